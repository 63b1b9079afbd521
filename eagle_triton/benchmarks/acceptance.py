"""A fixed mean number of accepted drafts in place of verification's result: for timing only, the tokens mean nothing.

The verification still runs, at its usual cost. Then its path is replaced by the first drafts of the tree's deepest
path: step t accepts floor((t + 1) * mean) - floor(t * mean) drafts, or as many as there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eagle_triton.engine import operations as engine_operations
from eagle_triton.engine.operations import Operations, make_operations
from eagle_triton.models import ea_model

WARNING = "ACCEPTED LENGTHS ARE FIXED (--accept-length {:g}): TIMES ONLY, THE TOKENS ARE MEANINGLESS"


def fix_acceptance(operations: Operations, mean: float) -> Operations:
    """The same operations, but verification accepts by the schedule. All stays on the device, so graphs work."""
    steps: dict[tuple[int, torch.device], Tensor] = {}

    def scheduled(batch: int, device: torch.device) -> Tensor:
        """How many drafts each sequence accepts now, [B] int64; sequences stand at different steps of the schedule."""
        step = steps.setdefault((batch, device), torch.arange(batch, device=device))
        step += 1
        return (step * mean).floor().long() - ((step - 1) * mean).floor().long()

    def fixed(verify: Callable) -> Callable:
        @functools.wraps(verify)
        def call(logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, *args: Any, **kwargs: Any) -> tuple:
            path, accepted, next_token = verify(logits, tokens, parents, depth, *args, **kwargs)
            if depth:
                path, accepted = deepest_path(parents, depth, scheduled(len(tokens), tokens.device))
            return path, accepted, next_token

        return call

    for name in ("verify_greedy", "verify_sampling", "verify_target_match", "verify_topp"):
        setattr(operations, name, fixed(getattr(operations, name)))
    return operations


def deepest_path(parents: Tensor, depth: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The first `wanted` [B] drafts on the way to the first of the deepest nodes; parents [B, N] int32.

    Returns path [B, D + 1] int32 and accepted [B] int32 as verify_greedy does.
    """
    above = parents.clamp(min=0).long()
    nodes = [torch.arange(parents.shape[1], device=parents.device).expand_as(above)]
    for _ in range(depth):
        nodes.append(above.gather(1, nodes[-1]))
    upwards = torch.stack(nodes, dim=1)  # [B, D + 1, N]: each node, its ancestors, then the root again and again
    reached, deepest = (upwards > 0).sum(1).max(1)
    upwards = upwards.gather(2, deepest[:, None, None].expand(-1, depth + 1, 1))[:, :, 0]
    accepted = torch.minimum(wanted, reached)
    step = torch.arange(depth + 1, device=parents.device)
    downwards = upwards.gather(1, (reached[:, None] - step).clamp(min=0))
    return torch.where(step <= accepted[:, None], downwards, -1).int(), accepted.int()


@contextmanager
def fixed_acceptance(mean: float | None, safeailab: ModuleType | None = None) -> Iterator[None]:
    """While open, models optimised in it, our EaModel, and that of module `safeailab` accept `mean` drafts per step.

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


def _schedule(mean: float) -> Iterator[int]:
    done = 0
    while True:
        done += 1
        yield int(done * mean) - int((done - 1) * mean)


def _fixed_walk(verify: Callable, mean: float) -> Callable:
    """Our EaModel's verify_tree."""
    schedule = _schedule(mean)

    def call(tokens: Tensor, children: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[int], Tensor]:
        _, root = verify(tokens, children, *args, **kwargs)
        parent = {child: node for node, below in enumerate(children) for child in below}
        path = [len(tokens) - 1]
        while path[-1]:
            path.append(parent[path[-1]])
        return path[::-1][: next(schedule) + 1], root

    return call


def _fixed_posterior(evaluate: Callable, mean: float) -> Callable:
    """SafeAILab's evaluate_posterior; a row of `candidates` is a path from the root, padded with -1."""
    schedule = _schedule(mean)

    def call(logits: Tensor, candidates: Tensor, processor: Any) -> tuple[Tensor, int, Tensor]:
        _, _, distribution = evaluate(logits, candidates, processor)
        lengths = (candidates >= 0).sum(1) - 1
        best = lengths.argmax()
        return best, min(next(schedule), int(lengths[best])), distribution

    return call
