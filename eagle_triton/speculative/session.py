"""Requests through the slots of one batch: a waiting queue, text and stop strings, statistics, and the tree in use.

The decoding is the engine's: a session hands requests in, asks for a step, and looks at what came out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.batch import Batch, Progress, Request
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.state import scratch_rows
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.speculative.policy import TreePolicy
from eagle_triton.speculative.statistics import Statistics
from eagle_triton.speculative.text import TextStream


@dataclass
class Completion:
    """How a request ended. finished: "stop" (a stop token, which is kept, or a stop string), "length" or "error".

    tokens: the new ones; a stop string takes those behind it away. text: None without a tokenizer; without the stop
    string. logprobs, if asked for: the log-softmax of the target's own logits at each token, before penalties,
    biases, temperature and filters.
    """

    index: int
    prompt: Tensor
    tokens: list[int]
    text: str | None
    finished: str
    error: str | None = None
    logprobs: list[float] | None = None
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def output_ids(self) -> Tensor:
        """Prompt and new tokens, int64 [L + n]."""
        return torch.cat((self.prompt, torch.tensor(self.tokens, dtype=torch.int64, device=self.prompt.device)))


@dataclass
class Piece:
    """What one step gave a request: new tokens, and the text that is certain now. `str(piece)` is its text."""

    index: int
    tokens: list[int]
    text: str = ""
    logprobs: list[float] | None = None
    completion: Completion | None = None  # with the last piece of a request

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class StepInfo:
    """One step of a batch, for `on_step`. nodes: of the tree that was verified, 1 for plain decoding."""

    step: int
    seconds: float
    nodes: int
    running: int
    waiting: int
    pieces: list[Piece]


class Results(Statistics):
    """The statistics of a call and, as `completions`, what became of each request, in the order of the prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.completions: list[Completion] = []


@dataclass
class _Job:
    """A request on its way."""

    index: int
    request: Request
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[float] | None = None
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def needs_fixed_tree(self) -> bool:
        """Whether its tokens depend on the trees: sampled, and with a seed that someone may use again."""
        return not self.request.sampling.greedy and self.request.sampling.seed is not None


