"""A running batch: requests enter and leave its slots while the others go on, without a new capture."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine import skipped_features
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import ReportQueue, wait_for_all
from eagle_triton.engine.pages import PAGE_ROWS, Beginning, CacheFullError
from eagle_triton.engine.prefill import NaNLogitsError, grow_first_tree
from eagle_triton.engine.prompt_queue import PromptQueue
from eagle_triton.engine.ranks import Ranks
from eagle_triton.engine.requests import NAN, REASONS, GuideReading, Progress, Request
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.slot_options import write_options, write_rules
from eagle_triton.engine.state import DecodeState, scratch_rows
from eagle_triton.engine.step import Mode
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.engine.upload import upload
from eagle_triton.reference.verification import ERROR, FAULT, REASON, REPORT_TOKENS, Verification

MIN_SCRATCH_ROWS = 128  # rows kept free behind a sequence, so that most trees may be changed to while it runs
PROMPT_TOKENS = 512  # of a prompt that are read between two steps: some 15 ms at 8B's shape on an H200
_FAILED = (0, 0, ERROR)  # how the report of a step begins for a sequence whose logits are NaN


class _SlotEntry:
    """A request in its slot; only its identity tells it from one that comes later.

    prompt: what is read before it decodes, on the host: behind a pause, all that was committed before. beginning: by
    which its pages are found. turn: the smaller, the earlier it came. tokens: committed behind what was read, as far as
    reports tell. decodes: its prompt is read. waits: for room, and holds none. root: behind the prompt, -1 if it is
    still to be chosen. steps: whose random numbers it has used.
    gamma: how deep its next trees may be, as far as reports tell: it rises at once, and falls by one a step. found:
    tokens of its prompt that pages held already. room: rows that its pages have.
    """

    def __init__(self, request: Request, prompt: Tensor, beginning: Beginning, turn: int):
        self.request, self.prompt, self.beginning, self.turn = request, prompt, beginning, turn
        self.tokens: list[int] = []
        self.decodes = self.waits = False
        self.root, self.steps = -1, 0
        self.gamma = math.inf
        self.found = self.room = 0

    @property
    def committed(self) -> Tensor:
        """All its tokens, as far as reports tell: int64 [L], on the host."""
        return torch.cat((self.prompt, torch.tensor(self.tokens, dtype=torch.int64, device="cpu")))


class _Begun(NamedTuple):
    """Prompts that have been read: whose, and by slot whether the target's logits were NaN, when the device says so."""

    entries: dict[int, _SlotEntry]
    nan: Tensor


