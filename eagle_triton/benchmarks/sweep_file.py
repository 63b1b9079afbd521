"""A file of results that grows by a line for each finished configuration, so that an interrupted sweep can go on.

Its first line says what is measured on what; the others hold what was found. A line counts when its end was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGINNING = b'{"machine": '
UNCOMPARED = ("date",)  # of the machine: when the sweep began


class SweepFile:
    """The finished configurations by name, and where they are kept; without a path they are kept for this run alone."""

    def __init__(self, path: Path | None, machine: Mapping[str, str], options: Mapping[str, Any]) -> None:
        """Read what the file holds.

        Raises ValueError if it is none of these, or was made with other options, by another commit or elsewhere, naming
        the first difference; OSError if it cannot be read.
        """
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        self._head = {"machine": dict(machine), "options": json.loads(json.dumps(options))}
        self._whole = 0  # bytes that are complete lines
        if path is not None and path.exists():
            self._read(path)

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Keep the result of a configuration; it is on the disk when this returns."""
        self.found[name] = result
        if self.path is None:
            return
        lines = [] if self._whole else [self._head]
        text = "".join(json.dumps(line) + "\n" for line in [*lines, {"configuration": name, **result}]).encode()
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.truncate(self._whole)  # of what an interrupt left
            file.seek(self._whole)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(text)

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        self._whole = raw.rfind(b"\n") + 1
        if raw[: len(BEGINNING)] != BEGINNING[: len(raw)]:
            raise ValueError(f"{path} is not the results of a sweep over questions")
        if not self._whole:
            return
        try:
            head, *results = [json.loads(line) for line in raw[: self._whole].splitlines()]
            found = {result.pop("configuration"): result for result in results}
            machine, options = dict(head["machine"]), dict(head["options"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is not the results of a sweep over questions") from None
        self._check(path, "option", options, self._head["options"])
        self._check(path, "", machine, self._head["machine"])
        self.found = found

    @staticmethod
    def _check(path: Path, kind: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        for name in [*here, *(name for name in there if name not in here)]:
            if name not in UNCOMPARED and there.get(name) != here.get(name):
                what = f"{kind} {name}".strip().replace("_", " ")
                raise ValueError(
                    f"{path} was made with {what} {there.get(name)}, and this would be {here.get(name)}: give another "
                    "file, or the same options on the same machine"
                )
