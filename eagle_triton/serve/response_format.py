"""The fields of a body that say what the answer must match: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eagle_triton.engine.grammar import Grammar

FORMATS = ("text", "json_object", "json_schema")
KINDS = ("json", "json_object", "regex", "choice", "grammar")  # of structured_outputs, one of them
OPTIONS = ("disable_any_whitespace",)


def read_grammar(asked: Mapping[str, Any]) -> tuple[str, Grammar | None]:
    """Which of the two fields of a body asks for a grammar, and the grammar; None if there is none.

    asked: the fields of the body. Raises ValueError or TypeError for what is wrong with them; the message begins
    with the field.
    """
    name, other = "response_format", "structured_outputs"
    grammar = None if name not in asked else _response_format(asked[name])
    if other not in asked:
        return name, grammar
    if grammar is not None:
        raise ValueError(f"{other} and {name} both say what the answer must match: give one of them")
    return other, _structured_outputs(asked[other])


def _response_format(given: Any) -> Grammar | None:
    field = "response_format"
    _check_keys(field, given, ("type",), ("json_schema",))
    if given["type"] not in FORMATS:
        raise ValueError(f"{field}.type must be one of {', '.join(FORMATS)}, got {json.dumps(given['type']):.60}")
    if ("json_schema" in given) != (given["type"] == "json_schema"):
        raise ValueError(f'{field}.json_schema must come with {field}.type "json_schema", and with no other')
    if given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return Grammar.json_object()
    field += ".json_schema"
    schema = given["json_schema"]
    _check_keys(field, schema, ("name", "schema"), ("description", "strict"))
    if not (schema.get("strict") is None or isinstance(schema["strict"], bool)):
        raise TypeError(f"{field}.strict must be true or false, got {json.dumps(schema['strict']):.60}")
    return _made(f"{field}.schema", Grammar.json_schema, schema["schema"])


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
