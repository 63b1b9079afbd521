"""Prompts on their way into slots: which pieces the next forward reads, first come, first served.

A prompt is read in pieces of PIECE_ROWS tokens, a short one in one of FEW_ROWS. Forwards have few sizes, so that each
is captured once: what is missing to a size is read as nobody's. A piece fills a page; where that is shared, whoever
comes first reads it for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import PAGE_ROWS

PIECE_ROWS = PAGE_ROWS  # tokens of a piece
FEW_ROWS = 16  # of a prompt that has no more: the least that tensor cores take
SIZES = {PIECE_ROWS: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), FEW_ROWS: (1, 4, 16, 64)}  # pieces in a forward
_MIN = 5  # pieces of 64 whose products take as long as reading the weights does
_FORWARD = 0.5  # what a forward takes beside its products, in the time of a piece


class Piece(NamedTuple):
    """Tokens start .. end of the prompt of a slot; `last` where the prompt ends there."""

    slot: int
    start: int
    end: int
    last: bool


class Forward(NamedTuple):
    """`size` pieces of `rows` tokens, of which the first are those in `pieces`, and the others nobody's."""

    rows: int
    size: int
    pieces: Sequence[Piece]

    @property
    def tokens(self) -> int:
        """How many it reads."""
        return sum(piece.end - piece.start for piece in self.pieces)

    @property
    def ended(self) -> list[int]:
        """The slots whose prompts it reads to the end."""
        return [piece.slot for piece in self.pieces if piece.last]


class _Reading:
    """A prompt that is read from token `start` on; `pages` are those of its first pieces that others may hold too.
    alone: in forwards of its own, and for nobody else."""

    def __init__(self, prompt: Tensor, pages: Sequence[int], alone: bool):
        self.prompt, self.pages, self.alone, self.start = prompt, pages, alone, 0


