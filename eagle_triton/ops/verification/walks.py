"""Walks along tokens that are known for every node: the target's argmax, or whatever comes first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.verification import check_first_path, check_tree
from eagle_triton.ops.sampling.filter_thresholds import Settings, merge_peaks, scan
from eagle_triton.runtime.overlap import await_inputs, overlapped

NOWHERE = tl.constexpr(2**31 - 1)
# Measured on one H200, [60, 128256] bf16 to accepted path: parts of 4096 tokens and 8 warps 11.5 µs, 4 warps 12.0,
# parts of 2048 tokens 12.0 to 12.5.
_GREEDY_PART = 4096  # tokens per program of the argmax
WALK_WARPS = 8
BY_SLOT = ["temperature_ptr", "min_p_ptr", "seed_ptr", "step_ptr", "tokens_ptr", "parents_ptr", "nan_ptr", "nodes"]
BY_SLOT += ["lengths_ptr", "depths_ptr"]
"""Arguments whose alignment moves with a batch's slot, or counts nodes: no kernel is compiled anew for it."""


@triton.jit
def follow(target, token, parent, depth, NODES: tl.constexpr, STEPS: tl.constexpr):
    """From the root to the first child whose token is its parent's target, as far as there is one: path [STEPS], how
    many were accepted, and the last of them."""
    node = tl.arange(0, NODES)
    right = token == tl.gather(target, tl.maximum(parent, 0), 0)
    step = tl.arange(0, STEPS)
    path = tl.where(step == 0, 0, -1)
    current = 0
    accepted = 0
    alive = True
    for count in range(1, depth + 1):
        child = tl.min(tl.where(right & (parent == current), node, NOWHERE), 0)
        alive = alive & (child < NOWHERE)
        current = tl.where(alive, child, current)
        accepted = tl.where(alive, count, accepted)
        path = tl.where((step == count) & alive, child, path)
    return path, accepted, current


@triton.jit
def greedy_walk(
    batch,
    peaks_ptr,
    places_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    nodes,
    parts,
    depth,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Merge the parts' argmaxes of one sequence's nodes and follow them through its tree."""
    node = tl.arange(0, NODES)
    real = node < nodes
    part = tl.arange(0, PARTS)[None, :]
    slot = (batch.to(tl.int64) * nodes + node[:, None]) * parts + part
    inside = real[:, None] & (part < parts)
    peaks = tl.load(peaks_ptr + slot, mask=inside, other=float("-inf"))
    places = tl.load(places_ptr + slot, mask=inside, other=NOWHERE)
    token = tl.load(tokens_ptr + batch * stride_tb + node * stride_tn, mask=real, other=-1)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=real, other=-2)
    peak, target = merge_peaks(peaks, places, 1)
    if nan_ptr is not None:
        tl.store(nan_ptr + batch, tl.max((peak != peak).to(tl.int32), 0) > 0)

    path, accepted, current = follow(target, token, parent, depth, NODES, STEPS)
    step = tl.arange(0, STEPS)
    tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
    tl.store(accepted_ptr + batch, accepted)
    tl.store(next_ptr + batch, tl.sum(tl.where(node == current, target, 0), 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _greedy_walk_kernel(
    peaks_ptr,
    places_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    nodes,
    parts,
    depth,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    await_inputs(PDL)
    greedy_walk(
        tl.program_id(0),
        peaks_ptr,
        places_ptr,
        tokens_ptr,
        parents_ptr,
        path_ptr,
        accepted_ptr,
        next_ptr,
        nan_ptr,
        nodes,
        parts,
        depth,
        stride_tb,
        stride_tn,
        stride_pb,
        stride_pn,
        NODES,
        PARTS,
        STEPS,
    )


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _first_path_kernel(
    parents_ptr,
    path_ptr,
    accepted_ptr,
    nodes,
    depth,
    stride_pb,
    stride_pn,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): follow the first child of each node."""
    await_inputs(PDL)
    batch, node = tl.program_id(0), tl.arange(0, NODES)
    parent = tl.load(parents_ptr + batch * stride_pb + node * stride_pn, mask=node < nodes, other=-2)
    every = tl.zeros((NODES,), tl.int32)
    path, accepted, _ = follow(every, every, parent, depth, NODES, STEPS)
    step = tl.arange(0, STEPS)
    tl.store(path_ptr + batch * (depth + 1) + step, path, mask=step <= depth)
    tl.store(accepted_ptr + batch, accepted)


def verify_greedy(
    logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, *, nan: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree along the target's argmax; see reference.verification.verify_greedy.

    Returns (path [B, D + 1] int32, accepted [B] int32, next token [B] int64) and fills `nan` [B] bool if given.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_tree("verify_greedy", logits, tokens, parents, depth, nan)
    batch, nodes, _ = logits.shape
    part = min(_GREEDY_PART, max(16, triton.next_power_of_2(logits.shape[-1])))
    peaks, places, _ = scan(logits, Settings(part=part, tile=part))
    path, accepted, next_token = walk_results(batch, depth, logits.device)
    parts = peaks.shape[1]
    overlapped(_greedy_walk_kernel, (batch,), logits.device)(
        peaks,
        places,
        tokens,
        parents,
        path,
        accepted,
        next_token,
        nan,
        nodes,
        parts,
        depth,
        *tokens.stride(),
        *parents.stride(),
        NODES=triton.next_power_of_2(nodes),
        PARTS=triton.next_power_of_2(parts),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=WALK_WARPS,
    )
    return path, accepted, next_token


def first_path(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The way down the first child of each node; see reference.verification.first_path.

    parents [B, N] int32. Returns (path [B, D + 1] int32, accepted [B] int32). Raises ValueError likewise.
    """
    check_first_path(parents, depth)
    batch, nodes = parents.shape
    path, accepted, _ = walk_results(batch, depth, parents.device)
    overlapped(_first_path_kernel, (batch,), parents.device)(
        parents,
        path,
        accepted,
        nodes,
        depth,
        *parents.stride(),
        NODES=triton.next_power_of_2(nodes),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )
    return path, accepted


def walk_results(batch: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    path = torch.empty(batch, depth + 1, dtype=torch.int32, device=device)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    return path, accepted, torch.empty(batch, dtype=torch.int64, device=device)
