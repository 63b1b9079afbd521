"""Reads the messages of a chat as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_triton.serve.errors import FieldError
from eagle_triton.serve.fields import (
    MAPPING,
    SOME_TEXT,
    TEXT,
    TEXT_OR_LIST,
    Field,
    Kind,
    Table,
    checked,
    list_of,
    needed,
    one_of,
    whole,
)

Message = dict[str, Any]
"""role, and content as text; where they are there, name, tool_calls with arguments as mappings, tool_call_id,
reasoning_content, and fields of other names, for chat templates that read them."""

ROLES = ("system", "developer", "user", "assistant", "tool")  # others are for chat templates that read them
_CONTENT = Kind("a string, or a list of parts of type text", TEXT_OR_LIST)
_CALLS = list_of("a list of tool calls", type="object")
MESSAGE: Table = {
    "role": Field(Kind("a name", SOME_TEXT), "who said it", needed=True),
    "content": Field(_CONTENT, "a string, or a list of parts of type text"),
    "name": Field(TEXT, "is handed to the chat template"),
    "tool_calls": Field(_CALLS, "of an answer: what it called"),
    "tool_call_id": Field(TEXT, "of a tool's message: the call whose result it is"),
    "reasoning_content": Field(TEXT, "of an answer: is handed to the chat template", "vLLM"),
    "reasoning": Field(TEXT, "another name of `reasoning_content`", "vLLM"),
    "refusal": Field(None, "what was refused stands in content"),
    "annotations": Field(None, "messages are text", nothing=([],)),
    "audio": Field(None, "messages are text"),
    "function_call": Field(None, "`tool_calls` took its place"),
}
_PART: Table = {"type": needed(one_of("text")), "text": needed(TEXT)}
_CALL: Table = {
    "id": needed(TEXT),
    "type": Field(one_of("function")),
    "function": needed(MAPPING),
    "index": Field(whole(0)),
}
_FUNCTION: Table = {"name": needed(TEXT), "arguments": needed(TEXT)}


def read_messages(given: Sequence[Mapping[str, Any]], field: str = "messages") -> list[Message]:
    """All messages of a chat, which are given as a field. Raises RequestError naming what is wrong in it."""
    return [_message(message, f"{field}.{index}") for index, message in enumerate(given)]


def _message(given: Mapping[str, Any], place: str) -> Message:
    others = {name: value for name, value in given.items() if name not in MESSAGE}
    said = {**checked({name: given[name] for name in given if name in MESSAGE}, MESSAGE, f"{place}."), **others}
    role, calls = said.get("role"), said.get("tool_calls", [])
    if "reasoning" in said:
        said = {"reasoning_content": said["reasoning"], **said}
        del said["reasoning"]
    for name, owner in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if said.get(name) and role != owner:
            raise FieldError(f"{place}.{name}", f"must stand in a message of the role {owner}")
    if calls and "content" not in said:
        said["content"] = ""
    for name in ("content", *(["tool_call_id"] if role == "tool" else [])):
        if name not in said:
            raise FieldError(f"{place}.{name}", "is missing")
    said["content"] = text_of(said["content"], _PART, f"{place}.content")
    if calls:
        said["tool_calls"] = [_call(call, f"{place}.tool_calls.{index}") for index, call in enumerate(calls)]
    return {name: value for name, value in said.items() if value != []}


def text_of(content: str | list[Any], table: Table, place: str) -> str:
    """A content as text: a string, or parts whose fields are those of a table, `text` among them."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        where = f"{place}.{index}"
        if not isinstance(part, dict):
            raise FieldError(where, f"must be a part with type and text, got {json.dumps(part):.60}")
        texts.append(checked(part, table, f"{where}.")["text"])
    return "".join(texts)


def _call(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool call of an earlier answer; templates take its arguments as a mapping."""
    call = checked(given, _CALL, f"{where}.")
    function = checked(call["function"], _FUNCTION, f"{where}.function.")
    arguments = arguments_of(function["arguments"])
    if arguments is None:
        raise FieldError(f"{where}.function.arguments", "must be a JSON object, as a string")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def arguments_of(text: str) -> dict[str, Any] | None:
    """A call's arguments as a mapping; None: the text is no JSON object."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
