"""The tensors of a decode step. Their addresses never change between steps, so that one graph can replay.

`Sequences` holds what belongs to the sequences whatever tree they are decoded with, `DecodeState` adds what belongs
to one shape of tree: several states may stand on the same sequences and take turns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory import by_slot
from eagle_triton.engine.memory.by_slot import part_of, tensors_of
from eagle_triton.engine.memory.pages import PagePool, SlotPages
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.engine.upload import upload
from eagle_triton.operands.ancestors import WORD, pack_ancestors
from eagle_triton.operands.logit_processing import LogitRules
from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.verification import PROPOSED, REPORT_TOKENS, TREE_DEPTH, Stops

if TYPE_CHECKING:
    from eagle_triton.engine.drafts.draft import Draft
    from eagle_triton.engine.skipped_features import SkippedFeatures

MAX_TABLE_ROWS = 32768  # that a sequence may have, unless it asks for more
CHEAP_TOKENS = 1 << 22  # that there may be room for in the tokens of all sequences: 32 MiB
STOP_IDS = 16  # stop tokens of one sequence, unless one asks for more
_GUIDE = 4  # columns of a report


class Tree(NamedTuple):
    """A draft tree: node 0 is the root, a parent's index is below its child's."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int32, -1 for the root
    depths: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N, W] int64: bit j of row i says that node j is i or an ancestor of i

    def without_empty_places(self) -> Tree:
        """The same for verification where tokens of -1 stand for no draft: their nodes are no node's children."""
        empty = self.tokens < 0
        return self._replace(tokens=self.tokens.masked_fill(empty, 0), parents=self.parents.masked_fill(empty, -1))

    def write_chain(self, tokens: Tensor) -> None:
        """Make every tree a chain of tokens [B, N] int64, the root first, in place."""
        batch, nodes = self.tokens.shape
        depths = torch.arange(nodes, dtype=torch.int32, device=tokens.device)
        below = torch.ones(batch, nodes, nodes, dtype=torch.bool, device=tokens.device).tril()
        self.tokens.copy_(tokens)
        self.depths.copy_(depths)
        self.parents.copy_(depths - 1)
        self.ancestors.copy_(pack_ancestors(below))


