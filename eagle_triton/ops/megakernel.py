"""The fused draft-verify-update megakernel: from the target's logits to the next draft tree in one launch.

A persistent grid of PROGRAMS programs walks through the phases of a step together. A phase deals its tasks out to the
programs, and a grid barrier stands before the next one. The work of a task is the device function that the separate
kernel of that operation calls too, with the same launch settings, so the results are the same to the bit.

    verify      greedy: the argmax of every node, the walk; then each sequence advances, and its cache rows move
    extend      the draft head takes in the accepted tokens: features -> fc -> a pass whose rows are those tokens
    beams       depth - 1 further passes whose rows are the chosen children of the last one
    a pass      inputs -> (fc ->) q, k, v -> rotary, append -> attention -> merge -> o -> norm -> SwiGLU -> down
                -> norm -> vocabulary projection -> top-k by chunks -> merge
    build       the last children's scores, re-rank and tree

The children of a pass are scored by the next one's first phase: each of its programs finds the beam for itself, which
takes less time than a barrier.

| name        | shape                   | dtype  |                                                              |
|-------------|-------------------------|--------|--------------------------------------------------------------|
| features    | [B, N, F]               | any    | of the target, for every node                                |
| path, accepted, before, lengths | [B, D + 1], [B] | int32 | nodes kept; rows of the draft cache before and after |
| levels      | [3, D + 1]              | int32  | per level: beam width, first beam slot, first flat candidate |
| candidates  | [B, C]                  | int64, fp32 | tokens and scores of all children, in flat order         |
| beam        | [D, B, K, ...]          | fp32, int64 | scores and ancestors of each level's nodes               |
| table       | [B, M]                  | int32  | pages of PAGE rows, of the target's cache and of the draft's |
| others      | [rows, ...]             | model's| rows of a pass, b * n + i; fp32 partial sums of split products |

Numerics: those of the operations. A barrier that waits too long ends the launch with FAULT in every sequence's report
(see `grid_barrier`), and the host raises.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eagle_triton.kv_cache import commit_plane, plane_of, row_offset
from eagle_triton.ops.attention_tiles import attend_split, merge_rows
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
from eagle_triton.ops.views import CacheLayer, CacheSide, Cube, Heads, Matrix, Pages, Rows, Vector
from eagle_triton.reference.verification import FAULT, REASON
from eagle_triton.runtime.grid_barrier import grid_barrier
from eagle_triton.runtime.launch import DRAFT_WARPS

WARPS = tl.constexpr(DRAFT_WARPS)
_REASON, _FAULT = tl.constexpr(REASON), tl.constexpr(FAULT)
# The phases of a pass. FC and SUM are EAGLE-1's; EAGLE-3 has its fc once, in front.
INPUTS, FC, SUM, QKV, ROTARY, ATTEND, MERGE, OUT, POST, SWIGLU, DOWN, NORM, HEAD, TOPK, BEST = map(
    tl.constexpr, range(15)
)


@triton.jit
def wide(index):
    """`index` as an int64, so that what is multiplied with it may pass 2^31."""
    return tl.full((), 0, tl.int64) + index


@triton.jit
def index_of(index):
    """`index` as an int32 tensor: the interpreter counts loops in Python's integers."""
    return tl.full((), 0, tl.int32) + index


