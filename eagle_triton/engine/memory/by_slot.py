"""What is kept for each slot of a batch: nested named tuples of tensors whose first dimension is the slot.

An object that lays its tensors out in its own way (LayerCaches) stands among them with `part`, `clear`, `copy` and
`tensors` of its own, and `move` where that is not what `copy` does. None stands for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def part_of(value: Any, slots: slice) -> Any:
    """The same of some of the slots: views of the same tensors. What is not kept by slot stays as it is."""
    if isinstance(value, Tensor):
        return value[slots]
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(part_of(field, slots) for field in value)
    return value.part(slots) if hasattr(value, "part") else value


def clear(value: Any) -> None:
    """Begin all slots anew: tensors to zero."""
    if isinstance(value, tuple):
        for field in value:
            clear(field)
    elif isinstance(value, Tensor):
        value.zero_()
    elif value is not None:
        value.clear()


def wipe(value: Any, pages: Tensor) -> None:
    """Leave nothing in pages [n] int64 of the pool that objects have theirs in."""
    if isinstance(value, tuple):
        for field in value:
            wipe(field, pages)
    elif value is not None and not isinstance(value, Tensor):
        value.wipe(pages)


def copy(value: Any, source: int, target: int, length: int) -> None:
    """Give slot `target` what slot `source` has, a sequence of `length` committed tokens."""
    if isinstance(value, tuple):
        for field in value:
            copy(field, source, target, length)
    elif isinstance(value, Tensor):
        value[target] = value[source]
    elif value is not None:
        value.copy(source, target, length)


def move(value: Any, source: int, target: int, length: int) -> None:
    """Let slot `target`, which has nothing, have what slot `source` has and leaves, its pages among that: of a sequence
    of `length` committed tokens."""
    if isinstance(value, tuple):
        for field in value:
            move(field, source, target, length)
    elif isinstance(value, Tensor):
        value[target] = value[source]
    elif value is not None:
        (value.move if hasattr(value, "move") else value.copy)(source, target, length)


def tensors_of(value: Any, objects: bool = True) -> Iterator[Tensor]:
    """All tensors, or without `objects` those that no object lays out in its own way."""
    if isinstance(value, tuple):
        for field in value:
            yield from tensors_of(field, objects)
    elif isinstance(value, Tensor):
        yield value
    elif value is not None and objects:
        yield from value.tensors


def bytes_of(value: Any) -> int:
    """Bytes of all tensors, also where they have no storage (device "meta")."""
    return sum(tensor.nbytes for tensor in tensors_of(value))
