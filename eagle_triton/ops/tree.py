"""Kernels of tree_decoding.py: the best tokens of a row, the beam of a level, and the tree of the best candidates."""

from __future__ import annotations

import triton
import triton.language as tl

from eagle_triton.ops.sampling.filter_thresholds import key_of, value_of
from eagle_triton.runtime.overlap import await_inputs

WORD = tl.constexpr(64)


_NOWHERE = tl.constexpr(2**31 - 1)


_OUTSIDE = tl.constexpr(1 - 2**31)  # a key below that of -inf


_TAKEN = tl.constexpr(-(2**31))  # a key below any other


_GONE = tl.constexpr(-(2**63))  # a rank below that of any key


@triton.jit
def ranked(key, index):
    """One int64 for each int32 key and its index: largest for the largest key, among equals for the lowest index."""
    return (key.to(tl.int64) << 32) | (index ^ _NOWHERE).to(tl.int64)


@triton.jit
def place_of(rank):
    return (rank & 0x7FFFFFFF).to(tl.int32) ^ _NOWHERE


@triton.jit
def _take_best(keys, index):
    """The largest of keys [n], the lowest of the distinct indices [n] at which it is, and the keys without that one."""
    best = tl.max(keys, 0)
    place = tl.min(tl.where(keys == best, index, _NOWHERE), 0)
    return best, place, tl.where(index == place, _TAKEN, keys)


@triton.jit
def fixed_sum(x):
    """The sum of fp32 values [n] in 0 .. 4096, n up to 4096, in fixed point: the same in any order, on any warps."""
    return tl.sum((x * 1099511627776.0).to(tl.int64), 0).to(tl.float32) * 9.094947017729282e-13  # 2^40


@triton.jit
def topk_chunk(
    x_ptr,
    ranks_ptr,
    peaks_ptr,
    sums_ptr,
    chunk,
    vocabulary,
    stride_xv,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The K best of one chunk of a row, its maximum and its sum of exponentials. All pointers are the row's."""
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + index * stride_xv, mask=index < vocabulary, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    peak = tl.max(x, 0)
    tl.store(peaks_ptr + chunk, peak)
    tl.store(sums_ptr + chunk, fixed_sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))))
    keys = tl.where(index < vocabulary, key_of(x, 0), _OUTSIDE)
    for count in range(K):
        best, place, keys = _take_best(keys, index)
        tl.store(ranks_ptr + chunk * K + count, ranked(best, place))


