"""The products of the chosen experts: gate and up with the activation, and down times the router's weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.experts import ExpertWeight, Routes, check_experts_down, check_experts_swiglu
from eagle_triton.ops.experts.routing import ROW_TILE
from eagle_triton.ops.layers.values import contiguous_rows, rounded
from eagle_triton.ops.views import Cube, Rows, view
from eagle_triton.runtime.fallback import gluon_module
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.float8_weight import BLOCK
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.four_bit_weight import MIDDLE
from eagle_triton.runtime.gpu import compute_capability
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch
from eagle_triton.runtime.mxfp4_weight import Mxfp4Weight
from eagle_triton.runtime.overlap import await_others, early_start, let_next_start, prefer_shared_memory
from eagle_triton.runtime.split_sums import SplitSums


class Settings(NamedTuple):
    """How a product is launched. columns, depth: the tile of an expert's weights. None of it depends on the rows."""

    columns: int
    depth: int
    stages: int = 4
    warps: int = 4


# Measured on one H200, Triton 3.6, bf16, one row (tools/tune_experts.py). Keys are an expert's columns and depth; gate
# and up count as one. The figures are µs of a layer's mixture with its router: with these settings for this product,
# then with the rule for other shapes. gpt-oss-20b takes 56.9 by the rule, 55.6 at best.
_MEASURED = {
    (768, 2048): Settings(32, 128),  # Qwen3-30B-A3B 28.4; 29.4
    (2048, 768): Settings(64, 128, 3),  # 29.6; 29.7
    (14336, 4096): Settings(32, 64, 3),  # Mixtral-8x7B 217; 231
    (4096, 14336): Settings(32, 128, 6),  # 208; 231
}


FOUR_BITS = (Mxfp4Weight, FourBitExpertWeight)


def settings_of(
    dtype: torch.dtype, columns: int, depth: int, chosen: int, kind: type = Tensor, both: bool = False
) -> Settings:
    """The settings of products [columns, depth] of `chosen` experts per row. both: of gate and up. kind: the weight's
    type. Unmeasured settings fit any device."""
    stages = 4 if dtype.itemsize <= 2 else 2
    # Depth and height must fit _in_tensor_cores_order.
    if kind in FOUR_BITS and not both and stages > 2:
        return Settings(128, 128, stages, warps=8)
    if kind in FOUR_BITS:
        return Settings(32 if both else 64, 128, stages)
    if kind is Float8ExpertWeight:  # six stages: Mixtral's down 204 us a layer instead of 222, Qwen3-30B-A3B the same
        return Settings(32 if both else 64, 64, 6 if stages > 2 else stages)
    if dtype.itemsize > 2:
        return Settings(32, 64, stages)
    rule = Settings(64 if chosen * triton.cdiv(columns, 64) >= _PROGRAMS else 32, 64, stages)
    return _MEASURED.get((columns, depth), rule)


_PROGRAMS = 112  # for one row; with fewer programs, tiles get smaller
_BLOCK = tl.constexpr(BLOCK)
_MIDDLE = tl.constexpr(MIDDLE)


class _Slot(NamedTuple):
    """16 rows of one expert. exists: whether each exists. remaining: how many rows there are from these on. place: the
    expert's place among those that a row chose, for rows that exist."""

    expert: int
    remaining: int
    row: tl.tensor
    exists: tl.tensor
    place: tl.tensor


@triton.jit
def _slot_of(slot, group, routes, CHOSEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr):
    """Rows BLOCK_M * group and following of the expert of a slot, as a _Slot."""
    expert, word = tl.load(routes.hit + slot), tl.load(routes.rows + slot)
    bit = tl.arange(0, 64)
    member = ((word >> bit) & 1).to(tl.int32)
    column = tl.cumsum(member, 0) - member - group * BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    mine = (column[None, :] == offs[:, None]) & (member != 0)[None, :]
    row = tl.sum(tl.where(mine, bit[None, :], 0), axis=1)
    remaining = tl.sum(member, axis=0) - group * BLOCK_M
    exists = offs < remaining
    place = tl.arange(0, BLOCK_J)[None, :]
    choice = tl.load(routes.experts + row[:, None] * CHOSEN + place, mask=exists[:, None] & (place < CHOSEN), other=-1)
    return _Slot(expert, remaining, row, exists, tl.sum(tl.where(choice == expert, place, 0), axis=1))


