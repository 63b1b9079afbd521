"""Counts of n-grams in tables of fixed size: drafts without a model, learnt while decoding.

speculative_decoding/ngram_storage.py counts the same in dictionaries. Here each slot has L tables, one for each length
of context: `shortest` tokens, then one more each. A context stores its most frequent token. Another token replaces it
only with a larger count, so the first one wins a tie.

Contexts and grams (a context's place and the token after it) are stored whole, so keys with the same hash are never
mixed. A key is at place hash(key) modulo the number of places, or at the next place, cyclically, that was empty when it
was added. At most half of the places are used. After that, new contexts and grams are not added; known ones are still
counted.
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
    """Count tokens of B sequences after their contexts of shortest .. shortest + L - 1 tokens, in place.

    tokens [B, C] int64: columns first .. end - 1 are counted, in order, once each; first and end [B] int32, end at most
    C. fillers [B, m, k] int64: row i is counted in order, `weight` times each, after the same context as the token at
    column first + i, and after that token. A sequence with end <= first does not change. Raises ValueError if shapes,
    dtypes or devices do not fit, unless 1 <= shortest <= 5 - L, or for a weight that is negative or not finite.
    """
    operands.check_count_ngrams(table, shortest, tokens, first, end, fillers, weight)
    for slot, (start, stop) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        row = tokens[slot, : max(stop, 0)].tolist()
        guesses = [] if fillers is None else fillers[slot].tolist()
        for level in range(table.used.shape[1]):
            counts, length = _level(table, slot, level), shortest + level
            for column in range(max(start, length), stop):
                guessed = guesses[column - start] if column - start < len(guesses) else []
                seen = [(row[column], 1.0), *((token, weight) for token in guessed)]
                _count(counts, row[column - length : column], seen)


def counted_drafts(table: NgramTable, shortest: int, tokens: Tensor, lengths: Tensor, places: int) -> Tensor:
    """Continue B sequences by the counts, token by token, up to the first unknown context.

    tokens [B, C] int64: the first lengths + 1 of each sequence are known; lengths [B] int32, below C. Each draft is the
    most frequent token after the longest known context of the known and drafted tokens. Returns int64 [B, places], -1
    after the last draft. Raises ValueError like `count_ngrams`, and for places below 1.
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
    """The table of one slot and context length."""
    return NgramTable(*(value[slot, level] for value in table))


def _count(table: NgramTable, context: list[int], seen: list[tuple[int, float]]) -> None:
    """Count tokens after a context, each with its weight."""
    key = _context_key(context)
    place, known = _place_of(table.contexts, key)
    if not known:
        contexts, grams = table.used.tolist()
        if 2 * contexts >= len(table.contexts) or 2 * grams >= len(table.grams):
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


def _next(table: NgramTable, slot: int, shortest: int, text: list[int]) -> int | None:
    """The most frequent token after the longest known context at the end of a text."""
    for level in reversed(range(table.used.shape[1])):
        length = shortest + level
        if length <= len(text):
            counts = _level(table, slot, level)
            place, known = _place_of(counts.contexts, _context_key(text[-length:]))
            if known:
                return int(counts.best[place])
    return None


def _context_key(context: list[int]) -> tuple[int, int]:
    """The key of at most LONGEST tokens: two words."""
    halves = [token + 1 for token in reversed(context)] + [0] * (LONGEST - len(context))
    return halves[0] | halves[1] << 32, halves[2] | halves[3] << 32


def _place_of(keys: Tensor, key: tuple[int, ...]) -> tuple[int, bool]:
    """The place of a key among keys [P, words], or the free place for it; and whether it is there."""
    place = _hash(key) % len(keys)
    while True:
        there = tuple(keys[place].tolist())
        if there == key or not there[0]:
            return place, there == key
        place = (place + 1) % len(keys)


def _hash(key: tuple[int, ...]) -> int:
    """The hash of a key, 32 bits."""
    value = 0
    for word in key:
        for half in (word & HALF, word >> 32):
            value = (value ^ half) * HASH_FACTOR & HALF
            value ^= value >> HASH_SHIFT
    return value
