"""How a request's tokens are chosen: a frozen, checked dataclass."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.grammar import Grammar
from eagle_triton.engine.upload import upload
from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.values import check_number, checked_integer

MIN_FLOAT32, MAX_FLOAT32 = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max  # as the device keeps them
PENALTIES = ("presence_penalty", "frequency_penalty")
MAX_TOP_K = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy, whatever the filters, because each keeps the best token. top_k 0, top_p 1, min_p 0,
    repetition_penalty 1, presence_penalty 0 and frequency_penalty 0 are off.

    Order: grammar, repetition_penalty (over the prompt and the output, like Hugging Face), frequency_penalty (each time
    that a token is in the output) and presence_penalty (once), both as OpenAI's, logit_bias, temperature, top-k, top-p,
    min-p. top_p_first: top-p before top-k, as in the original EaModel. seed: None draws one from torch's default
    generator, so torch.manual_seed decides. logit_bias: numbers that are added to the logits of tokens, as a mapping or
    pairs, kept as sorted pairs; -inf forbids a token. grammar: what the output must match; tokens that it forbids next
    have probability 0, and the others share all of it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_p_first: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", *PENALTIES):
            check_number(name, getattr(self, name))
        for name in PENALTIES:
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be in [-2, 2] (0: off), got {getattr(self, name)}")
        if not 0 <= self.temperature <= MAX_FLOAT32:
            raise ValueError(f"temperature must be a finite number >= 0 that float32 holds, got {self.temperature}")
        if not 0 <= self.top_k <= MAX_TOP_K or int(self.top_k) != self.top_k:
            raise ValueError(f"top_k must be an integer >= 0 (0: off) that 32 bits hold, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1: off), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1] (0: off), got {self.min_p}")
        if self.seed is not None:
            seed = checked_integer("seed", self.seed, kind="an integer or None")
            if not -(2**63) <= seed < 2**63:
                raise ValueError(f"seed must fit into 64 bits, got {seed}")
            object.__setattr__(self, "seed", seed)
        if not MIN_FLOAT32 <= self.repetition_penalty <= MAX_FLOAT32:
            given = self.repetition_penalty
            raise ValueError(f"repetition_penalty must be a finite number > 0 (1: off) that float32 holds, got {given}")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if not (self.grammar is None or isinstance(self.grammar, Grammar)):
            raise TypeError(
                f"grammar must be a Grammar or None, got {self.grammar!r:.60}: make one by Grammar.json_schema, "
                "json_object, regex, choice or ebnf"
            )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as sorted pairs: a token, and the number added to its logit."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def forbids_all(self, vocabulary: int, held_back: Collection[int] = ()) -> bool:
        """Whether the biases forbid every token, together with those that are held back."""
        forbidden = {token for token, value in self.biases if value == -math.inf}.union(held_back)
        return len(forbidden) >= vocabulary and all(token in forbidden for token in range(vocabulary))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether sampling leaves out some tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def processed(self) -> bool:
        """Whether the logits themselves are changed."""
        return self.repetition_penalty != 1 or bool(self.biases) or any(getattr(self, name) for name in PENALTIES)

    @staticmethod
    def original(temperature: float, top_p: float, top_k: float) -> SamplingParams:
        """The original EaModel's arguments: temperature <= 1e-5 is greedy, top_p outside [1e-8, 1) and top_k 0 off."""
        if temperature <= 1e-5:
            return SamplingParams()
        return SamplingParams(
            temperature=temperature,
            top_k=max(top_k, 0),  # type: ignore[arg-type]  # checked to be whole
            top_p=top_p if 1e-8 <= top_p < 1 else 1.0,
            top_p_first=True,
        )

    def seeds(self, count: int, generator: torch.Generator | None = None) -> list[int]:
        """Seeds for `count` sequences with these options: `seed`, `seed` + 1, ..., or drawn from `generator` (None:
        torch's default). Greedy decoding draws none."""
        if self.greedy:
            return [0] * count
        if self.seed is not None:
            return list(range(self.seed, self.seed + count))
        device = "cpu" if generator is None else generator.device
        return torch.randint(2**62, (count,), generator=generator, device=device).tolist()

    @staticmethod
    def write(requests: Sequence[SamplingParams], params: SamplingTensors, slots: Tensor) -> None:
        """Write the values and seeds of requests to rows `slots` [n] int64 of `params`, in place, and set their
        counters to 0. A seed of None is drawn."""
        values: dict[str, list[Any]] = {
            "temperature": [request.temperature for request in requests],
            "top_k": [int(request.top_k) for request in requests],
            "top_p": [request.top_p for request in requests],
            "min_p": [request.min_p for request in requests],
            "seed": [request.seeds(1)[0] for request in requests],
            "step": [0] * len(requests),
        }
        for name, column in values.items():
            tensor = getattr(params, name)
            tensor[slots] = upload(column, tensor.dtype, tensor.device)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """See SamplingParams.biases."""
    try:
        pairs = given.items() if isinstance(given, Mapping) else given
        bias = tuple(sorted((operator.index(token), float(value)) for token, value in pairs))
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"logit_bias must map tokens to numbers, or be pairs of both, got {given!r:.80}") from error
    for token, value in bias:
        if token < 0 or not (value == -math.inf or abs(value) <= MAX_FLOAT32):
            raise ValueError(f"logit_bias must give tokens >= 0 finite values or -inf, got {token}: {value}")
    if len({token for token, _ in bias}) < len(bias):
        raise ValueError("logit_bias: a token occurs twice")
    return bias
