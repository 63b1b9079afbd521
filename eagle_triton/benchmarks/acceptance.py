"""Replaces verification's result by a fixed mean number of accepted drafts. For timing only: the tokens mean nothing.

The verification still runs, at its usual cost. Then its path is replaced by the first drafts of the tree's deepest
path: step t accepts floor((t + 1) * mean) - floor(t * mean) drafts, or all that there are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.engine import operations as engine_operations
from eagle_triton.engine.operations import Operations, make_operations
from eagle_triton.models import ea_model
from eagle_triton.runtime.launch import launch

WARNING = "ACCEPTED LENGTHS ARE FIXED (--accept-length {:g}): TIMES ONLY, THE TOKENS ARE MEANINGLESS"


def fix_acceptance(operations: Operations, mean: float) -> Operations:
    """The same operations, but verification accepts by the schedule. It all stays on the device, so graphs work."""
    steps: dict[tuple[int, torch.device], Tensor] = {}

    def fixed(verify: Callable) -> Callable:
        @functools.wraps(verify)
        def call(logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, *args: Any, **kwargs: Any) -> tuple:
            path, accepted, next_token = verify(logits, tokens, parents, depth, *args, **kwargs)
            if depth:  # sequences are at different steps of the schedule
                key = len(tokens), tokens.device
                step = steps.setdefault(key, torch.arange(key[0], device=key[1]))
                path, accepted = scheduled_path(parents, depth, step, mean)
            return path, accepted, next_token

        return call

    for name in ("verify_greedy", "verify_sampling", "verify_target_match", "verify_topp"):
        setattr(operations, name, fixed(getattr(operations, name)))
    return operations


def scheduled_path(parents: Tensor, depth: int, step: Tensor, mean: float) -> tuple[Tensor, Tensor]:
    """The first drafts on the path to the first of the deepest nodes; the schedule says how many.

    parents [B, N] int32; step [B] int64: steps so far, which this increases by one. Returns path [B, D + 1] int32 and
    accepted [B] int32 like verify_greedy. One launch, because every launch adds to the step's time.
    """
    if parents.is_cuda:
        return launch_scheduled_path(parents, depth, step, mean)
    paths, accepted = torch.full((len(parents), depth + 1), -1, dtype=torch.int32), []
    for row, above in enumerate(parents.tolist()):
        ways = [[node] for node in range(len(above))]
        for way in ways:
            while way[-1]:
                way.append(above[way[-1]])
        kept = max(ways, key=len)[::-1][: _wanted(int(step[row]), mean) + 1]
        paths[row, : len(kept)] = torch.tensor(kept)
        accepted.append(len(kept) - 1)
    step += 1
    return paths, torch.tensor(accepted, dtype=torch.int32)


def launch_scheduled_path(parents: Tensor, depth: int, step: Tensor, mean: float) -> tuple[Tensor, Tensor]:
    """The same with the kernel."""
    batch, nodes = parents.shape
    path, accepted = parents.new_empty(batch, depth + 1), parents.new_empty(batch)
    blocks = triton.next_power_of_2(nodes), triton.next_power_of_2(depth + 1)
    arguments = parents.contiguous(), step, path, accepted, mean, nodes, depth, *blocks
    launch(_scheduled_path_kernel, (batch,))(*arguments, num_warps=1)
    return path, accepted


@triton.jit
def _scheduled_path_kernel(
    parents_ptr,
    step_ptr,
    path_ptr,
    accepted_ptr,
    mean,
    nodes,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (sequences,)."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.load(step_ptr + row) + 1
    tl.store(step_ptr + row, step)
    wanted = tl.floor(step.to(tl.float32) * mean) - tl.floor((step - 1).to(tl.float32) * mean)
    node = tl.arange(0, BLOCK_N)
    there = node < nodes
    above = tl.maximum(tl.load(parents_ptr + row * nodes + node, mask=there, other=0), 0)
    at, level = tl.where(there, node, 0), tl.zeros((BLOCK_N,), tl.int32)
    for _ in range(DEPTH):
        level += (at > 0).to(tl.int32)
        at = tl.gather(above, at, 0)
    reached, here = tl.max(level, 0, return_indices=True)
    accepted = tl.minimum(wanted.to(tl.int32), reached)
    tl.store(accepted_ptr + row, accepted)
    place = tl.arange(0, BLOCK_D)
    path = tl.full((BLOCK_D,), -1, tl.int32)
    for up in range(DEPTH + 1):
        path = tl.where((place == reached - up) & (place <= accepted), here, path)
        here = tl.sum(tl.where(node == here, above, 0), 0)
    tl.store(path_ptr + row * (DEPTH + 1) + place, path, mask=place <= DEPTH)


@contextmanager
def fixed_acceptance(mean: float | None, safeailab: ModuleType | None = None) -> Iterator[None]:
    """Inside, our EaModel, SafeAILab's in module `safeailab`, and models optimised here accept `mean` drafts per step.

    None changes nothing.
    """
    with ExitStack() as stack:
        if mean is not None:
            fixed = functools.partial(_fixed_operations, mean=mean)
            stack.enter_context(patch.object(engine_operations, "make_operations", fixed))
            stack.enter_context(patch.object(ea_model, "verify_tree", _fixed_walk(ea_model.verify_tree, mean)))
            if safeailab is not None:
                posterior = _fixed_posterior(safeailab.evaluate_posterior, mean)
                stack.enter_context(patch.object(safeailab, "evaluate_posterior", posterior))
        yield


def _fixed_operations(kernels: bool, mean: float) -> Operations:
    return fix_acceptance(make_operations(kernels), mean)


def _wanted(step: int, mean: float) -> int:
    """The number of drafts that the schedule accepts in a step."""
    return int((step + 1) * mean) - int(step * mean)


def _fixed_walk(verify: Callable, mean: float) -> Callable:
    """For our EaModel's verify_tree."""
    steps = itertools.count()

    def call(tokens: Tensor, children: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[int], Tensor]:
        _, root = verify(tokens, children, *args, **kwargs)
        parent = {child: node for node, below in enumerate(children) for child in below}
        path = [len(tokens) - 1]
        while path[-1]:
            path.append(parent[path[-1]])
        return path[::-1][: _wanted(next(steps), mean) + 1], root

    return call


def _fixed_posterior(evaluate: Callable, mean: float) -> Callable:
    """For SafeAILab's evaluate_posterior; a row of `candidates` is a path from the root, padded with -1."""
    steps = itertools.count()

    def call(logits: Tensor, candidates: Tensor, processor: Any) -> tuple[Tensor, int, Tensor]:
        _, _, distribution = evaluate(logits, candidates, processor)
        lengths = (candidates >= 0).sum(1) - 1
        best = lengths.argmax()
        return best, min(_wanted(next(steps), mean), int(lengths[best])), distribution

    return call
