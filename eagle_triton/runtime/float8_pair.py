"""Rows in 16 bits as pairs of e4m3 numbers, which tensor cores multiply directly with weights in eight bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.runtime.fallback import triton_version

LOW = 16.0  # factor of the low parts
GROUP = 128  # columns that share a scale: those of a block of weights
MAX_PAIRED_ROWS = 64  # more rows are not read as pairs


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


def takes_pairs(x: Tensor) -> bool:
    """Whether products read x [..., K] as a pair: few rows in bf16, on a Hopper GPU, with Triton 3.6 or newer."""
    if x.dtype != torch.bfloat16 or x.shape[:-1].numel() > MAX_PAIRED_ROWS or x.shape[-1] % 16:
        return False
    nvidia = x.device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(x.device) == (9, 0) and triton_version() >= (3, 6)


def whole_of(x: Tensor | Float8Pair) -> Tensor:
    """x itself, or the rows that a pair represents."""
    return x.total() if isinstance(x, Float8Pair) else x
