"""The endpoints. All code here runs in the event loop's thread. The engine has its own."""

from __future__ import annotations

import asyncio
import hmac
import html
import ipaddress
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_triton import __version__
from eagle_triton.engine.scheduler.requests import NAN, Piece
from eagle_triton.serve import description
from eagle_triton.serve.answers import Answer
from eagle_triton.serve.bodies import Body, DetokenizeBody, read_chat, read_completion, read_tokenize
from eagle_triton.serve.drafters import Drafters
from eagle_triton.serve.engine_client import EngineClient, Ticket
from eagle_triton.serve.errors import FieldError, RequestError
from eagle_triton.serve.fields import read_json, validated
from eagle_triton.serve.prompts import PromptReader
from eagle_triton.serve.responses import ResponseAnswer, ResponseStore, read_response, read_response_input

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20  # of a body
BODY_SECONDS = 60  # for a client to send a body
LONG = 64 << 10  # bytes; longer bodies are parsed in another thread, so that short ones need not wait
PAGE = Path(__file__).parent / "page.html"
MAX_READ = 16 * MAX_BYTES  # bytes of a refused body, before the connection is closed
AnyAnswer = Answer | ResponseAnswer
REPORTED = ("user", "safety_identifier", "metadata")  # fields of a body that the log shows
_LEFT = RequestError(499, "the client has left")
_FAILED = "the server has failed; see its log"


@dataclass(frozen=True)
class Service:
    """What the endpoints use.

    model: its name for clients. api_key: requests must send it; None: no key. log_prompts: log prompts and answers.
    root: the model's directory or hub id; None: `model`. hosts: host names by which a request without a key may call
    the server; "*": any. origins: web origins that may call it from a browser; "*": all. root_path: the prefix of all
    paths at a proxy. The proxy may keep it in paths or take it off.
    """

    engine: EngineClient
    prompts: PromptReader
    drafters: Drafters
    model: str
    api_key: str | None = None
    log_prompts: bool = False
    root: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    root_path: str = ""
    created: int = field(default_factory=lambda: int(time.time()))


def make_app(service: Service) -> FastAPI:
    """The application. The caller starts the engine before the first request, and closes it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.root_path = service.root_path  # uvicorn's own option knows only proxies that take the prefix off
    for kind in (RequestError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    if service.origins:
        headers = ["X-Request-Id", "Retry-After"]
        app.add_middleware(CORSMiddleware, allow_origins=service.origins, allow_methods=["*"], allow_headers=["*"],
                           expose_headers=headers)  # fmt: skip
    app.add_middleware(_RequestIds)
    app.include_router(_open_routes(service))
    app.include_router(_routes(service))
    return app


class _RequestIds:
    """Adds X-Request-Id to each answer, errors included: the id of the request, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = Headers(scope=scope).get("x-request-id")
                MutableHeaders(scope=message).setdefault("X-Request-Id", given or uuid.uuid4().hex)
            await send(message)

        await self._app(scope, receive, send_named)


