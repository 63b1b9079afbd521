"""A decode step as one CUDA graph launch, and reading its results without making the device wait."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import torch

from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import DecodeState

log = logging.getLogger(__name__)

WARM_UPS = 2  # eager runs before a capture: kernels compile, libraries allocate their workspaces


class StepGraph:
    """A step captured once for the tensors of one state, replayed at the price of one launch."""

    def __init__(self, step: Callable[[], None], state: DecodeState, ops: Operations):
        """Run `step` a few times on a frozen state, then capture it. Must come before the state holds a sequence."""
        start = time.perf_counter()
        state.active.fill_(False)
        state.lengths.zero_()
        stream = torch.cuda.Stream(state.lengths.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        before = Counter(ops.calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()
        self.calls = ops.calls - before  # what one replay runs
        self.ops = ops
        log.info("captured a decode step in %.1f s", time.perf_counter() - start)

    def __call__(self) -> None:
        """Launch the step."""
        self.graph.replay()
        self.ops.calls.update(self.calls)


class Outbox:
    """Carries `state.report` of each step to the host. On a GPU the copy is asynchronous, into pinned memory."""

    def __init__(self, state: DecodeState, slots: int):
        self.source = state.report
        self.cuda = state.report.is_cuda
        shape = (slots, *state.report.shape)
        self.buffers = torch.empty(shape, dtype=state.report.dtype, pin_memory=self.cuda)
        self.events = [torch.cuda.Event() for _ in range(slots)] if self.cuda else []
        self.sent = self.received = 0

    def send(self) -> None:
        """Queue the copy of the step launched last."""
        slot = self.sent % len(self.buffers)
        self.buffers[slot].copy_(self.source, non_blocking=self.cuda)
        if self.cuda:
            self.events[slot].record()
        self.sent += 1

    def receive(self) -> list[list[int]]:
        """The oldest copy not received yet, waiting for that step only."""
        slot = self.received % len(self.buffers)
        if self.cuda:
            self.events[slot].synchronize()
        self.received += 1
        return self.buffers[slot].tolist()
