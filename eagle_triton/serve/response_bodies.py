"""The bodies of /v1/responses: their fields and items, and items as messages of a chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, TypeAdapter, model_validator
from typing_extensions import Required, TypedDict

from eagle_triton.serve.bodies import Effort, Generation, ServedModel, TemplateFields, Text, Top
from eagle_triton.serve.fields import CLOSED, Fields, Listed, Refused, about, wrong
from eagle_triton.serve.messages import Arguments, Message, call_of, joined
from eagle_triton.serve.response_format import FlatFormat
from eagle_triton.serve.tools import FlatToolFields

PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of ids
LOGPROBS = "message.output_text.logprobs"


class _Part(TypedDict, total=False):
    type: Required[Literal["input_text", "output_text", "text", "reasoning_text"]]
    text: Required[str]
    annotations: list[Any] | None
    logprobs: list[Any] | None


_Content = Annotated[str | Listed[_Part], AfterValidator(joined)]


class _Item(TypedDict, total=False):
    id: str | None
    type: str | None
    status: str | None


class _MessageItem(_Item, total=False):
    role: Required[Literal["system", "developer", "user", "assistant"]]
    content: Required[_Content]
    phase: str | None


class _CallItem(_Item, total=False):
    call_id: Required[str]
    name: Required[str]
    arguments: Required[Arguments]


class _ResultItem(_Item, total=False):
    call_id: Required[str]
    output: Required[_Content]


class _ReasoningItem(_Item, total=False):
    content: _Content | None
    summary: Annotated[list[Any] | None, Field(max_length=0), Refused("reasoning is reported in full")]
    encrypted_content: Annotated[None, Refused("reasoning is text")]


def _kind(item: Any) -> str:
    return (item.get("type") or "message") if isinstance(item, dict) else "message"


Item = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_CallItem, Tag("function_call")]
    | Annotated[_ResultItem, Tag("function_call_output")]
    | Annotated[_ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
ITEM: TypeAdapter[Any] = TypeAdapter(Item, config=CLOSED)


class TextFields(Fields):
    """The options of a response's text."""

    format: FlatFormat | None = about("the answer matches it")
    verbosity: Annotated[Literal["medium"] | None, Refused("the model decides how much it writes")] = None


class ReasoningFields(Fields):
    """The options of a response's reasoning."""

    effort: Effort | None = about("as `reasoning_effort` in a chat")
    summary: Annotated[None, Refused("reasoning is reported in full")] = None
    generate_summary: Annotated[None, Refused("reasoning is reported in full")] = None


class ResponseInput(ServedModel, TemplateFields, FlatToolFields):
    """The fields of /v1/responses/input_tokens: the input of a response."""

    input: Text | Annotated[Listed[Item], Field(min_length=1)] = about(
        "a string, or messages, tool calls and their results", default=...
    )
    instructions: str | None = about("a system message before all others; the next response does not keep it")
    previous_response_id: str | None = about("continue the conversation of that response")
    reasoning: ReasoningFields | None = about("`effort`, as `reasoning_effort` in a chat")
    text: TextFields | None = about(
        '`format`: `{"type": "json_object"}`, or `{"type": "json_schema", "name", "schema", "strict"}`, as '
        "`response_format` in a chat"
    )
    truncation: Literal["disabled"] | None = about("an input that is too long is refused")
    conversation: Annotated[None, Refused("`previous_response_id` continues a conversation")] = None
    prompt: Annotated[None, Refused("no prompts are stored")] = None


class ResponseBody(Generation, ResponseInput):
    """Of /v1/responses."""

    store: bool | None = about("false: do not keep this response. The last 1000 are kept in memory")
    max_output_tokens: int | None = about("all that fit by default", ge=1)
    background: bool | None = about(
        "true: return at once with the status `queued`; `GET` reads the response later. Not with `stream`, nor with "
        "`store` false"
    )
    include: Listed[Literal["message.output_text.logprobs"]] | None = about(
        "report the log-probability of each token of a message's text, as `logprobs` in a chat"
    )
    top_logprobs: Top | None = about("with `include`: report this many likeliest tokens in each place")
    max_tool_calls: Annotated[None, Refused("the server runs no tools")] = None

    @model_validator(mode="after")
    def _response(self) -> ResponseBody:
        if self.background and self.store is False:
            raise wrong("background", "can only be used when `store` is true")
        if self.background and self.stream:
            raise wrong("background", "must come without stream=true")
        if self.top_logprobs and not self.include:
            raise wrong("top_logprobs", f'must come with include=["{LOGPROBS}"]')
        return self


class ItemQuery(Fields):
    """The query of /v1/responses/ID/input_items."""

    after: str | None = about("the id of the item after which the list begins")
    limit: Annotated[int, Field(strict=False, ge=1, le=100)] = about("the most items to return", default=20)
    order: Literal["asc", "desc"] = about("desc: the last item comes first", default="desc")


# --- items ---


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Items as messages of a chat. Calls that follow each other become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in given:
        kind, content = _kind(item), item.get("content", item.get("output"))
        if kind == "reasoning":
            thought += content or ""
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message":
            messages.append({"role": item["role"], "content": content})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = call_of(item["call_id"], item["name"], item["arguments"])
            messages[-1].setdefault("tool_calls", []).append(call)
        if thought and messages and messages[-1]["role"] == "assistant" and kind != "reasoning":
            messages[-1]["reasoning_content"], thought = thought, ""
    return messages


def listed(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The input as items with ids, in the form of output."""
    items = []
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind, facts = _kind(item), {name: value for name, value in item.items() if value is not None}
        if kind == "function_call":
            facts["arguments"] = json.dumps(facts["arguments"], ensure_ascii=False)
        elif kind != "function_call_output":
            text_type = "output_text" if item.get("role") == "assistant" else "input_text"
            part = {"type": "reasoning_text" if kind == "reasoning" else text_type, "text": facts.get("content", "")}
            facts["content"] = [{**part, "annotations": []} if text_type == "output_text" else part]
            facts |= {"summary": []} if kind == "reasoning" else {}
        items.append({"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "status": "completed", **facts, "type": kind})
    return items