class Session:
    """Decodes whatever is submitted, `slots` sequences at a time. Use as a context manager.

    A finished request makes room for the next in line at once; a request that fails does so alone. While a sampled
    request with a seed runs, the tree stays as it is, so that its output does not depend on its neighbours.
    """

    def __init__(
        self,
        engine: Engine,
        policy: TreePolicy | None,
        slots: int,
        rows: int,
        *,
        tokenizer: Any | None = None,
        stop_ids: Iterable[int] = (),
        logprobs: bool = False,
        text: bool = True,
    ) -> None:
        """policy: None decodes plainly. rows: the most tokens of a sequence, prompt included; a longer request fails.

        stop_ids: where requests end that name no stop tokens. text: give pieces their text, with a tokenizer; False
        leaves it to completions, where stop strings do not ask for it. Raises RuntimeError if the engine is busy.
        """
        self.policy, self.tokenizer, self.rows = policy, tokenizer, rows
        self.statistics = Statistics()  # of the requests that have ended
        self.steps = self.tokens = 0  # so far, of all requests
        self._text = text
        self._stop_ids = frozenset(stop_ids)
        self._waiting: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}
        self._submitted = 0
        self._depths = {spec.drafts: spec.depth for spec in (*(policy.trees if policy else ()), PLAIN)}
        largest = max(policy.trees, key=scratch_rows) if policy else PLAIN  # the cache must have room for any of them
        self._batch = Batch(engine, slots, largest, rows, logprobs=logprobs, drafts=policy is not None)

    def __enter__(self) -> Session:
        self._batch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._batch.__exit__(*error)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not (self._waiting or self._running)

    def submit(
        self,
        prompt: Tensor,
        max_new_tokens: int = 100,
        sampling: SamplingParams | None = None,
        *,
        stop_ids: Iterable[int] | None = None,
        stop_strings: Sequence[str] = (),
    ) -> int:
        """Put a prompt, int64 [L], in line; returns its index, by which pieces and completions name it.

        stop_ids: None takes the session's. Raises ValueError for a bad argument; a prompt that is too long fails later.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
        if stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer, the target has none")
        stops = self._stop_ids if stop_ids is None else frozenset(stop_ids)
        request = Request(prompt, max_new_tokens, sampling or SamplingParams(), stops)
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(self.tokenizer, prompt[-16:].tolist(), stop_strings)
        self._waiting.append(_Job(self._submitted, request, stream))
        self._submitted += 1
        return self._submitted - 1

    def cancel(self, index: int) -> None:
        """Forget a request, waiting or running; it gives no further pieces."""
        self._waiting = deque(job for job in self._waiting if job.index != index)
        for slot in [slot for slot, job in self._running.items() if job.index == index]:
            self._batch.release(slot)
            del self._running[slot]

    def step(self) -> list[Piece]:
        """Admit what there is room for, then one decode step; the pieces of all requests that got something."""
        return self.advance().pieces

    def advance(self) -> StepInfo:
        """`step`, with the facts around it."""
        start = time.perf_counter()
        pieces = self._admit()
        nodes = 1
        if self._running:
            began = time.perf_counter()
            progress = self._batch.step()
            self._observe(progress, (time.perf_counter() - began) * 1e3)
            nodes = max((row.proposed + 1 for row in progress), default=1)
            pieces += [self._take(row) for row in progress if row.slot in self._running]
            self.steps += 1
        return StepInfo(self.steps, time.perf_counter() - start, nodes, len(self._running), len(self._waiting), pieces)

    def _admit(self) -> list[Piece]:
        """Fill free slots from the line; pieces only for requests that end here."""
        ended: list[Piece] = []
        entering: list[_Job] = []
        while self._waiting and len(entering) < len(self._batch.free):
            job = self._waiting.popleft()
            if job.request.max_new_tokens:
                entering.append(job)
            else:
                ended.append(self._end(job, "length"))
        self._set_tree([*self._running.values(), *entering])
        if not entering:
            return ended
        try:  # together, so that equal prompts are computed once
            slots = self._batch.admit_all([job.request for job in entering])
        except (ValueError, RuntimeError):  # too long, or NaN logits: find out whose
            for job in entering:
                try:
                    self._enter(job, self._batch.admit(job.request))
                except (ValueError, RuntimeError) as error:
                    ended.append(self._end(job, "error", str(error)))
        else:
            for job, slot in zip(entering, slots, strict=True):
                self._enter(job, slot)
        return ended

    def _enter(self, job: _Job, slot: int) -> None:
        job.statistics.add_prefill()
        self._running[slot] = job

    def _set_tree(self, jobs: Iterable[_Job]) -> None:
        if self.policy is None:
            return
        wanted: TreeSpec = self.policy.fixed_tree if any(job.needs_fixed_tree for job in jobs) else self.policy.choose()
        if self._batch.spec != wanted:
            self._batch.spec = wanted

    def _observe(self, progress: Sequence[Progress], ms: float) -> None:
        """Tell the policy, unless the step was launched with another tree than the one it has chosen."""
        if self.policy is None or any(row.proposed != self.policy.spec.drafts for row in progress):
            return
        self.policy.observe([row.accepted for row in progress if row.error is None], ms)

    def _take(self, row: Progress) -> Piece:
        """A request's share of a step."""
        job, tokens, text = self._running[row.slot], list(row.tokens), ""
        if job.stream is not None and (self._text or job.stream.stop_strings):
            text = job.stream.push(*tokens)
        stopped = job.stream is not None and job.stream.stopped
        finished = "stop" if stopped else row.finished
        self.tokens += len(tokens)
        job.tokens += tokens
        job.text.append(text)
        if row.logprobs is not None:
            job.logprobs = (job.logprobs or []) + list(row.logprobs)
        if row.error is None:
            job.statistics.add_step(row.accepted, row.proposed, self._depths[row.proposed], len(tokens))
        piece = Piece(job.index, tokens, text, row.logprobs)
        if finished is not None:
            del self._running[row.slot]
            if row.finished is None:
                self._batch.release(row.slot)
            last = self._end(job, finished, row.error)
            piece = Piece(job.index, tokens, text + last.text, row.logprobs, last.completion)
        return piece

    def _end(self, job: _Job, finished: str, error: str | None = None) -> Piece:
        """The last piece of a request: text that waited, and its completion."""
        rest, kept = "", len(job.tokens)
        if job.stream is not None:
            if not (self._text or job.stream.stop_strings):
                rest = job.stream.push(*job.tokens)
            rest += job.stream.finish()
            job.text.append(rest)
            if job.stream.stopped:
                kept = job.stream.tokens
                finished = finished if error else "stop"
        job.statistics.tokens = kept
        self.statistics += job.statistics
        completion = Completion(
            job.index,
            job.request.prompt,
            job.tokens[:kept],
            None if job.stream is None else "".join(job.text),
            finished,
            error,
            None if job.logprobs is None else job.logprobs[:kept],
            job.statistics,
        )
        return Piece(job.index, [], rest, completion=completion)
