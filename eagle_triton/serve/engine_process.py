"""The engine's side of the server: it runs a session, in its own process or in a thread of this one.

In one process, HTTP and the launches of steps would take turns. Orders to the engine: a number with a request, the same
number with None to cancel it, and None to end. Messages from the engine: the name of a method of `EngineClient`, and
its arguments.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

import torch

from eagle_triton.engine.ranks import BETWEEN_SECONDS
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.session import Session, StepInfo
from eagle_triton.inference.shared_session import SharedSession
from eagle_triton.serve.drafters import Drafters

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = BETWEEN_SECONDS / 3
_EXPECTED = (ValueError, TypeError, OSError, ModuleNotFoundError)  # with messages for the person at the command
_LOST = "the engine failed in a step of this request; the server's log has the error"
_NO_TOKENS = torch.empty(0, dtype=torch.int64)
_NO_REQUEST = Request(_NO_TOKENS, 0)

Load: TypeAlias = Callable[[argparse.Namespace], EAGLEInference]
Order: TypeAlias = tuple[int, Request | None] | None
Orders: TypeAlias = queue.SimpleQueue[Order]
Tell: TypeAlias = Callable[..., None]


class Served(NamedTuple):
    """Facts of an engine that the server needs. The engine may be in another process."""

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
    """The engine's process has ended, or ranks that share the target have lost each other."""


class LocalEngine:
    """A session in the thread that calls `run`."""

    def __init__(self, open_session: Callable[[], Session], orders: Orders | None = None) -> None:
        """open_session: called first, and after a failed step. orders: None: a new queue."""
        self._open, self._orders = open_session, orders or queue.SimpleQueue()
        self.put = self._orders.put

    def run(self, tell: Tell) -> None:
        """Follow orders until the end, and send what each step gives. A failed step loses its requests, and another
        session begins. Raises what `open_session` raises, and EngineLostError if ranks share the target."""
        session = self._open()
        tell("opened")
        try:
            while True:
                numbers: dict[int, int] = {}  # of the requests in the session, by its indices
                try:
                    return _lead(session, self._orders, tell, numbers)
                except Exception as error:
                    for number in numbers.values():  # any of them may be the cause
                        tell("refused", number, 500, _LOST)
                    if isinstance(session, SharedSession):  # the other ranks are gone, or in another step
                        raise EngineLostError("a step failed, and ranks share the target") from error
                    log.exception("a step failed: its requests are lost, another batch begins")
                    session.close()
                    session = self._open()
        finally:
            session.close()

    def close(self) -> None:
        """End after the current step."""
        self.put(None)


class EngineProcess:
    """A session in its own process. `close` ends the process, and so does the end of this one."""

    def __init__(self, load: Load, args: argparse.Namespace) -> None:
        """Start the process, and call `load(args)` there, a function of a module. Raises what that raises."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, load, args), name="engine", daemon=True)
        self._process.start()
        theirs.close()
        self._closed = False
        try:
            _, (self.served,) = self._hear()
        except Exception:
            self.close()
            raise
        except BaseException:  # Ctrl-C: do not wait until it has loaded
            self._process.kill()
            self._process.join()
            raise

    def open(self, open_session: Callable[[EAGLEInference], Session]) -> None:
        """Let the process open its sessions by a function that can be pickled. `run` raises its errors."""
        self.put(open_session)

    def put(self, order: Any) -> None:
        """Send an order. If the process has ended, `run` raises."""
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(order))

    def run(self, tell: Tell) -> None:
        """Pass on messages until the process ends. Raises what opening a session raises, and EngineLostError if the
        process ends unasked."""
        while not self._closed:
            try:
                event_name, arguments = self._hear()
            except EngineLostError:
                if not self._closed:
                    raise
                return
            tell(event_name, *arguments)

    def close(self) -> None:
        """End it after the current step; kill it after ten seconds."""
        self._closed = True
        self.put(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _hear(self) -> tuple[str, tuple[Any, ...]]:
        try:
            event_name, arguments = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise EngineLostError("the engine's process has ended; its log has the reason") from None
        if event_name == "failed_to_open":
            raise arguments[0]
        return event_name, arguments


# --- in the engine's thread or process ---


def _lead(session: Session, orders: Orders, tell: Tell, numbers: dict[int, int]) -> None:
    latest = 0  # the number of the last request that has come
    while True:
        try:
            order = orders.get(block=session.idle, timeout=KEEP_ALIVE_SECONDS)
        except queue.Empty:
            if session.idle:
                session.keep_alive()
                continue
            info = session.advance()
            given = [numbers.get(piece.index) for piece in info.pieces]
            for piece in info.pieces:
                if piece.completion is not None:
                    numbers.pop(piece.index, None)
            tell("stepped", info, given, [numbers[index] for index in session.waiting], latest)
            continue
        if order is None:
            return
        number, request = order
        if request is None:
            for index in [index for index, known in numbers.items() if known == number]:
                del numbers[index]
                session.cancel(index)
            continue
        latest = number
        try:
            numbers[session.enqueue(request)] = number
        except ValueError as error:  # such as a grammar over several ranks
            tell("refused", number, 400, str(error))
        except Exception as error:  # any error concerns only this request
            log.exception("request %d cannot be decoded", number)
            tell("refused", number, 500, f"the request cannot be decoded: {error}")


def _run(connection: Connection, load: Load, args: argparse.Namespace) -> None:
    """The process of an engine."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)  # the server gets them too, and finishes running requests
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    opened = False

    def tell(event_name: str, *arguments: Any) -> None:
        nonlocal opened
        opened = opened or event_name == "opened"
        if event_name == "stepped":
            _drop_tensors(arguments[0])
        try:
            connection.send_bytes(pickle.dumps((event_name, arguments)))
        except OSError:  # the server has ended
            sys.exit()

    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:  # so that the server can send an order during a step
        with suppress(EOFError, OSError):
            while True:
                orders.put(pickle.loads(connection.recv_bytes()))
        orders.put(None)

    try:
        inference = load(args)
        tell("served", Served.read(inference))
        threading.Thread(target=listen, name="orders", daemon=True).start()
        open_session = orders.get()
        if open_session is None:
            return
        LocalEngine(functools.partial(open_session, inference), orders).run(tell)
    except Exception as error:
        if opened or not isinstance(error, _EXPECTED):
            log.exception("the engine has stopped" if opened else "the engine cannot be opened")
            raise
        tell("failed_to_open", _portable(error))


def _drop_tensors(info: StepInfo) -> None:
    """Remove the tensors of a step's requests: the server has them."""
    for piece in info.pieces:
        piece.request = _NO_REQUEST
        if piece.completion is not None:
            piece.completion.prompt = _NO_TOKENS


def _portable(error: Exception) -> Exception:
    """The error in a form that can be pickled: errors of the hub carry a response."""
    if isinstance(error, ModuleNotFoundError):
        return error
    return next(kind for kind in _EXPECTED if isinstance(error, kind))(str(error))
