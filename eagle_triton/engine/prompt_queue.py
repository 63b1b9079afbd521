"""Prompts that wait to be read into slots, and the pieces that the next forward reads: first come, first served.

A prompt is read in pieces of PIECE_ROWS tokens, a short one in a piece of FEW_ROWS. Forwards have few sizes, so that
each is captured once; empty pieces fill up a forward. A piece fills a page. If sequences share the page, the first one
reads it for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import PAGE_ROWS

PIECE_ROWS = PAGE_ROWS  # tokens of a piece
FEW_ROWS = 16  # tokens of a short prompt's piece: the fewest that tensor cores take
SIZES = {PIECE_ROWS: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), FEW_ROWS: (1, 4, 16, 64)}  # pieces in a forward
_MIN = 5  # the products of up to 5 pieces of 64 take as long as reading the weights
_FORWARD = 0.5  # the time of a forward without its products, in units of a piece


class Piece(NamedTuple):
    """Tokens start .. end - 1 of a slot's prompt. last: the prompt ends there."""

    slot: int
    start: int
    end: int
    last: bool


class Forward(NamedTuple):
    """`size` pieces of `rows` tokens: those in `pieces`, then empty ones."""

    rows: int
    size: int
    pieces: Sequence[Piece]

    @property
    def tokens(self) -> int:
        """How many tokens it reads."""
        return sum(piece.end - piece.start for piece in self.pieces)

    @property
    def ended(self) -> list[int]:
        """The slots with prompts that end in it."""
        return [piece.slot for piece in self.pieces if piece.last]


class _Reading:
    """A prompt that was read up to token `start`. pages: of its first pieces, perhaps shared. alone: it has its own
    forwards, and is not copied."""

    def __init__(self, prompt: Tensor, pages: Sequence[int], alone: bool):
        self.prompt, self.pages, self.alone, self.start = prompt, pages, alone, 0

    @cached_property
    def hash(self) -> int:
        return hash_of(self.prompt)


