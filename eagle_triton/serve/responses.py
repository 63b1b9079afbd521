"""POST /v1/responses: its body, read like a chat's, and its answers, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from eagle_triton.engine.scheduler.requests import Piece, Request
from eagle_triton.inference.session import Completion
from eagle_triton.serve.answer_parts import ARGUMENTS, CALL, CONTENT, END
from eagle_triton.serve.answers import PADDED, Choice, Place, event, whole_piece
from eagle_triton.serve.bodies import Body, body_of
from eagle_triton.serve.drafters import Drafters
from eagle_triton.serve.errors import FieldError, RequestError
from eagle_triton.serve.fields import validated
from eagle_triton.serve.messages import Message
from eagle_triton.serve.prompts import PromptReader
from eagle_triton.serve.response_bodies import (
    ITEM,
    PREFIXES,
    ItemQuery,
    ResponseBody,
    ResponseInput,
    TextFields,
    listed,
    messages_of,
)
from eagle_triton.serve.response_format import format_grammar
from eagle_triton.serve.tools import read_tools

log = logging.getLogger(__name__)

KEPT = 1000  # responses
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # the part that an item's content has


@dataclass
class Kept:
    """A kept response. messages: the conversation up to its end, without instructions. items: of its input. task: makes
    the response in the background."""

    response: dict[str, Any]
    messages: list[Message]
    items: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None


class ResponseStore:
    """The last `KEPT` responses, in memory."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}  # the oldest first

    def put(self, kept: Kept) -> None:
        """Keep a response. If there are too many, drop the oldest, and end it if it still runs."""
        self._kept[kept.response["id"]] = kept
        if len(self._kept) > KEPT:
            self.drop(next(iter(self._kept)))

    def get(self, name: str, param: str | None = None) -> Kept:
        """A kept response. Raises RequestError: 400 if the id is malformed, 404 if the response is not kept. param: the
        field with the id."""
        if not name.startswith("resp_"):
            raise RequestError(400, f"a response's id begins with resp_, got {name!r:.100}", param)
        if name not in self._kept:
            raise RequestError(404, f"Response with id {name!r:.100} not found: the server keeps the last {KEPT} in "
                               "memory", param, "response_not_found")  # fmt: skip
        return self._kept[name]

    def drop(self, name: str) -> None:
        """Forget a response, and end it if it still runs. Raises as `get`."""
        if (task := self.get(name).task) is not None:
            task.cancel()
        del self._kept[name]

    def input_items(self, name: str, query: Mapping[str, Any]) -> dict[str, Any]:
        """A page of the items of a response's input. Raises as `get`, and RequestError for a wrong query."""
        asked, items = validated(ItemQuery, query), self.get(name).items
        items = items if asked.order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if asked.after is not None and asked.after not in ids:
            raise FieldError("after", f"must be the id of an input item, got {asked.after!r:.100}")
        first = 0 if asked.after is None else ids.index(asked.after) + 1
        data = items[first : first + asked.limit]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return {"object": "list", "data": data, **ends, "has_more": first + len(data) < len(items)}

    def cancel(self, name: str) -> dict[str, Any]:
        """End a response in the background. Raises as `get`, and RequestError if it is not in the background."""
        kept = self.get(name)
        if not kept.response["background"]:
            raise RequestError(400, "Cannot cancel a synchronous response: this needs background=true")
        if kept.task is not None and kept.task.cancel():
            kept.response["status"] = "cancelled"
        return kept.response


def read_response(given: Mapping[str, Any], store: ResponseStore) -> Body:
    """The body of /v1/responses. Raises RequestError with the field's name."""
    asked = validated(ResponseBody, given)
    form = None if asked.text is None else asked.text.format
    grammar = None if form is None else format_grammar(form)
    return body_of(
        asked,
        {} if grammar is None else {"text": grammar},
        logprobs=asked.top_logprobs or 0 if asked.include else None,
        of_response=True,
        **_prompt(asked, store),
    )


def read_response_input(given: Mapping[str, Any], store: ResponseStore) -> Body:
    """The body of /v1/responses/input_tokens. Raises RequestError with the field's name."""
    asked = validated(ResponseInput, given)
    return Body(asked, **_prompt(asked, store))


