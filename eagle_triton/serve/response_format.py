"""Fields that say what the answer must match, as grammars: OpenAI's response_format (`text` in responses), vLLM's
structured_outputs, and SGLang's regex and ebnf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Json
from typing_extensions import Required, TypedDict

from eagle_triton.engine.grammar import Grammar
from eagle_triton.serve.fields import Listed, wrong

_AnySchema = dict[str, Any] | Literal[True]
_Schema = _AnySchema | Json[_AnySchema]
_ABOUT_SPACE = "disable_any_whitespace"


class _Plain(TypedDict):
    type: Literal["text", "json_object"]


class _Named(TypedDict, total=False):
    name: Required[str]
    schema: Required[_Schema]
    description: str | None
    strict: bool | None


class _Inner(TypedDict):
    type: Literal["json_schema"]
    json_schema: _Named


class _Flat(_Named):
    type: Literal["json_schema"]


class _StructuredOutputs(TypedDict, total=False):
    json: _Schema | None
    json_object: Literal[True] | None
    regex: str | None
    choice: Annotated[Listed[str], Field(min_length=1)] | None
    grammar: str | None
    disable_any_whitespace: bool | None


def format_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a format; None if it allows any text."""
    if given["type"] == "json_schema":
        return Grammar.json_schema(given.get("json_schema", given)["schema"])
    return Grammar.json_object() if given["type"] == "json_object" else None


def _structured(given: Mapping[str, Any]) -> Grammar:
    asked = {name: value for name, value in given.items() if value is not None}
    fixed = asked.pop(_ABOUT_SPACE, None)
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json": partial(Grammar.json_schema, whitespace=fixed is False),
        "json_object": lambda _: Grammar.json_object(fixed is False),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.ebnf,
    }
    if len(asked) != 1:
        raise wrong("", f"must have one of {', '.join(makers)}, got {', '.join(asked) or 'none'}")
    ((name, value),) = asked.items()
    if fixed is not None and name not in ("json", "json_object"):
        raise wrong(_ABOUT_SPACE, f"must come with json or json_object, got {name}")
    return makers[name](value)


ResponseFormat = Annotated[_Plain | _Inner, Field(discriminator="type"), AfterValidator(format_grammar)]
FlatFormat = Annotated[_Plain | _Flat, Field(discriminator="type")]
"""A format in a response: the schema and its name stand next to `type`."""
StructuredOutputs = Annotated[_StructuredOutputs, AfterValidator(_structured)]
Regex = Annotated[str, AfterValidator(Grammar.regex)]
Ebnf = Annotated[str, AfterValidator(Grammar.ebnf)]
