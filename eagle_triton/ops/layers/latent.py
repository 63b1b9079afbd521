"""Append the latent rows of multi-head latent attention, and rotate what its queries rotate."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.kv_cache import page_rows, row_offset
from eagle_triton.operands.kv_cache import capacity_of
from eagle_triton.operands.layers import check_latent_append
from eagle_triton.ops.layers.norms import before_weight, load_row_weight
from eagle_triton.ops.layers.rotary import Rotation, Temperature, Turn, cos_sin_of, factor_at, rotated_heads, store_head
from eagle_triton.ops.layers.values import SplitRows, load_sum, rounded
from eagle_triton.ops.views import CacheLayer, Heads, Pages, Vector, view
from eagle_triton.runtime.overlap import await_inputs, overlapped
from eagle_triton.runtime.split_sums import SplitSums

_UNALIGNED = ["table_ptr", "first_row_ptr", "depths_ptr", "stride_tb", "stride_fb", "depth_strides", "nodes"]


@triton.jit(do_not_specialize=["skip"], do_not_specialize_on_alignment=_UNALIGNED)
def _latent_append_kernel(
    q,
    latents,
    norm_ptr,
    eps,
    cache,
    turn,
    out,
    temperature,
    unrotated,
    table_ptr,
    first_row_ptr,
    depths_ptr,
    stride_tb,
    stride_fb,
    depth_strides,
    skip,
    nodes,
    capacity,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    UNROTATED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEY: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, B): a program appends one node's row and rotates its queries. With a temperature it multiplies them and
    the UNROTATED other elements of each, in place. _UNALIGNED: see rotary.py."""
    await_inputs(PDL)
    node, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first_row = tl.load(first_row_ptr + batch * stride_fb)
    position = first_row + skip + node
    row = position.to(tl.int64)
    if depths_ptr is not None:
        position = first_row + tl.load(depths_ptr + batch * depth_strides[0] + node * depth_strides[1])
    pages = Pages(table_ptr, stride_tb) if table_ptr is not None else None
    fits = (row >= 0) & (row < capacity)
    DTYPE: tl.constexpr = out.ptr.dtype.element_ty
    cos, sin = cos_sin_of(position, turn, KEY, DTYPE)
    HEADS: tl.constexpr = triton.next_power_of_2(QUERIES.group)
    queries = Vector(q.ptr + batch * q.batch + node * q.row, q.head)
    left, right, others = rotated_heads(queries, 0, None, 0.0, 0, QUERIES.group, cos, sin, HEADS, DTYPE, QUERIES)
    out_ptr = out.ptr + batch * out.batch + node * out.row
    head = tl.arange(0, HEADS)[:, None]
    if temperature is not None:
        factor = factor_at(position, temperature, DTYPE)
        left, right, others = rounded(left, DTYPE) * factor, rounded(right, DTYPE) * factor, others * factor
        column = tl.arange(0, triton.next_power_of_2(UNROTATED))[None, :]
        place = unrotated.ptr + batch * unrotated.batch + node * unrotated.row + head * unrotated.head + column
        inside = (head < QUERIES.group) & (column < UNROTATED)
        tl.store(place, (tl.load(place, mask=inside, other=0.0).to(tl.float32) * factor).to(DTYPE), mask=inside)
    store_head(out_ptr + head * out.head, left, right, others, head < QUERIES.group, QUERIES)

    latent_ptr = latents.ptr + (batch * nodes + node) * latents.row
    place = cache.ptr + row_offset(cache, pages, batch, row, fits, PAGE)
    BLOCK: tl.constexpr = triton.next_power_of_2(RANK)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < RANK
    latent = rounded(load_sum(latent_ptr + column, latents.split, inside, KEY.splits), DTYPE)
    scale = tl.rsqrt(tl.sum(latent * latent, axis=1) / RANK + eps)[:, None]
    weight = load_row_weight(norm_ptr, RANK, BLOCK, ZERO_CENTRED)
    normed = before_weight(latent * scale, DTYPE, ZERO_CENTRED, ROUND_FIRST) * weight
    tl.store(place + column, normed.to(cache.ptr.dtype.element_ty), mask=inside & fits)
    key = Vector(latent_ptr + RANK, 0)
    left, right, others = rotated_heads(key, latents.split, None, 0.0, 0, 1, cos, sin, 1, DTYPE, KEY)
    store_head(place + RANK, left, right, others, fits, KEY)


def latent_append(
    q: Tensor,
    latents: Tensor | SplitSums,
    norm: Tensor,
    eps: float,
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    *,
    out: Tensor,
    skip: int = 0,
    attention_scaling: float = 1.0,
    zero_centred: bool = False,
    round_first: bool = True,
    table: Tensor | None = None,
    pairs: bool = False,
    round_tables: bool = True,
    temperature: tuple[float, int] | None = None,
    unrotated: Tensor | None = None,
) -> Tensor:
    """Norm latents and rotate the key beside them, and write both to the cache; rotate q into `out`, which is returned.

    See reference.layers.latent_append. Raises ValueError before anything is written if shapes, dtypes, devices or
    strides do not fit.
    """
    check_latent_append(q, latents, norm, cache, first_row, depths, inv_freq, out, table, temperature, unrotated)
    batch, count, heads, rotated = q.shape
    rank = len(norm)
    rows, splits = SplitRows.of(latents)
    if q.stride(3) != 1:
        q = q.contiguous()
    if out.numel():
        kind = dict(pairs=pairs, round_tables=round_tables)
        overlapped(_latent_append_kernel, (count, batch), out.device)(
            view(Heads, q),
            rows,
            norm.contiguous(),
            eps,
            view(CacheLayer, cache),
            Turn(inv_freq.contiguous(), attention_scaling),
            view(Heads, out),
            None if temperature is None else Temperature(*temperature),
            view(Heads, unrotated),
            table,
            first_row,
            depths,
            0 if table is None else table.stride(0),
            first_row.stride(0),
            (0, 0) if depths is None else depths.stride(),
            skip,
            count,
            capacity_of(cache, table),
            page_rows(cache, table),
            rank,
            0 if unrotated is None else unrotated.shape[3],
            Rotation(1, heads, rotated // 2, 0, 1, **kind),
            Rotation(1, 1, rotated // 2, 0, splits, **kind),
            zero_centred,
            round_first,
            num_warps=4,
        )
    return out
