"""Rows of bf16 as pairs of e4m3 numbers (Float8Pair), for products with eight-bit weights.

| name  | shape          | dtype, layout                        |
|-------|----------------|--------------------------------------|
| x     | [..., K]       | bf16; a row is contiguous            |
| parts | [2, rows, K]   | e4m3: high, then low                 |
| scale | [groups, rows] | fp32, one for each 128 columns       |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.layers import check_float8_pair
from eagle_triton.ops.layers.values import contiguous_rows
from eagle_triton.ops.views import PairParts, Rows
from eagle_triton.runtime.overlap import await_inputs, overlapped
from eagle_triton.runtime.row_formats import GROUP, Float8Pair

_BLOCK = 2048  # columns of a program
_SPACED_BY_2_TO_MINUS_9 = tl.constexpr(1.5 * 2.0**14)  # neighbours of this number of fp32 are 2 ** -9 apart


@triton.jit
def _rounded_to_e4m3(x):
    """fp32 numbers below 256 rounded to e4m3, ties to even: to four significant bits, or to multiples of 2 ** -9.

    CUDA 12.9's assembler compiles a conversion to e4m3 and back wrongly: it reads the second of two pairs of numbers
    from the wrong register.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + _SPACED_BY_2_TO_MINUS_9) - _SPACED_BY_2_TO_MINUS_9
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@triton.jit
def _pair_of(x):
    """The high and low parts of groups x [G, WIDTH] fp32, to be stored as e4m3, and their scales [G]."""
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)  # NaN counts as infinity
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.where(largest == 0.0, 134, tl.minimum(tl.maximum(exponent, 8), 254))
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    x *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = _rounded_to_e4m3(x)
    return high, (x - high) * 16.0, tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def store_pair(x, first, pair, row, rows, size):
    """Store the pair of columns first.. of one row of `size` columns: x [G, WIDTH] fp32, 0 past the last column.
    `first` is a multiple of 128, and WIDTH is 128 unless G is 1."""
    groups, width = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    offs = first + groups[:, None] * 128 + width[None, :]
    mask = offs < size
    high, low, scale = _pair_of(x)
    parts_ptr = pair.parts + row.to(tl.int64) * size + offs
    tl.store(parts_ptr, high.to(tl.float8e4nv), mask=mask)
    tl.store(parts_ptr + rows.to(tl.int64) * size, low.to(tl.float8e4nv), mask=mask)
    group = first // 128 + groups
    tl.store(pair.scale + group * rows + row, scale, mask=group * 128 < size)


@triton.jit
def store_groups(x, group, row, ok, parts_ptr, scale_ptr, rows, size):
    """Store pairs of groups of 128 columns, x [G, 128] fp32: group `group` [G] of row `row` [G], where `ok` [G]. There
    are `rows` rows of `size` columns."""
    high, low, scale = _pair_of(x)
    column = (group[:, None] * 128 + tl.arange(0, 128)[None, :]).to(tl.int64)
    tl.store(parts_ptr + row[:, None] * size + column, high.to(tl.float8e4nv), mask=ok[:, None])
    tl.store(parts_ptr + (rows + row)[:, None] * size + column, low.to(tl.float8e4nv), mask=ok[:, None])
    tl.store(scale_ptr + group * rows + row, scale, mask=ok)


@triton.jit(do_not_specialize=["rows"])
def _float8_pair_kernel(x, pair, rows, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, blocks of columns): a program makes the pair of one block of one row."""
    await_inputs(PDL)
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    WIDTH: tl.constexpr = min(BLOCK, 128)
    offs = first + tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(x.ptr + row.to(tl.int64) * x.row + offs, mask=offs < size, other=0.0).to(tl.float32)
    store_pair(values, first, pair, row, rows, size)


def float8_pair(x: Tensor) -> Float8Pair:
    """x [..., K] bf16 as a pair. Raises ValueError for other dtypes."""
    check_float8_pair(x)
    matrix = contiguous_rows(x)
    pair = empty_pair(x.shape, x)
    rows, size = matrix.shape
    if rows and size:
        block = min(triton.next_power_of_2(size), _BLOCK)
        overlapped(_float8_pair_kernel, (rows, triton.cdiv(size, block)), x.device)(
            Rows.of(matrix),
            PairParts.of(pair),
            rows,
            size,
            block,
            num_warps=max(block // 512, 1),
        )
    return pair


def empty_pair(shape: torch.Size, like: Tensor) -> Float8Pair:
    """Room for the pair of a tensor of this shape, with the dtype and device of `like`."""
    rows, size = shape[:-1].numel(), shape[-1]
    parts = torch.empty(2, rows, size, dtype=torch.float8_e4m3fn, device=like.device)
    scale = torch.empty(triton.cdiv(size, GROUP), rows, dtype=torch.float32, device=like.device)
    return Float8Pair(parts, scale, shape, like.dtype)
