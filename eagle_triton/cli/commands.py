"""What a line of the chat means: `answer_to(line, state)` gives the new state, the lines to print, and what to do.

Nothing is loaded, printed or decoded here. A line that does not begin with "/" is a prompt; "//" stands for the "/" of
a prompt that begins with one. A prompt may have several lines; only the first decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_triton.cli.settings import (
    EGAG_MODES,
    METHODS,
    ON_ENGINE,
    PROCESSORS,
    STORAGES,
    Settings,
    read_number,
    read_processor,
    read_whole,
)
from eagle_triton.command_line import nearest

SWITCH = ("on", "off")
ENGINE_METHODS = f"{', '.join(ON_ENGINE[:-1])} and {ON_ENGINE[-1]}"
COMMAND = re.compile(r"\s*/[a-z]\w*(\s|$)", re.IGNORECASE)  # what makes pasted lines more than one prompt


@dataclass(frozen=True)
class State:
    """The settings of the chat. modes: the methods that answer a prompt."""

    settings: Settings = field(default_factory=Settings)
    modes: frozenset[str] = frozenset({"target", "speculative", "ngram"})
    debug: bool = False
    chat: bool = True

    @property
    def answering(self) -> tuple[str, ...]:
        """The methods that answer a prompt, in the order in which they do: the target, their measure, first."""
        return tuple(method for method in METHODS if method in self.modes)


@dataclass(frozen=True)
class Reply:
    """The state after a line, the lines to print, and what is to be done then.

    actions: "answer" (its text is `prompt`), "clear", "stats" and "quit", in the order of the line.
    """

    state: State
    lines: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    prompt: str = ""


@dataclass(frozen=True)
class Command:
    """A command. `change` raises ValueError or TypeError for arguments that it cannot take.

    usage: the arguments as the help writes them; values: words that complete them. told: what it is set to, and
    meaning what that does. action: what is to be done.
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
        """How it is called."""
        return f"/{self.name} {self.usage}".rstrip()


def answer_to(line: str, state: State) -> Reply:
    """The reply to a line. A wrong command changes nothing, and the reply's lines say why."""
    words = line.strip()
    if not words:
        return Reply(state)
    if re.search("[\ud800-\udfff]", line):  # so Python reads bytes that are no text
        return Reply(state, ("this line is not answered: it must be text in UTF-8",))
    first = line.partition("\n")[0].lstrip()
    if not first.startswith("/") or first.startswith(("//", "/*")):
        text = line.replace("//", "/", 1) if first.startswith("//") else line
        return Reply(state, actions=("answer",), prompt=text)
    lines: list[str] = []
    actions: list[str] = []
    for name, *arguments in _calls(words):
        reply = _run(name, arguments, state)
        state = reply.state
        lines += reply.lines
        actions += reply.actions
    return Reply(state, tuple(lines), tuple(actions))


def _calls(line: str) -> list[list[str]]:
    """The commands of a line, each with its arguments; what follows a # is a comment."""
    calls: list[list[str]] = []
    for word in re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split():
        if word.startswith("/"):
            calls.append([word])
        else:
            calls[-1].append(word)
    return calls


def _run(name: str, arguments: list[str], state: State) -> Reply:
    command = COMMANDS.get(name[1:].lower())
    if command is None:
        if near := nearest(name, [f"/{known}" for known in COMMANDS]):
            return Reply(state, (f"{name} is no command; did you mean {' or '.join(near)}? /help lists all",))
        return Reply(state, (f"{name} is no command; these are:", *help_lines(state)))
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
    """A line for each command, with what it is set to."""
    width = max(len(command.line) for command in COMMANDS.values())
    lines = [
        f"  {command.line:<{width}}  {command.summary}" + (f" ({told})" if (told := command.told(state)) else "")
        for command in COMMANDS.values()
    ]
    return (*lines, "Other lines are prompts; // begins one that begins with /. After a command, # begins a comment.")


def state_line(state: State) -> str:
    """The state in one line."""
    settings = state.settings
    facts = [_answering(state), f"length {settings.length}", f"gamma {settings.gamma}", _processor(state)]
    switches = {"egag": settings.egag, "chat": state.chat, "debug": state.debug}
    facts += [name for name, on in switches.items() if on] + ([] if settings.cache else ["cache off"])
    return " | ".join(facts)


# --- Kinds of commands.


def _switched(value: bool, arguments: list[str]) -> bool:
    """The new value of a switch: its argument's, or the other one without an argument."""
    if not arguments:
        return not value
    if len(arguments) > 1 or arguments[0].lower() not in SWITCH:
        raise ValueError(f"must be followed by on, off or nothing, got {' '.join(arguments)!r}")
    return arguments[0].lower() == "on"


def _switch(
    name: str, summary: str, read: Callable[[State], bool], write: Callable[[State, bool], State], **more: Any
) -> Command:
    def change(state: State, arguments: list[str]) -> State:
        return write(state, _switched(read(state), arguments))

    def told(state: State) -> str:
        return "on" if read(state) else "off"

    return Command(name, "[on|off]", summary, change, told, values=SWITCH, **more)


def _mode(method: str, summary: str) -> Command:
    """A switch of a method that answers."""
    return _switch(
        method,
        summary,
        lambda state: method in state.modes,
        lambda state, on: replace(state, modes=state.modes | {method} if on else state.modes - {method}),
        meaning=lambda state: f"prompts are answered by {_answering(state)}" if state.modes else "no mode is on",
    )


def _setting_switch(name: str, summary: str, meaning: Callable[[State], str]) -> Command:
    return _switch(
        name,
        summary,
        lambda state: getattr(state.settings, name),
        lambda state, on: _with(state, **{name: on}),
        meaning=meaning,
    )