@triton.jit
def topk_merge(
    ranks_ptr,
    peaks_ptr,
    sums_ptr,
    offsets_ptr,
    values_out_ptr,
    tokens_out_ptr,
    chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The K best of a row's `chunks` chunks' best, as log-probabilities and tokens. All pointers are the row's."""
    lane = tl.arange(0, CANDIDATES)
    ranks = tl.load(ranks_ptr + lane, mask=lane < chunks * K, other=_GONE)
    keys, index = (ranks >> 32).to(tl.int32), place_of(ranks)
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(peaks_ptr + chunk, mask=chunk < chunks, other=float("-inf"))
    sums = tl.load(sums_ptr + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.max(peaks, 0)
    total = fixed_sum(tl.where(peaks == float("-inf"), 0.0, sums * tl.exp(peaks - peak)))

    place = tl.arange(0, WIDTH)
    top, token = tl.full((WIDTH,), 0, tl.int32), tl.full((WIDTH,), 0, tl.int32)
    for count in range(K):
        best, chosen, keys = _take_best(keys, index)
        top, token = tl.where(place == count, best, top), tl.where(place == count, chosen, token)
    value = value_of(top, 0) - (peak + tl.log(total))
    value = tl.where(value == value, value, float("-inf"))  # a row of -inf, or with +inf
    tl.store(values_out_ptr + place, value, mask=place < K)
    token = token.to(tl.int64)
    if offsets_ptr is not None:
        token += tl.load(offsets_ptr + token, mask=place < K, other=0)
    tl.store(tokens_out_ptr + place, token, mask=place < K)


@triton.jit
def _topk_chunk_kernel(
    x_ptr,
    ranks_ptr,
    peaks_ptr,
    sums_ptr,
    vocabulary,
    stride_xr,
    stride_xv,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, chunks)."""
    await_inputs(PDL)
    row, chunks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    topk_chunk(
        x_ptr + row * stride_xr,
        ranks_ptr + row * chunks * K,
        peaks_ptr + row * chunks,
        sums_ptr + row * chunks,
        tl.program_id(1),
        vocabulary,
        stride_xv,
        K,
        CHUNK,
    )


@triton.jit
def _topk_merge_kernel(
    ranks_ptr,
    peaks_ptr,
    sums_ptr,
    offsets_ptr,
    values_out_ptr,
    tokens_out_ptr,
    chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    topk_merge(
        ranks_ptr + row * chunks * K,
        peaks_ptr + row * chunks,
        sums_ptr + row * chunks,
        offsets_ptr,
        values_out_ptr + row * K,
        tokens_out_ptr + row * K,
        chunks,
        K,
        CHUNKS,
        CANDIDATES,
        WIDTH,
    )


def topk_chunk_of(vocabulary: int) -> int:
    """Tokens per program."""
    return min(1024 if vocabulary <= 65536 else 2048, max(16, triton.next_power_of_2(vocabulary)))


@triton.jit
def choose_beam(
    parents_ptr,
    log_probs_ptr,
    selected_ptr,
    children,
    k,
    width,
    stride_pp,
    stride_lp,
    stride_lk,
    CHILDREN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The scores [CHILDREN] of one sequence's children of a level, and which of them [WIDTH] become the next beam."""
    child = tl.arange(0, CHILDREN)
    inside = child < children
    parent = child // k
    score = tl.load(parents_ptr + parent * stride_pp, mask=inside, other=0.0)
    score += tl.load(log_probs_ptr + parent * stride_lp + (child % k) * stride_lk, mask=inside, other=0.0)
    lane = tl.arange(0, WIDTH)
    if selected_ptr is None:
        key = key_of(tl.where(score == score, score, float("-inf")), 0)
        keys = tl.where(inside, key, _OUTSIDE)
        chosen = tl.zeros((WIDTH,), tl.int32)
        for count in range(width):
            _, place, keys = _take_best(keys, child)
            chosen = tl.where(lane == count, place, chosen)
    else:
        chosen = tl.load(selected_ptr + lane, mask=lane < width, other=0).to(tl.int32)
    return score, chosen


@triton.jit
def store_ancestors(above_ptr, out_ptr, parent, first_slot, width, words, stride_ap, stride_aw, WIDTH: tl.constexpr):
    """The ancestors of one sequence's new beam: its parents' at above_ptr, and every slot's own bit; out is dense."""
    lane = tl.arange(0, WIDTH)
    slot = first_slot + lane
    bit = tl.full((WIDTH,), 1, tl.int64) << (slot % WORD)
    for word in range(words):
        mask = tl.load(above_ptr + parent * stride_ap + word * stride_aw, mask=lane < width, other=0)
        mask |= tl.where(slot // WORD == word, bit, 0)
        tl.store(out_ptr + lane * words + word, mask, mask=lane < width)


_OF_A_LEVEL = ["parents_ptr", "children_ptr", "child_scores_ptr", "chosen_ptr", "width", "first_slot"]


@triton.jit(do_not_specialize=["first_candidate"], do_not_specialize_on_alignment=_OF_A_LEVEL)
def _expand_beam_kernel(
    parents_ptr,
    log_probs_ptr,
    tokens_ptr,
    ancestors_ptr,
    selected_ptr,
    children_ptr,
    child_scores_ptr,
    chosen_ptr,
    parents_out_ptr,
    tokens_out_ptr,
    scores_out_ptr,
    ancestors_out_ptr,
    children,
    k,
    width,
    words,
    first_slot,
    first_candidate,
    stride_pb,
    stride_pp,
    stride_lb,
    stride_lp,
    stride_lk,
    stride_tb,
    stride_tc,
    stride_ab,
    stride_ap,
    stride_aw,
    stride_ob,
    stride_sb,
    stride_cb,
    CHILDREN: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): score one sequence's children of a level and choose the next beam."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    parents_ptr += batch * stride_pb
    log_probs_ptr += batch * stride_lb
    score, chosen = choose_beam(
        parents_ptr, log_probs_ptr, selected_ptr, children, k, width, stride_pp, stride_lp, stride_lk, CHILDREN, WIDTH
    )
    child = tl.arange(0, CHILDREN)
    tl.store(child_scores_ptr + batch * stride_sb + child, score, mask=child < children)
    if children_ptr is not None:
        every = tl.load(tokens_ptr + batch * stride_tb + child * stride_tc, mask=child < children)
        tl.store(children_ptr + batch * stride_ob + child, every, mask=child < children)
    lane = tl.arange(0, WIDTH)
    beam, place, parent = lane < width, batch * width + lane, chosen // k
    token = tl.load(tokens_ptr + batch * stride_tb + chosen * stride_tc, mask=beam, other=0)
    own = tl.load(parents_ptr + parent * stride_pp, mask=beam, other=0.0)
    own += tl.load(log_probs_ptr + parent * stride_lp + (chosen % k) * stride_lk, mask=beam, other=0.0)
    tl.store(chosen_ptr + batch * stride_cb + lane, chosen.to(tl.int64) + first_candidate, mask=beam)
    tl.store(parents_out_ptr + place, parent.to(tl.int64), mask=beam)
    tl.store(tokens_out_ptr + place, token, mask=beam)
    tl.store(scores_out_ptr + place, own, mask=beam)
    out = ancestors_out_ptr + batch * width * words
    store_ancestors(
        ancestors_ptr + batch * stride_ab, out, parent, first_slot, width, words, stride_ap, stride_aw, WIDTH
    )


@triton.jit
def _best_candidates(key, least, drafts):
    """Which of key [n] >= least are among the `drafts` largest (ties to the lower index), and their rank by index."""
    low = least.to(tl.int64) - 1
    high = tl.max(key, 0).to(tl.int64)
    while high - low > 1:  # count(key > low) >= drafts > count(key > high)
        middle = (low + high) >> 1
        enough = tl.sum((key > middle).to(tl.int32), 0) >= drafts
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    last = high.to(tl.int32)
    above = key > last
    equal = (key == last).to(tl.int32)
    room = drafts - tl.sum(above.to(tl.int32), 0)
    chosen = above | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
    return chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1


@triton.jit
def write_tree(
    batch,
    root_ptr,
    candidates_ptr,
    scores_ptr,
    beam_ptr,
    selected_ptr,
    grafted_ptr,
    scratch_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ancestors_ptr,
    candidates,
    nodes,
    slots,
    grafts,
    k,
    words,
    stride_r,
    stride_cb,
    stride_cc,
    stride_sb,
    stride_sc,
    stride_bb,
    stride_bs,
    stride_gb,
    stride_gj,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    stride_db,
    stride_dn,
    stride_ab,
    stride_an,
    stride_aw,
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    PAIRS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
):
    """Choose the drafts of sequence `batch` (int64) and write its tree."""
    if selected_ptr is None:
        chosen_ptr = scratch_ptr + batch * nodes
        index = tl.arange(0, CANDIDATES)
        inside = index < candidates
        score = tl.load(scores_ptr + batch * stride_sb + index * stride_sc, mask=inside, other=0.0)
        key = tl.where(inside, key_of(tl.where(score == score, score, float("-inf")), 0), _OUTSIDE)
        if nodes > 1:
            chosen, rank = _best_candidates(key, tl.min(tl.where(inside, key, _NOWHERE), 0), nodes - 1)
            tl.store(chosen_ptr + rank, index, mask=chosen)
        tl.debug_barrier()
    else:
        chosen_ptr = selected_ptr

    node = tl.arange(0, NODES)
    draft = (node > 0) & (node < nodes)
    flat = tl.load(chosen_ptr + node - 1, mask=draft, other=0).to(tl.int32)
    token = tl.load(candidates_ptr + batch * stride_cb + flat * stride_cc, mask=draft, other=0)
    token = tl.where(node == 0, tl.load(root_ptr + batch * stride_r), token)
    slot = flat // k - 1  # the beam slot that was expanded, -1: the root
    expanded = draft & (slot >= 0) & (slot < slots)
    above = tl.load(beam_ptr + batch * stride_bb + slot * stride_bs, mask=expanded, other=-1).to(tl.int32)
    if grafted_ptr is not None:
        graft = flat - (candidates - grafts)
        named = tl.load(grafted_ptr + batch * stride_gb + graft * stride_gj, mask=draft & (graft >= 0), other=-1)
        above = tl.where(graft >= 0, named, above)
        expanded = tl.where(graft >= 0, draft & (named >= 0), expanded)
    parent = tl.zeros((NODES,), tl.int32)
    for first in range(0, nodes - 1, PAIRS):  # the parent's place among the chosen, which ascend
        other = first + tl.arange(0, PAIRS)
        other_flat = tl.load(chosen_ptr + other, mask=other < nodes - 1, other=_NOWHERE)
        parent += tl.sum((other_flat.to(tl.int32)[None, :] < above[:, None]).to(tl.int32), 1)
    parent = tl.where(expanded, tl.minimum(parent + 1, nodes - 1), 0)

    jump, depth = parent, draft.to(tl.int32)
    for _ in range(DOUBLINGS):
        depth += tl.gather(depth, jump, 0)
        jump = tl.gather(jump, jump, 0)
    real = node < nodes
    tl.store(tokens_ptr + batch * stride_tb + node * stride_tn, token, mask=real)
    tl.store(parents_ptr + batch * stride_pb + node * stride_pn, tl.where(node == 0, -1, parent), mask=real)
    tl.store(depths_ptr + batch * stride_db + node * stride_dn, depth, mask=real)
    bit = tl.full((NODES,), 1, tl.int64) << (node % WORD)
    for word in range(words):
        mask, jump = tl.where(node // WORD == word, bit, 0), parent
        for _ in range(DOUBLINGS):
            mask |= tl.gather(mask, jump, 0)
            jump = tl.gather(jump, jump, 0)
        if word == 0:
            mask |= 1  # the root, which the doubling reaches too
        tl.store(ancestors_ptr + batch * stride_ab + node * stride_an + word * stride_aw, mask, mask=real)


_MOVING = ["root_ptr", "lengths_ptr", "tokens_ptr", "parents_ptr", "depths_ptr", "ancestors_ptr", "nodes"]


@triton.jit(do_not_specialize_on_alignment=_MOVING)
def _build_tree_kernel(
    root_ptr,
    lengths_ptr,
    candidates_ptr,
    scores_ptr,
    beam_ptr,
    selected_ptr,
    grafted_ptr,
    scratch_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ancestors_ptr,
    candidates,
    nodes,
    slots,
    grafts,
    k,
    words,
    columns,
    stride_r,
    stride_rc,
    stride_cb,
    stride_cc,
    stride_sb,
    stride_sc,
    stride_bb,
    stride_bs,
    stride_gb,
    stride_gj,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    stride_db,
    stride_dn,
    stride_ab,
    stride_an,
    stride_aw,
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    PAIRS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    if lengths_ptr is not None:
        root_ptr += tl.minimum(tl.load(lengths_ptr + batch), columns - 1).to(tl.int64) * stride_rc
    write_tree(
        batch,
        root_ptr,
        candidates_ptr,
        scores_ptr,
        beam_ptr,
        selected_ptr,
        grafted_ptr,
        scratch_ptr,
        tokens_ptr,
        parents_ptr,
        depths_ptr,
        ancestors_ptr,
        candidates,
        nodes,
        slots,
        grafts,
        k,
        words,
        stride_r,
        stride_cb,
        stride_cc,
        stride_sb,
        stride_sc,
        stride_bb,
        stride_bs,
        stride_gb,
        stride_gj,
        stride_tb,
        stride_tn,
        stride_pb,
        stride_pn,
        stride_db,
        stride_dn,
        stride_ab,
        stride_an,
        stride_aw,
        CANDIDATES,
        NODES,
        PAIRS,
        DOUBLINGS,
    )
