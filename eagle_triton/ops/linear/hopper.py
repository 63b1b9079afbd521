"""Products of few rows on Hopper that load weights before their input is ready.

    linear_kernel:  out = x @ weight.T (+ bias), up to four weights side by side; the product, or its split sums
    swiglu_kernel:  out = silu(x @ gate.T) * (x @ up.T), or gelu(x @ gate.T) * (x @ up.T)

The kernels of few_rows.py in Gluon, which places memory by hand. Tiles of the weights and of x come through TMA into
two rings of shared memory, with one barrier per slot. A program starts early (runtime/overlap.py), starts to load its
first weights, waits for the preceding kernels, and then loads x. After a small kernel this saves 1.5 to 2.3 us per
product. A kernel that writes the weights must therefore have completed when the kernel before the product starts.
Inside a decode step nothing writes them. Needs Triton 3.6.

x and weights are bf16 or fp16, with rows aligned to 16 bytes. `out` is [rows, N] as x, or fp32 [splits, rows, N].
Numerics: as in few_rows.py with the same splits of K, to the bit: K is summed in the same order, sixteen at a time.
(few_rows.py's tiles of 16 and 32 rows of x go through `mma`, these through `wgmma`; they have given the same bits.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
from torch import Tensor

from eagle_triton.ops.linear.gluon_tiles import (
    await_full,
    barriers,
    descriptor,
    ready,
    room_for,
    steps_of,
    store,
    swiglu,
    tile_of,
    zeros,
)
from eagle_triton.ops.linear.settings import MAX_STREAMED, MULTIPROCESSORS, Streaming, tiles_of
from eagle_triton.ops.linear.weights import Columns
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.gluon import (
    async_load,
    debug_barrier,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from eagle_triton.runtime.gpu import multiprocessors_of
from eagle_triton.runtime.overlap import overlapped_on_hopper

# One H200, Triton 3.6, bf16: (rows up to, rows of each weight, K) -> block_n, block_k, w_stages, x_stages. The figures
# are us in a CUDA graph, with a small kernel of 2.8 us before the product; then the same with few_rows.py's kernels, or
# with cuBLAS for the named rows (tools/tune_linear.py --streamed). Settings of SwiGLU, and those without figures, were
# chosen by the time of the whole step: see "Between the kernels" in docs/speed-notes.md.
_HOPPER = {
    (16, (4096,), 4096): (64, 256, 4, 3),  # o
    (16, (14336, 14336), 4096): (64, 128, 3, 3),  # gate and up
    (16, (4096,), 14336): (64, 256, 5, 3),  # down
    (16, (128256,), 4096): (128, 128, 6, 4),  # head
    (16, (32000,), 4096): (128, 128, 3, 3),  # draft head
    (16, (4096, 512, 512), 2880): (128, 128, 3, 3),  # qkv of gpt-oss-20b 10.1; 12.4
    (16, (2880,), 4096): (64, 128, 4, 3),  # its o 9.1; 11.1
    (16, (4096, 512, 512), 2048): (128, 128, 3, 3),  # qkv of Qwen3-30B-A3B 8.1; 10.3
    (16, (2048,), 4096): (64, 128, 4, 3),  # its o 7.8; 9.4
    (32, (4096, 1024, 1024), 4096): (64, 128, 4, 4),  # qkv, 32 rows 16.5; 19.4
    (32, (4096,), 4096): (64, 128, 6, 4),  # o 11.5; 13.5; 32 rows 12.1; cuBLAS 15.8
    (32, (14336, 14336), 4096): (64, 128, 2, 3),  # gate and up 59.0; 32 rows 59.4; cuBLAS 70.2
    (32, (4096,), 14336): (64, 128, 6, 4),  # down; 32 rows 32.6; cuBLAS 36.5
    (32, (4096, 1024, 1024), 8192): (64, 128, 3, 3),  # draft qkv 26.9; 29.2
    (32, (32000,), 4096): (128, 128, 4, 4),  # draft head 63.1; 65.1; 32 rows 66.3; cuBLAS 71.9
    (32, (17408, 17408), 5120): (128, 64, 3, 4),  # gate and up of Qwen3.5-27B 88.9; 105.2
    (32, (10240, 6144, 48, 48), 5120): (64, 128, 6, 4),  # its stack before a delta rule 43.1; 46.5
    (64, (4096, 1024, 1024), 4096): (64, 128, 4, 3),  # qkv 17.5; 19.0
    (64, (4096,), 4096): (64, 128, 6, 4),  # o
    (64, (14336, 14336), 4096): (64, 128, 2, 2),  # gate and up 61.6
    (64, (4096,), 14336): (64, 128, 6, 4),  # down
    (64, (128256,), 4096): (128, 128, 4, 4),  # head
    (64, (15360, 15360), 3840): (64, 128, 2, 2),  # gate and up of Gemma 3 12B 61.1; 64.5
    (64, (3840,), 15360): (128, 128, 4, 4),  # its down 33.7; cuBLAS 37.4
    (64, (17408, 17408), 5120): (64, 128, 4, 4),  # gate and up of Qwen3.5-27B 98.1; 112.4
    (64, (10240, 6144, 48, 48), 5120): (128, 128, 4, 4),  # its stack before a delta rule 44.7; 48.3
}
# The same for more rows, then cuBLAS with one launch per weight. Above 128 rows, hopper_many_rows.py comes first.
_MANY_ROWS = {
    (128, (4096, 1024, 1024), 4096): Streaming(64, 64, 2, False, 5, 4),  # qkv, 128 rows 21.2; 33.1
    (128, (14336, 14336), 4096): Streaming(128, 64, 1, False, 4, 4, 8),  # gate and up, 128 rows 66.5; 74.9
    (128, (12288, 12288), 4096): Streaming(128, 64, 1, False, 4, 4, 8),  # of Qwen3-8B, 128 rows 61.6; 66.3
    (128, (4096,), 4096): Streaming(128, 64, 4, False, 5, 4, 8),  # o, 128 rows 15.3; 16.0
    (128, (4096,), 12288): Streaming(128, 64, 4, False, 5, 4),  # down of Qwen3-8B, 128 rows 35.0; 35.9
    (128, (4096, 1024, 1024), 8192): Streaming(128, 64, 4, False, 4, 3, 8),  # draft qkv, 80 rows 33.9; 48.2
    (128, (4096,), 14336): Streaming(128, 64, 4, False, 4, 4, 8),  # down, 80 rows 37.8; 40.4
}
# Shared memory that a program of an unmeasured shape may take: alone on a multiprocessor, and as one of two.
_BYTES_ALONE, _BYTES_OF_TWO = 176 * 1024, 113 * 1024
_LONG = 2048  # splits with this many columns have tiles 256 wide where x has up to 16 rows
_FEW = 32  # up to this many rows the weights are the left operand
_PREFETCH_BYTES = 32 * 1024  # in flight before the input is ready: more would slow the kernel that makes the input
_MULTIPROCESSOR = 228 * 1024  # bytes of shared memory; each program takes 1024 more than it asks for
_MANY_ROWS_PROGRAMS = 90  # with many rows, K is split until there are this many programs
_WIDE_ENOUGH = 128 * _MANY_ROWS_PROGRAMS  # columns from which SwiGLU of many rows has wide tiles


class _Ring(NamedTuple):
    """Slots for tiles of a matrix, each with a barrier that says it is full."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def _ring(desc, STAGES: gl.constexpr):
    """Room for STAGES tiles. The caller makes the barriers ready."""
    gl.static_assert(STAGES >= 2, "the previous step's slot is refilled")
    return _Ring(desc, room_for(desc, desc.block_type.shape[0], STAGES), barriers(STAGES))


