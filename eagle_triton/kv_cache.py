"""Move rows of the cache: append new rows, gather rows, commit the accepted path of a tree.

    append:  cache[l, s, b, h, lengths[b] + j] = new[l, s, b, j, h]             for j = 0 .. n - 1
    gather:  out[l, s, b, h, j] = cache[l, s, b, h, rows[b, j]], or 0 if rows[b, j] is -1
    commit:  cache[l, s, b, h, lengths[b] + j] = cache[l, s, b, h, lengths[b] + path[b, j]]    for j = 0 .. accepted[b]

| name     | shape                     | dtype |                                                                |
|----------|---------------------------|-------|----------------------------------------------------------------|
| cache    | [layers, 2, P, Hkv, R, d] | any   | keys (s = 0) and values (s = 1) in P pages of R rows           |
| table    | [B, M]                    | int32 | each sequence's pages, T = M * R; None: one each, P = B        |
| new      | [layers, 2, B, n, Hkv, d] | any   | in a projection's layout; converted to the cache's dtype       |
| lengths  | [B]                       | int32 | committed rows                                                 |
| rows     | [B, n]                    | int32 | rows to gather, -1 for none                                    |
| path     | [B, D + 1]                | int32 | nodes from the root to the last accepted one, then -1          |
| accepted | [B]                       | int32 | how many drafts were accepted; -1: not even the root           |

Each operation is one launch over all layers, keys and values, and heads. Numerics: copies, exact. Rows outside 0 .. T -
1 are neither read nor written. A "plane" is the T rows of one (layer, keys or values, sequence, head). With a table,
cache[l, s, b, h, t] above stands for row t % R of page table[b, t // R].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.kv_cache import capacity_of, check_append, check_commit, check_gather
from eagle_triton.ops.views import CacheStack, Matrix, NewRows, Pages, view
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.launch import launch
from eagle_triton.runtime.overlap import await_inputs, overlapped


@triton.jit
def plane_of(index, sequences, heads):
    """Layer * 2 + side, sequence and head of plane `index`, int64: a cache can have more than 2^31 elements."""
    index = tl.full((), 0, tl.int64) + index
    return index // (sequences * heads), index // heads % sequences, index % heads


@triton.jit
def first_row(cache, stack, head):
    """A pointer to a plane's first row in page 0."""
    return cache.ptr + stack // 2 * cache.layer + stack % 2 * cache.side + head * cache.head


