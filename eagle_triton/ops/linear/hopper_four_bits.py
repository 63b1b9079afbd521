"""Products with weights of four bits on Hopper, converted to 16 bits on their way to the tensor cores.

    linear_kernel:  out = x @ weight.T (+ bias), up to four weights side by side; the product, or its split sums
    swiglu_kernel:  out = act(x @ gate.T) * (x @ up.T)

The weights are the left operand, in registers. A word has eight neighbouring numbers of a row. A thread turns it into
four registers by masks alone, if columns c and c + 4 are a pair. So x comes with its columns in the order of words
(runtime/row_formats.py), in which the kernels that make x write it. Marlin's words have the numbers that a thread of
the tensor cores needs, and x comes with its columns in order: see _take_words.

One warp loads words and x through TMA, as far ahead as a ring of slots goes. It loads words before x is ready. Two
groups of warps multiply, each 64 rows of the weights. A number becomes 16 bits. Subtracting its zero is exact, and
multiplying by its group's scale rounds once. A group's scale and zero are kept in one word. A number of a table is
fetched from the lane that holds it. While the tensor cores multiply 64 columns, the next are converted.
Needs Triton 3.6. What bounds it: docs/speed-notes.md, "Four bits".

| name         | shape                        | dtype, layout                                |
|--------------|------------------------------|----------------------------------------------|
| x            | [rows, K]                    | bf16 or fp16, in the order of words; with    |
|              |                              | Marlin's in order, rows 16-byte aligned      |
| words        | [N, K / 8], or Marlin's      | int32, rows 16-byte aligned                  |
|              | [K / 16, 2 N]                |                                              |
| scales       | [N, K / group]               | as x; with a table fp32, or nested in uint8  |
| zeros        | [N / 8, K / group]           | int32, eight rows' in a word; none with a    |
|              |                              | table; without them all are 8                |
| bias         | [N]                          | as x                                         |
| out          | [rows, N], [splits, rows, N] | as x; fp32 if the splits' sums stay apart    |
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from eagle_triton.ops.layers.values import in_word_order
from eagle_triton.ops.linear.gluon_tiles import (
    await_full,
    barriers,
    descriptor,
    give_back,
    load_weights,
    room_for,
    room_for_weights,
    steps_of,
    store,
    swiglu,
    tile_of,
    zeros,
)
from eagle_triton.ops.linear.settings import MULTIPROCESSORS, Streaming, tiles_of
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.four_bit_weight import MIDDLE, FourBitWeight, Packing
from eagle_triton.runtime.gluon import (
    TensorDescriptor,
    async_load,
    debug_barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from eagle_triton.runtime.gpu import compute_capability
from eagle_triton.runtime.overlap import overlapped_on_hopper
from eagle_triton.runtime.row_formats import MAX_ORDERED_ROWS, WordOrdered

FEW_ROWS = 64  # up to this many, a row's bits do not depend on the other rows
BLOCK_N = 128  # rows of weights of a program: two groups of warps multiply 64 each
_SHARED_MEMORY = 225 * 1024  # of a multiprocessor
_MAX_SCALES = 150 * 1024  # bytes of scales that a program keeps: with more there is no room for two steps
_MAX_SCALES_OF_MANY = 64 * 1024  # the same for more than FEW_ROWS rows
_ROWS_OF_A_LOAD = 32  # a taller tile of x comes in loads of this height: those past the last row load other rows
_UNIT = gl.constexpr(64)  # columns that are converted at a time
_STARTING_REGISTERS = 168  # of a thread: one program to a multiprocessor, which is faster than two
_LOADER = gl.constexpr(24)  # registers of a thread of the loading warp
_MULTIPLIER = gl.constexpr(232)  # and of those that multiply, once that warp has given its own away
_HEIGHT = gl.constexpr(BLOCK_N // 2)  # rows of weights of a group of warps
MARLIN_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
_IN_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # scales of groups and rows, and Marlin's words
_NESTED_BLOCK = gl.constexpr(256)  # scales that share a scale
_A_GROUP = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of one group's scales
_MAGIC_BF16, _MAGIC_FP16 = gl.constexpr(0x4300), gl.constexpr(0x6400)  # 128 and 1024, where the last bit is worth 1


def _conversion(magic: gl.constexpr, dtype: str, with_zeros: bool, marlin: bool = False) -> gl.constexpr:
    """PTX that converts two words ($8, $9) to four pairs for each, $0 to $3 and $4 to $7, with the scales of two rows
    ($10, $11). Each word belongs to one row. marlin: the first two pairs of a word belong to the first row, the others
    to the second.

    With the bits of `magic` above it, a number of four bits is the 16-bit number magic + number. Then magic + zero is
    subtracted. with_zeros: the high half of $10 and $11 is magic + zero, and the low half the scale. Otherwise both
    halves are the scale, and all zeros are 8.
    """
    pairs = magic.value * 0x10001
    lines = [".reg .b32 t, v, z;"]
    lines.append(".reg .b32 s;" if with_zeros else f"mov.b32 z, {pairs + MIDDLE * 0x10001:#x};")
    for row in range(2):
        scale = f"${10 + row}"
        if with_zeros:
            lines.append(f"prmt.b32 z, {scale}, {scale}, 0x3232;")
            lines.append(f"prmt.b32 s, {scale}, {scale}, 0x1010;")
            scale = "s"
        for word, i in itertools.product(range(2), (2 * row, 2 * row + 1)) if marlin else ((row, i) for i in range(4)):
            source = f"${8 + word}"
            if i:
                lines.append(f"shr.u32 t, {source}, {4 * i};")
                source = "t"
            lines.append(f"lop3.b32 v, {source}, 0x000f000f, {pairs:#x}, 0xEA;")
            lines.append(f"sub.rn.{dtype}x2 v, v, z;")
            lines.append(f"mul.rn.{dtype}x2 ${4 * word + i}, v, {scale};")
    return gl.constexpr("{" + "\n".join(lines) + "}")


def _lookup(pack: str) -> gl.constexpr:
    """The same for numbers of a table, with scales in fp32. Each lane of a half warp holds one number of the table
    ($12). A number is fetched from its lane, multiplied in fp32, and rounded once. Bytes hold their first number in the
    high half, so columns i and i + 4 of a word are its numbers i ^ 1 and (i ^ 1) + 4."""
    lines = [".reg .b32 t;", ".reg .f32 low, high;", ".reg .f32 v;"]
    for half in range(2):
        for i in range(4):
            for number, name in ((i ^ 1, "low"), ((i ^ 1) + 4, "high")):
                lines.append(f"shr.u32 t, ${8 + half}, {4 * number};")
                lines.append("shfl.sync.idx.b32 v, $12, t, 0x100f, 0xffffffff;")
                lines.append(f"mul.rn.f32 {name}, v, ${10 + half};")
            lines.append(f"{pack} ${4 * half + i}, high, low;")
    return gl.constexpr("{" + "\n".join(lines) + "}")


_TO_BF16, _TO_FP16 = _conversion(_MAGIC_BF16, "bf16", False), _conversion(_MAGIC_FP16, "f16", False)
_ZEROS_TO_BF16, _ZEROS_TO_FP16 = _conversion(_MAGIC_BF16, "bf16", True), _conversion(_MAGIC_FP16, "f16", True)
_MARLIN_TO_BF16 = _conversion(_MAGIC_BF16, "bf16", False, True)
_MARLIN_TO_FP16 = _conversion(_MAGIC_FP16, "f16", False, True)
_MARLIN_ZEROS_TO_BF16 = _conversion(_MAGIC_BF16, "bf16", True, True)
_MARLIN_ZEROS_TO_FP16 = _conversion(_MAGIC_FP16, "f16", True, True)
_TABLE_TO_BF16 = _lookup("cvt.rn.bf16x2.f32")
_TABLE_TO_FP16 = _lookup("cvt.rn.f16x2.f32")
_REGISTERS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")
_TABLE_REGISTERS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r")


_in_word_order = gluon.jit(in_word_order.fn)


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
def _converted(words, scale, table, DTYPE: gl.constexpr, MARLIN: gl.constexpr, MMA: gl.constexpr):
    """Words [N, 8] with scales [N, 1] or [N, 8], as the left operand [N, 64] of a product with this layout.

    A thread's registers hold words of two rows in turn, the second eight rows below the first. A converted pair of
    numbers fills a register. So the PTX takes two words at a time, and its results for each are separate tensors.
    MARLIN: see _take_words. table: see _own_number. It is read where scales are fp32.
    """
    HEIGHT: gl.constexpr = words.shape[0]
    BY_TABLE: gl.constexpr = scale.dtype == gl.float32
    WITH_ZEROS: gl.constexpr = scale.dtype == gl.int32
    if BY_TABLE:
        operands = [words, scale.broadcast_to(words.shape), table]
    elif WITH_ZEROS:
        operands = [words, scale.broadcast_to(words.shape)]
    else:
        bits = scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        operands = [words, (bits | (bits << 16)).broadcast_to(words.shape)]
    plain_to_bf16: gl.constexpr = _MARLIN_TO_BF16 if MARLIN else _TO_BF16
    plain_to_fp16: gl.constexpr = _MARLIN_TO_FP16 if MARLIN else _TO_FP16
    zeros_to_bf16: gl.constexpr = _MARLIN_ZEROS_TO_BF16 if MARLIN else _ZEROS_TO_BF16
    zeros_to_fp16: gl.constexpr = _MARLIN_ZEROS_TO_FP16 if MARLIN else _ZEROS_TO_FP16
    to_bf16: gl.constexpr = _TABLE_TO_BF16 if BY_TABLE else zeros_to_bf16 if WITH_ZEROS else plain_to_bf16
    to_fp16: gl.constexpr = _TABLE_TO_FP16 if BY_TABLE else zeros_to_fp16 if WITH_ZEROS else plain_to_fp16
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        to_bf16 if DTYPE.is_bf16() else to_fp16,
        _TABLE_REGISTERS if BY_TABLE else _REGISTERS,
        operands,
        (DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value),
        is_pure=True,
        pack=2,
    )
    low = gl.join(gl.join(a0, b0), gl.join(a1, b1))
    high = gl.join(gl.join(a2, b2), gl.join(a3, b3))
    w = gl.join(low, high).reshape((HEIGHT // 16, 2, 8, 2, 4, 2, 2, 2))
    w = w.permute((0, 7, 2, 3, 5, 6, 4, 1) if MARLIN else (0, 5, 2, 3, 7, 6, 4, 1)).reshape((HEIGHT, 64))
    return gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _own_number(weight, KEPT: gl.constexpr, MMA: gl.constexpr):
    """With a table, a tensor in the shape of the words that are converted: all elements in a thread are the thread's
    number of the table. Otherwise 0."""
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    if gl.float32 == KEPT:
        none = gl.zeros((_HEIGHT, 8), gl.int32, layout)
        lane = gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [none], gl.int32, is_pure=True, pack=1)
        return gl.load(weight.table + (lane & 15))
    else:
        return 0


class _Ring(NamedTuple):
    """Slots for a step: the words of one or two weights, and x in tiles of 64 columns. Each slot has two barriers: it
    is full, and it has been read."""

    words: tuple[gl.shared_memory_descriptor, ...]
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


@gluon.jit
def _ring(x_desc, descs, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES steps, with barriers that are ready."""
    SHAPE: gl.constexpr = descs[0].block_type.shape
    UNITS: gl.constexpr = SHAPE[1] // (4 if len(SHAPE) == 3 else 8)
    words, x = room_for_weights(descs, SHAPE[0], STAGES), room_for(x_desc, BLOCK_M, UNITS * STAGES)
    ring = _Ring(words, x, barriers(STAGES), barriers(STAGES))
    for slot in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(slot), count=2)  # words and x arrive separately
        mbarrier.init(ring.read.index(slot), count=2)
    fence_async_shared()
    return ring


