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

WARM_UPS = 2  # eager runs before a capture: kernels compile, libraries allocate their workspaces


class LaunchGraph:
    """Launches captured once, replayed at the price of one. They have run before: nothing is compiled or allocated by
    libraries any more. Keeps what the launches refer to, since their replays use that memory."""

    def __init__(self, launches: Callable[[], None], ops: Operations, pool: Any, ranks: Ranks | None = None):
        """pool: torch.cuda.graph_pool_handle() of the graphs that never run at once. ranks: with whom the launches
        exchange something."""
        before = Counter(ops.calls)
        self.graph, self.launches = _Graph(), launches
        if ranks is not None:  # a capture waits for the device, without a bound
            wait_for_all(torch.device("cuda"), ranks)
        torch.cuda.current_blas_handle()  # a thread makes its own when it first multiplies, and cannot in a capture
        stream = torch.cuda.current_stream()
        try:
            with (
                _cublas_workspaces_of_its_own(),
                _nothing_collected(),
                torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"),  # others may allocate
            ):
                launches()
        except BaseException:  # after which torch 2.11 still records to the pool, and stays on the capture's stream
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            _failed_captures.append((self.graph, pool))
            torch.cuda.set_stream(stream)
            raise
        self.calls = ops.calls - before  # what one replay runs
        self.ops = ops

    def __call__(self) -> None:
        """Launch all of them."""
        self.graph.replay()
        self.ops.calls.update(self.calls)


def takes_captures(pool: Any) -> bool:
    """Whether a graph can be captured into this pool: no capture into it has failed."""
    return all(pool != failed for _, failed in _failed_captures)


# torch 2.11 goes on recording pinned memory for a capture that failed: its pool takes no other capture, and whoever
# allocates pinned memory asks the graph, which must live.
_failed_captures: list[tuple[_Graph, Any]] = []


class _Graph(torch.cuda.CUDAGraph):
    """A graph whose capture leaves torch's generator to other threads, which draw random numbers meanwhile; what is
    captured here draws none.

    torch may release Python's lock while the capture begins. A thread that draws on the GPU in these microseconds gets
    a RuntimeError ("Offset increment outside graph capture").
    """

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        others = generator.graphsafe_get_state()
        generator.graphsafe_set_state(others.clone_state())  # which the capture takes for its own
        try:
            super().capture_begin(*args, **kwargs)
        finally:
            generator.graphsafe_set_state(others)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Collect no garbage inside the block: what frees device memory waits for the device, and fails a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _cublas_workspaces_of_its_own() -> Iterator[None]:
    """Have cuBLAS take its workspaces from the memory of the graph that is captured inside the block.

    torch keeps a workspace for all products of a stream, and frees it whenever somebody clears these, as graphs of
    torch.compile do. A graph that was captured with such a one would write to freed memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class StepGraph(LaunchGraph):
    """A step, or what else is launched between steps, captured once for the tensors of one state."""

    def __init__(
        self,
        step: Callable[[], None],
        state: DecodeState,
        ops: Operations,
        pool: Any,
        ranks: Ranks | None = None,
        what: str = "a step",
    ):
        """Run `step` a few times with no sequence active, then capture it. What the state holds stays as it is.

        pool, ranks: see LaunchGraph. what: `step` in words, for people at a terminal and the log.
        """
        start = time.perf_counter()
        # a progress line for people at a terminal; gone when the capture is done, which takes seconds once per shape
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
    """The device's time for a step."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


class ReportQueue:
    """Carries what the device reports to the host, in order. On a GPU the copies are asynchronous."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None):
        """ranks: with whom the steps exchange something."""
        self.cuda, self._ranks = device.type == "cuda", ranks
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def send(self, report: Tensor) -> None:
        """Queue the copy of a report, an int64 tensor that the next step may overwrite."""
        copied = torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=self.cuda)
        copied.copy_(report, non_blocking=self.cuda)
        event = None
        if self.cuda:
            event = torch.cuda.Event()
            event.record()
        self._sent.append((copied, event))

    def receive(self) -> Tensor:
        """The oldest report not received yet, waiting for what it reports of only."""
        copied, event = self._sent.popleft()
        if event is not None:
            wait_for(event, self._ranks)
        return copied


def wait_for(event: torch.cuda.Event, ranks: Ranks | None) -> None:
    """Wait for what was launched on the device, but not for ever if it exchanges something with other ranks."""
    if ranks is None:
        event.synchronize()
    else:
        ranks.wait_for(event)


def wait_for_all(device: torch.device, ranks: Ranks | None) -> None:
    """`wait_for` all that was launched in the current stream, if the device is one that lets others go on meanwhile."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        wait_for(event, ranks)
