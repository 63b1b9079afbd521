"""Splits an answer into text, reasoning and tool calls, as the model's chat template writes them.

Four forms of calls are known: Hermes' (Qwen), Llama 3's, Mistral's and harmony (gpt-oss).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from eagle_triton.inference.text import beginning_at_end

CONTENT, REASONING, CALL, ARGUMENTS, END = "content", "reasoning", "call", "arguments", "end"
THINK, THOUGHT = "<think>", "</think>"


class Part(NamedTuple):
    """Some text of an answer. kind: CONTENT, REASONING, CALL (the name of the called function), ARGUMENTS (JSON of that
    call) or END (the model has ended what came before). end: where content ends in all text that was read."""

    kind: str
    text: str = ""
    end: int = 0


class Form(NamedTuple):
    """How a family of chat templates writes calls. openers: markers that begin a call. bare: an answer that begins with
    an object is also a call."""

    name: str
    openers: tuple[str, ...]
    bare: bool = False


HERMES = Form("hermes", ("<tool_call>",))
LLAMA = Form("llama", ("<|python_tag|>",), bare=True)
MISTRAL = Form("mistral", ("[TOOL_CALLS]",))
MISTRAL_ARGS = Form("mistral 11", ("[TOOL_CALLS]",))  # a call is a name, [ARGS], and its arguments
MISTRALS = (MISTRAL, MISTRAL_ARGS)
HARMONY = Form("harmony", ())
LISTED = Form("listed", ("[",))  # a list of calls, which a grammar makes

_STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'  # in JSON
_NAMED = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_BEGUN = re.compile(r'\s*\{\s*(?:\}|"[^"])')  # arguments, from the first name on
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?\[ARGS\]\s*(?=\{)")
_CLOSERS = ("</tool_call>", "}", "]", ",", ";")
_MESSAGE = "<|message|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


def form_of(template: str) -> Form | None:
    """The form of calls in a chat template; None if it has no known form."""
    if "<|channel|>" in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    others = "<function=", "<arg_key>"  # forms that have the same opener
    if "<tool_call>" in template and not any(other in template for other in others):
        return HERMES
    if "<|start_header_id|>" in template and "parameters" in template:
        return LLAMA
    return None


class AnswerReader:
    """Reads text as it comes. Text that may begin a marker is held back."""

    def __init__(
        self,
        form: Form | None,
        functions: Collection[str],
        reasons: bool | None = None,
        called: str | None = None,
    ) -> None:
        """form: of calls; None: read no calls. functions: those that may be called. A bare object is a call only if it
        names one of them. reasons: True: the prompt has begun the reasoning; False: an answer may begin with it; None:
        it has none. called: the whole answer is the arguments of this function."""
        self._form, self._functions = form, frozenset(functions)
        self.count = 0  # characters that were read
        self._held, self._found = "", list[Part]()
        self._space = ""  # read after text, and dropped before a call
        self._space_end = 0  # where it ends, as Part.end
        self._called = False
        self._fresh = True  # no text has come, or only reasoning
        self._opener = ""  # of the call that is read
        self._skipped = ""  # read before what is held; it is text if this is no call
        self._depth, self._quoted, self._escaped = 0, False, False  # in arguments
        self._kind = CONTENT  # of harmony's message
        self._name = called or ""
        self._read: Callable[[], bool] = self._read_named if called else self._read_text
        if form is HARMONY:
            self._read = self._read_header
        self._read_answer = self._read  # what comes after reasoning
        if reasons is not None:
            self._read = self._read_reasoning if reasons else self._read_begin

    @property
    def reasons(self) -> bool:
        """Whether the text read so far ends inside reasoning."""
        return self._read == self._read_reasoning or (self._read == self._read_message and self._kind == REASONING)

    def push(self, text: str) -> list[Part]:
        """Read more text. Returns the parts that are certain now."""
        self.count += len(text)
        self._held += text
        while self._held and self._read():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """The parts that were held back. A call that cannot be read becomes text."""
        rest, self._held = self._held, ""
        if self._read == self._read_call and self._form is not LISTED:
            self._add(CONTENT, self._skipped + rest)
        elif self._read == self._read_reasoning:
            self._add(REASONING, rest)
        elif self._read == self._read_message:
            self._add(self._kind, rest)
        elif self._read in (self._read_text, self._read_begin) or (
            self._read == self._read_header and "<|" not in rest
        ):
            self._add(CONTENT, rest)
        if not self._called and self._space:
            self._found.append(Part(CONTENT, self._space, self._space_end))
        return self._take()

    def _take(self) -> list[Part]:
        found, self._found = self._found, []
        self._called = self._called or any(part.kind == CALL for part in found)
        return found

    def _add(self, kind: str, text: str, marker: str = "") -> None:
        """Add text of a kind. Drops space at the beginning, and between text and a call. marker: what was read after
        the text; what is held follows."""
        end = self.count - len(self._held) - len(marker)
        if kind == CONTENT:
            self._space_end = end
            text = self._space + text
            kept = text.rstrip() if self._form else text
            text, self._space = kept, text[len(kept) :]
            end -= len(self._space)
            if self._fresh and self._form:
                text = text.lstrip()
            self._fresh = self._fresh and not text
        if text:
            self._found.append(Part(kind, text, end))

    def _go_on(self, read: Callable[[], bool], used: int = 0) -> bool:
        self._held, self._read = self._held[used:], read
        return True

    def _end(self, read: Callable[[], bool], used: int = 0) -> bool:
        self._found.append(Part(END))
        self._space = ""
        return self._go_on(read, used)

    def _until(self, markers: tuple[str, ...]) -> tuple[str, str]:
        """Take the text before the first of the markers, and that marker; "" if none has come. Text that may begin a
        marker stays."""
        places = [(self._held.find(marker), marker) for marker in markers if marker in self._held]
        place, marker = min(places, default=(len(self._held) - beginning_at_end(self._held, markers), ""))
        text, self._held = self._held[:place], self._held[place + len(marker) :]
        return text, marker

    # --- text and reasoning ---

    def _read_begin(self) -> bool:
        """The beginning of an answer: perhaps a marker of reasoning. Space before the marker is dropped."""
        self._held = self._held.lstrip()
        if self._held.startswith(THINK):
            return self._go_on(self._read_reasoning, len(THINK))
        return not THINK.startswith(self._held) and self._go_on(self._read_answer)

    def _read_text(self) -> bool:
        if self._form is not None and self._form.bare and self._fresh and self._held.lstrip().startswith("{"):
            self._opener = self._skipped = self._space = ""
            return self._go_on(self._read_call)
        text, self._opener = self._until(() if self._form is None else self._form.openers)
        self._skipped = self._opener
        self._add(CONTENT, text, self._opener)
        return bool(self._opener) and self._go_on(self._read_call)

    def _read_reasoning(self) -> bool:
        text, end = self._until((THOUGHT,))
        self._add(REASONING, text)
        return bool(end) and self._end(self._read_after_reasoning)

    def _read_after_reasoning(self) -> bool:
        self._held = self._held.lstrip()
        return bool(self._held) and self._go_on(self._read_answer)

    # --- calls in JSON ---

    def _read_call(self) -> bool:
        begin = self._held.lstrip()
        if self._form in MISTRALS and begin.startswith("["):
            used = len(self._held) - len(begin) + 1
            self._skipped += self._held[:used]
            return self._go_on(self._read_call, used)
        named = _NAMED.match(self._held)
        if named is not None:
            return self._begin_call(json.loads(named[1]), named.end())
        if self._form in MISTRALS and (named := _MISTRAL_NAMED.match(self._held)) is not None:
            return self._begin_call(named[1], named.end())
        try:  # whole, with its names in another order
            call, end = json.JSONDecoder().raw_decode(begin)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            if not (isinstance(name, str) and isinstance(arguments, dict)):
                raise KeyError(name)
        except json.JSONDecodeError:
            return False  # not whole yet
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError):  # the last: too many digits
            return self._is_text()
        if not self._may_be_called(name):
            return self._is_text()
        self._found += [Part(CALL, name), Part(ARGUMENTS, json.dumps(arguments, ensure_ascii=False))]
        return self._end(self._read_between, len(self._held) - len(begin) + end)

    def _read_named(self) -> bool:
        """The arguments of the only call. An answer that ends before they begin has no call."""
        return bool(_BEGUN.match(self._held)) and self._begin_call(self._name, 0)

    def _begin_call(self, name: str, used: int) -> bool:
        if not self._may_be_called(name):
            return self._is_text()
        self._space = ""
        self._found.append(Part(CALL, name))
        return self._go_on(self._read_arguments, used)

    def _may_be_called(self, name: str) -> bool:
        return name in self._functions or bool(self._opener)

    def _is_text(self) -> bool:
        """Treat as text what looked like a call."""
        first, self._held = self._held[:1], self._held[1:]
        self._add(CONTENT, self._skipped + first)
        self._fresh = False
        return self._go_on(self._read_text)

    def _read_arguments(self) -> bool:
        for place, character in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{}[]":
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    self._add(ARGUMENTS, self._held[: place + 1])
                    return self._end(self._read_between, place + 1)
        self._add(ARGUMENTS, self._held)
        self._held = ""
        return False

    def _read_between(self) -> bool:
        """After a call: read its closing marker, then the next call or text."""
        self._held = self._held.lstrip()
        closer = next((closer for closer in _CLOSERS if self._held.startswith(closer)), None)
        if closer is not None:
            return self._go_on(self._read_between, len(closer))
        if not self._held or "</tool_call>".startswith(self._held):
            return False
        self._fresh, self._skipped = True, ""
        return self._go_on(self._read_call if self._held.startswith("{") else self._read_text)

    # --- harmony ---

    def _read_header(self) -> bool:
        place = self._held.find(_MESSAGE)
        if place < 0:
            return False
        header = self._held[:place]
        called = re.search(r"to=functions\.([\w.-]+)", header)
        if called is not None:
            self._found.append(Part(CALL, called[1]))
        self._kind = ARGUMENTS if called else REASONING if "analysis" in header else CONTENT
        self._fresh = True
        return self._go_on(self._read_message, place + len(_MESSAGE))

    def _read_message(self) -> bool:
        text, end = self._until(HARMONY_ENDS)
        self._add(self._kind, text, end)
        return bool(end) and self._end(self._read_header)
