"""A running batch: requests enter and leave its slots while the others go on, without a new capture."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import wait_for_all
from eagle_triton.engine.memory.pages import PAGE_ROWS, CacheFullError
from eagle_triton.engine.prefill import NaNLogitsError
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.admission import agree_on_seeds, check_request, refuses_grammars
from eagle_triton.engine.scheduler.batch_slots import BatchSlots
from eagle_triton.engine.scheduler.requests import NAN, REASONS, Piece, Request, RunningRequest
from eagle_triton.engine.scheduler.step_planner import StepOptions, size_for
from eagle_triton.engine.scheduler.steps_in_flight import LaunchedStep
from eagle_triton.engine.step import Judge
from eagle_triton.engine.step_cache import SplitStep
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.verification import ERROR, Verification
from eagle_triton.values import check_range

PROMPT_TOKENS = 512  # prompt tokens to read between two steps: about 15 ms at 8B's shape on an H200


class Batch(BatchSlots):
    """Decodes the requests in its slots, all of them in each step. Use as a context manager.

    It has the engine to itself until it is closed or dropped: a second batch raises RuntimeError. So does every call
    after it was closed, or after an exception in a step (an interrupt, no memory), which leaves sequences half-way. On
    a GPU the next step is launched before the last one is read, so that the device never waits for the host. That step
    does nothing for requests that have ended. The tokens of a request depend neither on its slot nor on the other
    requests. In 16 bits the last bits of its logits depend on how much is read or decoded at once, and on whether a
    long prompt is read alone.
    """

    def __init__(
        self,
        engine: Engine,
        slots: int,
        spec: TreeSpec,
        rows: int,
        *,
        logprobs: bool = False,
        report_drafts: bool = False,
        drafts: bool | None = None,
        verification: Verification | None = None,
        prompt_tokens: int = PROMPT_TOKENS,
        judge: Judge | None = None,
    ):
        """rows: the most tokens of a sequence, prompt included. spec: the tree of the next step, see the property.

        logprobs: report the log-probability of each token, the log-softmax of the target's own logits: before
        penalties, biases, temperature and filters, over the tokens that a grammar allows. False: only for requests that
        ask for it.
        report_drafts: report the drafts.
        drafts: whether anything will be drafted; False makes plain decoding a little cheaper. None: if the engine has a
        draft.
        verification: how drafts are judged, None: the engine's way.
        prompt_tokens: about how many tokens of the prompts of `enter_all` are read before each step while others
        decode.
        judge: chooses all tokens on the host. For the first one it gets a tree of one node. With a judge, steps are not
        captured, the requests' sampling is ignored, and a full cache raises CacheFullError.
        """
        check_range("prompt_tokens", prompt_tokens, 1)
        if slots < 1 or rows < 1:
            raise ValueError(f"slots and rows must be at least 1, got {slots} and {rows}")
        drafts = engine.draft is not None if drafts is None else drafts
        verification = engine.verification if verification is None else verification
        self.prompt_tokens = prompt_tokens
        self._came = 0  # requests that were numbered here
        self.close = weakref.finalize(self, engine.acquire())  # also when the batch is dropped
        try:
            options = StepOptions(drafts, logprobs, report_drafts, verification, judge)
            super().__init__(engine, slots, spec, rows, options)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def start(engine: Engine, prompts: Sequence[Tensor], spec: TreeSpec, sampling: SamplingParams, rows: int) -> Batch:
        """A batch of prompts with the same sampling, a slot for each, until each has `rows` tokens."""
        batch = Batch(engine, len(prompts), spec, max(rows, *(len(prompt) + 1 for prompt in prompts)))
        try:
            batch.admit_all(
                Request(prompt, batch.rows - len(prompt), replace(sampling, seed=seed))
                for prompt, seed in zip(prompts, sampling.seeds(len(prompts)), strict=True)
            )
        except BaseException:
            batch.close()
            raise
        return batch

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def cache_used(self) -> float:
        """The share of the pages that sequences hold, 0 to 1: of the limit if there is one, else of existing pages."""
        pool = self.sequences.pages.pool
        return pool.held / max(pool.limit or pool.pages, 1)

    # --- entering and leaving ---

    def admit(self, request: Request | RunningRequest) -> int:
        """Prefill a request into a free slot, and return the slot. Other requests are not changed, even if this fails.

        Raises RuntimeError if no slot is free or the target's logits are NaN after the prompt, CacheFullError (a
        RuntimeError) if the others leave no room in the cache, ValueError if the request never fits. A request takes
        pages as it decodes. When no pages are left, the newest requests pause until there are some, and then read their
        tokens again.
        """
        return self.admit_all([request])[0]

    def admit_all(self, requests: Iterable[Request | RunningRequest]) -> list[int]:
        """`admit` several requests, or none if one fails; equal prompts are computed once."""
        self._check_usable()
        self.engine.check_model()
        slots = self._reserve(self._numbered(requests))
        with self._in_use():
            try:
                while not self._read.keys() >= set(slots):
                    self._read_prompts(None)
                self._begin_read()
                wait_for_all(self.sequences.device, self.engine.view.ranks)
                nan = self.sequences.begun[:, 1].tolist()
            except BaseException:
                self._give_up(slots)
                raise
            if broken := [place for place, slot in enumerate(slots) if nan[slot]]:
                self._give_up(slots, wipe=True)
                raise NaNLogitsError(f"{NAN} after the prompts of sequences {broken}")
        return slots

    def enter_all(
        self, requests: Iterable[Request | RunningRequest], stream: torch.cuda.Stream | None = None
    ) -> list[int]:
        """Put requests into free slots, and return the slots. The next steps read the prompts. Requests without an
        index are numbered from 0, in the order in which they come; pieces have this number.

        While others decode, only about `prompt_tokens` are read before each step. Otherwise all prompts are read at
        once, while the model is checked; in `stream`, if given, so that other launches before the next step need not
        wait. If the target's logits are NaN after a prompt, the request ends with that error. Other errors are raised
        as in `admit_all`.
        """
        self._check_usable()
        if self._decoding:
            self.engine.check_model()
            return self._reserve(self._numbered(requests))
        checks_later, entries = self.engine.check_launches(), self._numbered(requests)
        slots = self._reserve(entries)
        if stream is not None:  # the caller may have launched changes of weights where the engine has not run yet
            stream.wait_stream(torch.cuda.current_stream(self.engine.device))
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream), self._in_use():
                while self._prompts:
                    self._read_prompts(None)
            outdated = checks_later and self.engine.check_model()  # whether found pages are outdated
        except BaseException:
            if self._failure is None:
                with self._in_use():
                    self._give_up(slots)
            raise
        if outdated:
            with self._in_use():
                self._give_up(slots)
            slots = self._reserve(entries)
        return slots

    def reseed(self, seeds: Sequence[int]) -> None:
        """Give the requests, by slot, other seeds, before their first tokens are chosen."""
        for entry, seed in zip(self._present(), seeds, strict=True):
            entry.request = replace(entry.request, sampling=replace(entry.request.sampling, seed=seed))

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of the first requests probably have free slots and room in the cache now; at least one if there are
        no others."""
        if self._present(paused=True):
            return 0
        first = requests[: len(self.free)]
        count = self._room.fitting(first)
        return count if self.running else max(count, min(1, len(first)))

    def never_fits(self, request: Request) -> str | None:
        """Why the cache has no room even for this request alone; None: it has."""
        return self._room.never_fits(request)

    def _numbered(self, requests: Iterable[Request | RunningRequest]) -> list[RunningRequest]:
        return [
            request if isinstance(request, RunningRequest) else RunningRequest(request, self._came + place)
            for place, request in enumerate(requests)
        ]

    def _reserve(self, entries: Sequence[RunningRequest]) -> list[int]:
        """Put requests into slots where their prompts wait to be read. The model was checked."""
        for entry in entries:
            self._check(entry)
        if (ranks := self.engine.view.ranks) is not None:
            engine, pool = self.engine, self.sequences.pages.pool
            options = engine.number, engine.prefixes, self.verification, self.planner.options.drafts, pool.limit is None
            batch = len(self._entries), self.rows, self.spec, engine.launched, pool.forgot
            agree_on_seeds(ranks, entries, (*options, *batch))
        slots = self.free[: len(entries)]
        if len(slots) < len(entries):
            raise RuntimeError(f"{len(entries)} requests do not fit into {len(slots)} free slots; step until some end")
        with self._in_use():
            self._make_room()  # for the others' next trees, which may have another shape now
        if entries and self._present(paused=True):
            raise CacheFullError("earlier requests wait for cache pages: call step until they run")
        for entry in entries:
            entry.prefix = self._prefix_of(entry.request, entry.prompt)
        with self._in_use():
            found = self._put(dict(zip(slots, entries, strict=True)))
        self._came += len(entries)
        for slot, entry in zip(slots, entries, strict=True):
            entry.cached_tokens = found[slot] * PAGE_ROWS
            if entry.cached_tokens:
                self.engine.ops.calls["prompt_tokens_found"] += entry.cached_tokens
        return slots

    def _check(self, entry: RunningRequest) -> None:
        """Raise ValueError if a request never fits; make room for its stop tokens."""
        check_request(entry, self.engine.view, self.rows, self.spec.depth)
        reason = None
        if entry.request.sampling.grammar is not None:
            reason = refuses_grammars(self.verification)
            if self.planner.options.judge is not None:
                reason = "grammar: this batch has a judge, which chooses all tokens and reads no grammar"
        if reason := reason or self.never_fits(entry.request):
            raise ValueError(reason)
        if self.sequences.widen_stops(len(entry.request.stop_ids)):
            self.engine.steps.forget(self.sequences)

    def _give_up(self, slots: Sequence[int], wipe: bool = False) -> None:
        """Leave slots as if nothing had entered them."""
        self._empty(*reversed(slots), wipe=wipe)  # first the slots that wait for another slot's prompt

    def release(self, slot: int) -> None:
        """Drop the request in a slot before it has ended. Raises ValueError if there is none."""
        self._check_usable()
        self.request(slot)
        with self._in_use(), self._must_finish():
            self._empty(slot)

    # --- decoding ---

    def size_of_next(self, requests: int) -> int:
        """How many slots the next step covers when `requests` requests run, including those that run now."""
        taken = self.running
        taken += self.free[: max(requests - len(taken), 0)]
        return size_for(max(taken, default=0) + 1, self.sequences.slots)

    def compact(self) -> dict[int, int]:
        """Move requests from high slots to lower free ones if the next steps then cover fewer sequences.

        Returns the new slots by the old ones. No request moves while prompts are read.
        """
        self._check_usable()
        taken, moved = self.running, dict[int, int]()
        most = self.sequences.slots
        settled = not (self.reading or self._present(paused=True))
        if not taken or not settled or size_for(len(taken), most) == size_for(max(taken) + 1, most):
            return moved
        free = [slot for slot in self.free if slot < size_for(len(taken), most)]
        with self._in_use(), self._must_finish():
            for source, target in zip(reversed(taken), free, strict=False):
                if source < size_for(len(taken), most):
                    break
                length = self.lengths[source]
                self.sequences.move(source, target, length)
                self.state.move(source, target, length)
                entry = self.request(source)
                entry.slot, self._entries[target], self._entries[source] = target, entry, None
                self.lengths[target], self._reported[target] = length, self._reported[source]
                moved[source] = target
        return moved

    def step(self) -> list[Piece]:
        """Decode one step. Returns what it gave each running request, or the first tokens of new requests as soon as
        they are there. Requests that have ended leave their slots."""
        with self._in_use():
            while self.running or self._failed:
                while not (self.in_flight.full or self._failed):
                    self._make_room()
                    self._resume()
                    reads = self._take_prompts()
                    if self.in_flight.full:
                        break
                    if any(self.in_flight.may_go_on(entry) for entry in self._decoding.values()):
                        self._launch_step(reads)
                    elif self.in_flight:
                        break
                with self._must_finish():
                    pieces = self._read_step()
                pieces, self._failed = [*pieces, *self._failed], []
                if pieces:  # otherwise the step was for requests that have ended
                    return pieces
            return []

    def launch(self) -> None:
        """Launch the next step and never read its report: for timing, at the end of a batch."""
        with self._in_use():
            self._make_room()
            self._launch_step(None)
            self._room.unread_steps += 1

    def _take_prompts(self) -> bool:
        """Read waiting prompts: `prompt_tokens`, or all if no request decodes. Returns whether there were any."""
        decoding, reads, taken = bool(self._decoding), self.reading, 0
        while self._prompts and not (decoding and taken >= self.prompt_tokens):
            taken += self._read_prompts(self.prompt_tokens - taken if decoding else None)
        self._begin_read()
        return reads

    def _launch_step(self, reads: bool | None) -> None:
        """Launch the next step. reads: whether prompts were read before it; None: its report is never read."""
        self.planner.resize(max(self.running) + 1)
        step, mode = self.planner.next(self._present())
        with self._must_finish():
            self._run(step)
            self.engine.launched += 1
            if reads is not None:
                self.in_flight.send(LaunchedStep(self._decoding, self.state, mode, self.planner.levels, reads))
                for entry in self._decoding.values():
                    entry.steps += 1
            self.planner.levels = self.spec.beam_levels if mode.levels is None else mode.levels

    def _run(self, step: Callable[[], None]) -> None:
        """Launch a step. If it has grammars, write their masks while its first part runs."""
        if not isinstance(step, SplitStep):
            step()
            return
        entries, longest = self._decoding, self.planner.spare_rows
        if step.draft_forced is not None:
            self._masks.draft_forced(self.state, entries, longest, step.draft_forced)
        self._masks.send_trees(self.state, longest)
        step.forward()
        self._masks.write_masks(self.state, entries)
        step.verify()
        self._masks.send_roots(self.state, entries)
        step.draft()

    def _read_step(self) -> list[Piece]:
        """Read what the oldest step in flight gave requests that are still there. Requests that have ended leave."""
        pieces = self.in_flight.read()
        for piece in pieces:
            if piece.tree is not None and piece.tree.drafts and piece.error is None:
                self.engine.ops.calls["trees_verified"] += 1
                self.engine.ops.calls["drafts_accepted"] += piece.accepted
            self.lengths[piece.slot] += piece.committed
            self._reported[piece.slot] += len(piece.tokens)
            self.request(piece.slot).tokens += piece.tokens
        failed = [piece.slot for piece in pieces if piece.finished == REASONS[ERROR]]
        self._empty(*(piece.slot for piece in pieces if piece.finished and piece.slot not in failed))
        self._empty(*failed, wipe=True)  # last, so that no other request keeps a page that is forgotten
        return pieces
