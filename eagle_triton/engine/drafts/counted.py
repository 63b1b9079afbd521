"""Drafts from n-grams that are counted while decoding (NASD), without a model.

Without fillers this is adaptive n-gram parallel decoding (Ou et al., arXiv 2404.08698).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.memory.by_slot import part_of
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import AcceptedPath
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.ngram_table import LONGEST, NgramTable, new_ngram_table
from eagle_triton.values import check_choice, check_range, check_weight

MAX_N = LONGEST + 1
MAX_FILLERS = 64
KEPT_SEQUENCES = 4  # a table that is not emptied between sequences has room for this many

NgramStorageKind = Literal["basic", "onelevel"]


class CountedNgrams:
    """The counts of each slot. reset: empty a slot's counts for each new sequence."""

    def __init__(self, table: NgramTable, reset: bool):
        self.table, self.reset = table, reset

    def part(self, slots: slice) -> CountedNgrams:
        """The same for some of the slots, as views."""
        return CountedNgrams(part_of(self.table, slots), self.reset)

    def clear(self) -> None:
        """Prepare all slots for new sequences."""
        if self.reset:
            self.forget()

    def wipe(self, pages: Tensor) -> None:
        """Empty everything; it uses no pages."""
        self.forget()

    def copy(self, source: int, target: int, length: int) -> None:
        """Nothing: `CountedDraft.begin` counts each prompt in its own slot, later."""

    def move(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the counts of slot `source`."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    def forget(self) -> None:
        """Empty the tables of all slots."""
        for tensor in self.tensors:
            tensor.zero_()

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from self.table


class CountedDraft(Draft):
    """Drafts the most frequent token after the longest known context, and continues until a context is unknown.

    It counts prompts, committed tokens, and fillers: the target's largest logits at each committed token. After an
    unknown context the places of the tree are empty, with tokens of -1, which are never accepted.
    """

    any_tree: ClassVar[bool] = False

    def __init__(
        self,
        places: int,
        n: int = 3,
        storage: NgramStorageKind = "basic",
        filler_top_k: int = 3,
        filler_weight: float = 1.0,
        reset_in_between: bool = True,
    ):
        """places: the most tokens of a draft. n: the length of the longest n-gram, 2..5. storage: "basic" counts
        n-grams of 2 to n tokens, "onelevel" of n tokens only.

        filler_top_k: how many of the largest logits are counted for each token, `filler_weight` times each; 1: none.
        reset_in_between: empty a slot's counts when a sequence enters it. Otherwise they are kept until `forget`, or
        until the engine needs room for longer or more sequences. Raises ValueError for numbers out of range.
        """
        check_range("places", places, 1)
        check_range("n", n, 2, MAX_N)
        check_choice("storage", storage, get_args(NgramStorageKind))
        check_range("filler_top_k", filler_top_k, 1, MAX_FILLERS)
        check_weight("filler_weight", filler_weight)
        self.places, self.n, self.storage = places, n, storage
        self.filler_top_k, self.filler_weight, self.reset_in_between = filler_top_k, filler_weight, reset_in_between
        self.shortest = 1 if storage == "basic" else n - 1
        self._made: weakref.WeakSet[CountedNgrams] = weakref.WeakSet()

    @property
    def learns(self) -> bool:
        return True

    @property
    def fillers(self) -> int:
        """How many logits are counted for each token."""
        return self.filler_top_k if self.filler_top_k > 1 and self.filler_weight > 0 else 0

    def read_tree(self) -> TreeSpec:
        return TreeSpec.repeats(self.places)

    def new_slot_tensors(self, pages: SlotPages) -> CountedNgrams:
        contexts = pages.capacity * (1 if self.reset_in_between else KEPT_SEQUENCES)
        device = pages.table.device
        table = new_ngram_table(pages.slots, self.n - self.shortest, contexts, contexts * (1 + self.fillers), device)
        made = CountedNgrams(table, self.reset_in_between)
        self._made.add(made)
        return made

    def begin(self, ops: Operations, sequences: Sequences, features: Tensor, entering: Tensor) -> None:
        first, end = torch.zeros_like(sequences.lengths), (sequences.lengths + 1) * entering
        ops.count_ngrams(self._table(sequences), self.shortest, sequences.tokens, first, end)

    def learn(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, logits: Tensor) -> None:
        batch, nodes, _ = logits.shape
        fillers = None
        if self.fillers:  # the tree is a chain: node i's logits are for the token i + 1 after the former root
            fillers = ops.topk(logits.flatten(0, 1), self.fillers)[1].view(batch, nodes, self.fillers)
        end = state.lengths + state.active  # the root of a sequence that has ended does not count
        table, first = self._table(state.sequences), accepted.before + 1
        ops.count_ngrams(table, self.shortest, state.tokens, first, end, fillers, self.filler_weight)

    def grow(self, ops: Operations, state: DecodeState) -> None:
        table = self._table(state.sequences)
        drafts = ops.counted_drafts(table, self.shortest, state.tokens, state.lengths, state.spec.drafts)
        root = ops.sequence_rows(state.tokens, state.lengths, 1)
        state.tree.write_chain(torch.cat((root, drafts), dim=1))

    def forget(self) -> None:
        for counted in self._made:
            counted.forget()

    def _table(self, sequences: Sequences) -> NgramTable:
        return sequences.draft_tensors.table
