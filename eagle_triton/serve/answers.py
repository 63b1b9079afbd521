"""Answers in OpenAI's form: bodies of completions, and chunks of streams."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from eagle_triton.engine.scheduler.requests import Piece
from eagle_triton.engine.tree_spec import PLAIN
from eagle_triton.inference.session import Completion
from eagle_triton.inference.text import TextStream
from eagle_triton.serve.bodies import Body
from eagle_triton.serve.drafters import Drafters

SLOWER = "measured slower here"  # why there is a draft, and nothing is drafted


class Answer:
    """One request's answer, as a whole or in chunks.

    `chunk` is called with every piece; `whole` with the completion alone.
    """

    def __init__(self, body: Body, prompt: Sequence[int], model: str, tokenizer: Any, drafters: Drafters) -> None:
        """prompt: token ids. model: its name in the answer. tokenizer: for the text of single tokens."""
        self._body, self._prompt, self._tokenizer, self._drafters = body, prompt, tokenizer, drafters
        self._tokens: list[int] = []
        self._values: list[float] = []  # the log-probabilities of these
        self._sent = 0  # of the tokens
        self._characters = 0
        self._stream = TextStream(tokenizer, prompt[-16:], body.stop, body.min_tokens) if body.drafts else None
        kind = ("chatcmpl", "chat.completion") if body.chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{kind[0]}-{uuid.uuid4().hex}",
            "object": kind[1],
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The answer at once."""
        text, logprobs = completion.text, self._logprobs(completion.tokens, completion.logprobs)
        said = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._body.chat else {"text": text}
        )
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": completion.finished}
        return {**self._head, "choices": [choice], "usage": self._usage(len(completion.tokens), completion)}

    def begin(self) -> list[bytes]:
        """What a stream begins with."""
        if not self._body.chat:
            return []
        return [self._event([self._choice({"role": "assistant", "content": ""})], 0)]

    def chunk(self, piece: Piece) -> list[bytes]:
        """The events of a piece; after the last one also those that end a stream."""
        completion = piece.completion
        self._tokens += piece.tokens
        self._values += piece.logprobs or []
        fresh = slice(self._sent, piece.certain_tokens)  # later ones may belong to a stop string
        self._sent = piece.certain_tokens
        events = []
        if piece.text or piece.tokens:
            tokens = self._tokens[fresh]
            listed = self._logprobs(tokens, self._values[fresh]) if tokens else None
            drafts = self._drafts(piece) if self._stream is not None else None
            if piece.text or listed or drafts:
                events.append(self._event([self._choice({"content": piece.text}, listed)], self._sent, drafts=drafts))
        if completion is not None:
            used = len(completion.tokens)
            events.append(self._event([self._choice({}, finished=completion.finished)], used))
            if self._body.usage:
                events.append(self._event([], used, usage=self._usage(used, completion)))
            events.append(b"data: [DONE]\n\n")
        return events

    def _choice(self, said: dict[str, str], logprobs: Any = None, finished: str | None = None) -> dict[str, Any]:
        content = {"delta": said} if self._body.chat else {"text": said.get("content", "")}
        return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finished}

    def _event(self, choices: list[Any], tokens: int, *, usage: Any = None, drafts: Any = None) -> bytes:
        body: dict[str, Any] = {**self._head, "choices": choices}
        if self._body.chat:
            body["object"] = "chat.completion.chunk"
        if self._body.usage or self._body.continuous_usage:
            body["usage"] = self._usage(tokens) if self._body.continuous_usage and usage is None else usage
        if drafts is not None:
            body["drafts"] = drafts
        return event(body)

    def _usage(self, tokens: int, completion: Completion | None = None) -> dict[str, Any]:
        prompt = len(self._prompt)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
        if completion is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": completion.statistics.found_tokens}
        return usage

    def _drafts(self, piece: Piece) -> dict[str, Any]:
        """What a step drafted, and the drafter. `tokens`: for each the text that it made certain, and its drafter."""
        assert self._stream is not None
        tree, tokens = piece.tree or PLAIN, []
        for depth, token in enumerate(piece.tokens, 1):
            if not self._stream.stopped:
                drafter = self._drafters.of(tree, depth) if depth <= piece.accepted else None
                tokens.append([self._stream.push(token), drafter])
        if piece.completion is not None and (rest := self._stream.finish()):
            tokens.append([rest, None])
        facts: dict[str, Any] = {"emitted": len(piece.tokens), "accepted": piece.accepted, "proposed": piece.proposed}
        facts |= {"verified": piece.tree is not None, "drafter": self._drafters.of(tree)}
        if piece.tree is not None and not tree.drafts and self._drafters.any:
            facts["paused"] = SLOWER
        return {**facts, "tokens": tokens}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        texts = [self._tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in tokens]
        values = list(logprobs or [])
        if self._body.chat:
            content = [
                {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(self._characters)
            self._characters += len(text)
        return {"tokens": texts, "token_logprobs": values, "text_offset": offsets, "top_logprobs": None}


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(errors="replace")


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token's text; None if that is no whole character."""
    return None if "\ufffd" in text else list(text.encode())
