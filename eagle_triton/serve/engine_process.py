"""The engine in a process of its own: what HTTP does for each token would take turns with the launches of steps.

The server's process has `RemoteSession`, which is asked as a `Session` is; `EngineProcess` starts the other one and
carries what is asked for there, and what each step gave back.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from eagle_triton.engine.ranks import BETWEEN_SECONDS
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.session import Completion, Piece, Session, StepInfo
from eagle_triton.serve.drafters import Drafters

log = logging.getLogger(__name__)

_OPEN, _CLOSE, _ENQUEUE, _CANCEL = "open", "close", "enqueue", "cancel"  # what the engine's process is told
_SERVED, _REFUSED, _OPENED, _STEP, _FAILED = "served", "refused", "opened", "step", "failed"  # what it tells
_EXPECTED = (ValueError, TypeError, OSError, ModuleNotFoundError)  # sentences for who starts the server
_NO_TOKENS = torch.empty(0, dtype=torch.int64)

Load = Callable[[argparse.Namespace], EAGLEInference]


class Served(NamedTuple):
    """What a server must know of an engine, be it elsewhere."""

    tokenizer: Any
    config: EAGLEConfig
    stop_ids: frozenset[int]
    vocab_size: int
    max_positions: int | None
    drafters: Drafters
    words: str

    @staticmethod
    def read(inference: EAGLEInference) -> Served:
        """That of an engine."""
        pair, drafters = inference.pair, Drafters.read(inference)
        facts = frozenset(pair.stop_ids), pair.view.vocab_size, pair.max_positions
        return Served(inference.tokenizer, inference.config, *facts, drafters, repr(inference))


class EngineLostError(RuntimeError):
    """The engine's process has ended."""


class EngineProcess:
    """The process that has the engine. `close` ends it, also when this process ends without."""

    def __init__(self, load: Load, args: argparse.Namespace) -> None:
        """Start it, and load what the options name by `load`, a function of a module. Raises what that raises."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, load, args), name="engine", daemon=True)
        self._process.start()
        theirs.close()
        self._sending = threading.Lock()
        self._session: RemoteSession | None = None
        try:
            _, kind, told = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            kind, told = _REFUSED, _lost()
        except BaseException:  # Ctrl-C: what it loads is not waited for
            self._process.kill()
            self._process.join()
            raise
        if kind != _SERVED:
            self.close()
            raise told
        self.served: Served = told
        threading.Thread(target=self._listen, name="engine's news", daemon=True).start()

    def open_session(self, open_session: Callable[..., Session], *arguments: Any) -> RemoteSession:
        """A session that `open_session(inference, *arguments)`, a function of a module, opens there, in the place of
        the one before. Raises what that raises, and EngineLostError if the process has ended."""
        self._session = RemoteSession(self, 1 if self._session is None else self._session.number + 1)
        self.send(self._session.number, _OPEN, (open_session, arguments))
        self._session.wait_until_open()
        return self._session

    def send(self, session: int, what: str, value: Any = None) -> None:
        """Tell it something of a session. Raises EngineLostError if it has ended."""
        try:
            with self._sending:
                self._connection.send_bytes(pickle.dumps((session, what, value)))
        except OSError as error:
            raise _lost() from error

    def close(self) -> None:
        """End it."""
        with suppress(EngineLostError):
            self.send(0, _CLOSE)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _listen(self) -> None:
        """Hand on what it tells, until it ends."""
        while True:
            try:
                number, kind, told = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                number, kind, told = None, _FAILED, _lost()
            session = self._session
            if session is not None and number in (None, session.number):
                session.hear(kind, told)
            if number is None:
                return


def _lost() -> EngineLostError:
    return EngineLostError("the engine's process has ended; its log says why")


class RemoteSession:
    """A session of an `EngineProcess`, asked from one thread. Steps go on there by themselves."""

    def __init__(self, process: EngineProcess, number: int) -> None:
        self.number, self._answered = number, threading.Event()
        self.on_news: Callable[[], None] | None = None  # called by another thread when there is something to read
        self._process, self._submitted, self._known = process, 0, 0
        self._queued: list[int] = []  # in line there, as far as is known
        self._news: deque[tuple[StepInfo, list[int], int]] = deque()
        self._failure: BaseException | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing was told that `advance` would give."""
        return not self._news and self._failure is None

    @property
    def waiting(self) -> list[int]:
        """Requests in line there, by their numbers, as far as is known."""
        return [*self._queued, *range(self._known, self._submitted)]

    def enqueue(self, request: Request) -> int:
        """As `Session.enqueue`; what is wrong with a request is told by its completion."""
        self._process.send(self.number, _ENQUEUE, (self._submitted, request))
        self._submitted += 1
        return self._submitted - 1

    def cancel(self, index: int) -> None:
        """As `Session.cancel`."""
        self._process.send(self.number, _CANCEL, index)
        self._queued = [queued for queued in self._queued if queued != index]

    def advance(self) -> StepInfo:
        """The oldest step that was told and not read. Raises RuntimeError if the session has failed."""
        if not self._news and self._failure is not None:
            raise self._failure
        info, self._queued, self._known = self._news.popleft()
        return info

    def wait_until_open(self) -> None:
        """Until the other process has opened it. Raises what was raised there."""
        self._answered.wait()
        if self._failure is not None:
            raise self._failure

    def keep_alive(self) -> None:
        """Nothing waits for it."""

    def close(self) -> None:
        """End it there, whatever is not finished."""
        with suppress(EngineLostError):
            self._process.send(self.number, _CLOSE)

    def hear(self, kind: str, told: Any) -> None:
        """What the other process tells of it."""
        if kind == _STEP:
            self._news.append(told)
        elif kind != _OPENED:
            self._failure = told
        self._answered.set()
        if self.on_news is not None:
            self.on_news()


