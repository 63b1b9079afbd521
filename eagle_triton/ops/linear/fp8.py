"""Products with weights of eight bits and their scales (Float8Weight). No copy of a weight is kept.

On Hopper, up to 64 rows of bf16 become pairs of e4m3 numbers (see Float8Pair for what they keep of x). The tensor cores
multiply these with the weights themselves (`hopper_fp8_few_rows.py`). With more rows, or fp16, the weights are
converted to 16 bits on the fly, which is exact except for scales of blocks, since they are multiplied in
(`hopper_fp8.py`). Other scales are applied to the sums in fp32. On other devices the kernel of this file converts by
shifts, so the device need not know e4m3. Above MAX_CONVERTED rows of 16 bits cuBLAS multiplies a temporary copy of the
weight in 16 bits, rounded once more. `dispatch.py` takes the calls.

| name   | shape                           | dtype, layout                                                 |
|--------|---------------------------------|---------------------------------------------------------------|
| x      | [rows, K]                       | fp16, bf16 or fp32; a row is contiguous                       |
| values | [N, K]                          | e4m3 as uint8; a row is contiguous                            |
| scale  | [N or 1, 1], [N / 128, K / 128] | fp32 or bf16                                                  |
| bias   | [N]                             | as x                                                          |
| out    | [rows, N], [splits, rows, N]    | as x; fp32 if the splits' sums stay apart                     |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.ops.layers import float8_pair, swiglu
from eagle_triton.ops.layers.fp8_pair_rows import empty_pair
from eagle_triton.ops.layers.values import contiguous_rows
from eagle_triton.ops.linear.settings import (
    MAX_STREAMED,
    STACKED,
    Portable,
    Streaming,
    has_descriptors,
    portable_settings,
)
from eagle_triton.ops.linear.side_by_side import as_kernels_take, empty_output, parts_of
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.fallback import gluon_module
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight
from eagle_triton.runtime.gpu import compute_capability
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch
from eagle_triton.runtime.row_formats import (
    GROUP,
    MAX_PAIRED_ROWS,
    Float8Pair,
    ProductRows,
    RowFormat,
    has_format,
    whole_of,
)
from eagle_triton.runtime.split_sums import SplitSums, total_of

MAX_CONVERTED = 2048  # the most rows of a product by Hopper's kernels
_BIASES = tl.constexpr(2.0**120)  # 2 to the difference of the exponent biases of fp32 and e4m3


@triton.jit
def _converted(values):
    """e4m3 numbers (bytes seeeemmm) as fp32, exactly: the bits move to their places in fp32, then times 2 ** 120."""
    bits = values.to(tl.int32)
    wide = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return wide.to(tl.float32, bitcast=True) * _BIASES


class _Scales(NamedTuple):
    """The scales of a weight. row: the stride between rows or blocks of rows, or 0; column: between blocks of
    columns."""

    ptr: Tensor
    row: int
    column: int

    @staticmethod
    def of(weight: Float8Weight) -> _Scales:
        return _Scales(weight.scale, weight.scale_stride, weight.scale.stride(1) if weight.in_blocks else 0)


@triton.jit
def _linear_kernel(
    x,
    values,
    scales,
    bias_ptr,
    out,
    rows,
    cols,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Grid (column tiles, splits, row tiles): a program makes one split of one tile of the product.

    The first split adds the bias.
    """
    col, split, row = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2) * BLOCK_M
    offs_n = col + tl.arange(0, BLOCK_N)
    offs_m = row + tl.arange(0, BLOCK_M)
    of_weights = tl.minimum(offs_n, cols - 1).to(tl.int64)
    of_x = tl.minimum(offs_m, rows - 1).to(tl.int64)
    steps = tl.cdiv(depth, BLOCK_K)
    per_split = tl.cdiv(steps, SPLITS)
    first = split * per_split
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, tl.minimum(first + per_split, steps)):
        k = step * BLOCK_K
        offs_k = k + tl.arange(0, BLOCK_K)
        within = None if EVEN_K else (offs_k < depth)[None, :]
        values_ptr = values.ptr + of_weights[:, None] * values.row + offs_k[None, :]
        w_tile = tl.load(values_ptr, mask=within, other=None if EVEN_K else 0)
        x_ptr = x.ptr + of_x[:, None] * x.row + offs_k[None, :]
        x_tile = tl.load(x_ptr, mask=within, other=None if EVEN_K else 0.0)
        w_tile = _converted(w_tile).to(x_tile.dtype)
        if IN_BLOCKS:
            scale = tl.load(scales.ptr + of_weights // 128 * scales.row + k // 128 * scales.column).to(tl.float32)
            acc += tl.dot(w_tile, x_tile.T, input_precision="ieee") * scale[:, None]
        else:
            acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
    if not IN_BLOCKS:
        acc *= tl.load(scales.ptr + of_weights * scales.row).to(tl.float32)[:, None]
    if bias_ptr is not None:
        of_bias = tl.where(split == 0, cols, 0)
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < of_bias, other=0.0).to(tl.float32)[:, None]
    out_ptr = out.ptr + split.to(tl.int64) * rows * out.row
    mask = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
    out_ptr += offs_m.to(tl.int64)[:, None] * out.row + offs_n[None, :]
    tl.store(out_ptr, acc.T.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantise_kernel(
    values, scales, out_ptr, cols, depth, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IN_BLOCKS: tl.constexpr
):
    """Grid (row tiles, column tiles): a program converts one tile of a weight."""
    row, k = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_K
    offs_n, offs_k = (row + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None], k + tl.arange(0, BLOCK_K)[None, :]
    mask = (offs_n < cols) & (offs_k < depth)
    tile = tl.load(values.ptr + offs_n * values.row + offs_k, mask=mask, other=0)
    if IN_BLOCKS:
        scale_ptr = scales.ptr + offs_n // 128 * scales.row + offs_k // 128 * scales.column
    else:
        scale_ptr = scales.ptr + offs_n * scales.row
    scale = tl.load(scale_ptr, mask=mask if IN_BLOCKS else offs_n < cols, other=0.0).to(tl.float32)
    out = _converted(tile) * scale
    tl.store(out_ptr + offs_n * depth + offs_k, out.to(out_ptr.dtype.element_ty), mask=mask)


def dequantise(weight: Float8Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype`, rounded once."""
    cols, depth = weight.shape
    out = torch.empty(cols, depth, dtype=dtype, device=weight.device)
    launch(_dequantise_kernel, (triton.cdiv(cols, 16), triton.cdiv(depth, 512)))(
        Rows.of(weight.values.view(torch.uint8)),
        _Scales.of(weight),
        out,
        cols,
        depth,
        16,
        512,
        weight.in_blocks,
        num_warps=8,
        **NO_FMA_FUSION,
    )
    return out


def linear_stack_fp8(
    x: ProductRows,
    weights: Sequence[Float8Weight],
    biases: Sequence[Tensor | None],
    *,
    keep_splits: bool = False,
    settings: Streaming | None = None,
) -> tuple[Tensor | SplitSums, ...]:
    """Products of the same rows, on Hopper four to a launch. dispatch.linear_stack has checked the arguments."""
    lead = x.shape[:-1]
    rows = _rows(x, weights)
    _check_settings(rows, weights, settings, keep_splits)
    outs: list[Tensor | SplitSums] = []
    for some, some_biases in _launches(rows, weights, biases):
        cols = [len(weight) for weight in some]
        out = _multiply(rows, some, some_biases, cols, keep_splits, settings)
        outs += parts_of(out, cols, lead, x.dtype)
    return tuple(outs)


def linear_swiglu_fp8(
    x: ProductRows,
    gate: Float8Weight,
    up: Float8Weight,
    *,
    row_format: RowFormat | None = None,
    settings: Streaming | None = None,
) -> ProductRows:
    """silu(x @ gate.T) * (x @ up.T). dispatch.linear_swiglu has checked the arguments."""
    rows, cols = _rows(x, (gate, up)), len(gate)
    _check_settings(rows, (gate, up), settings, True)
    if not _in_one_launch(rows, (gate, up)):
        gated, raised = linear_stack_fp8(x, (gate, up), (None, None), settings=settings)
        return swiglu(total_of(gated), total_of(raised))
    out = torch.empty(*x.shape[:-1], cols, dtype=x.dtype, device=x.device)
    if isinstance(rows, Tensor):
        if out.numel():
            streamed = _streamed()
            settings = settings or streamed.settings_for(len(rows), (cols, cols), x.shape[-1], gate.in_blocks, True)
            streamed.linear_swiglu_hopper_fp8(rows, gate, up, out.view(-1, cols), settings)
        return out
    paired = _paired()
    settings = settings or paired.settings_for(rows.rows, (cols, cols), x.shape[-1], True)
    fits = row_format is RowFormat.FLOAT8_PAIR and has_format(out, row_format)
    pair = empty_pair(out.shape, out) if fits and settings.block_n == GROUP else None
    if out.numel():
        paired.linear_swiglu_hopper_fp8_few_rows(rows, gate, up, out if pair is None else pair, settings)
    return out if pair is None else pair


def _rows(x: ProductRows, weights: Sequence[Float8Weight]) -> Tensor | Float8Pair:
    """x as the kernel for these weights reads it: [rows, K], or a pair."""
    x = x if isinstance(x, Float8Pair) else whole_of(x)
    fits = isinstance(x, Float8Pair) or has_format(x, RowFormat.FLOAT8_PAIR)
    if not (fits and _have_descriptors(weights) and _paired() is not None):
        return contiguous_rows(whole_of(x))
    return x if isinstance(x, Float8Pair) else float8_pair(x)


def _launches(
    rows: Tensor | Float8Pair, weights: Sequence[Float8Weight], biases: Sequence[Tensor | None]
) -> list[tuple[list[Float8Weight], list[Tensor | None]]]:
    """Weights and biases of each launch: four on Hopper if they have the same kind of scale, otherwise one."""
    some = STACKED if _in_one_launch(rows, weights) else 1
    return [(list(weights[i : i + some]), list(biases[i : i + some])) for i in range(0, len(weights), some)]


def _in_one_launch(rows: Tensor | Float8Pair, weights: Sequence[Float8Weight]) -> bool:
    """Whether a kernel for Hopper multiplies by several of these weights at once."""
    if isinstance(rows, Float8Pair):
        return _are_alike(weights)
    return not _is_wide(rows, weights) and _streamed_for(rows, weights) is not None


def _multiply(
    rows: Tensor | Float8Pair,
    weights: list[Float8Weight],
    biases: list[Tensor | None],
    cols: list[int],
    keep_splits: bool,
    settings: Streaming | None,
) -> Tensor:
    """One launch: [rows, N of all weights], or fp32 [splits, rows, N of all weights]."""
    count, depth = rows.shape[:-1].numel(), rows.shape[-1]
    if isinstance(rows, Float8Pair):
        module = _paired()
        make = module.linear_hopper_fp8_few_rows
        settings = settings or module.settings_for(count, tuple(cols), depth, False)
    elif _is_wide(rows, weights):
        return F.linear(rows, dequantise(weights[0], rows.dtype), biases[0])
    else:
        module = _streamed_for(rows, weights)
        if module is None:
            portable = portable_settings(count, len(weights[0]), depth, keep_splits)
            out = empty_output(rows, cols, portable.splits)
            if out.numel():
                _launch_portable(rows, weights[0], biases[0], out, portable)
            return out
        make = module.linear_hopper_fp8
        settings = settings or module.settings_for(count, tuple(cols), depth, weights[0].in_blocks, False)
    if not keep_splits:
        settings = settings._replace(splits=1)
    out = empty_output(rows, cols, settings.splits)
    weights, cols, biases = as_kernels_take(weights, cols, biases)
    if out.numel():
        make(rows, weights, cols, biases, out, settings)
    return out


def _launch_portable(
    matrix: Tensor, weight: Float8Weight, bias: Tensor | None, out: Tensor, settings: Portable
) -> None:
    rows, depth = matrix.shape
    block_k = settings.block_k if matrix.element_size() == 2 else 32
    launch(
        _linear_kernel,
        (triton.cdiv(len(weight), settings.block_n), settings.splits, triton.cdiv(rows, settings.block_m)),
    )(
        Rows.of(matrix),
        Rows.of(weight.values.view(torch.uint8)),
        _Scales.of(weight),
        None if bias is None else bias.contiguous(),
        Rows.of(out),
        rows,
        len(weight),
        depth,
        settings.block_m,
        settings.block_n,
        block_k,
        settings.splits,
        weight.in_blocks,
        depth % block_k == 0,
        num_warps=settings.warps,
        num_stages=settings.stages,
        **NO_FMA_FUSION,
    )


def _is_wide(matrix: Tensor, weights: Sequence[Float8Weight]) -> bool:
    """Whether cuBLAS is faster, the copy of the weight included."""
    most = MAX_CONVERTED if _streamed_for(matrix, weights) is not None else MAX_STREAMED
    return len(matrix) > most and matrix.element_size() == 2


def _check_settings(
    rows: Tensor | Float8Pair, weights: Sequence[Float8Weight], settings: Streaming | None, keep_splits: bool
) -> None:
    """Raise ValueError for settings that the product cannot be launched with."""
    if settings is None:
        return
    if settings.splits > 1 and not keep_splits:
        raise ValueError("settings with splits need keep_splits")
    steps = triton.cdiv(rows.shape[-1], settings.block_k)
    if (settings.splits - 1) * triton.cdiv(steps, settings.splits) >= steps:
        raise ValueError(f"settings must give every split a step, got {settings.splits} splits of {steps} steps")
    known = settings.block_k == BLOCK
    if isinstance(rows, Tensor):
        known &= (settings.block_n, settings.warps) == (BLOCK, 8) and 2 <= settings.w_stages == settings.x_stages
        known &= _in_one_launch(rows, weights)
    if not known:
        raise ValueError(
            f"settings for weights of eight bits need block_k {BLOCK}; beyond {MAX_PAIRED_ROWS} rows, or for fp16, "
            f"also block_n {BLOCK}, 8 warps, equal w_stages and x_stages of at least 2, a Hopper GPU, x of 16 bits, at "
            f"most {MAX_CONVERTED} rows, aligned to 16 bytes, and scales of one kind; got {settings} for {rows.dtype} "
            f"{tuple(rows.shape)}"
        )


def _streamed_for(matrix: Tensor, weights: Sequence[Float8Weight]) -> Any:
    """The module hopper_fp8 if its kernels can take these operands, else None."""
    hopper = compute_capability(matrix.device) == (9, 0) and has_descriptors([matrix])
    if not (hopper and matrix.shape[1] % 2 == 0 and _have_descriptors(weights) and _are_alike(weights)):
        return None
    return _streamed()


def _have_descriptors(weights: Sequence[Float8Weight]) -> bool:
    """Whether these weights can have TMA descriptors."""
    return all(weight.values.data_ptr() % 16 == 0 and weight.values.stride(0) % 16 == 0 for weight in weights)


def _are_alike(weights: Sequence[Float8Weight]) -> bool:
    """Whether one launch can take all these weights."""
    return len({_kind_of_scale(weight) for weight in weights}) == 1


def _kind_of_scale(weight: Float8Weight) -> tuple[bool, torch.dtype, int]:
    """The properties that the scales of all weights of a launch must share."""
    scale = weight.scale
    return weight.in_blocks, scale.dtype, scale.stride(1) if scale.shape[1] > 1 else 0


def _streamed() -> Any:
    return gluon_module("eagle_triton.ops.linear.hopper_fp8")


def _paired() -> Any:
    return gluon_module("eagle_triton.ops.linear.hopper_fp8_few_rows")
