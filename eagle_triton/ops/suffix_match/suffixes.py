"""Drafts from all occurrences of a sequence's end: the most frequent continuations of the matches of `matches.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.suffix_match import (
    DEEPEST,
    MAX_BANNED,
    MAX_KEPT,
    MAX_TIMES,
    SLACK,
    RepeatDrafts,
    SuffixRules,
    TokenRing,
    check_suffix_drafts,
)
from eagle_triton.ops.suffix_match.matches import (
    BY_SLOT,
    CHUNK,
    LISTED,
    TIME_BITS,
    Ring,
    Store,
    continues,
    head_of,
    match_kernel,
    stored,
    walk_kernel,
)
from eagle_triton.runtime.overlap import await_inputs, overlapped

_SLACK = tl.constexpr(SLACK)
_DEEPEST = tl.constexpr(DEEPEST)
_TRIED_LENGTHS = tl.constexpr(8)  # distinct lengths that are tried
_TIME = tl.constexpr(MAX_TIMES - 1)
_BLOCK = tl.constexpr(32)  # segments for one load of counts
_UNROLL = tl.constexpr(2)
_FEW = tl.constexpr(32)  # up to this many occurrences use a smaller tile
_MAX_PLACES = 64
_GROUP = 8  # sequences that a program of `match` compares with a chunk of the ring


class DraftRules(NamedTuple):
    """A constexpr of the kernel: the rules of drafts in SuffixRules."""

    DEPTH: int  # max_tree_depth
    FACTOR: float
    OFFSET: float
    MIN_PROB: float  # min_token_prob
    TREE: bool
    BANNED: tuple[int, ...]

    @staticmethod
    def of(rules: SuffixRules) -> DraftRules:
        return DraftRules(
            DEPTH=int(rules.max_tree_depth),
            FACTOR=float(rules.max_spec_factor),
            OFFSET=float(rules.max_spec_offset),
            MIN_PROB=float(rules.min_token_prob),
            TREE=rules.use_tree_spec,
            BANNED=tuple(int(token) for token in rules.banned),
        )


class LengthRange(NamedTuple):
    """The matches of at least `longest` tokens in one store, taken as a match of `shortest` to `longest` tokens."""

    best: Tensor  # of the store's first segment, as `reach`
    reach: Tensor
    segments: int
    longest: int
    shortest: int
    longer: int  # matches of more tokens than `longest`
    whole: int  # matches of exactly `longest`


class Records(NamedTuple):
    """The draft from each LengthRange, contiguous."""

    nodes: Tensor  # tokens, then parents
    probs: Tensor
    scores: Tensor
    found: Tensor  # tokens of the match, and occurrences that were counted


@triton.jit
def _gathered(lengths, keep, WIDTH: tl.constexpr, N: tl.constexpr):
    """Times [N] of the matches of these lengths: all longer ones, then the latest others as far as there is room."""
    place = tl.arange(0, N)
    passed = tl.zeros((N,), tl.int32)  # segments before, and their matches: segment << 8 | matches
    taken, seen = 0, 0
    for first in tl.range(0, lengths.segments, _BLOCK, loop_unroll_factor=_UNROLL):
        segment = first + tl.arange(0, _BLOCK)
        inside = segment < lengths.segments
        reach = lengths.reach + segment * _DEEPEST + lengths.longest
        upper = tl.load(reach, mask=inside & (lengths.longest < _DEEPEST), other=0)
        equal = tl.load(reach - 1, mask=inside, other=0) - upper
        later = lengths.whole - seen - tl.cumsum(equal, 0)
        take = upper + tl.minimum(tl.maximum(keep - lengths.longer - later, 0), equal)
        upto = taken + tl.cumsum(take, 0)
        before = inside[:, None] & (upto[:, None] <= place[None, :])
        passed += tl.sum(tl.where(before, 256 + take[:, None], 0), 0)
        taken += tl.sum(take, 0)
        seen += tl.sum(equal, 0)
    key = tl.load(lengths.best + (passed >> 8) * WIDTH + place - (passed & 255), mask=place < taken, other=0)
    return key & _TIME


@triton.jit
def _ends(store, end, time, real, places, J: tl.constexpr, BANNED: tl.constexpr):
    """The number of tokens after each time [N] that a continuation may hold, at most `places`; 0 where not `real`."""
    step = tl.arange(0, J)
    at = time[:, None] + step[None, :]
    inside = real[:, None] & (at < end) & (step[None, :] < places)
    token = stored(store, at, inside)
    return tl.min(tl.where(continues(token, BANNED), J, step[None, :]), 1)


@triton.jit
def _reciprocal(count):
    """1 / count in fp64 by Newton's method: a division is a call, and calls spill registers."""
    exact = tl.maximum(count, 1).to(tl.float64)
    value = (1.0 / tl.maximum(count, 1).to(tl.float32)).to(tl.float64)
    value *= 2.0 - exact * value
    return value * (2.0 - exact * value)


