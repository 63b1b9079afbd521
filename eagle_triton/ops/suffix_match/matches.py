"""Earlier occurrences of a sequence's end, in the sequence and in former outputs, and the length of each match."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.suffix_match import DEEPEST, END, MAX_KEPT, MAX_TIMES, TokenRing
from eagle_triton.ops.views import Matrix, Vector
from eagle_triton.runtime.overlap import await_inputs

_END = tl.constexpr(END)
CHUNK = tl.constexpr(1024)  # positions that a program of `match` compares
LISTED = tl.constexpr(32)  # hits that a chunk of the ring lists; also chunks of a segment
_DEEPEST = tl.constexpr(DEEPEST)
TIME_BITS = tl.constexpr(MAX_TIMES.bit_length() - 1)
NO_TOKEN = tl.constexpr(-2)
_MAX_KEPT = tl.constexpr(MAX_KEPT)
BY_SLOT = ["tokens_ptr", "lengths_ptr"]
"""Arguments with an alignment that depends on a batch's slot. Without this, Triton would compile a kernel again."""


class Ring(NamedTuple):
    """Former outputs, [size] int32, and where the next one goes."""

    ptr: Tensor
    head: Tensor
    size: int

    @staticmethod
    def of(ring: TokenRing | None) -> Ring | None:
        return None if ring is None else Ring(ring.tokens, ring.head, len(ring.tokens))


class Sequences(NamedTuple):
    """Sequences; the first lengths + 1 tokens are known."""

    tokens: Matrix
    lengths: Vector


class Store(NamedTuple):
    """Where times point to: a sequence's row or, with `from_ring`, the ring."""

    row: Tensor
    ring: Ring | None
    head: int
    from_ring: bool


@triton.jit
def continues(token, BANNED: tl.constexpr):
    """Whether a continuation may hold the token."""
    allowed = token >= 0
    for index in tl.static_range(len(BANNED)):
        allowed &= token != BANNED[index]
    return allowed


@triton.jit
def _ring_place(ring, head, time):
    place = time + head
    return tl.where(place >= ring.size, place - ring.size, place)


@triton.jit
def stored(store, time, inside):
    """The tokens of a store at `time`, END where not `inside`."""
    ring, from_ring = store.ring, store.from_ring
    if ring is None:
        token = tl.load(store.row + time, mask=inside, other=_END).to(tl.int32)
    else:
        former = tl.load(ring.ptr + _ring_place(ring, store.head, time), mask=inside & from_ring, other=_END)
        own = tl.load(store.row + time, mask=inside & (from_ring == 0), other=_END).to(tl.int32)
        token = tl.where(from_ring, former, own)
    return token


@triton.jit
def head_of(ring):
    if ring is None:
        head = 0
    else:
        head = tl.load(ring.head) % ring.size
    return head


@triton.jit
def _list_own(row_ptr, length, chunk, hits_ptr, counts_ptr, BANNED: tl.constexpr):
    """List where a row's last two tokens stand among the positions of one chunk. Pointers are the segment's."""
    time = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (time >= 2) & (time <= length)
    last, before = tl.load(row_ptr + length), tl.load(row_ptr + tl.maximum(length - 1, 0))
    hit = (tl.load(row_ptr + time - 1, mask=inside, other=NO_TOKEN) == last) & (last >= 0)
    hit &= (tl.load(row_ptr + time - 2, mask=inside, other=NO_TOKEN) == before) & (before >= 0)
    hit &= continues(tl.load(row_ptr + time, mask=hit, other=_END), BANNED)
    place = tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(hits_ptr + place, time, mask=hit)
    part = tl.arange(0, LISTED)
    count = tl.sum(hit.to(tl.int32), 0) - part * LISTED
    tl.store(counts_ptr + part, tl.minimum(tl.maximum(count, 0), LISTED))


