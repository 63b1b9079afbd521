"""The cost of a decode step: measured, from a table of measurements, or assumed if nothing was measured."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.tree_spec import TreeSpec

TABLES = Path(__file__).parent / "costs.json"
ROW_COST = 0.0045  # assumed cost of one more row in the target's forward, in plain steps of one sequence
LIVE = 9  # a tree's cost is the median of this many last times
SETTLING = 2  # steps not timed after the first one with a new tree (nor is that): graphs are captured, caches catch up


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a decode step of `batch` sequences with trees of `nodes` nodes (1: plain) and `depth` levels."""

    batch: int
    nodes: int
    depth: int
    ms: float


@dataclass(frozen=True)
class CostTable:
    """Measured decode steps of one model shape on one device. source: where the figures come from."""

    device: str
    shape: tuple[int, int, int]  # layers, hidden size, vocabulary of the target
    dtype: str
    source: str
    timings: tuple[Timing, ...]

    def __post_init__(self) -> None:
        if not any(timing.nodes == 1 for timing in self.timings):
            raise ValueError(f"cost table of {self.device}: no plain step (nodes 1) among its timings")

    @staticmethod
    def read(path: str | Path = TABLES) -> list[CostTable]:
        """All tables of a JSON file; default: those that come with the package."""
        tables = json.loads(Path(path).read_text(encoding="utf-8"))
        return [
            CostTable(
                **{**table, "shape": tuple(table["shape"]), "timings": tuple(Timing(*row) for row in table["timings"])}
            )
            for table in tables
        ]

    @staticmethod
    def write(tables: Iterable[CostTable], path: str | Path) -> None:
        """Write tables in the form that `read` takes."""
        rows = [{**asdict(table), "timings": [list(asdict(row).values()) for row in table.timings]} for table in tables]
        Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def find(tables: Iterable[CostTable], view: ModelView) -> CostTable | None:
        """The table for this model's shape, dtype and device, if there is one."""
        tables = list(tables)
        if not all(isinstance(table, CostTable) for table in tables):
            raise TypeError("costs must be a list of CostTable, as CostTable.read(path) gives it")
        wanted = device_name(view.device), shape_of(view), str(view.dtype).removeprefix("torch.")
        return next((table for table in tables if (table.device, table.shape, table.dtype) == wanted), None)

    def ms(self, batch: int, nodes: int, depth: int) -> float | None:
        """Measured milliseconds of these steps, None if unknown. Linear between measured batch sizes and above them.
        Below the smallest size, or with only one size, its time."""
        known = sorted((row.batch, row.ms) for row in self.timings if (row.nodes, row.depth) == (nodes, depth))
        if not known:
            return None
        if len(known) == 1 or batch <= known[0][0]:
            return known[0][1]
        above = next((index for index, (size, _) in enumerate(known) if size >= batch), len(known) - 1)
        (low, low_ms), (high, high_ms) = known[above - 1], known[above]
        return low_ms + (high_ms - low_ms) * (batch - low) / (high - low)

    def trees(self) -> set[tuple[int, int]]:
        """(nodes, depth) of the trees that were timed."""
        return {(row.nodes, row.depth) for row in self.timings if row.nodes > 1}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def shape_of(view: ModelView) -> tuple[int, int, int]:
    """Layers, hidden size and vocabulary, by which a cost table is found."""
    return len(view.layers), view.hidden_size, view.vocab_size


def pass_cost(view: ModelView, draft: Draft) -> float:
    """The approximate cost of a pass of the draft: the bytes it reads over the bytes that a target forward reads."""
    return draft.weight_bytes(TreeSpec.dynamic(2, 0, 1)) / view.weight_bytes


class StepCosts:
    """Milliseconds per step for any tree over `slots` sequences.

    Trees that ran over this many have measured times. Others are estimated from `table`, if there is one, and from the
    assumption that a pass of the draft costs `pass_cost` plain steps, and each further row ROW_COST, plus the further
    experts it reads in a mixture. Estimates are scaled to the measured times, if possible to those over `slots`
    sequences.
    """

    def __init__(
        self,
        slots: int,
        pass_cost: float,
        table: CostTable | None = None,
        bytes_read: Callable[[int], float] = lambda rows: 1.0,
    ) -> None:
        """bytes_read: weights that a forward of the target over a number of rows reads; see ModelView."""
        self.slots, self.pass_cost, self.table, self._bytes_read = slots, pass_cost, table, cache(bytes_read)
        self._live: dict[tuple[int, TreeSpec], deque[float]] = {}  # by the number of sequences
        self._last: tuple[int, TreeSpec] | None = None
        self._settling = 0

    def add(self, spec: TreeSpec, ms: float, slots: int | None = None) -> None:
        """Record the time of a step over `slots` sequences; None: `self.slots`. The first steps after a change do not
        count."""
        step = self.slots if slots is None else slots, spec
        if step != self._last:
            self._last, self._settling = step, SETTLING
        elif self._settling:
            self._settling -= 1
        else:
            self._live.setdefault(step, deque(maxlen=LIVE)).append(ms)

    def measured(self, spec: TreeSpec, slots: int | None = None) -> float | None:
        """The median of this tree's last times over `slots` sequences, if known."""
        times = self._live.get((self.slots if slots is None else slots, spec), ())
        return statistics.median(times) if len(times) >= 3 else None

    def ms(self, spec: TreeSpec) -> float:
        """Measured or estimated milliseconds. If nothing was measured, only ratios have a meaning."""
        own = self.measured(spec)
        if own is not None:
            return own
        known = [(ms, *step) for step in self._live if (ms := self.measured(step[1], step[0])) is not None]
        here = [row for row in known if row[1] == self.slots] or known
        ratios = [ms / self._estimate(other, slots) for ms, slots, other in here]
        return (statistics.geometric_mean(ratios) if ratios else 1.0) * self._estimate(spec, self.slots)

    def origin(self, spec: TreeSpec) -> str:
        """Where `ms(spec)` comes from, in words."""
        if self.measured(spec) is not None:
            return "measured in this run"
        if self.table is not None:
            exact = self.table.ms(self.slots, spec.nodes, spec.beam_levels) is not None
            return f"{'' if exact else 'scaled from '}table of {self.table.device} ({self.table.source})"
        return f"assumed ({self.pass_cost:.3f} plain steps per draft pass, {ROW_COST} per row): nothing was measured"

    def _estimate(self, spec: TreeSpec, slots: int) -> float:
        relative = self._assumed(spec.nodes, spec.beam_levels, slots)
        if self.table is None:
            return relative
        exact = self.table.ms(slots, spec.nodes, spec.beam_levels)
        if exact is not None:
            return exact
        plain = self.table.ms(slots, 1, 0)
        assert plain is not None, "a cost table has plain steps"
        trees = sorted(self.table.trees(), key=lambda tree: abs(tree[0] - spec.nodes))
        nearest = self.table.ms(slots, *trees[0]) if trees else None
        if nearest is None:
            return plain * relative
        return plain * (1 + (nearest / plain - 1) * (relative - 1) / (self._assumed(*trees[0], slots) - 1))

    def _assumed(self, nodes: int, depth: int, slots: int) -> float:
        """The assumed cost, relative to a plain step of the same number of sequences."""
        weights = self._bytes_read(slots * nodes) / self._bytes_read(slots)
        return weights + self.pass_cost * depth + ROW_COST * slots * (nodes - 1)
