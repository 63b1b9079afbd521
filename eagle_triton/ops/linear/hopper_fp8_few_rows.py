"""Products of few rows with weights of eight bits on Hopper, which the tensor cores multiply without a conversion.

    linear_kernel:  out = x @ weight.T (+ bias), up to four weights side by side; the product, or its split sums
    swiglu_kernel:  out = silu(x @ gate.T) * (x @ up.T)

x comes as a pair (Float8Pair): a tile has its high parts of e4m3 above its low parts, so one product of eight bits
makes both sums. The tensor cores' sums of eight-bit products have about 14 bits. So they add up only 128 columns, the
width of a group and of a block of scales; these sums are scaled and added in fp32. Compared with fp64, a product is
2e-4 off (norms), and a product rounded to bf16 is 1.7e-3 off.

One warp of a program only loads: weights, then x, as far ahead as a ring of slots goes. A slot has a tile of each, a
barrier that says it is full, and one that says it has been read. A program starts early (runtime/overlap.py) and asks
for its first weights before x is ready, as in hopper.py. Times: docs/speed-notes.md, "FP8 weights";
`tools/tune_linear.py --float8` measures them with x's pair. Needs Triton 3.6.

| name         | shape                           | dtype, layout                                           |
|--------------|---------------------------------|---------------------------------------------------------|
| x parts      | [2 * rows, K]                   | e4m3, high above low                                    |
| x scales     | [groups, rows]                  | fp32                                                    |
| weights      | [N, K]                          | e4m3, rows 16-byte aligned                              |
| scales       | [N or 1, 1], [N / 128, K / 128] | fp32 or bf16                                            |
| bias         | [N]                             | as out                                                  |
| out          | [rows, N], [splits, rows, N]    | bf16; fp32 if the splits' sums stay apart; a pair       |

"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
from torch import Tensor

from eagle_triton.ops.linear.gluon_tiles import (
    await_full,
    barriers,
    block_scale,
    descriptor,
    give_back,
    load_weights,
    room_for,
    room_for_weights,
    scaled,
    steps_of,
    store,
    swiglu,
    tile_of,
)
from eagle_triton.ops.linear.settings import MULTIPROCESSORS, Streaming, tiles_of
from eagle_triton.ops.linear.weights import ScaledColumns
from eagle_triton.ops.views import Rows
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
from eagle_triton.runtime.gpu import multiprocessors_of
from eagle_triton.runtime.overlap import overlapped_on_hopper
from eagle_triton.runtime.row_formats import Float8Pair

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # of x's groups and rows
_A_GROUP = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of one group
_BLOCK_K = gl.constexpr(BLOCK)
_ROWS_OF_A_LOAD = 32  # a taller tile of x comes in loads of this height: those past the last row load other rows
_LOADER = gl.constexpr(24)  # registers of a thread of the loading warp
_PREFETCH_BYTES = 24 * 1024  # of weights in flight before the input is ready: more would slow the kernel that makes it
_SHARED_MEMORY = 224 * 1024  # of a multiprocessor, for the rings of its programs and the scales of x
_REGISTERS = 64 * 1024  # of a multiprocessor
_STAGES = 6  # slots of a ring at most
_MAX_GROUPS = 128  # of x: a program keeps the scales of up to this many in shared memory
_PROGRAMS = 120  # K is split until there are this many programs
_FEW_PROGRAMS = 90  # with this many, tiles are 128 rows of weights high where x has up to 16 rows
_DEEP = 8192  # with this many columns, tiles are 128 rows of weights high
_WIDE = 200  # with this many tiles, too


class _Ring(NamedTuple):
    """Slots for a tile of x's pair and one of each weight. Each has two barriers: it is full, and it has been read."""

    x: gl.shared_memory_descriptor
    w: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


