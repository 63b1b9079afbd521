"""The router of a mixture of experts: logits, choice and weights, and the rows of each expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.experts import MAX_ROWS, Routes, Routing, check_route
from eagle_triton.ops.layers.values import contiguous_rows, rounded
from eagle_triton.ops.linear.few_rows import arrivals_of, is_last_to_arrive
from eagle_triton.ops.views import Matrix, Rows, Vector, view
from eagle_triton.runtime.overlap import await_others, let_next_start, overlapped

ROW_TILE = 16  # rows of one product: the tensor cores' minimum, for any number of rows
_EXPERTS = 16  # of one program's logits
_DEPTH = 256  # columns of one split, for any number of rows, so that a row's bits do not change
_ROWS = 4  # of one choosing program: one per warp, where a maximum needs no shared memory
_PLACES = 128  # experts in a row of the tile in which experts are chosen: as many as a warp loads at once
_BLOCK_ROWS, _PADDED_ROWS, _MOST_BLOCKS = tl.constexpr(_ROWS), tl.constexpr(ROW_TILE), tl.constexpr(MAX_ROWS // _ROWS)
_LEAST = tl.constexpr(-(2**31))  # the sort key of an expert that cannot be chosen


class _Scratch(NamedTuple):
    """Data that programs leave for the last one: partials [splits, n, E] fp32 of the logits, words [blocks of rows, E]
    int64 with the rows of each expert, and arrivals [1 + blocks] int32, which are zero between launches."""

    partials: Tensor
    words: Tensor
    arrivals: Tensor


@triton.jit(do_not_specialize=["rows", "slots", "scale", "eps"])
def _route_kernel(
    x,
    weight,
    bias,
    correction,
    scratch,
    routes,
    rows,
    experts,
    depth,
    slots,
    width,
    scale,
    eps,
    DTYPE: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALISED: tl.constexpr,
    ROUND_SCORES: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of experts, splits of K, blocks of rows). A program computes a split of some logits. The last one of
    a block of rows chooses for that block, and the last one of all lists the experts that were hit. A choice is made in
    tiles [BLOCK_G, rows, BLOCK_M] with `width` experts in each BLOCK_M: one group's, if groups are chosen. DTYPE: the
    dtype to which logits are rounded."""
    let_next_start(PDL)
    block, blocks = tl.program_id(2), tl.num_programs(2)
    _store_partial_logits(x, weight, bias, scratch.partials, rows, experts, depth, STEPS, BLOCK_K, BLOCK_E, PDL)
    if is_last_to_arrive(scratch.arrivals + 1 + block, tl.num_programs(0) * tl.num_programs(1)):
        member = tl.arange(0, BLOCK_M)[None, :]
        expert = tl.arange(0, BLOCK_G)[:, None] * width + member
        real = (member < width) & (expert < experts)
        row = block * _BLOCK_ROWS + tl.arange(0, _BLOCK_ROWS)
        there = (row < rows)[None, :, None] & real[:, None, :]
        partials = scratch.partials + row[None, :, None] * experts + expert[:, None, :]
        score = tl.load(partials, mask=there, other=0.0, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            score += tl.load(partials + split * rows * experts, mask=there, other=0.0, cache_modifier=".cg")
        score = rounded(score, DTYPE)
        score = tl.sigmoid(score) if SCORE == "sigmoid" else score
        if ROUND_SCORES:
            score = rounded(score, DTYPE)
        order = score
        if correction is not None:
            if SCORE == "softmax":
                order = _softmax(score, real[:, None, :])
            order += tl.load(correction.ptr + expert * correction.item, mask=real, other=0.0)[:, None, :]
        order = tl.where(there & (order == order), order, float("-inf"))  # a NaN is chosen last, and keeps its weight
        if CHOSEN_GROUPS is not None:
            order = _in_best_groups(order, CHOSEN_GROUPS)
        chosen, value, taken = _best(order, score, expert[:, None, :], there, CHOSEN, BLOCK_J)
        number = tl.arange(0, BLOCK_J)[None, :]
        value = _weights_of(value, score, number < CHOSEN, real[:, None, :], eps, SCORE, RENORMALISED) * scale
        out, mask = row[:, None] * CHOSEN + number, (row < rows)[:, None] & (number < CHOSEN)
        tl.store(routes.experts + out, chosen, mask=mask)
        tl.store(routes.weights + out, value.to(routes.weights.dtype.element_ty), mask=mask)
        words = tl.sum(taken.to(tl.int64) << row[None, :, None], axis=1)
        words, last = _join_words(words, expert, real, scratch, block, blocks, experts)
        if last:
            _list_hit_experts(tl.ravel(words), tl.ravel(expert), routes, slots)


@triton.jit
def _store_partial_logits(
    x,
    weight,
    bias,
    partials_ptr,
    rows,
    experts,
    depth,
    STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store a split of the logits of a block of rows and a tile of experts. The first split has the bias."""
    split, number = tl.program_id(1), tl.arange(0, _PADDED_ROWS)
    row, expert = tl.program_id(2) * _BLOCK_ROWS + number, tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    there, real = ((number < _BLOCK_ROWS) & (row < rows))[:, None], expert < experts
    acc = tl.zeros((_PADDED_ROWS, BLOCK_E), tl.float32)
    if bias is not None:
        own = tl.load(bias.ptr + expert * bias.item, mask=real & (split == 0), other=0.0, cache_modifier=".cg")
        acc += own.to(tl.float32)[None, :]
    w_tiles = ()  # all loads start before the wait
    for step in tl.static_range(STEPS):
        column = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        w_ptrs = weight.ptr + expert[:, None] * weight.row + column[None, :] * weight.item
        mask = real[:, None] & (column < depth)[None, :]
        w_tiles += (tl.load(w_ptrs, mask=mask, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    await_others(PDL)
    for step in tl.static_range(STEPS):
        column = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = there & (column < depth)[None, :]
        x_tile = tl.load(x.ptr + row[:, None] * x.row + column[None, :], mask=mask, other=0.0)
        acc = tl.dot(x_tile.to(w_tiles[step].dtype), w_tiles[step].T, acc, input_precision="ieee")
    out = partials_ptr + (split * rows + row)[:, None] * experts + expert[None, :]
    tl.store(out, acc, mask=there & real[None, :])


@triton.jit
def _in_best_groups(order, CHOSEN_GROUPS: tl.constexpr):
    """order [groups, rows, members], or -inf outside each row's groups with the largest sums of their two best."""
    group, member = tl.arange(0, order.shape[0])[:, None], tl.arange(0, order.shape[2])[None, None, :]
    best = tl.max(order, axis=2)
    first = _lowest(member, order == best[:, :, None], 2)
    both = best + tl.max(tl.where(member == first[:, :, None], float("-inf"), order), axis=2)
    kept = group < 0
    for _ in tl.static_range(CHOSEN_GROUPS):  # padding of the tile comes after all groups and is never kept
        top = tl.max(tl.where(kept, float("-inf"), both), axis=0)
        kept |= group == _lowest(group, (both == top[None, :]) & (kept == 0), 0)[None, :]
    return tl.where(kept[:, :, None], order, float("-inf"))


@triton.jit
def _lowest(index, found, axis: tl.constexpr):
    """The lowest index where `found` is true."""
    return tl.min(tl.where(found, index, 1 << 30), axis=axis)


@triton.jit
def _best(order, score, expert, there, CHOSEN: tl.constexpr, BLOCK_J: tl.constexpr):
    """The best experts of each row by `order`, [rows, BLOCK_J]; their scores; and which experts these are, in the shape
    of `order`.

    Keys and scores are treated as integers, because a warp finds a sum or maximum of integers in one instruction."""
    number = tl.arange(0, BLOCK_J)[None, :]
    key, bits = tl.where(there, _sort_key(order), _LEAST), score.to(tl.int32, bitcast=True)
    chosen = tl.zeros((order.shape[1], BLOCK_J), tl.int32)
    value = tl.zeros((order.shape[1], BLOCK_J), tl.int32)
    for j in tl.static_range(CHOSEN):
        top = tl.max(tl.max(key, axis=0), axis=1)
        equal = key == top[None, :, None]
        first = tl.min(_lowest(expert, equal, 0), axis=1)
        here = equal & (expert == first[None, :, None])
        found = tl.sum(tl.sum(tl.where(here, bits, 0), axis=0), axis=1)
        chosen = tl.where(number == j, first[:, None], chosen)
        value = tl.where(number == j, found[:, None], value)
        key = tl.where(here, _LEAST, key)
    return chosen, value.to(tl.float32, bitcast=True), there & (key == _LEAST)


@triton.jit
def _sort_key(order):
    """Integers in the order of these numbers, all above _LEAST."""
    bits = tl.where(order == 0.0, 0.0, order).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _softmax(logits, real):
    """The softmax of each row of logits [groups, rows, members]."""
    top = tl.max(tl.max(tl.where(real, logits, float("-inf")), axis=0), axis=1)
    every = tl.where(real, tl.exp(logits - top[None, :, None]), 0.0)
    return every / tl.sum(tl.sum(every, axis=0), axis=1)[None, :, None]


@triton.jit
def _weights_of(value, score, taken, real, eps, SCORE: tl.constexpr, RENORMALISED: tl.constexpr):
    """The weights of the chosen experts, from their scores `value` [rows, BLOCK_J] and all scores of a row."""
    if SCORE != "sigmoid":
        top = tl.max(tl.max(tl.where(real, score, float("-inf")), axis=0), axis=1)
        value = tl.where(taken, tl.exp(value - top[:, None]), 0.0)
        if SCORE == "softmax":
            every = tl.where(real, tl.exp(score - top[None, :, None]), 0.0)
            value /= tl.sum(tl.sum(every, axis=0), axis=1)[:, None]
        if RENORMALISED:
            value /= tl.sum(value, axis=1)[:, None]
    elif RENORMALISED:
        value /= tl.sum(tl.where(taken, value, 0.0), axis=1)[:, None] + eps
    return value


@triton.jit
def _join_words(words, expert, real, scratch, block, blocks, experts):
    """To the last block of rows that arrives: (the words with the rows of all blocks, True)."""
    last = blocks == 1
    if blocks > 1:
        tl.store(scratch.words + block * experts + expert, words, mask=real)
        last = is_last_to_arrive(scratch.arrivals, blocks)
        if last:
            other = tl.arange(0, _MOST_BLOCKS)[:, None, None]
            ptrs = scratch.words + other * experts + expert[None, :, :]
            found = tl.load(ptrs, mask=(other < blocks) & real[None, :, :], other=0, cache_modifier=".cg")
            words = tl.sum(found, axis=0)
    return words, last


@triton.jit
def _list_hit_experts(words, expert, routes, slots):
    """Write the experts that have rows, and their words; 0 in unused slots."""
    hit, place = (words != 0).to(tl.int32), tl.arange(0, words.shape[0])
    slot = tl.cumsum(hit, 0) - hit
    tl.store(routes.hit + slot, expert, mask=hit != 0)
    tl.store(routes.rows + slot, words, mask=hit != 0)
    unused = (place >= tl.sum(hit, axis=0)) & (place < slots)
    tl.store(routes.hit + place, tl.zeros_like(expert), mask=unused)
    tl.store(routes.rows + place, tl.zeros_like(words), mask=unused)


def route(x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing) -> Routes:
    """The experts that each row chooses, and their weights.

    x [..., H] of n <= 64 rows, weight [E, H], bias [E], correction [E], added to scores only for the choice. The weight
    may be fp32 if logits are not rounded. Equal scores are ordered by index. Raises ValueError if shapes, dtypes or
    sizes do not fit.
    """
    check_route(x, weight, bias, correction, routing)
    x = contiguous_rows(x)
    (rows, depth), count, chosen = x.shape, len(weight), routing.chosen
    slots = min(count, rows * chosen)
    routes = Routes(
        x.new_empty(rows, chosen, dtype=torch.int32),
        x.new_empty(rows, chosen, dtype=torch.float32 if routing.weights_in_fp32 else x.dtype),
        x.new_empty(slots, dtype=torch.int32),
        x.new_empty(slots, dtype=torch.int64),
    )
    if not rows:
        return routes
    width = count // routing.groups if routing.groups > 1 else min(count, _PLACES)
    splits, blocks, step = triton.cdiv(depth, _DEPTH), triton.cdiv(rows, _ROWS), depth_of_step(weight.dtype)
    scratch = _Scratch(
        x.new_empty(splits, rows, count, dtype=torch.float32),
        x.new_empty(blocks, count, dtype=torch.int64),
        arrivals_of(x.device, 1 + blocks),
    )
    logits = x.dtype if routing.rounded_logits else torch.float32
    overlapped(_route_kernel, (triton.cdiv(count, _EXPERTS), splits, blocks), x.device)(
        Rows.of(x),
        view(Matrix, weight),
        view(Vector, bias),
        view(Vector, correction),
        scratch,
        routes,
        rows,
        count,
        depth,
        slots,
        width,
        routing.scale,
        routing.eps,
        getattr(tl, str(logits).removeprefix("torch.")),
        routing.score,
        routing.renormalised,
        routing.rounded_scores,
        chosen,
        routing.chosen_groups if routing.chosen_groups < routing.groups else None,
        splits,
        _DEPTH // step,
        step,
        _EXPERTS,
        triton.next_power_of_2(triton.cdiv(count, width)),
        triton.next_power_of_2(width),
        triton.next_power_of_2(chosen),
        num_warps=_ROWS,
    )
    return routes


def depth_of_step(dtype: torch.dtype) -> int:
    """The columns of the router's weight that are multiplied at once."""
    return 32 if dtype.itemsize > 2 else _DEPTH
