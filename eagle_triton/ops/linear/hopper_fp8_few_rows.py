"""Products of few rows with weights of eight bits on Hopper, whose tensor cores take both operands as they lie.

    linear_kernel:  out = x @ weight.T (+ bias), up to four weights side by side; split sums of K, or the product
    swiglu_kernel:  out = silu(x @ gate.T) * (x @ up.T)

x comes as a pair (Float8Pair): high and low parts of e4m3, one above the other in a tile, so that one product of eight
bits makes both sums, and no weight is converted. What the tensor cores add up in eight-bit products has some 14 bits;
so they add up 128 columns, the width of a group and of a block of scales, and these sums are scaled and added in fp32.
Against fp64 a product is 2e-4 off (norms), where one that is rounded to bf16 is 1.7e-3 off.

One warp of a program does nothing but load, weights ahead of x, as far as a ring of slots goes: a slot has a tile of
each, a barrier that says it is full, and one that says it has been read. Started early (runtime/overlap.py), a program
asks for its first weights before x is there, as in streamed.py. Needs Triton 3.6.

| name         | shape                           | dtype, layout                                           |
|--------------|---------------------------------|---------------------------------------------------------|
| x parts      | [2 * rows, K]                   | e4m3, high above low                                    |
| x scales     | [groups, rows]                  | fp32                                                    |
| weights      | [N, K]                          | e4m3, rows 16-byte aligned                              |
| scales       | [N or 1, 1], [N / 128, K / 128] | fp32 or bf16                                            |
| bias         | [N]                             | as out                                                  |
| out          | [rows, N], [splits, rows, N]    | bf16; fp32 if the splits' sums stay apart; a pair       |

Of Llama-3.1-8B with scales for blocks, us of 1 and 60 rows behind a small kernel of 2.8 on an H200, x's pair not
counted: q, k and v 10.1, 12.9; o 8.2, 9.0; gate and up 34.6, 39.3; down 18.9, 22.8. Their bytes alone need 8.8, 6.8,
30.8 and 16.8. Kernels that convert the weights, which they were before, took 12.4, 14.9; 9.4, 11.3; 40.5, 51.3; 20.9,
28.3. In a step less of that is left: 4.77 ms of a tree instead of 4.90, 2.84 of plain decoding as before, since what
waits between products is the same. Since then scales of x that are kept in shared memory have taken 4.4 us off down of
60 rows and 1.4 off o, and 0.16 ms off a tree; docs/speed-notes.md says what else was tried. (Experiments of products
with scales of x for rows, and of both steps, that were not kept; tools/tune_linear.py --float8 times products, x's pair
counted.)
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor

from eagle_triton.ops.linear.gluon_tiles import rounded, store
from eagle_triton.ops.linear.settings import MULTIPROCESSORS, Streaming, multiprocessors_of, tiles_of
from eagle_triton.runtime.float8_pair import Float8Pair
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight
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
from eagle_triton.runtime.launch import EXACT, launch
from eagle_triton.runtime.overlap import prefer_shared_memory

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # of x's groups and rows
_A_GROUP = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of these, one group's
_BLOCK_K = gl.constexpr(BLOCK)
_ROWS_OF_A_LOAD = 32  # of x: where a tile has more, those that end behind the last row are other rows, not padding
_LOADER = gl.constexpr(24)  # registers of a thread of the warp that loads
_PREFETCH_BYTES = 24 * 1024  # of weights in flight before the input is there: more would slow what makes the input
_SHARED_MEMORY = 224 * 1024  # of a multiprocessor, for the rings of its programs and the scales of x
_REGISTERS = 64 * 1024  # of a multiprocessor
_STAGES = 6  # slots of a ring at most
_MOST_GROUPS = 128  # of x, whose scales a program keeps in shared memory
_PROGRAMS = 120  # enough of them
_FEW_PROGRAMS = 90  # enough for tiles of 128 rows of weights where x has up to 16
_DEEP = 8192  # columns from which on tiles are 128 rows of weights high
_WIDE = 200  # and so they are of so many tiles


@gluon.jit
def _ring(x_desc, w_descs, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES tiles of x's pair and of each of the weights, and barriers: a slot is full, it has been read."""
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 2 * BLOCK_M, _BLOCK_K], x_desc.layout)
    shape: gl.constexpr = [STAGES, BLOCK_N, _BLOCK_K]
    w_tiles = (gl.allocate_shared_memory(w_descs[0].dtype, shape, w_descs[0].layout),)
    if len(w_descs) == 2:
        w_tiles = (w_tiles[0], gl.allocate_shared_memory(w_descs[1].dtype, shape, w_descs[1].layout))  # type: ignore[assignment]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)  # x and the weights are asked for by themselves
        mbarrier.init(read.index(slot), count=1)
    fence_async_shared()
    return x_tiles, w_tiles, full, read