@gluon.jit
def _ring(x_desc, w_descs, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES steps, with barriers that are ready."""
    x_tiles, w_tiles = room_for(x_desc, 2 * BLOCK_M, STAGES), room_for_weights(w_descs, BLOCK_N, STAGES)
    full, read = barriers(STAGES), barriers(STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)  # x and the weights arrive separately
        mbarrier.init(read.index(slot), count=1)
    fence_async_shared()
    return _Ring(x_tiles, w_tiles, full, read)


@gluon.jit
def _load_rows(x_desc, rows, step, first, ring):
    """Let TMA load x's pair of a step, after its weights.

    TMA is slower for rows outside of the tensor, so the first rows are loaded again instead of them.
    """
    STAGES: gl.constexpr = ring.full.shape[0]
    HEIGHT: gl.constexpr = x_desc.block_type.shape[0]
    LOADS: gl.constexpr = ring.x.shape[1] // HEIGHT
    tiles = reinterpret(ring.x, x_desc.dtype, [STAGES * LOADS, HEIGHT, _BLOCK_K], x_desc.layout)
    slot = step % STAGES
    mbarrier.expect(ring.full.index(slot), LOADS * x_desc.block_type.nbytes)
    for i in gl.static_range(LOADS):
        row = i % (LOADS // 2) * HEIGHT
        row = gl.where(row < rows, row, 0) + i // (LOADS // 2) * rows
        where = [row, (first + step) * _BLOCK_K]
        async_load(x_desc, where, ring.full.index(slot), tiles.index(slot * LOADS + i))


@gluon.jit
def _load(x_desc, w_descs, rows, col, first, count, ring, PREFETCH: gl.constexpr):
    """Load the operands of `count` steps from step `first`, with the weights of PREFETCH steps before x is ready."""
    gl.static_assert(ring.full.shape[0] > PREFETCH, "a reader of two slots gives the first back after the second")
    for step in range(gl.minimum(count, PREFETCH)):
        load_weights(w_descs, col, step, first, ring.w, ring.full, ring.read)
    gdc_wait()
    for step in range(count):
        _load_rows(x_desc, rows, step, first, ring)
        if step + PREFETCH < count:
            load_weights(w_descs, col, step + PREFETCH, first, ring.w, ring.full, ring.read)


@gluon.jit
def _zeros(HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """An accumulator; each warpgroup has 64 of its rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 32])
    return gl.zeros((HEIGHT, WIDTH), gl.float32, layout)


@gluon.jit
def _multiply(ring, step, zero, WEIGHT: gl.constexpr):
    """Weights of a step times x's pair, [BLOCK_N, 2 * BLOCK_M]. The caller must wait for its completion."""
    slot = step % ring.full.shape[0]
    x, w = ring.x.index(slot).permute((1, 0)), ring.w[WEIGHT].index(slot)
    return warpgroup_mma(w, x, zero, use_acc=False, is_async=True)


class _RowScales(NamedTuple):
    """The scales of x's groups and rows: [groups, rows] at `ptr`, and shared memory for the ones that a program
    keeps."""

    ptr: Tensor
    rows: int
    kept: gl.shared_memory_descriptor


@gluon.jit
def _room_for_scales(BLOCK_M: gl.constexpr, GROUPS: gl.constexpr):
    """Shared memory for the scales of x's rows in GROUPS groups. With 0 groups it has one, which is never read."""
    return gl.allocate_shared_memory(gl.float32, [max(GROUPS, 1), BLOCK_M], _SCALES)


@gluon.jit
def _keep_scales(ring, scales, first, count, GROUPS: gl.constexpr):
    """Copy the scales of x's rows in `count` groups from `first` on to shared memory.

    If each step loaded its own, it would wait for them as long as for weights from L2.
    """
    await_full(ring.full, 0)  # x is not ready before
    if GROUPS:
        BLOCK_M: gl.constexpr = scales.kept.shape[1]
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
        groups, offs = gl.arange(0, GROUPS, gl.SliceLayout(1, layout)), gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
        mask = (groups < count)[:, None] & (offs < scales.rows)[None, :]
        ptrs = scales.ptr + (first + groups)[:, None] * scales.rows + offs[None, :]
        scales.kept.store(gl.load(ptrs, mask=mask, other=0.0))
        debug_barrier()


@gluon.jit
def _row_scales(scales, first, step, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr):
    """The scales [1, BLOCK_M] of x's rows in a step."""
    BLOCK_M: gl.constexpr = scales.kept.shape[1]
    layout: gl.constexpr = gl.SliceLayout(0, _zeros(BLOCK_N, BLOCK_M).type.layout)
    if GROUPS:
        found = reinterpret(scales.kept, gl.float32, scales.kept.shape, _A_GROUP).index(step).load(layout)
    else:
        offs = gl.minimum(gl.arange(0, BLOCK_M, layout), scales.rows - 1)
        found = gl.load(scales.ptr + (first + step) * scales.rows + offs)
    return found[None, :]


