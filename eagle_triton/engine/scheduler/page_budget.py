"""How much of the cache a batch's requests take: first for their prompts, then more as they decode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from eagle_triton.engine import skipped_features
from eagle_triton.engine.memory.pages import PAGE_ROWS, SlotPages
from eagle_triton.engine.scheduler.requests import Request, RunningRequest
from eagle_triton.engine.scheduler.step_planner import StepPlanner
from eagle_triton.engine.scheduler.steps_in_flight import StepsInFlight
from eagle_triton.engine.state import scratch_rows


class PageBudget:
    """Counts the rows and pages of the requests in the slots of a batch.

    unread_steps: how many were launched without reading their reports.
    """

    def __init__(
        self, pages: SlotPages, planner: StepPlanner, reports: StepsInFlight, entries: list[RunningRequest | None]
    ):
        self._pages, self._planner, self._reports, self._entries = pages, planner, reports, entries
        self.unread_steps = 0

    def most_rows(self, request: Request) -> int:
        """How many rows a request may take."""
        overshoot = 0 if request.exact else self._planner.spec.depth
        rows = len(request.prompt) + request.max_new_tokens + overshoot + self._planner.spare_rows
        return min(rows, self._pages.capacity)

    def first_rows(self, request: Request, length: int) -> int:
        """How many rows a request with `length` tokens needs to begin or go on: enough for its first steps."""
        return min(length + self._rows_ahead(self._reports.most), self.most_rows(request))

    def never_fits(self, request: Request) -> str | None:
        """Why the cache has no room for a request even alone; None: it has."""
        pages, limit = -(-self.most_rows(request) // PAGE_ROWS), self._pages.pool.limit
        if limit is None or pages <= limit:
            return None
        return (
            f"cache_tokens: a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones take up to "
            f"{pages} pages of {PAGE_ROWS} tokens, and the cache has {limit}: raise cache_tokens"
        )

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of the first requests probably have room in addition to those in slots."""
        pages = itertools.accumulate(self._first_pages(request, len(request.prompt)) for request in requests)
        pool, others = self._pages.pool, self._pages_of_others()
        return sum(1 for _ in itertools.takewhile(lambda some: pool.has_room(some + others), pages))

    def may_resume(self, entry: RunningRequest) -> bool:
        """Whether a paused request probably has room again. Alone it always has."""
        others = self._pages_of_others()
        pages = self._first_pages(entry.request, len(entry.prompt))
        return not others or self._pages.pool.has_room(pages + others)

    def missing(self, lengths: Sequence[int]) -> dict[int, int]:
        """The rows that slots need, if the next step may write more than they have, by slot, the oldest request first.

        lengths: the committed tokens of all slots.
        """
        ahead = self._rows_ahead(1 + len(self._reports.steps))
        short = [
            (entry.index, slot, min(lengths[slot] + ahead, self.most_rows(entry.request)))
            for slot, entry in enumerate(self._entries)
            if entry is not None and not entry.paused and lengths[slot] + ahead > entry.page_rows
        ]
        return {slot: rows for _, slot, rows in sorted(short)}

    def write(self, slots: Sequence[int]) -> None:
        """Write all pages of some slots to their tables, and note the number of rows."""
        if slots:
            self._pages.write(slots)
        for slot in slots:
            entry = self._entries[slot]
            assert entry is not None
            entry.page_rows = self._rows_held(slot)

    def grew(self, slot: int) -> bool:
        """Whether the request in a slot has pages that are not in its table yet."""
        entry = self._entries[slot]
        return entry is not None and not entry.paused and entry.page_rows < self._rows_held(slot)

    def _rows_held(self, slot: int) -> int:
        return len(self._pages.of(slot)) * PAGE_ROWS

    def _rows_ahead(self, steps: int) -> int:
        """How many rows after the committed ones may be written by `steps` steps and read by later ones."""
        trees = [self._planner.spec, self._planner.state.spec, *(step.state.spec for step in self._reports.steps)]
        scratch = max(scratch_rows(tree, self._planner.draft) for tree in trees)
        if self._planner.plain_steps is not None:
            scratch = max(scratch, skipped_features.ROWS + 1)
        return (steps + self.unread_steps) * (max(tree.depth for tree in trees) + 1) + scratch

    def _first_pages(self, request: Request, length: int) -> int:
        return -(-self.first_rows(request, length) // PAGE_ROWS)

    def _pages_of_others(self) -> int:
        """Pages to leave for running requests when another enters: one for each."""
        return sum(1 for entry in self._entries if entry is not None and not entry.paused)
