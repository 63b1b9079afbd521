"""A running batch: requests enter and leave its slots while the others go on, without a new capture."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import wait_for_all
from eagle_triton.engine.memory.pages import PAGE_ROWS, CacheFullError, PrefixKeys
from eagle_triton.engine.prefill import NaNLogitsError
from eagle_triton.engine.prompt_queue import PromptQueue
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.admission import agreed_requests, check_request
from eagle_triton.engine.scheduler.page_budget import PageBudget
from eagle_triton.engine.scheduler.requests import NAN, REASONS, Request, StepResult
from eagle_triton.engine.scheduler.running_request import RunningRequest
from eagle_triton.engine.scheduler.slot_options import clear_slots, write_options
from eagle_triton.engine.scheduler.step_planner import StepOptions, StepPlanner, rows_behind, size_for
from eagle_triton.engine.scheduler.steps_in_flight import LaunchedStep, StepsInFlight
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.step import Judge, Mode
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.engine.upload import to_device, upload
from eagle_triton.operands.verification import ERROR, Verification

PROMPT_TOKENS = 512  # of a prompt that are read between two steps: some 15 ms at 8B's shape on an H200


class Batch:
    """Decodes the requests that stand in its slots, all by one step at a time. Use as a context manager.

    It has the engine to itself until it is closed or dropped: a second one is refused with RuntimeError. So is
    everything after it was closed, or after an exception out of a step (an interrupt, no memory), which leaves the
    sequences half-way. On a GPU the next step is launched before the last one is read, so that the device never waits
    for the host; what that step does for a request that has ended is nothing. What a request gives depends neither on
    its slot nor on who else is there; in 16 bits its last bits depend on how much is read or decoded at once,
    and on whether a long prompt is read alone.
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
        """rows: the most tokens of a sequence, prompt included. spec: the tree of the next step; see there.

        logprobs: report the log-probability of each token, the log-softmax of the target's own logits there: before
        penalties, biases, temperature and filters. False: for requests that ask for it.
        report_drafts: report what was drafted.
        drafts: False if nothing will ever be drafted, which makes plain decoding a little cheaper; None: it may be,
        if the engine has a draft.
        verification: how drafts are judged, None: as the engine has it.
        prompt_tokens: about how many tokens of the prompts of `enter_all` are read before each step while others
        decode.
        judge: chooses all tokens, on the host: roots as a tree of one node. Steps are not captured then, whatever
        requests ask of sampling counts for nothing, and where the cache has no room left CacheFullError is raised.
        """
        if prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, got {prompt_tokens}")
        if slots < 1 or rows < 1:
            raise ValueError(f"slots and rows must be at least 1, got {slots} and {rows}")
        hold = engine.acquire()
        self.close = weakref.finalize(self, hold.release)  # also when the batch is dropped
        self._failure: BaseException | None = None
        try:
            self.engine, self.rows = engine, rows
            drafts = engine.draft is not None if drafts is None else drafts
            verification = engine.verification if verification is None else verification
            options = StepOptions(drafts, logprobs, report_drafts, verification, judge)
            behind = rows_behind(spec, drafts)
            with engine.running():
                self.sequences = engine.sequences(slots, rows + behind)
                engine.release_pages()  # that a batch which failed has left
                self.sequences.active.fill_(False)
                self.sequences.lengths.zero_()
                self.chooser = StepPlanner(engine, self.sequences, spec, behind, options)
                self._prefill = engine.prefill(self.sequences)
            self.in_flight = StepsInFlight(engine, options)
            self.lengths = [0] * slots  # committed tokens, as the host knows them
            self._entries: list[RunningRequest | None] = [None] * slots
            self._room = PageBudget(self.sequences.pages, self.chooser, self.in_flight, self._entries)
            self._prompts = PromptQueue(
                self._prefill.packed, self.sequences.pages.pool.unread if self._prefill.share else None
            )
            self.prompt_tokens = prompt_tokens
            self._told = [0] * slots  # tokens told by reports so far
            self._read: dict[int, RunningRequest] = {}  # prompts that are read, and have not begun
            self._came = 0  # requests so far
            self._failed: list[StepResult] = []  # requests for which there is no room even alone
        except BaseException:
            hold.release()
            raise

    @staticmethod
    def start(
        engine: Engine,
        prompts: Sequence[Tensor],
        spec: TreeSpec,
        sampling: SamplingParams,
        rows: int,
        generator: torch.Generator | None = None,
        slots: int | None = None,
    ) -> Batch:
        """A batch of prompts that are sampled alike, each until it has `rows` tokens. slots: None is one for each."""
        seeds = sampling.seeds(len(prompts), generator)
        batch = Batch(engine, slots or len(prompts), spec, max(rows, *(len(prompt) + 1 for prompt in prompts)))
        try:
            batch.admit_all(
                Request(prompt, batch.rows - len(prompt), replace(sampling, seed=seed))
                for prompt, seed in zip(prompts, seeds, strict=True)
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
    def closed(self) -> bool:
        """Whether the engine was given back; nothing is decoded any more."""
        return not self.close.alive

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Launch inside the block. Refuses a batch that is closed or has failed."""
        self._check_usable()
        with self.engine.running():
            yield

    @contextmanager
    def _must_finish(self) -> Iterator[None]:
        """What is raised inside the block leaves the sequences half-way: the batch has failed."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def _check_usable(self) -> None:
        if self.closed:
            raise RuntimeError("this batch is closed")
        if self._failure is not None:
            raise RuntimeError(
                f"a step of this batch failed ({self._failure!r}), and it cannot go on: make a new batch"
            ) from self._failure

    @property
    def spec(self) -> TreeSpec:
        """The tree of the next step, PLAIN to draft nothing. Raises ValueError, when set, for one that does not fit."""
        return self.chooser.spec

    @spec.setter
    def spec(self, spec: TreeSpec) -> None:
        self.chooser.spec = spec

    @property
    def verification(self) -> Verification:
        """How drafts are judged."""
        return self.chooser.options.verification

    @property
    def _draft(self) -> Draft | None:
        """What drafts, None: nothing ever does."""
        return self.engine.draft if self.chooser.options.drafts else None

    @property
    def state(self) -> DecodeState:
        """Of the tree that was drafted last."""
        return self.chooser.state

    def _occupied(self, waiting: bool | None = None) -> list[tuple[int, RunningRequest]]:
        """Slots that are taken, with their requests: those that wait for room, or those that have it; None: all."""
        taken = [(slot, entry) for slot, entry in enumerate(self._entries) if entry is not None]
        return taken if waiting is None else [pair for pair in taken if pair[1].preempted == waiting]

    @property
    def free(self) -> list[int]:
        """Slots that a request may enter."""
        kept = {failed.slot for failed in self._failed}  # until that is told
        entries = enumerate(self._entries)
        return [slot for slot, entry in entries if entry is None and not (slot in kept or self._prompts.holds(slot))]

    @property
    def reading(self) -> bool:
        """Whether the next step reads prompts."""
        return bool(self._prompts or self._read)

    @property
    def running(self) -> list[int]:
        """Slots with a request that has not ended."""
        return [slot for slot, _ in self._occupied()]

    def request(self, slot: int) -> Request:
        """The request in a slot. Raises ValueError if there is none."""
        entry = self._entries[slot]
        if entry is None:
            raise ValueError(f"slot {slot} is free")
        return entry.request

    def tokens(self, slot: int) -> Tensor:
        """The prompt and the new tokens, as far as steps have told of them, of the request that is in a slot or has
        ended in it last: int64 [n], a copy."""
        self._check_usable()
        entry = self._entries[slot]
        if entry is not None and not entry.decodes:  # after a preemption tokens that were told may not stand there yet
            return to_device(entry.first(self._told[slot]), self.sequences.device)
        return self.sequences.tokens[slot, : self._told[slot]].clone()

    def admit(self, request: Request) -> int:
        """Prefill a request into a free slot, which is returned. The others notice nothing, also if this fails.

        Raises RuntimeError if no slot is free or the target's logits are NaN after the prompt, CacheFullError (a
        RuntimeError) if the others leave no room in the cache, ValueError if the request never fits. Room is taken as
        the request decodes; where there is none, requests that came last pause until there is, and read again what
        their pages held.
        """
        return self.admit_all([request])[0]

    def admit_all(self, requests: Iterable[Request]) -> list[int]:
        """`admit` several requests, or none if one fails; equal prompts are computed once."""
        slots = self._reserve(requests)
        with self._in_use():
            try:
                while any(self._read.get(slot) is not self._entries[slot] for slot in slots):
                    self._read_prompts(None)
                self._begin_read()
                broken = self._broken(slots)
            except BaseException:
                self._give_up(slots)
                raise
            if broken:
                self._give_up(slots, wipe=True)
                raise NaNLogitsError(f"{NAN} after the prompts of sequences {broken}")
        return slots

    def enter_all(self, requests: Iterable[Request]) -> list[int]:
        """Put requests into free slots, which are returned; the next steps read their prompts.

        While others decode, only about `prompt_tokens` are read before each step. If the target's logits are NaN after
        a prompt, the request ends with that error. Else raises as `admit_all` does.
        """
        return self._reserve(requests)

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of the first requests fit into free slots and into the cache now, as far as is known without trying;
        at least one if no other request is there."""
        if self._occupied(waiting=True):
            return 0
        first = requests[: len(self.free)]
        count = self._room.fitting(first)
        return count if self.running else max(count, min(1, len(first)))

    def never_fits(self, request: Request) -> str | None:
        """Why the cache has no room for a request even alone; None: it has."""
        return self._room.never_fits(request)

    def cached_tokens(self, slot: int) -> int:
        """How many tokens of the prompt in a slot were computed before, for another request."""
        entry = self._entries[slot]
        return 0 if entry is None else entry.cached_tokens

    def _reserve(self, requests: Iterable[Request]) -> list[int]:
        """Put requests into slots where their prompts wait to be read."""
        self._check_usable()
        self.engine.check_model()
        requests = list(requests)
        for request in requests:
            self._check(request)
        if self.engine.view.ranks is not None:
            requests = agreed_requests(self.engine.view.ranks, requests, self._to_compare())
        slots = self.free[: len(requests)]
        if len(slots) < len(requests):
            raise RuntimeError(f"{len(requests)} requests do not fit into {len(slots)} free slots; step until some end")
        with self._in_use():
            self._make_room()  # for others' next trees, which may have another shape now
        if requests and self._occupied(waiting=True):
            raise CacheFullError("earlier requests wait for cache pages: step until they run")
        entering = {slot: self._entry_of(request) for slot, request in zip(slots, requests, strict=True)}
        with self._in_use():
            self._put(entering)
        for entry in entering.values():
            if entry.cached_tokens:
                self.engine.ops.calls["prompt_tokens_found"] += entry.cached_tokens
        return slots

    def _check(self, request: Request) -> None:
        """Raise ValueError if a request never fits; make room for its stop tokens."""
        check_request(request, self.engine.view, self.rows, self.spec.depth)
        if reason := self.never_fits(request):
            raise ValueError(reason)
        if self.sequences.widen_stops(len(request.stop_ids)):
            self.engine.forget_steps(self.sequences)

    def _to_compare(self) -> tuple[Any, ...]:
        """What decides beside the requests how they are decoded, and must be the same on all ranks."""
        engine, pool = self.engine, self.sequences.pages.pool
        options = engine.number, engine.prefixes, self.verification, self.chooser.options.drafts, pool.limit is None
        return (*options, len(self._entries), self.rows, self.spec, engine.launched, pool.forgot)

    def _put(self, entering: dict[int, RunningRequest]) -> None:
        """Give slots pages for what they read first, and let it wait to be read; others have room for their next trees.
        What fails leaves them as they were."""
        mode = self.chooser.mode([*entering.values(), *(entry for _, entry in self._occupied())])
        pages, slots = self.sequences.pages, list(entering)
        try:
            rows = {slot: self._room.first_rows(entry.request, len(entry.prompt)) for slot, entry in entering.items()}
            found = pages.take(rows, {slot: entry.prefix for slot, entry in entering.items()})
            if mode.processed:
                self.sequences.add_rules()
            if mode.logits:
                self.sequences.add_logits()
            self.chooser.resize(max(max(slots) + 1, self.state.batch))
            self.chooser.change_tree(mode)
            self._set_up(entering, mode)
        except BaseException:
            self.sequences.lengths[slots] = 0
            for slot in reversed(slots):
                pages.give(slot)
            raise
        with self._must_finish():
            shared = {slot: pages.of(slot)[: len(entry.prefix.keys)] for slot, entry in entering.items()}
            alone = [slot for slot, entry in entering.items() if entry.request.embeddings is not None]
            self._prompts.add({slot: entry.prompt for slot, entry in entering.items()}, shared, alone)
            for slot, entry in entering.items():
                self.lengths[slot] = len(entry.prompt)
                self._told[slot] = len(entry.prompt) + len(entry.tokens)
                entry.cached_tokens = found[slot] * PAGE_ROWS
                self._entries[slot] = entry
            self._room.write(slots)

    def _entry_of(self, request: Request) -> RunningRequest:
        prompt = request.prompt.to("cpu", copy=True)  # the caller may write another one there
        self._came += 1
        return RunningRequest(request, prompt, self._prefix_of(request, prompt), self._came)

    def _prefix_of(self, request: Request, tokens: Tensor, known: Sequence[bytes] = ()) -> PrefixKeys:
        """By which pages with these tokens of a request are found; by nothing where none are shared, or where the
        target has read something else."""
        if not self._prefill.share or request.embeddings is not None:
            return PrefixKeys([])
        return PrefixKeys.of(tokens, b"plain" if self._draft is None else b"drafts", known)

    def _make_room(self) -> None:
        """Let all have pages for what the next step may write. Where there are none, the last to come pauses."""
        missing = self._room.missing(self.lengths)
        for slot, rows in missing.items():
            while self._has_pages(slot):
                try:
                    self.sequences.pages.extend(slot, rows)
                    break
                except CacheFullError:
                    self._preempt(self._last_to_come())
        grown = [slot for slot in missing if self._room.grew(slot)]
        if grown:
            with self._must_finish():
                self._room.write(grown)

    def _has_pages(self, slot: int) -> bool:
        entry = self._entries[slot]
        return entry is not None and not entry.preempted

    def _last_to_come(self) -> int:
        """The slot to preempt next: that of the last request to come, except where others share its prompt."""
        may = [pair for pair in self._occupied(waiting=False) if not self._prompts.reads_for_others(pair[0])]
        return max(may, key=lambda pair: pair[1].arrival)[0]

    def _preempt(self, slot: int) -> None:
        """Take a request's pages from it until there is room to go on. Waits for the device: the root that was chosen
        stays, because `rejection` would draw it by another law."""
        if self.chooser.options.judge is not None:  # who would be asked for the same root again
            raise CacheFullError("the cache is full, and requests with a judge cannot be preempted: raise cache_tokens")
        entry = self._entries[slot]
        assert entry is not None
        tokens = entry.first(self.lengths[slot])
        prefix = self._prefix_of(entry.request, tokens, entry.prefix.keys)
        wait_for_all(self.sequences.device, self.engine.view.ranks)
        root = int(self.sequences.tokens[slot, self.lengths[slot]]) if entry.decodes else entry.root
        waiting = entry.to_resume(tokens, prefix, root)
        with self._must_finish():
            self._empty(slot)
            self._entries[slot] = waiting
            self.engine.ops.calls["requests_paused"] += 1

    def _resume(self) -> None:
        """Let requests that wait for room read their tokens again, the first to come first, as far as there is any."""
        while waiting := self._occupied(waiting=True):
            slot, entry = min(waiting, key=lambda pair: pair[1].arrival)
            if not self._room.may_resume(entry):
                return
            going = copy.copy(entry)
            going.preempted = False
            try:
                self._put({slot: going})
            except CacheFullError as error:
                if self._occupied(waiting=False):
                    return
                failed = StepResult(slot, entry.request, [], finished=REASONS[ERROR], error=str(error))
                with self._must_finish():
                    self._failed.append(failed)
                    self._empty(slot)
                return
            going.cached_tokens = entry.cached_tokens

    def _read_prompts(self, most: int | None) -> int:
        """Launch the next forward over prompts, of about `most` tokens, and return how many are read by it.

        A failure on the way touches no request that decodes, and is tried again next time.
        """
        forward = self._prompts.next(most)
        if not self.engine.view.by_token:  # who interrupts leaves layers that have taken these tokens in, and others
            self._prompts.restart(forward)
        if self._prefill.read(forward, self._draft, self._embeddings_of(forward.pieces[0].slot)):
            return 0
        with self._must_finish():
            self._prompts.take(forward)
            for slot in forward.ended:
                self._finish_prompt(slot)
        return forward.tokens

    def _embeddings_of(self, slot: int) -> Tensor | None:
        """What the target reads instead of the tokens of the prompt in a slot, [L, H]; None: these."""
        entry = self._entries[slot]
        if entry is None or entry.request.embeddings is None:
            return None
        given = entry.request.embeddings
        behind = entry.prompt[len(given) :].to(given.device)
        return torch.cat((given, self.engine.view.embedding[behind]))

    def _begin_read(self) -> None:
        """Begin with all prompts that are read to the end, at once: it takes a pass of the draft over the whole batch.

        What fails on the way is done again next time.
        """
        begun = {slot: entry for slot, entry in sorted(self._read.items()) if entry is self._entries[slot]}
        if begun:
            mode = self.chooser.mode(entry for _, entry in self._occupied())
            write_options(self.sequences, begun)  # not before, while the device would wait
            self._prefill.choose_roots(list(begun), self.state, mode)
            self.in_flight.send_begun(begun, self.sequences)
            self._prefill.grow_trees(self._draft, self.state)
            self.chooser.levels = self.state.spec.beam_levels  # all trees were grown again
            for entry in begun.values():
                entry.decodes = True
                entry.steps += 1
        self._read = {}

    def _finish_prompt(self, source: int) -> None:
        """A slot's prompt is read: give it to those that wait for the same."""
        slots = (source, *self._prompts.finish(source))
        for slot in slots:
            entry = self._entries[slot]
            if entry is None:  # it was released, and read for others
                continue
            if slot != source:
                self._prefill.copy(source, slot, len(entry.prompt))
            self._read[slot] = entry
        for slot in slots:
            if self._entries[slot] is None:
                self._free(slot)

    def _broken(self, slots: Sequence[int]) -> list[int]:
        """Which of those that have just begun, by their places in `slots`, have NaN logits. Waits for the device."""
        wait_for_all(self.sequences.device, self.engine.view.ranks)
        nan = self.sequences.begun[:, 1].tolist()
        return [place for place, slot in enumerate(slots) if nan[slot]]

    def _give_up(self, slots: Sequence[int], wipe: bool = False) -> None:
        """Leave slots as if nothing had entered them."""
        for slot in reversed(slots):  # those that take another's prompt first
            self._empty(slot, wipe)

    def release(self, slot: int) -> None:
        """Drop the request in a slot before it has ended. Raises ValueError if there is none."""
        self._check_usable()
        if self._entries[slot] is None:
            raise ValueError(f"slot {slot} is free")
        with self._in_use(), self._must_finish():
            self._empty(slot)

    def step(self) -> list[StepResult]:
        """Decode one step: what it did for each running request; or, for those whose prompts were read last, the first
        tokens alone, as soon as they are there. Those that have ended leave their slots."""
        with self._in_use():
            return self._step()

    def launch(self) -> None:
        """Launch the next step without reading what it does: for timing, at the end of a batch."""
        with self._in_use():
            self._make_room()
            self._fit_step()
            step, levels = self.chooser.next([entry for _, entry in self._occupied()])
            with self._must_finish():
                step()
                self.engine.launched += 1
                self.chooser.levels = levels
                self._room.unread_steps += 1

    def _step(self) -> list[StepResult]:
        while self.running or self._failed:
            while not (self.in_flight.full or self._failed):
                self._make_room()
                self._resume()
                reads = self._take_prompts()
                if self.in_flight.full:
                    break
                if any(entry.decodes and not self._ends_anyway(entry) for _, entry in self._occupied()):
                    self._launch_step(reads)
                elif self.in_flight:
                    break
            with self._must_finish():
                progress = self._read_step()
            progress, self._failed = [*progress, *self._failed], []
            if progress:  # else it was launched for requests that had ended
                return progress
        return []

    def _ends_anyway(self, entry: RunningRequest) -> bool:
        """Whether a request surely ends by what is in flight already."""
        return entry.new_tokens + self.in_flight.least_tokens(entry) >= entry.request.max_new_tokens

    def compact(self) -> dict[int, int]:
        """Let requests in high slots go to free lower ones, as far as the next steps are over fewer sequences then.

        Returns the slots of those that have moved, the new ones by the old. Nobody moves while prompts are read.
        """
        self._check_usable()
        taken, moved = [slot for slot, _ in self._occupied()], dict[int, int]()
        most = self.sequences.slots
        settled = not (self.reading or self._occupied(waiting=True))
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
                self._entries[target], self._entries[source] = self._entries[source], None
                self.lengths[target], self._told[target] = length, self._told[source]
                moved[source] = target
        return moved

    def size_of_next(self, requests: int) -> int:
        """Slots that the next step covers once `requests` requests run, the present ones among them."""
        taken = [slot for slot, _ in self._occupied()]
        taken += self.free[: max(requests - len(taken), 0)]
        return size_for(max(taken, default=0) + 1, self.sequences.slots)

    def _fit_step(self) -> None:
        """Let the next step be over the slots that are taken, and no more."""
        self.chooser.resize(max(slot for slot, _ in self._occupied()) + 1)

    def _launch_step(self, reads: bool) -> None:
        """Launch the next step, to be read later. reads: prompts were read before it."""
        self._fit_step()
        step, levels = self.chooser.next([entry for _, entry in self._occupied()])
        with self._must_finish():
            step()
            self.engine.launched += 1
            entries = {slot: entry for slot, entry in self._occupied() if entry.decodes}
            self.in_flight.send(LaunchedStep(entries, self.state, self.chooser.levels, reads))
            for entry in entries.values():
                entry.steps += 1
            self.chooser.levels = levels

    def _take_prompts(self) -> bool:
        """Read waiting prompts: as many tokens as decoding requests may wait for, or all if none decodes. Returns
        whether there were any."""
        decoding = any(entry.decodes for _, entry in self._occupied())
        reads, taken = self.reading, 0
        while self._prompts and not (decoding and taken >= self.prompt_tokens):
            taken += self._read_prompts(self.prompt_tokens - taken if decoding else None)
        self._begin_read()
        return reads

    def _read_step(self) -> list[StepResult]:
        """What the oldest in flight did for the requests that are still there; those that have ended leave."""
        progress = self.in_flight.read(self._entries)
        for row in progress:
            if row.tree is not None and row.tree.drafts and row.error is None:
                self.engine.ops.calls["trees_verified"] += 1
                self.engine.ops.calls["drafts_accepted"] += row.accepted
            self.lengths[row.slot] += row.committed
            self._told[row.slot] += len(row.tokens)
            if (entry := self._entries[row.slot]) is not None:
                entry.tokens += row.tokens
            if row.finished:
                self._empty(row.slot, wipe=row.finished == REASONS[ERROR])
        return progress

    def _set_up(self, entering: dict[int, RunningRequest], mode: Mode) -> None:
        """Set up some slots. Their prompts are read later, and they have no pages yet."""
        prompts = {slot: entry.prompt for slot, entry in entering.items()}
        clear_slots(self.sequences, entering)
        self._prefill.write(prompts)
        rehearsal = functools.partial(self._prefill.rehearse, prompts, self._draft, self.state, mode)
        self.engine.compile_ahead(self.state, mode, rehearsal)
        if self.chooser.plain_steps is not None and self.sequences.skipped is not None:
            where = upload(list(entering), torch.int64, self.sequences.device)
            self.sequences.skipped.draft_lengths[where] = self.sequences.lengths[where]

    def _empty(self, slot: int, wipe: bool = False) -> None:
        """Let a request leave its slot; wipe: nothing of it may be used again."""
        entry = self._entries[slot]
        if entry is not None and entry.decodes and self._draft is not None:
            self._draft.end(self.sequences, slot, len(entry.prompt), self._told[slot])
        if entry is not None and entry.decodes and self.chooser.plain_steps is None and not wipe:
            tokens = entry.first(self.lengths[slot])
            self.sequences.pages.keep(slot, self._prefix_of(entry.request, tokens, entry.prefix.keys))
        self._entries[slot] = None
        self.sequences.active[slot] = False
        for free in self._prompts.drop(slot):
            self._free(free, wipe)

    def _free(self, slot: int, wipe: bool = False) -> None:
        """Nothing is read or decoded in a slot any more."""
        self.sequences.lengths[slot] = 0  # it costs no attention
        gone = self.sequences.pages.give(slot, forget=wipe)
        if wipe:
            self._prefill.wipe(slot, gone)
