"""Attention of new nodes over the cache, split over its keys: flash decoding with the tree mask read as bits.

    out[b, i, h] = softmax_t(scale * q[b, i, h] . k[b, h // G, t] + mask[b, i, t]) . v[b, h // G, t]

The rows of one tile are the N * G queries that share a key/value head (row = node * G + query head within the group),
so that every key is read once for the whole group and the products are tall enough for the tensor cores.

| name       | shape                    | dtype   |                                                           |
|------------|--------------------------|---------|-----------------------------------------------------------|
| q, out     | [B, N, Hq, d]            | q       | the new nodes                                             |
| cache      | [2, P, Hkv, R, d]        | q       | keys and values of one layer, in P pages of R rows        |
| table      | [B, W]                   | int32   | of each sequence its pages, T = W * R; None: P = B, its own |
| lengths    | [B]                      | int32   | committed rows, visible to every node                     |
| ancestors  | [B, N, W]                | int64   | bit j of row i: node i sees cache row lengths + j         |
| partial    | [B, Hkv, P, N * G, d]    | float32 | weighted sum of each program's values (workspace)         |
| softmax    | [B, Hkv, P, 2, N * G]    | float32 | log2 of what its weights are relative to; their sum       |
| lse        | [B, Hq, N]               | float32 | the natural logarithm of the sum of a row's weights       |

The keys of a sequence are split into parts, whose number follows from the static shapes of one sequence, and how many
of them share its rows from its length: a captured graph serves every length, and a result depends neither on the batch
nor on the capacity. They share the rows evenly, half of them up to 64 tiles; the others are empty. They are added up in
the order of their numbers: the same bits whether each is a program's own (P = splits), as for a single sequence, and
`_merge_kernel` adds them up, or one program does so with all of them (P = 1), as in a large batch. (But for what a
split adds that is 2^-149 of what others do: it may be nothing in one way, and a denormal number in the other.)

Numerics: products of the input dtype accumulated in fp32 (true fp32 for fp32 inputs), softmax in fp32 in the log2
domain, one rounding of the weights to the values' dtype and one of the result. The maximum that is taken off the scores
is rounded up to an integer: weights relative to different maxima then differ by powers of two, so that a weight is
rounded alike in every tile, split and tree, and a sum alike wherever it is added up. Rows of the cache that no node of
the tile may see are never multiplied, so what they hold (NaN included) does not matter. A row with nothing to see
gives 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle_triton import kv_cache
from eagle_triton.reference.attention import capacity_of, check_tree_attention
from eagle_triton.runtime.launch import EXACT, launch
from eagle_triton.runtime.overlap import can_overlap, prefer_shared_memory

_WORD = tl.constexpr(64)
MANY_TILES = tl.constexpr(64)  # of keys: more are worth all splits, fewer half of them
_TILE_ROWS = 64  # no tile of keys has more
MERGE_REGISTERS = 64  # of 8 splits: two programs find room beside two of attention's on Hopper
_PIECE_NODES = 16  # pieces of prompts have as many at least


@triton.jit
def _span(length, nodes, capacity, window, WORDS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The cache rows [oldest, newest) that any node of a sequence may see, from a tile's start on."""
    newest = tl.minimum(length + (_WORD * WORDS if WORDS else nodes), capacity)
    return tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N if WINDOW else 0, newest


