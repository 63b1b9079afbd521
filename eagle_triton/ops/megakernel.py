"""The fused draft-verify-update megakernel: from the target's logits to the next draft tree in one launch.

A persistent grid of PROGRAMS programs goes through the phases of a step together. The programs share a phase's tasks,
and a grid barrier separates phases. A task calls the same device function as the separate kernel of its operation, with
the same launch settings, so the results are equal to the bit.

    verify      greedy: the argmax of every node, the walk; then each sequence advances, and its cache rows are moved
    extend      the draft head takes in the accepted tokens: features -> fc -> a pass over those tokens
    beams       depth - 1 further passes over the chosen children of the last one
    a pass      inputs -> (fc ->) q, k, v -> rotary, append -> attention -> merge -> o -> norm -> SwiGLU -> down
                -> norm -> vocabulary projection -> top-k by chunks -> merge
    build       the last children's scores, re-rank and tree

The first phase of the next pass scores the children of a pass. Each program finds the beam for itself, which takes less
time than a barrier.

| name        | shape                   | dtype  |                                                              |
|-------------|-------------------------|--------|--------------------------------------------------------------|
| features    | [B, N, F]               | any    | of the target, for every node                                |
| path, accepted, before, lengths | [B, D + 1], [B] | int32 | nodes kept; rows of the draft cache before and after |
| levels      | [3, D + 1]              | int32  | per level: beam width, first beam slot, first flat candidate |
| candidates  | [B, C]                  | int64, fp32 | tokens and scores of all children, in flat order         |
| beam        | [D, B, K, ...]          | fp32, int64 | scores and ancestors of each level's nodes               |
| table       | [B, M]                  | int32  | pages of PAGE rows, of the target's cache and of the draft's |
| others      | [rows, ...]             | model's| rows of a pass, b * n + i; fp32 partial sums of split products |

Numerics: as in the operations. A barrier that waits too long ends the launch with FAULT in every sequence's report (see
`grid_barrier`), and the host raises.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.kv_cache import commit_plane, plane_of, row_offset
from eagle_triton.operands.verification import FAULT, REASON
from eagle_triton.ops.attention_tiles import (
    HeadSizes,
    KeyLayout,
    Limits,
    PagedCache,
    Parts,
    Splits,
    Task,
    Tiles,
    attend_split,
    merge_rows,
)
from eagle_triton.ops.layers.norms import norm_row
from eagle_triton.ops.layers.rotary import HeadNorms, NodeHead, Projected, Turn, rotary_append_head
from eagle_triton.ops.linear.few_rows import Operand, add_bias, product_steps, store_tile, swiglu_tile
from eagle_triton.ops.sampling.filter_thresholds import Scans, scan_parts
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
from eagle_triton.ops.verification.update import Accepted, Sequences, StopRules, update_one
from eagle_triton.ops.verification.walks import Walk, greedy_walk
from eagle_triton.ops.views import (
    BatchedRows,
    CacheLayer,
    CacheSide,
    Cube,
    Heads,
    KeyValues,
    Matrix,
    Pages,
    Rows,
    Vector,
)
from eagle_triton.runtime.grid_barrier import grid_barrier
from eagle_triton.runtime.launch import DRAFT_WARPS

WARPS = tl.constexpr(DRAFT_WARPS)
_REASON, _FAULT = tl.constexpr(REASON), tl.constexpr(FAULT)
# The phases of a pass. FC and SUM are for EAGLE-1; EAGLE-3 runs its fc once, before the passes.
INPUTS, FC, SUM, QKV, ROTARY, ATTEND, MERGE, OUT, POST, SWIGLU, DOWN, NORM, HEAD, TOPK, BEST = map(
    tl.constexpr, range(15)
)


class Target(NamedTuple):
    """The target's cache [layers, 2, P, heads, PAGE, TARGET_D], of layers * 2 * B * heads planes, and its sizes."""

    cache: Tensor
    planes: int
    heads: int
    page: int  # stride
    vocabulary: int
    features: int


class SequenceTensors(NamedTuple):
    """The sequences' tokens [B, columns], report [B, REPORT], and tensors [B]."""

    tokens: Tensor
    columns: int
    lengths: Tensor
    active: Tensor
    report: Tensor
    counter: Tensor
    before: Tensor


class Verified(NamedTuple):
    """The results of verification: path [B, D + 1], the others [B]."""

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    nan: Tensor


