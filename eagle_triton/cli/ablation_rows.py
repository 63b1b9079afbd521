"""The rows of an ablation: their groups and columns, the files that hold them, and their summary."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_triton.cli.settings import READERS, Settings

if TYPE_CHECKING:  # it imports torch
    from eagle_triton.comparison.answer import Answer
    from eagle_triton.comparison.result_file import Result

# fmt: off
COLUMNS = (
    "run_id", "timestamp", "group", "prompt_id", "prompt", "seed", "repeat",
    "device", "dtype", "target_model", "drafter_model", "processor", "processor_args", "max_gen_len",
    "gamma", "egag", "egag_gamma_min", "egag_gamma_max", "egag_ema",
    "ngram_storage", "ngram_n", "top_k_filler", "reset_in_between", "kv_cache",
    "prompt_tokens", "output_tokens", "target_forwards", "drafter_forwards", "drafts_proposed", "drafts_accepted",
    "acceptance_rate", "mean_accept_length", "mean_gamma", "min_gamma", "max_gamma", "mean_h_norm",
    "wall_time_s", "tokens_per_s", "speedup_vs_target_ar",
    "output_sha256", "matches_target_ar", "edit_distance_to_target_ar", "output_text", "status",
)
# fmt: on
TRACE_COLUMNS = ("run_id", "step", "h_norm", "h_ema", "gamma", "proposed", "accepted", "emitted")
SETTINGS = COLUMNS[COLUMNS.index("device") : COLUMNS.index("prompt_tokens")]
COMMON = ("device", "dtype", "target_model", "processor", "processor_args", "max_gen_len", "kv_cache")  # of a file
KEY = ("group", "prompt", "seed", "repeat")  # of a row
BASELINE = "target_ar"
SUMMARY = (
    "group, rows, tokens/s=tokens_per_s, speedup=speedup_vs_target_ar, tau=mean_accept_length, "
    "acceptance=acceptance_rate, gamma=mean_gamma, matches"
)

Row = dict[str, str]


class Group(NamedTuple):
    """A method with its own settings, and further columns for settings that it reads."""

    method: str
    settings: Mapping[str, Any] = {}
    reads: tuple[str, ...] = ()


GROUPS = {
    BASELINE: Group("target"),
    "speculative": Group("speculative", {"gamma": 4}),
    "egag": Group("speculative", {"egag": True, "egag_gamma_min": 1, "egag_gamma_max": 6, "egag_ema": 0.9}, ("gamma",)),
    "nasd": Group(
        "ngram", {"gamma": 4, "ngram_storage": "basic", "ngram_n": 3, "top_k_filler": 3}, ("reset_in_between",)
    ),
    "eagle": Group("eagle"),
    "block": Group("block"),
    "block_tree": Group("block_tree"),
    "suffix": Group("suffix", reads=("reset_in_between",)),
    "hybrid": Group("hybrid", reads=("reset_in_between",)),
}


class Job(NamedTuple):
    """A wanted row."""

    group: str
    prompt_id: str
    prompt: str
    seed: int
    repeat: int

    @property
    def name(self) -> str:
        """Its name in the file of results."""
        return json.dumps([getattr(self, name) for name in KEY])


@dataclass(frozen=True)
class Conditions:
    """The conditions of all rows of a file. device: with a GPU's name. drafters: the drafting models, by the names in
    `READERS`. settings: without the groups' own."""

    device: str
    dtype: str
    target: str
    drafters: Mapping[str, str | None]
    settings: Mapping[str, Any]

    def of(self, group: str, seed: int = 0) -> Settings:
        return Settings(**{**self.settings, **GROUPS[group].settings, "seed": seed})

    def columns(self, group: str, common: bool) -> Row:
        """The columns of settings: those that all rows of a file share, or a group's own."""
        settings, (method, own, reads) = self.of(group), GROUPS[group]
        values = {name: getattr(settings, name) for name in ("processor", "egag", *own, *reads)}
        values |= {
            "device": self.device,
            "dtype": self.dtype,
            "target_model": self.target,
            "drafter_model": next((self.drafters[name] for name in READERS if method in READERS[name]), None),
            "processor_args": " ".join(f"{name}={value}" for name, value in settings.processor_arguments.items()),
            "max_gen_len": settings.length,
            "kv_cache": settings.cache,
        }
        return {column: as_text(values.get(column)) for column in SETTINGS if (column in COMMON) == common}


