"""The launchers of products: check arguments, choose a kernel and its settings, and launch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from eagle_triton.operands.layers import check_activation
from eagle_triton.operands.linear import Weight, check_product
from eagle_triton.ops.layers import swiglu
from eagle_triton.ops.layers.values import contiguous_rows
from eagle_triton.ops.linear.few_rows import linear_few_rows, linear_swiglu_few_rows
from eagle_triton.ops.linear.four_bits import linear_stack_four_bits, linear_swiglu_four_bits
from eagle_triton.ops.linear.fp8 import linear_stack_fp8, linear_swiglu_fp8
from eagle_triton.ops.linear.settings import (
    MAX_ROWS,
    MAX_STREAMED,
    MAX_WIDE,
    STACKED,
    WIDE_TILE,
    Settings,
    Streaming,
    Wide,
    can_stream,
    has_descriptors,
    launch_settings,
)
from eagle_triton.ops.linear.side_by_side import as_kernels_take, empty_output, parts_of
from eagle_triton.runtime.fallback import gluon_module
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.four_bit_weight import FourBitWeight
from eagle_triton.runtime.gpu import multiprocessors_of
from eagle_triton.runtime.row_formats import ProductRows, RowFormat, whole_of
from eagle_triton.runtime.split_sums import SplitSums, total_of


def linear(
    x: ProductRows,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    keep_splits: bool = False,
    tune_for_rows: int | None = None,
    settings: Settings | Streaming | Wide | None = None,
) -> Tensor | SplitSums:
    """x @ weight.T (+ bias) (+ residual). x [..., K], weight [N, K], bias [N], residual [..., N]; returns [..., N].

    `keep_splits`: return SplitSums if K is split; then there is no residual. `tune_for_rows`: choose the launch
    settings for this number of rows, up to 64, so that passes of different widths share them (with quantised weights
    they always do). `settings` overrides that choice. Raises ValueError if shapes, dtypes, strides or devices do not
    fit, or if Streaming or Wide settings cannot be used.
    """
    check_product("linear", x, (weight,), (bias,), residual, keep_splits=keep_splits)
    if not isinstance(weight, Tensor):
        (product,) = linear_stack(x, [weight], [bias], keep_splits=keep_splits, settings=settings)
        return product if residual is None else residual + total_of(product)
    x = whole_of(x)
    settings = settings or _choose(x, (weight,), tune_for_rows, keep_splits, residual)
    if settings is None:
        out = F.linear(x, weight, bias)
        return out if residual is None else residual + out
    return _multiply("linear", x, [weight], [bias], residual, keep_splits, tune_for_rows is not None, settings)[0]


def linear_stack(
    x: ProductRows,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    *,
    keep_splits: bool = False,
    tune_for_rows: int | None = None,
    settings: Settings | Streaming | Wide | None = None,
) -> tuple[Tensor | SplitSums, ...]:
    """Several products of the same rows, e.g. q, k and v, four per launch. x [..., K], weights [Ni, K].

    Returns one [..., Ni] each: views of one tensor, side by side in its last dimension. Options as in `linear`.
    """
    check_product("linear_stack", x, weights, biases, None)
    eight = [weight for weight in weights if isinstance(weight, Float8Weight)]
    if len(eight) == len(weights):
        return linear_stack_fp8(x, eight, biases, keep_splits=keep_splits, settings=_streaming(settings))
    four = [weight for weight in weights if isinstance(weight, FourBitWeight)]
    if len(four) == len(weights):
        return linear_stack_four_bits(x, four, biases, keep_splits=keep_splits, settings=_streaming(settings))
    if eight or four:
        _refuse_mixed(settings)
        options: dict[str, Any] = {"keep_splits": keep_splits, "tune_for_rows": tune_for_rows}
        return tuple(linear(x, weight, bias, **options) for weight, bias in zip(weights, biases, strict=True))
    x, plain = whole_of(x), [weight for weight in weights if isinstance(weight, Tensor)]
    settings = settings or _choose(x, plain, tune_for_rows, keep_splits)
    if settings is None:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(plain, biases, strict=True))
    outs: list[Tensor | SplitSums] = []
    for i in range(0, len(plain), STACKED):
        outs += _multiply(
            "linear_stack",
            x,
            plain[i : i + STACKED],
            list(biases[i : i + STACKED]),
            None,
            keep_splits,
            tune_for_rows is not None,
            settings,
        )
    return tuple(outs)


def linear_swiglu(
    x: ProductRows,
    gate: Weight,
    up: Weight,
    *,
    tune_for_rows: int | None = None,
    row_format: RowFormat | None = None,
    activation: str = "silu",
    settings: Settings | Streaming | Wide | None = None,
) -> ProductRows:
    """silu(x @ gate.T) * (x @ up.T). x [..., K], gate and up [I, K]; returns [..., I].

    `activation`: "silu", or "gelu_tanh" for gelu with its tanh approximation. `row_format`: the form in which the next
    product reads the result, see layers.rms_norm.
    """
    check_product("linear_swiglu", x, (gate, up), (None, None), None, same=True)
    check_activation("linear_swiglu", activation)
    if isinstance(gate, Float8Weight) and isinstance(up, Float8Weight) and activation == "silu":
        return linear_swiglu_fp8(x, gate, up, row_format=row_format, settings=_streaming(settings))
    if isinstance(gate, FourBitWeight) and isinstance(up, FourBitWeight):
        return linear_swiglu_four_bits(x, gate, up, activation, row_format=row_format, settings=_streaming(settings))
    if not isinstance(gate, Tensor) or not isinstance(up, Tensor):
        _refuse_mixed(settings)
        gated, raised = linear_stack(x, (gate, up), (None, None))
        return swiglu(total_of(gated), total_of(raised), activation)
    x = whole_of(x)
    settings = settings or _choose(x, (gate, up), tune_for_rows, fused=True)
    if settings is None:
        return swiglu(F.linear(x, gate), F.linear(x, up), activation)
    matrix = _matrix("linear_swiglu", x, (gate, up))
    out = x.new_empty(len(matrix), len(gate))
    if not out.numel():
        pass
    elif isinstance(settings, Settings):
        linear_swiglu_few_rows(matrix, gate, up, out, settings, activation)
    elif isinstance(settings, Wide):
        raise ValueError(f"linear_swiglu: settings must not be Wide, got {settings}")
    else:
        _check_streaming("linear_swiglu", matrix, (gate, up), settings, None, False)
        _streamed().linear_swiglu_hopper(matrix, gate, up, out, settings, activation)
    return out.view(*x.shape[:-1], len(gate))


def _streaming(settings: Settings | Streaming | Wide | None) -> Streaming | None:
    if isinstance(settings, (Settings, Wide)):
        raise ValueError(f"settings for quantised weights must be Streaming or None, got {settings}")
    return settings


def _refuse_mixed(settings: Settings | Streaming | Wide | None) -> None:
    if settings is not None:
        raise ValueError(f"settings must be None for weights of several kinds, got {settings}")


def _multiply(
    name: str,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    residual: Tensor | None,
    keep_splits: bool,
    in_draft_pass: bool,
    settings: Settings | Streaming | Wide,
) -> list[Tensor | SplitSums]:
    """One launch for up to STACKED weights."""
    matrix = _matrix(name, x, weights)
    cols = [len(weight) for weight in weights]
    splits = 1 if isinstance(settings, Wide) else settings.splits
    keep_splits = keep_splits and not isinstance(settings, Wide) and (splits > 1 or in_draft_pass)
    out = empty_output(matrix, cols, splits, apart=keep_splits)
    if residual is not None:
        residual = residual.reshape(out.shape)
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
    parts = parts_of(out, cols, x.shape[:-1], x.dtype)
    weights, cols, biases = as_kernels_take(weights, cols, biases)
    if not out.numel():
        pass
    elif isinstance(settings, Settings):
        linear_few_rows(matrix, weights, cols, biases, residual, out, settings, keep_splits)
    elif isinstance(settings, Wide):
        _check_wide(name, matrix, weights, residual)
        _wide().linear_hopper_many_rows(matrix, weights, cols, biases, out, settings)
    else:
        _check_streaming(name, matrix, weights, settings, residual, keep_splits)
        _streamed().linear_hopper(matrix, weights, cols, biases, out, settings)
    return parts


def _choose(
    x: Tensor,
    weights: Sequence[Tensor],
    tune_for_rows: int | None,
    keep_splits: bool = False,
    residual: Tensor | None = None,
    fused: bool = False,
) -> Settings | Streaming | Wide | None:
    """The settings of a product; None: use cuBLAS. Streaming changes no bit up to 64 rows.

    `tune_for_rows`, if larger than the number of rows, decides the splits of K. The rows themselves decide the tiles,
    and whether hopper_many_rows.py is used. In 16 bits, `tune_for_rows` above MAX_ROWS is ignored: passes that large do
    not match bit for bit anyway.
    """
    matrix = contiguous_rows(x)
    if tune_for_rows is not None and tune_for_rows > MAX_ROWS and x.dtype.itemsize == 2:
        tune_for_rows = None
    rows, depth = max(tune_for_rows or 0, len(matrix)), x.shape[-1]
    cols = tuple(weight.shape[0] for weight in weights)
    settings = launch_settings(x.device, x.dtype, rows, cols, depth, fused, tune_for_rows is not None)
    streaming = _streamed() if residual is None and can_stream([matrix, *weights]) else None
    if settings is None:
        if streaming is None:
            return None
        wide = _wide().settings_for(len(matrix), cols, depth, multiprocessors_of(x.device))
        if wide is not None:
            return wide
        many = streaming.many_rows_settings(rows, cols, depth, fused)
        if many is None or (many.splits > 1 and not keep_splits):
            return None
        tile = (many.block_n, many.block_k, many.splits)
        return streaming.settings_for(len(matrix), cols, depth, *tile, fused) or many
    if tune_for_rows and not keep_splits:
        settings = settings._replace(splits=1)  # the megakernel does not join splits within a tile
    if streaming is None or (settings.splits > 1 and not keep_splits):
        return settings
    tile = (settings.block_n, settings.block_k, settings.splits)
    return streaming.settings_for(len(matrix), cols, depth, *tile, fused) or settings


def _streamed() -> Any:
    return gluon_module("eagle_triton.ops.linear.hopper")


def _wide() -> Any:
    return gluon_module("eagle_triton.ops.linear.hopper_many_rows")


def _matrix(name: str, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x as [rows, K] with contiguous rows. Weights with rows that are not contiguous are refused, not copied."""
    for weight in weights:
        if weight.stride(1) != 1 and weight.shape[1] > 1:
            raise ValueError(f"{name}: the rows of a weight must be contiguous, got strides {weight.stride()}")
    return contiguous_rows(x)


