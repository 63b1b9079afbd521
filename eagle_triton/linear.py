"""Products of few rows with weights as they lie in the model: the time is that of reading the weights once.

    linear:         out = x @ weight.T (+ bias) (+ residual)
    linear_stack:   out[i] = x @ weights[i].T (+ biases[i]), e.g. q, k and v
    linear_swiglu:  out = silu(x @ gate.T) * (x @ up.T)

| name       | shape                         | dtype, layout                                                |
|------------|-------------------------------|--------------------------------------------------------------|
| x          | [..., K]                      | fp16, bf16 or fp32                                           |
| weight     | [N, K]                        | as x; a row is contiguous, rows may be strided               |
| bias       | [N]                           | as x                                                         |
| residual   | [..., N]                      | as x                                                         |
| out        | [..., N]                      | as x                                                         |
| partials   | [tiles, splits, tile]         | fp32, the partial sums of each tile                          |
| arrivals   | [tiles]                       | int32, zero between launches                                 |

Numerics: fp32 accumulation (true fp32 products for fp32 inputs); bias and residual are applied in fp32 before the one
rounding to the output; SwiGLU rounds both products and silu(gate) first, as the models do. Where K is split, the
partial sums are added in the order of the splits, so the bits are the same every run: by the program that arrives last
at a tile, or, with `deferred`, by the operation that reads the product next (`Partials`), which saves a wait of 1.5 to
2 us at the end of the launch.

Weights come through TMA descriptors where the hardware has them (Hopper and newer, 16-bit, rows 16-byte aligned), by
plain loads elsewhere. Where cuBLAS is faster, cuBLAS (`torch.nn.functional.linear`) is called. On Hopper, Triton 3.6
given, streamed_linear.py makes products of few rows. See `_choose`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle_triton.launch import EXACT, launch
from eagle_triton.layers import rounded, swiglu
from eagle_triton.overlap import triton_version
from eagle_triton.partials import Partials
from eagle_triton.reference.linear import check_product

if TYPE_CHECKING:  # Gluon's
    from eagle_triton.streamed_linear import Streaming


log = logging.getLogger(__name__)


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
    DEFERRED: tl.constexpr,
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
    if DEFERRED:  # out is [SPLITS, rows, ...]
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
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    arrivals_ptr,
    rows,
    cols0,
    cols1,
    cols2,
    depth,
    stride_xm,
    stride_w0,
    stride_w1,
    stride_w2,
    stride_rm,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    DEFERRED: tl.constexpr,
):
    """Grid (column tiles of all weights, splits, row tiles); a program makes one split of one tile of one product.

    The products' columns stand side by side in `out`: cols0, then cols1, then cols2. All weights, or only the first.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = row_tile * tl.num_programs(0) + tile
    w_ptr, w_desc, bias_ptr, cols, stride_w = w0_ptr, w0_desc, bias0_ptr, cols0, stride_w0
    if w1_ptr is not None:
        tiles0, tiles1 = tl.cdiv(cols0, BLOCK_N), tl.cdiv(cols1, BLOCK_N)
        if tile >= tiles0 + tiles1:
            tile -= tiles0 + tiles1
            out_ptr += cols0 + cols1
            w_ptr, cols, stride_w = w2_ptr, cols2, stride_w2
            if w_desc is not None:
                w_desc = w2_desc
            if bias_ptr is not None:
                bias_ptr = bias2_ptr
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
        DEFERRED,
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


class Settings(NamedTuple):
    """How one product is launched. Four warps are one warpgroup of Hopper's tensor cores."""

    block_n: int
    block_k: int
    splits: int = 1  # of K; linear_swiglu has no splits
    warps: int = 4
    stages: int = 4
    swap: bool = False  # weights as the left operand
    tma: bool = True  # descriptors, where the hardware and the tensors allow them


