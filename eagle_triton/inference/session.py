"""A batch with a queue, text, stop strings, statistics, and the choice of the tree."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from typing_extensions import Unpack

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.grammar import Grammar
from eagle_triton.engine.memory.pages import CacheFullError, is_out_of_memory
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Piece, Request, RunningRequest, TopTokens
from eagle_triton.engine.scheduler.step_planner import SIZES
from eagle_triton.engine.state import scratch_rows
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.engine.upload import to_device
from eagle_triton.inference.arguments import ArgumentReader, Prompt, SubmitOptions, check_options
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.policy import TreePolicy
from eagle_triton.inference.statistics import Statistics
from eagle_triton.inference.text import TextStream
from eagle_triton.models.checks import check_positions
from eagle_triton.values import check_switches, checked_integer

log = logging.getLogger(__name__)

ENDLESS = Grammar.regex(r"(?s:.*)\x00")  # any text; ends only at a character that texts do not have
STEPS_OF_EACH = 3  # of each tree to prepare: on a GPU two are in flight, or one and first tokens


@dataclass
class Completion:
    """How a request ended. finished: "stop" (a stop token, which is kept, or a stop string), "length" or "error".

    tokens: the new ones, without those after a stop string. text: without the stop string; None without a tokenizer.
    logprobs, on request: the log-softmax of the target's own logits at each token, before penalties, biases,
    temperature and filters, over the tokens that a grammar allows. top_logprobs, prompt_logprobs: see `Piece`.
    pauses: how often the request waited for cache pages. stop_string: the one that ended it.
    """

    index: int
    prompt: Tensor
    tokens: list[int]
    text: str | None = None
    finished: str = ""
    error: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[TopTokens] | None = None
    prompt_logprobs: list[tuple[float, TopTokens]] | None = None
    statistics: Statistics = field(default_factory=Statistics)
    pauses: int = 0
    stop_string: str | None = None

    @property
    def output_ids(self) -> Tensor:
        """Prompt and new tokens, int64 [L + n]."""
        return torch.cat((self.prompt, torch.tensor(self.tokens, dtype=torch.int64, device=self.prompt.device)))


@dataclass(frozen=True)
class StepInfo:
    """One step of a batch, for `on_step`. nodes: size of the verified tree; 1 for plain decoding, 0 for first tokens.
    cache_used: the share of the cache's pages that sequences hold, 0 to 1. pauses: how often requests waited for pages
    so far. None: not known."""

    step: int
    seconds: float
    nodes: int
    running: int
    waiting: int
    pieces: list[Piece]
    cache_used: float | None = None
    pauses: int | None = None


class Results(Statistics):
    """The statistics of a call, and `completions`: how each request ended, in the order of the prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.completions: list[Completion] = []


