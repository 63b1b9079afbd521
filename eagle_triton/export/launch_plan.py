"""How to serve an exported head: a command, the same as a call in Python, and the changes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LaunchPlan:
    """The result of `export_head`.

    folder: the written folder. command: words of a command line; empty if the engine has none. call: the function that
    does the same in Python, by its dotted path; arguments: its keyword arguments. notes: sentences on what differs from
    decoding here.
    """

    folder: Path
    command: tuple[str, ...]
    call: str
    arguments: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())

    @property
    def shell(self) -> str:
        """The command for a POSIX shell."""
        return shlex.join(self.command)

    @property
    def python(self) -> str:
        """The call, as source."""
        module, _, name = self.call.rpartition(".")
        function, dot, method = name.partition(":")
        words = "".join(f"    {key}={value!r},\n" for key, value in self.arguments.items())
        return f"from {module} import {function}\n\nengine = {function}{'.' * bool(dot)}{method}(\n{words})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = dict(folder=str(self.folder), command=list(self.command), call=self.call.replace(":", "."))
        return {**told, "arguments": dict(self.arguments), "notes": list(self.notes)}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as options of a command line: underscores are dashes, mappings JSON."""
    words = []
    for name, value in arguments.items():
        text = json.dumps(value) if isinstance(value, Mapping) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    return words