@triton.jit
def _multiply(
    x_ptrs,
    exists,
    weight,
    scales,
    zeros,
    expert,
    columns,
    loaded,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """[BLOCK_N, rows]: the expert's weights in these columns times rows of x, in fp32.

    columns: their numbers, and whether each exists. loaded: the same in the order of _loaded_rows. scales: None for
    plain weights. Weights in four bits are bytes, with a scale for each GROUP columns of a row: in MXFP4 a byte, for
    integers a float, perhaps with a zero. With GROUP 0 they are in FP8: then scales multiply the sums of a block, so
    weights are not rounded."""
    FP8: tl.constexpr = scales is not None and GROUP == 0
    PARTS: tl.constexpr = 1 if scales is None else 4 if FP8 else 8  # numbers in a word
    column, real = loaded
    w_ptrs = weight.ptr + expert.to(tl.int64) * weight.batch + column.to(tl.int64)[:, None] * weight.row
    scaled = columns if FP8 else loaded  # sums and loaded rows are in different orders
    acc = tl.zeros((BLOCK_N, x_ptrs.shape[1]), tl.float32)
    if scales is not None:
        w_ptrs = w_ptrs.to(tl.pointer_type(tl.int32), bitcast=True)
        scale = _scales_of(scales, expert, scaled, 0, depth, BLOCK_K, GROUP)
        zero = _zeros_of(zeros, expert, loaded, 0, depth, BLOCK_K, GROUP)
    for start in range(0, depth, BLOCK_K):
        offs = start + tl.arange(0, BLOCK_K)
        places = start // PARTS + tl.arange(0, BLOCK_K // PARTS)
        w_mask, x_mask = real[:, None], exists[None, :]
        if not EVEN_K:
            # Written this way, Triton knows that four words share a mask, and loads 16 bytes at a time.
            inside = places < depth if scales is None else places // 4 < depth // (4 * PARTS)
            w_mask, x_mask = w_mask & inside[None, :], x_mask & (offs < depth)[:, None]
        w_tile = tl.load(w_ptrs + places[None, :] * weight.item, mask=w_mask, other=0)
        x_tile = tl.load(x_ptrs + offs[:, None], mask=x_mask, other=0.0)
        if scales is None:
            acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
        else:
            # Triton prefetches only tiles, so the next scales are loaded here.
            next_scale = _scales_of(scales, expert, scaled, start + BLOCK_K, depth, BLOCK_K, GROUP)
            next_zero = _zeros_of(zeros, expert, loaded, start + BLOCK_K, depth, BLOCK_K, GROUP)
            x_tile = _in_word_order(x_tile, PARTS)
            if FP8:
                w_tile = _in_tensor_cores_order(_from_fp8(w_tile, x_tile.dtype), PARTS)
                acc += tl.dot(w_tile, x_tile, input_precision="ieee") * scale[:, None]
            else:
                if scale.dtype == tl.uint8:
                    w_tile = _from_mxfp4(w_tile, scale, x_tile.dtype)
                else:
                    w_tile = _from_int4(w_tile, scale, zero, x_tile.dtype)
                acc = tl.dot(_in_tensor_cores_order(w_tile, PARTS), x_tile, acc, input_precision="ieee")
            scale, zero = next_scale, next_zero
    return acc


@triton.jit
def _scales_of(scales, expert, rows, start, depth, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """The scales of these rows in BLOCK_K columns from `start` on: in four bits [N, groups], FP8 [N]."""
    row, real = rows
    of_expert = scales.ptr + expert.to(tl.int64) * scales.batch
    if GROUP == 0:
        place = row // _BLOCK * scales.row + start // _BLOCK * scales.item
        scale = tl.load(of_expert + place, mask=real & (start < depth), other=0.0).to(tl.float32)
    else:
        groups = _groups_from(start, BLOCK_K, GROUP)
        place = row.to(tl.int64)[:, None] * scales.row + groups[None, :] * scales.item
        scale = tl.load(of_expert + place, mask=real[:, None] & (groups < depth // GROUP)[None, :], other=0)
    return scale


@triton.jit
def _zeros_of(zeros, expert, rows, start, depth, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """The same for zeros in four bits: int32 [N, groups], or without zeros [N, 1], all 8."""
    row, real = rows
    if zeros is None:
        return tl.full((row.shape[0], 1), _MIDDLE, tl.int32)
    else:
        groups = _groups_from(start, BLOCK_K, GROUP)
        place = (row // 8).to(tl.int64)[:, None] * zeros.row + groups[None, :] * zeros.item
        mask = real[:, None] & (groups < depth // GROUP)[None, :]
        words = tl.load(zeros.ptr + expert.to(tl.int64) * zeros.batch + place, mask=mask, other=0)
        return (words >> (row % 8 * 4)[:, None]) & 15


@triton.jit
def _groups_from(start, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """The groups of BLOCK_K columns from `start` on. A larger group may be any multiple of BLOCK_K, or a whole row."""
    COUNT: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    return start // GROUP + tl.arange(0, COUNT)


@triton.jit
def _loaded_rows(scales, BLOCK_N: tl.constexpr):
    """The rows of a product in the order in which their weights are loaded: see _in_tensor_cores_order."""
    row = tl.arange(0, BLOCK_N)
    if scales is not None:
        row = row // 8 % (BLOCK_N // 16) * 16 + row // (BLOCK_N // 2) * 8 + row % 8
    return row


@triton.jit
def _from_mxfp4(words, scale, DTYPE: tl.constexpr):
    """[N, K]: the numbers of int32 words [N, K / 8] times their scales [N, K / 32], exact in bf16 and fp32. In a word,
    number i + 4 follows number i."""
    words = words.to(tl.uint32, bitcast=True)
    # As bits of bf16 they are 2^126 times smaller.
    even = tl.join(
        ((words << 6) & 0x01C001C0) | ((words << 12) & 0x80008000),
        ((words >> 2) & 0x01C001C0) | ((words << 4) & 0x80008000),
    )
    odd = tl.join(
        ((words << 2) & 0x01C001C0) | ((words << 8) & 0x80008000),
        ((words >> 6) & 0x01C001C0) | (words & 0x80008000),
    )
    power = tl.maximum(scale.to(tl.uint32) << 7, 0x0040)  # the least scale is not a normal number
    if DTYPE.is_bf16():
        power = power.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        power = (power << 16).to(tl.float32, bitcast=True)
    return _of_rows(_by_groups(_halves(tl.join(even, odd), DTYPE), scale) * 2.0**126 * power[:, :, None]).to(DTYPE)


@triton.jit
def _from_int4(words, scale, zero, DTYPE: tl.constexpr):
    """[N, K]: the numbers of int32 words [N, K / 8] less their zeros, times their scales [N, groups]; rounded once. In
    a word, number i + 4 follows number i."""
    words = words.to(tl.uint32, bitcast=True)
    both = tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12))
    # As bits of bf16 they are 128 more.
    numbers = _by_groups(_halves((both & 0x000F000F) | 0x43004300, DTYPE), scale)
    numbers -= (zero + 128).to(numbers.dtype)[:, :, None]
    return _of_rows(numbers * scale.to(numbers.dtype)[:, :, None]).to(DTYPE)


@triton.jit
def _by_groups(numbers, scale):
    """Numbers of a tile in any shape as [N, groups, columns], for scales [N, groups]."""
    return tl.reshape(numbers, (scale.shape[0], scale.shape[1], numbers.numel // (scale.shape[0] * scale.shape[1])))


@triton.jit
def _of_rows(numbers):
    """[N, groups, columns] -> [N, K]."""
    return tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] * numbers.shape[2]))


@triton.jit
def _from_fp8(words, DTYPE: tl.constexpr):
    """[N, K]: the numbers of int32 words [N, K / 4], exact. In a word, number i + 2 follows number i."""
    words = words.to(tl.uint32, bitcast=True)
    # As bits of bf16 they are 2^120 times smaller.
    both = tl.join(
        ((words << 4) & 0x07F007F0) | ((words << 8) & 0x80008000),
        ((words >> 4) & 0x07F007F0) | (words & 0x80008000),
    )
    numbers = _halves(both, DTYPE) * 2.0**120
    return tl.reshape(numbers, (words.shape[0], 4 * words.shape[1])).to(DTYPE)


@triton.jit
def _halves(both, DTYPE: tl.constexpr):
    """[..., 2]: the halves of 32-bit words, as bf16, or as fp32 if DTYPE is another dtype."""
    if DTYPE.is_bf16():
        return tl.join(both.to(tl.uint16), (both >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)
    else:
        return tl.join(both << 16, both & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _in_tensor_cores_order(weights, PARTS: tl.constexpr):
    """Converted weights [N, K] with columns in the order of _in_word_order, and rows in the product's order if they
    were loaded in the order of _loaded_rows.

    In this order a thread that has loaded 16 bytes of two rows, four threads to a row, holds what its tensor core
    multiplies, so nothing moves between threads. This needs tiles with 16 rows per warp and 16 * PARTS columns. For
    other tiles Triton moves the weights through shared memory, which takes longer than everything else.
    """
    BLOCK_N: tl.constexpr = weights.shape[0]
    BLOCK_K: tl.constexpr = weights.shape[1]
    parts = tl.reshape(weights, (2, BLOCK_N // 16, 8, BLOCK_K // (16 * PARTS), 4, 4, PARTS // 2, 2))
    return tl.reshape(tl.permute(parts, (1, 0, 2, 3, 5, 6, 4, 7)), (BLOCK_N, BLOCK_K))


@triton.jit
def _in_word_order(x, PARTS: tl.constexpr):
    """x [K, rows] with its columns in the order in which words of PARTS numbers hold the weights' columns.

    In each 16 * PARTS columns, column i + PARTS / 2 * half + PARTS * word + 4 * PARTS * thread is at
    half + 2 * thread + 8 * i + 4 * PARTS * word."""
    BLOCK_K: tl.constexpr = x.shape[0]
    parts = tl.reshape(x, (BLOCK_K // (16 * PARTS), 4, 4, 2, PARTS // 2, x.shape[1]))
    return tl.reshape(tl.permute(parts, (0, 2, 4, 1, 3, 5)), (BLOCK_K, x.shape[1]))


@triton.jit
def _with_bias(value, bias, expert, columns, DTYPE: tl.constexpr):
    """A rounded product, plus the expert's bias, rounded."""
    column, real = columns
    added = tl.load(bias.ptr + expert.to(tl.int64) * bias.row + column, mask=real, other=0.0)
    return rounded(value + added.to(tl.float32)[:, None], DTYPE)


@triton.jit
def _of_gate_and_up(row, first, size, INTERLEAVED: tl.constexpr):
    """The columns of gate and up for the rows of a tile, in turn, and whether each exists."""
    if INTERLEAVED:
        column = 2 * first + row
        return column, column < 2 * size
    else:
        inner = first + row // 2
        return row % 2 * size + inner, inner < size


@triton.jit
def _experts_swiglu_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    routes,
    out_ptr,
    size,
    depth,
    limit,
    alpha,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns, slots): BLOCK_N columns of an expert's inner rows.

    The rows of a weight tile are gate and up in turn; their sums are separated at the end. Without GATED they are up
    alone."""
    await_others(PDL)
    slot = _slot_of(tl.program_id(2), tl.program_id(0), routes, CHOSEN, BLOCK_M, BLOCK_J)
    if slot.remaining > 0:
        first = tl.program_id(1) * BLOCK_N
        HEIGHT: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
        row, loaded_row = tl.arange(0, HEIGHT), _loaded_rows(scales, HEIGHT)
        if GATED:
            columns = _of_gate_and_up(row, first, size, INTERLEAVED)
            loaded = _of_gate_and_up(loaded_row, first, size, INTERLEAVED)
        else:
            columns, loaded = (first + row, first + row < size), (first + loaded_row, first + loaded_row < size)
        x_ptrs = x.ptr + slot.row.to(tl.int64)[None, :] * x.row
        acc = _multiply(
            x_ptrs, slot.exists, weight, scales, zeros, slot.expert, columns, loaded, depth,
            HEIGHT, BLOCK_K, EVEN_K, GROUP,
        )  # fmt: skip
        let_next_start(PDL)
        kind = out_ptr.dtype.element_ty
        value = rounded(acc, kind)
        if bias is not None:
            value = _with_bias(value, bias, slot.expert, columns, kind)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(value, (BLOCK_N, 2, BLOCK_M)), (0, 2, 1)))
        if not GATED:
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
            value *= value
        elif CLAMPED:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
            share = rounded(tl.sigmoid(rounded(gate * alpha, kind)), kind)
            value = rounded(up + 1.0, kind) * rounded(gate * share, kind)
        else:
            value = rounded(gate * tl.sigmoid(gate), kind) * up
        offs = first + tl.arange(0, BLOCK_N)
        out = out_ptr + (slot.row * CHOSEN + slot.place).to(tl.int64)[None, :] * size + offs[:, None]
        tl.store(out, value.to(kind), mask=(offs < size)[:, None] & slot.exists[None, :])


@triton.jit(do_not_specialize=["rows"])
def _experts_down_kernel(
    inner_ptr,
    weight,
    scales,
    zeros,
    bias,
    weights_ptr,
    routes,
    out_ptr,
    rows,
    size,
    depth,
    CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns, slots): BLOCK_N columns of an expert's outputs, times the row's weight."""
    await_others(PDL)
    slot = _slot_of(tl.program_id(2), tl.program_id(0), routes, CHOSEN, BLOCK_M, BLOCK_J)
    if slot.remaining > 0:
        first = tl.program_id(1) * BLOCK_N
        column, row = first + tl.arange(0, BLOCK_N), first + _loaded_rows(scales, BLOCK_N)
        columns, loaded = (column, column < size), (row, row < size)
        pair = slot.row * CHOSEN + slot.place
        x_ptrs = inner_ptr + pair.to(tl.int64)[None, :] * depth
        acc = _multiply(
            x_ptrs, slot.exists, weight, scales, zeros, slot.expert, columns, loaded, depth,
            BLOCK_N, BLOCK_K, EVEN_K, GROUP,
        )  # fmt: skip
        let_next_start(PDL)
        kind = inner_ptr.dtype.element_ty
        value = rounded(acc, kind)
        if bias is not None:
            value = _with_bias(value, bias, slot.expert, columns, kind)
        value *= tl.load(weights_ptr + pair, mask=slot.exists, other=0.0).to(tl.float32)[None, :]
        value = rounded(value, weights_ptr.dtype.element_ty)
        out = out_ptr + (slot.place * rows + slot.row).to(tl.int64)[None, :] * size + column[:, None]
        tl.store(out, value, mask=(column < size)[:, None] & slot.exists[None, :])


class _RoutesParts(NamedTuple):
    """Pointers to the parts of Routes that products read."""

    experts: Tensor
    hit: Tensor
    rows: Tensor

    @classmethod
    def of(cls, routes: Routes) -> _RoutesParts:
        return cls(routes.experts, routes.hit, routes.rows)


def experts_swiglu(
    x: Tensor,
    gate_up: ExpertWeight,
    bias: Tensor | None,
    routes: Routes,
    *,
    interleaved: bool = False,
    clamp: tuple[float, float] | None = None,
    gated: bool = True,
    settings: Settings | None = None,
) -> Tensor:
    """silu(gate(x)) * up(x) by each expert of each row. x [..., H] of n rows, gate_up [E, 2I, H], a tensor or in
    MXFP4, four bits or FP8, bias [E, 2I]; returns [n, k, I]. Without `gated`, relu(up(x))^2 with gate_up [E, I, H].

    The first half of an expert's rows is its gate, or with `interleaved` every other row from the first. clamp
    (limit, alpha): gate and up are bounded by the limit (the gate only from above), and the result is
    (up + 1) * gate * sigmoid(alpha * gate), as in gpt-oss. Every operation rounds to x's dtype.
    """
    check_experts_swiglu(x, gate_up, bias, routes, gated)
    x = contiguous_rows(x)
    (rows, chosen), size, depth = routes.experts.shape, gate_up.shape[1] // (2 if gated else 1), x.shape[1]
    out = x.new_empty(rows, chosen, size)
    if not out.numel():
        return out
    if clamp is not None:  # as torch bounds numbers of x's dtype
        clamp = torch.tensor(clamp[0], dtype=x.dtype, device="cpu").item(), clamp[1]
    if settings is None and gated and (module := _hopper_for(x, gate_up)) is not None:
        found = _RoutesParts.of(routes)
        module.experts_swiglu(x, gate_up, _bias_of(bias), found, out, interleaved=interleaved, clamp=clamp)
    else:
        settings = settings or settings_of(x.dtype, size, depth, chosen, type(gate_up), both=gated)
        limit, alpha = (0.0, 0.0) if clamp is None else clamp
        _launch(
            _experts_swiglu_kernel, size, depth, settings, routes, gate_up,
            Rows.of(x), *_views_of(gate_up), _bias_of(bias), _RoutesParts.of(routes), out,
            size, depth, limit, alpha, chosen, gated, interleaved, clamp is not None,
        )  # fmt: skip
    return out


def experts_down(
    inner: Tensor, down: ExpertWeight, bias: Tensor | None, routes: Routes, *, settings: Settings | None = None
) -> SplitSums:
    """The sum of down(inner) of each row's experts, times their weights: [n, H] as k parts.

    inner [n, k, I], down [E, H, I], a tensor or in MXFP4, four bits or FP8, bias [E, H]. A part is rounded to inner's
    dtype before it is multiplied by its weight, and again after that unless weights are in fp32.
    """
    check_experts_down(inner, down, bias, routes)
    (rows, chosen, depth), size = inner.shape, down.shape[1]
    sums = inner.new_empty(chosen, rows, size, dtype=torch.float32)
    if not sums.numel():
        return SplitSums(sums, inner.dtype)
    if settings is None and (module := _hopper_for(inner.flatten(0, 1), down)) is not None:
        module.experts_down(inner, down, _bias_of(bias), _RoutesParts.of(routes), routes.weights, sums)
    else:
        settings = settings or settings_of(inner.dtype, size, depth, chosen, type(down))
        _launch(
            _experts_down_kernel, size, depth, settings, routes, down,
            inner, *_views_of(down), _bias_of(bias), routes.weights,
            _RoutesParts.of(routes), sums, rows, size, depth, chosen,
        )  # fmt: skip
    return SplitSums(sums, inner.dtype)


def _hopper_for(x: Tensor, weight: ExpertWeight) -> Any:
    """The module of Hopper's kernels, if they multiply rows x [n, K] by such a weight here."""
    if not isinstance(weight, FOUR_BITS) or compute_capability(x.device) != (9, 0):
        return None
    module = gluon_module("eagle_triton.ops.experts.hopper_experts")
    return module if module is not None and module.takes(x, weight) else None


def _views_of(weight: ExpertWeight) -> tuple[Cube, Cube | None, Cube | None]:
    """A weight, or its bytes, their scales and perhaps zeros."""
    if isinstance(weight, Tensor):
        return view(Cube, weight), None, None
    zeros = weight.zeros if isinstance(weight, FourBitExpertWeight) else None
    return view(Cube, weight.bytes), view(Cube, weight.scales), None if zeros is None else view(Cube, zeros)


def _bias_of(bias: Tensor | None) -> Rows | None:
    return None if bias is None else Rows.of(contiguous_rows(bias))


def _launch(
    kernel: triton.JITFunction,
    size: int,
    depth: int,
    settings: Settings,
    routes: Routes,
    weight: ExpertWeight,
    *arguments: object,
) -> None:
    """Launch with a grid of tiles of rows, tiles of `size` columns, and slots."""
    rows, chosen = routes.experts.shape
    grid = (triton.cdiv(rows, ROW_TILE), triton.cdiv(size, settings.columns), len(routes.hit))
    compiled = launch(kernel, grid)(
        *arguments,
        ROW_TILE,
        settings.columns,
        settings.depth,
        triton.next_power_of_2(chosen),
        depth % settings.depth == 0,
        weight.group if isinstance(weight, FOUR_BITS) else 0,
        num_warps=settings.warps,
        num_stages=settings.stages,
        **early_start(routes.experts.device),
        **NO_FMA_FUSION,
    )
    prefer_shared_memory(compiled)
