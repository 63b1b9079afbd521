"""The settings of an answer, with the values that each allows. Standard library only."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from eagle_triton.command_line import MAX_TOKENS

METHODS = ("target", "drafter", "speculative", "ngram", "eagle", "block", "block_tree", "suffix", "hybrid")
ON_ENGINE = ("eagle", "block", "block_tree", "suffix", "hybrid")  # methods that only the engine has
READERS = {  # drafting models, and the methods that read each
    "drafter": ("drafter", "speculative"),
    "head": ("eagle", "hybrid"),
    "block_drafter": ("block", "block_tree"),
}
PROCESSORS = {  # the arguments of each, in their written order
    "greedy": ("temperature",),
    "multinomial": ("temperature",),
    "topk": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "topknucleus": ("temperature", "top_k", "top_p"),
}
STORAGES = ("basic", "onelevel")
MAX_DRAFTS = 63  # in a chain: a tree of 64 nodes is the engine's largest
MAX_SEED = 2**63 - 1


class Kind(NamedTuple):
    """The values that a setting allows. type: bool, int, float or str.

    readers: the methods that read it. least, most: of an int. expected, holds: the allowed finite floats, in words and
    as a test. choices: of a str. none: the meaning of None, "" if None is not allowed.
    """

    type: type
    summary: str
    readers: tuple[str, ...] = METHODS
    least: int = 1
    most: int = MAX_TOKENS
    expected: str = ""
    holds: Callable[[float], bool] = math.isfinite
    choices: tuple[str, ...] = ()
    none: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError or TypeError, with the name first, for a value that is not allowed."""
        if value is None and self.none:
            return
        if self.type is str and value not in self.choices:
            raise ValueError(f"{name} must be one of {', '.join(self.choices)}, got {value!r}")
        taken: Any = (int, float) if self.type is float else self.type
        if not isinstance(value, taken) or (isinstance(value, bool) and self.type is not bool):
            raise TypeError(f"{name} must be {WORDS[self.type]}, got {value!r}")
        if self.type is int and not self.least <= value <= self.most:
            raise ValueError(f"{name} must be a whole number from {self.least} to {self.most}, got {value}")
        if self.type is float and not (math.isfinite(value) and self.holds(value)):
            raise ValueError(f"{name} must be a finite number {self.expected}, got {value}")

    def read(self, name: str, text: str) -> Any:
        """The value of a text. Raises ValueError, with the name first, for a text that is not one."""
        if self.type is not int or re.fullmatch(r"[+-]?\d{1,100}", text, re.ASCII):
            with suppress(ValueError):
                return self.type(text)
        raise ValueError(f"{name} must be {WORDS[self.type]}, got {text!r}")

    def argument(self, text: str) -> Any:
        """The value of an argument, for argparse, which puts the option in front of an error."""
        try:
            value = self.read("", text)
            self.check("", value)
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(str(error).lstrip()) from None
        return value


WORDS: dict[type, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "a name"}
_DRAFTER, _NGRAM = ("speculative",), ("ngram",)


def _setting(default: Any, *kind: Any, **more: Any) -> Any:
    return field(default=default, metadata={"kind": Kind(*kind, **more)})


@dataclass(frozen=True)
class Settings:
    """How an answer is decoded. Raises ValueError or TypeError with the option's name first.

    egag_ema, egag_scale and egag_mode are `ema_beta`, `scale` and `mode` of `EGAGConfig`. Sampling applies temperature,
    then top-k, then top-p. The likeliest token is chosen by greedy, and by the other processors at temperature 0.
    cache: False: models read the whole text for each token. reset_in_between: forget n-grams and earlier outputs before
    each answer.
    """

    # fmt: off
    length: int = _setting(35, int, "most new tokens")
    gamma: int = _setting(4, int, "drafts per step", _DRAFTER + _NGRAM, most=MAX_DRAFTS)
    egag: bool = _setting(False, bool, "draft less if the drafter is unsure", _DRAFTER)
    egag_gamma_min: int = _setting(1, int, "fewest drafts with egag", _DRAFTER, most=MAX_DRAFTS)
    egag_gamma_max: int | None = _setting(None, int, "most drafts with egag", _DRAFTER, most=MAX_DRAFTS,
        none="as gamma")
    egag_ema: float = _setting(0.0, float, "weight of earlier entropies, at least 0 and below 1", _DRAFTER,
        expected="at least 0 and below 1", holds=lambda beta: 0 <= beta < 1)
    egag_scale: float | None = _setting(None, float, "entropy that counts as 1, in nats", _DRAFTER,
        expected="above 0, in nats, or None for ln V", holds=lambda scale: scale > 0, none="ln of the vocabulary")
    egag_mode: str = _setting("gamma", str, "decide per step, or per draft", _DRAFTER, choices=("gamma", "stop"))
    cache: bool = _setting(True, bool, "keep keys and values")
    top_k_filler: int = _setting(3, int, "likeliest tokens to count after each context", _NGRAM)
    filler_weight: float = _setting(1.0, float, "how often each of these tokens counts", _NGRAM,
        expected="at least 0", holds=lambda weight: weight >= 0)
    ngram_storage: str = _setting("basic", str, "contexts to count", _NGRAM, choices=STORAGES)
    ngram_n: int = _setting(3, int, "most tokens of an n-gram", _NGRAM, least=2)
    reset_in_between: bool = _setting(True, bool, "forget earlier answers before each")
    processor: str = _setting("greedy", str, "how to choose a token", choices=tuple(PROCESSORS))
    temperature: float = _setting(1.0, float, "0: greedy",
        expected="at least 0", holds=lambda temperature: temperature >= 0)
    top_k: int | None = _setting(None, int, "draw from this many likeliest tokens", none="all of them")
    top_p: float | None = _setting(None, float, "draw from this share of probability", none="all of them",
        expected="above 0 and at most 1", holds=lambda top_p: 0 < top_p <= 1)
    seed: int = _setting(42, int, "seed of an answer's random numbers", least=0, most=MAX_SEED)
    # fmt: on

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
                raise ValueError(f"{name} must be {off} with egag_mode stop, which looks at single entropies")
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
        """The most drafts in a step with EGAG."""
        return self.gamma if self.egag_gamma_max is None else self.egag_gamma_max

    @property
    def greedy(self) -> bool:
        """Whether nothing is random."""
        return self.processor == "greedy" or self.temperature == 0

    @property
    def processor_arguments(self) -> dict[str, float]:
        """The processor's arguments by name, in its order."""
        return {name: getattr(self, name) for name in PROCESSORS[self.processor]}


KINDS: dict[str, Kind] = {setting.name: setting.metadata["kind"] for setting in fields(Settings)}


def read_processor(words: Sequence[str]) -> dict[str, Any]:
    """The settings from a processor and its arguments, such as "topk 0.8 50"; temperature may be left out (1).

    Raises ValueError for an unknown processor, too many arguments, and an argument that is not a number.
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
