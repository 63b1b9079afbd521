"""The one-coin walk: the children's masses side by side, and the rest of the last node's distribution."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.verification import check_tree
from eagle_triton.ops.sampling.draws import choose_chunk, choose_token, chunk_of, coin_of
from eagle_triton.ops.sampling.filter_thresholds import row_thresholds, scale_of, token_weight
from eagle_triton.ops.verification.walks import BY_SLOT, NOWHERE, walk_results
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
    x_ptr,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    step_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    nan_ptr,
    sums_ptr,
    nodes,
    vocabulary,
    chunks,
    depth,
    stride_xr,
    stride_xv,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, chunks): walk one sequence's tree (every chunk the same walk), then sum one chunk of the last accepted
    node's distribution, without and with the tokens of its refused children."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch, chunk = tl.program_id(0), tl.program_id(1)
    node = tl.arange(0, NODES)
    real = node < nodes
    tokens, parents = tokens_ptr + batch * stride_tb, parents_ptr + batch * stride_pb
    token = tl.load(tokens + node * stride_tn, mask=real, other=-1)
    parent = tl.load(parents + node * stride_pn, mask=real, other=-2)
    x_batch = x_ptr + batch.to(tl.int64) * nodes * stride_xr
    thresholds = thresholds_ptr + batch.to(tl.int64) * nodes * 4
    scale, min_p = scale_of(tl.load(temperature_ptr + batch)), tl.load(min_p_ptr + batch)
    seed, counter = tl.load(seed_ptr + batch), tl.load(step_ptr + batch)

    above = tl.maximum(parent, 0)
    known = real & (parent >= 0) & (token >= 0) & (token < vocabulary)
    x = tl.load(x_batch + above.to(tl.int64) * stride_xr + token * stride_xv, mask=known, other=float("-inf"))
    mass = token_weight(thresholds + above * 4, x.to(tl.float32), token, min_p, scale) * tl.load(
        thresholds + above * 4 + 2
    )
    repeated = tl.zeros((NODES,), tl.int32)
    for first in range(0, nodes, PAIRS):  # a token that an earlier sibling holds counts once
        other = first + tl.arange(0, PAIRS)
        other_token = tl.load(tokens + other * stride_tn, mask=other < nodes, other=-1)
        other_parent = tl.load(parents + other * stride_pn, mask=other < nodes, other=-3)
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
        tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
        tl.store(accepted_ptr + batch, accepted)
        if nan_ptr is not None:
            tops = tl.load(thresholds + node * 4, mask=real, other=0.0)
            tl.store(nan_ptr + batch, tl.max((tops != tops).to(tl.int32), 0) > 0)

    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x_row = x_batch + current.to(tl.int64) * stride_xr  # type: ignore[attr-defined]
    x = tl.load(x_row + index * stride_xv, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    weight = token_weight(thresholds + current * 4, x, index, min_p, scale)
    rest = _without(weight, index, _refused(token, parent, current, chunk, CHUNK))
    slot = (batch * chunks + chunk) * 2
    tl.store(sums_ptr + slot, tl.sum(weight.to(tl.float64), 0))
    tl.store(sums_ptr + slot + 1, tl.sum(rest.to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _final_token_kernel(
    x_ptr,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    step_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    sums_ptr,
    next_ptr,
    nodes,
    vocabulary,
    chunks,
    depth,
    stride_xr,
    stride_xv,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): draw the token after the last accepted node from what its refused children left."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0)
    current = tl.load(path_ptr + batch * (depth + 1) + tl.load(accepted_ptr + batch))
    lane = tl.arange(0, CHUNKS)
    slot = (batch * chunks + lane) * 2
    whole = tl.load(sums_ptr + slot, mask=lane < chunks, other=0.0)
    rest = tl.load(sums_ptr + slot + 1, mask=lane < chunks, other=0.0)
    some_left = tl.sum(rest, 0) > 0  # else rounding refused all mass: draw from the whole distribution
    coin = coin_of(tl.load(seed_ptr + batch), tl.load(step_ptr + batch), nodes)
    chunk, target = choose_chunk(tl.where(some_left, rest, whole), coin)

    node = tl.arange(0, NODES)
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn, mask=node < nodes, other=-1)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=node < nodes, other=-2)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    row = batch.to(tl.int64) * nodes + current
    x = tl.load(x_ptr + row * stride_xr + index * stride_xv, mask=index < vocabulary, other=float("-inf"))
    scale = scale_of(tl.load(temperature_ptr + batch))
    weight = token_weight(thresholds_ptr + row * 4, x.to(tl.float32), index, tl.load(min_p_ptr + batch), scale)
    if some_left:
        weight = _without(weight, index, _refused(token, parent, current, chunk, CHUNK))
    tl.store(next_ptr + batch, choose_token(weight, index, target, vocabulary).to(tl.int64))


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
    path, accepted, next_token = walk_results(batch, depth, logits.device)
    x, chunk = logits.reshape(-1, vocabulary), chunk_of(vocabulary)
    chunks = triton.cdiv(vocabulary, chunk)
    sums = torch.empty(batch, chunks, 2, dtype=torch.float64, device=logits.device)
    rows = (x, thresholds, params.temperature, params.min_p, params.seed, params.step, tokens, parents)
    sizes = (nodes, vocabulary, chunks, depth, *x.stride(), *tokens.stride(), *parents.stride())
    width, early = triton.next_power_of_2(nodes), early_start(logits.device)
    compiled = launch(_sampled_walk_kernel, (batch, chunks))(
        *rows,
        path,
        accepted,
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
        *rows,
        path,
        accepted,
        sums,
        next_token,
        *sizes,
        NODES=width,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
        **early,
        num_warps=_DRAW_WARPS,
    )
    prefer_shared_memory(compiled)
    return path, accepted, next_token