# --- the engine's process ---


def _run(connection: Connection, load: Load, args: argparse.Namespace) -> None:
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)  # the server hears them, and finishes what runs
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def tell(session: int, kind: str, value: Any) -> None:
        connection.send_bytes(pickle.dumps((session, kind, value)))

    with suppress(EOFError, OSError):  # the server has ended
        try:
            inference = load(args)
            tell(0, _SERVED, Served.read(inference))
        except _EXPECTED as error:
            tell(0, _REFUSED, _portable(error))
            return
        except BaseException:
            log.exception("the engine cannot be loaded")
            raise
        while True:
            number, what, value = pickle.loads(connection.recv_bytes())
            if what == _CLOSE and not number:
                return
            if what != _OPEN:  # of a session that has ended
                continue
            open_session, arguments = value
            try:
                session = open_session(inference, *arguments)
            except Exception as error:
                if not isinstance(error, _EXPECTED):
                    log.exception("the engine cannot be opened")
                tell(number, _FAILED, _portable(error))
                continue
            tell(number, _OPENED, None)
            try:
                if not _Leader(session, connection, functools.partial(tell, number, _STEP)).run():
                    return
            except (EOFError, OSError):
                raise
            except Exception:
                log.exception("a step failed")
                tell(number, _FAILED, RuntimeError("a step failed; the engine's log says how"))
            finally:
                session.close()


def _portable(error: Exception) -> Exception:
    """The same, of a class that can be sent: those of the hub have a response."""
    if isinstance(error, ModuleNotFoundError):
        return error
    return next((kind for kind in _EXPECTED if isinstance(error, kind)), RuntimeError)(str(error))


class _Leader:
    """Leads a session by what comes over a connection."""

    def __init__(self, session: Session, connection: Connection, tell: Callable[[Any], None]) -> None:
        self._session, self._connection, self._tell = session, connection, tell
        self._numbers: dict[int, int] = {}  # that the other process knows requests by, by the session's
        self._known = 0  # requests that were heard of

    def run(self) -> bool:
        """Until the session is closed: True; until the process is to end: False."""
        session = self._session
        while True:
            while self._connection.poll(BETWEEN_SECONDS / 3 if session.idle else 0):
                number, what, value = pickle.loads(self._connection.recv_bytes())
                if what == _CLOSE:
                    return bool(number)
                self._follow(what, value)
            if not session.idle:
                info = session.advance()
                pieces = [self._portable(piece) for piece in info.pieces if piece.index in self._numbers]
                self._tell((replace(info, pieces=pieces), self._waiting(), self._known))

    def _follow(self, what: str, value: Any) -> None:
        if what == _ENQUEUE:
            number, request = value
            self._known = number + 1
            try:
                self._numbers[self._session.enqueue(request)] = number
            except Exception as error:  # of this request alone, whatever it is
                log.exception("a request cannot be decoded")
                failed = Completion(number, _NO_TOKENS, [], None, "error", str(error))
                piece = Piece(number, [], completion=failed)
                self._tell((StepInfo(0, 0.0, 0, 0, 0, [piece]), self._waiting(), self._known))
        else:
            for index in [index for index, number in self._numbers.items() if number == value]:
                self._session.cancel(index)
                del self._numbers[index]

    def _waiting(self) -> list[int]:
        return [self._numbers[index] for index in self._session.waiting]

    def _portable(self, piece: Piece) -> Piece:
        """A piece by the number that the other process knows, and without tensors of a device."""
        index, piece.index = piece.index, self._numbers[piece.index]
        if piece.completion is not None:
            piece.completion = replace(piece.completion, index=piece.index, prompt=_NO_TOKENS)
            del self._numbers[index]
        return piece
