"""Puts drafts from text that occurred before into the tree of a draft model. Each step is one small kernel.

| name            | shape, dtype              | meaning                                                      |
|---|---|---|
| candidates      | [B, C] int64              | the model's, in flat order (see TreeSpec), like their scores |
| beam_candidates | [B, S] int64              | the flat candidate of each beam slot                         |
| drafts          | RepeatDrafts, J places    | tokens -1 where nothing is drafted                           |
| estimates       | [B, J] f32                | their scores                                                 |
| counts          | [BUCKETS, J, 2] int32     | right and reached                                            |

Numerics: logarithms and their sums in fp32; copies, comparisons and counts are exact. One program counts, so the order
is fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands import grafting as operands
from eagle_triton.operands.grafting import Grafted
from eagle_triton.operands.suffix_match import RepeatDrafts
from eagle_triton.ops.views import Matrix, view
from eagle_triton.runtime.overlap import await_inputs, overlapped

_NOWHERE = tl.constexpr(2**31 - 1)
_FIRST = tl.constexpr(tuple(rate for row in operands.FIRST for rate in row))
_KINDS = tl.constexpr(len(_FIRST.value))  # of matches, from either source
_NEXT, _PRIOR_WEIGHT = tl.constexpr(operands.NEXT), tl.constexpr(operands.PRIOR_WEIGHT)
_UNANIMOUS, _MAX_COUNTED = tl.constexpr(operands.UNANIMOUS), tl.constexpr(operands.MAX_COUNTED)


class Counts(NamedTuple):
    """How often drafts were right and reached, [BUCKETS, J, 2]."""

    ptr: Tensor
    bucket: int


@triton.jit
def _graft_kernel(
    candidates,
    scores,
    beam_candidates,
    tokens,
    parents,
    estimates,
    named,
    grafted,
    count,
    slots,
    k,
    places,
    CANDIDATES: tl.constexpr,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): a program grafts one sequence's drafts, each after its parent."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    index, place = tl.arange(0, CANDIDATES), tl.arange(0, PLACES)
    inside, real = index < count, place < places
    out = batch * (count + places)
    row = candidates.ptr + batch * candidates.row
    candidate = tl.load(row + index * candidates.item, mask=inside, other=-1)
    score = tl.load(scores.ptr + batch * scores.row + index * scores.item, mask=inside, other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    token = tl.load(tokens.ptr + batch * tokens.row + place * tokens.item, mask=real, other=-1)
    parent = tl.load(parents.ptr + batch * parents.row + place * parents.item, mask=real, other=-1)
    estimate = estimates.ptr + batch * estimates.row + place * estimates.item
    estimate = tl.load(estimate, mask=real, other=float("-inf"))
    slot = tl.arange(0, SLOTS)
    beam = beam_candidates.ptr + batch * beam_candidates.row + slot * beam_candidates.item
    beam = tl.load(beam, mask=slot < slots, other=-2).to(tl.int32)

    if named is not None:
        named_parent = tl.load(named.ptr + batch * named.row + index * named.item, mask=inside, other=-1) - 1
    flat = count + place  # each draft's place among the candidates
    child = tl.arange(0, K)
    for current in range(places):
        here = place == current
        mine = tl.sum(tl.where(here, token, 0), 0)
        above = tl.sum(tl.where(here, parent, 0), 0)
        above = tl.where(above < 0, -1, tl.sum(tl.where(place == above, flat, 0), 0))
        if (mine >= 0) & (above < count):  # the model proposes nothing below a graft
            if named is not None:
                twin = tl.min(tl.where(inside & (named_parent == above) & (candidate == mine), index, _NOWHERE), 0)
            else:
                expanded = tl.min(tl.where((beam == above) & (above >= 0), slot, _NOWHERE), 0)
                first = tl.where(above < 0, 0, tl.where(expanded < _NOWHERE, k * (1 + expanded), count))
                near = first + child
                found = tl.load(row + near * candidates.item, mask=(child < k) & (near < count), other=-1)
                twin = tl.min(tl.where(found == mine, near, _NOWHERE), 0)
            own = tl.max(tl.where(here, estimate, float("-inf")), 0)
            score = tl.where((index == twin) & (own > score), own, score)
            flat = tl.where(here & (twin < _NOWHERE), twin, flat)

    nothing = (flat < count) | (token < 0)
    above = tl.gather(flat, tl.maximum(parent, 0), 0)
    above = tl.where((parent < 0) | nothing, -1, above)
    tl.store(grafted.candidates + out + index, candidate, mask=inside)
    tl.store(grafted.scores + out + index, score, mask=inside)
    draft_out = out + count + place
    tl.store(grafted.candidates + draft_out, tl.where(nothing, -1, token), mask=real)
    tl.store(grafted.scores + draft_out, tl.where(nothing, float("-inf"), estimate), mask=real)
    if named is not None:
        tl.store(grafted.parents + out + index, named_parent, mask=inside)
        tl.store(grafted.parents + draft_out, above, mask=real)
    else:
        tl.store(grafted.parents + batch * places + place, above, mask=real)


@triton.jit
def _first_rate(bucket):
    """The prior probability of a draft's first token."""
    rate = 0.0
    for index in tl.static_range(_KINDS):
        rate = tl.where(bucket % _KINDS == index, _FIRST[index], rate)
    return rate