@gluon.jit
def _add(total, sums, x_scale, scale, IN_BLOCKS: gl.constexpr):
    """total + scale * x_scale * (high + low / 16) of the sums [BLOCK_N, 2 * BLOCK_M] of a step. A thread has both parts
    of a number."""
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
    weight,
    scale_column,
    col,
    first,
    count,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """The sum [BLOCK_N, BLOCK_M] over `count` steps of K from step `first`, IN_FLIGHT of them (1 or 2) at a time."""
    zero, total = _zeros(BLOCK_N, 2 * BLOCK_M), _zeros(BLOCK_N, BLOCK_M)
    _keep_scales(ring, scales, first, count, GROUPS)
    k = first * _BLOCK_K
    pairs = 0
    if IN_FLIGHT == 2:
        pairs = count // 2 * 2
    for step in range(0, pairs, 2):
        scale0 = block_scale(weight, scale_column, col, k + step * _BLOCK_K, IN_BLOCKS)
        scale1 = block_scale(weight, scale_column, col, k + (step + 1) * _BLOCK_K, IN_BLOCKS)
        await_full(ring.full, step)
        sums0 = _multiply(ring, step, zero, 0)
        await_full(ring.full, step + 1)
        sums1 = _multiply(ring, step + 1, zero, 0)
        x_scale0 = _row_scales(scales, first, step, BLOCK_N, GROUPS)
        x_scale1 = _row_scales(scales, first, step + 1, BLOCK_N, GROUPS)
        sums0, sums1 = warpgroup_mma_wait(1, deps=[sums0, sums1])
        give_back(ring.read, step)
        total = _add(total, sums0, x_scale0, scale0, IN_BLOCKS)
        sums0, sums1 = warpgroup_mma_wait(0, deps=[sums0, sums1])
        give_back(ring.read, step + 1)
        total = _add(total, sums1, x_scale1, scale1, IN_BLOCKS)
    for step in range(pairs, count):
        scale = block_scale(weight, scale_column, col, k + step * _BLOCK_K, IN_BLOCKS)
        await_full(ring.full, step)
        sums = _multiply(ring, step, zero, 0)
        x_scale = _row_scales(scales, first, step, BLOCK_N, GROUPS)
        sums = warpgroup_mma_wait(0, deps=[sums])
        give_back(ring.read, step)
        total = _add(total, sums, x_scale, scale, IN_BLOCKS)
    return (total,)


