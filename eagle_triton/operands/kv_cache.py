"""Checks of the cache operations' arguments, see reference.kv_cache."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.shapes import check_tensors


def capacity_of(cache: Tensor, table: Tensor | None) -> int:
    """The most rows of a sequence in a cache [2, B, Hkv, T, d], or in one with pages [2, P, Hkv, R, d]."""
    return cache.shape[-2] * (1 if table is None else table.shape[1])


def check_append(cache: Tensor, new: Tensor, lengths: Tensor, table: Tensor | None = None) -> None:
    _check("append", cache, table, new=(new, "layers 2 B n Hkv d", None), lengths=(lengths, "B", torch.int32))


def check_gather(cache: Tensor, rows: Tensor, table: Tensor | None = None) -> None:
    _check("gather", cache, table, rows=(rows, "B n", torch.int32))


def check_commit(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor, table: Tensor | None = None) -> None:
    vectors = {name: (value, "B", torch.int32) for name, value in (("lengths", lengths), ("accepted", accepted))}
    _check("commit", cache, table, path=(path, "B P", torch.int32), **vectors)


def _check(name: str, cache: Tensor, table: Tensor | None, **tensors: tuple[Tensor, str, torch.dtype | None]) -> None:
    shape = "layers 2 B Hkv T d" if table is None else "layers 2 pages Hkv R d"
    check_tensors(name, {"cache": (cache, shape, None), **tensors, "table": (table, "B M>0", torch.int32)})
