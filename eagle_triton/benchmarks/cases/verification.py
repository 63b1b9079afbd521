"""From a tree's logits to its accepted path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.benchmarks.cases.case import DEPTH, NODES, Case, Provider, Random, Sizes, ours, reference_case
from eagle_triton.engine.operations import Operations
from eagle_triton.reference import sampling, verification


def verification_cases(ops: Operations, sizes: Sizes, random: Random) -> Iterator[Case]:
    """From logits to the accepted path. The target agrees with a few drafts; its logits are as peaked as a model's, or
    flat, so that the filters keep thousands of tokens and many tie at the cut."""
    parents, vocab = random.parents(), sizes.vocab
    path = _path(parents[0].tolist())[:5]
    element = random.dtype.itemsize

    def make(generator: torch.Generator, std: float = 8.0) -> tuple:
        logits = random.normal(generator, 1, NODES, vocab, std=std)
        tokens = torch.randint(vocab, (1, NODES), generator=generator, device=random.device)
        for node, child in pairwise(path):
            logits[0, node, tokens[0, child]] = 100.0
        return logits, tokens

    def walk(target: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        return verification.verify_greedy(F.one_hot(target, vocab).to(logits.dtype), tokens, parents, DEPTH)

    def greedy(verify: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logits, tokens: verify(logits, tokens, parents, DEPTH)

    def one(value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=random.device)

    params = sampling.SamplingTensors(
        temperature=one(1.0, torch.float32),
        top_k=one(0, torch.int32),
        top_p=one(0.9, torch.float64),
        min_p=one(0.0, torch.float32),
        seed=one(1, torch.int64),
        step=one(1, torch.int64),
    )

    def sampled(verify: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logits, tokens: verify(logits, tokens, parents, DEPTH, params, True)

    lengths, depths = one(1000, torch.int32), torch.zeros_like(parents)
    for node in range(1, NODES):
        depths[:, node] = depths[:, int(parents[0, node])] + 1

    def matched(verify: Callable[..., Any], filtered: bool) -> Callable[..., Any]:
        return lambda logits, tokens: verify(logits, tokens, parents, DEPTH, params, lengths, depths, True, filtered)

    moved = NODES * vocab * element
    name = f"from logits [{NODES}, {vocab}]"
    yield Case(
        "verification",
        f"greedy verification {name}",
        make,
        greedy(verification.verify_greedy),
        [
            Provider("torch", greedy(verification.verify_greedy)),
            Provider("argmax, walk not timed", lambda logits, tokens: logits.argmax(-1), walk),
            ours(ops, greedy(ops.verify_greedy)),
        ],
        moved,
        12,
    )
    yield reference_case(
        ops,
        "verification",
        f"sampled verification, top-p 0.9, {name}",
        make,
        sampled(verification.verify_sampling),
        sampled(ops.verify_sampling),
        moved,
        40,
    )
    for filters, filtered, aim, std in (
        ("top-p 0.9", True, 55, 8.0), ("top-p 0.9, flat", True, None, 2.0), ("no filter", False, 25, 8.0)
    ):  # fmt: skip
        yield reference_case(
            ops,
            "verification",
            f"target match, {filters}, {name}",
            partial(make, std=std),
            matched(verification.verify_target_match, filtered),
            matched(ops.verify_target_match, filtered),
            moved,
            aim,
        )


def _path(parents: list[int]) -> list[int]:
    """The nodes from the root to the last one."""
    nodes = [len(parents) - 1]
    while nodes[0]:
        nodes.insert(0, parents[nodes[0]])
    return nodes