class Session:
    """Decodes submitted requests, `slots` at a time. Use as a context manager, or call `close`.

    When a request ends, the next in line takes its slot at once. If a request fails, the others go on. Some requests
    must not depend on their neighbours, but depend on the tree, such as seeded ones with "rejection". While one of
    these runs, the tree stays the same.
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
        """policy: None decodes plainly. rows: the most tokens of a sequence, prompt included. It ends there, and a
        longer prompt fails. max_positions: the target's own such limit; None: no limit.

        report_drafts: pieces have the drafts. stop_ids: for requests without stop tokens. text: make the text of each
        piece, if there is a tokenizer; False makes it only for completions and for stop strings. config: the default
        sampling of requests. Raises RuntimeError if the engine is busy.
        """
        rows = min(rows, max_positions or rows)  # tables take memory for each row
        self.policy, self.tokenizer, self.rows = policy, tokenizer, rows
        self.statistics = Statistics()  # of ended requests
        self.steps = self.tokens = 0  # so far, of all requests
        self._config, self._positions = config or EAGLEConfig(), max_positions
        self._device, self._ranks = engine.view.device, engine.view.ranks
        self._reader = ArgumentReader(
            self._config, engine.view.vocab_size, torch.device("cpu"), tokenizer, frozenset(stop_ids)
        )
        self._text = text
        self._closed = False
        self._stepping = threading.Lock()  # a second step at the same time would end all requests
        self._prepares: TreeSpec | None = None  # the next step's tree, instead of the policy's
        self._waiting: list[RunningRequest] = []
        self._undelivered: list[Piece] = []  # not returned yet
        self._running: dict[int, RunningRequest] = {}  # by index
        self._submitted = 0
        trees = policy.trees if policy else (PLAIN,)
        largest = max(trees, key=lambda tree: scratch_rows(tree, engine.draft))  # the cache needs room for each
        try:
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
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            message = f"no memory for slots={slots} sequences of rows={rows} tokens: give fewer. {error}"
            raise type(error)(message) from error

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop all requests that wait or run, and release the engine. May be called again."""
        if not self._closed:
            self._closed = True
            self._batch.close()
            for dropped in (self._waiting, self._running, self._undelivered):
                dropped.clear()

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs, and every piece was returned."""
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
        """Put a prompt in line. Returns its index, which pieces and completions have.

        prompt: text, a list of token ids, or a tensor [L] or [1, L]. sampling: a `SamplingParams`, or instead
        temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed and
        grammar by name; defaults are in the configuration. stop_token_ids: None takes the session's. logprobs: for this
        request, if not for all of the session. min_new_tokens: no stop token or stop string counts before. A request
        ends at the latest with the session's rows or the target's positions. Raises ValueError or TypeError for a bad
        argument, RuntimeError if the session is closed, ImportError for a grammar without llguidance. If a prompt is
        too long, its completion has the error.
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
        """`submit` for a request that was read and checked."""
        self._check_open()
        if self._ranks is not None and request.sampling.grammar is not None:
            raise ValueError("grammar: it is not supported over several ranks (tp_plan): leave it out")
        self._submitted += 1  # even if this fails
        length, room = len(request.prompt), self.rows - len(request.prompt)
        limit = max(min(request.max_new_tokens, room), 0)
        request = replace(request, max_new_tokens=limit, min_new_tokens=min(request.min_new_tokens, limit))
        running = RunningRequest(request, self._submitted - 1)
        running.stream = None
        if self.tokenizer is not None:
            before = running.prompt[-16:].tolist()
            running.stream = TextStream(self.tokenizer, before, request.stop_strings, request.min_new_tokens)
        running.matcher = self._reader.matcher(request)
        error = self._too_long(length) or self._batch.never_fits(request)
        running.completion = Completion(running.index, running.prompt, running.tokens, error=error)
        self._waiting.append(running)
        return running.index

    @property
    def waiting(self) -> list[int]:
        """The indices of requests in line."""
        return [running.index for running in self._waiting]

    def cancel(self, index: int) -> None:
        """Drop a request that waits or runs. It gives no further pieces.

        Raises RuntimeError if the session is closed, ValueError for an index that `submit` has not returned.
        """
        self._check_open()
        if index not in range(self._submitted):
            known = f"0..{self._submitted - 1}" if self._submitted else "none yet"
            raise ValueError(f"cancel: index must be one that submit returned ({known}), got {index!r}")
        self._waiting = [running for running in self._waiting if running.index != index]
        if (running := self._running.get(index)) is not None:
            self._batch.release(running.slot)
            del self._running[index]

    def step(self) -> list[Piece]:
        """Let requests enter while there is room, then decode one step. Returns the pieces of this step.

        Raises RuntimeError if the session is closed or in a step. After any other error the next call returns the
        pieces made before it, and requests that had not entered are still in line.
        """
        return self.advance().pieces

    def advance(self) -> StepInfo:
        """`step` with more facts."""
        self._check_open()
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("this session is in a step; it belongs to one thread (docs/limits.md#threads)")
        try:
            return self._advance()
        finally:
            self._stepping.release()

    def _advance(self) -> StepInfo:
        start = time.perf_counter()
        nodes = 0
        if not self._undelivered:  # otherwise the last call failed, and this one returns its pieces
            self._admit()
            if self._running:
                nodes = self._decode()
        pieces, self._undelivered = self._undelivered, []
        counts = len(self._running), len(self._waiting)
        cache = self._batch.cache_used, self._batch.pauses
        return StepInfo(self.steps, time.perf_counter() - start, nodes, *counts, pieces, *cache)

    def prepare(self, most: int | None = None) -> None:
        """Compile and capture steps by decoding a few tokens: over up to `most` requests at a time (None: all slots),
        greedy and sampled, with grammars and without, for every tree that the policy may choose. Otherwise each is
        captured before the first step that needs it.

        Shows a progress bar at a terminal, and logs the time. Statistics and the policy do not count these steps.
        Raises RuntimeError unless the session is idle, or if it is closed; TypeError or ValueError for a wrong `most`.
        """
        self._check_open()
        if most is not None:
            most = checked_integer("most", most, 1, kind="an integer or None")
        if not self.idle:
            raise RuntimeError("prepare: call it before the first request is submitted, or after all have ended")
        slots = self._batch.sequences.slots
        sizes = [size for size in (*SIZES, slots) if size <= min(most or slots, slots)]
        before = self.statistics, self.steps, self.tokens, self._submitted
        grammars = [None, ENDLESS] if self._takes_grammars() else [None]
        runs = list(itertools.product(dict.fromkeys(sizes), (0.0, 1.0), grammars))
        trees = [PLAIN] if self.policy is None else [*([PLAIN] if self.policy.fallback else []), *self.policy.trees]
        new = max(min(1 + STEPS_OF_EACH * sum(tree.depth + 1 for tree in trees), self.rows - 2), 0)
        start, memory = time.perf_counter(), _reserved_bytes(self._device)
        try:
            for size, temperature, grammar in tqdm(runs, "compiling and capturing steps", leave=False, disable=None):
                self.statistics = Statistics()
                options: dict[str, Any] = {"temperature": temperature, "seed": 0, "grammar": grammar}
                stops = () if grammar is None else None  # a grammar needs a token that ends its output
                numbers = [self.submit([0, 0], new, stop_token_ids=stops, **options) for _ in range(size)]
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

    def _takes_grammars(self) -> bool:
        """Whether a request may have a grammar here."""
        if self._ranks is not None:
            return False
        try:
            self._reader.request(torch.zeros(1, dtype=torch.int64), 1, self._config.sampling(grammar=ENDLESS), None, ())
        except (ValueError, ImportError):
            return False
        return True

    def keep_alive(self) -> None:
        """Call this from time to time while a session that ranks share is idle. In other sessions it does nothing."""

    def _decode(self) -> int:
        """Decode one step. Returns the nodes of the verified tree."""
        began = time.perf_counter()
        self._batch.compact()
        pieces = self._batch.step()
        reads = any(piece.after_prompts for piece in pieces)
        self._observe(pieces, None if reads else (time.perf_counter() - began) * 1e3)
        for piece in pieces:
            if piece.index in self._running:
                self._complete(piece)
                self._undelivered.append(piece)
        trees = [piece.tree for piece in pieces if piece.tree is not None]
        self.steps += bool(trees)
        return max((tree.nodes for tree in trees), default=0)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed; open another one with EAGLEInference.session")

    def _sampling(self, sampling: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
        """The sampling given to `submit`, as `sampling` or by names."""
        if sampling is None:
            return self._config.sampling(**options)
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be a SamplingParams, got {sampling!r}; temperature=... goes by its name")
        if options:
            raise ValueError(f"submit: give sampling or {', '.join(options)}, not both")
        return sampling

    def _too_long(self, length: int) -> str | None:
        """Why a prompt of `length` tokens cannot enter; None: it can."""
        try:
            check_positions(length, self._positions)
        except ValueError as error:
            return str(error)
        if length > self.rows:
            return f"a prompt of {length} tokens does not fit into the {self.rows} rows of this batch"
        return None

    def _admit(self) -> None:
        """Fill free slots from the line. A request stays in line until it has entered, or ended without entering."""
        entering = self._entering()
        self._set_tree([*self._running.values(), *entering])
        if not entering:
            return
        try:  # together, so that they are read together
            self._batch.enter_all(entering)
        except (ValueError, CacheFullError):
            self._enter_one_by_one(entering)  # finds out which fails, or how many have room
        else:
            for running in entering:
                self._enter(running)

    def _entering(self) -> list[RunningRequest]:
        """The first in line that have free slots and can be sampled together. Ends requests that need no slot."""
        entering: list[RunningRequest] = []
        orders = {running.request.filter_order for running in self._running.values()}
        slots = len(self._batch.free)
        for running in list(self._waiting):
            error = running.completion.error
            if error is not None or not running.request.max_new_tokens:
                self._end_in_line(running, error)
                continue
            orders.add(running.request.filter_order)
            if len(entering) == slots or {True, False} <= orders:
                break
            entering.append(running)
        return entering[: self._batch.fitting([running.request for running in entering])]

    def _enter_one_by_one(self, entering: Sequence[RunningRequest]) -> None:
        for running in entering:
            try:
                self._batch.enter_all([running])
            except ValueError as error:
                self._end_in_line(running, str(error))
            except CacheFullError as error:
                if self._running:
                    return  # until one of them ends
                self._end_in_line(running, str(error))
            else:
                self._enter(running)

    def _enter(self, running: RunningRequest) -> None:
        self._running[running.index] = running
        self._waiting.remove(running)
        statistics = running.completion.statistics
        statistics.add_prefill(len(running.request.prompt), running.cached_tokens)
        statistics.lossless = self._batch.verification.keeps_output(not running.request.sampling.greedy)

    def _set_tree(self, requests: Sequence[RunningRequest]) -> None:
        if self.policy is None:
            return
        self.policy.resize(self._batch.size_of_next(len(requests)))
        fixed = any(running.request.needs_fixed_tree(self._batch.verification) for running in requests)
        self._batch.planner.every_level = fixed
        wanted: TreeSpec = self._prepares or (self.policy.fixed_tree if fixed else self.policy.choose())
        if self._batch.spec != wanted:
            self._batch.spec = wanted

    def _observe(self, pieces: Sequence[Piece], ms: float | None) -> None:
        """Tell the policy about a step, unless it had another tree than the policy chose."""
        if self._ranks is not None and self.policy is not None and len(self.policy.choices) > 1:
            ms = self._ranks.broadcast_from_rank0(ms)  # each measured its own, but all must choose the same tree
        if self.policy is None or self._prepares is not None or any(piece.tree != self.policy.spec for piece in pieces):
            return
        size = max((piece.size for piece in pieces), default=1)
        self.policy.observe([piece.accepted for piece in pieces if piece.error is None], ms, size)

    def _complete(self, piece: Piece) -> None:
        """Add text to a piece, and count the piece. If it is the last, end its request."""
        running = self._running[piece.index]
        completion, stream, statistics = running.completion, running.stream, running.completion.statistics
        if stream is not None and self._streams(stream):
            piece.text = stream.push(*piece.tokens)
        self.tokens += len(piece.tokens)
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            if (new := getattr(piece, name)) is not None:
                setattr(completion, name, known := getattr(completion, name) or [])
                known += new
        if piece.error is None and piece.tree is not None:
            forwards = piece.draft_forwards
            statistics.add_step(piece.accepted, piece.proposed, piece.depth, len(piece.tokens), forwards)
        piece.certain_tokens = stream.certain_tokens if stream and stream.stop_strings else len(running.tokens)
        finished = "stop" if stream is not None and stream.stopped else piece.finished
        if finished is not None:
            del self._running[piece.index]
            if piece.finished is None:
                self._batch.release(piece.slot)
            self._end(running, piece, finished)

    def _streams(self, stream: TextStream) -> bool:
        """Whether text is made while a request runs."""
        return self._text or bool(stream.stop_strings)

    def _end_in_line(self, running: RunningRequest, error: str | None) -> None:
        """End a request that has not entered a slot. error: None if no token is wanted."""
        piece = Piece(running.index, running.request, [], error=error)
        self._waiting.remove(running)
        self._end(running, piece, "length" if error is None else "error")
        self._undelivered.append(piece)

    def _end(self, running: RunningRequest, piece: Piece, finished: str) -> None:
        """End a request: finish its completion, and add the text that was held back to its last piece."""
        completion, stream, kept = running.completion, running.stream, len(running.tokens)
        if stream is not None:
            if not self._streams(stream):
                piece.text += stream.push(*running.tokens)
            piece.text += stream.finish()
            completion.text, completion.stop_string = stream.text, stream.stop_string
            if stream.stopped:
                kept = stream.tokens
                finished = finished if piece.error else "stop"
        del completion.tokens[kept:]
        for scores in (completion.logprobs, completion.top_logprobs):
            if scores is not None:
                del scores[kept:]
        completion.prompt = to_device(completion.prompt, self._device)
        completion.finished = piece.finished = finished
        completion.error, completion.pauses = piece.error, running.pauses
        completion.statistics.tokens = piece.certain_tokens = kept
        piece.completion = completion
        self.statistics += completion.statistics


def _reserved_bytes(device: torch.device) -> int:
    """The memory of a GPU that torch has reserved."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
