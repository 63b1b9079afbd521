"""A file of results, with a line for each finished part of a run, so that an interrupted run can continue.

Its first line has the conditions of the measurement. Each other line is a part: its name and settings, its time, its
answers, and notes. A line counts only with its line end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_triton.comparison.answer import Answer, from_json, to_json


@dataclass
class Result:
    """A finished part of a run. settings: its own, besides the conditions of the file. time: seconds since 1970."""

    answers: list[Answer]
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)


class OtherRunError(OSError, ValueError):
    """Another run writes to the same file."""


class ResultFile:
    """The finished parts of a run by name, in a file; without a path only in memory."""

    def __init__(self, path: Path | None, program: str, conditions: Mapping[str, Any], overwrite: bool = False) -> None:
        """Read the file; overwrite: begin a new one, whatever it has.

        Raises ValueError if it is not a file of this program, or was made under other conditions; OSError if it cannot
        be read.
        """
        self.path = path
        self.found: dict[str, Result] = {}
        self._head = {"program": program, "conditions": json.loads(json.dumps(conditions))}
        self._whole = 0  # bytes that are complete lines
        self._size = self._size_now()  # after what this run read or wrote
        if path is not None and path.exists() and not overwrite:
            self._read(path)

    def begin(self) -> None:
        """Make the file, so that a run without results can continue, too. Raises OSError if it cannot be written."""
        if not self._whole:
            self._write([self._head])

    def add(self, name: str, result: Result) -> None:
        """Keep a result; it is on the disk when this returns. Raises OSError if it cannot be written, `OtherRunError`
        if another run has written there."""
        line = {**vars(result), "name": name, "answers": [to_json(answer) for answer in result.answers]}
        self._write([line] if self._whole else [self._head, line])
        self.found[name] = result

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self.path is None:
            return
        if self._size_now() != self._size:
            raise OtherRunError(f"another run writes to {self.path}")
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.truncate(self._whole)  # a line without an end, which an interrupt left
            file.seek(self._whole)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(text)
        self._size = self._size_now()

    def _size_now(self) -> int:
        return self.path.stat().st_size if self.path is not None and self.path.exists() else 0

    def check(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Raise ValueError naming the first condition or setting in which the file is another than this run."""
        for name in [*here, *(name for name in there if name not in here)]:
            if there.get(name) != here.get(name):
                raise ValueError(
                    f"{self.path} was made with {name} {there.get(name)}, and this would be {here.get(name)}: give "
                    "another file, or the same options on the same machine"
                )

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        self._size, self._whole = len(raw), raw.rfind(b"\n") + 1
        beginning = f'{{"program": {json.dumps(self._head["program"])}, '.encode()
        other = f"{path} does not hold results of {self._head['program']}"
        if raw[: len(beginning)] != beginning[: len(raw)]:
            raise ValueError(other)
        if not self._whole:
            return
        try:
            head, *lines = [json.loads(line) for line in raw[: self._whole].splitlines()]
            conditions = dict(head["conditions"])
            for line in lines:
                name, answers = line.pop("name"), [from_json(answer) for answer in line["answers"]]
                self.found[name] = Result(**{**line, "answers": answers})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(other) from None
        self.check(conditions, self._head["conditions"])
