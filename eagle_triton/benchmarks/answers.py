"""The answers of a sweep in the files of others: SafeAILab/EAGLE's of answers, and SGLang's of records.

SafeAILab's (eagle/evaluation/gen_ea_answer_llama3chat.py, read at cb7e084) is a line for each question; its
evaluation/speed.py makes a ratio of a drafting file and a plain one. SGLang's (benchmark/mtbench/bench_sglang_eagle.py,
read at 01fe7c2) is a line for each run; `other` holds what its scripts/playground/bench_speculative.py calls a setting.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eagle_triton.benchmarks.sweep import Configuration

RECORDS = "sglang.jsonl"


def model_id(model: str, part: Configuration) -> str:
    """What SafeAILab's tools call it, and the stem of its file: `demo-head-60-temperature-0.0`."""
    return f"{Path(model).name}-{part.variant.replace(' ', '-')}-temperature-{part.temperature}"


def write_answers(directory: Path, model: str, part: Configuration, result: dict[str, Any]) -> Path:
    """Write the answers of one configuration in the place of what is there; returns the file.

    idxs: of the last verification of a turn, counted from 0; new_tokens: of a turn, the end token among them;
    wall_time: its seconds, prompt included.
    """
    name = model_id(model, part)
    path = directory / f"{name}.jsonl"
    _write(path, (_answer(name, answer, result["time"]) for answer in result["answers"]))
    return path


def _answer(name: str, answer: dict[str, Any], when: float) -> dict[str, Any]:
    turns = answer["turns"]
    choice = {
        "index": 0,
        "turns": [turn["text"] for turn in turns],
        "idxs": [max(turn["steps"] - 1, 0) for turn in turns],
        "new_tokens": [len(turn["tokens"]) for turn in turns],
        "wall_time": [turn["seconds"] for turn in turns],
    }
    return {
        "question_id": answer["question_id"],
        "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {answer['question_id']} {when}").hex,
        "model_id": name,
        "choices": [choice],
        "tstamp": when,
    }


def write_records(directory: Path, found: Sequence[tuple[Configuration, dict[str, Any]]]) -> Path:
    """Write SGLang's record of each configuration in the place of what is there; returns the file."""
    path = directory / RECORDS
    _write(path, (_record(part, result["answers"]) for part, result in found))
    return path


def _record(part: Configuration, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """latency: seconds of all answers together. accept_length: new tokens per verification, which is not tau: the
    prompt's own token counts, and what was accepted behind the last token does not."""
    turns = [turn for answer in answers for turn in answer["turns"]]
    tokens, steps = sum(len(turn["tokens"]) for turn in turns), sum(turn["steps"] for turn in turns)
    seconds = sum(turn["seconds"] for turn in turns)
    return {
        "task": "questions",
        "backend": "eagle_triton",
        "num_gpus": 1,
        "latency": round(seconds, 3),
        "throughput": round(tokens / seconds, 3),
        "accept_length": round(tokens / steps, 3) if steps and part.drafter != "plain" else 1.0,
        "num_requests": len(answers),
        "other": {
            "num_questions": len(answers),
            "parallel": 1,
            "temperature": part.temperature,
            "top_k": -1 if part.temperature else 1,
            "drafter": part.drafter,
            "steps": part.steps,
            "topk": part.topk,
            "num_draft_tokens": part.nodes if part.steps else 0,
            "completion_tokens": tokens,
        },
    }


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """All lines or none."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(beside, path)
