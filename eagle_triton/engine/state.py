"""The tensors of a decode step. Their addresses never change between steps, so that one graph can replay.

`Sequences` holds what belongs to the sequences whatever tree they are decoded with, `DecodeState` adds what belongs
to one shape of tree: several states may stand on the same sequences and take turns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from eagle_triton.adapters.view import DraftView, ModelView
from eagle_triton.reference.attention import WORD, pack_ancestors
from eagle_triton.reference.logit_processing import LogitRules
from eagle_triton.reference.sampling import SamplingParams
from eagle_triton.reference.verification import REPORT_TOKENS, Stops
from eagle_triton.tree_spec import TreeSpec

STOP_IDS = 16  # stop tokens of one sequence, unless one asks for more
Fields = TypeVar("Fields", bound=tuple)


class Tree(NamedTuple):
    """A draft tree: node 0 is the root, a parent's index is below its child's."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int32, -1 for the root
    depths: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N, W] int64: bit j of row i says that node j is i or an ancestor of i


def capacity_bucket(rows: int) -> int:
    """The cache capacity for `rows` rows: a power of two from 512 to 4096, then multiples of 4096."""
    return max(512, 1 << (rows - 1).bit_length()) if rows <= 4096 else -(-rows // 4096) * 4096


def rows_beyond(spec: TreeSpec) -> int:
    """Cache rows that a step may write behind the committed ones: the tree, or the draft's passes and its root row."""
    return max(spec.nodes, spec.depth + 1, spec.beam_slots) + 1


class Sequences:
    """B sequences, one for each slot: tokens, caches of T rows, and how each is sampled and stopped."""

    def __init__(self, view: ModelView, draft: DraftView | None, slots: int, capacity: int):
        self.slots, self.capacity, self.device = slots, capacity, view.device
        self.vocabulary = view.vocab_size

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=view.device)

        def cache(layers: tuple) -> Tensor:
            attention = layers[0].attention
            shape = (len(layers), 2, slots, attention.num_kv_heads, capacity, attention.head_dim)
            return torch.zeros(shape, dtype=view.dtype, device=view.device)

        self.tokens = zeros(capacity + 1, dtype=torch.int64)  # the root at column `lengths`
        self.lengths = zeros(dtype=torch.int32)  # committed tokens = valid rows of the target cache
        self.active = zeros(dtype=torch.bool)  # a step leaves the others as they are
        self.nan = zeros(dtype=torch.bool)  # the target's logits of the last step had a NaN
        self.stops = Stops(
            ids=zeros(STOP_IDS, dtype=torch.int64), limit=zeros(dtype=torch.int32), exact=zeros(dtype=torch.bool)
        )
        self.sampling = SamplingParams(
            temperature=zeros(dtype=torch.float32),
            top_k=zeros(dtype=torch.int32),
            top_p=zeros(dtype=torch.float32),
            min_p=zeros(dtype=torch.float32),
            seed=zeros(dtype=torch.int64),
            step=zeros(dtype=torch.int64),
        )
        self.target_cache = cache(view.layers)
        self.draft_cache = self.hidden = self.normed = None
        if draft is not None:
            self.draft_cache = cache(draft.layers)
            # what the draft says of the root, from which a tree of any shape grows; see step.draft_forward
            self.hidden = zeros(1, draft.hidden_size, dtype=view.dtype)
            self.normed = zeros(1, draft.hidden_size, dtype=view.dtype)
        self.lag: Lag | None = None  # where plain steps leave features for the draft; see lag.py
        self.rules: LogitRules | None = None  # from the first request on that has any
        self.root_logprob = zeros(dtype=torch.float32)  # of the root, in steps that report log-probabilities

    def add_rules(self) -> None:
        """Make room for penalties and biases, all off."""
        if self.rules is None:
            shape, device = (self.slots, self.vocabulary), self.device
            self.rules = LogitRules(
                penalty=torch.ones(self.slots, dtype=torch.float32, device=device),
                bias=torch.zeros(shape, dtype=torch.float32, device=device),
                seen=torch.zeros(shape, dtype=torch.uint8, device=device),
            )

    def widen_stops(self, count: int) -> bool:
        """Make room for `count` stop tokens of a sequence; True if that took a new table."""
        missing = count - self.stops.ids.shape[1]
        if missing <= 0:
            return False
        missing = -(-missing // STOP_IDS) * STOP_IDS
        ids = torch.nn.functional.pad(self.stops.ids, (0, missing), value=-1)
        self.stops = self.stops._replace(ids=ids)
        return True

    def part(self, slots: slice) -> Sequences:
        """Some of the sequences: views of the same tensors."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if name in ("target_cache", "draft_cache"):
                value = value if value is None else value[:, :, slots]
            elif isinstance(value, Tensor):
                value = value[slots]
            elif isinstance(value, tuple):
                value = _each(value, slots)
            setattr(part, name, value)
        part.slots = len(part.lengths)
        return part


class Lag(NamedTuple):
    """Features that plain decoding keeps while the draft does not take them in."""

    features: Tensor  # [B, R, F]: of position p in row p % R
    known: Tensor  # [B] int32: valid rows of the draft's cache

    def places(self, positions: Tensor) -> Tensor:
        """Where positions [B, n] stand in `features`, as an index [B, n, F] into dimension 1."""
        rows = positions.long() % self.features.shape[1]
        return rows[:, :, None].expand(-1, -1, self.features.shape[2])

    def keep(self, lengths: Tensor, features: Tensor) -> None:
        """Remember the features [B, 1, F] of the positions `lengths` [B]."""
        self.features.scatter_(1, self.places(lengths[:, None]), features)


class DecodeState:
    """Everything that one decode step of B sequences reads and writes, for one shape of tree."""

    def __init__(self, sequences: Sequences, spec: TreeSpec):
        self.spec = spec
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
        # what the host reads of a step, see update_sequence; behind the tokens their log-probabilities, float64
        self.report = zeros(REPORT_TOKENS + 2 * (spec.depth + 1), dtype=torch.int64)

        def constant(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # whom the emitted tokens see when the draft head takes them in: those before them; as wide as the beams' bits
        columns = max(spec.depth + 1, spec.beam_slots)
        chain = torch.ones(batch, spec.depth + 1, columns, dtype=torch.bool, device=device).tril()
        self.chain = pack_ancestors(chain)
        # the score of a root, and the beam slots above it: none
        self.root_score = zeros(1, dtype=torch.float32)
        self.root_ancestors = zeros(1, self.chain.shape[-1], dtype=torch.int64)
        self.planned_nodes = max(spec.depth + 1, *spec.beam_widths, 1)
        # what is known of beam slots beforehand: their level, and the flat index of their level's first child
        starts = [
            start for start, width in zip(spec.level_starts, spec.beam_widths, strict=False) for _ in range(width)
        ]
        levels = [level for level, width in enumerate(spec.beam_widths) for _ in range(width)]
        self.slot_starts, self.slot_levels = constant(starts), constant(levels, torch.int32)
        self.level_slots = constant([sum(spec.beam_widths[:i]) for i in range(len(spec.beam_widths))], torch.int32)
        self.selected = self.beam_children = None  # a fixed tree's drafts (flat) and slots (within their level)
        if spec.selected is not None:
            self.selected = constant(spec.selected)
            self.beam_children = constant([c - s for c, s in zip(spec.beam_candidates, starts, strict=True)])

    def part(self, slots: slice) -> DecodeState:
        """The state of some of the sequences: views of the same tensors."""
        part = copy.copy(self)
        part._share(self.sequences.part(slots))
        part.tree, part.report, part.chain = _each(self.tree, slots), self.report[slots], self.chain[slots]
        part.root_score, part.root_ancestors = self.root_score[slots], self.root_ancestors[slots]
        return part

    @contextmanager
    def held(self) -> Iterator[None]:
        """Steps inside the block change nothing that a sequence is decoded from: none is active meanwhile.

        Rows behind the committed ones and the random counters are written all the same, and given back where it counts.
        """
        sequences = self.sequences
        changed = [*self.tree, sequences.sampling.step, sequences.active, sequences.nan, sequences.root_logprob]
        changed += [] if sequences.hidden is None else [sequences.hidden, sequences.normed]
        changed += [] if sequences.rules is None else [sequences.rules.seen]
        changed += [] if sequences.lag is None else [sequences.lag.features]
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
        self.target_cache, self.draft_cache = sequences.target_cache, sequences.draft_cache
        self.sampling = sequences.sampling

    @property
    def emitted(self) -> Tensor:
        """The tokens that the last step committed, by the report: int64 [B, D + 1], -1 behind them."""
        return self.report[:, REPORT_TOKENS : REPORT_TOKENS + self.spec.depth + 1]

    def logprobs_of(self, report: Tensor) -> Tensor:
        """Their log-probabilities in a report of this state: float64 [B, D + 1]."""
        return report.view(torch.float64)[:, REPORT_TOKENS + self.spec.depth + 1 :]

    @property
    def stops(self) -> Stops:
        """Those of the sequences, which may be replaced."""
        return self.sequences.stops


def _each(values: Fields, slots: slice) -> Fields:
    return type(values)(*(value[slots] for value in values))
