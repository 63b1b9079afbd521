"""Gated delta nets (Yang et al., arXiv 2412.06464), the recurrent layers of Qwen3-Next, Qwen3.5 and OLMo Hybrid.

A layer remembers one state for each head, and the last input rows of its convolution. A forward over trees changes
neither: nodes see their ancestors by the parallel form in reference/gated_delta.py. A commit replays the accepted path
token by token, so the state depends on the committed tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import AcceptedPath, Mixer, NewRows, RecurrentCache
from eagle_triton.engine.model.modules import Norm, Projection, project_split, project_stack
from eagle_triton.engine.operations import Operations
from eagle_triton.operands.gated_delta import MAX_NODES, PromptPieces
from eagle_triton.runtime.row_formats import ProductRows, whole_of
from eagle_triton.runtime.split_sums import Product, total_of

if TYPE_CHECKING:
    from typing_extensions import Self

RECURRENT_TOKENS = 16  # up to this many tokens of a prompt are read one by one, more in chunks


class DeltaPending(NamedTuple):
    """The rows of a step's trees in L layers, until they are committed."""

    raw: Tensor  # [L, B, N, C]: inputs of the convolution
    mixed: Tensor  # [L, B, N, C]: its outputs
    gates: Tensor  # [L, B, N, 2, HV] float32


class DeltaMemory(NamedTuple):
    """One layer's part of a GatedDeltaCache; `pending` is None in a causal forward."""

    state: Tensor  # [B, HV, K, V] float32
    window: Tensor  # [B, W - 1, C]
    pending: DeltaPending | None  # without the first dimension
    pieces: PromptPieces | None  # of a causal forward; None: it reads the next tokens of all sequences


class GatedDeltaCache(RecurrentCache):
    """States [L, B, HV, K, V] float32 and windows [L, B, W - 1, C] of layers of one shape."""

    commits_roots: ClassVar[bool] = True
    delta_rule: ClassVar[bool] = True

    @classmethod
    def empty(
        cls, layers: int, slots: int, state: tuple[int, ...], conv: Tensor, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """state: HV, K and V. conv [C, W]: a layer's taps."""
        channels, taps = conv.shape
        return cls(
            torch.zeros(layers, slots, *state, dtype=torch.float32, device=device),
            torch.zeros(layers, slots, taps - 1, channels, dtype=dtype, device=device),
        )

    @property
    def states(self) -> Tensor:
        return self.memory[0]

    @property
    def windows(self) -> Tensor:
        return self.memory[1]

    def new_pending(self, nodes: int) -> DeltaPending:
        layers, batch, _, channels = self.windows.shape
        raw, mixed = (self.windows.new_empty(layers, batch, nodes, channels) for _ in range(2))
        return DeltaPending(raw, mixed, self.states.new_empty(layers, batch, nodes, 2, self.states.shape[2]))

    def layer(self, index: int, pending: DeltaPending | None = None) -> DeltaMemory:
        mine = None if pending is None else DeltaPending(*(tensor[index] for tensor in pending))
        return DeltaMemory(self.states[index], self.windows[index], mine, self.pieces)

    def commit(self, ops: Operations, pending: DeltaPending | None, accepted: AcceptedPath) -> None:
        if pending is None:
            return
        path = accepted.path, accepted.accepted
        ops.commit_states(self.states, self.windows, *pending, *path, delta_rule=self.delta_rule)


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """Causal convolution, gated delta rule, gated norm. H key heads of K, HV = H * R value heads of V.

    inputs: the products that give q, k, v, z, b and a: (qkv, z, b, a) in Qwen3.5, (qkvz, ba) with rows grouped by key
    head in Qwen3-Next, or one each in OLMo Hybrid. max_beta: beta is between 0 and it.
    """

    inputs: tuple[Projection, ...]
    conv: Tensor  # [C, W], C = 2 H K + HV V
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    norm: Norm  # [V]
    o: Projection
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    max_beta: float = 1.0

    max_nodes: ClassVar[int | None] = MAX_NODES
    reads_pieces: ClassVar[bool] = True

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return self.num_k_heads, self.num_v_heads, self.k_dim, self.v_dim, self.conv.shape[1]

    def new_cache(
        self, layers: int, slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> GatedDeltaCache:
        """It uses no pages: the size of a state does not depend on the number of tokens."""
        state = self.num_v_heads, self.k_dim, self.v_dim
        return GatedDeltaCache.empty(layers, slots, state, self.conv, dtype, device)

    def forward(self, ops: Operations, x: ProductRows, cache: DeltaMemory, rows: NewRows) -> Product:
        x = whole_of(x)
        q, k, v, z, b, a = self.products(ops, x, rows.tune_for_rows)
        gating = (a, b, self.A_log, self.dt_bias)
        if rows.ancestors is None or rows.active is not None:
            mixed = ops.causal_conv(q, k, v, self.conv, cache.window, active=rows.active, pieces=cache.pieces)
            if cache.pieces is not None:
                out = ops.delta_chunk(mixed, *gating, cache.state, cache.pieces, max_beta=self.max_beta)
            elif x.shape[1] <= RECURRENT_TOKENS:
                out = ops.delta_recurrent(mixed, *gating, cache.state, active=rows.active, max_beta=self.max_beta)
            else:
                out = ops.delta_chunk(mixed, *gating, cache.state, max_beta=self.max_beta)
        else:
            assert cache.pending is not None, "a forward over trees needs pending tensors"
            raw, mixed, gates = cache.pending
            ops.causal_conv(q, k, v, self.conv, cache.window, rows.ancestors, raw=raw, out=mixed)
            out = ops.delta_tree(
                mixed, *gating, cache.state, rows.ancestors, rows.depth, gates=gates, max_beta=self.max_beta
            )
        normed = ops.gated_norm(out, z, self.norm.weight, self.norm.eps)
        return project_split(ops, self.o, normed, rows.tune_for_rows)

    def products(self, ops: Operations, x: Tensor, tune_for_rows: int | None = None) -> tuple[Tensor, ...]:
        """q, k [B, n, H, K], v, z [B, n, H, R V], b, a [B, n, H, R] of rows x [B, n, *]: views of the products.

        tune_for_rows: see project."""
        products = [total_of(p) for p in project_stack(ops, self.inputs, x, tune_for_rows=tune_for_rows)]
        heads, shared = self.num_k_heads, self.num_v_heads // self.num_k_heads
        values = shared * self.v_dim
        by_head = [product.unflatten(-1, (heads, -1)) for product in products[-3:]]
        if len(products) == 2:
            qkvz, ba = by_head
            return (*qkvz.split((self.k_dim, self.k_dim, values, values), -1), *ba.split(shared, -1))
        keys = heads * self.k_dim
        q, k, v = products[:3] if len(products) == 6 else products[0].split((keys, keys, heads * values), -1)
        return (*(part.unflatten(-1, (heads, -1)) for part in (q, k, v)), *by_head)