class _InFlight(NamedTuple):
    """A step that was launched: for whom, on what, how many levels were scored for the tree that it verifies, who
    began right before it, and whether prompts were read there."""

    entries: list[_SlotEntry | None]
    state: DecodeState
    levels: int
    begun: list[_Begun]
    reads: bool


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
            self._logprobs, self._report_drafts = logprobs, report_drafts
            self.every_level = False  # score all levels of adaptive trees, whatever the neighbours' gammas are
            self.verification = engine.verification if verification is None else verification
            self._drafts = engine.draft is not None if drafts is None else drafts
            self._catches_up = self._drafts and engine.draft is not None and engine.draft.must_catch_up
            self._learns = self._drafts and engine.draft is not None and engine.draft.learns
            self._room = scratch_rows(spec)  # rows behind a sequence that steps may write
            if self._drafts:
                self._room = max(self._room, MIN_SCRATCH_ROWS, skipped_features.ROWS + 1)
            with engine.running():
                self.sequences = engine.sequences(slots, rows + self._room)
                engine.release_pages()  # that a batch which failed has left
                self.sequences.active.fill_(False)
                self.sequences.lengths.zero_()
                self.spec = spec
                self.state = engine.state(self.sequences, spec)
                self._prefill = engine.prefill(self.sequences)
            self.max_in_flight = (
                2 if engine.view.device.type == "cuda" else 1
            )  # a step is launched before the last is read
            self.lengths = [0] * slots  # committed tokens, as the host knows them
            self._entries: list[_SlotEntry | None] = [None] * slots
            self._reports = ReportQueue(engine.view.device, 2, engine.view.ranks)
            self._in_flight: deque[_InFlight] = deque()
            self._prompts = PromptQueue(
                self._prefill.packed, self.sequences.pages.pool.unread if self._prefill.share else None
            )
            self.prompt_tokens = prompt_tokens
            self._read: dict[int, _SlotEntry] = {}  # prompts that are read, and have not begun
            self._begun: list[_Begun] = []  # since the last step was launched
            self._came = 0  # requests so far
            self._unread = 0  # steps that were launched and will not be read
            self._failed: list[Progress] = []  # requests for which there is no room even alone
            self._levels = spec.beam_levels  # that were scored for the trees to be verified next
            self._plain_steps: int | None = None  # since the draft knew all; None while it does
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
    ) -> Batch:
        """A batch of prompts that are sampled alike, each until it has `rows` tokens."""
        seeds = sampling.seeds(len(prompts), generator)
        batch = Batch(engine, len(prompts), spec, max(rows, *(len(prompt) + 1 for prompt in prompts)))
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
                f"a step of this batch failed ({self._failure!r}), its sequences are lost: begin another batch"
            ) from self._failure

    @property
    def spec(self) -> TreeSpec:
        """The tree of the next step, PLAIN to draft nothing. Raises ValueError, when set, for one that does not fit."""
        return self._spec

    @spec.setter
    def spec(self, spec: TreeSpec) -> None:
        self.engine.view.check_tree(spec)
        if spec.drafts and not self._drafts:
            raise ValueError("spec: this batch has no draft, or was made with drafts=False")
        if scratch_rows(spec) > self._room:
            raise ValueError(
                f"spec: a tree with {scratch_rows(spec)} rows does not fit into the {self._room} behind each sequence; "
                "make the batch with the largest tree"
            )
        self._spec = spec

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
        return [slot for slot, entry in enumerate(self._entries) if entry is not None]

    def request(self, slot: int) -> Request:
        """The request in a slot. Raises ValueError if there is none."""
        entry = self._entries[slot]
        if entry is None:
            raise ValueError(f"slot {slot} is free")
        return entry.request

    def tokens(self, slot: int) -> Tensor:
        """The committed tokens of the request that is in a slot or has ended in it last: int64 [n], a copy."""
        self._check_usable()
        return self.sequences.tokens[slot, : self.lengths[slot]].clone()

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
        at least one if nobody else is there."""
        if self._entries_that(wait=True):
            return 0
        first, pool, there = requests[: len(self.free)], self.sequences.pages.pool, self._pages_of_others()
        pages = itertools.accumulate(self._first_pages(request, len(request.prompt)) for request in first)
        count = sum(1 for _ in itertools.takewhile(lambda some: pool.has_room(some + there), pages))
        return count if self.running else max(count, min(1, len(first)))

    def never_fits(self, request: Request) -> str | None:
        """Why the cache has no room for a request even if nobody else is there; None: it has."""
        pages, limit = -(-self._rows_of(request) // PAGE_ROWS), self.sequences.pages.pool.limit
        if limit is None or pages <= limit:
            return None
        return (
            f"cache_tokens: a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones take up to "
            f"{pages} pages of {PAGE_ROWS} tokens, more than the {limit} that there are"
        )

    def found(self, slot: int) -> int:
        """How many tokens of the prompt in a slot were computed before, for another request."""
        entry = self._entries[slot]
        return 0 if entry is None else entry.found

    def _reserve(self, requests: Iterable[Request]) -> list[int]:
        """Put requests into slots where their prompts wait to be read."""
        self._check_usable()
        self.engine.check_model()
        requests = list(requests)
        for request in requests:
            self._check(request)
        if self.engine.view.ranks is not None:
            requests = _agreed(self.engine.view.ranks, requests, self._to_compare())
        slots = self.free[: len(requests)]
        if len(slots) < len(requests):
            raise RuntimeError(f"{len(requests)} requests do not fit into {len(slots)} free slots; step until some end")
        with self._in_use():
            self._make_room()  # for others' next trees, which may have another shape now
        if requests and any(entry.waits for entry in self._entries if entry is not None):
            raise CacheFullError("requests that came before wait for room in the cache")
        entering = {slot: self._entry_of(request) for slot, request in zip(slots, requests, strict=True)}
        with self._in_use():
            self._put(entering)
        for entry in entering.values():
            if entry.found:
                self.engine.ops.calls["prompt_tokens_found"] += entry.found
        return slots

    def _to_compare(self) -> tuple[Any, ...]:
        """What decides beside the requests how they are decoded, and must be the same on all ranks."""
        engine, pool = self.engine, self.sequences.pages.pool
        options = engine.number, engine.prefixes, self.verification, self._drafts, pool.limit is None
        return (*options, len(self._entries), self.rows, self._spec, engine.launched, pool.forgot)

    def _put(self, entering: dict[int, _SlotEntry]) -> None:
        """Give slots pages for what they read first, and let it wait to be read; others have room for their next trees.
        What fails leaves them as they were."""
        mode = self._mode([entry.request for entry in (*entering.values(), *self._entries) if entry is not None])
        pages, slots = self.sequences.pages, list(entering)
        try:
            rows = {slot: self._first_rows(entry.request, len(entry.prompt)) for slot, entry in entering.items()}
            found = pages.take(rows, {slot: entry.beginning for slot, entry in entering.items()})
            if mode.processed:
                self.sequences.add_rules()
            self._change_tree(mode)
            self._set_up(entering, mode)
        except BaseException:
            self.sequences.lengths[slots] = 0
            for slot in reversed(slots):
                pages.give(slot)
            raise
        with self._must_finish():
            if slots:
                pages.write(slots)
            shared = {slot: pages.of(slot)[: len(entry.beginning.keys)] for slot, entry in entering.items()}
            self._prompts.add({slot: entry.prompt for slot, entry in entering.items()}, shared)
            for slot, entry in entering.items():
                self.lengths[slot] = len(entry.prompt)
                entry.found = found[slot] * PAGE_ROWS
                self._entries[slot] = entry
                self._note_room(slot)

    def _entry_of(self, request: Request) -> _SlotEntry:
        prompt = request.prompt.to("cpu", copy=True)  # the caller may write another one there
        self._came += 1
        return _SlotEntry(request, prompt, self._beginning_of(prompt), self._came)

    def _beginning_of(self, tokens: Tensor, known: Sequence[bytes] = ()) -> Beginning:
        """By which pages with these tokens are found; by nothing where none are shared."""
        if not self._prefill.share:
            return Beginning([])
        return Beginning.of(tokens, b"drafts" if self._drafts else b"plain", known)

    def _rows_of(self, request: Request) -> int:
        """How many rows a request may take."""
        overshoot = 0 if request.exact else self._spec.depth
        return min(len(request.prompt) + request.max_new_tokens + overshoot + self._room, self.sequences.capacity)

    def _rows_ahead(self, steps: int) -> int:
        """How many rows behind the committed ones so many steps may write."""
        specs = [self._spec, self.state.spec, *(flight.state.spec for flight in self._in_flight)]
        scratch = max(map(scratch_rows, specs))
        if self._plain_steps is not None:
            scratch = max(scratch, skipped_features.ROWS + 1)
        return steps * (max(spec.depth for spec in specs) + 1) + scratch

    def _first_rows(self, request: Request, length: int) -> int:
        """How many rows a request takes that begins, or goes on, with `length` tokens: enough for its first steps."""
        return min(length + self._rows_ahead(self.max_in_flight + self._unread), self._rows_of(request))

    def _first_pages(self, request: Request, length: int) -> int:
        return -(-self._first_rows(request, length) // PAGE_ROWS)

    def _pages_of_others(self) -> int:
        """That are left to those who are there when somebody comes: one for each to go on with."""
        return len(self._entries_that(wait=False))

    def _make_room(self) -> None:
        """Let all have pages for what the next step may write. Where there are none, the last to come pauses."""
        pages, ahead = self.sequences.pages, self._rows_ahead(1 + len(self._in_flight) + self._unread)
        wanted = []
        for slot, entry in enumerate(self._entries):
            if entry is not None and not entry.waits and self.lengths[slot] + ahead > entry.room:
                wanted.append((entry.turn, slot, min(self.lengths[slot] + ahead, self._rows_of(entry.request))))
        for _, slot, rows in sorted(wanted):
            while self._has_pages(slot):
                try:
                    pages.extend(slot, rows)
                    break
                except CacheFullError:
                    self._pause(self._last_to_come())
        grown = [slot for _, slot, _ in wanted if self._has_pages(slot) and self._grew(slot)]
        if grown:
            with self._must_finish():
                pages.write(grown)
                for slot in grown:
                    self._note_room(slot)

    def _grew(self, slot: int) -> bool:
        """Whether a request has pages that its table does not name yet."""
        entry = self._entries[slot]
        return entry is not None and entry.room < len(self.sequences.pages.of(slot)) * PAGE_ROWS

    def _note_room(self, slot: int) -> None:
        """A request's table names all its pages: keep how many rows that are, which every step looks at."""
        entry = self._entries[slot]
        assert entry is not None
        entry.room = len(self.sequences.pages.of(slot)) * PAGE_ROWS

    def _has_pages(self, slot: int) -> bool:
        entry = self._entries[slot]
        return entry is not None and not entry.waits

    def _last_to_come(self) -> int:
        """The slot that pauses next: of the request that came last, but for those whose prompts others take."""
        may = [pair for pair in self._entries_that(wait=False) if not self._prompts.reads_for_others(pair[0])]
        return max(may, key=lambda pair: pair[1].turn)[0]

    def _pause(self, slot: int) -> None:
        """Take a request's pages from it until there is room to go on. Waits for the device: the root that was chosen
        stays, because `rejection` would draw it by another law."""
        entry = self._entries[slot]
        assert entry is not None
        waiting = _SlotEntry(entry.request, entry.committed, entry.beginning, entry.turn)
        waiting.beginning = self._beginning_of(waiting.prompt, entry.beginning.keys)
        waiting.found, waiting.waits, waiting.steps = entry.found, True, entry.steps
        wait_for_all(self.sequences.device, self.engine.view.ranks)
        waiting.root = int(self.sequences.tokens[slot, self.lengths[slot]]) if entry.decodes else entry.root
        with self._must_finish():
            self._empty(slot)
            self._entries[slot] = waiting
            self.engine.ops.calls["requests_paused"] += 1

    def _go_on(self) -> None:
        """Let requests that wait for room read their tokens again, the first to come first, as far as there is any."""
        while waiting := self._entries_that(wait=True):
            slot, entry = min(waiting, key=lambda pair: pair[1].turn)
            others, pages = self._pages_of_others(), self._first_pages(entry.request, len(entry.prompt))
            if others and not self.sequences.pages.pool.has_room(pages + others):
                return
            going = copy.copy(entry)
            going.waits = False
            try:
                self._put({slot: going})
            except CacheFullError as error:
                if others:
                    return
                failed = Progress(slot, entry.request, [], self._spec, 0, 0, 0, 0, REASONS[ERROR], str(error))
                with self._must_finish():
                    self._failed.append(failed)
                    self._empty(slot)
                return
            going.found = entry.found

    def _entries_that(self, wait: bool) -> list[tuple[int, _SlotEntry]]:
        """Slots and requests that wait for room, or those that have it."""
        return [(slot, entry) for slot, entry in enumerate(self._entries) if entry is not None and entry.waits == wait]

    def _read_prompts(self, most: int | None) -> int:
        """Launch the next forward over prompts, of about `most` tokens, and return how many are read by it.

        What fails on the way touches nobody who decodes, and is done again next time.
        """
        forward = self._prompts.next(most)
        if not self.engine.view.by_token:  # who interrupts leaves layers that have taken these tokens in, and others
            self._prompts.restart(forward)
        if self._prefill.read(forward, self.engine.draft if self._drafts else None):
            return 0
        with self._must_finish():
            self._prompts.take(forward)
            for slot in forward.ended:
                self._finish_prompt(slot)
        return forward.tokens

    def _begin_read(self) -> None:
        """Begin with all prompts that are read to the end, at once: it takes a pass of the draft over the whole batch.

        What fails on the way is done again next time.
        """
        begun = {slot: entry for slot, entry in self._read.items() if entry is self._entries[slot]}
        if begun:
            draft = self.engine.draft if self._drafts else None
            mode = self._mode([entry.request for entry in self._entries if entry])
            nan = self._prefill.begin(list(begun), draft, self.state, mode)
            self._levels = self.state.spec.beam_levels  # all trees have grown anew
            self._begun.append(_Begun(begun, nan))
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
        nan = {slot for begun in self._begun for slot in begun.entries if begun.nan[slot]}
        return [place for place, slot in enumerate(slots) if slot in nan]

    def _give_up(self, slots: Sequence[int], wipe: bool = False) -> None:
        """Leave slots as if nothing had entered them."""
        for slot in reversed(slots):  # those that take another's prompt first
            self._empty(slot, wipe)
        for begun in self._begun:
            for slot in begun.entries.keys() & set(slots):
                del begun.entries[slot]

    def release(self, slot: int) -> None:
        """Drop the request in a slot before it has ended. Raises ValueError if there is none."""
        self._check_usable()
        if self._entries[slot] is None:
            raise ValueError(f"slot {slot} is free")
        with self._in_use(), self._must_finish():
            self._empty(slot)

    def step(self) -> list[Progress]:
        """Decode one step: what it did for each running request. Those that have ended leave their slots."""
        with self._in_use():
            return self._step()

    def launch(self) -> None:
        """Launch the next step without reading what it does: for timing, at the end of a batch."""
        with self._in_use():
            self._make_room()
            step, levels = self._next_step()
            with self._must_finish():
                step()
                self._levels = levels
                self._unread += 1
                self.engine.launched += 1

    def _step(self) -> list[Progress]:
        while self.running or self._failed:
            while len(self._in_flight) < self.max_in_flight and not self._failed:
                self._make_room()
                self._go_on()
                self._take_prompts()
                if any(entry is not None and entry.decodes for entry in self._entries):
                    self._launch_step()
            with self._must_finish():
                progress = self._read_report() if self._in_flight else []
            progress, self._failed = [*progress, *self._failed], []
            if progress:  # else it was launched for requests that had ended
                return progress
        return []

    def _launch_step(self) -> None:
        """Launch the next step, to be read later."""
        step, levels = self._next_step()
        with self._must_finish():
            step()
            self.engine.launched += 1
            self._reports.send(self.state.report)
            entries = [entry if entry is not None and entry.decodes else None for entry in self._entries]
            for entry in entries:
                if entry is not None:
                    entry.steps += 1
            self._in_flight.append(_InFlight(entries, self.state, self._levels, self._begun, self._reads))
            self._levels, self._begun = levels, []

    def _take_prompts(self) -> None:
        """Read prompts that wait: as many tokens as those who decode may wait for, or all if nobody does."""
        decoding = any(entry.decodes for entry in self._entries if entry is not None)
        self._reads, taken = self.reading, 0
        while self._prompts and not (decoding and taken >= self.prompt_tokens):
            taken += self._read_prompts(self.prompt_tokens - taken if decoding else None)
        self._begin_read()

    def _read_report(self) -> list[Progress]:
        """What the oldest step in flight did for the requests that are still there."""
        flight = self._in_flight.popleft()
        report, state = self._reports.receive(), flight.state
        rows = report.tolist()
        wanted = self._logprobs or any(entry is not None and entry.request.logprobs for entry in flight.entries)
        logprobs = state.logprobs_of(report).tolist() if wanted else None
        guided = state.guide_of(report).tolist() if state.spec.adaptive else None
        if any(row[REASON] == FAULT for row in rows):
            raise self.engine.disable_megakernel()
        progress = []
        for slot, entry in enumerate(flight.entries):
            if entry is not None and entry is self._entries[slot]:
                if any(entry is those.entries.get(slot) and bool(those.nan[slot]) for those in flight.begun):
                    rows[slot][: len(_FAILED)] = _FAILED
                reading = None
                if guided is not None:
                    h_norm, h_ema, gamma, following = guided[slot]
                    reading = _reading(h_norm, h_ema, gamma, flight.levels)
                    entry.gamma = following if math.isinf(entry.gamma) else max(following, entry.gamma - 1)
                asked = self._logprobs or entry.request.logprobs
                values = logprobs[slot] if asked and logprobs is not None else None
                progress.append(self._progress(slot, entry.request, flight, rows[slot], values, reading))
        for row in progress:
            if row.tree.drafts and row.error is None:
                self.engine.ops.calls["trees_verified"] += 1
                self.engine.ops.calls["drafts_accepted"] += row.accepted
            self.lengths[row.slot] += len(row.tokens)
            if (entry := self._entries[row.slot]) is not None:
                entry.tokens += row.tokens
            if row.finished:
                self._empty(row.slot, wipe=row.finished == REASONS[ERROR])
        return progress

    def _next_step(self) -> tuple[Callable[[], None], int]:
        """The step to launch now, compiled and captured if it is new, for the tree that is wanted, and how many levels
        it scores for the one after it.

        An exception on the way leaves all as it was, but that some of it may be done already.
        """
        mode = self._mode([entry.request for entry in self._entries if entry])
        self._change_tree(mode)
        if self._plain_steps == skipped_features.ROWS:
            self._catch_up()
        step = self.engine.step(self.state, mode)
        if self._plain_steps is not None:
            self._plain_steps += 1
        return step, self._spec.beam_levels if mode.levels is None else mode.levels

    def _change_tree(self, mode: Mode) -> None:
        """Go over to `spec` if that is not the tree that was drafted."""
        starts_skipping = self._catches_up and not self._spec.drafts and self._plain_steps is None
        if starts_skipping:
            skipped_features.start_skipping(self.engine.view, self.sequences)
        if self._spec != self.state.spec:
            if self._spec.drafts and self._plain_steps is not None:
                self._catch_up()
                self._plain_steps = None
            state = self.engine.state(self.sequences, self._spec)
            grow = functools.partial(grow_first_tree, self.engine.ops, self.engine.draft, state)
            self.engine.compile_ahead(state, mode, grow)
            grow()
            self.state, self._levels = state, self._spec.beam_levels
        if starts_skipping:
            self._plain_steps = 0
        if self._plain_steps is not None:
            self.engine.catch_up(self.state)  # made now, where that is new, not when it is launched

    def _catch_up(self) -> None:
        if self._plain_steps:
            self.engine.catch_up(self.state)()
            self._plain_steps = 0

    def _set_up(self, entering: dict[int, _SlotEntry], mode: Mode) -> None:
        """Set up some slots, whose prompts are read later, and which have no pages yet."""
        engine, sequences, draft = self.engine, self.sequences, self.engine.draft if self._drafts else None
        slots = sorted(entering)
        prompts = {slot: entry.prompt for slot, entry in entering.items()}
        for run in _runs(slots):
            sequences.part(run).clear()
        where = upload(slots, torch.int64, sequences.device)
        write_options(sequences, where, [entering[slot].request for slot in slots])
        sequences.first_step[where] = upload([entering[slot].steps for slot in slots], torch.int64, sequences.device)
        sequences.first_root[where] = upload([entering[slot].root for slot in slots], torch.int64, sequences.device)
        if sequences.rules is not None:
            for slot, entry in entering.items():
                write_rules(sequences.rules, slot, entry.request, entry.prompt)
        self._prefill.write(prompts)
        rehearsal = functools.partial(self._prefill.rehearse, prompts, draft, self.state, mode)
        engine.compile_ahead(self.state, mode, rehearsal)
        if self._plain_steps is not None and sequences.skipped is not None:
            sequences.skipped.draft_lengths[where] = sequences.lengths[where]

    def _empty(self, slot: int, wipe: bool = False) -> None:
        """Let a request leave its slot; wipe: nothing of it may be used again."""
        entry, draft = self._entries[slot], self.engine.draft
        if entry is not None and entry.decodes and draft is not None and self._drafts:
            draft.end(self.sequences, slot, len(entry.prompt), self.lengths[slot])
        if entry is not None and entry.decodes and self._plain_steps is None and not wipe:
            self.sequences.pages.keep(slot, self._beginning_of(entry.committed, entry.beginning.keys))
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

    def _mode(self, requests: Sequence[Request]) -> Mode:
        """How a step with these requests must run. Raises ValueError if they cannot be in one batch."""
        sampled = [request.sampling for request in requests if not request.sampling.greedy]
        orders = {sampling.top_p_first for sampling in sampled}
        if len(orders) > 1:
            raise ValueError("sampling: top_p_first must be the same for all sampled requests of a batch")
        return Mode(
            sampled=bool(sampled),
            top_p_first=True in orders,
            keep_features=self._catches_up and not self._spec.drafts,
            learns=self._learns and not self._spec.drafts,
            processed=any(request.processed for request in requests),
            logprobs=self._logprobs or any(request.logprobs for request in requests),
            drafts=self._report_drafts,
            levels=self._wanted_levels(),
            filtered=any(sampling.filtered for sampling in sampled),
            verification=self.verification,
        )

    def _wanted_levels(self) -> int | None:
        """How many levels the next step scores: enough for every running sequence, as far as is known."""
        gammas = [entry.gamma for entry in self._entries if entry is not None and entry.decodes]
        if not self._spec.adaptive or self.engine.draft is None or not gammas or self.every_level:
            return None
        return self.engine.draft.levels_for(self._spec, max(gammas))

    def _check(self, request: Request) -> None:
        prompt, view = request.prompt, self.engine.view
        if prompt.dtype != torch.int64 or prompt.ndim != 1 or not len(prompt):
            raise ValueError(f"prompt must be int64 [L] with L > 0, got {prompt.dtype} {list(prompt.shape)}")
        if not 0 <= int(prompt.min()) <= int(prompt.max()) < view.vocab_size:
            raise ValueError(
                f"prompt: tokens must lie in 0..{view.vocab_size - 1}, got {int(prompt.min())}..{int(prompt.max())}"
            )
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if not 0 <= request.min_new_tokens <= request.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must lie in 0..{request.max_new_tokens} (max_new_tokens), got {request.min_new_tokens}"
            )
        overshoot = 0 if request.exact else self._spec.depth
        if len(prompt) + request.max_new_tokens + overshoot > self.rows:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {request.max_new_tokens + overshoot} new ones do not fit into "
                f"the {self.rows} rows of this batch"
            )
        if reason := self.never_fits(request):
            raise ValueError(reason)
        unknown = [token for token, _ in request.sampling.biases if token >= view.vocab_size]
        if unknown:
            raise ValueError(f"logit_bias: tokens must lie in 0..{view.vocab_size - 1}, got {unknown}")
        if min(request.stop_ids, default=0) < 0:
            raise ValueError(f"stop_ids must not be negative, got {min(request.stop_ids)}")
        if self.sequences.widen_stops(len(request.stop_ids)):
            self.engine.forget_steps(self.sequences)

    def _progress(
        self,
        slot: int,
        request: Request,
        flight: _InFlight,
        row: list[int],
        logprobs: list[float] | None,
        egag: GuideReading | None,
    ) -> Progress:
        """What the row of a report says."""
        accepted, count, reason = row[:REPORT_TOKENS]
        drafts = row[len(row) - 2 - flight.state.spec.drafts : -2] if self._report_drafts else None
        return Progress(
            slot,
            request,
            row[REPORT_TOKENS : REPORT_TOKENS + count],
            flight.state.spec,
            row[-2],
            max(accepted, 0),
            row[-1],
            flight.levels,
            REASONS.get(reason),
            NAN if reason == ERROR else None,
            None if logprobs is None else logprobs[:count],
            None if drafts is None else [token for token in drafts if token >= 0],
            egag,
            flight.reads,
        )


