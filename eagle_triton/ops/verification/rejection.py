"""The walk with one coin for each node: over its children's masses, then the rest of the last node's distribution."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.verification import check_tree
from eagle_triton.ops.sampling.draws import choose_chunk, choose_token, chunk_of, coin_of
from eagle_triton.ops.sampling.filter_thresholds import row_thresholds, scale_of, token_weight
from eagle_triton.ops.verification.walks import BY_SLOT, NOWHERE, load_nodes, store_path, walk_results
from eagle_triton.ops.views import Matrix, view
from eagle_triton.runtime.launch import launch
from eagle_triton.runtime.overlap import early_start, prefer_shared_memory

_DRAW_WARPS = 8


@triton.jit
def _without(weight, index, refused):
    """weight [n] of tokens `index`, 0 for the tokens in `refused` (NOWHERE: none)."""
    token = tl.min(refused, 0)
    while token < NOWHERE:
        weight = tl.where(index == token, 0.0, weight)
        refused = tl.where(refused == token, NOWHERE, refused)
        token = tl.min(refused, 0)
    return weight


@triton.jit
def _refused(token, parent, current, chunk, CHUNK: tl.constexpr):
    """The tokens of a node's children that lie in one chunk."""
    low = chunk * CHUNK
    return tl.where((parent == current) & (token >= low) & (token < low + CHUNK), token.to(tl.int32), NOWHERE)


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _sampled_walk_kernel(
    x,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    step_ptr,
    tokens_ptr,
    tokens_strides,
    parents_ptr,
    parents_strides,
    walk,
    nan_ptr,
    sums_ptr,
    nodes,
    vocabulary,
    chunks,
    depth,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, chunks): walk one sequence's tree (all chunks do the same walk), then sum one chunk of the last accepted
    node's distribution, without and with the tokens of its refused children."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch, chunk = tl.program_id(0), tl.program_id(1)
    node = tl.arange(0, NODES)
    real = node < nodes
    tokens, parents = Matrix(tokens_ptr, *tokens_strides), Matrix(parents_ptr, *parents_strides)
    token, parent = load_nodes(batch, tokens, parents, nodes, NODES)
    x_batch = x.ptr + batch.to(tl.int64) * nodes * x.row
    thresholds = thresholds_ptr + batch.to(tl.int64) * nodes * 4
    scale, min_p = scale_of(tl.load(temperature_ptr + batch)), tl.load(min_p_ptr + batch)
    seed, counter = tl.load(seed_ptr + batch), tl.load(step_ptr + batch)

    above = tl.maximum(parent, 0)
    known = real & (parent >= 0) & (token >= 0) & (token < vocabulary)
    logit = tl.load(x_batch + above.to(tl.int64) * x.row + token * x.item, mask=known, other=float("-inf"))
    mass = token_weight(thresholds + above * 4, logit.to(tl.float32), token, min_p, scale)
    mass *= tl.load(thresholds + above * 4 + 2)
    repeated = tl.zeros((NODES,), tl.int32)
    for first in range(0, nodes, PAIRS):  # a token that an earlier sibling has counts once
        other = first + tl.arange(0, PAIRS)
        token_ptr = tokens.ptr + batch * tokens.row + other * tokens.item
        parent_ptr = parents.ptr + batch * parents.row + other * parents.item
        other_token = tl.load(token_ptr, mask=other < nodes, other=-1)
        other_parent = tl.load(parent_ptr, mask=other < nodes, other=-3)
        same = (token[:, None] == other_token[None, :]) & (parent[:, None] == other_parent[None, :])
        earlier = other[None, :] < node[:, None]
        repeated = tl.maximum(repeated, tl.max((same & earlier).to(tl.int32), 1))
    mass = tl.where(known & (repeated == 0), mass, 0.0)
    coin = coin_of(seed, counter, above)

    step = tl.arange(0, STEPS)
    path = tl.where(step == 0, 0, -1)
    current = 0
    accepted = 0
    alive = True
    for count in range(1, depth + 1):
        passed = tl.where(parent == current, mass, 0.0)
        hit = (coin < tl.cumsum(passed, 0)) & (passed > 0)
        child = tl.min(tl.where(hit, node, NOWHERE), 0)
        alive = alive & (child < NOWHERE)
        current = tl.where(alive, child, current)
        accepted = tl.where(alive, count, accepted)
        path = tl.where((step == count) & alive, child, path)
    if chunk == 0:
        store_path(batch, walk, path, accepted, depth, STEPS)
        if nan_ptr is not None:
            tops = tl.load(thresholds + node * 4, mask=real, other=0.0)
            tl.store(nan_ptr + batch, tl.max((tops != tops).to(tl.int32), 0) > 0)

    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x_row = x_batch + current.to(tl.int64) * x.row  # type: ignore[attr-defined]
    logits = tl.load(x_row + index * x.item, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    weight = token_weight(thresholds + current * 4, logits, index, min_p, scale)
    rest = _without(weight, index, _refused(token, parent, current, chunk, CHUNK))
    slot = (batch * chunks + chunk) * 2
    tl.store(sums_ptr + slot, tl.sum(weight.to(tl.float64), 0))
    tl.store(sums_ptr + slot + 1, tl.sum(rest.to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _final_token_kernel(
    x,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    step_ptr,
    tokens_ptr,
    tokens_strides,
    parents_ptr,
    parents_strides,
    walk,
    sums_ptr,
    nodes,
    vocabulary,
    chunks,
    depth,
    NODES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): draw the token after the last accepted node, without the tokens of its refused children."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0)
    current = tl.load(walk.path + batch * (depth + 1) + tl.load(walk.accepted + batch))
    lane = tl.arange(0, CHUNKS)
    slot = (batch * chunks + lane) * 2
    whole = tl.load(sums_ptr + slot, mask=lane < chunks, other=0.0)
    rest = tl.load(sums_ptr + slot + 1, mask=lane < chunks, other=0.0)
    some_left = tl.sum(rest, 0) > 0  # if rounding refused all mass, draw from the whole distribution
    coin = coin_of(tl.load(seed_ptr + batch), tl.load(step_ptr + batch), nodes)
    chunk, target = choose_chunk(tl.where(some_left, rest, whole), coin)

    tokens, parents = Matrix(tokens_ptr, *tokens_strides), Matrix(parents_ptr, *parents_strides)
    token, parent = load_nodes(batch, tokens, parents, nodes, NODES)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    row = batch.to(tl.int64) * nodes + current
    logits = tl.load(x.ptr + row * x.row + index * x.item, mask=index < vocabulary, other=float("-inf"))
    scale = scale_of(tl.load(temperature_ptr + batch))
    weight = token_weight(thresholds_ptr + row * 4, logits.to(tl.float32), index, tl.load(min_p_ptr + batch), scale)
    if some_left:
        weight = _without(weight, index, _refused(token, parent, current, chunk, CHUNK))
    tl.store(walk.next_token + batch, choose_token(weight, index, target, vocabulary).to(tl.int64))


def verify_sampling(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    top_p_first: bool = False,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree by sampling each node's continuation; see reference.verification.verify_sampling.

    Arguments and results as verify_greedy; coins come from `params`. Raises ValueError likewise.
    """
    check_tree("verify_sampling", logits, tokens, parents, depth, nan)
    batch, nodes, vocabulary = logits.shape
    thresholds = row_thresholds("verify_sampling", logits, params, top_p_first, argmax_at_0=True)
    walk, chunk = walk_results(batch, depth, logits.device), chunk_of(vocabulary)
    chunks = triton.cdiv(vocabulary, chunk)
    sums = torch.empty(batch, chunks, 2, dtype=torch.float64, device=logits.device)
    x, sizes = view(Matrix, logits.reshape(-1, vocabulary)), (nodes, vocabulary, chunks, depth)
    tree = (tokens, tokens.stride(), parents, parents.stride())
    given = (x, thresholds, params.temperature, params.min_p, params.seed, params.step, *tree, walk)
    width, early = triton.next_power_of_2(nodes), early_start(logits.device)
    compiled = launch(_sampled_walk_kernel, (batch, chunks))(
        *given,
        nan,
        sums,
        *sizes,
        NODES=width,
        STEPS=triton.next_power_of_2(depth + 1),
        CHUNK=chunk,
        PAIRS=min(width, 64),
        **early,
        num_warps=_DRAW_WARPS,
    )
    prefer_shared_memory(compiled)
    compiled = launch(_final_token_kernel, (batch,))(
        *given,
        sums,
        *sizes,
        NODES=width,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
        **early,
        num_warps=_DRAW_WARPS,
    )
    prefer_shared_memory(compiled)
    return walk
