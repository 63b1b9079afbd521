"""The requests in the slots of a batch: they enter, have their prompts read, wait for pages, and leave."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import finalize

import torch
from torch import Tensor

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import wait_for_all
from eagle_triton.engine.memory.by_slot import slices_of
from eagle_triton.engine.memory.pages import CacheFullError, prefix_keys
from eagle_triton.engine.prefill import NO_EXTRAS, PromptExtras
from eagle_triton.engine.prompt_queue import PromptQueue
from eagle_triton.engine.scheduler.grammar_masks import GrammarMasks
from eagle_triton.engine.scheduler.page_budget import PageBudget
from eagle_triton.engine.scheduler.requests import REASONS, Piece, Request, RunningRequest
from eagle_triton.engine.scheduler.slot_options import write_options
from eagle_triton.engine.scheduler.step_planner import StepOptions, StepPlanner, spare_rows
from eagle_triton.engine.scheduler.steps_in_flight import StepsInFlight
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.step import Mode
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.engine.upload import to_device, upload
from eagle_triton.operands.verification import ERROR, Verification


class BatchSlots:
    """The slots of a `Batch`, and what happens with them between two steps."""

    close: finalize

    def __init__(self, engine: Engine, slots: int, spec: TreeSpec, rows: int, options: StepOptions):
        """Arguments: see `Batch`, which has acquired the engine."""
        self.engine, self.rows = engine, rows
        spare = spare_rows(spec, engine.draft if options.drafts else None)
        with engine.running():
            self.sequences = engine.sequences(slots, rows + spare)
            engine.release_pages()  # left by a failed batch
            self.sequences.active.fill_(False)
            self.sequences.lengths.zero_()
            self.planner = StepPlanner(engine, self.sequences, spec, spare, options)
            self._prefill = engine.prefill(self.sequences)
        self.in_flight = StepsInFlight(engine, options)
        self._masks = GrammarMasks(engine.view.device)
        self.lengths = [0] * slots  # committed tokens, as far as steps have reported
        self._entries: list[RunningRequest | None] = [None] * slots
        self._room = PageBudget(self.sequences.pages, self.planner, self.in_flight, self._entries)
        self._prompts = PromptQueue(
            self._prefill.packed, self.sequences.pages.pool.unread if self._prefill.share else None
        )
        self._reported = [0] * slots  # tokens of prompt and steps, as far as steps have reported
        self._read: dict[int, RunningRequest] = {}  # prompts are read, roots are not chosen
        self.pauses = 0  # how often requests waited for pages
        self._failed: list[Piece] = []  # pieces of requests that have no room even alone
        self._failure: BaseException | None = None

    @property
    def closed(self) -> bool:
        """Whether the engine was given back, so that nothing is decoded any more."""
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

    # --- what is in the slots ---

    @property
    def spec(self) -> TreeSpec:
        """The tree of the next step, PLAIN to draft nothing. Setting one that does not fit raises ValueError."""
        return self.planner.spec

    @spec.setter
    def spec(self, spec: TreeSpec) -> None:
        self.planner.spec = spec

    @property
    def verification(self) -> Verification:
        """How drafts are judged."""
        return self.planner.options.verification

    @property
    def state(self) -> DecodeState:
        """The state of the tree that was drafted last."""
        return self.planner.state

    def _present(self, paused: bool | None = None) -> list[RunningRequest]:
        """Requests in the order of slots: paused ones, others, or all (None)."""
        return [entry for entry in self._entries if entry is not None and paused in (None, entry.paused)]

    @property
    def _decoding(self) -> dict[int, RunningRequest]:
        return {entry.slot: entry for entry in self._present() if entry.decodes}

    @property
    def free(self) -> list[int]:
        """Slots that a request may enter."""
        kept = {failed.slot for failed in self._failed}  # until their pieces are returned
        entries = enumerate(self._entries)
        return [slot for slot, entry in entries if entry is None and not (slot in kept or self._prompts.holds(slot))]

    @property
    def running(self) -> list[int]:
        """Slots with a request that has not ended."""
        return [entry.slot for entry in self._present()]

    @property
    def reading(self) -> bool:
        """Whether the next step reads prompts."""
        return bool(self._prompts or self._read)

    def request(self, slot: int) -> RunningRequest:
        """The request in a slot. Raises ValueError if there is none."""
        entry = self._entries[slot]
        if entry is None:
            raise ValueError(f"slot {slot} is free")
        return entry

    def tokens(self, slot: int) -> Tensor:
        """Prompt and reported new tokens of the request in a slot, or of the last one there: int64 [n], a copy."""
        self._check_usable()
        entry = self._entries[slot]
        if entry is not None and not entry.decodes:  # after a pause tokens that were reported may not be there yet
            return to_device(entry.first(self._reported[slot]), self.sequences.device)
        return self.sequences.tokens[slot, : self._reported[slot]].clone()

    # --- entering ---

    def _put(self, entering: dict[int, RunningRequest]) -> Mapping[int, int]:
        """Put requests into slots: give them pages for the tokens to read first, and queue these. The others already
        have room for their next trees. Returns how many pages of each were found. A failure changes nothing."""
        mode = self.planner.mode([*entering.values(), *self._present()])
        pages, slots = self.sequences.pages, list(entering)
        try:
            rows = {slot: self._room.first_rows(entry.request, len(entry.prompt)) for slot, entry in entering.items()}
            found = pages.take(rows, {slot: entry.prefix for slot, entry in entering.items()})
            self.planner.resize(max(max(slots) + 1, self.state.batch))
            self.planner.change_tree(mode)
            self._set_up(entering, mode)
        except BaseException:
            self.sequences.lengths[slots] = 0
            pages.give(*reversed(slots))
            raise
        with self._must_finish():
            shared = {slot: pages.of(slot)[: len(entry.prefix)] for slot, entry in entering.items()}
            apart = self.engine.view.reads_prompts_apart  # so output is not copied from an equal prompt
            alone = [slot for slot, entry in entering.items() if entry.request.read_alone or (apart and entry.tokens)]
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

    def _set_up(self, entering: dict[int, RunningRequest], mode: Mode) -> None:
        """Prepare slots for requests, before their prompts are read and their tables name pages."""
        prompts = {slot: entry.prompt for slot, entry in entering.items()}
        for run in slices_of(entering):
            self.sequences.clear(run)
        self._prefill.write(prompts, [len(entry.request.prompt) for entry in entering.values()])
        rehearsal = functools.partial(self._prefill.rehearse, prompts, self.planner.draft, self.state, mode)
        self.engine.steps.compile_ahead(self.state, mode, rehearsal)
        if self.planner.only_plain_steps:
            self.engine.note_one_launch(mode)
        if self.planner.plain_steps is not None and self.sequences.skipped is not None:
            where = upload(list(entering), torch.int64, self.sequences.device)
            self.sequences.skipped.draft_lengths[where] = self.sequences.lengths[where]

    def _prefix_of(self, request: Request, tokens: Tensor, known: Sequence[bytes] = ()) -> list[bytes]:
        """The keys of pages with these tokens; none if pages are not shared, or if the request has embeddings or is
        read alone."""
        if not self._prefill.share or request.read_alone:
            return []
        return prefix_keys(tokens, b"plain" if self.planner.draft is None else b"drafts", known)

    def _read_prompts(self, most: int | None) -> int:
        """Launch the next forward over prompts, of about `most` tokens, and return how many it reads.

        After a failure the requests that decode are as they were, and the next call tries again.
        """
        forward = self._prompts.next(most)
        if not self.engine.view.by_token:  # after an interrupt some layers have read these tokens, others not
            self._prompts.restart(forward)
        if self._prefill.read(forward, self.planner.draft, self._extras_of(forward.pieces[0].slot)):
            return 0
        with self._must_finish():
            self._prompts.take(forward)
            for slot in forward.ended:
                self._finish_prompt(slot)
        return forward.tokens

    def _extras_of(self, slot: int) -> PromptExtras:
        """What the prompt in a slot needs besides its tokens."""
        entry = self._entries[slot]
        if entry is None:
            return NO_EXTRAS
        embeddings = entry.request.embeddings
        if embeddings is not None:
            rest = entry.prompt[len(embeddings) :].to(embeddings.device)
            embeddings = torch.cat((embeddings, self.engine.view.embedding[rest]))
        return PromptExtras(embeddings, None if entry.tokens else entry.prompt_scores)

    def _finish_prompt(self, source: int) -> None:
        """After a slot's prompt is read, copy it to the slots that wait for the same prompt."""
        slots = (source, *self._prompts.finish(source))
        for slot in slots:
            entry = self._entries[slot]
            if entry is None:  # it was released while others waited for its prompt
                continue
            if slot != source:
                self._prefill.copy(source, slot, len(entry.prompt))
            self._read[slot] = entry
        self._free(*(slot for slot in slots if self._entries[slot] is None))

    def _begin_read(self) -> None:
        """Choose the roots of all read prompts at once, because this takes a pass of the draft over the whole batch.

        After a failure the next call does it again.
        """
        begun = dict(sorted(self._read.items()))
        if begun:
            mode = self.planner.mode(self._present())
            if mode.masked:
                self.state.add_masks()
                self._masks.write_first(self.state, begun)
            write_options(self.sequences, begun)  # any earlier, the device would wait for it
            self._prefill.choose_roots(list(begun), self.state, mode)
            self.in_flight.send_begun(begun, self.sequences)
            self._prefill.grow_trees(self.planner.draft, self.state)
            self.planner.levels = self.state.spec.beam_levels  # all trees were grown again
            for entry in begun.values():
                entry.decodes = True
                entry.steps += 1
        self._read = {}

    # --- room in the cache ---

    def _make_room(self) -> None:
        """Give all requests pages for rows that the next step may write. If none are left, the newest request
        pauses."""
        missing = self._room.missing(self.lengths)
        for slot, rows in missing.items():
            while (entry := self._entries[slot]) is not None and not entry.paused:
                try:
                    self.sequences.pages.extend(slot, rows)
                    break
                except CacheFullError:
                    self._pause(self._newest())
        grown = [slot for slot in missing if self._room.grew(slot)]
        if grown:
            with self._must_finish():
                self._room.write(grown)

    def _newest(self) -> int:
        """The slot of the newest request that can pause. Requests that read a prompt for others cannot."""
        may = [entry for entry in self._present(paused=False) if not self._prompts.reads_for_others(entry.slot)]
        return max(may, key=lambda entry: entry.index).slot

    def _pause(self, slot: int) -> None:
        """Take a request's pages until there is room again. Waits for the device, to keep the chosen root: `rejection`
        would draw another one from another distribution."""
        if self.planner.options.judge is not None:  # the judge would be asked for the same root again
            raise CacheFullError("the cache is full, and requests with a judge cannot be paused: raise cache_tokens")
        entry = self.request(slot)
        tokens = entry.first(self.lengths[slot])
        prefix = self._prefix_of(entry.request, tokens, entry.prefix)
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

    # --- leaving ---

    def _empty(self, *slots: int, wipe: bool = False) -> None:
        """Let requests leave their slots. wipe: nothing that they computed may be used again."""
        for slot in slots:
            self._leave(slot, wipe)
        for run in slices_of(slots):
            self.sequences.active[run].zero_()
        self._free(*(free for slot in slots for free in self._prompts.drop(slot)), wipe=wipe)

    def _leave(self, slot: int, wipe: bool) -> None:
        """Let a request leave its slot, on the host."""
        entry = self._entries[slot]
        if entry is None:
            return
        if entry.decodes and self.planner.draft is not None:
            self.planner.draft.end(self.sequences, slot, len(entry.prompt), self._reported[slot])
        if entry.decodes and self.planner.plain_steps is None and not wipe:
            tokens = entry.first(self.lengths[slot])
            self.sequences.pages.keep(slot, self._prefix_of(entry.request, tokens, entry.prefix))
        self.in_flight.forget(entry)
        entry.slot, self._entries[slot] = -1, None
        self._read.pop(slot, None)

    def _free(self, *slots: int, wipe: bool = False) -> None:
        """Free slots in which nothing is read or decoded any more."""
        for run in slices_of(slots):
            self.sequences.lengths[run].zero_()  # they cost no attention
        gone = self.sequences.pages.give(*slots, forget=wipe)
        if wipe:
            for slot in slots:
                self._prefill.wipe(slot, gone)
