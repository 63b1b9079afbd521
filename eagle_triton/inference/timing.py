"""Time generations and decode steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import wait_for_all
from eagle_triton.engine.ranks import Ranks
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.inference.costs import SETTLING, CostTable, Timing, device_name, shape_of


class Stopwatch:
    """Wall seconds since construction, including the device's work."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        """ranks: the ranks that the device exchanges data with."""
        self.device, self._ranks = device, ranks
        self.start = self._now()

    def seconds(self) -> float:
        """The seconds until now, after waiting for the device."""
        return self._now() - self.start

    def so_far(self) -> float:
        """The seconds until now, without waiting."""
        return max(time.perf_counter() - self.start, 1e-9)

    def _now(self) -> float:
        if self._ranks is not None:
            wait_for_all(self.device, self._ranks)
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@torch.no_grad()
def measure_costs(
    engine: Engine, trees: Sequence[TreeSpec], batches: Sequence[int], context: int, steps: int, least_rows: int = 0
) -> CostTable:
    """Time plain decoding and each of `trees` at every batch size, after random prompts of `context` tokens.

    least_rows: make room for sequences of at least this many tokens.
    """
    view, source, timings = engine.view, torch.Generator("cpu").manual_seed(0), []
    for batch in batches:
        prompts = torch.randint(view.vocab_size, (batch, context), generator=source, device="cpu").to(view.device)
        for spec in (PLAIN, *trees):
            new = (SETTLING + 2 + steps) * (spec.depth + 1)
            with Batch(engine, batch, spec, max(context + new, least_rows)) as running:
                running.admit_all(Request(prompt, new) for prompt in prompts)
                for _ in range(SETTLING + 1):
                    running.step()
                watch = Stopwatch(view.device, view.ranks)
                for _ in range(steps):
                    running.step()
                timings.append(Timing(batch, spec.nodes, spec.depth, watch.seconds() / steps * 1e3))
    dtype = str(view.dtype).removeprefix("torch.")
    return CostTable(device_name(view.device), shape_of(view), dtype, "measured here", tuple(timings))
