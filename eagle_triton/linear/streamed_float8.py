"""Products of few rows with weights of eight bits on Hopper, whose weights are under way before their input is.

    linear_kernel:  out = x @ weight.T (+ bias), up to four weights side by side; split sums of K, or the product
    swiglu_kernel:  out = silu(x @ gate.T) * (x @ up.T)

As streamed.py, but one warp of a program does nothing but load, and the others nothing but convert and multiply: each
slot of a ring has a barrier that says it is full, and one that says it has been read. The weights are always the left
operand: tiles of e4m3 come through TMA, and are converted on their way from shared memory to the registers that the
tensor cores read, exactly. While they multiply one tile, the next is converted. Scales are fp32 and stay out of the
products: one for each row is applied to the sum, one for each block of 128 by 128 to the sum of each step of K, which
is 128 wide. Needs Triton 3.6.

| name         | shape                           | dtype, layout                                           |
|--------------|---------------------------------|---------------------------------------------------------|
| x            | [rows, K]                       | bf16 or fp16, rows 16-byte aligned                      |
| weights      | [N, K / 2]                      | pairs of e4m3 as int16, rows 16-byte aligned            |
| scales       | [N or 1, 1], [N / 128, K / 128] | fp32 or bf16                                            |
| bias         | [N]                             | as x                                                    |
| out          | [rows, N], [splits, rows, N]    | as x; fp32 if the splits' sums stay apart               |

They are bound by latency: hardware counters (H200) show neither L2 (65 %) nor any pipe (ALU 33 %) at its limit, but
half of all cycles without a warp that could go on. Hence the warp that loads (with all warps issuing loads a step of K
had five barriers of the whole program), and two products in flight where sums need no scaling between. Of Llama-3.1-8B
with scales for rows, us of 16 and 64 rows behind a small kernel of 2.8: q, k and v 10.4, 13.7; o 8.4, 10.2; gate and up
34.8, 41.5 (scales for blocks 36.1, 48.7); down 20.9, 23.3 (experiments with forms of these kernels, some with more
stages, that were not kept; tools/tune_linear.py --float8 times these).

Tried without gain there: weights read sixteen at a time for `mma` of either operand from registers, through shared
memory (gate and up 39.9, 64) or from memory straight to registers, with no barrier at all (47.5), though both have half
the instructions; gate above up in one tile for eight warps (45, 46); weights read four at a time by `ldmatrix`, which
takes x with its even columns before its odd ones: 40.4 at 64 rows if x comes so, 59 if it is put in that order on its
way (what writes shared memory for the tensor cores must be fenced, and the fence waits for the next loads). These
experiments were not kept either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eagle_triton.linear.settings import MOST_STREAMED, tiles_of
from eagle_triton.linear.streamed import (
    _MULTIPROCESSORS,
    TILE_LAYOUT,
    Streaming,
    _multiprocessors,
    _ready,
    _rounded,
    _store,
    _zeros,
)
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.launch import EXACT, launch
from eagle_triton.runtime.overlap import prefer_shared_memory

_BLOCK_K = 128  # that of a block of scales
_PROGRAMS = 256  # enough of them: two to a multiprocessor
_WIDE = 200  # tiles of 128 rows of weights: enough of them, which read x half as often
_SHARED_MEMORY = 228 * 1024  # of a multiprocessor, of which each program takes 1024 bytes more than it asks for
_STAGES = 3  # more are slower in a step: programs that take little memory start early
_REGISTERS = 64 * 1024  # of a multiprocessor
_NARROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)  # of tiles of 32 columns
_ROWS_OF_A_LOAD = 32  # of x, where a tile of it has more, which may end behind the last of them
_LOADER = gl.constexpr(24)  # registers of a thread of the warp that loads
_PREFETCH_BYTES = 24 * 1024  # of weights in flight before the input is there: more would slow what makes the input


def _conversion(pack: str, scaled: bool) -> gl.constexpr:
    """PTX that makes two pairs of e4m3 numbers ($2), one pair to a row, two pairs ($0, $1) of fp16 or bf16.

    Exactly, for fp16 and fp32 on the way hold every e4m3 number; but with a scale ($3) each is rounded once. `pack`
    makes a pair of two fp32 numbers, and is "" for fp16 without a scale.
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
    """A tile of weights, two to an element, as the left operand of products that are added to `acc`; times `scale`, a
    number, if it is not None.

    A thread holds a pair of a row, and that eight rows below. Converted, a pair is a register; so what comes out as two
    rows is a pair, and what comes out as two tensors is two rows.
    """
    pairs = tile.load(gl.DotOperandLayout(0, acc.type.layout, 1))
    SCALED: gl.constexpr = scale is not None
    operands = [pairs]
    if SCALED:
        operands = [pairs, gl.full(pairs.shape, scale, gl.float32, pairs.type.layout)]
    registers: gl.constexpr = "=r,=r,r,r,r" if SCALED else "=r,=r,r"
    if KIND.is_bf16():
        to_bf16: gl.constexpr = _TO_SCALED_BF16 if SCALED else _TO_BF16
        upper, lower = gl.inline_asm_elementwise(
            to_bf16, registers, operands, dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        to_fp16: gl.constexpr = _TO_SCALED_FP16 if SCALED else _TO_FP16
        upper, lower = gl.inline_asm_elementwise(
            to_fp16, registers, operands, dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    HEIGHT: gl.constexpr = pairs.shape[0]
    WIDTH: gl.constexpr = pairs.shape[1]
    w = gl.join(upper, lower).reshape((HEIGHT // 16, 2, 8, WIDTH, 2)).permute((0, 4, 2, 3, 1))
    return gl.convert_layout(w.reshape((HEIGHT, 2 * WIDTH)), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def _load_scale(scale_ptr, col, cols, k, stride_sn, stride_sk, acc, IN_BLOCKS: gl.constexpr):
    """The scales [BLOCK_N, 1] of a tile of weights at (col, k)."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row = gl.minimum(col + gl.arange(0, acc.shape[0], layout), cols - 1)
    if IN_BLOCKS:
        row = row // 128
    return gl.load(scale_ptr + row * stride_sn + k // 128 * stride_sk).to(gl.float32)[:, None]


@gluon.jit
def _ring(desc, HEIGHT: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES tiles of HEIGHT rows, and for each two barriers: it is full, it has been read."""
    gl.static_assert(STAGES >= 2, "a tile is loaded while the one before it is read")
    shape: gl.constexpr = [STAGES, HEIGHT, desc.block_type.shape[1]]
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return tiles, full, read


@gluon.jit
def _put(desc, row, column, ring, step, STAGES: gl.constexpr):
    """Let TMA load the tile at (row, column) for a step, once the one in its slot has been read."""
    tiles, full, read = ring
    slot = step % STAGES
    mbarrier.wait(read.index(slot), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(slot), tiles.index(slot))


@gluon.jit
def _put_rows(desc, row, rows, column, ring, step, STAGES: gl.constexpr):
    """The same for a tile of x, which may have several of the descriptor's height.

    TMA takes longer for what lies outside of the tensor; so instead of those that do, the first rows are loaded again.
    """
    tiles, full, read = ring
    HEIGHT: gl.constexpr = desc.block_type.shape[0]
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    PARTS: gl.constexpr = tiles.shape[1] // HEIGHT
    if PARTS == 1:
        _put(desc, row, column, ring, step, STAGES)
    else:
        gl.static_assert(WIDTH * 2 <= 128, "rows of a tile lie one behind the other")
        parts = tiles._reinterpret(desc.dtype, [STAGES * PARTS, HEIGHT, WIDTH], desc.layout)
        slot = step % STAGES
        mbarrier.wait(read.index(slot), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), PARTS * desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            of_part = row + part * HEIGHT
            of_part = gl.where(of_part < rows, of_part, 0)
            tma.async_copy_global_to_shared(desc, [of_part, column], full.index(slot), parts.index(slot * PARTS + part))


@gluon.jit
def _take_weights(ring, step, scale, acc, KIND: gl.constexpr, STAGES: gl.constexpr):
    """The tile of weights of a step, converted, in registers; times `scale` if it is not None."""
    tiles, full, _read = ring
    slot = step % STAGES
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    w = _load_weights(tiles.index(slot), scale, acc, KIND)
    _give_back(ring, step, STAGES)
    return w


@gluon.jit
def _take_rows(ring, step, STAGES: gl.constexpr):
    """The tile of x of a step, as the right operand, which stays in its slot until it is given back."""
    tiles, full, _read = ring
    slot = step % STAGES
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    return tiles.index(slot).permute((1, 0))


@gluon.jit
def _give_back(ring, step, STAGES: gl.constexpr):
    """The tile of a step has been read."""
    mbarrier.arrive(ring[2].index(step % STAGES))


@gluon.jit
def _load_split(
    x_desc,
    w_desc,
    row,
    rows,
    col,
    first,
    count,
    x_ring,
    w_ring,
    BLOCK_K: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Load what linear_kernel multiplies, as far ahead as the rings go: PREFETCH tiles of weights before x is there."""
    for step in range(gl.minimum(count, PREFETCH)):
        _put(w_desc, col, (first + step) * (BLOCK_K // 2), w_ring, step, W_STAGES)
    gdc_wait()
    for step in range(count):
        _put_rows(x_desc, row, rows, (first + step) * BLOCK_K, x_ring, step, X_STAGES)
        if step + PREFETCH < count:
            _put(w_desc, col, (first + step + PREFETCH) * (BLOCK_K // 2), w_ring, step + PREFETCH, W_STAGES)


@gluon.jit
def _multiply_waiting(
    x_ring,
    w_ring,
    scale_ptr,
    col,
    cols,
    k,
    count,
    stride_sn,
    stride_sk,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    """The sum [BLOCK_N, BLOCK_M] over `count` steps from column k of the weights.

    While one tile of weights is multiplied, the next is taken. ptxas converts it behind the wait for that product.
    """
    kind: gl.constexpr = x_ring[0].dtype
    acc = _zeros(BLOCK_M, BLOCK_N, True)
    total = acc
    scale = _load_scale(scale_ptr, col, cols, k, stride_sn, stride_sk, acc, IN_BLOCKS)
    next_scale = scale
    w = _take_weights(w_ring, 0, None, acc, kind, W_STAGES)
    for step in range(count):
        after = gl.minimum(step + 1, count - 1)  # the last one is taken twice
        if IN_BLOCKS:
            scale = next_scale
            next_scale = _load_scale(scale_ptr, col, cols, k + after * BLOCK_K, stride_sn, stride_sk, acc, IN_BLOCKS)
        x = _take_rows(x_ring, step, X_STAGES)
        part = warpgroup_mma(w, x, acc, use_acc=not IN_BLOCKS, is_async=True)
        next_w = _take_weights(w_ring, after, None, acc, kind, W_STAGES)
        part, w = warpgroup_mma_wait(0, deps=[part, w])
        _give_back(x_ring, step, X_STAGES)
        if IN_BLOCKS:
            total += part * scale
        else:
            acc = part
        w = next_w
    if not IN_BLOCKS:
        total = acc * scale
    return (total,)


@gluon.jit
def _scale_of_step(scale_ptr, k, stride_sk, IN_BLOCKS: gl.constexpr):
    """The scale of the block of weights at column k, to be multiplied into these; None where scales are for rows."""
    scale = None
    if IN_BLOCKS:
        scale = gl.load(scale_ptr + k // 128 * stride_sk).to(gl.float32)
    return scale


@gluon.jit
def _multiply_overlapped(
    x_ring,
    w_ring,
    scale_ptr,
    col,
    cols,
    k,
    count,
    stride_sn,
    stride_sk,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    """As _multiply_waiting, but a product is waited for when the next is under way: what lies between is hidden, and
    two tiles of weights stay in registers, each of which keeps its own.

    Sums are then of all steps, so scales of blocks are multiplied into the weights, which rounds these.
    """
    kind: gl.constexpr = x_ring[0].dtype
    acc = _zeros(BLOCK_M, BLOCK_N, True)
    block_ptr = scale_ptr + col // 128 * stride_sn
    even = _take_weights(w_ring, 0, _scale_of_step(block_ptr, k, stride_sk, IN_BLOCKS), acc, kind, W_STAGES)
    odd = even
    x = _take_rows(x_ring, 0, X_STAGES)
    acc = warpgroup_mma(even, x, acc, is_async=True)
    acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
    for step in range(1, count - 1, 2):
        odd = _take_weights(
            w_ring, step, _scale_of_step(block_ptr, k + step * BLOCK_K, stride_sk, IN_BLOCKS), acc, kind, W_STAGES
        )
        x = _take_rows(x_ring, step, X_STAGES)
        acc = warpgroup_mma(odd, x, acc, is_async=True)
        acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
        _give_back(x_ring, step - 1, X_STAGES)
        even = _take_weights(
            w_ring,
            step + 1,
            _scale_of_step(block_ptr, k + (step + 1) * BLOCK_K, stride_sk, IN_BLOCKS),
            acc,
            kind,
            W_STAGES,
        )
        x = _take_rows(x_ring, step + 1, X_STAGES)
        acc = warpgroup_mma(even, x, acc, is_async=True)
        acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
        _give_back(x_ring, step, X_STAGES)
    for step in range((count - 1) // 2 * 2 + 1, count):  # the last one, if their number is even
        odd = _take_weights(
            w_ring, step, _scale_of_step(block_ptr, k + step * BLOCK_K, stride_sk, IN_BLOCKS), acc, kind, W_STAGES
        )
        x = _take_rows(x_ring, step, X_STAGES)
        acc = warpgroup_mma(odd, x, acc, is_async=True)
        acc, even, odd = warpgroup_mma_wait(1, deps=[acc, even, odd])
    acc, even, odd = warpgroup_mma_wait(0, deps=[acc, even, odd])
    if not IN_BLOCKS:
        acc *= _load_scale(scale_ptr, col, cols, 0, stride_sn, 0, acc, False)
    return (acc,)


@gluon.jit
def _multiply_split(
    x_ring,
    w_ring,
    scale_ptr,
    col,
    cols,
    k,
    count,
    stride_sn,
    stride_sk,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    OVERLAPPED: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    """The sum [BLOCK_N, BLOCK_M] over `count` steps from column k of the weights."""
    if OVERLAPPED:
        return _multiply_overlapped(
            x_ring,
            w_ring,
            scale_ptr,
            col,
            cols,
            k,
            count,
            stride_sn,
            stride_sk,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            IN_BLOCKS,
            W_STAGES,
            X_STAGES,
        )
    return _multiply_waiting(
        x_ring,
        w_ring,
        scale_ptr,
        col,
        cols,
        k,
        count,
        stride_sn,
        stride_sk,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        IN_BLOCKS,
        W_STAGES,
        X_STAGES,
    )


@gluon.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    w3_desc,
    scale0_ptr,
    scale1_ptr,
    scale2_ptr,
    scale3_ptr,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
    bias3_ptr,
    out_ptr,
    rows,
    cols0,
    cols1,
    cols2,
    cols3,
    depth,
    stride_sn0,
    stride_sn1,
    stride_sn2,
    stride_sn3,
    stride_sk,
    stride_om,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLITS: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    OVERLAPPED: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (row tiles, column tiles of all weights, splits): a program makes one split of one tile of one product.

    As streamed.linear_kernel. No split may be without a step. stride_sn: of a weight's scales from row to row, or block
    to block, 0 if one is for all. OVERLAPPED: which loop makes the product, and so where scales of blocks go.
    """
    row, tile, split = gl.program_id(0) * BLOCK_M, gl.program_id(1), gl.program_id(2)
    if rows > BLOCK_M:  # the last tile overlaps the one before it: both store the same
        row = gl.minimum(row, rows - BLOCK_M)
    w_desc, scale_ptr, bias_ptr, cols, stride_sn = w0_desc, scale0_ptr, bias0_ptr, cols0, stride_sn0
    if w1_desc is not None:
        tiles0, tiles1, tiles2 = gl.cdiv(cols0, BLOCK_N), gl.cdiv(cols1, BLOCK_N), gl.cdiv(cols2, BLOCK_N)
        if tile >= tiles0 + tiles1:
            tile -= tiles0 + tiles1
            out_ptr += cols0 + cols1
            w_desc, scale_ptr, cols, stride_sn = w2_desc, scale2_ptr, cols2, stride_sn2
            if bias_ptr is not None:
                bias_ptr = bias2_ptr
            if w3_desc is not None:  # noqa: SIM102 (known before tile is)
                if tile >= tiles2:
                    tile -= tiles2
                    out_ptr += cols2
                    w_desc, scale_ptr, cols, stride_sn = w3_desc, scale3_ptr, cols3, stride_sn3
                    if bias_ptr is not None:
                        bias_ptr = bias3_ptr
        elif tile >= tiles0:
            tile -= tiles0
            out_ptr += cols0
            w_desc, scale_ptr, cols, stride_sn = w1_desc, scale1_ptr, cols1, stride_sn1
            if bias_ptr is not None:
                bias_ptr = bias1_ptr
    col = tile * BLOCK_N
    steps = gl.cdiv(depth, BLOCK_K)
    per_split = gl.cdiv(steps, SPLITS)
    first = split * per_split
    count = gl.minimum(per_split, steps - first)

    w_ring, x_ring = _ring(w_desc, BLOCK_N, W_STAGES), _ring(x_desc, BLOCK_M, X_STAGES)
    _ready((w_ring[1], w_ring[2], x_ring[1], x_ring[2]), max(W_STAGES, X_STAGES))
    # fmt: off
    (total,) = gl.warp_specialize([
        (_multiply_split, (x_ring, w_ring, scale_ptr, col, cols, first * BLOCK_K, count, stride_sn, stride_sk, BLOCK_M,
                           BLOCK_N, BLOCK_K, IN_BLOCKS, OVERLAPPED, W_STAGES, X_STAGES)),
        (_load_split, (x_desc, w_desc, row, rows, col, first, count, x_ring, w_ring, BLOCK_K, W_STAGES, X_STAGES,
                       PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on
    gdc_launch_dependents()

    out_ptr += (split.to(gl.int64) * rows + row) * stride_om
    rows -= row
    _store(total, out_ptr, bias_ptr, col, rows, gl.where(split == 0, cols, 0), cols, stride_om, BLOCK_M, BLOCK_N, True)


@gluon.jit
def _load_both(
    x_desc,
    gate_desc,
    up_desc,
    row,
    col,
    count,
    x_ring,
    gate_ring,
    up_ring,
    BLOCK_K: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """As _load_split, for swiglu_kernel."""
    for step in range(gl.minimum(count, PREFETCH)):
        _put(gate_desc, col, step * (BLOCK_K // 2), gate_ring, step, W_STAGES)
        _put(up_desc, col, step * (BLOCK_K // 2), up_ring, step, W_STAGES)
    gdc_wait()
    for step in range(count):
        _put(x_desc, row, step * BLOCK_K, x_ring, step, X_STAGES)
        ahead = step + PREFETCH
        if ahead < count:
            _put(gate_desc, col, ahead * (BLOCK_K // 2), gate_ring, ahead, W_STAGES)
            _put(up_desc, col, ahead * (BLOCK_K // 2), up_ring, ahead, W_STAGES)


@gluon.jit
def _multiply_both(
    x_ring,
    gate_ring,
    up_ring,
    gate_scale_ptr,
    up_scale_ptr,
    col,
    cols,
    count,
    stride_sn0,
    stride_sn1,
    stride_sk,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    """As _multiply_waiting, of the gate and of what it gates in turn."""
    kind: gl.constexpr = x_ring[0].dtype
    gate = _zeros(BLOCK_M, BLOCK_N, True)
    up, gate_total, up_total = gate, gate, gate
    gate_scale = _load_scale(gate_scale_ptr, col, cols, 0, stride_sn0, stride_sk, gate, IN_BLOCKS)
    up_scale = _load_scale(up_scale_ptr, col, cols, 0, stride_sn1, stride_sk, gate, IN_BLOCKS)
    gate_w = _take_weights(gate_ring, 0, None, gate, kind, W_STAGES)
    if IN_BLOCKS:
        next_gate, next_up = gate_scale, up_scale
        for step in range(count):
            after = gl.minimum(step + 1, count - 1)
            gate_scale, up_scale, k = next_gate, next_up, after * BLOCK_K
            next_gate = _load_scale(gate_scale_ptr, col, cols, k, stride_sn0, stride_sk, gate, IN_BLOCKS)
            next_up = _load_scale(up_scale_ptr, col, cols, k, stride_sn1, stride_sk, gate, IN_BLOCKS)
            x = _take_rows(x_ring, step, X_STAGES)
            part = warpgroup_mma(gate_w, x, gate, use_acc=False, is_async=True)
            up_w = _take_weights(up_ring, step, None, gate, kind, W_STAGES)
            part, gate_w = warpgroup_mma_wait(0, deps=[part, gate_w])
            gate_total += part * gate_scale
            part = warpgroup_mma(up_w, x, up, use_acc=False, is_async=True)
            gate_w = _take_weights(gate_ring, after, None, gate, kind, W_STAGES)
            part, up_w = warpgroup_mma_wait(0, deps=[part, up_w])
            _give_back(x_ring, step, X_STAGES)
            up_total += part * up_scale
    else:  # as _multiply_overlapped
        x = _take_rows(x_ring, 0, X_STAGES)
        gate = warpgroup_mma(gate_w, x, gate, is_async=True)
        up_w = _take_weights(up_ring, 0, None, up, kind, W_STAGES)
        up = warpgroup_mma(up_w, x, up, is_async=True)
        gate, up, gate_w, up_w = warpgroup_mma_wait(1, deps=[gate, up, gate_w, up_w])
        for step in range(1, count):
            gate_w = _take_weights(gate_ring, step, None, up_total, kind, W_STAGES)
            x = _take_rows(x_ring, step, X_STAGES)
            gate = warpgroup_mma(gate_w, x, gate, is_async=True)
            gate, up, gate_w, up_w = warpgroup_mma_wait(1, deps=[gate, up, gate_w, up_w])
            _give_back(x_ring, step - 1, X_STAGES)
            up_w = _take_weights(up_ring, step, None, up_total, kind, W_STAGES)
            up = warpgroup_mma(up_w, x, up, is_async=True)
            gate, up, gate_w, up_w = warpgroup_mma_wait(1, deps=[gate, up, gate_w, up_w])
        gate, up, gate_w, up_w = warpgroup_mma_wait(0, deps=[gate, up, gate_w, up_w])
        gate_total, up_total = gate * gate_scale, up * up_scale
    return gate_total, up_total


@gluon.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    x_desc,
    gate_desc,
    up_desc,
    gate_scale_ptr,
    up_scale_ptr,
    out_ptr,
    rows,
    cols,
    depth,
    stride_sn0,
    stride_sn1,
    stride_sk,
    stride_om,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (row tiles, column tiles): a program makes one tile of both products and multiplies them."""
    row, col = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    count = gl.cdiv(depth, BLOCK_K)
    gate_ring, up_ring = _ring(gate_desc, BLOCK_N, W_STAGES), _ring(up_desc, BLOCK_N, W_STAGES)
    x_ring = _ring(x_desc, BLOCK_M, X_STAGES)
    barriers = (gate_ring[1], gate_ring[2], up_ring[1], up_ring[2], x_ring[1], x_ring[2])
    _ready(barriers, max(W_STAGES, X_STAGES))
    gdc_launch_dependents()
    # fmt: off
    gate, up = gl.warp_specialize([
        (_multiply_both, (x_ring, gate_ring, up_ring, gate_scale_ptr, up_scale_ptr, col, cols, count, stride_sn0,
                          stride_sn1, stride_sk, BLOCK_M, BLOCK_N, BLOCK_K, IN_BLOCKS, W_STAGES, X_STAGES)),
        (_load_both, (x_desc, gate_desc, up_desc, row, col, count, x_ring, gate_ring, up_ring, BLOCK_K, W_STAGES,
                      X_STAGES, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on

    out_kind: gl.constexpr = out_ptr.dtype.element_ty
    gate, up = _rounded(gate, out_kind), _rounded(up, out_kind)
    out = _rounded(gate * (1.0 / (1.0 + gl.exp(-gate))), out_kind) * up
    out_ptr += row.to(gl.int64) * stride_om
    rows -= row
    _store(out.to(out_kind), out_ptr, None, col, rows, cols, cols, stride_om, BLOCK_M, BLOCK_N, True)


def settings_for(rows: int, cols: tuple[int, ...], depth: int, fused: bool, in_blocks: bool) -> Streaming:
    """Settings for the product of so many rows with weights [n, depth] for n in `cols`; `fused`: swiglu_kernel.

    Splits of K do not depend on the rows, so that the bits of a row do not. As many programs as there are share a
    multiprocessor: what one waits for, the others' work hides. Rings are short: in a step the next kernel's programs
    start early where there is room for them, and longer rings were slower.
    """
    if rows > 64:
        return _settings_for_many(rows, cols, depth, in_blocks)
    wide = not fused and tiles_of(cols, 128) >= _WIDE
    block_m, block_n = block_m_of(rows), (128 if wide else 64)
    splits = 1 if fused else _splits(cols, depth)
    warps = 8 if wide and in_blocks and rows > 32 else 4  # else sums would not fit the registers
    together = min(
        _most_together(block_m, block_n, warps, fused),
        triton.cdiv(tiles_of(cols, block_n, fused) * splits, _MULTIPROCESSORS),
    )
    room = _SHARED_MEMORY // together - 2048
    w_stage, x_stage = block_n * _BLOCK_K * (2 if fused else 1), block_m * _BLOCK_K * 2
    stages = min(_STAGES, max(2, room // (w_stage + x_stage)))
    return Streaming(block_n, _BLOCK_K, splits, True, stages, stages, warps)


def _settings_for_many(rows: int, cols: tuple[int, ...], depth: int, in_blocks: bool) -> Streaming:
    """Of more than 64 rows: a program has a multiprocessor to itself, and its two warpgroups 128 rows of weights."""
    block_m, splits = block_m_of(rows), 1
    if rows <= MOST_STREAMED and not in_blocks:
        splits = _splits(cols, depth)
    else:
        programs = tiles_of(cols, 128) * triton.cdiv(rows, block_m)
        while splits < 4 and 2 * programs * splits <= _MULTIPROCESSORS and depth >= 8 * splits * _BLOCK_K:
            splits *= 2
    stages = 4 if block_m > 128 else 6
    return Streaming(128, _BLOCK_K // 2, splits, True, stages, stages, 8)  # 128 columns would not fit the registers


def _splits(cols: tuple[int, ...], depth: int) -> int:
    """Splits of K that do not depend on the rows."""
    splits = 1
    while splits < 4 and tiles_of(cols, 64) * splits < _PROGRAMS and depth >= 8 * splits * _BLOCK_K:
        splits *= 2
    return splits


def linear(
    x: Tensor,
    weights: Sequence[Float8Weight],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
) -> None:
    """x @ weight.T + bias for one, three or four weights, side by side in `out`; see linear_kernel. float8.py has
    checked all.

    x [rows, K]; of weights [Ni, K] the first cols[i] rows; biases [Ni] or None each; out [rows, sum of cols], or fp32
    [splits, rows, sum of cols].
    """
    tiles, block_m = tiles_of(cols, settings.block_n), block_m_of(len(x))
    row_tiles = triton.cdiv(len(x), block_m)
    together = _together(settings, 1, block_m, tiles * settings.splits * row_tiles, _multiprocessors(x.device))
    absent = [None] * (4 - len(weights))
    height = min(block_m, _ROWS_OF_A_LOAD) if settings.block_k < _BLOCK_K else block_m
    compiled = launch(linear_kernel, (row_tiles, tiles, settings.splits))(
        _descriptor(x, height, settings.block_k),
        *(_pairs(weight, settings) for weight in weights),
        *absent,
        *(weight.scale for weight in weights),
        *absent,
        *biases,
        *absent,
        out,
        len(x),
        *cols,
        *(0 for _ in absent),
        x.shape[1],
        *(_stride(weight) for weight in weights),
        *(0 for _ in absent),
        weights[0].scale.stride(1) if weights[0].in_blocks else 0,
        out.stride(-2),
        block_m,
        settings.block_n,
        settings.block_k,
        settings.splits,
        weights[0].in_blocks,
        overlaps(len(x), settings.block_n, weights[0].in_blocks),
        settings.w_stages,
        settings.x_stages,
        _prefetch_stages(settings, 1),
        num_warps=settings.warps,
        maxnreg=_registers(settings, together),
        launch_pdl=True,
        **EXACT,
    )
    prefer_shared_memory(compiled)


def linear_swiglu(x: Tensor, gate: Float8Weight, up: Float8Weight, out: Tensor, settings: Streaming) -> None:
    """silu(x @ gate.T) * (x @ up.T). x [rows, K], gate and up [I, K], out [rows, I]; float8.py has checked all."""
    tiles, block_m = triton.cdiv(len(gate), settings.block_n), block_m_of(len(x))
    row_tiles = triton.cdiv(len(x), block_m)
    together = _together(settings, 2, block_m, tiles * row_tiles, _multiprocessors(x.device))
    compiled = launch(swiglu_kernel, (row_tiles, tiles))(
        _descriptor(x, block_m, settings.block_k),
        _pairs(gate, settings),
        _pairs(up, settings),
        gate.scale,
        up.scale,
        out,
        len(x),
        len(gate),
        x.shape[1],
        _stride(gate),
        _stride(up),
        gate.scale.stride(1) if gate.in_blocks else 0,
        out.stride(0),
        block_m,
        settings.block_n,
        settings.block_k,
        gate.in_blocks,
        settings.w_stages,
        settings.x_stages,
        _prefetch_stages(settings, 2),
        num_warps=settings.warps,
        maxnreg=_registers(settings, together),
        launch_pdl=True,
        **EXACT,
    )
    prefer_shared_memory(compiled)


def block_m_of(rows: int) -> int:
    """Rows of x to a program: the tensor cores' right operand, whose sums must fit the registers."""
    return min(max(16, triton.next_power_of_2(rows)), 256)


def overlaps(rows: int, block_n: int, in_blocks: bool) -> bool:
    """Whether linear_kernel has two products in flight: of few rows where it is exact and tiles fit the registers."""
    return rows > 64 or (block_n == 64 and not in_blocks)


def _together(settings: Streaming, weights: int, block_m: int, programs: int, multiprocessors: int) -> int:
    """How many programs share a multiprocessor."""
    w_stage, x_stage = weights * settings.block_n * settings.block_k, block_m * settings.block_k * 2
    shared = settings.w_stages * w_stage + settings.x_stages * x_stage
    most = _most_together(block_m, settings.block_n, settings.warps, weights == 2)
    return max(1, min(most, _SHARED_MEMORY // (shared + 1024), triton.cdiv(programs, multiprocessors)))


def _most_together(block_m: int, block_n: int, warps: int, fused: bool) -> int:
    """How many programs a multiprocessor has registers for."""
    if warps == 8:
        return 1
    return 2 if fused or block_n > 64 else 3 if block_m > 16 else 4


def _registers(settings: Streaming, together: int) -> int:
    """Of a thread, before those that load give theirs to those that multiply. They are counted as four warps."""
    return min(_REGISTERS // (together * 32 * (settings.warps + 4)) // 8 * 8, 248)


def _prefetch_stages(settings: Streaming, weights: int) -> int:
    """How many tiles of weights are in flight at a time before the input is there."""
    return min(settings.w_stages, max(1, _PREFETCH_BYTES // (weights * settings.block_n * settings.block_k)))


def _descriptor(tensor: Tensor, height: int, width: int) -> TensorDescriptor:
    layout = TILE_LAYOUT if width >= 64 else _NARROW_LAYOUT
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [height, width], layout)


def _pairs(weight: Float8Weight, settings: Streaming) -> TensorDescriptor:
    return _descriptor(weight.values.view(torch.int16), settings.block_n, settings.block_k // 2)


def _stride(weight: Float8Weight) -> int:
    """Of the scales, from one row or block to the next."""
    return weight.scale.stride(0) if len(weight.scale) > 1 else 0
