"""The settings of an answer: one frozen dataclass. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

METHODS = ("target", "drafter", "speculative", "ngram", "eagle", "block", "block_tree", "suffix", "hybrid")
ON_ENGINE = ("eagle", "block", "block_tree", "suffix", "hybrid")  # methods that only the engine has
READERS = {  # the models that draft, and the methods that read them
    "drafter": ("drafter", "speculative"),
    "head": ("eagle", "hybrid"),
    "block_drafter": ("block", "block_tree"),
}
PROCESSORS = {  # the arguments of each, in the order in which they are written
    "greedy": ("temperature",),
    "multinomial": ("temperature",),
    "topk": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "topknucleus": ("temperature", "top_k", "top_p"),
}
STORAGES = ("basic", "onelevel")
EGAG_MODES = ("gamma", "stop")
MAX_DRAFTS = 63  # in a chain: a tree of 64 nodes is the engine's largest
MAX_TOKENS = 10_000_000  # more than any model has positions
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Settings:
    """How an answer is decoded. Raises ValueError or TypeError that begins with the option's name.

    length: the most new tokens. gamma: drafts a step. egag: choose their number by the drafter's entropy, between
    egag_gamma_min and egag_gamma_max (None: gamma); egag_ema, egag_scale (nats) and egag_mode are `ema_beta`, `scale`
    and `mode` of `EGAGConfig`. processor: how a token is chosen, with temperature, top_k and top_p as it takes them:
    temperature first, then top-k, then top-p; greedy takes the likeliest at any temperature, the others at 0. cache:
    keep keys and values; without, models read the whole text for each token. ngram_storage, ngram_n, top_k_filler,
    filler_weight: how n-grams are counted. reset_in_between: forget n-grams and former outputs before each answer.
    seed: of the random numbers of an answer.
    """

    length: int = 35
    gamma: int = 4
    egag: bool = False
    egag_gamma_min: int = 1
    egag_gamma_max: int | None = None
    egag_ema: float = 0.0
    egag_scale: float | None = None
    egag_mode: str = "gamma"
    processor: str = "greedy"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    cache: bool = True
    ngram_storage: str = "basic"
    ngram_n: int = 3
    top_k_filler: int = 3
    filler_weight: float = 1.0
    reset_in_between: bool = True
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("egag", "cache", "reset_in_between"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_whole("length", 1, MAX_TOKENS)
        self._check_whole("gamma", 1, MAX_DRAFTS)
        self._check_whole("ngram_n", 2, MAX_TOKENS)
        self._check_whole("top_k_filler", 1, MAX_TOKENS)
        self._check_whole("seed", 0, MAX_SEED)
        self._check_number("filler_weight", "at least 0", lambda weight: weight >= 0)
        if self.top_k_filler == 1 and self.filler_weight != 1:
            raise ValueError(f"filler_weight must be 1 with top_k_filler 1, no filler, got {self.filler_weight}")
        self._check_name("ngram_storage", STORAGES)
        self._check_egag()
        self._check_processor()

    @property
    def gamma_max(self) -> int:
        """The most drafts of a step with EGAG."""
        return self.gamma if self.egag_gamma_max is None else self.egag_gamma_max

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn at random."""
        return self.processor == "greedy" or self.temperature == 0

    @property
    def processor_arguments(self) -> dict[str, float]:
        """The processor's arguments by their names, in its order."""
        return {name: getattr(self, name) for name in PROCESSORS[self.processor]}

    def _check_egag(self) -> None:
        self._check_whole("egag_gamma_min", 1, MAX_DRAFTS)
        if self.egag_gamma_max is not None:
            self._check_whole("egag_gamma_max", 1, MAX_DRAFTS)
        if self.egag_gamma_min > self.gamma_max:
            name = "gamma, as egag_gamma_max is None" if self.egag_gamma_max is None else "egag_gamma_max"
            raise ValueError(f"egag_gamma_min must be at most {self.gamma_max} ({name}), got {self.egag_gamma_min}")
        self._check_number("egag_ema", "at least 0 and below 1", lambda beta: 0 <= beta < 1)
        if self.egag_scale is not None:
            self._check_number("egag_scale", "above 0, in nats, or None for ln V", lambda scale: scale > 0)
        self._check_name("egag_mode", EGAG_MODES)
        for name, off in (("egag_ema", 0.0), ("egag_scale", None)):
            if self.egag_mode == "stop" and getattr(self, name) != off:
                raise ValueError(f"{name} must be {off} with egag_mode stop, which looks at each entropy by itself")

    def _check_processor(self) -> None:
        self._check_name("processor", tuple(PROCESSORS))
        self._check_number("temperature", "at least 0", lambda temperature: temperature >= 0)
        read = PROCESSORS[self.processor]
        for name in ("top_k", "top_p"):
            value = getattr(self, name)
            if value is None and name in read:
                raise ValueError(f"{name} must be given for processor {self.processor}")
            if value is not None and name not in read:
                raise ValueError(
                    f"{name}={value!r} is not read by processor {self.processor}, which takes {', '.join(read)}"
                )
        if self.top_k is not None:
            self._check_whole("top_k", 1, MAX_TOKENS)
        if self.top_p is not None:
            self._check_number("top_p", "above 0 and at most 1", lambda top_p: 0 < top_p <= 1)

    def _check_whole(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if not least <= value <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value}")

    def _check_number(self, name: str, expected: str, holds: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not (math.isfinite(value) and holds(value)):
            raise ValueError(f"{name} must be a finite number {expected}, got {value}")

    def _check_name(self, name: str, names: tuple[str, ...]) -> None:
        if getattr(self, name) not in names:
            raise ValueError(f"{name} must be one of {', '.join(names)}, got {getattr(self, name)!r}")


def read_processor(words: Sequence[str]) -> dict[str, Any]:
    """The settings that a processor and its arguments name, as in "topk 0.8 50"; temperature may be left out (1).

    Raises ValueError for an unknown processor, too many arguments, and one that is no number.
    """
    if not words or words[0].lower() not in PROCESSORS:
        kinds = ", ".join(" ".join((name, *taken)) for name, taken in PROCESSORS.items())
        raise ValueError(f"takes one of {kinds}; got {repr(words[0]) if words else 'none'}")
    name, *given = words
    taken = PROCESSORS[name.lower()]
    if len(given) > len(taken):
        raise ValueError(f"{name} takes {', '.join(taken)}, got {' '.join(given)!r}")
    found: dict[str, Any] = {"processor": name.lower(), "temperature": 1.0, "top_k": None, "top_p": None}
    for option, text in zip(taken, given, strict=False):
        found[option] = read_whole(text, option) if option == "top_k" else read_number(text, option)
    return found


def read_whole(text: str, name: str) -> int:
    """A whole number. Raises ValueError that begins with the name."""
    if not re.fullmatch(r"[+-]?\d{1,100}", text, re.ASCII):
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return int(text)


def read_number(text: str, name: str) -> float:
    """A number. Raises ValueError that begins with the name."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
