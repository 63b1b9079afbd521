"""A session over several ranks (tensor parallelism): rank 0 takes the requests, and the others follow it."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from typing import Any

from eagle_triton.engine.ranks import RanksError
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.inference.session import Session, StepInfo

log = logging.getLogger(__name__)

_ENQUEUE, _CANCEL, _ADVANCE, _NOTHING, _CLOSE = "enqueue", "cancel", "advance", "nothing", "close"
_SESSION = "a session"  # what ranks compare, instead of a call's requests or options


class SharedSession(Session):
    """A Session on rank 0. The others call `follow`, which returns when rank 0 closes it.

    Before each step rank 0 sends the others the new requests and cancellations. The others wait for this at most
    `ranks.STEP_SECONDS` while requests run, otherwise `ranks.BETWEEN_SECONDS` after each `keep_alive`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments: see Session; the same on all ranks."""
        super().__init__(*args, **options)
        assert self._ranks is not None, "ranks share the target"
        self.leads = self._ranks.rank == 0
        self._orders: list[tuple[str, Any]] = []  # not sent to the others yet
        self._apart = True  # nothing runs: ranks may meet at different times
        self._broken = False  # a step or an exchange failed: the others' state is unknown

    # --- rank 0 ---

    def enqueue(self, request: Request) -> int:
        """Session.enqueue on rank 0. Raises RuntimeError on the others."""
        self._check_leads("submit")
        sent = pickle.dumps(replace(request, prompt=request.prompt.to("cpu", copy=True)))  # as it is now
        index = super().enqueue(request)
        self._orders.append((_ENQUEUE, (index, sent)))
        return index

    def cancel(self, index: int) -> None:
        """Session.cancel on rank 0. Raises RuntimeError on the others, RanksError if another rank has gone."""
        self._check_leads("cancel")
        super().cancel(index)
        self._orders.append((_CANCEL, index))
        if self.idle and not self._apart:  # the others wait for a step that does not come
            self.keep_alive()

    def advance(self) -> StepInfo:
        """Session.advance on rank 0. Raises RuntimeError on the others, RanksError if another rank has gone."""
        self._check_leads("step")
        self._check_open()
        self._tell(_ADVANCE)
        return self._step_together()

    def keep_alive(self) -> None:
        """Tell the others that rank 0 is there. Call this from time to time while the session is idle."""
        if self.leads and not self._closed:
            self._check_open()
            self._tell(_NOTHING)
            self._apart = self._apart or self.idle

    def close(self) -> None:
        """Session.close. On rank 0 this ends the others too."""
        if self.leads and not (self._closed or self._broken):
            try:
                self._tell(_CLOSE)
            except RanksError as error:
                log.warning("the session is closed, but not all ranks got the message: %s", error)
        super().close()

    def _tell(self, what: str) -> None:
        """Send the others the orders since the last message, and what rank 0 does now."""
        orders, self._orders = self._orders, []
        self._exchange((what, orders, self._prepares))

    def _check_leads(self, name: str) -> None:
        if not self.leads:
            raise RuntimeError(f"{name}: call it on rank 0 only; other ranks call follow()")

    # --- the others ---

    def follow(self) -> None:
        """Do what rank 0 does until it closes the session. RuntimeError on rank 0, RanksError if a rank has gone."""
        if self.leads:
            raise RuntimeError("follow: call it on the other ranks; rank 0 takes the requests")
        self._check_open()
        try:
            while (what := self._hear()) != _CLOSE:
                if what == _ADVANCE:
                    self._step_together()
                else:
                    self._apart = self._apart or self.idle
        finally:
            super().close()

    def _hear(self) -> str:
        """Carry out rank 0's orders, and return what it does now."""
        what, orders, self._prepares = self._exchange(None)
        for name, value in orders:
            if name == _ENQUEUE:
                self._submitted, sent = value  # rank 0 also counted requests that failed to enter the line
                super().enqueue(pickle.loads(sent))
            else:
                super().cancel(value)
        return what

    # --- all ---

    def _exchange(self, message: Any) -> Any:
        """Rank 0's message, on all ranks."""
        assert self._ranks is not None
        try:
            if self._apart:
                self._ranks.check_same_on_all_ranks(
                    "what is called next, here a session that rank 0 has not closed,", _SESSION
                )
            return self._ranks.broadcast_from_rank0(message)
        except BaseException:
            self._broken = True
            raise

    def _step_together(self) -> StepInfo:
        try:
            info = super().advance()
        except BaseException:
            self._broken = True
            raise
        self._apart = self.idle  # the same on all ranks
        return info

    def _check_open(self) -> None:
        super()._check_open()
        if self._broken:
            raise RuntimeError(
                "a step of this session or an exchange between ranks has failed: end all ranks and start again"
            )
