"""Attention of trees on Hopper: a program loads keys and values while it multiplies earlier ones.

Splits and results are the same as in attention_tiles.py, bit for bit. Gluon places memory by hand. One warp of a
program only loads: tiles of keys and values come through TMA into a ring of slots in shared memory. Each slot has two
barriers: it is full, and it has been read. Four warps multiply. While the tensor cores add up a tile's values, these
warps make the weights of the next tile's scores. One loop goes through all splits, over committed and new keys.

Weights are rounded to 16 bits in pairs. Triton rounds them one by one (F2F), in the unit that also makes exponentials
(XU), which took an eighth to a quarter of the time. The same PTX gives the rounded weights back as fp32. Sums are only
scaled where a row's maximum has grown. Times: docs/speed-notes.md. Needs Triton 3.6.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from eagle_triton.ops import attention_tiles as kernels
from eagle_triton.ops.attention_tiles import Limits, Task
from eagle_triton.ops.layers.values import in_word_order
from eagle_triton.runtime.gluon import (
    TensorDescriptor,
    async_load,
    debug_barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
ROWS = 64  # query rows of a program, and keys of a tile: the bits of one word
REGISTERS = 128  # of a thread of 256, before the loading warps give theirs away: two programs fit
_ROWS = gl.constexpr(ROWS)
_LOADER = gl.constexpr(24)  # registers of a thread of the warp that loads


class _Ring(NamedTuple):
    """Slots for tiles of keys and of values. Each has two barriers: it is full, and it has been read."""

    k_tiles: Any
    v_tiles: Any
    full: Any
    read: Any


class _Span(NamedTuple):
    """Cache rows first .. last - 1: one split's part of the `tiles` tiles that `active` splits share. The first
    `committed` of its `own` tiles hold no new keys. In the first `narrowed` tiles a node's window may hide keys."""

    first: Any
    last: Any
    own: Any
    committed: Any
    narrowed: Any
    tiles: Any
    active: Any


class _HeadKeys(NamedTuple):
    """Keys and values of one head of a sequence: their first rows in the descriptor, and the sequence's pages, each of
    `page_rows` descriptor rows."""

    desc: Any
    pages_ptr: Any
    k_row: Any
    v_row: Any
    page_rows: Any


_share_out = gluon.jit(kernels._share_out.fn)
_visible_rows = gluon.jit(kernels._visible_rows.fn)
_popcount = gluon.jit(kernels.popcount.fn)
_in_word_order = gluon.jit(in_word_order.fn)
_first_tile = gluon.jit(kernels._first_tile.fn)
_either = gluon.jit(kernels._either.fn)
_relative_to = gluon.jit(kernels._relative_to.fn)
_sink = gluon.jit(kernels._sink.fn)

# PTX: rounds two numbers to 16 bits, in one register, and converts them back to fp32.
_ROUND_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;")
_ROUND_FP16 = gl.constexpr(
    "{ .reg .f16 a, b; cvt.rn.f16x2.f32 $0, $4, $3; mov.b32 {a, b}, $0; cvt.f32.f16 $1, a; cvt.f32.f16 $2, b; }"
)


def _scaling(count: int) -> tuple[gl.constexpr, gl.constexpr]:
    """PTX that multiplies `count` sums of a thread by their rows' factors, and its constraints: results, sums in the
    same registers, and factors. A thread has two of the tensor cores' sums from one row, then two from another."""
    sums, factors = range(count), range(2 * count, 3 * count)
    products = " ".join(f"mul.f32 ${i}, ${i}, ${j};" for i, j in zip(sums, factors, strict=True))
    test = f"setp.neu.f32 p, ${factors[0]}, 0f3F800000; setp.neu.or.f32 p, ${factors[2]}, 0f3F800000, p;"
    text = f"{{ .reg .pred p; {test} vote.sync.any.pred p, p, -1; @!p bra DONE; {products} DONE: }}"
    return gl.constexpr(text), gl.constexpr(",".join(["=&r"] * count + [str(i) for i in sums] + ["r"] * count))


