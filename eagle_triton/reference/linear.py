"""Products of few rows with weights as stored in the model: [out, in], one tensor for each projection.

With a quantised weight the product is computed in fp32 from the dequantised weight, and rounded once. Eight-bit weights
are exact (Float8Weight), four-bit weights are rounded to x's dtype first (FourBitWeight).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from eagle_triton.operands.linear import Weight, check_product
from eagle_triton.reference.layers import swiglu
from eagle_triton.runtime.four_bit_weight import FourBitWeight
from eagle_triton.runtime.row_formats import ProductRows, RowFormat, whole_of
from eagle_triton.runtime.split_sums import SplitSums


def linear(
    x: ProductRows,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    keep_splits: bool = False,
    tune_for_rows: int | None = None,
) -> Tensor | SplitSums:
    """x @ weight.T (+ bias) (+ residual). x [..., K], weight [N, K], bias [N], residual [..., N]; returns [..., N].

    keep_splits: the caller also takes SplitSums, which only the kernel returns. tune_for_rows: for the kernel only.
    """
    check_product("linear", x, (weight,), (bias,), residual, keep_splits=keep_splits)
    out = _product(x, weight, bias)
    return out if residual is None else residual + out


def linear_stack(
    x: ProductRows,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    *,
    keep_splits: bool = False,
    tune_for_rows: int | None = None,
) -> tuple[Tensor | SplitSums, ...]:
    """Several products of the same rows, e.g. q, k and v. x [..., K], weights [Ni, K]; returns one [..., Ni] each."""
    check_product("linear_stack", x, weights, biases, None)
    return tuple(_product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def linear_swiglu(
    x: ProductRows,
    gate: Weight,
    up: Weight,
    *,
    tune_for_rows: int | None = None,
    row_format: RowFormat | None = None,
    activation: str = "silu",
) -> ProductRows:
    """silu(x @ gate.T) * (x @ up.T); with the activation "gelu_tanh", gelu with its tanh approximation. x [..., K],
    gate and up [I, K]; returns [..., I]. tune_for_rows and row_format are for the kernel only."""
    check_product("linear_swiglu", x, (gate, up), (None, None), None, same=True)
    return swiglu(_product(x, gate), _product(x, up), activation)


def _product(x: ProductRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    x = whole_of(x)
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    full = weight.dequantised(x.dtype).float() if isinstance(weight, FourBitWeight) else weight.dequantised()
    return F.linear(x.float(), full, wide).to(x.dtype)
