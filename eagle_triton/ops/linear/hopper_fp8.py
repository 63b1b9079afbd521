"""Products with weights of eight bits on Hopper, converted to 16 bits on their way to the tensor cores.

    linear_kernel:  out = x @ weight.T (+ bias), up to four weights side by side; the product, or its split sums

For more rows than hopper_fp8_few_rows.py takes, and for fp16. One warp of a program only loads, and two warpgroups only
convert and multiply. The weights are the left operand. Their tiles of e4m3 come through TMA, and are converted exactly
between shared memory and the registers that the tensor cores read. While these multiply one tile, the next is
converted. Scales of rows are applied to the sums. Scales of blocks are fp32 and multiplied into the weights, which
rounds them. Needs Triton 3.6.

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
    TILE_LAYOUT,
    await_full,
    await_read,
    barriers,
    descriptor,
    give_back,
    ready,
    room_for,
    steps_of,
    store,
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
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch
from eagle_triton.runtime.overlap import prefer_shared_memory

_BLOCK_K = 128  # that of a block of scales
_PROGRAMS = 256  # K is split until there are this many programs, two to a multiprocessor
_REGISTERS = 168  # of a thread, before the loading warp gives its own away: a program has a multiprocessor to itself
_NARROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)  # of tiles of 32 columns
_ROWS_OF_A_LOAD = 32  # a taller tile of x, which may end past x's last row, comes in loads of this height
_LOADER = gl.constexpr(24)  # registers of a thread of the loading warp
_PREFETCH = 3  # tiles of weights in flight before the input is ready: more would slow the kernel that makes it


def _conversion(pack: str, scaled: bool) -> gl.constexpr:
    """PTX that converts two pairs of e4m3 numbers ($2), one pair to a row, to two pairs ($0, $1) of fp16 or bf16.

    It is exact, because fp16 and fp32 hold every e4m3 number; with a scale ($3) each number is rounded once. `pack`
    makes a pair of two fp32 numbers; it is "" for fp16 without a scale.
    """
    lines = [
        ".reg .b16 upper, lower, first, second;",
        ".reg .b32 pair;",
        ".reg .f32 x, y;",
        "mov.b32 {upper, lower}, $2;",
    ]
    for out, half in (("$0", "upper"), ("$1", "lower")):
        if not pack:
            lines.append(f"cvt.rn.f16x2.e4m3x2 {out}, {half};")
            continue
        lines += [f"cvt.rn.f16x2.e4m3x2 pair, {half};", "mov.b32 {first, second}, pair;"]
        lines += ["cvt.f32.f16 x, first;", "cvt.f32.f16 y, second;"]
        if scaled:
            lines += ["mul.f32 x, x, $3;", "mul.f32 y, y, $3;"]
        lines.append(f"{pack} {out}, y, x;")
    return gl.constexpr("{" + "\n".join(lines) + "}")


_TO_BF16 = _conversion("cvt.rn.bf16x2.f32", False)
_TO_FP16 = _conversion("", False)
_TO_SCALED_BF16 = _conversion("cvt.rn.bf16x2.f32", True)
_TO_SCALED_FP16 = _conversion("cvt.rn.f16x2.f32", True)


@gluon.jit
def _load_weights(tile, scale, acc, KIND: gl.constexpr):
    """A tile of weights, two to an element, as the left operand of a product that is added to `acc`; times the number
    `scale` unless that is None.

    A thread holds a pair of one row and the pair eight rows below. A converted pair fills a register. So the PTX's two
    rows are a pair, and its two tensors are two rows.
    """
    pairs = tile.load(gl.DotOperandLayout(0, acc.type.layout, 1))
    SCALED: gl.constexpr = scale is not None
    operands = [pairs]
    if SCALED:
        operands = [pairs, gl.full(pairs.shape, scale, gl.float32, pairs.type.layout)]
    registers: gl.constexpr = "=r,=r,r,r,r" if SCALED else "=r,=r,r"
    to_bf16: gl.constexpr = _TO_SCALED_BF16 if SCALED else _TO_BF16
    to_fp16: gl.constexpr = _TO_SCALED_FP16 if SCALED else _TO_FP16
    conversion: gl.constexpr = to_bf16 if KIND.is_bf16() else to_fp16
    upper, lower = gl.inline_asm_elementwise(
        conversion, registers, operands, dtype=(KIND.value, KIND.value), is_pure=True, pack=2
    )
    HEIGHT: gl.constexpr = pairs.shape[0]
    WIDTH: gl.constexpr = pairs.shape[1]
    w = gl.join(upper, lower).reshape((HEIGHT // 16, 2, 8, WIDTH, 2)).permute((0, 4, 2, 3, 1))
    return gl.convert_layout(w.reshape((HEIGHT, 2 * WIDTH)), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def _row_scales(weight, col, acc):
    """The scales [BLOCK_N, 1] of rows of a weight (ScaledColumns) from `col` on."""
    row = gl.minimum(col + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout)), weight.cols - 1)
    return gl.load(weight.scale + row * weight.scale_row).to(gl.float32)[:, None]


class _Ring(NamedTuple):
    """Slots for tiles of a matrix, each with two barriers: it is full, it has been read."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


