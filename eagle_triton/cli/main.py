"""Speculative decoding at a terminal.

    eagle-triton check                      what this machine has, and what is missing
    eagle-triton generate 'import os'       one answer to one prompt
    eagle-triton chat                       prompts, commands, and figures of every method side by side
    eagle-triton serve                      OpenAI's endpoints, and a page in the browser
    eagle-triton bench                      time generations, decode steps and single operations
    eagle-triton ablation                   compare the methods over prompts, as CSV
    eagle-triton export demo --to vllm -o OUT   a draft head for vLLM, SGLang and others
    eagle-triton quantize demo --to fp8 -o OUT  a target with its projections in eight or four bits

Each command has its own options: eagle-triton chat --help
Exit code 0: done; 1: it failed, or figures are missing; 2: a wrong argument; 130: ended by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys

from eagle_triton import __version__
from eagle_triton.command_line import Parser, run_program

COMMANDS = {  # the module of each command
    "check": "eagle_triton.cli.check",
    "generate": "eagle_triton.cli.generate",
    "chat": "eagle_triton.cli.chat",
    "serve": "eagle_triton.serve.main",
    "bench": "eagle_triton.benchmarks.main",
    "ablation": "eagle_triton.cli.ablation",
    "export": "eagle_triton.cli.export",
    "quantize": "eagle_triton.cli.quantize",
}
PROGRAM = "eagle-triton"


def main(argv: list[str] | None = None) -> int:
    """Run a command with its arguments. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else ""
    if name in COMMANDS:
        return run(name, argv[1:], f"{PROGRAM} {name}")
    parser = Parser(PROGRAM, __doc__ or "")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    if name.startswith("-"):
        parser.parse_args(argv)
    parser.error(f"command must be one of {', '.join(COMMANDS)}, got {repr(name) if name else 'none'}")


def run(command: str, argv: list[str], program: str) -> int:
    """Run one command. program: the name in help and errors. Returns the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends a run like Ctrl-C
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know every character of a model
    return run_program(lambda: importlib.import_module(COMMANDS[command]).main(argv, program), program)


if __name__ == "__main__":
    sys.exit(main())