# One H200, Triton 3.6, bf16; (rows up to, rows of each weight, K). Behind each row: us alone, us deferred where K is
# split, and us of cuBLAS on the concatenated weights (tools/tune_linear.py: graph replay, weights larger than L2).
_HOPPER = {
    (16, (4096, 1024, 1024), 4096): Settings(64, 128, 2, 4, 4, True),  # qkv 15.5, 14.4; 15.8
    (16, (4096,), 4096): Settings(64, 256, 2, 4, 3, True),  # o 11.3, 10.3; 13.3
    (16, (14336, 14336), 4096): Settings(128, 128, 1, 4, 3, True),  # gate and up 56.3; 56.6 without SwiGLU
    (16, (4096,), 14336): Settings(64, 256, 2, 4, 4, True),  # down 30.6, 29.7; 32.5
    (16, (128256,), 4096): Settings(128, 128, 1, 4, 3, True),  # head 237; 246
    (16, (4096, 1024, 1024), 8192): Settings(64, 128, 4, 4, 3, True),  # draft qkv 27.6, 26.3; 27.7
    (16, (32000,), 4096): Settings(128, 128, 1, 4, 3, True),  # draft head 62.0; 64.9
    (64, (4096, 1024, 1024), 4096): Settings(32, 128, 2, 4, 3),  # 17.8, 15.9; 16.0
    (64, (4096,), 4096): Settings(32, 128, 2, 4, 4),  # 12.4, 10.9; 11.7
    (64, (14336, 14336), 4096): Settings(128, 64, 1, 4, 4),  # 59.3; 61.2 without SwiGLU
    (64, (4096,), 14336): Settings(64, 128, 2, 4, 4),  # 33.7, 32.2; 35.6
    (64, (128256,), 4096): Settings(128, 128, 1, 4, 4),  # 249; 274
    (64, (4096, 1024, 1024), 8192): Settings(64, 128, 2, 4, 3),  # 30.8, 28.8; 28.7
    (64, (32000,), 4096): Settings(128, 64, 1, 4, 4),  # 64.9; 67.7
}
_MAX_ROWS = 64  # more rows are cuBLAS's, or streamed_linear.wide_settings'
_PROGRAMS = 112  # enough of them to load every multiprocessor


def launch_settings(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    cols: tuple[int, ...],
    depth: int,
    fused: bool = False,
    planned: bool = False,
) -> Settings | None:
    """Settings for the product of `rows` rows with weights [n, depth] for n in `cols`, or None: not by these kernels.

    `fused`: each program reads all weights (linear_swiglu); else their tiles stand side by side. In fp32, where no
    tensor cores are used, and for many rows, time is no longer that of reading the weights: cuBLAS. `planned` fp32
    products stay here, so that a draft pass has the megakernel's bits.
    """
    if rows > _MAX_ROWS or (dtype.itemsize > 2 and not planned):
        return None
    if dtype.itemsize > 2:
        settings = Settings(32, 32, stages=2, tma=False)
    elif _compute_capability(device) not in ((9, 0), (10, 0), (10, 3)):
        settings = Settings(32 if fused else 64, 64, stages=3)  # small enough for any device; unmeasured
    else:
        few = rows <= 16
        if (16 if few else 64, cols, depth) in _HOPPER:
            return _HOPPER[16 if few else 64, cols, depth]
        wide = _tiles(cols, 128, fused) >= _PROGRAMS
        settings = Settings(
            128 if wide else 64, 64 if wide and not few else 128, stages=3 if wide and few else 4, swap=few
        )
    tiles, splits = _tiles(cols, settings.block_n, fused), 1
    while not fused and splits < 8 and tiles * splits < _PROGRAMS and depth >= 8 * splits * settings.block_k:
        splits *= 2
    return settings._replace(splits=splits)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    deferred: bool = False,
    planned_rows: int | None = None,
    settings: Settings | Streaming | None = None,
) -> Tensor | Partials:
    """x @ weight.T (+ bias) (+ residual). x [..., K], weight [N, K], bias [N], residual [..., N]; returns [..., N].

    `deferred`: the caller takes Partials too, and there is no residual. `planned_rows`: choose the launch settings for
    that many rows, so that passes of different widths share them. `settings` overrides that choice.
    Raises ValueError on shapes, dtypes, strides or devices that do not fit, and on Streaming settings that cannot be.
    """
    check_product("linear", x, (weight,), (bias,), residual, deferred=deferred)
    settings = settings or _choose(x, (weight,), planned_rows, deferred, residual)
    if settings is None:
        out = F.linear(x, weight, bias)
        return out if residual is None else residual + out
    return _launch("linear", x, [weight], [bias], residual, deferred, planned_rows is not None, settings)


