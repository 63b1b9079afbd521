"""Formats of rows for products with quantised weights. The kernel before a product writes them instead of x."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.runtime.fallback import triton_version
from eagle_triton.runtime.gpu import compute_capability

LOW = 16.0  # factor of the low parts
GROUP = 128  # columns that share a scale: those of a block of weights
MAX_PAIRED_ROWS = 64  # more rows are not read as pairs
MAX_ORDERED_ROWS = 512  # more rows are not read in the order of words


class RowFormat(Enum):
    """The format in which a product can read its input."""

    FLOAT8_PAIR = "float8_pair"
    """Float8Pair: for eight-bit weights."""
    WORD_ORDER = "word_order"
    """WordOrdered: for four-bit weights in words along a row."""


class Float8Pair(NamedTuple):
    """x [..., K] of `dtype`, as scale * (high + low / 16).

    A bf16 number has eight significant bits, an e4m3 number four. In each group of 128 columns of a row, numbers of at
    least 2 ** -13 times the group's largest are exact; smaller ones have an error of up to 2 ** -21 times the largest.
    If one of a group is infinite or NaN, all 128 become NaN.

    | name  | shape         | dtype, layout                                                           |
    |-------|---------------|-------------------------------------------------------------------------|
    | parts | [2, rows, K]  | float8_e4m3fn, contiguous: high, then low                               |
    | scale | [groups, rows]| fp32: powers of two that scale each group's largest to [128, 256)       |
    """

    parts: Tensor
    scale: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @property
    def rows(self) -> int:
        return self.parts.shape[1]

    def total(self) -> Tensor:
        """x itself, [..., K], in its dtype."""
        high, low = self.parts.float()
        scale = self.scale.T.repeat_interleave(GROUP, 1)[:, : self.shape[-1]]
        return ((high + low / LOW) * scale).view(self.shape).to(self.dtype)


class WordOrdered(NamedTuple):
    """x [..., K] in fp16 or bf16, its columns in the same order as in words of four-bit weights: in each 32 columns,
    column 8 * word + i + 4 * pair is at 8 * i + 2 * word + pair.

    | name   | shape     | dtype, layout |
    |--------|-----------|---------------|
    | values | [rows, K] | contiguous    |
    """

    values: Tensor
    shape: torch.Size

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @staticmethod
    def of(x: Tensor) -> WordOrdered:
        """x [..., K] in that order. K is a multiple of 32."""
        parts = x.reshape(x.shape[:-1].numel(), -1, 4, 2, 4)
        return WordOrdered(parts.permute(0, 1, 4, 2, 3).flatten(1), x.shape)

    def total(self) -> Tensor:
        """x itself, [..., K]."""
        return self.values.view(len(self.values), -1, 4, 4, 2).permute(0, 1, 3, 4, 2).reshape(self.shape)


FormattedRows = Float8Pair | WordOrdered
ProductRows = Tensor | Float8Pair | WordOrdered


def has_format(x: Tensor, row_format: RowFormat | None) -> bool:
    """Whether products read x [..., K] in this format: few rows of 16 bits, on a Hopper GPU, with Triton 3.6 or
    newer."""
    rows, depth = x.shape[:-1].numel(), x.shape[-1]
    if row_format is RowFormat.FLOAT8_PAIR:
        fits = x.dtype == torch.bfloat16 and rows <= MAX_PAIRED_ROWS and depth % 16 == 0
    elif row_format is RowFormat.WORD_ORDER:
        fits = x.dtype in (torch.bfloat16, torch.float16) and rows <= MAX_ORDERED_ROWS and depth % 128 == 0
    else:
        return False
    return fits and compute_capability(x.device) == (9, 0) and triton_version() >= (3, 6)


def whole_of(x: ProductRows) -> Tensor:
    """x itself, from any format of rows."""
    return x if isinstance(x, Tensor) else x.total()
