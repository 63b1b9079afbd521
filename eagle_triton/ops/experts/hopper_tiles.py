"""Tiles of an expert's weights in four bits on Hopper: their shape, and which thread has which rows.

A program multiplies 64 rows of an expert's weights, or 32, in parts of 256 columns. Each of its four warps takes half
of a part's rows and half of its columns. A thread takes 32 columns (a unit) of four rows, or of two if the program has
32 rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from eagle_triton.ops.views import Rows
from eagle_triton.runtime.gluon import gl, gluon
from eagle_triton.runtime.mxfp4_weight import GROUP

WARPS = gl.constexpr(4)
UNIT = gl.constexpr(GROUP)  # columns of a row that a thread multiplies at a time
# The layout of weights and sums [2, 2, 8 rows, 4 units, 4 words]. A thread has all words of a unit. Along the first
# axis warps have different columns, along the second different rows.
WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 8, 4, 1], [2, 2, 1, 1, 1], [4, 3, 2, 1, 0]))


class Tile(NamedTuple):
    """What a program multiplies: `height` rows of weights by `x_rows` rows of x."""

    kind: str  # "down", or how gate and up lie: "interleaved" or in "halves"
    height: int
    x_rows: int
    group: int  # columns of weights that share a scale
    chosen: int  # experts of a row of x
    clamped: bool  # whether SwiGLU is


class Weight(NamedTuple):
    """A weight of all experts, without its words."""

    scales: Tensor
    zeros: Tensor | None
    bias: Rows | None  # [E, rows]
    rows: int  # of each expert
    depth: int  # columns


# Functions of constants take a tile's fields: under Triton 3.6 a tuple has no names there.
@gluon.constexpr_function
def row_tiles(height):
    """In how many tiles of the tensor cores a thread has rows."""
    return height // 32


@gluon.constexpr_function
def _bits(kind, height):
    """Which bits of a row's number in a part say where the row lies in WEIGHTS: three bits for its place among eight
    rows (the lowest first), one for first or second row of a tile (a gate is a first row, its up the second), one for
    the second axis, and one for the tile if there are two. So chosen, eight lanes read all banks of shared memory."""
    rows, second, half, tile = {
        "interleaved": ((2, 1, 3), 0, 5, 4),
        "halves": ((2, 0, 1), 5, 4, 3),
        "down": ((2, 0, 1), 3, 5, 4),
    }[kind]
    if row_tiles(height) == 2:
        return rows, second, half, (tile,)
    return rows, second - (second > tile), half - (half > tile), ()


@gluon.constexpr_function
def part_layout(kind, height, width):
    """The layout of a part's words [height, 32], or of its scales [height, 8]. A thread has four words of each of its
    rows, or one scale."""
    rows, second, half, tiles = _bits(kind, height)
    words = [[0, 1], [0, 2]] if width == 32 else []
    registers = [*words, [1 << second, 0], *([1 << tile, 0] for tile in tiles)]
    lanes = [[0, width // 8], [0, width // 4], *([1 << bit, 0] for bit in rows)]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << half, 0], [0, width // 2]], [], [height, width])


@gluon.constexpr_function
def part_axes(kind, height, *words):
    """How a part is separated into a thread's rows, for `by_row`: a shape, an order of axes, and the final shape.

    The first shape has an axis for each bit of a row's number, then [2, 4, *words]. The order puts the axes of WEIGHTS
    first, then the tile if there are two, then first or second row.
    """
    rows, second, half, tiles = _bits(kind, height)
    count = 4 + 1 + len(tiles)
    of_rows = (count - 1 - bit for bit in reversed(rows))
    last = (*(count - 1 - tile for tile in tiles), count - 1 - second)
    order = (count, count - 1 - half, *of_rows, count + 1, *(count + 2 for _ in words), *last)
    return (2,) * count + (2, 4, *words), order, (2, 2, 8, 4, *words, *(2 for _ in last))


@gluon.jit
def by_row(part, WORDS: gl.constexpr, TILE: gl.constexpr):
    """A part as one tensor for each row of a thread. It has words, or one number for all words of a unit."""
    axes: gl.constexpr = part_axes(TILE.kind, TILE.height, *WORDS)
    part = part.reshape(axes.value[0]).permute(axes.value[1]).reshape(axes.value[2])
    firsts, seconds = part.split()
    if row_tiles(TILE.height) == 1:
        rows = (firsts, seconds)
    else:
        first, third = firsts.split()
        second, fourth = seconds.split()
        rows = (first, second, third, fourth)  # type: ignore[assignment]
    return rows


@gluon.jit
def number_in_part(half, row, tile, second, TILE: gl.constexpr):
    """A row's number in a part, from its places in a thread's tensors."""
    bits: gl.constexpr = _bits(TILE.kind, TILE.height)
    of_eight = ((row & 1) << bits[0][0]) + ((row >> 1 & 1) << bits[0][1]) + ((row >> 2) << bits[0][2])
    number = of_eight + (second << bits[1]) + (half << bits[2])
    if len(bits[3]):
        number = number + (tile << bits[3][0])
    return number


@gluon.jit
def row_of(number, first, rows, TILE: gl.constexpr):
    """Which of an expert's `rows` rows has this number in a part. first: the program's first column of the output."""
    if TILE.kind == "interleaved":
        row = 2 * first + number
    elif TILE.kind == "halves":
        row = first + number % (TILE.height // 2) + number // (TILE.height // 2) * (rows // 2)
    else:
        row = first + number
    return row
