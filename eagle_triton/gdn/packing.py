"""What is packed into one row: sequences of several lengths, with their ends in cu_seqlens; heads side by side."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def sequence_lengths(name: str, cu_seqlens: Tensor | None, x: Tensor) -> list[int] | None:
    """The lengths of the sequences in x [1, T, ...], from cu_seqlens [N + 1]; None: each row of x is a sequence.

    Raises ValueError unless they begin at 0, never fall and end at T.
    """
    if cu_seqlens is None:
        return None
    ends = cu_seqlens.tolist()
    lengths = [last - first for first, last in pairwise(ends)]
    if len(x) != 1 or not lengths or ends[0] != 0 or ends[-1] != x.shape[1] or min(lengths) < 0:
        raise ValueError(
            f"{name}: with cu_seqlens, there must be one row of T tokens, and ends from 0 to T = {x.shape[1]}, "
            f"got {len(x)} rows and {ends}"
        )
    return lengths


def split_heads(mixed: Tensor, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, HV, V] from mixed [B, T, 2 H K + HV V]."""
    keys = heads * key_dim
    q, k, v = mixed.split((keys, keys, mixed.shape[-1] - 2 * keys), dim=-1)
    return q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)), v.unflatten(-1, (-1, value_dim))


def padded(x: Tensor, lengths: list[int] | None, value: float = 0.0) -> Tensor:
    """x [1, T, ...] as [N, longest, ...], each sequence padded with `value`. Without lengths x itself."""
    if lengths is None:
        return x
    if len(set(lengths)) == 1:
        return x.unflatten(1, (len(lengths), -1))[0]
    return pad_sequence(list(x[0].split(lengths)), batch_first=True, padding_value=value)


def packed(x: Tensor, lengths: list[int] | None) -> Tensor:
    """The inverse of `padded`."""
    if lengths is None:
        return x
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])[None]
