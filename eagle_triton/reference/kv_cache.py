"""The cache [layers, 2, B, Hkv, T, d] (dimension 1: keys, values): append new rows, gather rows, commit a path.

With a `table` it is in pages, see reference.attention.tree_attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.kv_cache import capacity_of, check_append, check_commit, check_gather


def append(cache: Tensor, new: Tensor, lengths: Tensor, table: Tensor | None = None) -> None:
    """Write new rows [layers, 2, B, n, Hkv, d] at rows lengths .. lengths + n - 1 of every layer, in place.

    cache [layers, 2, B, Hkv, T, d]; lengths [B] int32. On a CPU, raises ValueError before writing anything if a
    sequence has no room for n rows; on a GPU the caller must check this, because the host does not know the lengths.
    """
    check_append(cache, new, lengths, table)
    count, capacity = new.shape[3], capacity_of(cache, table)
    if not cache.is_cuda and int(lengths.max()) + count > capacity:
        raise ValueError(f"append: {int(lengths.max())} + {count} rows exceed the capacity of {capacity}")
    rows = lengths[:, None].long() + torch.arange(count, device=cache.device)
    _by_row(cache)[_places(cache, rows, table)] = new.permute(2, 3, 0, 1, 4, 5).to(cache.dtype)


def gather(cache: Tensor, rows: Tensor, table: Tensor | None = None) -> Tensor:
    """Copy rows [B, n] int32 of every layer: [layers, 2, B, Hkv, n, d]. Row -1 gives zeros.

    Raises ValueError on a CPU for a row outside -1 .. T - 1.
    """
    check_gather(cache, rows, table)
    capacity = capacity_of(cache, table)
    if not cache.is_cuda and rows.numel() and not -1 <= int(rows.min()) <= int(rows.max()) < capacity:
        raise ValueError(f"gather: rows must lie in -1..{capacity - 1}, got {int(rows.min())}..{int(rows.max())}")
    taken = _by_row(cache)[_places(cache, rows.clamp(min=0).long(), table)].permute(2, 3, 0, 4, 1, 5).contiguous()
    return taken.masked_fill((rows < 0)[None, None, :, None, :, None], 0)


def commit(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor, table: Tensor | None = None) -> None:
    """Keep the rows of the accepted path: row lengths + path[j] moves to row lengths + j, for j = 0 .. accepted.

    cache [layers, 2, B, Hkv, T, d], changed in place; lengths [B] int32; path [B, D + 1] int32, ascending node indices
    from the root (path[0] = 0); accepted [B] int32, -1 to leave a sequence unchanged. Rows may overlap; rows past the
    capacity do not change.
    """
    check_commit(cache, lengths, path, accepted, table)
    capacity, steps = capacity_of(cache, table), path.shape[1]
    # The P rows from `lengths` on; near the end of the cache the last P rows, so that no row occurs twice.
    target = lengths[:, None].long().clamp(max=max(capacity - steps, 0)) + torch.arange(
        min(steps, capacity), device=cache.device
    )
    step = target - lengths[:, None]
    source = lengths[:, None] + path.gather(1, step.clamp(min=0)).long()
    moved = (step >= 0) & (step <= accepted[:, None]) & (source < capacity)
    by_row = _by_row(cache)
    by_row[_places(cache, target, table)] = by_row[_places(cache, torch.where(moved, source, target), table)]


def write_rows(cache: Tensor, rows: Tensor, first_row: Tensor, table: Tensor | None = None) -> None:
    """Write keys and values [B, n, 2, Hkv, d] at n rows from first_row [B] on of one layer's cache, in place.

    cache [2, B, Hkv, T, d], or in pages with a `table`, see reference.attention.tree_attention. Rows outside 0 .. T - 1
    are not written.
    """
    row = first_row[:, None].long() + torch.arange(rows.shape[1], device=cache.device)
    fits = (row >= 0) & (row < capacity_of(cache, table))
    page, row = _places(cache, torch.where(fits, row, 0), table)
    cache.permute(1, 3, 0, 2, 4)[page[fits], row[fits]] = rows[fits].to(cache.dtype)


def _by_row(cache: Tensor) -> Tensor:
    """A view [P, R, layers, 2, Hkv, d] of a cache [layers, 2, P, Hkv, R, d]."""
    return cache.permute(2, 4, 0, 1, 3, 5)


def _places(cache: Tensor, rows: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The pages of each sequence's rows [B, n] int64, and the rows' indices in these pages, [B, n] int64 each."""
    if table is None:
        return torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows), rows
    page_rows = cache.shape[-2]
    return table.long().gather(1, rows // page_rows), rows % page_rows
