"""The engine in a process of its own: in one process HTTP and the launches of steps would take turns.

The server's process has a `RemoteSession`, with the methods of a `Session`. `EngineProcess` starts the other process.
Both send each other names of methods with their arguments.
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
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from eagle_triton.engine.ranks import BETWEEN_SECONDS
from eagle_triton.engine.scheduler.requests import Piece, Request
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.session import Completion, Session, StepInfo
from eagle_triton.serve.drafters import Drafters

log = logging.getLogger(__name__)

_EXPECTED = (ValueError, TypeError, OSError, ModuleNotFoundError)  # with messages for the person who starts the server
_NO_TOKENS = torch.empty(0, dtype=torch.int64)
_NO_REQUEST = Request(_NO_TOKENS, 0)

Load = Callable[[argparse.Namespace], EAGLEInference]


class Served(NamedTuple):
    """What a server must know of an engine, which may be in another process."""

    tokenizer: Any
    config: EAGLEConfig
    stop_ids: frozenset[int]
    vocab_size: int
    max_positions: int | None
    drafters: Drafters
    words: str

    @staticmethod
    def read(inference: EAGLEInference) -> Served:
        """Read it from an engine."""
        pair, drafters = inference.pair, Drafters.read(inference)
        facts = frozenset(pair.stop_ids), pair.view.vocab_size, pair.max_positions
        return Served(inference.tokenizer, inference.config, *facts, drafters, repr(inference))


class EngineLostError(RuntimeError):
    """The engine's process has ended."""


class EngineProcess:
    """The process that has the engine. `close` ends it; it also ends with this process."""

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
            _, outcome, (told,) = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            outcome, told = "refused", _lost()
        except BaseException:  # Ctrl-C: do not wait until it has loaded
            self._process.kill()
            self._process.join()
            raise
        if outcome != "served":
            self.close()
            raise told
        self.served: Served = told
        threading.Thread(target=self._listen, name="engine's news", daemon=True).start()

    def open_session(self, open_session: Callable[..., Session], *arguments: Any) -> RemoteSession:
        """A session that `open_session(inference, *arguments)`, a function of a module, opens there. It replaces the
        one before. Raises what that raises, and EngineLostError if the process has ended."""
        self._session = RemoteSession(self, 1 if self._session is None else self._session.number + 1)
        self.send(self._session.number, "open", open_session, arguments)
        self._session.wait_until_open()
        return self._session

    def send(self, session: int, method: str, *arguments: Any) -> None:
        """Call a method of a session there. Raises EngineLostError if the process has ended."""
        try:
            with self._sending:
                self._connection.send_bytes(pickle.dumps((session, method, arguments)))
        except OSError as error:
            raise _lost() from error

    def close(self) -> None:
        """End it."""
        with suppress(EngineLostError):
            self.send(0, "close")
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _listen(self) -> None:
        """Call the methods of the session here that it names, until it ends."""
        while True:
            try:
                number, method, arguments = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                number, method, arguments = None, "failed", (_lost(),)
            session = self._session
            if session is not None and number in (None, session.number):
                getattr(session, method)(*arguments)
            if number is None:
                return


def _lost() -> EngineLostError:
    return EngineLostError("the engine's process has ended; its log says why")


