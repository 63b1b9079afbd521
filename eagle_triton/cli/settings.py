"""The settings of an answer: one frozen dataclass, and a table of what each may be. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
MAX_DRAFTS = 63  # in a chain: a tree of 64 nodes is the engine's largest
MAX_TOKENS = 10_000_000  # more than any model has positions
MAX_SEED = 2**63 - 1


class Kind(NamedTuple):
    """What a setting may be. type: bool, int, float or str.

    expected: in words. holds: whether a value is so. readers: the methods that read it. none: what None stands for, ""
    where it must not be None. choices: of a str.
    """

    type: type
    summary: str
    readers: tuple[str, ...] = METHODS
    expected: str = ""
    holds: Callable[[Any], bool] = lambda value: True
    none: str = ""
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError or TypeError that begins with the name for a value that cannot be."""
        if value is None and self.none:
            return
        if self.type is str:
            if value not in self.choices:
                raise ValueError(f"{name} must be one of {', '.join(self.choices)}, got {value!r}")
            return
        taken: Any = {bool: bool, int: int, float: (int, float)}[self.type]
        if not isinstance(value, taken) or (isinstance(value, bool) and self.type is not bool):
            what = {bool: "True or False", int: "a whole number", float: "a number"}[self.type]
            raise TypeError(f"{name} must be {what}, got {value!r}")
        if not (math.isfinite(value) if self.type is float else True) or not self.holds(value):
            raise ValueError(f"{name} must be {self.expected}, got {value}")

    def read(self, name: str, text: str) -> Any:
        """The value of a text. Raises ValueError that begins with the name for what is no such value."""
        if self.type is str:
            return text
        try:
            if self.type is int and not re.fullmatch(r"[+-]?\d{1,100}", text, re.ASCII):
                raise ValueError
            return self.type(text)
        except ValueError:
            what = "a whole number" if self.type is int else "a number"
            raise ValueError(f"{name} must be {what}, got {text!r}") from None


def _whole(least: int, most: int, summary: str, readers: tuple[str, ...] = METHODS, none: str = "") -> Kind:
    expected = f"a whole number from {least} to {most}"
    return Kind(int, summary, readers, expected, lambda value: least <= value <= most, none)


def _number(
    expected: str, holds: Callable[[float], bool], summary: str, readers: tuple[str, ...] = METHODS, none: str = ""
) -> Kind:
    return Kind(float, summary, readers, f"a finite number {expected}", holds, none)


def _name(choices: Iterable[str], summary: str, readers: tuple[str, ...] = METHODS) -> Kind:
    return Kind(str, summary, readers, choices=tuple(choices))


_DRAFTER, _NGRAM, _FREE = ("speculative",), ("ngram",), "not given"
KINDS = {
    "length": _whole(1, MAX_TOKENS, "most new tokens"),
    "gamma": _whole(1, MAX_DRAFTS, "drafts a step", _DRAFTER + _NGRAM),
    "egag": Kind(bool, "as many drafts as the drafter is sure", _DRAFTER),
    "egag_gamma_min": _whole(1, MAX_DRAFTS, "least drafts with egag", _DRAFTER),
    "egag_gamma_max": _whole(1, MAX_DRAFTS, "most drafts with egag", _DRAFTER, "that of gamma"),
    "egag_ema": _number(
        "at least 0 and below 1", lambda beta: 0 <= beta < 1, "weight of former entropies, from 0 and below 1", _DRAFTER
    ),
    "egag_scale": _number(
        "above 0, in nats, or None for ln V", lambda scale: scale > 0, "entropy that counts as 1, in nats", _DRAFTER,
        "ln of the vocabulary",
    ),
    "egag_mode": _name(("gamma", "stop"), "once a step, or before each draft", _DRAFTER),
    "cache": Kind(bool, "keep keys and values"),
    "top_k_filler": _whole(1, MAX_TOKENS, "likeliest tokens that are counted after each context", _NGRAM),
    "filler_weight": _number("at least 0", lambda weight: weight >= 0, "how often each of them counts", _NGRAM),
    "ngram_storage": _name(STORAGES, "what contexts are counted", _NGRAM),
    "ngram_n": _whole(2, MAX_TOKENS, "most tokens of an n-gram", _NGRAM),
    "reset_in_between": Kind(bool, "forget former answers before each"),
    "processor": _name(PROCESSORS, "how a token is chosen"),
    "temperature": _number("at least 0", lambda temperature: temperature >= 0, "0: greedy"),
    "top_k": _whole(1, MAX_TOKENS, "of the likeliest tokens", none=_FREE),
    "top_p": _number("above 0 and at most 1", lambda top_p: 0 < top_p <= 1, "of the likeliest tokens", none=_FREE),
    "seed": _whole(0, MAX_SEED, "of the random numbers of an answer"),
}  # fmt: skip


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
        for name, kind in KINDS.items():
            kind.check(name, getattr(self, name))
        if self.top_k_filler == 1 and self.filler_weight != 1:
            raise ValueError(f"filler_weight must be 1 with top_k_filler 1, no filler, got {self.filler_weight}")
        if self.egag_gamma_min > self.gamma_max:
            name = "gamma, as egag_gamma_max is None" if self.egag_gamma_max is None else "egag_gamma_max"
            raise ValueError(f"egag_gamma_min must be at most {self.gamma_max} ({name}), got {self.egag_gamma_min}")
        for name, off in (("egag_ema", 0.0), ("egag_scale", None)):
            if self.egag_mode == "stop" and getattr(self, name) != off:
                raise ValueError(f"{name} must be {off} with egag_mode stop, which looks at each entropy by itself")
        read = PROCESSORS[self.processor]
        for name in ("top_k", "top_p"):
            value = getattr(self, name)
            if value is None and name in read:
                raise ValueError(f"{name} must be given for processor {self.processor}")
            if value is not None and name not in read:
                taken = ", ".join(read)
                raise ValueError(f"{name}={value!r} is not read by processor {self.processor}, which takes {taken}")

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
    return found | {option: KINDS[option].read(option, text) for option, text in zip(taken, given, strict=False)}
