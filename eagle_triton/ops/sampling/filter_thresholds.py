"""Finds the distribution that sampling follows at each row of logits, without sorting the vocabulary.

A distribution keeps the tokens x with logit > cut, and those with logit = cut from index `first` on, if their weight
w(x) = exp((x - top) / temperature) is at least min_p. A kept token has probability w(x) / sum of the kept w. The cut of
top-k is the smallest key with count(x > key) < k, the cut of top-p the smallest with mass(x > key) < p * mass. Count
and mass fall as the key grows, so a search over the logits' ordered bit patterns finds the cut; one pass over a row
measures LANES keys at once.

Top-p drops some of the tokens that equal its cut, as transformers' processor does: by ascending index, it drops tokens
while the mass up to the token, from the smallest logit on, is at most (1 - p) * mass. The number dropped follows from
the mass above the cut and the weight of one token. If it is not 0, a further pass counts the tokens at the cut in each
tile, and `settle` looks for `first` in the right tile.

    scan    [row, part]   largest logit of PART tokens, its index, and its mass
    narrow  [row, group]  take in the last pass's sums, then measure the next keys in GROUP tiles (ROUNDS launches);
                          the first opens the search with bounds from the parts' maxima, narrow ones for peaked rows
    settle  [row]         end the searches that are still open, and write the thresholds

Parts with a maximum below the search are not read again, so passes over peaked rows cost little more than their launch.
A search's first two passes split keys evenly by value, later ones by bit pattern, so a search ends after a few passes
for any logits.

| name     | shape, dtype                   | meaning                                                                 |
|---|---|---|
| x        | [R, V] any float               | row b * N + n: the logits after node n of sequence b                    |
| scans    | [R, P] f32, int32, f32         | per part: maximum, its first index, mass relative to it                 |
| facts    | [R, 8] f32                     | top, scale = log2(e) / temperature, top_k, top_p, min_p, only, 1 - top_p |
| searches | [ROUNDS + 1, R, 8] int32       | stage, stage after it, passes, low, high, base, mass, dropped           |
| measures | [ROUNDS, R, G, LANES] f32      | per group: count or mass above each key; or per tile: count at the cut |
| thresholds | [R, 4] f32                   | top, cut, 1 / mass, only                                                |

`only` holds the bits of an int32: the token of a distribution that is an argmax, or -1 - first. A search's `low` is a
key below the answer, `high` one not below it. `passes` counts the passes of the stage; at the end it is the number of
the round that counted the tokens at the cut (from 1 on; 0: none did).

Numerics: fp32, sums in a fixed order. The number of tokens dropped at the cut is computed as transformers does on a
CPU, from probabilities in fp32. It equals the reference's wherever these sums are exact, for example when all kept
tokens tie. Elsewhere a token differs only if its sum lies within rounding of 1 - top_p, relative to the row's mass. A
row with a NaN or +inf has no distribution: top is NaN, and a token drawn from it is in range but otherwise unspecified.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.sampling import SamplingTensors, check_logits, check_params
from eagle_triton.ops.views import Matrix, Vector, view
from eagle_triton.runtime.launch import launch
from eagle_triton.runtime.overlap import can_overlap, early_start, prefer_shared_memory

_LOG2E = tl.constexpr(1.4426950408889634)
_NOWHERE = tl.constexpr(2**31 - 1)
_COUNT, _MASS, _TOTAL, _TIES, _DONE = (tl.constexpr(stage) for stage in range(5))
_KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # low bits that are always zero in fp32


class Settings(NamedTuple):
    """Launch settings of one vocabulary size."""

    part: int  # tokens of a part
    tile: int  # tokens measured at once, at most `part`
    group: int = 8  # tiles per program of a pass, at most `lanes`
    scan_parts: int = 1  # per program of the scan
    lanes: int = 8
    rounds: int = 4
    settle_tile: int = 4096
    settle_warps: int = 16

    def parts(self, vocabulary: int) -> int:
        return triton.cdiv(vocabulary, self.part)


def settings(vocabulary: int) -> Settings:
    """The same for all devices. On one H200, [60, 128256] bf16: scan of 2048 tokens 10.3 µs (1024: 12.0, 4096: 11)."""
    width = max(16, triton.next_power_of_2(vocabulary))
    tile = min(1024, width)
    return Settings(part=min(2048, width), tile=tile, group=min(8, width // tile), settle_tile=min(4096, width))


class Scans(NamedTuple):
    """The results of the scan for each part of a row, all [R, P]."""

    peaks: Tensor
    places: Tensor
    masses: Tensor | None


class Filters(NamedTuple):
    """The filters of a distribution, all [B].

    Kernels take them as separate arguments, because do_not_specialize_on_alignment does not reach into a view.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Search(NamedTuple):
    """The state of a row's search, in registers; see the module."""

    stage: Any
    then: Any
    passes: Any
    low: Any
    high: Any
    base: Any
    mass: Any
    dropped: Any


