"""Calls of programs in this process: what one says that refuses, and what the benchmark records."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from eagle_triton.benchmarks import main as benchmark


def refused(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *words: Any) -> str:
    """The one line on stderr of a call that ends with exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, words)])
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert stopped.value.code == 2 and not printed.out
    return line


def recorded(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> dict[str, Any]:
    """The record that the benchmark prints as JSON."""
    assert benchmark.main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)
