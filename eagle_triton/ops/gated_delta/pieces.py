"""Pieces of prompts on the device: which rows of a forward belong to one sequence. See reference.gated_delta."""

from __future__ import annotations

import triton
import triton.language as tl

from eagle_triton.operands.gated_delta import MAX_PIECES

_PIECES = tl.constexpr(MAX_PIECES)


@triton.jit
def sequence_of(piece, slots_ptr, starts_ptr, counts_ptr, pieces):
    """A piece's slot, the number of its sequence's pieces, whether the slot has a memory of earlier tokens, and whether
    the piece continues an earlier one of the same sequence.

    The number is above 0, and the memory counts, only for a sequence's first piece: its program takes all pieces.
    """
    place = tl.arange(0, _PIECES)
    slot = tl.load(slots_ptr + piece)
    slots = tl.load(slots_ptr + place, mask=place < pieces, other=-1)
    counts = tl.load(counts_ptr + place, mask=place < pieces, other=0)
    mine = (slots == slot) & (counts > 0)
    follows = tl.sum((mine & (place < piece)).to(tl.int32), 0) > 0
    count = tl.sum((mine & (place >= piece)).to(tl.int32), 0)
    known = (tl.load(starts_ptr + piece) > 0) & (follows == 0)
    return slot.to(tl.int64), tl.where(follows, 0, count), known, follows & (count > 0)
