"""The tensors of a decode step. Their addresses never change between steps, so that one graph can replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.adapters.view import DraftView, ModelView
from eagle_triton.reference.attention import WORD, pack_ancestors
from eagle_triton.reference.sampling import SamplingParams
from eagle_triton.reference.verification import REPORT_TOKENS, Stops
from eagle_triton.tree_spec import TreeSpec

STOP_IDS = 16  # stop tokens of one sequence


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


class DecodeState:
    """Everything that one decode step of B sequences reads and writes. T rows of capacity per sequence."""

    def __init__(self, view: ModelView, draft: DraftView | None, spec: TreeSpec, batch: int, capacity: int):
        self.spec, self.batch, self.capacity = spec, batch, capacity
        nodes, device = spec.nodes, view.device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def cache(layers: tuple) -> Tensor:
            attention = layers[0].attention
            shape = (len(layers), 2, batch, attention.num_kv_heads, capacity, attention.head_dim)
            return zeros(*shape, dtype=view.dtype)

        self.tokens = zeros(batch, capacity + spec.depth + 2, dtype=torch.int64)  # the root at column `lengths`
        self.lengths = zeros(batch, dtype=torch.int32)  # committed tokens = valid rows of the target cache
        self.active = zeros(batch, dtype=torch.bool)  # a finished sequence is frozen
        self.tree = Tree(
            zeros(batch, nodes, dtype=torch.int64),
            zeros(batch, nodes, dtype=torch.int32),
            zeros(batch, nodes, dtype=torch.int32),
            zeros(batch, nodes, -(-nodes // WORD), dtype=torch.int64),
        )
        self.tree.parents[:, 0] = -1
        self.tree.ancestors[:, 0, 0] = 1
        self.target_cache = cache(view.layers)
        self.draft_cache = cache(draft.layers) if draft is not None else None
        self.report = zeros(batch, REPORT_TOKENS + spec.depth + 1, dtype=torch.int64)  # what the host reads of a step
        self.nan = zeros(batch, dtype=torch.bool)  # the target's logits of the last step had a NaN
        self.stops = Stops(
            ids=zeros(batch, STOP_IDS, dtype=torch.int64),
            limit=zeros(batch, dtype=torch.int32),
            exact=zeros(batch, dtype=torch.bool),
        )
        self.sampling = SamplingParams(
            temperature=zeros(batch, dtype=torch.float32),
            top_k=zeros(batch, dtype=torch.int32),
            top_p=zeros(batch, dtype=torch.float32),
            min_p=zeros(batch, dtype=torch.float32),
            seed=zeros(batch, dtype=torch.int64),
            step=zeros(batch, dtype=torch.int64),
        )

        def constant(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # whom the emitted tokens see when the draft head takes them in: those before them
        chain = torch.ones(batch, spec.depth + 1, spec.depth + 1, dtype=torch.bool, device=device).tril()
        self.chain = pack_ancestors(chain)
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
