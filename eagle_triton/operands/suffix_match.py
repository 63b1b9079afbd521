"""Rules of drafts from repetition, the drafts, and the texts in which they are found; see reference.suffix_match."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from eagle_triton.operands.shapes import check_tensors
from eagle_triton.values import check_choice, check_number, check_range, check_switches, checked_integer

END = -1

SLACK = 1e-6  # rounding may take this much from a budget or min_token_prob

DEEPEST, MAX_KEPT, MAX_BANNED, MAX_TIMES = 64, 128, 16, 1 << 24
"""Limits of the kernels, which the reference does not have: tokens of a match, matches, banned tokens, and positions of
a sequence or of the ring."""

Match = Literal["leftmost", "latest"]


@dataclass(frozen=True)
class SuffixRules:
    """How far a draft may go. Raises ValueError or TypeError for a value that makes no sense."""

    max_tree_depth: int = 64  # of match and draft together
    max_spec_tokens: int | None = None  # None: as many as the depth allows
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    use_tree_spec: bool = False  # a tree of the likeliest continuations; otherwise one path
    parity: bool = False  # see `suffix_draft`
    banned: tuple[int, ...] = ()  # tokens that are never drafted: a continuation ends before them
    min_match: int = 1
    keep: int | None = None  # count only this many matches: the longest, and the latest among equals

    def __post_init__(self) -> None:
        for name, least in (("max_tree_depth", 1), ("max_spec_tokens", 0), ("min_match", 1), ("keep", 1)):
            value = getattr(self, name)
            if value is None and name in ("max_spec_tokens", "keep"):
                continue
            checked_integer(f"suffix_draft: {name}", value, least)
        for name in ("max_spec_factor", "max_spec_offset", "min_token_prob"):
            check_number(f"suffix_draft: {name}", value := getattr(self, name))
            if not math.isfinite(value):
                raise ValueError(f"suffix_draft: {name} must be finite, got {value}")
        if self.max_spec_factor < 0:
            raise ValueError(f"suffix_draft: max_spec_factor must not be negative, got {self.max_spec_factor}")
        check_range("suffix_draft: min_token_prob", self.min_token_prob, 0, 1)
        for name in ("use_tree_spec", "parity"):
            check_switches(**{f"suffix_draft: {name}": getattr(self, name)})

    def budget(self, match: int) -> int:
        """The most tokens drafted after a match: floor(match * factor + offset), within max_spec_tokens."""
        wanted = math.floor(match * self.max_spec_factor + self.max_spec_offset + SLACK)
        most = self.max_tree_depth if self.max_spec_tokens is None else self.max_spec_tokens
        return max(0, min(wanted, most))


class SuffixDraft(NamedTuple):
    """A draft of n tokens, parents before children; n may be 0."""

    tokens: Tensor  # [n] int32
    parents: Tensor  # [n] int32: places in the draft, -1 for tokens directly after the context
    probs: Tensor  # [n] float32: estimated probability that the draft is right up to here
    score: float  # the sum of probs: the expected number of right tokens
    match_len: int  # tokens of the context that matched, 0 if nothing ever followed them
    occurrences: int  # positions of that match that were counted


class TokenRing(NamedTuple):
    """Outputs of former requests, at fixed addresses on the device. The oldest are overwritten first."""

    tokens: Tensor  # [R] int32: END after each output, and in empty places
    head: Tensor  # [1] int32: where the next output goes; the oldest output is the next one from there on


class RepeatDrafts(NamedTuple):
    """Drafts for B sequences, J places for each, parents before children."""

    tokens: Tensor  # [B, J] int64, -1 where nothing is drafted
    parents: Tensor  # [B, J] int32: places among the J, -1 for tokens directly after the sequence
    probs: Tensor  # [B, J] float32: estimated probability that the draft is right up to here, 0 without a draft
    match: Tensor  # [B] int32: tokens of the match, 0 where nothing is drafted
    occurrences: Tensor  # [B] int32: positions of that match that were counted
    from_ring: Tensor  # [B] bool: the match is in the ring, not in the sequence itself


def check_match_lengths(store: Tensor, context: Tensor, limit: int | None) -> None:
    check_tensors("match_lengths", {"store": (store, "S", torch.int32), "context": (context, "C", torch.int32)})
    if len(store) and store[-1] != END:
        raise ValueError(f"match_lengths: store must end with END ({END}), got {int(store[-1])}")
    if limit is not None and limit < 0:
        raise ValueError(f"match_lengths: limit must not be negative, got {limit}")


def check_suffix_drafts(function: str, tokens: Tensor, lengths: Tensor, ring: TokenRing | None, places: int) -> None:
    tensors = {
        "tokens": (tokens, "B C, contiguous rows", torch.int64),
        "lengths": (lengths, "B", torch.int32),
        "ring.tokens": (None if ring is None else ring.tokens, "R>0", torch.int32),
        "ring.head": (None if ring is None else ring.head, "1", torch.int32),
    }
    check_tensors(function, tensors)
    check_range(f"{function}: places", places, 1)


def check_ngram_draft(prompt: Tensor, generated: Tensor, max_ngram: int, min_ngram: int, match: str) -> None:
    check_tensors("ngram_draft", {"prompt": (prompt, "P", torch.int32), "generated": (generated, "G", torch.int32)})
    check_ngram_rules("ngram_draft", max_ngram, min_ngram, match)


def check_ngram_drafts(
    tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor, places: int, max_ngram: int, min_ngram: int, match: str
) -> None:
    check_suffix_drafts("ngram_drafts", tokens, lengths, None, places)
    check_tensors("ngram_drafts", {"prompt_lengths": (prompt_lengths, "B", torch.int32)}, B=len(lengths))
    check_ngram_rules("ngram_drafts", max_ngram, min_ngram, match)


def check_ngram_rules(function: str, max_ngram: int, min_ngram: int, match: str) -> None:
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"{function}: expected 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
    check_choice(f"{function}: match", match, get_args(Match))