def _check_streaming(
    name: str,
    matrix: Tensor,
    weights: Sequence[Tensor],
    settings: Streaming,
    residual: Tensor | None,
    keep_splits: bool,
) -> None:
    if residual is not None or (settings.splits > 1 and not keep_splits):
        raise ValueError(f"{name}: Streaming settings allow no residual, and need keep_splits if K is split")
    if not has_descriptors([matrix, *weights]) or len(matrix) > MAX_STREAMED:
        raise ValueError(
            f"{name}: Streaming settings need a Hopper GPU, 16 bits and at most {MAX_STREAMED} rows, aligned to 16 "
            f"bytes, got {matrix.dtype} {tuple(matrix.shape)} with strides {matrix.stride()}"
        )


def _check_wide(name: str, matrix: Tensor, weights: Sequence[Tensor], residual: Tensor | None) -> None:
    cols = [len(weight) for weight in weights]
    if residual is not None or len(weights) != 3 or any(n % WIDE_TILE for n in cols):
        raise ValueError(
            f"{name}: Wide settings need a stack of two or three weights without a residual, with columns that are "
            f"multiples of {WIDE_TILE}, got {cols}"
        )
    if not can_stream([matrix, *weights]) or not WIDE_TILE < len(matrix) <= MAX_WIDE:
        raise ValueError(
            f"{name}: Wide settings need a Hopper GPU, 16 bits and {WIDE_TILE + 1} to {MAX_WIDE} rows, aligned to 16 "
            f"bytes, got {matrix.dtype} {tuple(matrix.shape)} with strides {matrix.stride()}"
        )