@gluon.jit
def _ring(desc, HEIGHT: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES tiles of HEIGHT rows."""
    gl.static_assert(STAGES >= 2, "a tile is loaded while the one before it is read")
    return _Ring(room_for(desc, HEIGHT, STAGES), barriers(STAGES), barriers(STAGES))


@gluon.jit
def _put(desc, row, column, ring, step):
    """Let TMA load the tile at (row, column) for a step, once the one in its slot has been read."""
    slot = step % ring.full.shape[0]
    await_read(ring.read, step)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    async_load(desc, [row, column], ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def _put_rows(desc, row, rows, column, ring, step):
    """The same for a tile of x, which may be several of the descriptor's boxes high.

    TMA is slower for boxes outside of the tensor, so the first rows are loaded again instead of them.
    """
    STAGES: gl.constexpr = ring.full.shape[0]
    HEIGHT: gl.constexpr = desc.block_type.shape[0]
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    PARTS: gl.constexpr = ring.tiles.shape[1] // HEIGHT
    if PARTS == 1:
        _put(desc, row, column, ring, step)
    else:
        gl.static_assert(WIDTH * 2 <= 128, "rows of a tile lie one after another")
        parts = reinterpret(ring.tiles, desc.dtype, [STAGES * PARTS, HEIGHT, WIDTH], desc.layout)
        slot = step % STAGES
        await_read(ring.read, step)
        mbarrier.expect(ring.full.index(slot), PARTS * desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            of_part = row + part * HEIGHT
            of_part = gl.where(of_part < rows, of_part, 0)
            async_load(desc, [of_part, column], ring.full.index(slot), parts.index(slot * PARTS + part))


@gluon.jit
def _take_weights(ring, step, scale, acc, KIND: gl.constexpr):
    """The tile of weights of a step, converted, in registers; times `scale` if it is not None."""
    await_full(ring.full, step)
    w = _load_weights(ring.tiles.index(step % ring.full.shape[0]), scale, acc, KIND)
    give_back(ring.read, step)
    return w


@gluon.jit
def _take_rows(ring, step):
    """The tile of x of a step as the right operand. It stays in its slot until it is given back."""
    await_full(ring.full, step)
    return ring.tiles.index(step % ring.full.shape[0]).permute((1, 0))


@gluon.jit
def _load_split(
    x_desc, w_desc, row, rows, col, first, count, x_ring, w_ring, BLOCK_K: gl.constexpr, PREFETCH: gl.constexpr
):
    """Load linear_kernel's tiles as far ahead as the rings go, PREFETCH tiles of weights before x is ready."""
    for step in range(gl.minimum(count, PREFETCH)):
        _put(w_desc, col, (first + step) * (BLOCK_K // 2), w_ring, step)
    gdc_wait()
    for step in range(count):
        _put_rows(x_desc, row, rows, (first + step) * BLOCK_K, x_ring, step)
        if step + PREFETCH < count:
            _put(w_desc, col, (first + step + PREFETCH) * (BLOCK_K // 2), w_ring, step + PREFETCH)


@gluon.jit
def _scale_of_step(scale_ptr, k, scale_column, IN_BLOCKS: gl.constexpr):
    """The scale of the block of weights at column k; None where scales are for rows."""
    scale = None
    if IN_BLOCKS:
        scale = gl.load(scale_ptr + k // 128 * scale_column).to(gl.float32)
    return scale


@gluon.jit
def _multiply_split(
    x_ring,
    w_ring,
    weight,
    scale_column,
    col,
    k,
    count,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
):
    """The sum [BLOCK_N, BLOCK_M] over `count` steps from column k of the weights.

    A product is waited for when the next one runs, which hides the conversion between them. Two tiles of weights stay
    in registers, each in its own. The sums are over all steps, so scales of blocks are multiplied into the weights.
    """
    kind: gl.constexpr = x_ring.tiles.dtype
    acc = zeros(BLOCK_M, BLOCK_N, True)
    block_ptr = weight.scale + col // 128 * weight.scale_row
    even = _take_weights(w_ring, 0, _scale_of_step(block_ptr, k, scale_column, IN_BLOCKS), acc, kind)
    odd = even
    acc = warpgroup_mma(even, _take_rows(x_ring, 0), acc, is_async=True)
    acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
    for step in range(1, count - 1, 2):
        scale = _scale_of_step(block_ptr, k + step * BLOCK_K, scale_column, IN_BLOCKS)
        odd = _take_weights(w_ring, step, scale, acc, kind)
        acc = warpgroup_mma(odd, _take_rows(x_ring, step), acc, is_async=True)
        acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
        give_back(x_ring.read, step - 1)
        scale = _scale_of_step(block_ptr, k + (step + 1) * BLOCK_K, scale_column, IN_BLOCKS)
        even = _take_weights(w_ring, step + 1, scale, acc, kind)
        acc = warpgroup_mma(even, _take_rows(x_ring, step + 1), acc, is_async=True)
        acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
        give_back(x_ring.read, step)
    for step in range((count - 1) // 2 * 2 + 1, count):  # the last step, if their number is even
        scale = _scale_of_step(block_ptr, k + step * BLOCK_K, scale_column, IN_BLOCKS)
        odd = _take_weights(w_ring, step, scale, acc, kind)
        acc = warpgroup_mma(odd, _take_rows(x_ring, step), acc, is_async=True)
        acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
    acc, even, odd = warpgroup_mma_wait(0, deps=[acc, even, odd])
    if not IN_BLOCKS:
        acc *= _row_scales(weight, col, acc)
    return (acc,)


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
    scale_column,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLITS: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (row tiles, column tiles of all weights, splits): a program makes one split of one tile of one product.

    As hopper.linear_kernel. Every split must have a step. scale_column: the stride between columns of block scales.
    """
    row, split = gl.program_id(0) * BLOCK_M, gl.program_id(2)
    if rows > BLOCK_M:  # the last tile overlaps the one before it: both store the same
        row = gl.minimum(row, rows - BLOCK_M)
    descs = (w0_desc, w1_desc, w2_desc, w3_desc)
    tile = tile_of(gl.program_id(1), columns, descs, biases if biases is not None else (0, 0, 0, 0), out.ptr, BLOCK_N)
    col = tile.number * BLOCK_N
    first, count = steps_of(split, depth, BLOCK_K, SPLITS)

    w_ring, x_ring = _ring(tile.desc, BLOCK_N, W_STAGES), _ring(x_desc, BLOCK_M, X_STAGES)
    ready((w_ring.full, w_ring.read, x_ring.full, x_ring.read), max(W_STAGES, X_STAGES))
    # fmt: off
    (total,) = gl.warp_specialize([
        (_multiply_split, (x_ring, w_ring, tile.weight, scale_column, col, first * BLOCK_K, count, BLOCK_M, BLOCK_N,
                           BLOCK_K, IN_BLOCKS)),
        (_load_split, (x_desc, tile.desc, row, rows, col, first, count, x_ring, w_ring, BLOCK_K, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on
    gdc_launch_dependents()  # after the wait: attention relies on that (runtime/overlap.py)

    out_rows = Rows(tile.out_ptr + (split.to(gl.int64) * rows + row) * out.row, out.row)
    bias_ptr, cols = tile.bias if biases is not None else None, tile.weight.cols
    store(total, out_rows, bias_ptr, col, rows - row, gl.where(split == 0, cols, 0), cols, BLOCK_M, BLOCK_N, True)


def settings_for(rows: int, cols: tuple[int, ...], depth: int, in_blocks: bool) -> Streaming:
    """Settings for the product of `rows` rows with weights [n, depth] for n in `cols`.

    A program has a multiprocessor to itself, and its two warpgroups have 128 rows of weights. Without scales of blocks,
    splits of K do not depend on the rows up to MAX_STREAMED of them, so the bits of a row do not either.
    """
    block_m, splits = block_m_of(rows), 1
    if rows <= MAX_STREAMED and not in_blocks:
        splits = _splits(cols, depth)
    else:
        programs = tiles_of(cols, 128) * triton.cdiv(rows, block_m)
        while splits < 4 and 2 * programs * splits <= MULTIPROCESSORS and depth >= 8 * splits * _BLOCK_K:
            splits *= 2
    stages = 4 if block_m > 128 else 6
    return Streaming(128, _BLOCK_K // 2, splits, True, stages, stages, 8)  # 128 columns would not fit the registers


def _splits(cols: tuple[int, ...], depth: int) -> int:
    """Splits of K that do not depend on the rows."""
    splits = 1
    while splits < 4 and tiles_of(cols, 64) * splits < _PROGRAMS and depth >= 8 * splits * _BLOCK_K:
        splits *= 2
    return splits


def linear_hopper_fp8(
    x: Tensor,
    weights: Sequence[Float8Weight],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
) -> None:
    """x @ weight.T + bias, as few_rows.linear_few_rows; see linear_kernel. fp8.py has checked the arguments."""
    tiles, block_m = tiles_of(cols, settings.block_n), block_m_of(len(x))
    row_tiles = triton.cdiv(len(x), block_m)
    height = min(block_m, _ROWS_OF_A_LOAD) if settings.block_k < _BLOCK_K else block_m
    compiled = launch(linear_kernel, (row_tiles, tiles, settings.splits))(
        descriptor(x, height, settings.block_k),
        *(_pairs(weight, settings) for weight in weights),
        *[None] * (4 - len(weights)),
        tuple(ScaledColumns(n, w.scale, w.scale_stride) for n, w in zip(cols, weights, strict=True)),
        None if biases[0] is None else tuple(biases),
        Rows.of(out),
        len(x),
        x.shape[1],
        weights[0].scale.stride(1) if weights[0].in_blocks else 0,
        block_m,
        settings.block_n,
        settings.block_k,
        settings.splits,
        weights[0].in_blocks,
        settings.w_stages,
        settings.x_stages,
        min(settings.w_stages, _PREFETCH),
        num_warps=settings.warps,
        maxnreg=_REGISTERS,
        launch_pdl=True,
        **NO_FMA_FUSION,
    )
    prefer_shared_memory(compiled)


def block_m_of(rows: int) -> int:
    """Rows of x to a program. They are the tensor cores' right operand, and their sums must fit the registers."""
    return min(max(16, triton.next_power_of_2(rows)), 256)


def _pairs(weight: Float8Weight, settings: Streaming) -> TensorDescriptor:
    width = settings.block_k // 2
    layout = TILE_LAYOUT if width >= 64 else _NARROW_LAYOUT
    return descriptor(weight.values.view(torch.int16), settings.block_n, width, layout)