@triton.jit
def _share_out(rows, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr):
    """The tiles of `rows` rows, and how many splits share them.

    The last tile counts twice: it holds the new keys, whose masks cost as much as a tile.
    """
    tiles = tl.cdiv(rows, BLOCK_N) + 1
    most = tl.where(tiles > MANY_TILES, SPLITS, (SPLITS + 1) // 2)
    return tiles, tl.minimum(tl.maximum(tl.minimum(tiles // MIN_TILES, tiles - 1), 1), most)


@triton.jit
def _first_tile(split, tiles, active):
    """Where a split begins, and the one before it ends; split <= active."""
    return (split * tiles) // active


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _popcount(x):
    """Set bits of each int64."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _low_bits(count):
    """int64 words with the lowest `count` bits set, for any count: none below 1, all above 63."""
    some = (tl.full(count.shape, 1, tl.int64) << tl.minimum(tl.maximum(count, 0), 63).to(tl.int64)) - 1
    return tl.where(count > 63, tl.full(count.shape, -1, tl.int64), some)


@triton.jit
def _word(bits_ptr, index, row_ok, WORDS: tl.constexpr):
    """Ancestor word `index` of each row; words before the first stand for committed rows, which all rows see."""
    stored = tl.load(bits_ptr + index, mask=row_ok & (index >= 0) & (index < WORDS), other=0)
    return tl.where(row_ok & (index < 0), tl.full(stored.shape, -1, tl.int64), stored)


@triton.jit
def _window(bits_ptr, offset, row_ok, WORDS: tl.constexpr):
    """The 64 visibility bits of each row from new key `offset` on (negative: committed rows)."""
    index, shift = offset >> 6, (offset & 63).to(tl.int64)
    low = _word(bits_ptr, index, row_ok, WORDS)
    high = _word(bits_ptr, index + 1, row_ok, WORDS)
    low = (low >> shift) & ~(tl.full(low.shape, -1, tl.int64) << (63 - shift) << 1)  # a logical shift
    return low | (high << (63 - shift) << 1)


@triton.jit
def _positions_before(bits_ptr, offset, row_ok, WORDS: tl.constexpr):
    """How many of the new keys before `offset` each row sees."""
    count = tl.zeros(row_ok.shape, tl.int32)
    for index in tl.static_range(WORDS):
        word = _word(bits_ptr, index, row_ok, WORDS)
        count += _popcount(word & _low_bits(tl.zeros(row_ok.shape, tl.int32) + offset - 64 * index))
    return count


@triton.jit
def _page(pages_ptr, start, capacity, PAGE: tl.constexpr):
    """The page, int64, that a tile of rows from `start` on lies in, of PAGE rows; PAGE 0: 0, all rows lie in one.

    Behind the capacity it is any page.
    """
    if PAGE:
        page = tl.load(pages_ptr + tl.minimum(start, capacity - 1) // PAGE).to(tl.int64)
    else:
        page = tl.full((), 0, tl.int64)
    return page


@triton.jit
def _tile_offset(page, start, stride_page, STRIDE_T: tl.constexpr, PAGE: tl.constexpr):
    """Where that tile lies, int64: it may be 2^31 elements away."""
    if PAGE:
        offset = page * stride_page + start % PAGE * STRIDE_T
    else:
        offset = start * tl.full((), STRIDE_T, tl.int64)
    return offset


@triton.jit
def _tile_row(page, start, rows_page, PAGE: tl.constexpr):
    """Its first row, counted in rows of a descriptor, where a page begins every `rows_page`."""
    row = start
    if PAGE:
        row = page.to(tl.int32) * rows_page + start % PAGE
    return row


@triton.jit
def _fold(acc, top, total, scores, v, scale_log2, MASKED: tl.constexpr):
    """Fold a tile's scores and values into the running (weighted sum, maximum, denominator) of each row."""
    new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1) * scale_log2))
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(tl.fma(scores, scale_log2, -base[:, None])).to(v.dtype)
    decay = tl.exp2(top - base)
    acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, tl.fma(total, decay, tl.sum(weights.to(tl.float32), 1))  # a lone key's weight is 1 in the end


@triton.jit
def _relative_to(top, base):
    """The power of two that takes sums relative to 2^top to 2^base, 0 for top -inf."""
    return tl.exp2(top - tl.where(base == float("-inf"), 0.0, base))


@triton.jit
def _add_split(sums, base, whole, acc, top, total):
    """Add a split's (weighted sum, maximum, denominator) to those of the splits before it: exact but for the sum, and
    for what underflows."""
    new_base = tl.maximum(base, top)
    before, beside = _relative_to(base, new_base), _relative_to(top, new_base)
    return tl.fma(acc, beside[:, None], sums * before[:, None]), new_base, tl.fma(total, beside, whole * before)


@triton.jit
def _begin_split(begins, sums, base, whole, acc, top, total):
    """Where a split begins, the one before it is added up, and nothing is known of the new one."""
    if begins:
        sums, base, whole = _add_split(sums, base, whole, acc, top, total)
        acc, top, total = _nothing(acc.shape[0], acc.shape[1])
    return sums, base, whole, acc, top, total


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The weighted sum, maximum and denominator of no keys."""
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return tl.zeros((BLOCK_M, BLOCK_D), tl.float32), top, tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def _attend(
    q,
    cache_desc,
    k_row,
    v_row,
    k_ptr,
    v_ptr,
    pages_ptr,
    stride_page,
    rows_page,
    bits_ptr,
    node,
    row_ok,
    length,
    capacity,
    first,
    last,
    tiles,
    active,
    scale_log2,
    window,
    D: tl.constexpr,
    STRIDE_T: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows `q` over the cache rows first .. last: the weighted sum of their values [BLOCK_M, BLOCK_D], log2 of what the
    weights are relative to (-inf: there are none), and their sum.

    WORDS 0: causal. Tiles of committed rows need no mask (unless WINDOW); those that touch new keys go by BLOCK_T.
    ALL_SPLITS: the rows are those of `active` splits of `tiles` tiles, each of which is summed by itself first.
    """
    acc, top, total = _nothing(BLOCK_M, BLOCK_D)
    if ALL_SPLITS:
        sums, base, whole = _nothing(BLOCK_M, BLOCK_D)
        split = 1  # the next to begin
    column = tl.arange(0, BLOCK_D)
    column_ok = column < D
    if WINDOW:
        if WORDS:
            position = length + _positions_before(bits_ptr, 64 * WORDS, row_ok, WORDS) - 1
        else:
            position = length + node

    # Committed rows, in whole tiles.
    plain_last = tl.minimum(last, length // BLOCK_N * BLOCK_N)
    row = tl.arange(0, BLOCK_N)
    tile = row[:, None] * STRIDE_T + column[None, :]
    page = _page(pages_ptr, first, capacity, PAGE)
    for start in tl.range(first, plain_last, BLOCK_N):
        following = _page(pages_ptr, start + BLOCK_N, capacity, PAGE)  # a tile ahead, so that nothing waits for it
        if ALL_SPLITS:
            begins = start == first + _first_tile(split, tiles, active) * BLOCK_N
            split += begins
            sums, base, whole, acc, top, total = _begin_split(begins, sums, base, whole, acc, top, total)
        if TMA:
            k = cache_desc.load([k_row + _tile_row(page, start, rows_page, PAGE), 0])
        else:
            ok = column_ok[None, :]
            if WINDOW:
                ok = ok & (start + row >= length - window)[:, None]
            offset = _tile_offset(page, start, stride_page, STRIDE_T, PAGE)
            k = tl.load(k_ptr + offset + tile, mask=ok, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if WINDOW:
            scores = tl.where((start + row)[None, :] > (position - window)[:, None], scores, float("-inf"))
        if TMA:
            v = cache_desc.load([v_row + _tile_row(page, start, rows_page, PAGE), 0])
        else:
            v = tl.load(v_ptr + offset + tile, mask=ok, other=0.0)
        acc, top, total = _fold(acc, top, total, scores, v, scale_log2, WINDOW)
        page = following

    # The last committed rows and the new ones: what each row sees of a tile is one word of bits.
    row = tl.arange(0, BLOCK_T)
    tile = row[:, None] * STRIDE_T + column[None, :]
    for start in tl.range(tl.maximum(first, plain_last), last, BLOCK_T, num_stages=1):
        if ALL_SPLITS:
            begins = start == first + _first_tile(split, tiles, active) * BLOCK_N
            split += begins
            sums, base, whole, acc, top, total = _begin_split(begins, sums, base, whole, acc, top, total)
        rows = start + row
        ok = (rows < last)[:, None] & column_ok[None, :]
        offset = _tile_offset(page, start, stride_page, STRIDE_T, PAGE)
        page = _page(pages_ptr, start + BLOCK_T, capacity, PAGE)
        k = tl.load(k_ptr + offset + tile, mask=ok, other=0.0)
        v = tl.load(v_ptr + offset + tile, mask=ok, other=0.0)
        if WORDS:
            word = _window(bits_ptr, start - length, row_ok, WORDS)
            anyone = tl.reduce(word, 0, _either)
            half = tl.where((row < 32)[None, :], word.to(tl.int32)[:, None], (word >> 32).to(tl.int32)[:, None])
            visible = ((half >> (row & 31)[None, :]) & 1) != 0
            seen = ((anyone >> row.to(tl.int64)) & 1) != 0
            if WINDOW:
                before = tl.minimum(start, length) + _positions_before(bits_ptr, start - length, row_ok, WORDS)
                lower = word[:, None] & _low_bits(tl.zeros((BLOCK_M, BLOCK_T), tl.int32) + row[None, :])
                visible = visible & (before[:, None] + _popcount(lower) > (position - window)[:, None])
        else:
            visible = (rows[None, :] <= (length + node)[:, None]) & row_ok[:, None]
            seen = rows <= length + tl.max(tl.where(row_ok, node, -1), 0)
            if WINDOW:
                visible = visible & (rows[None, :] > (position - window)[:, None])
        if WINDOW:
            seen = seen & (rows >= length - window)
        v = tl.where(seen[:, None], v, tl.zeros_like(v))  # a weight of 0 does not hide a NaN
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(visible & (rows < last)[None, :], scores, float("-inf"))
        acc, top, total = _fold(acc, top, total, scores, v, scale_log2, True)
    if ALL_SPLITS:
        acc, top, total = _add_split(sums, base, whole, acc, top, total)
    return acc, top, total


@triton.jit
def _normalised(acc, total):
    return acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def attend_split(
    row_block,
    program,
    sequence,
    head,
    q_ptr,
    cache_ptr,
    cache_desc,
    table_ptr,
    lengths_ptr,
    ancestors_ptr,
    out_ptr,
    partial_ptr,
    softmax_ptr,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_ckv,
    stride_cb,
    stride_ch,
    stride_tb,
    stride_ab,
    stride_an,
    stride_ob,
    stride_on,
    stride_oh,
    nodes,
    capacity,
    scale_log2,
    window,
    D: tl.constexpr,
    STRIDE_T: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows row_block * BLOCK_M .. of one head of one sequence over split `program`, with PROGRAMS 1 over all splits.

    PAGE: rows of a page, of which a sequence has several; 0: a sequence's rows lie in one page. The sum of a split
    goes to `partial` and `softmax`, that of all to `out`, and its log-sum-exp [B, Hq, N] to `softmax` if there is that.
    A split without keys writes nothing.
    """
    batch, rows = sequence.to(tl.int64), nodes * GROUP
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok, node = row < rows, row // GROUP
    column = tl.arange(0, BLOCK_D)
    mask = row_ok[:, None] & (column < D)[None, :]
    query_head = head * GROUP + row % GROUP
    q_offset = node * stride_qn + query_head * stride_qh
    length = tl.minimum(tl.load(lengths_ptr + batch), capacity)
    oldest, newest = _span(length, nodes, capacity, window, WORDS, WINDOW, BLOCK_N)
    tiles, active = _share_out(newest - oldest, BLOCK_N, SPLITS, MIN_TILES)
    if program < active:
        q = tl.load(q_ptr + batch * stride_qb + (q_offset[:, None] + column[None, :]), mask=mask, other=0.0)
        first, last = oldest, newest
        if PROGRAMS == SPLITS:
            first = oldest + _first_tile(program, tiles, active) * BLOCK_N
            last = tl.minimum(oldest + _first_tile(program + 1, tiles, active) * BLOCK_N, newest)
        if WORDS == 0:  # causal: nothing behind the block's last node
            last = tl.minimum(last, length + tl.minimum((row_block + 1) * BLOCK_M - 1, rows - 1) // GROUP + 1)

        pages_ptr, page = table_ptr, batch
        if table_ptr is not None:
            pages_ptr = table_ptr + batch * stride_tb
            page = tl.zeros_like(batch) if PAGE else tl.load(pages_ptr).to(tl.int64)
        k_ptr = cache_ptr + page * stride_cb + head.to(tl.int64) * stride_ch
        k_row = page.to(tl.int32) * (stride_cb // D).to(tl.int32) + head * (stride_ch // D).to(tl.int32)
        v_row = k_row + (stride_ckv // D).to(tl.int32)
        bits_ptr = ancestors_ptr
        if WORDS:
            bits_ptr = ancestors_ptr + batch * stride_ab + node * stride_an
        sums, top, total = _attend(
            q,
            cache_desc,
            k_row,
            v_row,
            k_ptr,
            k_ptr + stride_ckv,
            pages_ptr,
            stride_cb,
            (stride_cb // D).to(tl.int32),
            bits_ptr,
            node,
            row_ok,
            length,
            capacity,
            first,
            last,
            tiles,
            active,
            scale_log2,
            window,
            D,
            STRIDE_T,
            PAGE,
            WORDS,
            WINDOW,
            PROGRAMS < SPLITS,
            TMA,
            BLOCK_M,
            BLOCK_N,
            BLOCK_T,
            BLOCK_D,
        )
        if PROGRAMS == 1:
            o_offset = node * stride_on + query_head * stride_oh
            out = _normalised(sums, total).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + batch * stride_ob + (o_offset[:, None] + column[None, :]), out, mask=mask)
            if softmax_ptr is not None:
                lse = (top + tl.log2(total)) * 0.6931471805599453
                tl.store(softmax_ptr + (batch * HEADS * GROUP + query_head) * nodes + node, lse, mask=row_ok)
        else:
            p_row = ((batch * HEADS + head) * PROGRAMS + program) * rows
            tl.store(softmax_ptr + 2 * p_row + row, top, mask=row_ok)
            tl.store(softmax_ptr + 2 * p_row + rows + row, total, mask=row_ok)
            tl.store(partial_ptr + p_row * D + (row[:, None] * D + column[None, :]), sums, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["table_ptr", "lengths_ptr", "nodes"])
def _tree_attention_kernel(
    q_ptr,
    cache_ptr,
    cache_desc,
    table_ptr,
    lengths_ptr,
    ancestors_ptr,
    out_ptr,
    partial_ptr,
    softmax_ptr,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_ckv,
    stride_cb,
    stride_ch,
    stride_tb,
    stride_ab,
    stride_an,
    stride_ob,
    stride_on,
    stride_oh,
    nodes,
    capacity,
    scale_log2,
    window,
    D: tl.constexpr,
    STRIDE_T: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (row blocks, B * Hkv, PROGRAMS): a program attends BLOCK_M rows of one head over its splits of the keys.

    Programs that are idle for every sequence come last, so that they hold nobody up.
    """
    if PDL == 2:
        tl.extra.cuda.gdc_wait()
    if PDL:  # after the wait, because the merge reads the lengths before its own
        tl.extra.cuda.gdc_launch_dependents()
    attend_split(
        tl.program_id(0),
        tl.program_id(2),
        tl.program_id(1) // HEADS,
        tl.program_id(1) % HEADS,
        q_ptr,
        cache_ptr,
        cache_desc,
        table_ptr,
        lengths_ptr,
        ancestors_ptr,
        out_ptr,
        partial_ptr,
        softmax_ptr,
        stride_qb,
        stride_qn,
        stride_qh,
        stride_ckv,
        stride_cb,
        stride_ch,
        stride_tb,
        stride_ab,
        stride_an,
        stride_ob,
        stride_on,
        stride_oh,
        nodes,
        capacity,
        scale_log2,
        window,
        D,
        STRIDE_T,
        PAGE,
        GROUP,
        HEADS,
        WORDS,
        WINDOW,
        SPLITS,
        PROGRAMS,
        MIN_TILES,
        TMA,
        BLOCK_M,
        BLOCK_N,
        BLOCK_T,
        BLOCK_D,
    )


@triton.jit
def merge_rows(
    row_block,
    sequence,
    head,
    partial_ptr,
    softmax_ptr,
    lengths_ptr,
    out_ptr,
    stride_ob,
    stride_on,
    stride_oh,
    nodes,
    capacity,
    window,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up what programs left of rows row_block * BLOCK_R .. of one head of a sequence."""
    batch, rows = sequence.to(tl.int64), nodes * GROUP
    length = tl.minimum(tl.load(lengths_ptr + batch), capacity)
    oldest, newest = _span(length, nodes, capacity, window, WORDS, WINDOW, BLOCK_N)
    _, active = _share_out(newest - oldest, BLOCK_N, SPLITS, MIN_TILES)
    row, column, split = row_block * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    row_ok = row < rows
    mask = row_ok[:, None] & (column < D)[None, :]
    p_row = (batch * HEADS + head) * SPLITS * rows
    partial_ptr += p_row * D
    softmax_ptr += 2 * p_row
    tile = row[:, None] * D + column[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    ok = row_ok[:, None] & (split < active)[None, :]
    base = tl.max(tl.load(softmax_ptr + 2 * split[None, :] * rows + row[:, None], mask=ok, other=float("-inf")), 1)
    sums = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    whole = tl.zeros((BLOCK_R,), tl.float32)
    for index in tl.static_range(SPLITS):
        active_row = row_ok & (index < active)
        top = tl.load(softmax_ptr + 2 * index * rows + row, mask=active_row, other=float("-inf"))
        total = tl.load(softmax_ptr + (2 * index + 1) * rows + row, mask=active_row, other=0.0)
        partial = tl.load(partial_ptr + index * rows * D + tile, mask=mask & (index < active), other=0.0)
        beside = _relative_to(top, base)
        sums = tl.fma(partial, beside[:, None], sums)
        whole = tl.fma(total, beside, whole)
    out = _normalised(sums, whole)
    o_offset = (row // GROUP) * stride_on + (head * GROUP + row % GROUP) * stride_oh
    out_ptr += batch * stride_ob
    tl.store(out_ptr + (o_offset[:, None] + column[None, :]), out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["lengths_ptr", "nodes"])
def _merge_kernel(
    partial_ptr,
    softmax_ptr,
    lengths_ptr,
    out_ptr,
    stride_ob,
    stride_on,
    stride_oh,
    nodes,
    capacity,
    window,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (row blocks, B * Hkv): a program adds up the parts of BLOCK_R rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    merge_rows(
        tl.program_id(0),
        tl.program_id(1) // HEADS,
        tl.program_id(1) % HEADS,
        partial_ptr,
        softmax_ptr,
        lengths_ptr,
        out_ptr,
        stride_ob,
        stride_on,
        stride_oh,
        nodes,
        capacity,
        window,
        D,
        GROUP,
        HEADS,
        WORDS,
        WINDOW,
        SPLITS,
        MIN_TILES,
        PDL,
        BLOCK_N,
        BLOCK_R,
        BLOCK_S,
        BLOCK_D,
    )


class Settings(NamedTuple):
    """How one shape is launched: the keys are split into up to `splits` parts of at least `min_tiles` tiles, which are
    added up by a kernel of its own if there are as many `programs`, else by one program; that changes no bit.

    block_m rows, block_n keys per tile (block_t in tiles with new keys); tma: committed keys come through a tensor
    descriptor; pdl: 1 lets the merge launch early, 2 the attention kernel too; maxnreg caps the registers.
    """

    block_m: int
    block_n: int
    splits: int
    programs: int
    min_tiles: int
    num_warps: int
    num_stages: int
    block_t: int = 64
    tma: bool = False
    pdl: int = 0
    maxnreg: int = 0


def settings_for(
    rows: int,
    width: int,
    kv_heads: int,
    batch: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
) -> Settings:
    """The launch settings for `rows` = N * G query rows per key/value head. Of lengths they know nothing, and `splits`
    of the batch.

    `capability` is that of a CUDA device, None elsewhere. Measured on an H200 by `tools/tune_attention.py` (bf16, 32/8
    heads, d 128), both kernels together, µs at 512, 2048 and 8192 keys. 60 nodes of one sequence, 8 splits: 10.7,
    15.6, 31; 4 splits: 10.6, 22, 39. Of eight sequences one program for all splits takes 21, 58, 197, one for each of
    four 29, 59, 187. One node of one sequence, 16 splits: 5.9, 9.9, 15; 8 splits: 7.1, 13, 22. Of 64 sequences one
    program for all splits: 46, 134, 489, where reading alone takes 31, 126, 502. Between, few rows of eight sequences,
    neither is good: 12.8, 27, 79 with 16 splits, 10.7, 24, 75 with 8. Half of the splits up to 64 tiles: more are not
    worth their merge. A program that has no keys must do nothing at all: a batch has many. The number of a tile's page
    must be known a tile ahead: 37.7 instead of 31.4 at 8192 keys. Descriptors do not matter up to 2048 keys, and save
    2 % at 8192. A tile with new keys takes two to three times as long as another whatever its height, so block_t 64
    beats 32. Dependent launch (pdl 2) takes 0.3 µs off at 60 nodes, 0.6 at 10, if merges keep to MERGE_REGISTERS:
    else it costs 2.
    """
    hopper = capability is not None and capability[0] in (9, 10)
    num_stages = 3 if hopper else 2
    wide = width > 128
    if dtype == torch.float32:
        block_m, block_n, num_stages = (16 if rows <= 16 or wide else 32), (16 if wide else 32), 1
    elif rows <= 16:
        block_m, block_n = 16, 32 if wide else 64
    else:
        block_m, block_n = 64, 32 if wide else 64
    if capability is None:  # 64 KiB of shared memory on the CDNA 3 GPUs this is compiled for
        num_stages = 1
    few_rows = rows <= 64
    if rows > 1024:  # a chunk of a prompt fills the device with its row blocks
        splits = programs = 1
    else:
        for_a_split = kv_heads * triton.cdiv(rows, block_m)  # of one sequence
        splits = _power_of_two(min(264 // for_a_split, 8 if capability is None else 16))
        programs = splits if for_a_split * batch < (128 if few_rows else 256) else 1
    return Settings(
        block_m,
        block_n,
        splits,
        programs,
        2 if few_rows else 4,
        4,  # the megakernel's: launch.DRAFT_WARPS
        num_stages,
        min(block_n, 64),
        pdl=2 if hopper else 0,
        tma=hopper and rows > 16 and dtype != torch.float32,
    )


def _power_of_two(count: int) -> int:
    """The largest that is no more, at least 1: few variants to compile."""
    return 1 << (max(count, 1).bit_length() - 1)


def merge_rows_of(splits: int, width: int) -> int:
    """Rows of a program of the merge, which is one warp: as many as keep 64 loads of a thread in flight. No sum crosses
    threads."""
    return max(1, 2048 // (triton.next_power_of_2(splits) * max(16, triton.next_power_of_2(width))))


def settings_for_pieces(use: Settings, rows: int, heads: int) -> Settings:
    """The same for pieces of prompts, `rows` query rows of each of `heads` heads, all pieces counted.

    One split where they fill the device, else eight, and sixteen for many keys. On an H200, 32 pieces of 64 tokens of
    32 heads of 128 (bf16): 136 µs for a prompt of 2048 with one split, 193 and the merge with four; behind 14336 rows
    1179 with descriptors, 1257 without. Tiles of 128 query rows on 8 warps take 10 to 20 % longer, 128 keys 10 to 60 %
    (an experiment that was not kept).
    """
    fills = heads * triton.cdiv(rows, use.block_m) >= 96
    if fills:
        return use._replace(splits=1, programs=1, pdl=0)
    return use._replace(splits=16, programs=16, min_tiles=1)


def tree_attention(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None = None,
    *,
    scale: float,
    sliding_window: int | None = None,
    launch_nodes: int | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v for N new nodes per sequence, whose keys are in the cache already.

    q [B, N, Hq, d]; cache [2, B, Hkv, T, d] in q's dtype (fp16, bf16 or fp32), d <= 256; lengths [B] int32; ancestors
    [B, N, W] int64 or None (causal); `scale` > 0. See `reference.attention.tree_attention` for who sees what, and for
    the `table` of a cache in pages, which must be of 64 rows or a multiple where a sequence has several.
    The last dimension of every tensor must be contiguous; its other strides are free. `launch_nodes`: choose the
    launch settings for that many nodes. Returns [B, N, Hq, d]. Raises ValueError before the launch if shapes, dtypes,
    strides or devices do not fit.
    """
    check_tree_attention(q, cache, lengths, ancestors, scale, sliding_window, table)
    _check_kernel_limits(q, cache, lengths, ancestors, table)
    rows = (launch_nodes or q.shape[1]) * (q.shape[2] // cache.shape[2])
    use = settings_for(rows, q.shape[3], cache.shape[2], len(q), q.dtype, _capability(q.device))
    if ancestors is None and q.shape[1] >= _PIECE_NODES and table is not None:
        use = settings_for_pieces(use, rows, len(q) * cache.shape[2])
    return _launch(q, cache, lengths, ancestors, scale, sliding_window, use, table)


def attend_committed(q: Tensor, cache: Tensor, length: int, *, scale: float, table: Tensor) -> tuple[Tensor, Tensor]:
    """What N nodes of each sequence, however many, see of its first `length` rows, all that the table's pages have.

    q, cache and table as in `tree_attention`, length = W * R. Returns [B, N, Hq, d], and the natural logarithm of the
    sum of each row's weights, [B, Hq, N] float32, by which others can be added. Raises ValueError before the launch if
    shapes, dtypes, strides, devices or the length do not fit.
    """
    lengths = torch.full((len(q),), length, dtype=torch.int32, device=q.device)
    check_tree_attention(q, cache, lengths, None, scale, None, table)
    _check_kernel_limits(q, cache, lengths, None, table)
    if length != capacity_of(cache, table):
        raise ValueError(
            f"attend_committed: length must be all {capacity_of(cache, table)} rows of the table's pages, got {length}"
        )
    batch, nodes, heads, width = q.shape
    rows = nodes * (heads // cache.shape[2])
    use = settings_for(rows, width, cache.shape[2], batch, q.dtype, _capability(q.device))
    lse = torch.empty(batch, heads, nodes, dtype=torch.float32, device=q.device)
    use = use._replace(splits=1, programs=1, pdl=0)
    return _launch(q, cache, lengths, None, scale, None, use, table, lse), lse


def _capability(device: torch.device) -> tuple[int, int] | None:
    """That of a CUDA device, None elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None


def _check_kernel_limits(
    q: Tensor, cache: Tensor, lengths: Tensor, ancestors: Tensor | None, table: Tensor | None
) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or q.shape[-1] > 256:
        raise ValueError(
            f"tree_attention: q must be fp16, bf16 or fp32 with d <= 256, got {q.dtype} and d = {q.shape[-1]}"
        )
    if table is not None and table.shape[1] > 1 and cache.shape[3] % _TILE_ROWS:
        raise ValueError(
            f"tree_attention: pages must have a multiple of {_TILE_ROWS} rows, a tile's, got {cache.shape[3]}"
        )
    named = {"q": q, "cache": cache, "lengths": lengths, "ancestors": ancestors, "table": table}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"tree_attention: {name} must have stride 1 in its last dimension, got strides {tensor.stride()}"
            )
    elements = q.shape[1] * max(q.stride(1), q.shape[2] * q.shape[3])
    if elements >= 2**31:  # offsets within one sequence's q and out are int32
        raise ValueError(f"tree_attention: q must span less than 2^31 elements per sequence, got {elements}")


def _launch(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    scale: float,
    sliding_window: int | None,
    use: Settings,
    table: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    assert use.programs in (1, use.splits), "a program takes one split or all"
    assert lse is None or use.programs == 1, "a merge gives no log-sum-exp"
    batch, nodes, heads, width = q.shape
    kv_heads, capacity = cache.shape[2], capacity_of(cache, table)
    group, rows = heads // kv_heads, nodes * (heads // kv_heads)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    block_d = max(16, triton.next_power_of_2(width))
    partial = softmax = None
    if use.programs > 1:
        partial = torch.empty(batch, kv_heads, use.programs, rows, width, dtype=torch.float32, device=q.device)
        softmax = torch.empty(batch, kv_heads, use.programs, 2, rows, dtype=torch.float32, device=q.device)
    rows_of_memory = _rows_of_memory(cache) if use.tma and sliding_window is None else None
    desc = None if rows_of_memory is None else TensorDescriptor.from_tensor(rows_of_memory, [use.block_n, block_d])
    pdl = use.pdl if use.programs > 1 and can_overlap(q.device) else 0
    shared = {
        "D": width,
        "GROUP": group,
        "HEADS": kv_heads,
        "WORDS": 0 if ancestors is None else ancestors.shape[-1],
        "WINDOW": sliding_window is not None,
        "SPLITS": use.splits,
        "MIN_TILES": use.min_tiles,
        "PDL": pdl,
        "BLOCK_N": use.block_n,
        "BLOCK_D": block_d,
    }
    compiled = launch(_tree_attention_kernel, (triton.cdiv(rows, use.block_m), batch * kv_heads, use.programs))(
        q,
        cache,
        desc,
        table,
        lengths,
        ancestors,
        out,
        partial,
        lse if softmax is None else softmax,
        *q.stride()[:3],
        *cache.stride()[:3],
        0 if table is None else table.stride(0),
        *((0, 0) if ancestors is None else ancestors.stride()[:2]),
        *out.stride()[:3],
        nodes,
        capacity,
        scale * math.log2(math.e),
        sliding_window or 0,
        **shared,
        STRIDE_T=cache.stride(3),
        PAGE=kv_cache.page_rows(cache, table),
        PROGRAMS=use.programs,
        TMA=desc is not None,
        BLOCK_M=use.block_m,
        BLOCK_T=use.block_t,
        num_warps=use.num_warps,
        num_stages=use.num_stages,
        **EXACT,
        **({"launch_pdl": True} if pdl == 2 else {}),
        **({"maxnreg": use.maxnreg} if use.maxnreg else {}),
    )
    prefer_shared_memory(compiled)
    if use.programs > 1:
        block_s = triton.next_power_of_2(use.splits)
        block_r = merge_rows_of(use.splits, width)
        compiled = launch(_merge_kernel, (triton.cdiv(rows, block_r), batch * kv_heads))(
            partial,
            softmax,
            lengths,
            out,
            *out.stride()[:3],
            nodes,
            capacity,
            sliding_window or 0,
            **shared,
            BLOCK_R=block_r,
            BLOCK_S=block_s,
            num_warps=1,
            **EXACT,
            **({"maxnreg": MERGE_REGISTERS} if pdl and use.splits == 8 else {}),
            **({"launch_pdl": True} if pdl else {}),
        )
        prefer_shared_memory(compiled)
    return out


def _rows_of_memory(cache: Tensor) -> Tensor | None:
    """All rows of the memory that a cache [2, P, Hkv, R, d] lies in, from its first to its last, as a descriptor takes
    them: [n, d]. None if it cannot."""
    width = cache.shape[4]
    aligned = cache.data_ptr() % 16 == 0 and width * cache.element_size() % 16 == 0
    if not aligned or cache.stride(3) != width or any(stride % width for stride in cache.stride()[:3]):
        return None
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:4], cache.stride()[:4], strict=True))
    rows = last // width + 1
    return cache.as_strided((rows, width), (width, 1)) if rows < 2**31 else None  # its coordinates are int32
