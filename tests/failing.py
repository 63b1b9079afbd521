"""Functions that fail when a test says so, and calls that must be refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest


def failing(function: Callable, error: BaseException | type[BaseException], *at: int) -> Callable:
    """The function, but its calls of these numbers, from 1, raise the error in its place."""
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) in at:
            raise error
        return function(*args, **kwargs)

    return call


def check_refused(*cases: tuple[str, Callable[[], Any]], error: Any = ValueError) -> None:
    """Each call raises the error, with its message."""
    for message, call in cases:
        with pytest.raises(error, match=message):
            call()