@triton.jit
def draft_verify_update_kernel(
    target_logits_ptr,
    features_ptr,
    target_cache_ptr,
    table_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    before_ptr,
    lengths_ptr,
    active_ptr,
    stop_ids_ptr,
    limits_ptr,
    exact_ptr,
    report_ptr,
    counter_ptr,
    sequence_ptr,
    embedding_ptr,
    fc_ptr,
    fc_desc,
    fc_bias_ptr,
    fc_in_desc,
    qkv_in_desc,
    o_in_desc,
    mlp_in_desc,
    down_in_desc,
    head_in_desc,
    token_norm_ptr,
    feature_norm_ptr,
    q_ptr,
    q_desc,
    q_bias_ptr,
    k_ptr,
    k_desc,
    k_bias_ptr,
    v_ptr,
    v_desc,
    v_bias_ptr,
    o_ptr,
    o_desc,
    post_norm_ptr,
    gate_ptr,
    gate_desc,
    up_ptr,
    up_desc,
    down_ptr,
    down_desc,
    norm_ptr,
    head_ptr,
    head_desc,
    d2t_ptr,
    inv_freq_ptr,
    cache_ptr,
    levels_ptr,
    chain_ptr,
    beam_children_ptr,
    selected_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ancestors_ptr,
    sync_ptr,
    gathered_ptr,
    products_ptr,
    inputs_ptr,
    residual_ptr,
    queries_ptr,
    partial_ptr,
    softmax_ptr,
    attended_ptr,
    x_ptr,
    normed_ptr,
    inner_ptr,
    hidden_ptr,
    head_in_ptr,
    last_hidden_ptr,
    last_normed_ptr,
    logits_ptr,
    ranks_ptr,
    places_ptr,
    peaks_ptr,
    masses_ptr,
    log_probs_ptr,
    candidates_ptr,
    scores_ptr,
    beam_scores_ptr,
    beam_ancestors_ptr,
    beam_candidates_ptr,
    root_ptr,
    scratch_ptr,
    absent,
    limit,
    nodes,
    columns,
    stops,
    target_vocabulary,
    target_planes,
    target_heads,
    target_page,
    table_width,
    feature_size,
    vocabulary,
    scale_log2,
    rotary_scaling,
    token_eps,
    feature_eps,
    post_eps,
    norm_eps,
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
    DOUBLINGS: tl.constexpr,
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
    """Grid (PROGRAMS,), all resident: see the module. `ok` is 0 after a fault, and then no phase has any task."""
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
    program = tl.program_id(0)
    number = 0
    ok = 1
    capacity = table_width * PAGE
    lane = tl.arange(0, BEAM_WIDTH)
    child = tl.arange(0, CHILDREN)

    # Verify, then advance each sequence.
    STEPS_BLOCK: tl.constexpr = triton.next_power_of_2(STEPS)
    if GREEDY:
        for task in range(program, B * nodes * PARTS, PROGRAMS):
            scan_parts(
                wide(task // PARTS),
                task % PARTS,
                Matrix(target_logits_ptr, target_vocabulary, 1),
                None,
                Scans(peaks_ptr, places_ptr, None),
                nodes,
                target_vocabulary,
                PART,
                1,
            )
        number += 1
        ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS, TMA)
    for task in range(program, B * ok, PROGRAMS):
        if GREEDY:
            greedy_walk(
                index_of(task),
                peaks_ptr,
                places_ptr,
                Matrix(tokens_ptr, nodes, 1),
                Matrix(parents_ptr, nodes, 1),
                Walk(path_ptr, accepted_ptr, next_ptr),
                nan_ptr,
                nodes,
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
                Rows(sequence_ptr, columns),
                columns,
                lengths_ptr,
                active_ptr,
                Rows(report_ptr, REPORT),
                counter_ptr,
                before_ptr,
            ),
            Rows(tokens_ptr, nodes),
            Accepted(Rows(path_ptr, STEPS), STEPS, accepted_ptr, next_ptr, nan_ptr),
            StopRules(Rows(stop_ids_ptr, stops), stops, limits_ptr, exact_ptr),
            triton.next_power_of_2(STEPS + 1),
            STOPS,
        )
    number += 1
    ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS, TMA)

    # Keep the accepted rows of the target's cache.
    for task in range(program, target_planes * ok, PROGRAMS):
        stack, sequence, head = plane_of(task, B, target_heads)
        commit_plane(
            CacheSide(target_cache_ptr, target_page, PAGE * TARGET_D, TARGET_D),
            target_cache_ptr + (stack * target_heads + head) * (PAGE * TARGET_D),
            Pages(table_ptr, table_width),
            sequence,
            tl.load(before_ptr + sequence),
            path_ptr + sequence * STEPS,
            tl.load(accepted_ptr + sequence),
            STEPS,
            capacity,
            TARGET_D,
            PAGE,
            STEPS_BLOCK,
            triton.next_power_of_2(TARGET_D),
        )

    # The accepted nodes' features, in the order of the path.
    FEATURE_BLOCK: tl.constexpr = 1024
    blocks = tl.cdiv(feature_size, FEATURE_BLOCK)
    for task in range(program, B * STEPS * blocks * ok, PROGRAMS):
        row = wide(task // blocks)
        node = tl.maximum(tl.load(path_ptr + row), 0)
        column = task % blocks * FEATURE_BLOCK + tl.arange(0, FEATURE_BLOCK)
        source = features_ptr + (row // STEPS * nodes + node) * feature_size + column
        value = tl.load(source, mask=column < feature_size)
        tl.store(gathered_ptr + row * feature_size + column, value, mask=column < feature_size)
    number += 1
    ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, PROGRAMS, TMA)

    # All passes of the draft head, one phase after the other; EAGLE-3 begins with its fc.
    PHASES: tl.constexpr = 13 if EAGLE3 else 15
    for phase in range(-1 if EAGLE3 else 0, PASSES * PHASES):
        index = tl.maximum(phase, 0) // PHASES
        kind = phase - index * PHASES
        if EAGLE3:
            kind = tl.where(kind == 0, INPUTS, kind + 2)
        first_pass = index == 0
        level = tl.maximum(index - 1, 0)  # whose chosen children are this pass's nodes
        if UNIFORM:
            count = tl.where(first_pass, STEPS, BEAM)
            above = tl.where(level == 0, 1, BEAM)  # nodes of the level above
            first_slot = level * BEAM
            start = tl.where(level == 0, 0, K + (level - 1) * (BEAM * K))
            next_start = tl.where(first_pass, 0, K + level * (BEAM * K))
        else:
            count = tl.where(first_pass, STEPS, tl.load(levels_ptr + level))
            above = tl.where(level == 0, 1, tl.load(levels_ptr + tl.maximum(level - 1, 0)))
            first_slot = tl.load(levels_ptr + STEPS + level)
            start = tl.load(levels_ptr + 2 * STEPS + level)
            next_start = tl.load(levels_ptr + 2 * STEPS + index)
        rows = B * count
        ends = tl.where(first_pass, B, rows)  # of the accepted tokens' pass only the last row goes on

        if kind == INPUTS:  # the embedding and the feature of each node, and the bookkeeping of its beam
            for task in range(program, rows * 2 * ok, PROGRAMS):
                row = wide(task // 2)
                is_token = task % 2 == 0
                batch = row // count
                place = row % count
                feature = row
                if first_pass:
                    column = tl.minimum(tl.load(before_ptr + batch) + 1 + place, columns - 1)
                    token = tl.load(sequence_ptr + batch * columns + column)
                else:
                    beam_above = beam_scores_ptr + (level * B + batch) * BEAM
                    log_probs = log_probs_ptr + batch * above * K
                    named = beam_children_ptr
                    if beam_children_ptr is not None:
                        named += first_slot
                    parents, children = Vector(beam_above, 1), Matrix(log_probs, K, 1)
                    score, chosen = choose_beam(parents, children, named, above * K, K, count, CHILDREN, BEAM_WIDTH)
                    mine = tl.sum(tl.where(lane == place, chosen, 0), 0)
                    token = tl.load(candidates_ptr + batch * CANDIDATES + start + mine)
                    feature = batch * above + mine // K
                    if is_token & (place == 0):
                        parent = chosen // K
                        in_beam = lane < count
                        own = tl.load(beam_above + parent, mask=in_beam, other=0.0)
                        own += tl.load(log_probs + chosen, mask=in_beam, other=0.0)
                        tl.store(scores_ptr + batch * CANDIDATES + start + child, score, mask=child < above * K)
                        tl.store(beam_scores_ptr + ((level + 1) * B + batch) * BEAM + lane, own, mask=in_beam)
                        slots = beam_candidates_ptr + batch * SLOTS + first_slot
                        tl.store(slots + lane, (chosen + start).to(tl.int64), mask=in_beam)
                        masks = beam_ancestors_ptr + (level * B + batch) * (BEAM * WORDS)
                        masks_out = masks + B * BEAM * WORDS
                        bits_above = Matrix(masks, WORDS, 1)
                        store_ancestors(bits_above, masks_out, parent, first_slot, count, WORDS, BEAM_WIDTH)
                inputs = inputs_ptr + row * (2 * HIDDEN)
                picked = residual_ptr + row * HIDDEN
                if EAGLE3 and first_pass and (task % 2 == 1):
                    norm_row(
                        products_ptr + feature * HIDDEN,
                        feature_norm_ptr,
                        None,
                        inputs + HIDDEN,
                        picked,
                        rows * HIDDEN,
                        feature_eps,
                        HIDDEN,
                        BLOCK_H,
                        FC_SPLITS,
                        False,
                    )
                else:
                    source = hidden_ptr + feature * HIDDEN
                    weight = feature_norm_ptr
                    eps = feature_eps
                    out = inputs + HIDDEN
                    if first_pass:
                        source = gathered_ptr + feature * HIDDEN
                    if is_token:
                        source = embedding_ptr + token * HIDDEN
                        weight = token_norm_ptr
                        eps = token_eps
                        out = inputs
                        picked = normed_ptr + row * HIDDEN  # a place that nobody reads
                    norm_row(source, weight, None, out, picked, 0, eps, HIDDEN, BLOCK_H, 1, False)

        elif (kind == QKV) | (kind == OUT) | (kind == DOWN) | (kind == HEAD) | (kind == FC):
            source, source_desc = inputs_ptr, qkv_in_desc
            depth, width, tiles, splits, height = 2 * HIDDEN, QKV_COLS, QKV_TILES, QKV_SPLITS, rows
            if not EAGLE3:
                source, depth = residual_ptr, HIDDEN
            if kind == FC:
                source_desc, splits = fc_in_desc, FC_SPLITS
                source = gathered_ptr if EAGLE3 else inputs_ptr
                depth = feature_size if EAGLE3 else 2 * HIDDEN
            elif kind == OUT:
                source, source_desc, depth, splits = attended_ptr, o_in_desc, Q_COLS, OUT_SPLITS
            elif kind == DOWN:
                source, source_desc, depth, splits = inner_ptr, down_in_desc, INNER, DOWN_SPLITS
            elif kind == HEAD:
                source, source_desc, depth, splits = hidden_ptr, head_in_desc, HIDDEN, 1
                if EAGLE3:
                    source = head_in_ptr
                width, tiles, height = vocabulary, tl.cdiv(vocabulary, TILE_N), ends
            if (kind == FC) | (kind == OUT) | (kind == DOWN):
                width, tiles = HIDDEN, tl.cdiv(HIDDEN, TILE_N)
            for task in range(program, tiles * splits * ok, PROGRAMS):
                tile, split = task // splits, task % splits
                cols = width
                weight, weight_desc, bias = q_ptr, q_desc, q_bias_ptr
                base = 0
                if kind == QKV:
                    cols = Q_COLS
                    if tile >= Q_TILES + KV_TILES:
                        tile -= Q_TILES + KV_TILES
                        weight, weight_desc, bias = v_ptr, v_desc, v_bias_ptr
                        cols, base = KV_COLS, Q_COLS + KV_COLS
                    elif tile >= Q_TILES:
                        tile -= Q_TILES
                        weight, weight_desc, bias = k_ptr, k_desc, k_bias_ptr
                        cols, base = KV_COLS, Q_COLS
                elif kind == FC:
                    weight, weight_desc = fc_ptr, fc_desc
                elif kind == OUT:
                    weight, weight_desc = o_ptr, o_desc
                elif kind == DOWN:
                    weight, weight_desc = down_ptr, down_desc
                else:
                    weight, weight_desc = head_ptr, head_desc
                column = tile * TILE_N
                acc = product_steps(
                    Operand(source, source_desc, depth, height),
                    Operand(weight, weight_desc, depth, cols),
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
                if q_bias_ptr is not None and kind == QKV:
                    acc = add_bias(acc, bias, column, tl.where(split == 0, cols, 0), TILE_N, SWAP)
                if fc_bias_ptr is not None and kind == FC:
                    acc = add_bias(acc, fc_bias_ptr, column, tl.where(split == 0, cols, 0), TILE_N, SWAP)
                if kind == HEAD:
                    logits = Rows(logits_ptr, vocabulary)
                    store_tile(acc, None, logits, 0, column, height, cols, BLOCK_M, TILE_N, SWAP)
                else:
                    products = Rows(products_ptr + wide(split) * height * width + base, width)
                    store_tile(acc, None, products, 0, column, height, cols, BLOCK_M, TILE_N, SWAP)

        elif kind == ROTARY:
            for task in range(program, rows * HEADS * ok, PROGRAMS):
                place = task % count
                batch = wide(task // (count * HEADS))
                first_row = tl.load(before_ptr + batch)
                position = first_row + place
                if not first_pass:
                    length = tl.load(lengths_ptr + batch)
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
                    Turn(inv_freq_ptr, rotary_scaling),
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

        elif kind == ATTEND:
            visible = lengths_ptr
            bits = beam_ancestors_ptr + (level + 1) * (B * BEAM * WORDS)
            bits_stride = BEAM * WORDS
            if first_pass:
                visible, bits, bits_stride = before_ptr, chain_ptr, STEPS * WORDS
            row_blocks = tl.cdiv(count * GROUP, ROWS_M)
            for task in range(program, row_blocks * KEY_SPLITS * B * HEADS * ok, PROGRAMS):
                head = index_of(task // (row_blocks * KEY_SPLITS))
                attend_split(
                    task // KEY_SPLITS % row_blocks,
                    task % KEY_SPLITS,
                    head // HEADS,
                    head % HEADS,
                    queries_ptr,
                    cache_ptr,
                    None,
                    table_ptr,
                    visible,
                    bits,
                    attended_ptr,
                    partial_ptr,
                    softmax_ptr,
                    count * Q_COLS,
                    Q_COLS,
                    D,
                    wide(HEADS * PLANE),
                    wide(2 * HEADS * PLANE),
                    wide(PLANE),
                    table_width,
                    bits_stride,
                    WORDS,
                    count * Q_COLS,
                    Q_COLS,
                    D,
                    count,
                    64 * WORDS,
                    capacity,
                    scale_log2,
                    0,
                    D,
                    D,
                    PAGE,
                    GROUP,
                    HEADS,
                    WORDS,
                    False,
                    KEY_SPLITS,
                    KEY_SPLITS,
                    MIN_TILES,
                    False,
                    ROWS_M,
                    KEYS_N,
                    KEYS_T,
                    D_BLOCK,
                )

        elif kind == MERGE:
            if KEY_SPLITS > 1:
                visible = lengths_ptr
                if first_pass:
                    visible = before_ptr
                row_blocks = tl.cdiv(count * GROUP, MERGE_ROWS)
                for task in range(program, row_blocks * B * HEADS * ok, PROGRAMS):
                    head = index_of(task // row_blocks)
                    merge_rows(
                        task % row_blocks,
                        head // HEADS,
                        head % HEADS,
                        partial_ptr,
                        softmax_ptr,
                        visible,
                        attended_ptr,
                        None,
                        None,
                        count * Q_COLS,
                        Q_COLS,
                        D,
                        count,
                        0,
                        64 * WORDS,
                        capacity,
                        0,
                        D,
                        GROUP,
                        HEADS,
                        False,
                        KEY_SPLITS,
                        MIN_TILES,
                        False,
                        KEYS_N,
                        MERGE_ROWS,
                        triton.next_power_of_2(KEY_SPLITS),
                        D_BLOCK,
                    )

        elif (kind == POST) | (kind == NORM) | (kind == SUM):
            for task in range(program, tl.where(kind == NORM, ends, rows) * ok, PROGRAMS):
                row = wide(task)
                source = row
                if first_pass & (kind == NORM):
                    source = row * STEPS + tl.maximum(tl.load(accepted_ptr + row), 0)
                sums = products_ptr + source * HIDDEN
                x = x_ptr + source * HIDDEN
                if kind == POST:
                    residual = residual_ptr + row * HIDDEN
                    if NORMED_RESIDUAL:
                        residual = inputs_ptr + (row * 2 + 1) * HIDDEN
                    norm_row(
                        sums,
                        post_norm_ptr,
                        residual,
                        normed_ptr + row * HIDDEN,
                        x,
                        rows * HIDDEN,
                        post_eps,
                        HIDDEN,
                        BLOCK_H,
                        OUT_SPLITS,
                        False,
                    )
                elif kind == NORM:
                    out = hidden_ptr + row * HIDDEN
                    normed, total = out, None
                    if EAGLE3:
                        normed, total = head_in_ptr + row * HIDDEN, out
                    norm_row(
                        sums,
                        norm_ptr,
                        x,
                        normed,
                        total,
                        rows * HIDDEN,
                        norm_eps,
                        HIDDEN,
                        BLOCK_H,
                        DOWN_SPLITS,
                        False,
                    )
                    if first_pass:  # from here another tree may be grown later
                        column = tl.arange(0, BLOCK_H)
                        tl.debug_barrier()
                        value = tl.load(out + column, mask=column < HIDDEN)
                        tl.store(last_hidden_ptr + row * HIDDEN + column, value, mask=column < HIDDEN)
                        value = tl.load(normed + column, mask=column < HIDDEN)
                        tl.store(last_normed_ptr + row * HIDDEN + column, value, mask=column < HIDDEN)
                elif not EAGLE3:
                    out = residual_ptr + row * HIDDEN
                    norm_row(sums, None, None, out, None, rows * HIDDEN, 0.0, HIDDEN, BLOCK_H, FC_SPLITS, False)

        elif kind == SWIGLU:
            for task in range(program, tl.cdiv(INNER, MLP_N) * ok, PROGRAMS):
                swiglu_tile(
                    0,
                    task * MLP_N,
                    Operand(normed_ptr, mlp_in_desc, HIDDEN, rows),
                    Operand(gate_ptr, gate_desc, HIDDEN, INNER),
                    Operand(up_ptr, up_desc, HIDDEN, INNER),
                    Rows(inner_ptr, INNER),
                    HIDDEN,
                    BLOCK_M,
                    MLP_N,
                    MLP[1],
                    MLP[2],
                    EVEN_K,
                )

        elif kind == TOPK:
            for task in range(program, ends * CHUNKS * ok, PROGRAMS):
                row = wide(task // CHUNKS)
                topk_chunk(
                    row,
                    task % CHUNKS,
                    Matrix(logits_ptr, vocabulary, 1),
                    ChunkBest(ranks_ptr, peaks_ptr, masses_ptr),
                    CHUNKS,
                    vocabulary,
                    K,
                    CHUNK,
                )

        else:  # BEST: of all chunks
            each = tl.where(first_pass, 1, count)
            for task in range(program, ends * ok, PROGRAMS):
                row = wide(task)
                topk_merge(
                    row,
                    ChunkBest(ranks_ptr, peaks_ptr, masses_ptr),
                    d2t_ptr,
                    log_probs_ptr + row * K,
                    candidates_ptr + (row // each * CANDIDATES + next_start + row % each * K),
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
        above = tl.where(PASSES == 1, 1, tl.load(levels_ptr + tl.maximum(PASSES - 2, 0)))
        start = tl.load(levels_ptr + 2 * STEPS + PASSES - 1)
        parents = Vector(beam_scores_ptr + ((PASSES - 1) * B + batch) * BEAM, 1)
        children = Matrix(log_probs_ptr + batch * above * K, K, 1)
        score, _ = choose_beam(parents, children, None, above * K, K, 0, CHILDREN, BEAM_WIDTH)
        tl.store(scores_ptr + batch * CANDIDATES + start + child, score, mask=child < above * K)
        root = tl.load(sequence_ptr + batch * columns + tl.minimum(tl.load(lengths_ptr + batch), columns - 1))
        tl.store(root_ptr + batch, root)
        tl.debug_barrier()
        write_tree(
            batch,
            Rows(root_ptr, 1),
            Lists(candidates_ptr, CANDIDATES, 1, CANDIDATES),
            Matrix(scores_ptr, CANDIDATES, 1),
            Lists(beam_candidates_ptr, SLOTS, 1, SLOTS),
            selected_ptr,
            None,
            scratch_ptr,
            Tree(
                Matrix(tokens_ptr, nodes, 1),
                Matrix(parents_ptr, nodes, 1),
                Matrix(depths_ptr, nodes, 1),
                Cube(ancestors_ptr, nodes * TREE_WORDS, TREE_WORDS, 1),
                nodes,
                TREE_WORDS,
            ),
            K,
            triton.next_power_of_2(CANDIDATES),
            NODES,
            64 if NODES > 64 else NODES,
            DOUBLINGS,
        )
    if ok == 0:
        for batch in range(B):
            tl.store(report_ptr + batch * REPORT + _REASON, _FAULT)
