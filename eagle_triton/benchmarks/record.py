"""The format of all results: the program, the machine, the options, and rows of figures."""

from __future__ import annotations

import csv
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from eagle_triton import __version__
from eagle_triton.command_line import sentence
from eagle_triton.text_table import table

ROOT = Path(__file__).resolve().parents[2]
UNRECORDED = (  # options that change no figure, and a secret
    *("mode", "json", "commit", "output", "csv", "plot", "results", "answers"),
    *("result_dir", "verbose", "way", "api_key"),
)


@dataclass(frozen=True)
class Record:
    """One run of the benchmark. `notes` are sentences that a reader of the figures must know."""

    mode: str
    machine: dict[str, str]
    options: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str]

    @classmethod
    def of(
        cls, mode: str, device: torch.device | str, args: Any, rows: list[dict[str, Any]], notes: list[str],
        **options: Any,
    ) -> Record:  # fmt: skip
        """A run that ends now, from the arguments of a command line; options: more of them. No directories."""
        given = {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(args).items()
            if name not in UNRECORDED
        }
        return cls(mode, machine(torch.device(device), args.commit), {**given, **options}, rows, notes)

    @property
    def facts(self) -> str:
        """The machine in a line."""
        return ", ".join(f"{name} {value}" for name, value in self.machine.items() if value)

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def write_json(self, path: Path) -> None:
        path.write_text(self.json() + "\n", encoding="utf-8")

    def write_csv(self, path: Path) -> None:
        """One line for each row; the machine's columns follow the figures'."""
        lines = [{"mode": self.mode, **row, **self.machine} for row in self.rows]
        columns = list(dict.fromkeys(column for line in lines for column in line))
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


def publish(record: Record, text: str, program: str, **files: Path | None) -> int:
    """Print a text, then write the record to the files of --output, --csv and --plot. A failed write loses no figure.
    Returns the exit code: 1 after a failed write or a note that begins with FAIL."""
    from eagle_triton.benchmarks.plot import plot  # it imports Record

    print(text, flush=True)
    failed = any(note.startswith("FAIL") for note in record.notes)
    writers: dict[str, Callable[[Path], None]] = {
        "output": record.write_json,
        "csv": record.write_csv,
        "plot": partial(plot, record),
    }
    for name, path in files.items():
        try:
            if path is not None:
                writers[name](path)
        except (OSError, ValueError) as error:
            failed = True
            print(f"{program}: --{name} {path} was not written: {sentence(error)}", file=sys.stderr)
    return int(failed)


def machine(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """The machine and versions of a measurement. commit: recorded instead of git's."""
    triton = sys.modules.get("triton")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else "",
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "eagle_triton": __version__,
        "commit": commit or _commit() or "unknown",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    """The commit of this package's checkout; empty for an installed package."""
    if not (ROOT / ".git").exists():
        return ""
    changed = "+changes" if _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") else ""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    return commit and commit + changed


def _output(*command: str) -> str:
    """The output of a command; empty if it does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def histogram_table(histograms: Mapping[str, Mapping[int, int]]) -> str:
    """A line for each name: the number of its steps that accepted 0, 1, ... drafts."""
    most = max((accepted for counts in histograms.values() for accepted in counts), default=0)
    rows = [
        [name, *(counts.get(accepted, 0) for accepted in range(most + 1)), sum(counts.values())]
        for name, counts in histograms.items()
    ]
    return table(("drafts accepted in a step", *map(str, range(most + 1)), "steps"), rows)
