"""The walk along the target's own samples: noise, and the argmax of kept logits plus noise."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.verification import check_positioned
from eagle_triton.ops.sampling.draws import log_exponential, uniform_of
from eagle_triton.ops.sampling.filter_thresholds import row_thresholds, scale_of, token_weight
from eagle_triton.ops.verification.walks import (
    BY_SLOT,
    NOWHERE,
    WALK_WARPS,
    follow,
    load_nodes,
    store_walk,
    walk_results,
)
from eagle_triton.ops.views import Matrix, view
from eagle_triton.runtime.overlap import await_inputs, overlapped

_LOG2E = tl.constexpr(1.4426950408889634)
_NOISE_PART = 2048  # tokens per program of the argmax with noise
_NOISE_WARPS = 4
_SHARED = 2  # with more nodes per level than this, a level's noise is made once for all of them
_REACH = tl.constexpr(1e-12)  # noise spans less than 26, so a token with a weight below e^-26 never wins


class Scores(NamedTuple):
    """The results of the argmax with noise for each part of a row, all [R, parts]."""

    peaks: Tensor
    scores: Tensor
    places: Tensor


@triton.jit
def _noise_of(seed, position, first, COUNT: tl.constexpr):
    """Gumbel noise, negated and in powers of two, of the COUNT tokens from `first` on at an absolute position."""
    return log_exponential(uniform_of(seed, position, first, COUNT)) * _LOG2E


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _noise_kernel(
    temperature_ptr, seed_ptr, lengths_ptr, noise_ptr, levels, vocabulary, PART: tl.constexpr, PDL: tl.constexpr
):
    """Grid (B * levels, parts): a program makes the noise of one part of the vocabulary at one level of a tree."""
    await_inputs(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART
    batch, level = row // levels, row % levels
    if tl.load(temperature_ptr + batch) > 0:
        position = tl.load(lengths_ptr + batch) + level.to(tl.int32) + 1
        noise = _noise_of(tl.load(seed_ptr + batch), position, first, PART)
        index = first + tl.arange(0, PART)
        tl.store(noise_ptr + row * vocabulary + index, noise, mask=index < vocabulary)


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _perturb_kernel(
    x,
    thresholds_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    lengths_ptr,
    depths_ptr,
    depths_strides,
    noise_ptr,
    best,
    nodes,
    levels,
    vocabulary,
    parts,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, parts): a program finds the largest logit of a part's kept tokens (NaN if any logit is NaN), and the
    largest (logit - this maximum) * scale + noise with its first index. Without thresholds all tokens are kept. Without
    noise [B, levels, V] it is made here, if the part keeps a token."""
    await_inputs(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, node = row // nodes, row % nodes
    first = part * PART
    index = first + tl.arange(0, PART)
    logit = tl.load(x.ptr + row * x.row + index * x.item, mask=index < vocabulary, other=float("-inf"))
    logit = logit.to(tl.float32)
    temperature = tl.load(temperature_ptr + batch)
    scale = scale_of(temperature)
    kept = logit > float("-inf")
    if thresholds_ptr is not None:
        weight = token_weight(thresholds_ptr + row * 4, logit, index, tl.load(min_p_ptr + batch), scale)
        kept = kept & (weight > _REACH)
    y = tl.where(kept, logit, float("-inf"))
    peak = tl.max(y, 0)
    slot = row * parts + part
    broken = tl.max((logit != logit).to(tl.int32), 0) > 0
    tl.store(best.peaks + slot, tl.where(broken, float("nan"), peak))
    if peak > float("-inf"):
        score = tl.where(y == peak, 0.0, (y - peak) * scale)
        if temperature > 0:
            level = tl.load(depths_ptr + batch * depths_strides[0] + node * depths_strides[1])
            if noise_ptr is None:
                score -= _noise_of(tl.load(seed_ptr + batch), tl.load(lengths_ptr + batch) + level + 1, first, PART)
            else:
                noise = noise_ptr + (batch * levels + level) * vocabulary + index
                score -= tl.load(noise, mask=kept, other=0.0)
        score = tl.where(kept, score, float("-inf"))
        top = tl.max(score, 0)
        tl.store(best.scores + slot, top)
        tl.store(best.places + slot, tl.min(tl.where(kept & (score == top), index, NOWHERE), 0))


@triton.jit
def merge_scores(batch, best, temperature, nodes, parts, NODES: tl.constexpr, PARTS: tl.constexpr):
    """The token with the best score at each node [NODES] of sequence `batch` (int64), 0 if there is none, and whether
    any of the sequence's logits is NaN."""
    first = batch * nodes * parts
    node = tl.arange(0, NODES)[:, None]
    part = tl.arange(0, PARTS)[None, :]
    slot, inside = node * parts + part, (node < nodes) & (part < parts)
    peaks = tl.load(best.peaks + first + slot, mask=inside, other=float("-inf"))
    kept = peaks > float("-inf")
    scores = tl.load(best.scores + first + slot, mask=kept, other=float("-inf"))
    places = tl.load(best.places + first + slot, mask=kept, other=NOWHERE)
    y = tl.where(kept, peaks, float("-inf"))
    top = tl.max(y, 1)[:, None]
    total = tl.where(y == top, scores, (y - top) * scale_of(temperature) + scores)
    total = tl.where(kept, total, float("-inf"))
    place = tl.min(tl.where(kept & (total == tl.max(total, 1)[:, None]), places, NOWHERE), 1)
    nan = tl.max(tl.max((peaks != peaks).to(tl.int32), 1), 0) > 0
    return tl.where(place < NOWHERE, place, 0), nan


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _target_walk_kernel(
    temperature_ptr,
    best,
    tokens_ptr,
    tokens_strides,
    parents_ptr,
    parents_strides,
    walk,
    nan_ptr,
    nodes,
    parts,
    depth,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): merge the parts of one sequence's nodes, and follow their samples through its tree."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    target, nan = merge_scores(batch, best, tl.load(temperature_ptr + batch), nodes, parts, NODES, PARTS)
    if nan_ptr is not None:
        tl.store(nan_ptr + batch, nan)
    tokens, parents = Matrix(tokens_ptr, *tokens_strides), Matrix(parents_ptr, *parents_strides)
    token, parent = load_nodes(batch, tokens, parents, nodes, NODES)
    path, accepted, current = follow(target, token, parent, depth, NODES, STEPS)
    store_walk(batch, walk, path, accepted, current, target, depth, NODES, STEPS)


def verify_target_match(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    lengths: Tensor,
    depths: Tensor,
    top_p_first: bool = False,
    filtered: bool = True,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree along samples that do not depend on it; see reference.verification.verify_target_match.

    Arguments and results as verify_sampling; lengths [B] and depths [B, N] int32 give the positions of the noise.
    filtered: False if all filters are off. Raises ValueError likewise.
    """
    name = "verify_target_match"
    check_positioned(name, logits, tokens, parents, depth, params, lengths, depths, nan)
    batch, nodes, _ = logits.shape
    thresholds = row_thresholds(name, logits, params, top_p_first, argmax_at_0=True) if filtered else None
    best, parts = perturb(logits, thresholds, params, lengths, depths, depth + 1)
    walk = walk_results(batch, depth, logits.device)
    overlapped(_target_walk_kernel, (batch,), logits.device)(
        params.temperature,
        best,
        tokens,
        tokens.stride(),
        parents,
        parents.stride(),
        walk,
        nan,
        nodes,
        parts,
        depth,
        NODES=triton.next_power_of_2(nodes),
        PARTS=triton.next_power_of_2(parts),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=WALK_WARPS,
    )
    return walk


def perturb(
    logits: Tensor, thresholds: Tensor | None, params: SamplingTensors, lengths: Tensor, depths: Tensor, levels: int
) -> tuple[Scores, int]:
    """Per row and part of logits [B, N, V]: largest kept logit, best score and its token; and the number of parts.

    Nodes of one level share their noise. With many nodes per level it is made once.
    """
    batch, nodes, vocabulary = logits.shape
    x, part = logits.reshape(-1, vocabulary), min(_NOISE_PART, max(16, triton.next_power_of_2(vocabulary)))
    parts = triton.cdiv(vocabulary, part)
    peaks = torch.empty(len(x), parts, dtype=torch.float32, device=x.device)
    best = Scores(peaks, torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32))
    noise = None
    if nodes > _SHARED * levels:
        noise = torch.empty(batch, levels, vocabulary, dtype=torch.float32, device=x.device)
        overlapped(_noise_kernel, (batch * levels, parts), x.device)(
            params.temperature,
            params.seed,
            lengths,
            noise,
            levels,
            vocabulary,
            PART=part,
            num_warps=_NOISE_WARPS,
        )
    overlapped(_perturb_kernel, (len(x), parts), x.device)(
        view(Matrix, x),
        thresholds,
        params.temperature,
        params.min_p,
        params.seed,
        lengths,
        depths,
        depths.stride(),
        noise,
        best,
        nodes,
        levels,
        vocabulary,
        parts,
        PART=part,
        num_warps=_NOISE_WARPS,
    )
    return best, parts
