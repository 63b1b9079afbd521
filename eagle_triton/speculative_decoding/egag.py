"""EGAG: how many tokens to draft, by the entropy of the drafter's logits.

A sure drafter (low entropy) may draft more than a doubtful one. The entropy is that of the logits from which the first
draft of a step is drawn, so it costs no forward; it is of the raw logits at temperature 1, not of what a processor
makes of them (greedy would always have entropy 0). The number depends on the text and the drafter alone, never on what
the target says in the same step: output keeps the target's distribution.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from eagle_triton.operands.adaptive_length import EGAGConfig as EGAGConfig
from eagle_triton.operands.adaptive_length import adaptive_gamma as adaptive_gamma
from eagle_triton.values import check_range


def entropy(logits: Tensor) -> Tensor:
    """-sum p ln p in nats of p = softmax(logits): [..., V] -> float32 [...]; 0 ln 0 is 0."""
    return torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1)


def normalized_entropy(logits: Tensor, scale: float | None = None) -> Tensor:
    """The entropy of logits [..., V] over `scale` nats, None: over ln V, the largest there can be; at most 1. [...]"""
    largest = math.log(logits.shape[-1]) if scale is None else scale
    return (entropy(logits) / largest).clamp(max=1.0) if largest else entropy(logits)


def egag_config(gamma: int, gamma_min: int, gamma_max: int | None, *options: Any) -> EGAGConfig:
    """An EGAGConfig of a function's options. Raises as it does, by the names that the functions have for them."""
    check_range("gamma", gamma, 1)
    try:
        return EGAGConfig(gamma_min, gamma if gamma_max is None else gamma_max, *options)
    except (TypeError, ValueError) as error:
        names = r"\b(ema_beta|scale|mode|stop_threshold|stop_lambda)\b"
        raise type(error)(re.sub(names, r"egag_\1", str(error))) from None


class EntropyGuide:
    """The rule of an `EGAGConfig` along one generation.

    h_norm, h_ema: of the latest step, the normalised entropy and its moving average; None before the first.
    """

    def __init__(self, config: EGAGConfig) -> None:
        if config.gamma_max is None:
            raise ValueError("gamma_max: the rule of a generation needs a number")
        self.config, self.gamma_max = config, config.gamma_max
        self.h_norm: float | None = None
        self.h_ema: float | None = None

    def gamma(self, logits: Tensor) -> int:
        """How many tokens this step may draft, by the logits [V] from which its first draft is drawn."""
        self.h_norm = float(normalized_entropy(logits, self.config.scale))
        beta = 0.0 if self.h_ema is None else self.config.ema_beta
        self.h_ema = beta * (self.h_ema or 0.0) + (1 - beta) * self.h_norm
        if self.config.mode == "stop":
            return self.gamma_max
        return adaptive_gamma(self.h_ema, self.config.gamma_min, self.gamma_max)

    def stops(self, logits: Tensor, drafted: int) -> bool:
        """Whether no more than the `drafted` tokens should be proposed, by the logits [V] of the next draft."""
        if self.config.mode != "stop" or drafted < self.config.gamma_min:
            return False
        return 1 - math.sqrt(self.config.stop_lambda * float(entropy(logits))) < self.config.stop_threshold
