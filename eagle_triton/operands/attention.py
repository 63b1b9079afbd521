"""Checks of attention's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_triton.operands.ancestors import WORD
from eagle_triton.operands.shapes import check_tensors


def check_tree_attention(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    scale: float,
    sliding_window: int | None,
    table: Tensor | None = None,
    new_keys: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    value_width: int | None = None,
) -> None:
    sides = 2 if value_width is None else 1  # keys and values, or keys with values in their first columns
    tensors = {
        "q": (q, "B N Hq d", None),
        "cache": (cache, f"{sides} {'B Hkv T d' if table is None else 'P Hkv R d'}", q.dtype),
        "table": (table, "B M>0", torch.int32),
        "lengths": (lengths, "B", torch.int32),
        "ancestors": (ancestors, "B N W>0", torch.int64),
        "sinks": (sinks, "Hq", (torch.float32, q.dtype)),
    }
    _check_heads_and_scale("tree_attention", check_tensors("tree_attention", tensors), scale, softcap)
    if value_width is not None and not 0 < value_width < q.shape[3]:
        raise ValueError(f"tree_attention: value_width must lie in 1..{q.shape[3] - 1}, got {value_width}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"tree_attention: sliding_window must be at least 1, got {sliding_window}")
    most = 0 if ancestors is None else WORD * ancestors.shape[2]
    if new_keys is not None and (type(new_keys) is not int or not 1 <= new_keys <= most):
        words = "no ancestors" if ancestors is None else f"ancestors with W = {ancestors.shape[2]}"
        raise ValueError(f"tree_attention: new_keys must lie in 1..{WORD} * W, got {new_keys!r} and {words}")


def check_prompt_attention(
    q: Tensor,
    cache: Tensor,
    start: int,
    end: int,
    scale: float,
    table: Tensor,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    name = "prompt_attention"
    tensors = {
        "q": (q, "N Hq d", None),
        "cache": (cache, "2 P Hkv R d", q.dtype),
        "table": (table, "M", torch.int32),
        "sinks": (sinks, "Hq", (torch.float32, q.dtype)),
    }
    sizes = check_tensors(name, tensors)
    _check_heads_and_scale(name, sizes, scale, softcap)
    rows, capacity = sizes["R"], sizes["R"] * len(table)
    if start < 0 or start % rows or not start < end <= min(start + len(q), capacity):
        raise ValueError(
            f"{name}: start must be a multiple of a page's {rows} rows, and end at most start + N ({len(q)}) and the "
            f"table's {capacity} rows, got {start} and {end}"
        )


def _check_heads_and_scale(name: str, sizes: dict[str, Any], scale: float, softcap: float | None) -> None:
    if sizes["Hq"] % sizes["Hkv"]:
        raise ValueError(f"{name}: Hq must be a multiple of the cache's {sizes['Hkv']} heads, got Hq = {sizes['Hq']}")
    if not scale > 0:
        raise ValueError(f"{name}: scale must be positive, got {scale}")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"{name}: softcap must be positive and finite, got {softcap}")
