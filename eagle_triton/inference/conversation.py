"""A conversation so far, and its tokens for a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def plain_ids(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text, without a chat template."""
    return tokenizer(text, verbose=False).input_ids


@dataclass
class Conversation:
    """Prompts, each with its answer."""

    turns: list[tuple[str, str]] = field(default_factory=list)

    def ids(self, prompt: str, tokenizer: Any) -> list[int]:
        """The tokens of all turns and of a new prompt, by the tokenizer's chat template.

        Without a template the texts are joined: each answer after its prompt, and a line end after each answer.
        """
        if not getattr(tokenizer, "chat_template", None):
            former = (prompt + answer for prompt, answer in self.turns)
            return plain_ids(
                "".join(text if text.endswith("\n") else f"{text}\n" for text in former) + prompt, tokenizer
            )
        messages = [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        messages.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
