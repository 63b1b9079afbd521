"""Attention of trees and prompts in Triton. A program attends a tile of rows over its splits of the keys, and a second
kernel adds up the programs' results. Formulas: `eagle_triton.attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.ops.layers.fp8_pair_rows import store_groups
from eagle_triton.ops.layers.values import in_word_order, rounded
from eagle_triton.ops.views import KeyValues, Pages

MANY_TILES = tl.constexpr(64)  # with at most this many tiles of keys, only half of the splits are used


class HeadSizes(NamedTuple):
    """`heads` of keys and values, of `width` elements, with a `group` of query heads each. word_order: store the
    output's columns in the order of WordOrdered. rest: keys have this many more elements, and their first `width` are
    the values; 0: values have a place of their own."""

    width: int
    group: int
    heads: int
    word_order: bool
    rest: int = 0


class Splits(NamedTuple):
    """Keys are split into up to `most` parts of at least `min_tiles` tiles. `programs` is `most` or 1."""

    most: int
    programs: int
    min_tiles: int


class Tiles(NamedTuple):
    """Sizes of a program's tiles: query rows; keys; keys in tiles with new ones; and columns, at least d."""

    rows: int
    keys: int
    new_keys: int
    columns: int


class KeyLayout(NamedTuple):
    """How a sequence's keys lie: rows of a `page` (0: all rows lie in one), and the `stride` from row to row.

    words: int64 words of a new node's ancestor bits, 0 if the nodes are causal.
    """

    page: int
    stride: int
    words: int


class Parts(NamedTuple):
    """The programs' results for their splits, in fp32.

    sums [B, Hkv, programs, N * G, d]: weighted values. softmax [B, Hkv, programs, 2, N * G]: the exponent (log2) that a
    row's weights are relative to, then their sum.
    """

    sums: Tensor
    softmax: Tensor


class Task(NamedTuple):
    """A program's task: a block of rows of one head of one sequence, over one split or all."""

    row_block: Any
    split: Any
    sequence: Any
    head: Any


class Limits(NamedTuple):
    """The cache rows that a sequence's nodes may see: the committed ones and `new_keys` more, below `capacity`.

    window: the most rows that each node sees, None for all.
    """

    lengths_ptr: Any
    new_keys: Any
    capacity: Any
    window: Any


class PagedCache(NamedTuple):
    """A cache, a descriptor of all rows of its memory or None, and each sequence's pages."""

    rows: KeyValues
    desc: Any
    pages: Pages  # ptr is None if sequence b has page b


class _HeadKeys(NamedTuple):
    """Keys and values of one head: where they begin in memory and in a descriptor, and where a sequence's pages
    begin."""

    k_ptr: Any
    v_ptr: Any
    desc: Any
    k_row: Any
    v_row: Any
    pages_ptr: Any
    page: Any  # from one page to the next


class _Queries(NamedTuple):
    """A tile of rows: their queries and nodes, which rows exist, and where the words of their ancestors begin.

    rest: the queries' elements beyond the values' width, or None.
    """

    q: Any
    rest: Any
    node: Any
    ok: Any
    bits_ptr: Any


class _Span(NamedTuple):
    """Cache rows first .. last - 1: a part of the `tiles` tiles that `active` splits share."""

    first: Any
    last: Any
    tiles: Any
    active: Any


@triton.jit
def _visible_rows(length, limits, BLOCK_N: tl.constexpr):
    """The cache rows [oldest, newest) that any node of a sequence may see, from a tile's start on."""
    oldest = 0
    if limits.window is not None:
        oldest = tl.maximum(length - limits.window, 0) // BLOCK_N * BLOCK_N
    return oldest, tl.minimum(length + limits.new_keys, limits.capacity)


