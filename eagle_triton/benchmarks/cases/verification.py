"""From a tree's logits to its accepted path."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.benchmarks.cases.case import DEPTH, NODES, Case, CaseMaker, Sizes
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.reference import tree_decoding, verification


def verification_cases(maker: CaseMaker, sizes: Sizes) -> Iterator[Case]:
    """From logits to the accepted path. The target agrees with a few drafts. Its logits are as peaked as a model's, or
    flat: then the filters keep thousands of tokens, and many tie at the cut."""
    parents, vocab = maker.parents(), sizes.vocab
    ancestors = tree_decoding._ancestor_closure(parents)
    path = ancestors[0, -1].nonzero().flatten().tolist()  # from the root to the last node

    def make(generator: torch.Generator, std: float = 8.0) -> tuple:
        logits = maker.normal(generator, 1, NODES, vocab, std=std)
        tokens = maker.integers(generator, vocab, 1, NODES)
        for node, child in pairwise(path[:5]):
            logits[0, node, tokens[0, child]] = 100.0
        return logits, tokens

    def walk(target: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        return verification.verify_greedy(F.one_hot(target, vocab).to(logits.dtype), tokens, parents, DEPTH)

    params = SamplingTensors.zeros(1, maker.device)
    wanted, slot = SamplingParams(temperature=1.0, top_p=0.9, seed=1), maker.int32(0).long()
    SamplingParams.write([wanted], params, slot)
    lengths, depths = maker.int32(1000), ancestors.sum(-1, dtype=torch.int32) - 1

    case = partial(maker.case, "verification")
    moved, name = NODES * vocab * maker.dtype.itemsize, f"from logits [{NODES}, {vocab}]"
    yield case(
        f"greedy verification {name}", make, lambda ops, *inputs: ops.verify_greedy(*inputs, parents, DEPTH), moved, 12,
        others={
            "torch": lambda logits, tokens: verification.verify_greedy(logits, tokens, parents, DEPTH),
            "argmax, walk not timed": (lambda logits, tokens: logits.argmax(-1), walk),
        },
    )  # fmt: skip
    yield case(
        f"sampled verification, top-p 0.9, {name}", make,
        lambda ops, *inputs: ops.verify_sampling(*inputs, parents, DEPTH, params, True), moved, 40,
    )  # fmt: skip
    for filters, filtered, aim, std in (
        ("top-p 0.9", True, 55, 8.0), ("top-p 0.9, flat", True, None, 2.0), ("no filter", False, 25, 8.0)
    ):  # fmt: skip
        rest = parents, DEPTH, params, lengths, depths, True, filtered
        yield case(
            f"target match, {filters}, {name}", partial(make, std=std),
            lambda ops, *inputs, rest=rest: ops.verify_target_match(*inputs, *rest), moved, aim,
        )  # fmt: skip