class Stopping(NamedTuple):
    """When sequences finish: ids [B, stops], limit and exact [B]."""

    ids: Tensor
    stops: int
    limit: Tensor
    exact: Tensor


class TreeTensors(NamedTuple):
    """The draft tree: tokens, parents and depths [B, nodes], ancestors [B, nodes, TREE_WORDS]."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    nodes: int


class Plan(NamedTuple):
    """How a tree grows: a BeamPlan, and the levels."""

    levels: Tensor
    chain: Tensor
    beam_children: Tensor | None
    selected: Tensor | None


class DraftTensors(NamedTuple):
    """The draft's cache, and the hidden state of each sequence's last accepted token, [B, HIDDEN]."""

    cache: Tensor
    hidden: Tensor
    normed: Tensor


class HeadLayer(NamedTuple):
    """A draft head of one layer: its dense weights, None for missing ones."""

    embedding: Tensor
    fc: Tensor
    fc_bias: Tensor | None
    q: Tensor
    q_bias: Tensor | None
    k: Tensor
    k_bias: Tensor | None
    v: Tensor
    v_bias: Tensor | None
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    head: Tensor
    vocabulary: int
    d2t: Tensor | None
    token_norm: Tensor | None
    token_eps: float
    feature_norm: Tensor | None
    feature_eps: float
    post_norm: Tensor
    post_eps: float
    norm: Tensor | None
    norm_eps: float
    inv_freq: Tensor
    rotary_scaling: float
    scale_log2: float


class Workspace(NamedTuple):
    """Memory that phases pass on to each other."""

    gathered: Tensor
    products: Tensor
    inputs: Tensor
    residual: Tensor
    queries: Tensor
    partial: Tensor
    softmax: Tensor
    attended: Tensor
    x: Tensor
    normed: Tensor
    inner: Tensor
    hidden: Tensor
    head_in: Tensor
    logits: Tensor
    ranks: Tensor
    places: Tensor
    peaks: Tensor
    masses: Tensor
    log_probs: Tensor
    candidates: Tensor
    scores: Tensor
    beam_scores: Tensor
    beam_ancestors: Tensor
    beam_candidates: Tensor
    root: Tensor
    scratch: Tensor


@triton.jit
def wide(index):
    """`index` as an int64, so that products with it may pass 2^31."""
    return tl.full((), 0, tl.int64) + index


@triton.jit
def index_of(index):
    """`index` as an int32 tensor: in the interpreter, loops count Python integers."""
    return tl.full((), 0, tl.int32) + index


@triton.jit
def draft_verify_update_kernel(
    target_logits_ptr,
    features_ptr,
    target,
    pages,
    sequences,
    verified,
    stopping,
    tree,
    plan,
    draft,
    layer,
    fc_desc,
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    gate_desc,
    up_desc,
    down_desc,
    head_desc,
    fc_in_desc,
    qkv_in_desc,
    o_in_desc,
    mlp_in_desc,
    down_in_desc,
    head_in_desc,
    work,
    sync_ptr,
    absent,
    limit,
    GREEDY: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TARGET_D: tl.constexpr,
    STOPS: tl.constexpr,
    REPORT: tl.constexpr,
    EAGLE3: tl.constexpr,
    NORMED_RESIDUAL: tl.constexpr,
    B: tl.constexpr,
    PASSES: tl.constexpr,
    K: tl.constexpr,
    BEAM: tl.constexpr,
    SLOTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    TREE_WORDS: tl.constexpr,
    NODES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TMA: tl.constexpr,
    UNIFORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MLP: tl.constexpr,
    ATTENTION: tl.constexpr,
):
    """Grid (PROGRAMS,), all resident: see the module. `ok` is 0 after a fault; then no phase has tasks."""
    STEPS: tl.constexpr = PASSES + 1
    Q_COLS: tl.constexpr = HEADS * GROUP * D
    KV_COLS: tl.constexpr = HEADS * D
    QKV_COLS: tl.constexpr = Q_COLS + 2 * KV_COLS
    TILE_N: tl.constexpr = TILE[0]
    TILE_K: tl.constexpr = TILE[1]
    SWAP: tl.constexpr = TILE[2]
    STAGES: tl.constexpr = TILE[3]
    FC_SPLITS: tl.constexpr = SPLITS[0]
    QKV_SPLITS: tl.constexpr = SPLITS[1]
    OUT_SPLITS: tl.constexpr = SPLITS[2]
    DOWN_SPLITS: tl.constexpr = SPLITS[3]
    MLP_N: tl.constexpr = MLP[0]
    ROWS_M: tl.constexpr = ATTENTION[0]
    KEYS_N: tl.constexpr = ATTENTION[1]
    KEY_SPLITS: tl.constexpr = ATTENTION[2]
    MIN_TILES: tl.constexpr = ATTENTION[3]
    KEYS_T: tl.constexpr = ATTENTION[4]
    PLANE: tl.constexpr = PAGE * D  # a head's keys or values of the draft, in a page
    D_BLOCK: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    MERGE_ROWS: tl.constexpr = WARPS * (128 // D_BLOCK if D_BLOCK < 128 else 1)
    Q_TILES: tl.constexpr = (Q_COLS + TILE_N - 1) // TILE_N
    KV_TILES: tl.constexpr = (KV_COLS + TILE_N - 1) // TILE_N
    QKV_TILES: tl.constexpr = Q_TILES + 2 * KV_TILES
    BEAM_WIDTH: tl.constexpr = triton.next_power_of_2(BEAM)
    CHILDREN: tl.constexpr = triton.next_power_of_2(BEAM * K)
    table_ptr, table_width, cache_ptr, scale_log2 = pages.ptr, pages.row, draft.cache, layer.scale_log2
    queries_ptr, attended_ptr, partial_ptr, softmax_ptr = work.queries, work.attended, work.partial, work.softmax
    products_ptr = work.products
    program = tl.program_id(0)
    number = 0
    ok = 1
    capacity = table_width * PAGE
    lane = tl.arange(0, BEAM_WIDTH)
    child = tl.arange(0, CHILDREN)

    # Verify, then advance each sequence.
    STEPS_BLOCK: tl.constexpr = triton.next_power_of_2(STEPS)
    if GREEDY:
        for task in range(program, B * tree.nodes * PARTS, PROGRAMS):
            scan_parts(
                wide(task // PARTS),
                task % PARTS,
                Matrix(target_logits_ptr, target.vocabulary, 1),
                None,
                Scans(work.peaks, work.places, None),
                tree.nodes,
                target.vocabulary,
                PART,
                1,
            )
        number += 1
        ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS, TMA)
    for task in range(program, B * ok, PROGRAMS):
        if GREEDY:
            greedy_walk(
                index_of(task),
                work.peaks,
                work.places,
                Matrix(tree.tokens, tree.nodes, 1),
                Matrix(tree.parents, tree.nodes, 1),
                Walk(verified.path, verified.accepted, verified.next_token),
                verified.nan,
                tree.nodes,
                PARTS,
                PASSES,
                NODES,
                triton.next_power_of_2(PARTS),
                STEPS_BLOCK,
            )
            tl.debug_barrier()
        update_one(
            wide(task),
            Sequences(
                Rows(sequences.tokens, sequences.columns),
                sequences.columns,
                sequences.lengths,
                sequences.active,
                Rows(sequences.report, REPORT),
                sequences.counter,
                sequences.before,
            ),
            Rows(tree.tokens, tree.nodes),
            Accepted(Rows(verified.path, STEPS), STEPS, verified.accepted, verified.next_token, verified.nan),
            StopRules(Rows(stopping.ids, stopping.stops), stopping.stops, stopping.limit, stopping.exact),
            triton.next_power_of_2(STEPS + 1),
            STOPS,
        )
    number += 1
    ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS, TMA)

    # Keep the accepted rows of the target's cache.
    for task in range(program, target.planes * ok, PROGRAMS):
        stack, sequence, target_head = plane_of(task, B, target.heads)
        commit_plane(
            CacheSide(target.cache, target.page, PAGE * TARGET_D, TARGET_D),
            target.cache + (stack * target.heads + target_head) * (PAGE * TARGET_D),
            Pages(table_ptr, table_width),
            sequence,
            tl.load(sequences.before + sequence),
            verified.path + sequence * STEPS,
            tl.load(verified.accepted + sequence),
            STEPS,
            capacity,
            TARGET_D,
            PAGE,
            STEPS_BLOCK,
            triton.next_power_of_2(TARGET_D),
        )

    # The accepted nodes' features, in the order of the path.
    FEATURE_BLOCK: tl.constexpr = 1024
    blocks = tl.cdiv(target.features, FEATURE_BLOCK)
    for task in range(program, B * STEPS * blocks * ok, PROGRAMS):
        row = wide(task // blocks)
        node = tl.maximum(tl.load(verified.path + row), 0)
        column = task % blocks * FEATURE_BLOCK + tl.arange(0, FEATURE_BLOCK)
        source = features_ptr + (row // STEPS * tree.nodes + node) * target.features + column
        value = tl.load(source, mask=column < target.features)
        tl.store(work.gathered + row * target.features + column, value, mask=column < target.features)
    number += 1
    ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS, TMA)

    # All passes of the draft head, phase by phase; EAGLE-3 begins with its fc.
    PHASES: tl.constexpr = 13 if EAGLE3 else 15
    for phase in range(-1 if EAGLE3 else 0, PASSES * PHASES):
        index = tl.maximum(phase, 0) // PHASES
        phase_kind = phase - index * PHASES
        if EAGLE3:
            phase_kind = tl.where(phase_kind == 0, INPUTS, phase_kind + 2)
        first_pass = index == 0
        level = tl.maximum(index - 1, 0)  # its chosen children are the nodes of this pass
        if UNIFORM:
            count = tl.where(first_pass, STEPS, BEAM)
            above = tl.where(level == 0, 1, BEAM)  # nodes of the level above
            first_slot = level * BEAM
            start = tl.where(level == 0, 0, K + (level - 1) * (BEAM * K))
            next_start = tl.where(first_pass, 0, K + level * (BEAM * K))
        else:
            count = tl.where(first_pass, STEPS, tl.load(plan.levels + level))
            above = tl.where(level == 0, 1, tl.load(plan.levels + tl.maximum(level - 1, 0)))
            first_slot = tl.load(plan.levels + STEPS + level)
            start = tl.load(plan.levels + 2 * STEPS + level)
            next_start = tl.load(plan.levels + 2 * STEPS + index)
        rows = B * count
        ends = tl.where(first_pass, B, rows)  # after the pass over accepted tokens, only last rows continue

        if phase_kind == INPUTS:  # the embedding and the feature of each node, and the bookkeeping of its beam
            for task in range(program, rows * 2 * ok, PROGRAMS):
                row = wide(task // 2)
                is_token = task % 2 == 0
                batch = row // count
                place = row % count
                feature = row
                if first_pass:
                    column = tl.minimum(tl.load(sequences.before + batch) + 1 + place, sequences.columns - 1)
                    token = tl.load(sequences.tokens + batch * sequences.columns + column)
                else:
                    beam_above = work.beam_scores + (level * B + batch) * BEAM
                    log_probs = work.log_probs + batch * above * K
                    named = plan.beam_children
                    if plan.beam_children is not None:
                        named += first_slot
                    parents, children = Vector(beam_above, 1), Matrix(log_probs, K, 1)
                    score, chosen = choose_beam(parents, children, named, above * K, K, count, CHILDREN, BEAM_WIDTH)
                    mine = tl.sum(tl.where(lane == place, chosen, 0), 0)
                    token = tl.load(work.candidates + batch * CANDIDATES + start + mine)
                    feature = batch * above + mine // K
                    if is_token & (place == 0):
                        parent = chosen // K
                        in_beam = lane < count
                        own = tl.load(beam_above + parent, mask=in_beam, other=0.0)
                        own += tl.load(log_probs + chosen, mask=in_beam, other=0.0)
                        tl.store(work.scores + batch * CANDIDATES + start + child, score, mask=child < above * K)
                        tl.store(work.beam_scores + ((level + 1) * B + batch) * BEAM + lane, own, mask=in_beam)
                        slots = work.beam_candidates + batch * SLOTS + first_slot
                        tl.store(slots + lane, (chosen + start).to(tl.int64), mask=in_beam)
                        masks = work.beam_ancestors + (level * B + batch) * (BEAM * WORDS)
                        masks_out = masks + B * BEAM * WORDS
                        bits_above = Matrix(masks, WORDS, 1)
                        store_ancestors(bits_above, masks_out, parent, first_slot, count, WORDS, BEAM_WIDTH)
                inputs = work.inputs + row * (2 * HIDDEN)
                picked = work.residual + row * HIDDEN
                if EAGLE3 and first_pass and (task % 2 == 1):
                    norm_row(
                        products_ptr + feature * HIDDEN,
                        layer.feature_norm,
                        None,
                        inputs + HIDDEN,
                        picked,
                        rows * HIDDEN,
                        layer.feature_eps,
                        HIDDEN,
                        BLOCK_H,
                        FC_SPLITS,
                        False,
                    )
                else:
                    source = work.hidden + feature * HIDDEN
                    weight = layer.feature_norm
                    eps = layer.feature_eps
                    out = inputs + HIDDEN
                    if first_pass:
                        source = work.gathered + feature * HIDDEN
                    if is_token:
                        source = layer.embedding + token * HIDDEN
                        weight = layer.token_norm
                        eps = layer.token_eps
                        out = inputs
                        picked = work.normed + row * HIDDEN  # a place that is never read
                    norm_row(source, weight, None, out, picked, 0, eps, HIDDEN, BLOCK_H, 1, False)

        elif (
            (phase_kind == QKV) | (phase_kind == OUT) | (phase_kind == DOWN) | (phase_kind == HEAD) | (phase_kind == FC)
        ):
            source, source_desc = work.inputs, qkv_in_desc
            weight, weight_desc = layer.q, q_desc
            depth, width, tiles, splits, height = 2 * HIDDEN, QKV_COLS, QKV_TILES, QKV_SPLITS, rows
            if not EAGLE3:
                source, depth = work.residual, HIDDEN
            if phase_kind == FC:
                source_desc, splits, weight, weight_desc = fc_in_desc, FC_SPLITS, layer.fc, fc_desc
                source = work.gathered if EAGLE3 else work.inputs
                depth = target.features if EAGLE3 else 2 * HIDDEN
            elif phase_kind == OUT:
                source, source_desc, depth, splits = attended_ptr, o_in_desc, Q_COLS, OUT_SPLITS
                weight, weight_desc = layer.o, o_desc
            elif phase_kind == DOWN:
                source, source_desc, depth, splits = work.inner, down_in_desc, INNER, DOWN_SPLITS
                weight, weight_desc = layer.down, down_desc
            elif phase_kind == HEAD:
                source, source_desc, depth, splits = work.hidden, head_in_desc, HIDDEN, 1
                if EAGLE3:
                    source = work.head_in
                weight, weight_desc = layer.head, head_desc
                width, tiles, height = layer.vocabulary, tl.cdiv(layer.vocabulary, TILE_N), ends
            if (phase_kind == FC) | (phase_kind == OUT) | (phase_kind == DOWN):
                width, tiles = HIDDEN, tl.cdiv(HIDDEN, TILE_N)
            for task in range(program, tiles * splits * ok, PROGRAMS):
                tile, split = task // splits, task % splits
                cols, base = width, 0
                own, own_desc, bias = weight, weight_desc, layer.q_bias
                if phase_kind == QKV:  # one product of three weights
                    cols = Q_COLS
                    if tile >= Q_TILES + KV_TILES:
                        tile -= Q_TILES + KV_TILES
                        own, own_desc, bias = layer.v, v_desc, layer.v_bias
                        cols, base = KV_COLS, Q_COLS + KV_COLS
                    elif tile >= Q_TILES:
                        tile -= Q_TILES
                        own, own_desc, bias = layer.k, k_desc, layer.k_bias
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
                    BLOCK_M,
                    TILE_N,
                    TILE_K,
                    SWAP,
                    EVEN_K,
                    STAGES,
                )
                if layer.q_bias is not None and phase_kind == QKV:
                    acc = add_bias(acc, bias, column, tl.where(split == 0, cols, 0), TILE_N, SWAP)
                if layer.fc_bias is not None and phase_kind == FC:
                    acc = add_bias(acc, layer.fc_bias, column, tl.where(split == 0, cols, 0), TILE_N, SWAP)
                if phase_kind == HEAD:
                    logits = Rows(work.logits, layer.vocabulary)
                    store_tile(acc, None, logits, 0, column, height, cols, BLOCK_M, TILE_N, SWAP)
                else:
                    products = Rows(products_ptr + wide(split) * height * width + base, width)
                    store_tile(acc, None, products, 0, column, height, cols, BLOCK_M, TILE_N, SWAP)

        elif phase_kind == ROTARY:
            for task in range(program, rows * HEADS * ok, PROGRAMS):
                place = task % count
                batch = wide(task // (count * HEADS))
                first_row = tl.load(sequences.before + batch)
                position = first_row + place
                if not first_pass:
                    length = tl.load(sequences.lengths + batch)
                    first_row = length + first_slot
                    position = length + level
                row = wide(first_row + place)
                fits = (row >= 0) & (row < capacity)
                cache = CacheLayer(cache_ptr, HEADS * PLANE, 2 * HEADS * PLANE, PLANE, D)
                offset = row_offset(cache, Pages(table_ptr, table_width), batch, row, fits, PAGE)
                sequence, key_ptr = count * QKV_COLS, products_ptr + Q_COLS
                rotary_append_head(
                    NodeHead(place, wide(task // count % HEADS), batch, position, offset, fits),
                    Projected(
                        Heads(products_ptr, sequence, QKV_COLS, D),
                        Heads(key_ptr, sequence, QKV_COLS, D),
                        Heads(key_ptr + KV_COLS, sequence, QKV_COLS, D),
                        rows * QKV_COLS,
                    ),
                    cache,
                    Turn(layer.inv_freq, layer.rotary_scaling),
                    HeadNorms(None, None, 0.0),
                    queries_ptr,
                    count,
                    HEADS,
                    GROUP,
                    D // 2,
                    0,
                    QKV_SPLITS,
                    False,
                )

        elif phase_kind == ATTEND:
            visible = sequences.lengths
            bits = work.beam_ancestors + (level + 1) * (B * BEAM * WORDS)
            bits_stride = BEAM * WORDS
            if first_pass:
                visible, bits, bits_stride = sequences.before, plan.chain, STEPS * WORDS
            row_blocks = tl.cdiv(count * GROUP, ROWS_M)
            for task in range(program, row_blocks * KEY_SPLITS * B * HEADS * ok, PROGRAMS):
                head = index_of(task // (row_blocks * KEY_SPLITS))
                planes = KeyValues(cache_ptr, wide(HEADS * PLANE), wide(2 * HEADS * PLANE), wide(PLANE))
                attend_split(
                    Task(task // KEY_SPLITS % row_blocks, task % KEY_SPLITS, head // HEADS, head % HEADS),
                    Heads(queries_ptr, count * Q_COLS, Q_COLS, D),
                    PagedCache(planes, None, Pages(table_ptr, table_width)),
                    Limits(visible, 64 * WORDS, capacity, None),
                    BatchedRows(bits, bits_stride, WORDS),
                    Heads(attended_ptr, count * Q_COLS, Q_COLS, D),
                    Parts(partial_ptr, softmax_ptr),
                    None,
                    count,
                    scale_log2,
                    None,
                    None,
                    KeyLayout(PAGE, D, WORDS),
                    HeadSizes(D, GROUP, HEADS, False),
                    Splits(KEY_SPLITS, KEY_SPLITS, MIN_TILES),
                    Tiles(ROWS_M, KEYS_N, KEYS_T, D_BLOCK),
                )

        elif phase_kind == MERGE:
            if KEY_SPLITS > 1:
                visible = sequences.lengths
                if first_pass:
                    visible = sequences.before
                row_blocks = tl.cdiv(count * GROUP, MERGE_ROWS)
                for task in range(program, row_blocks * B * HEADS * ok, PROGRAMS):
                    head = index_of(task // row_blocks)
                    merge_rows(
                        task % row_blocks,
                        head // HEADS,
                        head % HEADS,
                        Parts(partial_ptr, softmax_ptr),
                        Limits(visible, 64 * WORDS, capacity, None),
                        Heads(attended_ptr, count * Q_COLS, Q_COLS, D),
                        None,
                        count,
                        0,
                        HeadSizes(D, GROUP, HEADS, False),
                        Splits(KEY_SPLITS, KEY_SPLITS, MIN_TILES),
                        KEYS_N,
                        MERGE_ROWS,
                        D_BLOCK,
                        False,
                    )

        elif (phase_kind == POST) | (phase_kind == NORM) | (phase_kind == SUM):
            for task in range(program, tl.where(phase_kind == NORM, ends, rows) * ok, PROGRAMS):
                row = wide(task)
                source = row
                if first_pass & (phase_kind == NORM):
                    source = row * STEPS + tl.maximum(tl.load(verified.accepted + row), 0)
                sums = products_ptr + source * HIDDEN
                x = work.x + source * HIDDEN
                if phase_kind == POST:
                    residual = work.residual + row * HIDDEN
                    if NORMED_RESIDUAL:
                        residual = work.inputs + (row * 2 + 1) * HIDDEN
                    norm_row(
                        sums,
                        layer.post_norm,
                        residual,
                        work.normed + row * HIDDEN,
                        x,
                        rows * HIDDEN,
                        layer.post_eps,
                        HIDDEN,
                        BLOCK_H,
                        OUT_SPLITS,
                        False,
                    )
                elif phase_kind == NORM:
                    out = work.hidden + row * HIDDEN
                    normed, total = out, None
                    if EAGLE3:
                        normed, total = work.head_in + row * HIDDEN, out
                    norm_row(
                        sums,
                        layer.norm,
                        x,
                        normed,
                        total,
                        rows * HIDDEN,
                        layer.norm_eps,
                        HIDDEN,
                        BLOCK_H,
                        DOWN_SPLITS,
                        False,
                    )
                    if first_pass:  # a later call may grow another tree from here
                        column = tl.arange(0, BLOCK_H)
                        tl.debug_barrier()
                        value = tl.load(out + column, mask=column < HIDDEN)
                        tl.store(draft.hidden + row * HIDDEN + column, value, mask=column < HIDDEN)
                        value = tl.load(normed + column, mask=column < HIDDEN)
                        tl.store(draft.normed + row * HIDDEN + column, value, mask=column < HIDDEN)
                elif not EAGLE3:
                    out = work.residual + row * HIDDEN
                    norm_row(sums, None, None, out, None, rows * HIDDEN, 0.0, HIDDEN, BLOCK_H, FC_SPLITS, False)

        elif phase_kind == SWIGLU:
            for task in range(program, tl.cdiv(INNER, MLP_N) * ok, PROGRAMS):
                swiglu_tile(
                    0,
                    task * MLP_N,
                    Operand(work.normed, mlp_in_desc, HIDDEN, rows),
                    Operand(layer.gate, gate_desc, HIDDEN, INNER),
                    Operand(layer.up, up_desc, HIDDEN, INNER),
                    Rows(work.inner, INNER),
                    HIDDEN,
                    BLOCK_M,
                    MLP_N,
                    MLP[1],
                    MLP[2],
                    EVEN_K,
                )

        elif phase_kind == TOPK:
            for task in range(program, ends * CHUNKS * ok, PROGRAMS):
                row = wide(task // CHUNKS)
                topk_chunk(
                    row,
                    task % CHUNKS,
                    Matrix(work.logits, layer.vocabulary, 1),
                    ChunkBest(work.ranks, work.peaks, work.masses),
                    CHUNKS,
                    layer.vocabulary,
                    K,
                    CHUNK,
                )

        else:  # BEST: of all chunks
            each = tl.where(first_pass, 1, count)
            for task in range(program, ends * ok, PROGRAMS):
                row = wide(task)
                topk_merge(
                    row,
                    ChunkBest(work.ranks, work.peaks, work.masses),
                    layer.d2t,
                    work.log_probs + row * K,
                    work.candidates + (row // each * CANDIDATES + next_start + row % each * K),
                    CHUNKS,
                    K,
                    triton.next_power_of_2(CHUNKS),
                    triton.next_power_of_2(CHUNKS * K),
                    triton.next_power_of_2(K),
                )
        number += 1
        ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS, TMA)

    # The last level's scores, and the tree.
    for task in range(program, B * ok, PROGRAMS):
        batch = wide(task)
        above = tl.where(PASSES == 1, 1, tl.load(plan.levels + tl.maximum(PASSES - 2, 0)))
        start = tl.load(plan.levels + 2 * STEPS + PASSES - 1)
        parents = Vector(work.beam_scores + ((PASSES - 1) * B + batch) * BEAM, 1)
        children = Matrix(work.log_probs + batch * above * K, K, 1)
        score, _ = choose_beam(parents, children, None, above * K, K, 0, CHILDREN, BEAM_WIDTH)
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
            NODES,
            64 if NODES > 64 else NODES,
        )
    if ok == 0:
        for batch in range(B):
            tl.store(sequences.report + batch * REPORT + _REASON, _FAULT)
