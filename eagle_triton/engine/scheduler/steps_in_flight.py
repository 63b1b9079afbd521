"""Launched steps that are not read yet, and what their reports say about each request."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import ReportQueue
from eagle_triton.engine.scheduler.requests import (
    NAN,
    REASONS,
    GuideReading,
    Piece,
    Request,
    RunningRequest,
    TopTokens,
)
from eagle_triton.engine.scheduler.step_planner import StepOptions
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.step import Mode
from eagle_triton.operands.verification import ERROR, FAULT, GOES_ON, PROPOSED, REASON, REPORT_TOKENS, TREE_DEPTH


class BegunPrompts(NamedTuple):
    """First tokens chosen after prompts: requests by their slots at that time, and the target's logits if asked for."""

    entries: dict[int, RunningRequest]
    logits: Tensor | None = None
    tops: bool = False  # the likeliest tokens were sent, too


class LaunchedStep(NamedTuple):
    """A launched step: requests by their slots at that time, state and mode, how many levels were scored for its tree,
    whether prompts were read right before it, and the logits of its tokens if asked for."""

    entries: dict[int, RunningRequest]
    state: DecodeState
    mode: Mode
    levels: int
    reads: bool
    logits: Tensor | None = None
    tops: bool = False  # the likeliest tokens were sent, too


class StepsInFlight:
    """Launched first tokens and steps, in order, until the host has read their reports.

    most: how many are launched before the oldest is read: on a GPU two, so that the GPU never waits for the host.
    """

    def __init__(self, engine: Engine, options: StepOptions):
        self._engine, self._options = engine, options
        self.most = 2 if engine.view.device.type == "cuda" else 1
        self._queue = ReportQueue(engine.view.device, engine.view.ranks)
        self._tops = ReportQueue(engine.view.device, engine.view.ranks)  # for steps with requests that ask for these
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

    def may_go_on(self, entry: RunningRequest) -> bool:
        """Whether a request may need another step, if it gets as few tokens as possible from what is in flight."""
        exact = entry.request.exact
        least = sum(
            entry in sent.entries.values() and (isinstance(sent, LaunchedStep) or (exact and not entry.tokens))
            for sent in self._sent
        )
        return len(entry.tokens) + least < entry.request.max_new_tokens

    def send_begun(self, entries: dict[int, RunningRequest], sequences: Sequences) -> None:
        """Copy the roots just chosen for some slots of the sequences to the host."""
        self._send(BegunPrompts(entries), sequences.begun, sequences.root_logits, sequences.root_tops)

    def send(self, step: LaunchedStep) -> None:
        """Copy the report of the step just launched to the host."""
        self._send(step, step.state.report, step.state.token_logits, step.state.token_tops)

    def _send(
        self, sent: BegunPrompts | LaunchedStep, report: Tensor, logits: Tensor | None, tops: Tensor | None
    ) -> None:
        """Copy a report to the host, and what requests also ask for."""
        self._queue.send(report)
        requests = [entry.request for entry in sent.entries.values()]
        if any(request.logits for request in requests):
            assert logits is not None, "there is room for logits if they are asked for"
            sent = sent._replace(logits=logits.clone())  # the next step overwrites them
        if any(request.top_logprobs for request in requests):
            assert tops is not None, "there is room for them if they are asked for"
            self._tops.send(tops)
            sent = sent._replace(tops=True)
        self._sent.append(sent)

    def forget(self, entry: RunningRequest) -> None:
        """Read nothing more for a request that has left its slot, or waits there for pages."""
        for sent in self._sent:
            for place in [place for place, one in sent.entries.items() if one is entry]:
                del sent.entries[place]

    def read(self) -> list[Piece]:
        """Wait for the oldest in flight, and return what it gave its requests, nothing if none is in flight. Notes how
        deep requests may draft next. Raises MegakernelError if a step failed."""
        if not self._sent:
            return []
        sent, report = self._sent.popleft(), self._queue.receive()
        tops = self._tops.receive() if sent.tops else None
        if isinstance(sent, BegunPrompts):
            pieces = [self._first_token(sent, place, report[place], tops) for place in sent.entries]
            return [piece for piece in pieces if piece.tokens or piece.error]
        return self._of_step(sent, report, tops)

    def _first_token(self, begun: BegunPrompts, place: int, report: Tensor, tops: Tensor | None) -> Piece:
        """What a request gets after its prompt was read. The piece has no token if the request got it before a pause,
        or gets only committed tokens."""
        entry = begun.entries[place]
        request, (root, nan, _) = entry.request, report.tolist()
        new = [] if nan or entry.failure or entry.tokens or not request.exact else [root]
        finished = _end_at(entry, new)
        if finished and not entry.read_by_grammar(new):
            new = []
        error = NAN if nan else entry.failure
        given = new and self._reports_logprobs(request)
        return Piece(
            entry.index,
            request,
            new,
            slot=entry.slot,
            finished=REASONS[ERROR] if error else finished,
            error=error,
            logprobs=[report.view(torch.float64)[2].item()] if given else None,
            after_prompts=True,
            logits=begun.logits[place, None] if new and begun.logits is not None and request.logits else None,
            top_logprobs=_top_tokens(request, None if tops is None else tops[place, None]) if new else None,
            prompt_logprobs=_prompt_logprobs(entry) if new else None,
        )

    def _of_step(self, step: LaunchedStep, report: Tensor, tops: Tensor | None) -> list[Piece]:
        """What a step gave its requests, which may have moved to other slots."""
        rows, state = report.tolist(), step.state
        wanted = any(self._reports_logprobs(entry.request) for entry in step.entries.values())
        logprobs = state.logprobs_of(report).tolist() if wanted else []
        drafts = state.drafts_of(report).tolist() if self._options.report_drafts else None
        guided = state.guide_of(report).tolist() if state.spec.adaptive else None
        reasons = {row[REASON] for row in rows}
        if FAULT in reasons:
            raise self._engine.steps.disable_megakernel()
        if ERROR in reasons and step.mode.one_launch:
            self._engine.give_up_one_launch()
        pieces = []
        draft = self._engine.draft
        for place, entry in step.entries.items():
            request, row = entry.request, rows[place]
            accepted, count, reason = row[:REPORT_TOKENS]
            given = slice(0, count)  # of the committed tokens and the root after them
            if request.exact and count:  # the first was reported when it was chosen
                given = slice(1, count + (reason == GOES_ON))
            new = row[REPORT_TOKENS:][given]
            finished = REASONS.get(reason) or (_end_at(entry, new) if request.exact else None)
            if entry.failure or (finished and reason != ERROR and not entry.read_by_grammar(new)):
                given, new = slice(0), []
            error = entry.failure or (NAN if reason == ERROR else None)
            pieces.append(
                Piece(
                    entry.index,
                    request,
                    new,
                    slot=entry.slot,
                    tree=state.spec,
                    depth=row[TREE_DEPTH],
                    accepted=max(accepted, 0),
                    proposed=row[PROPOSED],
                    draft_forwards=0 if reason == ERROR or draft is None else draft.passes(step.levels),
                    committed=count,
                    finished=REASONS[ERROR] if error else finished,
                    error=error,
                    logprobs=logprobs[place][given] if self._reports_logprobs(request) else None,
                    drafts=None if drafts is None else [token for token in drafts[place] if token >= 0],
                    egag=None if guided is None else _note_guide(entry, guided[place], step.levels),
                    after_prompts=step.reads,
                    size=state.batch,
                    logits=step.logits[place, given] if step.logits is not None and request.logits else None,
                    top_logprobs=_top_tokens(request, None if tops is None else tops[place, given]),
                )
            )
        return pieces

    def _reports_logprobs(self, request: Request) -> bool:
        return self._options.logprobs or request.logprobs


