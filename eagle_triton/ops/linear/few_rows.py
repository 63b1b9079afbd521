"""Triton kernels for products of few rows: tiles of x @ weight.T, with or without split K, and of SwiGLU's products.

Weights come through TMA descriptors on Hopper and newer (16 bits, rows aligned to 16 bytes), by plain loads elsewhere.
The megakernel uses the tile functions too. Besides the names in `linear/__init__.py`:

| name       | shape                         | dtype, layout                                                |
|------------|-------------------------------|--------------------------------------------------------------|
| partials   | [tiles, splits, tile]         | fp32, the partial sums of each tile                          |
| arrivals   | [tiles]                       | int32, zero between launches                                 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle_triton.ops.layers.values import activated, rounded
from eagle_triton.ops.linear.settings import Settings, block_m_of, descriptors, tiles_of
from eagle_triton.ops.linear.weights import Weight, tile_of
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch


class Operand(NamedTuple):
    """A matrix [rows, K] of a product with contiguous rows; `desc`: its TMA descriptor, or None."""

    ptr: Tensor
    desc: TensorDescriptor | None
    row: int
    rows: int


@triton.jit
def load_tile(matrix, row, k, depth, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """[ROWS, BLOCK_K] of an Operand from (row, k). Rows past the end are arbitrary, columns past it 0."""
    if matrix.desc is not None:
        tile = matrix.desc.load([row, k])
    else:
        offs_row = tl.minimum(row + tl.arange(0, ROWS), matrix.rows - 1).to(tl.int64)
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = None if EVEN_K else (offs_k < depth)[None, :]
        ptrs = matrix.ptr + offs_row[:, None] * matrix.row + offs_k[None, :]
        tile = tl.load(ptrs, mask=mask, other=None if EVEN_K else 0.0)
    return tile


@triton.jit
def zeros_tile(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """An accumulator: [BLOCK_M, BLOCK_N], or its transpose with SWAP."""
    return tl.zeros((BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N), tl.float32)


@triton.jit
def multiply_add(x, w, acc, SWAP: tl.constexpr):
    """acc + x @ w.T, or its transpose with SWAP, where the weights are the tall left operand of the tensor cores."""
    if SWAP:
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def add_bias(acc, bias_ptr, col, cols, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    offs_n = col + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < cols, other=0.0).to(tl.float32)
    return acc + (bias[:, None] if SWAP else bias[None, :])


@triton.jit
def store_tile(
    acc, residual, out, row, col, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr
):
    """Add the residual (Rows, or None), round, and store the tile at (row, col) of `out` (Rows)."""
    if SWAP:
        acc = acc.T
    offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = col + tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
    if residual is not None:
        added = tl.load(residual.ptr + offs_m[:, None] * residual.row + offs_n[None, :], mask=mask, other=0.0)
        acc += added.to(tl.float32)
    out_ptr = out.ptr + offs_m[:, None] * out.row + offs_n[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def join_splits(acc, partials_ptr, arrivals_ptr, slot, split, SPLITS: tl.constexpr):
    """Store this split's partial sum of a tile. Returns (the sum of all in order, True) to the last split to arrive."""
    height: tl.constexpr = acc.shape[0]
    width: tl.constexpr = acc.shape[1]
    offs = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    partials_ptr += slot.to(tl.int64) * (SPLITS * height * width)
    tl.store(partials_ptr + split * (height * width) + offs, acc)
    last = is_last_to_arrive(arrivals_ptr + slot, SPLITS)
    if last:
        if SPLITS == 2:  # a sum of two is the same in either order
            acc += tl.load(partials_ptr + (1 - split) * (height * width) + offs, cache_modifier=".cg")
        else:
            acc = tl.load(partials_ptr + offs, cache_modifier=".cg")
            for i in tl.static_range(1, SPLITS):
                acc += tl.load(partials_ptr + i * (height * width) + offs, cache_modifier=".cg")
    return acc, last


