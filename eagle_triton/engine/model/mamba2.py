"""Mamba-2 (Dao and Gu, arXiv 2405.21060), the recurrent layers of Granite 4, Nemotron-H and Bamba.

A layer remembers what a gated delta net does, and a forward over trees changes none of it: see gated_delta.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.gated_delta import RECURRENT_TOKENS, DeltaMemory, GatedDeltaCache
from eagle_triton.engine.model.mixers import Mixer, NewRows
from eagle_triton.engine.model.modules import Norm, Projection, project, project_split
from eagle_triton.engine.operations import Operations
from eagle_triton.operands.gated_delta import MAX_NODES
from eagle_triton.runtime.row_formats import ProductRows
from eagle_triton.runtime.split_sums import Product


class Mamba2Cache(GatedDeltaCache):
    """States [L, B, HV, K, V] float32 and windows [L, B, W - 1, C] of layers of one shape."""

    delta_rule = False


@dataclass(frozen=True)
class Mamba2(Mixer):
    """Causal convolution, state space, and a norm of its gated output. G groups share B and C of K, HV heads have V.

    The rows of `input` are the gate z [HV V], x [HV V], B and C [G K each] and dt [HV].
    """

    input: Projection
    conv: Tensor  # [C, W], C = HV V + 2 G K
    conv_bias: Tensor | None  # [C]
    A_log: Tensor  # [HV], like dt_bias and D
    dt_bias: Tensor
    D: Tensor
    norm: Norm  # [HV V], of each of `norm_parts` parts of a row
    norm_parts: int
    o: Projection
    groups: int
    heads: int
    state_dim: int
    head_dim: int
    dt_limit: tuple[float, float] = (0.0, math.inf)  # of a prompt's own rows only, as in transformers

    max_nodes: ClassVar[int | None] = MAX_NODES
    reads_pieces: ClassVar[bool] = True

    @property
    def reads_prompts_apart(self) -> bool:
        return self.dt_limit != (0.0, math.inf)

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return self.groups, self.heads, self.state_dim, self.head_dim, self.conv.shape[1]

    def new_cache(
        self, layers: int, slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> Mamba2Cache:
        """It uses no pages: the size of a state does not depend on the number of tokens."""
        state = self.heads, self.state_dim, self.head_dim
        return Mamba2Cache.empty(layers, slots, state, self.conv, dtype, device)

    def forward(self, ops: Operations, x: ProductRows, cache: DeltaMemory, rows: NewRows) -> Product:
        product = project(ops, self.input, x, rows.tune_for_rows)
        z, mixed, dt = product.split((self.heads * self.head_dim, len(self.conv), self.heads), -1)
        z = z.unflatten(-1, (self.norm_parts, -1))
        inputs = mixed[:, :, None], None, None, self.conv, cache.window
        steps = dt.unflatten(-1, (self.groups, -1)), None, self.A_log, self.dt_bias
        if rows.active is not None:
            mixed = ops.causal_conv(*inputs, active=rows.active, bias=self.conv_bias)
            out = ops.delta_recurrent(mixed, *steps, cache.state, active=rows.active, skip=self.D)
        elif rows.ancestors is None:
            mixed = ops.causal_conv(*inputs, bias=self.conv_bias, pieces=cache.pieces)
            options: dict[str, Any] = dict(skip=self.D, dt_limit=self.dt_limit, limited=rows.prompt)
            if cache.pieces is None and mixed.shape[1] <= RECURRENT_TOKENS:
                out = ops.delta_recurrent(mixed, *steps, cache.state, **options)
            else:
                out = ops.delta_chunk(mixed, *steps, cache.state, cache.pieces, **options)
        else:
            assert cache.pending is not None, "a forward over trees needs pending tensors"
            raw, mixed, gates = cache.pending
            ops.causal_conv(*inputs, rows.ancestors, bias=self.conv_bias, raw=raw, out=mixed)
            out = ops.delta_tree(mixed, *steps, cache.state, rows.ancestors, rows.depth, gates=gates, skip=self.D)
        normed = ops.gated_norm(
            out.flatten(2).unflatten(-1, (self.norm_parts, -1)), z, self.norm.weight, self.norm.eps, gate_first=True
        )
        return project_split(ops, self.o, normed, rows.tune_for_rows)
