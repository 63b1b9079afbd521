"""Products of few rows with weights as they lie in the model: [out, in], one tensor per projection.

Or one of eight bits with its scales (Float8Weight): then the product is that of the weight itself, in fp32, rounded
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from eagle_triton.runtime.float8_pair import Float8Pair, whole_of
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.split_sums import SplitSums


def linear(
    x: Tensor | Float8Pair,
    weight: Tensor | Float8Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    keep_splits: bool = False,
    launch_rows: int | None = None,
) -> Tensor | SplitSums:
    """x @ weight.T (+ bias) (+ residual). x [..., K], weight [N, K], bias [N], residual [..., N]; returns [..., N].

    `keep_splits`: the caller also takes a product whose partial sums are still apart, which only the kernel returns.
    `launch_rows` matters to the kernel alone.
    """
    check_product("linear", x, (weight,), (bias,), residual, keep_splits=keep_splits)
    out = _product(x, weight, bias)
    return out if residual is None else residual + out


def linear_stack(
    x: Tensor | Float8Pair,
    weights: Sequence[Tensor | Float8Weight],
    biases: Sequence[Tensor | None],
    *,
    keep_splits: bool = False,
    launch_rows: int | None = None,
) -> tuple[Tensor | SplitSums, ...]:
    """Several products of the same rows, e.g. q, k and v. x [..., K], weights [Ni, K]; returns one [..., Ni] each."""
    check_product("linear_stack", x, weights, biases, None)
    return tuple(_product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def linear_swiglu(
    x: Tensor | Float8Pair,
    gate: Tensor | Float8Weight,
    up: Tensor | Float8Weight,
    *,
    launch_rows: int | None = None,
    for_float8: bool = False,
) -> Tensor | Float8Pair:
    """silu(x @ gate.T) * (x @ up.T). x [..., K], gate and up [I, K]; returns [..., I]. `launch_rows` and `for_float8`
    matter to the kernel alone."""
    check_product("linear_swiglu", x, (gate, up), (None, None), None, same=True)
    return F.silu(_product(x, gate)) * _product(x, up)


def _product(x: Tensor | Float8Pair, weight: Tensor | Float8Weight, bias: Tensor | None = None) -> Tensor:
    x = whole_of(x)
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.dequantised(), wide).to(x.dtype)


def check_product(
    name: str,
    x: Tensor | Float8Pair,
    weights: Sequence[Tensor | Float8Weight],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    same: bool = False,
    keep_splits: bool = False,
) -> None:
    """Raise ValueError unless these are operands of one product; `same`: all weights must have one shape."""
    if keep_splits and residual is not None:
        raise ValueError(f"{name}: a keep_splits product takes no residual: its reader adds one")
    if not weights or len(weights) != len(biases):
        raise ValueError(f"{name}: expected one bias or None per weight, got {len(weights)} and {len(biases)}")
    if len(x.shape) < 1 or not x.dtype.is_floating_point:
        raise ValueError(f"{name}: x must be floating point [..., K], got {x.dtype} {tuple(x.shape)}")
    operands: list[Tensor] = []
    for weight, bias in zip(weights, biases, strict=True):
        if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(f"{name}: weight must be [N, {x.shape[-1]}], got {tuple(weight.shape)}")
        if same and weight.shape != weights[0].shape:
            raise ValueError(f"{name}: weights must be {tuple(weights[0].shape)} alike, got {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}: bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
        if isinstance(weight, Tensor):
            operands.append(weight)
        elif weight.device != x.device:
            raise ValueError(f"{name}: expected a weight on {x.device} as x, got {weight.device}")
        if bias is not None:
            operands.append(bias)
    if residual is not None:
        expected = (*x.shape[:-1], weights[0].shape[0])
        if residual.shape != expected:
            raise ValueError(f"{name}: residual must be {expected}, got {tuple(residual.shape)}")
        operands.append(residual)
    for operand in operands:
        if operand.dtype != x.dtype or operand.device != x.device:
            raise ValueError(f"{name}: expected {x.dtype} on {x.device} as x, got {operand.dtype} on {operand.device}")
