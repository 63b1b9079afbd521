"""The server's requests on their way to the engine and back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eagle_triton.engine.scheduler.requests import Piece, Request
from eagle_triton.inference.session import Completion, Session, StepInfo
from eagle_triton.serve.engine_process import EngineLostError, EngineProcess, LocalEngine
from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.metrics import Metrics

log = logging.getLogger(__name__)

_numbers = itertools.count(1)


@dataclass(eq=False)
class Ticket:
    """A request of the server. place: its number in its body. pieces: of all requests of that body, with their places;
    or the error that ends one."""

    request: Request
    place: int = 0
    pieces: asyncio.Queue[tuple[int, Piece] | RequestError] = field(default_factory=asyncio.Queue)
    number: int = field(default_factory=lambda: next(_numbers))
    came: float = field(default_factory=time.perf_counter)
    entered: float = 0.0  # when it was handed to the engine
    began: float | None = None  # when its first tokens came
    latest: float | None = None  # when its last tokens came
    completion: Completion | None = None  # once its last piece was read


class EngineClient:
    """Takes tickets through an engine, at most one for each of its slots at a time. Others wait in line.

    Its methods run in the event loop's thread. `start` and `close` may be called in any other thread, `drain` also in a
    signal handler. One more thread runs the engine, or listens to its process.
    """

    when_lost: Callable[[], None] | None = None
    """Called in the engine's thread if its process has ended, or if ranks that share the target have lost each other,
    which ends all of them."""

    def __init__(
        self, engine: Callable[[], Session] | EngineProcess, metrics: Metrics, slots: int, max_queue: int
    ) -> None:
        """engine: in a process or in a thread of this one. max_queue: how many further requests may wait."""
        self.metrics, self.slots, self.max_queue = metrics, slots, max_queue
        self._engine = engine if isinstance(engine, EngineProcess) else LocalEngine(engine)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: deque[Ticket] = deque()  # not handed to the engine yet
        self._live: dict[int, Ticket] = {}  # in the engine, by number
        self._queued: set[int] = set()  # waiting in the engine's line; it has seen numbers up to `_known`
        self._known = 0
        self._seconds = 1.0  # per request, an average of the latest ones
        self.lost = False  # ranks have lost each other, or the engine's process has ended
        self._refusal: str | None = None  # why no further request is accepted
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._opened: Future[None] = Future()

    def start(self) -> None:
        """Open a session, and decode until `close`. Raises what opening the session raises."""
        self._thread.start()
        self._opened.result()

    @property
    def alive(self) -> bool:
        """Whether the engine accepts and decodes requests."""
        return self._refusal is None and self._thread.is_alive()

    @property
    def refusal(self) -> str:
        """Why requests are not accepted."""
        return self._refusal or "the engine has stopped"

    def check_room(self, count: int = 1) -> None:
        """Raise RequestError if the line has no room for `count` more (429; 400 if it never has), or if no further
        requests are accepted (503)."""
        if not self.alive:
            raise RequestError(503, self.refusal, code="shutting_down")
        if 1 < count > self.slots + self.max_queue:
            raise RequestError(400, f"n: prompts and samples make {count} answers, but the server has room for at most "
                               f"{self.slots + self.max_queue}", "n")  # fmt: skip
        there = len(self._line) + len(self._live)
        if there + count > self.slots + self.max_queue:
            self.metrics.rejections.inc()
            wait = min(max(1, math.ceil(self._seconds * there / self.slots / 2)), 60)  # a guess
            raise RequestError(429, f"{self.max_queue} requests wait already: try again later", code="queue_full",
                               headers={"Retry-After": str(wait)})  # fmt: skip

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Put the requests of one body in line. Raises as `check_room`."""
        self.check_room(len(requests))
        self._loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[int, Piece] | RequestError] = asyncio.Queue()
        tickets = [Ticket(request, place, pieces) for place, request in enumerate(requests)]
        self._line += tickets
        self._fill()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """End a waiting or running request. Does nothing if it has ended."""
        if self._take(ticket):
            self.metrics.add_end("abort", time.perf_counter() - ticket.came)
            self._fill()

    def drain(self, seconds: float) -> None:
        """Refuse waiting and new requests, and finish the running ones, within `seconds`."""
        self._refusal = "the server is shutting down"
        self._call("drain", seconds)

    def close(self) -> None:
        """End after the current step, and drop unfinished requests."""
        self._refusal = self._refusal or "the server is shutting down"
        self._engine.close()
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread of the engine ---

    def _run(self) -> None:
        try:
            self._engine.run(self._call)
        except BaseException as error:
            if not self._opened.done():
                if not isinstance(error, (ValueError, OSError)):  # their messages reach the person at the command
                    log.exception("the engine cannot be opened")
                self._opened.set_exception(error)
                return
            self._refusal = "the engine has stopped; the server's log has the error"
            self.lost = isinstance(error, EngineLostError)
            log.exception("the engine has stopped")
        finally:
            self._call("end")
        if self.lost and self.when_lost is not None:
            self.when_lost()

    def _call(self, event_name: str, *arguments: Any) -> None:
        """Call a method, by its name, in the event loop's thread."""
        if event_name == "opened":
            self._opened.set_result(None)
        elif self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and no client waits
                self._loop.call_soon_threadsafe(getattr(self, f"_{event_name}"), *arguments)

    # --- messages of the engine ---

    def _stepped(self, info: StepInfo, numbers: list[int | None], queued: list[int], known: int) -> None:
        """A step was done. numbers: of the tickets that got its pieces. queued: those in the engine's line, among the
        first `known`."""
        self._queued, self._known, now = set(queued), known, time.perf_counter()
        self.metrics.add_pieces(info.pieces)
        if info.cache_used is not None and info.pauses is not None:
            self.metrics.set_cache(info.cache_used, info.pauses)
        for number, piece in zip(numbers, info.pieces, strict=True):
            if (completion := piece.completion) is not None:
                self.metrics.add_prompt(completion.statistics)
            if number in self._live:
                self._hand_out(self._live[number], piece, now)
        self._fill()

    def _hand_out(self, ticket: Ticket, piece: Piece, now: float) -> None:
        if piece.tokens:
            if ticket.latest is None:
                ticket.began = now
                self.metrics.first_token.observe(now - ticket.came)
            else:
                self.metrics.between.observe(now - ticket.latest)
            ticket.latest = now
        if piece.completion is not None:
            del self._live[ticket.number]
            self._end_of(ticket, piece.completion.finished, now)
            if piece.completion.error is None:
                self._count_completion(ticket, piece.completion, now)
        ticket.pieces.put_nowait((ticket.place, piece))

    def _count_completion(self, ticket: Ticket, completion: Completion, now: float) -> None:
        entered, began = ticket.entered, now if ticket.began is None else ticket.began
        if (new := len(completion.tokens)) > 1:
            self.metrics.token.observe((now - began) / (new - 1))
        phases = {"queue": entered - ticket.came, "prefill": began - entered, "decode": now - began}
        phases["inference"] = now - entered
        self.metrics.add_completion(ticket.request, completion, phases)

    def _refused(self, number: int, status: int, message: str) -> None:
        """The engine refuses or loses a request."""
        if number in self._live:
            self._refuse([self._live[number]], status, message)

    def _end(self) -> None:
        """The engine has ended."""
        self._turn_away([*self._line, *self._entering()])
        self._refuse([*self._live.values()], 500, self.refusal)

    # --- the line ---

    def _drain(self, seconds: float) -> None:
        self._turn_away([*self._line, *self._entering()])
        assert self._loop is not None
        self._loop.call_later(seconds, lambda: self._turn_away([*self._live.values()]))

    def _turn_away(self, tickets: Sequence[Ticket]) -> None:
        self._refuse(tickets, 503, self.refusal, "shutting_down")

    def _refuse(self, tickets: Sequence[Ticket], status: int, message: str, code: str | None = None) -> None:
        for ticket in tickets:
            if self._take(ticket):
                self._end_of(ticket, "error", time.perf_counter())
                ticket.pieces.put_nowait(RequestError(status, message, code=code))
        self._fill()

    def _take(self, ticket: Ticket) -> bool:
        """Take a ticket out of the line or out of the engine; False if it has ended."""
        if ticket in self._line:
            self._line.remove(ticket)
            return True
        if self._live.pop(ticket.number, None) is None:
            return False
        self._engine.put((ticket.number, None))
        return True

    def _end_of(self, ticket: Ticket, reason: str, now: float) -> None:
        self._seconds += 0.1 * (now - ticket.came - self._seconds)
        self.metrics.add_end(reason, now - ticket.came)

    def _fill(self) -> None:
        """Hand waiting requests to the engine while it has slots."""
        while self._line and len(self._live) < self.slots and self._refusal is None:
            ticket = self._line.popleft()
            ticket.entered = time.perf_counter()
            self._live[ticket.number] = ticket
            self._engine.put((ticket.number, ticket.request))
        entering = len(self._entering())
        self.metrics.set_waiting(entering + len(self._line))
        self.metrics.running.set(len(self._live) - entering)
        if not self._live:  # no step will say so
            self.metrics.cache_used.set(0)

    def _entering(self) -> list[Ticket]:
        """Tickets in the engine's line, or on their way there."""
        return [ticket for number, ticket in self._live.items() if number in self._queued or number > self._known]
