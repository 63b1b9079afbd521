"""Measure files of results/ again, each by the command that its page names, on this machine.

    python tools/remeasure.py results/step-trees-*.json results/step-chains-*.json
    python tools/remeasure.py results/ranks-h200.json --to FOLDER --list

The commands run one after another; with --seconds none begins that long after the first. Their output goes to stderr. A
command replaces the old file at its end. The exit status is 1 if a command failed or was left out. Files of commands
that take a CHECKOUT need --upstream.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.benchmarks.modes import add_options
from eagle_triton.command_line import Parser, run_program, whole
from tools import results_page

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("remeasure.py", __doc__ or "")
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE.json", help="of results/, with the options of their measurement")
    add("--to", type=Path, metavar="FOLDER", help="where new files go (default: where the old ones are)")
    add_options(parser, "--commit")
    add("--upstream", type=Path, metavar="CHECKOUT", help="a clone of SafeAILab/EAGLE, for files that time that too")
    add("--seconds", type=whole(), metavar="N", help="begin no command later than this after the first")
    add("--list", action="store_true", help="print the commands, and run none")
    args = parser.parse_args(argv)
    if args.to is not None and not args.to.is_dir():
        parser.error(f"--to must be a folder that exists, got {args.to}")
    try:
        commands = {path: command_for(path, args.to or path.parent, args.commit, args.upstream) for path in args.files}
    except ValueError as error:
        parser.error(str(error))
    begin, unmade = time.monotonic(), []
    for path, words in commands.items():
        if args.list:
            print(shlex.join(words))
            continue
        if args.seconds is not None and time.monotonic() - begin > args.seconds:
            unmade.append(path.name)
            continue
        start = time.monotonic()
        failed = subprocess.run(_by_this_python(words), cwd=ROOT, stdout=sys.stderr).returncode
        unmade += [path.name] * bool(failed)
        print(f"{path.name}: {'FAILED' if failed else 'done'} after {time.monotonic() - start:.0f} s", flush=True)
    if unmade:
        print(f"not measured: {', '.join(unmade)}")
    return int(bool(unmade))


def command_for(path: Path, folder: Path, commit: str | None, upstream: Path | None) -> list[str]:
    """The words of the command that makes a file again, in `folder`. Raises ValueError if none is known."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        words = shlex.split(results_page.command(record))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} must be a record of a measurement: {type(error).__name__}: {error}") from error
    if "CHECKOUT" in words:
        if upstream is None:
            raise ValueError(f"{path} times SafeAILab's EAGLE too: name a clone of it by --upstream")
        words[words.index("CHECKOUT")] = str(upstream.resolve())
    words += ["--output", str(folder.resolve() / path.name)]
    for option, suffix in (("--csv", ".csv"), ("--plot", ".png")):
        if path.with_suffix(suffix).exists():
            words += [option, str((folder / path.name).resolve().with_suffix(suffix))]
    return [*words, "--commit", commit] if commit else words


def _by_this_python(words: Sequence[str]) -> list[str]:
    """The same command by this interpreter, whatever PATH says."""
    launcher = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
    return [sys.executable, *launcher, *words[1:]]


if __name__ == "__main__":
    sys.exit(run_program(main))
