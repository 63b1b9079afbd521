"""Attention of consecutive rows of one long prompt over all that stands before them."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.reference.attention import tree_attention


def prompt_attention(q: Tensor, cache: Tensor, start: int, end: int, *, scale: float, table: Tensor) -> Tensor:
    """softmax(scale * q k^T) v for tokens start .. end of one prompt, whose keys are in the cache already.

    q [N, Hq, d], N >= end - start: row i is token start + i and sees tokens 0 .. start + i; cache [2, P, Hkv, R, d]
    (keys, values of one layer) in q's dtype, Hq a multiple of Hkv; table [M] int32: token t is row t % R of page
    table[t // R]. start and end are the host's, start a multiple of R.
    Returns [N, Hq, d] in q's dtype, computed in fp32; rows from end - start on are of no use. Raises ValueError if
    shapes, dtypes or devices do not fit.
    """
    check_prompt_attention(q, cache, start, end, scale, table)
    out, count = torch.zeros_like(q), end - start
    lengths = torch.full((1,), start, dtype=torch.int32, device=q.device)
    out[:count] = tree_attention(q[None, :count], cache, lengths, scale=scale, table=table[None])[0]
    return out


def check_prompt_attention(q: Tensor, cache: Tensor, start: int, end: int, scale: float, table: Tensor) -> None:
    """Raise ValueError, with what was expected and what came, if the arguments of prompt_attention do not fit."""
    name = "prompt_attention"
    if q.dim() != 3 or cache.dim() != 5 or cache.shape[0] != 2 or cache.shape[4] != q.shape[2]:
        raise ValueError(
            f"{name}: q must be [N, Hq, d] and cache [2, P, Hkv, R, d] with the same d, got {tuple(q.shape)} and "
            f"{tuple(cache.shape)}"
        )
    if q.shape[1] % cache.shape[2]:
        raise ValueError(f"{name}: Hq must be a multiple of the cache's {cache.shape[2]} heads, got Hq = {q.shape[1]}")
    if q.dtype != cache.dtype:
        raise ValueError(f"{name}: q and cache must have one dtype, got {q.dtype} and {cache.dtype}")
    if table.dim() != 1 or table.dtype != torch.int32:
        raise ValueError(f"{name}: table must be int32 [M], got {table.dtype} {tuple(table.shape)}")
    if q.device != cache.device or q.device != table.device:
        devices = sorted(str(tensor.device) for tensor in (q, cache, table))
        raise ValueError(f"{name}: all tensors must be on one device, got {devices}")
    rows, capacity = cache.shape[3], cache.shape[3] * len(table)
    if start < 0 or start % rows or not start < end <= min(start + len(q), capacity):
        raise ValueError(
            f"{name}: start must be a multiple of a page's {rows} rows, and end at most {len(q)} (N) behind it and "
            f"{capacity} (W * R), got {start} and {end}"
        )
    if not scale > 0:
        raise ValueError(f"{name}: scale must be positive, got {scale}")