_SCALE_32, _SCALE_32_OPERANDS = _scaling(32)  # of a tile of 64 rows and 64 columns
_SCALE_64, _SCALE_64_OPERANDS = _scaling(64)  # and of one of 128


def descriptor(rows_of_memory: Tensor, width: int) -> TensorDescriptor:
    """A descriptor of the rows [n, d] of a cache. Its tiles are `width` wide in shared memory."""
    return TensorDescriptor.from_tensor(rows_of_memory, [ROWS, width], TILE_LAYOUT)


def nodes_for(nodes: int, words: int) -> int:
    """The constexpr NODES. If every node has a bit, it does not depend on the number of nodes."""
    return triton.next_power_of_2(max(nodes, ROWS * words))


def stages_of(width: int) -> int:
    """The number of slots in a program's ring of 64 KiB."""
    return 2 if width > 64 else 4


@gluon.jit
def _word(bits_ptr, index, ok, WORDS: gl.constexpr):
    """Ancestor word `index` of each row; words before the first stand for committed rows, which all rows see."""
    stored = gl.load(bits_ptr + index, mask=ok & (index >= 0) & (index < WORDS), other=0)
    return gl.where(ok & (index < 0), gl.full(stored.shape, -1, gl.int64, stored.type.layout), stored)


@gluon.jit
def _window(bits_ptr, offset, ok, WORDS: gl.constexpr):
    """The 64 visibility bits of each row from new key `offset` on (negative: committed rows)."""
    index, shift = offset >> 6, (offset & 63).to(gl.int64)
    low = _word(bits_ptr, index, ok, WORDS)
    high = _word(bits_ptr, index + 1, ok, WORDS)
    ones = gl.full(low.shape, -1, gl.int64, low.type.layout)
    low = (low >> shift) & ~(ones << (63 - shift) << 1)  # a logical shift
    return low | (high << (63 - shift) << 1)


@gluon.jit
def _ring(desc, STAGES: gl.constexpr):
    k_tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, _ROWS, desc.block_type.shape[1]], desc.layout)
    v_tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, _ROWS, desc.block_type.shape[1]], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(read.index(slot), count=1)
    fence_async_shared()
    return _Ring(k_tiles, v_tiles, full, read)


@gluon.jit
def _page(pages_ptr, start, capacity, PAGE: gl.constexpr):
    """The page of the tile of rows from `start` on: 0 if a sequence has one page, any page past the capacity.

    It is read from L2: L1 may hold an older table, from before the preceding kernels.
    """
    page = start * 0
    if PAGE:
        page = gl.load(pages_ptr + gl.minimum(start, capacity - 1) // PAGE, cache_modifier=".cg")
    return page


@gluon.jit
def _load(keys, span, ring, capacity, KEYS: gl.constexpr, READ_EARLY: gl.constexpr):
    """Load a span's tiles. A slot takes the keys of one tile and the values of the tile before it.

    READ_EARLY: ask for tiles without new keys before the new ones are written.
    """
    k_tiles, v_tiles, full, read = ring
    desc, pages_ptr = keys.desc, keys.pages_ptr
    PAGE: gl.constexpr = KEYS.page
    first, count = span.first, span.own
    STAGES: gl.constexpr = full.shape[0]
    if not READ_EARLY:
        gdc_wait()
    row_before, page = first * 0, _page(pages_ptr, first, capacity, PAGE)
    for step in range(count + 1):
        if READ_EARLY:  # noqa: SIM102 (known before step is)
            if step == span.committed:
                gdc_wait()
        slot, start = step % STAGES, first + step * _ROWS
        row = start
        if PAGE:
            row = page * keys.page_rows + start % PAGE
        page = _page(pages_ptr, start + _ROWS, capacity, PAGE)  # a tile ahead, so that nothing waits for it
        mbarrier.wait(read.index(slot), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), desc.block_type.nbytes, pred=step < count)
        mbarrier.expect(full.index(slot), desc.block_type.nbytes, pred=step > 0)
        mbarrier.arrive(full.index(slot), pred=(step == 0) | (step == count))  # only keys or only values are loaded
        async_load(desc, [keys.k_row + row, 0], full.index(slot), k_tiles.index(slot), pred=step < count)
        async_load(desc, [keys.v_row + row_before, 0], full.index(slot), v_tiles.index(slot), pred=step > 0)
        row_before = row


