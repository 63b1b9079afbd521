"""A tile's words and scales on Hopper: words of four bits as a group of warps takes them from shared memory, and the
scales and zeros of its rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from eagle_triton.ops.linear.hopper_four_bit_conversion import MAGIC_BF16, MAGIC_FP16
from eagle_triton.runtime.gluon import gl, gluon, reinterpret

UNIT = gl.constexpr(64)  # columns that are converted at a time
HEIGHT = gl.constexpr(64)  # rows of weights of a group of warps
IN_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # scales of groups and rows, and Marlin's words
NESTED_BLOCK = gl.constexpr(256)  # scales that share a scale
_A_GROUP = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of one group's scales


class FourBitColumns(NamedTuple):
    """The columns of a weight's product, its scales and zeros with their strides, its table, and of nested scales their
    code, their own scales and their offset. Fields for what a weight does not have hold its scales.

    A flat tuple: with Triton 3.6 a constant in a tuple of a tuple is lost on its way to the other warps.
    """

    cols: int
    scale: Tensor
    scale_row: int
    scale_column: int
    zero: Tensor
    zero_row: int
    zero_column: int
    table: Tensor
    code: Tensor
    outer: Tensor
    offset: Tensor


@gluon.jit
def _stored(row, MARLIN: gl.constexpr):
    """Where the scale of a tile's row is, in which word its zero is, and at which place of the word. MARLIN: for the
    rows of take_words and the order of FourBitWeight."""
    if MARLIN:
        high, low = row >> 4, row >> 3 & 1
        return high * 16 + (row & 7) * 2 + low, high * 2 + (row >> 2 & 1), low * 4 + (row & 3)
    else:
        return row, row >> 3, row & 7


@gluon.jit
def load_scales(weight, col, first, depth, GROUP: gl.constexpr, GROUPS: gl.constexpr, MARLIN: gl.constexpr):
    """The scales [GROUPS, 64] of a tile's rows, from column `first` on; fp32 where they are nested. With zeros int32:
    the scale's bits, and in the high half the bits of magic + zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, gl.num_warps()], [0, 1])
    group = first // GROUP + gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
    row = col + gl.arange(0, HEIGHT, gl.SliceLayout(0, layout))
    group, row = gl.minimum(group, depth // GROUP - 1), gl.minimum(row, weight.cols - 1)
    row, zero_row, place = _stored(row, MARLIN)
    found = gl.load(weight.scale + row[None, :] * weight.scale_row + group[:, None] * weight.scale_column)
    if weight.scale.dtype.element_ty == gl.uint8:
        outer = (row[None, :] * (depth // GROUP) + group[:, None]) // NESTED_BLOCK
        found = gl.load(weight.code + found.to(gl.int32)) * gl.load(weight.outer + outer) + gl.load(weight.offset)
    if weight.zero.dtype.element_ty == gl.int32:
        magic: gl.constexpr = MAGIC_BF16 if weight.scale.dtype.element_ty == gl.bfloat16 else MAGIC_FP16
        zero = gl.load(weight.zero + zero_row[None, :] * weight.zero_row + group[:, None] * weight.zero_column)
        zero = (zero >> (place * 4)[None, :]) & 15 | magic
        found = found.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF | zero << 16
    return found


@gluon.jit
def _scale(kept, first, column, GROUP: gl.constexpr, MMA: gl.constexpr):
    """The scales of the 64 columns from `column` on, for the rows of a thread's words: [64, 1], or [64, 8] for each
    word if half of the columns may be of another group. first: `kept` begins with this column's group. It is in shared
    memory: if each step loaded scales, it would wait for them longer than for its words."""
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    groups = reinterpret(kept, kept.dtype, kept.shape, _A_GROUP)
    scale = groups.index(column // GROUP - first // GROUP).load(gl.SliceLayout(1, layout))[:, None]
    if GROUP % UNIT:
        other = groups.index((column + UNIT // 2) // GROUP - first // GROUP).load(gl.SliceLayout(1, layout))[:, None]
        halves = gl.join(scale.broadcast_to((HEIGHT, 4)), other.broadcast_to((HEIGHT, 4)))
        scale = gl.convert_layout(halves.permute((0, 2, 1)).reshape((HEIGHT, 8)), layout)
    return scale


@gluon.jit
def scales(kept, first, column, GROUP: gl.constexpr, MMA: gl.constexpr):
    """The scales of the 64 columns from `column` on and of the next 64."""
    left = _scale(kept, first, column, GROUP, MMA)
    right = left
    if GROUP % (2 * UNIT):
        right = _scale(kept, first, column + UNIT, GROUP, MMA)
    return left, right


@gluon.jit
def halves(words, WIDTH: gl.constexpr, MMA: gl.constexpr):
    """Words [64, 2 * WIDTH] as the left half of their columns and the right one."""
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    left, right = words.reshape((HEIGHT, 2, WIDTH)).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def take_words(tiles, place, MMA: gl.constexpr):
    """The words of a step in registers: one or two tensors [64, 16], of 128 columns each.

    Each of Marlin's words has four numbers of a row n and four of row n + 8, from 16 columns. Two such words for
    neighbouring 16 columns are treated as words of two rows. The tile's row 16w + 8h + 4a + b, for w, b < 4 and
    h, a < 2, is row 16b + 8h + 2w + a of the 64, so that a warp's words are neighbours. With the rows that Marlin gives
    to a warp, all its words would lie in every fourth bank of shared memory.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    MARLIN: gl.constexpr = len(tiles.shape) == 4
    WIDTH: gl.constexpr = 2 * tiles.shape[2] if MARLIN else tiles.shape[2]
    if MARLIN:
        own = reinterpret(tiles, tiles.dtype, [2 * tiles.shape[0], WIDTH // 2, 128], IN_ROWS)
        words = own.index(place).load(_marlin_lanes(WIDTH // 2)).reshape((WIDTH // 4, 2, 4, 2, 4, 4))
        words = words.permute((2, 1, 3, 5, 0, 4)).reshape((HEIGHT, WIDTH))
        words = gl.convert_layout(words, layout, assert_trivial=True)
    else:
        STEPS: gl.constexpr = tiles.shape[0] * tiles.shape[1] // HEIGHT
        own = reinterpret(tiles, tiles.dtype, [STEPS, HEIGHT, WIDTH], tiles.layout)
        words = own.index(place).load(layout)
    if WIDTH == 16:
        return (words,)
    else:
        return halves(words, 16, MMA)


@gluon.constexpr_function
def _marlin_lanes(tiles):
    """Which words [tiles, 128] of 64 rows and of 16 columns each the threads load: see take_words."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << bit, 0] for bit in range(4) if tiles >> bit > 1],
        lane_bases=[[0, 4], [0, 8], [0, 1], [0, 2], [0, 16]],
        warp_bases=[[0, 32], [0, 64]],
        block_bases=[],
        shape=[tiles, 128],
    )


@gluon.jit
def in_order(total, MARLIN: gl.constexpr):
    """The sums [64, BLOCK_M] of a tile's rows, in the order of the weight's rows."""
    if MARLIN:
        total = total.reshape((4, 2, 2, 4, total.shape[1])).permute((3, 1, 0, 2, 4)).reshape(total.shape)
    return total
