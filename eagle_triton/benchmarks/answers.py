"""Writes the answers of a sweep in other projects' formats: SafeAILab/EAGLE's answer files, and SGLang's records.

SafeAILab's (eagle/evaluation/gen_ea_answer_llama3chat.py, read at cb7e084) has a line for each question; its
evaluation/speed.py computes a ratio from a drafting file and a plain one. SGLang's
(benchmark/mtbench/bench_sglang_eagle.py, read at 01fe7c2) has a line for each run; `other` holds a setting in the form
of its scripts/playground/bench_speculative.py.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eagle_triton.benchmarks.question_file import Question
from eagle_triton.benchmarks.sweep import Configuration
from eagle_triton.comparison.figures import Totals
from eagle_triton.comparison.result_file import Result

RECORDS = "sglang.jsonl"


def model_id(model: str, part: Configuration) -> str:
    """The name for SafeAILab's tools, and the stem of the file: `demo-head-60-temperature-0.0`."""
    return f"{Path(model).name}-{part.variant.replace(' ', '-')}-temperature-{part.temperature}"


def write_answers(
    directory: Path, model: str, part: Configuration, questions: Sequence[Question], result: Result
) -> Path:
    """Write the answers of one configuration, replacing an existing file. Returns the file.

    idxs: of the last verification of a turn, counted from 0; new_tokens: of a turn, with the end token; wall_time: its
    seconds, prompt included.
    """
    name = model_id(model, part)
    path = directory / f"{name}.jsonl"
    turns = iter(result.answers)
    lines = []
    for question in questions:
        answers = list(islice(turns, len(question.turns)))
        choice = {
            "index": 0,
            "turns": [answer.text for answer in answers],
            "idxs": [max(answer.verifications - 1, 0) for answer in answers],
            "new_tokens": [len(answer.tokens) for answer in answers],
            "wall_time": [answer.seconds for answer in answers],
        }
        number = uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {question.question_id} {result.time}").hex
        line = {"question_id": question.question_id, "answer_id": number, "model_id": name}
        lines.append({**line, "choices": [choice], "tstamp": result.time})
    _write(path, lines)
    return path


def write_records(directory: Path, questions: int, found: Sequence[tuple[Configuration, Result]]) -> Path:
    """Write SGLang's record of each configuration, replacing an existing file. Returns the file."""
    path = directory / RECORDS
    _write(path, (_record(part, questions, Totals.of(result.answers)) for part, result in found))
    return path


def _record(part: Configuration, questions: int, totals: Totals) -> dict[str, Any]:
    """latency: seconds of all answers together. accept_length: new tokens per verification. It is not tau: it counts
    the prompt's own token, and not the accepted tokens after the last one."""
    drafted = totals.steps and part.drafter != "plain"
    return {
        "task": "questions",
        "backend": "eagle_triton",
        "num_gpus": 1,
        "latency": round(totals.seconds, 3),
        "throughput": round(totals.tokens / totals.seconds, 3),
        "accept_length": round(totals.tokens / totals.steps, 3) if drafted else 1.0,
        "num_requests": questions,
        "other": {
            "num_questions": questions,
            "parallel": 1,
            "temperature": part.temperature,
            "top_k": -1 if part.temperature else 1,
            "drafter": part.drafter,
            "steps": part.steps,
            "topk": part.topk,
            "num_draft_tokens": part.nodes if part.steps else 0,
            "completion_tokens": totals.tokens,
        },
    }


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write all lines or none."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(beside, path)
