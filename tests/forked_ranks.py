"""What torchrun does for tests: a script in some processes, with the same variables.

`run_started` starts them. `Forks.run` does the same with forks of one process that has imported torch, transformers and
the package, which takes most of a start; on a machine with a GPU, where a fork may not use it, it starts them too.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # that a run may take


def run_started(
    *command: str, ranks: int = 2, until: int | None = None, start: Any = None, **environment: str
) -> tuple[int, str, str]:
    """Exit status, what was printed and what was written to stderr: of all ranks, which end when one fails.

    With `until` it is the status of that rank, and the others are killed when it has ended. `{rank}` in a command is a
    rank's own. `start` starts a process (default: `start_process`).
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        processes = []
        for rank in range(ranks):
            own = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            words = [word.replace("{rank}", str(rank)) for word in command]
            processes.append((start or start_process)(words, {**environment, **own}, out, errors))
        status = wait_for(processes, until)
        for file in (out, errors):
            file.seek(0)
        return status, out.read(), errors.read()


def start_process(words: list[str], environment: dict[str, str], out: Any, errors: Any) -> subprocess.Popen:
    pipes: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=os.environ | environment, **pipes)


def wait_for(processes: list[Any], until: int | None) -> int:
    """The first exit status that is not 0, or that of rank `until`. All are ended then, and after `SECONDS`."""
    wanted = processes if until is None else [processes[until]]
    deadline = time.monotonic() + SECONDS
    while True:
        found = [process.poll() for process in processes]
        ended = [status for process, status in zip(processes, found, strict=True) if process in wanted]
        late = time.monotonic() > deadline
        if any(ended) or None not in ended or late:
            break
        time.sleep(0.02)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    return 124 if late else next(filter(None, ended), 0)


class Fork:
    """A process that was forked, with the methods of one that was started."""

    def __init__(self, words: list[str], environment: dict[str, str], out: Any, errors: Any):
        self.status: int | None = None
        self.process = os.fork()
        if not self.process:
            nothing = os.open(os.devnull, os.O_RDONLY)
            for file, place in ((nothing, 0), (out.fileno(), 1), (errors.fileno(), 2)):
                os.dup2(file, place)
            os.environ.update(environment)
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
            sys.exit()  # ends the process as it ends where it was not forked

    def poll(self) -> int | None:
        if self.status is None:
            self.wait(os.WNOHANG)
        return self.status

    def wait(self, how: int = 0) -> None:
        ended, status = os.waitpid(self.process, how)
        if ended:
            self.status = os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)


class Forks:
    """The process that forks, which lives until `close`. It reads a run a line, and answers with a line."""

    def __init__(self, environment: dict[str, str]):
        command = [sys.executable, "-m", "tests.forked_ranks"]
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def run(self, *command: str, **options: Any) -> tuple[int, str, str]:
        """As `run_started`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([command, options]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        status, out, errors = json.loads(answer)
        return status, out, errors

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    import tests.tensor_parallel_script

    with contextlib.suppress(ImportError):  # of a transformers that spreads no FP8 weights
        import tests.shared_float8_script  # noqa: F401
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests import faster_interpreter

        faster_interpreter.install()
    for line in sys.stdin:
        command, options = json.loads(line)
        print(json.dumps(run_started(*command, start=Fork, **options)), flush=True)


if __name__ == "__main__":
    main()
