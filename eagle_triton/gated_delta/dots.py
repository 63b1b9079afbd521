"""Products on tensor cores that are as accurate as fp32, and the triangular systems solved with them.

An fp32 number is the sum of three bf16 numbers. Where a product's one side is bf16, three products of 16 bits are exact
but for the sum; where both are fp32, six leave out what is below 2^-24. Beside three products in tf32, which cost as
much, that is closer, fits in fewer registers, and keeps the tiles in the layouts they have.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def bf16_parts(x: Tensor) -> bool:
    """Whether fp32 is multiplied in bf16 parts: on GPUs; in Triton's interpreter it is multiplied as it is."""
    return x.is_cuda


@triton.jit
def leading(x):
    """fp32 x rounded to the 8 bits of a bf16 number. By its bits: a conversion of single numbers is slow."""
    return ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def as_bf16(x):
    """fp32 x whose lower 16 bits are 0."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def parts(x):
    """Three bf16 tiles whose sum is fp32 x."""
    high = leading(x)
    rest = x - high
    middle = leading(rest)
    return as_bf16(high), as_bf16(middle), as_bf16(rest - middle)


@triton.jit
def wide_dot(x, y, PARTS: tl.constexpr):
    """fp32 x [M, K] times fp32 y [K, N]; small products are summed first."""
    if PARTS:
        x_high, x_middle, x_low = parts(x)
        y_high, y_middle, y_low = parts(y)
        total = tl.dot(x_middle, y_middle, tl.dot(x_low, y_high, tl.dot(x_high, y_low)))
        return tl.dot(x_high, y_high, tl.dot(x_middle, y_high, tl.dot(x_high, y_middle, total)))
    else:
        return tl.dot(x, y, input_precision="ieee")


@triton.jit
def model_dot(x, y, PARTS: tl.constexpr):
    """x [M, K] of the model's dtype times fp32 y [K, N]."""
    if PARTS and x.dtype == tl.bfloat16:
        high, middle, low = parts(y)
        return tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low)))
    else:
        return wide_dot(x.to(tl.float32), y, PARTS)


@triton.jit
def pair_dot(x, y, PARTS: tl.constexpr):
    """x [M, K] times the transpose of y [N, K], both of the model's dtype: in 16 bits every product is exact."""
    if x.dtype == tl.float32:
        return wide_dot(x, tl.trans(y), PARTS)
    else:
        return tl.dot(x, tl.trans(y))


@triton.jit
def substitute(system, right, steps, PARTS: tl.constexpr):
    """d [N, V] with (I + system) d = right, where system^(steps + 1) = 0.

    After step i the rows that depend on a chain of i others are those of forward substitution, and stay. So no power of
    `system` is formed: its entries grow like binomial coefficients where keys are alike, and cancel.
    """
    update = right
    for _ in range(steps):
        update = right - wide_dot(system, update, PARTS)
    return update