def _open_routes(service: Service) -> APIRouter:
    """Endpoints that need no key."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        if not service.engine.alive:
            raise RequestError(503, service.engine.refusal)
        return Response(status_code=200)

    fixed: dict[str, Callable[[], Response]] = {
        "/": lambda: HTMLResponse(_page(service.root_path)),
        "/docs": lambda: HTMLResponse(description.page()),
        "/openapi.json": lambda: JSONResponse(description.openapi(service.root_path)),
        "/version": lambda: JSONResponse({"version": __version__}),
    }
    for path, answer in fixed.items():
        routes.add_api_route(path, answer)
    return routes


def _page(root_path: str) -> str:
    """The page. Its requests use relative paths, also if a proxy shows it at its prefix without a final slash."""
    text = PAGE.read_text(encoding="utf-8")
    return text.replace("<head>", f'<head>\n<base href="{html.escape(root_path)}/">', 1) if root_path else text


def _routes(service: Service) -> APIRouter:
    routes = APIRouter(dependencies=[Depends(_checker(service)), Depends(_refuse_query)])
    responses = ResponseStore()
    short, long = (ThreadPoolExecutor(1, thread_name_prefix="tokenizer") for _ in range(2))

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(service.engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return _model(service)

    def reader_of(raw: bytes) -> ThreadPoolExecutor:
        return short if len(raw) <= LONG else long

    def endpoint(
        read: Callable[[Mapping[str, Any]], Body], kind: Callable[..., AnyAnswer]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Add a POST endpoint. read: makes a `Body` of its JSON. The answer is made by an object of the given class."""

        async def answer(request: Request) -> Response:
            raw = await _bytes_of(request)
            body = read(read_json(raw))
            _check_model(service, body["model"])
            service.engine.check_room(body.samples * max(len(body.prompts), 1))  # before its prompts are tokenized
            asked = await asyncio.get_running_loop().run_in_executor(reader_of(raw), service.prompts.requests, body)
            answer = kind(body, asked, service.model, service.prompts, service.drafters)
            headers = {} if "x-request-id" in request.headers else {"X-Request-Id": answer.id}
            tickets = service.engine.submit(asked)
            service.engine.metrics.samples.observe(body.n)
            pieces = _pieces(service, body, tickets, None if body["background"] else request)
            if isinstance(answer, ResponseAnswer) and body["background"]:
                return JSONResponse(answer.begin_in_background(pieces), headers=headers)
            if not body["stream"]:
                async with aclosing(pieces):
                    ended = {place: piece.completion async for place, piece in pieces if piece.completion is not None}
                return JSONResponse(answer.whole([ended[place] for place in sorted(ended)]), headers=headers)
            events = _events(pieces, tickets, answer)
            first = await anext(events)  # an error before it gives the answer an error status
            headers["Cache-Control"] = "no-cache"
            return _EventStream(_after(first, events), headers=headers, media_type="text/event-stream")

        return answer

    routes.post("/v1/chat/completions")(endpoint(read_chat, Answer))
    routes.post("/v1/completions")(endpoint(read_completion, Answer))
    read, kind = partial(read_response, store=responses), partial(ResponseAnswer, store=responses)
    routes.post("/v1/responses")(endpoint(read, kind))

    async def tokens_of(body: Body, raw: bytes) -> list[int]:
        _check_model(service, body["model"])
        return await asyncio.get_running_loop().run_in_executor(reader_of(raw), service.prompts.tokens, body)

    @routes.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request) -> dict[str, Any]:
        raw = await _bytes_of(request)
        tokens = await tokens_of(read_response_input(read_json(raw), responses), raw)
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    @routes.post("/v1/responses/compact")
    async def compact() -> None:
        raise RequestError(400, "/v1/responses/compact is not offered: the server shortens no conversations. Begin a "
                           "new conversation with the part of this one that you want to keep")  # fmt: skip

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        raw, prompts = await _bytes_of(request), service.prompts
        body = read_tokenize(read_json(raw))
        tokens = await tokens_of(body, raw)
        strings = prompts.tokenizer.convert_ids_to_tokens(tokens) if body["return_token_strs"] else None
        return {"count": len(tokens), "max_model_len": prompts.max_model_len, "tokens": tokens, "token_strs": strings}

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return service.prompts.tokenizer_info()

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        asked = validated(DetokenizeBody, read_json(await _bytes_of(request)))
        _check_model(service, asked.model)
        if (largest := max(asked.tokens, default=0)) >= service.prompts.vocabulary:
            raise FieldError("tokens", f"must lie in 0..{service.prompts.vocabulary - 1}, got {largest}")
        return {"prompt": service.prompts.text(asked.tokens)}

    @routes.api_route("/v1/responses/{name}", methods=["GET", "DELETE"])  # one route, so that a 405 names both methods
    async def response(request: Request, name: str) -> dict[str, Any]:
        if request.method == "GET":
            return responses.get(name).response
        responses.drop(name)
        return {"id": name, "object": "response", "deleted": True}

    @routes.get("/v1/responses/{name}/input_items")
    async def input_items(request: Request, name: str) -> dict[str, Any]:
        return responses.input_items(name, dict(request.query_params))

    @routes.post("/v1/responses/{name}/cancel")
    async def cancel(name: str) -> dict[str, Any]:
        return responses.cancel(name)

    return routes


# --- one request ---


async def _pieces(
    service: Service, body: Body, tickets: list[Ticket], request: Request | None
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pairs of a request's place in the body and a piece, until all requests have ended. Raises RequestError if one
    fails or the client of `request` leaves. Finally cancels the requests that have not ended, and logs each one."""
    leaving = None if request is None else asyncio.ensure_future(_leave(request, tickets[0]))
    if service.log_prompts:
        log.info("request %d: prompt %r", tickets[0].number, body.messages if body.chat else body.prompts)
    try:
        while any(ticket.completion is None for ticket in tickets):
            given = await tickets[0].pieces.get()
            if isinstance(given, RequestError):
                raise given
            place, piece = given
            completion = tickets[place].completion = piece.completion
            if completion is not None and (error := completion.error) is not None:
                param = body.grammar_field if error.startswith("grammar") else None
                raise RequestError(500 if error == NAN else 400, f"the request could not be decoded: {error}", param)
            yield given
    finally:
        if leaving is not None:
            leaving.cancel()
        for ticket in tickets:
            service.engine.cancel(ticket)
            log.info("request %d: %s", ticket.number, _facts(service, body, ticket))


async def _leave(request: Request, ticket: Ticket) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    ticket.pieces.put_nowait(_LEFT)


async def _events(
    pieces: AsyncGenerator[tuple[int, Piece], None], tickets: list[Ticket], answer: AnyAnswer
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. An error after the first event becomes an event."""
    begun, events = False, list[bytes]()
    async with aclosing(pieces):
        try:
            async for given in pieces:
                if not (begun or events):
                    events += answer.begin()
                events += answer.chunk(*given)
                ended = all(ticket.completion is not None for ticket in tickets)
                if events and (ended or tickets[0].pieces.empty()):  # pieces that are here already are sent together
                    begun = True
                    yield b"".join(events)
                    events = []
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, RequestError):
                log.exception("request %d has failed", tickets[0].number)
                error = RequestError(500, _FAILED)
            yield b"".join([*events, answer.failed(error)])