def _agreed(ranks: Ranks, requests: Sequence[Request], batch: tuple[Any, ...]) -> list[Request]:
    """The same requests, with the seeds that rank 0 gives or draws. batch: what else decides how they are decoded; how
    many steps were launched before, for with what one rank has launched alone others' next step would be exchanged; and
    how often kept pages were forgotten. Raises RanksError on all ranks where they have others."""
    asked = [
        {
            **{field.name: getattr(request, field.name) for field in fields(request)},
            "prompt": request.prompt.tolist(),
            "sampling": replace(request.sampling, seed=None),
        }
        for request in requests
    ]
    what = "the requests of a batch, its engine, options, trees and slots, what was forgotten, and the number of steps"
    ranks.check_alike(f"{what} before", (batch, asked))
    seeds = ranks.agreed([request.sampling.seeds(1)[0] for request in requests])
    return [
        replace(request, sampling=replace(request.sampling, seed=seed))
        for request, seed in zip(requests, seeds, strict=True)
    ]


def _reading(h_norm: float, h_ema: float, gamma: float, levels: int) -> GuideReading:
    return GuideReading(h_norm, h_ema, int(gamma) if gamma == gamma else 0, levels)


def _runs(slots: list[int]) -> list[slice]:
    """Ascending slots as few slices."""
    groups = itertools.groupby(enumerate(slots), lambda pair: pair[1] - pair[0])
    runs = [[slot for _, slot in group] for _, group in groups]
    return [slice(run[0], run[-1] + 1) for run in runs]
