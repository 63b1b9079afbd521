"""The megakernel's phases before the draft passes: verify, advance the sequences, and keep what was accepted."""

from __future__ import annotations

import triton
import triton.language as tl

from eagle_triton.kv_cache import commit_plane, plane_of
from eagle_triton.ops.sampling.filter_thresholds import Scans, scan_parts
from eagle_triton.ops.verification.update import Accepted, Sequences, StopRules, update_one
from eagle_triton.ops.verification.walks import Walk, greedy_walk
from eagle_triton.ops.views import CacheSide, Matrix, Rows

_FEATURE_BLOCK = tl.constexpr(1024)


@triton.jit
def wide(index):
    """`index` as an int64, so that products with it may pass 2^31."""
    return tl.full((), 0, tl.int64) + index


@triton.jit
def index_of(index):
    """`index` as an int32 tensor: in the interpreter, loops count Python integers."""
    return tl.full((), 0, tl.int32) + index


@triton.jit
def scan_logits(grid, logits_ptr, state, SIZES: tl.constexpr):
    """The largest logit of each part of each node's logits [B * N, vocabulary]."""
    SCANNING: tl.constexpr = SIZES.scanning
    target, tree, work = state.target, state.tree, state.work
    for task in range(grid.program, SIZES.tree.batch * tree.nodes * SCANNING.parts, SIZES.programs):
        scan_parts(
            wide(task // SCANNING.parts),
            task % SCANNING.parts,
            Matrix(logits_ptr, target.vocabulary, 1),
            None,
            Scans(work.peaks, work.places, None),
            tree.nodes,
            target.vocabulary,
            SCANNING.part,
            1,
        )


@triton.jit
def verify_and_advance(grid, state, SIZES: tl.constexpr):
    """Walk each sequence's tree (if greedy; otherwise that was done), and append what was accepted to the sequence."""
    TREE: tl.constexpr = SIZES.tree
    SCANNING: tl.constexpr = SIZES.scanning
    REPORT: tl.constexpr = SIZES.report
    sequences, verified, stopping, tree, work = state.sequences, state.verified, state.stopping, state.tree, state.work
    STEPS: tl.constexpr = TREE.passes + 1
    for task in range(grid.program, TREE.batch * grid.ok, SIZES.programs):
        if SIZES.greedy:
            greedy_walk(
                index_of(task),
                work.peaks,
                work.places,
                Matrix(tree.tokens, tree.nodes, 1),
                Matrix(tree.parents, tree.nodes, 1),
                Walk(verified.path, verified.accepted, verified.next_token),
                verified.nan,
                tree.nodes,
                SCANNING.parts,
                TREE.passes,
                TREE.nodes,
                triton.next_power_of_2(SCANNING.parts),
                triton.next_power_of_2(STEPS),
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
            SIZES.stops,
        )


@triton.jit
def keep_accepted_rows(grid, state, SIZES: tl.constexpr):
    """Move the accepted rows of the target's cache to the end of what is committed."""
    TREE: tl.constexpr = SIZES.tree
    target, pages, verified = state.target, state.pages, state.verified
    WIDTH: tl.constexpr = SIZES.target_width
    PAGE: tl.constexpr = SIZES.head.page
    STEPS: tl.constexpr = TREE.passes + 1
    for task in range(grid.program, target.planes * grid.ok, SIZES.programs):
        stack, sequence, head = plane_of(task, TREE.batch, target.heads)
        commit_plane(
            CacheSide(target.cache, target.page, PAGE * WIDTH, WIDTH),
            target.cache + (stack * target.heads + head) * (PAGE * WIDTH),
            pages,
            sequence,
            tl.load(state.sequences.before + sequence),
            verified.path + sequence * STEPS,
            tl.load(verified.accepted + sequence),
            STEPS,
            pages.row * PAGE,
            WIDTH,
            PAGE,
            triton.next_power_of_2(STEPS),
            triton.next_power_of_2(WIDTH),
        )


@triton.jit
def gather_features(grid, features_ptr, state, SIZES: tl.constexpr):
    """Copy the accepted nodes' features [B, N, F] in the order of the path."""
    TREE: tl.constexpr = SIZES.tree
    target = state.target
    STEPS: tl.constexpr = TREE.passes + 1
    blocks = tl.cdiv(target.features, _FEATURE_BLOCK)
    for task in range(grid.program, TREE.batch * STEPS * blocks * grid.ok, SIZES.programs):
        row = wide(task // blocks)
        node = tl.maximum(tl.load(state.verified.path + row), 0)
        column = task % blocks * _FEATURE_BLOCK + tl.arange(0, _FEATURE_BLOCK)
        source = features_ptr + (row // STEPS * state.tree.nodes + node) * target.features + column
        value = tl.load(source, mask=column < target.features)
        tl.store(state.work.gathered + row * target.features + column, value, mask=column < target.features)