@gluon.jit
def _put_weights(w_descs, col, step, first, ring, STAGES: gl.constexpr):
    """Let TMA load the weights of a step into its slot, once what lies there has been read."""
    _x_tiles, w_tiles, full, read = ring
    slot = step % STAGES
    mbarrier.wait(read.index(slot), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), len(w_descs) * w_descs[0].block_type.nbytes)
    for i in gl.static_range(len(w_descs)):
        where = [col, (first + step) * _BLOCK_K]
        async_load(w_descs[i], where, full.index(slot), w_tiles[i].index(slot))


@gluon.jit
def _put_rows(x_desc, rows, step, first, ring, STAGES: gl.constexpr):
    """Let TMA load x's pair of a step, behind its weights. TMA takes longer for what lies outside of the tensor; so
    instead of rows that do, the first ones are loaded again."""
    x_tiles, _w_tiles, full, _read = ring
    HEIGHT: gl.constexpr = x_desc.block_type.shape[0]
    LOADS: gl.constexpr = x_tiles.shape[1] // HEIGHT
    tiles = reinterpret(x_tiles, x_desc.dtype, [STAGES * LOADS, HEIGHT, _BLOCK_K], x_desc.layout)
    slot = step % STAGES
    mbarrier.expect(full.index(slot), LOADS * x_desc.block_type.nbytes)
    for i in gl.static_range(LOADS):
        row = i % (LOADS // 2) * HEIGHT
        row = gl.where(row < rows, row, 0) + i // (LOADS // 2) * rows
        where = [row, (first + step) * _BLOCK_K]
        async_load(x_desc, where, full.index(slot), tiles.index(slot * LOADS + i))


@gluon.jit
def _load(x_desc, w_descs, rows, col, first, count, ring, STAGES: gl.constexpr, PREFETCH: gl.constexpr):
    """Load all that is multiplied in `count` steps from step `first`: weights of PREFETCH steps before x is there."""
    gl.static_assert(PREFETCH < STAGES, "who reads two slots gives the first one back behind the second")
    for step in range(gl.minimum(count, PREFETCH)):
        _put_weights(w_descs, col, step, first, ring, STAGES)
    gdc_wait()
    for step in range(count):
        _put_rows(x_desc, rows, step, first, ring, STAGES)
        if step + PREFETCH < count:
            _put_weights(w_descs, col, step + PREFETCH, first, ring, STAGES)


@gluon.jit
def _zeros(HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """An accumulator; each warpgroup has 64 of its rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 32])
    return gl.zeros((HEIGHT, WIDTH), gl.float32, layout)


@gluon.jit
def _multiply(ring, step, zero, WEIGHT: gl.constexpr, STAGES: gl.constexpr):
    """Weights of a step, times x's pair: [BLOCK_N, 2 * BLOCK_M], not complete before it is waited for."""
    slot = step % STAGES
    x, w = ring[0].index(slot).permute((1, 0)), ring[1][WEIGHT].index(slot)
    return warpgroup_mma(w, x, zero, use_acc=False, is_async=True)


@gluon.jit
def _await(ring, step, STAGES: gl.constexpr):
    """Wait until the slot of a step is full."""
    mbarrier.wait(ring[2].index(step % STAGES), step // STAGES & 1)


@gluon.jit
def _give_back(ring, step, STAGES: gl.constexpr):
    """The slot of a step has been read."""
    mbarrier.arrive(ring[3].index(step % STAGES))


@gluon.jit
def _block_scale(scale_ptr, col, k, stride_sn, stride_sk, IN_BLOCKS: gl.constexpr):
    """The scale of the weights at (col, k), where it is for blocks."""
    scale = (k * 0).to(gl.float32)
    if IN_BLOCKS:
        scale = gl.load(scale_ptr + col // _BLOCK_K * stride_sn + k // _BLOCK_K * stride_sk).to(gl.float32)
    return scale


@gluon.jit
def _room_for_scales(BLOCK_M: gl.constexpr, GROUPS: gl.constexpr):
    """Shared memory for the scales of x's rows in GROUPS groups; of one that nobody reads if there are none."""
    return gl.allocate_shared_memory(gl.float32, [max(GROUPS, 1), BLOCK_M], _SCALES)


@gluon.jit
def _keep_scales(ring, x_scale_ptr, rows, first, count, scales, GROUPS: gl.constexpr):
    """Copy the scales of x's rows in `count` groups from `first` on to shared memory. In each step anew, they would be
    waited for as long as all that is on its way from L2 together with the weights."""
    _await(ring, 0, 1)  # x is not there before
    if GROUPS:
        BLOCK_M: gl.constexpr = scales.shape[1]
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
        groups, offs = gl.arange(0, GROUPS, gl.SliceLayout(1, layout)), gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
        mask = (groups < count)[:, None] & (offs < rows)[None, :]
        ptrs = x_scale_ptr + (first + groups)[:, None] * rows + offs[None, :]
        scales.store(gl.load(ptrs, mask=mask, other=0.0))
        debug_barrier()


@gluon.jit
def _row_scales(scales, x_scale_ptr, rows, first, step, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr):
    """The scales [1, BLOCK_M] of x's rows in a step."""
    BLOCK_M: gl.constexpr = scales.shape[1]
    layout: gl.constexpr = gl.SliceLayout(0, _zeros(BLOCK_N, BLOCK_M).type.layout)
    if GROUPS:
        found = reinterpret(scales, gl.float32, scales.shape, _A_GROUP).index(step).load(layout)
    else:
        offs = gl.minimum(gl.arange(0, BLOCK_M, layout), rows - 1)
        found = gl.load(x_scale_ptr + (first + step) * rows + offs)
    return found[None, :]


@gluon.jit
def _add(total, sums, x_scale, scale, IN_BLOCKS: gl.constexpr):
    """total + scale * x_scale * (high + low / 16) of the sums [BLOCK_N, 2 * BLOCK_M] of a step. A thread has both of a
    number."""
    HEIGHT: gl.constexpr = sums.shape[0]
    WIDTH: gl.constexpr = sums.shape[1] // 2
    high, low = sums.reshape((HEIGHT, 2, WIDTH)).permute((0, 2, 1)).split()
    both = gl.fma(low, gl.full(low.shape, 0.0625, gl.float32, low.type.layout), high)
    both = gl.convert_layout(both, total.type.layout, assert_trivial=True)
    if IN_BLOCKS:
        x_scale *= scale
    return gl.fma(both, x_scale.broadcast_to(both.shape), total)


@gluon.jit
def _multiply_split(
    ring,
    scales,
    x_scale_ptr,
    scale_ptr,
    rows,
    col,
    first,
    count,
    stride_sn,
    stride_sk,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """The sum [BLOCK_N, BLOCK_M] over `count` steps of K from step `first`, IN_FLIGHT of them (1 or 2) at a time."""
    zero, total = _zeros(BLOCK_N, 2 * BLOCK_M), _zeros(BLOCK_N, BLOCK_M)
    _keep_scales(ring, x_scale_ptr, rows, first, count, scales, GROUPS)
    k = first * _BLOCK_K
    pairs = 0
    if IN_FLIGHT == 2:
        pairs = count // 2 * 2
    for step in range(0, pairs, 2):
        scale0 = _block_scale(scale_ptr, col, k + step * _BLOCK_K, stride_sn, stride_sk, IN_BLOCKS)
        scale1 = _block_scale(scale_ptr, col, k + (step + 1) * _BLOCK_K, stride_sn, stride_sk, IN_BLOCKS)
        _await(ring, step, STAGES)
        sums0 = _multiply(ring, step, zero, 0, STAGES)
        _await(ring, step + 1, STAGES)
        sums1 = _multiply(ring, step + 1, zero, 0, STAGES)
        x_scale0 = _row_scales(scales, x_scale_ptr, rows, first, step, BLOCK_N, GROUPS)
        x_scale1 = _row_scales(scales, x_scale_ptr, rows, first, step + 1, BLOCK_N, GROUPS)
        sums0, sums1 = warpgroup_mma_wait(1, deps=[sums0, sums1])
        _give_back(ring, step, STAGES)
        total = _add(total, sums0, x_scale0, scale0, IN_BLOCKS)
        sums0, sums1 = warpgroup_mma_wait(0, deps=[sums0, sums1])
        _give_back(ring, step + 1, STAGES)
        total = _add(total, sums1, x_scale1, scale1, IN_BLOCKS)
    for step in range(pairs, count):
        scale = _block_scale(scale_ptr, col, k + step * _BLOCK_K, stride_sn, stride_sk, IN_BLOCKS)
        _await(ring, step, STAGES)
        sums = _multiply(ring, step, zero, 0, STAGES)
        x_scale = _row_scales(scales, x_scale_ptr, rows, first, step, BLOCK_N, GROUPS)
        sums = warpgroup_mma_wait(0, deps=[sums])
        _give_back(ring, step, STAGES)
        total = _add(total, sums, x_scale, scale, IN_BLOCKS)
    return (total,)


@gluon.jit
def _scaled(total, scale_ptr, col, cols, stride_sn, IN_BLOCKS: gl.constexpr):
    """The sum [BLOCK_N, BLOCK_M] times the scales of the weights' rows, if they are not for blocks."""
    if not IN_BLOCKS:
        offs_n = gl.minimum(col + gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout)), cols - 1)
        total *= gl.load(scale_ptr + offs_n * stride_sn).to(gl.float32)[:, None]
    return total


@gluon.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    w3_desc,
    x_scale_ptr,
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
    SPLITS: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Grid (column tiles of all weights, splits): as streamed.linear_kernel. No split may be without a step.

    stride_sn: of a weight's scales from row to row, or block to block, 0 if one is for all. GROUPS: see groups_of.
    """
    tile, split = gl.program_id(0), gl.program_id(1)
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
    steps = gl.cdiv(depth, _BLOCK_K)
    per_split = gl.cdiv(steps, SPLITS)
    first = split * per_split
    count = gl.minimum(per_split, steps - first)

    ring, scales = _ring(x_desc, (w_desc,), BLOCK_M, BLOCK_N, STAGES), _room_for_scales(BLOCK_M, GROUPS)
    # fmt: off
    (total,) = gl.warp_specialize([
        (_multiply_split, (ring, scales, x_scale_ptr, scale_ptr, rows, col, first, count, stride_sn, stride_sk, BLOCK_M,
                           BLOCK_N, IN_BLOCKS, IN_FLIGHT, STAGES, GROUPS)),
        (_load, (x_desc, (w_desc,), rows, col, first, count, ring, STAGES, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on
    gdc_launch_dependents()  # behind the wait: attention relies on that (runtime/overlap.py)

    total = _scaled(total, scale_ptr, col, cols, stride_sn, IN_BLOCKS)
    out_ptr += split.to(gl.int64) * rows * stride_om
    store(total, out_ptr, bias_ptr, col, rows, gl.where(split == 0, cols, 0), cols, stride_om, BLOCK_M, BLOCK_N, True)


@gluon.jit
def _multiply_both(
    ring,
    scales,
    x_scale_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    rows,
    col,
    count,
    stride_sn0,
    stride_sn1,
    stride_sk,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """As _multiply_split, of the gate and of what it gates, one product at a time: the sums of two would not fit the
    registers beside the scales of x, and by its cycles memory should take longer than both."""
    zero, gate_total = _zeros(BLOCK_N, 2 * BLOCK_M), _zeros(BLOCK_N, BLOCK_M)
    up_total = gate_total
    _keep_scales(ring, x_scale_ptr, rows, 0, count, scales, GROUPS)
    for step in range(count):
        gate_scale = _block_scale(gate_scale_ptr, col, step * _BLOCK_K, stride_sn0, stride_sk, IN_BLOCKS)
        up_scale = _block_scale(up_scale_ptr, col, step * _BLOCK_K, stride_sn1, stride_sk, IN_BLOCKS)
        _await(ring, step, STAGES)
        gate = _multiply(ring, step, zero, 0, STAGES)
        x_scale = _row_scales(scales, x_scale_ptr, rows, 0, step, BLOCK_N, GROUPS)
        gate = warpgroup_mma_wait(0, deps=[gate])
        gate_total = _add(gate_total, gate, x_scale, gate_scale, IN_BLOCKS)
        up = _multiply(ring, step, zero, 1, STAGES)
        up = warpgroup_mma_wait(0, deps=[up])
        _give_back(ring, step, STAGES)
        up_total = _add(up_total, up, x_scale, up_scale, IN_BLOCKS)
    return gate_total, up_total


@gluon.jit
def _store_pair(out, parts_ptr, scale_ptr, col, rows, cols, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The pair of a tile [BLOCK_N, BLOCK_M] whose first column is `col`: fp8_pair_rows.py in Gluon."""
    gl.static_assert(BLOCK_N == _BLOCK_K, "a tile is a group")
    largest = gl.max(gl.where(out == out, gl.abs(out), float("inf")), 0)
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 0xFF
    exponent = gl.where(largest == 0.0, 134, gl.minimum(gl.maximum(exponent, 8), 254))
    scale = ((exponent - 7) << 23).to(gl.float32, bitcast=True)
    out *= ((261 - exponent) << 23).to(gl.float32, bitcast=True)[None, :]
    bits = out.to(gl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(gl.float32, bitcast=True)
    small = (out + 24576.0) - 24576.0
    high = gl.where(gl.abs(out) < 0.015625, small, normal)
    low = (out - high) * 16.0
    store(high, parts_ptr, None, col, rows, cols, cols, cols, BLOCK_M, BLOCK_N, True)
    parts_ptr += rows.to(gl.int64) * cols
    store(low, parts_ptr, None, col, rows, cols, cols, cols, BLOCK_M, BLOCK_N, True)
    scale = gl.where(largest < float("inf"), scale, float("nan"))
    offs_m = gl.arange(0, BLOCK_M, largest.type.layout)
    gl.store(scale_ptr + col // _BLOCK_K * rows + offs_m, scale, mask=offs_m < rows)


@gluon.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    x_desc,
    gate_desc,
    up_desc,
    x_scale_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    out_ptr,
    parts_ptr,
    out_scale_ptr,
    rows,
    cols,
    depth,
    stride_sn0,
    stride_sn1,
    stride_sk,
    stride_om,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Grid (column tiles,): a program makes one tile of both products and multiplies them. If there is room for a pair,
    it stores that instead: its tile is a group of columns."""
    col = gl.program_id(0) * BLOCK_N
    count = gl.cdiv(depth, _BLOCK_K)
    ring, scales = _ring(x_desc, (gate_desc, up_desc), BLOCK_M, BLOCK_N, STAGES), _room_for_scales(BLOCK_M, GROUPS)
    gdc_launch_dependents()
    # fmt: off
    gate, up = gl.warp_specialize([
        (_multiply_both, (ring, scales, x_scale_ptr, gate_scale_ptr, up_scale_ptr, rows, col, count, stride_sn0,
                          stride_sn1, stride_sk, BLOCK_M, BLOCK_N, IN_BLOCKS, STAGES, GROUPS)),
        (_load, (x_desc, (gate_desc, up_desc), rows, col, 0, count, ring, STAGES, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on

    gate = _scaled(gate, gate_scale_ptr, col, cols, stride_sn0, IN_BLOCKS)
    up = _scaled(up, up_scale_ptr, col, cols, stride_sn1, IN_BLOCKS)
    kind: gl.constexpr = gl.bfloat16  # as all that comes in pairs
    gate, up = rounded(gate, kind), rounded(up, kind)
    out = rounded(gate * (1.0 / (1.0 + gl.exp(-gate))), kind) * up
    if parts_ptr is None:
        store(out.to(kind), out_ptr, None, col, rows, cols, cols, stride_om, BLOCK_M, BLOCK_N, True)
    else:
        _store_pair(rounded(out, kind), parts_ptr, out_scale_ptr, col, rows, cols, BLOCK_M, BLOCK_N)


def settings_for(rows: int, cols: tuple[int, ...], depth: int, fused: bool) -> Streaming:
    """Settings for the product of so many rows, at most MOST_ROWS, with weights [n, depth] for n in `cols`; `fused`:
    swiglu_kernel.

    Splits of K do not depend on the rows, so that the bits of a row do not. Tiles of 128 rows of weights read x half as
    often, and more of the weights at a time; those of 64 are more.
    """
    block_m = block_m_of(rows)
    block_n = 128 if fused or depth >= _DEEP or tiles_of(cols, 128) >= _WIDE else 64
    splits = 1
    tiles = tiles_of(cols, block_n, fused)
    while not fused and splits < 4 and tiles * splits < _PROGRAMS and depth >= 8 * splits * BLOCK:
        splits *= 2
    if block_m == 16 and tiles_of(cols, 128, fused) * splits >= _FEW_PROGRAMS:
        block_n, tiles = 128, tiles_of(cols, 128, fused)
    warps = 8 if block_n == 128 and (block_m > 16 or not fused) else 4
    programs = tiles * splits
    found = Streaming(block_n, BLOCK, splits, True, _STAGES, _STAGES, warps)
    in_flight = 1 if fused else in_flight_of(programs, MULTIPROCESSORS)
    most = _REGISTERS // (registers_of(found, block_m, in_flight, 4 if fused else 1) * 32 * (warps + 4))
    together = max(1, min(most, triton.cdiv(programs, MULTIPROCESSORS)))
    slot = (block_n * (2 if fused else 1) + 2 * block_m) * BLOCK
    of_scales = 4 * groups_of(depth, splits, block_m) * block_m
    stages = min(_STAGES, max(2, (_SHARED_MEMORY // together - of_scales) // slot))
    return found._replace(w_stages=stages, x_stages=stages)


def linear(
    x: Float8Pair,
    weights: Sequence[Float8Weight],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
) -> None:
    """x @ weight.T + bias for one, three or four weights, side by side in `out`; see linear_kernel. float8.py has
    checked all.

    Of weights [Ni, K] the first cols[i] rows; biases [Ni] or None each; out [rows, sum of cols], or fp32 [splits, rows,
    sum of cols].
    """
    tiles, block_m = tiles_of(cols, settings.block_n), block_m_of(x.rows)
    in_flight = in_flight_of(tiles * settings.splits, multiprocessors_of(x.device))
    absent = [None] * (4 - len(weights))
    compiled = launch(linear_kernel, (tiles, settings.splits))(
        _rows_descriptor(x, block_m),
        *(_descriptor(weight.values, settings.block_n) for weight in weights),
        *absent,
        x.scale,
        *(weight.scale for weight in weights),
        *absent,
        *biases,
        *absent,
        out,
        x.rows,
        *cols,
        *(0 for _ in absent),
        x.shape[-1],
        *(weight.scale_stride for weight in weights),
        *(0 for _ in absent),
        weights[0].scale.stride(1) if weights[0].in_blocks else 0,
        out.stride(-2),
        block_m,
        settings.block_n,
        settings.splits,
        weights[0].in_blocks,
        in_flight,
        settings.w_stages,
        prefetch_stages(settings, 1),
        groups_of(x.shape[-1], settings.splits, block_m),
        num_warps=settings.warps,
        maxnreg=registers_of(settings, block_m, in_flight, 1),
        launch_pdl=True,
        **EXACT,
    )
    prefer_shared_memory(compiled)


def linear_swiglu(
    x: Float8Pair, gate: Float8Weight, up: Float8Weight, out: Tensor | Float8Pair, settings: Streaming
) -> None:
    """silu(x @ gate.T) * (x @ up.T). x [rows, K], gate and up [I, K], out [rows, I], or its pair; float8.py has checked
    all."""
    pair = out if isinstance(out, Float8Pair) else None
    block_m = block_m_of(x.rows)
    compiled = launch(swiglu_kernel, (triton.cdiv(len(gate), settings.block_n),))(
        _rows_descriptor(x, block_m),
        _descriptor(gate.values, settings.block_n),
        _descriptor(up.values, settings.block_n),
        x.scale,
        gate.scale,
        up.scale,
        out if pair is None else None,
        None if pair is None else pair.parts,
        None if pair is None else pair.scale,
        x.rows,
        len(gate),
        x.shape[-1],
        gate.scale_stride,
        up.scale_stride,
        gate.scale.stride(1) if gate.in_blocks else 0,
        len(gate),
        block_m,
        settings.block_n,
        gate.in_blocks,
        settings.w_stages,
        prefetch_stages(settings, 2),
        groups_of(x.shape[-1], 1, block_m),
        num_warps=settings.warps,
        maxnreg=registers_of(settings, block_m, 1, 4),
        launch_pdl=True,
        **EXACT,
    )
    prefer_shared_memory(compiled)


def block_m_of(rows: int) -> int:
    """Rows of x in a tile; the tensor cores' right operand has twice as many."""
    return max(16, triton.next_power_of_2(rows))


def groups_of(depth: int, splits: int, block_m: int) -> int:
    """Groups of x whose scales a program keeps in shared memory, a power of two; 0: it asks for them in each step, as
    is faster for few rows."""
    groups = triton.next_power_of_2(triton.cdiv(triton.cdiv(depth, BLOCK), splits))
    return groups if block_m > 16 and groups <= _MOST_GROUPS else 0


def in_flight_of(programs: int, multiprocessors: int) -> int:
    """Products that a program has under way: two where it has a multiprocessor to itself."""
    return 2 if programs <= multiprocessors else 1


def registers_of(settings: Streaming, block_m: int, in_flight: int, totals: int) -> int:
    """Of a thread, before those that load give theirs to those that multiply: what sums take, and others. They are
    counted as four warps."""
    a_sum = settings.block_n * block_m // (32 * settings.warps)
    wanted = a_sum * (2 * in_flight + totals) + 56
    shared = triton.cdiv(wanted * settings.warps // (settings.warps + 4) + 8, 8) * 8
    least = triton.cdiv(2 * a_sum + 40, 8) * 8  # ptxas compiles no product with fewer
    return min(max(shared, least), _REGISTERS // (32 * (settings.warps + 4)) // 8 * 8, 248)


def prefetch_stages(settings: Streaming, weights: int) -> int:
    """Steps whose weights are in flight before the input is there."""
    return min(settings.w_stages - 1, max(1, _PREFETCH_BYTES // (weights * settings.block_n * BLOCK)))


def _rows_descriptor(x: Float8Pair, block_m: int) -> TensorDescriptor:
    return _descriptor(x.parts.view(-1, x.shape[-1]), min(block_m, _ROWS_OF_A_LOAD))


def _descriptor(tensor: Tensor, height: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [height, BLOCK], TILE_LAYOUT)
