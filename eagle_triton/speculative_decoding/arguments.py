"""Check a call's arguments before a model runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from eagle_triton.speculative_decoding.readers import CausalReader
from eagle_triton.values import checked_integer


def checked_prompt(inputs: Iterable[int], *readers: CausalReader) -> list[int]:
    """The prompt's token ids. Raises ValueError if there are none, or if a reader cannot read these."""
    try:
        prompt = [operator.index(token) for token in inputs]
    except TypeError as error:
        raise ValueError(f"inputs must be a list of token ids, got {inputs!r:.60}") from error
    if not prompt:
        raise ValueError("inputs must hold at least one token")
    for reader in readers:
        if not 0 <= min(prompt) <= max(prompt) < reader.vocabulary:
            raise ValueError(
                f"inputs: tokens must lie in 0..{reader.vocabulary - 1}, the {reader.role}'s vocabulary, got "
                f"{min(prompt)}..{max(prompt)}"
            )
        if reader.max_positions is not None and len(prompt) > reader.max_positions:
            raise ValueError(
                f"inputs has {len(prompt)} tokens, more than the {reader.max_positions} positions of the {reader.role}"
            )
    return prompt


def checked_end_tokens(eos_tokens_id: int | Iterable[int]) -> frozenset[int]:
    """The tokens that end a sequence. Raises TypeError for what are no token ids."""
    try:
        return frozenset(map(operator.index, eos_tokens_id if isinstance(eos_tokens_id, Iterable) else [eos_tokens_id]))
    except TypeError as error:
        raise TypeError(f"eos_tokens_id must be a token id or a list of them, got {eos_tokens_id!r:.60}") from error


def longest(prompt: list[int], max_gen_len: int, reader: CausalReader) -> int:
    """The most tokens of prompt and output together. Raises TypeError or ValueError for a max_gen_len that is no
    integer of at least 0."""
    total = len(prompt) + checked_integer("max_gen_len", max_gen_len, 0)
    return total if reader.max_positions is None else min(total, reader.max_positions)


def check_same_vocabulary(drafter: CausalReader, target: CausalReader, tokenizer: Any) -> None:
    """Raise ValueError if drafter and target have different vocabularies.

    Different numbers of logits are padding if both have room for the tokenizer's tokens, or without a tokenizer if the
    numbers differ by at most 1 %.
    """
    sizes = drafter.vocabulary, target.vocabulary
    if tokenizer is None:
        padded = 100 * abs(sizes[0] - sizes[1]) <= max(sizes)
    else:
        padded = sizes[0] == sizes[1] or len(tokenizer) <= min(sizes)
    if not padded:
        raise ValueError(
            f"the drafter's vocabulary has {sizes[0]} tokens, the target's {sizes[1]}: they must be the same but for "
            "padding (pass the tokenizer if that is all); for another tokenizer there is universal assisted generation "
            "in transformers: generate(assistant_model=..., tokenizer=..., assistant_tokenizer=...)"
        )
