"""The fields of a body that say what the answer must match: OpenAI's response_format, which responses have in `text`,
vLLM's structured_outputs, and SGLang's regex and ebnf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from eagle_triton.engine.grammar import Grammar
from eagle_triton.serve.errors import FieldError, RequestError
from eagle_triton.serve.fields import ANY, MAPPING, SWITCH, TEXT, Field, Kind, Table, checked, list_of, needed, one_of

_FORMAT: Table = {"type": needed(one_of("text", "json_object", "json_schema"))}
_RESPONSE_FORMAT: Table = {**_FORMAT, "json_schema": Field(MAPPING)}
_SCHEMA: Table = {"name": needed(TEXT), "schema": needed(ANY), "description": Field(TEXT), "strict": Field(SWITCH)}
_TRUE = Kind("true, or left out", {"const": True})
_STRUCTURED_OUTPUTS: Table = {
    "json": Field(ANY),
    "json_object": Field(_TRUE),
    "regex": Field(TEXT),
    "choice": Field(list_of("a list of strings", type="string")),
    "grammar": Field(TEXT),
    "disable_any_whitespace": Field(SWITCH),
}


def read_grammar(asked: Mapping[str, Any], calls: bool = False) -> tuple[str | None, Grammar | None]:
    """Which field of a body says what the answer must match, and the grammar of a format; None if there is none.

    asked: the fields of the body. calls: its tool_choice asks for calls, which leave no text that a format is about.
    Raises RequestError naming the field.
    """
    readers: dict[str, Callable[[Any], Grammar | None]] = {
        "response_format": _response_format,
        "text": _text,
        "structured_outputs": _structured_outputs,
        "regex": partial(_made, "regex", Grammar.regex),
        "ebnf": partial(_made, "ebnf", Grammar.ebnf),
    }
    found = ((name, read(asked[name])) for name, read in readers.items() if name in asked)
    formats = [(name, grammar) for name, grammar in found if grammar is not None]
    if len(formats) > 1:
        raise FieldError(formats[1][0], f"and {formats[0][0]} both say what the answer must match: give one of them")
    if calls:
        return "tool_choice", None
    return formats[0] if formats else (None, None)


def _response_format(given: Mapping[str, Any]) -> Grammar | None:
    read, place = checked(given, _RESPONSE_FORMAT, "response_format."), "response_format.json_schema"
    if ("json_schema" in read) != (read["type"] == "json_schema"):
        raise FieldError(place, 'must come with response_format.type "json_schema", and with no other')
    return _format(read["type"], read.get("json_schema", {}), place)


def _text(given: Mapping[str, Any]) -> Grammar | None:
    """The format in a response's `text`, where the schema and its name stand next to `type`."""
    if (form := given.get("format")) is None:
        return None
    schema = {name: value for name, value in form.items() if name != "type"}
    has_schema = form.get("type") == "json_schema"
    kind = checked({"type": form.get("type")} if has_schema else form, _FORMAT, "text.format.")["type"]
    return _format(kind, schema, "text.format")


def _format(kind: str, schema: Mapping[str, Any], place: str) -> Grammar | None:
    """The grammar of a type of format. schema: a mapping with the schema, its name and `strict`; place: of it."""
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    return _made(f"{place}.schema", Grammar.json_schema, checked(schema, _SCHEMA, f"{place}.")["schema"])


def _structured_outputs(given: Mapping[str, Any]) -> Grammar:
    field = "structured_outputs"
    read = checked(given, _STRUCTURED_OUTPUTS, f"{field}.")
    fixed = read.pop("disable_any_whitespace", None)
    if len(read) != 1:
        kinds = [name for name in _STRUCTURED_OUTPUTS if name != "disable_any_whitespace"]
        raise FieldError(field, f"must have one of {', '.join(kinds)}, got {', '.join(read) or 'none'}")
    ((name, value),) = read.items()
    if fixed is not None and name not in ("json", "json_object"):
        where = f"{field}.disable_any_whitespace"
        raise FieldError(where, f"is about json and json_object, and {name} was given")
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json": partial(Grammar.json_schema, whitespace=fixed is False),
        "json_object": lambda _: Grammar.json_object(fixed is False),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.ebnf,
    }
    return _made(f"{field}.{name}", makers[name], value)


def _made(place: str, make: Callable[[Any], Grammar], given: Any) -> Grammar:
    """A grammar; errors name the place in the body."""
    try:
        return make(given)
    except (TypeError, ValueError) as error:
        raise RequestError(400, f"{place}: {str(error).removeprefix('grammar: ')}", place) from None
