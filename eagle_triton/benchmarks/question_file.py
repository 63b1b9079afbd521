"""Reads question files in the format of MT-bench, Spec-Bench and SafeAILab/EAGLE. Standard library only.

Each line is a JSON object with `question_id`, `category` and `turns`, the texts to ask one after another. Other fields,
such as references, are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_triton.demo import PAIR, path_of

OWN_QUESTIONS = Path(path_of(PAIR)) / "questions.jsonl"
ALL = "all questions"  # the category of a row over all questions


class Question(NamedTuple):
    """One question of one or more turns."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def read_questions(path: Path) -> list[Question]:
    """The questions of a file, in order, without empty lines.

    Raises ValueError with file and line for a line that is not a question and for a repeated id, and ValueError for a
    file without questions; OSError for an unreadable file.
    """
    questions: dict[str, Question] = {}
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = _question(json.loads(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 at byte {error.start + 1}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error.msg} at character {error.colno}") from None
        except RecursionError:
            raise ValueError(f"{path}, line {number}: JSON that is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if questions.setdefault(str(question.question_id), question) is not question:
            raise ValueError(f"{path}, line {number}: question_id {question.question_id} occurs a second time")
    if not questions:
        raise ValueError(f"{path} has no questions")
    return list(questions.values())


def of_categories(questions: Sequence[Question], names: Sequence[str]) -> list[Question]:
    """The questions of these categories, in order. Raises ValueError for an unknown category."""
    known = list(dict.fromkeys(question.category for question in questions))
    for name in names:
        if name not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got {name!r}")
    return [question for question in questions if question.category in names]


def digest(questions: Sequence[Question]) -> str:
    """16 hexadecimal digits that depend only on the questions and their order, not on the file."""
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()[:16]


def _question(value: Any) -> Question:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {type(value).__name__}")
    if missing := [key for key in Question._fields if key not in value]:
        raise ValueError(f"must have {' and '.join(missing)}")
    name, category, turns = (value[key] for key in Question._fields)
    if isinstance(name, bool) or not isinstance(name, int | str) or name == "":
        raise ValueError(f"question_id must be a whole number or a text, got {name!r:.60}")
    if not isinstance(category, str):
        raise ValueError(f"category must be a text, got {category!r:.60}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"turns must be a list of texts that are not empty, got {turns!r:.60}")
    return Question(name, category, tuple(turns))
