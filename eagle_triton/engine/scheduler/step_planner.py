"""Which step a batch launches next: over which tree and in which mode, and when its draft catches up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from eagle_triton.engine import skipped_features
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.prefill import grow_first_tree
from eagle_triton.engine.scheduler.running_request import RunningRequest
from eagle_triton.engine.state import Sequences, scratch_rows
from eagle_triton.engine.step import Judge, Mode
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.verification import Verification

MIN_SCRATCH_ROWS = 128  # rows kept free after a sequence, so that it may change to most trees while it runs


SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
"""Sequences that a step is captured for, beside all that there are slots for."""
PATIENCE = 64  # steps that would have done with a smaller size before it is captured, which takes seconds


def size_for(slots: int, most: int) -> int:
    """The smallest size of a step that covers the first `slots` slots, of `most`."""
    return min(next((size for size in SIZES if size >= slots), most), most)


def rows_behind(spec: TreeSpec, drafts: bool) -> int:
    """How many rows a batch keeps free after each sequence; `spec` is its largest tree."""
    return max(scratch_rows(spec), MIN_SCRATCH_ROWS, skipped_features.ROWS + 1) if drafts else scratch_rows(spec)


class StepOptions(NamedTuple):
    """What a batch wants of every step, see there."""

    drafts: bool
    logprobs: bool
    report_drafts: bool
    verification: Verification
    judge: Judge | None = None


class StepPlanner:
    """Chooses the steps of a batch.

    state: of the tree that was drafted, which the next step verifies, for the first so many of the sequences: a step
    costs what these cost. levels: that were scored for it. every_level: score all levels of adaptive trees, whatever
    the gammas of those who run are. rows_behind: free after each sequence. plain_steps: launched since the draft knew
    all tokens; None while it does.
    """

    def __init__(self, engine: Engine, sequences: Sequences, spec: TreeSpec, rows_behind: int, options: StepOptions):
        self._engine, self._sequences = engine, sequences
        self.rows_behind, self.options = rows_behind, options
        draft = engine.draft if options.drafts else None
        self._catches_up = draft is not None and draft.must_catch_up
        self._learns = draft is not None and draft.learns
        self.every_level = False
        self.plain_steps: int | None = None
        self._asked = 0  # in turn for a smaller size
        self.spec = spec
        self.state = engine.state(sequences, spec).first(size_for(1, sequences.slots))
        self.levels = spec.beam_levels

    @property
    def spec(self) -> TreeSpec:
        """The tree of the next step. Raises ValueError, when set, for one that does not fit."""
        return self._spec

    @spec.setter
    def spec(self, spec: TreeSpec) -> None:
        self._engine.view.check_tree(spec)
        if spec.drafts and not self.options.drafts:
            raise ValueError("spec: this batch has no draft, or was made with drafts=False")
        if scratch_rows(spec) > self.rows_behind:
            raise ValueError(
                f"spec: a tree with {scratch_rows(spec)} rows does not fit into the {self.rows_behind} behind each "
                "sequence; make the batch with the largest tree"
            )
        self._spec = spec

    def resize(self, slots: int) -> None:
        """Let the next steps be over the first so many slots, or some more, and no others. Those that are new to them
        have no trees yet. A smaller size that is not captured yet has to be asked for PATIENCE times."""
        size = size_for(max(slots, 1), self._sequences.slots)
        state = self._engine.state(self._sequences, self.state.spec).first(size)
        self._asked = self._asked + 1 if size < self.state.batch else 0
        if size > self.state.batch or self._asked > PATIENCE or self._engine.has_step(state):
            self.state, self._asked = state, 0

    def next(self, entries: Sequence[RunningRequest]) -> tuple[Callable[[], None], int]:
        """The step to launch now for those who are there, compiled and captured if it is new, for the tree that is
        wanted, and how many levels it scores for the one after it.

        An exception on the way leaves all as it was, but that some of it may be done already.
        """
        mode = self.mode(entries)
        self.change_tree(mode)
        if self.plain_steps == skipped_features.ROWS:
            self._catch_up()
        step = self._engine.step(self.state, mode)
        if self.plain_steps is not None:
            self.plain_steps += 1
        return step, self._spec.beam_levels if mode.levels is None else mode.levels

    def mode(self, entries: Iterable[RunningRequest]) -> Mode:
        """How a step for them must run. Raises ValueError if they cannot be in one batch."""
        entries = list(entries)
        requests = [entry.request for entry in entries]
        sampled = [request.sampling for request in requests if not request.sampling.greedy]
        orders = {sampling.top_p_first for sampling in sampled}
        if len(orders) > 1:
            raise ValueError("sampling: top_p_first must be the same for all sampled requests of a batch")
        return Mode(
            sampled=bool(sampled),
            top_p_first=True in orders,
            keep_features=self._catches_up and not self._spec.drafts,
            learns=self._learns and not self._spec.drafts,
            processed=any(request.processed for request in requests),
            logprobs=self.options.logprobs or any(request.logprobs for request in requests),
            logits=any(request.logits for request in requests),
            drafts=self.options.report_drafts,
            levels=self._wanted_levels(entries),
            filtered=any(sampling.filtered for sampling in sampled),
            verification=self.options.verification,
            judge=self.options.judge,
        )

    def change_tree(self, mode: Mode) -> None:
        """Go over to `spec` if that is not the tree that was drafted."""
        starts_skipping = self._catches_up and not self._spec.drafts and self.plain_steps is None
        if starts_skipping:
            skipped_features.start_skipping(self._engine.view, self._sequences)
        if self._spec != self.state.spec:
            if self._spec.drafts and self.plain_steps is not None:
                self._catch_up()
                self.plain_steps = None
            state = self._engine.state(self._sequences, self._spec).first(self.state.batch)
            grow = functools.partial(grow_first_tree, self._engine.ops, self._engine.draft, state)
            self._engine.compile_ahead(state, mode, grow)
            grow()
            self.state, self.levels = state, self._spec.beam_levels
        if starts_skipping:
            self.plain_steps = 0
        if self.plain_steps is not None:
            self._engine.catch_up(self.state)  # made now, where that is new, not when it is launched

    def _catch_up(self) -> None:
        if self.plain_steps:
            self._engine.catch_up(self.state)()
            self.plain_steps = 0

    def _wanted_levels(self, entries: Iterable[RunningRequest]) -> int | None:
        """How many levels the next step scores: enough for every running sequence, as far as is known."""
        gammas = [entry.gamma for entry in entries if entry.decodes]
        if not self._spec.adaptive or self._engine.draft is None or not gammas or self.every_level:
            return None
        return self._engine.draft.levels_for(self._spec, max(gammas))
