"""Drafts from what occurred before."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.benchmarks.cases.case import Case, Random, Sizes, ours
from eagle_triton.engine.operations import Operations
from eagle_triton.reference import suffix_match


def suffix_case(ops: Operations, sizes: Sizes, random: Random, size: int, batch: int, target_us: float | None) -> Case:
    """Drafts from repetition: each sequence ends with a phrase that it and the ring hold several times.

    Nothing in torch does that.
    """
    columns, phrase = (2048, 40) if random.device.type == "cuda" else (256, 20)
    rules = suffix_match.SuffixRules(min_match=2, keep=128)

    def make(generator: torch.Generator) -> tuple:
        def text(*shape: int) -> Tensor:
            return torch.randint(sizes.vocab, shape, generator=generator, device=random.device)

        ring, tokens, phrases = text(size), text(batch, columns), text(batch, phrase)
        places = torch.arange(4 * batch, device=random.device) * (size // (4 * batch))
        steps = torch.arange(phrase, device=random.device)
        ring[(places[:, None] + steps).clamp(max=size - 1)] = phrases.repeat(4, 1)
        tokens[:, :phrase] = phrases
        tokens[:, columns - 1 - phrase // 2 : columns - 1] = phrases[:, : phrase // 2]
        lengths = torch.full((batch,), columns - 2, dtype=torch.int32, device=random.device)
        ring[-1] = suffix_match.END
        return tokens, lengths, suffix_match.TokenRing(ring.int(), random.int32(size // 3)), 16, rules

    return Case(
        "suffix",
        f"suffix_drafts, {batch} sequences, ring of {size}",
        make,
        suffix_match.suffix_drafts,
        [ours(ops, ops.suffix_drafts)],
        size * 4,
        target_us,
    )