class Results:
    """The results of an ablation: a file that lets a run continue, the CSV of its rows, and a CSV of their steps.

    A failed row is only in the CSV, so it is decoded again.
    """

    def __init__(
        self, path: Path, trace: Path | None, conditions: Conditions, groups: Iterable[str], overwrite: bool = False
    ) -> None:
        """Read the results next to `path`, and check that the rows of `groups` were measured under these conditions.

        Writes nothing. Raises ValueError for other conditions and for files of another kind; OSError for an unreadable
        file.
        """
        from eagle_triton.comparison.result_file import ResultFile  # here: it imports torch

        self.path, self.trace, self.conditions = path, trace, conditions
        self._common = conditions.columns(BASELINE, common=True)
        kept = kept_beside(path)
        for file, columns in () if overwrite else self._files():
            if file.exists() and not file.read_bytes().startswith(_line(columns)) and file.stat().st_size:
                raise ValueError(f"{file} is not a CSV of an ablation: name another file, or use --overwrite")
        if not overwrite and path.exists() and path.stat().st_size and not kept.exists():
            raise ValueError(
                f"{path} cannot be continued without its results, {kept.name}, which are not beside it. Name another "
                "file, or use --overwrite"
            )
        self.file = ResultFile(kept, "ablation", self._common, overwrite)
        for name, result in self.file.found.items():
            if (group := json.loads(name)[0]) in groups:
                here = conditions.columns(group, common=False)
                self.file.check({column: result.settings[column] for column in here}, here)

    def _files(self) -> list[tuple[Path, tuple[str, ...]]]:
        """The CSVs with their columns."""
        return [(self.path, COLUMNS), *([] if self.trace is None else [(self.trace, TRACE_COLUMNS)])]

    def begin(self) -> None:
        """Write the CSVs from the existing results. Raises OSError."""
        self.file.begin()
        for path, columns in self._files():
            path.write_bytes(_line(columns))
        for name, result in self.file.found.items():
            self._append(name, result)

    def find(self, job: Job) -> Row | None:
        """The row of a job, None if it is still wanted."""
        result = self.file.found.get(job.name)
        return None if result is None else self._row(job.name, result)

    def add(self, job: Job, answer: Answer | None, prompt_tokens: int = 0, failed: str = "") -> None:
        """Keep an answer, and write its row and steps. failed: why there is no answer. Raises OSError if they cannot be
        written."""
        from eagle_triton.comparison.result_file import Result

        own = {"prompt_id": job.prompt_id, **self.conditions.columns(job.group, common=False)}
        if answer is None:
            row = self._begun(job.name, Result([], settings=own)) | {"status": f"failed: {failed}"}
            _append_rows(self.path, COLUMNS, [row])
            return
        result = Result([answer], settings={**own, "prompt_tokens": prompt_tokens})
        self.file.add(job.name, result)
        self._append(job.name, result)

    def _append(self, name: str, result: Result) -> None:
        row, answer = self._row(name, result), result.answers[0]
        _append_rows(self.path, COLUMNS, [row])
        if self.trace is not None:
            numbered = [{**vars(step), "step": n, "emitted": len(step.tokens)} for n, step in enumerate(answer.steps)]
            steps = ({column: as_text(step.get(column)) for column in TRACE_COLUMNS} for step in numbered)
            _append_rows(self.trace, TRACE_COLUMNS, [{**step, "run_id": row["run_id"]} for step in steps])

    def _begun(self, name: str, result: Result) -> Row:
        """A row without figures."""
        settings = {**self._common, **result.settings}
        columns = {column: settings[column] for column in SETTINGS}
        when = datetime.fromtimestamp(result.time, timezone.utc).isoformat(timespec="milliseconds")
        run = hashlib.sha256(f"{name} {sorted(columns.items())}".encode()).hexdigest()[:12]
        row = {"run_id": run, "timestamp": when, "prompt_id": settings["prompt_id"], **columns}
        row |= zip(KEY, json.loads(name), strict=True)
        return dict.fromkeys(COLUMNS, "") | {name: as_text(value) for name, value in row.items()}

    def _row(self, name: str, result: Result) -> Row:
        group, *asked = json.loads(name)[:3]
        same = json.dumps([BASELINE, *asked]).removesuffix("]") + ","  # how the names of the target's answers begin
        alone = [found.answers[0] for name, found in self.file.found.items() if name.startswith(same)]
        figures = _figures(result.answers[0], alone, drafts=group != BASELINE)
        figures["prompt_tokens"] = result.settings["prompt_tokens"]
        return self._begun(name, result) | {name: as_text(value) for name, value in figures.items()}


def _figures(answer: Answer, alone: Sequence[Answer], drafts: bool) -> dict[str, Any]:
    """The columns of an answer. alone: the target's answers to the same prompt with the same seed."""
    text = _without_nul(answer.text)
    gammas = [step.gamma for step in answer.steps if step.gamma is not None]
    entropies = [step.h_norm for step in answer.steps if step.h_norm is not None]
    values: dict[str, Any] = {
        "output_tokens": len(answer.tokens),
        "target_forwards": answer.target_forwards,
        "drafter_forwards": answer.drafter_forwards,
        "drafts_proposed": answer.proposed,
        "drafts_accepted": answer.accepted,
        "acceptance_rate": answer.acceptance_rate if drafts else None,
        "mean_accept_length": answer.tau,
        "mean_gamma": statistics.fmean(gammas) if gammas else None,
        "min_gamma": min(gammas, default=None),
        "max_gamma": max(gammas, default=None),
        "mean_h_norm": statistics.fmean(entropies) if entropies else None,
        "wall_time_s": answer.seconds,
        "tokens_per_s": answer.tokens_per_second,
        "output_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "output_text": text,
        "status": "ok",
    }
    if alone:
        speed = statistics.median(other.tokens_per_second for other in alone)
        first = _without_nul(alone[0].text)
        values["speedup_vs_target_ar"] = answer.tokens_per_second / speed if drafts else 1.0
        values["matches_target_ar"] = text == first and len(answer.tokens) == len(alone[0].tokens)
        values["edit_distance_to_target_ar"] = edit_distance(text, first)
    return values


