"""How to choose tokens: one frozen, checked dataclass per generation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from eagle_triton.reference.sampling import SamplingParams


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    `top_p_first`: top-p before top-k, the order of the original EaModel; otherwise Hugging Face's. `seed`: None draws
    one from torch's default generator, so torch.manual_seed decides.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_p_first: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if self.top_k < 0 or int(self.top_k) != self.top_k:
            raise ValueError(f"top_k must be an integer >= 0 (0: off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1: off), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1] (0: off), got {self.min_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @staticmethod
    def original(temperature: float, top_p: float, top_k: float) -> Sampling:
        """The original EaModel's arguments: temperature <= 1e-5 is greedy, top_p outside [1e-8, 1) and top_k 0 off."""
        if not temperature > 1e-5:
            return Sampling()
        return Sampling(
            temperature=temperature,
            top_k=max(int(top_k), 0),
            top_p=top_p if 1e-8 <= top_p < 1 else 1.0,
            top_p_first=True,
        )

    def fill(self, params: SamplingParams, generator: torch.Generator | None = None) -> None:
        """Write these values and fresh seeds (one for each sequence) to the device, in place; the step counter to 0."""
        params.temperature.fill_(self.temperature)
        params.top_k.fill_(int(self.top_k))
        params.top_p.fill_(self.top_p)
        params.min_p.fill_(self.min_p)
        params.step.zero_()
        if self.greedy:
            return
        batch = len(params.seed)
        if self.seed is not None:
            seeds = torch.arange(self.seed, self.seed + batch)
        elif generator is not None:
            seeds = torch.randint(2**62, (batch,), generator=generator, device=generator.device)
        else:
            seeds = torch.randint(2**62, (batch,))
        params.seed.copy_(seeds)
