"""Handles Ctrl-C in the middle of an answer, and SIGTERM at any time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Hold the first Ctrl-C back. The yielded function raises it as KeyboardInterrupt.

    Call it between two steps, so that no step is left half done. A second Ctrl-C does not wait.
    """
    asked = False

    def keep(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, keep)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def left_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the program with exit code 130. A KeyboardInterrupt would only stop an answer."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(130)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
