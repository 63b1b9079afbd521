"""Programs of this package in processes that are forked from one that has imported torch, transformers and the package.

That takes most of a start. Where processes cannot fork programs are started.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORKS = hasattr(os, "fork")
CONTEXT: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
CONTEXT.set_forkserver_preload(
    [
        "eagle_triton.serve.app",
        "eagle_triton.serve.engine_process",
        "eagle_triton.cli.chat",
        "transformers.models.llama.modeling_llama",
    ]
)


def start_program(
    main: Callable[[list[str]], int], *argv: str, terminal: int | None = None, **environment: str
) -> ForkedProgram | subprocess.Popen[str]:
    """`main(argv)`, a function of a module, in a process of its own that ends with the exit code that it returns.

    `terminal` is a file that is its terminal, and what it reads and writes; else `stdout` and `stderr` are pipes.
    `environment` are variables beside those of this process.
    """
    environment = {**os.environ, **environment}
    # Triton has read it where it was imported already.
    if FORKS and environment.get("TRITON_INTERPRET") == os.environ.get("TRITON_INTERPRET"):
        return ForkedProgram(main, list(argv), terminal, environment)
    code = f"import sys; from {main.__module__} import {main.__name__} as main; sys.exit(main(sys.argv[1:]))"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code, *argv], env=environment, **pipes)


class ForkedProgram:
    """A program with the methods of one that was started."""

    def __init__(
        self, main: Callable[[list[str]], int], argv: list[str], terminal: int | None, environment: dict[str, str]
    ) -> None:
        if terminal is None:
            pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
            self.stdout, self.stderr = (os.fdopen(os.dup(ours.fileno()), encoding="utf-8") for ours, _ in pipes)
            files = [None, *(theirs for _, theirs in pipes)]
        else:
            files = [Connection(os.dup(terminal)) for _ in range(3)]
        self._process = CONTEXT.Process(target=_run, args=(main, argv, files, os.getcwd(), environment))
        self._process.start()
        self.pid: int = self._process.pid
        for file in filter(None, files):
            file.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, which: int) -> None:
        os.kill(self.pid, which)

    def wait(self, timeout: float = 60) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """And what it has started."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has no group yet
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
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
