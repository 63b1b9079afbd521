"""Products with weights of eight bits on Hopper, converted to 16 bits on their way to the tensor cores.

    linear_kernel:  out = x @ weight.T (+ bias), up to four weights side by side; the product, or its split sums
                    out = silu(x @ gate.T) * (x @ up.T)

For more rows than hopper_fp8_few_rows.py takes, and for fp16. One warp of a program only loads, through TMA into a ring
of shared memory, and two warpgroups only convert and multiply. The weights are the left operand. They are converted
exactly between shared memory and the registers that the tensor cores read; while these multiply 64 columns, the next
are converted. Scales of rows are applied to the sums. Scales of blocks are fp32 and multiplied into the weights, which
rounds them. A tile of gate and up has eight rows of each in turn, so a thread has both numbers of a result.

Programs stay and make one tile of the output after another, so the next tile's operands are loaded while one is stored.
The last tiles are half as high where that ends sooner. So are tiles of the last rows if these fit: see whole_tiles.
Needs Triton 3.6.

| name         | shape                           | dtype, layout                                           |
|--------------|---------------------------------|---------------------------------------------------------|
| x            | [rows, K]                       | bf16 or fp16, rows 16-byte aligned                      |
| weights      | [N, K / 2]                      | pairs of e4m3 as int16, rows 16-byte aligned            |
| scales       | [N or 1, 1], [N / 128, K / 128] | fp32 or bf16                                            |
| bias         | [N]                             | as x                                                    |
| out          | [rows, N], [splits, rows, N]    | as x; fp32 if the splits' sums stay apart               |

Pairs of e4m3 would be slower here, since they are two products: docs/speed-notes.md, "FP8 weights".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from eagle_triton.ops.linear.gluon_tiles import (
    await_full,
    await_read,
    barriers,
    block_scale,
    descriptor,
    give_back,
    room_for,
    scaled,
    steps_of,
    store,
    swiglu,
    tile_of,
    zeros,
)
from eagle_triton.ops.linear.settings import MAX_STREAMED, MULTIPROCESSORS, Streaming, tiles_of
from eagle_triton.ops.linear.weights import ScaledColumns
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.gluon import (
    TensorDescriptor,
    async_load,
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
from eagle_triton.runtime.gpu import multiprocessors_of
from eagle_triton.runtime.overlap import overlapped_on_hopper

BLOCK_N = 128  # rows of weights of a tile: two warpgroups multiply 64 each
BLOCK_K = 128  # columns of a step and of a block of scales; a slot has half, because 128 would not fit in registers
MAX_BLOCK_M = 256  # rows of x of the highest tile
EACH = 8  # rows of gate, and then of up, in a tile of both
WARPS = 8
WEIGHT_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
_HEIGHT = gl.constexpr(BLOCK_N)
_STEP = gl.constexpr(BLOCK_K)
_UNIT = gl.constexpr(BLOCK_K // 2)  # columns of a slot
_HIGHEST = gl.constexpr(MAX_BLOCK_M)
_STORED = gl.constexpr(32)  # rows of x that are stored at a time: shared memory holds the ring, too
_REGISTERS = 168  # of a thread, before the loading warp gives its own away: a program has a multiprocessor to itself
_LOADER = gl.constexpr(24)  # registers of a thread of the loading warp
_FUSED_LOADER = gl.constexpr(32)  # the same where it loads from two weights
_ROWS_OF_A_LOAD = 32  # a tile of x that ends past x's last row comes in loads of this height
_PROGRAMS = 256  # K is split until there are this many programs, two to a multiprocessor


def _conversion(pack: str, scaled: bool) -> gl.constexpr:
    """PTX that converts two pairs of e4m3 numbers ($2), one pair to a row, to two pairs ($0, $1) of fp16 or bf16.

    It is exact, because fp16 and fp32 hold every e4m3 number; with scales of both rows ($3, $5) each number is rounded
    once. `pack` makes a pair of two fp32 numbers; it is "" for fp16 without a scale.
    """
    lines = [
        ".reg .b16 upper, lower, first, second;",
        ".reg .b32 pair;",
        ".reg .f32 x, y;",
        "mov.b32 {upper, lower}, $2;",
    ]
    for out, half, scale in (("$0", "upper", "$3"), ("$1", "lower", "$5")):
        if not pack:
            lines.append(f"cvt.rn.f16x2.e4m3x2 {out}, {half};")
            continue
        lines += [f"cvt.rn.f16x2.e4m3x2 pair, {half};", "mov.b32 {first, second}, pair;"]
        lines += ["cvt.f32.f16 x, first;", "cvt.f32.f16 y, second;"]
        if scaled:
            lines += [f"mul.f32 x, x, {scale};", f"mul.f32 y, y, {scale};"]
        lines.append(f"{pack} {out}, y, x;")
    return gl.constexpr("{" + "\n".join(lines) + "}")


_TO_BF16 = _conversion("cvt.rn.bf16x2.f32", False)
_TO_FP16 = _conversion("", False)
_TO_SCALED_BF16 = _conversion("cvt.rn.bf16x2.f32", True)
_TO_SCALED_FP16 = _conversion("cvt.rn.f16x2.f32", True)


class _Ring(NamedTuple):
    """Slots for _UNIT columns of a tile of x and of one of weights, each with two barriers: it is full, it has been
    read."""

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


@gluon.jit
def _ring(x_desc, w_desc, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES slots, with barriers that are ready."""
    gl.static_assert(STAGES >= 2, "a slot is loaded while the one before it is read")
    x_tiles, w_tiles = room_for(x_desc, BLOCK_M, STAGES), room_for(w_desc, _HEIGHT, STAGES)
    full, read = barriers(STAGES), barriers(STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)  # x and the weights arrive separately
        mbarrier.init(read.index(slot), count=1)
    fence_async_shared()
    return _Ring(x_tiles, w_tiles, full, read)


