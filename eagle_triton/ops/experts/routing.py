"""The router of a mixture of experts: logits, choice and weights, and the rows of each expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.experts import Routes, Routing, check_route
from eagle_triton.ops.layers.values import contiguous_rows, load_sum, rounded
from eagle_triton.ops.linear.few_rows import Operand, load_tile
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.overlap import await_inputs, overlapped

ROW_TILE = 16  # rows of one product: the tensor cores' least, and always the same
_EXPERTS, _MOST_SPLITS = 16, 8
_INDICES = tl.constexpr(0x7FFFFFFF)  # the bits of an index
_LEAST = tl.constexpr(-(2**63))  # the sort key of an expert that cannot be chosen


@triton.jit(do_not_specialize=["rows"])
def _router_logits_kernel(
    x,
    weight,
    partials_ptr,
    marks_ptr,
    rows,
    experts,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of experts, splits of K, tiles of rows): partials [splits, rows, experts]. Clears the marks."""
    await_inputs(PDL)
    split, row, expert = tl.program_id(1), tl.program_id(2) * BLOCK_M, tl.program_id(0) * BLOCK_E
    offs_m, offs_e = row + tl.arange(0, BLOCK_M), expert + tl.arange(0, BLOCK_E)
    if (split == 0) & (row == 0):
        tl.store(marks_ptr + 1 + offs_e, tl.zeros((BLOCK_E,), tl.int64), mask=offs_e < experts)
        if expert == 0:
            tl.store(marks_ptr, tl.zeros((), tl.int64))
    steps = tl.cdiv(depth, BLOCK_K)
    per_split = tl.cdiv(steps, tl.num_programs(1))
    mine, router = Operand(x.ptr, None, x.row, rows), Operand(weight.ptr, None, weight.row, experts)
    acc = tl.zeros((BLOCK_E, BLOCK_M), tl.float32)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, steps)):
        w_tile = load_tile(router, expert, step * BLOCK_K, depth, BLOCK_E, BLOCK_K, EVEN_K)
        x_tile = load_tile(mine, row, step * BLOCK_K, depth, BLOCK_M, BLOCK_K, EVEN_K)
        acc = tl.dot(w_tile, x_tile.to(w_tile.dtype).T, acc, input_precision="ieee")
    out = partials_ptr + (split * rows + offs_m)[None, :] * experts + offs_e[:, None]
    tl.store(out, acc, mask=(offs_e < experts)[:, None] & (offs_m < rows)[None, :])


@triton.jit
def _lowest(index, found, axis: tl.constexpr):
    """The lowest index where `found` is true."""
    return tl.min(tl.where(found, index, 1 << 30), axis=axis)


@triton.jit
def _sort_key(order, index):
    """A number for each expert: the larger, the earlier it is chosen. The lower half names the expert."""
    bits = tl.where(order == 0.0, 0.0, order).to(tl.int32, bitcast=True)  # -0.0 is no less than 0.0
    bits = tl.where(bits < 0, bits ^ _INDICES, bits)
    return (bits.to(tl.int64) << 32) | (index ^ _INDICES).to(tl.int64)


