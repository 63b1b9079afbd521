"""What a program says of a call that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *words: Any) -> str:
    """The one line on stderr of a call that ends with exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, words)])
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert stopped.value.code == 2 and not printed.out
    return line
