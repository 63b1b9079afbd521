"""Reads a body's tools, and makes the grammar for an answer in which calls must fit them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator
from typing_extensions import Required, TypedDict

from eagle_triton.engine.grammar import FIXED, Grammar
from eagle_triton.serve.answer_parts import (
    HARMONY,
    HARMONY_ENDS,
    HERMES,
    LISTED,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    THINK,
    THOUGHT,
    Form,
)
from eagle_triton.serve.errors import FieldError
from eagle_triton.serve.fields import OPEN, Fields, Listed, about

Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}, the form of chat templates."""

_COMBINING = ("anyOf", "oneOf", "if", "not", "$ref", "dependentSchemas")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_Type = Literal["object", "array", "string", "number", "integer", "boolean", "null"]
_Object = Literal["object"]


class _Properties(TypedDict, total=False):
    """The parts of a JSON Schema that are checked, besides its type."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    required: Listed[str]
    properties: dict[str, bool | _Schema]


class _Schema(_Properties, total=False):
    type: _Type | Listed[_Type] | None


class _Parameters(_Properties, total=False):
    type: _Object | Listed[_Object] | None


class _Function(TypedDict, total=False):
    name: Required[Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]]
    description: str | None
    parameters: _Parameters | None
    strict: bool | None


class _Typed(TypedDict):
    type: Literal["function"]


class _Tool(_Typed):
    function: _Function


class _FlatTool(_Typed, _Function):
    pass


class _Name(TypedDict):
    name: str


class _Named(_Typed):
    function: _Name


class _FlatNamed(_Typed, _Name):
    pass


def _nested(given: Any, check: Callable[[Any], Any]) -> Tool:
    """A tool in the form of chat templates, with the given order of fields. In `given` a function's name and parameters
    may also stand next to `type`."""
    check(given)
    facts = given.get("function", given).items()
    return {"type": "function", "function": {name: one for name, one in facts if name != "type" and one is not None}}


_Choice = Literal["none", "auto", "required"]


class _CallFields(Fields):
    parallel_tool_calls: bool | None = about("false: at most one call in an answer")


class ToolFields(_CallFields):
    """The fields of a chat about tools."""

    tools: Listed[Annotated[_Tool, WrapValidator(_nested)]] | None = about(
        "functions that an answer may call. Arguments of a function with `strict` always fit its schema",
        max_length=128,
    )
    tool_choice: _Choice | Annotated[_Named, WrapValidator(_nested)] | None = about(
        '`"auto"`: the model decides, the default with tools. `"none"`: no calls. `"required"`, or one function: after '
        "reasoning, the answer is only calls, which fit their `parameters`"
    )


class FlatToolFields(_CallFields):
    """The same fields of a response. A function's name and parameters stand next to `type`."""

    tools: Listed[Annotated[_FlatTool, WrapValidator(_nested)]] | None = about(
        "functions: `type`, `name`, `description`, `parameters`, `strict`", max_length=128
    )
    tool_choice: _Choice | Annotated[_FlatNamed, WrapValidator(_nested)] | None = about(
        "as in a chat; one function: its `type` and `name`"
    )


@dataclass(frozen=True)
class Tools:
    """The tools of a body. offered: those that may be called. required: the answer must be calls and nothing else.
    named: the answer must be one call of this function. one_call: an answer has at most one call."""

    offered: tuple[Tool, ...] = ()
    required: bool = False
    named: str | None = None
    one_call: bool = False

    @property
    def names(self) -> list[str]:
        """The functions that may be called."""
        return [tool["function"]["name"] for tool in self.offered]

    @property
    def forced(self) -> bool:
        """Whether the answer must be calls."""
        return self.required or self.named is not None

    @property
    def auto(self) -> bool:
        """Whether the model decides to call. It must know the tools from the chat template."""
        return bool(self.offered) and not self.forced

    @property
    def strict(self) -> bool:
        """Whether the arguments of some function must fit their schema."""
        return any(tool["function"].get("strict") for tool in self.offered)

    @property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """The functions that may be called, or the one that must be, by name."""
        found = {tool["function"]["name"]: tool["function"] for tool in self.offered}
        return found if self.named is None else {self.named: found[self.named]}