class PromptQueue:
    """Prompts that wait or are half read. Where no pages are shared, or each is a forward of its own, of equal ones the
    first is read, and copied to the others."""

    def __init__(self, packed: bool, unread: set[int] | None = None):
        """packed: in pieces, several in a forward; else a prompt is one piece and one forward. unread: the shared pages
        that are still to be read, which the queue takes out as it reads them; None: no pages are shared."""
        self._packed, self._copies = packed, not packed or unread is None
        self._unread = set() if unread is None else unread
        self._readings: dict[int, _Reading] = {}  # in the order in which they came
        self._twins: dict[int, list[int]] = {}  # of each slot that is read, those that take its prompt
        self._unwanted: set[int] = set()  # those that are read for others alone

    def __bool__(self) -> bool:
        return bool(self._readings)

    def add(
        self,
        prompts: Mapping[int, Tensor],
        pages: Mapping[int, Sequence[int]] | None = None,
        alone: Collection[int] = (),
    ) -> None:
        """Prompts [L] int64 by slot, on the host, all of which enter at once; pages: of their first whole pieces.
        alone: slots whose prompts are more than their tokens, and have forwards of their own."""
        for slot, prompt in prompts.items():
            twin = None if slot in alone else self._twin(prompt)
            if twin is None:
                self._readings[slot] = _Reading(prompt, () if pages is None else pages[slot], slot in alone)
                self._twins[slot] = []
            else:
                self._twins[twin].append(slot)

    def next(self, most: int | None = None) -> Forward:
        """The next forward, of about `most` tokens, None: as many as one may have; at least a piece.

        A piece comes behind those before it: in an earlier forward or in the same, where every layer appends its keys
        before it attends. They wait until `take`.
        """
        pieces = self._pieces()
        first = next(pieces)
        if not self._packed:
            return Forward(first.end - first.start, 1, [first])
        rows = self._rows_of(first)
        largest = SIZES[rows][-1]
        alike = [first, *islice((piece for piece in pieces if self._are_alike(piece, first)), largest - 1)]
        size = next_size(len(alike), rows, None if most is None else most // rows)
        return Forward(rows, size, alike[:size])

    def take(self, forward: Forward) -> None:
        """The forward that `next` gave was launched: its pieces wait no more."""
        for piece in forward.pieces:
            reading = self._readings[piece.slot]
            self._unread.difference_update(reading.pages[piece.start // PIECE_ROWS : piece.end // PIECE_ROWS])
            reading.start = piece.end

    def restart(self, forward: Forward) -> None:
        """Read the prompts that the forward has pieces of from their beginnings, unless it is taken."""
        for piece in forward.pieces:
            self._readings[piece.slot].start = 0

    def finish(self, slot: int) -> list[int]:
        """The prompt of a slot is read: the slots that take it from there. The queue forgets it."""
        del self._readings[slot]
        self._unwanted.discard(slot)
        return self._twins.pop(slot)

    def drop(self, slot: int) -> list[int]:
        """A slot's prompt is wanted no more: the slots that nothing is read in now. Not its own, if it is read on for
        others that take it from there; then one that was read for this slot alone may be among them."""
        if self._twins.get(slot):
            self._unwanted.add(slot)
            return []
        freed = [slot]
        source = next((source for source, twins in self._twins.items() if slot in twins), None)
        if source is not None:
            self._twins[source].remove(slot)
            if not self._twins[source] and source in self._unwanted:
                freed.append(source)
        for slot in freed:
            if slot in self._readings:
                self.finish(slot)
        return freed

    def holds(self, slot: int) -> bool:
        """Whether a prompt is being read in a slot."""
        return slot in self._readings

    def reads_for_others(self, slot: int) -> bool:
        """Whether others wait to take a slot's prompt from there."""
        return bool(self._twins.get(slot))

    def _twin(self, prompt: Tensor) -> int | None:
        """A slot whose prompt, still being read, is equal. A short one is read faster than copied."""
        if not self._copies or (self._packed and len(prompt) <= PIECE_ROWS):
            return None
        others = ((slot, other.prompt) for slot, other in self._readings.items() if not other.alone)
        return next((slot for slot, other in others if torch.equal(prompt, other)), None)

    def _pieces(self) -> Iterator[Piece]:
        """All that wait, each shared page once."""
        taken: set[int] = set()  # by pieces before
        for slot, reading in self._readings.items():
            length = len(reading.prompt)
            while reading.start // PIECE_ROWS < len(reading.pages):
                if reading.pages[reading.start // PIECE_ROWS] in self._unread:
                    break
                reading.start += PIECE_ROWS  # somebody has read it
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

    def _are_alike(self, piece: Piece, first: Piece) -> bool:
        """Whether a piece may stand in one forward with the first one."""
        alone = self._readings[piece.slot].alone or self._readings[first.slot].alone
        return self._rows_of(piece) == self._rows_of(first) and (piece.slot == first.slot or not alone)

    def _rows_of(self, piece: Piece) -> int:
        return FEW_ROWS if piece.last and piece.end <= FEW_ROWS else PIECE_ROWS


def next_size(count: int, rows: int, most: int | None = None) -> int:
    """How many pieces of `rows` tokens the next forward has, to read `count` in the least time; not above `most` if
    there is a smaller size."""
    sizes = tuple(size for size in SIZES[rows] if most is None or size <= most) or SIZES[rows][:1]
    return sizes[-1] if count >= sizes[-1] else _cheapest(count, rows, sizes)[1]


@cache
def _cheapest(count: int, rows: int, sizes: tuple[int, ...]) -> tuple[float, int]:
    """The least time for `count` pieces, in that of a piece of 64 where there are many, and the first size for it."""
    if not count:
        return 0.0, 0
    times = []
    for size in sizes:
        rest = _cheapest(max(count - size, 0), rows, sizes)[0]
        times.append((max(size * rows / PIECE_ROWS, _MIN) + _FORWARD + rest, size))
    return min(times)