@gluon.jit
def _per_row(x, like):
    """One number for each row, [rows, 1], in the layout of `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _rounded_in_pairs(x, DTYPE: gl.constexpr):
    """fp32 rounded to 16 bits, two numbers at a time, and the rounded numbers in fp32."""
    if DTYPE is gl.bfloat16:
        both = gl.inline_asm_elementwise(_ROUND_BF16, "=r,=r,=r,r,r", [x], (gl.bfloat16, gl.float32), True, 2)
    else:
        both = gl.inline_asm_elementwise(_ROUND_FP16, "=r,=r,=r,r,r", [x], (gl.float16, gl.float32), True, 2)
    return both


@gluon.jit
def _decayed(acc, decay):
    """acc [rows, d] times one factor per row: powers of two, mostly 1. A warp with only ones skips this."""
    factors = _per_row(decay, acc).broadcast_to(acc.shape)
    if acc.shape[1] == 128:
        acc = gl.inline_asm_elementwise(_SCALE_64, _SCALE_64_OPERANDS, [acc, factors], gl.float32, True, 64)
    else:
        gl.static_assert(acc.shape[1] == 64)
        acc = gl.inline_asm_elementwise(_SCALE_32, _SCALE_32_OPERANDS, [acc, factors], gl.float32, True, 32)
    return acc


@gluon.jit
def _weigh(scores, top, total, scale_log2, DTYPE: gl.constexpr):
    """The weights of a tile's scores, the factor for earlier sums, and each row's new (maximum, denominator).

    This is attention_tiles._fold without its product.
    """
    new_top = gl.maximum(top, gl.ceil(gl.max(scores, 1) * scale_log2))
    exponent = gl.where(new_top == float("-inf"), 0.0, new_top)
    scales = gl.full(scores.shape, scale_log2, gl.float32, scores.type.layout)
    weights = gl.exp2(gl.fma(scores, scales, (-exponent)[:, None].broadcast_to(scores.shape)))
    weights, rounded = _rounded_in_pairs(weights, DTYPE)
    decay = gl.exp2(top - exponent)
    return weights, decay, new_top, gl.fma(total, decay, gl.sum(rounded, 1))


@gluon.jit
def _add_split(sums, exponent, denominators, acc, top, total):
    """Add a split's (weighted sum, maximum, denominator) to the sum of earlier splits, as attention_tiles does."""
    new_exponent = gl.maximum(exponent, top)
    old_factor, factor = _relative_to(exponent, new_exponent), _relative_to(top, new_exponent)
    sums = gl.fma(acc, _per_row(factor, acc).broadcast_to(acc.shape), sums * _per_row(old_factor, acc))
    return sums, new_exponent, gl.fma(total, factor, denominators * old_factor)


