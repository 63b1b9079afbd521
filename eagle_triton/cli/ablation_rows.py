"""The rows of an ablation: their groups and columns, and the files that hold them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
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
OWN = tuple(column for column in SETTINGS if column not in COMMON)  # of a row
OK = "ok"
BASELINE = "target_ar"

Row = dict[str, str]


class Group(NamedTuple):
    """A method with settings of its own, and the columns of settings that it reads."""

    method: str
    settings: Mapping[str, Any] = MappingProxyType({})
    reads: tuple[str, ...] = ()


GROUPS = {
    BASELINE: Group("target"),
    "speculative": Group("speculative", {"gamma": 4}, ("gamma",)),
    "egag": Group(
        "speculative",
        {"egag": True, "egag_gamma_min": 1, "egag_gamma_max": 6, "egag_ema": 0.9},
        ("gamma", "egag_gamma_min", "egag_gamma_max", "egag_ema"),
    ),
    "nasd": Group(
        "ngram",
        {"gamma": 4, "ngram_storage": "basic", "ngram_n": 3, "top_k_filler": 3},
        ("gamma", "ngram_storage", "ngram_n", "top_k_filler", "reset_in_between"),
    ),
    "eagle": Group("eagle"),
    "block": Group("block"),
    "block_tree": Group("block_tree"),
    "suffix": Group("suffix", {}, ("reset_in_between",)),
    "hybrid": Group("hybrid", {}, ("reset_in_between",)),
}


class Job(NamedTuple):
    """A row that is wanted."""

    group: str
    prompt_id: str
    prompt: str
    seed: int
    repeat: int

    @property
    def name(self) -> str:
        """The name of its result in the file of results."""
        return json.dumps([self.group, self.prompt, self.seed, self.repeat])


@dataclass(frozen=True)
class Conditions:
    """What all rows of a file share. device: with a GPU's name. drafters: by the names of `READERS`, as far as there
    are any. settings: those that are no group's own."""

    device: str
    dtype: str
    target: str
    drafters: Mapping[str, str | None]
    settings: Mapping[str, Any]

    def of(self, group: str, seed: int) -> Settings:
        """The settings of a group."""
        return Settings(**{**self.settings, **GROUPS[group].settings, "seed": seed})

    @property
    def common(self) -> Row:
        """The columns of settings that all rows of a file share."""
        return {name: value for name, value in self._columns(BASELINE).items() if name in COMMON}

    def of_group(self, group: str) -> Row:
        """The other columns of settings."""
        return {name: value for name, value in self._columns(group).items() if name not in COMMON}

    def _columns(self, group: str) -> Row:
        settings = self.of(group, 0)
        method, _, reads = GROUPS[group]
        values = {name: getattr(settings, name) for name in ("processor", "egag", *reads)}
        values |= {
            "device": self.device,
            "dtype": self.dtype,
            "target_model": self.target,
            "drafter_model": next((self.drafters[name] for name in READERS if method in READERS[name]), None),
            "processor_args": " ".join(f"{name}={value}" for name, value in settings.processor_arguments.items()),
            "max_gen_len": settings.length,
            "kv_cache": settings.cache,
        }
        return {column: as_text(values.get(column)) for column in SETTINGS}


