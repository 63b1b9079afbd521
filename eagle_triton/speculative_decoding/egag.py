"""EGAG chooses how many tokens to draft, by the entropy of the drafter's logits.

A sure drafter (low entropy) may draft more than a doubtful one. The entropy comes from the logits of a step's first
draft, so it costs no extra forward. It is computed from raw logits at temperature 1, not from a processor's output
(greedy would always have entropy 0). The number depends only on the text and the drafter, not on the target in the same
step, so output keeps the target's distribution.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from eagle_triton.operands.adaptive_length import EGAGConfig as EGAGConfig
from eagle_triton.operands.adaptive_length import adaptive_gamma as adaptive_gamma
from eagle_triton.values import checked_integer


def entropy(logits: Tensor) -> Tensor:
    """-sum p ln p in nats for p = softmax(logits): [..., V] -> float32 [...]; 0 ln 0 is 0."""
    return torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1)


def normalized_entropy(logits: Tensor, scale: float | None = None) -> Tensor:
    """The entropy of logits [..., V] / `scale` nats, at most 1: [...]. None: / ln V, the largest possible entropy."""
    largest = math.log(logits.shape[-1]) if scale is None else scale
    return (entropy(logits) / largest).clamp(max=1.0) if largest else entropy(logits)


def egag_config(gamma: int, gamma_min: int, gamma_max: int | None, *options: Any) -> EGAGConfig:
    """An EGAGConfig from a function's options. Raises as EGAGConfig does, with the functions' names of options."""
    checked_integer("gamma", gamma, 1)
    try:
        return EGAGConfig(gamma_min, gamma if gamma_max is None else gamma_max, *options)
    except (TypeError, ValueError) as error:
        names = r"\b(ema_beta|scale|mode|stop_threshold|stop_lambda)\b"
        raise type(error)(re.sub(names, r"egag_\1", str(error))) from None


class EntropyGuide:
    """The rule of an `EGAGConfig` along one generation.

    h_norm, h_ema: the latest step's normalised entropy, and the moving average; None before the first step.
    """

    def __init__(self, config: EGAGConfig) -> None:
        if config.gamma_max is None:
            raise ValueError("gamma_max must be a number for EntropyGuide, got None")
        self.config, self.gamma_max = config, config.gamma_max
        self.h_norm: float | None = None
        self.h_ema: float | None = None

    def gamma(self, logits: Tensor) -> int:
        """How many tokens this step may draft, by its first draft's logits [V]."""
        self.h_norm = float(normalized_entropy(logits, self.config.scale))
        beta = 0.0 if self.h_ema is None else self.config.ema_beta
        self.h_ema = beta * (self.h_ema or 0.0) + (1 - beta) * self.h_norm
        if self.config.mode == "stop":
            return self.gamma_max
        return adaptive_gamma(self.h_ema, self.config.gamma_min, self.gamma_max)

    def stops(self, logits: Tensor, drafted: int) -> bool:
        """Whether to stop after `drafted` tokens, by the logits [V] of the next draft."""
        if self.config.mode != "stop" or drafted < self.config.gamma_min:
            return False
        return 1 - math.sqrt(self.config.stop_lambda * float(entropy(logits))) < self.config.stop_threshold