@triton.jit
def _path(store, time, ends, most, MIN_PROB: tl.constexpr, J: tl.constexpr):
    """Follow matches [N] together for at most `most` tokens: tokens [J], probabilities [J] fp64, their number."""
    step = tl.arange(0, J)
    tokens, probs = tl.full((J,), -1, tl.int32), tl.zeros((J,), tl.float64)
    alive = ends > 0
    prob = tl.full((), 1.0, tl.float64)
    count = 0
    going = most > 0
    while going:
        goes_on = alive & (ends > count)
        token = stored(store, time + count, goes_on)
        same = (token[:, None] == token[None, :]) & goes_on[:, None]
        often = tl.sum(same.to(tl.int32), 0).to(tl.int64)
        key = (often << 55) | (time.to(tl.int64) << 31) | token.to(tl.int64)
        best = tl.max(tl.where(goes_on, key, 0), 0)
        whole = tl.sum(goes_on.to(tl.int32), 0)
        next_token = (best & 0x7FFFFFFF).to(tl.int32)
        prob *= (best >> 55).to(tl.float64) * _reciprocal(whole)
        likely = (whole > 0) & (prob - MIN_PROB + _SLACK >= 0)
        tokens = tl.where(likely & (step == count), next_token, tokens)
        probs = tl.where(likely & (step == count), prob, probs)
        alive = goes_on & (token == next_token)
        count += likely.to(tl.int32)
        going = likely & (count < most)
    return tokens, probs, count


@triton.jit
def _grown(store, time, ends, levels, MIN_PROB: tl.constexpr, N: tl.constexpr, J: tl.constexpr):
    """The nodes of all continuations as keys [N, J], each at its latest match and its level; -1 elsewhere.

    A key holds probability, level and time: likelier, then shallower, then later nodes have larger keys.
    """
    step = tl.arange(0, J)
    keys = tl.full((N, J), -1, tl.int64)
    latest = tl.where(ends > 0, 0, -1)  # the latest match with the same tokens so far, -1: left out
    prob = tl.full((N,), 1.0, tl.float64)
    level = 0
    going = levels > 0
    while going:
        goes_on = (latest >= 0) & (ends > level)
        token = stored(store, time + level, goes_on)
        whole = (latest[:, None] == latest[None, :]) & goes_on[:, None]
        same = whole & (token[:, None] == token[None, :])
        counts = tl.sum(whole.to(tl.int32) + (same.to(tl.int32) << 8), 0)
        latest = tl.max(tl.where(same, time[:, None], -1), 0)
        prob *= (counts >> 8).to(tl.float64) * _reciprocal(counts & 255)
        latest = tl.where(goes_on & (prob - MIN_PROB + _SLACK >= 0), latest, -1)
        bits = prob.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
        key = tl.where(latest == time, (bits << 30) | ((63 - level) << TIME_BITS) | time, -1)
        keys = tl.where(step[None, :] == level, key[:, None], keys)
        level += 1
        going = (level < levels) & (tl.max(latest, 0) >= 0)
    return keys


@triton.jit
def _best_nodes(keys, budget, levels, J: tl.constexpr):
    """The `budget` largest of keys [N, J] in the first `levels` levels, as [J], and the sum of their probabilities."""
    step = tl.arange(0, J)
    keys = tl.where(_level_of(keys) < levels, keys, -1)
    chosen = tl.full((J,), -1, tl.int64)
    best = tl.full((), 2**62, tl.int64)
    count = 0
    going = budget > 0
    while going:
        best = tl.max(tl.max(tl.where(keys < best, keys, -1), 1), 0)
        chosen = tl.where(step == count, best, chosen)
        count += 1
        going = (best >= 0) & (count < budget)
    total = tl.sum(_node_probs(chosen).to(tl.float64), 0)
    return chosen, (tl.floor(total * 262144.0 + 0.5) * (1.0 / 262144.0)).to(tl.float32)


@triton.jit
def _level_of(keys):
    return 63 - ((keys >> TIME_BITS) & 63).to(tl.int32)


@triton.jit
def _node_probs(keys):
    return tl.where(keys >= 0, (keys >> 30).to(tl.int32), 0).to(tl.float32, bitcast=True)


