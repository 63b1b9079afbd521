"""Speculative decoding at a terminal.

    eagle-triton check                      what this machine has and lacks
    eagle-triton generate 'import os'       one answer to one prompt
    eagle-triton chat                       prompts, commands, and figures of every method side by side
    eagle-triton bench                      time generations, decode steps and single operations
    eagle-triton ablation                   compare the methods over prompts, as CSV

Each has options of its own: eagle-triton chat --help
Exit code 0: done; 1: it failed, or figures are missing; 2: a wrong argument.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path

from eagle_triton import __version__
from eagle_triton.benchmarks.arguments import Parser
from eagle_triton.cli import environment

COMMANDS = {  # the modules that have them
    "check": "eagle_triton.cli.main",
    "generate": "eagle_triton.cli.generate",
    "chat": "eagle_triton.cli.chat",
    "bench": "eagle_triton.benchmarks.main",
    "ablation": "eagle_triton.cli.ablation",
}
PROGRAM = "eagle-triton"


def main(argv: list[str] | None = None) -> int:
    """Run a command with its arguments. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends a run as Ctrl-C does
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads any more; nothing may be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in COMMANDS:
        program = f"{PROGRAM} {name}"
        if name == "check":
            return check(rest, program)
        return importlib.import_module(COMMANDS[name]).main(rest, program)
    parser = Parser(PROGRAM, __doc__ or "")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    if name.startswith("-"):
        parser.parse_args(argv)
    parser.error(f"command must be one of {', '.join(COMMANDS)}, got {repr(name) if name else 'none'}")


def check(argv: list[str], program: str = f"{PROGRAM} check") -> int:
    """Print what the running Python and this machine have. Returns 0 if they are usable, else 1."""
    parser = Parser(program, "What this machine has for eagle_triton and what it lacks. Nothing is changed.")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    options = parser.parse_args(argv)
    try:
        result = environment.report(Path(sys.executable))
    except environment.SetupError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if options.json else environment.table(result))
    return 0 if result["usable"] else 1


if __name__ == "__main__":
    sys.exit(main())