def read_tools(asked: ToolFields | FlatToolFields) -> Tools:
    """A body's tools; none if the choice is "none". Raises RequestError with the field's name."""
    tools: tuple[Any, ...] = tuple(asked.tools or ())
    choice: Any = asked.tool_choice
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise FieldError("tools", f"name {max(names, key=names.count)!r} twice")
    harmless = (None, "none", "auto") if isinstance(asked, FlatToolFields) else (None, "none")
    if choice not in harmless and not tools:
        raise FieldError("tool_choice", "must come with tools")
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    if named is not None and named not in names:
        raise FieldError("tool_choice", f"must name one of the tools, {', '.join(names)}, got {named!r:.60}")
    one_call = asked.parallel_tool_calls is False
    return Tools() if choice == "none" else Tools(tools, choice == "required", named, one_call)


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _arguments_schema(function: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments, which are an object; without `parameters` an empty one. Objects have only
    the named properties, unless `additionalProperties` is given or schemas are combined."""
    schema = {"type": "object", **function.get("parameters", _NO_PARAMETERS)}
    return _moved(schema, "#", closes=not _combines(schema))


def _moved(schema: Any, place: str, closes: bool) -> Any:
    """A schema for use inside another one, at `place`: its references begin there. closes: objects have only the named
    properties."""
    if isinstance(schema, list):
        return [_moved(one, place, closes) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(value, place, closes) for name, value in schema.items()}
    if isinstance(refers := schema.get("$ref"), str) and refers.startswith("#"):
        moved["$ref"] = place + refers[1:]
    named, needed = schema.get("properties"), schema.get("required", [])
    if closes and isinstance(named, Mapping) and isinstance(needed, list) and all(name in named for name in needed):
        moved.setdefault("additionalProperties", False)
    return moved


def _combines(schema: Any) -> bool:
    """Whether it has several schemas for the same object."""
    inner = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    several = isinstance(schema, Mapping) and "properties" in schema and not schema.keys().isdisjoint(_COMBINING)
    return several or (isinstance(schema, Mapping) and "allOf" in schema) or any(map(_combines, inner))


# --- the grammar of an answer ---


def answer_grammar(
    tools: Tools,
    form: Form | None,
    reasons: bool | None,
    format: Grammar | None,
    token_of: Callable[[str], int | None],
) -> Grammar | None:
    """The grammar of an answer: calls, a format, or text, after the model's reasoning. None: any text.

    form: of calls in the model's chat template. Without one, only forced calls are written: as a list of objects with
    `name` and `parameters`, or as the arguments of a named function. reasons: True: an answer begins with reasoning;
    None: it does not; False: it may. format: matched by an answer without calls. token_of: the id of a marker that is
    one token and no text; else None.

    A call begins with its family's marker, or for Llama 3 with the answer's first brace. Then follow one of the tools
    and arguments that fit its schema; without `strict` they are any object. Text before a call contains no marker.
    """
    if not (tools.forced or tools.strict or format):
        return None
    if not tools.offered and reasons is None and form is not HARMONY:
        return format
    lark = _Lark(token_of)
    if form is HARMONY:
        _add_harmony(lark, tools, format)
    else:
        _add_body(lark, tools, form or LISTED, reasons, format)
        _add_start(lark, reasons)
    return Grammar.ebnf(lark.text) if format is None else format.within(lark.text)


class _Lark:
    """A grammar in Lark's syntax as it grows."""

    def __init__(self, token_of: Callable[[str], int | None]) -> None:
        self._token_of = token_of
        self._rules = ["%llguidance {}", "ANY: /(?s:.*)/", r"SPACE: /\s{0,3}/", r"NEWLINE: /\n?/"]

    @property
    def text(self) -> str:
        return "\n".join(self._rules)

    def add(self, name: str, *bodies: str) -> str:
        """Add a rule. Returns its name."""
        self._rules.append(f"{name}: {' | '.join(bodies)}")
        return name

    def marker(self, text: str) -> str:
        """A marker, as a token of its own or as text."""
        token = self._token_of(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def text_without(self, name: str, markers: Sequence[str], begin: str = "ANY") -> str:
        """Add a terminal: text that matches `begin` and contains no marker, in whatever tokens it is spelled."""
        spelled = " | ".join(map(json.dumps, markers))
        return self.add(name, f"{begin} & ~(ANY ({spelled}) ANY)")

    def text_to(self, name: str, marker: str, begin: str = "ANY") -> str:
        """Add a rule: text and the marker that ends it."""
        if self._token_of(marker) is None:
            terminal = self.add(f"{name.upper()}_TEXT", begin)
            return self.add(f"{name}[lazy]", f"{terminal} {json.dumps(marker)}").removesuffix("[lazy]")
        return self.add(name, f"{self.text_without(f'{name.upper()}_TEXT', [marker], begin)} {self.marker(marker)}")

    def add_call(self, tools: Tools, write: Callable[[str, dict[str, Any]], str]) -> None:
        """Add `call`: a call of one of the tools. write: a call in Lark, by its function and schema."""
        calls = []
        for name, function in tools.functions.items():
            fits = tools.forced or function.get("strict")
            calls.append(write(name, _arguments_schema(function) if fits else {"type": "object"}))
        self.add("call", *calls)


def _add_start(lark: _Lark, reasons: bool | None) -> None:
    """Add `start`: `body`, after reasoning as in `answer_grammar`."""
    starts = [] if reasons else ["body"]
    if reasons is not None:
        thought = f"{lark.text_to('thought', THOUGHT)} SPACE body"
        starts.append(thought if reasons else f"{lark.marker(THINK)} {thought}")
    lark.add("start", *starts)


def _add_body(lark: _Lark, tools: Tools, form: Form, reasons: bool | None, format: Grammar | None) -> None:
    """Add `body`: calls that begin with a marker, a format, or text."""
    if not tools.offered:
        lark.add("body", "@answer")
        return
    args = f"({lark.marker('[CALL_ID]')} /\\w{{1,32}}/)? {lark.marker('[ARGS]')}"

    def write(function: str, schema: dict[str, Any]) -> str:
        if form is LISTED and tools.named:
            return _json(schema)
        if form is MISTRAL_ARGS:
            return f'"{function}" {args} {_json(schema)}'
        arguments = "arguments" if form in (HERMES, MISTRAL) else "parameters"
        moved = _moved(schema, f"#/properties/{arguments}", closes=False)
        return _json(_object({"name": {"const": function}, arguments: moved}))

    lark.add_call(tools, write)
    if form is LISTED and tools.named:
        lark.add("body", "call")
        return
    many = not (tools.one_call or tools.named)
    listed = f'call {"(/, ?/ call)*" if many else ""} "]"'
    opened = {
        HERMES: f"NEWLINE call NEWLINE {lark.marker('</tool_call>')}",
        LLAMA: "call (/; ?/ call)*" if many else "call",
        MISTRAL: f'SPACE "[" {listed}',
        MISTRAL_ARGS: "call",
        LISTED: listed,
    }
    lark.add("opened", opened[form])  # what follows a marker
    (opener,), several = form.openers, many and form in (HERMES, MISTRAL_ARGS)  # with a marker each
    one = f"{lark.marker(opener)}{'?' if form.bare else ''} opened"
    calls = f"{one} (SPACE {one})*" if several else one
    if tools.forced:
        lark.add("body", calls)
    elif format is not None:
        lark.add("body", calls, "@answer")
    else:
        begin = r"/([^{\s](?s:.*))?/" if form.bare else "ANY"
        if reasons is False:
            begin += f" & ~({json.dumps(THINK)} ANY)"
        to_opener, rest = lark.text_to("to_opener", opener, begin), lark.text_without("REST", [opener], begin)
        bare = ["opened"] if form.bare else []
        lark.add("body", f"({to_opener} opened){'*' if several else '?'} {rest}", *bare)


def _add_harmony(lark: _Lark, tools: Tools, format: Grammar | None) -> None:
    """Add `start`: messages of harmony. The last one calls a tool or is the answer."""
    channel, message, constrain = map(lark.marker, ("<|channel|>", "<|message|>", "<|constrain|>"))
    written = lark.add("written", f'(" "? {constrain} "json" | " json")?')

    def write(function: str, schema: dict[str, Any]) -> str:
        to = f'" to=functions.{function}"'
        return f'({channel} "commentary" {to} | {to} {channel} "commentary") {written} {message} {_json(schema)}'

    ended, before = lark.text_to("ended", "<|end|>"), '"analysis"' if tools.forced else '("analysis" | "commentary")'
    thought = lark.add("thought", f'{channel} {before} {message} {ended} {lark.marker("<|start|>")} "assistant"')
    last = []
    if tools.offered:
        lark.add_call(tools, write)
        last.append("call")
    if not tools.forced and format is not None:
        last.append(f'{channel} "final" {written} {message} @answer')
    elif not tools.forced:
        last.append(f'{channel} ({before} | "final") {message} {lark.text_without("REST", HARMONY_ENDS)}')
    lark.add("start", f"{thought}* ({' | '.join(last)})")


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': FIXED})}"