@triton.jit
def _estimate_scores_kernel(drafts, counts, scores_ptr, buckets_ptr, places, PLACES: tl.constexpr, PDL: tl.constexpr):
    """Grid (B,): a program estimates the scores of one sequence's drafts, and stores their bucket."""
    await_inputs(PDL)
    batch, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    real = place < places
    token = tl.load(drafts.tokens + batch * places + place, mask=real, other=-1)
    prob = tl.load(drafts.probs + batch * places + place, mask=real, other=0.0)
    match, seen = tl.load(drafts.match + batch), tl.load(drafts.occurrences + batch)
    sure = tl.load(drafts.probs + batch * places)
    length = (match >= 4).to(tl.int32) + (match >= 8) + (match >= 16)
    agree = (seen >= 2).to(tl.int32) + (seen >= 4)
    bucket = length * 4 + tl.where(sure >= _UNANIMOUS, agree, 3)
    bucket += (tl.load(drafts.from_ring + batch) != 0).to(tl.int32) * 16
    tl.store(buckets_ptr + batch, bucket)

    cell = counts.ptr + bucket * counts.bucket + place * 2
    right = tl.load(cell, mask=real, other=0).to(tl.float32)
    reached = tl.load(cell + 1, mask=real, other=0).to(tl.float32)
    prior = tl.where(place == 0, _first_rate(bucket), _NEXT)
    rate = (right + _PRIOR_WEIGHT * prior) / (reached + _PRIOR_WEIGHT)
    share = prob / tl.maximum(sure, 1.1754943508222875e-38)
    score = tl.cumsum(tl.log(rate), 0) + tl.log(share)
    tl.store(scores_ptr + batch * places + place, tl.where(token >= 0, score, float("-inf")), mask=real)


