"""Products of few rows with weights as they lie in the model: [out, in], one tensor per projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from eagle_triton.runtime.split_sums import SplitSums


def linear(
    x: Tensor,
    weight: Tensor,
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
    out = F.linear(x, weight, bias)
    return out if residual is None else residual + out


def linear_stack(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    keep_splits: bool = False,
    launch_rows: int | None = None,
) -> tuple[Tensor | SplitSums, ...]:
    """Several products of the same rows, e.g. q, k and v. x [..., K], weights [Ni, K]; returns one [..., Ni] each."""
    check_product("linear_stack", x, weights, biases, None)
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def linear_swiglu(x: Tensor, gate: Tensor, up: Tensor, *, launch_rows: int | None = None) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T). x [..., K], gate and up [I, K]; returns [..., I]."""
    check_product("linear_swiglu", x, (gate, up), (None, None), None, same=True)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def check_product(
    name: str,
    x: Tensor,
    weights: Sequence[Tensor],
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
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"{name}: x must be floating point [..., K], got {x.dtype} {tuple(x.shape)}")
    operands = []
    for weight, bias in zip(weights, biases, strict=True):
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(f"{name}: weight must be [N, {x.shape[-1]}], got {tuple(weight.shape)}")
        if same and weight.shape != weights[0].shape:
            raise ValueError(f"{name}: weights must be {tuple(weights[0].shape)} alike, got {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}: bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
        operands += [weight] if bias is None else [weight, bias]
    if residual is not None:
        expected = (*x.shape[:-1], weights[0].shape[0])
        if residual.shape != expected:
            raise ValueError(f"{name}: residual must be {expected}, got {tuple(residual.shape)}")
        operands.append(residual)
    for operand in operands:
        if operand.dtype != x.dtype or operand.device != x.device:
            raise ValueError(f"{name}: expected {x.dtype} on {x.device} as x, got {operand.dtype} on {operand.device}")
