"""The API's own description: /openapi.json for programs, /docs for people, both made from the classes of the bodies."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import models_json_schema

from eagle_triton import __version__
from eagle_triton.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from eagle_triton.serve.fields import Fields, Refused
from eagle_triton.serve.response_bodies import ItemQuery, ResponseBody, ResponseInput

Schema = dict[str, Any]
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _object(open_: bool = False, **properties: Any) -> Schema:
    """An object with these properties, each a schema, a type or types. open_: it may have others."""
    named = {name: {"type": given} if isinstance(given, (str, list)) else given for name, given in properties.items()}
    return {"type": "object", "properties": named, "required": list(named), "additionalProperties": open_}


def _list(items: Schema | str) -> Schema:
    return {"type": "array", "items": {"type": items} if isinstance(items, str) else items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT, COUNT, IDS = "string", {"type": "integer", "minimum": 0}, _list("integer")
MATCHED = ["string", "integer", "null"]
ENDS = {"enum": ["stop", "length", "tool_calls"]}
ERROR = _object(error=_object(message=TEXT, type=TEXT, param=[TEXT, "null"], code=[TEXT, "null"]))
MODEL = _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, root=TEXT, max_model_len=COUNT)
USAGE = _object(True, prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
CALL = _object(id=TEXT, type={"const": "function"}, function=_object(name=TEXT, arguments=TEXT))
MESSAGE = _object(True, role={"const": "assistant"}, content=[TEXT, "null"], refusal="null")
REASONING = {"reasoning_content": {"type": [TEXT, "null"]}, "reasoning": {"type": TEXT}}
MESSAGE["properties"] |= {"tool_calls": _list(CALL), **REASONING}
SCORE = _object(True, token=TEXT, logprob="number", bytes=_or_null(_list("integer")))
SCORES = _list({**SCORE, "properties": {**SCORE["properties"], "top_logprobs": _list(SCORE)}})
LISTED = _object(
    tokens=_list(TEXT),
    token_logprobs=_list({"type": ["number", "null"]}),
    text_offset=_list(COUNT),
    top_logprobs=_list({"type": ["object", "null"], "additionalProperties": {"type": ["number", "null"]}}),
)
HEAD = {"id": TEXT, "created": COUNT, "model": TEXT, "usage": USAGE}
END = {"index": COUNT, "finish_reason": ENDS, "stop_reason": MATCHED, "matched_stop": MATCHED}
CHAT_CHOICE = _object(True, **END, message=MESSAGE, logprobs=_or_null(_object(content=SCORES, refusal="null")))
CHOICE = _object(True, **END, text=TEXT, logprobs=_or_null(LISTED))
PART = _object(True, type=TEXT, text=TEXT)
ITEMS: dict[str, dict[str, Any]] = {
    "message": {"role": {"const": "assistant"}, "content": _list(PART)},
    "reasoning": {"content": _list(PART), "summary": "array"},
    "function_call": {"call_id": TEXT, "name": TEXT, "arguments": TEXT},
}
STATUS = {"enum": ["completed", "incomplete", "queued", "in_progress", "cancelled", "failed"]}
OUTPUT = [_object(id=TEXT, type={"const": kind}, status=STATUS, **item) for kind, item in ITEMS.items()]
RESPONSE = _object(
    True, id=TEXT, object={"const": "response"}, created_at=COUNT, status=STATUS, model=TEXT,
    output=_list({"anyOf": OUTPUT}),
    usage=_or_null(_object(True, input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)),
)  # fmt: skip

BODIES: dict[str, tuple[str, type[Fields], Schema]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatBody,
                             _object(True, **HEAD, object={"const": "chat.completion"}, choices=_list(CHAT_CHOICE))),
    "/v1/completions": ("Continue prompts", CompletionBody,
                        _object(True, **HEAD, object={"const": "text_completion"}, choices=_list(CHOICE))),
    "/v1/responses": ("Answer items, and keep the answer", ResponseBody, RESPONSE),
    "/v1/responses/input_tokens": ("Count the input tokens of a response", ResponseInput,
                                   _object(object={"const": "response.input_tokens"}, input_tokens=COUNT)),
    "/tokenize": ("The token ids of a text or of messages", TokenizeBody,
                  _object(count=COUNT, max_model_len=COUNT, tokens=IDS, token_strs=_or_null(_list(TEXT)))),
    "/detokenize": ("The text of token ids", DetokenizeBody, _object(prompt=TEXT)),
}  # fmt: skip
ITEM_LIST = _object(object={"const": "list"}, data=_list({"type": "object"}), has_more="boolean",
                    first_id=[TEXT, "null"], last_id=[TEXT, "null"])  # fmt: skip
DELETED = _object(id=TEXT, object={"const": "response"}, deleted={"const": True})
OTHERS: dict[tuple[str, str], tuple[str, Schema | None]] = {  # an answer that is not JSON has no schema
    ("get", "/v1/responses/{name}"): ("Read a kept response", RESPONSE),
    ("delete", "/v1/responses/{name}"): ("Forget a response", DELETED),
    ("get", "/v1/responses/{name}/input_items"): ("Read the items of a response's input", ITEM_LIST),
    ("post", "/v1/responses/{name}/cancel"): ("Cancel a response in the background", RESPONSE),
    ("get", "/v1/models"): ("The served model, in a list", _object(object={"const": "list"}, data=_list(MODEL))),
    ("get", "/v1/models/{name}"): ("The served model", MODEL),
    ("get", "/tokenizer_info"): ("The tokenizer's special tokens and its chat template",
                                 _object(True, tokenizer_class=TEXT, model_max_length=COUNT)),
    ("get", "/version"): ("The server's version", _object(version=TEXT)),
    ("get", "/health"): ("200 while requests are taken, else 503", None),
    ("get", "/metrics"): ("Counts, for Prometheus", None),
}  # fmt: skip


def openapi(root_path: str = "") -> dict[str, Any]:
    """The API in OpenAPI 3.1. root_path: the prefix of its paths."""
    paths: dict[str, dict[str, Any]] = {}
    bodies, inner = models_json_schema(
        [(model, "validation") for _, model, _ in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    for path, (what, model, answer) in BODIES.items():
        body = {"required": True, "content": _json(bodies[model, "validation"])}
        paths[path] = {"post": {"summary": what, "requestBody": body, "responses": _answers(what, answer)}}
        if "stream" in model.model_fields:
            paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = {}
    for (method, path), (what, schema) in OTHERS.items():
        paths.setdefault(path, {})[method] = {"summary": what, "responses": _answers(what, schema)}
        if "{name}" in path:
            kind = {"type": TEXT, **({"pattern": "^resp_"} if "responses" in path else {})}
            named = {"name": "name", "in": "path", "required": True, "schema": kind}
            asked = ItemQuery.model_json_schema()["properties"] if path.endswith("/input_items") else {}
            queries = [{"name": name, "in": "query", "schema": schema} for name, schema in asked.items()]
            paths[path][method]["parameters"] = [named, *queries]
    info = {"title": "eagle_triton", "version": __version__}
    parts = {"paths": paths, "components": {"schemas": inner["$defs"]}}
    return {"openapi": "3.1.0", "info": info, "servers": [{"url": root_path or "/"}], **parts}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _answers(what: str, schema: Schema | None) -> dict[str, Any]:
    refused = {"4XX": "The request was refused", "5XX": "The request failed, or the server is shutting down"}
    errors = {status: {"description": why, "content": _json(ERROR)} for status, why in refused.items()}
    return {"200": {"description": what, **({} if schema is None else {"content": _json(schema)})}, **errors}


def rows(model: type[Fields]) -> Iterator[tuple[str, str, str, str]]:
    """The fields of a body in Markdown: name, origin, values, and what the field does."""
    shown = model.model_json_schema()["properties"]
    for name, field in sorted(model.model_fields.items(), key=lambda item: not item[1].is_required()):
        why = next((one.why for one in field.metadata if isinstance(one, Refused)), None)
        does = field.description if why is None else f"nothing else is offered: {why}"
        yield name, shown[name].get("x-origin", "OpenAI"), _values(shown[name]), does or ""


def _values(schema: Schema) -> str:
    """The values of a field, without null."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_values(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if listed := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(f"`{json.dumps(one)}`" for one in listed)
    if schema.get("type") == "array":
        return "`[]`" if schema.get("maxItems") == 0 else f"array of {_values(schema['items'])}"
    kind = schema.get("type", "object" if schema.keys() & {"$ref", "oneOf"} else "any")
    return f"{kind} {', '.join(f'{sign} {schema[name]}' for name, sign in BOUNDS.items() if name in schema)}".rstrip()


def page() -> str:
    """The API as a page that loads nothing else."""
    parts = []
    for path, (what, model, _) in BODIES.items():
        parts.append(f"<h2>POST {path}</h2><p>{what}.</p><table>")
        for row in rows(model):
            parts.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>")
        parts.append("</table>")
    parts += [f"<h2>{method.upper()} {path}</h2><p>{what}.</p>" for (method, path), (what, _) in OTHERS.items()]
    style = (
        "body{font:15px system-ui;max-width:60em;margin:2em auto;padding:0 1em}td{padding:.2em .8em;vertical-align:top}"
    )
    head = f"<meta charset=utf-8><title>eagle_triton's API</title><style>{style}</style>"
    return f"<!doctype html>{head}<h1>eagle_triton {__version__}</h1>{''.join(parts)}"
