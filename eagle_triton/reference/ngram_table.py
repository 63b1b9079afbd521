"""Which token followed which tokens, counted in tables of fixed size: drafts without a model, learnt while decoding.

speculative_decoding/ngram_storage.py counts the same in dictionaries. Here each slot has one table for each length of
context, L of them: `shortest` tokens, then one more each. A context remembers the token with the largest count; another
takes its place only with a larger count, so of equal ones the first stays.

Contexts are kept whole, as are grams, which are a context's place and the token behind it: what falls on one place by
its hash is never mixed. A key stands at hash(key) modulo the places, or at the next place, round the end, that was
empty when it came. At most half of the places are taken: from then on a new context is not learnt, nor a new token
behind a known one, while what is there is counted as ever.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LONGEST = 4  # tokens of a context
WINDOW = 32  # places that a kernel compares at once
HASH_FACTOR, HASH_SHIFT, HALF = 0x5BD1E995, 15, (1 << 32) - 1


class NgramTable(NamedTuple):
    """Counts of B slots and L lengths of context. P and G are powers of two; what is empty is zero everywhere."""

    contexts: Tensor  # [B, L, P, 2] int64: tokens + 1, 32 bits each, the last token lowest; 0 where there is none
    best: Tensor  # [B, L, P] int32: the token with the largest count behind a context
    best_counts: Tensor  # [B, L, P] float64
    grams: Tensor  # [B, L, G] int64: (place of the context + 1) << 32 | the token behind it
    counts: Tensor  # [B, L, G] float64
    used: Tensor  # [B, L, 2] int32: how many contexts and grams there are


def new_ngram_table(slots: int, levels: int, contexts: int, grams: int, device: torch.device) -> NgramTable:
    """An empty table with room for so many contexts and grams of each slot and length of context, or a few more."""
    places, gram_places = (max(WINDOW, 1 << (2 * count - 1).bit_length()) for count in (contexts, grams))

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(slots, levels, *shape, dtype=dtype, device=device)

    return NgramTable(
        contexts=zeros(places, 2, dtype=torch.int64),
        best=zeros(places, dtype=torch.int32),
        best_counts=zeros(places, dtype=torch.float64),
        grams=zeros(gram_places, dtype=torch.int64),
        counts=zeros(gram_places, dtype=torch.float64),
        used=zeros(2, dtype=torch.int32),
    )


def count_ngrams(
    table: NgramTable,
    shortest: int,
    tokens: Tensor,
    first: Tensor,
    end: Tensor,
    fillers: Tensor | None = None,
    weight: float = 1.0,
) -> None:
    """Count tokens of B sequences behind their contexts of shortest .. shortest + L - 1 tokens, in place.

    tokens [B, C] int64, of which columns first .. end - 1 are counted in their order, once each; first and end [B]
    int32, end at most C. fillers [B, m, k] int64: tokens that are counted, `weight` times each, behind the same context
    as the token at column first + i, after it and in their order. A sequence with end <= first is left as it is. Raises
    ValueError if shapes, dtypes or devices do not fit, unless 1 <= shortest <= 5 - L, or for a weight that is negative
    or not finite.
    """
    check_count_ngrams(table, shortest, tokens, first, end, fillers, weight)
    for slot, (start, stop) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        row = tokens[slot, : max(stop, 0)].tolist()
        behind = [] if fillers is None else fillers[slot].tolist()
        for level in range(table.used.shape[1]):
            counts, length = _level(table, slot, level), shortest + level
            for column in range(max(start, length), stop):
                guessed = behind[column - start] if column - start < len(behind) else []
                seen = [(row[column], 1.0), *((token, weight) for token in guessed)]
                _count(counts, row[column - length : column], seen)


def counted_drafts(table: NgramTable, shortest: int, tokens: Tensor, lengths: Tensor, places: int) -> Tensor:
    """What B sequences go on with by the counts, token by token, up to the first unknown context.

    tokens [B, C] int64, of which the first lengths + 1 of each sequence are known; lengths [B] int32, below C. Each
    token is the one with the largest count behind the longest known context of what is known and drafted. Returns int64
    [B, places], -1 behind the last draft. Raises ValueError as `count_ngrams`, and for places below 1.
    """
    check_counted_drafts(table, shortest, tokens, lengths, places)
    drafts = torch.full((len(tokens), places), -1, dtype=torch.int64, device=tokens.device)
    for slot, length in enumerate(lengths.tolist()):
        text = tokens[slot, : length + 1][-LONGEST:].tolist()
        for place in range(places):
            token = _next(table, slot, shortest, text)
            if token is None:
                break
            drafts[slot, place] = token
            text.append(token)
    return drafts


def _level(table: NgramTable, slot: int, level: int) -> NgramTable:
    """The counts of one slot and length of context."""
    return NgramTable(*(value[slot, level] for value in table))


def _count(table: NgramTable, context: list[int], seen: list[tuple[int, float]]) -> None:
    """Count tokens behind a context, each with its weight."""
    key = _context_key(context)
    place, known = _place_of(table.contexts, key)
    if not known:
        if any(2 * used >= len(keys) for used, keys in _filled(table)):
            return
        table.contexts[place] = table.contexts.new_tensor(key)
        table.used[0] += 1
    for token, weight in seen:
        gram = (place + 1) << 32 | token
        at, counted = _place_of(table.grams[:, None], (gram,))
        if not counted:
            if 2 * int(table.used[1]) >= len(table.grams):
                continue
            table.grams[at] = gram
            table.used[1] += 1
        count = float(table.counts[at]) + weight
        table.counts[at] = count
        if count > float(table.best_counts[place]):
            table.best[place], table.best_counts[place] = token, count


def _filled(table: NgramTable) -> list[tuple[int, Tensor]]:
    return list(zip(table.used.tolist(), (table.contexts, table.grams), strict=True))


def _next(table: NgramTable, slot: int, shortest: int, text: list[int]) -> int | None:
    """The token behind the longest known context that ends a text."""
    for level in reversed(range(table.used.shape[1])):
        length = shortest + level
        if length <= len(text):
            counts = _level(table, slot, level)
            place, known = _place_of(counts.contexts, _context_key(text[-length:]))
            if known:
                return int(counts.best[place])
    return None


def _context_key(context: list[int]) -> tuple[int, int]:
    """The two words of at most LONGEST tokens."""
    halves = [token + 1 for token in reversed(context)] + [0] * (LONGEST - len(context))
    return halves[0] | halves[1] << 32, halves[2] | halves[3] << 32


def _place_of(keys: Tensor, key: tuple[int, ...]) -> tuple[int, bool]:
    """Where a key stands among keys [P, words], or where it goes; and whether it is there."""
    place = _hash(key) % len(keys)
    while True:
        there = tuple(keys[place].tolist())
        if there == key or not there[0]:
            return place, there == key
        place = (place + 1) % len(keys)


def _hash(key: tuple[int, ...]) -> int:
    """32 bits."""
    value = 0
    for word in key:
        for half in (word & HALF, word >> 32):
            value = (value ^ half) * HASH_FACTOR & HALF
            value ^= value >> HASH_SHIFT
    return value


def check_count_ngrams(
    table: NgramTable,
    shortest: int,
    tokens: Tensor,
    first: Tensor,
    end: Tensor,
    fillers: Tensor | None,
    weight: float,
) -> None:
    _check("count_ngrams", table, shortest, tokens, {"first": first, "end": end})
    if fillers is not None and (
        fillers.ndim != 3
        or len(fillers) != len(tokens)
        or fillers.dtype != torch.int64
        or fillers.device != tokens.device
    ):
        raise ValueError(
            f"count_ngrams: fillers must be torch.int64 [{len(tokens)}, m, k] on {tokens.device}, got {fillers.dtype} "
            f"{list(fillers.shape)} on {fillers.device}"
        )
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"count_ngrams: weight must be at least 0 and finite, got {weight}")


def check_counted_drafts(table: NgramTable, shortest: int, tokens: Tensor, lengths: Tensor, places: int) -> None:
    _check("counted_drafts", table, shortest, tokens, {"lengths": lengths})
    if places < 1:
        raise ValueError(f"counted_drafts: places must be at least 1, got {places}")


def _check(function: str, table: NgramTable, shortest: int, tokens: Tensor, by_slot: dict[str, Tensor]) -> None:
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or (tokens.numel() and tokens.stride(1) != 1):
        raise ValueError(
            f"{function}: tokens must be torch.int64 [B, C] with stride 1 in its rows, got {tokens.dtype} "
            f"{list(tokens.shape)}"
        )
    for name, value in by_slot.items():
        if value.shape != tokens.shape[:1] or value.dtype != torch.int32 or value.device != tokens.device:
            raise ValueError(
                f"{function}: {name} must be torch.int32 [{len(tokens)}] on {tokens.device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
    levels = table.used.shape[1] if table.used.ndim == 3 else 0
    if not 1 <= shortest <= LONGEST + 1 - max(levels, 1):
        raise ValueError(
            f"{function}: contexts of {levels} lengths from {shortest} on, where they have 1 to {LONGEST} tokens"
        )
    places, grams = table.contexts.shape[-2:-1], table.grams.shape[-1:]
    for name, value, dtype, shape in (
        ("contexts", table.contexts, torch.int64, (*places, 2)),
        ("best", table.best, torch.int32, places),
        ("best_counts", table.best_counts, torch.float64, places),
        ("grams", table.grams, torch.int64, grams),
        ("counts", table.counts, torch.float64, grams),
        ("used", table.used, torch.int32, (2,)),
    ):
        shape = (len(tokens), levels, *shape)
        if value.shape != shape or value.dtype != dtype or value.device != tokens.device or not value.is_contiguous():
            raise ValueError(
                f"{function}: table.{name} must be {dtype} {list(shape)} on {tokens.device}, contiguous, got "
                f"{value.dtype} {list(value.shape)} on {value.device}"
            )
    for name, count in (("contexts", places[0]), ("grams", grams[0])):
        if count < WINDOW or count & (count - 1):
            raise ValueError(f"{function}: {name} must have a power of two of places, {WINDOW} or more, got {count}")
