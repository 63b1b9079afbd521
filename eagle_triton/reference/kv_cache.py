"""The cache [layers, 2, B, Hkv, T, d] (dimension 1: keys, values): append new rows, gather rows, commit a path."""

from __future__ import annotations

import torch
from torch import Tensor


def append(cache: Tensor, new: Tensor, lengths: Tensor) -> None:
    """Write new rows [layers, 2, B, n, Hkv, d] at rows lengths .. lengths + n of every layer, in place.

    cache [layers, 2, B, Hkv, T, d]; lengths [B] int32. On a CPU, raises ValueError before writing anything if a
    sequence has no room for n rows; on a GPU the caller guards the capacity, because lengths are known there only.
    """
    count, capacity = new.shape[3], cache.shape[4]
    expected = (*cache.shape[:3], count, cache.shape[3], cache.shape[5])
    if new.shape != expected:
        raise ValueError(f"append: new must be {list(expected)}, got {list(new.shape)}")
    if not cache.is_cuda and int(lengths.max()) + count > capacity:
        raise ValueError(f"append: {int(lengths.max())} + {count} rows exceed the capacity of {capacity}")
    rows = lengths[:, None].long() + torch.arange(count, device=cache.device)
    batch = torch.arange(cache.shape[2], device=cache.device)[:, None]
    cache.permute(2, 4, 0, 1, 3, 5)[batch, rows] = new.permute(2, 3, 0, 1, 4, 5).to(cache.dtype)


def gather(cache: Tensor, rows: Tensor) -> Tensor:
    """Copy rows [B, n] int32 of every layer: [layers, 2, B, Hkv, n, d]. Row -1 gives zeros.

    Raises ValueError on a CPU for a row outside -1 .. T - 1.
    """
    capacity = cache.shape[4]
    if not cache.is_cuda and rows.numel() and not -1 <= int(rows.min()) <= int(rows.max()) < capacity:
        raise ValueError(f"gather: rows must lie in -1..{capacity - 1}, got {int(rows.min())}..{int(rows.max())}")
    layers, two, _, heads, _, width = cache.shape
    index = rows.clamp(min=0).long()[None, None, :, None, :, None].expand(layers, two, -1, heads, -1, width)
    return cache.gather(4, index) * (rows >= 0)[None, None, :, None, :, None]


def commit(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Keep the rows of the accepted path: row lengths + path[j] moves to row lengths + j, for j = 0 .. accepted.

    cache [layers, 2, B, Hkv, T, d], changed in place; lengths [B] int32; path [B, P] int32, ascending node indices
    from the root (path[0] = 0); accepted [B] int32, -1 to leave a sequence untouched. Rows overlap safely.
    """
    steps = torch.arange(path.shape[1], device=cache.device)
    keep = steps <= accepted[:, None]
    target = lengths[:, None].long() + steps
    source = torch.where(keep, lengths[:, None].long() + path, target).clamp(max=cache.shape[4] - 1)
    rows = gather(cache, source.int())
    layers, two, _, heads, _, width = cache.shape
    index = target.clamp(max=cache.shape[4] - 1)[None, None, :, None, :, None]
    cache.scatter_(4, index.expand(layers, two, -1, heads, -1, width), rows)