async def _after(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for some in events:
            yield some


class _EventStream(StreamingResponse):
    """Server-sent events. Their generator finds out itself whether the client has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await self.stream_response(send)


def _facts(service: Service, body: Body, ticket: Ticket) -> str:
    """How a request ended, for the log; with its text if `log_prompts` is set."""
    seconds = time.perf_counter() - ticket.came
    user = "".join(f", {name} {body[name]!r:.100}" for name in REPORTED if body[name] is not None)
    completion = ticket.completion
    if completion is None:
        return f"{len(ticket.request.prompt)} prompt tokens, gave up after {seconds:.2f} s{user}"
    counts = f"{len(ticket.request.prompt)} prompt tokens, {len(completion.tokens)} new, {completion.finished}"
    answer = f", answer {completion.text!r}" if service.log_prompts else ""
    return f"{counts}, tau {completion.statistics.tau:.2f}, {seconds:.2f} s{user}{answer}"


# --- checks before a request is read, and refusals ---


def _checker(service: Service) -> Callable[[Request], Awaitable[None]]:
    """Makes the check of each request. With a key, it refuses requests without the key, in a time that does not depend
    on how much of the key is right. Without one, it refuses requests to a host name that is not the server's: another
    site may have pointed its name here (DNS rebinding). An IP address is always allowed."""
    known = {"localhost", *(name.lower() for name in service.hosts)}

    async def check(request: Request) -> None:
        if service.api_key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), service.api_key.encode())
            if not (right and scheme.lower() == "bearer"):
                raise RequestError(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key",
                                   headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
            return
        name = request.url.hostname or ""
        if "*" not in known and name not in known and not _is_address(name):
            raise RequestError(403, f"the host name {name!r:.80} is not allowed: allow it with --allowed-hosts, or set "
                                    "a key with --api-key")  # fmt: skip

    return check


async def _refuse_query(request: Request) -> None:
    """Refuses query parameters where an endpoint does not read them itself, and those that are given twice."""
    names = [name for name, _ in request.query_params.multi_items()]
    if names and not request.url.path.endswith("/input_items"):
        raise FieldError(f"{names[0]:.60}", "is a query parameter, and this endpoint reads none")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FieldError(f"{twice:.60}", "must be given once")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _bytes_of(request: Request) -> bytes:
    """The JSON bytes of a body. Raises RequestError if they are no JSON, too many or too late."""
    try:
        return await asyncio.wait_for(_read_bytes(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise RequestError(408, f"the body must come within {BODY_SECONDS} seconds",
                           headers={"Connection": "close"}) from None  # fmt: skip


async def _read_bytes(request: Request) -> bytes:
    """Read the body to its end even if it is refused: else the client would not read the reason."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    kept, read = bytearray(), 0
    try:
        async for some in request.stream():
            read += len(some)
            if read <= MAX_BYTES:
                kept += some
            elif read > MAX_READ:
                break
    except ClientDisconnect:
        raise _LEFT from None
    if read > MAX_BYTES:
        raise RequestError(413, f"the body must have at most {MAX_BYTES} bytes")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise RequestError(415, f"the body must be sent without Content-Encoding, got {encoding!r:.60}")
    if kind != "application/json":
        raise RequestError(415, f"the body must be of type application/json, got {kind or 'none'!r:.60}")
    return bytes(kept)


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.model):
        raise RequestError(404, f"model {name!r:.100} is not served here, but {service.model!r} is", "model",
                           "model_not_found")  # fmt: skip


def _model(service: Service) -> dict[str, Any]:
    facts = {"created": service.created, "owned_by": "eagle_triton", "max_model_len": service.prompts.max_model_len}
    return {"id": service.model, "object": "model", "root": service.root or service.model, **facts}


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        why = error.param or error.code or "refused"
        log.info("%s %r: %d, %r", request.method, request.url.path, error.status, why)  # %r: in one line
    elif isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path!r:.100}: {error.detail}"
        if error.status_code in (404, 405):
            message += f". Endpoints and their methods are listed at {request.scope.get('root_path', '')}/docs"
        error = RequestError(error.status_code, message, headers=error.headers)
    else:
        error = RequestError(500, _FAILED)
    return JSONResponse(error.body, error.status, error.headers)
