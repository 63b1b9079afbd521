"""The megakernel: the order of its phases."""

from __future__ import annotations

import triton
import triton.language as tl

from eagle_triton.operands.verification import FAULT, REASON
from eagle_triton.ops.megakernel.draft_pass import (
    ATTEND,
    DOWN,
    FC,
    INPUTS,
    LOGITS,
    MERGE,
    NORM,
    OUT,
    POST,
    QKV,
    ROTARY,
    SUM,
    SWIGLU,
    TOPK,
    attend,
    best_children,
    best_of_chunks,
    build_tree,
    make_inputs,
    merge_splits,
    multiply,
    multiply_swiglu,
    norm_sums,
    pass_of,
    rotate_and_append,
)
from eagle_triton.ops.megakernel.tensors import Grid, InputDescriptors, State, WeightDescriptors
from eagle_triton.ops.megakernel.verify import gather_features, keep_accepted_rows, scan_logits, verify_and_advance
from eagle_triton.runtime.grid_barrier import grid_barrier

_REASON, _FAULT = tl.constexpr(REASON), tl.constexpr(FAULT)


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
    SIZES: tl.constexpr,
):
    """Grid (programs,), all resident. absent, limit: see `grid_barrier`."""
    TREE: tl.constexpr = SIZES.tree
    weights = WeightDescriptors(fc_desc, q_desc, k_desc, v_desc, o_desc, gate_desc, up_desc, down_desc, head_desc)
    inputs = InputDescriptors(fc_in_desc, qkv_in_desc, o_in_desc, mlp_in_desc, down_in_desc, head_in_desc)
    state = State(target, pages, sequences, verified, stopping, tree, plan, draft, layer, weights, inputs, work)
    program = tl.program_id(0)
    number = 0
    ok = 1

    if SIZES.greedy:
        scan_logits(Grid(program, ok), target_logits_ptr, state, SIZES)
        number += 1
        ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, SIZES.programs, SIZES.tma)
    verify_and_advance(Grid(program, ok), state, SIZES)
    number += 1
    ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, SIZES.programs, SIZES.tma)
    keep_accepted_rows(Grid(program, ok), state, SIZES)
    gather_features(Grid(program, ok), features_ptr, state, SIZES)
    number += 1
    ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, SIZES.programs, SIZES.tma)

    # All passes of the draft head, phase by phase; EAGLE-3 begins with its fc.
    PHASES: tl.constexpr = 13 if SIZES.head.eagle3 else 15
    for phase in range(-1 if SIZES.head.eagle3 else 0, TREE.passes * PHASES):
        index = tl.maximum(phase, 0) // PHASES
        kind = phase - index * PHASES
        if SIZES.head.eagle3:
            kind = tl.where(kind == 0, INPUTS, kind + 2)
        here, grid = pass_of(index, state, SIZES), Grid(program, ok)
        if kind == INPUTS:
            make_inputs(grid, here, state, SIZES)
        elif (kind == QKV) | (kind == OUT) | (kind == DOWN) | (kind == LOGITS) | (kind == FC):
            multiply(grid, here, kind, state, SIZES)
        elif kind == ROTARY:
            rotate_and_append(grid, here, state, SIZES)
        elif kind == ATTEND:
            attend(grid, here, state, SIZES)
        elif kind == MERGE:
            merge_splits(grid, here, state, SIZES)
        elif (kind == POST) | (kind == NORM) | (kind == SUM):
            norm_sums(grid, here, kind, state, SIZES)
        elif kind == SWIGLU:
            multiply_swiglu(grid, here, state, SIZES)
        elif kind == TOPK:
            best_of_chunks(grid, here, state, SIZES)
        else:
            best_children(grid, here, state, SIZES)
        number += 1
        ok = grid_barrier(sync_ptr, number, program, absent, limit, ok, SIZES.programs, SIZES.tma)

    build_tree(Grid(program, ok), state, SIZES)
    if ok == 0:
        for batch in range(TREE.batch):
            tl.store(sequences.report + batch * SIZES.report + _REASON, _FAULT)