def _prompt(asked: ResponseInput, store: ResponseStore) -> dict[str, Any]:
    """The conversation that a response answers, as fields of `Body`."""
    messages: list[Message] = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    if asked.previous_response_id is not None:
        before = store.get(asked.previous_response_id, "previous_response_id")
        if before.response["status"] in ("queued", "in_progress"):
            raise FieldError("previous_response_id", "names a response that still runs: wait until it has ended")
        messages += before.messages
    effort = None if asked.reasoning is None else asked.reasoning.effort
    return {"messages": [*messages, *messages_of(asked.input)], "effort": effort, "tools": read_tools(asked)}


class ResponseAnswer:
    """The answer to a body of /v1/responses, with the methods of an `Answer`."""

    def __init__(
        self,
        body: Body,
        requests: Sequence[Request],
        model: str,
        reader: PromptReader,
        drafters: Drafters,
        store: ResponseStore,
    ) -> None:
        """requests: exactly one. store: keeps the response."""
        assert body.messages is not None, "a response's body has messages"
        self._body, self._store = body, store
        self._messages_before = body.messages[body["instructions"] is not None :]
        self._items = listed(body["input"])
        (self._request,) = requests
        self._choice = Choice(body, 0, self._request, reader, drafters)
        self.id = f"resp_{uuid.uuid4().hex}"
        self._head = self._new_head(model)
        self._output: list[dict[str, Any]] = []  # items; the last may be unfinished
        self._open = False  # whether the last item is unfinished
        self._number = 0  # of the next event

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        self._follow(whole_piece(self._request, completions[0]))
        return self._ended(completions[0])

    def begin(self) -> list[bytes]:
        """The first events of a stream."""
        return [self._event(f"response.{what}", response=self._response()) for what in ("created", "in_progress")]

    def chunk(self, index: int, piece: Piece) -> list[bytes]:
        """The events of a piece."""
        events = self._follow(piece)
        if piece.completion is not None:
            response = self._ended(piece.completion)
            events += [self._event(f"response.{response['status']}", response=response), b"data: [DONE]\n\n"]
        return events

    def begin_in_background(self, pieces: AsyncGenerator[tuple[int, Piece], None]) -> dict[str, Any]:
        """The response before its first piece. It is kept, and continues in the background."""

        async def go_on() -> None:
            try:
                async with aclosing(pieces):
                    async for place, piece in pieces:
                        queued["status"] = "in_progress"
                        self.chunk(place, piece)
            except Exception as error:  # no request waits for the error
                log.exception("a response in the background has failed")
                why = error.message if isinstance(error, RequestError) else "the server has failed; see its log"
                queued.update(status="failed", error={"code": "server_error", "message": why})

        queued = self._response("queued")
        self._store.put(Kept(queued, self._messages_before, self._items, asyncio.ensure_future(go_on())))
        return queued

    def failed(self, error: RequestError) -> bytes:
        """The event of an error in a stream."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _follow(self, piece: Piece) -> list[bytes]:
        """Add a piece to the output. Returns its events."""
        events = []
        for kind, text, places in self._choice.read(piece):
            if kind == CALL:
                events += [*self._close(), *self._begin_item("function_call", name=text)]
            elif kind == ARGUMENTS:
                self._output[-1]["arguments"] += text
                events.append(self._of_item("response.function_call_arguments.delta", delta=text))
            elif kind == END:
                events += self._close()
            else:
                events += self._follow_text(kind == CONTENT, text, places)
        if piece.completion is not None:
            events += self._close("incomplete" if piece.completion.finished == "length" else "completed")
        return events

    def _follow_text(self, content: bool, text: str, places: Sequence[Place]) -> list[bytes]:
        """Add content or reasoning. places: the tokens of content."""
        events, item = [], "message" if content else "reasoning"
        if text and not (self._open and self._output[-1]["type"] == item):
            events += [*self._close(), *self._begin_item(item)]
        scored = {"logprobs": self._choice.scored(places)} if content else {}
        if self._open:
            (content_part,) = self._output[-1]["content"]
            content_part["text"] += text
            if content:
                content_part["logprobs"] += scored["logprobs"]
        if text:
            events.append(self._of_item(f"response.{PARTS[item]}.delta", content_index=0, delta=text, **scored))
        return events

    def _begin_item(self, kind: str, name: str = "") -> list[bytes]:
        """Begin an item of the output. name: of the called function."""
        own: dict[str, dict[str, Any]] = {
            "message": {"role": "assistant", "content": []},
            "reasoning": {"summary": [], "content": []},
            "function_call": {"call_id": self._choice.call_id(), "name": name, "arguments": ""},
        }
        item = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **own[kind]}
        self._output.append(item)
        self._open = True
        events = [self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)]
        if (part := PARTS.get(kind)) is not None:
            extra: dict[str, Any] = {"annotations": [], "logprobs": []} if part == "output_text" else {}
            item["content"].append({"type": part, "text": "", **extra})
            events.append(self._of_item("response.content_part.added", content_index=0, part=item["content"][0]))
        return events

    def _close(self, status: str = "completed") -> list[bytes]:
        """End the last item of the output, if it is unfinished."""
        if not self._open:
            return []
        self._open, item, events = False, self._output[-1], []
        item["status"] = status
        if item["type"] == "function_call":
            call = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._of_item("response.function_call_arguments.done", **call))
        else:
            (part,) = item["content"]
            done = {"content_index": 0, **{name: part[name] for name in ("text", "logprobs") if name in part}}
            events.append(self._of_item(f"response.{part['type']}.done", **done))
            events.append(self._of_item("response.content_part.done", content_index=0, part=part))
        events.append(self._event("response.output_item.done", output_index=len(self._output) - 1, item=item))
        return events

    def _of_item(self, kind: str, **facts: Any) -> bytes:
        """An event of the last item."""
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **facts)

    def _event(self, kind: str, **facts: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **facts}
        self._number += 1
        if self._body.options.include_obfuscation and kind.endswith(".delta"):
            body["obfuscation"] = secrets.token_hex(PADDED)[: PADDED - len(facts["delta"]) % PADDED]
        return event(body, kind)

    def _ended(self, completion: Completion) -> dict[str, Any]:
        """The finished response, which is kept."""
        cut = completion.finished == "length"
        prompt, used = len(self._request.prompt), self._choice.used
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": completion.statistics.found_tokens,
                "cache_write_tokens": prompt - completion.statistics.found_tokens,
            },
            "output_tokens": used,
            "output_tokens_details": {"reasoning_tokens": self._choice.thought},
            "total_tokens": prompt + used,
        }
        response = self._response("incomplete" if cut else "completed", usage)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        response["completed_at"] = None if cut else int(time.time())
        if response["store"]:
            before = self._messages_before
            items = []
            for item in self._output:
                with suppress(ValidationError):  # a call that was cut off
                    items.append(ITEM.validate_python(item))
            self._store.put(Kept(response, [*before, *messages_of(items)], self._items))
        return response

    def _response(self, status: str = "in_progress", usage: Any = None) -> dict[str, Any]:
        return {**self._head, "status": status, "output": [dict(item) for item in self._output], "usage": usage}

    def _new_head(self, model: str) -> dict[str, Any]:
        """The fields that do not change while a response is made."""
        body, sampling = self._body, self._request.sampling
        defaults: dict[str, Any] = {
            "instructions": None, "max_output_tokens": None, "previous_response_id": None, "metadata": {},
            "parallel_tool_calls": True, "store": True, "user": None, "background": False,
            "safety_identifier": None, "prompt_cache_key": None,
        }  # fmt: skip
        functions = [tool["function"] for tool in body["tools"] or ()]
        choice, text = body["tool_choice"] or "auto", body["text"] or TextFields()
        verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
        return {
            "id": self.id, "object": "response", "created_at": int(time.time()), "completed_at": None, "model": model,
            "status": "in_progress", "error": None, "incomplete_details": None,
            **{name: value if body[name] is None else body[name] for name, value in defaults.items()},
            "tools": [{"type": "function", "description": None, "parameters": None, "strict": False, **function}
                      for function in functions],
            "tool_choice": {"type": "function", **choice["function"]} if isinstance(choice, dict) else choice,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_logprobs": body.logprobs or 0,
            "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
            "reasoning": {"effort": body.effort, "summary": None}, "service_tier": "default",
            "text": {"format": text.format or {"type": "text"}, **verbosity},
            "truncation": "disabled", "max_tool_calls": None,
        }  # fmt: skip
