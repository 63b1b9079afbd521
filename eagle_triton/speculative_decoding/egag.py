"""EGAG: how many tokens to draft, by the entropy of the drafter's logits.

A sure drafter (low entropy) may draft more than a doubtful one. The entropy is that of the logits from which the first
draft of a step is drawn, so it costs no forward; it is of the raw logits at temperature 1, not of what a processor
makes of them (greedy would always have entropy 0). The number depends on the text and the drafter alone, never on what
the target says in the same step: output keeps the target's distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """-sum p ln p in nats of p = softmax(logits): [..., V] -> float32 [...]; 0 ln 0 is 0."""
    return torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1)


def normalized_entropy(logits: Tensor, scale: float | None = None) -> Tensor:
    """The entropy of logits [..., V] over `scale` nats, None: over ln V, the largest there can be; at most 1. [...]"""
    largest = math.log(logits.shape[-1]) if scale is None else scale
    return (entropy(logits) / largest).clamp(max=1.0) if largest else entropy(logits)


def moving_average(before: float | None, value: float, beta: float) -> float:
    """beta * before + (1 - beta) * value; the value itself where nothing was before."""
    return value if before is None else beta * before + (1 - beta) * value


def adaptive_gamma(h: float, gamma_min: int, gamma_max: int) -> int:
    """floor((1 - h) gamma_max), but no less than gamma_min and no more than gamma_max; h: a normalised entropy."""
    return min(max(math.floor((1 - h) * gamma_max + 1e-9), gamma_min), gamma_max)


@dataclass(frozen=True)
class EGAGConfig:
    """How the number of drafts follows the entropy. Raises ValueError for values that cannot be.

    gamma_min, gamma_max: its bounds. ema_beta: the weight of former steps in a moving average of the normalised
    entropy, 0: none. scale: the nats that count as 1; None: ln V. Drafters are seldom above 3 nats, far below ln V, so
    a scale of 3.0 lets the number move more.

    mode: "gamma" fixes the number before drafting. "stop" asks before each draft after gamma_min, and stops where
    1 - sqrt(stop_lambda * entropy), a lower bound on the probability of acceptance, is below stop_threshold (Agrawal
    et al., AdaEDL, arXiv 2410.18351); it takes neither ema_beta nor scale.
    """

    gamma_min: int = 1
    gamma_max: int = 5
    ema_beta: float = 0.0
    scale: float | None = None
    mode: str = "gamma"
    stop_threshold: float = 0.3
    stop_lambda: float = 0.2

    def __post_init__(self) -> None:
        if self.gamma_min < 1:
            raise ValueError(f"gamma_min must be at least 1, got {self.gamma_min}")
        if self.gamma_max < self.gamma_min:
            raise ValueError(f"gamma_max must be at least gamma_min ({self.gamma_min}), got {self.gamma_max}")
        if not 0 <= self.ema_beta < 1:
            raise ValueError(f"egag_ema_beta must be at least 0 and below 1, got {self.ema_beta}")
        if self.scale is not None and not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"egag_scale must be above 0 and finite, in nats, or None for ln V, got {self.scale}")
        if self.mode not in ("gamma", "stop"):
            raise ValueError(f'egag_mode must be "gamma" or "stop", got {self.mode!r}')
        if self.mode == "stop" and (self.ema_beta or self.scale is not None):
            raise ValueError('egag_mode "stop" looks at each entropy by itself: no egag_ema_beta and no egag_scale')
        if not 0 <= self.stop_threshold <= 1:
            raise ValueError(f"egag_stop_threshold must lie in 0..1, got {self.stop_threshold}")
        if not (self.stop_lambda > 0 and math.isfinite(self.stop_lambda)):
            raise ValueError(f"egag_stop_lambda must be above 0 and finite, got {self.stop_lambda}")


class EntropyGuide:
    """The rule of an `EGAGConfig` along one generation.

    h_norm, h_ema: of the latest step, the normalised entropy and its moving average; None before the first.
    """

    def __init__(self, config: EGAGConfig) -> None:
        self.config = config
        self.h_norm: float | None = None
        self.h_ema: float | None = None

    def gamma(self, logits: Tensor) -> int:
        """How many tokens this step may draft, by the logits [V] from which its first draft is drawn."""
        self.h_norm = float(normalized_entropy(logits, self.config.scale))
        self.h_ema = moving_average(self.h_ema, self.h_norm, self.config.ema_beta)
        if self.config.mode == "stop":
            return self.config.gamma_max
        return adaptive_gamma(self.h_ema, self.config.gamma_min, self.config.gamma_max)

    def stops(self, logits: Tensor, drafted: int) -> bool:
        """Whether no more than the `drafted` tokens should be proposed, by the logits [V] of the next draft."""
        if self.config.mode != "stop" or drafted < self.config.gamma_min:
            return False
        return 1 - math.sqrt(self.config.stop_lambda * float(entropy(logits))) < self.config.stop_threshold
