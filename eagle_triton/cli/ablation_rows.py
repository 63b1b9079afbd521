"""The rows of an ablation: which there are, what they hold, and the file that keeps them."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_triton.cli.result_file import append_rows, read_rows, write_rows
from eagle_triton.cli.settings import Settings

if TYPE_CHECKING:  # it imports torch
    from eagle_triton.cli.decoding import Answer

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
BESIDE = ("speedup_vs_target_ar", "matches_target_ar", "edit_distance_to_target_ar")
SETTINGS = COLUMNS[COLUMNS.index("device") : COLUMNS.index("prompt_tokens")]
OK = "ok"
BASELINE = "target_ar"

Row = dict[str, str]
Key = tuple[str, str, str, str]


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
    def key(self) -> Key:
        return self.group, self.prompt, str(self.seed), str(self.repeat)


@dataclass(frozen=True)
class Conditions:
    """What all rows of a file have in common. device: with a GPU's name. settings: those that are no group's own."""

    device: str
    dtype: str
    target: str
    drafter: str | None
    head: str | None
    settings: Mapping[str, Any]

    def of(self, group: str, seed: int) -> Settings:
        """The settings of a group."""
        return Settings(**{**self.settings, **GROUPS[group].settings, "seed": seed})

    def columns(self, group: str) -> Row:
        """The columns of `SETTINGS` of a group's rows."""
        settings = self.of(group, 0)
        method, _, reads = GROUPS[group]
        drafters = {"speculative": self.drafter, "eagle": self.head, "hybrid": self.head}
        values = {name: getattr(settings, name) for name in ("processor", "egag", *reads)}
        values |= {
            "device": self.device,
            "dtype": self.dtype,
            "target_model": self.target,
            "drafter_model": drafters.get(method),
            "processor_args": " ".join(f"{name}={value}" for name, value in settings.processor_arguments.items()),
            "max_gen_len": settings.length,
            "kv_cache": settings.cache,
        }
        return {column: as_text(values.get(column)) for column in SETTINGS}


class Results:
    """The rows of a file, those that were there and those that are added, and the file of their steps if there is one.

    A row that failed is not kept: it is wanted again.
    """

    def __init__(self, path: Path, trace: Path | None, conditions: Conditions) -> None:
        self.path, self.trace, self.conditions = path, trace, conditions
        self._rows: dict[Key, Row] = {}
        self._steps: list[Row] = []

    def read(self, groups: Iterable[str]) -> None:
        """Take in what the files hold, and check that rows of these groups were made under the same conditions.

        Nothing is written. Raises ValueError for other conditions or columns, and steps that are missing; OSError for
        a file that cannot be read.
        """
        for number, row in enumerate(read_rows(self.path, COLUMNS), 1):
            self._check(row, number, set(groups))
            if row["status"] == OK:
                self._rows[_key(row)] = row
        if self.trace is None:
            return
        kept = {row["run_id"] for row in self._rows.values()}
        self._steps = [step for step in read_rows(self.trace, TRACE_COLUMNS) if step["run_id"] in kept]
        if missing := kept - {step["run_id"] for step in self._steps}:
            raise ValueError(
                f"{self.trace} lacks the steps of {len(missing)} of the {len(kept)} rows that {self.path} has; name "
                "the file that was written with them, or --overwrite"
            )

    def begin(self) -> None:
        """Write the files anew with what was read, unless they hold just that. Raises OSError if they cannot be."""
        write_rows(self.path, COLUMNS, self._rows.values())
        if self.trace is not None:
            write_rows(self.trace, TRACE_COLUMNS, self._steps)

    def find(self, job: Job) -> Row | None:
        """The row of a job, None if it is still wanted."""
        return self._rows.get(job.key)

    def add(self, job: Job, answer: Answer, prompt_tokens: int) -> Row:
        """Write the row of an answer and its steps. Raises OSError if they cannot be."""
        row = self._begun(job) | _figures(job, answer, prompt_tokens, self.alone(job))
        if self.trace is not None:
            append_rows(self.trace, TRACE_COLUMNS, _steps(row["run_id"], answer))
        append_rows(self.path, COLUMNS, [row])
        self._rows[job.key] = row
        return row

    def add_failure(self, job: Job, reason: str) -> None:
        """Write a row without figures."""
        append_rows(self.path, COLUMNS, [self._begun(job) | {"status": f"failed: {reason}"}])

    def _check(self, row: Row, number: int, groups: set[str]) -> None:
        group = row["group"]
        if group not in GROUPS:
            raise ValueError(
                f"{self.path}: group of row {number} must be one of {', '.join(GROUPS)}, got {group!r:.60}"
            )
        for name, value in self.conditions.columns(group).items():
            if row[name] != value and (group in groups or name not in ("drafter_model", *GROUPS[group].reads)):
                raise ValueError(
                    f"{self.path} has rows of other settings: {name} of row {number} is {row[name]!r:.60}, and of this "
                    f"run {value!r:.60}; name another file, or --overwrite"
                )

    def _begun(self, job: Job) -> Row:
        """A row without figures."""
        columns = self.conditions.columns(job.group)
        run_id = hashlib.sha256(repr((job.key, sorted(columns.items()))).encode()).hexdigest()[:12]
        named = {"run_id": run_id, "timestamp": datetime.now(timezone.utc).isoformat(timespec="milliseconds")}
        named |= {name: as_text(value) for name, value in job._asdict().items()}
        return dict.fromkeys(COLUMNS, "") | named | columns

    def alone(self, job: Job) -> list[Row]:
        """What the target gave alone to the same prompt with the same seed."""
        return [
            row
            for (group, prompt, seed, _), row in self._rows.items()
            if (group, prompt, seed) == (BASELINE, job.prompt, str(job.seed))
        ]


def _figures(job: Job, answer: Answer, prompt_tokens: int, alone: Sequence[Row]) -> Row:
    text = answer.text.replace("\0", "\ufffd")  # the csv module of Python 3.10 reads no NUL
    gammas = [step.gamma for step in answer.steps if step.gamma is not None]
    entropies = [step.h_norm for step in answer.steps if step.h_norm is not None]
    drafts = job.group != BASELINE
    values = {
        "prompt_tokens": prompt_tokens,
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
    beside: tuple[float | None, bool | None, int | None] = (None, None, None) if drafts else (1.0, True, 0)
    if alone:
        speed = statistics.median(float(row["tokens_per_s"]) for row in alone)
        first = alone[0]["output_text"]
        same = text == first and str(len(answer.tokens)) == alone[0]["output_tokens"]
        beside = (
            answer.tokens_per_second / speed if drafts else 1.0,
            same,
            edit_distance(text, first),
        )
    values |= dict(zip(BESIDE, beside, strict=True))
    return {name: as_text(value) for name, value in values.items()}


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


def edit_distance(first: str, second: str) -> int:
    """The fewest characters to insert, delete or replace that make one text of the other.

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


def _key(row: Row) -> Key:
    return row["group"], row["prompt"], row["seed"], row["repeat"]