def _value(name: str, summary: str, read: Callable[[str, str], Any], default: str = "", **more: Any) -> Command:
    """A setting with one value. default: what the word "default" stands for, where there is such a value, None."""

    def change(state: State, arguments: list[str]) -> State:
        if len(arguments) != 1:
            raise ValueError(f"takes one value, got {' '.join(arguments) or 'none'}")
        text = arguments[0].lower()
        return _with(state, **{name: None if default and text == "default" else read(text, name)})

    def told(state: State) -> str:
        value = getattr(state.settings, name)
        return f"default, {default}" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    values = more.pop("values", ())
    usage = "<{}>".format("/".join(values or ("value",)) + ("|default" if default else ""))
    return Command(name, usage, summary, change, told, values=values + (("default",) if default else ()), **more)


def _action(name: str, summary: str) -> Command:
    def change(state: State, arguments: list[str]) -> State:
        if arguments:
            raise ValueError(f"takes nothing, got {' '.join(arguments)!r}")
        return state

    return Command(name, "", summary, change, action=name)


def _with(state: State, **options: Any) -> State:
    return replace(state, settings=replace(state.settings, **options))


# --- Commands of no kind.


def _answering(state: State) -> str:
    return ", ".join(state.answering) or "nothing"


def _set_method(state: State, arguments: list[str]) -> State:
    if not arguments or arguments[0].lower() not in METHODS:
        got = repr(arguments[0]) if arguments else "none"
        raise ValueError(f"takes one of {', '.join(METHODS)}, perhaps with on or off, got {got}")
    return _mode(arguments[0].lower(), "").change(state, arguments[1:])


def _processor(state: State) -> str:
    settings = state.settings
    values = ", ".join(f"{name} {value:g}" for name, value in settings.processor_arguments.items())
    return settings.processor if settings.processor == "greedy" else f"{settings.processor}, {values}"


def _set_storage(state: State, arguments: list[str]) -> State:
    if len(arguments) != 2:
        raise ValueError(f"takes a storage and its n, got {' '.join(arguments) or 'none'}")
    storage, n = arguments
    return _with(state, ngram_storage=storage.lower(), ngram_n=read_whole(n, "n"))


def _egag_meaning(state: State) -> str:
    settings = state.settings
    few = f"{settings.egag_gamma_min} to {settings.gamma_max}" if settings.egag else str(settings.gamma)
    off = "" if "speculative" in state.modes else ", but is off"
    return f"speculative drafts {few} tokens a step" + (" by the drafter's entropy" if settings.egag else "") + off


def _cache_meaning(state: State) -> str:
    if state.settings.cache:
        return "keys and values are kept"
    return f"models read the whole text again for each token, by their own forward; {ENGINE_METHODS} cannot"


def _reset_meaning(state: State) -> str:
    if state.settings.reset_in_between:
        return "each answer counts n-grams from the start"
    return "n-grams and outputs of former answers are kept"


COMMANDS = {
    command.name: command
    for command in [
        _mode("speculative", "answer with drafts of the drafter"),
        _mode("target", "answer with the target alone"),
        _mode("drafter", "answer with the drafter alone"),
        _value("length", "most new tokens", read_whole),
        _value("gamma", "drafts a step", read_whole),
        _setting_switch("egag", "as many drafts as the drafter is sure", _egag_meaning),
        _value("egag_gamma_min", "least drafts with egag", read_whole),
        _value("egag_gamma_max", "most drafts with egag", read_whole, "that of gamma"),
        _value("egag_ema", "weight of former entropies, from 0 and below 1", read_number),
        _value("egag_scale", "entropy that counts as 1, in nats", read_number, "ln of the vocabulary"),
        _value("egag_mode", "once a step, or before each draft", lambda text, _: text, values=EGAG_MODES),
        Command(
            "processor",
            "<name> [values...]",
            f"one of {', '.join(PROCESSORS)}",
            lambda state, arguments: _with(state, **read_processor(arguments)),
            _processor,
            values=tuple(PROCESSORS),
        ),
        _switch(
            "debug",
            "show each step",
            lambda state: state.debug,
            lambda state, on: replace(state, debug=on),
            meaning=lambda state: "accepted green, rejected red, the target's own blue" if state.debug else "",
        ),
        _setting_switch("cache", "keep keys and values", _cache_meaning),
        _mode("ngram", "answer with drafts of counted n-grams"),
        _value("top_k_filler", "likeliest tokens that are counted after each context", read_whole),
        _value("filler_weight", "how often each of them counts", read_number),
        Command(
            "set_ngramstorage",
            f"<{'/'.join(STORAGES)}> <n>",
            "contexts of 1 to n - 1 tokens, or of n - 1 alone",
            _set_storage,
            lambda state: f"{state.settings.ngram_storage} {state.settings.ngram_n}",
            values=STORAGES,
        ),
        _setting_switch("reset_in_between", "forget former answers before each", _reset_meaning),
        Command(
            "method",
            "<name> [on|off]",
            "switch any method by its name",
            _set_method,
            _answering,
            values=METHODS,
        ),
        _value("seed", "of the random numbers of an answer", read_whole),
        _switch(
            "chat",
            "prompts continue the conversation",
            lambda state: state.chat,
            lambda state, on: replace(state, chat=on),
            meaning=lambda state: "the conversation is context" if state.chat else "prompts stand alone, as plain text",
        ),
        _action("clear", "forget the conversation"),
        _action("stats", "figures of all answers so far"),
        _action("help", "this list"),
        _action("quit", "leave"),
    ]
}
