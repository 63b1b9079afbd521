"""Chooses tokens: one from a row of logits, or the accepted path of a draft tree.

The sampled walk is lossless: for any tree, the tokens follow the target's own (processed) distribution. A draft is
accepted with the target's probability of it. A rejected draft is removed from the distribution, which is renormalised
(arXiv:2302.01318, with a point mass as the proposal).
"""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def eagle_warpers(temperature: float, top_p: float, top_k: float) -> LogitsProcessorList | None:
    """Temperature, then top-p, then top-k, in the original EaModel's order; None means greedy.

    Sampling needs temperature > 1e-5. top_p applies in [1e-8, 1), top_k above 0. Raises ValueError for a top_k that is
    not an integer.
    """
    if temperature <= 1e-5:
        return None
    return _without_neutral(
        temperature != 1.0 and TemperatureLogitsWarper(float(temperature)),
        1e-8 <= top_p < 1.0 and TopPLogitsWarper(float(top_p)),
        top_k > 0 and _top_k_warper(top_k),
    )


def generate_warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList | None:
    """Temperature, top-k, top-p, min-p, in the order of Hugging Face's `generate`; neutral values are 1, 0, 1, 0.

    None, which means greedy, for temperature 0. Raises ValueError for a value out of range.
    """
    if temperature < 0:
        raise ValueError(f"temperature: must not be negative, got {temperature} (0: greedy)")
    if top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(
            f"sampling: expected top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, "
            f"got top_k={top_k}, top_p={top_p}, min_p={min_p}"
        )
    if temperature == 0:
        return None
    return _without_neutral(
        temperature != 1.0 and TemperatureLogitsWarper(float(temperature)),
        top_k > 0 and _top_k_warper(top_k),
        top_p < 1.0 and TopPLogitsWarper(float(top_p)),
        min_p > 0 and MinPLogitsWarper(float(min_p)),
    )


def _without_neutral(*warpers: Any) -> LogitsProcessorList:
    """The warpers in this order, without False, which stands for one that would change nothing."""
    return LogitsProcessorList(warper for warper in warpers if warper)


def _top_k_warper(top_k: float) -> TopKLogitsWarper:
    if top_k % 1:
        raise ValueError(f"top_k must be a whole number, got {top_k}")
    return TopKLogitsWarper(int(top_k))


def probabilities(logits: Tensor, warpers: LogitsProcessorList) -> Tensor:
    """Processed distribution [V] fp32 from logits [V]."""
    return warpers(None, logits.float()[None])[0].softmax(dim=-1)


def choose(logits: Tensor, warpers: LogitsProcessorList | None, generator: torch.Generator | None = None) -> Tensor:
    """The next token, [1] int64, from logits [V]: the most likely, or a sample of the processed distribution."""
    if warpers is None:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial(probabilities(logits, warpers), 1, generator=generator)


def children_of(tree_mask: Tensor, depths: Tensor) -> list[list[int]]:
    """Each node's children in node order, from tree_mask [N, N] bool (self and ancestors) and depths [N] int64."""
    child = tree_mask & (depths[:, None] == depths[None, :] + 1)
    return [child[:, node].nonzero().flatten().tolist() for node in range(len(depths))]


def verify_tree(
    tokens: Tensor,
    children: list[list[int]],
    logits: Tensor,
    warpers: LogitsProcessorList | None,
    generator: torch.Generator | None = None,
) -> tuple[list[int], Tensor]:
    """Walk the draft tree with the target's logits.

    tokens: [N] int64, the root first. children: of each node, in the order in which they are tried. logits: [N, V].
    warpers: None for greedy. Returns (the accepted nodes from the root on, the token after them [1] int64).
    """
    drafts = tokens.tolist()
    if warpers is None:
        wanted = logits.argmax(dim=-1)
        path, targets = [0], wanted.tolist()
        while step := [child for child in children[path[-1]] if drafts[child] == targets[path[-1]]]:
            path.append(step[0])
        return path, wanted[path[-1], None]

    path = [0]
    while True:
        distribution = probabilities(logits[path[-1]], warpers)
        for child in children[path[-1]]:
            rest = distribution.clone()
            rest[drafts[child]] = 0
            mass = rest.sum()
            accepted = torch.rand((), generator=generator, device=distribution.device) < distribution[drafts[child]]
            if accepted or mass == 0:
                path.append(child)
                break
            distribution = rest / mass
        else:
            return path, torch.multinomial(distribution, 1, generator=generator)
