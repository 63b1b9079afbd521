"""The fields of a body that say what the answer must match: OpenAI's response_format, which responses have in `text`,
and vLLM's structured_outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eagle_triton.engine.grammar import Grammar

FORMATS = ("text", "json_object", "json_schema")
KINDS = ("json", "json_object", "regex", "choice", "grammar")  # of structured_outputs, one of them
OPTIONS = ("disable_any_whitespace",)
_SCHEMA_KEYS = ("name", "schema", "description", "strict")


def read_grammar(asked: Mapping[str, Any], calls: bool = False) -> tuple[str | None, Grammar | None]:
    """Which field of a body says what the answer must match, and the grammar of a format; None if there is none.

    asked: the fields of the body. calls: its tool_choice asks for calls. Raises ValueError or TypeError for what is
    wrong with them; the message begins with the field.
    """
    readers = {"response_format": _response_format, "text": _text, "structured_outputs": _structured_outputs}
    found = ((name, read(asked[name])) for name, read in readers.items() if name in asked)
    formats = [(name, grammar) for name, grammar in found if grammar is not None]
    names = ["tool_choice"] * calls + [name for name, _ in formats]
    if len(names) > 1:
        raise ValueError(f"{names[1]} and {names[0]} both say what the answer must match: give one of them")
    return (names[0] if names else None), (formats[0][1] if formats else None)


def _response_format(given: Any) -> Grammar | None:
    field = "response_format"
    _check_keys(field, given, ("type",), ("json_schema",))
    if ("json_schema" in given) != (given["type"] == "json_schema"):
        raise ValueError(f'{field}.json_schema must come with {field}.type "json_schema", and with no other')
    return _format(field, given["type"], f"{field}.json_schema", given.get("json_schema"))


def _text(given: Any) -> Grammar | None:
    """The format in a response's `text`, where a schema stands beside its type."""
    if (form := given.get("format")) is None:
        return None
    field = "text.format"
    _check_keys(field, form, ("type",), _SCHEMA_KEYS if form.get("type") == "json_schema" else ())
    return _format(field, form["type"], field, {name: value for name, value in form.items() if name != "type"})


def _format(field: str, kind: Any, place: str, schema: Any) -> Grammar | None:
    """The grammar of a type of format. place: where its schema stands, with name and strict beside it."""
    if kind not in FORMATS:
        raise ValueError(f"{field}.type must be one of {', '.join(FORMATS)}, got {json.dumps(kind):.60}")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    _check_keys(place, schema, ("name", "schema"), ("description", "strict"))
    if not (schema.get("strict") is None or isinstance(schema["strict"], bool)):
        raise TypeError(f"{place}.strict must be true or false, got {json.dumps(schema['strict']):.60}")
    return _made(f"{place}.schema", Grammar.json_schema, schema["schema"])


def _structured_outputs(given: Any) -> Grammar:
    field = "structured_outputs"
    _check_keys(field, given, (), (*KINDS, *OPTIONS))
    asked = [name for name in KINDS if given.get(name) is not None]
    if len(asked) != 1:
        raise ValueError(f"{field} must have one of {', '.join(KINDS)}, got {', '.join(asked) or 'none'}")
    fixed = given.get("disable_any_whitespace")
    if not (fixed is None or isinstance(fixed, bool)):
        raise TypeError(f"{field}.disable_any_whitespace must be true or false, got {json.dumps(fixed):.60}")
    (name,) = asked
    value, place = given[name], f"{field}.{name}"
    if name in ("json", "json_object"):
        whitespace = fixed is False
        if name == "json":
            return _made(place, Grammar.json_schema, value, whitespace)
        if value is not True:
            raise ValueError(f"{place} must be true, or left out, got {json.dumps(value):.60}")
        return Grammar.json_object(whitespace)
    if fixed is not None:
        raise ValueError(f"{field}.disable_any_whitespace is about json and json_object, and {name} was given")
    if name == "choice":
        if not isinstance(value, list):
            raise TypeError(f"{place} must be a list of strings, got {json.dumps(value):.60}")
        return _made(place, Grammar.choice, value)
    return _made(place, Grammar.regex if name == "regex" else Grammar.ebnf, value)


def _made(place: str, make: Any, *arguments: Any) -> Grammar:
    """A grammar; errors name the place in the body."""
    try:
        return make(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {str(error).removeprefix('grammar: ')}") from None


def _check_keys(field: str, given: Any, needed: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Raise unless a value is an object with the keys that are needed, and no other than these and `others`."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{field} must be an object, got {json.dumps(given):.60}")
    for name in needed:
        if given.get(name) is None:
            raise ValueError(f"{field}.{name} is missing")
    known = (*needed, *others)
    for name in given:
        if name not in known:
            raise ValueError(f"{field}.{name} is unknown or not offered; the keys are {', '.join(known)}")
