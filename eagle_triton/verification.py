"""Judging a draft tree: the walks of the verification strategies, and the update of the token sequence.

Greedy: the vocabulary's argmax is taken by a grid of (node, part) programs; one program per sequence merges the parts
and walks. Sampled: filter_thresholds.row_thresholds gives every node's distribution as four numbers, so that [N, V]
probabilities never exist. Target match and top-p: a grid of (node, part) programs takes the argmax of the kept logits
with noise, which is made only in parts where something is kept; then the walk merges as the greedy one does.
Rejection: the walk gathers the children's masses alone, and only the last accepted node's row is read once more, to
draw the final token.

| name       | shape, dtype           | meaning                                                       |
|---|---|---|
| logits     | [B, N, V] any float    | of the target after each node, any strides                    |
| tokens     | [B, N] int64           | the tree's tokens, node 0 the root                            |
| parents    | [B, N] int32           | -1 for the root, else below the node's own index              |
| path       | [B, D + 1] int32       | node indices root .. last accepted, then -1                   |
| accepted   | [B] int32              | drafts accepted                                               |
| next_token | [B] int64              | the correction or bonus token                                 |
| nan        | [B] bool               | whether the sequence's logits hold a NaN                      |
| lengths    | [B] int32              | the root's position                                           |
| depths     | [B, N] int32           | of the nodes, 0 for the root                                  |
| ranks      | [B, N] int32           | tokens that the parent's row has above the node's own         |

Numerics: comparisons in fp32 (exact for every input dtype), ties to the lower token, a NaN counts as the largest
logit. Masses in fp32, the final draw's sums in fp64, every sum in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.reference.sampling import SamplingTensors
from eagle_triton.reference.verification import (
    ERROR,
    LENGTH,
    REPORT_TOKENS,
    STOP,
    Stops,
    check_first_path,
    check_limits,
    check_positioned,
    check_tree,
    check_update,
)
from eagle_triton.runtime.launch import launch
from eagle_triton.runtime.overlap import await_inputs, early_start, overlapped, prefer_shared_memory
from eagle_triton.sampling.draws import (
    choose_chunk,
    choose_token,
    chunk_of,
    coin_of,
    log_exponential,
    uniform_of,
)
from eagle_triton.sampling.filter_thresholds import Settings, merge_peaks, row_thresholds, scale_of, scan, token_weight

_NOWHERE = tl.constexpr(2**31 - 1)
_LOG2E = tl.constexpr(1.4426950408889634)
_STOP, _LENGTH, _ERROR = tl.constexpr(STOP), tl.constexpr(LENGTH), tl.constexpr(ERROR)
_REPORT_TOKENS = tl.constexpr(REPORT_TOKENS)
# Measured on one H200, [60, 128256] bf16 to accepted path: parts of 4096 tokens and 8 warps 11.5 µs, 4 warps 12.0,
# parts of 2048 tokens 12.0 to 12.5.
_GREEDY_PART = 4096  # tokens per program of the argmax
_WALK_WARPS = 8
_DRAW_WARPS = 8
_NOISE_PART = 2048  # tokens per program of the argmax with noise
_NOISE_WARPS = 4
_REACH = tl.constexpr(
    1e-12
)  # noise spans less than 26: a token of a smaller weight than e^-26 never wins over the best
_BY_SLOT = ["temperature_ptr", "min_p_ptr", "seed_ptr", "step_ptr", "tokens_ptr", "parents_ptr", "nan_ptr", "nodes"]
_BY_SLOT += ["lengths_ptr", "depths_ptr"]
"""Arguments whose alignment moves with a batch's slot, or counts nodes: no kernel is compiled anew for it."""


@triton.jit
def follow(target, token, parent, depth, NODES: tl.constexpr, STEPS: tl.constexpr):
    """From the root to the first child whose token is its parent's target, as far as there is one: path [STEPS], how
    many were accepted, and the last of them."""
    node = tl.arange(0, NODES)
    right = token == tl.gather(target, tl.maximum(parent, 0), 0)
    step = tl.arange(0, STEPS)
    path = tl.where(step == 0, 0, -1)
    current = 0
    accepted = 0
    alive = True
    for count in range(1, depth + 1):
        child = tl.min(tl.where(right & (parent == current), node, _NOWHERE), 0)
        alive = alive & (child < _NOWHERE)
        current = tl.where(alive, child, current)
        accepted = tl.where(alive, count, accepted)
        path = tl.where((step == count) & alive, child, path)
    return path, accepted, current