@triton.jit
def _list_former(
    row_ptr, length, ring, head, time, hit, hits_ptr, count_ptr, DEPTH: tl.constexpr, BANNED: tl.constexpr
):
    """List a chunk of the ring for one sequence. hit [CHUNK]: two tokens match. Pointers are the chunk's."""
    hit &= continues(tl.load(ring.ptr + _ring_place(ring, head, time), mask=hit, other=_END), BANNED)
    count = tl.sum(hit.to(tl.int32), 0)
    place = tl.cumsum(hit.to(tl.int32), 0) - 1
    if count > LISTED:
        agreeing = hit.to(tl.int32) * 2
        for back in tl.static_range(3, min(DEPTH, 4) + 1):
            at = _ring_place(ring, head, time - back)
            token = tl.load(ring.ptr + at, mask=(agreeing == back - 1) & (time >= back), other=NO_TOKEN)
            wanted = tl.load(row_ptr + length + 1 - back, mask=length + 1 >= back, other=_END)
            agreeing += ((token == wanted) & (token >= 0)).to(tl.int32)
        before = 0
        for less in tl.static_range(3):  # matches of 4 tokens first, and later ones first among equals
            alike = (agreeing == 4 - less).to(tl.int32)
            total = tl.sum(alike, 0)
            place = tl.where(agreeing == 4 - less, before + total - tl.cumsum(alike, 0), place)
            before += total
    tl.store(hits_ptr + place, time, mask=hit & (place < LISTED))
    tl.store(count_ptr, tl.minimum(count, LISTED))


