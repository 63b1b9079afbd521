"""How a tree grows: the best children of a beam, and the best of all candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.benchmarks.cases.case import DEPTH, NODES, TOP_K, Case, Provider, Random, Sizes, ours, reference_case
from eagle_triton.engine.operations import Operations
from eagle_triton.reference import tree_decoding


def tree_case(ops: Operations, random: Random) -> Case:
    """The best of all candidates of a dynamic tree: scores fall from parent to child, as sums of log-probabilities."""

    def make(generator: torch.Generator) -> tuple:
        scores = torch.zeros(1, 1, device=random.device)
        ancestors = torch.zeros(1, 1, 2, dtype=torch.int64, device=random.device)
        all_scores, slots = [], []
        for level in range(DEPTH):
            nodes, first_slot = scores.shape[1], TOP_K * level
            log_probs = torch.empty(1, nodes, TOP_K, device=random.device).exponential_(generator=generator).neg()
            tokens = torch.zeros(1, nodes * TOP_K, dtype=torch.int64, device=random.device)
            grown = tree_decoding.expand_beam(scores, log_probs, tokens, ancestors, first_slot, TOP_K)
            all_scores.append(grown.child_scores)
            slots.append(grown.chosen + TOP_K * (1 + first_slot - nodes))
            scores, ancestors = grown.scores, grown.ancestors
        scores = torch.cat(all_scores, 1)
        tokens = torch.randint(32000, scores.shape, generator=generator, device=random.device)
        return tokens[:, 0].contiguous(), tokens, scores, torch.cat(slots[:-1], 1), NODES, TOP_K

    return reference_case(
        ops,
        "tree",
        f"build_tree, {NODES} nodes",
        make,
        tree_decoding.build_tree,
        ops.build_tree,
        TOP_K * (1 + TOP_K * (DEPTH - 1)) * 12 + NODES * 24,
        10,
    )


def topk_case(ops: Operations, sizes: Sizes, random: Random) -> Case:
    """The children of a beam. Of equal logits torch may take any, so logits are compared, not tokens."""

    def make(generator: torch.Generator) -> tuple:
        return (random.normal(generator, TOP_K, sizes.draft_vocab, std=2.0),)

    def values(out: tuple[Tensor, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        return out[0].float(), logits.gather(1, out[1]).float()

    def expected(logits: Tensor) -> tuple[Tensor, Tensor]:
        return values(tree_decoding.topk(logits, TOP_K), logits)

    return Case(
        "tree",
        f"log-softmax, top {TOP_K} of [{TOP_K}, {sizes.draft_vocab}]",
        make,
        expected,
        [
            Provider("log_softmax, topk", lambda logits: logits.float().log_softmax(-1).topk(TOP_K), values),
            Provider("topk, logsumexp", _topk_logsumexp, values),
            ours(ops, lambda logits: ops.topk(logits, TOP_K), values),
        ],
        TOP_K * sizes.draft_vocab * random.dtype.itemsize,
        8,
    )


def _topk_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, tokens = logits.topk(TOP_K)
    return best.float() - logits.float().logsumexp(-1, keepdim=True), tokens
