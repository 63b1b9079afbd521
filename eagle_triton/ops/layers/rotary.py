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
from eagle_triton.ops.views import CacheLayer, Heads, Pages, view
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


class HeadNorms(NamedTuple):
    """The weights [d] of heads' norms before or after the rotation, or None; and their epsilon."""

    q: Tensor | None
    k: Tensor | None
    eps: float
    v: Tensor | None = None


@triton.jit
def first_columns(half: tl.constexpr, PAIRS: tl.constexpr):
    """The columns of a head's elements that come first in a rotated pair."""
    columns = tl.arange(0, triton.next_power_of_2(half))
    if PAIRS:
        columns = 2 * columns
    return columns


@triton.jit
def rotate_heads(
    row_ptr,
    stride_head,
    stride_split,
    norm_ptr,
    eps,
    first_head,
    head_limit,
    cos,
    sin,
    half: tl.constexpr,
    rest: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    PAIRS: tl.constexpr = False,
    ROUND_TABLES: tl.constexpr = True,
    NORM_LAST: tl.constexpr = False,
):
    """HEADS heads of one row: normed if `norm_ptr` is given; the first 2 half elements rotated unless cos is None.

    NORM_LAST: normed after the rotation. Returns both halves, [HEADS, n] each, and the rest [HEADS, m] (the first half
    again if rest is 0); n and m are powers of two.
    """
    offs_h = first_head + tl.arange(0, HEADS)
    offs_d = tl.arange(0, triton.next_power_of_2(half))
    columns = first_columns(half, PAIRS)
    GAP: tl.constexpr = 1 if PAIRS else half
    mask = (offs_h < head_limit)[:, None] & (offs_d < half)[None, :]
    ptrs = row_ptr + offs_h[:, None] * stride_head + columns[None, :]
    first = rounded(load_sum(ptrs, stride_split, mask, SPLITS), DTYPE)
    second = rounded(load_sum(ptrs + GAP, stride_split, mask, SPLITS), DTYPE)
    third = first
    if rest > 0:
        offs_r = tl.arange(0, triton.next_power_of_2(rest))
        mask = (offs_h < head_limit)[:, None] & (offs_r < rest)[None, :]
        ptrs = row_ptr + offs_h[:, None] * stride_head + 2 * half + offs_r[None, :]
        third = rounded(load_sum(ptrs, stride_split, mask, SPLITS), DTYPE)
    if not NORM_LAST:
        first, second, third = _normed(
            first, second, third, norm_ptr, eps, half, rest, ZERO_CENTRED, ROUND_FIRST, DTYPE, PAIRS
        )
    if cos is not None:
        if ROUND_TABLES:
            left = rounded(first * cos, DTYPE) - rounded(second * sin, DTYPE)
            second = rounded(second * cos, DTYPE) + rounded(first * sin, DTYPE)
        else:
            left = first * cos - second * sin
            second = second * cos + first * sin
        first = left
    if NORM_LAST:
        first, second = rounded(first, DTYPE), rounded(second, DTYPE)
        first, second, third = _normed(
            first, second, third, norm_ptr, eps, half, rest, ZERO_CENTRED, ROUND_FIRST, DTYPE, PAIRS
        )
    return first, second, third


