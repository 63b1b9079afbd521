"""Drafts from what was said before, without a model: by suffixes (arXiv 2411.04975) or n-grams (prompt lookup)."""

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

RING_TOKENS = 1 << 20  # of former outputs: 4 MiB
MIN_MATCH, KEEP = 2, 128  # matches of one token are worth little; so many matches are counted
FACTOR = 8.0  # most drafts for each token of a match: a tree has its places anyway, and calibration knows better


class OutputRing:
    """Outputs of former requests on the device, the oldest forgotten first. Only whole outputs are kept."""

    def __init__(self, tokens: int, device: torch.device, most_outputs: int | None = None):
        """tokens: room in all, one more is taken by each output. most_outputs: None is as many as there is room for.

        Raises ValueError unless there is room for one token and one output, or for more than the kernels read.
        """
        if not 2 <= tokens <= MAX_TIMES:
            raise ValueError(f"a ring must have room for 2 to {MAX_TIMES} tokens, got {tokens}")
        if most_outputs is not None and most_outputs < 1:
            raise ValueError(f"a ring must have room for an output at least, got {most_outputs}")
        with torch.inference_mode(False):  # it outlives the caller's
            self.tensors = TokenRing(
                torch.full((tokens,), END, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
            )
        self.most_outputs = most_outputs
        self._kept: deque[tuple[int, int]] = deque()  # (start, length with its END), oldest first
        self._head = 0

    def __len__(self) -> int:
        """How many outputs it holds."""
        return len(self._kept)

    def append(self, output: Tensor) -> None:
        """Keep an output [n] of integers on the device, of one that is too long the last tokens. Waits for nothing."""
        ring = self.tensors.tokens
        output = output[-(len(ring) - 1) :]
        count = len(output) + 1
        if count == 1:
            return
        if self._head + count > len(ring):  # no output goes round the end
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
        """Drop the outputs that lie in a range which is written next: the oldest."""
        while self._kept and self._kept[0][0] < stop and self._kept[0][0] + self._kept[0][1] > start:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        start, count = self._kept.popleft()
        self.tensors.tokens[start : start + count] = END


class RepeatSource(ABC):
    """Finds what followed the end of each sequence before. places: the most tokens of a draft."""

    places: int

    @abstractmethod
    def find(self, ops: Operations, sequences: Sequences, places: int) -> RepeatDrafts:
        """Drafts of at most so many tokens for all sequences, from their committed tokens and roots."""

    def remember(self, output: Tensor) -> None:
        """A request has ended with these tokens [n] int64."""

    def forget(self) -> None:
        """Former requests count no more."""


class SuffixSource(RepeatSource):
    """The longest ends of a sequence that occurred in it before, or in outputs of former requests."""

    def __init__(self, places: int, rules: SuffixRules | None = None, ring: OutputRing | None = None):
        if places < 1:
            raise ValueError(f"places must be at least 1, got {places}")
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
    """The last generated tokens, where they stood in the prompt or, if not there, were generated before."""

    def __init__(
        self, places: int, max_ngram: int = 5, min_ngram: int = 1, match: Match = "leftmost", joined: bool = False
    ):
        check_ngram_rules("ngram_drafts", max_ngram, min_ngram, match)
        if places < 1:
            raise ValueError(f"places must be at least 1, got {places}")
        self.places, self.match, self.joined = places, match, joined
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def find(self, ops: Operations, sequences: Sequences, places: int) -> RepeatDrafts:
        return self.continue_from(ops, sequences, sequences.lengths, places)

    def continue_from(self, ops: Operations, sequences: Sequences, lengths: Tensor, places: int) -> RepeatDrafts:
        """As `find` where the token at column lengths [B] int32 is the last one known."""
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
    """Drafts from a source alone. Where nothing is found the tree has empty places, tokens of -1, which are never
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
    """Make the next trees of drafts from repetition alone."""
    root = ops.sequence_rows(state.tokens, state.lengths, 1)[:, 0]
    none = found.tokens[:, :0]
    ops.build_tree(
        root, found.tokens, found.probs.log(), none, state.spec.nodes, 1, grafted=found.parents, out=state.tree
    )
