"""Products that are not summed yet: the splits of one product, or the parts of several ranks. The kernel that reads the
product adds them. Also tables with rows shared by ranks."""

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
    """A product [..., N] as `sums` [splits, ..., N] fp32 over splits of K. Its value: the sums, added in order and
    rounded to `dtype`. rms_norm and rotary_append take it instead of a tensor."""

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
        """Like Tensor.unflatten, for a negative `dim`."""
        return SplitSums(self.sums.unflatten(dim, sizes), self.dtype)

    def total(self) -> Tensor:
        """The product itself, for readers that take only tensors."""
        return self.total_in_fp32().to(self.dtype)

    def total_in_fp32(self) -> Tensor:
        """The product before rounding."""
        return functools.reduce(torch.add, self.sums.unbind(0))


@dataclass(frozen=True)
class SharedSums:
    """A product [..., N] with a part on each rank. Its value: the parts, added in rank order and rounded to `dtype`.

    rms_norm, add_rms_norm and add take it instead of a tensor. Each read exchanges the parts, so all ranks must read it
    equally often. part: this rank's, in fp32 if it has splits.
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
    """A table [V, H] with the same number of rows on each rank, in rank order.

    embed_rms_norm takes it instead of a table. Each read exchanges the ranks' look-ups, so all ranks must read it
    equally often. rows [V / size, H]: this rank's.
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
    """This rank's part of a look-up of tokens [...]: its own rows [..., H], and zeros for other ranks' tokens."""
    place = tokens - rank * len(rows)
    mine = (place >= 0) & (place < len(rows))
    return rows[place.clamp(0, len(rows) - 1)].masked_fill(~mine[..., None], 0)


Product: TypeAlias = Tensor | SplitSums | SharedSums
"""A product: whole, as splits of one process, or as parts of several ranks."""


def total_of(x: Product) -> Tensor:
    """A product as a tensor; splits and parts are added."""
    return x if isinstance(x, Tensor) else x.total()