def linear_stack(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    deferred: bool = False,
    planned_rows: int | None = None,
    settings: Settings | Streaming | None = None,
) -> tuple[Tensor | Partials, ...]:
    """Several products of the same rows, e.g. q, k and v, three to a launch. x [..., K], weights [Ni, K].

    Returns one [..., Ni] each: views of one tensor, side by side in its last dimension. Options as for `linear`.
    """
    check_product("linear_stack", x, weights, biases, None)
    settings = settings or _choose(x, weights, planned_rows, deferred)
    if settings is None:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    outs: list[Tensor | Partials] = []
    for i in range(0, len(weights), 3):
        some = list(weights[i : i + 3])
        out = _launch(
            "linear_stack", x, some, list(biases[i : i + 3]), None, deferred, planned_rows is not None, settings
        )
        cols = [weight.shape[0] for weight in some]
        if isinstance(out, Partials):
            outs += [Partials(sums, out.dtype) for sums in out.sums.split(cols, dim=-1)]
        else:
            outs += out.split(cols, dim=-1)
    return tuple(outs)


def linear_swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    planned_rows: int | None = None,
    settings: Settings | Streaming | None = None,
) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T). x [..., K], gate and up [I, K]; returns [..., I]."""
    check_product("linear_swiglu", x, (gate, up), (None, None), None, same=True)
    settings = settings or _choose(x, (gate, up), planned_rows, fused=True)
    if settings is None:
        return swiglu(F.linear(x, gate), F.linear(x, up))
    matrix = _matrix("linear_swiglu", x, (gate, up))
    rows, depth, cols = *matrix.shape, gate.shape[0]
    out = x.new_empty(rows, cols)
    if out.numel() and not isinstance(settings, Settings):
        _check_streaming("linear_swiglu", matrix, (gate, up), settings, None, False)
        _streaming().linear_swiglu(matrix, gate, up, out, settings)
    elif out.numel():
        block_m = block_m_of(rows)
        launch(_linear_swiglu_kernel, (triton.cdiv(cols, settings.block_n), triton.cdiv(rows, block_m)))(
            matrix,
            gate,
            up,
            *descriptors([matrix, gate, up], block_m, settings),
            out,
            rows,
            cols,
            depth,
            matrix.stride(0),
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
    return out.view(*x.shape[:-1], cols)


def _launch(
    name: str,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    residual: Tensor | None,
    deferred: bool,
    planned: bool,
    settings: Settings | Streaming,
) -> Tensor | Partials:
    """One launch for up to three weights: [..., N of all weights]."""
    matrix = _matrix(name, x, weights)
    rows, depth = matrix.shape
    cols = [weight.shape[0] for weight in weights]
    deferred = deferred and (settings.splits > 1 or planned)
    shape = (*x.shape[:-1], sum(cols))
    if deferred:
        out = x.new_empty(settings.splits, rows, shape[-1], dtype=torch.float32)
    else:
        out = x.new_empty(rows, shape[-1])
    if residual is not None:
        residual = residual.reshape(out.shape)
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
    if len(weights) == 2:  # the kernels know one weight or three
        weights, biases, cols = [*weights, weights[1]], [*biases, biases[1]], [*cols, 0]
    if any(bias is not None for bias in biases):
        biases = [x.new_zeros(n) if b is None else b.contiguous() for n, b in zip(cols, biases, strict=True)]
    if out.numel() and not isinstance(settings, Settings):
        _check_streaming(name, matrix, weights, settings, residual, deferred)
        _streaming().linear(matrix, weights, cols, biases, out, settings)
    elif out.numel():
        block_m = block_m_of(rows)
        absent = [None] * (3 - len(weights))
        grid = (_tiles(cols, settings.block_n), settings.splits, triton.cdiv(rows, block_m))
        partials = arrivals = None
        if settings.splits > 1 and not deferred:
            tiles = grid[0] * grid[2]
            partials = x.new_empty(tiles * settings.splits * block_m * settings.block_n, dtype=torch.float32)
            arrivals = _arrivals(x.device, tiles)
        launch(_linear_kernel, grid)(
            matrix,
            *weights,
            *absent,
            *descriptors([matrix, *weights], block_m, settings),
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
            matrix.stride(0),
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
            deferred,
            num_warps=settings.warps,
            num_stages=settings.stages,
            **EXACT,
        )
    return Partials(out.view(-1, *shape), x.dtype) if deferred else out.view(shape)


def _choose(
    x: Tensor,
    weights: Sequence[Tensor],
    planned_rows: int | None,
    deferred: bool = False,
    residual: Tensor | None = None,
    fused: bool = False,
) -> Settings | Streaming | None:
    """How a product is launched, None: by cuBLAS. Streaming up to 64 rows does not change a bit."""
    matrix = _contiguous_rows(x)
    rows, depth = max(planned_rows or 0, len(matrix)), x.shape[-1]
    cols = tuple(weight.shape[0] for weight in weights)
    settings = launch_settings(x.device, x.dtype, rows, cols, depth, fused, planned_rows is not None)
    streaming = _streaming() if _compute_capability(x.device) == (9, 0) and _tma([matrix, *weights]) else None
    if settings is None:
        wide = streaming is not None and deferred and planned_rows is not None
        return streaming.wide_settings(rows, cols, depth) if wide else None
    if planned_rows and not deferred:
        settings = settings._replace(splits=1)  # the megakernel has no last program of a tile
    if streaming is None or residual is not None or (settings.splits > 1 and not deferred):
        return settings
    tile = (settings.block_n, settings.block_k, settings.splits, settings.swap)
    return streaming.settings_for(rows, cols, depth, *tile, fused) or settings


@functools.cache
def _streaming() -> ModuleType | None:
    """streamed_linear.py, or None with a Triton before 3.6, whose Gluon does not compile it, or without Gluon."""
    if triton_version() < (3, 6):
        log.warning("products are not streamed: that takes Triton 3.6, this is %s", triton.__version__)
        return None
    try:
        return importlib.import_module("eagle_triton.streamed_linear")
    except ImportError as error:
        log.warning("products are not streamed: %s", error)
        return None


def block_m_of(rows: int) -> int:
    """The row tile: the next power of two, 16 at least (the tensor cores' least) and 128 at most."""
    return min(max(16, triton.next_power_of_2(rows)), 128)


def _tiles(cols: Sequence[int], block_n: int, fused: bool = False) -> int:
    return sum(triton.cdiv(n, block_n) for n in (cols[:1] if fused else cols))


def _matrix(name: str, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x as [rows, K] with contiguous rows. Weights whose rows are not contiguous are refused: they are not copied."""
    for weight in weights:
        if weight.stride(1) != 1 and weight.shape[1] > 1:
            raise ValueError(f"{name}: the rows of a weight must be contiguous, got strides {weight.stride()}")
    return _contiguous_rows(x)


def _contiguous_rows(x: Tensor) -> Tensor:
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _check_streaming(
    name: str, matrix: Tensor, weights: Sequence[Tensor], settings: Streaming, residual: Tensor | None, deferred: bool
) -> None:
    if residual is not None or (settings.splits > 1 and not deferred):
        raise ValueError(f"{name}: streamed products take no residual and leave split sums to the reader (deferred)")
    if not _tma([matrix, *weights]) or len(matrix) > (16 if settings.swap else 128):
        raise ValueError(
            f"{name}: streamed products need a Hopper GPU, 16 bits, rows aligned to 16 bytes, and at most 128 of them "
            f"(16 with swap), got {matrix.dtype} {tuple(matrix.shape)} with strides {matrix.stride()}"
        )


@functools.cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA device, else (0, 0)."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else (0, 0)


def _tma(tensors: Sequence[Tensor]) -> bool:
    """Whether descriptors can stand for these matrices: Hopper and newer, 16 bits, aligned rows."""
    return _compute_capability(tensors[0].device) >= (9, 0) and all(
        tensor.element_size() == 2 and tensor.data_ptr() % 16 == 0 and tensor.stride(-2) % 8 == 0 for tensor in tensors
    )


def descriptors(tensors: list[Tensor], block_m: int, settings: Settings) -> list[TensorDescriptor | None]:
    """TMA descriptors of x and the weights, or None each where they cannot be used."""
    if not (settings.tma and _tma(tensors)):
        return [None] * len(tensors)
    return [
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [block, settings.block_k])
        for tensor, block in zip(tensors, [block_m] + [settings.block_n] * (len(tensors) - 1), strict=True)
    ]


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
