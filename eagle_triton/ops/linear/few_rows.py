"""Triton kernels of products of few rows: tiles of x @ weight.T, perhaps with K split, and of SwiGLU's two products.

Weights come through TMA descriptors where the hardware has them (Hopper and newer, 16-bit, rows 16-byte aligned), by
plain loads elsewhere. The tile functions are the megakernel's too. Beside the names of `linear/__init__.py`:

| name       | shape                         | dtype, layout                                                |
|------------|-------------------------------|--------------------------------------------------------------|
| partials   | [tiles, splits, tile]         | fp32, the partial sums of each tile                          |
| arrivals   | [tiles]                       | int32, zero between launches                                 |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.ops.layers.values import rounded
from eagle_triton.ops.linear.settings import Settings, block_m_of, descriptors, tiles_of
from eagle_triton.runtime.launch import EXACT, launch


@triton.jit
def load_tile(ptr, desc, row, k, rows, depth, stride, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """[ROWS, BLOCK_K] of a row-major matrix from (row, k). Rows past the end are arbitrary, columns past it 0."""
    if desc is not None:
        tile = desc.load([row, k])
    else:
        offs_row = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = None if EVEN_K else (offs_k < depth)[None, :]
        tile = tl.load(ptr + offs_row[:, None] * stride + offs_k[None, :], mask=mask, other=None if EVEN_K else 0.0)
    return tile


@triton.jit
def zeros_tile(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """An accumulator: [BLOCK_M, BLOCK_N], or its transpose with SWAP."""
    return tl.zeros((BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N), tl.float32)


@triton.jit
def multiply_add(x, w, acc, SWAP: tl.constexpr):
    """acc + x @ w.T, or its transpose with SWAP: then the weights are the tall left operand of the tensor cores."""
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
    acc,
    residual_ptr,
    out_ptr,
    row,
    col,
    rows,
    cols,
    stride_rm,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Add the residual, round, and store the tile at (row, col)."""
    if SWAP:
        acc = acc.T
    offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = col + tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offs_m[:, None] * stride_rm + offs_n[None, :], mask=mask, other=0.0)
        acc += residual.to(tl.float32)
    tl.store(out_ptr + offs_m[:, None] * stride_om + offs_n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def join_splits(acc, partials_ptr, arrivals_ptr, slot, split, SPLITS: tl.constexpr):
    """Leave this split's partial sum of a tile. The last split to arrive gets (the sum of all in their order, True)."""
    height: tl.constexpr = acc.shape[0]
    width: tl.constexpr = acc.shape[1]
    offs = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    partials_ptr += slot.to(tl.int64) * (SPLITS * height * width)
    tl.store(partials_ptr + split * (height * width) + offs, acc)
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(arrivals_ptr + slot, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        tl.store(arrivals_ptr + slot, 0)  # for the next launch
        if SPLITS == 2:  # a sum of two is the same in either order
            acc += tl.load(partials_ptr + (1 - split) * (height * width) + offs, cache_modifier=".cg")
        else:
            acc = tl.load(partials_ptr + offs, cache_modifier=".cg")
            for i in tl.static_range(1, SPLITS):
                acc += tl.load(partials_ptr + i * (height * width) + offs, cache_modifier=".cg")
    return acc, last


@triton.jit
def product_steps(
    x_ptr,
    x_desc,
    w_ptr,
    w_desc,
    row,
    col,
    split,
    splits,
    rows,
    cols,
    depth,
    stride_xm,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """The accumulator of split number `split` of the tile at (row, col) of x @ w.T."""
    steps = tl.cdiv(depth, BLOCK_K)
    per_split = tl.cdiv(steps, splits)
    first = split * per_split
    acc = zeros_tile(BLOCK_M, BLOCK_N, SWAP)
    for step in tl.range(first, tl.minimum(first + per_split, steps), num_stages=STAGES):
        w = load_tile(w_ptr, w_desc, col, step * BLOCK_K, cols, depth, stride_wn, BLOCK_N, BLOCK_K, EVEN_K)
        x = load_tile(x_ptr, x_desc, row, step * BLOCK_K, rows, depth, stride_xm, BLOCK_M, BLOCK_K, EVEN_K)
        acc = multiply_add(x, w, acc, SWAP)
    return acc


@triton.jit
def product_tile(
    x_ptr,
    x_desc,
    w_ptr,
    w_desc,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    arrivals_ptr,
    row,
    col,
    slot,
    split,
    rows,
    cols,
    depth,
    stride_xm,
    stride_wn,
    stride_rm,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    KEEP_SPLITS: tl.constexpr,
):
    """One split of one [BLOCK_M, BLOCK_N] tile of x @ w.T. The bias goes with the first split."""
    acc = product_steps(
        x_ptr,
        x_desc,
        w_ptr,
        w_desc,
        row,
        col,
        split,
        SPLITS,
        rows,
        cols,
        depth,
        stride_xm,
        stride_wn,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SWAP,
        EVEN_K,
    )
    if bias_ptr is not None:
        acc = add_bias(acc, bias_ptr, col, tl.where(split == 0, cols, 0), BLOCK_N, SWAP)
    if KEEP_SPLITS:  # out is [SPLITS, rows, ...]
        out_ptr += split.to(tl.int64) * rows * stride_om
        store_tile(acc, None, out_ptr, row, col, rows, cols, 0, stride_om, BLOCK_M, BLOCK_N, SWAP)
    elif SPLITS == 1:
        store_tile(acc, residual_ptr, out_ptr, row, col, rows, cols, stride_rm, stride_om, BLOCK_M, BLOCK_N, SWAP)
    else:
        acc, last = join_splits(acc, partials_ptr, arrivals_ptr, slot, split, SPLITS)
        if last:
            store_tile(acc, residual_ptr, out_ptr, row, col, rows, cols, stride_rm, stride_om, BLOCK_M, BLOCK_N, SWAP)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    w3_ptr,
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    w3_desc,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
    bias3_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    arrivals_ptr,
    rows,
    cols0,
    cols1,
    cols2,
    cols3,
    depth,
    stride_xm,
    stride_w0,
    stride_w1,
    stride_w2,
    stride_w3,
    stride_rm,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    KEEP_SPLITS: tl.constexpr,
):
    """Grid (column tiles of all weights, splits, row tiles); a program makes one split of one tile of one product.

    The products' columns stand side by side in `out`: cols0, then cols1 and so on. One weight, three or four.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = row_tile * tl.num_programs(0) + tile
    w_ptr, w_desc, bias_ptr, cols, stride_w = w0_ptr, w0_desc, bias0_ptr, cols0, stride_w0
    if w1_ptr is not None:
        tiles0, tiles1, tiles2 = tl.cdiv(cols0, BLOCK_N), tl.cdiv(cols1, BLOCK_N), tl.cdiv(cols2, BLOCK_N)
        if tile >= tiles0 + tiles1:
            tile -= tiles0 + tiles1
            out_ptr += cols0 + cols1
            w_ptr, cols, stride_w = w2_ptr, cols2, stride_w2
            if w_desc is not None:
                w_desc = w2_desc
            if bias_ptr is not None:
                bias_ptr = bias2_ptr
            if w3_ptr is not None:  # noqa: SIM102 (known before tile is)
                if tile >= tiles2:
                    tile -= tiles2
                    out_ptr += cols2
                    w_ptr, cols, stride_w = w3_ptr, cols3, stride_w3
                    if w_desc is not None:
                        w_desc = w3_desc
                    if bias_ptr is not None:
                        bias_ptr = bias3_ptr
        elif tile >= tiles0:
            tile -= tiles0
            out_ptr += cols0
            w_ptr, cols, stride_w = w1_ptr, cols1, stride_w1
            if w_desc is not None:
                w_desc = w1_desc
            if bias_ptr is not None:
                bias_ptr = bias1_ptr
    product_tile(
        x_ptr,
        x_desc,
        w_ptr,
        w_desc,
        bias_ptr,
        residual_ptr,
        out_ptr,
        partials_ptr,
        arrivals_ptr,
        row_tile * BLOCK_M,
        tile * BLOCK_N,
        slot,
        split,
        rows,
        cols,
        depth,
        stride_xm,
        stride_w,
        stride_rm,
        stride_om,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SPLITS,
        SWAP,
        EVEN_K,
        KEEP_SPLITS,
    )


@triton.jit
def swiglu_tile(
    row,
    col,
    x_ptr,
    gate_ptr,
    up_ptr,
    x_desc,
    gate_desc,
    up_desc,
    out_ptr,
    rows,
    cols,
    depth,
    stride_xm,
    stride_gate,
    stride_up,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """The tile at (row, col) of both products, multiplied."""
    gate, up = zeros_tile(BLOCK_M, BLOCK_N, SWAP), zeros_tile(BLOCK_M, BLOCK_N, SWAP)
    for k in range(0, depth, BLOCK_K):
        gate_w = load_tile(gate_ptr, gate_desc, col, k, cols, depth, stride_gate, BLOCK_N, BLOCK_K, EVEN_K)
        up_w = load_tile(up_ptr, up_desc, col, k, cols, depth, stride_up, BLOCK_N, BLOCK_K, EVEN_K)
        x = load_tile(x_ptr, x_desc, row, k, rows, depth, stride_xm, BLOCK_M, BLOCK_K, EVEN_K)
        gate, up = multiply_add(x, gate_w, gate, SWAP), multiply_add(x, up_w, up, SWAP)
    kind = out_ptr.dtype.element_ty
    gate, up = rounded(gate, kind), rounded(up, kind)
    out = rounded(gate * tl.sigmoid(gate), kind) * up
    store_tile(out, None, out_ptr, row, col, rows, cols, 0, stride_om, BLOCK_M, BLOCK_N, SWAP)


@triton.jit(do_not_specialize=["rows"])
def _linear_swiglu_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    x_desc,
    gate_desc,
    up_desc,
    out_ptr,
    rows,
    cols,
    depth,
    stride_xm,
    stride_gate,
    stride_up,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Grid (column tiles, row tiles)."""
    swiglu_tile(
        tl.program_id(1) * BLOCK_M,
        tl.program_id(0) * BLOCK_N,
        x_ptr,
        gate_ptr,
        up_ptr,
        x_desc,
        gate_desc,
        up_desc,
        out_ptr,
        rows,
        cols,
        depth,
        stride_xm,
        stride_gate,
        stride_up,
        stride_om,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SWAP,
        EVEN_K,
    )


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    cols: Sequence[int],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    out: Tensor,
    settings: Settings,
    keep_splits: bool,
) -> None:
    """x @ weight.T + bias for one, three or four weights, side by side in `out`. products.py has checked all.

    x [rows, K]; of weights [Ni, K] the first cols[i] rows; biases [Ni] or None each; residual [rows, N] or None; out
    [rows, sum of cols], or with `keep_splits` fp32 [splits, rows, sum of cols].
    """
    rows, depth = x.shape
    block_m = block_m_of(rows)
    absent = [None] * (4 - len(weights))
    grid = (tiles_of(cols, settings.block_n), settings.splits, triton.cdiv(rows, block_m))
    partials = arrivals = None
    if settings.splits > 1 and not keep_splits:
        tiles = grid[0] * grid[2]
        partials = x.new_empty(tiles * settings.splits * block_m * settings.block_n, dtype=torch.float32)
        arrivals = _arrivals(x.device, tiles)
    launch(_linear_kernel, grid)(
        x,
        *weights,
        *absent,
        *descriptors([x, *weights], block_m, settings),
        *absent,
        *biases,
        *absent,
        residual,
        out,
        partials,
        arrivals,
        rows,
        *cols,
        *(0 for _ in absent),
        depth,
        x.stride(0),
        *(weight.stride(0) for weight in weights),
        *(0 for _ in absent),
        0 if residual is None else residual.stride(0),
        out.stride(-2),
        block_m,
        settings.block_n,
        settings.block_k,
        settings.splits,
        settings.swap,
        depth % settings.block_k == 0,
        keep_splits,
        num_warps=settings.warps,
        num_stages=settings.stages,
        **EXACT,
    )


def linear_swiglu(x: Tensor, gate: Tensor, up: Tensor, out: Tensor, settings: Settings) -> None:
    """silu(x @ gate.T) * (x @ up.T). x [rows, K], gate and up [I, K], out [rows, I]; products.py has checked all."""
    (rows, depth), cols, block_m = x.shape, len(gate), block_m_of(len(x))
    launch(_linear_swiglu_kernel, (triton.cdiv(cols, settings.block_n), triton.cdiv(rows, block_m)))(
        x,
        gate,
        up,
        *descriptors([x, gate, up], block_m, settings),
        out,
        rows,
        cols,
        depth,
        x.stride(0),
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        block_m,
        settings.block_n,
        settings.block_k,
        settings.swap,
        depth % settings.block_k == 0,
        num_warps=settings.warps,
        num_stages=settings.stages,
        **EXACT,
    )


_ARRIVALS: dict[tuple[torch.device, int | None], Tensor] = {}
_SLOTS = 8192


def _arrivals(device: torch.device, slots: int) -> Tensor:
    """At least `slots` zeroed counters, which every launch leaves zeroed.

    One set per stream, and one for all captured graphs of a device: two of those must not replay at the same time.
    """
    if device.type != "cuda" or slots > _SLOTS:
        return torch.zeros(slots, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, None if capturing else torch.cuda.current_stream(device).cuda_stream)
    if key not in _ARRIVALS:
        zeros = torch.zeros(_SLOTS, dtype=torch.int32, device=device)
        if capturing:
            return zeros  # the graph's own memory, cleared in each replay
        _ARRIVALS[key] = zeros
        _ARRIVALS.setdefault((device, None), torch.zeros_like(zeros))
    return _ARRIVALS[key]
