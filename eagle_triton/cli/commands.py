"""Interprets a line of the chat: `answer_to(line, state)` gives the new state, lines to print, and actions.

It loads, prints and decodes nothing. A line that does not begin with "/" is a prompt; "//" stands for a "/" at the
beginning of a prompt. A prompt may have several lines; only the first one decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_triton.cli.settings import KINDS, METHODS, ON_ENGINE, PROCESSORS, STORAGES, Settings, read_processor
from eagle_triton.command_line import nearest

SWITCH = ("on", "off")
COMMAND = re.compile(r"\s*/[a-z]\w*(\s|$)", re.IGNORECASE)  # makes pasted lines more than one prompt


@dataclass(frozen=True)
class State:
    """The settings of the chat. modes: the methods that answer a prompt."""

    settings: Settings = field(default_factory=Settings)
    modes: frozenset[str] = frozenset({"target", "speculative", "ngram"})
    debug: bool = False
    chat: bool = True

    @property
    def answering(self) -> tuple[str, ...]:
        """The methods that answer a prompt, in order: the target first, as the measure of the others."""
        return tuple(method for method in METHODS if method in self.modes)


@dataclass(frozen=True)
class Reply:
    """The state after a line, the lines to print, and the actions.

    actions: "answer" (to `prompt`), "clear", "stats" and "quit", in the order of the line.
    """

    state: State
    lines: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    prompt: str = ""


@dataclass(frozen=True)
class Command:
    """A command. `change` raises ValueError or TypeError for wrong arguments.

    usage: the arguments, for the help; values: words that complete them. told: its current value, and meaning the
    effect of that. action: to be done by the chat.
    """

    name: str
    usage: str
    summary: str
    change: Callable[[State, list[str]], State]
    told: Callable[[State], str] = lambda state: ""
    meaning: Callable[[State], str] = lambda state: ""
    values: tuple[str, ...] = ()
    action: str = ""

    @property
    def line(self) -> str:
        return f"/{self.name} {self.usage}".rstrip()


def answer_to(line: str, state: State) -> Reply:
    """The reply to a line. A wrong command changes nothing; the reply's lines say why."""
    words = line.strip()
    if not words:
        return Reply(state)
    if re.search("[\ud800-\udfff]", line):  # Python's way to read bytes that are not text
        return Reply(state, ("this line is not text in UTF-8",))
    first = line.partition("\n")[0].lstrip()
    if not first.startswith("/") or first.startswith(("//", "/*")):
        text = line.replace("//", "/", 1) if first.startswith("//") else line
        return Reply(state, actions=("answer",), prompt=text)
    whole = Reply(state)
    for call in re.split(r"\s+(?=/)", re.split(r"(?:^|\s)#", words, maxsplit=1)[0]):  # without a comment
        name, *arguments = call.split()
        reply = _run(name, arguments, whole.state)
        whole = Reply(reply.state, whole.lines + reply.lines, whole.actions + reply.actions)
    return whole


def _run(name: str, arguments: list[str], state: State) -> Reply:
    command = COMMANDS.get(name[1:].lower())
    if command is None:
        if near := nearest(name, [f"/{known}" for known in COMMANDS]):
            return Reply(state, (f"{name} is not a command; did you mean {' or '.join(near)}? /help lists all",))
        return Reply(state, (f"{name} is not a command; the commands are:", *help_lines(state)))
    try:
        changed = command.change(state, arguments)
    except (ValueError, TypeError) as error:
        return Reply(state, (f"/{command.name}: {error}", f"usage: {command.line}"))
    if command.action:
        lines = help_lines(state) if command.action == "help" else ()
        return Reply(state, lines, tuple({command.action} - {"help"}))
    meaning = command.meaning(changed)
    return Reply(changed, (f"{command.name} {command.told(changed)}" + (f": {meaning}" if meaning else ""),))


def help_lines(state: State) -> tuple[str, ...]:
    """A line for each command, with its current value."""
    width = max(len(command.line) for command in COMMANDS.values())
    lines = [
        f"  {command.line:<{width}}  {command.summary}" + (f" ({told})" if (told := command.told(state)) else "")
        for command in COMMANDS.values()
    ]
    return (*lines, "Other lines are prompts; // begins one that begins with /. After a command, # begins a comment.")


def state_line(state: State) -> str:
    settings = state.settings
    facts = [_answering(state), f"length {settings.length}", f"gamma {settings.gamma}", _processor(state)]
    switches = {"egag": settings.egag, "chat": state.chat, "debug": state.debug}
    facts += [name for name, on in switches.items() if on] + ([] if settings.cache else ["cache off"])
    return " | ".join(facts)


# --- Kinds of commands.


def _switch(
    name: str,
    summary: str,
    read: Callable[[State], bool],
    write: Callable[[State, bool], State],
    meaning: Callable[[State], str],
) -> Command:
    def change(state: State, arguments: list[str]) -> State:
        if len(arguments) > 1 or (arguments and arguments[0].lower() not in SWITCH):
            raise ValueError(f"must be followed by on, off or nothing, got {' '.join(arguments)!r}")
        return write(state, arguments[0].lower() == "on" if arguments else not read(state))

    def told(state: State) -> str:
        return "on" if read(state) else "off"

    return Command(name, "[on|off]", summary, change, told, meaning, SWITCH)


