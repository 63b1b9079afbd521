"""The lossy walk: any draft that the filters keep is accepted."""

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
from eagle_triton.ops.verification.walks import BY_SLOT, NOWHERE, WALK_WARPS, walk_results
from eagle_triton.runtime.overlap import await_inputs, overlapped


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _rank_kernel(
    x_ptr,
    tokens_ptr,
    parents_ptr,
    ranks_ptr,
    nodes,
    vocabulary,
    stride_xr,
    stride_xv,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,): count the tokens of the parent's row that are better than the node's own; NOWHERE for the root."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    batch, node = row // nodes, row % nodes
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn)
    rank = tl.full((), NOWHERE, tl.int32)
    if (parent >= 0) & (token >= 0) & (token < vocabulary):
        x_row = x_ptr + (batch * nodes + parent) * stride_xr
        own = tl.load(x_row + token * stride_xv).to(tl.float32)
        better = tl.zeros((CHUNK,), tl.int32)
        for first in range(0, vocabulary, CHUNK):
            index = first + tl.arange(0, CHUNK)
            x = tl.load(x_row + index * stride_xv, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
            better += ((x > own) | ((x == own) & (index < token))).to(tl.int32)
        rank = tl.sum(better, 0)
    tl.store(ranks_ptr + row, rank)


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _topp_walk_kernel(
    x_ptr,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    peaks_ptr,
    scores_ptr,
    places_ptr,
    ranks_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    nodes,
    vocabulary,
    parts,
    depth,
    window,
    stride_xr,
    stride_xv,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): walk one sequence's tree by the likeliest child that is kept; with ranks also by a window."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    node, slot = tl.arange(0, NODES), batch * nodes * parts
    temperature = tl.load(temperature_ptr + batch)
    target, nan = merge_scores(
        peaks_ptr + slot, scores_ptr + slot, places_ptr + slot, temperature, nodes, parts, NODES, PARTS
    )
    if nan_ptr is not None:
        tl.store(nan_ptr + batch, nan)
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn, mask=node < nodes, other=-1)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=node < nodes, other=-2)
    known = (parent >= 0) & (token >= 0) & (token < vocabulary)
    above = batch * nodes + tl.maximum(parent, 0)
    x = tl.load(x_ptr + above * stride_xr + token * stride_xv, mask=known, other=float("-inf")).to(tl.float32)
    weight = token_weight(thresholds_ptr + above * 4, x, token, tl.load(min_p_ptr + batch), scale_of(temperature))
    kept = known & (weight > 0)
    x = tl.where(kept, x, float("-inf"))
    if ranks_ptr is not None:
        rank = tl.load(ranks_ptr + batch * nodes + node, mask=node < nodes, other=NOWHERE)

    step = tl.arange(0, STEPS)
    path = tl.where(step == 0, 0, -1)
    current = 0
    accepted = 0
    alive = True
    for count in range(1, depth + 1):
        allowed = kept & (parent == current)
        best = tl.max(tl.where(allowed, x, float("-inf")), 0)
        child = tl.min(tl.where(allowed & (x == best), node, NOWHERE), 0)
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
    tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
    tl.store(accepted_ptr + batch, accepted)
    tl.store(next_ptr + batch, tl.sum(tl.where(node == current, target, 0), 0).to(tl.int64))


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
    """Walk the tree by any draft that the filters keep, lossy; see reference.verification.verify_topp.

    Arguments and results as verify_target_match; window and max_candidates 0 are off. Raises ValueError likewise.
    """
    check_positioned("verify_topp", logits, tokens, parents, depth, params, lengths, depths, nan)
    check_limits("verify_topp", window, max_candidates)
    batch, nodes, vocabulary = logits.shape
    x, ranks = logits.reshape(-1, vocabulary), None
    strides = (*tokens.stride(), *parents.stride())
    thresholds = row_thresholds("verify_topp", logits, params, top_p_first, argmax_at_0=True)
    if max_candidates:
        best = params._replace(
            top_k=torch.full_like(params.top_k, max_candidates),
            top_p=torch.ones_like(params.top_p),
            min_p=torch.zeros_like(params.min_p),
        )
        capped = row_thresholds("verify_topp", logits, best, False, argmax_at_0=True)
        thresholds = torch.where((capped[:, 1] > thresholds[:, 1])[:, None], capped, thresholds)
    scores, parts = perturb(logits, thresholds, params, lengths, depths, depth + 1)
    if window:
        ranks = torch.empty(batch, nodes, dtype=torch.int32, device=logits.device)
        overlapped(_rank_kernel, (len(x),), logits.device)(
            x, tokens, parents, ranks, nodes, vocabulary, *x.stride(), *strides, CHUNK=chunk_of(vocabulary), num_warps=8
        )
    path, accepted, next_token = walk_results(batch, depth, logits.device)
    overlapped(_topp_walk_kernel, (batch,), logits.device)(
        x,
        thresholds,
        params.temperature,
        params.min_p,
        *scores,
        ranks,
        tokens,
        parents,
        path,
        accepted,
        next_token,
        nan,
        nodes,
        vocabulary,
        parts,
        depth,
        window,
        *x.stride(),
        *strides,
        NODES=triton.next_power_of_2(nodes),
        PARTS=triton.next_power_of_2(parts),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=WALK_WARPS,
    )
    return path, accepted, next_token
