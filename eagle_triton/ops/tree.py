"""Kernels of tree_decoding.py: the best tokens of a row, the beam of a level, and the tree of the best candidates."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.ops.attention_tiles import popcount
from eagle_triton.ops.sampling.filter_thresholds import key_of, value_of
from eagle_triton.ops.views import Cube, Matrix, Rows, Vector
from eagle_triton.runtime.overlap import await_inputs

WORD = tl.constexpr(64)


_NOWHERE = tl.constexpr(2**31 - 1)


_OUTSIDE = tl.constexpr(1 - 2**31)  # a key below that of -inf


_TAKEN = tl.constexpr(-(2**31))  # a key below any other


_GONE = tl.constexpr(-(2**63))  # a rank below that of any key


# Of the largest chunk. A place takes the 13 bits that the key of a number of 16 bits does not need.
_LAST_PLACE = tl.constexpr(2**13 - 1)


class ChunkBest(NamedTuple):
    """The best tokens of each chunk of a row, and the terms of their log-softmax."""

    ranks: Tensor  # [R, chunks, K]
    peaks: Tensor  # [R, chunks]
    sums: Tensor  # [R, chunks], of exponentials relative to the peak


class Beam(NamedTuple):
    """The nodes of a level, contiguous: an Expansion without its first two fields."""

    parents: Tensor  # [B, width]
    tokens: Tensor  # [B, width]
    scores: Tensor  # [B, width]
    ancestors: Tensor  # [B, width, words]


class Lists(NamedTuple):
    """A tensor [rows, columns] with its number of columns."""

    ptr: Tensor
    row: int
    item: int
    columns: int

    @staticmethod
    def of(x: Tensor | None) -> Lists | None:
        return None if x is None else Lists(x, x.stride(0), x.stride(1), x.shape[1])


class Tree(NamedTuple):
    """The draft tree to write: tokens, parents and depths [B, nodes], ancestors [B, nodes, words]."""

    tokens: Matrix
    parents: Matrix
    depths: Matrix
    ancestors: Cube
    nodes: int
    words: int


@triton.jit
def ranked(key, index):
    """One int64 for each int32 key and its index: larger for a larger key, among equals for a lower index."""
    return (key.to(tl.int64) << 32) | (index ^ _NOWHERE).to(tl.int64)


@triton.jit
def place_of(rank):
    return (rank & 0x7FFFFFFF).to(tl.int32) ^ _NOWHERE


@triton.jit
def _take_best(keys, index):
    """The largest of keys [n], the lowest of its distinct indices [n], and the keys without that one."""
    best = tl.max(keys, 0)
    place = tl.min(tl.where(keys == best, index, _NOWHERE), 0)
    return best, place, tl.where(index == place, _TAKEN, keys)


@triton.jit
def fixed_sum(x):
    """The sum of fp32 values [n] in 0 .. 4096, n up to 4096, in fixed point: the same in any order and warps."""
    return tl.sum((x * 1099511627776.0).to(tl.int64), 0).to(tl.float32) * 9.094947017729282e-13  # 2^40


@triton.jit
def topk_chunk(row, chunk, x, best, chunks, vocabulary, K: tl.constexpr, CHUNK: tl.constexpr):
    """The K best of one chunk of a row, its maximum and its sum of exponentials. `row` is int64.

    A number of 16 bits and its place in the chunk fit in an int32, so one reduction finds both.
    """
    place = tl.arange(0, CHUNK)
    index = chunk * CHUNK + place
    logit = tl.load(x.ptr + row * x.row + index * x.item, mask=index < vocabulary, other=float("-inf"))
    SHORT: tl.constexpr = logit.dtype.primitive_bitwidth == 16
    logit = logit.to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    peak = tl.max(logit, 0)
    tl.store(best.peaks + row * chunks + chunk, peak)
    mass = fixed_sum(tl.exp(logit - tl.where(peak == float("-inf"), 0.0, peak)))
    tl.store(best.sums + row * chunks + chunk, mass)
    keys = tl.where(index < vocabulary, key_of(logit, 0), _OUTSIDE)
    ranks_ptr = best.ranks + (row * chunks + chunk) * K
    if SHORT:
        keys = (keys & ~_LAST_PLACE) | (_LAST_PLACE - place)
        for count in range(K):
            found = tl.max(keys, 0)
            keys = tl.where(keys == found, _TAKEN, keys)
            key = tl.where(found >= 0, found & ~_LAST_PLACE, found | _LAST_PLACE)
            tl.store(ranks_ptr + count, ranked(key, chunk * CHUNK + _LAST_PLACE - (found & _LAST_PLACE)))
    else:
        for count in range(K):
            key, first, keys = _take_best(keys, index)
            tl.store(ranks_ptr + count, ranked(key, first))


@triton.jit
def topk_merge(
    row,
    best,
    offsets_ptr,
    values_out_ptr,
    tokens_out_ptr,
    chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The K best of a row's `chunks` chunks' best, as log-probabilities and tokens, each [K]. `row` is int64.

    Each chunk's best are in order, so only the first that is left of each chunk is compared.
    """
    chunk = tl.arange(0, CHUNKS)
    inside, of_row = chunk < chunks, row * chunks + chunk
    first = tl.load(best.ranks + of_row * K, mask=inside, other=_GONE)
    peaks = tl.load(best.peaks + of_row, mask=inside, other=float("-inf"))
    sums = tl.load(best.sums + of_row, mask=inside, other=0.0)
    keys, index, taken = (first >> 32).to(tl.int32), place_of(first), tl.zeros((CHUNKS,), tl.int32)
    place = tl.arange(0, WIDTH)
    top, token = tl.full((WIDTH,), 0, tl.int32), tl.full((WIDTH,), 0, tl.int32)
    for count in range(K):
        key, chosen, _ = _take_best(keys, index)
        top, token = tl.where(place == count, key, top), tl.where(place == count, chosen, token)
        won = index == chosen
        taken += won.to(tl.int32)
        next_rank = tl.load(best.ranks + of_row * K + taken, mask=won & (taken < K), other=_GONE)
        keys = tl.where(won, (next_rank >> 32).to(tl.int32), keys)
        index = tl.where(won, place_of(next_rank), index)
    token = token.to(tl.int64)
    if offsets_ptr is not None:
        token += tl.load(offsets_ptr + token, mask=place < K, other=0)
    peak = tl.max(peaks, 0)
    total = fixed_sum(tl.where(peaks == float("-inf"), 0.0, sums * tl.exp(peaks - peak)))
    value = value_of(top, 0) - (peak + tl.log(total))
    value = tl.where(value == value, value, float("-inf"))  # a row of -inf, or with +inf
    tl.store(values_out_ptr + place, value, mask=place < K)
    tl.store(tokens_out_ptr + place, token, mask=place < K)


