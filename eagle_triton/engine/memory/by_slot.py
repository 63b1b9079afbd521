"""Functions over per-slot data: nested named tuples of tensors with the slot as first dimension.

Objects with another layout (LayerCaches) may be among them. They have their own `part`, `clear`, `wipe`, `copy` and
`tensors`, and `move` if it differs from `copy`. None is skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def slices_of(slots: Iterable[int]) -> list[slice]:
    """Slots as a few slices."""
    groups = itertools.groupby(enumerate(sorted(slots)), lambda pair: pair[1] - pair[0])
    runs = [[slot for _, slot in group] for _, group in groups]
    return [slice(run[0], run[-1] + 1) for run in runs]


def part_of(value: Any, slots: slice) -> Any:
    """The same for some of the slots, as views. Values without slots stay as they are."""
    if isinstance(value, Tensor):
        return value[slots]
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(part_of(field, slots) for field in value)
    return value.part(slots) if hasattr(value, "part") else value


def _leaves(value: Any) -> Iterator[Any]:
    """Its tensors and objects."""
    if isinstance(value, tuple):
        for field in value:
            yield from _leaves(field)
    elif value is not None:
        yield value


def clear(value: Any) -> None:
    """Zero all slots."""
    for leaf in _leaves(value):
        leaf.zero_() if isinstance(leaf, Tensor) else leaf.clear()


def wipe(value: Any, pages: Tensor) -> None:
    """Zero pages [n] int64 of the pool, in all objects."""
    for leaf in _leaves(value):
        if not isinstance(leaf, Tensor):
            leaf.wipe(pages)


def copy(value: Any, source: int, target: int, length: int) -> None:
    """Copy slot `source`, a sequence of `length` committed tokens, to slot `target`."""
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            leaf[target] = leaf[source]
        else:
            leaf.copy(source, target, length)


def move(value: Any, source: int, target: int, length: int) -> None:
    """Move a sequence of `length` committed tokens, with its pages, from slot `source` to the empty slot `target`."""
    for leaf in _leaves(value):
        if hasattr(leaf, "move"):
            leaf.move(source, target, length)
        else:
            copy(leaf, source, target, length)


def tensors_of(value: Any, objects: bool = True) -> Iterator[Tensor]:
    """All tensors; without `objects`, those outside of objects."""
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif objects:
            yield from leaf.tensors


def bytes_of(value: Any) -> int:
    """Bytes of all tensors, also of those without storage (device "meta")."""
    return sum(tensor.nbytes for tensor in tensors_of(value))
