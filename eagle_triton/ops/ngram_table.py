"""Counts n-grams on the device while it decodes, and drafts from the counts.

`reference/ngram_table.py` defines what is counted and where it is stored; the tables here have the same bits.

| name          | shape, dtype             | meaning                                                            |
|---|---|---|
| table         | NgramTable               | B slots, L lengths of context, P places for contexts, G for grams  |
| tokens        | [B, C] int64             | sequences                                                          |
| first, end    | [B] int32                | columns first .. end - 1 are counted                               |
| fillers       | [B, m, k] int64          | guesses for the tokens from `first` on, counted like those         |
| drafts        | [B, J] int64             | -1 where nothing is drafted                                        |

Ties go to the token that came first, so a slot's counts must change in the order of its tokens. For each slot and
length, one program of one warp goes through them, and compares 32 places of a table at once. Prompts are counted in the
same way.

Numerics: counts are fp64 sums in that order, so they equal sums of Python's floats for every weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands import ngram_table as operands
from eagle_triton.operands.ngram_table import NgramTable
from eagle_triton.runtime.overlap import await_inputs, overlapped

_WINDOW = tl.constexpr(operands.WINDOW)
_FACTOR = tl.constexpr(operands.HASH_FACTOR)
_SHIFT = tl.constexpr(operands.HASH_SHIFT)
_HALF = tl.constexpr(operands.HALF)


class Tables(NamedTuple):
    """An NgramTable without `used`, because the alignment of `used` depends on the slot."""

    contexts: Tensor
    best: Tensor
    best_counts: Tensor
    grams: Tensor
    counts: Tensor


class Fillers(NamedTuple):
    """Guesses for the tokens from `first` on, [B, columns, guesses]."""

    ptr: Tensor
    columns: int
    guesses: int
    slot: int
    column: int
    guess: int

    @staticmethod
    def of(fillers: Tensor | None) -> Fillers | None:
        return None if fillers is None else Fillers(fillers, *fillers.shape[1:], *fillers.stride())


@triton.jit
def _mixed(value, word):
    """A 32-bit hash that takes in one more word, by halves."""
    value = ((value ^ (word & _HALF)) * _FACTOR) & _HALF
    value = value ^ (value >> _SHIFT)
    value = ((value ^ (word >> 32)) * _FACTOR) & _HALF
    return value ^ (value >> _SHIFT)


@triton.jit
def _find(keys_ptr, values_ptr, places, first, second, WORDS: tl.constexpr):
    """The place of a key of one or two words, or the empty place for it; whether it was found; and its value."""
    lane = tl.arange(0, _WINDOW)
    place = _mixed(first * 0, first)
    if WORDS == 2:
        place = _mixed(place, second)
    place = place & (places - 1)
    known = place < 0
    going = place >= 0
    value = tl.sum(tl.zeros((_WINDOW,), dtype=values_ptr.dtype.element_ty), 0)
    while going:
        at = (place + lane) & (places - 1)
        there = tl.load(keys_ptr + at * WORDS)
        same = there == first
        if WORDS == 2:
            same &= tl.load(keys_ptr + at * WORDS + 1) == second
        values = tl.load(values_ptr + at)
        offset = tl.min(tl.where(same | (there == 0), lane, _WINDOW), 0)
        going = offset == _WINDOW
        known = tl.max((same & (lane == offset)).to(tl.int32), 0) > 0
        value = tl.sum(tl.where(lane == offset, values, 0), 0)
        place = (place + offset) & (places - 1)
    return place, known, value


@triton.jit
def _context_at(row_ptr, column, length):
    """The two words of the `length` tokens before a column."""
    one = tl.load(row_ptr + column - 1) + 1
    two = tl.load(row_ptr + column - 2, mask=length > 1, other=-1) + 1
    three = tl.load(row_ptr + column - 3, mask=length > 2, other=-1) + 1
    four = tl.load(row_ptr + column - 4, mask=length > 3, other=-1) + 1
    return one | (two << 32), three | (four << 32)


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "first_ptr", "end_ptr", "used_ptr"])
def _count_ngrams_kernel(
    tables,
    used_ptr,
    tokens_ptr,
    first_ptr,
    end_ptr,
    fillers,
    shortest,
    places,
    gram_places,
    stride_tb,
    stride_first,
    stride_end,
    WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, L): a program counts the new tokens of one slot after their contexts of one length."""
    await_inputs(PDL)
    slot, level = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = slot * tl.num_programs(1) + level
    contexts_ptr = tables.contexts + table * places * 2
    best_ptr = tables.best + table * places
    best_counts_ptr = tables.best_counts + table * places
    grams_ptr = tables.grams + table * gram_places
    counts_ptr = tables.counts + table * gram_places
    used_ptr += table * 2
    row = tokens_ptr + slot * stride_tb
    length = shortest + level
    first, end = tl.load(first_ptr + slot * stride_first), tl.load(end_ptr + slot * stride_end)
    used, grams_used = tl.load(used_ptr), tl.load(used_ptr + 1)
    for column in range(tl.maximum(first, length), end):
        last, before = _context_at(row, column, length)
        place, known, best_count = _find(contexts_ptr, best_counts_ptr, places, last, before, 2)
        fits = (used < places // 2) & (grams_used < gram_places // 2)
        if known | fits:
            tl.store(contexts_ptr + place * 2, last)
            tl.store(contexts_ptr + place * 2 + 1, before)
            used += (known == 0).to(tl.int32)
            own, best = tl.load(row + column), tl.load(best_ptr + place)
            count_to = 1
            if fillers is not None:
                count_to = tl.where(column - first < fillers.columns, 1 + fillers.guesses, 1)
            for number in range(0, count_to):
                token = own
                if fillers is not None:
                    guess = slot * fillers.slot + (column - first) * fillers.column + (number - 1) * fillers.guess
                    token = tl.load(fillers.ptr + guess, mask=number > 0, other=own)
                gram = ((place + 1) << 32) | token
                at, counted, count = _find(grams_ptr, counts_ptr, gram_places, gram, gram, 1)
                if counted | (grams_used < gram_places // 2):
                    count = tl.where(number == 0, count + 1.0, count + WEIGHT)
                    tl.store(grams_ptr + at, gram)
                    tl.store(counts_ptr + at, count)
                    grams_used += (counted == 0).to(tl.int32)
                    best = tl.where(count > best_count, token, best.to(tl.int64)).to(tl.int32)
                    best_count = tl.maximum(best_count, count)
                tl.debug_barrier()  # every lane must see the stores
            tl.store(best_ptr + place, best)
            tl.store(best_counts_ptr + place, best_count)
        tl.debug_barrier()
    tl.store(used_ptr, used)
    tl.store(used_ptr + 1, grams_used)


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "lengths_ptr"])
def _counted_drafts_kernel(
    contexts_ptr,
    best_ptr,
    tokens_ptr,
    lengths_ptr,
    drafts_ptr,
    shortest,
    levels,
    places,
    drafts,
    stride_tb,
    stride_l,
    PDL: tl.constexpr,
):
    """Grid (B,): a program drafts for one slot, token by token."""
    await_inputs(PDL)
    slot = tl.program_id(0).to(tl.int64)
    known = tl.load(lengths_ptr + slot * stride_l) + 1
    last, before = _context_at(tokens_ptr + slot * stride_tb, known, known)
    going = known > 0
    for step in range(0, drafts):
        token = known.to(tl.int64) * 0 - 1
        for back in range(0, levels):
            level = levels - 1 - back
            length = shortest + level
            if going & (token < 0) & (length <= known + step):
                near = tl.where(length > 1, last, last & _HALF)
                far = tl.where(length > 3, before, tl.where(length > 2, before & _HALF, 0))
                table = slot * levels + level
                _, found, best = _find(
                    contexts_ptr + table * places * 2, best_ptr + table * places, places, near, far, 2
                )
                token = tl.where(found, best.to(tl.int64), token)
        going &= token >= 0
        tl.store(drafts_ptr + slot * drafts + step, token)
        before = ((before & _HALF) << 32) | (last >> 32)
        last = ((last & _HALF) << 32) | (token + 1)