class Results:
    """The results of an ablation: a file from which a run goes on, the CSV of its rows, and a CSV of their steps.

    A failed row is only in the CSV, so it is decoded again.
    """

    def __init__(
        self, path: Path, trace: Path | None, conditions: Conditions, groups: Iterable[str], overwrite: bool = False
    ) -> None:
        """Read the results beside `path`, and check that those of `groups` were measured under the same conditions.

        Nothing is written. Raises ValueError for other conditions, and for files of something else; OSError for a file
        that cannot be read.
        """
        from eagle_triton.comparison.result_file import ResultFile  # here: it imports torch

        self.path, self.trace, self.conditions = path, trace, conditions
        kept = path.with_name(f"{path.name}.jsonl")
        if not overwrite:
            _check_csv(path, COLUMNS)
            if trace is not None:
                _check_csv(trace, TRACE_COLUMNS)
            if path.exists() and path.stat().st_size and not kept.exists():
                raise ValueError(
                    f"{path} cannot go on: {kept.name}, which has its results, is not beside it; name another "
                    "file, or --overwrite"
                )
        self.file = ResultFile(kept, "ablation", conditions.common, overwrite)
        self._alone: dict[tuple[str, int], list[Answer]] = {}  # the target's, by prompt and seed
        wanted = set(groups)
        for name, result in self.file.found.items():
            self._know(name, result)
            group = json.loads(name)[0]
            if group in wanted:
                self.file.check({column: result.settings[column] for column in OWN}, conditions.of_group(group))

    def begin(self) -> None:
        """Write the CSVs from the results that there are. Raises OSError if they cannot be written."""
        self.file.begin()
        for path, columns in ((self.path, COLUMNS), (self.trace, TRACE_COLUMNS)):
            if path is not None:
                path.write_bytes(_line(columns))
        for name, result in self.file.found.items():
            self._append(name, result)

    def find(self, job: Job) -> Row | None:
        """The row of a job, None if it is still wanted."""
        result = self.file.found.get(job.name)
        return None if result is None else self._row(job.name, result)

    def add(self, job: Job, answer: Answer, prompt_tokens: int) -> None:
        """Keep an answer, and write its row and steps. Raises OSError if they cannot be written."""
        from eagle_triton.comparison.result_file import Result

        own = {"prompt_id": job.prompt_id, "prompt_tokens": prompt_tokens, **self.conditions.of_group(job.group)}
        result = Result([answer], settings=own)
        self.file.add(job.name, result)
        self._know(job.name, result)
        self._append(job.name, result)

    def _know(self, name: str, result: Result) -> None:
        """Let others be compared with an answer of the target alone."""
        group, prompt, seed, _ = json.loads(name)
        if group == BASELINE:
            self._alone.setdefault((prompt, seed), []).append(result.answers[0])

    def add_failure(self, job: Job, reason: str) -> None:
        """Write a row without figures."""
        from eagle_triton.comparison.result_file import Result

        settings = {"prompt_id": job.prompt_id, **self.conditions.of_group(job.group)}
        row = self._begun(job.name, Result([], settings=settings)) | {"status": f"failed: {reason}"}
        _append_rows(self.path, COLUMNS, [row])

    def _append(self, name: str, result: Result) -> None:
        row = self._row(name, result)
        _append_rows(self.path, COLUMNS, [row])
        if self.trace is not None:
            _append_rows(self.trace, TRACE_COLUMNS, _steps(row["run_id"], result.answers[0]))

    def _begun(self, name: str, result: Result) -> Row:
        """A row without figures."""
        key = dict(zip(("group", "prompt", "seed", "repeat"), json.loads(name), strict=True))
        settings = {**self.conditions.common, **result.settings}
        columns = {column: settings[column] for column in SETTINGS}
        when = datetime.fromtimestamp(result.time, timezone.utc).isoformat(timespec="milliseconds")
        values = {
            "run_id": hashlib.sha256(f"{name} {sorted(columns.items())}".encode()).hexdigest()[:12],
            "timestamp": when,
            "prompt_id": settings["prompt_id"],
            **key,
            **columns,
        }
        return dict.fromkeys(COLUMNS, "") | {name: as_text(value) for name, value in values.items()}

    def _row(self, name: str, result: Result) -> Row:
        group, prompt, seed, _ = json.loads(name)
        alone = self._alone.get((prompt, seed), [])
        figures = _figures(result.answers[0], alone, drafts=group != BASELINE)
        figures["prompt_tokens"] = result.settings["prompt_tokens"]
        return self._begun(name, result) | {name: as_text(value) for name, value in figures.items()}


def _figures(answer: Answer, alone: Sequence[Answer], drafts: bool) -> dict[str, Any]:
    """The columns of an answer. alone: what the target gave alone to the same prompt with the same seed."""
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
        "status": OK,
    }
    if alone:
        speed = statistics.median(other.tokens_per_second for other in alone)
        first = _without_nul(alone[0].text)
        values["speedup_vs_target_ar"] = answer.tokens_per_second / speed if drafts else 1.0
        values["matches_target_ar"] = text == first and len(answer.tokens) == len(alone[0].tokens)
        values["edit_distance_to_target_ar"] = edit_distance(text, first)
    return values


def _steps(run_id: str, answer: Answer) -> list[Row]:
    return [
        {
            "run_id": run_id,
            **{name: as_text(getattr(step, name)) for name in TRACE_COLUMNS if hasattr(step, name)},
            "step": str(number),
            "emitted": str(len(step.tokens)),
        }
        for number, step in enumerate(answer.steps)
    ]


def _without_nul(text: str) -> str:
    """The csv module of Python 3.10 reads no NUL."""
    return text.replace("\0", "\ufffd")


def _check_csv(path: Path, columns: Sequence[str]) -> None:
    """Raise ValueError for a file that begins with other columns; one that is missing or empty may be written."""
    if path.exists() and not path.read_bytes().startswith(_line(columns)) and path.stat().st_size:
        raise ValueError(f"{path} is not a CSV of an ablation; name another file, or --overwrite")


def _append_rows(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    with open(path, "ab") as file:
        file.write(b"".join(_line([row[column] for column in columns]) for row in rows))


def _line(fields: Sequence[str]) -> bytes:
    """A record with a line end. csv quotes \\r as well as \\n only where its own line end is \\r\\n."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\r\n").writerow(fields)
    return buffer.getvalue().removesuffix("\r\n").encode() + b"\n"


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
    """How a value stands in a file: nothing for None, floats with six digits."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