@triton.jit
def _normed(
    first,
    second,
    third,
    norm_ptr,
    eps,
    half: tl.constexpr,
    rest: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The norm of heads in the parts that `rotate_heads` returns; the parts themselves if `norm_ptr` is None."""
    if norm_ptr is not None:
        offs_d = tl.arange(0, triton.next_power_of_2(half))
        columns = first_columns(half, PAIRS)
        GAP: tl.constexpr = 1 if PAIRS else half
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if rest > 0:
            square += tl.sum(third * third, axis=1)
        scale = tl.rsqrt(square / (2 * half + rest) + eps)[:, None]
        weight = load_weight(norm_ptr + columns, offs_d < half, ZERO_CENTRED)[None, :]
        first = rounded(before_weight(first * scale, DTYPE, ZERO_CENTRED, ROUND_FIRST) * weight, DTYPE)
        weight = load_weight(norm_ptr + GAP + columns, offs_d < half, ZERO_CENTRED)[None, :]
        second = rounded(before_weight(second * scale, DTYPE, ZERO_CENTRED, ROUND_FIRST) * weight, DTYPE)
        if rest > 0:
            offs_r = tl.arange(0, triton.next_power_of_2(rest))
            weight = load_weight(norm_ptr + 2 * half + offs_r, offs_r < rest, ZERO_CENTRED)[None, :]
            third = rounded(before_weight(third * scale, DTYPE, ZERO_CENTRED, ROUND_FIRST) * weight, DTYPE)
    return first, second, third


@triton.jit
def rotary_append_head(
    place,
    x,
    cache,
    turn,
    norms,
    out_ptr,
    num_nodes,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    half: tl.constexpr,
    rest: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr = True,
    PAIRS: tl.constexpr = False,
    ROUND_TABLES: tl.constexpr = True,
    temperature=None,
    NORM_LAST: tl.constexpr = False,
):
    """Rotate the query heads of one group and its key, and append key and value to the cache (CacheLayer).

    place: a NodeHead; x: Projected. The last `rest` of a head's 2 half + rest elements are not rotated.
    """
    dim: tl.constexpr = 2 * half + rest
    GROUP: tl.constexpr = triton.next_power_of_2(group)
    offs_d = tl.arange(0, triton.next_power_of_2(half))
    in_half = offs_d < half
    columns = first_columns(half, PAIRS)
    GAP: tl.constexpr = 1 if PAIRS else half
    kind: tl.constexpr = out_ptr.dtype.element_ty
    cos = None
    sin = None
    if turn.inv_freq is not None:
        inv_freq = tl.load(turn.inv_freq + offs_d, mask=in_half, other=0.0).to(tl.float32)
        cos, sin = cos_sin(place.position.to(tl.float32) * inv_freq)
        cos, sin = cos * turn.scaling, sin * turn.scaling
        if ROUND_TABLES:
            cos, sin = rounded(cos, kind), rounded(sin, kind)
        cos, sin = cos[None, :], sin[None, :]

    q_ptr = x.q.ptr + place.batch * x.q.batch + place.node * x.q.row + place.head * group * x.q.head
    first, second, third = rotate_heads(
        q_ptr,
        x.q.head,
        x.split,
        norms.q,
        norms.eps,
        0,
        group,
        cos,
        sin,
        half,
        rest,
        GROUP,
        SPLITS,
        ZERO_CENTRED,
        ROUND_FIRST,
        kind,
        PAIRS,
        ROUND_TABLES,
        NORM_LAST,
    )
    if temperature is not None:
        factor = 1.0 + temperature.beta * tl.log(1.0 + (place.position // temperature.length).to(tl.float32))
        factor = rounded(factor, kind)
        first, second, third = rounded(first, kind) * factor, rounded(second, kind) * factor, third * factor
    offs_g = tl.arange(0, GROUP)
    mask = (offs_g < group)[:, None] & in_half[None, :]
    out = out_ptr + ((place.batch * num_nodes + place.node) * num_kv_heads + place.head) * (group * dim)
    if rest > 0:
        offs_r = tl.arange(0, triton.next_power_of_2(rest))
        in_rest = offs_r < rest
        out_rest = out + offs_g[:, None] * dim + 2 * half + offs_r[None, :]
        tl.store(out_rest, third.to(out_ptr.dtype.element_ty), mask=(offs_g < group)[:, None] & in_rest[None, :])
    out += offs_g[:, None] * dim + columns[None, :]
    tl.store(out, first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + GAP, second.to(out_ptr.dtype.element_ty), mask=mask)

    if x.k is not None:
        head = place.head
        k_ptr = x.k.ptr + place.batch * x.k.batch + place.node * x.k.row
        key_first, key_second, key_third = rotate_heads(
            k_ptr,
            x.k.head,
            x.split,
            norms.k,
            norms.eps,
            head,
            num_kv_heads,
            cos,
            sin,
            half,
            rest,
            1,
            SPLITS,
            ZERO_CENTRED,
            ROUND_FIRST,
            kind,
            PAIRS,
            ROUND_TABLES,
            NORM_LAST,
        )
        mask = in_half[None, :] & place.fits
        stored = cache.ptr.dtype.element_ty
        key = cache.ptr + place.cache_row + head * cache.head + columns[None, :]
        tl.store(key, key_first.to(stored), mask=mask)
        tl.store(key + GAP, key_second.to(stored), mask=mask)
        v_row = x.v.ptr + place.batch * x.v.batch + place.node * x.v.row
        v_ptr = v_row + head * x.v.head
        if norms.v is None:
            value = v_ptr + columns[None, :]
            tl.store(key + cache.side, load_sum(value, x.split, mask, SPLITS).to(stored), mask=mask)
            tl.store(key + cache.side + GAP, load_sum(value + GAP, x.split, mask, SPLITS).to(stored), mask=mask)
        else:
            first, second, value_third = rotate_heads(
                v_row,
                x.v.head,
                x.split,
                norms.v,
                norms.eps,
                head,
                num_kv_heads,
                None,
                None,
                half,
                rest,
                1,
                SPLITS,
                ZERO_CENTRED,
                ROUND_FIRST,
                kind,
                PAIRS,
            )
            tl.store(key + cache.side, first.to(stored), mask=mask)
            tl.store(key + cache.side + GAP, second.to(stored), mask=mask)
        if rest > 0:
            mask = in_rest[None, :] & place.fits
            key = cache.ptr + place.cache_row + head * cache.head + 2 * half + offs_r[None, :]
            tl.store(key, key_third.to(stored), mask=mask)
            if norms.v is None:
                value = v_ptr + 2 * half + offs_r[None, :]
                tl.store(key + cache.side, load_sum(value, x.split, mask, SPLITS).to(stored), mask=mask)
            else:
                tl.store(key + cache.side, value_third.to(stored), mask=mask)


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
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    half: tl.constexpr,
    rest: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUND_TABLES: tl.constexpr,
    NORM_LAST: tl.constexpr,
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
    rotary_append_head(
        place,
        x,
        cache,
        turn,
        norms,
        out_ptr,
        num_nodes,
        num_kv_heads,
        group,
        half,
        rest,
        SPLITS,
        ZERO_CENTRED,
        ROUND_FIRST,
        PAIRS,
        ROUND_TABLES,
        temperature,
        NORM_LAST,
    )


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
    group = heads // num_kv_heads
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
    rest = dim - 2 * half
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
            num_kv_heads,
            group,
            half,
            rest,
            splits,
            zero_centred,
            round_first,
            pairs and turns,
            round_tables,
            norm_last,
            num_warps=1 if dim <= 256 else 4,
        )
    return out
