"""The page of the site that shows each file of results/: its rows, what it was measured on, and by which command.

    python tools/results_page.py            print it

mkdocs.yml names this file as a hook: the page is made while the site is built, and kept nowhere, so it is never stale.
By the standard library alone, as is the site.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.benchmarks import main as benchmark
from eagle_triton.cli import ablation_rows
from eagle_triton.command_line import Parser, option_of, run_program
from eagle_triton.text_table import cell

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = "results.md"  # of the site
SCRIPTS = {  # modes of other scripts: how they are called, and the options that they read
    "integration": (
        "integration_test.py",
        ("model", "draft", "eagle1", "prompt", "dtype", "max_length", "num_runs", "target_weights"),
    ),
    "first call": ("tools/first_call.py", ("shape",)),
    "http": ("tools/time_server.py", ("model", "draft", "num_runs", "prompt_length", "max_length")),
    "ranks": ("tools/check_ranks.py", ("rows", "width", "replays", "num_runs")),
    "decode-on-ranks": ("tools/decode_on_ranks.py", ("prompts", "new_tokens", "steps", "dtype")),
}
DEFAULTS = {
    "integration": {"model": "demo", "dtype": "float32"},  # others depend on the dtype
    "http": {"num_runs": 20, "prompt_length": 64, "max_length": 128},
    "ranks": {"rows": [1, 10, 60, 480], "width": 8192, "replays": 5000, "num_runs": 20},
    "decode-on-ranks": {"prompts": 8, "new_tokens": 64, "steps": 10_000, "dtype": "bfloat16"},
}
RANKS = re.compile(r"(?:ranks: )?(\d+) (?:ranks,|share the target)")  # the note of how many ranks there were
FOLDED = 24  # rows from which on a table is shown when it is asked for
TOP = """# Results

Each file of `results/` with its rows, the machine and the commit that they were measured on, and the command that
measured them. This page is made of the files when the site is built. [Figures](figures.md) says what they mean and how
they are measured. `tau` is tokens per step, `ms` milliseconds, `us` microseconds; a note that begins with FAIL or NOISE
stands beside the figures that it is about.
"""


def main(argv: list[str] | None = None) -> int:
    Parser("results_page.py", __doc__ or "").parse_args(argv)
    sys.stdout.write(page())
    return 0


def on_files(files: Any, config: Any) -> Any:
    """mkdocs's hook: add the page and its pictures to the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    for path in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def page(folder: Path = RESULTS) -> str:
    """The page as Markdown. Raises ValueError for a file that it cannot show."""
    sections = {"": TOP}
    for path in sorted(folder.iterdir()):
        kind, section = _section(path)
        if section:
            sections[kind] = sections.get(kind, f"\n## {kind[0].upper()}{kind[1:]}\n") + section
    known = [kind for kind in ("", *benchmark.MODES, *SCRIPTS) if kind in sections]
    return "".join(sections[kind] for kind in dict.fromkeys([*known, *sections]))


def _section(path: Path) -> tuple[str, str]:
    """The mode that made a file, and its part of the page: none of a file that belongs to another one."""
    if path.suffix in (".png", ".csv") and path.with_suffix(".json").exists():
        return "", ""
    if path.suffix == ".csv":
        return "ablation", _ablation(path)
    if path.suffix != ".json":
        raise ValueError(f"{path}: only .json, .csv and the .png of a .json are known")
    record = json.loads(path.read_text(encoding="utf-8"))
    if "mode" not in record:
        return "checkpoints", _checkpoints(path, record)
    machine = record["machine"]
    facts = [machine["device"], *(f"{key} {machine[key]}" for key in ("driver", "torch", "triton", "transformers"))]
    head = _head(path, facts, machine["commit"], machine["date"], command(record))
    picture = path.with_suffix(".png")
    drawn = f"\n![{picture.stem}](results/{picture.name})\n" if picture.exists() else ""
    notes = "".join(f"\n- {_escaped(note)}" for note in record["notes"])
    return record["mode"], head + table(record["rows"]) + (f"{notes}\n" if notes else "") + drawn