@triton.jit(do_not_specialize=["scale", "slots"])
def _choose_kernel(
    partials_ptr,
    bias_ptr,
    correction_ptr,
    marks_ptr,
    experts_ptr,
    weights_ptr,
    hit_ptr,
    rows_ptr,
    experts,
    slots,
    scale,
    KIND: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALISED: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,): a program chooses for one row, and marks it for its experts. The last one lists the marks.

    Experts lie in a tile [groups, experts of a group]. KIND: what logits are rounded to."""
    await_inputs(PDL)
    row, rows = tl.program_id(0), tl.num_programs(0)
    group, member, size = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M), experts // GROUPS
    index = group[:, None] * size + member[None, :]
    there = (group < GROUPS)[:, None] & (member < size)[None, :]
    logits = load_sum(partials_ptr + row * experts + index, rows * experts, there, SPLITS)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + index, mask=there, other=0.0).to(tl.float32)
    score = logits
    if SCORE == "sigmoid":
        score = tl.sigmoid(logits)
    else:
        score = rounded(logits, KIND)
    order = score
    if correction_ptr is not None:
        order += tl.load(correction_ptr + index, mask=there, other=0.0)
    order = tl.where(there & (order == order), order, float("-inf"))  # a NaN is chosen last, and keeps its weight
    if CHOSEN_GROUPS < GROUPS:
        best = tl.max(order, axis=1)
        first = _lowest(index, there & (order == best[:, None]), 1)
        both = best + tl.max(tl.where(index == first[:, None], float("-inf"), order), axis=1)
        out_of_play = group >= GROUPS
        for _ in tl.static_range(CHOSEN_GROUPS):
            top = tl.max(tl.where(out_of_play, float("-inf"), both), axis=0)
            out_of_play |= group == _lowest(group, (both == top) & (out_of_play == 0), 0)
        taken_groups = out_of_play & (group < GROUPS)
        order = tl.where(taken_groups[:, None], order, float("-inf"))
    place = tl.arange(0, BLOCK_J)
    chosen, value = tl.zeros((BLOCK_J,), tl.int32), tl.zeros((BLOCK_J,), tl.float32)
    key = tl.where(there, _sort_key(order, index), _LEAST)
    for j in tl.static_range(CHOSEN):
        top = tl.max(key)
        here = key == top
        chosen = tl.where(place == j, (top & _INDICES).to(tl.int32) ^ _INDICES, chosen)
        value = tl.where(place == j, tl.sum(tl.where(here, score, 0.0)), value)
        key = tl.where(here, _LEAST, key)
    taken = place < CHOSEN
    if SCORE != "sigmoid":
        top = tl.max(tl.max(tl.where(there, score, float("-inf")), axis=1), axis=0)
        value = tl.where(taken, tl.exp(value - top), 0.0)
        if SCORE == "softmax":
            value /= tl.sum(tl.sum(tl.where(there, tl.exp(score - top), 0.0), axis=1), axis=0)
        if RENORMALISED:
            value /= tl.sum(value, axis=0)
    elif RENORMALISED:
        value /= tl.sum(tl.where(taken, value, 0.0), axis=0) + 1e-20
    value *= scale
    tl.store(experts_ptr + row * CHOSEN + place, chosen, mask=taken)
    tl.store(weights_ptr + row * CHOSEN + place, value.to(weights_ptr.dtype.element_ty), mask=taken)
    if rows == 1:  # as many slots as experts
        smaller = ((chosen[None, :] < chosen[:, None]) & taken[None, :]).to(tl.int32)
        slot = tl.sum(smaller, axis=1)
        tl.store(hit_ptr + slot, chosen, mask=taken)
        tl.store(rows_ptr + slot, tl.full((BLOCK_J,), 1, tl.int64), mask=taken)
    else:
        bit = tl.full((BLOCK_J,), 1, tl.int64) << row
        tl.atomic_or(marks_ptr + 1 + chosen, bit, mask=taken, sem="relaxed")
        tl.debug_barrier()  # every thread's marks come before the one thread's release
        if tl.atomic_add(marks_ptr, 1, sem="acq_rel", scope="gpu") == rows - 1:
            _list_hit_experts(marks_ptr + 1, hit_ptr, rows_ptr, experts, slots, BLOCK_E)


@triton.jit
def _list_hit_experts(marks_ptr, hit_ptr, rows_ptr, experts, slots, BLOCK_E: tl.constexpr):
    """The experts that have marks, and their marks."""
    offs = tl.arange(0, BLOCK_E)
    marks = tl.load(marks_ptr + offs, mask=offs < experts, other=0, cache_modifier=".cg")
    hit = (marks != 0).to(tl.int32)
    slot = tl.cumsum(hit, 0) - hit
    tl.store(hit_ptr + slot, offs, mask=hit != 0)
    tl.store(rows_ptr + slot, marks, mask=hit != 0)
    unused = (offs >= tl.sum(hit, axis=0)) & (offs < slots)
    tl.store(hit_ptr + offs, tl.zeros((BLOCK_E,), tl.int32), mask=unused)
    tl.store(rows_ptr + offs, tl.zeros((BLOCK_E,), tl.int64), mask=unused)


def route(x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing) -> Routes:
    """The experts that each row chooses, and their weights.

    x [..., H] of n <= 64 rows, weight [E, H], bias [E], correction [E] float32, added to scores for the choice alone.
    With "sigmoid" the logits are fp32, and the weight may be too; otherwise they are rounded to x's dtype. Equal scores
    go by index. Raises ValueError if shapes, dtypes or sizes do not fit.
    """
    check_route(x, weight, bias, correction, routing)
    x, weight = contiguous_rows(x), contiguous_rows(weight)
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
    splits, depth_tile = splits_of(depth), depth_tile_of(weight.dtype)
    partials = x.new_empty(splits, rows, count, dtype=torch.float32)
    marks = x.new_empty(1 + count, dtype=torch.int64)  # how many rows have chosen, and the rows of each expert
    grid = (triton.cdiv(count, _EXPERTS), splits, triton.cdiv(rows, ROW_TILE))
    overlapped(_router_logits_kernel, grid, x.device)(
        Rows.of(x),
        Rows.of(weight),
        partials,
        marks,
        rows,
        count,
        depth,
        ROW_TILE,
        _EXPERTS,
        depth_tile,
        depth % depth_tile == 0,
        num_warps=4,
        num_stages=3,
    )
    overlapped(_choose_kernel, (rows,), x.device)(
        partials,
        None if bias is None else bias.contiguous(),
        None if correction is None else correction.contiguous(),
        marks,
        *routes,
        count,
        slots,
        routing.scale,
        getattr(tl, str(x.dtype).removeprefix("torch.")),
        routing.score,
        routing.renormalised,
        chosen,
        routing.groups,
        routing.chosen_groups,
        splits,
        triton.next_power_of_2(routing.groups),
        triton.next_power_of_2(count // routing.groups),
        triton.next_power_of_2(chosen),
        triton.next_power_of_2(count),
        num_warps=1,  # its maxima then need no shared memory
    )
    return routes


def splits_of(depth: int) -> int:
    """Into how many sums a logit is split: by the width alone, so that it has the same bits for any number of rows."""
    return max(1, min(_MOST_SPLITS, depth // 512))


def depth_tile_of(dtype: torch.dtype) -> int:
    """The columns of the router's weight that one step reads."""
    return 32 if dtype.itemsize > 2 else 128
