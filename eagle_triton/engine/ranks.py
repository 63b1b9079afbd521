"""The processes that share a model whose matrices are spread over them (tensor parallelism), and what they exchange.

Every rank runs the same script, and in a step the same operations: products of its own shards, exchanged here, and
everything behind them whole. All hold the same bits then, so that none has to be told what another chose. What could
differ all the same, because it was measured or drawn or comes from outside, is rank 0's: `broadcast_from_rank0`.

A rank that has gone ends the others with RanksError: where its connections close or its process has ended at once, else
after `STEP_SECONDS`.

On GPUs that see each other's memory kernels exchange the ranks' parts by themselves (`runtime/peer_memory.py`), the
norm behind a product those of its sums. Everywhere else the group's backend does.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from eagle_triton.engine.rank_processes import has_ended, processes_beside
from eagle_triton.runtime.peer_memory import LOOKS, PeerMemory
from eagle_triton.runtime.split_sums import SharedSums, SplitSums

STEP_SECONDS = 60.0  # that a rank waits for another inside a generation: the other may be compiling kernels
POLL_SECONDS = 2e-5
LIVING_SECONDS = 0.5  # of a wait, between two looks whether the other ranks' processes are alive
PROOF_LOOKS = LOOKS // 3  # of waits whose outcome is compared: another may be compiling, but STEP_SECONDS are longer
BETWEEN_SECONDS = 1800.0  # and between generations, where one may read files or talk to somebody
MAX_EXCHANGED_ROWS = 512  # that one launch exchanges: those of a step, of eight trees of 60 nodes

_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

P = ParamSpec("P")
R = TypeVar("R")


class RanksError(RuntimeError):
    """Another rank has gone or hangs, or was asked for something else: this one cannot go on alone."""


def _named(exchange: Callable[P, R]) -> Callable[P, R]:
    """The same, what fails in it as a RanksError that says what to do. Behind such a failure nothing is exchanged any
    more: others wait for something else, or for nobody."""

    @functools.wraps(exchange)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        ranks = args[0] if isinstance(args[0], Ranks) else None
        if ranks is not None:
            ranks.check_together()
            ranks.exchanges.append(exchange.__name__)
        try:
            return exchange(*args, **kwargs)
        except (RanksError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            why = f"another rank has gone or hangs; end all ranks and start again ({error})"
            if ranks is not None:
                ranks.lost = why
            raise RanksError(why) from error
        finally:
            if ranks is not None:
                ranks.exchanges.pop()

    return call


@dataclass(eq=False)
class Ranks:
    """This process, `rank` of `size`. device_group: for what lies on the device; host_group: for Python's objects;
    meeting_group: for what ranks do first in a call, to which they come at different times. peers: the memory by which
    kernels exchange parts, where there is such (`open_memory`), and why_no_peers, where that was tried in vain.
    processes: of the other ranks on this host. lost: why the ranks are not together any more, None: they are."""

    rank: int
    size: int
    device_group: Any
    host_group: Any
    meeting_group: Any
    peers: PeerMemory | None = None
    why_no_peers: str | None = None
    processes: dict[int, psutil.Process] = field(default_factory=dict)
    lost: str | None = None
    exchanges: list[str] = field(default_factory=list)  # that threads are in now
    engines: int = 0  # that were made on them: the same script makes them in the same order
    decoding: threading.RLock = field(default_factory=threading.RLock)  # held by the thread that launches
    _opened: list[tuple[Any, PeerMemory]] = field(default_factory=list)  # all, and what each belongs to: graphs go on
    _last_stream: torch.cuda.Stream | None = None  # of all engines
    _proved: bool = False

    def __post_init__(self) -> None:
        _ALL.add(self)

    @staticmethod
    @_named
    def of(mesh: Any) -> Ranks:
        """Those of a torch.distributed.DeviceMesh of one dimension, each of which asks for them, once it has loaded
        its part.

        They get groups of their own, whose waits are bounded, made once for each mesh.
        """
        group = mesh.get_group()
        if group not in _KNOWN:
            members = dist.get_process_group_ranks(group)

            def new(backend: str, seconds: float) -> Any:
                return dist.new_group(members, timedelta(seconds=seconds), backend, use_local_synchronization=True)

            meeting = new("gloo", BETWEEN_SECONDS)  # first: it connects once all have come here
            device = new("nccl" if mesh.device_type == "cuda" else "gloo", STEP_SECONDS)
            ranks = Ranks(dist.get_rank(group), len(members), device, new("gloo", STEP_SECONDS), meeting)
            ranks.together(torch.zeros(1, device=mesh.device_type))  # connects, which a capture could not
            ranks.processes = processes_beside(ranks.rank, ranks.all_gather_object)
            _KNOWN[group] = ranks
        return _KNOWN[group]

    @torch.inference_mode(False)  # the memory outlives a caller's
    def open_memory(self, width: int, device: torch.device) -> None:
        """Have kernels exchange parts by themselves, sums of rows of at most `width` among them, if torch gives all
        ranks memory of their GPUs that the others see (symmetric memory, without multicast). All ranks call this; once
        for each width is enough.

        `peers` is that memory then; else `why_no_peers` says what stands against it, on any rank.
        """
        row_bytes = -(-4 * width // 16) * 16
        if self.why_no_peers is not None or (self.peers is not None and row_bytes <= self.peers.row_bytes):
            return
        self.meet()
        count = PeerMemory.bytes_for(self.size, MAX_EXCHANGED_ROWS, row_bytes)
        found: dict[str, Any] = {}

        def allocate() -> None:
            from torch.distributed import _symmetric_memory as symmetric

            found["block"] = symmetric.empty(count, dtype=torch.uint8, device=device)
            found["block"].zero_()
            torch.cuda.synchronize(device)

        def connect() -> None:
            from torch.distributed import _symmetric_memory as symmetric

            with _without_multicast():
                found["handle"] = symmetric.rendezvous(found["block"], self.device_group.group_name)
            found["blocks"] = [found["handle"].get_buffer(rank, (count,), torch.uint8) for rank in range(self.size)]

        if self._all_do(allocate) and self._all_do(connect):
            self.peers = PeerMemory.of(self.rank, found["blocks"], MAX_EXCHANGED_ROWS, row_bytes)
            self._opened.append((found, self.peers))
            self._proved = False

    def prove_memory(self, ops: Any, like: Tensor) -> None:
        """Give `peers` up, and say so in `why_no_peers`, unless sums and columns through it have the bits of gathered
        ones on every rank. ops: Operations; like: a tensor of the width, dtype and device of what is summed. All ranks
        call this, behind `open_memory`; once is enough."""
        if self.peers is None or self._proved:
            return
        memory, generator = replace(self.peers, looks=PROOF_LOOKS), torch.Generator().manual_seed(self.rank)
        for rows in (1, 3, min(60, memory.rows), memory.rows, 1):
            part = torch.randn(rows, like.shape[-1], generator=generator).to(like.device, torch.float32)
            parts = part, part.to(like.dtype)
            gathered = [self.together(each) for each in parts]  # by all ranks, whatever comes of the rest

            def compare(rows: int = rows, parts: Any = parts, gathered: Any = gathered) -> None:
                for each, all_parts in zip(parts, gathered, strict=True):
                    summed = ops.add(SharedSums(each, like.dtype, memory))
                    joined = ops.join_columns(each, memory)
                    if not torch.equal(summed, ops.add(SplitSums(all_parts.float(), like.dtype))):
                        raise RuntimeError(f"sums of {rows} rows through the ranks' memory were not those of a gather")
                    if not torch.equal(joined, torch.cat(all_parts.unbind(0), -1)):
                        raise RuntimeError(f"columns of {rows} rows came otherwise through the ranks' memory")
                if memory.gave_up():
                    raise RuntimeError(f"a wait for {rows} rows in the ranks' memory was in vain")

            if not self._all_do(compare):
                self.peers = None
                return
        self._proved = True

    def _all_do(self, what: Callable[[], None]) -> bool:
        """Whether all ranks can do something; else `why_no_peers` says why not."""
        reason = None
        try:
            what()
        except Exception as error:  # whatever it is, the group's backend exchanges sums then, and the report says so
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        said = enumerate(self.all_gather_object(reason))
        reasons = [f"rank {rank}: {other}" for rank, other in said if other is not None]
        self.why_no_peers = "; ".join(reasons) or None
        return not reasons

    @property
    def note(self) -> str | None:
        """What a report says of how sums are exchanged on GPUs."""
        by_nccl = f"NCCL gathers what ranks have, for want of: {self.why_no_peers}"
        if self.peers is None:
            return None if self.why_no_peers is None else by_nccl
        by_kernels = "kernels exchange what ranks have by symmetric memory"
        if self.why_no_peers is None:
            return by_kernels
        return f"{by_kernels}; of rows wider than {self.peers.row_bytes // 4} elements {by_nccl}"

    # --- in a step ---

    def peers_for(self, kernels: bool, device: torch.device) -> PeerMemory | None:
        """The memory by which operations exchange parts. kernels: whether they are kernels; the references do so on a
        CPU only: elsewhere they would not wait for the others."""
        return self.peers if kernels or device.type == "cpu" else None

    def summed(self, part: Tensor | SplitSums, dtype: torch.dtype, by_the_norm: bool = False) -> SplitSums | SharedSums:
        """What each rank's product of its columns [..., N] comes to: the ranks' parts, which the reader adds up in the
        order of the ranks, as it adds splits of one product, and rounds to `dtype` once.

        Not an all-reduce: that adds in an order which depends on the number of rows, so that a request's last bits
        would depend on its neighbours. by_the_norm: the reader may exchange them too, to the same bits.
        """
        if by_the_norm and self.peers is not None and self.peers.fits(part):
            return SharedSums(part, dtype, self.peers)
        total = part.total_in_fp32() if isinstance(part, SplitSums) else part
        return SplitSums(self.together(total).float(), dtype)

    def joined(self, part: Tensor) -> Tensor:
        """All columns of a product of which each rank has some: [..., n] -> [..., size * n]."""
        return self.together(part).movedim(0, -2).flatten(-2)

    @_named
    def together(self, part: Tensor) -> Tensor:
        """Every rank's tensor [...], in their order: [size, ...]."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        out = part.new_empty((self.size, *part.shape))
        gather(out.view(-1), part.contiguous().view(-1), group=self.device_group)
        return out

    # --- on the host ---

    def wait_for(self, event: torch.cuda.Event, seconds: float | None = None) -> None:
        """Wait for what was launched on the device, for STEP_SECONDS unless it is said otherwise.

        Raises RanksError if that takes too long, or another rank's process has ended: a graph that exchanges something
        with a rank that has gone never ends, and nobody else watches over it. Also where a kernel has waited for
        another rank in vain, and went on without its part.
        """
        self.check_together()
        start, seconds = time.monotonic(), STEP_SECONDS if seconds is None else seconds
        look = start + LIVING_SECONDS
        while not event.query():
            now = time.monotonic()
            if now > look:
                look = now + LIVING_SECONDS
                if gone := [rank for rank, process in self.processes.items() if has_ended(process)]:
                    self._end(f"the processes of ranks {gone} have ended; end all ranks")
            if now > start + seconds:
                self._end(f"a step did not end in {seconds:g} s: another rank has gone or hangs; end all ranks")
            time.sleep(POLL_SECONDS)
        if any(memory.gave_up() for memory in self._memories):
            self._end("a kernel has waited for another rank's part in vain: it has gone or hangs; end all ranks")

    def _end(self, why: str) -> NoReturn:
        """Raise RanksError, now and from now on, and let the device come to an end."""
        self.lost = why
        try:
            for memory in self._memories:
                memory.give_up()
        finally:
            raise RanksError(why)

    def take_turns(self, stream: torch.cuda.Stream) -> None:
        """What is launched on a stream from now on comes behind all that engines of these ranks have launched on
        others: they count uses of one memory."""
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    @property
    def _memories(self) -> list[PeerMemory]:
        """By which graphs may exchange something: `peers`, and what was there before a wider model."""
        now = [] if self.peers is None else [self.peers]
        return [*now, *(memory for _, memory in self._opened if memory is not self.peers)]

    def check_together(self) -> None:
        """Raise RanksError where the ranks have lost each other before."""
        if self.lost is not None:
            raise RanksError(self.lost)

    @_named
    def meet(self) -> None:
        """Wait for the others, who come to this at different times: before what they do first in a call."""
        # rank 0 waits as long as is given here, or by torch's default; the others by the group's timeout
        dist.monitored_barrier(self.meeting_group, timedelta(seconds=BETWEEN_SECONDS))

    @_named
    def broadcast_from_rank0(self, value: Any) -> Any:
        """Rank 0's value, which can be pickled. The others wait for it as long as in a step: see `meet`."""
        values = [value]
        dist.broadcast_object_list(values, dist.get_global_rank(self.host_group, 0), self.host_group)
        return values[0]

    @_named
    def check_same_on_all_ranks(self, what: str, value: Any) -> None:
        """Raise RanksError, naming `what` and the ranks, on all of them unless all have equal values, which can be
        pickled. They may come to this at different times."""
        self.meet()
        values = self.all_gather_object(value)
        if others := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise RanksError(f"{what} must be the same on all ranks: those of {others} are not rank 0's")

    @_named
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, which can be pickled, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values


@atexit.register
def _end_threads() -> None:
    """Have gloo's threads end before Python does, also those of groups that were destroyed and are held here.

    A collective returns before its thread has given the tensors back, and for that it needs Python: where that ends
    meanwhile torch (2.13) aborts a process that has done all it should ("terminate called without an active
    exception"). Not where a thread is inside a collective, for whose end this would wait.
    """
    for ranks in list(_ALL):
        if ranks.exchanges:
            continue
        ranks.lost = "Python is ending"
        for name in ("device_group", "host_group", "meeting_group"):
            group = getattr(ranks, name)
            if isinstance(group, dist.ProcessGroup) and group.name() == "gloo":
                with suppress(ValueError):  # it was destroyed before
                    dist.destroy_process_group(group)
                setattr(ranks, name, None)  # the last to hold it waits for its threads
            group = None


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Memory that is connected in the block needs no NVLink multicast, which some machines lack."""
    before = os.environ.get(_MULTICAST)
    os.environ[_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST]
        else:
            os.environ[_MULTICAST] = before


_KNOWN: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
_ALL: weakref.WeakSet[Ranks] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # where there is fork; a child has none of the threads
    os.register_at_fork(after_in_child=_ALL.clear)
