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

import torch
from torch import Tensor

from eagle_triton.operands import ngram_table as operands
from eagle_triton.operands.ngram_table import HALF, HASH_FACTOR, HASH_SHIFT, LONGEST, NgramTable


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
    operands.check_count_ngrams(table, shortest, tokens, first, end, fillers, weight)
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
    operands.check_counted_drafts(table, shortest, tokens, lengths, places)
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
