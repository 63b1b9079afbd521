"""Rows of a pool, one for each sequence, by their slots. A slot below 0 is padding, and is not touched."""

from __future__ import annotations

import torch
from torch import Tensor


def check_slots(name: str, label: str, pool: Tensor, slots: Tensor, shape: tuple[int, ...], count: int) -> None:
    """Raise ValueError unless pool is [slots, *shape], and slots [count] are different rows of it."""
    if tuple(pool.shape[1:]) != shape:
        raise ValueError(f"{name}: {label} must be [slots, {', '.join(map(str, shape))}], got {list(pool.shape)}")
    if slots.shape != (count,) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: slots of {label} must be integers [{count}], got {slots.dtype} {list(slots.shape)}")
    named = [slot for slot in slots.tolist() if slot >= 0]
    if len(set(named)) < len(named) or max(named, default=0) >= len(pool):
        raise ValueError(f"{name}: slots of {label} must be distinct and below {len(pool)}, got {slots.tolist()}")


def take(pool: Tensor, slots: Tensor) -> Tensor:
    """Copies of the slots' rows [N, ...]; any row for padding."""
    return pool[slots.clamp(min=0).long()]


def take_continued(pool: Tensor, slots: Tensor, continues: Tensor | None) -> Tensor:
    """`take`, with zeros for sequences that begin anew: where continues [N] is False; None: all of them."""
    rows = take(pool, slots)
    return torch.zeros_like(rows) if continues is None else _zeroed(rows, ~continues)


def put(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [N, ...] to their slots, in place, without padding."""
    kept = slots >= 0
    pool[slots[kept].long()] = rows[kept].to(pool.dtype)


def without_padding(rows: Tensor, slots: Tensor) -> Tensor:
    """rows [N, ...], zeros where a slot is padding."""
    return _zeroed(rows, slots < 0)


def _zeroed(rows: Tensor, where: Tensor) -> Tensor:
    return rows.masked_fill(where.view(-1, *[1] * (rows.dim() - 1)), 0.0)