class _Launch(NamedTuple):
    """What the programs of a launch make: products of `rows` rows with the weights (see tile_of) in `tiles` column
    tiles. The first `whole` of these are made in tiles of BLOCK_M rows, and with one half tile for the last rows if
    they fit. The others are made in half tiles only."""

    columns: tuple[ScaledColumns, ...]
    descs: tuple[TensorDescriptor | None, ...]
    biases: tuple[Tensor | int, ...]
    out: Rows
    rows: int
    depth: int
    scale_column: int
    tiles: int
    whole: int


class _OutputTile(NamedTuple):
    """A tile of the output: its first row and its height, its column tile, its split, and that split's first step and
    number of steps."""

    row: int
    height: int
    column: int
    split: int
    first: int
    steps: int


@gluon.jit
def _row_tiles(rows, height, BLOCK_M: gl.constexpr):
    """How many tiles of this height a column has. The last rows take no whole tile if they fit in half a tile."""
    if BLOCK_M == _HIGHEST:
        return (rows + (BLOCK_M // 2 - 1)) // height
    else:  # lower tiles are not halved
        return gl.cdiv(rows, height)


@gluon.jit
def _output_tiles(launch, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr):
    """The number of whole tiles of the output, of halves in columns without whole tiles, and of all tiles."""
    whole = launch.whole * _row_tiles(launch.rows, BLOCK_M, BLOCK_M) * SPLITS
    halves = (launch.tiles - launch.whole) * _row_tiles(launch.rows, BLOCK_M // 2, BLOCK_M) * SPLITS
    rests = launch.whole * (_row_tiles(launch.rows, BLOCK_M // 2, BLOCK_M) % 2) * SPLITS if BLOCK_M == _HIGHEST else 0
    return whole, halves, whole + halves + rests


@gluon.jit
def _output_tile(number, launch, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr):
    """Tile `number` of the output: whole tiles come first, the half tiles below them last. Otherwise tiles of the same
    columns are neighbours, so weights come from memory once.

    The last tile of rows overlaps the one before it: both store the same.
    """
    whole, halves, _ = _output_tiles(launch, BLOCK_M, SPLITS)
    height, top, begin, columns = BLOCK_M, 0, 0, launch.whole
    if number >= whole:
        height, begin, columns = BLOCK_M // 2, launch.whole, launch.tiles - launch.whole
        number -= whole
    row_tiles = _row_tiles(launch.rows, height, BLOCK_M)
    if BLOCK_M == _HIGHEST:
        is_rest = (height < BLOCK_M) & (number >= halves)
        if is_rest:
            top, row_tiles, begin, columns = launch.rows, 1, 0, launch.whole
            number -= halves
    row = gl.minimum(top + number % row_tiles * height, gl.maximum(launch.rows - height, 0))
    number = number // row_tiles
    split = number // columns
    first, steps = steps_of(split, launch.depth, _STEP, SPLITS)
    return _OutputTile(row, height, begin + number % columns, split, first, steps)


class _Weights(NamedTuple):
    """The weights of a tile of the output: their descriptors, the tile's first column of the product, what scales the
    upper eight of each 16 rows and what scales the lower eight, and where their bias and their output begin."""

    descs: tuple[TensorDescriptor, ...]
    col: int
    upper: ScaledColumns
    lower: ScaledColumns
    bias: Tensor | int
    out_ptr: Tensor


@gluon.jit
def _weights_at(column, launch, FUSED: gl.constexpr):
    if FUSED:
        gate, up = launch.columns
        return _Weights((launch.descs[0], launch.descs[1]), column * (_HEIGHT // 2), gate, up, 0, launch.out.ptr)
    else:
        tile = tile_of(column, launch.columns, launch.descs, launch.biases, launch.out.ptr, _HEIGHT)
        return _Weights((tile.desc,), tile.number * _HEIGHT, tile.weight, tile.weight, tile.bias, tile.out_ptr)


@gluon.jit
def _load_weights(descs, col, k, ring, step):
    """Let TMA load a tile of weights at (col, k) into its slot: with gate and up, some rows of each in turn."""
    STAGES: gl.constexpr = ring.full.shape[0]
    HEIGHT: gl.constexpr = descs[0].block_type.shape[0]
    LOADS: gl.constexpr = _HEIGHT // HEIGHT
    tiles = reinterpret(ring.w, descs[0].dtype, [STAGES * LOADS, HEIGHT, _UNIT // 2], descs[0].layout)
    slot = step % STAGES
    mbarrier.expect(ring.full.index(slot), LOADS * descs[0].block_type.nbytes)
    for i in range(LOADS // len(descs)):
        for j in gl.static_range(len(descs)):
            place = tiles.index(slot * LOADS + i * len(descs) + j)
            async_load(descs[j], [col + i * HEIGHT, k // 2], ring.full.index(slot), place)


@gluon.jit
def _load_rows(desc, tile, rows, k, ring, step):
    """The same for a tile of x.

    TMA is slower for rows outside of the tensor, so the first rows are loaded again instead of them.
    """
    STAGES: gl.constexpr = ring.full.shape[0]
    HEIGHT: gl.constexpr = desc.block_type.shape[0]
    LOADS: gl.constexpr = ring.x.shape[1] // HEIGHT
    tiles = reinterpret(ring.x, desc.dtype, [STAGES * LOADS, HEIGHT, _UNIT], desc.layout)
    slot = step % STAGES
    full, halved = ring.full.index(slot), tile.height < ring.x.shape[1]
    mbarrier.expect(full, LOADS * desc.block_type.nbytes, pred=halved == 0)
    mbarrier.expect(full, LOADS // 2 * desc.block_type.nbytes, pred=halved)
    for i in gl.static_range(LOADS):
        row = tile.row + i * HEIGHT
        row = gl.where(row < rows, row, 0)
        async_load(desc, [row, k], full, tiles.index(slot * LOADS + i), pred=tile.height > i * HEIGHT)


@gluon.jit
def _load(x_desc, launch, ring, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr, FUSED: gl.constexpr):
    """Load the operands of a program's tiles as far ahead as the ring goes, the first step's weights before x is
    ready: more would slow the kernel that makes x."""
    tile = _output_tile(gl.program_id(0), launch, BLOCK_M, SPLITS)
    weights = _weights_at(tile.column, launch, FUSED)
    for step in range(2):
        _load_weights(weights.descs, weights.col, tile.first * _STEP + step * _UNIT, ring, step)
    gdc_wait()
    step = 0
    _, _, tiles = _output_tiles(launch, BLOCK_M, SPLITS)
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile = _output_tile(number, launch, BLOCK_M, SPLITS)
        weights = _weights_at(tile.column, launch, FUSED)
        for i in range(2 * tile.steps):
            k = tile.first * _STEP + i * _UNIT
            if step >= 2:
                await_read(ring.read, step)
                _load_weights(weights.descs, weights.col, k, ring, step)
            _load_rows(x_desc, tile, launch.rows, k, ring, step)
            step += 1


@gluon.jit
def _take_weights(ring, step, upper_scale, lower_scale, acc, SCALED: gl.constexpr):
    """The weights of a slot, two to an element, as the left operand of a product that is added to `acc`. SCALED: times
    one scale in the upper eight of each 16 rows, and another in the lower eight.

    A thread holds a pair of one row and the pair eight rows below. A converted pair fills a register. So the PTX takes
    the pairs of two rows at a time, and returns a tensor for each row.
    """
    await_full(ring.full, step)
    pairs = ring.w.index(step % ring.full.shape[0]).load(gl.DotOperandLayout(0, acc.type.layout, 1))
    kind: gl.constexpr = ring.x.dtype
    operands = [pairs]
    if SCALED:
        upper_scales = gl.full(pairs.shape, upper_scale, gl.float32, pairs.type.layout)
        operands = [pairs, upper_scales, gl.full(pairs.shape, lower_scale, gl.float32, pairs.type.layout)]
    registers: gl.constexpr = "=r,=r,r,r,r,r,r" if SCALED else "=r,=r,r"
    to_bf16: gl.constexpr = _TO_SCALED_BF16 if SCALED else _TO_BF16
    to_fp16: gl.constexpr = _TO_SCALED_FP16 if SCALED else _TO_FP16
    conversion: gl.constexpr = to_bf16 if kind.is_bf16() else to_fp16
    upper, lower = gl.inline_asm_elementwise(
        conversion, registers, operands, dtype=(kind.value, kind.value), is_pure=True, pack=2
    )
    w = gl.join(upper, lower).reshape((_HEIGHT // 16, 2, 8, _UNIT // 2, 2)).permute((0, 4, 2, 3, 1))
    w = w.reshape((_HEIGHT, _UNIT))
    return gl.convert_layout(w, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)


@gluon.jit
def _multiply(ring, step, tile, weights, scale_column, BLOCK_M: gl.constexpr, IN_BLOCKS: gl.constexpr):
    """The sums [128, BLOCK_M] of a tile of the output, from the ring's step number `step` on.

    A product is waited for when the next one runs, which hides the conversion between them. Two tiles of weights are in
    registers at a time. The sums are over all steps, so scales of blocks are multiplied into the weights.
    """
    STAGES: gl.constexpr = ring.full.shape[0]
    ROOM: gl.constexpr = ring.x.shape[1] // BLOCK_M  # a slot has room for one tile of x, or for two lower ones
    x_tiles = reinterpret(ring.x, ring.x.dtype, [STAGES * ROOM, BLOCK_M, _UNIT], ring.x.layout)
    acc = zeros(BLOCK_M, _HEIGHT, True)
    even = gl.zeros((_HEIGHT, _UNIT), ring.x.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    odd = even
    k = tile.first * _STEP
    upper_scale = block_scale(weights.upper, scale_column, weights.col, k, IN_BLOCKS)
    lower_scale = block_scale(weights.lower, scale_column, weights.col, k, IN_BLOCKS)
    for i in range(tile.steps):
        unit = step + 2 * i
        k = (tile.first + gl.minimum(i + 1, tile.steps - 1)) * _STEP  # the next step's scales are on their way
        next_upper = block_scale(weights.upper, scale_column, weights.col, k, IN_BLOCKS)
        next_lower = block_scale(weights.lower, scale_column, weights.col, k, IN_BLOCKS)
        even = _take_weights(ring, unit, upper_scale, lower_scale, acc, IN_BLOCKS)
        x = x_tiles.index(unit % STAGES * ROOM).permute((1, 0))
        acc = warpgroup_mma(even, x, acc, is_async=True)
        acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
        mbarrier.arrive(ring.read.index((unit + STAGES - 1) % STAGES), pred=i > 0)
        odd = _take_weights(ring, unit + 1, upper_scale, lower_scale, acc, IN_BLOCKS)
        x = x_tiles.index((unit + 1) % STAGES * ROOM).permute((1, 0))
        acc = warpgroup_mma(odd, x, acc, is_async=True)
        acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
        give_back(ring.read, unit)
        upper_scale, lower_scale = next_upper, next_lower
    acc, even, odd = warpgroup_mma_wait(0, deps=[acc, even, odd])
    give_back(ring.read, step + 2 * tile.steps - 1)
    return acc


@gluon.jit
def _finish(
    acc,
    weights,
    out,
    rows,
    bias_cols,
    DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    FUSED: gl.constexpr,
    BIASED: gl.constexpr,
):
    """Scale and store the sums [128, BLOCK_M], some rows of x at a time."""
    HALF: gl.constexpr = BLOCK_M // 2
    col, upper, lower = weights.col, weights.upper, weights.lower
    if BLOCK_M > _STORED:
        first, second = acc.reshape((_HEIGHT, 2, HALF)).permute((0, 2, 1)).split()
        _finish(first, weights, out, rows, bias_cols, DTYPE, HALF, IN_BLOCKS, FUSED, BIASED)
        out = Rows(out.ptr + HALF * out.row, out.row)
        _finish(second, weights, out, rows - HALF, bias_cols, DTYPE, HALF, IN_BLOCKS, FUSED, BIASED)
    elif FUSED:
        gate, up = acc.reshape((_HEIGHT // 16, 2, 8, BLOCK_M)).permute((0, 2, 3, 1)).split()
        gate = scaled(gate.reshape((_HEIGHT // 2, BLOCK_M)), upper, col, upper.cols, IN_BLOCKS)
        up = scaled(up.reshape((_HEIGHT // 2, BLOCK_M)), lower, col, lower.cols, IN_BLOCKS)
        store(swiglu(gate, up, DTYPE), out, None, col, rows, 0, upper.cols, BLOCK_M, _HEIGHT // 2, True)
    else:
        acc = scaled(acc, upper, col, upper.cols, IN_BLOCKS)
        bias_ptr = weights.bias if BIASED else None
        store(acc, out, bias_ptr, col, rows, bias_cols, upper.cols, BLOCK_M, _HEIGHT, True)


@gluon.jit
def _compute_tile(
    launch,
    tile,
    ring,
    step,
    is_last,
    BLOCK_M: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    FUSED: gl.constexpr,
    BIASED: gl.constexpr,
):
    """Multiply and store a tile of the output."""
    weights = _weights_at(tile.column, launch, FUSED)
    acc = _multiply(ring, step, tile, weights, launch.scale_column, BLOCK_M, IN_BLOCKS)
    if not FUSED and is_last:
        gdc_launch_dependents()  # after the wait: attention relies on that (runtime/overlap.py)
    before = (tile.split.to(gl.int64) * launch.rows + tile.row) * launch.out.row
    out = Rows(weights.out_ptr + before, launch.out.row)
    bias_cols = gl.where(tile.split == 0, weights.upper.cols, 0)
    rows = launch.rows - tile.row
    _finish(acc, weights, out, rows, bias_cols, ring.x.dtype, BLOCK_M, IN_BLOCKS, FUSED, BIASED)


@gluon.jit
def _compute_tiles(
    launch,
    ring,
    BLOCK_M: gl.constexpr,
    SPLITS: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    FUSED: gl.constexpr,
    BIASED: gl.constexpr,
):
    """Make a program's tiles of the output."""
    step = 0
    _, _, tiles = _output_tiles(launch, BLOCK_M, SPLITS)
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile = _output_tile(number, launch, BLOCK_M, SPLITS)
        is_last = number + gl.num_programs(0) >= tiles
        if tile.height == BLOCK_M:
            _compute_tile(launch, tile, ring, step, is_last, BLOCK_M, IN_BLOCKS, FUSED, BIASED)
        elif BLOCK_M == _HIGHEST:  # lower tiles are not halved
            _compute_tile(launch, tile, ring, step, is_last, BLOCK_M // 2, IN_BLOCKS, FUSED, BIASED)
        step += 2 * tile.steps


@gluon.jit(do_not_specialize=["rows", "tiles", "whole"])
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
    scale_column,
    tiles,
    whole,
    BLOCK_M: gl.constexpr,
    SPLITS: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    FUSED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (programs,): a program makes tiles of the output, each of one split of one product. FUSED: the weights are
    gate and up, and a tile is of both.

    Products stand side by side in `out`. Every split must have a step. scale_column: the stride between columns of
    block scales. tiles, whole: see _Launch.
    """
    BIASED: gl.constexpr = biases is not None
    descs = (w0_desc, w1_desc, w2_desc, w3_desc)
    of_tiles = biases if biases is not None else (0, 0, 0, 0)
    launch = _Launch(columns, descs, of_tiles, out, rows, depth, scale_column, tiles, whole)
    ring = _ring(x_desc, w0_desc, BLOCK_M, STAGES)
    if FUSED:
        gdc_launch_dependents()
    # fmt: off
    gl.warp_specialize([
        (_compute_tiles, (launch, ring, BLOCK_M, SPLITS, IN_BLOCKS, FUSED, BIASED)),
        (_load, (x_desc, launch, ring, BLOCK_M, SPLITS, FUSED)),
    ], [1], [_FUSED_LOADER if FUSED else _LOADER])
    # fmt: on


def settings_for(rows: int, cols: tuple[int, ...], depth: int, in_blocks: bool, fused: bool) -> Streaming:
    """Settings for the product of `rows` rows with weights [n, depth] for n in `cols`. `fused`: with SwiGLU.

    A program has a multiprocessor to itself. Stages are slots, of half a step. Without scales of blocks, splits of K do
    not depend on the rows up to MAX_STREAMED of them, so the bits of a row do not either.
    """
    block_m, splits = block_m_of(rows), 1
    if fused:
        pass
    elif rows <= MAX_STREAMED and not in_blocks:
        splits = _splits(cols, depth)
    else:
        programs = tiles_of(cols, BLOCK_N) * triton.cdiv(rows, block_m)
        while splits < 4 and 2 * programs * splits <= MULTIPROCESSORS and depth >= 8 * splits * BLOCK_K:
            splits *= 2
    stages = 4 if block_m > 128 else 6
    return Streaming(BLOCK_N, BLOCK_K, splits, True, stages, stages, WARPS)


def _splits(cols: tuple[int, ...], depth: int) -> int:
    """Splits of K that do not depend on the rows."""
    splits = 1
    while splits < 4 and tiles_of(cols, 64) * splits < _PROGRAMS and depth >= 8 * splits * BLOCK_K:
        splits *= 2
    return splits


def whole_tiles(rows: int, tiles: int, splits: int, programs: int) -> int:
    """How many of the column tiles are made in tiles of block_m_of(rows) rows: see _Launch.

    All, a number that fills rounds of all programs, or none: whichever ends first, if half a tile takes three quarters
    of the time, as measured for tiles of MAX_BLOCK_M rows.
    """
    if block_m_of(rows) < MAX_BLOCK_M:
        return tiles

    def time_with(whole: int) -> int:
        high, low = output_tiles(rows, tiles, whole, splits)
        rounds = triton.cdiv(high, programs)
        return 4 * rounds + 3 * (triton.cdiv(high + low, programs) - rounds)

    of_column, _ = output_tiles(rows, 1, 1, splits)
    return min((tiles, tiles * of_column // programs * programs // of_column, 0), key=time_with)


def output_tiles(rows: int, tiles: int, whole: int, splits: int) -> tuple[int, int]:
    """The number of whole tiles of the output, and of halves, for _Launch's `tiles` and `whole`."""
    if block_m_of(rows) < MAX_BLOCK_M:
        return tiles * splits, 0
    halves = triton.cdiv(rows, MAX_BLOCK_M // 2)
    return whole * (halves // 2) * splits, (whole * (halves % 2) + (tiles - whole) * halves) * splits


def linear_hopper_fp8(
    x: Tensor,
    weights: Sequence[Float8Weight],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
) -> None:
    """x @ weight.T + bias, as few_rows.linear_few_rows; see linear_kernel. fp8.py has checked the arguments."""
    _launch(x, weights, cols, biases, out, settings, tiles_of(cols, BLOCK_N), False)


def linear_swiglu_hopper_fp8(x: Tensor, gate: Float8Weight, up: Float8Weight, out: Tensor, settings: Streaming) -> None:
    """silu(x @ gate.T) * (x @ up.T) as `out` [rows, I]. fp8.py has checked the arguments."""
    cols = (len(gate), len(up))
    _launch(x, (gate, up), cols, (None, None), out, settings, triton.cdiv(len(gate), BLOCK_N // 2), True)


def _launch(
    x: Tensor,
    weights: Sequence[Float8Weight],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
    tiles: int,
    fused: bool,
) -> None:
    rows, programs = len(x), multiprocessors_of(x.device)
    whole = whole_tiles(rows, tiles, settings.splits, programs)
    count = sum(output_tiles(rows, tiles, whole, settings.splits))
    overlapped_on_hopper(linear_kernel, (min(programs, count),))(
        descriptor(x, rows_of_a_load(rows), BLOCK_K // 2),
        *(_pairs(weight, EACH if fused else BLOCK_N) for weight in weights),
        *[None] * (4 - len(weights)),
        tuple(ScaledColumns(n, w.scale, w.scale_stride) for n, w in zip(cols, weights, strict=True)),
        None if biases[0] is None else tuple(biases),
        Rows.of(out),
        rows,
        x.shape[1],
        weights[0].scale.stride(1) if weights[0].in_blocks else 0,
        tiles,
        whole,
        block_m_of(rows),
        settings.splits,
        weights[0].in_blocks,
        fused,
        settings.w_stages,
        num_warps=WARPS,
        maxnreg=_REGISTERS,
    )


def block_m_of(rows: int) -> int:
    """Rows of x in a tile. They are the tensor cores' right operand, and their sums must fit the registers."""
    return min(max(16, triton.next_power_of_2(rows)), MAX_BLOCK_M)


def rows_of_a_load(rows: int) -> int:
    """Rows of x that TMA loads at a time: few, where a tile ends past the last row."""
    block_m = block_m_of(rows)
    return min(block_m, _ROWS_OF_A_LOAD) if rows < block_m else max(block_m // 2, 16)


def _pairs(weight: Float8Weight, height: int) -> TensorDescriptor:
    return descriptor(weight.values.view(torch.int16), height, BLOCK_K // 4, WEIGHT_LAYOUT)
