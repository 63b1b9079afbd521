"""Drafts from earlier text, without a model: by suffixes (arXiv 2411.04975) or n-grams (prompt lookup)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.suffix_match import (
    DEEPEST,
    END,
    MAX_BANNED,
    MAX_TIMES,
    Match,
    RepeatDrafts,
    SuffixRules,
    TokenRing,
    check_ngram_rules,
)
from eagle_triton.values import check_range

RING_TOKENS = 1 << 20  # of former outputs: 4 MiB
MIN_MATCH = 2  # a match of one token is worth little
KEEP = 128  # how many matches are counted
FACTOR = 8.0  # most drafts per token of a match: large, because the tree has room for them, and calibration decides


class OutputRing:
    """Outputs of earlier requests on the device. The oldest are forgotten first; only whole outputs are kept."""

    def __init__(self, tokens: int, device: torch.device, most_outputs: int | None = None):
        """tokens: the size; each output takes its tokens and one more. most_outputs: None: all that fit.

        Raises ValueError unless at least one output of one token fits, and at most what the kernels read.
        """
        if not 2 <= tokens <= MAX_TIMES:
            raise ValueError(f"a ring must have room for 2 to {MAX_TIMES} tokens, got {tokens}")
        if most_outputs is not None and most_outputs < 1:
            raise ValueError(f"a ring must have room for at least one output, got {most_outputs}")
        with torch.inference_mode(False):  # it outlives the caller's inference mode
            self.tensors = TokenRing(
                torch.full((tokens,), END, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
            )
        self.most_outputs = most_outputs
        self._kept: deque[tuple[int, int]] = deque()  # (start, length with its END), oldest first
        self._head = 0

    def __len__(self) -> int:
        """The number of outputs in it."""
        return len(self._kept)

    def append(self, output: Tensor) -> None:
        """Keep an output [n] of integers on the device; of a long one only the last tokens. The host does not wait."""
        ring = self.tensors.tokens
        output = output[-(len(ring) - 1) :]
        count = len(output) + 1
        if count == 1:
            return
        if self._head + count > len(ring):  # an output does not wrap around
            self._forget(self._head, len(ring))
            ring[self._head :] = END
            self._head = 0
        self._forget(self._head, self._head + count)
        while self.most_outputs is not None and len(self._kept) >= self.most_outputs:
            self._forget_oldest()
        ring[self._head : self._head + count - 1] = output
        ring[self._head + count - 1] = END
        self._kept.append((self._head, count))
        self._head = (self._head + count) % len(ring)
        self.tensors.head.fill_(self._head)

    def clear(self) -> None:
        """Forget all outputs."""
        if not self._kept:
            return
        self.tensors.tokens.fill_(END)
        self.tensors.head.zero_()
        self._kept.clear()
        self._head = 0

    def _forget(self, start: int, stop: int) -> None:
        """Drop the outputs in a range that is about to be written; they are the oldest."""
        while self._kept and self._kept[0][0] < stop and self._kept[0][0] + self._kept[0][1] > start:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        start, count = self._kept.popleft()
        self.tensors.tokens[start : start + count] = END


class RepeatSource(ABC):
    """Finds earlier continuations of the end of each sequence. places: the most tokens of a draft."""

    places: int

    @abstractmethod
    def find(self, ops: Operations, sequences: Sequences, places: int) -> RepeatDrafts:
        """Drafts of at most `places` tokens for all sequences, from their committed tokens and roots."""

    def remember(self, output: Tensor) -> None:
        """Take in the output [n] int64 of a request that has ended."""

    def forget(self) -> None:
        """Forget all earlier requests."""


class SuffixSource(RepeatSource):
    """Finds the longest suffixes of a sequence that occurred in it before, or in outputs of earlier requests."""

    def __init__(self, places: int, rules: SuffixRules | None = None, ring: OutputRing | None = None):
        check_range("places", places, 1)
        self.places, self.ring = places, ring
        self.rules = rules or SuffixRules(min_match=MIN_MATCH, keep=KEEP, max_spec_factor=FACTOR)
        if self.rules.max_tree_depth > DEEPEST:
            raise ValueError(f"max_tree_depth must be at most {DEEPEST} in the engine, got {self.rules.max_tree_depth}")
        if len(self.rules.banned) > MAX_BANNED:
            raise ValueError(f"at most {MAX_BANNED} tokens can be banned in the engine, got {len(self.rules.banned)}")

    def find(self, ops: Operations, sequences: Sequences, places: int) -> RepeatDrafts:
        ring = None if self.ring is None else self.ring.tensors
        return ops.suffix_drafts(sequences.tokens, sequences.lengths, ring, places, self.rules)

    def remember(self, output: Tensor) -> None:
        if self.ring is not None:
            self.ring.append(output)

    def forget(self) -> None:
        if self.ring is not None:
            self.ring.clear()


class NgramSource(RepeatSource):
    """Finds the last generated tokens in the prompt, or else in the output."""

    def __init__(
        self, places: int, max_ngram: int = 5, min_ngram: int = 1, match: Match = "leftmost", joined: bool = False
    ):
        check_ngram_rules("ngram_drafts", max_ngram, min_ngram, match)
        check_range("places", places, 1)
        self.places, self.match, self.joined = places, match, joined
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def find(self, ops: Operations, sequences: Sequences, places: int) -> RepeatDrafts:
        return self.continue_from(ops, sequences, sequences.lengths, places)

    def continue_from(self, ops: Operations, sequences: Sequences, lengths: Tensor, places: int) -> RepeatDrafts:
        """`find` with the token at column lengths [B] int32 as the last one."""
        return ops.ngram_drafts(
            sequences.tokens,
            lengths,
            sequences.prompt_lengths,
            places,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            match=self.match,
            joined=self.joined,
        )


class RepeatDraft(Draft):
    """Drafts from a source only. If it finds nothing, the tree has empty places, with tokens of -1, which are never
    accepted."""

    any_tree: ClassVar[bool] = False

    def __init__(self, source: RepeatSource):
        self.source = source

    def read_tree(self) -> TreeSpec:
        return TreeSpec.repeats(self.source.places)

    def grow(self, ops: Operations, state: DecodeState) -> None:
        found = self.source.find(ops, state.sequences, state.spec.grafts)
        write_repeats(ops, state, found)

    def end(self, sequences: Sequences, slot: int, prompt: int, length: int) -> None:
        self.source.remember(sequences.tokens[slot, prompt:length])

    def forget(self) -> None:
        self.source.forget()


def write_repeats(ops: Operations, state: DecodeState, found: RepeatDrafts) -> None:
    """Build the next trees from the drafts of a source only."""
    root = ops.sequence_rows(state.tokens, state.lengths, 1)[:, 0]
    none = found.tokens[:, :0]
    ops.build_tree(
        root, found.tokens, found.probs.log(), none, state.spec.nodes, 1, grafted=found.parents, out=state.tree
    )
