"""Where the lines of a chat come from: a file or a pipe, a terminal with prompt_toolkit, or one without."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from eagle_triton.cli.commands import COMMANDS, State, state_line

PROMPT, MORE = "> ", "... "


class Reader(Protocol):
    """Reads what comes next, perhaps several lines. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C.

    typed: whether somebody types it.
    """

    typed: bool

    def read(self, state: State) -> str: ...


def choose_reader(lines: list[str] | None, stdin: TextIO, out: TextIO) -> Reader:
    """The reader for lines of a file, for what is piped in, or for the terminal with what is installed."""
    if lines is not None or not (stdin.isatty() and out.isatty()):
        return Lines(stdin if lines is None else lines, out)
    if importlib.util.find_spec("prompt_toolkit") is not None:
        return prompt_toolkit_reader(out)
    return Terminal(out)


def dispatched(text: str) -> Iterator[str]:
    """What was read at once as lines of the chat: each by itself if one is a command, else one prompt."""
    lines = text.splitlines()
    yield from lines if any(line.lstrip().startswith("/") for line in lines) else [text]


def continued(read: Callable[[str], str]) -> str:
    """What `read`, given a prompt, reads; a line that ends with a backslash goes on in the next one."""
    text = read(PROMPT)
    while text.endswith("\\"):
        text = text[:-1] + "\n" + read(MORE)
    return text


class Lines:
    """Lines of a file or a pipe, each shown as if it had been typed."""

    typed = False

    def __init__(self, lines: Iterable[str], out: TextIO):
        self.lines = iter(lines)
        self.out = out

    def read(self, state: State) -> str:
        return continued(self._next)

    def _next(self, prompt: str) -> str:
        line = next(self.lines, None)
        if line is None:
            raise EOFError
        line = line.rstrip("\r\n")
        self.out.write(f"{prompt}{line}\n")
        self.out.flush()
        return line


class Terminal:
    """A terminal, by `input` and, where Python has it, readline."""

    typed = True

    def __init__(self, out: TextIO):
        self.out = out
        with suppress(ImportError):
            importlib.import_module("readline")  # arrow keys; input() takes it by itself

    def read(self, state: State) -> str:
        try:
            return continued(input)
        except (EOFError, KeyboardInterrupt):
            self.out.write("\n")
            raise


class PromptToolkit:
    """A terminal, by a session of prompt_toolkit."""

    typed = True

    def __init__(self, session: Any):
        self.session = session

    def read(self, state: State) -> str:
        return continued(lambda prompt: self.session.prompt(prompt, bottom_toolbar=state_line(state)))


def prompt_toolkit_reader(out: TextIO) -> Reader:
    """A terminal with history, completion and the state at its foot."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    class Words(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Any]:
            before = document.text_before_cursor
            word = before.split(" ")[-1]
            for found in completions(before):
                yield Completion(found, start_position=-len(word))

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    try:
        file = state_directory() / "history"
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab"):
            pass
        history = FileHistory(str(file))
    except OSError as error:
        out.write(f"what is typed is not kept for the next time: {error}\n")
        history = InMemoryHistory()
    return PromptToolkit(
        PromptSession(history=history, completer=Words(), complete_while_typing=False, key_bindings=keys)
    )


def completions(before: str) -> list[str]:
    """The words that the last one before the cursor may become, in a line of commands."""
    *words, last = before.lstrip().split(" ")
    if not before.lstrip().startswith("/"):
        return []
    if last.startswith("/") or not words:
        return [f"/{name}" for name in COMMANDS if f"/{name}".startswith(last.lower())]
    calls = [word for word in words if word.startswith("/")]
    command = COMMANDS.get(calls[-1][1:].lower())
    values = () if command is None else command.values
    if command is not None and command.name == "method" and words[-1] != "/method":
        values = ("on", "off")
    return [value for value in values if value.startswith(last.lower())]


def state_directory() -> Path:
    """Where this user's programs keep what they remember, by the habits of the system."""
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "eagle-triton"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "eagle-triton"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "eagle-triton"
