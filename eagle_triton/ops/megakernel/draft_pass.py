"""The megakernel's phases of a draft pass, in the order in which they run, and the tree that the last one builds.

Each function goes through this program's tasks of one phase.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eagle_triton.kv_cache import row_offset
from eagle_triton.ops.attention_tiles import (
    Limits,
    PagedCache,
    Parts,
    Task,
    attend_split,
    merge_rows,
)
from eagle_triton.ops.layers.norms import norm_row
from eagle_triton.ops.layers.rotary import HeadNorms, NodeHead, Projected, Turn, rotary_append_head
from eagle_triton.ops.linear.few_rows import Operand, add_bias, product_steps, store_tile, swiglu_tile
from eagle_triton.ops.megakernel.tensors import Pass
from eagle_triton.ops.megakernel.verify import index_of, wide
from eagle_triton.ops.tree import (
    ChunkBest,
    Lists,
    Tree,
    choose_beam,
    store_ancestors,
    topk_chunk,
    topk_merge,
    write_tree,
)
from eagle_triton.ops.views import BatchedRows, CacheLayer, Cube, Heads, KeyValues, Matrix, Rows, Vector
from eagle_triton.runtime.launch import DRAFT_WARPS

_WARPS = tl.constexpr(DRAFT_WARPS)
# The phases of a pass. FC and SUM are for EAGLE-1; EAGLE-3 runs its fc once, before the passes.
INPUTS, FC, SUM, QKV, ROTARY, ATTEND, MERGE, OUT, POST, SWIGLU, DOWN, NORM, LOGITS, TOPK, BEST = map(
    tl.constexpr, range(15)
)


@triton.jit
def pass_of(index, state, SIZES: tl.constexpr):
    """The pass number `index`, a Pass."""
    TREE: tl.constexpr = SIZES.tree
    plan = state.plan
    STEPS: tl.constexpr = TREE.passes + 1
    BEAM: tl.constexpr = TREE.beam
    K: tl.constexpr = TREE.top_k
    first = index == 0
    level = tl.maximum(index - 1, 0)  # its chosen children are the nodes of this pass
    if TREE.uniform:
        count = tl.where(first, STEPS, BEAM)
        above = tl.where(level == 0, 1, BEAM)
        first_slot = level * BEAM
        start = tl.where(level == 0, 0, K + (level - 1) * (BEAM * K))
        next_start = tl.where(first, 0, K + level * (BEAM * K))
    else:
        count = tl.where(first, STEPS, tl.load(plan.levels + level))
        above = tl.where(level == 0, 1, tl.load(plan.levels + tl.maximum(level - 1, 0)))
        first_slot = tl.load(plan.levels + STEPS + level)
        start = tl.load(plan.levels + 2 * STEPS + level)
        next_start = tl.load(plan.levels + 2 * STEPS + index)
    rows = TREE.batch * count
    ends = tl.where(first, TREE.batch, rows)  # after the pass over accepted tokens, only last rows continue
    return Pass(first, level, count, above, first_slot, start, next_start, rows, ends)


@triton.jit
def make_inputs(grid, here, state, SIZES: tl.constexpr):
    """The embedding and the feature of each node of a Pass. A node's program finds the beam for itself; that of a
    sequence's first node also stores it."""
    HEAD: tl.constexpr = SIZES.head
    sequences, layer, work = state.sequences, state.layer, state.work
    HIDDEN: tl.constexpr = HEAD.hidden
    BLOCK_H: tl.constexpr = triton.next_power_of_2(HIDDEN)
    for task in range(grid.program, here.rows * 2 * grid.ok, SIZES.programs):
        row = wide(task // 2)
        is_token = task % 2 == 0
        batch = row // here.count
        place = row % here.count
        feature = row
        if here.first:
            column = tl.minimum(tl.load(sequences.before + batch) + 1 + place, sequences.columns - 1)
            token = tl.load(sequences.tokens + batch * sequences.columns + column)
        else:
            token, feature = _node_of_beam(here, batch, place, is_token, state, SIZES)
        inputs = work.inputs + row * (2 * HIDDEN)
        picked = work.residual + row * HIDDEN
        if HEAD.eagle3 and here.first and (task % 2 == 1):
            norm_row(
                work.products + feature * HIDDEN,
                layer.feature_norm,
                None,
                inputs + HIDDEN,
                picked,
                here.rows * HIDDEN,
                layer.feature_eps,
                HIDDEN,
                BLOCK_H,
                SIZES.products.fc_splits,
                False,
            )
        else:
            source = work.hidden + feature * HIDDEN
            weight = layer.feature_norm
            eps = layer.feature_eps
            out = inputs + HIDDEN
            if here.first:
                source = work.gathered + feature * HIDDEN
            if is_token:
                source = layer.embedding + token * HIDDEN
                weight = layer.token_norm
                eps = layer.token_eps
                out = inputs
                picked = work.normed + row * HIDDEN  # a place that is never read
            norm_row(source, weight, None, out, picked, 0, eps, HIDDEN, BLOCK_H, 1, False)


@triton.jit
def _node_of_beam(here, batch, place, is_token, state, SIZES: tl.constexpr):
    """The token and the feature's row of node `place` of a sequence's beam."""
    TREE: tl.constexpr = SIZES.tree
    WORDS: tl.constexpr = TREE.words
    plan, work = state.plan, state.work
    K: tl.constexpr = TREE.top_k
    BEAM: tl.constexpr = TREE.beam
    BEAM_WIDTH: tl.constexpr = triton.next_power_of_2(BEAM)
    CHILDREN: tl.constexpr = triton.next_power_of_2(BEAM * K)
    lane = tl.arange(0, BEAM_WIDTH)
    child = tl.arange(0, CHILDREN)
    scores_above = work.beam_scores + (here.level * TREE.batch + batch) * BEAM
    log_probs = work.log_probs + batch * here.above * K
    named = plan.beam_children
    if plan.beam_children is not None:
        named += here.first_slot
    parents, children = Vector(scores_above, 1), Matrix(log_probs, K, 1)
    score, chosen = choose_beam(parents, children, named, here.above * K, K, here.count, CHILDREN, BEAM_WIDTH)
    mine = tl.sum(tl.where(lane == place, chosen, 0), 0)
    token = tl.load(work.candidates + batch * TREE.candidates + here.start + mine)
    feature = batch * here.above + mine // K
    if is_token & (place == 0):
        parent = chosen // K
        in_beam = lane < here.count
        own = tl.load(scores_above + parent, mask=in_beam, other=0.0)
        own += tl.load(log_probs + chosen, mask=in_beam, other=0.0)
        scores = work.scores + batch * TREE.candidates + here.start
        tl.store(scores + child, score, mask=child < here.above * K)
        tl.store(work.beam_scores + ((here.level + 1) * TREE.batch + batch) * BEAM + lane, own, mask=in_beam)
        slots = work.beam_candidates + batch * TREE.slots + here.first_slot
        tl.store(slots + lane, (chosen + here.start).to(tl.int64), mask=in_beam)
        masks = work.beam_ancestors + (here.level * TREE.batch + batch) * (BEAM * WORDS)
        masks_out = masks + TREE.batch * BEAM * WORDS
        bits_above = Matrix(masks, WORDS, 1)
        store_ancestors(bits_above, masks_out, parent, here.first_slot, here.count, WORDS, BEAM_WIDTH)
    return token, feature


@triton.jit
def multiply(grid, here, kind, state, SIZES: tl.constexpr):
    """A product of phase QKV, OUT, DOWN, LOGITS or FC, in fp32 parts, or as logits."""
    HEAD: tl.constexpr = SIZES.head
    PRODUCTS: tl.constexpr = SIZES.products
    layer, work = state.layer, state.work
    HIDDEN: tl.constexpr = HEAD.hidden
    Q_COLS: tl.constexpr = HEAD.q_cols
    KV_COLS: tl.constexpr = HEAD.kv_cols
    TILE_N: tl.constexpr = PRODUCTS.columns
    SWAP: tl.constexpr = PRODUCTS.swap
    Q_TILES: tl.constexpr = (Q_COLS + TILE_N - 1) // TILE_N
    KV_TILES: tl.constexpr = (KV_COLS + TILE_N - 1) // TILE_N
    source, source_desc = work.inputs, state.inputs.qkv
    weight, weight_desc = layer.q, state.weights.q
    depth, width, tiles, splits = 2 * HIDDEN, Q_COLS + 2 * KV_COLS, Q_TILES + 2 * KV_TILES, PRODUCTS.qkv_splits
    height = here.rows
    if not HEAD.eagle3:
        source, depth = work.residual, HIDDEN
    if kind == FC:
        source_desc, splits, weight, weight_desc = state.inputs.fc, PRODUCTS.fc_splits, layer.fc, state.weights.fc
        source = work.gathered if HEAD.eagle3 else work.inputs
        depth = state.target.features if HEAD.eagle3 else 2 * HIDDEN
    elif kind == OUT:
        source, source_desc, depth, splits = work.attended, state.inputs.o, Q_COLS, PRODUCTS.out_splits
        weight, weight_desc = layer.o, state.weights.o
    elif kind == DOWN:
        source, source_desc, depth, splits = work.inner, state.inputs.down, HEAD.inner, PRODUCTS.down_splits
        weight, weight_desc = layer.down, state.weights.down
    elif kind == LOGITS:
        source, source_desc, depth, splits = work.hidden, state.inputs.head, HIDDEN, 1
        if HEAD.eagle3:
            source = work.head_in
        weight, weight_desc = layer.head, state.weights.head
        width, tiles, height = layer.vocabulary, tl.cdiv(layer.vocabulary, TILE_N), here.ends
    if (kind == FC) | (kind == OUT) | (kind == DOWN):
        width, tiles = HIDDEN, tl.cdiv(HIDDEN, TILE_N)
    for task in range(grid.program, tiles * splits * grid.ok, SIZES.programs):
        tile, split = task // splits, task % splits
        cols, base = width, 0
        own, own_desc, bias = weight, weight_desc, layer.q_bias
        if kind == QKV:  # one product of three weights
            cols = Q_COLS
            if tile >= Q_TILES + KV_TILES:
                tile -= Q_TILES + KV_TILES
                own, own_desc, bias = layer.v, state.weights.v, layer.v_bias
                cols, base = KV_COLS, Q_COLS + KV_COLS
            elif tile >= Q_TILES:
                tile -= Q_TILES
                own, own_desc, bias = layer.k, state.weights.k, layer.k_bias
                cols, base = KV_COLS, Q_COLS
        column = tile * TILE_N
        acc = product_steps(
            Operand(source, source_desc, depth, height),
            Operand(own, own_desc, depth, cols),
            0,
            column,
            split,
            splits,
            depth,
            PRODUCTS.rows,
            TILE_N,
            PRODUCTS.depth,
            SWAP,
            PRODUCTS.even,
            PRODUCTS.stages,
        )
        if layer.q_bias is not None and kind == QKV:
            acc = add_bias(acc, bias, column, tl.where(split == 0, cols, 0), TILE_N, SWAP)
        if layer.fc_bias is not None and kind == FC:
            acc = add_bias(acc, layer.fc_bias, column, tl.where(split == 0, cols, 0), TILE_N, SWAP)
        if kind == LOGITS:
            logits = Rows(work.logits, layer.vocabulary)
            store_tile(acc, None, logits, 0, column, height, cols, PRODUCTS.rows, TILE_N, SWAP)
        else:
            products = Rows(work.products + wide(split) * height * width + base, width)
            store_tile(acc, None, products, 0, column, height, cols, PRODUCTS.rows, TILE_N, SWAP)


@triton.jit
def rotate_and_append(grid, here, state, SIZES: tl.constexpr):
    """Rotate queries and keys, and append keys and values to the draft's cache."""
    HEADS: tl.constexpr = SIZES.head.heads
    WIDTH: tl.constexpr = SIZES.head.width
    PAGE: tl.constexpr = SIZES.head.page
    PLANE: tl.constexpr = PAGE * WIDTH  # a head's keys or values in a page
    KV_COLS: tl.constexpr = SIZES.head.kv_cols
    QKV_COLS: tl.constexpr = SIZES.head.q_cols + 2 * KV_COLS
    ROTATION: tl.constexpr = SIZES.rotation
    pages, sequences, layer, work = state.pages, state.sequences, state.layer, state.work
    capacity = pages.row * PAGE
    for task in range(grid.program, here.rows * HEADS * grid.ok, SIZES.programs):
        place = task % here.count
        batch = wide(task // (here.count * HEADS))
        first_row = tl.load(sequences.before + batch)
        position = first_row + place
        if not here.first:
            length = tl.load(sequences.lengths + batch)
            first_row = length + here.first_slot
            position = length + here.level
        row = wide(first_row + place)
        fits = (row >= 0) & (row < capacity)
        cache = CacheLayer(state.draft.cache, HEADS * PLANE, 2 * HEADS * PLANE, PLANE, WIDTH)
        offset = row_offset(cache, pages, batch, row, fits, PAGE)
        sequence, key_ptr = here.count * QKV_COLS, work.products + SIZES.head.q_cols
        rotary_append_head(
            NodeHead(place, wide(task // here.count % HEADS), batch, position, offset, fits),
            Projected(
                Heads(work.products, sequence, QKV_COLS, WIDTH),
                Heads(key_ptr, sequence, QKV_COLS, WIDTH),
                Heads(key_ptr + KV_COLS, sequence, QKV_COLS, WIDTH),
                here.rows * QKV_COLS,
            ),
            cache,
            Turn(layer.inv_freq, layer.rotary_scaling),
            HeadNorms(None, None, 0.0),
            None,
            work.queries,
            here.count,
            ROTATION,
        )


@triton.jit
def attend(grid, here, state, SIZES: tl.constexpr):
    """Attend each split of the draft's keys."""
    HEADS: tl.constexpr = SIZES.head.heads
    Q_COLS: tl.constexpr = SIZES.head.q_cols
    WIDTH: tl.constexpr = SIZES.head.width
    PAGE: tl.constexpr = SIZES.head.page
    PLANE: tl.constexpr = PAGE * WIDTH
    WORDS: tl.constexpr = SIZES.tree.words
    NODES: tl.constexpr = SIZES.tree.batch * SIZES.tree.beam
    KEYS: tl.constexpr = SIZES.attention.keys
    HEAD_SIZES: tl.constexpr = SIZES.attention.heads
    SPLITS: tl.constexpr = SIZES.attention.splits
    TILES: tl.constexpr = SIZES.attention.tiles
    sequences, work = state.sequences, state.work
    visible = sequences.lengths
    bits = work.beam_ancestors + (here.level + 1) * (NODES * WORDS)
    bits_stride = SIZES.tree.beam * WORDS
    if here.first:
        visible, bits, bits_stride = sequences.before, state.plan.chain, (SIZES.tree.passes + 1) * WORDS
    row_blocks = tl.cdiv(here.count * SIZES.head.group, TILES.rows)
    for task in range(grid.program, row_blocks * SPLITS.most * SIZES.tree.batch * HEADS * grid.ok, SIZES.programs):
        head = index_of(task // (row_blocks * SPLITS.most))
        planes = KeyValues(state.draft.cache, wide(HEADS * PLANE), wide(2 * HEADS * PLANE), wide(PLANE))
        attend_split(
            Task(task // SPLITS.most % row_blocks, task % SPLITS.most, head // HEADS, head % HEADS),
            Heads(work.queries, here.count * Q_COLS, Q_COLS, WIDTH),
            PagedCache(planes, None, state.pages),
            Limits(visible, 64 * WORDS, state.pages.row * PAGE, None),
            BatchedRows(bits, bits_stride, WORDS),
            Heads(work.attended, here.count * Q_COLS, Q_COLS, WIDTH),
            Parts(work.partial, work.softmax),
            None,
            here.count,
            state.layer.scale_log2,
            None,
            None,
            KEYS,
            HEAD_SIZES,
            SPLITS,
            TILES,
        )


@triton.jit
def merge_splits(grid, here, state, SIZES: tl.constexpr):
    """Add up the splits of attention, if there are several."""
    HEADS: tl.constexpr = SIZES.head.heads
    Q_COLS: tl.constexpr = SIZES.head.q_cols
    WIDTH: tl.constexpr = SIZES.head.width
    WORDS: tl.constexpr = SIZES.tree.words
    PAGE: tl.constexpr = SIZES.head.page
    HEAD_SIZES: tl.constexpr = SIZES.attention.heads
    SPLITS: tl.constexpr = SIZES.attention.splits
    TILES: tl.constexpr = SIZES.attention.tiles
    ROWS: tl.constexpr = _WARPS * (128 // TILES.columns if TILES.columns < 128 else 1)
    if SPLITS.most > 1:
        work, visible = state.work, state.sequences.lengths
        if here.first:
            visible = state.sequences.before
        row_blocks = tl.cdiv(here.count * SIZES.head.group, ROWS)
        for task in range(grid.program, row_blocks * SIZES.tree.batch * HEADS * grid.ok, SIZES.programs):
            head = index_of(task // row_blocks)
            merge_rows(
                task % row_blocks,
                head // HEADS,
                head % HEADS,
                Parts(work.partial, work.softmax),
                Limits(visible, 64 * WORDS, state.pages.row * PAGE, None),
                Heads(work.attended, here.count * Q_COLS, Q_COLS, WIDTH),
                None,
                here.count,
                0,
                HEAD_SIZES,
                SPLITS,
                TILES.keys,
                ROWS,
                TILES.columns,
                False,
            )


@triton.jit
def norm_sums(grid, here, kind, state, SIZES: tl.constexpr):
    """Add up the parts of a product and norm the sum: after o in POST, after down in NORM. SUM is without a norm."""
    HEAD: tl.constexpr = SIZES.head
    PRODUCTS: tl.constexpr = SIZES.products
    draft, layer, work = state.draft, state.layer, state.work
    STEPS: tl.constexpr = SIZES.tree.passes + 1
    HIDDEN: tl.constexpr = HEAD.hidden
    BLOCK_H: tl.constexpr = triton.next_power_of_2(HIDDEN)
    for task in range(grid.program, tl.where(kind == NORM, here.ends, here.rows) * grid.ok, SIZES.programs):
        row = wide(task)
        source = row
        if here.first & (kind == NORM):
            source = row * STEPS + tl.maximum(tl.load(state.verified.accepted + row), 0)
        sums = work.products + source * HIDDEN
        x = work.x + source * HIDDEN
        if kind == POST:
            residual = work.residual + row * HIDDEN
            if HEAD.normed_residual:
                residual = work.inputs + (row * 2 + 1) * HIDDEN
            norm_row(
                sums,
                layer.post_norm,
                residual,
                work.normed + row * HIDDEN,
                x,
                here.rows * HIDDEN,
                layer.post_eps,
                HIDDEN,
                BLOCK_H,
                PRODUCTS.out_splits,
                False,
            )
        elif kind == NORM:
            out = work.hidden + row * HIDDEN
            normed, total = out, None
            if HEAD.eagle3:
                normed, total = work.head_in + row * HIDDEN, out
            norm_row(
                sums,
                layer.norm,
                x,
                normed,
                total,
                here.rows * HIDDEN,
                layer.norm_eps,
                HIDDEN,
                BLOCK_H,
                PRODUCTS.down_splits,
                False,
            )
            if here.first:  # a later call may grow another tree from here
                column = tl.arange(0, BLOCK_H)
                tl.debug_barrier()
                value = tl.load(out + column, mask=column < HIDDEN)
                tl.store(draft.hidden + row * HIDDEN + column, value, mask=column < HIDDEN)
                value = tl.load(normed + column, mask=column < HIDDEN)
                tl.store(draft.normed + row * HIDDEN + column, value, mask=column < HIDDEN)
        elif not HEAD.eagle3:
            out = work.residual + row * HIDDEN
            norm_row(sums, None, None, out, None, here.rows * HIDDEN, 0.0, HIDDEN, BLOCK_H, PRODUCTS.fc_splits, False)


@triton.jit
def multiply_swiglu(grid, here, state, SIZES: tl.constexpr):
    """silu(x gate^T) * (x up^T)."""
    HEAD: tl.constexpr = SIZES.head
    PRODUCTS: tl.constexpr = SIZES.products
    INNER: tl.constexpr = HEAD.inner
    HIDDEN: tl.constexpr = HEAD.hidden
    layer, work = state.layer, state.work
    COLUMNS: tl.constexpr = PRODUCTS.swiglu_columns
    for task in range(grid.program, tl.cdiv(INNER, COLUMNS) * grid.ok, SIZES.programs):
        swiglu_tile(
            0,
            task * COLUMNS,
            Operand(work.normed, state.inputs.mlp, HIDDEN, here.rows),
            Operand(layer.gate, state.weights.gate, HIDDEN, INNER),
            Operand(layer.up, state.weights.up, HIDDEN, INNER),
            Rows(work.inner, INNER),
            HIDDEN,
            PRODUCTS.rows,
            COLUMNS,
            PRODUCTS.swiglu_depth,
            PRODUCTS.swiglu_swap,
            PRODUCTS.even,
        )


@triton.jit
def best_of_chunks(grid, here, state, SIZES: tl.constexpr):
    """The best children in each chunk of each row's logits."""
    SCANNING: tl.constexpr = SIZES.scanning
    layer, work = state.layer, state.work
    CHUNKS: tl.constexpr = SCANNING.chunks
    for task in range(grid.program, here.ends * CHUNKS * grid.ok, SIZES.programs):
        row = wide(task // CHUNKS)
        logits, best = (Matrix(work.logits, layer.vocabulary, 1), ChunkBest(work.ranks, work.peaks, work.masses))
        topk_chunk(row, task % CHUNKS, logits, best, CHUNKS, layer.vocabulary, SIZES.tree.top_k, SCANNING.chunk)


@triton.jit
def best_children(grid, here, state, SIZES: tl.constexpr):
    """The best children of each row, of those of all chunks."""
    TREE: tl.constexpr = SIZES.tree
    work = state.work
    CHUNKS: tl.constexpr = SIZES.scanning.chunks
    K: tl.constexpr = TREE.top_k
    each = tl.where(here.first, 1, here.count)
    for task in range(grid.program, here.ends * grid.ok, SIZES.programs):
        row = wide(task)
        topk_merge(
            row,
            ChunkBest(work.ranks, work.peaks, work.masses),
            state.layer.d2t,
            work.log_probs + row * K,
            work.candidates + (row // each * TREE.candidates + here.next_start + row % each * K),
            CHUNKS,
            K,
            triton.next_power_of_2(CHUNKS),
            triton.next_power_of_2(K),
        )


@triton.jit
def build_tree(grid, state, SIZES: tl.constexpr):
    """The scores of the last level's children, and each sequence's next tree."""
    TREE: tl.constexpr = SIZES.tree
    TREE_WORDS: tl.constexpr = TREE.tree_words
    SLOTS: tl.constexpr = TREE.slots
    CANDIDATES: tl.constexpr = TREE.candidates
    sequences, tree, plan, work = state.sequences, state.tree, state.plan, state.work
    K: tl.constexpr = TREE.top_k
    BEAM: tl.constexpr = TREE.beam
    STEPS: tl.constexpr = TREE.passes + 1
    CHILDREN: tl.constexpr = triton.next_power_of_2(BEAM * K)
    child = tl.arange(0, CHILDREN)
    for task in range(grid.program, TREE.batch * grid.ok, SIZES.programs):
        batch = wide(task)
        above = tl.where(TREE.passes == 1, 1, tl.load(plan.levels + tl.maximum(TREE.passes - 2, 0)))
        start = tl.load(plan.levels + 2 * STEPS + TREE.passes - 1)
        parents = Vector(work.beam_scores + ((TREE.passes - 1) * TREE.batch + batch) * BEAM, 1)
        children = Matrix(work.log_probs + batch * above * K, K, 1)
        score, _ = choose_beam(parents, children, None, above * K, K, 0, CHILDREN, triton.next_power_of_2(BEAM))
        tl.store(work.scores + batch * CANDIDATES + start + child, score, mask=child < above * K)
        column = tl.minimum(tl.load(sequences.lengths + batch), sequences.columns - 1)
        root = tl.load(sequences.tokens + batch * sequences.columns + column)
        tl.store(work.root + batch, root)
        tl.debug_barrier()
        write_tree(
            batch,
            Rows(work.root, 1),
            Lists(work.candidates, CANDIDATES, 1, CANDIDATES),
            Matrix(work.scores, CANDIDATES, 1),
            Lists(work.beam_candidates, SLOTS, 1, SLOTS),
            plan.selected,
            None,
            work.scratch,
            Tree(
                Matrix(tree.tokens, tree.nodes, 1),
                Matrix(tree.parents, tree.nodes, 1),
                Matrix(tree.depths, tree.nodes, 1),
                Cube(tree.ancestors, tree.nodes * TREE_WORDS, TREE_WORDS, 1),
                tree.nodes,
                TREE_WORDS,
            ),
            K,
            triton.next_power_of_2(CANDIDATES),
            TREE.nodes,
            64 if TREE.nodes > 64 else TREE.nodes,
        )
