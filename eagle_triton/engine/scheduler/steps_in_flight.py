"""What was launched and is not read yet, and what its reports say of each request."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import ReportQueue
from eagle_triton.engine.scheduler.requests import NAN, REASONS, GuideReading, Request, StepResult
from eagle_triton.engine.scheduler.running_request import RunningRequest
from eagle_triton.engine.scheduler.step_planner import StepOptions
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.operands.verification import ERROR, FAULT, GOES_ON, PROPOSED, REASON, REPORT_TOKENS, TREE_DEPTH


class BegunPrompts(NamedTuple):
    """Prompts that were read and first tokens that were chosen: requests by slot, and the target's logits there if they
    are asked for."""

    entries: dict[int, RunningRequest]
    logits: Tensor | None = None


class LaunchedStep(NamedTuple):
    """A step that was launched: for whom, on what, how many levels were scored for the tree that it verifies, whether
    prompts were read right before it, and the logits of its tokens if they are asked for."""

    entries: dict[int, RunningRequest]
    state: DecodeState
    levels: int
    reads: bool
    logits: Tensor | None = None


class StepsInFlight:
    """Prompts that have begun and steps that were launched, in this order, which the host has not read yet.

    most: how many are launched before the oldest is read; on a GPU one more, so that it never waits for the host.
    """

    def __init__(self, engine: Engine, options: StepOptions):
        self._engine, self._options = engine, options
        self.most = 2 if engine.view.device.type == "cuda" else 1
        self._queue = ReportQueue(engine.view.device, engine.view.ranks)
        self._sent: deque[BegunPrompts | LaunchedStep] = deque()

    def __bool__(self) -> bool:
        return bool(self._sent)

    @property
    def full(self) -> bool:
        """Whether the oldest should be read before more is launched."""
        return len(self._sent) >= self.most

    @property
    def steps(self) -> list[LaunchedStep]:
        """Steps in flight, the oldest first."""
        return [sent for sent in self._sent if isinstance(sent, LaunchedStep)]

    def least_tokens(self, entry: RunningRequest) -> int:
        """How many tokens what is in flight will tell of a request at least, if it does not end."""
        exact = entry.request.exact
        return sum(
            entry in sent.entries.values() and (isinstance(sent, LaunchedStep) or (exact and not entry.tokens))
            for sent in self._sent
        )

    def send_begun(self, entries: dict[int, RunningRequest], sequences: Sequences) -> None:
        """The roots of some slots of the sequences were chosen last: have them copied to the host."""
        self._queue.send(sequences.begun)
        logits = None
        if any(entry.request.logits for entry in entries.values()):
            assert sequences.root_logits is not None, "who asks for logits has room for them"
            logits = sequences.root_logits.clone()  # the next step writes others there
        self._sent.append(BegunPrompts(entries, logits))

    def send(self, step: LaunchedStep) -> None:
        """The step was launched last: have its report copied to the host."""
        self._queue.send(step.state.report)
        if any(entry.request.logits for entry in step.entries.values()):
            assert step.state.token_logits is not None, "a step that keeps logits has room for them"
            step = step._replace(logits=step.state.token_logits.clone())  # the next step writes others there
        self._sent.append(step)

    def read(self, entries: Sequence[RunningRequest | None]) -> list[StepResult]:
        """What the oldest in flight did for the requests that are still in their slots, waiting for it; none if there
        is nothing. How deep these may draft next is noted. Raises MegakernelError if a step went wrong."""
        if not self._sent:
            return []
        sent = self._sent.popleft()
        slot_of = {entry: slot for slot, entry in enumerate(entries) if entry is not None}
        places = {place: slot_of[entry] for place, entry in sent.entries.items() if entry in slot_of}  # then: now
        report = self._queue.receive()
        if isinstance(sent, BegunPrompts):
            rows = [self._first_token(sent, place, slot, report[place]) for place, slot in places.items()]
            return [row for row in rows if row.tokens or row.error]
        return self._of_step(sent, places, report)

    def _first_token(self, begun: BegunPrompts, place: int, slot: int, report: Tensor) -> StepResult:
        """What to tell of a request once its prompt was read: no token if that was told before a preemption, or if its
        tokens are told when they are committed."""
        entry = begun.entries[place]
        request, (root, nan, _) = entry.request, report.tolist()
        new = [] if nan or entry.tokens or not request.exact else [root]
        told = new and self._tells_logprobs(request)
        return StepResult(
            slot,
            request,
            new,
            finished="error" if nan else _end_at(entry, new),
            error=NAN if nan else None,
            logprobs=[report.view(torch.float64)[2].item()] if told else None,
            behind_prompts=True,
            logits=begun.logits[place, None] if new and begun.logits is not None and request.logits else None,
        )

    def _of_step(self, step: LaunchedStep, places: dict[int, int], report: Tensor) -> list[StepResult]:
        """What a step did for requests that stood in some places, and stand in some slots now."""
        rows, state = report.tolist(), step.state
        wanted = any(self._tells_logprobs(entry.request) for entry in step.entries.values())
        logprobs = state.logprobs_of(report).tolist() if wanted else None
        drafts = state.drafts_of(report).tolist() if self._options.report_drafts else None
        guided = state.guide_of(report).tolist() if state.spec.adaptive else None
        if any(row[REASON] == FAULT for row in rows):
            raise self._engine.disable_megakernel()
        progress = []
        for place, slot in places.items():
            entry, row = step.entries[place], rows[place]
            request = entry.request
            accepted, count, reason = row[:REPORT_TOKENS]
            told = slice(0, count)  # of the committed tokens and the root after them
            if request.exact and count:  # the first of them was told when it was chosen
                told = slice(1, count + (reason == GOES_ON))
            new = row[REPORT_TOKENS:][told]
            progress.append(
                StepResult(
                    slot,
                    request,
                    new,
                    tree=state.spec,
                    depth=row[TREE_DEPTH],
                    accepted=max(accepted, 0),
                    proposed=row[PROPOSED],
                    passes=step.levels,
                    committed=count,
                    finished=REASONS.get(reason) or (_end_at(entry, new) if request.exact else None),
                    error=NAN if reason == ERROR else None,
                    logprobs=logprobs[place][told] if logprobs is not None and self._tells_logprobs(request) else None,
                    drafts=None if drafts is None else [token for token in drafts[place] if token >= 0],
                    egag=None if guided is None else _note_guide(entry, guided[place], step.levels),
                    behind_prompts=step.reads,
                    size=state.batch,
                    logits=step.logits[place, told] if step.logits is not None and request.logits else None,
                )
            )
        return progress

    def _tells_logprobs(self, request: Request) -> bool:
        return self._options.logprobs or request.logprobs


def _end_at(entry: RunningRequest, new: list[int]) -> str | None:
    """Why a request ends at the last of its new tokens, which the device has not committed; None: it goes on."""
    if new and new[-1] in entry.request.stop_ids:
        return "stop"
    return "length" if entry.new_tokens + len(new) >= entry.request.max_new_tokens else None


def _note_guide(entry: RunningRequest, guide: list[float], levels: int) -> GuideReading:
    """What EGAG said of a tree, having noted how deep the request's next ones may be."""
    h_norm, h_ema, gamma, following = guide
    entry.gamma = following if math.isinf(entry.gamma) else max(following, entry.gamma - 1)
    return GuideReading(h_norm, h_ema, int(gamma) if gamma == gamma else 0, levels)