@triton.jit
def greedy_walk(
    batch,
    peaks_ptr,
    places_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    nodes,
    parts,
    depth,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Merge the parts' argmaxes of one sequence's nodes and follow them through its tree."""
    node = tl.arange(0, NODES)
    real = node < nodes
    part = tl.arange(0, PARTS)[None, :]
    slot = (batch.to(tl.int64) * nodes + node[:, None]) * parts + part
    inside = real[:, None] & (part < parts)
    peaks = tl.load(peaks_ptr + slot, mask=inside, other=float("-inf"))
    places = tl.load(places_ptr + slot, mask=inside, other=_NOWHERE)
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn, mask=real, other=-1)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=real, other=-2)
    peak, target = merge_peaks(peaks, places, 1)
    if nan_ptr is not None:
        tl.store(nan_ptr + batch, tl.max((peak != peak).to(tl.int32), 0) > 0)

    path, accepted, current = follow(target, token, parent, depth, NODES, STEPS)
    step = tl.arange(0, STEPS)
    tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
    tl.store(accepted_ptr + batch, accepted)
    tl.store(next_ptr + batch, tl.sum(tl.where(node == current, target, 0), 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_BY_SLOT)
def _greedy_walk_kernel(
    peaks_ptr,
    places_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    nodes,
    parts,
    depth,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    await_inputs(PDL)
    greedy_walk(
        tl.program_id(0),
        peaks_ptr,
        places_ptr,
        tokens_ptr,
        parents_ptr,
        path_ptr,
        accepted_ptr,
        next_ptr,
        nan_ptr,
        nodes,
        parts,
        depth,
        stride_tb,
        stride_tn,
        stride_pb,
        stride_pn,
        NODES,
        PARTS,
        STEPS,
    )


@triton.jit
def _without(weight, index, refused):
    """weight [n] of tokens `index`, 0 for the tokens in `refused` (_NOWHERE: none)."""
    token = tl.min(refused, 0)
    while token < _NOWHERE:
        weight = tl.where(index == token, 0.0, weight)
        refused = tl.where(refused == token, _NOWHERE, refused)
        token = tl.min(refused, 0)
    return weight


@triton.jit
def _refused(token, parent, current, chunk, CHUNK: tl.constexpr):
    """The tokens of a node's children that lie in one chunk."""
    low = chunk * CHUNK
    return tl.where((parent == current) & (token >= low) & (token < low + CHUNK), token.to(tl.int32), _NOWHERE)


@triton.jit(do_not_specialize_on_alignment=_BY_SLOT)
def _sampled_walk_kernel(
    x_ptr,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    step_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    nan_ptr,
    sums_ptr,
    nodes,
    vocabulary,
    chunks,
    depth,
    stride_xr,
    stride_xv,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, chunks): walk one sequence's tree (every chunk the same walk), then sum one chunk of the last accepted
    node's distribution, without and with the tokens of its refused children."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch, chunk = tl.program_id(0), tl.program_id(1)
    node = tl.arange(0, NODES)
    real = node < nodes
    tokens, parents = tokens_ptr + batch * stride_tb, parents_ptr + batch * stride_pb
    token = tl.load(tokens + node * stride_tn, mask=real, other=-1)
    parent = tl.load(parents + node * stride_pn, mask=real, other=-2)
    x_batch = x_ptr + batch.to(tl.int64) * nodes * stride_xr
    thresholds = thresholds_ptr + batch.to(tl.int64) * nodes * 4
    scale, min_p = scale_of(tl.load(temperature_ptr + batch)), tl.load(min_p_ptr + batch)
    seed, counter = tl.load(seed_ptr + batch), tl.load(step_ptr + batch)

    above = tl.maximum(parent, 0)
    known = real & (parent >= 0) & (token >= 0) & (token < vocabulary)
    x = tl.load(x_batch + above.to(tl.int64) * stride_xr + token * stride_xv, mask=known, other=float("-inf"))
    mass = token_weight(thresholds + above * 4, x.to(tl.float32), token, min_p, scale) * tl.load(
        thresholds + above * 4 + 2
    )
    repeated = tl.zeros((NODES,), tl.int32)
    for first in range(0, nodes, PAIRS):  # a token that an earlier sibling holds counts once
        other = first + tl.arange(0, PAIRS)
        other_token = tl.load(tokens + other * stride_tn, mask=other < nodes, other=-1)
        other_parent = tl.load(parents + other * stride_pn, mask=other < nodes, other=-3)
        same = (token[:, None] == other_token[None, :]) & (parent[:, None] == other_parent[None, :])
        earlier = other[None, :] < node[:, None]
        repeated = tl.maximum(repeated, tl.max((same & earlier).to(tl.int32), 1))
    mass = tl.where(known & (repeated == 0), mass, 0.0)
    coin = coin_of(seed, counter, above)

    step = tl.arange(0, STEPS)
    path = tl.where(step == 0, 0, -1)
    current = 0
    accepted = 0
    alive = True
    for count in range(1, depth + 1):
        passed = tl.where(parent == current, mass, 0.0)
        hit = (coin < tl.cumsum(passed, 0)) & (passed > 0)
        child = tl.min(tl.where(hit, node, _NOWHERE), 0)
        alive = alive & (child < _NOWHERE)
        current = tl.where(alive, child, current)
        accepted = tl.where(alive, count, accepted)
        path = tl.where((step == count) & alive, child, path)
    if chunk == 0:
        tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
        tl.store(accepted_ptr + batch, accepted)
        if nan_ptr is not None:
            tops = tl.load(thresholds + node * 4, mask=real, other=0.0)
            tl.store(nan_ptr + batch, tl.max((tops != tops).to(tl.int32), 0) > 0)

    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x_row = x_batch + current.to(tl.int64) * stride_xr  # type: ignore[attr-defined]
    x = tl.load(x_row + index * stride_xv, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    weight = token_weight(thresholds + current * 4, x, index, min_p, scale)
    rest = _without(weight, index, _refused(token, parent, current, chunk, CHUNK))
    slot = (batch * chunks + chunk) * 2
    tl.store(sums_ptr + slot, tl.sum(weight.to(tl.float64), 0))
    tl.store(sums_ptr + slot + 1, tl.sum(rest.to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=_BY_SLOT)
def _final_token_kernel(
    x_ptr,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    step_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    sums_ptr,
    next_ptr,
    nodes,
    vocabulary,
    chunks,
    depth,
    stride_xr,
    stride_xv,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): draw the token after the last accepted node from what its refused children left."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0)
    current = tl.load(path_ptr + batch * (depth + 1) + tl.load(accepted_ptr + batch))
    lane = tl.arange(0, CHUNKS)
    slot = (batch * chunks + lane) * 2
    whole = tl.load(sums_ptr + slot, mask=lane < chunks, other=0.0)
    rest = tl.load(sums_ptr + slot + 1, mask=lane < chunks, other=0.0)
    some_left = tl.sum(rest, 0) > 0  # else rounding refused all mass: draw from the whole distribution
    coin = coin_of(tl.load(seed_ptr + batch), tl.load(step_ptr + batch), nodes)
    chunk, target = choose_chunk(tl.where(some_left, rest, whole), coin)

    node = tl.arange(0, NODES)
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn, mask=node < nodes, other=-1)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=node < nodes, other=-2)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    row = batch.to(tl.int64) * nodes + current
    x = tl.load(x_ptr + row * stride_xr + index * stride_xv, mask=index < vocabulary, other=float("-inf"))
    scale = scale_of(tl.load(temperature_ptr + batch))
    weight = token_weight(thresholds_ptr + row * 4, x.to(tl.float32), index, tl.load(min_p_ptr + batch), scale)
    if some_left:
        weight = _without(weight, index, _refused(token, parent, current, chunk, CHUNK))
    tl.store(next_ptr + batch, choose_token(weight, index, target, vocabulary).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_BY_SLOT)
def _perturb_kernel(
    x_ptr,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    lengths_ptr,
    depths_ptr,
    peaks_ptr,
    scores_ptr,
    places_ptr,
    nodes,
    vocabulary,
    parts,
    stride_xr,
    stride_xv,
    stride_db,
    stride_dn,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, parts): of a part's kept tokens (without thresholds of all) the largest logit, NaN if one is, and the
    largest (logit - that) * scale + noise with its first index. Noise is made where something is kept."""
    await_inputs(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, node = row // nodes, row % nodes
    first = part * PART
    index = first + tl.arange(0, PART)
    x = tl.load(x_ptr + row * stride_xr + index * stride_xv, mask=index < vocabulary, other=float("-inf"))
    x = x.to(tl.float32)
    temperature = tl.load(temperature_ptr + batch)
    scale = scale_of(temperature)
    kept = x > float("-inf")
    if thresholds_ptr is not None:
        weight = token_weight(thresholds_ptr + row * 4, x, index, tl.load(min_p_ptr + batch), scale)
        kept = kept & (weight > _REACH)
    y = tl.where(kept, x, float("-inf"))
    peak = tl.max(y, 0)
    slot = row * parts + part
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    tl.store(peaks_ptr + slot, tl.where(broken, float("nan"), peak))
    if peak > float("-inf"):
        score = tl.where(y == peak, 0.0, (y - peak) * scale)
        if temperature > 0:
            position = tl.load(lengths_ptr + batch) + tl.load(depths_ptr + batch * stride_db + node * stride_dn) + 1
            noise = log_exponential(uniform_of(tl.load(seed_ptr + batch), position, first, PART))
            score -= noise * _LOG2E
        score = tl.where(kept, score, float("-inf"))
        best = tl.max(score, 0)
        tl.store(scores_ptr + slot, best)
        tl.store(places_ptr + slot, tl.min(tl.where(kept & (score == best), index, _NOWHERE), 0))


@triton.jit
def _merge_scores(
    peaks_ptr, scores_ptr, places_ptr, temperature, nodes, parts, NODES: tl.constexpr, PARTS: tl.constexpr
):
    """The token of the best score of each of one sequence's nodes [NODES], 0 if there is none, and whether one of its
    logits is NaN."""
    node = tl.arange(0, NODES)[:, None]
    part = tl.arange(0, PARTS)[None, :]
    slot, inside = node * parts + part, (node < nodes) & (part < parts)
    peaks = tl.load(peaks_ptr + slot, mask=inside, other=float("-inf"))
    kept = peaks > float("-inf")
    scores = tl.load(scores_ptr + slot, mask=kept, other=float("-inf"))
    places = tl.load(places_ptr + slot, mask=kept, other=_NOWHERE)
    y = tl.where(kept, peaks, float("-inf"))
    top = tl.max(y, 1)[:, None]
    total = tl.where(y == top, scores, (y - top) * scale_of(temperature) + scores)
    total = tl.where(kept, total, float("-inf"))
    place = tl.min(tl.where(kept & (total == tl.max(total, 1)[:, None]), places, _NOWHERE), 1)
    nan = tl.max(tl.max((peaks != peaks).to(tl.int32), 1), 0) > 0
    return tl.where(place < _NOWHERE, place, 0), nan


@triton.jit(do_not_specialize_on_alignment=_BY_SLOT)
def _target_walk_kernel(
    temperature_ptr,
    peaks_ptr,
    scores_ptr,
    places_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    nodes,
    parts,
    depth,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): merge the parts of one sequence's nodes, and follow their samples through its tree."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    node, slot = tl.arange(0, NODES), batch * nodes * parts
    target, nan = _merge_scores(
        peaks_ptr + slot,
        scores_ptr + slot,
        places_ptr + slot,
        tl.load(temperature_ptr + batch),
        nodes,
        parts,
        NODES,
        PARTS,
    )
    if nan_ptr is not None:
        tl.store(nan_ptr + batch, nan)
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn, mask=node < nodes, other=-1)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=node < nodes, other=-2)
    path, accepted, current = follow(target, token, parent, depth, NODES, STEPS)
    step = tl.arange(0, STEPS)
    tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
    tl.store(accepted_ptr + batch, accepted)
    tl.store(next_ptr + batch, tl.sum(tl.where(node == current, target, 0), 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_BY_SLOT)
def _rank_kernel(
    x_ptr,
    tokens_ptr,
    parents_ptr,
    ranks_ptr,
    nodes,
    vocabulary,
    stride_xr,
    stride_xv,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,): count the tokens of the parent's row that are better than the node's own; NOWHERE for the root."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    batch, node = row // nodes, row % nodes
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn)
    rank = tl.full((), _NOWHERE, tl.int32)
    if (parent >= 0) & (token >= 0) & (token < vocabulary):
        x_row = x_ptr + (batch * nodes + parent) * stride_xr
        own = tl.load(x_row + token * stride_xv).to(tl.float32)
        better = tl.zeros((CHUNK,), tl.int32)
        for first in range(0, vocabulary, CHUNK):
            index = first + tl.arange(0, CHUNK)
            x = tl.load(x_row + index * stride_xv, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
            better += ((x > own) | ((x == own) & (index < token))).to(tl.int32)
        rank = tl.sum(better, 0)
    tl.store(ranks_ptr + row, rank)


@triton.jit(do_not_specialize_on_alignment=_BY_SLOT)
def _topp_walk_kernel(
    x_ptr,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    peaks_ptr,
    scores_ptr,
    places_ptr,
    ranks_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    nodes,
    vocabulary,
    parts,
    depth,
    window,
    stride_xr,
    stride_xv,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): walk one sequence's tree by the likeliest child that is kept; with ranks also by a window."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    node, slot = tl.arange(0, NODES), batch * nodes * parts
    temperature = tl.load(temperature_ptr + batch)
    target, nan = _merge_scores(
        peaks_ptr + slot, scores_ptr + slot, places_ptr + slot, temperature, nodes, parts, NODES, PARTS
    )
    if nan_ptr is not None:
        tl.store(nan_ptr + batch, nan)
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn, mask=node < nodes, other=-1)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=node < nodes, other=-2)
    known = (parent >= 0) & (token >= 0) & (token < vocabulary)
    above = batch * nodes + tl.maximum(parent, 0)
    x = tl.load(x_ptr + above * stride_xr + token * stride_xv, mask=known, other=float("-inf")).to(tl.float32)
    weight = token_weight(thresholds_ptr + above * 4, x, token, tl.load(min_p_ptr + batch), scale_of(temperature))
    kept = known & (weight > 0)
    x = tl.where(kept, x, float("-inf"))
    if ranks_ptr is not None:
        rank = tl.load(ranks_ptr + batch * nodes + node, mask=node < nodes, other=_NOWHERE)

    step = tl.arange(0, STEPS)
    path = tl.where(step == 0, 0, -1)
    current = 0
    accepted = 0
    alive = True
    for count in range(1, depth + 1):
        allowed = kept & (parent == current)
        best = tl.max(tl.where(allowed, x, float("-inf")), 0)
        child = tl.min(tl.where(allowed & (x == best), node, _NOWHERE), 0)
        if ranks_ptr is not None:
            second = tl.min(tl.where((parent == current) & (rank == 1), node, _NOWHERE), 0)
            look = second
            for _ in range(window):
                look = tl.min(tl.where((parent == look) & (rank == 0), node, _NOWHERE), 0)
            opens = (look < _NOWHERE) & (temperature > 0)
            child = tl.where((child == _NOWHERE) & opens, second, child)
        alive = alive & (child < _NOWHERE)
        current = tl.where(alive, child, current)
        accepted = tl.where(alive, count, accepted)
        path = tl.where((step == count) & alive, child, path)
    tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
    tl.store(accepted_ptr + batch, accepted)
    tl.store(next_ptr + batch, tl.sum(tl.where(node == current, target, 0), 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_BY_SLOT)
def _first_path_kernel(
    parents_ptr,
    path_ptr,
    accepted_ptr,
    nodes,
    depth,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): follow the first child of each node."""
    await_inputs(PDL)
    batch, node = tl.program_id(0), tl.arange(0, NODES)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=node < nodes, other=-2)
    every = tl.zeros((NODES,), tl.int32)
    path, accepted, _ = follow(every, every, parent, depth, NODES, STEPS)
    step = tl.arange(0, STEPS)
    tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
    tl.store(accepted_ptr + batch, accepted)


