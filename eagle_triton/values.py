"""Checks of single values, for all who take options. Each error says what was expected and what was given."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any


def checked_integer(
    name: str, value: Any, least: float | None = None, most: float | None = None, kind: str = "an integer"
) -> int:
    """The value, an integer of any kind but bool; with `least` within `check_range`. kind: the allowed types in words.

    Raises TypeError for another type, ValueError for a value out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {kind}, got {value!r:.60}")
    if least is not None:
        check_range(name, value, least, most)
    return operator.index(value)


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless the value is a number of any kind but bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r:.60}")


def check_range(name: str, value: Any, least: float, most: float | None = None) -> None:
    """Raise ValueError unless least <= value <= most; most None: no bound. NaN lies in no range."""
    if most is None and not value >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} must lie in {least}..{most}, got {value}")


def check_weight(name: str, value: float) -> None:
    """Raise ValueError unless the value is finite, and at least 0."""
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")


def check_switches(**switches: Any) -> None:
    """Raise TypeError for what is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r:.60}")


def check_switch_or_auto(name: str, value: Any) -> None:
    """Raise TypeError for what is neither True nor False nor "auto"."""
    if not isinstance(value, bool) and value != "auto":
        raise TypeError(f'{name} must be True or False or "auto", got {value!r:.60}')


def check_choice(name: str, value: Any, known: Collection[Any]) -> None:
    """Raise ValueError for a value that is not among the known ones."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r:.60}")