def _without_nul(text: str) -> str:
    """The csv module of Python 3.10 reads no NUL."""
    return text.replace("\0", "\ufffd")


def _append_rows(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    with open(path, "ab") as file:
        file.write(b"".join(_line([row[column] for column in columns]) for row in rows))


def _line(fields: Sequence[str]) -> bytes:
    """A record with a line end. csv quotes both \\r and \\n only if its own line end is \\r\\n."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\r\n").writerow(fields)
    return buffer.getvalue().removesuffix("\r\n").encode() + b"\n"


def kept_beside(path: Path) -> Path:
    """The file of results beside a CSV, which it is written from."""
    return path.with_name(f"{path.name}.jsonl")


def edit_distance(first: str, second: str) -> int:
    """The fewest characters to insert, delete or replace to turn one text into the other.

    Hyyrö's bit-parallel form of Levenshtein's distance (Nordic Journal of Computing 10, 2003): the differences down a
    column of the table are the bits of two numbers.
    """
    if not first or first == second:
        return len(second) if not first else 0
    places: dict[str, int] = {}
    for number, character in enumerate(first):
        places[character] = places.get(character, 0) | 1 << number
    every, last = (1 << len(first)) - 1, 1 << (len(first) - 1)
    rises, falls, distance = every, 0, len(first)
    for character in second:
        equal = places.get(character, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        right_rises, right_falls = falls | (~(diagonal | rises) & every), rises & diagonal
        distance += bool(right_rises & last) - bool(right_falls & last)
        right_rises = right_rises << 1 | 1
        rises = (right_falls << 1 | ~(equal | falls | right_rises)) & every
        falls = right_rises & (equal | falls) & every
    return distance


def as_text(value: object) -> str:
    """A value in a file: nothing for None, floats with six digits."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# --- summary ---


def summary(rows: Sequence[Row], groups: Sequence[str]) -> list[dict[str, Any]]:
    """Figures of each group: medians of tokens per second and of the speedup, means of tau and gamma, the share of
    accepted drafts, and the number of rows with the target's text."""
    lines = []
    for group in groups:
        own = [row for row in rows if row["group"] == group]
        proposed, matches = sum(_numbers(own, "drafts_proposed")), [row["matches_target_ar"] for row in own]
        line: dict[str, Any] = {"group": group, "rows": len(own)}
        line |= {key: _of(own, key, statistics.median) for key in ("tokens_per_s", "speedup_vs_target_ar")}
        line |= {key: _of(own, key, statistics.fmean) for key in ("mean_accept_length", "mean_gamma")}
        line["acceptance_rate"] = sum(_numbers(own, "drafts_accepted")) / proposed if proposed else None
        line["matches"] = f"{matches.count('True')}/{len(own)}" if any(matches) else None
        lines += [line] if own else []
    return lines


def plot(rows: Sequence[Row], groups: Sequence[str], path: Path) -> None:
    """Draw tokens per second, tokens per verification and acceptance of each group, with a dot for each row. Raises
    OSError if the file cannot be written."""
    from matplotlib.figure import Figure  # needed only for a picture

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    shown = [group for group in groups if any(row["group"] == group for row in rows)]
    panels = {
        "tokens_per_s": "tokens per second (median)",
        "mean_accept_length": "tokens per verification (median)",
        "acceptance_rate": "share of drafts accepted (median)",
    }
    for axes, (column, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for place, group in enumerate(shown):
            values = _numbers([row for row in rows if row["group"] == group], column)
            if values:
                axes.bar(place, statistics.median(values), color=f"C{place}", alpha=0.6)
                axes.plot([place] * len(values), values, ".", color="black", markersize=3)
        axes.set_xticks(range(len(shown)), shown, rotation=40, ha="right")
        axes.set(ylabel=label, ylim=(0, None), xlim=(-0.6, len(shown) - 0.4))
    names = ("device", "dtype", "target_model", "processor", "processor_args", "max_gen_len")
    figure.supxlabel(", ".join(f"{name} {row[name]}" for row in rows[:1] for name in names), fontsize=7)
    figure.savefig(path, dpi=150)


def _numbers(rows: Sequence[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row[column]]


def _of(rows: Sequence[Row], column: str, combine: Callable[[list[float]], float]) -> float | None:
    values = _numbers(rows, column)
    return combine(values) if values else None