def _mode(method: str, summary: str) -> Command:
    """A switch for a method that answers."""
    return _switch(
        method,
        summary,
        lambda state: method in state.modes,
        lambda state, on: replace(state, modes=state.modes | {method} if on else state.modes - {method}),
        lambda state: f"prompts are answered by {_answering(state)}" if state.modes else "no mode is on",
    )


def _setting(name: str, meaning: Callable[[State], str] = lambda state: "") -> Command:
    """A setting from the table of all: a switch, or one value; "default" stands for None if that is allowed."""
    kind = KINDS[name]
    if kind.type is bool:
        read, write = lambda state: getattr(state.settings, name), lambda state, on: _with(state, **{name: on})
        return _switch(name, kind.summary, read, write, meaning)

    def change(state: State, arguments: list[str]) -> State:
        if len(arguments) != 1:
            raise ValueError(f"takes one value, got {' '.join(arguments) or 'none'}")
        text = arguments[0].lower()
        return _with(state, **{name: None if kind.none and text == "default" else kind.read(name, text)})

    def told(state: State) -> str:
        value = getattr(state.settings, name)
        return f"default, {kind.none}" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    default = ("default",) if kind.none else ()
    usage = f"<{'/'.join(kind.choices or ('value',))}{'|default' * bool(default)}>"
    return Command(name, usage, kind.summary, change, told, values=kind.choices + default)


def _action(name: str, summary: str) -> Command:
    def change(state: State, arguments: list[str]) -> State:
        if arguments:
            raise ValueError(f"takes no arguments, got {' '.join(arguments)!r}")
        return state

    return Command(name, "", summary, change, action=name)


def _with(state: State, **options: Any) -> State:
    return replace(state, settings=replace(state.settings, **options))


# --- Other commands, and the meanings of switches.


def _answering(state: State) -> str:
    return ", ".join(state.answering) or "nothing"


def _set_method(state: State, arguments: list[str]) -> State:
    if not arguments or arguments[0].lower() not in METHODS:
        got = repr(arguments[0]) if arguments else "none"
        raise ValueError(f"takes one of {', '.join(METHODS)}, then on, off or nothing, got {got}")
    return _mode(arguments[0].lower(), "").change(state, arguments[1:])


def _processor(state: State) -> str:
    settings = state.settings
    values = ", ".join(f"{name} {value:g}" for name, value in settings.processor_arguments.items())
    return settings.processor if settings.processor == "greedy" else f"{settings.processor}, {values}"


def _set_storage(state: State, arguments: list[str]) -> State:
    if len(arguments) != 2:
        raise ValueError(f"takes a storage and its n, got {' '.join(arguments) or 'none'}")
    storage, n = arguments
    return _with(state, ngram_storage=storage.lower(), ngram_n=KINDS["ngram_n"].read("n", n))


def _egag_meaning(state: State) -> str:
    settings = state.settings
    few = f"{settings.egag_gamma_min} to {settings.gamma_max}" if settings.egag else str(settings.gamma)
    off = "" if "speculative" in state.modes else ", but is off"
    return f"speculative drafts {few} tokens a step" + (" by the drafter's entropy" if settings.egag else "") + off


def _cache_meaning(state: State) -> str:
    if state.settings.cache:
        return "keys and values are kept"
    engine = f"{', '.join(ON_ENGINE[:-1])} and {ON_ENGINE[-1]}"
    return f"models read the whole text again for each token, with their own forward; {engine} need the cache"


def _reset_meaning(state: State) -> str:
    if state.settings.reset_in_between:
        return "each answer counts n-grams from the start"
    return "n-grams and outputs of earlier answers are kept"


_ALL = [
    _mode("speculative", "answer with drafts of the drafter"),
    _mode("target", "answer with the target alone"),
    _mode("drafter", "answer with the drafter alone"),
    _setting("length"),
    _setting("gamma"),
    _setting("egag", _egag_meaning),
    *map(_setting, ("egag_gamma_min", "egag_gamma_max", "egag_ema", "egag_scale", "egag_mode")),
    Command(
        "processor", "<name> [values...]", f"one of {', '.join(PROCESSORS)}",
        lambda state, arguments: _with(state, **read_processor(arguments)), _processor, values=tuple(PROCESSORS),
    ),
    _switch(
        "debug", "show each step", lambda state: state.debug, lambda state, on: replace(state, debug=on),
        lambda state: "accepted green, rejected red, the target's own blue" if state.debug else "",
    ),
    _setting("cache", _cache_meaning),
    _mode("ngram", "answer with drafts of counted n-grams"),
    *map(_setting, ("top_k_filler", "filler_weight")),
    Command(
        "set_ngramstorage", f"<{'/'.join(STORAGES)}> <n>", "contexts of 1 to n - 1 tokens, or of n - 1 alone",
        _set_storage, lambda state: f"{state.settings.ngram_storage} {state.settings.ngram_n}", values=STORAGES,
    ),
    _setting("reset_in_between", _reset_meaning),
    Command("method", "<name> [on|off]", "switch any method by its name", _set_method, _answering, values=METHODS),
    _setting("seed"),
    _switch(
        "chat", "prompts continue the conversation", lambda state: state.chat,
        lambda state, on: replace(state, chat=on),
        lambda state: "the conversation is context" if state.chat else "prompts stand alone, as plain text",
    ),
    _action("clear", "forget the conversation"),
    _action("stats", "figures of all answers so far"),
    _action("help", "this list"),
    _action("quit", "leave"),
]  # fmt: skip
COMMANDS = {command.name: command for command in _ALL}
