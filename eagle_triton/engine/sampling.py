"""How to choose tokens: one frozen, checked dataclass per request."""

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

    def seeds(self, count: int, generator: torch.Generator | None = None) -> list[int]:
        """Fresh seeds for `count` sequences that share these options, from `generator` or torch's default.

        With a seed of its own, that and those that follow it. Greedy decoding needs none, and draws none.
        """
        if self.greedy:
            return [0] * count
        if self.seed is not None:
            return list(range(self.seed, self.seed + count))
        device = None if generator is None else generator.device
        return torch.randint(2**62, (count,), generator=generator, device=device).tolist()

    def fill(self, params: SamplingParams) -> None:
        """Write these values and the seed (a fresh one if there is none) to the device, in place; the counter to 0."""
        params.temperature.fill_(self.temperature)
        params.top_k.fill_(int(self.top_k))
        params.top_p.fill_(self.top_p)
        params.min_p.fill_(self.min_p)
        params.seed.fill_(self.seeds(1)[0])
        params.step.zero_()