@triton.jit
def update_one(
    sequence_ptr,
    length_ptr,
    active_ptr,
    tokens_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    stop_ids_ptr,
    limit_ptr,
    exact_ptr,
    report_ptr,
    steps,
    columns,
    stops,
    STEPS: tl.constexpr,
    STOPS: tl.constexpr,
):
    """update_sequence for the one sequence whose rows and values the pointers name. STEPS > D, STOPS >= S."""
    step = tl.arange(0, STEPS)
    length = tl.load(length_ptr)
    active = tl.load(active_ptr) != 0
    nan = tl.load(nan_ptr) != 0
    limit = tl.load(limit_ptr)
    next_token = tl.load(next_ptr)
    accepted = tl.where(active & (nan == 0), tl.load(accepted_ptr), -1)
    given = (step <= accepted) & (step < steps)
    node = tl.load(path_ptr + step, mask=given, other=0)
    token = tl.load(tokens_ptr + node, mask=given, other=-1)

    stop = tl.arange(0, STOPS)
    stop_id = tl.load(stop_ids_ptr + stop, mask=stop < stops, other=-1)
    stopping = tl.max(((token[:, None] == stop_id[None, :]) & given[:, None]).to(tl.int32), 1) > 0
    first_stop = tl.min(tl.where(stopping, step, steps), 0)
    count = accepted + 1
    cut = tl.minimum(tl.minimum(count, first_stop + 1), tl.maximum(limit - length, 0))
    kept = tl.where(tl.load(exact_ptr) != 0, cut, count)
    after = length + kept
    reason = tl.where(first_stop < kept, _STOP, tl.where(after >= limit, _LENGTH, 0))
    reason = tl.where(active, tl.where(nan, _ERROR, reason), 0)

    place = sequence_ptr + length.to(tl.int64) + step
    tl.store(place, token, mask=given & (length + step < columns))
    behind = length + count
    tl.store(sequence_ptr + behind.to(tl.int64), next_token, mask=(count > 0) & (behind < columns))
    tl.store(report_ptr + _REPORT_TOKENS + step, token, mask=step < steps)
    tl.store(report_ptr, accepted.to(tl.int64))
    tl.store(report_ptr + 1, kept.to(tl.int64))
    tl.store(report_ptr + 2, reason.to(tl.int64))
    tl.debug_barrier()  # no warp may still be about to read what follows
    tl.store(length_ptr, after)
    tl.store(accepted_ptr, accepted)
    tl.store(active_ptr, active & (reason == 0))