@triton.jit
def _share_out(rows, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr):
    """The tiles of `rows` rows, and how many splits share them.

    The last tile counts twice: it holds the new keys, and their masks cost as much as a tile.
    """
    tiles = tl.cdiv(rows, BLOCK_N) + 1
    most = tl.where(tiles > MANY_TILES, SPLITS, (SPLITS + 1) // 2)
    return tiles, tl.minimum(tl.maximum(tl.minimum(tiles // MIN_TILES, tiles - 1), 1), most)


@triton.jit
def _first_tile(split, tiles, active):
    """The first tile of a split, where the split before it ends; split <= active."""
    return (split * tiles) // active


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def popcount(x):
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
        count += popcount(word & _low_bits(tl.zeros(row_ok.shape, tl.int32) + offset - 64 * index))
    return count


@triton.jit
def _page(pages_ptr, start, capacity, PAGE: tl.constexpr):
    """The page (int64) of the tile of rows from `start` on: 0 if PAGE is 0, any page past the capacity."""
    if PAGE:
        page = tl.load(pages_ptr + tl.minimum(start, capacity - 1) // PAGE).to(tl.int64)
    else:
        page = tl.full((), 0, tl.int64)
    return page


@triton.jit
def _tile_offset(page, start, stride_page, STRIDE_T: tl.constexpr, PAGE: tl.constexpr):
    """The tile's offset in elements, int64: it may be 2^31 or more."""
    if PAGE:
        offset = page * stride_page + start % PAGE * STRIDE_T
    else:
        offset = start * tl.full((), STRIDE_T, tl.int64)
    return offset


@triton.jit
def _tile_row(page, start, rows_page, PAGE: tl.constexpr):
    """The tile's first row among a descriptor's rows, where a page begins every `rows_page` rows."""
    row = start
    if PAGE:
        row = page.to(tl.int32) * rows_page + start % PAGE
    return row


@triton.jit
def _sink(logit):
    """The maximum and denominator of a row that has only its sink so far. logit: log2 of its weight, -inf for none."""
    top = tl.ceil(logit)
    return top, tl.exp2(logit - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _tanh(x):
    """tanh(x) to a few units in the last place. Near 0, where 1 - 2 / (exp(2x) + 1) is less exact, by a polynomial."""
    size, square = tl.abs(x), x * x
    series = tl.fma(tl.fma(square, 1.57394409e-2, -5.23025477e-2), square, 1.33152947e-1)
    series = tl.fma(series, square, -3.33327681e-1)
    far = 1.0 - 2.0 / (tl.exp2(size * 2.8853900817779268) + 1.0)
    return tl.where(size < 0.55, tl.fma(series * square, x, x), tl.where(x < 0.0, -far, far))


@triton.jit
def _fold(acc, top, total, scores, v, scale_log2, MASKED: tl.constexpr):
    """Fold a tile's scores and values into the running (weighted sum, maximum, denominator) of each row."""
    new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1) * scale_log2))
    exponent = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(tl.fma(scores, scale_log2, -exponent[:, None])).to(v.dtype)
    decay = tl.exp2(top - exponent)
    acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, tl.fma(total, decay, tl.sum(weights.to(tl.float32), 1))  # a lone key's weight is 1 in the end


@triton.jit
def _relative_to(top, exponent):
    """The power of two that takes sums relative to 2^top to 2^exponent, 0 for top -inf."""
    return tl.exp2(top - tl.where(exponent == float("-inf"), 0.0, exponent))


@triton.jit
def _add_split(sums, exponent, denominators, acc, top, total):
    """Add a split's (weighted sum, maximum, denominator) to the totals of the splits before it. Only the additions
    round, and small terms may underflow."""
    new_exponent = tl.maximum(exponent, top)
    old_factor, factor = _relative_to(exponent, new_exponent), _relative_to(top, new_exponent)
    return (
        tl.fma(acc, factor[:, None], sums * old_factor[:, None]),
        new_exponent,
        tl.fma(total, factor, denominators * old_factor),
    )


@triton.jit
def _begin_split(begins, sums, exponent, denominators, acc, top, total):
    """Where a split begins, add the one before it to the totals and start from nothing."""
    if begins:
        sums, exponent, denominators = _add_split(sums, exponent, denominators, acc, top, total)
        acc, top, total = _nothing(acc.shape[0], acc.shape[1])
    return sums, exponent, denominators, acc, top, total


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The weighted sum, maximum and denominator of no keys."""
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return tl.zeros((BLOCK_M, BLOCK_D), tl.float32), top, tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def _rest_columns(REST: tl.constexpr):
    """The columns [1, n] of the elements of queries and keys beyond the values' width."""
    return tl.arange(0, triton.next_power_of_2(REST) if REST > 16 else 16)[None, :]


@triton.jit
def _with_rest(scores, rest, k_ptrs, ok, REST: tl.constexpr):
    """Scores of a tile of keys, with the products of the elements beyond the values' width. rest: the queries'. k_ptrs:
    where the keys' begin; ok: which keys exist."""
    column = _rest_columns(REST)
    k = tl.load(k_ptrs[:, None] + column, mask=ok[:, None] & (column < REST), other=0.0)
    return tl.dot(rest, tl.trans(k), scores, input_precision="ieee")


@triton.jit
def _attend(
    queries,
    keys,
    limits,
    span,
    length,
    scale_log2,
    sink,
    tanh_scale,
    D: tl.constexpr,
    REST: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Attend a tile of rows over a span of the cache. Returns each row's weighted sum of values [rows, columns], the
    exponent (log2) that its weights are relative to (-inf: there are none), and the sum of its weights.

    Tiles of committed rows need no mask, unless there is a window. Tiles with new keys have a size of their own.
    ALL_SPLITS: the span covers all splits, and each is summed by itself first. sink: log2 of the weight that each row
    begins with, None: 0. Scores are scale_log2 * q k, or with tanh_scale scale_log2 * tanh(tanh_scale * q k).
    """
    BLOCK_M: tl.constexpr = TILES.rows
    BLOCK_N: tl.constexpr = TILES.keys
    BLOCK_T: tl.constexpr = TILES.new_keys
    BLOCK_D: tl.constexpr = TILES.columns
    STRIDE_T: tl.constexpr = KEYS.stride
    PAGE: tl.constexpr = KEYS.page
    WORDS: tl.constexpr = KEYS.words
    WINDOW: tl.constexpr = limits.window is not None
    TMA: tl.constexpr = keys.desc is not None
    node, row_ok, bits_ptr = queries.node, queries.ok, queries.bits_ptr
    first, last, tiles, active = span
    capacity, window = limits.capacity, limits.window
    rows_page = (keys.page // D).to(tl.int32)
    acc, top, total = _nothing(BLOCK_M, BLOCK_D)
    if ALL_SPLITS:
        sums, exponent, denominators = _nothing(BLOCK_M, BLOCK_D)
        split = 1  # the next to begin
    if sink is not None:
        top, total = _sink(sink)
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
    page = _page(keys.pages_ptr, first, capacity, PAGE)
    for start in tl.range(first, plain_last, BLOCK_N):
        following = _page(keys.pages_ptr, start + BLOCK_N, capacity, PAGE)  # a tile ahead, so that nothing waits for it
        if ALL_SPLITS:
            begins = start == first + _first_tile(split, tiles, active) * BLOCK_N
            split += begins
            sums, exponent, denominators, acc, top, total = _begin_split(
                begins, sums, exponent, denominators, acc, top, total
            )
        if TMA:
            k = keys.desc.load([keys.k_row + _tile_row(page, start, rows_page, PAGE), 0])
        else:
            ok = column_ok[None, :]
            if WINDOW:
                ok = ok & (start + row >= length - window)[:, None]
            offset = _tile_offset(page, start, keys.page, STRIDE_T, PAGE)
            k = tl.load(keys.k_ptr + offset + tile, mask=ok, other=0.0)
        scores = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
        if REST:
            k_ptrs = keys.k_ptr + offset + D + row * STRIDE_T
            scores = _with_rest(scores, queries.rest, k_ptrs, row < BLOCK_N, REST)
        if tanh_scale is not None:
            scores = _tanh(scores * tanh_scale)
        if WINDOW:
            scores = tl.where((start + row)[None, :] > (position - window)[:, None], scores, float("-inf"))
        if TMA:
            v = keys.desc.load([keys.v_row + _tile_row(page, start, rows_page, PAGE), 0])
        elif REST:
            v = k
        else:
            v = tl.load(keys.v_ptr + offset + tile, mask=ok, other=0.0)
        acc, top, total = _fold(acc, top, total, scores, v, scale_log2, WINDOW)
        page = following

    # The last committed rows and the new ones: a row's mask for a tile is one word of bits.
    row = tl.arange(0, BLOCK_T)
    tile = row[:, None] * STRIDE_T + column[None, :]
    for start in tl.range(tl.maximum(first, plain_last), last, BLOCK_T, num_stages=1):
        if ALL_SPLITS:
            begins = start == first + _first_tile(split, tiles, active) * BLOCK_N
            split += begins
            sums, exponent, denominators, acc, top, total = _begin_split(
                begins, sums, exponent, denominators, acc, top, total
            )
        rows = start + row
        ok = (rows < last)[:, None] & column_ok[None, :]
        offset = _tile_offset(page, start, keys.page, STRIDE_T, PAGE)
        page = _page(keys.pages_ptr, start + BLOCK_T, capacity, PAGE)
        k = tl.load(keys.k_ptr + offset + tile, mask=ok, other=0.0)
        if REST:
            v = k
        else:
            v = tl.load(keys.v_ptr + offset + tile, mask=ok, other=0.0)
        if WORDS:
            word = _window(bits_ptr, start - length, row_ok, WORDS)
            anyone = tl.reduce(word, 0, _either)
            half = tl.where((row < 32)[None, :], word.to(tl.int32)[:, None], (word >> 32).to(tl.int32)[:, None])
            visible = ((half >> (row & 31)[None, :]) & 1) != 0
            seen = ((anyone >> row.to(tl.int64)) & 1) != 0
            if WINDOW:
                before = tl.minimum(start, length) + _positions_before(bits_ptr, start - length, row_ok, WORDS)
                lower = word[:, None] & _low_bits(tl.zeros((BLOCK_M, BLOCK_T), tl.int32) + row[None, :])
                visible = visible & (before[:, None] + popcount(lower) > (position - window)[:, None])
        else:
            visible = (rows[None, :] <= (length + node)[:, None]) & row_ok[:, None]
            seen = rows <= length + tl.max(tl.where(row_ok, node, -1), 0)
            if WINDOW:
                visible = visible & (rows[None, :] > (position - window)[:, None])
        if WINDOW:
            seen = seen & (rows >= length - window)
        v = tl.where(seen[:, None], v, tl.zeros_like(v))  # a weight of 0 does not hide a NaN
        scores = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
        if REST:
            k_ptrs = keys.k_ptr + offset + D + row * STRIDE_T
            scores = _with_rest(scores, queries.rest, k_ptrs, rows < last, REST)
        if tanh_scale is not None:
            scores = _tanh(scores * tanh_scale)
        scores = tl.where(visible & (rows < last)[None, :], scores, float("-inf"))
        acc, top, total = _fold(acc, top, total, scores, v, scale_log2, True)
    if ALL_SPLITS:
        acc, top, total = _add_split(sums, exponent, denominators, acc, top, total)
    return acc, top, total


@triton.jit
def _normalised(acc, total):
    return acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def attend_split(
    task,
    q,
    cache,
    limits,
    ancestors,
    out,
    parts,
    lse_ptr,
    nodes,
    scale_log2,
    sinks_ptr,
    tanh_scale,
    KEYS: tl.constexpr,
    SIZES: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Attend the rows of a task. The sum of one split goes to `parts`, the sum of all to `out`, and its log-sum-exp
    [B, Hq, N] to `lse_ptr` if there is one. A split without keys writes nothing. The first split carries the sinks
    [Hq]."""
    D: tl.constexpr = SIZES.width
    REST: tl.constexpr = SIZES.rest
    GROUP: tl.constexpr = SIZES.group
    BLOCK_M: tl.constexpr = TILES.rows
    BLOCK_N: tl.constexpr = TILES.keys
    row_block, program, head = task.row_block, task.split, task.head
    batch, rows = task.sequence.to(tl.int64), nodes * GROUP
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok, node = row < rows, row // GROUP
    column = tl.arange(0, TILES.columns)
    mask = row_ok[:, None] & (column < D)[None, :]
    query_head = head * GROUP + row % GROUP
    q_offset = node * q.row + query_head * q.head
    length = tl.minimum(tl.load(limits.lengths_ptr + batch), limits.capacity)
    oldest, newest = _visible_rows(length, limits, BLOCK_N)
    tiles, active = _share_out(newest - oldest, BLOCK_N, SPLITS.most, SPLITS.min_tiles)
    if program < active:
        q_ptr = q.ptr + batch * q.batch
        query, rest = tl.load(q_ptr + (q_offset[:, None] + column[None, :]), mask=mask, other=0.0), None
        if REST:
            column_r = tl.arange(0, triton.next_power_of_2(REST) if REST > 16 else 16)[None, :]
            rest = tl.load(
                q_ptr + D + q_offset[:, None] + column_r, mask=row_ok[:, None] & (column_r < REST), other=0.0
            )
        first, last = oldest, newest
        if SPLITS.programs == SPLITS.most:
            first = oldest + _first_tile(program, tiles, active) * BLOCK_N
            last = tl.minimum(oldest + _first_tile(program + 1, tiles, active) * BLOCK_N, newest)
        if KEYS.words == 0:  # causal: nothing after the block's last node
            last = tl.minimum(last, length + tl.minimum((row_block + 1) * BLOCK_M - 1, rows - 1) // GROUP + 1)

        pages_ptr, page = cache.pages.ptr, batch
        if cache.pages.ptr is not None:
            pages_ptr = cache.pages.ptr + batch * cache.pages.row
            page = tl.zeros_like(batch) if KEYS.page else tl.load(pages_ptr).to(tl.int64)
        k_ptr = cache.rows.ptr + page * cache.rows.page + head.to(tl.int64) * cache.rows.head
        k_row = page.to(tl.int32) * (cache.rows.page // D).to(tl.int32) + head * (cache.rows.head // D).to(tl.int32)
        v_row = k_row + (cache.rows.side // D).to(tl.int32)
        bits_ptr = None
        if KEYS.words:
            bits_ptr = ancestors.ptr + batch * ancestors.batch + node * ancestors.row
        queries = _Queries(query, rest, node, row_ok, bits_ptr)
        keys = _HeadKeys(k_ptr, k_ptr + cache.rows.side, cache.desc, k_row, v_row, pages_ptr, cache.rows.page)
        span = _Span(first, last, tiles, active)
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + query_head, mask=row_ok & (program == 0), other=float("-inf")).to(tl.float32)
            sink *= 1.4426950408889634
        ALL_SPLITS: tl.constexpr = SPLITS.programs < SPLITS.most
        sums, top, total = _attend(
            queries, keys, limits, span, length, scale_log2, sink, tanh_scale, D, REST, KEYS, ALL_SPLITS, TILES
        )
        if SPLITS.programs == 1:
            o_offset = node * out.row + query_head * out.head
            o = _normalised(sums, total).to(out.ptr.dtype.element_ty)
            if SIZES.word_order:
                o = in_word_order(o)
            tl.store(out.ptr + batch * out.batch + (o_offset[:, None] + column[None, :]), o, mask=mask)
            if lse_ptr is not None:
                lse = (top + tl.log2(total)) * 0.6931471805599453
                tl.store(lse_ptr + (batch * SIZES.heads * GROUP + query_head) * nodes + node, lse, mask=row_ok)
        else:
            p_row = ((batch * SIZES.heads + head) * SPLITS.programs + program) * rows
            tl.store(parts.softmax + 2 * p_row + row, top, mask=row_ok)
            tl.store(parts.softmax + 2 * p_row + rows + row, total, mask=row_ok)
            tl.store(parts.sums + p_row * D + (row[:, None] * D + column[None, :]), sums, mask=mask)


@triton.jit(
    do_not_specialize=["new_keys"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr", "nodes", "sinks_ptr"],
)
def _tree_attention_kernel(
    q,
    cache,
    cache_desc,
    table_ptr,
    table_row,
    lengths_ptr,
    ancestors,
    out,
    parts,
    nodes,
    new_keys,
    capacity,
    scale_log2,
    sinks_ptr,
    window,
    lse_ptr,
    tanh_scale,
    KEYS: tl.constexpr,
    SIZES: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (row blocks, B * Hkv, programs): a program attends a block of rows of one head over its splits of the keys.

    Programs that are idle for every sequence come last, so that no busy one waits for them.
    """
    if PDL == 2:
        tl.extra.cuda.gdc_wait()
    if PDL:  # after the wait, because the merge reads the lengths before its own wait
        tl.extra.cuda.gdc_launch_dependents()
    sequence, head = tl.program_id(1) // SIZES.heads, tl.program_id(1) % SIZES.heads
    task = Task(tl.program_id(0), tl.program_id(2), sequence, head)
    cache = PagedCache(cache, cache_desc, Pages(table_ptr, table_row))
    limits = Limits(lengths_ptr, new_keys, capacity, window)
    attend_split(
        task, q, cache, limits, ancestors, out, parts, lse_ptr, nodes, scale_log2, sinks_ptr, tanh_scale,
        KEYS, SIZES, SPLITS, TILES,
    )  # fmt: skip


@triton.jit
def merge_rows(
    row_block,
    sequence,
    head,
    parts,
    limits,
    out,
    pair,
    nodes,
    all_rows,
    SIZES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the programs' results for rows row_block * BLOCK_R .. of one head of a sequence. Store the sums in `out`,
    or in `pair` as a Float8Pair, where a head's 128 elements are a group. all_rows: the nodes of all sequences."""
    D: tl.constexpr = SIZES.width
    GROUP: tl.constexpr = SIZES.group
    MAX_SPLITS: tl.constexpr = SPLITS.most
    batch, rows = sequence.to(tl.int64), nodes * GROUP
    # see runtime/overlap.py
    length = tl.minimum(tl.load(limits.lengths_ptr + batch, cache_modifier=".cg"), limits.capacity)
    oldest, newest = _visible_rows(length, limits, BLOCK_N)
    _, active = _share_out(newest - oldest, BLOCK_N, MAX_SPLITS, SPLITS.min_tiles)
    row, column = row_block * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    split = tl.arange(0, triton.next_power_of_2(MAX_SPLITS))
    row_ok = row < rows
    mask = row_ok[:, None] & (column < D)[None, :]
    p_row = (batch * SIZES.heads + head) * MAX_SPLITS * rows
    sums_ptr = parts.sums + p_row * D
    softmax_ptr = parts.softmax + 2 * p_row
    tile = row[:, None] * D + column[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    ok = row_ok[:, None] & (split < active)[None, :]
    exponent = tl.max(tl.load(softmax_ptr + 2 * split[None, :] * rows + row[:, None], mask=ok, other=float("-inf")), 1)
    sums = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    denominators = tl.zeros((BLOCK_R,), tl.float32)
    for index in tl.static_range(MAX_SPLITS):
        active_row = row_ok & (index < active)
        top = tl.load(softmax_ptr + 2 * index * rows + row, mask=active_row, other=float("-inf"))
        total = tl.load(softmax_ptr + (2 * index + 1) * rows + row, mask=active_row, other=0.0)
        partial = tl.load(sums_ptr + index * rows * D + tile, mask=mask & (index < active), other=0.0)
        factor = _relative_to(top, exponent)
        sums = tl.fma(partial, factor[:, None], sums)
        denominators = tl.fma(total, factor, denominators)
    merged = _normalised(sums, denominators)
    node, query_head = row // GROUP, head * GROUP + row % GROUP
    if pair is not None:
        tl.static_assert(D == 128)
        merged = rounded(merged, tl.bfloat16)
        size = SIZES.heads * GROUP * D
        store_groups(merged, query_head, batch * nodes + node, row_ok, pair.parts, pair.scale, all_rows, size)
    else:
        o_offset = node * out.row + query_head * out.head
        if SIZES.word_order:
            merged = in_word_order(merged)
        out_ptr = out.ptr + batch * out.batch
        tl.store(out_ptr + (o_offset[:, None] + column[None, :]), merged.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["all_rows", "new_keys"], do_not_specialize_on_alignment=["lengths_ptr", "nodes"])
def _merge_kernel(
    parts,
    lengths_ptr,
    out,
    pair,
    nodes,
    all_rows,
    new_keys,
    capacity,
    window,
    SIZES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (row blocks, B * Hkv): a program adds up the parts of BLOCK_R rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_block, sequence, head = tl.program_id(0), tl.program_id(1) // SIZES.heads, tl.program_id(1) % SIZES.heads
    limits = Limits(lengths_ptr, new_keys, capacity, window)
    merge_rows(
        row_block,
        sequence,
        head,
        parts,
        limits,
        out,
        pair,
        nodes,
        all_rows,
        SIZES,
        SPLITS,
        BLOCK_N,
        BLOCK_R,
        BLOCK_D,
        PDL,
    )
