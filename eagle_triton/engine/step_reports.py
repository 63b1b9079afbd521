"""Steps that were launched and are not read yet, and what their reports say of each request."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import ReportQueue
from eagle_triton.engine.requests import NAN, REASONS, GuideReading, Progress, Request
from eagle_triton.engine.slot_entry import SlotEntry
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.step_chooser import StepOptions
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.reference.verification import ERROR, FAULT, REASON, REPORT_TOKENS

_FAILED = (0, 0, ERROR)  # how the report of a step begins for a sequence whose logits are NaN


class Begun(NamedTuple):
    """Prompts that have been read: whose, and by slot whether the target's logits were NaN, when the device says so."""

    entries: dict[int, SlotEntry]
    nan: Tensor


class LaunchedStep(NamedTuple):
    """A step that was launched: for whom, on what, how many levels were scored for the tree that it verifies, who
    began right before it, whether prompts were read there, and the logits of its tokens if somebody asks for them."""

    entries: list[SlotEntry | None]
    state: DecodeState
    levels: int
    begun: list[Begun]
    reads: bool
    logits: Tensor | None = None

    def nan_behind_prompt(self, slot: int) -> bool:
        """Whether the request in a slot began right before it, from logits that were NaN."""
        entry = self.entries[slot]
        return any(entry is begun.entries.get(slot) and bool(begun.nan[slot]) for begun in self.begun)


class StepReports:
    """Steps in flight, the oldest first.

    most: so many are launched before the oldest is read: on a GPU one more, so that it never waits for the host.
    """

    def __init__(self, engine: Engine, options: StepOptions):
        self._engine, self._options = engine, options
        self.most = 2 if engine.view.device.type == "cuda" else 1
        self._queue = ReportQueue(engine.view.device, 2, engine.view.ranks)
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def trees(self) -> list[TreeSpec]:
        """Those that the steps in flight verify."""
        return [step.state.spec for step in self._steps]

    def send(self, step: LaunchedStep) -> None:
        """The step was launched last: have its report copied to the host."""
        self._queue.send(step.state.report)
        if any(entry is not None and entry.request.logits for entry in step.entries):
            assert step.state.token_logits is not None, "a step that keeps logits has room for them"
            step = step._replace(logits=step.state.token_logits.clone())  # the next step writes others there
        self._steps.append(step)

    def read(self, entries: Sequence[SlotEntry | None]) -> list[Progress]:
        """What the oldest step did for the requests that are still in their slots, waiting for it; none if there is no
        step. How deep these may draft next is noted. Raises MegakernelError if the step went wrong."""
        if not self._steps:
            return []
        step = self._steps.popleft()
        report, state = self._queue.receive(), step.state
        rows = report.tolist()
        wanted = any(entry is not None and self._tells_logprobs(entry.request) for entry in step.entries)
        logprobs = state.logprobs_of(report).tolist() if wanted else None
        drafts = state.drafts_of(report).tolist() if self._options.report_drafts else None
        guided = state.guide_of(report).tolist() if state.spec.adaptive else None
        if any(row[REASON] == FAULT for row in rows):
            raise self._engine.disable_megakernel()
        progress = []
        slot_of = {id(entry): slot for slot, entry in enumerate(entries) if entry is not None}
        for place, entry in enumerate(step.entries):  # where it stood then
            slot = slot_of.get(id(entry))
            if entry is None or slot is None:
                continue
            row = rows[place]
            if step.nan_behind_prompt(place):
                row[: len(_FAILED)] = _FAILED
            accepted, count, reason = row[:REPORT_TOKENS]
            told = None if logprobs is None or not self._tells_logprobs(entry.request) else logprobs[place][:count]
            progress.append(
                Progress(
                    slot,
                    entry.request,
                    tokens=row[REPORT_TOKENS : REPORT_TOKENS + count],
                    tree=state.spec,
                    depth=row[-2],
                    accepted=max(accepted, 0),
                    proposed=row[-1],
                    passes=step.levels,
                    finished=REASONS.get(reason),
                    error=NAN if reason == ERROR else None,
                    logprobs=told,
                    drafts=None if drafts is None else [token for token in drafts[place] if token >= 0],
                    egag=None if guided is None else _note_guide(entry, guided[place], step.levels),
                    behind_prompts=step.reads,
                    size=state.batch,
                    logits=step.logits[place, :count] if step.logits is not None and entry.request.logits else None,
                )
            )
        return progress

    def _tells_logprobs(self, request: Request) -> bool:
        return self._options.logprobs or request.logprobs


def _note_guide(entry: SlotEntry, guide: list[float], levels: int) -> GuideReading:
    """What EGAG said of a tree, having noted how deep the request's next ones may be."""
    h_norm, h_ema, gamma, following = guide
    entry.gamma = following if math.isinf(entry.gamma) else max(following, entry.gamma - 1)
    return GuideReading(h_norm, h_ema, int(gamma) if gamma == gamma else 0, levels)
