"""The weights of one launch in the form that kernels take. Their products are side by side in its output."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Weight(NamedTuple):
    """A weight [cols, K] with contiguous rows."""

    ptr: Tensor
    row: int
    cols: int


class Columns(NamedTuple):
    """The columns of a weight's product. The weight itself is read through its descriptor."""

    cols: int


class ScaledColumns(NamedTuple):
    """The same for an eight-bit weight. scale_row: the stride between rows or blocks of its scales, or 0."""

    cols: int
    scale: Tensor
    scale_row: int


class Tile(NamedTuple):
    """One tile of several products side by side: its weight, the tile's number there, and where that product begins."""

    weight: Weight | Columns | ScaledColumns
    desc: TensorDescriptor | int  # of the weight, or 0
    bias: Tensor | int  # [cols], or 0
    number: int
    out_ptr: Tensor


@triton.jit
def tile_of(number, weights, descs, biases, out_ptr, BLOCK_N):
    """Tile `number` of all. weights: one, three or four; descs, biases: likewise, or 0 (Triton 3.6 returns no None)."""
    tile = Tile(weights[0], descs[0], biases[0], number, out_ptr)
    if len(weights) > 1:
        tiles0 = (weights[0].cols + (BLOCK_N - 1)) // BLOCK_N
        tiles1 = (weights[1].cols + (BLOCK_N - 1)) // BLOCK_N
        tiles2 = (weights[2].cols + (BLOCK_N - 1)) // BLOCK_N
        if number >= tiles0 + tiles1:
            number -= tiles0 + tiles1
            out_ptr += weights[0].cols + weights[1].cols
            tile = Tile(weights[2], descs[2], biases[2], number, out_ptr)
            if len(weights) > 3:  # noqa: SIM102 (known before the number is)
                if number >= tiles2:
                    tile = Tile(weights[3], descs[3], biases[3], number - tiles2, out_ptr + weights[2].cols)
        elif number >= tiles0:
            tile = Tile(weights[1], descs[1], biases[1], number - tiles0, out_ptr + weights[0].cols)
    return tile