def capacity_bucket(rows: int) -> int:
    """The capacity for `rows` rows where all of it has memory: a power of two from 512 to 4096, then multiples of
    4096."""
    return max(512, 1 << (rows - 1).bit_length()) if rows <= 4096 else -(-rows // 4096) * 4096


def table_capacity(rows: int, slots: int) -> int:
    """The capacity of tables of pages for sequences of `rows` rows: as large as costs little, so it seldom changes."""
    return max(capacity_bucket(rows), min(MAX_TABLE_ROWS, max(CHEAP_TOKENS // slots // 512, 1) * 512))


def scratch_rows(spec: TreeSpec) -> int:
    """Cache rows that a step may write behind the committed ones: the tree, or the draft's passes and its root row."""
    return max(spec.nodes, spec.depth + 1, spec.beam_slots) + 1


class Sequences:
    """B sequences, one for each slot: tokens, what target and draft remember, and how each is sampled and stopped."""

    def __init__(self, view: ModelView, draft: Draft | None, slots: int, capacity: int, pool: PagePool | None = None):
        """capacity: the most rows of a sequence, a multiple of PAGE_ROWS. pool: whose pages requests get as they enter;
        None: one of their own, with pages for all rows of every slot."""
        self.slots, self.capacity, self.device = slots, capacity, view.device
        self.vocabulary = view.vocab_size
        self.whole = self  # of which these are the first
        self._firsts: dict[int, Sequences] = {}  # the first so many of the whole

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=view.device)

        self.tokens = zeros(capacity + 1, dtype=torch.int64)  # the root at column `lengths`
        self.lengths = zeros(dtype=torch.int32)  # committed tokens = what the target remembers
        self.prompt_lengths = zeros(dtype=torch.int32)
        self.first_step = zeros(dtype=torch.int64)  # by which random numbers begin, where a prompt is read
        self.first_root = zeros(dtype=torch.int64)  # the root behind it if that is known, or -1
        self.active = zeros(dtype=torch.bool)  # a step leaves the others as they are
        self.nan = zeros(dtype=torch.bool)  # the target's logits of the last step had a NaN
        self.stops = Stops(
            ids=zeros(STOP_IDS, dtype=torch.int64), limit=zeros(dtype=torch.int32), exact=zeros(dtype=torch.bool)
        )
        self.sampling = SamplingTensors(
            temperature=zeros(dtype=torch.float32),
            top_k=zeros(dtype=torch.int32),
            top_p=zeros(dtype=torch.float64),
            min_p=zeros(dtype=torch.float32),
            seed=zeros(dtype=torch.int64),
            step=zeros(dtype=torch.int64),
        )
        if pool is None:
            self.pages = SlotPages.whole(slots, capacity, view.device)
        else:
            self.pages = SlotPages(pool, slots, capacity, view.device)
        self.caches = view.new_caches(self.pages)
        self.draft_tensors: Any = None if draft is None else draft.new_slot_tensors(self.pages)
        self.skipped: SkippedFeatures | None = None  # where plain steps leave features for the draft
        self.rules: LogitRules | None = None  # from the first request on that has any
        self.root_logprob = zeros(dtype=torch.float32)  # of the root, in steps that report log-probabilities
        self.root_logits: Tensor | None = None  # [B, V] float32 of the root, from the first request that asks for any
        # what the host reads of a prompt: the root behind it, whether the target's logits were NaN there, and the
        # root's log-probability (the bits of a float64)
        self.begun = zeros(3, dtype=torch.int64)

    def first(self, slots: int) -> Sequences:
        """The first so many of the sequences, always the same object."""
        whole = self.whole
        if slots == whole.slots:
            return whole
        if slots not in whole._firsts:
            whole._firsts[slots] = whole.part(slice(0, slots))
        return whole._firsts[slots]

    @property
    def family(self) -> list[Sequences]:
        """The whole, and what `first` has made of it: all have parts of the same tensors."""
        return [self.whole, *self.whole._firsts.values()]

    def give(self, **tensors: Any) -> None:
        """Have tensors by slot of the whole under new names, or in the place of others, in all of the family."""
        for part in self.family:
            for name, value in tensors.items():
                setattr(part, name, part_of(value, slice(0, part.slots)))

    def add_rules(self) -> None:
        """Make room for penalties, biases and least lengths, all off."""
        if self.rules is None:
            slots, device = self.whole.slots, self.device
            shape = (slots, self.vocabulary)
            rules = LogitRules(
                penalty=torch.ones(slots, dtype=torch.float32, device=device),
                bias=torch.zeros(shape, dtype=torch.float32, device=device),
                seen=torch.zeros(shape, dtype=torch.uint8, device=device),
                least=torch.zeros(slots, dtype=torch.int32, device=device),
            )
            self.give(rules=rules)

    def add_logits(self) -> None:
        """Make room for the target's logits that the roots were chosen by."""
        if self.root_logits is None:
            shape = (self.whole.slots, self.vocabulary)
            self.give(root_logits=torch.zeros(shape, dtype=torch.float32, device=self.device))

    def widen_stops(self, count: int) -> bool:
        """Make room for `count` stop tokens of a sequence; True if that took a new table."""
        missing = count - self.stops.ids.shape[1]
        if missing <= 0:
            return False
        missing = -(-missing // STOP_IDS) * STOP_IDS
        stops = self.whole.stops
        ids = torch.nn.functional.pad(stops.ids, (0, missing), value=-1)
        self.give(stops=stops._replace(ids=ids))
        return True

    def part(self, slots: slice) -> Sequences:
        """Some of the sequences: views of the same tensors."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if name != "whole":
                setattr(part, name, part_of(value, slots))
        part.slots = len(part.lengths)
        return part

    def clear(self) -> None:
        """Begin all sequences anew, but for what the target remembers: prompts are read into it."""
        self.lengths.zero_()
        by_slot.clear(self.draft_tensors)

    def wipe(self, pages: Sequence[int]) -> None:
        """Leave nothing of what target and draft remembered of all these sequences, who have left `pages` to nobody: a
        NaN that nobody sees spoils what is weighed with 0."""
        self.caches.clear()
        by_slot.clear(self.draft_tensors)
        by_slot.wipe((self.caches, self.draft_tensors), upload(pages, torch.int64, self.device))

    def copy(self, source: int, target: int, length: int) -> None:
        """Let slot `target` remember of a prompt of `length` tokens what target and draft do in slot `source`."""
        self.caches.copy(source, target, length)
        by_slot.copy(self.draft_tensors, source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Let slot `target`, which is free, go on with the sequence of slot `source`, of `length` committed tokens at
        least; that is free then."""
        self.pages.move(source, target)
        by_slot.move((self.caches, self.draft_tensors), source, target, length)
        own = self.tokens, self.lengths, self.prompt_lengths, self.first_step, self.first_root, self.active, self.nan
        asked_for = self.stops, self.sampling, self.root_logprob, self.root_logits, self.rules, self.skipped
        by_slot.move((*own, *asked_for), source, target, length)
        self.active[source] = False
        self.lengths[source] = 0


class DecodeState:
    """Everything that one decode step of B sequences reads and writes, for one shape of tree."""

    def __init__(self, sequences: Sequences, draft: Draft | None, spec: TreeSpec):
        self.spec = spec
        self._firsts: dict[int, DecodeState] = {}  # of the first so many sequences
        self._share(sequences)
        batch, nodes, device = sequences.slots, spec.nodes, sequences.device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        self.tree = Tree(
            zeros(nodes, dtype=torch.int64),
            zeros(nodes, dtype=torch.int32),
            zeros(nodes, dtype=torch.int32),
            zeros(nodes, -(-nodes // WORD), dtype=torch.int64),
        )
        self.tree.parents[:, 0] = -1
        self.tree.ancestors[:, 0, 0] = 1
        self.levels = spec.beam_levels  # that the draft scores for the next tree, at most
        # what the host reads of a step, see update_sequence; behind the tokens their log-probabilities, what EGAG says
        # of this tree and the next, the drafts, and how deep the tree was and how many of them it had
        self.report = zeros(REPORT_TOKENS + 2 * (spec.depth + 2) + _GUIDE + spec.drafts + 2, dtype=torch.int64)
        self.report[:, TREE_DEPTH], self.report[:, PROPOSED] = spec.depth, spec.drafts
        # [B, D + 2, V] float32: the logits of each token that the last step committed and of the next root, where some
        # request asks for them
        self.token_logits: Tensor | None = None
        self.draft_tree_tensors: Any = (
            None if draft is None or not spec.drafts else draft.new_tree_tensors(spec, batch, device)
        )

    def first(self, slots: int) -> DecodeState:
        """The same for the first so many sequences: the same trees, always the same object."""
        if slots == self.batch:
            return self
        if slots not in self._firsts:
            first, some = copy.copy(self), slice(0, slots)
            first._firsts = {}
            first._share(self.sequences.first(slots))
            first.tree, first.report = part_of(self.tree, some), self.report[some]
            first.draft_tree_tensors = part_of(self.draft_tree_tensors, some)
            first.token_logits = None
            self._firsts[slots] = first
        return self._firsts[slots]

    def move(self, source: int, target: int, length: int) -> None:
        """Let slot `target`, whose sequence has come from slot `source`, have the tree that was drafted for it."""
        by_slot.move((self.tree, self.draft_tree_tensors), source, target, length)

    def add_logits(self) -> None:
        """Make room for the target's logits of each token of a step, for sequences that have such room."""
        self.sequences.add_logits()
        if self.token_logits is None:
            shape = (self.batch, self.spec.depth + 2, self.sequences.vocabulary)
            self.token_logits = torch.zeros(shape, dtype=torch.float32, device=self.lengths.device)

    def limited(self, levels: int | None) -> DecodeState:
        """The same tensors, the next tree being scored no deeper than so many levels; None: as deep as the tree is."""
        limited = copy.copy(self)
        limited.levels = self.spec.beam_levels if levels is None else levels
        return limited

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Steps inside the block change nothing that a sequence is decoded from: none is active meanwhile.

        Rows behind the committed ones and the random counters are written all the same, and given back where it counts.
        """
        sequences = self.sequences
        changed = [*self.tree, sequences.sampling.step, sequences.active, sequences.nan, sequences.root_logprob]
        changed += tensors_of(sequences.draft_tensors, objects=False)
        changed += [] if sequences.rules is None else [sequences.rules.seen]
        changed += [] if sequences.root_logits is None else [sequences.root_logits]
        changed += [] if sequences.skipped is None else [*sequences.skipped]
        saved = [tensor.clone() for tensor in changed]
        sequences.active.fill_(False)
        try:
            yield
        finally:
            for tensor, before in zip(changed, saved, strict=True):
                tensor.copy_(before)

    def _share(self, sequences: Sequences) -> None:
        self.sequences, self.batch, self.capacity = sequences, sequences.slots, sequences.capacity
        self.tokens, self.lengths, self.active, self.nan = (
            sequences.tokens,
            sequences.lengths,
            sequences.active,
            sequences.nan,
        )
        self.sampling = sequences.sampling

    @property
    def emitted(self) -> Tensor:
        """The tokens that the last step committed, and the next root: int64 [B, D + 2], -1 behind them."""
        return self.report[:, REPORT_TOKENS : REPORT_TOKENS + self.spec.depth + 2]

    def logprobs_of(self, report: Tensor) -> Tensor:
        """In a report of this state the log-probabilities of the tokens that the step committed, and of the next root:
        float64 [B, D + 2]."""
        first = REPORT_TOKENS + self.spec.depth + 2
        return report.view(torch.float64)[:, first : first + self.spec.depth + 2]

    def guide_of(self, report: Tensor) -> Tensor:
        """What EGAG says in a report: float64 [B, 4], of the tree its normalised entropy, the average, and gamma, then
        gamma of the next tree."""
        first = REPORT_TOKENS + 2 * (self.spec.depth + 2)
        return report.view(torch.float64)[:, first : first + _GUIDE]

    def drafts_of(self, report: Tensor) -> Tensor:
        """The drafts that were verified, where a report has them: int64 [B, N - 1], -1 in empty places."""
        return report[:, report.shape[1] - 2 - self.spec.drafts : TREE_DEPTH]

    @property
    def stops(self) -> Stops:
        """Those of the sequences, which may be replaced."""
        return self.sequences.stops
