"""Short gated convolutions, the layers of LFM2 that do not attend.

A layer remembers the last input rows of its convolution. A forward over trees changes none of them: a node's earlier
rows are its ancestors'. A commit moves the accepted rows into the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.mixers import AcceptedPath, Mixer, NewRows, RecurrentCache
from eagle_triton.engine.model.modules import Projection, project, project_split
from eagle_triton.engine.operations import Operations
from eagle_triton.operands.gated_delta import MAX_NODES, PromptPieces
from eagle_triton.runtime.row_formats import ProductRows
from eagle_triton.runtime.split_sums import Product


class ConvMemory(NamedTuple):
    """One layer's part of a ShortConvCache."""

    window: Tensor  # [B, W - 1, H]
    pending: Tensor | None  # [B, N, H]: inputs of the convolution over trees; None in a causal forward
    pieces: PromptPieces | None  # of a causal forward; None: it reads the next tokens of all sequences


class ShortConvCache(RecurrentCache):
    """Windows [L, B, W - 1, H] of layers of one shape."""

    commits_roots: ClassVar[bool] = True

    def new_pending(self, nodes: int) -> Tensor:
        layers, batch, _, channels = self.memory[0].shape
        return self.memory[0].new_empty(layers, batch, nodes, channels)

    def layer(self, index: int, pending: Tensor | None = None) -> ConvMemory:
        return ConvMemory(self.memory[0][index], None if pending is None else pending[index], self.pieces)

    def commit(self, ops: Operations, pending: Tensor | None, accepted: AcceptedPath) -> None:
        if pending is not None:
            ops.commit_windows(self.memory[0], pending, accepted.path, accepted.accepted)


@dataclass(frozen=True)
class ShortConv(Mixer):
    """y = o(c * convolution of (b * x)), where the rows of `input` are b, c and x."""

    input: Projection  # [3 H, H]
    conv: Tensor  # [H, W]
    o: Projection  # [H, H]

    max_nodes: ClassVar[int | None] = MAX_NODES
    reads_pieces: ClassVar[bool] = True

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return tuple(self.conv.shape)

    def new_cache(
        self, layers: int, slots: int, pages: SlotPages | None, dtype: torch.dtype, device: torch.device
    ) -> ShortConvCache:
        """It uses no pages: a window does not grow."""
        channels, taps = self.conv.shape
        return ShortConvCache(torch.zeros(layers, slots, taps - 1, channels, dtype=dtype, device=device))

    def forward(self, ops: Operations, x: ProductRows, cache: ConvMemory, rows: NewRows) -> Product:
        product = project(ops, self.input, x, rows.tune_for_rows)
        ancestors = rows.ancestors if rows.active is None else None
        out = ops.gated_conv(
            product,
            self.conv,
            cache.window,
            ancestors,
            active=rows.active,
            raw=cache.pending,
            pieces=cache.pieces,
        )
        return project_split(ops, self.o, out, rows.tune_for_rows)
