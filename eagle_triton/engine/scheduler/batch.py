"""A running batch: requests enter and leave its slots while the others go on, without a new capture."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.engine import Engine, SplitStep
from eagle_triton.engine.graph import wait_for_all
from eagle_triton.engine.memory.by_slot import slices_of
from eagle_triton.engine.memory.pages import PAGE_ROWS, CacheFullError, PrefixKeys
from eagle_triton.engine.prefill import NaNLogitsError
from eagle_triton.engine.prompt_queue import PromptQueue
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.admission import agree_on_seeds, check_request, refuses_grammars
from eagle_triton.engine.scheduler.grammar_masks import GrammarMasks
from eagle_triton.engine.scheduler.page_budget import PageBudget
from eagle_triton.engine.scheduler.requests import NAN, REASONS, Piece, Request, RunningRequest
from eagle_triton.engine.scheduler.slot_options import clear_slots, write_options
from eagle_triton.engine.scheduler.step_planner import StepOptions, StepPlanner, size_for, spare_rows
from eagle_triton.engine.scheduler.steps_in_flight import LaunchedStep, StepsInFlight
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.step import Judge, Mode
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.engine.upload import to_device, upload
from eagle_triton.operands.verification import ERROR, Verification

PROMPT_TOKENS = 512  # of a prompt that are read between two steps: some 15 ms at 8B's shape on an H200


class Batch:
    """Decodes the requests that stand in its slots, all by one step at a time. Use as a context manager.

    It has the engine to itself until it is closed or dropped: a second batch is refused with RuntimeError. So is
    every call after it was closed, or after an exception in a step (an interrupt, no memory), which leaves the
    sequences half-way. On a GPU the next step is launched before the last one is read, so that the device never waits
    for the host; it does nothing for a request that has ended. The tokens of a request depend neither on its slot nor
    on the other requests. In 16 bits its last bits depend on how much is read or decoded at once, and on whether a
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
        penalties, biases, temperature and filters, over the tokens that a grammar allows. False: only of requests that
        ask for it.
        report_drafts: report what was drafted.
        drafts: False if nothing will ever be drafted, which makes plain decoding a little cheaper; None: if the engine
        has a draft.
        verification: how drafts are judged, None: as the engine says.
        prompt_tokens: about how many tokens of the prompts of `enter_all` are read before each step while others
        decode.
        judge: chooses all tokens on the host, also the first one, which it sees as a tree of one node. Then steps are
        not captured, the sampling of requests is ignored, and CacheFullError is raised when the cache is full.
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
            spare = spare_rows(spec, engine.draft if drafts else None)
            with engine.running():
                self.sequences = engine.sequences(slots, rows + spare)
                engine.release_pages()  # of a batch that has failed
                self.sequences.active.fill_(False)
                self.sequences.lengths.zero_()
                self.chooser = StepPlanner(engine, self.sequences, spec, spare, options)
                self._prefill = engine.prefill(self.sequences)
            self.in_flight = StepsInFlight(engine, options)
            self._masks = GrammarMasks(engine.view.device)
            self.lengths = [0] * slots  # committed tokens, as far as steps have reported
            self._entries: list[RunningRequest | None] = [None] * slots
            self._room = PageBudget(self.sequences.pages, self.chooser, self.in_flight, self._entries)
            self._prompts = PromptQueue(
                self._prefill.packed, self.sequences.pages.pool.unread if self._prefill.share else None
            )
            self.prompt_tokens = prompt_tokens
            self._reported = [0] * slots  # tokens of prompt and steps, as far as steps have reported
            self._read: dict[int, RunningRequest] = {}  # their prompts are read, and their roots not chosen
            self.pauses = 0  # of requests that waited for pages
            self._came = 0  # requests that were numbered here
            self._failed: list[Piece] = []  # of requests that have no room even alone
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
        """A batch of prompts with the same sampling, each until it has `rows` tokens. slots: None: one for each."""
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
        """For a block that launches. Refuses a batch that is closed or has failed."""
        self._check_usable()
        with self.engine.running():
            yield

    @contextmanager
    def _must_finish(self) -> Iterator[None]:
        """For a block that leaves the sequences half-way if it raises: then the batch has failed."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def _check_usable(self) -> None:
        if self.closed:
            raise RuntimeError("this batch is closed")
        if self.sequences.pages.pool is not self.engine.pool:
            raise RuntimeError("the model was restored while this generation ran, and its cache is gone: start anew")
        if self._failure is not None:
            raise RuntimeError(
                f"a step of this batch failed ({self._failure!r}), and it cannot go on: make a new batch"
            ) from self._failure

    @property
    def spec(self) -> TreeSpec:
        """The tree of the next step, PLAIN to draft nothing. Setting one that does not fit raises ValueError."""
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
        """The draft, None if nothing is ever drafted."""
        return self.engine.draft if self.chooser.options.drafts else None

    @property
    def state(self) -> DecodeState:
        """The state of the tree that was drafted last."""
        return self.chooser.state

    def _present(self, paused: bool | None = None) -> list[RunningRequest]:
        """Requests in slots, by slot: those that are paused, those that are not, or all (None)."""
        return [entry for entry in self._entries if entry is not None and paused in (None, entry.paused)]

    @property
    def free(self) -> list[int]:
        """Slots that a request may enter."""
        kept = {failed.slot for failed in self._failed}  # until their pieces are handed out
        entries = enumerate(self._entries)
        return [slot for slot, entry in entries if entry is None and not (slot in kept or self._prompts.holds(slot))]

    @property
    def cache_used(self) -> float:
        """The part of the pages that sequences hold, 0 to 1: of all that there may be, or of those that there are."""
        pool = self.sequences.pages.pool
        return pool.held / max(pool.limit or pool.pages, 1)

    @property
    def reading(self) -> bool:
        """Whether the next step reads prompts."""
        return bool(self._prompts or self._read)

    @property
    def running(self) -> list[int]:
        """Slots with a request that has not ended."""
        return [entry.slot for entry in self._present()]

    def request(self, slot: int) -> RunningRequest:
        """The request in a slot. Raises ValueError if there is none."""
        entry = self._entries[slot]
        if entry is None:
            raise ValueError(f"slot {slot} is free")
        return entry

    def tokens(self, slot: int) -> Tensor:
        """Prompt and new tokens, as far as steps have reported, of the request that is in a slot or was the last one
        there: int64 [n], a copy."""
        self._check_usable()
        entry = self._entries[slot]
        if entry is not None and not entry.decodes:  # after a pause tokens that were reported may not be there yet
            return to_device(entry.first(self._reported[slot]), self.sequences.device)
        return self.sequences.tokens[slot, : self._reported[slot]].clone()

    def admit(self, request: Request | RunningRequest) -> int:
        """Prefill a request into a free slot, which is returned. Other requests are not touched, even if this fails.

        Raises RuntimeError if no slot is free or the target's logits are NaN after the prompt, CacheFullError (a
        RuntimeError) if the others leave no room in the cache, ValueError if the request never fits. A request takes
        pages as it decodes. When there are none left, the newest requests pause until there are, and then read their
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
                broken = self._broken(slots)
            except BaseException:
                self._give_up(slots)
                raise
            if broken:
                self._give_up(slots, wipe=True)
                raise NaNLogitsError(f"{NAN} after the prompts of sequences {broken}")
        return slots

    def enter_all(
        self, requests: Iterable[Request | RunningRequest], stream: torch.cuda.Stream | None = None
    ) -> list[int]:
        """Put requests into free slots, which are returned; the next steps read their prompts. Pieces name those that
        do not run yet by their numbers, from 0 in the order in which they come.

        While others decode, only about `prompt_tokens` are read before each step. Else all are read at once, and the
        model is checked meanwhile. stream: they are read in this one then, so that what is launched before the next
        step need not wait for it. If the target's logits are NaN after a prompt, the request ends with that error. Else
        raises as `admit_all` does.
        """
        self._check_usable()
        if any(entry.decodes for entry in self._present()):
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
            outdated = checks_later and self.engine.check_model()  # what was found in pages
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
        """Give the requests, by slot, other seeds. Their first tokens are not chosen yet."""
        for entry, seed in zip(self._present(), seeds, strict=True):
            entry.request = replace(entry.request, sampling=replace(entry.request.sampling, seed=seed))

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of the first requests have free slots and room in the cache now, as far as is known without trying;
        at least one if no other request is there."""
        if self._present(paused=True):
            return 0
        first = requests[: len(self.free)]
        count = self._room.fitting(first)
        return count if self.running else max(count, min(1, len(first)))

    def never_fits(self, request: Request) -> str | None:
        """Why the cache has no room for a request even alone; None: it has."""
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
        if self.engine.view.ranks is not None:
            agree_on_seeds(self.engine.view.ranks, entries, self._to_compare())
        slots = self.free[: len(entries)]
        if len(slots) < len(entries):
            raise RuntimeError(f"{len(entries)} requests do not fit into {len(slots)} free slots; step until some end")
        with self._in_use():
            self._make_room()  # for others' next trees, which may have another shape now
        if entries and self._present(paused=True):
            raise CacheFullError("earlier requests wait for cache pages: step until they run")
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
        if entry.request.sampling.grammar is not None and (reason := self._refuses_grammars()):
            raise ValueError(reason)
        if reason := self.never_fits(entry.request):
            raise ValueError(reason)
        if self.sequences.widen_stops(len(entry.request.stop_ids)):
            self.engine.forget_steps(self.sequences)

    def _refuses_grammars(self) -> str | None:
        """Why this batch decodes no request with a grammar; None: it does."""
        options = self.chooser.options
        if options.judge is not None:
            return "grammar: the judge chooses all tokens, and reads no grammar"
        return refuses_grammars(options.verification)

    def _to_compare(self) -> tuple[Any, ...]:
        """What else decides how requests are decoded, and must be the same on all ranks."""
        engine, pool = self.engine, self.sequences.pages.pool
        options = engine.number, engine.prefixes, self.verification, self.chooser.options.drafts, pool.limit is None
        return (*options, len(self._entries), self.rows, self.spec, engine.launched, pool.forgot)

    def _put(self, entering: dict[int, RunningRequest]) -> Mapping[int, int]:
        """Put requests into slots: give them pages for what they read first, and queue it to be read. The others have
        room for their next trees. Returns how many pages of each were found. A failure leaves all as it was."""
        mode = self.chooser.mode([*entering.values(), *self._present()])
        pages, slots = self.sequences.pages, list(entering)
        try:
            rows = {slot: self._room.first_rows(entry.request, len(entry.prompt)) for slot, entry in entering.items()}
            found = pages.take(rows, {slot: entry.prefix for slot, entry in entering.items()})
            if mode.processed:
                self.sequences.add_rules()
            if mode.logits:
                self.sequences.add_logits()
            if mode.top_logprobs:
                self.sequences.add_tops()
            self.chooser.resize(max(max(slots) + 1, self.state.batch))
            self.chooser.change_tree(mode)
            self._set_up(entering, mode)
        except BaseException:
            self.sequences.lengths[slots] = 0
            pages.give(*reversed(slots))
            raise
        with self._must_finish():
            shared = {slot: pages.of(slot)[: len(entry.prefix.keys)] for slot, entry in entering.items()}
            alone = [slot for slot, entry in entering.items() if entry.request.read_alone]
            self._prompts.add({slot: entry.prompt for slot, entry in entering.items()}, shared, alone)
            for slot, entry in entering.items():
                self.lengths[slot] = len(entry.prompt)
                self._reported[slot] = len(entry.request.prompt) + len(entry.tokens)
                entry.slot, entry.paused = slot, False
                if entry.request.prompt_logprobs and not entry.tokens:
                    entry.prompt_scores = self._prefill.new_scores(len(entry.prompt))
                self._entries[slot] = entry
            self._room.write(slots)
        return found

    def _prefix_of(self, request: Request, tokens: Tensor, known: Sequence[bytes] = ()) -> PrefixKeys:
        """The keys by which pages with these tokens are found; none if pages are not shared, or if the target reads
        embeddings or is read alone."""
        if not self._prefill.share or request.read_alone:
            return PrefixKeys([])
        return PrefixKeys.of(tokens, b"plain" if self._draft is None else b"drafts", known)

    def _make_room(self) -> None:
        """Give all requests pages for what the next step may write. If there are none left, the newest one pauses."""
        missing = self._room.missing(self.lengths)
        for slot, rows in missing.items():
            while self._has_pages(slot):
                try:
                    self.sequences.pages.extend(slot, rows)
                    break
                except CacheFullError:
                    self._pause(self._newest())
        grown = [slot for slot in missing if self._room.grew(slot)]
        if grown:
            with self._must_finish():
                self._room.write(grown)

    def _has_pages(self, slot: int) -> bool:
        entry = self._entries[slot]
        return entry is not None and not entry.paused

    def _newest(self) -> int:
        """The slot of the newest request, to be paused; those that read a prompt for others are left out."""
        may = [entry for entry in self._present(paused=False) if not self._prompts.reads_for_others(entry.slot)]
        return max(may, key=lambda entry: entry.index).slot

    def _pause(self, slot: int) -> None:
        """Take a request's pages from it until there is room to go on. Waits for the device: the chosen root is kept,
        because `rejection` would draw another one by another law."""
        if self.chooser.options.judge is not None:  # it would be asked for the same root again
            raise CacheFullError("the cache is full, and requests with a judge cannot be paused: raise cache_tokens")
        entry = self._entries[slot]
        assert entry is not None
        tokens = entry.first(self.lengths[slot])
        prefix = self._prefix_of(entry.request, tokens, entry.prefix.keys)
        wait_for_all(self.sequences.device, self.engine.view.ranks)
        root = int(self.sequences.tokens[slot, self.lengths[slot]]) if entry.decodes else entry.root
        with self._must_finish():
            self._empty(slot)
            entry.pause(tokens, prefix, root)
            entry.slot, self._entries[slot] = slot, entry
            self.engine.ops.calls["requests_paused"] += 1
            self.pauses += 1

    def _resume(self) -> None:
        """Let paused requests read their tokens again, the oldest first, as far as there is room."""
        while waiting := self._present(paused=True):
            entry = min(waiting, key=lambda entry: entry.index)
            slot = entry.slot
            if not self._room.may_resume(entry):
                return
            try:
                self._put({slot: entry})
            except CacheFullError as error:
                if self._present(paused=False):
                    return
                failed = Piece(entry.index, entry.request, [], slot=slot, finished=REASONS[ERROR], error=str(error))
                with self._must_finish():
                    self._failed.append(failed)
                    self._empty(slot)
                return

    def _read_prompts(self, most: int | None) -> int:
        """Launch the next forward over prompts, of about `most` tokens, and return how many it reads.

        After a failure the requests that decode are as they were, and the next call tries again.
        """
        forward = self._prompts.next(most)
        if not self.engine.view.by_token:  # an interrupt leaves some layers that have read these tokens, and others not
            self._prompts.restart(forward)
        first = forward.pieces[0].slot
        entry = self._entries[first]
        scores = None if entry is None or entry.tokens else entry.prompt_scores
        if self._prefill.read(forward, self._draft, self._embeddings_of(first), scores):
            return 0
        with self._must_finish():
            self._prompts.take(forward)
            for slot in forward.ended:
                self._finish_prompt(slot)
        return forward.tokens

    def _embeddings_of(self, slot: int) -> Tensor | None:
        """What the target reads in place of the tokens of the prompt in a slot, [L, H]; None: the tokens."""
        entry = self._entries[slot]
        if entry is None or entry.request.embeddings is None:
            return None
        given = entry.request.embeddings
        rest = entry.prompt[len(given) :].to(given.device)
        return torch.cat((given, self.engine.view.embedding[rest]))

    def _begin_read(self) -> None:
        """Choose the roots of all prompts that are read, at once: it takes a pass of the draft over the whole batch.

        After a failure the next call does it again.
        """
        begun = dict(sorted(self._read.items()))
        if begun:
            mode = self.chooser.mode(self._present())
            if mode.masked:
                self.state.add_masks()
                self._masks.write_first(self.state, begun)
            write_options(self.sequences, begun)  # before, the device would wait for it
            self._prefill.choose_roots(list(begun), self.state, mode)
            self.in_flight.send_begun(begun, self.sequences)
            self._prefill.grow_trees(self._draft, self.state)
            self.chooser.levels = self.state.spec.beam_levels  # all trees were grown again
            for entry in begun.values():
                entry.decodes = True
                entry.steps += 1
        self._read = {}

    def _finish_prompt(self, source: int) -> None:
        """The prompt in a slot is read: copy it to the slots that wait for the same one."""
        slots = (source, *self._prompts.finish(source))
        for slot in slots:
            entry = self._entries[slot]
            if entry is None:  # it was released while others waited for its prompt
                continue
            if slot != source:
                self._prefill.copy(source, slot, len(entry.prompt))
            self._read[slot] = entry
        self._free(*(slot for slot in slots if self._entries[slot] is None))

    def _broken(self, slots: Sequence[int]) -> list[int]:
        """Which requests that have just begun have NaN logits, by their places in `slots`. Waits for the device."""
        wait_for_all(self.sequences.device, self.engine.view.ranks)
        nan = self.sequences.begun[:, 1].tolist()
        return [place for place, slot in enumerate(slots) if nan[slot]]

    def _give_up(self, slots: Sequence[int], wipe: bool = False) -> None:
        """Leave slots as if nothing had entered them."""
        self._empty(*reversed(slots), wipe=wipe)  # first those that wait for the prompt of another

    def release(self, slot: int) -> None:
        """Drop the request in a slot before it has ended. Raises ValueError if there is none."""
        self._check_usable()
        if self._entries[slot] is None:
            raise ValueError(f"slot {slot} is free")
        with self._in_use(), self._must_finish():
            self._empty(slot)

    def step(self) -> list[Piece]:
        """Decode one step: what it gave each running request; or the first tokens of requests that have just begun, as
        soon as they are there. Requests that have ended leave their slots."""
        with self._in_use():
            return self._step()

    def launch(self) -> None:
        """Launch the next step and never read its report: for timing, at the end of a batch."""
        with self._in_use():
            self._make_room()
            self._fit_step()
            step, levels = self.chooser.next(self._present())
            with self._must_finish():
                self._run(step)
                self.engine.launched += 1
                self.chooser.levels = levels
                self._room.unread_steps += 1

    def _step(self) -> list[Piece]:
        while self.running or self._failed:
            while not (self.in_flight.full or self._failed):
                self._make_room()
                self._resume()
                reads = self._take_prompts()
                if self.in_flight.full:
                    break
                if any(entry.decodes and not self._ends_anyway(entry) for entry in self._present()):
                    self._launch_step(reads)
                elif self.in_flight:
                    break
            with self._must_finish():
                pieces = self._read_step()
            pieces, self._failed = [*pieces, *self._failed], []
            if pieces:  # else it was for requests that have ended
                return pieces
        return []

    def _ends_anyway(self, entry: RunningRequest) -> bool:
        """Whether a request surely ends by what is in flight."""
        return len(entry.tokens) + self.in_flight.least_tokens(entry) >= entry.request.max_new_tokens

    def compact(self) -> dict[int, int]:
        """Move requests in high slots to lower free ones if the next steps are over fewer sequences then.

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
                entry = self._entries[source]
                assert entry is not None
                entry.slot, self._entries[target], self._entries[source] = target, entry, None
                self.lengths[target], self._reported[target] = length, self._reported[source]
                moved[source] = target
        return moved

    def size_of_next(self, requests: int) -> int:
        """Slots that the next step covers once `requests` requests run, those that run now included."""
        taken = self.running
        taken += self.free[: max(requests - len(taken), 0)]
        return size_for(max(taken, default=0) + 1, self.sequences.slots)

    def _fit_step(self) -> None:
        """Let the next step be over the slots that are taken."""
        self.chooser.resize(max(self.running) + 1)

    def _launch_step(self, reads: bool) -> None:
        """Launch the next step, to be read later. reads: prompts were read before it."""
        self._fit_step()
        step, levels = self.chooser.next(self._present())
        with self._must_finish():
            self._run(step)
            self.engine.launched += 1
            entries = {entry.slot: entry for entry in self._present() if entry.decodes}
            self.in_flight.send(LaunchedStep(entries, self.state, self.chooser.levels, reads))
            for entry in entries.values():
                entry.steps += 1
            self.chooser.levels = levels

    def _run(self, step: Callable[[], None]) -> None:
        """Launch a step. If it has grammars, write their masks while its first part runs."""
        if not isinstance(step, SplitStep):
            step()
            return
        entries = {entry.slot: entry for entry in self._present() if entry.decodes}
        self._masks.send_trees(self.state, self.chooser.spare_rows)
        if self.state.spec.drafts:
            self._masks.repair_trees(self.state, entries)
        step.forward()
        self._masks.write_masks(self.state, entries)
        step.verify()
        self._masks.send_roots(self.state, entries)
        step.draft()

    def _take_prompts(self) -> bool:
        """Read waiting prompts: `prompt_tokens`, or all if no request decodes. Returns whether there were any."""
        decoding = any(entry.decodes for entry in self._present())
        reads, taken = self.reading, 0
        while self._prompts and not (decoding and taken >= self.prompt_tokens):
            taken += self._read_prompts(self.prompt_tokens - taken if decoding else None)
        self._begin_read()
        return reads

    def _read_step(self) -> list[Piece]:
        """What the oldest step in flight gave the requests that are still there; those that have ended leave."""
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
        self._empty(*failed, wipe=True)  # last, so that no page that is forgotten is kept by another
        return pieces

    def _set_up(self, entering: dict[int, RunningRequest], mode: Mode) -> None:
        """Prepare slots for requests, before their prompts are read and their tables name pages."""
        prompts = {slot: entry.prompt for slot, entry in entering.items()}
        clear_slots(self.sequences, entering)
        self._prefill.write(prompts)
        rehearsal = functools.partial(self._prefill.rehearse, prompts, self._draft, self.state, mode)
        self.engine.compile_ahead(self.state, mode, rehearsal)
        if self.chooser.plain_steps is not None and self.sequences.skipped is not None:
            where = upload(list(entering), torch.int64, self.sequences.device)
            self.sequences.skipped.draft_lengths[where] = self.sequences.lengths[where]

    def _empty(self, *slots: int, wipe: bool = False) -> None:
        """Let requests leave their slots. wipe: nothing that they computed may be used again."""
        for slot in slots:
            self._leave(slot, wipe)
        for run in slices_of(slots):
            self.sequences.active[run].zero_()
        self._free(*(free for slot in slots for free in self._prompts.drop(slot)), wipe=wipe)

    def _leave(self, slot: int, wipe: bool) -> None:
        """Let a request leave its slot, as far as the host knows."""
        entry = self._entries[slot]
        if entry is not None and entry.decodes and self._draft is not None:
            self._draft.end(self.sequences, slot, len(entry.prompt), self._reported[slot])
        if entry is not None and entry.decodes and self.chooser.plain_steps is None and not wipe:
            tokens = entry.first(self.lengths[slot])
            self.sequences.pages.keep(slot, self._prefix_of(entry.request, tokens, entry.prefix.keys))
        if entry is not None:
            self.in_flight.forget(entry)
            entry.slot = -1
        self._entries[slot] = None
        self._read.pop(slot, None)

    def _free(self, *slots: int, wipe: bool = False) -> None:
        """Nothing is read or decoded in these slots any more."""
        for run in slices_of(slots):
            self.sequences.lengths[run].zero_()  # they cost no attention
        gone = self.sequences.pages.give(*slots, forget=wipe)
        if wipe:
            for slot in slots:
                self._prefill.wipe(slot, gone)
