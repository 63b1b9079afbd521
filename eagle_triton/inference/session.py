"""Requests through the slots of one batch: a waiting queue, text and stop strings, statistics, and the tree in use.

The decoding is the engine's: a session hands requests in, asks for a step, and looks at what came out.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from typing_extensions import Unpack

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import CacheFullError
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import GuideReading, Request, StepResult
from eagle_triton.engine.scheduler.step_planner import SIZES
from eagle_triton.engine.state import scratch_rows
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.engine.upload import to_device
from eagle_triton.inference.arguments import ArgumentReader, Prompt, SubmitOptions, check_options, check_switches
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.policy import TreePolicy
from eagle_triton.inference.statistics import Statistics
from eagle_triton.inference.text import TextStream
from eagle_triton.models.checks import check_positions
from eagle_triton.operands.verification import Verification

log = logging.getLogger(__name__)

STEPS_OF_EACH = 3  # trees that a session prepares: on a GPU two steps are on their way, or first tokens


@dataclass
class Completion:
    """How a request ended. finished: "stop" (a stop token, which is kept, or a stop string), "length" or "error".

    tokens: the new ones; those after a stop string are taken away. text: None without a tokenizer; without the stop
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
    """New tokens of a request: of one step, or of its prompt's end; and the text that is certain now.

    It is no string: `piece.text` is its text, as is `str(piece)`. `"".join` takes those, or what `stream_text` gives.

    tokens: accepted drafts, then the target's own token; at the prompt's end that token alone.
    completion: with the last piece of a request.
    accepted, proposed: drafts of the step, also those that a stop cut off.
    drafts: what was drafted, if asked for, the root's children first. egag: how EGAG bounded them.
    draft_forwards: passes of the draft for it.
    tree: the shape that was verified, None at the prompt's end.
    certain_tokens: of all tokens so far, those that no stop string can take away any more.
    """

    index: int
    tokens: list[int]
    text: str = ""
    logprobs: list[float] | None = None
    completion: Completion | None = None  # with the last piece of a request
    accepted: int = 0
    proposed: int = 0
    drafts: list[int] | None = None
    egag: GuideReading | None = None
    draft_forwards: int = 0
    tree: TreeSpec | None = None
    certain_tokens: int = 0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class StepInfo:
    """One step of a batch, for `on_step`. nodes: of the tree that was verified, 1 for plain decoding, 0 where first
    tokens came."""

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


@dataclass(eq=False)
class _Job:
    """A request on its way. error: why it cannot enter at all."""

    index: int
    request: Request
    stream: TextStream | None
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[float] | None = None
    statistics: Statistics = field(default_factory=Statistics)

    def needs_fixed_tree(self, verification: Verification) -> bool:
        """Whether its tokens depend on the trees and must come again: it is greedy, or has a seed."""
        sampling = self.request.sampling
        return (sampling.greedy or sampling.seed is not None) and verification.follows_tree(not sampling.greedy)

    @property
    def order(self) -> bool | None:
        """Which filter comes first, `top_p_first`; None where nothing is sampled."""
        return None if self.request.sampling.greedy else self.request.sampling.top_p_first


