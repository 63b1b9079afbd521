"""Frozen dataclasses of options."""

from __future__ import annotations

import dataclasses
from typing import Any


def with_options(config: Any, options: dict[str, Any]) -> Any:
    """A copy with some options changed. Raises ValueError for unknown ones, naming those that exist."""
    known = [field.name for field in dataclasses.fields(config)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
    return dataclasses.replace(config, **options)