def count_ngrams(
    table: NgramTable,
    shortest: int,
    tokens: Tensor,
    first: Tensor,
    end: Tensor,
    fillers: Tensor | None = None,
    weight: float = 1.0,
) -> None:
    """Count tokens of B sequences after their contexts, in place; see reference.ngram_table.count_ngrams.

    Raises ValueError if shapes, dtypes or devices do not fit, unless 1 <= shortest <= 5 - L, or if a weight is negative
    or not finite.
    """
    operands.check_count_ngrams(table, shortest, tokens, first, end, fillers, weight)
    batch, levels, _ = table.used.shape
    if not batch * levels:
        return
    overlapped(_count_ngrams_kernel, (batch, levels), tokens.device)(
        Tables(*table[:-1]),
        table.used,
        tokens,
        first,
        end,
        Fillers.of(fillers),
        shortest,
        table.best.shape[2],
        table.grams.shape[2],
        tokens.stride(0),
        first.stride(0),
        end.stride(0),
        WEIGHT=float(weight),
        num_warps=1,
        num_stages=1,
    )


def counted_drafts(table: NgramTable, shortest: int, tokens: Tensor, lengths: Tensor, places: int) -> Tensor:
    """The likeliest continuations of B sequences by the counts; see reference.ngram_table.counted_drafts.

    Returns int64 [B, places], -1 after the last draft. Raises ValueError as `count_ngrams`, and for places below 1.
    """
    operands.check_counted_drafts(table, shortest, tokens, lengths, places)
    batch, levels, _ = table.used.shape
    drafts = torch.empty(batch, places, dtype=torch.int64, device=tokens.device)
    if batch:
        overlapped(_counted_drafts_kernel, (batch,), tokens.device)(
            table.contexts,
            table.best,
            tokens,
            lengths,
            drafts,
            shortest,
            levels,
            table.best.shape[2],
            places,
            tokens.stride(0),
            lengths.stride(0),
            num_warps=1,
            num_stages=1,
        )
    return drafts
