"""Moving rows of the cache: append new ones, gather some, commit the accepted path of a tree.

    append:  cache[l, s, b, h, lengths[b] + j] = new[l, s, b, j, h]             for j = 0 .. n - 1
    gather:  out[l, s, b, h, j] = cache[l, s, b, h, rows[b, j]], or 0 if rows[b, j] is -1
    commit:  cache[l, s, b, h, lengths[b] + j] = cache[l, s, b, h, lengths[b] + path[b, j]]    for j = 0 .. accepted[b]

| name           | shape                   | dtype |                                                         |
|----------------|-------------------------|-------|---------------------------------------------------------|
| cache          | [layers, 2, B, Hkv, T, d] | any | keys (s = 0) and values (s = 1) of every layer          |
| new            | [layers, 2, B, n, Hkv, d] | any | as a projection lays them out; converted to the cache's |
| lengths        | [B]                     | int32 | committed rows                                          |
| rows           | [B, n]                  | int32 | rows to gather, -1 for none                             |
| path, accepted | [B, P], [B]             | int32 | node indices root..last accepted; count of drafts, or -1 |

Each operation is one launch over all layers, keys and values and heads. Numerics: copies, exact. Rows that would lie
outside 0 .. T - 1 are neither read nor written. Every program knows its "plane", one (layer, keys or values, sequence,
head), whose T rows are one stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.reference.kv_cache import check_append, check_commit, check_gather
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
        place = table_ptr + sequence * stride_tb
        if PAGE:
            place += row // PAGE
            page_row = row % PAGE
        page = tl.load(place, mask=ok, other=0).to(tl.int64)
    return page * stride_page + page_row * stride_row


@triton.jit
def _append_kernel(
    cache_ptr,
    new_ptr,
    lengths_ptr,
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
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (planes, row blocks): a program writes BLOCK_R new rows of one plane."""
    stack, sequence, head = plane_of(tl.program_id(0), sequences, heads)
    layer, side = stack // 2, stack % 2
    index = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.load(lengths_ptr + sequence) + index
    column = tl.arange(0, BLOCK_D)
    ok = ((index < count) & (row >= 0) & (row < capacity))[:, None] & (column < D)[None, :]
    new_ptr += layer * stride_nl + side * stride_ns + sequence * stride_nb + head * stride_nh
    cache_ptr += layer * stride_cl + side * stride_cs + sequence * stride_cb + head * stride_ch
    new = tl.load(new_ptr + index.to(tl.int64)[:, None] * stride_nt + column[None, :], mask=ok)
    out = cache_ptr + row.to(tl.int64)[:, None] * stride_ct + column[None, :]
    tl.store(out, new.to(cache_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _gather_kernel(
    cache_ptr,
    rows_ptr,
    out_ptr,
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
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (planes, row blocks): a program copies BLOCK_R rows of one plane; out is contiguous."""
    stack, sequence, head = plane_of(tl.program_id(0), sequences, heads)
    index = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    row = tl.load(rows_ptr + sequence * stride_rb + index, mask=index < count, other=-1)
    cache_ptr += stack // 2 * stride_cl + stack % 2 * stride_cs + sequence * stride_cb + head * stride_ch
    wanted = ((row >= 0) & (row < capacity))[:, None] & (column < D)[None, :]
    values = tl.load(cache_ptr + row.to(tl.int64)[:, None] * stride_ct + column[None, :], mask=wanted, other=0)
    out_row = (tl.full((), 0, tl.int64) + tl.program_id(0)) * count + index
    ok = (index < count)[:, None] & (column < D)[None, :]
    tl.store(out_ptr + out_row[:, None] * D + column[None, :], values, mask=ok)


@triton.jit
def commit_plane(
    plane_ptr,
    stride_ct,
    length,
    path_ptr,
    accepted,
    steps,
    capacity,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Move the accepted rows of one plane. All rows are read before any is written: they may overlap."""
    step = tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_D)
    moved = (step < steps) & (step <= accepted)
    node = tl.load(path_ptr + step, mask=moved, other=0)
    source, target = length + node, length + step
    moved = moved & (node != step) & (source >= 0) & (source < capacity) & (target >= 0) & (target < capacity)
    ok = moved[:, None] & (column < D)[None, :]
    values = tl.load(plane_ptr + source.to(tl.int64)[:, None] * stride_ct + column[None, :], mask=ok)
    tl.debug_barrier()
    tl.store(plane_ptr + target.to(tl.int64)[:, None] * stride_ct + column[None, :], values, mask=ok)


@triton.jit
def _commit_kernel(
    cache_ptr,
    lengths_ptr,
    path_ptr,
    accepted_ptr,
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
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (planes,): a program moves the accepted rows of one plane."""
    await_inputs(PDL)
    stack, sequence, head = plane_of(tl.program_id(0), sequences, heads)
    cache_ptr += stack // 2 * stride_cl + stack % 2 * stride_cs + sequence * stride_cb + head * stride_ch
    length, accepted = tl.load(lengths_ptr + sequence), tl.load(accepted_ptr + sequence)
    commit_plane(
        cache_ptr, stride_ct, length, path_ptr + sequence * stride_pb, accepted, steps, capacity, D, BLOCK_P, BLOCK_D
    )


def append(cache: Tensor, new: Tensor, lengths: Tensor) -> None:
    """Write new rows [layers, 2, B, n, Hkv, d] at rows lengths .. lengths + n of every layer, in place.

    cache [layers, 2, B, Hkv, T, d]; lengths [B] int32. Lengths are known on the device only: the caller guards the
    capacity, and rows past it are dropped. Raises ValueError before writing if shapes, dtypes or devices do not fit.
    """
    check_append(cache, new, lengths)
    _check_rows_contiguous("append", cache=cache, new=new, lengths=lengths)
    planes, count, width = cache[..., 0, 0].numel(), new.shape[3], cache.shape[5]
    if not planes * count:
        return
    block_r = min(16, triton.next_power_of_2(count))
    launch(_append_kernel, (planes, triton.cdiv(count, block_r)))(
        cache,
        new,
        lengths,
        *cache.stride()[:5],
        *new.stride()[:5],
        *cache.shape[2:4],
        count,
        cache.shape[4],
        D=width,
        BLOCK_R=block_r,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=_WARPS,
    )


def gather(cache: Tensor, rows: Tensor) -> Tensor:
    """Copy rows [B, n] int32 of every layer: [layers, 2, B, Hkv, n, d]. Row -1 gives zeros.

    A row outside -1 .. T - 1 gives zeros too (on a CPU the reference raises). Raises ValueError before the launch if
    shapes, dtypes or devices do not fit.
    """
    check_gather(cache, rows)
    _check_rows_contiguous("gather", cache=cache, rows=rows)
    planes, count, width = cache[..., 0, 0].numel(), rows.shape[1], cache.shape[5]
    out = torch.empty(*cache.shape[:4], count, width, dtype=cache.dtype, device=cache.device)
    if out.numel():
        block_r = min(16, triton.next_power_of_2(count))
        launch(_gather_kernel, (planes, triton.cdiv(count, block_r)))(
            cache,
            rows,
            out,
            *cache.stride()[:5],
            rows.stride(0),
            *cache.shape[2:4],
            count,
            cache.shape[4],
            D=width,
            BLOCK_R=block_r,
            BLOCK_D=triton.next_power_of_2(width),
            num_warps=_WARPS,
        )
    return out


def commit(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Keep the rows of the accepted path: row lengths + path[j] moves to row lengths + j, for j = 0 .. accepted.

    cache [layers, 2, B, Hkv, T, d], changed in place; lengths [B] int32; path [B, P] int32, ascending node indices
    from the root (path[0] = 0); accepted [B] int32, -1 to leave a sequence untouched. Rows overlap safely, rows
    past the capacity stay. Raises ValueError before writing if shapes, dtypes or devices do not fit.
    """
    check_commit(cache, lengths, path, accepted)
    _check_rows_contiguous("commit", cache=cache, lengths=lengths, path=path, accepted=accepted)
    planes, steps, width = cache[..., 0, 0].numel(), path.shape[1], cache.shape[5]
    if not planes * steps:
        return
    overlapped(_commit_kernel, (planes,), cache.device)(
        cache,
        lengths,
        path,
        accepted,
        *cache.stride()[:5],
        path.stride(0),
        *cache.shape[2:4],
        steps,
        cache.shape[4],
        D=width,
        BLOCK_P=triton.next_power_of_2(steps),
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=_WARPS,
    )


def page_rows(cache: Tensor, table: Tensor | None) -> int:
    """Rows of a page where sequences have several of a cache's [2, P, Hkv, R, d], else 0."""
    return cache.shape[3] if table is not None and table.shape[1] > 1 else 0


_WARPS = 2


def _check_rows_contiguous(name: str, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: {argument} must have stride 1 in its last dimension, got strides {tensor.stride()}"
            )