@gluon.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    w3_desc,
    x_scale_ptr,
    columns,
    biases,
    out,
    rows,
    depth,
    scale_column,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Grid (column tiles of all weights, splits): as hopper.linear_kernel. Every split must have a step.

    scale_column: the stride between columns of block scales. GROUPS: see groups_of.
    """
    descs, split = (w0_desc, w1_desc, w2_desc, w3_desc), gl.program_id(1)
    tile = tile_of(gl.program_id(0), columns, descs, biases if biases is not None else (0, 0, 0, 0), out.ptr, BLOCK_N)
    col = tile.number * BLOCK_N
    first, count = steps_of(split, depth, _BLOCK_K, SPLITS)

    ring = _ring(x_desc, (tile.desc,), BLOCK_M, BLOCK_N, STAGES)
    scales = _RowScales(x_scale_ptr, rows, _room_for_scales(BLOCK_M, GROUPS))
    # fmt: off
    (total,) = gl.warp_specialize([
        (_multiply_split, (ring, scales, tile.weight, scale_column, col, first, count, BLOCK_M, BLOCK_N, IN_BLOCKS,
                           IN_FLIGHT, GROUPS)),
        (_load, (x_desc, (tile.desc,), rows, col, first, count, ring, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on
    gdc_launch_dependents()  # after the wait: attention relies on that (runtime/overlap.py)

    bias_ptr, cols = tile.bias if biases is not None else None, tile.weight.cols
    total = scaled(total, tile.weight, col, cols, IN_BLOCKS)
    out_rows = Rows(tile.out_ptr + split.to(gl.int64) * rows * out.row, out.row)
    store(total, out_rows, bias_ptr, col, rows, gl.where(split == 0, cols, 0), cols, BLOCK_M, BLOCK_N, True)


@gluon.jit
def _multiply_both(
    ring,
    scales,
    gate_w,
    up_w,
    scale_column,
    col,
    count,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """As _multiply_split for gate and up, one product at a time.

    The sums of two would not fit the registers beside the scales of x, and loading takes longer than both products.
    """
    zero, gate_total = _zeros(BLOCK_N, 2 * BLOCK_M), _zeros(BLOCK_N, BLOCK_M)
    up_total = gate_total
    _keep_scales(ring, scales, 0, count, GROUPS)
    for step in range(count):
        gate_scale = block_scale(gate_w, scale_column, col, step * _BLOCK_K, IN_BLOCKS)
        up_scale = block_scale(up_w, scale_column, col, step * _BLOCK_K, IN_BLOCKS)
        await_full(ring.full, step)
        gate = _multiply(ring, step, zero, 0)
        x_scale = _row_scales(scales, 0, step, BLOCK_N, GROUPS)
        gate = warpgroup_mma_wait(0, deps=[gate])
        gate_total = _add(gate_total, gate, x_scale, gate_scale, IN_BLOCKS)
        up = _multiply(ring, step, zero, 1)
        up = warpgroup_mma_wait(0, deps=[up])
        give_back(ring.read, step)
        up_total = _add(up_total, up, x_scale, up_scale, IN_BLOCKS)
    return gate_total, up_total


@gluon.jit
def _store_pair(out, parts_ptr, scale_ptr, col, rows, cols, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The pair of a tile [BLOCK_N, BLOCK_M] from column `col` on: fp8_pair_rows.py in Gluon."""
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
    store(high, Rows(parts_ptr, cols), None, col, rows, cols, cols, BLOCK_M, BLOCK_N, True)
    parts_ptr += rows.to(gl.int64) * cols
    store(low, Rows(parts_ptr, cols), None, col, rows, cols, cols, BLOCK_M, BLOCK_N, True)
    scale = gl.where(largest < float("inf"), scale, float("nan"))
    offs_m = gl.arange(0, BLOCK_M, largest.type.layout)
    gl.store(scale_ptr + col // _BLOCK_K * rows + offs_m, scale, mask=offs_m < rows)


@gluon.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    x_desc,
    gate_desc,
    up_desc,
    x_scale_ptr,
    gate_w,
    up_w,
    out,
    parts_ptr,
    out_scale_ptr,
    rows,
    depth,
    scale_column,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Grid (column tiles,): a program makes one tile of both products and multiplies them.

    With `parts_ptr` it stores the pair instead; its tile is then a group of columns.
    """
    col, cols = gl.program_id(0) * BLOCK_N, gate_w.cols
    count = gl.cdiv(depth, _BLOCK_K)
    ring = _ring(x_desc, (gate_desc, up_desc), BLOCK_M, BLOCK_N, STAGES)
    scales = _RowScales(x_scale_ptr, rows, _room_for_scales(BLOCK_M, GROUPS))
    gdc_launch_dependents()
    # fmt: off
    gate, up = gl.warp_specialize([
        (_multiply_both, (ring, scales, gate_w, up_w, scale_column, col, count, BLOCK_M, BLOCK_N, IN_BLOCKS, GROUPS)),
        (_load, (x_desc, (gate_desc, up_desc), rows, col, 0, count, ring, PREFETCH)),
    ], [1], [_LOADER])
    # fmt: on

    gate, up = scaled(gate, gate_w, col, cols, IN_BLOCKS), scaled(up, up_w, col, cols, IN_BLOCKS)
    product = swiglu(gate, up, gl.bfloat16)  # all pairs are of bf16
    if parts_ptr is None:
        store(product, out, None, col, rows, cols, cols, BLOCK_M, BLOCK_N, True)
    else:
        _store_pair(product.to(gl.float32), parts_ptr, out_scale_ptr, col, rows, cols, BLOCK_M, BLOCK_N)


def settings_for(rows: int, cols: tuple[int, ...], depth: int, fused: bool) -> Streaming:
    """Settings for a product of up to MAX_PAIRED_ROWS rows with weights [n, depth] for n in `cols`.

    `fused`: swiglu_kernel. Splits of K do not depend on the rows, so the bits of a row do not either. Tiles of 128 rows
    of weights read x half as often and load more weights at a time; tiles of 64 rows give more programs.
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


def linear_hopper_fp8_few_rows(
    x: Float8Pair,
    weights: Sequence[Float8Weight],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
) -> None:
    """x @ weight.T + bias, as few_rows.linear_few_rows; see linear_kernel. fp8.py has checked the arguments."""
    tiles, block_m = tiles_of(cols, settings.block_n), block_m_of(x.rows)
    in_flight = in_flight_of(tiles * settings.splits, multiprocessors_of(x.device))
    overlapped_on_hopper(linear_kernel, (tiles, settings.splits))(
        _rows_descriptor(x, block_m),
        *(_descriptor(weight.values, settings.block_n) for weight in weights),
        *[None] * (4 - len(weights)),
        x.scale,
        tuple(ScaledColumns(n, w.scale, w.scale_stride) for n, w in zip(cols, weights, strict=True)),
        None if biases[0] is None else tuple(biases),
        Rows.of(out),
        x.rows,
        x.shape[-1],
        weights[0].scale.stride(1) if weights[0].in_blocks else 0,
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
    )


def linear_swiglu_hopper_fp8_few_rows(
    x: Float8Pair, gate: Float8Weight, up: Float8Weight, out: Tensor | Float8Pair, settings: Streaming
) -> None:
    """silu(x @ gate.T) * (x @ up.T) as `out` [rows, I] or its pair. fp8.py has checked the arguments."""
    block_m = block_m_of(x.rows)
    overlapped_on_hopper(swiglu_kernel, (triton.cdiv(len(gate), settings.block_n),))(
        _rows_descriptor(x, block_m),
        _descriptor(gate.values, settings.block_n),
        _descriptor(up.values, settings.block_n),
        x.scale,
        ScaledColumns(len(gate), gate.scale, gate.scale_stride),
        ScaledColumns(len(up), up.scale, up.scale_stride),
        *((None, out.parts, out.scale) if isinstance(out, Float8Pair) else (Rows.of(out), None, None)),
        x.rows,
        x.shape[-1],
        gate.scale.stride(1) if gate.in_blocks else 0,
        block_m,
        settings.block_n,
        gate.in_blocks,
        settings.w_stages,
        prefetch_stages(settings, 2),
        groups_of(x.shape[-1], 1, block_m),
        num_warps=settings.warps,
        maxnreg=registers_of(settings, block_m, 1, 4),
    )


def block_m_of(rows: int) -> int:
    """Rows of x in a tile. The tensor cores' right operand has twice this number."""
    return max(16, triton.next_power_of_2(rows))


def groups_of(depth: int, splits: int, block_m: int) -> int:
    """The number of groups (a power of two) for which a program keeps scales of x in shared memory.

    0: it loads them in each step, which is faster for few rows.
    """
    groups = triton.next_power_of_2(triton.cdiv(triton.cdiv(depth, BLOCK), splits))
    return groups if block_m > 16 and groups <= _MAX_GROUPS else 0


def in_flight_of(programs: int, multiprocessors: int) -> int:
    """Products that a program runs at a time: two where it has a multiprocessor to itself."""
    return 2 if programs <= multiprocessors else 1


def registers_of(settings: Streaming, block_m: int, in_flight: int, totals: int) -> int:
    """Registers of a thread, before the loading warp, which counts as four, gives its own to the others."""
    a_sum = settings.block_n * block_m // (32 * settings.warps)
    wanted = a_sum * (2 * in_flight + totals) + 56
    shared = triton.cdiv(wanted * settings.warps // (settings.warps + 4) + 8, 8) * 8
    least = triton.cdiv(2 * a_sum + 40, 8) * 8  # ptxas compiles no product with fewer
    return min(max(shared, least), _REGISTERS // (32 * (settings.warps + 4)) // 8 * 8, 248)


def prefetch_stages(settings: Streaming, weights: int) -> int:
    """Steps for which weights are in flight before the input is ready."""
    return min(settings.w_stages - 1, max(1, _PREFETCH_BYTES // (weights * settings.block_n * BLOCK)))


def _rows_descriptor(x: Float8Pair, block_m: int) -> TensorDescriptor:
    return _descriptor(x.parts.view(-1, x.shape[-1]), min(block_m, _ROWS_OF_A_LOAD))


def _descriptor(tensor: Tensor, height: int) -> TensorDescriptor:
    return descriptor(tensor, height, BLOCK, TILE_LAYOUT)
