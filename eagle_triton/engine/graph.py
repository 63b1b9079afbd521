"""A decode step as one CUDA graph launch, and reading its results without making the device wait."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_triton.engine.operations import Operations
from eagle_triton.engine.ranks import Ranks
from eagle_triton.engine.state import DecodeState

log = logging.getLogger(__name__)

WARM_UPS = 2  # eager runs before a capture: kernels compile, libraries allocate workspaces


class LaunchGraph:
    """Launches captured once, and replayed as one. The launches must have run before, so that nothing is compiled and
    libraries allocate nothing. Keeps all objects that the launches refer to, because replays use their memory."""

    def __init__(self, launches: Callable[[], None], ops: Operations, pool: Any, ranks: Ranks | None = None):
        """pool: torch.cuda.graph_pool_handle(), for graphs that never run at the same time. ranks: the launches
        exchange data with these."""
        before = Counter(ops.calls)
        self.graph, self.launches = _Graph(), launches
        if ranks is not None:  # a capture waits for the device without a time limit; this wait has one
            wait_for_all(torch.device("cuda"), ranks)
        torch.cuda.current_blas_handle()  # a thread makes it at its first product, but not in a capture
        stream = torch.cuda.current_stream()
        try:
            with (
                _own_cublas_workspaces(),
                _no_garbage_collection(),
                torch.cuda.graph(
                    self.graph, pool=pool, capture_error_mode="thread_local"
                ),  # other threads may allocate
            ):
                launches()
        except BaseException:  # torch 2.11 would keep recording to the pool, and stay on the capture's stream
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            _failed_captures.append((self.graph, pool))
            torch.cuda.set_stream(stream)
            raise
        self.calls = ops.calls - before  # of one replay
        self.ops = ops

    def __call__(self) -> None:
        self.graph.replay()
        self.ops.calls.update(self.calls)


def takes_captures(pool: Any) -> bool:
    """Whether graphs can be captured into this pool: no capture into it has failed."""
    return all(pool != failed for _, failed in _failed_captures)


# torch 2.11 keeps recording pinned memory for a failed capture. Its pool takes no other capture, and the graph must
# stay alive, because every allocation of pinned memory uses it.
_failed_captures: list[tuple[_Graph, Any]] = []


class _Graph(torch.cuda.CUDAGraph):
    """A graph that does not take over torch's generator during its capture, so that other threads can draw random
    numbers. The captured launches draw none.

    torch may release Python's lock while the capture begins. A thread that draws on the GPU in these microseconds gets
    a RuntimeError ("Offset increment outside graph capture").
    """

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        others = generator.graphsafe_get_state()
        generator.graphsafe_set_state(others.clone_state())  # the capture takes over this copy
        try:
            super().capture_begin(*args, **kwargs)
        finally:
            generator.graphsafe_set_state(others)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside the block: freeing device memory waits for the device, which a capture does not
    allow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _own_cublas_workspaces() -> Iterator[None]:
    """Have cuBLAS allocate its workspaces in the pool of the graph that is captured inside the block.

    torch keeps one workspace for all products of a stream. It is freed when workspaces are cleared, as torch.compile's
    graphs do. A graph captured with it would then write to freed memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class StepGraph(LaunchGraph):
    """A step, or other launches over one state, captured once."""

    def __init__(
        self,
        step: Callable[[], None],
        state: DecodeState,
        ops: Operations,
        pool: Any,
        ranks: Ranks | None = None,
        what: str = "a step",
    ):
        """Run `step` a few times with no active sequence, then capture it. The state does not change.

        pool, ranks: see LaunchGraph. what: the name of `step` in the progress bar and the log.
        """
        start = time.perf_counter()
        # a capture takes seconds; the bar shows on a terminal only, and disappears afterwards
        steps = tqdm(total=WARM_UPS + 1, desc=f"compiling and capturing {what}", leave=False, disable=None)
        with state.unchanged(), steps:
            stream = torch.cuda.Stream(state.lengths.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    step()
                    steps.update()
            torch.cuda.current_stream().wait_stream(stream)
            super().__init__(step, ops, pool, ranks)
        log.info("captured %s in %.1f s", what, time.perf_counter() - start)


def median_milliseconds(step: Callable[[], None], rounds: int = 20) -> float:
    """The median time of a step on the device."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


class ReportQueue:
    """Copies reports from the device to the host, in order. On a GPU the copies are asynchronous."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None):
        """ranks: the steps exchange data with these."""
        self.cuda, self._ranks = device.type == "cuda", ranks
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def send(self, report: Tensor) -> None:
        """Queue the copy of a report, int64. The next step may overwrite it."""
        copied = torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=self.cuda)
        copied.copy_(report, non_blocking=self.cuda)
        event = None
        if self.cuda:
            event = torch.cuda.Event()
            event.record()
        self._sent.append((copied, event))

    def receive(self) -> Tensor:
        """The oldest report not received yet. Waits for its step only."""
        copied, event = self._sent.popleft()
        if event is not None:
            wait_for(event, self._ranks)
        return copied


def wait_for(event: torch.cuda.Event, ranks: Ranks | None) -> None:
    """Wait for an event on the device; with ranks, not forever, see Ranks.wait_for."""
    if ranks is None:
        event.synchronize()
    else:
        ranks.wait_for(event)


def wait_for_all(device: torch.device, ranks: Ranks | None) -> None:
    """`wait_for` all launches in a GPU's current stream."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        wait_for(event, ranks)
