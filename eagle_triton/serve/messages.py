"""Messages of a chat, in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Json
from typing_extensions import Required, TypedDict

from eagle_triton.serve.fields import CLOSED, OPEN, Listed, Refused, wrong

Message = dict[str, Any]
"""role, and content as text. If given: name, tool_calls with arguments as mappings, tool_call_id, reasoning_content,
and any other fields that a chat template may read."""

ROLES = ("system", "developer", "user", "assistant", "tool")  # a chat template may read others


class _TextPart(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]  # the message is open
    type: Literal["text"]
    text: str


def joined(content: str | list[Any]) -> str:
    """Content as text. content: a string, or parts with text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


Arguments = Annotated[Json[dict[str, Any]], BeforeValidator(lambda text: "{}" if text == "" else text)]
"""A call's arguments: in a body a string, in a template a mapping."""


class _Function(TypedDict):
    name: str
    arguments: Arguments


class _Call(TypedDict, total=False):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    id: Required[str]
    type: Literal["function"] | None
    function: Required[_Function]
    index: int | None


def call_of(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a function."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class _Message(TypedDict, total=False):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    role: Required[Annotated[str, Field(min_length=1)]]
    content: Annotated[str | Listed[_TextPart], AfterValidator(joined)] | None
    name: str | None
    tool_calls: Listed[Annotated[_Call, AfterValidator(lambda call: call_of(call["id"], **call["function"]))]] | None
    tool_call_id: str | None
    reasoning_content: str | None
    reasoning: str | None  # another name of reasoning_content
    refusal: Annotated[None, Refused("a refusal is part of content")]
    annotations: Annotated[list[Any] | None, Field(max_length=0), Refused("messages are text")]
    audio: Annotated[None, Refused("messages are text")]
    function_call: Annotated[None, Refused("`tool_calls` took its place")]


MESSAGE = _Message.__annotations__.keys()


def _checked(given: Mapping[str, Any]) -> Message:
    message = {name: value for name, value in given.items() if value not in (None, [])}
    if "reasoning" in message:
        message = {"reasoning_content": message["reasoning"], **message}
        del message["reasoning"]
    for name, owner in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if message.get(name) and message["role"] != owner:
            raise wrong(name, f"must be in a message of the role {owner}")
    if "tool_calls" in message:
        message.setdefault("content", "")
    for name in ("content", *(["tool_call_id"] if message["role"] == "tool" else [])):
        if name not in message:
            raise wrong(name, "is missing")
    return message


MessageField = Annotated[_Message, AfterValidator(_checked)]