@gluon.jit
def _visible_scores(scores, bits_ptr, ok, start, length, last, WORDS: gl.constexpr):
    """The scores of the keys from row `start` on; -inf where a row does not see the key."""
    word = _window(bits_ptr, start - length, ok, WORDS)
    column = gl.arange(0, _ROWS, gl.SliceLayout(0, scores.type.layout))
    half = gl.where((column < 32)[None, :], word.to(gl.int32)[:, None], (word >> 32).to(gl.int32)[:, None])
    visible = (((half >> (column & 31)[None, :]) & 1) != 0) & (start + column < last)[None, :]
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _oldest_key(bits_ptr, ok, length, window, WORDS: gl.constexpr):
    """The cache row of the first key in each row's window. The window holds all ancestors of the row's node."""
    ancestors = _popcount(gl.load(bits_ptr, mask=ok, other=0))
    for index in gl.static_range(1, WORDS):
        ancestors += _popcount(gl.load(bits_ptr + index, mask=ok, other=0))
    return length + ancestors - window


@gluon.jit
def _scores_in_window(scores, oldest, start):
    """The scores of the keys from row `start` on; -inf for those before each row's oldest key."""
    key = start + gl.arange(0, _ROWS, gl.SliceLayout(0, scores.type.layout))
    return gl.where(key[None, :] >= oldest[:, None], scores, float("-inf"))


@gluon.jit
def _clear_unseen(v_tile, bits_ptr, ok, start, length, last, window, WORDS: gl.constexpr, LOADS: gl.constexpr):
    """Set to zero the values from row `start` on that no node sees: a weight of 0 would not hide a NaN."""
    anyone = gl.reduce(_window(bits_ptr, start - length, ok, WORDS), 0, _either)
    key = gl.arange(0, _ROWS, gl.SliceLayout(1, LOADS))
    seen = (((anyone >> key.to(gl.int64)) & 1) != 0) & (start + key < last)
    if window is not None:
        seen = seen & (start + key >= length - window)
    v = v_tile.load(LOADS)
    v_tile.store(gl.where(seen[:, None], v, gl.zeros_like(v)))
    fence_async_shared()
    debug_barrier()


