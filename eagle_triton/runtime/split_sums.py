"""Products whose partial sums are still apart: what a split product hands to the kernel that reads it, or each of
several ranks that have some of its columns. And tables of which each rank has some rows."""

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


@dataclass(frozen=True, eq=False)
class SharedRows:
    """A table [V, H] of which each rank has as many rows, in the order of the ranks.

    Stands in for a table where embed_rms_norm reads one: ranks exchange what they look up, once each time that it is
    read, so all ranks must read it alike. `rows` [V / size, H] are this rank's.
    """

    rows: Tensor
    peers: PeerMemory

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows) * self.peers.size, self.rows.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def dim(self) -> int:
        return 2

    def __getitem__(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64 -> [..., H], on a CPU; see PeerMemory.exchanged."""
        return self.peers.exchanged(own_rows(self.rows, tokens, self.peers.rank)).sum(0)


def own_rows(rows: Tensor, tokens: Tensor, rank: int) -> Tensor:
    """This rank's part of a look-up of tokens [...]: its own rows [..., H], and zeros where a token is another's."""
    place = tokens - rank * len(rows)
    mine = (place >= 0) & (place < len(rows))
    return rows[place.clamp(0, len(rows) - 1)].masked_fill(~mine[..., None], 0)


Product: TypeAlias = Tensor | SplitSums | SharedSums
"""A product whole, or with the splits of one process apart, or with the parts of several."""


def total_of(x: Product) -> Tensor:
    """A product, added up if its parts are still apart."""
    return x if isinstance(x, Tensor) else x.total()
