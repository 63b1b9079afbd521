"""Moving rows of the cache: append new ones, gather some, commit the accepted path of a tree.

    append:  cache[l, s, b, h, lengths[b] + j] = new[l, s, b, j, h]             for j = 0 .. n - 1
    gather:  out[l, s, b, h, j] = cache[l, s, b, h, rows[b, j]], or 0 if rows[b, j] is -1
    commit:  cache[l, s, b, h, lengths[b] + j] = cache[l, s, b, h, lengths[b] + path[b, j]]    for j = 0 .. accepted[b]

| name           | shape                     | dtype |                                                          |
|----------------|---------------------------|-------|----------------------------------------------------------|
| cache          | [layers, 2, P, Hkv, R, d] | any   | keys (s = 0) and values (s = 1) in P pages of R rows     |
| table          | [B, M]                    | int32 | each sequence's pages, T = M * R; None: P = B, its own   |
| new            | [layers, 2, B, n, Hkv, d] | any   | as a projection lays them out; converted to the cache's  |
| lengths        | [B]                       | int32 | committed rows                                           |
| rows           | [B, n]                    | int32 | rows to gather, -1 for none                              |
| path, accepted | [B, P], [B]               | int32 | node indices root..last accepted; count of drafts, or -1 |

Each operation is one launch over all layers, keys and values and heads. Numerics: copies, exact. Rows that would lie
outside 0 .. T - 1 are neither read nor written. Every program knows its "plane", one (layer, keys or values, sequence,
head), of T rows. Above, cache[l, s, b, h, t] stands for row t % R of page table[b, t // R] where there is a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.reference.attention import capacity_of
from eagle_triton.reference.kv_cache import check_append, check_commit, check_gather
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.launch import launch
from eagle_triton.runtime.overlap import await_inputs, overlapped


@triton.jit
def plane_of(index, sequences, heads):
    """Layer * 2 + side, sequence and head of plane `index`, int64: a cache can pass 2^31 elements."""
    index = tl.full((), 0, tl.int64) + index
    return index // (sequences * heads), index // heads % sequences, index % heads


@triton.jit
def row_offset(table_ptr, sequence, row, ok, stride_tb, stride_page, stride_row, PAGE: tl.constexpr):
    """Where a row of a sequence (both int64) lies behind the first row of a cache, by the sequence's table of pages.

    PAGE: rows of a page, 0: a sequence's lie in one. Without a table that is its own. Read only where `ok`.
    """
    page, page_row = sequence, row
    if table_ptr is not None:
        pages_ptr = table_ptr + sequence * stride_tb
        if PAGE:
            page = tl.load(pages_ptr + row // PAGE, mask=ok, other=0).to(tl.int64)
            page_row = row % PAGE
        else:
            page = tl.load(pages_ptr).to(tl.int64)
    return page * stride_page + page_row * stride_row


@triton.jit
def _append_kernel(
    cache_ptr,
    table_ptr,
    new_ptr,
    lengths_ptr,
    stride_tb,
    stride_cl,
    stride_cs,
    stride_cb,
    stride_ch,
    stride_ct,
    stride_nl,
    stride_ns,
    stride_nb,
    stride_nt,
    stride_nh,
    sequences,
    heads,
    count,
    capacity,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (planes, row blocks): a program writes BLOCK_R new rows of one plane."""
    stack, sequence, head = plane_of(tl.program_id(0), sequences, heads)
    layer, side = stack // 2, stack % 2
    index = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.load(lengths_ptr + sequence) + index
    column = tl.arange(0, BLOCK_D)
    fits = (index < count) & (row >= 0) & (row < capacity)
    ok = fits[:, None] & (column < D)[None, :]
    new_ptr += layer * stride_nl + side * stride_ns + sequence * stride_nb + head * stride_nh
    cache_ptr += layer * stride_cl + side * stride_cs + head * stride_ch
    place = row_offset(table_ptr, sequence, row.to(tl.int64), fits, stride_tb, stride_cb, stride_ct, PAGE)
    new = tl.load(new_ptr + index.to(tl.int64)[:, None] * stride_nt + column[None, :], mask=ok)
    tl.store(cache_ptr + place[:, None] + column[None, :], new.to(cache_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _gather_kernel(
    cache_ptr,
    table_ptr,
    rows_ptr,
    out_ptr,
    stride_tb,
    stride_cl,
    stride_cs,
    stride_cb,
    stride_ch,
    stride_ct,
    stride_rb,
    sequences,
    heads,
    count,
    capacity,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (planes, row blocks): a program copies BLOCK_R rows of one plane; out is contiguous."""
    stack, sequence, head = plane_of(tl.program_id(0), sequences, heads)
    index = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    row = tl.load(rows_ptr + sequence * stride_rb + index, mask=index < count, other=-1)
    cache_ptr += stack // 2 * stride_cl + stack % 2 * stride_cs + head * stride_ch
    fits = (row >= 0) & (row < capacity)
    place = row_offset(table_ptr, sequence, row.to(tl.int64), fits, stride_tb, stride_cb, stride_ct, PAGE)
    wanted = fits[:, None] & (column < D)[None, :]
    values = tl.load(cache_ptr + place[:, None] + column[None, :], mask=wanted, other=0)
    out_row = (tl.full((), 0, tl.int64) + tl.program_id(0)) * count + index
    ok = (index < count)[:, None] & (column < D)[None, :]
    tl.store(out_ptr + out_row[:, None] * D + column[None, :], values, mask=ok)


@triton.jit
def commit_plane(
    plane_ptr,
    table_ptr,
    sequence,
    stride_tb,
    stride_cb,
    stride_ct,
    length,
    path_ptr,
    accepted,
    steps,
    capacity,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Move the accepted rows of one plane, whose first row of page 0 is at plane_ptr; `sequence` is int64.

    All rows are read before any is written: they may overlap.
    """
    step = tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_D)
    moved = (step < steps) & (step <= accepted)
    node = tl.load(path_ptr + step, mask=moved, other=0)
    source, target = length + node, length + step
    moved = moved & (node != step) & (source >= 0) & (source < capacity) & (target >= 0) & (target < capacity)
    ok = moved[:, None] & (column < D)[None, :]
    origin = row_offset(table_ptr, sequence, source.to(tl.int64), moved, stride_tb, stride_cb, stride_ct, PAGE)
    place = row_offset(table_ptr, sequence, target.to(tl.int64), moved, stride_tb, stride_cb, stride_ct, PAGE)
    values = tl.load(plane_ptr + origin[:, None] + column[None, :], mask=ok)
    tl.debug_barrier()
    tl.store(plane_ptr + place[:, None] + column[None, :], values, mask=ok)


@triton.jit
def _commit_kernel(
    cache_ptr,
    table_ptr,
    lengths_ptr,
    path_ptr,
    accepted_ptr,
    stride_tb,
    stride_cl,
    stride_cs,
    stride_cb,
    stride_ch,
    stride_ct,
    stride_pb,
    sequences,
    heads,
    steps,
    capacity,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (planes,): a program moves the accepted rows of one plane."""
    await_inputs(PDL)
    stack, sequence, head = plane_of(tl.program_id(0), sequences, heads)
    cache_ptr += stack // 2 * stride_cl + stack % 2 * stride_cs + head * stride_ch
    length, accepted = tl.load(lengths_ptr + sequence), tl.load(accepted_ptr + sequence)
    commit_plane(
        cache_ptr,
        table_ptr,
        sequence,
        stride_tb,
        stride_cb,
        stride_ct,
        length,
        path_ptr + sequence * stride_pb,
        accepted,
        steps,
        capacity,
        D,
        PAGE,
        BLOCK_P,
        BLOCK_D,
    )


def append(cache: Tensor, new: Tensor, lengths: Tensor, table: Tensor | None = None) -> None:
    """Write new rows [layers, 2, B, n, Hkv, d] at rows lengths .. lengths + n of every layer, in place.

    cache [layers, 2, B, Hkv, T, d], or in pages with a `table` [B, M] int32, see reference.attention.tree_attention;
    lengths [B] int32. Lengths are known on the device only: the caller guards the capacity, and rows past it are
    dropped. For decoding loops of one's own: the engine appends keys as it rotates them, by `rotary_append`.
    Raises ValueError before writing if shapes, dtypes or devices do not fit.
    """
    check_append(cache, new, lengths, table)
    check_rows_contiguous("append", cache=cache, new=new, lengths=lengths, table=table)
    planes, count, width = _planes(cache, lengths), new.shape[3], cache.shape[5]
    if not planes * count:
        return
    block_r = min(16, triton.next_power_of_2(count))
    launch(_append_kernel, (planes, triton.cdiv(count, block_r)))(
        cache,
        table,
        new,
        lengths,
        0 if table is None else table.stride(0),
        *cache.stride()[:5],
        *new.stride()[:5],
        len(lengths),
        cache.shape[3],
        count,
        capacity_of(cache, table),
        D=width,
        PAGE=page_rows(cache, table),
        BLOCK_R=block_r,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=_WARPS,
    )


def gather(cache: Tensor, rows: Tensor, table: Tensor | None = None) -> Tensor:
    """Copy rows [B, n] int32 of every layer: [layers, 2, B, Hkv, n, d]. Row -1 gives zeros.

    A row outside -1 .. T - 1 gives zeros too (on a CPU the reference raises). `cache` and `table` as in `append`. For
    decoding loops of one's own, to copy a branch: the engine reads rows where they lie.
    Raises ValueError before the launch if shapes, dtypes or devices do not fit.
    """
    check_gather(cache, rows, table)
    check_rows_contiguous("gather", cache=cache, rows=rows, table=table)
    planes, count, width = _planes(cache, rows), rows.shape[1], cache.shape[5]
    layers, two, _, heads = cache.shape[:4]
    out = torch.empty(layers, two, len(rows), heads, count, width, dtype=cache.dtype, device=cache.device)
    if out.numel():
        block_r = min(16, triton.next_power_of_2(count))
        launch(_gather_kernel, (planes, triton.cdiv(count, block_r)))(
            cache,
            table,
            rows,
            out,
            0 if table is None else table.stride(0),
            *cache.stride()[:5],
            rows.stride(0),
            len(rows),
            heads,
            count,
            capacity_of(cache, table),
            D=width,
            PAGE=page_rows(cache, table),
            BLOCK_R=block_r,
            BLOCK_D=triton.next_power_of_2(width),
            num_warps=_WARPS,
        )
    return out


def commit(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor, table: Tensor | None = None) -> None:
    """Keep the rows of the accepted path: row lengths + path[j] moves to row lengths + j, for j = 0 .. accepted.

    cache and `table` as in `append`, changed in place; lengths [B] int32; path [B, P] int32, ascending node indices
    from the root (path[0] = 0); accepted [B] int32, -1 to leave a sequence untouched. Rows overlap safely, rows
    past the capacity stay. Raises ValueError before writing if shapes, dtypes or devices do not fit.
    """
    check_commit(cache, lengths, path, accepted, table)
    check_rows_contiguous("commit", cache=cache, lengths=lengths, path=path, accepted=accepted, table=table)
    planes, steps, width = _planes(cache, lengths), path.shape[1], cache.shape[5]
    if not planes * steps:
        return
    overlapped(_commit_kernel, (planes,), cache.device)(
        cache,
        table,
        lengths,
        path,
        accepted,
        0 if table is None else table.stride(0),
        *cache.stride()[:5],
        path.stride(0),
        len(lengths),
        cache.shape[3],
        steps,
        capacity_of(cache, table),
        D=width,
        PAGE=page_rows(cache, table),
        BLOCK_P=triton.next_power_of_2(steps),
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=_WARPS,
    )


def page_rows(cache: Tensor, table: Tensor | None) -> int:
    """Rows of a page where sequences have several of a cache's [..., P, Hkv, R, d], else 0."""
    return cache.shape[-2] if table is not None and table.shape[1] > 1 else 0


_WARPS = 2


def _planes(cache: Tensor, by_sequence: Tensor) -> int:
    return cache.shape[0] * 2 * len(by_sequence) * cache.shape[3]