def _top_tokens(request: Request, tops: Tensor | None) -> list[TopTokens] | None:
    """The likeliest tokens at each place, from float64 [n, 2, K], without forbidden ones; None if not asked for."""
    if tops is None or not request.top_logprobs:
        return None
    return [
        [(int(token), value) for token, value in zip(*place, strict=True) if value > -math.inf]
        for place in tops[:, :, : request.top_logprobs].tolist()
    ]


def _prompt_logprobs(entry: RunningRequest) -> list[tuple[float, TopTokens]] | None:
    """The log-probabilities of a prompt that was read. Waits for the device."""
    if entry.prompt_scores is None:
        return None
    scores = entry.prompt_scores[:-1].cpu()  # the token after the last one is not in the prompt
    tops = _top_tokens(entry.request, scores[:, 1:].unflatten(1, (2, -1))) or [[] for _ in scores]
    return list(zip(scores[:, 0].tolist(), tops, strict=True))


def _end_at(entry: RunningRequest, new: list[int]) -> str | None:
    """Why a request ends at its last new token, which the device has not committed; None: it goes on."""
    if new and new[-1] in entry.request.stop_ids:
        return "stop"
    return "length" if len(entry.tokens) + len(new) >= entry.request.max_new_tokens else None


def _note_guide(entry: RunningRequest, guide: list[float], levels: int) -> GuideReading:
    """EGAG's values for a tree. Notes how deep the request's next trees may be."""
    h_norm, h_ema, gamma, following = guide
    entry.gamma = following if math.isinf(entry.gamma) else max(following, entry.gamma - 1)
    return GuideReading(h_norm, h_ema, int(gamma) if gamma == gamma else 0, levels)