@triton.jit
def _linked(store, keys, J: tl.constexpr):
    """The tokens and parents [J] of the nodes with these keys."""
    place = tl.arange(0, J)
    real = keys >= 0
    time = (keys & _TIME).to(tl.int32)
    level = tl.where(real, _level_of(keys), -1)
    above = real[:, None] & (level[:, None] + 1 == level[None, :])
    tokens = tl.full((J,), -1, tl.int32)
    for depth in range(tl.max(level, 0) + 1):
        token = stored(store, time + depth, level >= depth)
        above &= (level[:, None] < depth) | (token[:, None] == token[None, :])
        tokens = tl.where(level == depth, token, tokens)
    return tokens, tl.max(tl.where(above, place[:, None], -1), 0)


@triton.jit
def _draft_of_lengths(
    store,
    end,
    lengths,
    out,
    places,
    keep,
    most,
    RULES: tl.constexpr,
    WIDTH: tl.constexpr,
    J: tl.constexpr,
    N: tl.constexpr,
):
    """The best draft from at most N of the matches of these lengths. Their store ends at time `end`."""
    DEPTH: tl.constexpr = RULES.DEPTH
    BANNED: tl.constexpr = RULES.BANNED  # a tuple, which Triton 3.6 cannot pass on inside another
    longest, shortest = lengths.longest, lengths.shortest
    time = _gathered(lengths, keep, WIDTH, N)
    occurrences = tl.minimum(lengths.longer + lengths.whole, keep)
    real = tl.arange(0, N) < occurrences
    ends = _ends(store, end, time, real, places, J, BANNED)

    m = tl.arange(0, _DEEPEST) + 1
    tried = (m <= longest) & (m >= shortest)
    wanted = tl.floor(m.to(tl.float64) * RULES.FACTOR + RULES.OFFSET + _SLACK)
    budget = tl.minimum(tl.maximum(wanted, 0.0), most).to(tl.int32)
    levels = DEPTH - m
    step = tl.arange(0, J)
    if RULES.TREE:
        within = tl.max(tl.where(tried & (budget <= levels), m, 0), 0)
        match = tl.where(within > 0, within, shortest)  # a shorter match has no more tokens, but levels to spare
        nodes = _grown(store, time, ends, tl.minimum(DEPTH - match, most), RULES.MIN_PROB, N, J)
        keys = tl.full((J,), -1, tl.int64)
        score, found = tl.full((), 0.0, tl.float32), 0
        going = True
        while going:
            allowed = tl.sum(tl.where(m == match, budget, 0), 0)
            chosen, total = _best_nodes(nodes, allowed, DEPTH - match, J)
            better = total >= score
            keys = tl.where(better, chosen, keys)
            score, found = tl.where(better, total, score), tl.where(better, match, found)
            match += 1
            going = (match <= longest) & ((DEPTH - match).to(tl.float32) >= score)
        tokens, parents = _linked(store, keys, J)
        probs = _node_probs(keys)
    else:
        allowed = tl.where(tried, tl.minimum(budget, levels), -1)
        tokens, exact, count = _path(store, time, ends, tl.max(allowed, 0), RULES.MIN_PROB, J)
        found = tl.max(tl.where(allowed >= count, m, 0), 0)  # the longest match that allows `count` tokens
        score, probs = tl.sum(exact, 0).to(tl.float32), exact.to(tl.float32)
        parents = tl.where(step < count, step - 1, -1)
    tl.store(out.nodes + step, tokens, mask=step < places)
    tl.store(out.nodes + places + step, parents, mask=step < places)
    tl.store(out.probs + step, probs, mask=step < places)
    tl.store(out.scores, score)
    tl.store(out.found, found)
    tl.store(out.found + 1, occurrences)


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _draft_kernel(
    tokens_ptr,
    lengths_ptr,
    ring,
    best_ptr,
    reach_ptr,
    records,
    own_segments,
    segments,
    keep,
    min_match,
    places,
    most,
    stride_tb,
    stride_l,
    RULES: tl.constexpr,
    WIDTH: tl.constexpr,
    J: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, stores * _TRIED_LENGTHS): a program drafts from the nth longest distinct length of matches in one
    store."""
    await_inputs(PDL)
    slot, nth = tl.program_id(0), tl.program_id(1) % _TRIED_LENGTHS
    from_ring = tl.program_id(1) >= _TRIED_LENGTHS
    length = tl.load(lengths_ptr + slot * stride_l)
    first = slot * segments + tl.where(from_ring, own_segments, 0)
    count = tl.where(from_ring, segments - own_segments, length // CHUNK + 1)
    m = tl.arange(0, _DEEPEST) + 1
    reach, beyond = tl.zeros((_DEEPEST,), tl.int32), tl.zeros((_DEEPEST,), tl.int32)  # of m tokens or more, of more
    for start in tl.range(0, count, _BLOCK, loop_unroll_factor=_UNROLL):
        segment = start + tl.arange(0, _BLOCK)
        at = reach_ptr + (first + segment[:, None]) * _DEEPEST + m[None, :]
        inside = segment[:, None] < count
        reach += tl.sum(tl.load(at - 1, mask=inside, other=0), 0)
        beyond += tl.sum(tl.load(at, mask=inside & (m < _DEEPEST)[None, :], other=0), 0)
    distinct = ((reach > beyond) & (beyond < keep)).to(tl.int32)
    rank = tl.sum(distinct, 0) - tl.cumsum(distinct, 0)
    longest = tl.sum(tl.where((distinct > 0) & (rank == nth), m, 0), 0)
    shortest = tl.maximum(tl.sum(tl.where((distinct > 0) & (rank == nth + 1), m, 0), 0) + 1, min_match)

    record = slot * tl.num_programs(1) + tl.program_id(1)
    if longest == 0:
        tl.store(records.scores + record, 0.0)
    else:
        longer = tl.sum(tl.where(m == longest, beyond, 0), 0)
        whole = tl.sum(tl.where(m == longest, reach - beyond, 0), 0)
        row = tokens_ptr + slot.to(tl.int64) * stride_tb
        store = Store(row, ring, head_of(ring), from_ring)
        end = length + 1
        if ring is not None:
            end = tl.where(from_ring, ring.size, end)
        lengths = LengthRange(
            best_ptr + first * WIDTH, reach_ptr + first * _DEEPEST, count, longest, shortest, longer, whole
        )
        out = Records(
            records.nodes + record * 2 * places,
            records.probs + record * places,
            records.scores + record,
            records.found + record * 2,
        )
        if longer + whole <= _FEW:
            _draft_of_lengths(store, end, lengths, out, places, keep, most, RULES, WIDTH, J, _FEW)
        else:
            _draft_of_lengths(store, end, lengths, out, places, keep, most, RULES, WIDTH, J, WIDTH)


@triton.jit
def _choose_kernel(records, drafts, places, RECORDS: tl.constexpr, J: tl.constexpr, PDL: tl.constexpr):
    """Grid (B,): take the draft with the highest score. Among equals a sequence's own comes before earlier outputs, and
    a longer match before a shorter one."""
    await_inputs(PDL)
    slot = tl.program_id(0)
    record = tl.arange(0, RECORDS)
    score = tl.load(records.scores + slot * RECORDS + record)
    best = tl.max(score, 0)
    chosen = tl.min(tl.where(score == best, record, RECORDS), 0)
    at = slot * RECORDS + chosen
    some = tl.sum((score > 0).to(tl.int32), 0) > 0
    step = tl.arange(0, J)
    real = some & (step < places)
    nodes = records.nodes + at * 2 * places + step
    out = slot * places + step
    tl.store(drafts.tokens + out, tl.load(nodes, mask=real, other=-1).to(tl.int64), mask=step < places)
    tl.store(drafts.parents + out, tl.load(nodes + places, mask=real, other=-1), mask=step < places)
    tl.store(drafts.probs + out, tl.load(records.probs + at * places + step, mask=real, other=0.0), mask=step < places)
    tl.store(drafts.match + slot, tl.load(records.found + at * 2, mask=some, other=0))
    tl.store(drafts.occurrences + slot, tl.load(records.found + at * 2 + 1, mask=some, other=0))
    tl.store(drafts.from_ring + slot, some & (chosen >= _TRIED_LENGTHS))


def suffix_drafts(
    tokens: Tensor, lengths: Tensor, ring: TokenRing | None, places: int, rules: SuffixRules
) -> RepeatDrafts:
    """Drafts from earlier occurrences of B sequences' ends, in them or in the ring; see reference.suffix_match.

    tokens [B, C] int64, the first lengths + 1 of each sequence are known; lengths [B] int32, below C. At most `places`
    J tokens are drafted, at most 64. Raises ValueError if shapes or dtypes do not fit, and for rules beyond the
    kernels' limits (see the package).
    """
    check_suffix_drafts("suffix_drafts", tokens, lengths, ring, places)
    check_limits(tokens, ring, places, rules)
    (batch, columns), device = tokens.shape, tokens.device
    drafts = new_drafts(batch, places, device)
    if not batch:
        return drafts
    keep = MAX_KEPT if rules.keep is None else int(rules.keep)
    width = max(_FEW.value, triton.next_power_of_2(keep))
    size = 0 if ring is None else len(ring.tokens)
    own_segments, ring_chunks = triton.cdiv(columns, CHUNK.value), triton.cdiv(size, CHUNK.value)
    segments = own_segments + triton.cdiv(ring_chunks, LISTED.value)
    group = min(_GROUP, triton.next_power_of_2(batch))
    records = _TRIED_LENGTHS.value * (1 if ring is None else 2)
    former, draft_rules = Ring.of(ring), DraftRules.of(rules)
    most = places if rules.max_spec_tokens is None else min(places, int(rules.max_spec_tokens))

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    hits, counts = integers(batch, segments, CHUNK.value), integers(batch, segments, LISTED.value)
    best, reach = integers(batch, segments, width), integers(batch, segments, DEEPEST)
    drafted = Records(
        nodes=integers(batch, records, 2, places),
        probs=torch.empty(batch, records, places, dtype=torch.float32, device=device),
        scores=torch.empty(batch, records, dtype=torch.float32, device=device),
        found=integers(batch, records, 2),
    )
    overlapped(match_kernel, (batch * own_segments + ring_chunks * triton.cdiv(batch, group),), device)(
        tokens,
        lengths,
        former,
        hits,
        counts,
        batch,
        own_segments,
        segments,
        tokens.stride(0),
        lengths.stride(0),
        DEPTH=draft_rules.DEPTH,
        BANNED=draft_rules.BANNED,
        GROUP=group,
        num_warps=4,
    )
    overlapped(walk_kernel, (batch, segments), device)(
        tokens,
        lengths,
        former,
        hits,
        counts,
        best,
        reach,
        own_segments,
        ring_chunks,
        keep,
        int(rules.min_match),
        tokens.stride(0),
        lengths.stride(0),
        DEPTH=draft_rules.DEPTH,
        WIDTH=width,
        TILE=32,
        num_warps=4,
    )
    overlapped(_draft_kernel, (batch, records), device)(
        tokens,
        lengths,
        former,
        best,
        reach,
        drafted,
        own_segments,
        segments,
        keep,
        int(rules.min_match),
        places,
        most,
        tokens.stride(0),
        lengths.stride(0),
        RULES=draft_rules,
        WIDTH=width,
        J=triton.next_power_of_2(places),
        num_warps=draft_warps(rules.use_tree_spec, places),
    )
    overlapped(_choose_kernel, (batch,), device)(
        drafted, drafts, places, RECORDS=records, J=triton.next_power_of_2(places), num_warps=1
    )
    return drafts


def draft_warps(tree: bool, places: int) -> int:
    """Warps of a drafting program: the fewest that hold its tiles in registers, since warps wait at each level."""
    return (4 if places <= 16 else 8) if tree else 2


def check_limits(tokens: Tensor, ring: TokenRing | None, places: int, rules: SuffixRules) -> None:
    """Raise ValueError for rules beyond the kernels' limits; see the package."""
    if rules.parity:
        raise ValueError("suffix_drafts: rules.parity must be False: SuffixDecodingCache counts as Arctic does")
    if rules.min_match < 2:
        raise ValueError(
            f"suffix_drafts: rules.min_match must be at least 2, got {rules.min_match}: too many positions match one "
            "token; set min_match=2"
        )
    limits = [
        ("rules.max_tree_depth", rules.max_tree_depth, DEEPEST),
        ("rules.keep", rules.keep or 0, MAX_KEPT),
        ("the number of banned tokens", len(rules.banned), MAX_BANNED),
        ("places", places, _MAX_PLACES),
        ("the capacity of tokens", tokens.shape[1], MAX_TIMES),
        ("the size of the ring", 0 if ring is None else len(ring.tokens), MAX_TIMES),
    ]
    for name, value, most in limits:
        if value > most:
            raise ValueError(f"suffix_drafts: {name} must be at most {most}, got {value}")


def new_drafts(batch: int, places: int, device: torch.device) -> RepeatDrafts:
    return RepeatDrafts(
        tokens=torch.empty(batch, places, dtype=torch.int64, device=device),
        parents=torch.empty(batch, places, dtype=torch.int32, device=device),
        probs=torch.empty(batch, places, dtype=torch.float32, device=device),
        match=torch.empty(batch, dtype=torch.int32, device=device),
        occurrences=torch.empty(batch, dtype=torch.int32, device=device),
        from_ring=torch.empty(batch, dtype=torch.bool, device=device),
    )