@gluon.jit
def _load(ring, step, wanted, row, column):
    """Let TMA load the tile of a step, at (row, column), if it is wanted."""
    slot = step % ring.full.shape[0]
    mbarrier.expect(ring.full.index(slot), ring.desc.block_type.nbytes, pred=wanted)
    async_load(ring.desc, [row, column], ring.full.index(slot), ring.tiles.index(slot), pred=wanted)


@gluon.jit
def _multiply_add(x, w, acc, SWAP: gl.constexpr):
    """acc + x @ w.T, or its transpose with SWAP. The caller must wait for its completion."""
    if SWAP:
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
    return acc


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
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLITS: gl.constexpr,
    SWAP: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Grid (column tiles of all weights, splits): a program makes one split of one tile of one product.

    The products' columns are side by side in `out`, the splits' sums one after another. The first split adds the
    bias. PREFETCH: tiles of weights in flight at a time before x is ready.
    """
    descs = (w0_desc, w1_desc, w2_desc, w3_desc)
    tile = tile_of(gl.program_id(0), columns, descs, biases if biases is not None else (0, 0, 0, 0), out.ptr, BLOCK_N)
    col, split = tile.number * BLOCK_N, gl.program_id(1)
    first, count = steps_of(split, depth, BLOCK_K, SPLITS)

    w, x = _ring(tile.desc, W_STAGES), _ring(x_desc, X_STAGES)
    ready((w.full, x.full), max(W_STAGES, X_STAGES))
    for i in gl.static_range(W_STAGES):
        if i >= PREFETCH:
            mbarrier.wait(w.full.index(i - PREFETCH), 0, pred=i - PREFETCH < count)
        _load(w, i, i < count, col, (first + i) * BLOCK_K)
    gdc_wait()
    for i in gl.static_range(X_STAGES):
        _load(x, i, i < count, 0, (first + i) * BLOCK_K)

    acc = zeros(BLOCK_M, BLOCK_N, SWAP)
    for step in range(count):
        await_full(w.full, step)
        await_full(x.full, step)
        acc = _multiply_add(x.tiles.index(step % X_STAGES), w.tiles.index(step % W_STAGES), acc, SWAP)
        acc = warpgroup_mma_wait(1, deps=[acc])  # the previous step is complete and its slots are free
        next_w, next_x = step - 1 + W_STAGES, step - 1 + X_STAGES
        _load(w, next_w, (step > 0) & (next_w < count), col, (first + next_w) * BLOCK_K)
        _load(x, next_x, (step > 0) & (next_x < count), 0, (first + next_x) * BLOCK_K)
    acc = warpgroup_mma_wait(0, deps=[acc])
    debug_barrier()  # no warpgroup may still read the rings: the store may reuse their memory
    gdc_launch_dependents()  # after the wait: attention relies on that (runtime/overlap.py)

    out_rows = Rows(tile.out_ptr + split.to(gl.int64) * rows * out.row, out.row)
    bias_ptr, cols = tile.bias if biases is not None else None, tile.weight.cols
    store(acc, out_rows, bias_ptr, col, rows, gl.where(split == 0, cols, 0), cols, BLOCK_M, BLOCK_N, SWAP)


@gluon.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    x_desc,
    gate_desc,
    up_desc,
    out,
    rows,
    cols,
    depth,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SWAP: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
    GELU_TANH: gl.constexpr,
):
    """Grid (column tiles,): a program makes one tile of both products and multiplies them. GELU_TANH: gelu for silu.

    The next kernel is a product and may start at once: its weights are loaded after these.
    """
    col = gl.program_id(0) * BLOCK_N
    count = gl.cdiv(depth, BLOCK_K)
    gate_w, up_w, x = _ring(gate_desc, W_STAGES), _ring(up_desc, W_STAGES), _ring(x_desc, X_STAGES)
    ready((gate_w.full, up_w.full, x.full), max(W_STAGES, X_STAGES))
    gdc_launch_dependents()
    for i in gl.static_range(W_STAGES):
        if i >= PREFETCH:
            mbarrier.wait(gate_w.full.index(i - PREFETCH), 0, pred=i - PREFETCH < count)
            mbarrier.wait(up_w.full.index(i - PREFETCH), 0, pred=i - PREFETCH < count)
        _load(gate_w, i, i < count, col, i * BLOCK_K)
        _load(up_w, i, i < count, col, i * BLOCK_K)
    gdc_wait()
    for i in gl.static_range(X_STAGES):
        _load(x, i, i < count, 0, i * BLOCK_K)

    gate = zeros(BLOCK_M, BLOCK_N, SWAP)
    up = zeros(BLOCK_M, BLOCK_N, SWAP)
    for step in range(count):
        x_tile = x.tiles.index(step % X_STAGES)
        await_full(gate_w.full, step)
        await_full(x.full, step)
        gate = _multiply_add(x_tile, gate_w.tiles.index(step % W_STAGES), gate, SWAP)
        await_full(up_w.full, step)
        up = _multiply_add(x_tile, up_w.tiles.index(step % W_STAGES), up, SWAP)
        gate, up = warpgroup_mma_wait(2, deps=[gate, up])  # as in linear_kernel
        next_w, next_x = step - 1 + W_STAGES, step - 1 + X_STAGES
        wanted = (step > 0) & (next_w < count)
        _load(gate_w, next_w, wanted, col, next_w * BLOCK_K)
        _load(up_w, next_w, wanted, col, next_w * BLOCK_K)
        _load(x, next_x, (step > 0) & (next_x < count), 0, next_x * BLOCK_K)
    gate, up = warpgroup_mma_wait(0, deps=[gate, up])
    debug_barrier()  # as in linear_kernel

    product = swiglu(gate, up, out.ptr.dtype.element_ty, GELU_TANH)
    store(product, out, None, col, rows, cols, cols, BLOCK_M, BLOCK_N, SWAP)


def settings_for(
    rows: int,
    cols: tuple[int, ...],
    depth: int,
    block_n: int,
    block_k: int,
    splits: int,
    fused: bool = False,
) -> Streaming | None:
    """Settings for a product of up to 64 rows with weights [n, depth] for n in `cols`; None: not with these kernels.

    block_n, block_k and splits are the same as in few_rows.py; they give the tiles' size for unmeasured shapes.
    `fused`: for swiglu_kernel. The tensor cores' tiles are 64 rows high, of x or of the weights. A half-empty tile of x
    takes a fifth longer, because rows outside of a tensor load no faster.
    """
    if rows > 64:
        return None
    swap = rows <= _FEW
    measured = _HOPPER.get((16, cols, depth)) if rows <= 16 else None
    measured = measured or _HOPPER.get((_FEW if swap else 64, cols, depth))
    if measured is not None:
        block_n, block_k, w_stages, x_stages = measured
    else:
        alone = tiles_of(cols, block_n, fused) * splits <= MULTIPROCESSORS
        if fused and 2 * (2 * block_n + _block_m(swap, rows)) * block_k * 2 > _BYTES_OF_TWO:
            block_k = 64  # two stages of the larger tiles would leave no room for a second program
        long = len(cols) == 1 and depth >= _LONG * splits and depth % (256 * splits) == 0
        if alone and long and rows <= 16 and (block_n, block_k) == (64, 128):
            block_k = 256  # more of a row at a time
        w_stage, x_stage = block_n * (2 if fused else 1) * block_k * 2, _block_m(swap, rows) * block_k * 2
        room = _BYTES_ALONE if alone else _BYTES_OF_TWO
        most = min(4 if fused else 6, triton.cdiv(depth, block_k * splits))
        w_stages = 2
        while w_stages < most and (w_stages + 1) * w_stage + min(w_stages + 1, 4) * x_stage <= room:
            w_stages += 1
        x_stages = min(w_stages, 4)
    if block_k < 64 or (swap and block_n < 64):
        return None
    return Streaming(block_n, block_k, splits, swap, w_stages, x_stages)


def many_rows_settings(rows: int, cols: tuple[int, ...], depth: int, fused: bool = False) -> Streaming | None:
    """Settings for a product of 65 to 256 rows; None: use cuBLAS.

    Besides measured shapes: stacks, for which cuBLAS needs a launch per weight, and SwiGLU up to 128 rows. Times:
    docs/speed-notes.md, "Large batches".
    """
    if not 64 < rows <= MAX_STREAMED:
        return None
    few = rows <= 128
    if few and (128, cols, depth) in _MANY_ROWS:
        return _MANY_ROWS[128, cols, depth]
    if fused:
        return Streaming(128 if cols[0] >= _WIDE_ENOUGH else 64, 64, 1, False, 4, 4, 8) if few else None
    if len(cols) < 3 or (not few and sum(cols) > 8192):
        return None
    splits, tiles = 1, tiles_of(cols, 64)
    while splits < 4 and tiles * splits < _MANY_ROWS_PROGRAMS and depth >= 8 * splits * 64:
        splits *= 2
    return Streaming(64, 64, splits, not few, 5 if few else 4, 4)


def linear_hopper(
    x: Tensor,
    weights: Sequence[Tensor],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    out: Tensor,
    settings: Streaming,
) -> None:
    """x @ weight.T + bias, as few_rows.linear_few_rows; see linear_kernel. dispatch.py has checked the arguments."""
    tiles = tiles_of(cols, settings.block_n)
    overlapped_on_hopper(linear_kernel, (tiles, settings.splits))(
        descriptor(x, _block_m(settings.swap, len(x)), settings.block_k),
        *(descriptor(weight, settings.block_n, settings.block_k) for weight in weights),
        *[None] * (4 - len(weights)),
        tuple(Columns(n) for n in cols),
        None if biases[0] is None else tuple(biases),
        Rows.of(out),
        len(x),
        x.shape[1],
        _block_m(settings.swap, len(x)),
        settings.block_n,
        settings.block_k,
        settings.splits,
        settings.swap,
        settings.w_stages,
        settings.x_stages,
        _prefetch_stages(settings, 1, len(x), tiles * settings.splits, multiprocessors_of(x.device)),
        num_warps=settings.warps,
    )


def linear_swiglu_hopper(
    x: Tensor, gate: Tensor, up: Tensor, out: Tensor, settings: Streaming, activation: str
) -> None:
    """activation(x @ gate.T) * (x @ up.T), as few_rows.linear_swiglu_few_rows. dispatch.py has checked the
    arguments."""
    cols = len(gate)
    tiles = triton.cdiv(cols, settings.block_n)
    overlapped_on_hopper(swiglu_kernel, (tiles,))(
        descriptor(x, _block_m(settings.swap, len(x)), settings.block_k),
        descriptor(gate, settings.block_n, settings.block_k),
        descriptor(up, settings.block_n, settings.block_k),
        Rows.of(out),
        len(x),
        cols,
        x.shape[1],
        _block_m(settings.swap, len(x)),
        settings.block_n,
        settings.block_k,
        settings.swap,
        settings.w_stages,
        settings.x_stages,
        _prefetch_stages(settings, 2, len(x), tiles, multiprocessors_of(x.device)),
        activation == "gelu_tanh",
        num_warps=settings.warps,
    )


def _block_m(swap: bool, rows: int) -> int:
    return max(16 if swap else 64, triton.next_power_of_2(rows))


def _prefetch_stages(settings: Streaming, weights: int, rows: int, programs: int, multiprocessors: int) -> int:
    """Tiles of weights in flight before the input is ready; all slots, if programs come in waves."""
    w_stage = weights * settings.block_n * settings.block_k * 2
    x_stage = _block_m(settings.swap, rows) * settings.block_k * 2
    shared = settings.w_stages * w_stage + settings.x_stages * x_stage
    if programs > multiprocessors * (_MULTIPROCESSOR // (shared + 1024)):
        return settings.w_stages
    return min(settings.w_stages, max(1, _PREFETCH_BYTES // w_stage))