class Session:
    """Decodes whatever is submitted, `slots` sequences at a time. Use as a context manager, or call `close`.

    A finished request makes room for the next in line at once; a request that fails does so alone. While a request runs
    whose tokens depend on the tree (a seeded one with "rejection", say) and must not on its neighbours, the tree stays.
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
        report_drafts: bool = False,
        text: bool = True,
        config: EAGLEConfig | None = None,
        max_positions: int | None = None,
    ) -> None:
        """policy: None decodes plainly. rows: the most tokens of a sequence, prompt included: it ends there, and a
        longer prompt fails. max_positions: the same, by what the target was made for; None: not limited.

        report_drafts: let pieces say what was drafted. stop_ids: where requests end that name no stop tokens. text:
        give pieces their text, with a tokenizer; False leaves it to completions, where stop strings do not ask for it.
        config: how requests are sampled that do not say. Raises RuntimeError if the engine is busy.
        """
        self.policy, self.tokenizer, self.rows = policy, tokenizer, rows
        self.statistics = Statistics()  # of the requests that have ended
        self.steps = self.tokens = 0  # so far, of all requests
        self._config, self._positions = config or EAGLEConfig(), max_positions
        self._device, self._ranks = engine.view.device, engine.view.ranks
        self._reader = ArgumentReader(
            self._config, engine.view.vocab_size, torch.device("cpu"), tokenizer, frozenset(stop_ids)
        )
        self._text = text
        self._closed = False
        self._prepares: TreeSpec | None = None  # the tree of the next step, whatever the policy says
        self._waiting: list[_Job] = []
        self._undelivered: list[Piece] = []  # made, and not handed out yet
        self._running: dict[int, _Job] = {}
        self._submitted = 0
        largest = max(policy.trees, key=scratch_rows) if policy else PLAIN  # the cache must have room for any of them
        self._batch = Batch(
            engine,
            slots,
            largest,
            rows,
            logprobs=logprobs,
            report_drafts=report_drafts,
            drafts=policy is not None,
            prompt_tokens=self._config.prompt_tokens,
        )

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End here, whatever still waits or runs, and let others have the engine. May be called again."""
        if not self._closed:
            self._closed = True
            self._batch.close()

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and every piece was handed out."""
        return not (self._waiting or self._running or self._undelivered)

    def submit(
        self,
        prompt: Prompt,
        max_new_tokens: int = 100,
        sampling: SamplingParams | None = None,
        *,
        stop_token_ids: int | Iterable[int] | None = None,
        stop_strings: str | Iterable[str] = (),
        logprobs: bool = False,
        min_new_tokens: int = 0,
        **options: Unpack[SubmitOptions],
    ) -> int:
        """Put a prompt in line; returns its index, by which pieces and completions name it.

        prompt: text, a list of token ids, or a tensor [L] or [1, L]. sampling: a `SamplingParams`, or instead of it
        temperature, top_p, top_k, min_p, repetition_penalty, logit_bias and seed by their names; what is not given is
        as configured. stop_token_ids: None takes the session's. logprobs: report this request's, where the session does
        not report all. min_new_tokens: no stop token and no stop string before. The request ends where the session's
        rows or the target's positions do, if it comes so far. Raises ValueError or TypeError for a bad argument,
        RuntimeError if the session is closed; a prompt that is too long fails alone, in its completion.
        """
        self._check_open()
        check_options("submit", options, self.submit)
        check_switches(logprobs=logprobs)
        chosen = self._sampling(sampling, options)
        request = self._reader.request(
            self._reader.prompt(prompt), max_new_tokens, chosen, stop_token_ids, stop_strings,
            min_new_tokens=min_new_tokens, logprobs=logprobs,
        )  # fmt: skip
        return self.enqueue(request)

    def enqueue(self, request: Request) -> int:
        """`submit` for what has been read and checked."""
        self._check_open()
        length, room = len(request.prompt), min(self.rows, self._positions or self.rows) - len(request.prompt)
        limit = max(min(request.max_new_tokens, room), 0)
        request = replace(
            request,
            prompt=request.prompt.to("cpu", copy=True),  # the caller may write another one there
            max_new_tokens=limit,
            min_new_tokens=min(request.min_new_tokens, limit),
        )
        stream = None
        if self.tokenizer is not None:
            before = request.prompt[-16:].tolist()
            stream = TextStream(self.tokenizer, before, request.stop_strings, request.min_new_tokens)
        error = self._too_long(length) or self._batch.never_fits(request)
        self._waiting.append(_Job(self._submitted, request, stream, error))
        self._submitted += 1
        return self._submitted - 1

    @property
    def waiting(self) -> list[int]:
        """Requests in line, by their indices."""
        return [job.index for job in self._waiting]

    def cancel(self, index: int) -> None:
        """Forget a request, waiting or running; it gives no further pieces.

        Raises RuntimeError if the session is closed, ValueError for an index that `submit` has not returned.
        """
        self._check_open()
        if index not in range(self._submitted):
            known = f"0..{self._submitted - 1}" if self._submitted else "none yet"
            raise ValueError(f"cancel: index must be one that submit returned ({known}), got {index!r}")
        self._waiting = [job for job in self._waiting if job.index != index]
        for slot in [slot for slot, job in self._running.items() if job.index == index]:
            self._batch.release(slot)
            del self._running[slot]

    def step(self) -> list[Piece]:
        """Admit what there is room for, then one decode step; the pieces of all requests that got something.

        Raises RuntimeError if the session is closed. After any other error the next call first hands out what was made
        before it, and requests that had not entered are still in line.
        """
        return self.advance().pieces

    def advance(self) -> StepInfo:
        """`step`, with the facts around it."""
        self._check_open()
        start = time.perf_counter()
        nodes = 0
        if not self._undelivered:  # else the last call has failed, and this one brings what it had made
            self._admit()
            if self._running:
                nodes = self._decode()
        pieces, self._undelivered = self._undelivered, []
        return StepInfo(self.steps, time.perf_counter() - start, nodes, len(self._running), len(self._waiting), pieces)

    def prepare(self, most: int | None = None) -> None:
        """Compile and capture what steps need over up to `most` requests at a time (None: as many as there are slots),
        greedy and sampled, over every tree that the policy may choose, by decoding a few tokens; else that happens
        between the first steps that need it.

        With a progress bar for people at a terminal, and what it took in the log. Nothing of it is counted, and the
        policy learns nothing. Raises RuntimeError unless the session is idle, or if it is closed.
        """
        self._check_open()
        if not self.idle:
            raise RuntimeError("prepare: requests are there; prepare a session before the first one")
        slots = self._batch.sequences.slots
        sizes = [size for size in (*SIZES, slots) if size <= min(most or slots, slots)]
        before = self.statistics, self.steps, self.tokens, self._submitted
        runs = list(itertools.product(dict.fromkeys(sizes), (0.0, 1.0)))
        trees = [PLAIN] if self.policy is None else [*([PLAIN] if self.policy.fallback else []), *self.policy.trees]
        new = min(1 + STEPS_OF_EACH * sum(tree.depth + 1 for tree in trees), self.rows - 2)
        start, memory = time.perf_counter(), _reserved_bytes(self._device)
        try:
            for size, temperature in tqdm(runs, desc="compiling and capturing steps", leave=False, disable=None):
                self.statistics = Statistics()
                options: dict[str, Any] = {"temperature": temperature, "seed": 0, "stop_token_ids": ()}
                numbers = [self.submit([0, 0], new, **options) for _ in range(size)]
                for self._prepares in trees:  # drafting resumes after plain steps
                    for _ in range(STEPS_OF_EACH):
                        self.step()
                for number in numbers:
                    self.cancel(number)
                self._undelivered.clear()
        finally:
            self._prepares = None
            self.statistics, self.steps, self.tokens, self._submitted = before
        gib = (_reserved_bytes(self._device) - memory) / 2**30
        log.info("steps over up to %d requests took %.1f s and %.2f GiB", max(sizes), time.perf_counter() - start, gib)

    def keep_alive(self) -> None:
        """To be called now and then while nothing is asked of a session that ranks share; else nothing happens."""

    def _decode(self) -> int:
        """One step; the nodes of the tree that was verified."""
        began = time.perf_counter()
        if moved := self._batch.compact():
            self._running = {moved.get(slot, slot): job for slot, job in self._running.items()}
        progress = self._batch.step()
        reads = any(row.behind_prompts for row in progress)
        self._observe(progress, None if reads else (time.perf_counter() - began) * 1e3)
        for row in progress:
            if row.slot in self._running:
                self._undelivered.append(self._take(row))
        trees = [row.tree for row in progress if row.tree is not None]
        self.steps += bool(trees)
        return max((tree.nodes for tree in trees), default=0)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed; open another one with EAGLEInference.session")

    def _sampling(self, sampling: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
        """What `submit` was given, either way."""
        if sampling is None:
            return self._config.sampling(**options)
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be a SamplingParams, got {sampling!r}; temperature=... goes by its name")
        if options:
            raise ValueError(f"submit: give sampling or {', '.join(options)}, not both")
        return sampling

    def _too_long(self, length: int) -> str | None:
        """Why a prompt of `length` tokens cannot enter."""
        try:
            check_positions(length, self._positions)
        except ValueError as error:
            return str(error)
        if length > self.rows:
            return f"a prompt of {length} tokens does not fit into the {self.rows} rows of this batch"
        return None

    def _admit(self) -> None:
        """Fill free slots from the line; pieces only for requests that end here. A request leaves the line as it
        enters, not before."""
        entering = self._entering()
        self._set_tree([*self._running.values(), *entering])
        if not entering:
            return
        try:  # together, so that they are read together
            slots = self._batch.enter_all([job.request for job in entering])
        except (ValueError, CacheFullError):
            self._enter_one_by_one(entering)  # find out which fails, or how many have room
            return
        for job, slot in zip(entering, slots, strict=True):
            self._enter(job, slot)

    def _entering(self) -> list[_Job]:
        """The first in line, as many as there are free slots for, and as can be sampled together. Requests that need no
        slot end on the way."""
        entering: list[_Job] = []
        orders = {job.order for job in self._running.values()}
        slots = len(self._batch.free)
        for job in list(self._waiting):
            if job.error is not None or not job.request.max_new_tokens:
                self._waiting.remove(job)
                self._undelivered.append(self._end(job, "length" if job.error is None else "error", job.error))
                continue
            orders.add(job.order)
            if len(entering) == slots or {True, False} <= orders:
                break
            entering.append(job)
        return entering[: self._batch.fitting([job.request for job in entering])]

    def _enter_one_by_one(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            try:
                (slot,) = self._batch.enter_all([job.request])
            except ValueError as error:
                self._fail(job, error)
            except CacheFullError as error:
                if self._running:
                    return  # until one of them ends
                self._fail(job, error)
            else:
                self._enter(job, slot)

    def _fail(self, job: _Job, error: Exception) -> None:
        self._waiting.remove(job)
        self._undelivered.append(self._end(job, "error", str(error)))

    def _enter(self, job: _Job, slot: int) -> None:
        self._running[slot] = job
        self._waiting.remove(job)
        job.statistics.add_prefill(len(job.request.prompt), self._batch.cached_tokens(slot))
        job.statistics.lossless = self._batch.verification.lossless

    def _set_tree(self, jobs: Iterable[_Job]) -> None:
        if self.policy is None:
            return
        jobs = list(jobs)
        self.policy.resize(self._batch.size_of_next(len(jobs)))
        fixed = any(job.needs_fixed_tree(self._batch.verification) for job in jobs)
        self._batch.chooser.every_level = fixed
        wanted: TreeSpec = self._prepares or (self.policy.fixed_tree if fixed else self.policy.choose())
        if self._batch.spec != wanted:
            self._batch.spec = wanted

    def _observe(self, progress: Sequence[StepResult], ms: float | None) -> None:
        """Tell the policy, unless the step was launched with another tree than the one it has chosen."""
        if self._ranks is not None and self.policy is not None and self.policy.has_choice:
            ms = self._ranks.broadcast_from_rank0(ms)  # each has measured its own, and all must choose the same tree
        if self.policy is None or self._prepares is not None or any(row.tree != self.policy.spec for row in progress):
            return
        size = max((row.size for row in progress), default=1)
        self.policy.observe([row.accepted for row in progress if row.error is None], ms, size)

    def _take(self, row: StepResult) -> Piece:
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
        before = job.statistics.draft_forwards
        if row.error is None and row.tree is None:
            job.statistics.add_first_token()
        elif row.error is None:
            job.statistics.add_step(row.accepted, row.proposed, row.depth, len(tokens), row.passes)
        passes = job.statistics.draft_forwards - before
        certain = job.stream.certain_tokens if job.stream and job.stream.stop_strings else len(job.tokens)
        piece = Piece(
            job.index, tokens, text, row.logprobs, None, row.accepted, row.proposed, row.drafts, row.egag, passes,
            row.tree, certain,
        )  # fmt: skip
        if finished is not None:
            del self._running[row.slot]
            if row.finished is None:
                self._batch.release(row.slot)
            last = self._end(job, finished, row.error)
            piece = replace(
                piece, text=text + last.text, completion=last.completion, certain_tokens=last.certain_tokens
            )
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
            to_device(job.request.prompt, self._device),
            job.tokens[:kept],
            None if job.stream is None else "".join(job.text),
            finished,
            error,
            None if job.logprobs is None else job.logprobs[:kept],
            job.statistics,
        )
        return Piece(job.index, [], rest, completion=completion, certain_tokens=kept)


def _reserved_bytes(device: torch.device) -> int:
    """What torch has taken of a GPU's memory."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
