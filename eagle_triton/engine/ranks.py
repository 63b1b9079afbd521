"""The processes that share a model by tensor parallelism, and what they exchange.

Every rank runs the same script, and in a step the same operations. It computes products of its own shards, which are
exchanged here, and everything else whole. So all ranks have the same bits, and make the same choices without exchange.
Values that could differ, because they are measured, drawn or come from outside, are taken from rank 0:
`broadcast_from_rank0`.

If a rank has gone, the others raise RanksError: at once if its connections closed or its process ended, otherwise after
`STEP_SECONDS`.

On GPUs that see each other's memory, kernels exchange the ranks' parts (`runtime/peer_memory.py`); a norm exchanges the
sums that it reads. Elsewhere the group's backend exchanges both.
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
from eagle_triton.runtime.launch import StreamOrder
from eagle_triton.runtime.peer_memory import POLLS, PeerMemory
from eagle_triton.runtime.split_sums import SharedSums, SplitSums

STEP_SECONDS = 60.0  # a rank waits this long for another inside a generation: the other may be compiling kernels
POLL_SECONDS = 2e-5
LIVING_SECONDS = 0.5  # in a wait, between two checks that the other ranks' processes are alive
PROOF_POLLS = POLLS // 3  # polls of a wait in `prove_memory`: long enough to compile, shorter than STEP_SECONDS
BETWEEN_SECONDS = 1800.0  # a rank waits this long between generations: the other may be reading files
MAX_EXCHANGED_ROWS = 512  # in one launch: enough for a step with eight trees of 60 nodes

_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

P = ParamSpec("P")
R = TypeVar("R")


class RanksError(RuntimeError):
    """Another rank has gone, hangs, or got another call, and this one cannot go on alone."""


def _raises_ranks_error(exchange: Callable[P, R]) -> Callable[P, R]:
    """Make an exchange raise its failures as RanksError, with advice. After a failure the ranks exchange nothing more,
    because they no longer wait for the same exchange."""

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
    """This process, `rank` of `size`.

    device_group: exchanges tensors on the device. host_group: exchanges Python objects. meeting_group: waits for ranks
    that enter a call at different times. peers: the memory in which kernels exchange parts, if `open_memory` could open
    it; otherwise why_no_peers says why not. processes: of the other ranks on this host. lost: why the ranks can no
    longer work together; None: they can.
    """

    rank: int
    size: int
    device_group: Any
    host_group: Any
    meeting_group: Any
    peers: PeerMemory | None = None
    why_no_peers: str | None = None
    processes: dict[int, psutil.Process] = field(default_factory=dict)
    lost: str | None = None
    exchanges: list[str] = field(default_factory=list)  # in progress, in any thread
    engines: int = 0  # made so far; every rank's script makes them in the same order
    decoding: threading.RLock = field(default_factory=threading.RLock)  # held by the thread that launches
    _opened: list[tuple[Any, PeerMemory]] = field(default_factory=list)  # all, with their owners: graphs still use them
    streams: StreamOrder = field(default_factory=StreamOrder)  # of all engines: they share one memory, count its uses
    _proved: bool = False

    def __post_init__(self) -> None:
        _ALL.add(self)

    @staticmethod
    @_raises_ranks_error
    def of(mesh: Any) -> Ranks:
        """The ranks of a one-dimensional torch.distributed.DeviceMesh. Every rank calls this, after it has loaded its
        part of the model.

        They get their own groups, made once for each mesh, with bounded waits.
        """
        group = mesh.get_group()
        if group not in _KNOWN:
            members = dist.get_process_group_ranks(group)

            def new(backend: str, seconds: float) -> Any:
                return dist.new_group(members, timedelta(seconds=seconds), backend, use_local_synchronization=True)

            meeting = new("gloo", BETWEEN_SECONDS)  # first, because it waits until all ranks are here
            device = new("nccl" if mesh.device_type == "cuda" else "gloo", STEP_SECONDS)
            ranks = Ranks(dist.get_rank(group), len(members), device, new("gloo", STEP_SECONDS), meeting)
            ranks.together(torch.zeros(1, device=mesh.device_type))  # connects now, because a capture cannot
            ranks.processes = processes_beside(ranks.rank, ranks.all_gather_object)
            _KNOWN[group] = ranks
        return _KNOWN[group]

    @torch.inference_mode(False)  # the memory outlives a caller's inference mode
    def open_memory(self, width: int, device: torch.device) -> None:
        """Open memory in which kernels exchange parts and sums of rows of up to `width` elements: torch's symmetric
        memory, without multicast. All ranks call this; once for each width is enough.

        Sets `peers`, or `why_no_peers` if it fails on any rank.
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

        if self._works_on_all_ranks(allocate) and self._works_on_all_ranks(connect):
            self.peers = PeerMemory.of(self.rank, found["blocks"], MAX_EXCHANGED_ROWS, row_bytes)
            self._opened.append((found, self.peers))
            self._proved = False

    def prove_memory(self, ops: Any, like: Tensor) -> None:
        """Compare sums and columns exchanged through `peers` with gathered ones. Unless all bits agree on every rank,
        drop `peers` and set `why_no_peers`.

        ops: Operations. like: a tensor with the width, dtype and device of the sums. All ranks call this after
        `open_memory`; once is enough.
        """
        if self.peers is None or self._proved:
            return
        memory, generator = replace(self.peers, polls=PROOF_POLLS), torch.Generator().manual_seed(self.rank)
        for rows in (1, 3, min(60, memory.rows), memory.rows, 1):
            part = torch.randn(rows, like.shape[-1], generator=generator).to(like.device, torch.float32)
            parts = part, part.to(like.dtype)
            gathered = [self.together(each) for each in parts]  # outside `compare`, so that all ranks do it

            def compare(rows: int = rows, parts: Any = parts, gathered: Any = gathered) -> None:
                for each, all_parts in zip(parts, gathered, strict=True):
                    summed = ops.add(SharedSums(each, like.dtype, memory))
                    joined = ops.join_columns(each, memory)
                    if not torch.equal(summed, ops.add(SplitSums(all_parts.float(), like.dtype))):
                        raise RuntimeError(f"sums of {rows} rows through the ranks' memory differ from gathered ones")
                    if not torch.equal(joined, torch.cat(all_parts.unbind(0), -1)):
                        raise RuntimeError(
                            f"columns of {rows} rows through the ranks' memory differ from gathered ones"
                        )
                if memory.gave_up():
                    raise RuntimeError(f"{rows} rows did not arrive in the ranks' memory in time")

            if not self._works_on_all_ranks(compare):
                self.peers = None
                return
        self._proved = True

    def _works_on_all_ranks(self, what: Callable[[], None]) -> bool:
        """Whether `what` succeeds on all ranks; if not, sets `why_no_peers`."""
        reason = None
        try:
            what()
        except Exception as error:  # the group's backend exchanges sums instead, and the report says so
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        gathered = enumerate(self.all_gather_object(reason))
        reasons = [f"rank {rank}: {other}" for rank, other in gathered if other is not None]
        self.why_no_peers = "; ".join(reasons) or None
        return not reasons

    @property
    def note(self) -> str | None:
        """The report's note on how GPUs exchange sums."""
        by_nccl = f"NCCL gathers the ranks' parts, because symmetric memory failed: {self.why_no_peers}"
        if self.peers is None:
            return None if self.why_no_peers is None else by_nccl
        by_kernels = "kernels exchange the ranks' parts through symmetric memory"
        if self.why_no_peers is None:
            return by_kernels
        return f"{by_kernels}; for rows wider than {self.peers.row_bytes // 4} elements {by_nccl}"

    # --- in a step ---

    def peers_for(self, kernels: bool, device: torch.device) -> PeerMemory | None:
        """The memory in which operations exchange parts. kernels: whether the operations are kernels. References use it
        only on a CPU, because elsewhere they would not wait for the other ranks."""
        return self.peers if kernels or device.type == "cpu" else None

    def summed(self, part: Tensor | SplitSums, dtype: torch.dtype, by_the_norm: bool = False) -> SplitSums | SharedSums:
        """The sum of every rank's part [..., N] of a product. The reader adds the parts in rank order, like the splits
        of one product, and rounds to `dtype` once.

        Not an all-reduce: its order depends on the number of rows, so a request's last bits would depend on the other
        requests. by_the_norm: the reader can exchange the parts itself, with the same bits.
        """
        if by_the_norm and self.peers is not None and self.peers.fits(part):
            return SharedSums(part, dtype, self.peers)
        total = part.total_in_fp32() if isinstance(part, SplitSums) else part
        return SplitSums(self.together(total).float(), dtype)

    def joined(self, part: Tensor) -> Tensor:
        """All columns of a product, n from each rank: [..., n] -> [..., size * n]."""
        return self.together(part).movedim(0, -2).flatten(-2)

    @_raises_ranks_error
    def together(self, part: Tensor) -> Tensor:
        """Every rank's tensor [...], in rank order: [size, ...]."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        out = part.new_empty((self.size, *part.shape))
        gather(out.view(-1), part.contiguous().view(-1), group=self.device_group)
        return out

    # --- on the host ---

    def wait_for(self, event: torch.cuda.Event, seconds: float | None = None) -> None:
        """Wait for an event on the device, at most `seconds`; None: STEP_SECONDS.

        Raises RanksError if that takes too long, if another rank's process has ended, or if a kernel gave up waiting
        for another rank's part. A graph that exchanges data with a rank that has gone never ends, and nothing else
        notices this.
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
            self._end("another rank's part did not arrive in a kernel: the rank has gone or hangs; end all ranks")

    def _end(self, why: str) -> NoReturn:
        """Raise RanksError, now and in every later exchange, and let waiting kernels end."""
        self.lost = why
        try:
            for memory in self._memories:
                memory.give_up()
        finally:
            raise RanksError(why)

    @property
    def _memories(self) -> list[PeerMemory]:
        """All memory that graphs may use: `peers`, and the memory opened before for narrower rows."""
        now = [] if self.peers is None else [self.peers]
        return [*now, *(memory for _, memory in self._opened if memory is not self.peers)]

    def check_together(self) -> None:
        """Raise RanksError if the ranks can no longer work together."""
        if self.lost is not None:
            raise RanksError(self.lost)

    @_raises_ranks_error
    def meet(self) -> None:
        """Wait for all ranks, which may enter a call at different times."""
        # rank 0 waits for the time given here, the others for the group's timeout
        dist.monitored_barrier(self.meeting_group, timedelta(seconds=BETWEEN_SECONDS))

    @_raises_ranks_error
    def broadcast_from_rank0(self, value: Any) -> Any:
        """Rank 0's value, which must be picklable. The other ranks wait STEP_SECONDS for it: see `meet`."""
        values = [value]
        dist.broadcast_object_list(values, dist.get_global_rank(self.host_group, 0), self.host_group)
        return values[0]

    @_raises_ranks_error
    def check_same_on_all_ranks(self, what: str, value: Any) -> None:
        """Raise RanksError on all ranks unless their values are equal. Values must be picklable. Ranks may call this at
        different times."""
        self.meet()
        values = self.all_gather_object(value)
        if others := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise RanksError(f"{what} must be the same on all ranks: ranks {others} and rank 0 differ")

    @_raises_ranks_error
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, which must be picklable, in rank order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values


@atexit.register
def _end_threads() -> None:
    """End gloo's threads before Python ends, also the threads of destroyed groups that are still referenced here.

    A collective returns before its thread has released the tensors, which needs Python. If Python ends in between,
    torch (2.13) aborts the process ("terminate called without an active exception"). Groups with a thread inside a
    collective are left alone, because ending these would wait for it.
    """
    for ranks in list(_ALL):
        if ranks.exchanges:
            continue
        ranks.lost = "Python is ending"
        for name in ("device_group", "host_group", "meeting_group"):
            group = getattr(ranks, name)
            if isinstance(group, dist.ProcessGroup) and group.name() == "gloo":
                with suppress(ValueError):  # it is destroyed already
                    dist.destroy_process_group(group)
                setattr(ranks, name, None)  # dropping the last reference waits for its threads
            group = None


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Connect memory in the block without NVLink multicast, which some machines lack."""
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
if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_ALL.clear)
