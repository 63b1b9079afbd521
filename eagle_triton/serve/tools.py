"""Reads what a chat says of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.fields import MAPPING, TEXT, Field, Table, checked, is_mapping, one_of

Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}, as chat templates take it."""

NEEDS_GRAMMAR = "decoding is not constrained to a format"
MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_TOOL: Table = {"type": Field(one_of("function"), ""), "function": Field(MAPPING, "")}
_FUNCTION: Table = {
    "name": Field(TEXT, ""),
    "description": Field(TEXT, ""),
    "parameters": Field(MAPPING, ""),
    "strict": Field(None, NEEDS_GRAMMAR, nothing=(False,)),
}
_NAMED: Table = {"name": Field(TEXT, "")}


def read_tools(given: list[Any], choice: Any) -> tuple[Tool, ...]:
    """The tools that may be called: none with the choice "none". Raises RequestError naming the field.

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
    if isinstance(choice, dict):
        asked = checked(checked(choice, _TOOL, "tool_choice.").get("function", {}), _NAMED, "tool_choice.function.")
        if asked.get("name") not in names:
            raise RequestError(400, f"tool_choice must name one of the tools, {', '.join(names)}, got "
                               f"{asked.get('name')!r:.60}", "tool_choice")  # fmt: skip
    elif choice not in (None, "none", "auto", "required"):
        raise RequestError(400, "tool_choice must be none, auto, required, or name a function", "tool_choice")
    if isinstance(choice, dict) or choice == "required":  # a grammar of the calls belongs here
        raise RequestError(400, f"tool_choice must be auto or none: {NEEDS_GRAMMAR}", "tool_choice")
    return () if choice == "none" else tools


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
