"""Make distributions from logits: temperature first, then top-k, then top-p."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from eagle_triton.values import checked_integer


class LogitsProcessor(ABC):
    """Probabilities of logits [..., V], as float32 on their device. The logits are never changed.

    temperature: divides the logits before anything else; 0 gives all probability to the first of the largest logits
    kept. Raises ValueError if it is negative or not finite. In your own processor `process` says which tempered logits
    stay, or at temperature 0 which logits.
    """

    def __init__(self, temperature: float) -> None:
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise ValueError(f"{type(self).__name__}: temperature must be at least 0 and finite, got {temperature}")
        self.temperature = temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] of logits [..., V]."""
        if self.temperature == 0:
            return _one_hot(self.process(logits.float()))
        return self.process(logits.float() / self.temperature).softmax(dim=-1)

    @abstractmethod
    def process(self, logits: Tensor) -> Tensor:
        """Tempered logits [..., V], with -inf for excluded tokens."""

    @abstractmethod
    def sample(self, probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token for each row: probabilities [..., V] -> int64 [..., 1]."""


class GreedyProcessor(LogitsProcessor):
    """All probability on the first of the largest logits, at any temperature."""

    def __init__(self, temperature: float = 1) -> None:
        super().__init__(temperature)

    def __call__(self, logits: Tensor) -> Tensor:
        """Zeros [..., V] with a one at the largest logit."""
        return _one_hot(logits)

    def process(self, logits: Tensor) -> Tensor:
        """-inf for all but the largest."""
        return logits.masked_fill(self(logits) == 0, -math.inf)

    def sample(self, probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The most probable token. The generator is not used."""
        return probs.argmax(dim=-1, keepdim=True)


class MultinomialProcessor(LogitsProcessor):
    """The whole distribution at a temperature. A subclass sets top_k or top_p; top-k comes first."""

    top_k: int | None = None
    top_p: float | None = None

    def process(self, logits: Tensor) -> Tensor:
        """-inf for the tokens that top_k and top_p leave out. Temperature 0 needs no top-p: the largest logit stays."""
        if self.top_k is not None:
            logits = _top_k(logits, self.top_k)
        return logits if self.top_p is None or not self.temperature else _top_p(logits, self.top_p)

    def sample(self, probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A draw for each row, with the generator (None: torch's default) on its device; the result is moved back."""
        rows = probs.reshape(-1, probs.shape[-1])
        if generator is not None:
            rows = rows.to(generator.device)
        return torch.multinomial(rows, 1, generator=generator).to(probs.device).view(*probs.shape[:-1], 1)


class TopKProcessor(MultinomialProcessor):
    """The top_k most probable tokens, and all as probable as the last one. Raises ValueError for a top_k below 1."""

    def __init__(self, temperature: float, top_k: int) -> None:
        super().__init__(temperature)
        self.top_k = _checked_top_k(self, top_k)


class NucleusProcessor(MultinomialProcessor):
    """The fewest most probable tokens with a sum of at least top_p (Holtzman et al., arXiv 1904.09751). Of equal ones
    the last are taken, as in transformers.

    Raises ValueError unless 0 < top_p <= 1.
    """

    def __init__(self, temperature: float, top_p: float) -> None:
        super().__init__(temperature)
        self.top_p = _checked_top_p(self, top_p)


class TopKNucleusProcessor(MultinomialProcessor):
    """First top-k, then top-p over the rest. Raises ValueError as either does."""

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        super().__init__(temperature)
        self.top_k, self.top_p = _checked_top_k(self, top_k), _checked_top_p(self, top_p)


def draw(processor: LogitsProcessor, probs: Tensor, generator: torch.Generator | None) -> list[int]:
    """A token for each row of probs [rows, V], by the processor."""
    tokens = processor.sample(probs) if generator is None else processor.sample(probs, generator=generator)
    return tokens.reshape(-1).tolist()


def _top_k(logits: Tensor, top_k: int) -> Tensor:
    least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def _top_p(logits: Tensor, top_p: float) -> Tensor:
    values, order = logits.sort(dim=-1, stable=True)
    dropped = values.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    dropped[..., -1] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)


def _one_hot(logits: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()


def _checked_top_k(processor: LogitsProcessor, top_k: int) -> int:
    return checked_integer(f"{type(processor).__name__}: top_k", top_k, 1)


def _checked_top_p(processor: LogitsProcessor, top_p: float) -> float:
    if not 0 < top_p <= 1:
        raise ValueError(f"{type(processor).__name__}: top_p must be above 0 and at most 1, got {top_p}")
    return top_p
