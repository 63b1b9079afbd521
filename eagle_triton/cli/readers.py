"""Reads the lines of a chat: from a file or a pipe, or from a terminal with or without prompt_toolkit."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from eagle_triton.cli.commands import COMMAND, COMMANDS, State, state_line

PROMPT, MORE = "> ", "... "
LINE_END = re.compile(r"\r?\n")  # str.splitlines() also splits at others, such as U+2028


@dataclass(frozen=True)
class Reader:
    """Reads the next lines of the chat.

    next_line: given a prompt and the state of the chat, returns the next text; raises EOFError at the end, and
    KeyboardInterrupt for Ctrl-C. typed: whether the text is typed at a terminal.
    """

    next_line: Callable[[str, State], str]
    typed: bool = True

    def read(self, state: State) -> list[str]:
        """The next lines. Raises as `next_line`."""
        return chat_lines(lambda prompt: self.next_line(prompt, state))


def choose_reader(lines: list[str] | None, stdin: TextIO, out: TextIO) -> Reader:
    """The reader for lines of a file, for piped input, or for the terminal with the installed packages.

    Bytes that are not text become surrogates, which the chat refuses line by line.
    """
    piped = not (stdin.isatty() and out.isatty())
    if isinstance(stdin, io.TextIOWrapper):
        encoding, newline = ("utf-8", "\n") if piped else (None, None)  # a terminal has its own encoding
        stdin.reconfigure(encoding=encoding, errors="surrogateescape", newline=newline)
    if lines is not None or piped:
        return given_lines(stdin if lines is None else lines, out)
    if importlib.util.find_spec("prompt_toolkit") is not None:
        session = toolkit_session(out)
        return Reader(lambda prompt, state: session.prompt(prompt, bottom_toolbar=state_line(state)))
    return terminal(out)


def chat_lines(read: Callable[[str], str]) -> list[str]:
    """The lines that `read` returns at once, given a prompt: single lines if one of them is a command, else one prompt.

    A line that ends with a backslash continues in the next line, even if that is a command.
    """
    text = read(PROMPT)
    waiting = LINE_END.split(text)
    if not any(map(COMMAND.match, waiting)):
        return [_continued(text, read)]
    found = []
    while waiting:
        found.append(_continued(waiting.pop(0), lambda prompt: waiting.pop(0) if waiting else read(prompt)))
    return found


def _continued(text: str, read: Callable[[str], str]) -> str:
    """A text and the lines that continue it, up to the end of input."""
    while text.endswith("\\"):
        text = text[:-1]
        try:
            text += "\n" + read(MORE)
        except EOFError:
            break
    return text


def given_lines(lines: Iterable[str], out: TextIO) -> Reader:
    """Lines of a file or a pipe, each shown as if it had been typed."""
    waiting = iter(lines)

    def next_line(prompt: str, state: State) -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        line = line.removesuffix("\n").removesuffix("\r")
        out.write(f"{prompt}{line}\n")
        out.flush()
        return line

    return Reader(next_line, typed=False)


def terminal(out: TextIO) -> Reader:
    """A terminal with `input`, and with readline if Python has it."""
    with suppress(ImportError):
        importlib.import_module("readline")  # arrow keys; input() uses it by itself

    def next_line(prompt: str, state: State) -> str:
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            raise

    return Reader(next_line)


def toolkit_session(out: TextIO) -> Any:
    """A session of prompt_toolkit, with history and completion."""
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
        out.write(f"typed lines are not kept for the next chat: {error}\n")
        history = InMemoryHistory()
    return PromptSession(history=history, completer=Words(), complete_while_typing=False, key_bindings=keys)


def completions(before: str) -> list[str]:
    """Completions of the last word before the cursor, in a line of commands."""
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
    """The directory for this user's state, by the conventions of the system."""
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "eagle-triton"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "eagle-triton"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "eagle-triton"
