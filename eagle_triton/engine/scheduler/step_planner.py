"""Plan a batch's next step: its tree and mode, and when the draft catches up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from eagle_triton.engine import skipped_features
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model import one_launch
from eagle_triton.engine.prefill import grow_first_tree
from eagle_triton.engine.scheduler.requests import RunningRequest
from eagle_triton.engine.state import Sequences, scratch_rows
from eagle_triton.engine.step import Judge, Mode
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.verification import Verification

MIN_SCRATCH_ROWS = 128  # rows kept free after a sequence, so that most trees fit while it runs

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
"""A step is captured for these numbers of sequences, and for all slots."""
PATIENCE = 64  # steps that could have been smaller before a smaller size is captured, which takes seconds


def size_for(slots: int, most: int) -> int:
    """The smallest size of a step that covers the first `slots` slots, of `most`."""
    return min(next((size for size in SIZES if size >= slots), most), most)


def spare_rows(spec: TreeSpec, draft: Draft | None) -> int:
    """How many rows a batch keeps free after each sequence; spec: its largest tree."""
    least = 0 if draft is None else max(MIN_SCRATCH_ROWS, skipped_features.ROWS + 1)
    return max(scratch_rows(spec, draft), least)


class StepOptions(NamedTuple):
    """A batch's options for every step, see `Batch`."""

    drafts: bool
    logprobs: bool
    report_drafts: bool
    verification: Verification
    judge: Judge | None = None


class StepPlanner:
    """Chooses the steps of a batch.

    state: has the tree that the next step verifies, over the first `state.batch` sequences, which decide a step's cost.
    levels: how many were scored for the tree. every_level: score all levels of adaptive trees, whatever the requests'
    gammas are. spare_rows: rows free after each sequence. plain_steps: how many were launched since the draft knew all
    tokens; None while it does. draft: None if nothing is ever drafted.
    """

    def __init__(self, engine: Engine, sequences: Sequences, spec: TreeSpec, spare_rows: int, options: StepOptions):
        self._engine, self._sequences = engine, sequences
        self.spare_rows, self.options = spare_rows, options
        self.draft = draft = engine.draft if options.drafts else None
        self._catches_up = draft is not None and draft.must_catch_up
        self._learns = draft is not None and draft.learns
        self.every_level = False
        self.plain_steps: int | None = None
        self._asked = 0  # how many times in a row a smaller size was asked for
        self.spec = spec
        self.state = engine.state(sequences, spec).first(size_for(1, sequences.slots))
        self.levels = spec.beam_levels

    @property
    def only_plain_steps(self) -> bool:
        """Whether every step of the batch is over one row: it has one slot, and drafts nothing."""
        return self._sequences.slots == 1 and self.draft is None

    @property
    def spec(self) -> TreeSpec:
        """The tree of the next step. Setting one that does not fit raises ValueError."""
        return self._spec

    @spec.setter
    def spec(self, spec: TreeSpec) -> None:
        self._engine.view.check_tree(spec)
        if spec.drafts and not self.options.drafts:
            raise ValueError("spec: this batch has no draft, or was made with drafts=False")
        if self.draft is not None:
            self.draft.check_tree(spec)
        if (needed := scratch_rows(spec, self.draft)) > self.spare_rows:
            raise ValueError(
                f"spec: this tree needs {needed} rows after each sequence, and the batch has {self.spare_rows}; make "
                "the batch with the largest tree"
            )
        self._spec = spec

    def resize(self, slots: int) -> None:
        """Let the next steps cover the first `slots` slots, or some more. Newly covered slots have no trees yet. A
        smaller size without a captured step is used only if it is asked for more than PATIENCE times in a row."""
        size = size_for(max(slots, 1), self._sequences.slots)
        state = self._engine.state(self._sequences, self.state.spec).first(size)
        self._asked = self._asked + 1 if size < self.state.batch else 0
        if size > self.state.batch or self._asked > PATIENCE or self._engine.steps.has(state):
            self.state, self._asked = state, 0

    def next(self, entries: Sequence[RunningRequest]) -> tuple[Callable[[], None], Mode]:
        """The step to launch now for these requests and the wanted tree, and its mode. A new step is compiled and
        captured.

        After an exception this can be called again.
        """
        mode = self.mode(entries)
        self.change_tree(mode)
        if self.plain_steps == skipped_features.ROWS:
            self._catch_up()
        step = self._engine.steps.of(self.state, mode)
        if self.plain_steps is not None:
            self.plain_steps += 1
        return step, mode

    def mode(self, entries: Iterable[RunningRequest]) -> Mode:
        """How a step for these requests must run. Raises ValueError if they cannot be in one batch."""
        entries = list(entries)
        requests = [entry.request for entry in entries]
        sampled = [request.sampling for request in requests if not request.sampling.greedy]
        orders = {request.filter_order for request in requests} - {None}
        if len(orders) > 1:
            raise ValueError("sampling: top_p_first must be equal in all sampled requests, got True and False")
        longest = max((len(request.prompt) + request.max_new_tokens for request in requests), default=0)
        return Mode(
            sampled=bool(sampled),
            top_p_first=True in orders,
            keep_features=self._catches_up and not self._spec.drafts,
            learns=self._learns and not self._spec.drafts,
            masked=any(request.sampling.grammar is not None for request in requests),
            processed=any(request.processed for request in requests),
            logprobs=self.options.logprobs or any(request.logprobs for request in requests),
            logits=any(request.logits for request in requests),
            top_logprobs=any(request.top_logprobs for request in requests),
            drafts=self.options.report_drafts,
            levels=self._wanted_levels(entries),
            filtered=any(sampling.filtered for sampling in sampled),
            verification=self.options.verification,
            judge=self.options.judge,
            one_launch=self._engine.ops.one_launch and self.only_plain_steps and longest <= one_launch.MAX_ROWS,
        )

    def change_tree(self, mode: Mode) -> None:
        """Change to `spec` if another tree was drafted."""
        starts_skipping = self._catches_up and not self._spec.drafts and self.plain_steps is None
        if starts_skipping:
            skipped_features.start_skipping(self._engine.view, self._sequences)
        if self._spec != self.state.spec:
            if self._spec.drafts and self.plain_steps is not None:
                self._catch_up()
                self.plain_steps = None
            state = self._engine.state(self._sequences, self._spec).first(self.state.batch)
            grow = functools.partial(grow_first_tree, self._engine.ops, self._engine.draft, state)
            self._engine.steps.compile_ahead(state, mode, grow)
            grow()
            self.state, self.levels = state, self._spec.beam_levels
        if starts_skipping:
            self.plain_steps = 0
        if self.plain_steps is not None:
            self._engine.steps.catch_up(self.state)  # made now if new, not when it is launched

    def _catch_up(self) -> None:
        if self.plain_steps:
            self._engine.steps.catch_up(self.state)()
            self.plain_steps = 0

    def _wanted_levels(self, entries: Iterable[RunningRequest]) -> int | None:
        """How many levels the next step scores: enough for every request, by the steps read so far. None: all."""
        gammas = [entry.gamma for entry in entries if entry.decodes]
        if not self._spec.adaptive or self._engine.draft is None or not gammas or self.every_level:
            return None
        return self._engine.draft.levels_for(self._spec, max(gammas))