@triton.jit
def _update_sequence_kernel(
    sequence_ptr,
    lengths_ptr,
    active_ptr,
    tokens_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    stop_ids_ptr,
    limit_ptr,
    exact_ptr,
    report_ptr,
    steps,
    columns,
    stops,
    stride_sb,
    stride_tb,
    stride_pb,
    stride_ib,
    stride_rb,
    STEPS: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    update_one(
        sequence_ptr + batch * stride_sb,
        lengths_ptr + batch,
        active_ptr + batch,
        tokens_ptr + batch * stride_tb,
        path_ptr + batch * stride_pb,
        accepted_ptr + batch,
        next_ptr + batch,
        nan_ptr + batch,
        stop_ids_ptr + batch * stride_ib,
        limit_ptr + batch,
        exact_ptr + batch,
        report_ptr + batch * stride_rb,
        steps,
        columns,
        stops,
        STEPS,
        STOPS,
    )


def verify_greedy(
    logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, *, nan: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree along the target's argmax; see reference.verification.verify_greedy.

    Returns (path [B, D + 1] int32, accepted [B] int32, next token [B] int64) and fills `nan` [B] bool if given.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_tree("verify_greedy", logits, tokens, parents, depth, nan)
    batch, nodes, _ = logits.shape
    part = min(_GREEDY_PART, max(16, triton.next_power_of_2(logits.shape[-1])))
    peaks, places, _ = scan(logits, Settings(part=part, tile=part))
    path, accepted, next_token = _results(batch, depth, logits.device)
    parts = peaks.shape[1]
    overlapped(_greedy_walk_kernel, (batch,), logits.device)(
        peaks,
        places,
        tokens,
        parents,
        path,
        accepted,
        next_token,
        nan,
        nodes,
        parts,
        depth,
        *tokens.stride(),
        *parents.stride(),
        NODES=triton.next_power_of_2(nodes),
        PARTS=triton.next_power_of_2(parts),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=_WALK_WARPS,
    )
    return path, accepted, next_token


def verify_sampling(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    top_p_first: bool = False,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree by sampling each node's continuation; see reference.verification.verify_sampling.

    Arguments and results as verify_greedy; coins come from `params`. Raises ValueError likewise.
    """
    check_tree("verify_sampling", logits, tokens, parents, depth, nan)
    batch, nodes, vocabulary = logits.shape
    thresholds = row_thresholds("verify_sampling", logits, params, top_p_first, argmax_at_0=True)
    path, accepted, next_token = _results(batch, depth, logits.device)
    x, chunk = logits.reshape(-1, vocabulary), chunk_of(vocabulary)
    chunks = triton.cdiv(vocabulary, chunk)
    sums = torch.empty(batch, chunks, 2, dtype=torch.float64, device=logits.device)
    rows = (x, thresholds, params.temperature, params.min_p, params.seed, params.step, tokens, parents)
    sizes = (nodes, vocabulary, chunks, depth, *x.stride(), *tokens.stride(), *parents.stride())
    width, early = triton.next_power_of_2(nodes), early_start(logits.device)
    compiled = launch(_sampled_walk_kernel, (batch, chunks))(
        *rows,
        path,
        accepted,
        nan,
        sums,
        *sizes,
        NODES=width,
        STEPS=triton.next_power_of_2(depth + 1),
        CHUNK=chunk,
        PAIRS=min(width, 64),
        **early,
        num_warps=_DRAW_WARPS,
    )
    prefer_shared_memory(compiled)
    compiled = launch(_final_token_kernel, (batch,))(
        *rows,
        path,
        accepted,
        sums,
        next_token,
        *sizes,
        NODES=width,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
        **early,
        num_warps=_DRAW_WARPS,
    )
    prefer_shared_memory(compiled)
    return path, accepted, next_token


def verify_target_match(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    lengths: Tensor,
    depths: Tensor,
    top_p_first: bool = False,
    filtered: bool = True,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree along samples that do not see it; see reference.verification.verify_target_match.

    Arguments and results as verify_sampling; lengths [B] and depths [B, N] int32 say where the noise stands. filtered:
    False if all filters are off. Raises ValueError likewise.
    """
    name = "verify_target_match"
    check_positioned(name, logits, tokens, parents, depth, params, lengths, depths, nan)
    batch, nodes, _ = logits.shape
    thresholds = row_thresholds(name, logits, params, top_p_first, argmax_at_0=True) if filtered else None
    scores, parts = _perturb(logits, thresholds, params, lengths, depths)
    path, accepted, next_token = _results(batch, depth, logits.device)
    overlapped(_target_walk_kernel, (batch,), logits.device)(
        params.temperature,
        *scores,
        tokens,
        parents,
        path,
        accepted,
        next_token,
        nan,
        nodes,
        parts,
        depth,
        *tokens.stride(),
        *parents.stride(),
        NODES=triton.next_power_of_2(nodes),
        PARTS=triton.next_power_of_2(parts),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=_WALK_WARPS,
    )
    return path, accepted, next_token


def verify_topp(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    lengths: Tensor,
    depths: Tensor,
    top_p_first: bool = False,
    window: int = 0,
    max_candidates: int = 0,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree by any draft that the filters keep, lossy; see reference.verification.verify_topp.

    Arguments and results as verify_target_match; window and max_candidates 0 are off. Raises ValueError likewise.
    """
    check_positioned("verify_topp", logits, tokens, parents, depth, params, lengths, depths, nan)
    check_limits("verify_topp", window, max_candidates)
    batch, nodes, vocabulary = logits.shape
    x, ranks = logits.reshape(-1, vocabulary), None
    strides = (*tokens.stride(), *parents.stride())
    thresholds = row_thresholds("verify_topp", logits, params, top_p_first, argmax_at_0=True)
    if max_candidates:
        best = params._replace(
            top_k=torch.full_like(params.top_k, max_candidates),
            top_p=torch.ones_like(params.top_p),
            min_p=torch.zeros_like(params.min_p),
        )
        floor = row_thresholds("verify_topp", logits, best, False, argmax_at_0=True)[:, 1]
        thresholds[:, 1] = torch.maximum(thresholds[:, 1], floor)
    scores, parts = _perturb(logits, thresholds, params, lengths, depths)
    if window:
        ranks = torch.empty(batch, nodes, dtype=torch.int32, device=logits.device)
        overlapped(_rank_kernel, (len(x),), logits.device)(
            x, tokens, parents, ranks, nodes, vocabulary, *x.stride(), *strides, CHUNK=chunk_of(vocabulary), num_warps=8
        )
    path, accepted, next_token = _results(batch, depth, logits.device)
    overlapped(_topp_walk_kernel, (batch,), logits.device)(
        x,
        thresholds,
        params.temperature,
        params.min_p,
        *scores,
        ranks,
        tokens,
        parents,
        path,
        accepted,
        next_token,
        nan,
        nodes,
        vocabulary,
        parts,
        depth,
        window,
        *x.stride(),
        *strides,
        NODES=triton.next_power_of_2(nodes),
        PARTS=triton.next_power_of_2(parts),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=_WALK_WARPS,
    )
    return path, accepted, next_token


def first_path(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The way down the first child of each node; see reference.verification.first_path.

    parents [B, N] int32. Returns (path [B, D + 1] int32, accepted [B] int32). Raises ValueError likewise.
    """
    check_first_path(parents, depth)
    batch, nodes = parents.shape
    path, accepted, _ = _results(batch, depth, parents.device)
    overlapped(_first_path_kernel, (batch,), parents.device)(
        parents,
        path,
        accepted,
        nodes,
        depth,
        *parents.stride(),
        NODES=triton.next_power_of_2(nodes),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )
    return path, accepted


def update_sequence(
    sequence: Tensor,
    lengths: Tensor,
    active: Tensor,
    tokens: Tensor,
    path: Tensor,
    accepted: Tensor,
    next_token: Tensor,
    nan: Tensor,
    stops: Stops,
    report: Tensor,
) -> None:
    """Commit what verification accepted and see who has finished; see reference.verification.update_sequence.

    Changes sequence [B, C], lengths, active and accepted [B] in place and fills report [B, R]. Raises ValueError if
    shapes, dtypes or devices do not fit.
    """
    check_update(sequence, lengths, active, tokens, path, accepted, next_token, nan, stops, report)
    batch, steps = path.shape
    width = stops.ids.shape[1]
    overlapped(_update_sequence_kernel, (batch,), path.device)(
        sequence,
        lengths,
        active,
        tokens,
        path,
        accepted,
        next_token,
        nan,
        *stops,
        report,
        steps,
        sequence.shape[1],
        width,
        *(value.stride(0) for value in (sequence, tokens, path, stops.ids, report)),
        STEPS=triton.next_power_of_2(steps),
        STOPS=triton.next_power_of_2(width),
        num_warps=1,
    )


def _results(batch: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    path = torch.empty(batch, depth + 1, dtype=torch.int32, device=device)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    return path, accepted, torch.empty(batch, dtype=torch.int64, device=device)


def _perturb(
    logits: Tensor, thresholds: Tensor | None, params: SamplingTensors, lengths: Tensor, depths: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Per row and part of logits [B, N, V]: largest kept logit, best score and its token; and how many parts."""
    _, nodes, vocabulary = logits.shape
    x, part = logits.reshape(-1, vocabulary), min(_NOISE_PART, max(16, triton.next_power_of_2(vocabulary)))
    parts = triton.cdiv(vocabulary, part)
    peaks = torch.empty(len(x), parts, dtype=torch.float32, device=x.device)
    scores, places = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    overlapped(_perturb_kernel, (len(x), parts), x.device)(
        x,
        thresholds,
        params.temperature,
        params.min_p,
        params.seed,
        lengths,
        depths,
        peaks,
        scores,
        places,
        nodes,
        vocabulary,
        parts,
        *x.stride(),
        *depths.stride(),
        PART=part,
        num_warps=_NOISE_WARPS,
    )
    return (peaks, scores, places), parts