@triton.jit
def _topk_chunk_kernel(x, best, vocabulary, K: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Grid (R, chunks): a program runs `topk_chunk` for one chunk of a row."""
    await_inputs(PDL)
    row, chunks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    topk_chunk(row, tl.program_id(1), x, best, chunks, vocabulary, K, CHUNK)


@triton.jit
def _topk_merge_kernel(
    best,
    offsets_ptr,
    values_out_ptr,
    tokens_out_ptr,
    chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,): a program merges the chunks of a row."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    values, tokens = values_out_ptr + row * K, tokens_out_ptr + row * K
    topk_merge(row, best, offsets_ptr, values, tokens, chunks, K, CHUNKS, WIDTH)


def topk_chunk_of(vocabulary: int) -> int:
    """Tokens per program."""
    return min(1024 if vocabulary <= 65536 else 2048, max(16, triton.next_power_of_2(vocabulary)))


@triton.jit
def choose_beam(parents, log_probs, selected_ptr, children, k, width, CHILDREN: tl.constexpr, WIDTH: tl.constexpr):
    """The scores [CHILDREN] of one sequence's children of a level, and which of them [WIDTH] become the next beam.

    parents: its nodes' scores, a Vector. log_probs: of their children, a Matrix.
    """
    child = tl.arange(0, CHILDREN)
    inside = child < children
    parent = child // k
    score = tl.load(parents.ptr + parent * parents.item, mask=inside, other=0.0)
    score += tl.load(log_probs.ptr + parent * log_probs.row + (child % k) * log_probs.item, mask=inside, other=0.0)
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
def store_ancestors(above, out_ptr, parent, first_slot, width, words, WIDTH: tl.constexpr):
    """The ancestors of one sequence's new beam: its parents' ancestors, `above`, and every slot's own bit. out is
    contiguous."""
    lane = tl.arange(0, WIDTH)
    slot = first_slot + lane
    bit = tl.full((WIDTH,), 1, tl.int64) << (slot % WORD)
    for word in range(words):
        mask = tl.load(above.ptr + parent * above.row + word * above.item, mask=lane < width, other=0)
        mask |= tl.where(slot // WORD == word, bit, 0)
        tl.store(out_ptr + lane * words + word, mask, mask=lane < width)


_OF_A_LEVEL = ["parents_ptr", "children_ptr", "child_scores_ptr", "chosen_ptr", "width", "first_slot"]


@triton.jit(do_not_specialize=["first_candidate"], do_not_specialize_on_alignment=_OF_A_LEVEL)
def _expand_beam_kernel(
    parents_ptr,
    parents_strides,
    log_probs,
    tokens,
    ancestors,
    selected_ptr,
    children_ptr,
    children_row,
    child_scores_ptr,
    child_scores_row,
    chosen_ptr,
    chosen_row,
    beam,
    count,
    k,
    width,
    words,
    first_slot,
    first_candidate,
    CHILDREN: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): score one sequence's `count` children of a level and choose the next beam."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    parents = Vector(parents_ptr + batch * parents_strides[0], parents_strides[1])
    own_log_probs = Matrix(log_probs.ptr + batch * log_probs.batch, log_probs.row, log_probs.item)
    score, places = choose_beam(parents, own_log_probs, selected_ptr, count, k, width, CHILDREN, WIDTH)
    child = tl.arange(0, CHILDREN)
    tl.store(child_scores_ptr + batch * child_scores_row + child, score, mask=child < count)
    if children_ptr is not None:
        every = tl.load(tokens.ptr + batch * tokens.row + child * tokens.item, mask=child < count)
        tl.store(children_ptr + batch * children_row + child, every, mask=child < count)
    lane = tl.arange(0, WIDTH)
    inside, slot, parent = lane < width, batch * width + lane, places // k
    token = tl.load(tokens.ptr + batch * tokens.row + places * tokens.item, mask=inside, other=0)
    own = tl.load(parents.ptr + parent * parents.item, mask=inside, other=0.0)
    log_prob_ptr = own_log_probs.ptr + parent * log_probs.row + (places % k) * log_probs.item
    own += tl.load(log_prob_ptr, mask=inside, other=0.0)
    tl.store(chosen_ptr + batch * chosen_row + lane, places.to(tl.int64) + first_candidate, mask=inside)
    tl.store(beam.parents + slot, parent.to(tl.int64), mask=inside)
    tl.store(beam.tokens + slot, token, mask=inside)
    tl.store(beam.scores + slot, own, mask=inside)
    above = Matrix(ancestors.ptr + batch * ancestors.batch, ancestors.row, ancestors.item)
    store_ancestors(above, beam.ancestors + batch * width * words, parent, first_slot, width, words, WIDTH)


@triton.jit
def _best_candidates(key, least, drafts):
    """Which of the keys [n], all >= least, are the `drafts` largest (ties to the lower index), and the rank of each by
    index."""
    low = least.to(tl.int64) - 1
    high = tl.max(key, 0).to(tl.int64)
    while high - low > 1:  # count(key > low) >= drafts >= count(key > high)
        middle = (low + high) >> 1
        count = tl.sum((key > middle).to(tl.int32), 0)
        low = tl.where(count >= drafts, middle, low)
        high = tl.where(count <= drafts, middle, high)
    last = high.to(tl.int32)
    above = key > last
    equal = (key == last).to(tl.int32)
    room = drafts - tl.sum(above.to(tl.int32), 0)
    chosen = above | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
    return chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1


@triton.jit
def write_tree(
    batch,
    root,
    candidates,
    scores,
    beam,
    selected_ptr,
    grafted,
    scratch_ptr,
    tree,
    k,
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Choose the drafts of sequence `batch` (int64) and write its tree. root: Rows, each beginning with a root's
    token."""
    nodes = tree.nodes
    if selected_ptr is None:
        chosen_ptr = scratch_ptr + batch * nodes
        index = tl.arange(0, CANDIDATES)
        inside = index < candidates.columns
        score = tl.load(scores.ptr + batch * scores.row + index * scores.item, mask=inside, other=0.0)
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
    token = tl.load(candidates.ptr + batch * candidates.row + flat * candidates.item, mask=draft, other=0)
    token = tl.where(node == 0, tl.load(root.ptr + batch * root.row), token)
    slot = flat // k - 1  # the expanded beam slot, -1 for the root
    expanded = draft & (slot >= 0) & (slot < beam.columns)
    above = tl.load(beam.ptr + batch * beam.row + slot * beam.item, mask=expanded, other=-1).to(tl.int32)
    if grafted is not None:
        graft = flat - (candidates.columns - grafted.columns)
        graft_ptr = grafted.ptr + batch * grafted.row + graft * grafted.item
        named = tl.load(graft_ptr, mask=draft & (graft >= 0), other=-1)
        above = tl.where(graft >= 0, named, above)
        expanded = tl.where(graft >= 0, draft & (named >= 0), expanded)
    parent = tl.zeros((NODES,), tl.int32)
    for first in range(0, nodes - 1, PAIRS):  # find the parent's place among the chosen, which ascend
        other = first + tl.arange(0, PAIRS)
        other_flat = tl.load(chosen_ptr + other, mask=other < nodes - 1, other=_NOWHERE)
        parent += tl.sum((other_flat.to(tl.int32)[None, :] < above[:, None]).to(tl.int32), 1)
    parent = tl.where(expanded, tl.minimum(parent + 1, nodes - 1), 0)
    store_tree(batch, token, parent, tree, NODES)


@triton.jit
def store_tree(batch, token, parent, tree, NODES: tl.constexpr):
    """Write the tree of token [NODES] and parent [NODES], 0 for the root."""
    node = tl.arange(0, NODES)
    real = node < tree.nodes
    tokens, parents, depths, ancestors = tree.tokens, tree.parents, tree.depths, tree.ancestors
    tl.store(tokens.ptr + batch * tokens.row + node * tokens.item, token, mask=real)
    tl.store(parents.ptr + batch * parents.row + node * parents.item, tl.where(node == 0, -1, parent), mask=real)
    bit = tl.full((NODES,), 1, tl.int64) << (node % WORD)
    depth = tl.full((NODES,), -1, tl.int32)
    for word in range(tree.words):
        mask, above, levels = tl.where(node // WORD == word, bit, 0), parent, 1
        while (tl.max(above, 0) > 0) & (levels < tree.nodes):  # `above`: the ancestor so many levels up, or the root
            mask |= tl.gather(mask, above, 0)
            above = tl.gather(above, above, 0)
            levels *= 2
        if word == 0:
            mask |= 1  # the root
        depth += popcount(mask)
        place_ptr = ancestors.ptr + batch * ancestors.batch + node * ancestors.row + word * ancestors.item
        tl.store(place_ptr, mask, mask=real)
    tl.store(depths.ptr + batch * depths.row + node * depths.item, depth, mask=real)


_MOVING = ["root_ptr", "lengths_ptr", "tokens_ptr", "parents_ptr", "depths_ptr", "ancestors_ptr", "nodes"]


@triton.jit(do_not_specialize_on_alignment=_MOVING)
def _build_tree_kernel(
    root_ptr,
    root_strides,
    columns,
    lengths_ptr,
    candidates,
    scores,
    beam,
    selected_ptr,
    grafted,
    scratch_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ancestors_ptr,
    tree_strides,
    nodes,
    words,
    k,
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): a program writes one tree. A root is in column 0 of its row, or with lengths in column lengths[b].
    tree_strides: of the Tree's tensors."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    if lengths_ptr is not None:
        root_ptr += tl.minimum(tl.load(lengths_ptr + batch), columns - 1).to(tl.int64) * root_strides[1]
    tokens, parents = Matrix(tokens_ptr, *tree_strides[0]), Matrix(parents_ptr, *tree_strides[1])
    depths, ancestors = Matrix(depths_ptr, *tree_strides[2]), Cube(ancestors_ptr, *tree_strides[3])
    write_tree(
        batch,
        Rows(root_ptr, root_strides[0]),
        candidates,
        scores,
        beam,
        selected_ptr,
        grafted,
        scratch_ptr,
        Tree(tokens, parents, depths, ancestors, nodes, words),
        k,
        CANDIDATES,
        NODES,
        PAIRS,
    )


@triton.jit(do_not_specialize_on_alignment=_MOVING)
def _best_first_tree_kernel(
    root_ptr,
    root_strides,
    columns,
    lengths_ptr,
    log_probs_ptr,
    choices_ptr,
    rows_ptr,
    scores_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ancestors_ptr,
    tree_strides,
    nodes,
    words,
    levels,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): the best paths of one lattice [levels, ROWS, K], one after the other.

    The children of a node lie in a row, the best first. So the next node is the best of each node's best child that is
    not in the tree yet, which entry n of `key` and `order` describes for node n. `order` is (level, n, place in the
    level) in mixed radix, PLACES >= ROWS * K; of equal keys the lowest is taken. PLACES and NODES are powers of two.
    """
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    log_probs_ptr += batch * levels * ROWS * K
    node = tl.arange(0, NODES)
    key = tl.where(node == 0, key_of(tl.load(log_probs_ptr), 0), _TAKEN)
    order, taken = tl.zeros((NODES,), tl.int32), tl.zeros((NODES,), tl.int32)
    score = tl.zeros((NODES,), tl.int32)  # the nodes' scores, as bits
    for new in range(1, nodes):
        best = tl.max(key, 0)
        first = tl.min(tl.where(key == best, order, _NOWHERE), 0)
        place, parent, level = first % PLACES, first // PLACES % NODES, first // (PLACES * NODES)
        own, above = value_of(best, 0), tl.sum(tl.where(node == parent, score, 0), 0).to(tl.float32, bitcast=True)
        choice = level * (ROWS * K) + place
        has_sibling = (place + 1) % K != 0
        sibling = above + tl.load(log_probs_ptr + choice + 1, mask=has_sibling, other=0.0)
        below, has_child = (level + 1) * NODES + new, level + 1 < levels
        child_choice, child_order = (level + 1) * (ROWS * K), below * PLACES
        if rows_ptr is not None:
            row = tl.load(rows_ptr + batch * levels * ROWS * K + choice).to(tl.int32)
            child_choice, child_order = child_choice + row * K, child_order + row * K
        child = own + tl.load(log_probs_ptr + child_choice, mask=has_child, other=0.0)
        of_parent, of_new = node == parent, node == new
        child_key = tl.where(has_child, key_of(child, 0), _TAKEN)
        key = tl.where(of_parent, tl.where(has_sibling, key_of(sibling, 0), _TAKEN), tl.where(of_new, child_key, key))
        order = tl.where(of_parent, first + 1, tl.where(of_new, child_order, order))
        score = tl.where(of_new, own.to(tl.int32, bitcast=True), score)
        taken = tl.where(of_new, first, taken)

    draft = (node > 0) & (node < nodes)
    tl.store(scores_ptr + batch * nodes + node, score.to(tl.float32, bitcast=True), mask=node < nodes)
    choice = taken // (PLACES * NODES) * (ROWS * K) + taken % PLACES
    token = tl.load(choices_ptr + batch * levels * ROWS * K + choice, mask=draft, other=0)
    if lengths_ptr is not None:
        root_ptr += tl.minimum(tl.load(lengths_ptr + batch), columns - 1).to(tl.int64) * root_strides[1]
    token = tl.where(node == 0, tl.load(root_ptr + batch * root_strides[0]), token)
    tokens, parents = Matrix(tokens_ptr, *tree_strides[0]), Matrix(parents_ptr, *tree_strides[1])
    depths, ancestors = Matrix(depths_ptr, *tree_strides[2]), Cube(ancestors_ptr, *tree_strides[3])
    tree = Tree(tokens, parents, depths, ancestors, nodes, words)
    store_tree(batch, token, taken // PLACES % NODES, tree, NODES)