@triton.jit
def is_last_to_arrive(arrivals_ptr, programs):
    """Whether this is the last of `programs` to arrive. It then sees in L2 what the others have stored before."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(arrivals_ptr, 0)  # for the next launch
    return last


@triton.jit
def product_steps(
    x,
    w,
    row,
    col,
    split,
    splits,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """The accumulator of split number `split` of the tile at (row, col) of x @ w.T, two Operands."""
    steps = tl.cdiv(depth, BLOCK_K)
    per_split = tl.cdiv(steps, splits)
    first = split * per_split
    acc = zeros_tile(BLOCK_M, BLOCK_N, SWAP)
    for step in tl.range(first, tl.minimum(first + per_split, steps), num_stages=STAGES):
        w_tile = load_tile(w, col, step * BLOCK_K, depth, BLOCK_N, BLOCK_K, EVEN_K)
        x_tile = load_tile(x, row, step * BLOCK_K, depth, BLOCK_M, BLOCK_K, EVEN_K)
        acc = multiply_add(x_tile, w_tile, acc, SWAP)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weights,
    biases,
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    w3_desc,
    residual,
    out,
    partials_ptr,
    arrivals_ptr,
    rows,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    KEEP_SPLITS: tl.constexpr,
):
    """Grid (column tiles of all weights, splits, row tiles); a program makes one split of one tile of one product.

    weights: one, three or four; their products stand side by side in `out`. The first split adds the bias.
    """
    number, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = row_tile * tl.num_programs(0) + number
    descs = (w0_desc, w1_desc, w2_desc, w3_desc) if w0_desc is not None else (0, 0, 0, 0)
    tile = tile_of(number, weights, descs, biases if biases is not None else (0, 0, 0, 0), out.ptr, BLOCK_N)
    weight, out_ptr = tile.weight, tile.out_ptr
    row, col, cols = row_tile * BLOCK_M, tile.number * BLOCK_N, weight.cols
    acc = product_steps(
        Operand(x.ptr, x_desc, x.row, rows),
        Operand(weight.ptr, tile.desc if w0_desc is not None else None, weight.row, cols),
        row,
        col,
        split,
        SPLITS,
        depth,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SWAP,
        EVEN_K,
    )
    if biases is not None:
        acc = add_bias(acc, tile.bias, col, tl.where(split == 0, cols, 0), BLOCK_N, SWAP)
    if KEEP_SPLITS:  # out is [SPLITS, rows, ...]
        out_ptr += split.to(tl.int64) * rows * out.row
        store_tile(acc, None, Rows(out_ptr, out.row), row, col, rows, cols, BLOCK_M, BLOCK_N, SWAP)
    elif SPLITS == 1:
        store_tile(acc, residual, Rows(out_ptr, out.row), row, col, rows, cols, BLOCK_M, BLOCK_N, SWAP)
    else:
        acc, last = join_splits(acc, partials_ptr, arrivals_ptr, slot, split, SPLITS)
        if last:
            store_tile(acc, residual, Rows(out_ptr, out.row), row, col, rows, cols, BLOCK_M, BLOCK_N, SWAP)


@triton.jit
def swiglu_tile(
    row,
    col,
    x,
    gate_w,
    up_w,
    out,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    GELU_TANH: tl.constexpr = False,
):
    """Store the tile at (row, col) of activation(x @ gate.T) * (x @ up.T). All three are Operands, `out` Rows."""
    gate, up = zeros_tile(BLOCK_M, BLOCK_N, SWAP), zeros_tile(BLOCK_M, BLOCK_N, SWAP)
    for k in range(0, depth, BLOCK_K):
        gate_tile = load_tile(gate_w, col, k, depth, BLOCK_N, BLOCK_K, EVEN_K)
        up_tile = load_tile(up_w, col, k, depth, BLOCK_N, BLOCK_K, EVEN_K)
        x_tile = load_tile(x, row, k, depth, BLOCK_M, BLOCK_K, EVEN_K)
        gate, up = multiply_add(x_tile, gate_tile, gate, SWAP), multiply_add(x_tile, up_tile, up, SWAP)
    kind = out.ptr.dtype.element_ty
    gate, up = rounded(gate, kind), rounded(up, kind)
    product = rounded(activated(gate, GELU_TANH), kind) * up
    store_tile(product, None, out, row, col, x.rows, gate_w.rows, BLOCK_M, BLOCK_N, SWAP)


@triton.jit(do_not_specialize=["rows"])
def _linear_swiglu_kernel(
    x,
    gate,
    up,
    x_desc,
    gate_desc,
    up_desc,
    out,
    rows,
    cols,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    GELU_TANH: tl.constexpr,
):
    """Grid (column tiles, row tiles): a program makes one tile of `out`."""
    swiglu_tile(
        tl.program_id(1) * BLOCK_M,
        tl.program_id(0) * BLOCK_N,
        Operand(x.ptr, x_desc, x.row, rows),
        Operand(gate.ptr, gate_desc, gate.row, cols),
        Operand(up.ptr, up_desc, up.row, cols),
        out,
        depth,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SWAP,
        EVEN_K,
        GELU_TANH,
    )


def linear_few_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    out: Tensor,
    settings: Settings,
    keep_splits: bool,
) -> None:
    """x @ weight.T + bias for one, three or four weights, side by side in `out`. dispatch.py has checked the arguments.

    x [rows, K]; weights [Ni, K], only the first cols[i] rows of each; biases [Ni] or None each; residual [rows, N] or
    None; out [rows, sum of cols], or with `keep_splits` fp32 [splits, rows, sum of cols].
    """
    rows, depth = x.shape
    block_m = block_m_of(rows)
    absent = [None] * (4 - len(weights))
    grid = (tiles_of(cols, settings.block_n), settings.splits, triton.cdiv(rows, block_m))
    partials = arrivals = None
    if settings.splits > 1 and not keep_splits:
        tiles = grid[0] * grid[2]
        partials = x.new_empty(tiles * settings.splits * block_m * settings.block_n, dtype=torch.float32)
        arrivals = arrivals_of(x.device, tiles)
    launch(_linear_kernel, grid)(
        Rows.of(x),
        tuple(Weight(weight, weight.stride(0), n) for weight, n in zip(weights, cols, strict=True)),
        None if biases[0] is None else tuple(biases),
        *descriptors([x, *weights], block_m, settings),
        *absent,
        Rows.of(residual),
        Rows.of(out),
        partials,
        arrivals,
        rows,
        depth,
        block_m,
        settings.block_n,
        settings.block_k,
        settings.splits,
        settings.swap,
        depth % settings.block_k == 0,
        keep_splits,
        num_warps=settings.warps,
        num_stages=settings.stages,
        **NO_FMA_FUSION,
    )


def linear_swiglu_few_rows(
    x: Tensor, gate: Tensor, up: Tensor, out: Tensor, settings: Settings, activation: str
) -> None:
    """activation(x @ gate.T) * (x @ up.T). x [rows, K], gate and up [I, K], out [rows, I]."""
    (rows, depth), cols, block_m = x.shape, len(gate), block_m_of(len(x))
    launch(_linear_swiglu_kernel, (triton.cdiv(cols, settings.block_n), triton.cdiv(rows, block_m)))(
        Rows.of(x),
        Rows.of(gate),
        Rows.of(up),
        *descriptors([x, gate, up], block_m, settings),
        Rows.of(out),
        rows,
        cols,
        depth,
        block_m,
        settings.block_n,
        settings.block_k,
        settings.swap,
        depth % settings.block_k == 0,
        activation == "gelu_tanh",
        num_warps=settings.warps,
        num_stages=settings.stages,
        **NO_FMA_FUSION,
    )


_ARRIVALS: dict[tuple[torch.device, int | None], Tensor] = {}
_SLOTS = 8192


def arrivals_of(device: torch.device, slots: int) -> Tensor:
    """At least `slots` zeroed counters; every launch leaves them zeroed.

    Each stream has its own. All captured graphs of a device share one set, so two must not replay at the same time.
    """
    if device.type != "cuda" or slots > _SLOTS:
        return torch.zeros(slots, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, None if capturing else torch.cuda.current_stream(device).cuda_stream)
    if key not in _ARRIVALS:
        zeros = torch.zeros(_SLOTS, dtype=torch.int32, device=device)
        if capturing:
            return zeros  # the graph's own memory, which each replay clears
        _ARRIVALS[key] = zeros
        _ARRIVALS.setdefault((device, None), torch.zeros_like(zeros))
    return _ARRIVALS[key]