class RemoteSession:
    """A session of an `EngineProcess`, used by one thread. It goes on with its steps without being asked."""

    def __init__(self, process: EngineProcess, number: int) -> None:
        self.number, self._answered = number, threading.Event()
        self.on_news: Callable[[], None] | None = None  # called in another thread when there is something to read
        self._process, self._submitted, self._known = process, 0, 0
        self._queued: list[int] = []  # in line there, of the first `_known` requests
        self._news: deque[tuple[StepInfo, list[int], int]] = deque()
        self._failure: BaseException | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing for `advance` to return."""
        return not self._news and self._failure is None

    @property
    def waiting(self) -> list[int]:
        """Requests in line there, by their numbers, as far as is known."""
        return [*self._queued, *range(self._known, self._submitted)]

    def enqueue(self, request: Request) -> int:
        """As `Session.enqueue`, but errors of a request come with its completion."""
        self._process.send(self.number, "enqueue", request)
        self._submitted += 1
        return self._submitted - 1

    def cancel(self, index: int) -> None:
        """As `Session.cancel`."""
        self._process.send(self.number, "cancel", index)
        self._queued = [queued for queued in self._queued if queued != index]

    def advance(self) -> StepInfo:
        """The oldest step that was not read yet. Raises RuntimeError if the session has failed."""
        if not self._news and self._failure is not None:
            raise self._failure
        info, self._queued, self._known = self._news.popleft()
        return info

    def wait_until_open(self) -> None:
        """Wait until it is open there. Raises what was raised there."""
        self._answered.wait()
        if self._failure is not None:
            raise self._failure

    def keep_alive(self) -> None:
        """Nothing to do: the session is not shared."""

    def close(self) -> None:
        """Close it there, and drop what is not finished."""
        with suppress(EngineLostError):
            self._process.send(self.number, "close")

    # --- called for the other process, in the thread that listens to it ---

    def opened(self) -> None:
        """It is open there."""
        self._answered.set()

    def stepped(self, info: StepInfo, queued: list[int], known: int) -> None:
        """A step was done. queued: which of the first `known` requests are in line there."""
        self._news.append((info, queued, known))
        self._wake()

    def failed(self, error: BaseException) -> None:
        """It could not be opened, or has failed."""
        self._failure = error
        self._answered.set()
        self._wake()

    def _wake(self) -> None:
        if self.on_news is not None:
            self.on_news()


# --- the engine's process ---


def _run(connection: Connection, load: Load, args: argparse.Namespace) -> None:
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)  # the server gets them, and finishes what runs
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def tell(session: int, method: str, *arguments: Any) -> None:
        connection.send_bytes(pickle.dumps((session, method, arguments)))

    with suppress(EOFError, OSError):  # the server has ended
        try:
            inference = load(args)
            tell(0, "served", Served.read(inference))
        except _EXPECTED as error:
            tell(0, "refused", _portable(error))
            return
        except BaseException:
            log.exception("the engine cannot be loaded")
            raise
        while True:
            number, method, arguments = pickle.loads(connection.recv_bytes())
            if method == "close" and not number:
                return
            if method != "open":  # of a session that has ended
                continue
            open_session, options = arguments
            try:
                session = open_session(inference, *options)
            except Exception as error:
                if not isinstance(error, _EXPECTED):
                    log.exception("the engine cannot be opened")
                tell(number, "failed", _portable(error))
                continue
            tell(number, "opened")
            try:
                if not _Leader(session, connection, functools.partial(tell, number, "stepped")).run():
                    return
            except (EOFError, OSError):
                raise
            except Exception:
                log.exception("a step failed")
                tell(number, "failed", RuntimeError("a step failed; the engine's log says how"))
            finally:
                session.close()


def _portable(error: Exception) -> Exception:
    """The error as one that can be sent: errors of the hub carry a response."""
    if isinstance(error, ModuleNotFoundError):
        return error
    return next((kind for kind in _EXPECTED if isinstance(error, kind)), RuntimeError)(str(error))


class _Leader:
    """Runs a session: does what comes over a connection, and sends back what each step gives."""

    def __init__(self, session: Session, connection: Connection, tell: Callable[..., None]) -> None:
        self._session, self._connection, self._tell = session, connection, tell
        self._known = 0  # requests that have come, with indices from 0 here and there

    def run(self) -> bool:
        """Run until the session is closed, True, or until the process is to end, False."""
        session = self._session
        while True:
            while self._connection.poll(BETWEEN_SECONDS / 3 if session.idle else 0):
                number, method, arguments = pickle.loads(self._connection.recv_bytes())
                if method == "close":
                    return bool(number)
                getattr(self, method)(*arguments)
            if not session.idle:
                self._send(session.advance())

    def enqueue(self, request: Request) -> None:
        """Put a request in line. If that fails, send a completion with the error."""
        index, self._known = self._known, self._known + 1
        try:
            self._session.enqueue(request)
        except Exception as error:  # of this request alone, whatever it is
            log.exception("a request cannot be decoded")
            completion = Completion(index, _NO_TOKENS, [], None, "error", str(error))
            self._send(StepInfo(0, 0.0, 0, 0, 0, [Piece(index, request, [], completion=completion)]))

    def cancel(self, index: int) -> None:
        """As `Session.cancel`."""
        self._session.cancel(index)

    def _send(self, info: StepInfo) -> None:
        """Send a step, without the tensors of its requests, which the other process has."""
        for piece in info.pieces:
            piece.request = _NO_REQUEST
            if piece.completion is not None:
                piece.completion.prompt = _NO_TOKENS
        self._tell(info, self._session.waiting, self._known)
