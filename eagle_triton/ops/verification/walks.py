"""Walks along tokens that are known for every node: the target's argmax, or the first child."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.verification import check_first_path, check_tree
from eagle_triton.ops.sampling.filter_thresholds import Settings, merge_peaks, scan
from eagle_triton.ops.views import Matrix
from eagle_triton.runtime.overlap import await_inputs, overlapped

NOWHERE = tl.constexpr(2**31 - 1)
_GREEDY_PART = 4096  # tokens per program of the argmax, on 8 warps; 2048 tokens or 4 warps take 0.5 µs more on an H200
WALK_WARPS = 8
BY_SLOT = ["temperature_ptr", "min_p_ptr", "seed_ptr", "step_ptr", "tokens_ptr", "parents_ptr", "nan_ptr", "nodes"]
BY_SLOT += ["lengths_ptr", "depths_ptr"]
"""Counts of nodes, and arguments with an alignment that depends on a batch's slot. Without this, Triton would compile a
kernel again."""


class Walk(NamedTuple):
    """The end of a walk: the path [B, D + 1], the number of accepted drafts [B], and the token after them [B]."""

    path: Tensor
    accepted: Tensor
    next_token: Tensor


@triton.jit
def load_nodes(batch, tokens, parents, nodes, NODES: tl.constexpr):
    """Tokens and parents [NODES] of one sequence's tree; past its nodes tokens are -1 and parents -2."""
    node = tl.arange(0, NODES)
    token = tl.load(tokens.ptr + batch * tokens.row + node * tokens.item, mask=node < nodes, other=-1)
    parent = tl.load(parents.ptr + batch * parents.row + node * parents.item, mask=node < nodes, other=-2)
    return token, parent


@triton.jit
def store_path(batch, walk, path, accepted, depth, STEPS: tl.constexpr):
    step = tl.arange(0, STEPS)
    tl.store(walk.path + batch * (depth + 1) + step, path, mask=step <= depth)
    tl.store(walk.accepted + batch, accepted)


@triton.jit
def store_walk(batch, walk, path, accepted, current, target, depth, NODES: tl.constexpr, STEPS: tl.constexpr):
    """Store the results of a walk that ended at node `current`, and that node's target [NODES]."""
    store_path(batch, walk, path, accepted, depth, STEPS)
    node = tl.arange(0, NODES)
    tl.store(walk.next_token + batch, tl.sum(tl.where(node == current, target, 0), 0).to(tl.int64))


@triton.jit
def follow(target, token, parent, depth, NODES: tl.constexpr, STEPS: tl.constexpr):
    """Follow, from the root, the first child that has its parent's target as token: path [STEPS], the number of
    accepted drafts, and the last node."""
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
    tokens,
    parents,
    walk,
    nan_ptr,
    nodes,
    parts,
    depth,
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
    token, parent = load_nodes(batch, tokens, parents, nodes, NODES)
    peak, target = merge_peaks(peaks, places, 1)
    if nan_ptr is not None:
        tl.store(nan_ptr + batch, tl.max((peak != peak).to(tl.int32), 0) > 0)

    path, accepted, current = follow(target, token, parent, depth, NODES, STEPS)
    store_walk(batch, walk, path, accepted, current, target, depth, NODES, STEPS)


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _greedy_walk_kernel(
    peaks_ptr,
    places_ptr,
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
    """Grid (B,): a program walks one sequence's tree."""
    await_inputs(PDL)
    tokens, parents = Matrix(tokens_ptr, *tokens_strides), Matrix(parents_ptr, *parents_strides)
    batch = tl.program_id(0)
    greedy_walk(batch, peaks_ptr, places_ptr, tokens, parents, walk, nan_ptr, nodes, parts, depth, NODES, PARTS, STEPS)


@triton.jit(do_not_specialize_on_alignment=BY_SLOT)
def _first_path_kernel(
    parents_ptr,
    parents_strides,
    walk,
    nodes,
    depth,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): follow the first child of each node."""
    await_inputs(PDL)
    batch, node = tl.program_id(0), tl.arange(0, NODES)
    parent_ptr = parents_ptr + batch * parents_strides[0] + node * parents_strides[1]
    parent = tl.load(parent_ptr, mask=node < nodes, other=-2)
    every = tl.zeros((NODES,), tl.int32)
    path, accepted, _ = follow(every, every, parent, depth, NODES, STEPS)
    store_path(batch, walk, path, accepted, depth, STEPS)


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
    walk = walk_results(batch, depth, logits.device)
    parts = peaks.shape[1]
    overlapped(_greedy_walk_kernel, (batch,), logits.device)(
        peaks,
        places,
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


def first_path(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The path along the first child of each node; see reference.verification.first_path.

    parents [B, N] int32. Returns (path [B, D + 1] int32, accepted [B] int32). Raises ValueError likewise.
    """
    check_first_path(parents, depth)
    batch, nodes = parents.shape
    walk = walk_results(batch, depth, parents.device)
    overlapped(_first_path_kernel, (batch,), parents.device)(
        parents,
        parents.stride(),
        walk,
        nodes,
        depth,
        NODES=triton.next_power_of_2(nodes),
        STEPS=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )
    return walk.path, walk.accepted


def walk_results(batch: int, depth: int, device: torch.device) -> Walk:
    path = torch.empty(batch, depth + 1, dtype=torch.int32, device=device)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    return Walk(path, accepted, torch.empty(batch, dtype=torch.int64, device=device))
