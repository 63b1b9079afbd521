"""Packages that import a public name when it is first used, so that importing the package is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def public_names(
    package: str, homes: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package.

    homes: modules and their public names, separated by blanks. A module is one of the package, or ".x.y" for
    eagle_triton.x.y.
    """
    root = package.partition(".")[0]
    modules = {
        name: f"{root}{module}" if module.startswith(".") else f"{package}.{module}"
        for module, names in homes.items()
        for name in names.split()
    }
    known = sorted(modules)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    def names() -> list[str]:
        return sorted([*vars(sys.modules[package]), *known])

    return known, get, names
