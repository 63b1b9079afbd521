"""Rotary embedding, and the append to the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.kv_cache import page_rows, row_offset
from eagle_triton.operands.kv_cache import capacity_of
from eagle_triton.operands.layers import check_rotary_append
from eagle_triton.ops.layers.norms import before_weight, load_weight
from eagle_triton.ops.layers.values import load_sum, rounded
from eagle_triton.ops.views import CacheLayer, Heads, Pages, Vector, view
from eagle_triton.runtime.overlap import await_inputs, overlapped
from eagle_triton.runtime.split_sums import SplitSums, total_of


@triton.jit
def cos_sin(angle):
    """Cosine and sine of fp32 angles of any size: fp64 reduction to [-pi/4, pi/4], then Taylor series in fp32."""
    turns = angle.to(tl.float64) * 0.15915494309189535
    quarters = (turns - tl.floor(turns)) * 4.0
    quarter = tl.floor(quarters + 0.5)
    x = ((quarters - quarter) * 1.5707963267948966).to(tl.float32)
    quarter = quarter.to(tl.int32)
    y = x * x
    sin = x * (1.0 + y * (-1.0 / 6 + y * (1.0 / 120 + y * (-1.0 / 5040 + y * (1.0 / 362880)))))
    cos = 1.0 + y * (-0.5 + y * (1.0 / 24 + y * (-1.0 / 720 + y * (1.0 / 40320 + y * (-1.0 / 3628800)))))
    odd = quarter % 2 == 1
    sin, cos = tl.where(odd, cos, sin), tl.where(odd, sin, cos)
    return tl.where((quarter == 1) | (quarter == 2), -cos, cos), tl.where((quarter == 2) | (quarter == 3), -sin, sin)


class Projected(NamedTuple):
    """Queries, and keys and values or None, [B, N, heads, d], or partial sums of them, `split` elements apart."""

    q: Heads
    k: Heads | None
    v: Heads | None
    split: int


class NodeHead(NamedTuple):
    """A key head of one node of a sequence; all int64 but the node. And the node's position.

    cache_row: the offset of the row of its first key head in the cache; fits: whether that row is written.
    """

    node: int
    head: int
    batch: int
    position: int
    cache_row: int
    fits: bool


class Turn(NamedTuple):
    """The rotation of heads: frequencies [r / 2] fp32 or None, and the factor of sine and cosine."""

    inv_freq: Tensor | None
    scaling: float


class Temperature(NamedTuple):
    """Queries are multiplied by 1 + beta * log(1 + position // length)."""

    beta: float
    length: int


@triton.jit
def factor_at(position, temperature, DTYPE: tl.constexpr):
    """What a Temperature multiplies the queries of a position by, rounded to DTYPE."""
    factor = 1.0 + temperature.beta * tl.log(1.0 + (position // temperature.length).to(tl.float32))
    return rounded(factor, DTYPE)


class HeadNorms(NamedTuple):
    """The weights [d] of heads' norms before or after the rotation, or None; and their epsilon."""

    q: Tensor | None
    k: Tensor | None
    eps: float
    v: Tensor | None = None


class Rotation(NamedTuple):
    """How heads are rotated and normed: what a kernel is compiled for.

    `heads` key heads with `group` query heads each. The first 2 `half` elements of a head are rotated, the other `rest`
    are not. splits: of the sums that are read. pairs: rotated elements are neighbours, else `half` apart.
    round_tables: sine and cosine are rounded to the dtype, and with round_terms the terms of the rotation. norm_last:
    heads are normed after the rotation. zero_centred, round_first: see `rms_norm`.
    """

    heads: int
    group: int
    half: int
    rest: int
    splits: int
    pairs: bool = False
    round_tables: bool = True
    norm_last: bool = False
    zero_centred: bool = False
    round_first: bool = True
    round_terms: bool = True


@triton.jit
def _columns(HOW: tl.constexpr):
    """The columns of a head's elements that come first in a rotated pair, and which exist."""
    place = tl.arange(0, triton.next_power_of_2(HOW.half))
    columns = place
    if HOW.pairs:
        columns = 2 * columns
    return columns, place < HOW.half


@triton.jit
def cos_sin_of(position, turn, HOW: tl.constexpr, DTYPE: tl.constexpr):
    """Cosines and sines [1, n] of a node's position."""
    place = tl.arange(0, triton.next_power_of_2(HOW.half))
    inv_freq = tl.load(turn.inv_freq + place, mask=place < HOW.half, other=0.0).to(tl.float32)
    cos, sin = cos_sin(position.to(tl.float32) * inv_freq)
    cos, sin = cos * turn.scaling, sin * turn.scaling
    if HOW.round_tables:
        cos, sin = rounded(cos, DTYPE), rounded(sin, DTYPE)
    return cos[None, :], sin[None, :]


@triton.jit
def rotated_heads(
    rows, split, norm_ptr, eps, first, limit, cos, sin, COUNT: tl.constexpr, DTYPE: tl.constexpr, HOW: tl.constexpr
):
    """COUNT heads of one row from the `first` on: normed if `norm_ptr` is given, rotated unless cos is None.

    rows: a Vector of the row's heads, of `limit`. Returns both halves, [COUNT, n] each, and the rest [COUNT, m] (the
    first half again if there is none); n and m are powers of two.
    """
    half: tl.constexpr = HOW.half
    GAP: tl.constexpr = 1 if HOW.pairs else half
    offs_h = first + tl.arange(0, COUNT)
    columns, in_half = _columns(HOW)
    mask = (offs_h < limit)[:, None] & in_half[None, :]
    ptrs = rows.ptr + offs_h[:, None] * rows.item + columns[None, :]
    left = rounded(load_sum(ptrs, split, mask, HOW.splits), DTYPE)
    right = rounded(load_sum(ptrs + GAP, split, mask, HOW.splits), DTYPE)
    others = left
    if HOW.rest > 0:
        offs_r = tl.arange(0, triton.next_power_of_2(HOW.rest))
        mask = (offs_h < limit)[:, None] & (offs_r < HOW.rest)[None, :]
        ptrs = rows.ptr + offs_h[:, None] * rows.item + 2 * half + offs_r[None, :]
        others = rounded(load_sum(ptrs, split, mask, HOW.splits), DTYPE)
    if not HOW.norm_last:
        left, right, others = _normed(left, right, others, norm_ptr, eps, DTYPE, HOW)
    if cos is not None:
        if HOW.round_tables and HOW.round_terms:
            turned = rounded(left * cos, DTYPE) - rounded(right * sin, DTYPE)
            right = rounded(right * cos, DTYPE) + rounded(left * sin, DTYPE)
        else:
            turned = left * cos - right * sin
            right = right * cos + left * sin
        left = turned
    if HOW.norm_last:
        left, right = rounded(left, DTYPE), rounded(right, DTYPE)
        left, right, others = _normed(left, right, others, norm_ptr, eps, DTYPE, HOW)
    return left, right, others


@triton.jit
def _normed(left, right, others, norm_ptr, eps, DTYPE: tl.constexpr, HOW: tl.constexpr):
    """The norm of heads in the parts that `rotated_heads` returns; the parts themselves if `norm_ptr` is None."""
    if norm_ptr is not None:
        half: tl.constexpr = HOW.half
        GAP: tl.constexpr = 1 if HOW.pairs else half
        columns, in_half = _columns(HOW)
        square = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        if HOW.rest > 0:
            square += tl.sum(others * others, axis=1)
        scale = tl.rsqrt(square / (2 * half + HOW.rest) + eps)[:, None]
        left = _weighted(left * scale, norm_ptr + columns, in_half, DTYPE, HOW)
        right = _weighted(right * scale, norm_ptr + GAP + columns, in_half, DTYPE, HOW)
        if HOW.rest > 0:
            offs_r = tl.arange(0, triton.next_power_of_2(HOW.rest))
            others = _weighted(others * scale, norm_ptr + 2 * half + offs_r, offs_r < HOW.rest, DTYPE, HOW)
    return left, right, others


@triton.jit
def _weighted(scaled, weight_ptrs, mask, DTYPE: tl.constexpr, HOW: tl.constexpr):
    """A norm's last step: its weight."""
    weight = load_weight(weight_ptrs, mask, HOW.zero_centred)[None, :]
    return rounded(before_weight(scaled, DTYPE, HOW.zero_centred, HOW.round_first) * weight, DTYPE)


@triton.jit
def rotary_append_head(place, x, cache, turn, norms, temperature, out_ptr, num_nodes, HOW: tl.constexpr):
    """Rotate the query heads of one group and its key, and append key and value to the cache (CacheLayer).

    place: a NodeHead; x: Projected; turn: a Turn; norms: HeadNorms; temperature: a Temperature or None.
    """
    half: tl.constexpr = HOW.half
    rest: tl.constexpr = HOW.rest
    group: tl.constexpr = HOW.group
    dim: tl.constexpr = 2 * half + rest
    GROUP: tl.constexpr = triton.next_power_of_2(group)
    GAP: tl.constexpr = 1 if HOW.pairs else half
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    columns, in_half = _columns(HOW)
    cos = None
    sin = None
    if turn.inv_freq is not None:
        cos, sin = cos_sin_of(place.position, turn, HOW, DTYPE)

    queries = x.q.ptr + place.batch * x.q.batch + place.node * x.q.row + place.head * group * x.q.head
    left, right, others = rotated_heads(
        Vector(queries, x.q.head), x.split, norms.q, norms.eps, 0, group, cos, sin, GROUP, DTYPE, HOW
    )
    if temperature is not None:
        factor = factor_at(place.position, temperature, DTYPE)
        left, right, others = rounded(left, DTYPE) * factor, rounded(right, DTYPE) * factor, others * factor
    offs_g = tl.arange(0, GROUP)
    mask = (offs_g < group)[:, None] & in_half[None, :]
    out = out_ptr + ((place.batch * num_nodes + place.node) * HOW.heads + place.head) * (group * dim)
    if rest > 0:
        offs_r = tl.arange(0, triton.next_power_of_2(rest))
        in_rest = offs_r < rest
        out_rest = out + offs_g[:, None] * dim + 2 * half + offs_r[None, :]
        tl.store(out_rest, others.to(DTYPE), mask=(offs_g < group)[:, None] & in_rest[None, :])
    out += offs_g[:, None] * dim + columns[None, :]
    tl.store(out, left.to(DTYPE), mask=mask)
    tl.store(out + GAP, right.to(DTYPE), mask=mask)

    if x.k is not None:
        keys = x.k.ptr + place.batch * x.k.batch + place.node * x.k.row
        key = cache.ptr + place.cache_row + place.head * cache.head
        left, right, others = rotated_heads(
            Vector(keys, x.k.head), x.split, norms.k, norms.eps, place.head, HOW.heads, cos, sin, 1, DTYPE, HOW
        )
        store_head(key, left, right, others, place.fits, HOW)
        values = x.v.ptr + place.batch * x.v.batch + place.node * x.v.row
        if norms.v is None:
            value = values + place.head * x.v.head
            mask = in_half[None, :] & place.fits
            left = load_sum(value + columns[None, :], x.split, mask, HOW.splits)
            right = load_sum(value + columns[None, :] + GAP, x.split, mask, HOW.splits)
            others = left
            if rest > 0:
                mask = in_rest[None, :] & place.fits
                others = load_sum(value + 2 * half + offs_r[None, :], x.split, mask, HOW.splits)
        else:
            left, right, others = rotated_heads(
                Vector(values, x.v.head), x.split, norms.v, norms.eps, place.head, HOW.heads, None, None, 1, DTYPE, HOW
            )
        store_head(key + cache.side, left, right, others, place.fits, HOW)


@triton.jit
def store_head(ptr, left, right, others, fits, HOW: tl.constexpr):
    """Write the parts of heads where they fit. ptr, fits: of one head, or [heads, 1]."""
    GAP: tl.constexpr = 1 if HOW.pairs else HOW.half
    stored = ptr.dtype.element_ty
    columns, in_half = _columns(HOW)
    mask = in_half[None, :] & fits
    tl.store(ptr + columns[None, :], left.to(stored), mask=mask)
    tl.store(ptr + GAP + columns[None, :], right.to(stored), mask=mask)
    if HOW.rest > 0:
        offs_r = tl.arange(0, triton.next_power_of_2(HOW.rest))
        tl.store(ptr + 2 * HOW.half + offs_r[None, :], others.to(stored), mask=(offs_r < HOW.rest)[None, :] & fits)


_UNALIGNED = ["table_ptr", "first_row_ptr", "depths_ptr", "stride_tb", "stride_fb", "stride_db", "num_nodes"]


@triton.jit(do_not_specialize=["skip"], do_not_specialize_on_alignment=_UNALIGNED)
def _rotary_append_kernel(
    x,
    cache,
    turn,
    norms,
    temperature,
    out_ptr,
    table_ptr,
    first_row_ptr,
    depths_ptr,
    stride_tb,
    stride_fb,
    stride_db,
    stride_dn,
    skip,
    num_nodes,
    capacity,
    PAGE: tl.constexpr,
    HOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, Hkv, B): one program makes one head of one node.

    Arguments in _UNALIGNED are not part of views, because all fields of a view are compiled for their alignment.
    """
    await_inputs(PDL)
    node, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_row = tl.load(first_row_ptr + batch * stride_fb)
    position = first_row + skip + node
    row = position.to(tl.int64)
    if depths_ptr is not None:
        position = first_row + tl.load(depths_ptr + batch * stride_db + node * stride_dn)
    fits = (row >= 0) & (row < capacity)
    pages = Pages(table_ptr, stride_tb) if table_ptr is not None else None
    place = NodeHead(node, head, batch, position, row_offset(cache, pages, batch, row, fits, PAGE), fits)
    rotary_append_head(place, x, cache, turn, norms, temperature, out_ptr, num_nodes, HOW)


def rotary_append(
    q: Tensor | SplitSums,
    k: Tensor | SplitSums | None,
    v: Tensor | SplitSums | None,
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    *,
    skip: int = 0,
    attention_scaling: float = 1.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: float = 0.0,
    zero_centred: bool = False,
    round_first: bool = True,
    table: Tensor | None = None,
    pairs: bool = False,
    round_tables: bool = True,
    round_terms: bool = True,
    temperature: tuple[float, int] | None = None,
    norm_last: bool = False,
) -> Tensor:
    """Norm (optional), rotate q and k by their positions, and write k and v to the cache. Returns the rotated q.

    See reference.layers.rotary_append. Raises ValueError before anything is written if shapes, dtypes, devices or
    strides do not fit.
    """
    check_rotary_append(q, k, v, cache, first_row, depths, inv_freq, (q_norm, k_norm, v_norm), table, temperature)
    batch, count, heads, dim = q.shape
    num_kv_heads = cache.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    given = (q,) if k is None or v is None else (q, k, v)
    sums = [x.sums for x in given if isinstance(x, SplitSums)]
    splits, stride_split = 1, 0
    if len(sums) == len(given) and len({(len(x), x.stride(0)) for x in sums}) == 1:
        splits, stride_split = len(sums[0]), sums[0].stride(0)
        heads_of = [x[0] for x in sums]
    else:
        heads_of = [total_of(x) for x in given]
    heads_of = [x if x.stride(3) == 1 else x.contiguous() for x in heads_of]
    queries, *own = (Heads(x, *x.stride()[:3]) for x in heads_of)
    keys, values = own or (None, None)
    q_norm, k_norm, v_norm = (None if norm is None else norm.contiguous() for norm in (q_norm, k_norm, v_norm))
    turns = len(inv_freq) > 0
    half = len(inv_freq) if turns else dim // 2
    if out.numel():
        overlapped(_rotary_append_kernel, (count, num_kv_heads, batch), out.device)(
            Projected(queries, keys, values, stride_split),
            view(CacheLayer, cache),
            Turn(inv_freq.contiguous() if turns else None, attention_scaling),
            HeadNorms(q_norm, k_norm, eps, v_norm),
            None if temperature is None else Temperature(*temperature),
            out,
            table,
            first_row,
            depths,
            0 if table is None else table.stride(0),
            first_row.stride(0),
            *((0, 0) if depths is None else depths.stride()),
            skip,
            count,
            capacity_of(cache, table),
            page_rows(cache, table),
            Rotation(
                num_kv_heads,
                heads // num_kv_heads,
                half,
                dim - 2 * half,
                splits,
                pairs and turns,
                round_tables,
                norm_last,
                zero_centred,
                round_first,
                round_terms,
            ),
            num_warps=1 if dim <= 256 else 4,
        )
    return out
