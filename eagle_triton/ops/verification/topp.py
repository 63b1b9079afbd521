"""The lossy walk, which accepts every draft that the filters keep."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.verification import check_limits, check_positioned
from eagle_triton.ops.sampling.draws import chunk_of
from eagle_triton.ops.sampling.filter_thresholds import row_thresholds, scale_of, token_weight
from eagle_triton.ops.verification.target_match import merge_scores, perturb
from eagle_triton.ops.verification.walks import BY_SLOT, NOWHERE, WALK_WARPS, load_nodes, store_walk, walk_results
from eagle_triton.ops.views import Matrix, view
from eagle_triton.runtime.overlap import await_inputs, overlapped


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _rank_kernel(
    x,
    tokens_ptr,
    tokens_strides,
    parents_ptr,
    parents_strides,
    ranks_ptr,
    nodes,
    vocabulary,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,): count the tokens of the parent's row that are better than the node's own; NOWHERE for the root."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    batch, node = row // nodes, row % nodes
    token = tl.load(tokens_ptr + batch * tokens_strides[0] + node * tokens_strides[1])
    parent = tl.load(parents_ptr + batch * parents_strides[0] + node * parents_strides[1])
    rank = tl.full((), NOWHERE, tl.int32)
    if (parent >= 0) & (token >= 0) & (token < vocabulary):
        x_row = x.ptr + (batch * nodes + parent) * x.row
        own = tl.load(x_row + token * x.item).to(tl.float32)
        better = tl.zeros((CHUNK,), tl.int32)
        for first in range(0, vocabulary, CHUNK):
            index = first + tl.arange(0, CHUNK)
            logit = tl.load(x_row + index * x.item, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
            better += ((logit > own) | ((logit == own) & (index < token))).to(tl.int32)
        rank = tl.sum(better, 0)
    tl.store(ranks_ptr + row, rank)


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _topp_walk_kernel(
    x,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    best,
    ranks_ptr,
    tokens_ptr,
    tokens_strides,
    parents_ptr,
    parents_strides,
    walk,
    nan_ptr,
    nodes,
    vocabulary,
    parts,
    depth,
    window,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): walk one sequence's tree by the likeliest kept child, with ranks also within a window."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    temperature = tl.load(temperature_ptr + batch)
    target, nan = merge_scores(batch, best, temperature, nodes, parts, NODES, PARTS)
    if nan_ptr is not None:
        tl.store(nan_ptr + batch, nan)
    tokens, parents = Matrix(tokens_ptr, *tokens_strides), Matrix(parents_ptr, *parents_strides)
    token, parent = load_nodes(batch, tokens, parents, nodes, NODES)
    known = (parent >= 0) & (token >= 0) & (token < vocabulary)
    above = batch * nodes + tl.maximum(parent, 0)
    logit = tl.load(x.ptr + above * x.row + token * x.item, mask=known, other=float("-inf")).to(tl.float32)
    weight = token_weight(thresholds_ptr + above * 4, logit, token, tl.load(min_p_ptr + batch), scale_of(temperature))
    kept = known & (weight > 0)
    logit = tl.where(kept, logit, float("-inf"))
    if ranks_ptr is not None:
        rank = tl.load(ranks_ptr + batch * nodes + node, mask=node < nodes, other=NOWHERE)

    step = tl.arange(0, STEPS)
    path = tl.where(step == 0, 0, -1)
    current = 0
    accepted = 0
    alive = True
    for count in range(1, depth + 1):
        allowed = kept & (parent == current)
        top = tl.max(tl.where(allowed, logit, float("-inf")), 0)
        child = tl.min(tl.where(allowed & (logit == top), node, NOWHERE), 0)
        if ranks_ptr is not None:
            second = tl.min(tl.where((parent == current) & (rank == 1), node, NOWHERE), 0)
            look = second
            for _ in range(window):
                look = tl.min(tl.where((parent == look) & (rank == 0), node, NOWHERE), 0)
            opens = (look < NOWHERE) & (temperature > 0)
            child = tl.where((child == NOWHERE) & opens, second, child)
        alive = alive & (child < NOWHERE)
        current = tl.where(alive, child, current)
        accepted = tl.where(alive, count, accepted)
        path = tl.where((step == count) & alive, child, path)
    store_walk(batch, walk, path, accepted, current, target, depth, NODES, STEPS)


def verify_topp(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    lengths: Tensor,
    depths: Tensor,
    top_p_first: bool = False,
    window: int = 0,
    max_candidates: int = 0,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree by drafts that the filters keep, lossy; see reference.verification.verify_topp.

    Arguments and results as verify_target_match; window and max_candidates are off at 0. Raises ValueError likewise.
    """
    check_positioned("verify_topp", logits, tokens, parents, depth, params, lengths, depths, nan)
    check_limits("verify_topp", window, max_candidates)
    batch, nodes, vocabulary = logits.shape
    x, ranks = logits.reshape(-1, vocabulary), None
    tree = (tokens, tokens.stride(), parents, parents.stride())
    thresholds = row_thresholds("verify_topp", logits, params, top_p_first, argmax_at_0=True)
    if max_candidates:
        most = params._replace(
            top_k=torch.full_like(params.top_k, max_candidates),
            top_p=torch.ones_like(params.top_p),
            min_p=torch.zeros_like(params.min_p),
        )
        capped = row_thresholds("verify_topp", logits, most, False, argmax_at_0=True)
        thresholds = torch.where((capped[:, 1] > thresholds[:, 1])[:, None], capped, thresholds)
    best, parts = perturb(logits, thresholds, params, lengths, depths, depth + 1)
    if window:
        ranks = torch.empty(batch, nodes, dtype=torch.int32, device=logits.device)
        overlapped(_rank_kernel, (len(x),), logits.device)(
            view(Matrix, x), *tree, ranks, nodes, vocabulary, CHUNK=chunk_of(vocabulary), num_warps=8
        )
    walk = walk_results(batch, depth, logits.device)
    overlapped(_topp_walk_kernel, (batch,), logits.device)(
        view(Matrix, x),
        thresholds,
        params.temperature,
        params.min_p,
        best,
        ranks,
        *tree,
        walk,
        nan,
        nodes,
        vocabulary,
        parts,
        depth,
        window,
        NODES=triton.next_power_of_2(nodes),
        PARTS=triton.next_power_of_2(parts),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=WALK_WARPS,
    )
    return walk
