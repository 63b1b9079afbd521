"""Products whose partial sums are still apart: what a split product hands to the kernel that reads it, or each of
several ranks that have some of its columns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from eagle_triton.runtime.peer_memory import PeerMemory


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


@dataclass(frozen=True)
class SharedSums:
    """A product [..., N] of which each rank has a part: these added in the order of the ranks, and rounded to `dtype`.

    Stands in for a tensor where rms_norm, add_rms_norm and add read one: they exchange the parts, once each time that
    it is read, so all ranks must read it alike. `part` is this rank's, fp32 where its splits are apart, else as it is.
    """

    part: Tensor | SplitSums
    dtype: torch.dtype
    peers: PeerMemory

    @property
    def shape(self) -> torch.Size:
        return self.part.shape

    @property
    def device(self) -> torch.device:
        return self.part.device

    def dim(self) -> int:
        return self.part.dim()

    def total(self) -> Tensor:
        """The product itself, on a CPU; see PeerMemory.exchanged."""
        part = self.part.total_in_fp32() if isinstance(self.part, SplitSums) else self.part
        return functools.reduce(torch.add, self.peers.exchanged(part).float().unbind(0)).to(self.dtype)


Product: TypeAlias = Tensor | SplitSums | SharedSums
"""A product whole, or with the splits of one process apart, or with the parts of several."""


def total_of(x: Product) -> Tensor:
    """A product, added up if its parts are still apart."""
    return x if isinstance(x, Tensor) else x.total()