def command(record: Mapping[str, Any]) -> str:
    """The command that gives a record of these options: what differs from the defaults is given."""
    mode, options = record["mode"], record["options"]
    ranks = next((found[1] for note in record["notes"] if (found := RANKS.match(note))), None)
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks else "python"
    given: dict[str, Any] = {}
    if mode in SCRIPTS:
        start, names = SCRIPTS[mode]
        defaults = DEFAULTS.get(mode, {})
        given = {name: options[name] for name in names if options.get(name) not in (None, defaults.get(name))}
    else:
        start = "benchmark.py" if mode == "generate" else f"benchmark.py {mode}"
        defaults = vars(benchmark._parser(mode, True, "benchmark.py").parse_args([]))
        for option in (*benchmark.MODES[mode].options, "--dtype"):
            name = option[2:].replace("-", "_")
            settled = Namespace(**{**defaults, **given, "mode": mode, "device": options["device"]})
            benchmark._settle(settled)
            if name in options and options[name] not in (getattr(settled, name), [], None):
                given[name] = options[name]
    words = [word for name, value in given.items() for word in _words(name, value)]
    words += ["--device", "cpu"] if options.get("device") == "cpu" else []  # also where there is a GPU
    return " ".join([launcher, start, *words])


def _words(name: str, value: Any) -> list[str]:
    given = option_of(name)
    if name == "upstream":  # in older files a switch
        return [given, "CHECKOUT"] if value else []
    if isinstance(value, bool):
        return [given] * value
    parts = value if isinstance(value, list) else [value]
    words = [f"{part:g}" if isinstance(part, float) else shlex.quote(str(part)) for part in parts]
    return [given, *words] if "nargs" in benchmark.OPTIONS.get(given, {}) else [given, ",".join(words)]


# --- other files ---


def _ablation(path: Path) -> str:
    """The table that the ablation prints."""
    csv.field_size_limit(2**31 - 1)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    repeats = max(int(row["repeat"]) for row in rows)
    call = "eagle-triton ablation" + (f" --repeats {repeats}" if repeats != 3 else "") + f" --out {path.name}"
    first, groups = rows[0], list(dict.fromkeys(row["group"] for row in rows))
    facts = [first["device"], first["dtype"], f"{len(rows)} rows"]
    return _head(path, facts, None, first["timestamp"], call) + table(ablation_rows.summary(rows, groups))


def _checkpoints(path: Path, record: Mapping[str, Mapping[str, Any]]) -> str:
    """The numbers that training the embedded checkpoints reached, by part."""
    made = next(part["made_with"] for part in record.values() if "made_with" in part)
    rows = [
        {"part": part, "figure": name, "value": value}
        for part, values in record.items()
        for name, value in _numbers(values)
        if part not in ("recipe", "bytes")
    ]
    facts = [made["device"], *(f"{key} {made[key]}" for key in ("torch", "transformers"))]
    commit = re.sub(r"^(\w{12})\w+", r"\1", made["commit"])  # as other files have it, perhaps with "+changes"
    return _head(path, facts, commit, None, "python tools/train_demo.py") + table(rows)


def _numbers(values: Mapping[str, Any], before: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{before}{name}, ")
        elif isinstance(value, int | float):
            found.append((before + name, value))
    return found


# --- Markdown ---


def _head(path: Path, facts: Sequence[str], commit: str | None, date: str | None, call: str) -> str:
    measured = ", ".join(fact for fact in facts if not fact.endswith(" "))
    when = f", {date[:10]}" if date else ""
    return f"\n### {path.name}\n\n{measured}; commit {commit or 'not recorded'}{when}.\n\n```sh\n{call}\n```\n\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows; columns that say the same in all rows stand above it, once."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    same = [name for name in columns if len(rows) > 1 and all(row.get(name, row) == rows[0].get(name) for row in rows)]
    shown = [name for name in columns if name not in same]
    text = f"In all rows: {', '.join(f'{name} {_cell(rows[0][name])}' for name in same)}.\n\n" if same else ""
    lines = [f"| {' | '.join(shown)} |", f"|{'---|' * len(shown)}"]
    lines += [f"| {' | '.join(_cell(row.get(name)) for name in shown)} |" for row in rows]
    body = "\n".join(lines) + "\n"
    if len(rows) < FOLDED:
        return text + body
    return f'{text}<details markdown="1"><summary>{len(rows)} rows</summary>\n\n{body}\n</details>\n'


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{_escaped(str(key))}: {_cell(item)}' for key, item in value.items())})"
    if isinstance(value, list):
        return f"({', '.join(_cell(item) for item in value)})"
    return _escaped(cell(value))


def _escaped(text: str) -> str:
    """Text with Markdown's own characters escaped."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return "".join(f"\\{letter}" if letter in "*_`[]" else letter for letter in text)


if __name__ == "__main__":
    sys.exit(run_program(main))
