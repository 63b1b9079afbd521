"""The API as it describes itself: /openapi.json for programs, /docs for people. Both come from the tables of fields."""

from __future__ import annotations

import html
from typing import Any

from eagle_triton import __version__
from eagle_triton.serve import fields
from eagle_triton.serve.fields import Table

BODIES: dict[str, tuple[str, Table]] = {
    "/v1/chat/completions": ("An answer to messages", fields.CHAT),
    "/v1/completions": ("What follows prompts", fields.COMPLETION),
    "/v1/responses": ("An answer to items, which is kept", fields.RESPONSE),
    "/tokenize": ("The token ids of a text or of messages", fields.TOKENIZE),
    "/detokenize": ("The text of token ids", fields.DETOKENIZE),
}
OTHERS = {
    ("get", "/v1/responses/{name}"): "A response that is kept",
    ("delete", "/v1/responses/{name}"): "Forget a response",
    ("get", "/v1/models"): "What is served",
    ("get", "/v1/models/{name}"): "The same by its name",
    ("get", "/version"): "The server's version",
    ("get", "/health"): "200 while requests are taken, else 503",
    ("get", "/metrics"): "Counts, for Prometheus",
}


def openapi() -> dict[str, Any]:
    """The API in OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for path, (what, table) in BODIES.items():
        content = {"application/json": {"schema": fields.schema(table)}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"summary": what, "requestBody": body, "responses": {"200": {"description": what}}}}
    for (method, path), what in OTHERS.items():
        paths.setdefault(path, {})[method] = {"summary": what, "responses": {"200": {"description": what}}}
        if "{name}" in path:
            named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            paths[path][method]["parameters"] = [named]
    return {"openapi": "3.1.0", "info": {"title": "eagle_triton", "version": __version__}, "paths": paths}


def page() -> str:
    """The API as a page that fetches nothing."""
    parts = []
    for path, (what, table) in BODIES.items():
        parts.append(f"<h2>POST {path}</h2><p>{what}.</p><table>")
        for name, field in table.items():
            says = html.escape(fields.says(field).replace("`", ""))
            parts.append(f"<tr><td><code>{name}</code></td><td>{field.origin}</td><td>{says}</td></tr>")
        parts.append("</table>")
    parts += [f"<h2>{method.upper()} {path}</h2><p>{what}.</p>" for (method, path), what in OTHERS.items()]
    style = (
        "body{font:15px system-ui;max-width:60em;margin:2em auto;padding:0 1em}td{padding:.2em .8em;vertical-align:top}"
    )
    head = f"<meta charset=utf-8><title>eagle_triton's API</title><style>{style}</style>"
    return f"<!doctype html>{head}<h1>eagle_triton {__version__}</h1>{''.join(parts)}"