@triton.jit
def _compare_group(
    sequences,
    ring,
    hits_ptr,
    counts_ptr,
    chunk,
    first,
    batch,
    own_segments,
    segments,
    DEPTH: tl.constexpr,
    BANNED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """List where the last two tokens of GROUP sequences stand in one chunk of the ring. Most have no hit."""
    tokens, of_slots = sequences.tokens, sequences.lengths
    head = tl.load(ring.head) % ring.size
    time = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (time >= 2) & (time < ring.size)
    last = tl.load(ring.ptr + _ring_place(ring, head, time - 1), mask=inside, other=_END)
    before = tl.load(ring.ptr + _ring_place(ring, head, time - 2), mask=inside, other=_END)
    lane = tl.arange(0, GROUP)
    slots = first + lane
    lengths = tl.load(of_slots.ptr + slots * of_slots.item, mask=slots < batch, other=0)
    ends = tokens.ptr + slots.to(tl.int64) * tokens.row + lengths
    wanted = tl.load(ends, mask=lengths > 0, other=NO_TOKEN).to(tl.int32)
    wanted_before = tl.load(ends - 1, mask=lengths > 0, other=NO_TOKEN).to(tl.int32)
    wanted = tl.where((wanted >= 0) & (wanted_before >= 0), wanted, NO_TOKEN)
    hits = (wanted[:, None] == last[None, :]) & (wanted_before[:, None] == before[None, :])
    counts = tl.sum(hits.to(tl.int32), 1)
    place = own_segments * LISTED + chunk
    tl.store(counts_ptr + slots * segments * LISTED + place, 0, mask=(slots < batch) & (counts == 0))
    some = tl.sum(tl.where(counts > 0, 1 << lane, 0), 0)
    slot = first
    while some > 0:
        if some & 1:
            length = tl.load(of_slots.ptr + slot * of_slots.item)
            row = tokens.ptr + slot.to(tl.int64) * tokens.row
            hit = inside & (last == tl.load(row + length)) & (before == tl.load(row + length - 1))
            at = slot * segments * LISTED + place
            _list_former(row, length, ring, head, time, hit, hits_ptr + at * LISTED, counts_ptr + at, DEPTH, BANNED)
        some >>= 1
        slot += 1


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def match_kernel(
    tokens_ptr,
    lengths_ptr,
    ring,
    hits_ptr,
    counts_ptr,
    batch,
    own_segments,
    segments,
    stride_tb,
    stride_l,
    DEPTH: tl.constexpr,
    BANNED: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * own segments + chunks of the ring * groups of GROUP sequences,): a program compares one chunk."""
    await_inputs(PDL)
    program, own = tl.program_id(0), batch * own_segments
    if program < own:
        slot, chunk = program // own_segments, program % own_segments
        length = tl.load(lengths_ptr + slot * stride_l)
        if chunk * CHUNK <= length:
            segment = slot * segments + chunk
            row = tokens_ptr + slot.to(tl.int64) * stride_tb
            _list_own(row, length, chunk, hits_ptr + segment * CHUNK, counts_ptr + segment * LISTED, BANNED)
    elif ring is not None:
        groups = (batch + GROUP - 1) // GROUP
        chunk, first = (program - own) // groups, (program - own) % groups * GROUP
        sequences = Sequences(Matrix(tokens_ptr, stride_tb, 1), Vector(lengths_ptr, stride_l))
        _compare_group(
            sequences, ring, hits_ptr, counts_ptr, chunk, first, batch, own_segments, segments, DEPTH, BANNED, GROUP
        )


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def walk_kernel(
    tokens_ptr,
    lengths_ptr,
    ring,
    hits_ptr,
    counts_ptr,
    best_ptr,
    reach_ptr,
    own_segments,
    ring_chunks,
    keep,
    min_match,
    stride_tb,
    stride_l,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, segments): a program measures the matches of one segment and sorts the best of them.

    best: keys, length << 24 | time, the largest first. reach[m - 1]: how many of them have at least m tokens.
    """
    await_inputs(PDL)
    slot, segment = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + slot * stride_l)
    row = tokens_ptr + slot.to(tl.int64) * stride_tb
    from_ring = segment >= own_segments
    part = tl.arange(0, LISTED)
    listed = tl.where(from_ring, (segment - own_segments) * LISTED + part < ring_chunks, segment * CHUNK <= length)
    record = slot * tl.num_programs(1) + segment
    hits, best = hits_ptr + record * CHUNK, best_ptr + record * WIDTH
    counts = counts_ptr + record * LISTED
    total = tl.sum(tl.load(counts + part, mask=listed, other=0), 0)
    m = tl.arange(0, _DEEPEST) + 1
    reach = tl.zeros((_DEEPEST,), tl.int32)
    if total > 0:
        store = Store(row, ring, head_of(ring), from_ring)
        index = tl.arange(0, CHUNK)
        chunk = index // LISTED
        known = (from_ring == 0) | ((segment - own_segments) * LISTED + chunk < ring_chunks)
        real = index % LISTED < tl.load(counts + chunk, mask=known, other=0)
        hit = tl.load(hits + index, mask=real, other=0)
        tl.debug_barrier()  # every hit is read before any is moved
        tl.store(hits + tl.cumsum(real.to(tl.int32), 0) - 1, hit, mask=real)
        tl.debug_barrier()
        back = tl.arange(0, _DEEPEST)
        context = tl.load(row + length - back, mask=(back <= length) & (back < DEPTH), other=NO_TOKEN).to(tl.int32)
        context = tl.where(context >= 0, context, NO_TOKEN)
        for first in range(0, total, TILE):
            place = first + tl.arange(0, TILE)
            time = tl.load(hits + place, mask=place < total, other=0)
            at = time[:, None] - 1 - back[None, :]
            token = stored(store, at, at >= 0)
            agreeing = tl.min(tl.where(token != context[None, :], back[None, :], _DEEPEST), 1)
            key = tl.where(agreeing >= min_match, (agreeing << TIME_BITS) | time, -1)
            tl.store(hits + place, key, mask=place < total)
        tl.debug_barrier()
        if total <= _MAX_KEPT:
            few = tl.arange(0, _MAX_KEPT)
            found = tl.load(hits + few, mask=few < total, other=-1)
            rank = tl.sum((found[:, None] > found[None, :]).to(tl.int32), 0)
            tl.store(best + rank, found, mask=(found >= 0) & (rank < keep))
            matches = tl.sum((found >= 0).to(tl.int32), 0)
        else:
            keys = tl.sort(tl.load(hits + index, mask=index < total, other=-1), descending=True)
            tl.store(best + index, keys, mask=(keys >= 0) & (index < keep))
            matches = tl.sum((keys >= 0).to(tl.int32), 0)
        tl.debug_barrier()
        kept = tl.arange(0, WIDTH)
        match = tl.load(best + kept, mask=kept < tl.minimum(matches, keep), other=0) >> TIME_BITS
        reach = tl.sum((match[:, None] >= m[None, :]).to(tl.int32), 0)
    tl.store(reach_ptr + record * _DEEPEST + m - 1, reach)
