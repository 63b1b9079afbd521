"""What the kernels and launchers of this folder share."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.runtime.split_sums import Product, SplitSums, total_of


@triton.jit
def load_sum(ptrs, stride_split, mask, SPLITS: tl.constexpr):
    """fp32 values, or the sum of SPLITS partial values in their order."""
    total = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(ptrs + split * stride_split, mask=mask, other=0.0)
    return total


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 values rounded to DTYPE, in fp32."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def activated(gate, GELU_TANH: tl.constexpr):
    """silu of fp32 values, or gelu with its tanh approximation."""
    slope = gate
    if GELU_TANH:  # 0.5 * (1 + tanh(y)) = sigmoid(2 * y)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(slope)


@triton.jit
def in_word_order(x):
    """x [R, C] with its columns in the order of words, see WordOrdered in runtime/row_formats.py. C is a multiple of
    32."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    return x.reshape((ROWS, COLS // 32, 4, 2, 4)).permute((0, 1, 4, 2, 3)).reshape((ROWS, COLS))


def contiguous_rows(x: Tensor) -> Tensor:
    """x as [rows, H] with contiguous rows, copied only if they are not."""
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class SplitRows(NamedTuple):
    """Rows [rows, n], or partial sums of them [splits, rows, n]; a row is contiguous."""

    ptr: Tensor
    split: int
    row: int

    @staticmethod
    def of(product: Product) -> tuple[SplitRows, int]:
        """A product's rows, and the number of their splits."""
        if isinstance(product, SplitSums):
            sums = product.sums.reshape(len(product.sums), product.shape[:-1].numel(), product.shape[-1])
            sums = sums if sums.stride(2) == 1 else sums.contiguous()
            return SplitRows(sums, sums.stride(0), sums.stride(1)), len(sums)
        rows = contiguous_rows(total_of(product))
        return SplitRows(rows, 0, rows.stride(0)), 1