@gluon.jit
def _attend(
    task,
    q,
    ancestors,
    out,
    parts,
    span,
    q_tile,
    ring,
    nodes,
    length,
    scale_log2,
    sinks_ptr,
    window,
    KEYS: gl.constexpr,
    SIZES: gl.constexpr,
    SPLITS: gl.constexpr,
    NODES: gl.constexpr,
):
    """Attend the rows of a task over a span, and store the result.

    If there are more splits than programs, the span covers all splits, and each is summed by itself first.
    """
    k_tiles, v_tiles, full, read = ring
    row_block, program, batch, head = task
    first, last, count, committed, narrowed, tiles, active = span
    WORDS: gl.constexpr = KEYS.words
    D: gl.constexpr = SIZES.width
    GROUP: gl.constexpr = SIZES.group
    ALL_SPLITS: gl.constexpr = SPLITS.programs < SPLITS.most
    DTYPE: gl.constexpr = q_tile.dtype
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_D: gl.constexpr = q_tile.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    q_ptr, out_ptr = q.ptr + batch * q.batch, out.ptr + batch * out.batch
    bits_ptr = ancestors.ptr + batch * ancestors.batch
    rows = nodes * GROUP
    p_row = ((batch * SIZES.heads + head) * SPLITS.programs + program) * rows
    q_row = row_block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LOADS))
    q_column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LOADS))
    q_offset = q_row // GROUP * q.row + (head * GROUP + q_row % GROUP) * q.head
    row = row_block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, SCORES))
    row_ok, row_bits = row < rows, bits_ptr + row // GROUP * ancestors.row
    node = gl.arange(0, NODES, gl.BlockedLayout([1], [32], [4], [0]))
    node_ok, node_bits = node < nodes, bits_ptr + node * ancestors.row

    gdc_wait()
    query = gl.load(
        q_ptr + (q_offset[:, None] + q_column[None, :]),
        mask=(q_row < rows)[:, None] & (q_column < D)[None, :],
        other=0.0,
    )
    q_tile.store(query)
    fence_async_shared()

    zero = gl.zeros((_ROWS, _ROWS), gl.float32, SCORES)
    acc = gl.zeros((_ROWS, BLOCK_D), gl.float32, SUMS)
    top = gl.full((_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros((_ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    sums, exponent, denominators = acc, top, total
    if sinks_ptr is not None:
        sink_ok = row_ok & (program == 0)
        sink = gl.load(sinks_ptr + (head * GROUP + row % GROUP), mask=sink_ok, other=float("-inf")).to(gl.float32)
        top, total = _sink(sink * 1.4426950408889634)
    split, split_tile = 1, _first_tile(1, tiles, active)  # the next split, and its first tile
    if window is not None:
        oldest = _oldest_key(row_bits, row_ok, length, window, WORDS)

    mbarrier.wait(full.index(0), 0)
    scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(read.index(0))
    if committed == 0:
        scores = _visible_scores(scores, row_bits, row_ok, first, length, last, WORDS)
    if window is not None:  # noqa: SIM102 (known before narrowed is)
        if narrowed > 0:
            scores = _scores_in_window(scores, oldest, first)
    weights, decay, top, total = _weigh(scores, top, total, scale_log2, DTYPE)
    operand = gl.convert_layout(weights, WEIGHTS)
    for tile in range(1, count):
        slot, start = tile % STAGES, first + tile * _ROWS
        mbarrier.wait(full.index(slot), tile // STAGES & 1)
        scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        if (tile > committed) | (tile <= narrowed):
            _clear_unseen(v_tiles.index(slot), node_bits, node_ok, start - _ROWS, length, last, window, WORDS, LOADS)
        acc = _decayed(acc, decay)
        acc = warpgroup_mma(operand, v_tiles.index(slot), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        if tile >= committed:
            scores = _visible_scores(scores, row_bits, row_ok, start, length, last, WORDS)
        if window is not None:  # noqa: SIM102 (known before narrowed is)
            if tile < narrowed:
                scores = _scores_in_window(scores, oldest, start)
        if ALL_SPLITS:
            begins = tile == split_tile
            split_top, split_total = top, total
            top, total = gl.where(begins, float("-inf"), top), gl.where(begins, 0.0, total)
        weights, decay, top, total = _weigh(scores, top, total, scale_log2, DTYPE)
        if not ALL_SPLITS:
            # The slot is full already. This wait makes ptxas compute the weights before the wait below; otherwise it
            # waits for the sums first. That is better for many sequences, where memory is slow: slots are free early.
            mbarrier.wait(full.index(slot), tile // STAGES & 1)
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        mbarrier.arrive(read.index(slot))
        operand = gl.convert_layout(weights, WEIGHTS)
        if ALL_SPLITS:  # noqa: SIM102 (known before begins is)
            if begins:
                sums, exponent, denominators = _add_split(sums, exponent, denominators, acc, split_top, split_total)
                acc = gl.zeros((_ROWS, BLOCK_D), gl.float32, SUMS)
                split += 1
                split_tile = _first_tile(split, tiles, active)
    slot = count % STAGES
    mbarrier.wait(full.index(slot), count // STAGES & 1)
    if (count > committed) | (count <= narrowed):
        start = first + (count - 1) * _ROWS
        _clear_unseen(v_tiles.index(slot), node_bits, node_ok, start, length, last, window, WORDS, LOADS)
    acc = _decayed(acc, decay)
    acc = warpgroup_mma(operand, v_tiles.index(slot), acc, is_async=True)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    if ALL_SPLITS:
        acc, top, total = _add_split(sums, exponent, denominators, acc, top, total)

    out_row = row_block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, SUMS))
    out_column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, SUMS))
    mask = (out_row < rows)[:, None] & (out_column < D)[None, :]
    if SPLITS.programs == 1:
        o = (acc * _per_row(1.0 / gl.where(total == 0.0, 1.0, total), acc)).to(DTYPE)
        if SIZES.word_order:
            o = _in_word_order(o)
            out_row = row_block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, o.type.layout))
            out_column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, o.type.layout))
            mask = (out_row < rows)[:, None] & (out_column < D)[None, :]
        offset = out_row // GROUP * out.row + (head * GROUP + out_row % GROUP) * out.head
        gl.store(out_ptr + (offset[:, None] + out_column[None, :]), o, mask=mask)
    else:
        gl.store(parts.softmax + 2 * p_row + row, top, mask=row_ok)
        gl.store(parts.softmax + 2 * p_row + rows + row, total, mask=row_ok)
        gl.store(parts.sums + p_row * D + (out_row[:, None] * D + out_column[None, :]), acc, mask=mask)


