"""Packages that import a public name when it is first used, so that importing the package is quick."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def public_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package, whose source imports its public names for type checkers
    only: in a block `if TYPE_CHECKING`."""
    body = ast.parse(inspect.getsource(sys.modules[package])).body
    (block,) = (part.body for part in body if isinstance(part, ast.If))
    imports = (part for part in block if isinstance(part, ast.ImportFrom))
    homes = {alias.name: str(part.module) for part in imports for alias in part.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted([*vars(sys.modules[package]), *homes])

    return sorted(homes), get, names
