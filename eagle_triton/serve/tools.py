"""Reads what a chat says of tools, and makes the grammar of an answer that must call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_triton.engine.grammar import Grammar
from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.fields import MAPPING, SWITCH, TEXT, Field, Table, checked, is_mapping, one_of

Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}, as chat templates take it."""

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_TOOL: Table = {"type": Field(one_of("function"), ""), "function": Field(MAPPING, "")}
_FUNCTION: Table = {
    "name": Field(TEXT, ""),
    "description": Field(TEXT, ""),
    "parameters": Field(MAPPING, ""),
    "strict": Field(SWITCH, ""),
}
_NAMED: Table = {"name": Field(TEXT, "")}
_COMBINING = ("anyOf", "oneOf", "if", "not", "$ref", "dependentSchemas")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tools:
    """What a chat says of tools. offered: those that may be called; required: the answer must be calls and nothing
    else; named: it must be one call of this function."""

    offered: tuple[Tool, ...] = ()
    required: bool = False
    named: str | None = None

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
        """Whether the model decides if it calls one, which the chat template must tell it."""
        return bool(self.offered) and not self.forced

    def grammar(self, one_call: bool) -> Grammar | None:
        """What an answer that must be calls matches; None: it may be anything.

        With a named function the answer is its arguments. With several it is a list of objects with `name` and
        `parameters`; one_call: of one.
        """
        functions = {tool["function"]["name"]: tool["function"] for tool in self.offered}
        if self.named is not None:
            return Grammar.json_schema(_arguments_schema(functions[self.named]))
        if not self.required:
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name in functions
        ]
        listed = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({"maxItems": 1} if one_call else {})}
        schemas = {name: _arguments_schema(function, f"#/$defs/{name}") for name, function in functions.items()}
        return Grammar.json_schema({**listed, "$defs": schemas})


def read_tools(given: list[Any], choice: Any) -> Tools:
    """The tools of a chat; with the choice "none" there are none. Raises RequestError naming the field.

    choice: None, "none", "auto", "required", or a mapping that names one.
    """
    if len(given) > MAX_TOOLS:
        raise RequestError(400, f"tools must be at most {MAX_TOOLS}, got {len(given)}", "tools")
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(400, f"tools name {max(names, key=names.count)!r} twice", "tools")
    if choice is not None and choice != "none" and not tools:
        raise RequestError(400, "tool_choice must come with tools", "tool_choice")
    named = None
    if isinstance(choice, dict):
        asked = checked(checked(choice, _TOOL, "tool_choice.").get("function", {}), _NAMED, "tool_choice.function.")
        if asked.get("name") not in names:
            raise RequestError(400, f"tool_choice must name one of the tools, {', '.join(names)}, got "
                               f"{asked.get('name')!r:.60}", "tool_choice")  # fmt: skip
        named = asked["name"]
    elif choice not in (None, "none", "auto", "required"):
        raise RequestError(400, "tool_choice must be none, auto, required, or name a function", "tool_choice")
    if choice in (None, "auto"):
        for index, tool in enumerate(tools):
            if tool["function"].get("strict"):
                where = f"tools.{index}.function.strict"
                raise RequestError(400, f'{where}=true needs tool_choice="required" or a named function: other calls '
                                   "are the model's own, and may not fit their schema", where)  # fmt: skip
    return Tools() if choice == "none" else Tools(tools, choice == "required", named)


def _tool(given: Any, where: str) -> Tool:
    if not is_mapping(given):
        raise RequestError(400, f"{where} must be a mapping of type and function", where)
    tool = checked(given, _TOOL, f"{where}.")
    if tool.keys() != _TOOL.keys():
        raise RequestError(400, f"{where} must have type and function", where)
    function = checked(tool["function"], _FUNCTION, f"{where}.function.")
    if not _NAME.fullmatch(function.get("name", "")):
        raise RequestError(400, f"{where}.function.name must be 1 to 64 letters, digits, _, - or ., got "
                           f"{function.get('name')!r:.80}", f"{where}.function.name")  # fmt: skip
    if "parameters" in function:
        _check_schema(function["parameters"], f"{where}.function.parameters", {"object"})
    return {"type": "function", "function": function}


def _check_schema(given: Any, where: str, types: set[str]) -> None:
    """Refuse what is no JSON Schema of one of some types."""
    if not is_mapping(given):
        raise RequestError(400, f"{where} must be a JSON Schema, got {given!r:.60}", where)
    kind, required, properties = given.get("type"), given.get("required", []), given.get("properties", {})
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not set(map(str, kinds)) <= types:
        raise RequestError(400, f"{where}.type must be {' or '.join(sorted(types))}, got {kind!r:.60}", f"{where}.type")
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise RequestError(400, f"{where}.required must be a list of names", f"{where}.required")
    if not isinstance(properties, Mapping):
        raise RequestError(400, f"{where}.properties must be a mapping", f"{where}.properties")
    for name, inner in properties.items():
        if not isinstance(inner, bool):
            _check_schema(inner, f"{where}.properties.{name}", set(_TYPES))


def _arguments_schema(function: Mapping[str, Any], place: str = "#") -> Any:
    """The schema of a function's arguments, which are an object, as it stands at a place of another one. Without
    `parameters` it has none. An object has only the properties that are named, unless `additionalProperties` is there
    or schemas are combined."""
    schema = {"type": "object", **function.get("parameters", _NO_PARAMETERS)}
    return _moved(schema, place, closes=not _combines(schema))


def _moved(schema: Any, place: str, closes: bool) -> Any:
    """A schema whose references are to its own parts at a place. closes: objects have only the properties named."""
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
    """Whether several schemas in it are about the same object."""
    inner = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    several = isinstance(schema, Mapping) and "properties" in schema and not schema.keys().isdisjoint(_COMBINING)
    return several or (isinstance(schema, Mapping) and "allOf" in schema) or any(map(_combines, inner))
