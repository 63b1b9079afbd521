"""How prompts are cut into pieces, and pieces put together to forwards of few sizes, so that each is captured once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

PIECE_ROWS = 64  # tokens of a piece: a tile of attention's keys
FEW_ROWS = 16  # of a prompt that has no more: the least that tensor cores take
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # pieces of 64 in a forward
FEW_SIZES = (1, 4, 16, 64)  # of 16
_LEAST = 5  # pieces of 64 whose products take as long as reading the weights does


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
    pieces: list[Piece]


def plan_forwards(lengths: Mapping[int, int]) -> list[Forward]:
    """Forwards that read prompts of these lengths, by slot, in an order in which each piece comes behind those before
    it: in an earlier forward or in the same, where every layer appends its keys before it attends."""
    few = [Piece(slot, 0, length, True) for slot, length in lengths.items() if length <= FEW_ROWS]
    many = [
        Piece(slot, start, min(start + PIECE_ROWS, length), start + PIECE_ROWS >= length)
        for slot, length in lengths.items()
        if length > FEW_ROWS
        for start in range(0, length, PIECE_ROWS)
    ]
    forwards = []
    for rows, pieces, sizes in ((PIECE_ROWS, many, SIZES), (FEW_ROWS, few, FEW_SIZES)):
        while pieces:
            size = _next_size(len(pieces), sizes, rows)
            forwards.append(Forward(rows, size, pieces[:size]))
            pieces = pieces[size:]
    return forwards


def _next_size(count: int, sizes: tuple[int, ...], rows: int) -> int:
    """The size of the next forward, of those that read `count` pieces in the least time."""
    return sizes[-1] if count >= sizes[-1] else _cheapest(count, sizes, rows)[1]


@cache
def _cheapest(count: int, sizes: tuple[int, ...], rows: int) -> tuple[float, int]:
    """The least time for `count` pieces, in that of a piece of 64 where there are many, and the first size for it."""
    if not count:
        return 0.0, 0
    times = []
    for size in sizes:
        rest = _cheapest(max(count - size, 0), sizes, rows)[0]
        times.append((max(size * rows / PIECE_ROWS, _LEAST) + rest, size))
    return min(times)
