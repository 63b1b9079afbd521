"""Programs of this package in processes that are forked from one that has imported torch, transformers and the package.

That takes most of a start. Where a process cannot fork they are started.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CONTEXT: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
CONTEXT.set_forkserver_preload(
    [
        "eagle_triton.serve.app",
        "eagle_triton.serve.engine_process",
        "eagle_triton.cli.chat",
        "transformers.models.llama.modeling_llama",
    ]
)


class Program:
    """`main(argv)`, a function of a module, in a process of its own. `stdout` and `stderr` are what it writes.

    It ends with the exit code that `main` returns. `terminal` is a file that is its terminal, and what it reads and
    writes. `environment` are variables beside those of this process.
    """

    def __init__(
        self, main: Callable[[list[str]], int], *argv: str, terminal: int | None = None, **environment: str
    ) -> None:
        if terminal is None:
            pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
            self.stdout, self.stderr = (os.fdopen(os.dup(ours.fileno()), encoding="utf-8") for ours, _ in pipes)
            files = [None, *(theirs for _, theirs in pipes)]
        else:
            files = [Connection(os.dup(terminal)) for _ in range(3)]
        arguments = main, list(argv), files, os.getcwd(), {**os.environ, **environment}
        self._process = CONTEXT.Process(target=_run, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid
        for file in filter(None, files):
            file.close()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.exitcode is None

    def send_signal(self, which: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, which)

    def wait(self, seconds: float = 60) -> int:
        """Its exit code, or minus the signal that ended it. Raises TimeoutError if it does not end in time."""
        self._process.join(seconds)
        if self.running:
            raise TimeoutError(f"process {self.pid} did not end within {seconds} s")
        return self._process.exitcode

    def kill(self) -> None:
        """End it, and what it has started."""
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()


def _run(
    main: Callable[[list[str]], int], argv: list[str], files: list[Connection | None], folder: str, environment: dict
) -> None:
    """In the process that was forked: become the program."""
    os.setsid()
    for place, file in enumerate(files):
        if file is not None:
            os.dup2(file.fileno(), place)
            file.close()
    if files[0] is not None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    by_method = multiprocessing.get_context
    multiprocessing.get_context = lambda _: by_method("fork")  # of the engine's process
    sys.exit(main(argv))