@triton.jit
def row_offset(cache, pages, sequence, row, ok, PAGE: tl.constexpr):
    """The offset of a sequence's row (both int64) from its plane's first row in page 0. Pages are read where `ok`.

    pages: None if sequence b has page b. PAGE: rows of a page, 0 if a sequence has one page.
    """
    page, page_row = sequence, row
    if pages is not None:
        pages_ptr = pages.ptr + sequence * pages.row
        if PAGE:
            page = tl.load(pages_ptr + row // PAGE, mask=ok, other=0).to(tl.int64)
            page_row = row % PAGE
        else:
            page = tl.load(pages_ptr).to(tl.int64)
    return page * cache.page + page_row * cache.row


@triton.jit
def _append_kernel(
    cache,
    pages,
    new,
    lengths_ptr,
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
    index = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.load(lengths_ptr + sequence) + index
    column = tl.arange(0, BLOCK_D)
    fits = (index < count) & (row >= 0) & (row < capacity)
    ok = fits[:, None] & (column < D)[None, :]
    new_ptr = new.ptr + stack // 2 * new.layer + stack % 2 * new.side + sequence * new.batch + head * new.head
    plane_ptr = first_row(cache, stack, head)
    place = row_offset(cache, pages, sequence, row.to(tl.int64), fits, PAGE)
    values = tl.load(new_ptr + index.to(tl.int64)[:, None] * new.row + column[None, :], mask=ok)
    tl.store(plane_ptr + place[:, None] + column[None, :], values.to(plane_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _gather_kernel(
    cache,
    pages,
    rows,
    out_ptr,
    sequences,
    heads,
    count,
    capacity,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (planes, row blocks): a program copies BLOCK_R rows of one plane. out is contiguous."""
    stack, sequence, head = plane_of(tl.program_id(0), sequences, heads)
    index = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    row = tl.load(rows.ptr + sequence * rows.row + index, mask=index < count, other=-1)
    plane_ptr = first_row(cache, stack, head)
    fits = (row >= 0) & (row < capacity)
    place = row_offset(cache, pages, sequence, row.to(tl.int64), fits, PAGE)
    wanted = fits[:, None] & (column < D)[None, :]
    values = tl.load(plane_ptr + place[:, None] + column[None, :], mask=wanted, other=0)
    out_row = (tl.full((), 0, tl.int64) + tl.program_id(0)) * count + index
    ok = (index < count)[:, None] & (column < D)[None, :]
    tl.store(out_ptr + out_row[:, None] * D + column[None, :], values, mask=ok)


@triton.jit
def commit_plane(
    cache,
    plane_ptr,
    pages,
    sequence,
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
    """Move the accepted rows of one plane. Its first row in page 0 is at plane_ptr; `sequence` is int64.

    All rows are read before any is written, because they may overlap.
    """
    step = tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_D)
    moved = (step < steps) & (step <= accepted)
    node = tl.load(path_ptr + step, mask=moved, other=0)
    source, target = length + node, length + step
    moved = moved & (node != step) & (source >= 0) & (source < capacity) & (target >= 0) & (target < capacity)
    ok = moved[:, None] & (column < D)[None, :]
    origin = row_offset(cache, pages, sequence, source.to(tl.int64), moved, PAGE)
    place = row_offset(cache, pages, sequence, target.to(tl.int64), moved, PAGE)
    values = tl.load(plane_ptr + origin[:, None] + column[None, :], mask=ok)
    tl.debug_barrier()
    tl.store(plane_ptr + place[:, None] + column[None, :], values, mask=ok)


@triton.jit
def _commit_kernel(
    cache,
    pages,
    lengths_ptr,
    path,
    accepted_ptr,
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
    plane_ptr, path_ptr = first_row(cache, stack, head), path.ptr + sequence * path.row
    length, accepted = tl.load(lengths_ptr + sequence), tl.load(accepted_ptr + sequence)
    commit_plane(
        cache, plane_ptr, pages, sequence, length, path_ptr, accepted, steps, capacity, D, PAGE, BLOCK_P, BLOCK_D
    )


def append(cache: Tensor, new: Tensor, lengths: Tensor, table: Tensor | None = None) -> None:
    """Write new rows [layers, 2, B, n, Hkv, d] at rows lengths .. lengths + n - 1 of every layer, in place.

    cache [layers, 2, B, Hkv, T, d], or in pages with a `table` [B, M] int32, see reference.attention.tree_attention;
    lengths [B] int32. Only the device knows the lengths, so the caller must check the capacity; rows past it are
    dropped. For your own decoding loops. The engine uses `rotary_append`, which rotates and appends keys at once.
    Raises ValueError before writing if shapes, dtypes or devices do not fit.
    """
    check_append(cache, new, lengths, table)
    check_rows_contiguous("append", cache=cache, new=new, lengths=lengths, table=table)
    planes, count, width = _planes(cache, lengths), new.shape[3], cache.shape[5]
    if not planes * count:
        return
    block_r = min(16, triton.next_power_of_2(count))
    launch(_append_kernel, (planes, triton.cdiv(count, block_r)))(
        view(CacheStack, cache),
        view(Pages, table),
        view(NewRows, new),
        lengths,
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
    your own decoding loops, to copy a branch. The engine reads rows in place.
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
            view(CacheStack, cache),
            view(Pages, table),
            view(Matrix, rows),
            out,
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

    cache and `table` as in `append`, changed in place; lengths [B] int32; path [B, D + 1] int32, ascending node indices
    from the root (path[0] = 0); accepted [B] int32, -1 to leave a sequence untouched. Rows may overlap. Rows past the
    capacity do not move. Raises ValueError before writing if shapes, dtypes or devices do not fit.
    """
    check_commit(cache, lengths, path, accepted, table)
    check_rows_contiguous("commit", cache=cache, lengths=lengths, path=path, accepted=accepted, table=table)
    planes, steps, width = _planes(cache, lengths), path.shape[1], cache.shape[5]
    if not planes * steps:
        return
    overlapped(_commit_kernel, (planes,), cache.device)(
        view(CacheStack, cache),
        view(Pages, table),
        lengths,
        view(Matrix, path),
        accepted,
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
    """Rows of a page of a cache [..., P, Hkv, R, d] if sequences have several pages, else 0."""
    return cache.shape[-2] if table is not None and table.shape[1] > 1 else 0


_WARPS = 2


def _planes(cache: Tensor, by_sequence: Tensor) -> int:
    return cache.shape[0] * 2 * len(by_sequence) * cache.shape[3]