@triton.jit
def _count_right_kernel(
    counts,
    buckets_ptr,
    drafted,
    tokens,
    before_ptr,
    accepted_ptr,
    batch,
    columns,
    places,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1,): the program counts all sequences, one after another, each in all places at once."""
    await_inputs(PDL)
    place = tl.arange(0, PLACES)
    real = place < places
    for sequence in range(batch):
        accepted = tl.load(accepted_ptr + sequence)
        if accepted >= 0:
            row = sequence + tl.zeros((), tl.int64)
            draft = tl.load(drafted.ptr + row * drafted.row + place * drafted.item, mask=real, other=-1)
            column = tl.minimum(tl.load(before_ptr + sequence) + 1 + place, columns - 1).to(tl.int64)
            token = tl.load(tokens.ptr + row * tokens.row + column * tokens.item, mask=real, other=-1)
            there = draft >= 0
            wrong = tl.min(tl.where((token == draft) & there, _NOWHERE, place), 0)  # the first wrong place
            reached = there & (place <= wrong) & (place <= accepted)
            cell = counts.ptr + tl.load(buckets_ptr + sequence) * counts.bucket + place * 2
            right = tl.load(cell, mask=real, other=0) + (reached & (place < wrong)).to(tl.int32)
            reached_count = tl.load(cell + 1, mask=real, other=0) + reached.to(tl.int32)
            tl.store(cell, right, mask=real)
            tl.store(cell + 1, reached_count, mask=real)
            tl.debug_barrier()
    for first in range(0, BUCKETS * PLACES, BLOCK):
        index = first + tl.arange(0, BLOCK)
        cells = counts.ptr + index // PLACES * counts.bucket + index % PLACES * 2
        inside = (index < BUCKETS * PLACES) & (index % PLACES < places)
        reached_count = tl.load(cells + 1, mask=inside, other=0)
        many = inside & (reached_count >= _MAX_COUNTED)
        tl.store(cells, tl.load(cells, mask=many, other=0) // 2, mask=many)
        tl.store(cells + 1, reached_count // 2, mask=many)


def graft(
    candidates: Tensor,
    scores: Tensor,
    beam_candidates: Tensor,
    top_k: int,
    drafts: RepeatDrafts,
    estimates: Tensor,
    *,
    parents: Tensor | None = None,
) -> Grafted:
    """Put drafts from repetition into a model's candidates; see reference.grafting.graft.

    Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_graft(candidates, scores, beam_candidates, top_k, drafts, estimates, parents)
    (batch, count), places = candidates.shape, drafts.tokens.shape[1]
    out = Grafted(
        candidates.new_empty(batch, count + places),
        scores.new_empty(batch, count + places),
        drafts.parents.new_empty(batch, places if parents is None else count + places),
    )
    overlapped(_graft_kernel, (batch,), candidates.device)(
        view(Matrix, candidates),
        view(Matrix, scores),
        view(Matrix, beam_candidates),
        view(Matrix, drafts.tokens),
        view(Matrix, drafts.parents),
        view(Matrix, estimates),
        view(Matrix, parents),
        out,
        count,
        beam_candidates.shape[1],
        top_k,
        places,
        CANDIDATES=triton.next_power_of_2(count),
        SLOTS=triton.next_power_of_2(max(beam_candidates.shape[1], 1)),
        K=triton.next_power_of_2(top_k),
        PLACES=triton.next_power_of_2(places),
        num_warps=2,
    )
    return out


def estimate_scores(drafts: RepeatDrafts, counts: Tensor, *, buckets: Tensor) -> Tensor:
    """Logarithms of the estimated probability of each place, float32 [B, J]; see reference.grafting.estimate_scores.

    Writes the drafts' buckets to `buckets` [B] int32. Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_estimate(drafts, counts, buckets)
    batch, places = drafts.tokens.shape
    scores = torch.empty_like(drafts.probs)
    overlapped(_estimate_scores_kernel, (batch,), counts.device)(
        drafts, view(Counts, counts), scores, buckets, places, PLACES=triton.next_power_of_2(places), num_warps=1
    )
    return scores


def count_right(
    counts: Tensor, buckets: Tensor, drafted: Tensor, tokens: Tensor, before: Tensor, accepted: Tensor
) -> None:
    """Count in place how far chains of drafts were right; see reference.grafting.count_right.

    Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_count_right(counts, buckets, drafted, tokens, before, accepted)
    batch, places = drafted.shape
    overlapped(_count_right_kernel, (1,), tokens.device)(
        view(Counts, counts),
        buckets,
        view(Matrix, drafted),
        view(Matrix, tokens),
        before,
        accepted,
        batch,
        tokens.shape[1],
        places,
        BUCKETS=operands.BUCKETS,
        BLOCK=128,
        PLACES=triton.next_power_of_2(places),
        num_warps=1,
    )
