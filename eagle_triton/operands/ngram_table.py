"""The tables that count tokens after contexts; see reference.ngram_table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.shapes import check_tensors
from eagle_triton.values import check_range, check_weight

LONGEST = 4  # tokens of a context

WINDOW = 32  # places that a kernel compares at once

HASH_FACTOR, HASH_SHIFT, HALF = 0x5BD1E995, 15, (1 << 32) - 1


class NgramTable(NamedTuple):
    """Counts of B slots and L lengths of context. P and G are powers of two; empty places are zero."""

    contexts: Tensor  # [B, L, P, 2] int64: tokens + 1, 32 bits each, the last token lowest; 0 where there is none
    best: Tensor  # [B, L, P] int32: the token with the largest count after a context
    best_counts: Tensor  # [B, L, P] float64
    grams: Tensor  # [B, L, G] int64: (place of the context + 1) << 32 | the token after it
    counts: Tensor  # [B, L, G] float64
    used: Tensor  # [B, L, 2] int32: the numbers of contexts and grams


def new_ngram_table(slots: int, levels: int, contexts: int, grams: int, device: torch.device) -> NgramTable:
    """An empty table with room for at least `contexts` and `grams` for each slot and length of context."""
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


def check_count_ngrams(
    table: NgramTable, shortest: int, tokens: Tensor, first: Tensor, end: Tensor, fillers: Tensor | None, weight: float
) -> None:
    _check("count_ngrams", table, shortest, tokens, first=first, end=end)
    fields = {"fillers": (fillers, "B m k", torch.int64)}
    check_tensors("count_ngrams", fields, device=tokens.device, B=len(tokens))
    check_weight("count_ngrams: weight", weight)


def check_counted_drafts(table: NgramTable, shortest: int, tokens: Tensor, lengths: Tensor, places: int) -> None:
    _check("counted_drafts", table, shortest, tokens, lengths=lengths)
    check_range("counted_drafts: places", places, 1)


def _check(function: str, table: NgramTable, shortest: int, tokens: Tensor, **by_slot: Tensor) -> None:
    tensors = {
        "tokens": (tokens, "B C, contiguous rows", torch.int64),
        **{name: (value, "B", torch.int32) for name, value in by_slot.items()},
        "table.used": (table.used, "B L 2, contiguous", torch.int32),
        "table.contexts": (table.contexts, "B L P 2, contiguous", torch.int64),
        "table.best": (table.best, "B L P, contiguous", torch.int32),
        "table.best_counts": (table.best_counts, "B L P, contiguous", torch.float64),
        "table.grams": (table.grams, "B L G, contiguous", torch.int64),
        "table.counts": (table.counts, "B L G, contiguous", torch.float64),
    }
    sizes = check_tensors(function, tensors)
    if not 1 <= shortest <= LONGEST + 1 - max(sizes["L"], 1):
        raise ValueError(
            f"{function}: contexts must have 1 to {LONGEST} tokens, got {sizes['L']} lengths from {shortest} on"
        )
    for name, count in (("contexts", sizes["P"]), ("grams", sizes["G"])):
        if count < WINDOW or count & (count - 1):
            raise ValueError(f"{function}: the places of {name} must be a power of two from {WINDOW} on, got {count}")