class PromptQueue:
    """Prompts that wait or are half read. If pages are not shared, or prompts are read one by one, only the first of
    equal prompts is read, and then copied to the others."""

    def __init__(self, packed: bool, unread: set[int] | None = None):
        """packed: a forward reads several pieces; otherwise a prompt is one piece and one forward. unread: the shared
        pages that are not read yet; the queue removes them as it reads them. None: no pages are shared."""
        self._packed, self._may_copy = packed, not packed or unread is None
        self._unread = set() if unread is None else unread
        self._readings: dict[int, _Reading] = {}  # in order of arrival
        self._copies: dict[int, list[int]] = {}  # for each slot that is read: the slots that copy its prompt
        self._unwanted: set[int] = set()  # dropped slots that are read only for their copies

    def __bool__(self) -> bool:
        return bool(self._readings)

    def add(
        self,
        prompts: Mapping[int, Tensor],
        pages: Mapping[int, Sequence[int]] | None = None,
        alone: Collection[int] = (),
    ) -> None:
        """Add prompts [L] int64 by slot, on the host. pages: of their first full pieces. alone: slots with prompts that
        are more than their tokens; these have their own forwards."""
        for slot, prompt in prompts.items():
            source = None if slot in alone else self._source_of(prompt)
            if source is None:
                self._readings[slot] = _Reading(prompt, () if pages is None else pages[slot], slot in alone)
                self._copies[slot] = []
            else:
                self._copies[source].append(slot)

    def next(self, most: int | None = None) -> Forward:
        """The next forward, with at least one piece and about `most` tokens; None: the most that a forward may have.

        The pieces of a prompt come in order, in one forward or in several: every layer appends its keys before it
        attends. Pieces stay in the queue until `take`.
        """
        pieces = self._pieces()
        first = next(pieces)
        if not self._packed:
            return Forward(first.end - first.start, 1, [first])
        rows = self._rows_of(first)
        largest = SIZES[rows][-1]
        fitting = [first, *islice((piece for piece in pieces if self._fits_with(piece, first)), largest - 1)]
        size = next_size(len(fitting), rows, None if most is None else most // rows)
        return Forward(rows, size, fitting[:size])

    def take(self, forward: Forward) -> None:
        """Remove the pieces of a forward that was launched."""
        for piece in forward.pieces:
            reading = self._readings[piece.slot]
            self._unread.difference_update(reading.pages[piece.start // PIECE_ROWS : piece.end // PIECE_ROWS])
            reading.start = piece.end

    def restart(self, forward: Forward) -> None:
        """Read the prompts of a forward's pieces again from the start."""
        for piece in forward.pieces:
            self._readings[piece.slot].start = 0

    def finish(self, slot: int) -> list[int]:
        """Forget a slot's prompt, which is read. Returns the slots that copy it."""
        del self._readings[slot]
        self._unwanted.discard(slot)
        return self._copies.pop(slot)

    def drop(self, slot: int) -> list[int]:
        """Stop reading a slot's prompt. Returns the slots that are free now.

        If other slots copy this prompt, it is still read, and its slot is not free. If this slot was the last to copy a
        dropped slot's prompt, that slot is free too.
        """
        if self._copies.get(slot):
            self._unwanted.add(slot)
            return []
        freed = [slot]
        source = next((source for source, copies in self._copies.items() if slot in copies), None)
        if source is not None:
            self._copies[source].remove(slot)
            if not self._copies[source] and source in self._unwanted:
                freed.append(source)
        for slot in freed:
            if slot in self._readings:
                self.finish(slot)
        return freed

    def holds(self, slot: int) -> bool:
        """Whether a prompt is being read in a slot."""
        return slot in self._readings

    def reads_for_others(self, slot: int) -> bool:
        """Whether other slots wait to copy a slot's prompt."""
        return bool(self._copies.get(slot))

    def _source_of(self, prompt: Tensor) -> int | None:
        """A slot with an equal prompt that is being read; None for a short prompt, which is read faster than copied."""
        if not self._may_copy or (self._packed and len(prompt) <= PIECE_ROWS):
            return None
        own = hash_of(prompt)
        others = ((slot, other) for slot, other in self._readings.items() if other.hash == own and not other.alone)
        return next((slot for slot, other in others if torch.equal(prompt, other.prompt)), None)

    def _pieces(self) -> Iterator[Piece]:
        """All waiting pieces, each shared page once."""
        taken: set[int] = set()  # pages of earlier pieces
        for slot, reading in self._readings.items():
            length = len(reading.prompt)
            while reading.start // PIECE_ROWS < len(reading.pages):
                if reading.pages[reading.start // PIECE_ROWS] in self._unread:
                    break
                reading.start += PIECE_ROWS  # another slot has read it
            if not self._packed:
                yield Piece(slot, reading.start, length, True)
                continue
            for start in range(reading.start, length, PIECE_ROWS):
                page = start // PIECE_ROWS
                if page < len(reading.pages):
                    if reading.pages[page] in taken or reading.pages[page] not in self._unread:
                        continue
                    taken.add(reading.pages[page])
                yield Piece(slot, start, min(start + PIECE_ROWS, length), start + PIECE_ROWS >= length)

    def _fits_with(self, piece: Piece, first: Piece) -> bool:
        """Whether a piece may be in one forward with the first one."""
        alone = self._readings[piece.slot].alone or self._readings[first.slot].alone
        return self._rows_of(piece) == self._rows_of(first) and (piece.slot == first.slot or not alone)

    def _rows_of(self, piece: Piece) -> int:
        return FEW_ROWS if piece.last and piece.end <= FEW_ROWS else PIECE_ROWS


def hash_of(prompt: Tensor) -> int:
    """Equal for equal prompts [L] int64 on the host."""
    return hash(prompt.numpy().tobytes())


def next_size(count: int, rows: int, most: int | None = None) -> int:
    """How many pieces of `rows` tokens the next forward should have, to read `count` pieces in the least time. At most
    `most`, if there is such a size."""
    sizes = tuple(size for size in SIZES[rows] if most is None or size <= most) or SIZES[rows][:1]
    return sizes[-1] if count >= sizes[-1] else _cheapest(count, rows, sizes)[1]


@cache
def _cheapest(count: int, rows: int, sizes: tuple[int, ...]) -> tuple[float, int]:
    """The least time for `count` pieces, in units of a 64-token piece in a large forward, and the first forward's
    size."""
    if not count:
        return 0.0, 0
    times = []
    for size in sizes:
        rest = _cheapest(max(count - size, 0), rows, sizes)[0]
        times.append((max(size * rows / PIECE_ROWS, _MIN) + _FORWARD + rest, size))
    return min(times)
