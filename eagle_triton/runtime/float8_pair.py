"""Rows of 16 bits as pairs of e4m3 numbers, which the tensor cores multiply with weights of eight bits as they lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.runtime.fallback import triton_version

LOW = 16.0  # what the low parts are multiplied by
GROUP = 128  # columns that share a scale, as many as a block of weights has
MAX_PAIRED_ROWS = 64  # of a product that reads pairs


class Float8Pair(NamedTuple):
    """x [..., K] of `dtype`, as scale * (high + low / 16).

    A number of bf16 has eight bits that count, one of e4m3 four. So x is kept exactly from 2 ** -13 of the largest
    beside it on, of 128 columns of a row, and to 2 ** -21 of that one elsewhere. Infinity and NaN
    make all of the 128 NaN.

    | name  | shape         | dtype, layout                                                           |
    |-------|---------------|-------------------------------------------------------------------------|
    | parts | [2, rows, K]  | float8_e4m3fn, contiguous: high, then low                               |
    | scale | [groups, rows]| fp32: the powers of two that bring the largest of 128 to [128, 256)     |
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
        """x itself, [..., K] of its dtype."""
        high, low = self.parts.float()
        scale = self.scale.T.repeat_interleave(GROUP, 1)[:, : self.shape[-1]]
        return ((high + low / LOW) * scale).view(self.shape).to(self.dtype)


def takes_pairs(x: Tensor) -> bool:
    """Whether products read x [..., K] as a pair: few rows of bf16 on a Hopper GPU, by kernels that take Triton 3.6."""
    if x.dtype != torch.bfloat16 or x.shape[:-1].numel() > MAX_PAIRED_ROWS or x.shape[-1] % 16:
        return False
    nvidia = x.device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(x.device) == (9, 0) and triton_version() >= (3, 6)


def whole_of(x: Tensor | Float8Pair) -> Tensor:
    """x, or what a pair stands for."""
    return x.total() if isinstance(x, Float8Pair) else x