# --------------------------------------------------------------------------------------------- keys and weights


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """An int32 that orders like x; -0 equals +0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The float that has this key."""
    wide = key << SHIFT
    bits = tl.where(key >= 0, wide, (wide | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def token_weight(thresholds, x, index, min_p, scale):
    """Weights of tokens `index` with logits x under the thresholds at `thresholds`."""
    weight = tl.exp2((x - tl.load(thresholds)) * scale)
    cut, only = tl.load(thresholds + 1), tl.load(thresholds + 3).to(tl.int32, bitcast=True)
    kept = (x > cut) | ((x == cut) & (index >= -1 - only))
    weight = tl.where(kept & (weight >= min_p), weight, 0.0)
    return tl.where(only < 0, weight, (index == only).to(tl.float32))


@triton.jit
def scale_of(temperature):
    return _LOG2E / tl.where(temperature > 0, temperature, 1.0)


# --------------------------------------------------------------------------------------------------------- scan


@triton.jit
def scan_parts(row, part_block, x, temperature_ptr, scans, nodes, vocabulary, PART: tl.constexpr, PARTS: tl.constexpr):
    """Store the maximum of each of PARTS parts of row `row` (int64), its first index (a NaN counts as largest), and
    with temperatures the part's mass relative to it."""
    part = part_block * PARTS + tl.arange(0, PARTS)
    index = part[:, None] * PART + tl.arange(0, PART)[None, :]
    inside = index < vocabulary
    place_x = x.ptr + row * x.row + index * x.item
    logit = tl.load(place_x, mask=inside, other=float("-inf")).to(tl.float32)
    y = tl.where(logit == logit, logit, float("inf"))
    peak = tl.max(y, 1)
    place = tl.min(tl.where(y == peak[:, None], index, _NOWHERE), 1)
    if tl.max(peak, 0) == float("inf"):  # rare, so it is read again rather than kept in registers
        again = tl.load(place_x, mask=inside, other=0.0).to(tl.float32)
        first_nan = tl.min(tl.where(again != again, index, _NOWHERE), 1)
        peak = tl.where(first_nan < _NOWHERE, float("nan"), peak)
        place = tl.where(first_nan < _NOWHERE, first_nan, place)
    parts = tl.cdiv(vocabulary, PART)
    slot = row * parts + part
    tl.store(scans.peaks + slot, peak, mask=part < parts)
    tl.store(scans.places + slot, place, mask=part < parts)
    if temperature_ptr is not None:
        scale = scale_of(tl.load(temperature_ptr + row // nodes))
        top = tl.where(peak == float("-inf"), 0.0, peak)  # a part of -inf has mass 0, not NaN
        tl.store(scans.masses + slot, tl.sum(tl.exp2((logit - top[:, None]) * scale), 1), mask=part < parts)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "nodes"])
def scan_kernel(
    x,
    temperature_ptr,
    scans,
    nodes,
    vocabulary,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Grid (R, part blocks): a program scans PARTS parts of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    scan_parts(row, tl.program_id(1), x, temperature_ptr, scans, nodes, vocabulary, PART, PARTS)


@triton.jit
def merge_peaks(peaks, places, axis: tl.constexpr):
    """The maximum and its first index over parts: peaks, places [.., P] along `axis`; absent parts are (-inf, 2^31 -
    1)."""
    nan = peaks != peaks
    y = tl.where(nan, float("inf"), peaks)
    peak = tl.max(y, axis)
    broken = tl.max(nan.to(tl.int32), axis)
    hit = tl.where(tl.expand_dims(broken, axis) > 0, nan, y == tl.expand_dims(peak, axis))
    place = tl.min(tl.where(hit, places, _NOWHERE), axis)
    return tl.where(broken > 0, float("nan"), peak), place


# ------------------------------------------------------------------------------------------------------- search


@triton.jit
def _load_search(place):
    base = tl.load(place + 5).to(tl.float32, bitcast=True)
    mass = tl.load(place + 6).to(tl.float32, bitcast=True)
    stage, then, passes = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    return Search(stage, then, passes, tl.load(place + 3), tl.load(place + 4), base, mass, tl.load(place + 7))


@triton.jit
def _store_search(place, search):
    tl.store(place, search.stage)
    tl.store(place + 1, search.then)
    tl.store(place + 2, search.passes)
    tl.store(place + 3, search.low)
    tl.store(place + 4, search.high)
    tl.store(place + 5, search.base.to(tl.int32, bitcast=True))
    tl.store(place + 6, search.mass.to(tl.int32, bitcast=True))
    tl.store(place + 7, search.dropped)


@triton.jit
def _keys(facts, passes, low, high, vocabulary, SHIFT: tl.constexpr, LANES: tl.constexpr):
    """LANES ascending keys: low, then keys strictly between low and high (low + 1 if there are none)."""
    lane = tl.arange(0, LANES)
    # Tokens below `tail` have less than (1 - top_p) / 2 of the mass together, so a top-p search ends above it.
    share = tl.maximum(tl.load(facts + 6), 1e-7)
    tail = tl.load(facts) + (tl.log2(share / vocabulary) - 1) / tl.load(facts + 1)
    bottom = tl.maximum(value_of(low, SHIFT), tail)
    by_value = key_of(bottom + (value_of(high, SHIFT) - bottom) * (lane.to(tl.float32) / LANES), SHIFT)
    by_key = low + ((high.to(tl.int64) - low) * lane // LANES).to(tl.int32)
    key = tl.maximum(tl.minimum(tl.where(passes < 2, by_value, by_key), high - 1), low + 1)
    return tl.where(lane == 0, low, key)


@triton.jit
def _stage_after(stage, then, min_p):
    """The next stage: the second filter if there is one, otherwise the sum of kept weights, unless the mass search has
    just measured that."""
    return tl.where(then < _TOTAL, then, tl.where((stage == _COUNT) | (min_p > 0), _TOTAL, _DONE))


@triton.jit
def _weight_at(facts, key, SHIFT: tl.constexpr):
    """The weight of a token with this key."""
    return tl.exp2((value_of(key, SHIFT) - tl.load(facts)) * tl.load(facts + 1))


@triton.jit
def _dropped_at_cut(share, mass, base, weight):
    """How many tokens that equal the cut top-p drops. Each has this weight, `mass` includes all of them, and `share` is
    1 - top_p. As in transformers, probabilities are rounded to fp32 and added in fp64, and so are their sums."""
    below, each = tl.div_rn(tl.maximum(base - mass, 0.0), base), tl.div_rn(weight, base)
    guess = (share - below) / each
    guess = tl.floor(tl.where(guess > 0, tl.minimum(guess, 1e9), 0.0))  # 0 where it is NaN
    one_more = (below.to(tl.float64) + (guess + 1).to(tl.float64) * each.to(tl.float64)).to(tl.float32) <= share
    too_many = (below.to(tl.float64) + guess.to(tl.float64) * each.to(tl.float64)).to(tl.float32) > share
    guess = tl.where(one_more, guess + 1, tl.where(too_many, guess - 1, guess))
    most = tl.floor(mass / weight + 0.5) - 1  # if no token lies above the cut, one stays
    return tl.where(each > 0, tl.maximum(tl.minimum(guess, most), 0.0), 0.0).to(tl.int32)


@triton.jit
def _advance(facts, search, measured, vocabulary, SHIFT: tl.constexpr, LANES: tl.constexpr):
    """Take a pass's sums [LANES] into the search: keep the interval where they cross the target."""
    stage, then, passes, low, high, base, mass, dropped = search
    lane = tl.arange(0, LANES)
    keys = _keys(facts, passes, low, high, vocabulary, SHIFT, LANES)
    base = tl.where(base < 0, tl.sum(tl.where(lane == 0, measured, 0.0), 0), base)
    target = tl.where(stage == _COUNT, tl.load(facts + 2), tl.load(facts + 3) * base)
    below = (measured < target) & (lane > 0)
    upper = tl.min(tl.where(below, keys, high), 0)
    lower = tl.max(tl.where(below, low, keys), 0)
    at_lower = tl.min(tl.where(below, float("inf"), measured), 0)
    total = stage == _TOTAL
    found = total | (upper - lower.to(tl.int64) <= 1)
    weight = _weight_at(facts, tl.where(total, low + 1, upper), SHIFT)  # of a token at the cut
    if found & (stage == _MASS):
        dropped = _dropped_at_cut(tl.load(facts + 6), at_lower, base, weight)
    raised = (stage == _COUNT) & (lower > low)
    dropped = tl.where(raised, 0, dropped)  # top-k keeps all that equal its own cut
    at_lower = tl.where(total, tl.sum(tl.where(lane == 0, measured, 0.0), 0), at_lower)
    gone = tl.where((stage == _COUNT) | (total & (weight < tl.load(facts + 4))), 0.0, weight * dropped)
    mass = tl.where(found, at_lower - gone, mass)
    low = tl.where(total, low, tl.where(found, upper - 1, lower))
    high = tl.where(found, key_of(tl.load(facts), SHIFT), upper)
    base = tl.where(found, tl.where(stage == _COUNT, -1.0, mass), base)  # -1: the next pass measures it
    passes = tl.where(found, 0, passes + 1)
    next_stage = tl.where(total, _DONE, _stage_after(stage, then, tl.load(facts + 4)))
    next_stage = tl.where((next_stage == _DONE) & (dropped > 0), _TIES, next_stage)
    stage, then = tl.where(found, next_stage, stage), tl.where(found, _TOTAL, then)
    return Search(stage, then, passes, low, high, base, mass, dropped)


@triton.jit
def _open(
    row,
    filters,
    scans,
    facts,
    nodes,
    vocabulary,
    TOP_P_FIRST: tl.constexpr,
    ARGMAX_AT_0: tl.constexpr,
    SHIFT: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Merge a row's parts and open its search between bounds that follow from the parts' maxima. Every program of the
    row does this and writes the same facts."""
    temperature, top_k = tl.load(filters.temperature + row // nodes), tl.load(filters.top_k + row // nodes)
    exact_top_p, min_p = tl.load(filters.top_p + row // nodes), tl.load(filters.min_p + row // nodes)
    top_p, share = exact_top_p.to(tl.float32), (1 - exact_top_p).to(tl.float32)
    part = tl.arange(0, PARTS)
    parts = tl.cdiv(vocabulary, PART)
    peaks = tl.load(scans.peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    places = tl.load(scans.places + row * parts + part, mask=part < parts, other=_NOWHERE)
    masses = tl.load(scans.masses + row * parts + part, mask=part < parts, other=0.0)
    top, place = merge_peaks(peaks, places, 0)
    scale = scale_of(temperature)
    weights = tl.exp2((peaks - top) * scale)
    masses = tl.where(masses > 0, masses * weights, 0.0)
    mass = tl.sum(masses, 0)

    count_on = (top_k > 0) & (top_k < vocabulary)
    count_stage, mass_stage = tl.where(count_on, _COUNT, _TOTAL), tl.where(exact_top_p < 1, _MASS, _TOTAL)
    first, second = count_stage, mass_stage
    if TOP_P_FIRST:
        first, second = mass_stage, count_stage
    stage = _stage_after(tl.full((), _MASS, tl.int32), tl.where(first < _TOTAL, first, second), min_p)
    then = tl.where(first < _TOTAL, second, _TOTAL)
    only = tl.full((), -1, tl.int32)
    if ARGMAX_AT_0:
        stage = tl.where(temperature > 0, stage, _DONE)
        only = tl.where(temperature > 0, only, place)
    tl.store(facts, top)
    tl.store(facts + 1, scale)
    tl.store(facts + 2, top_k.to(tl.float32))
    tl.store(facts + 3, top_p)
    tl.store(facts + 4, min_p)
    tl.store(facts + 5, only.to(tl.float32, bitcast=True))
    tl.store(facts + 6, share)
    tl.debug_barrier()  # _keys reads the facts

    low, high = key_of(tl.full((), float("-inf"), tl.float32), SHIFT), key_of(top, SHIFT)
    if stage < _TOTAL:
        target = tl.where(stage == _COUNT, top_k.to(tl.float32), top_p * mass)
        least = tl.where(stage == _COUNT, 1.0, weights)[None, :]  # of a part with a maximum above the key
        most = tl.where(stage == _COUNT, PART * 1.0, masses)[None, :]
        lane = tl.arange(0, LANES)
        for _ in tl.static_range(2):
            keys = _keys(facts, 0, low, high, vocabulary, SHIFT, LANES)
            passed = (peaks[None, :] > value_of(keys, SHIFT)[:, None]) & (part < parts)[None, :]
            enough = tl.sum(tl.where(passed, least, 0.0), 1) > target * 1.0001  # beyond rounding
            missed = tl.sum(tl.where(passed, most, 0.0), 1) < target * 0.9999
            low = tl.max(tl.where(enough & (lane > 0), keys, low), 0)
            high = tl.min(tl.where(missed & (lane > 0), keys, high), 0)
    none = tl.full((), 0, tl.int32)
    return Search(stage, then, none, low, high, mass, mass, none)


@triton.jit
def _load_tile(x, first, vocabulary, wanted, TILE: tl.constexpr):
    """TILE logits [1, TILE] of one row from token `first` on, read only if `wanted`."""
    index = (first + tl.arange(0, TILE))[None, :]
    return tl.load(x.ptr + index * x.item, mask=(index < vocabulary) & wanted, other=float("-inf"))


@triton.jit
def _measure(above, x, facts, stage, floors):
    """Add to above [LANES, TILE] the count or mass that x [1, TILE] has over each floor [LANES, 1]."""
    x = tl.maximum(x.to(tl.float32), -3.0e38)  # no NaN or infinity times 0 below
    scale = tl.where((stage == _COUNT) | (stage == _TIES), 0.0, tl.load(facts + 1))
    weight = tl.exp2((x - tl.load(facts)) * scale)
    weight = tl.where(weight >= tl.where(stage == _TOTAL, tl.load(facts + 4), 0.0), weight, 0.0)
    return above + (x > floors).to(tl.float32) * weight


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "nodes"])
def _narrow_kernel(
    x,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    scans,
    facts_ptr,
    searches_ptr,
    measures_ptr,
    nodes,
    vocabulary,
    TOP_P_FIRST: tl.constexpr,
    ARGMAX_AT_0: tl.constexpr,
    ROUND: tl.constexpr,
    SHIFT: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, groups): pass number ROUND of a row's search over GROUP tiles."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, groups = tl.num_programs(0), tl.num_programs(1)
    facts = facts_ptr + row * 8
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ROUND == 0:
        filters = Filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
        search = _open(
            row, filters, scans, facts, nodes, vocabulary, TOP_P_FIRST, ARGMAX_AT_0, SHIFT, PART, PARTS, 2 * LANES
        )
    else:
        search = _next_search(
            facts, searches_ptr, measures_ptr, ROUND - 1, row, rows, groups, vocabulary, SHIFT, GROUPS, LANES
        )
    if group == 0:
        _store_search(searches_ptr + (ROUND * rows + row) * 8, search)
    stage, low = search.stage, search.low
    if stage < _DONE:
        keys = _keys(facts, search.passes, low, search.high, vocabulary, SHIFT, LANES)
        floors = value_of(keys, SHIFT)[:, None]
        # Bit t of `active`: the search has not yet excluded the maximum of tile t's part.
        tile = tl.arange(0, GROUP)
        start = group * GROUP * TILE
        part = (start + tile * TILE) // PART
        parts = tl.cdiv(vocabulary, PART)
        peaks = tl.load(scans.peaks + row * parts + part, mask=part < parts, other=float("-inf"))
        active = tl.sum((peaks > value_of(low, SHIFT)).to(tl.int32) << tile, 0)
        above = tl.zeros((LANES, TILE), tl.float32)
        lane, cut = tl.arange(0, LANES)[:, None], value_of(low + 1, SHIFT)
        x_row = Vector(x.ptr + row * x.row, x.item)
        following = _load_tile(x_row, start, vocabulary, active & 1 > 0, TILE)
        for index in range(GROUP):
            tile_x = following.to(tl.float32)  # the next tile loads while this one is measured
            wanted = (active >> (index + 1)) & 1 > 0
            following = _load_tile(x_row, start + (index + 1) * TILE, vocabulary, wanted, TILE)
            if (active >> index) & 1 > 0:
                if stage == _TIES:  # a lane counts the tokens at the cut in one tile
                    tile_x = tl.where(tile_x == cut, tile_x, float("-inf"))
                    floors = tl.where(lane == index, value_of(low, SHIFT), float("inf"))
                above = _measure(above, tile_x, facts, stage, floors)
        slot = ((ROUND * rows + row) * groups + group) * LANES
        tl.store(measures_ptr + slot + tl.arange(0, LANES), tl.sum(above, 1))


@triton.jit
def _next_search(
    facts,
    searches_ptr,
    measures_ptr,
    ROUND: tl.constexpr,
    row,
    rows,
    groups,
    vocabulary,
    SHIFT: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The search as pass ROUND found it, advanced by that pass's sums."""
    search = _load_search(searches_ptr + (ROUND * rows + row) * 8)
    if search.stage < _DONE:
        group = tl.arange(0, GROUPS)[:, None]
        slot = ((ROUND * rows + row) * groups + group) * LANES + tl.arange(0, LANES)[None, :]
        measured = tl.sum(tl.load(measures_ptr + slot, mask=group < groups, other=0.0), 0)
        if search.stage == _TIES:
            stage, passes = tl.full((), _DONE, tl.int32), tl.full((), ROUND + 1, tl.int32)
            low, high, base, mass = search.low, search.high, search.base, search.mass
            search = Search(stage, search.then, passes, low, high, base, mass, search.dropped)
        else:
            search = _advance(facts, search, measured, vocabulary, SHIFT, LANES)
    return search


@triton.jit
def _skip_tiles(x, start, skip, cut, vocabulary, TILE: tl.constexpr):
    """Move from token `start` over whole tiles while they hold at most `skip` tokens that equal the cut."""
    going = start < vocabulary
    while going:
        index = start + tl.arange(0, TILE)
        tile_x = tl.load(x.ptr + index * x.item, mask=index < vocabulary, other=float("-inf"))
        count = tl.sum((tile_x == cut).to(tl.int32), 0)
        going = count <= skip
        if going:
            start += TILE
            skip -= count
            going = start < vocabulary
    return start, skip


@triton.jit
def _first_at_cut(
    x,
    counts,
    counted,
    cut,
    dropped,
    vocabulary,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The index of the token that equals the cut after `dropped` others; NOWHERE if there are no more. `counts`, if
    they were `counted`, has their number in each tile of SPAN tokens; a group has GROUP tiles in LANES places."""
    start, skip = tl.full((), 0, tl.int32), dropped
    if counted:
        tile = tl.arange(0, COUNTS)
        first = (tile // LANES * GROUP + tile % LANES) * SPAN  # lanes past GROUP count nothing
        count = tl.load(counts + tile, mask=first < vocabulary, other=0.0).to(tl.int32)
        start = tl.min(tl.where(tl.cumsum(count, 0) > skip, first, vocabulary), 0)
        skip -= tl.sum(tl.where(first < start, count, 0), 0)
    start, skip = _skip_tiles(x, start, skip, cut, vocabulary, 4 * TILE)
    start, skip = _skip_tiles(x, start, skip, cut, vocabulary, TILE)
    index = start + tl.arange(0, TILE)
    tied = tl.load(x.ptr + index * x.item, mask=index < vocabulary, other=float("-inf")) == cut
    return tl.min(tl.where(tied & (tl.cumsum(tied.to(tl.int32), 0) > skip), index, _NOWHERE), 0)


@triton.jit
def _settle_kernel(
    x,
    facts_ptr,
    searches_ptr,
    measures_ptr,
    thresholds_ptr,
    groups,
    vocabulary,
    ROUNDS: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,): end a row's search, with further passes over the whole row if needed, and write its thresholds."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    facts = facts_ptr + row * 8
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    search = _next_search(
        facts, searches_ptr, measures_ptr, ROUNDS - 1, row, rows, groups, vocabulary, SHIFT, GROUPS, LANES
    )
    x_row = Vector(x.ptr + row * x.row, x.item)
    while search.stage < _TIES:  # every pass shortens the interval, so this ends
        keys = _keys(facts, search.passes, search.low, search.high, vocabulary, SHIFT, LANES)
        floors = value_of(keys, SHIFT)[:, None]
        above = tl.zeros((LANES, TILE), tl.float32)
        following = _load_tile(x_row, 0, vocabulary, search.stage < _TIES, TILE)
        for first in range(0, vocabulary, TILE):
            tile_x = following
            following = _load_tile(x_row, first + TILE, vocabulary, search.stage < _TIES, TILE)
            above = _measure(above, tile_x, facts, search.stage, floors)
        search = _advance(facts, search, tl.sum(above, 1), vocabulary, SHIFT, LANES)
    cut, only = value_of(search.low + 1, SHIFT), tl.load(facts + 5).to(tl.int32, bitcast=True)
    if search.dropped > 0:
        counted = search.passes > 0
        counts = measures_ptr + (tl.maximum(search.passes - 1, 0) * rows + row) * groups * LANES
        first = _first_at_cut(
            x_row, counts, counted, cut, search.dropped, vocabulary, SPAN, GROUP, LANES, GROUPS * LANES, TILE
        )
        only = -1 - first
    own = thresholds_ptr + row * 4
    tl.store(own, tl.load(facts))
    tl.store(own + 1, cut)
    tl.store(own + 2, tl.where(only < 0, 1.0 / search.mass, 1.0))
    tl.store(own + 3, only.to(tl.float32, bitcast=True))


# ----------------------------------------------------------------------------------------------------- launchers


def scan(logits: Tensor, setting: Settings, temperature: Tensor | None = None) -> Scans:
    """Per row and part of logits [B, N, V]: maximum float32, its index int32 and, given temperatures [B], its mass."""
    _, nodes, vocabulary = logits.shape
    parts = setting.parts(vocabulary)
    x = logits.reshape(-1, vocabulary)
    peaks = torch.empty(len(x), parts, dtype=torch.float32, device=x.device)
    places = torch.empty(len(x), parts, dtype=torch.int32, device=x.device)
    scans = Scans(peaks, places, None if temperature is None else torch.empty_like(peaks))
    launch(scan_kernel, (len(x), triton.cdiv(parts, setting.scan_parts)))(
        view(Matrix, x),
        temperature,
        scans,
        nodes,
        vocabulary,
        PART=setting.part,
        PARTS=setting.scan_parts,
        PDL=can_overlap(x.device),
    )
    return scans


def row_thresholds(name: str, logits: Tensor, params: SamplingTensors, top_p_first: bool, argmax_at_0: bool) -> Tensor:
    """The thresholds of every row, float32 [B * N, 4]. `argmax_at_0`: temperature 0 keeps only the argmax; otherwise it
    counts as 1. Raises ValueError, with `name` in front, if logits or params do not fit."""
    check_logits(name, logits)
    batch, nodes, vocabulary = logits.shape
    check_params(name, params, batch, logits.device)
    setting = settings(vocabulary)
    parts, rows, device = setting.parts(vocabulary), batch * nodes, logits.device
    groups = triton.cdiv(vocabulary, setting.tile * setting.group)
    x = view(Matrix, logits.reshape(-1, vocabulary))
    scans = scan(logits, setting, params.temperature)
    facts = torch.empty(rows, 8, dtype=torch.float32, device=device)
    searches = torch.empty(setting.rounds + 1, rows, 8, dtype=torch.int32, device=device)
    measures = torch.empty(setting.rounds, rows, groups, setting.lanes, dtype=torch.float32, device=device)
    thresholds = torch.empty(rows, 4, dtype=torch.float32, device=device)
    static = {
        "SHIFT": _KEY_SHIFT[logits.dtype],
        "LANES": setting.lanes,
        "GROUP": setting.group,
        "GROUPS": triton.next_power_of_2(groups),
        **early_start(device),
    }
    for index in range(setting.rounds):
        compiled = launch(_narrow_kernel, (rows, groups))(
            x,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            scans,
            facts,
            searches,
            measures,
            nodes,
            vocabulary,
            TOP_P_FIRST=top_p_first,
            ARGMAX_AT_0=argmax_at_0,
            ROUND=index,
            PART=setting.part,
            PARTS=triton.next_power_of_2(parts),
            TILE=setting.tile,
            **static,
        )
        prefer_shared_memory(compiled)
    compiled = launch(_settle_kernel, (rows,))(
        x,
        facts,
        searches,
        measures,
        thresholds,
        groups,
        vocabulary,
        ROUNDS=setting.rounds,
        TILE=setting.settle_tile,
        SPAN=setting.tile,
        **static,
        num_warps=setting.settle_warps,
    )
    prefer_shared_memory(compiled)
    return thresholds