@gluon.jit(
    do_not_specialize=["new_keys"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr", "nodes", "sinks_ptr"],
)
def tree_attention_kernel(
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
    KEYS: gl.constexpr,
    SIZES: gl.constexpr,
    SPLITS: gl.constexpr,
    NODES: gl.constexpr,
    STAGES: gl.constexpr,
    READ_EARLY: gl.constexpr,
):
    """Grid (row blocks, B * Hkv, programs): like attention_tiles._tree_attention_kernel, for at most NODES nodes.

    cache_desc: all rows of the cache's memory, [n, d]. window: at least as many keys as a node has bits, or
    None. READ_EARLY: read lengths, table and committed rows before the preceding kernels have ended.
    """
    D: gl.constexpr = SIZES.width
    row_block, program = gl.program_id(0), gl.program_id(2)
    sequence, head = gl.program_id(1) // SIZES.heads, gl.program_id(1) % SIZES.heads
    ring = _ring(cache_desc, STAGES)
    q_tile = gl.allocate_shared_memory(cache_desc.dtype, cache_desc.block_type.shape, cache_desc.layout)
    if not READ_EARLY:
        gdc_wait()
    gdc_launch_dependents()
    batch = sequence.to(gl.int64)
    length = gl.maximum(gl.minimum(gl.load(lengths_ptr + batch, cache_modifier=".cg"), capacity), 0)
    oldest, newest = _visible_rows(length, Limits(lengths_ptr, new_keys, capacity, window), _ROWS)
    tiles, active = _share_out(newest - oldest, _ROWS, SPLITS.most, SPLITS.min_tiles)
    if program < active:
        first, last = oldest, newest
        if SPLITS.programs == SPLITS.most:
            first = oldest + _first_tile(program, tiles, active) * _ROWS
            last = gl.minimum(oldest + _first_tile(program + 1, tiles, active) * _ROWS, newest)
        count, narrowed = gl.cdiv(last - first, _ROWS), 0
        if window is not None:
            narrowed = gl.cdiv(gl.maximum(length + KEYS.words * 64 - window - first, 0), _ROWS)
        committed = gl.minimum(gl.maximum(length // _ROWS * _ROWS - first, 0) // _ROWS, count)
        pages_ptr, page = table_ptr, sequence
        if table_ptr is not None:
            pages_ptr = table_ptr + batch * table_row
            if not KEYS.page:
                page = gl.load(pages_ptr, cache_modifier=".cg")
        page_rows = (cache.page // D).to(gl.int32)
        k_row = head * (cache.head // D).to(gl.int32)
        if not KEYS.page:
            k_row += page * page_rows
        v_row = k_row + (cache.side // D).to(gl.int32)
        task = Task(row_block, program, batch, head)
        keys = _HeadKeys(cache_desc, pages_ptr, k_row, v_row, page_rows)
        span = _Span(first, last, count, committed, narrowed, tiles, active)
        # fmt: off
        gl.warp_specialize([
            (_attend, (task, q, ancestors, out, parts, span, q_tile, ring, nodes, length, scale_log2,
                       sinks_ptr, window, KEYS, SIZES, SPLITS, NODES)),
            (_load, (keys, span, ring, capacity, KEYS, READ_EARLY)),
        ], [1], [_LOADER])
        # fmt: on
