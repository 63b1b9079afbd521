"""Drafting: growing a tree, and finding text that occurred before."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.benchmarks.cases.case import DEPTH, NODES, TOP_K, Case, CaseMaker, Sizes
from eagle_triton.operands.suffix_match import END, SuffixRules, TokenRing
from eagle_triton.reference import tree_decoding


def tree_case(maker: CaseMaker) -> Case:
    """The best of all candidates of a dynamic tree: scores fall from parent to child, as sums of log-probabilities."""

    def make(generator: torch.Generator) -> tuple:
        scores = torch.zeros(1, 1, device=maker.device)
        ancestors = torch.zeros(1, 1, 2, dtype=torch.int64, device=maker.device)
        all_scores, slots = [], []
        for level in range(DEPTH):
            nodes, first_slot = scores.shape[1], TOP_K * level
            log_probs = torch.empty(1, nodes, TOP_K, device=maker.device).exponential_(generator=generator).neg()
            tokens = torch.zeros(1, nodes * TOP_K, dtype=torch.int64, device=maker.device)
            grown = tree_decoding.expand_beam(scores, log_probs, tokens, ancestors, first_slot, TOP_K)
            all_scores.append(grown.child_scores)
            slots.append(grown.chosen + TOP_K * (1 + first_slot - nodes))
            scores, ancestors = grown.scores, grown.ancestors
        scores = torch.cat(all_scores, 1)
        tokens = maker.integers(generator, 32000, *scores.shape)
        return tokens[:, 0].contiguous(), tokens, scores, torch.cat(slots[:-1], 1), NODES, TOP_K

    moved = TOP_K * (1 + TOP_K * (DEPTH - 1)) * 12 + NODES * 24
    return maker.case(
        "tree", f"build_tree, {NODES} nodes", make, lambda ops, *inputs: ops.build_tree(*inputs), moved, 10
    )


def best_first_case(maker: CaseMaker, nodes: int) -> Case:
    """The best paths through 15 levels of a block drafter that is unsure of each: trees get as wide as they can."""
    levels, k = 15, 8

    def make(generator: torch.Generator) -> tuple:
        log_probs = maker.normal(generator, 1, levels, 1, 64, std=2.0).float().log_softmax(-1)
        log_probs, tokens = (part.contiguous() for part in log_probs.topk(k))
        return tokens[:, 0, 0, 0].contiguous(), log_probs, tokens, nodes

    name, moved = f"best_first_tree, {nodes} nodes of {levels} levels", levels * k * 12 + nodes * 36
    return maker.case("tree", name, make, lambda ops, *inputs: ops.best_first_tree(*inputs), moved)


def topk_case(maker: CaseMaker, sizes: Sizes) -> Case:
    """The children of a beam. Of equal logits torch may take any, so logits are compared, not tokens."""

    def values(out: tuple[Tensor, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        return out[0].float(), logits.gather(1, out[1]).float()

    def topk_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
        best, tokens = logits.topk(TOP_K)
        return best.float() - logits.float().logsumexp(-1, keepdim=True), tokens

    return maker.case(
        "tree",
        f"log-softmax, top {TOP_K} of [{TOP_K}, {sizes.draft_vocab}]",
        lambda generator: (maker.normal(generator, TOP_K, sizes.draft_vocab, std=2.0),),
        lambda ops, logits: ops.topk(logits, TOP_K),
        TOP_K * sizes.draft_vocab * maker.dtype.itemsize,
        8,
        others={
            "log_softmax, topk": (lambda logits: logits.float().log_softmax(-1).topk(TOP_K), values),
            "topk, logsumexp": (topk_logsumexp, values),
        },
        finish=values,
    )


def suffix_case(maker: CaseMaker, sizes: Sizes, size: int, batch: int, target_us: float | None) -> Case:
    """Drafts from repetition: each sequence ends with a phrase that it and the ring hold several times."""
    columns, phrase = (2048, 40) if maker.cuda else (256, 20)

    def make(generator: torch.Generator) -> tuple:
        ring, tokens, phrases = (
            maker.integers(generator, sizes.vocab, *shape) for shape in ((size,), (batch, columns), (batch, phrase))
        )
        places = torch.arange(4 * batch, device=maker.device) * (size // (4 * batch))
        steps = torch.arange(phrase, device=maker.device)
        ring[(places[:, None] + steps).clamp(max=size - 1)] = phrases.repeat(4, 1)
        tokens[:, :phrase] = phrases
        tokens[:, columns - 1 - phrase // 2 : columns - 1] = phrases[:, : phrase // 2]
        lengths = torch.full((batch,), columns - 2, dtype=torch.int32, device=maker.device)
        ring[-1] = END
        return tokens, lengths, TokenRing(ring.int(), maker.int32(size // 3)), 16, SuffixRules(min_match=2, keep=128)

    name = f"suffix_drafts, {batch} sequences, ring of {size}"  # torch has no such operation
    return maker.case(
        "suffix", name, make, lambda ops, *inputs: ops.suffix_drafts(*inputs), size * 4, target_us, others={}
    )
