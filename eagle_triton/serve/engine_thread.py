"""The one thread that touches the model: orders come to it by a queue, and each request gets its pieces by another."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from eagle_triton.engine.ranks import BETWEEN_SECONDS
from eagle_triton.engine.scheduler.requests import Piece, Request
from eagle_triton.inference.session import Completion, Session
from eagle_triton.inference.shared_session import SharedSession
from eagle_triton.serve.engine_process import EngineLostError, RemoteSession
from eagle_triton.serve.errors import RequestError
from eagle_triton.serve.metrics import Metrics

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = BETWEEN_SECONDS / 3

_numbers = itertools.count(1)


@dataclass(eq=False)
class Ticket:
    """A request of the server. place: its number among those of one body. pieces: what these gave, with the place of
    each, or why one gives no more."""

    request: Request
    place: int = 0
    pieces: asyncio.Queue[tuple[int, Piece] | RequestError] = field(default_factory=asyncio.Queue)
    number: int = field(default_factory=lambda: next(_numbers))
    came: float = field(default_factory=time.perf_counter)
    entered: float | None = None  # when it was handed to the session
    began: float | None = None  # when its first tokens came
    latest: float | None = None  # when its last tokens came
    completion: Completion | None = None  # once its last piece was read


AnySession: TypeAlias = Session | RemoteSession
Order: TypeAlias = Callable[[AnySession], None]
Given: TypeAlias = list[tuple[Ticket, Piece | RequestError]]


class EngineThread:
    """Decodes tickets in a session that it alone uses, here or in another process.

    `submit` and `cancel` are called in the event loop's thread, and tickets get their pieces there. `drain` and `close`
    may be called in any thread, `drain` also in a signal handler.
    """

    when_lost: Callable[[], None] | None = None
    """Called in the thread when the engine's process has ended, or when ranks that share the target have lost each
    other, which ends all of them."""

    def __init__(self, open_session: Callable[[], AnySession], metrics: Metrics, slots: int, max_queue: int) -> None:
        """open_session: called in the thread, at first and after a step that failed. slots: those of a session;
        max_queue: how many further requests may wait."""
        self.metrics, self.slots, self.max_queue = metrics, slots, max_queue
        self._open = open_session
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()  # for the thread; None: end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets: set[Ticket] = set()  # that have not ended; used in the event loop's thread
        self._seconds = 1.0  # that a request takes, by the last ones
        self.lost = False  # ranks have lost each other, or the engine's process has ended
        self._refusal: str | None = None  # why no request is taken any more
        self._line: deque[Ticket] = deque()  # not submitted to the session yet; used in this thread, as all below
        self._live: dict[int, Ticket] = {}  # by the session's index, at most as many as slots
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._opened: Future[None] = Future()

    # --- for the event loop's thread ---

    def start(self) -> None:
        """Open the session, and decode until `close`. Raises what opening the session raises."""
        self._thread.start()
        self._opened.result()

    @property
    def alive(self) -> bool:
        """Whether requests are taken and decoded."""
        return self._refusal is None and self._thread.is_alive()

    @property
    def refusal(self) -> str:
        """Why requests are not taken, if they are not."""
        return self._refusal or "the engine has stopped"

    def check_room(self, count: int = 1) -> None:
        """Raise RequestError if the line has no room for `count` more (429; 400 if it never has), or no request is
        taken any more (503)."""
        if not self.alive:
            raise RequestError(503, self.refusal, code="shutting_down")
        if 1 < count > self.slots + self.max_queue:
            raise RequestError(400, f"prompts and samples are {count} answers, and the server has room for "
                               f"{self.slots + self.max_queue}", "n")  # fmt: skip
        if len(self._tickets) + count > self.slots + self.max_queue:
            self.metrics.rejections.inc()
            raise RequestError(429, f"{self.max_queue} requests wait already, try again later", code="queue_full",
                               headers={"Retry-After": str(self._retry_after())})  # fmt: skip

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Put the requests of one body in line. Raises as `check_room`."""
        self.check_room(len(requests))
        self._loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[int, Piece] | RequestError] = asyncio.Queue()
        tickets = [Ticket(request, place, pieces) for place, request in enumerate(requests)]
        for ticket in tickets:
            self._tickets.add(ticket)
            self._orders.put(functools.partial(self._line_up, ticket))
        return tickets

    def _retry_after(self) -> int:
        """Seconds after which there may be room in the line, a guess by how long requests took."""
        return min(max(1, math.ceil(self._seconds * len(self._tickets) / self.slots / 2)), 60)

    def cancel(self, ticket: Ticket) -> None:
        """Give up a request, waiting or running; for one that has ended this does nothing."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self.metrics.add_end("abort", time.perf_counter() - ticket.came)
            self._orders.put(functools.partial(self._cancel, ticket))

    def _hand_out(self, given: Given) -> None:
        now = time.perf_counter()
        for ticket, piece in given:
            if ticket not in self._tickets:
                continue
            if isinstance(piece, Piece) and piece.tokens:
                if ticket.latest is None:
                    ticket.began = now
                    self.metrics.first_token.observe(now - ticket.came)
                else:
                    self.metrics.between.observe(now - ticket.latest)
                ticket.latest = now
            completion = None if isinstance(piece, RequestError) else piece.completion
            if isinstance(piece, RequestError) or completion is not None:
                self._tickets.remove(ticket)
                self._seconds += 0.1 * (now - ticket.came - self._seconds)
                self.metrics.add_end("error" if completion is None else completion.finished, now - ticket.came)
                if completion is not None and completion.error is None:
                    self._count_completion(ticket, completion, now)
            ticket.pieces.put_nowait((ticket.place, piece) if isinstance(piece, Piece) else piece)

    def _count_completion(self, ticket: Ticket, completion: Completion, now: float) -> None:
        new, request = len(completion.tokens), ticket.request
        entered = ticket.came if ticket.entered is None else ticket.entered
        began = now if ticket.began is None else ticket.began
        if new > 1:
            self.metrics.token.observe((now - began) / (new - 1))
        phases = {"queue": entered - ticket.came, "prefill": began - entered, "decode": now - began}
        phases["inference"] = now - entered
        self.metrics.add_completion(len(request.prompt), new, request.max_new_tokens, phases)

    # --- from anywhere ---

    def drain(self, seconds: float) -> None:
        """Refuse requests that wait or come, and finish those that run, within `seconds`."""
        self._refusal = "the server is shutting down"
        self._orders.put(functools.partial(self._drain, time.monotonic() + seconds))

    def close(self) -> None:
        """End after the current step, and drop what is not finished."""
        self._refusal = self._refusal or "the server is shutting down"
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ---

    def _open_session(self) -> AnySession:
        session = self._open()
        if isinstance(session, RemoteSession):
            session.on_news = lambda: self._orders.put(lambda _: None)  # it only wakes the thread
        return session

    def _run(self) -> None:
        try:
            session = self._open_session()
        except BaseException as error:
            if not isinstance(error, (ValueError, OSError)):  # their messages are for the person who started the server
                log.exception("the engine cannot be opened")
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        try:
            while True:
                try:
                    if not self._follow_orders(session):
                        break
                    self._step(session)
                except EngineLostError:
                    raise
                except Exception:
                    if isinstance(session, SharedSession):  # the other ranks have gone, or are in another step
                        raise
                    log.exception("a step failed: its requests are lost, another batch begins")
                    self._lose("the engine failed in a step of this request; the server's log says how")
                    session.close()
                    session = self._open_session()
        except BaseException:
            self._refusal = "the engine has stopped; the server's log says why"
            self.lost = isinstance(session, SharedSession | RemoteSession)
            log.exception("the engine has stopped")
        finally:
            self._lose(self.refusal)
            self._refuse_orders(session)
            session.close()
            if self.lost and self.when_lost is not None:
                self.when_lost()

    def _step(self, session: AnySession) -> None:
        if session.idle:
            return
        info = session.advance()
        given: Given = []
        self.metrics.add_pieces(info.pieces)
        if info.cache_used is not None and info.pauses is not None:
            self.metrics.set_cache(info.cache_used, info.pauses)
        for piece in info.pieces:
            if (ticket := self._live.get(piece.index)) is not None:
                given.append((ticket, piece))
            if (completion := piece.completion) is not None:
                self._live.pop(piece.index, None)
                self.metrics.add_prompt(completion.statistics.prompt_tokens, completion.statistics.found_tokens)
        self._give(given)
        self._count(session)

    def _follow_orders(self, session: AnySession) -> bool:
        """Do what was asked for; wait for it if there is nothing else to do. False: end here."""
        while True:
            while self._line and len(self._live) < self.slots:
                self._enter(session, self._line.popleft())
            self._count(session)
            try:
                order = self._orders.get(block=session.idle, timeout=self._patience())
            except queue.Empty:
                if session.idle and self._patience():
                    session.keep_alive()
                    continue
                break
            if order is None:
                return False
            order(session)
        if not self._patience():
            self._refuse(session, list(self._live))
        return True

    def _line_up(self, ticket: Ticket, session: AnySession) -> None:
        if self._refusal is None:
            self._line.append(ticket)
        else:
            self._turn_away(ticket)

    def _cancel(self, ticket: Ticket, session: AnySession) -> None:
        with suppress(ValueError):
            self._line.remove(ticket)
        for index in [index for index, live in self._live.items() if live is ticket]:
            del self._live[index]
            session.cancel(index)

    def _drain(self, deadline: float, session: AnySession) -> None:
        self._deadline = deadline
        self._refuse(session, session.waiting)
        self._turn_away_line()

    def _patience(self) -> float:
        """The most seconds to wait for orders; 0: the deadline of requests that run has passed."""
        if self._deadline is None or not self._live:
            return KEEP_ALIVE_SECONDS
        return min(max(self._deadline - time.monotonic(), 0.0), KEEP_ALIVE_SECONDS)

    def _enter(self, session: AnySession, ticket: Ticket) -> None:
        try:
            ticket.entered = time.perf_counter()
            self._live[session.enqueue(ticket.request)] = ticket
        except ValueError as error:  # such as a grammar over several ranks
            self._give([(ticket, RequestError(400, str(error)))])
        except Exception as error:  # of this request alone, whatever it is
            log.exception("request %d cannot be decoded", ticket.number)
            self._give([(ticket, RequestError(500, f"the request cannot be decoded: {error}"))])

    def _refuse(self, session: AnySession, indices: list[int]) -> None:
        for index in indices:
            if (ticket := self._live.pop(index, None)) is not None:  # else it was cancelled
                session.cancel(index)
                self._turn_away(ticket)

    def _turn_away(self, *tickets: Ticket) -> None:
        self._give([(ticket, RequestError(503, self.refusal, code="shutting_down")) for ticket in tickets])

    def _turn_away_line(self) -> None:
        self._turn_away(*self._line)
        self._line.clear()

    def _lose(self, reason: str) -> None:
        """Give up all requests of the session, also those that wait: one of them may be why it failed."""
        self._give([(ticket, RequestError(500, reason)) for ticket in self._live.values()])
        self._live.clear()

    def _refuse_orders(self, session: AnySession) -> None:
        """Turn away requests in line, and those that still come."""
        self._turn_away_line()
        with suppress(queue.Empty):
            while True:
                if (order := self._orders.get_nowait()) is not None:
                    order(session)

    def _give(self, given: Given) -> None:
        if given and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and no client waits
                self._loop.call_soon_threadsafe(self._hand_out, given)

    def _count(self, session: AnySession) -> None:
        entering = sum(index in self._live for index in session.waiting)
        self.metrics.set_waiting(entering + len(self._line))
        self.metrics.running.set(len(self._live) - entering)
        if session.idle:  # no step will say so
            self.metrics.cache_used.set(0)