@gluon.jit
def _load_rows(desc, row, rows, step, first, ring):
    """Let TMA load x of a step, from `row` on, after its words.

    TMA is slower for rows outside of the tensor, so the first rows are loaded again instead of them.
    """
    STAGES: gl.constexpr = ring.full.shape[0]
    HEIGHT: gl.constexpr = desc.block_type.shape[0]
    LOADS: gl.constexpr = ring.x.shape[1] // HEIGHT
    UNITS: gl.constexpr = ring.x.shape[0] // STAGES
    parts = reinterpret(ring.x, desc.dtype, [UNITS * STAGES * LOADS, HEIGHT, _UNIT], desc.layout)
    slot = step % STAGES
    mbarrier.expect(ring.full.index(slot), UNITS * LOADS * desc.block_type.nbytes)
    for i in gl.static_range(UNITS * LOADS):
        of_part = row + i % LOADS * HEIGHT
        of_part = gl.where(of_part < rows, of_part, 0)
        where = [of_part, ((first + step) * UNITS + i // LOADS) * _UNIT]
        async_load(desc, where, ring.full.index(slot), parts.index(slot * UNITS * LOADS + i))


@gluon.jit
def _load(x_desc, w_descs, row, rows, col, first, count, ring, PREFETCH: gl.constexpr):
    """Load the operands of `count` steps from step `first`, with the words of PREFETCH steps before x is ready."""
    for step in range(gl.minimum(count, PREFETCH)):
        load_weights(w_descs, col, step, first, ring.words, ring.full, ring.read)
    gdc_wait()
    for step in range(count):
        _load_rows(x_desc, row, rows, step, first, ring)
        if step + PREFETCH < count:
            load_weights(w_descs, col, step + PREFETCH, first, ring.words, ring.full, ring.read)


@gluon.jit
def _stored(row, MARLIN: gl.constexpr):
    """Where the scale of a tile's row is, in which word its zero is, and at which place of the word. MARLIN: for the
    rows of _take_words and the order of FourBitWeight."""
    if MARLIN:
        high, low = row >> 4, row >> 3 & 1
        return high * 16 + (row & 7) * 2 + low, high * 2 + (row >> 2 & 1), low * 4 + (row & 3)
    else:
        return row, row >> 3, row & 7


@gluon.jit
def _load_scales(weight, col, first, depth, GROUP: gl.constexpr, GROUPS: gl.constexpr, MARLIN: gl.constexpr):
    """The scales [GROUPS, 64] of a tile's rows, from column `first` on; fp32 where they are nested. With zeros int32:
    the scale's bits, and in the high half the bits of magic + zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, gl.num_warps()], [0, 1])
    group = first // GROUP + gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
    row = col + gl.arange(0, _HEIGHT, gl.SliceLayout(0, layout))
    group, row = gl.minimum(group, depth // GROUP - 1), gl.minimum(row, weight.cols - 1)
    row, zero_row, place = _stored(row, MARLIN)
    found = gl.load(weight.scale + row[None, :] * weight.scale_row + group[:, None] * weight.scale_column)
    if weight.scale.dtype.element_ty == gl.uint8:
        outer = (row[None, :] * (depth // GROUP) + group[:, None]) // _NESTED_BLOCK
        found = gl.load(weight.code + found.to(gl.int32)) * gl.load(weight.outer + outer) + gl.load(weight.offset)
    if weight.zero.dtype.element_ty == gl.int32:
        magic: gl.constexpr = _MAGIC_BF16 if weight.scale.dtype.element_ty == gl.bfloat16 else _MAGIC_FP16
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
    if GROUP % _UNIT:
        other = groups.index((column + _UNIT // 2) // GROUP - first // GROUP).load(gl.SliceLayout(1, layout))[:, None]
        halves = gl.join(scale.broadcast_to((_HEIGHT, 4)), other.broadcast_to((_HEIGHT, 4)))
        scale = gl.convert_layout(halves.permute((0, 2, 1)).reshape((_HEIGHT, 8)), layout)
    return scale


@gluon.jit
def _scales(kept, first, column, GROUP: gl.constexpr, MMA: gl.constexpr):
    """The scales of the 64 columns from `column` on and of the next 64."""
    left = _scale(kept, first, column, GROUP, MMA)
    right = left
    if GROUP % (2 * _UNIT):
        right = _scale(kept, first, column + _UNIT, GROUP, MMA)
    return left, right


@gluon.jit
def _halves(words, WIDTH: gl.constexpr, MMA: gl.constexpr):
    """Words [64, 2 * WIDTH] as the left half of their columns and the right one."""
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    left, right = words.reshape((_HEIGHT, 2, WIDTH)).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _take_words(tiles, place, MMA: gl.constexpr):
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
        own = reinterpret(tiles, tiles.dtype, [2 * tiles.shape[0], WIDTH // 2, 128], _IN_ROWS)
        words = own.index(place).load(_marlin_lanes(WIDTH // 2)).reshape((WIDTH // 4, 2, 4, 2, 4, 4))
        words = words.permute((2, 1, 3, 5, 0, 4)).reshape((_HEIGHT, WIDTH))
        words = gl.convert_layout(words, layout, assert_trivial=True)
    else:
        STEPS: gl.constexpr = tiles.shape[0] * tiles.shape[1] // _HEIGHT
        own = reinterpret(tiles, tiles.dtype, [STEPS, _HEIGHT, WIDTH], tiles.layout)
        words = own.index(place).load(layout)
    if WIDTH == 16:
        return (words,)
    else:
        return _halves(words, 16, MMA)


@gluon.constexpr_function
def _marlin_lanes(tiles):
    """Which words [tiles, 128] of 64 rows and of 16 columns each the threads load: see _take_words."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << bit, 0] for bit in range(4) if tiles >> bit > 1],
        lane_bases=[[0, 4], [0, 8], [0, 1], [0, 2], [0, 16]],
        warp_bases=[[0, 32], [0, 64]],
        block_bases=[],
        shape=[tiles, 128],
    )


@gluon.jit
def _in_order(total, MARLIN: gl.constexpr):
    """The sums [64, BLOCK_M] of a tile's rows, in the order of the weight's rows."""
    if MARLIN:
        total = total.reshape((4, 2, 2, 4, total.shape[1])).permute((3, 1, 0, 2, 4)).reshape(total.shape)
    return total


@gluon.jit
def _multiply_split(ring, kept, weight, col, first, count, depth, GROUP: gl.constexpr, HALF: gl.constexpr):
    """The sum [64, BLOCK_M] of a half of the tile's rows, over `count` steps from step `first`.

    A product runs while the next product's words are converted. If it ran on into the next step, the compiler would
    make each product wait, because two groups of warps multiply.
    """
    BLOCK_M: gl.constexpr = ring.x.shape[1]
    STAGES: gl.constexpr = ring.full.shape[0]
    UNITS: gl.constexpr = ring.x.shape[0] // STAGES
    MARLIN: gl.constexpr = len(ring.words[0].shape) == 4
    kind: gl.constexpr = ring.x.dtype
    acc = zeros(BLOCK_M, _HEIGHT, True)
    mma: gl.constexpr = acc.type.layout
    kept.store(_load_scales(weight, col, first * UNITS * _UNIT, depth, GROUP, kept.shape[0], MARLIN))
    table = _own_number(weight, kept.dtype, mma)
    debug_barrier()
    w0 = gl.zeros((_HEIGHT, _UNIT), kind, gl.DotOperandLayout(0, mma, 2))
    w1 = w0
    for step in range(count):
        slot = step % STAGES
        await_full(ring.full, step)
        words = _take_words(ring.words[0], 2 * slot + HALF, mma)
        for i in gl.static_range(UNITS // 2):
            left, right = _halves(words[i], 8, mma)
            column = ((first + step) * UNITS + 2 * i) * _UNIT
            scale0, scale1 = _scales(kept, first * UNITS * _UNIT, column, GROUP, mma)
            w0 = _converted(left, scale0, table, kind, MARLIN, mma)
            acc = warpgroup_mma(w0, ring.x.index(slot * UNITS + 2 * i).permute((1, 0)), acc, is_async=True)
            acc, w0, w1 = warpgroup_mma_wait(1, deps=[acc, w0, w1])
            w1 = _converted(right, scale1, table, kind, MARLIN, mma)
            acc = warpgroup_mma(w1, ring.x.index(slot * UNITS + 2 * i + 1).permute((1, 0)), acc, is_async=True)
            if i + 1 < UNITS // 2:
                acc, w0, w1 = warpgroup_mma_wait(1, deps=[acc, w0, w1])
        acc, w0, w1 = warpgroup_mma_wait(0, deps=[acc, w0, w1])
        give_back(ring.read, step)
    return _in_order(acc, MARLIN)


@gluon.jit
def _half_of_linear(
    ring,
    kept,
    tile,
    out,
    bias_cols,
    col,
    rows,
    first,
    count,
    depth,
    GROUP: gl.constexpr,
    BIASED: gl.constexpr,
    HALF: gl.constexpr,
):
    """A group of warps of linear_kernel: multiplies a half of the tile's rows, and stores."""
    col += HALF * _HEIGHT
    total = _multiply_split(ring, kept.index(HALF), tile.weight, col, first, count, depth, GROUP, HALF)
    if HALF == 0:
        gdc_launch_dependents()  # after the wait: attention relies on that (runtime/overlap.py)
    bias_ptr = tile.bias if BIASED else None
    store(total, out, bias_ptr, col, rows, bias_cols, tile.weight.cols, ring.x.shape[1], _HEIGHT, True)


@gluon.jit
def _first_row(rows, BLOCK_M: gl.constexpr):
    """The first row of this program's tile. The last tile overlaps the one before it: both store the same."""
    row = gl.program_id(0) * BLOCK_M
    if rows > BLOCK_M:
        row = gl.minimum(row, rows - BLOCK_M)
    return row


@gluon.constexpr_function
def _kept_dtype(scale, zero, kind):
    """The dtype of what _load_scales returns for scales and zeros of these dtypes."""
    if zero == gl.int32:
        return gl.int32
    return kind if scale == kind else gl.float32


@gluon.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    w3_desc,
    columns,
    biases,
    out,
    rows,
    depth,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (row tiles, column tiles of all weights, splits): a program makes one split of one tile of one product.

    As hopper.linear_kernel. Every split must have a step.
    """
    row, split = _first_row(rows, BLOCK_M), gl.program_id(2)
    descs = (w0_desc, w1_desc, w2_desc, w3_desc)
    of_tiles = biases if biases is not None else (0, 0, 0, 0)
    tile = tile_of(gl.program_id(1), columns, descs, of_tiles, out.ptr, 2 * _HEIGHT)
    col = tile.number * 2 * _HEIGHT
    first, count = steps_of(split, depth, BLOCK_K, SPLITS)
    ring = _ring(x_desc, (tile.desc,), BLOCK_M, STAGES)
    KEPT: gl.constexpr = _kept_dtype(columns[0].scale.dtype.element_ty, columns[0].zero.dtype.element_ty, x_desc.dtype)
    kept = gl.allocate_shared_memory(KEPT, [2, GROUPS, _HEIGHT], _IN_ROWS)
    out_rows = Rows(tile.out_ptr + (split.to(gl.int64) * rows + row) * out.row, out.row)
    BIASED: gl.constexpr = biases is not None
    bias_cols = gl.where(split == 0, tile.weight.cols, 0)
    # fmt: off
    gl.warp_specialize([
        (_half_of_linear, (ring, kept, tile, out_rows, bias_cols, col, rows - row, first, count, depth, GROUP, BIASED,
                           0)),
        (_half_of_linear, (ring, kept, tile, out_rows, bias_cols, col, rows - row, first, count, depth, GROUP, BIASED,
                           1)),
        (_load, (x_desc, (tile.desc,), row, rows, col, first, count, ring, PREFETCH)),
    ], [4, 1], [_MULTIPLIER, _LOADER])
    # fmt: on


@gluon.jit
def _multiply_both(ring, gate_kept, up_kept, gate, up, col, count, depth, GROUP: gl.constexpr, HALF: gl.constexpr):
    """As _multiply_split for gate and up, in turn."""
    BLOCK_M: gl.constexpr = ring.x.shape[1]
    STAGES: gl.constexpr = ring.full.shape[0]
    UNITS: gl.constexpr = ring.x.shape[0] // STAGES
    MARLIN: gl.constexpr = len(ring.words[0].shape) == 4
    kind: gl.constexpr = ring.x.dtype
    gates = zeros(BLOCK_M, _HEIGHT, True)
    ups = gates
    mma: gl.constexpr = gates.type.layout
    of_gate = _load_scales(gate, col, 0, depth, GROUP, gate_kept.shape[0], MARLIN)
    of_up = _load_scales(up, col, 0, depth, GROUP, up_kept.shape[0], MARLIN)
    gate_kept.store(of_gate)
    up_kept.store(of_up)
    gate_table, up_table = _own_number(gate, gate_kept.dtype, mma), _own_number(up, up_kept.dtype, mma)
    debug_barrier()
    w0 = gl.zeros((_HEIGHT, _UNIT), kind, gl.DotOperandLayout(0, mma, 2))
    w1 = w0
    for step in range(count):
        slot = step % STAGES
        place = 2 * slot + HALF
        await_full(ring.full, step)
        gate_words, up_words = _take_words(ring.words[0], place, mma), _take_words(ring.words[1], place, mma)
        for i in gl.static_range(UNITS // 2):
            x0 = ring.x.index(slot * UNITS + 2 * i).permute((1, 0))
            x1 = ring.x.index(slot * UNITS + 2 * i + 1).permute((1, 0))
            column = (step * UNITS + 2 * i) * _UNIT
            left, right = _halves(gate_words[i], 8, mma)
            scale0, scale1 = _scales(gate_kept, 0, column, GROUP, mma)
            w0 = _converted(left, scale0, gate_table, kind, MARLIN, mma)
            gates = warpgroup_mma(w0, x0, gates, is_async=True)
            gates, ups, w0, w1 = warpgroup_mma_wait(1, deps=[gates, ups, w0, w1])
            w1 = _converted(right, scale1, gate_table, kind, MARLIN, mma)
            gates = warpgroup_mma(w1, x1, gates, is_async=True)
            gates, ups, w0, w1 = warpgroup_mma_wait(1, deps=[gates, ups, w0, w1])
            left, right = _halves(up_words[i], 8, mma)
            scale0, scale1 = _scales(up_kept, 0, column, GROUP, mma)
            w0 = _converted(left, scale0, up_table, kind, MARLIN, mma)
            ups = warpgroup_mma(w0, x0, ups, is_async=True)
            gates, ups, w0, w1 = warpgroup_mma_wait(1, deps=[gates, ups, w0, w1])
            w1 = _converted(right, scale1, up_table, kind, MARLIN, mma)
            ups = warpgroup_mma(w1, x1, ups, is_async=True)
            if i + 1 < UNITS // 2:
                gates, ups, w0, w1 = warpgroup_mma_wait(1, deps=[gates, ups, w0, w1])
        gates, ups, w0, w1 = warpgroup_mma_wait(0, deps=[gates, ups, w0, w1])
        give_back(ring.read, step)
    return _in_order(gates, MARLIN), _in_order(ups, MARLIN)


@gluon.jit
def _half_of_swiglu(
    ring,
    kept,
    gate,
    up,
    out,
    col,
    rows,
    count,
    depth,
    GROUP: gl.constexpr,
    GELU_TANH: gl.constexpr,
    IN_WORD_ORDER: gl.constexpr,
    HALF: gl.constexpr,
):
    """The same for swiglu_kernel."""
    col += HALF * _HEIGHT
    gate_kept, up_kept = kept.index(2 * HALF), kept.index(2 * HALF + 1)
    gates, ups = _multiply_both(ring, gate_kept, up_kept, gate, up, col, count, depth, GROUP, HALF)
    product = swiglu(gates, ups, ring.x.dtype, GELU_TANH).permute((1, 0))
    if IN_WORD_ORDER:
        product = _in_word_order(product)
    store(product, out, None, col, rows, gate.cols, gate.cols, ring.x.shape[1], _HEIGHT, False)


@gluon.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    x_desc,
    gate_desc,
    up_desc,
    gate,
    up,
    out,
    rows,
    depth,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    GELU_TANH: gl.constexpr,
    IN_WORD_ORDER: gl.constexpr,
):
    """Grid (row tiles, column tiles): a program makes one tile of both products and multiplies them. IN_WORD_ORDER:
    store the columns of `out` in the order of words."""
    row = _first_row(rows, BLOCK_M)
    col, count = gl.program_id(1) * 2 * _HEIGHT, gl.cdiv(depth, BLOCK_K)
    descs = (gate_desc, up_desc)
    ring = _ring(x_desc, descs, BLOCK_M, STAGES)
    KEPT: gl.constexpr = _kept_dtype(gate.scale.dtype.element_ty, gate.zero.dtype.element_ty, x_desc.dtype)
    kept = gl.allocate_shared_memory(KEPT, [4, GROUPS, _HEIGHT], _IN_ROWS)
    out_rows = Rows(out.ptr + row.to(gl.int64) * out.row, out.row)
    gdc_launch_dependents()
    # fmt: off
    gl.warp_specialize([
        (_half_of_swiglu, (ring, kept, gate, up, out_rows, col, rows - row, count, depth, GROUP, GELU_TANH,
                           IN_WORD_ORDER, 0)),
        (_half_of_swiglu, (ring, kept, gate, up, out_rows, col, rows - row, count, depth, GROUP, GELU_TANH,
                           IN_WORD_ORDER, 1)),
        (_load, (x_desc, descs, row, rows, col, 0, count, ring, PREFETCH)),
    ], [4, 1], [_MULTIPLIER, _LOADER])
    # fmt: on


def takes(x: Tensor | WordOrdered, weights: Sequence[FourBitWeight]) -> bool:
    """Whether the kernels of this file can multiply rows x [..., K] by these weights in one launch."""
    first, in_a_program, rows = weights[0], 2 if len(weights) == 2 else 1, x.shape[:-1].numel()
    scales = in_a_program * BLOCK_N * groups_of(x.shape[-1], first.group) * _item_of(first)
    return (
        compute_capability(x.device) == (9, 0)
        and 0 < rows <= MAX_ORDERED_ROWS
        and scales <= (_MAX_SCALES if rows <= FEW_ROWS else _MAX_SCALES_OF_MANY)
        and all(reads(weight, x.dtype) for weight in weights)
        and len({(weight.packing, weight.group, weight.scale.dtype, weight.zero is None) for weight in weights}) == 1
    )


def reads(weight: FourBitWeight, dtype: torch.dtype) -> bool:
    """Whether the kernels read such a weight for products of rows of this dtype."""
    marlin = weight.packing is Packing.MARLIN and weight.table is None and weight.has_whole_units
    if dtype not in (torch.bfloat16, torch.float16) or weight.packed.data_ptr() % 16:
        return False
    if not (weight.reads_word_order or marlin):
        return False
    if weight.table is None:
        return weight.scale.dtype == dtype
    known = torch.float32 if weight.nested is None else torch.uint8
    nested = weight.nested is None or (weight.nested.block == _NESTED_BLOCK.value and weight.scale.is_contiguous())
    return weight.scale.dtype == known and nested


def settings_for(rows: int, cols: tuple[int, ...], depth: int, fused: bool) -> Streaming:
    """Settings for the product of up to MAX_ORDERED_ROWS rows with weights [n, depth] for n in `cols`.

    Up to FEW_ROWS rows splits of K do not depend on their number, so the bits of a row do not either.
    """
    programs, splits = tiles_of(cols, BLOCK_N, fused), 1
    if rows > FEW_ROWS:
        programs *= triton.cdiv(rows, block_m_of(rows))
    while not fused and splits < 4 and programs * splits * 2 <= MULTIPROCESSORS and depth >= 1024 * splits:
        splits *= 2
    wide = depth % (256 * splits) == 0 and rows <= FEW_ROWS  # the same splits as in steps of 128
    stages = 6 if not wide else 2 if fused or rows > 32 else 3
    return Streaming(BLOCK_N, 256 if wide else 128, splits, True, stages, stages, 4)


def fitted(settings: Streaming, rows: int, depth: int, weights: int, group: int, item: int) -> Streaming:
    """The settings with only as many stages as shared memory has room for, and with block_k 128 if there is no room for
    two stages of 256. A program multiplies by `weights` weights. item: bytes of a scale that is kept. Raises ValueError
    for settings for which the kernels have no tiles."""
    known = settings.block_n == BLOCK_N and settings.block_k in (128, 256) and depth % settings.block_k == 0
    if not known or (settings.splits - 1) * columns_of(depth, settings) >= depth:
        raise ValueError(
            f"settings for weights of four bits need block_n {BLOCK_N}, block_k 128 or 256 that divides K = {depth}, "
            f"and a step for every split, got {settings}"
        )
    block_m = block_m_of(rows)
    slot = (BLOCK_N * weights + 4 * block_m) * settings.block_k // 2
    of_scales = BLOCK_N * weights * groups_of(columns_of(depth, settings), group) * item
    to_store = 4 * BLOCK_N * block_m if rows > FEW_ROWS else 4 * _HEIGHT.value * block_m
    stages = min(settings.w_stages, (_SHARED_MEMORY - of_scales - to_store) // slot)
    if stages < 2 and settings.block_k > 128:
        return fitted(settings._replace(block_k=128), rows, depth, weights, group, item)
    return settings._replace(w_stages=stages, x_stages=stages)


def columns_of(depth: int, settings: Streaming) -> int:
    """The most columns that a program multiplies."""
    return triton.cdiv(triton.cdiv(depth, settings.block_k), settings.splits) * settings.block_k


def _item_of(weight: FourBitWeight) -> int:
    """Bytes of one of its scales as they are kept."""
    return 2 if weight.table is None and weight.zero is None else 4


def linear_hopper_four_bits(
    x: Tensor,
    weights: Sequence[FourBitWeight],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
) -> None:
    """x @ weight.T + bias, as few_rows.linear_few_rows; see linear_kernel. x: [rows, K] as the weights read it.
    four_bits.py has checked the arguments."""
    rows, depth = x.shape
    settings, block_m = fitted(settings, rows, depth, 1, weights[0].group, _item_of(weights[0])), block_m_of(rows)
    grid = triton.cdiv(rows, block_m), tiles_of(cols, BLOCK_N), settings.splits
    overlapped_on_hopper(linear_kernel, grid)(
        descriptor(x, min(block_m, _ROWS_OF_A_LOAD), _UNIT.value),
        *(_words(weight, settings) for weight in weights),
        *[None] * (4 - len(weights)),
        tuple(_columns(n, weight) for n, weight in zip(cols, weights, strict=True)),
        None if biases[0] is None else tuple(biases),
        Rows.of(out),
        rows,
        depth,
        block_m,
        settings.block_k,
        weights[0].group,
        settings.splits,
        settings.w_stages,
        groups_of(columns_of(depth, settings), weights[0].group),
        prefetch_stages(settings),
        num_warps=4,
        maxnreg=_STARTING_REGISTERS,
    )


def linear_swiglu_hopper_four_bits(
    x: Tensor,
    gate: FourBitWeight,
    up: FourBitWeight,
    out: Tensor | WordOrdered,
    settings: Streaming,
    activation: str = "silu",
) -> None:
    """act(x @ gate.T) * (x @ up.T) as `out` [rows, I]. x: [rows, K] as the weights read it. four_bits.py has checked
    the arguments."""
    rows, depth = x.shape
    settings, block_m = fitted(settings, rows, depth, 2, gate.group, _item_of(gate)), block_m_of(rows)
    overlapped_on_hopper(swiglu_kernel, (triton.cdiv(rows, block_m), triton.cdiv(len(gate), BLOCK_N)))(
        descriptor(x, min(block_m, _ROWS_OF_A_LOAD), _UNIT.value),
        _words(gate, settings),
        _words(up, settings),
        _columns(len(gate), gate),
        _columns(len(up), up),
        Rows.of(out.values if isinstance(out, WordOrdered) else out),
        rows,
        depth,
        block_m,
        settings.block_k,
        gate.group,
        settings.w_stages,
        groups_of(columns_of(depth, settings), gate.group),
        prefetch_stages(settings),
        activation == "gelu_tanh",
        isinstance(out, WordOrdered),
        num_warps=4,
        maxnreg=_STARTING_REGISTERS,
    )


def block_m_of(rows: int) -> int:
    """Rows of x in a tile, which is the tensor cores' right operand."""
    return min(max(16, triton.next_power_of_2(rows)), 128)


def groups_of(columns: int, group: int) -> int:
    """The number of groups, a power of two, for which a program that multiplies `columns` columns keeps scales."""
    return triton.next_power_of_2(triton.cdiv(columns, group) + (columns % group > 0))


def prefetch_stages(settings: Streaming) -> int:
    """Steps for which words are in flight before x is ready."""
    return min(settings.w_stages - 1, 3)


def words_layout(settings: Streaming) -> gl.NVMMASharedLayout:
    """The layout of a tile of words. A row has 16 or 32 words."""
    return gl.NVMMASharedLayout(swizzle_byte_width=settings.block_k // 2, element_bitwidth=32, rank=2)


def _words(weight: FourBitWeight, settings: Streaming) -> TensorDescriptor:
    if weight.packing is Packing.MARLIN:
        tiles = weight.packed.view(-1, len(weight) // 64, 128).transpose(0, 1)
        return TensorDescriptor(tiles, list(tiles.shape), list(tiles.stride()), marlin_block(settings), MARLIN_LAYOUT)
    return descriptor(weight.packed, BLOCK_N, settings.block_k // 8, words_layout(settings))


def marlin_block(settings: Streaming) -> list[int]:
    """The shape of a tile of Marlin's words."""
    return [BLOCK_N // 64, settings.block_k // 16, 128]


def _columns(cols: int, weight: FourBitWeight) -> FourBitColumns:
    code, outer, offset = (weight.scale,) * 3 if weight.nested is None else weight.nested.tensors
    table = weight.scale if weight.table is None else weight.table
    zero = weight.scale if weight.zero is None else weight.zero
    row, column = weight.scale.stride()
    zero_row, zero_column = zero.stride()
    scales = weight.scale, row, column, zero, zero_row, zero_column
    return FourBitColumns(cols, *scales, table, code, outer, offset)
