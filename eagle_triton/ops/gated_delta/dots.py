"""Products on tensor cores that are as accurate as fp32, and triangular solves with them.

The kernels' PARTS says how fp32 numbers are split (`bf16_parts`).

An fp32 number is the sum of three bf16 numbers. If one side of a product is bf16, three products in 16 bits are exact
but for the sum. If both sides are fp32, six products leave out only terms below 2^-24. Three products in tf32 cost as
much, are less accurate, need more registers, and change the tiles' layouts.

No product has a left side of 64 rows, because Triton compiles those to Hopper's wgmma. Versions 3.4 to 3.7 have
compiled some kernels with several of them to code that reads foreign shared memory (triton-lang/triton 10486 and 11366,
fla-org/flash-linear-attention 984): on an H200, ours gave wrong numbers or faults at some shapes. So here nodes are
columns, a few columns of a state are rows, and matrices of nodes by nodes are made in two halves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.runtime.gpu import compute_capability


def bf16_parts(x: Tensor, in_turn: bool = False) -> str | None:
    """The kernels' PARTS: how fp32 numbers are split for products in bf16. "ptx" on NVIDIA's GPUs, "portable" on
    others, None in Triton's interpreter, which does not split them.

    in_turn: the compiler must not merge or move the splits ("ptx in turn"), so that fewer registers are in use.
    """
    if x.device.type == "cpu":
        return None
    if compute_capability(x.device) == (0, 0):
        return "portable"
    return "ptx in turn" if in_turn else "ptx"


_PARTS_OF_TWO = tl.constexpr("""
    {
    .reg .b32 first, second;
    cvt.rn.bf16x2.f32 $0, $4, $3;
    shl.b32 first, $0, 16;
    and.b32 second, $0, 0xffff0000;
    sub.f32 first, $3, first;
    sub.f32 second, $4, second;
    cvt.rn.bf16x2.f32 $1, second, first;
    {
    .reg .b32 high_first, high_second;
    shl.b32 high_first, $1, 16;
    and.b32 high_second, $1, 0xffff0000;
    sub.f32 first, first, high_first;
    sub.f32 second, second, high_second;
    }
    cvt.rn.bf16x2.f32 $2, second, first;
    }
""")


@triton.jit
def leading(x):
    """fp32 x rounded to the 8 bits of a bf16 number, by integer operations: converting single numbers is slow."""
    return ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def as_bf16(x):
    """fp32 x, with lower 16 bits of 0, as bf16."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def parts(x, PARTS: tl.constexpr):
    """Three bf16 tiles that add up to fp32 x."""
    if PARTS != "portable":  # two numbers at a time: half the instructions of Triton's own code
        return tl.inline_asm_elementwise(
            _PARTS_OF_TWO,
            "=&r,=&r,=r,r,r",
            [x],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=PARTS == "ptx",
            pack=2,
        )
    high = leading(x)
    rest = x - high
    middle = leading(rest)
    return as_bf16(high), as_bf16(middle), as_bf16(rest - middle)


@triton.jit
def opaque(x, PARTS: tl.constexpr):
    """fp32 x through PTX, so that Triton does not know its origin."""
    if PARTS is not None and PARTS != "portable":
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def on_top(upper, lower, PARTS: tl.constexpr):
    """[2 M, N]: one fp32 tile [M, N] above another."""
    M: tl.constexpr = upper.shape[0]
    N: tl.constexpr = upper.shape[1]
    both = tl.reshape(tl.permute(tl.join(upper, lower), (2, 0, 1)), (2 * M, N))
    return opaque(both, PARTS)  # after a tl.join, Triton gives products the layout of 4-bit numbers


@triton.jit
def square_dot(x, y, PARTS: tl.constexpr):
    """fp32 x [64, K] times fp32 y [K, N], in two halves."""
    K: tl.constexpr = x.shape[1]
    upper, lower = tl.split(tl.permute(tl.reshape(x, (2, 32, K)), (1, 2, 0)))
    return on_top(wide_dot(upper, y, PARTS), wide_dot(lower, y, PARTS), PARTS)


@triton.jit
def dot_of_parts(x, y_high, y_middle, y_low, PARTS: tl.constexpr):
    """wide_dot of the parts of y. Each product has its own sum, so that none waits for another."""
    x_high, x_middle, x_low = parts(x, PARTS)
    small = tl.dot(x_middle, y_middle) + (tl.dot(x_low, y_high) + tl.dot(x_high, y_low))
    return tl.dot(x_high, y_high) + ((tl.dot(x_middle, y_high) + tl.dot(x_high, y_middle)) + small)


@triton.jit
def wide_dot(x, y, PARTS: tl.constexpr):
    """fp32 x [M, K] times fp32 y [K, N]; small products are summed first. M is at most 32."""
    tl.static_assert(x.shape[0] <= 32, "64 rows would be a product of wgmma")
    if PARTS is not None:
        y_high, y_middle, y_low = parts(y, PARTS)
        return dot_of_parts(x, y_high, y_middle, y_low, PARTS)
    else:
        return tl.dot(x, y, input_precision="ieee")


@triton.jit
def model_dot(x, y, PARTS: tl.constexpr):
    """fp32 x [M, K] times y [K, N] of the model's dtype. M is at most 32."""
    if PARTS is not None and y.dtype == tl.bfloat16:
        tl.static_assert(x.shape[0] <= 32, "64 rows would be a product of wgmma")
        high, middle, low = parts(x, PARTS)
        return tl.dot(high, y) + (tl.dot(middle, y) + tl.dot(low, y))
    else:
        return wide_dot(x, y.to(tl.float32), PARTS)


@triton.jit
def pair_dot(x, y, PARTS: tl.constexpr):
    """x [M, K] times y [K, N], both of the model's dtype: in 16 bits every product is exact. M is at most 32."""
    if x.dtype == tl.float32:
        return wide_dot(x, y, PARTS)
    else:
        tl.static_assert(x.shape[0] <= 32, "64 rows would be a product of wgmma")
        return tl.dot(x, y)


@triton.jit
def substitute(system, right, steps, PARTS: tl.constexpr):
    """Solves d (I + system) = right for d [V, N], where system^(steps + 1) = 0. V is at most 32.

    After step i, columns that depend on a chain of i others have their final values, as in forward substitution. No
    power of `system` is formed: with similar keys its entries would grow like binomial coefficients, and cancel.
    """
    update = right
    if PARTS is not None:
        tl.static_assert(right.shape[0] <= 32, "64 rows would be a product of wgmma")
        high, middle, low = parts(system, PARTS)
        for _ in range(steps):
            update = right - dot_of_parts(update, high, middle, low, PARTS)
    else:
        for _ in range(steps):
            update = right - wide_dot(update, system, PARTS)
    return update
