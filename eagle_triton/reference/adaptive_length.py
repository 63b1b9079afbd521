"""The rule by which the draft's entropy decides how deep to draft (EGAG).

A confident draft (low entropy) may draft deeper. The entropy is computed from the raw logits of a step's first draft,
at temperature 1, so it needs no extra pass. The depth depends on the text and the draft only, not on the target's
logits of the same step, so the output keeps the target's distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands import adaptive_length as operands
from eagle_triton.operands.adaptive_length import EGAGConfig, GuideTensors


def row_entropy(logits: Tensor) -> Tensor:
    """-sum p ln p in nats of p = softmax(logits), with 0 ln 0 = 0. logits [R, V] any float; returns float32 [R].

    NaN for a row with a NaN or +inf, or with only -inf.
    """
    operands.check_row_entropy(logits)
    return torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1)


def choose_gamma(entropy: Tensor, lengths: Tensor, guide: GuideTensors, config: EGAGConfig, vocabulary: int) -> None:
    """Update `guide` in place by the entropies at the sequences' roots.

    entropy [B] float32 in nats; lengths [B] int32: committed tokens. vocabulary: V of the logits. The same length as
    before means the same root; its entropy counts once. A NaN gives gamma_min, and is left out of the average.
    Raises ValueError if shapes or dtypes do not fit, or without a gamma_max.
    """
    operands.check_choose_gamma(entropy, lengths, guide, config, vocabulary)
    assert config.gamma_max is not None
    _, former, _, kept = guide.values.unbind(1)
    before = torch.where(guide.root == lengths, kept, former)
    h = (entropy / operands.nats_of(config, vocabulary)).clamp(max=1.0).double()
    averaged = torch.where(before.isnan(), h, config.ema_beta * before + (1 - config.ema_beta) * h)
    ema = torch.where(h.isnan(), before, averaged)
    gamma = ((1 - ema) * config.gamma_max + 1e-9).floor().clamp(config.gamma_min, config.gamma_max)
    gamma = gamma.new_full(gamma.shape, config.gamma_max) if config.mode == "stop" else gamma
    gamma = gamma.masked_fill(h.isnan(), config.gamma_min)
    guide.values.copy_(torch.stack((h, ema, gamma, before), dim=1))
    guide.root.copy_(lengths)


def clip_depth(
    tokens: Tensor,
    scores: Tensor,
    depths: Tensor,
    guide: GuideTensors,
    lengths: Tensor,
    limits: Tensor,
    config: EGAGConfig,
    levels: int | None = None,
) -> None:
    """Remove candidates deeper than gamma, and those with score -inf, in place: token -1, score -inf.

    tokens [B, C] int64; scores [B, C] float32; depths [C] int32, 1 for the root's children. Also removes candidates
    that would exceed a sequence's limit of `limits` [B] int32 tokens; lengths [B] int32: committed tokens, without the
    root. levels: the number of scored levels, in mode "stop". Then gamma becomes the depth that was reached; gamma_max
    if that is all levels, or all that fit.
    Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_clip_depth(tokens, scores, depths, guide, lengths, limits)
    gone = scores == float("-inf")
    room = limits - lengths - 1
    if levels is not None and config.gamma_max is not None:
        reached = torch.where(gone, 0, depths).amax(1)
        guide.gamma.copy_(torch.where(reached >= room.clamp(max=levels), config.gamma_max, reached))
    gone |= ~(depths <= torch.minimum(guide.gamma, room.double())[:, None])
    tokens.masked_fill_(gone, -1)
    scores.masked_fill_(gone, float("-inf"))
