"""Products whose partial sums are still apart: what a split product hands to the kernel that reads it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SplitSums:
    """A product [..., N] whose splits of K are still apart: it is `sums`, added in their order and rounded to `dtype`.

    Stands in for a tensor where rms_norm and rotary_append read one; `sums` is [splits, ..., N] fp32.
    """

    sums: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.sums.shape[1:]

    @property
    def device(self) -> torch.device:
        return self.sums.device

    def dim(self) -> int:
        return self.sums.dim() - 1

    def unflatten(self, dim: int, sizes: Sequence[int]) -> SplitSums:
        """As Tensor.unflatten, for a negative `dim`."""
        return SplitSums(self.sums.unflatten(dim, sizes), self.dtype)

    def total(self) -> Tensor:
        """The product itself, for readers that know tensors only."""
        return self.total_in_fp32().to(self.dtype)

    def total_in_fp32(self) -> Tensor:
        """The same before it is rounded."""
        return functools.reduce(torch.add, self.sums.unbind(0))


def total_of(x: Tensor | SplitSums) -> Tensor:
    """A product, its splits added up if they are still apart."""
    return x.total() if isinstance(x, SplitSums) else x
