"""Drafting as deep as the entropy allows: the options of the rule, and the averages of each sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.shapes import FLOATS, check_tensors
from eagle_triton.values import check_number, check_range, check_switches, checked_integer


@dataclass(frozen=True)
class EGAGConfig:
    """How the number of drafts follows the entropy. Raises ValueError for values that make no sense.

    gamma_min, gamma_max: its limits; gamma_max None: the number without the rule. ema_beta: the weight of earlier steps
    in a moving average of the normalised entropy; 0 turns the average off. scale: the nats that count as 1; None: ln V.
    Drafters are seldom above 3 nats, far below ln V, so the number varies more with a scale of 3.0.

    mode: "gamma" fixes the number before drafting. "stop" decides before each draft after gamma_min, and stops where
    1 - sqrt(stop_lambda * entropy), a lower bound on the probability of acceptance, is below stop_threshold (Agrawal
    et al., AdaEDL, arXiv 2410.18351); it takes neither ema_beta nor scale.

    exact: in the engine, run the draft gamma_max times in every step, and leave places empty. Otherwise the number of
    passes follows the running sequences' largest gamma a step or two late, and clips a gamma that rises faster.
    """

    gamma_min: int = 1
    gamma_max: int | None = None
    ema_beta: float = 0.0
    scale: float | None = None
    mode: str = "gamma"
    stop_threshold: float = 0.3
    stop_lambda: float = 0.2
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("gamma_min", "gamma_max"):
            if name == "gamma_min" or self.gamma_max is not None:
                checked_integer(name, getattr(self, name))
        for name in ("ema_beta", "scale", "stop_threshold", "stop_lambda"):
            if name != "scale" or self.scale is not None:
                check_number(name, getattr(self, name))
        check_switches(exact=self.exact)
        check_range("gamma_min", self.gamma_min, 1)
        if self.gamma_max is not None and self.gamma_max < self.gamma_min:
            raise ValueError(f"gamma_max must be at least gamma_min ({self.gamma_min}), got {self.gamma_max}")
        if not 0 <= self.ema_beta < 1:
            raise ValueError(f"ema_beta must be at least 0 and below 1, got {self.ema_beta}")
        if self.scale is not None and not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale must be above 0 and finite, in nats, or None for ln V, got {self.scale}")
        if self.mode not in ("gamma", "stop"):
            raise ValueError(f'mode must be "gamma" or "stop", got {self.mode!r:.60}')
        if self.mode == "stop" and (self.ema_beta or self.scale is not None):
            raise ValueError('mode "stop" uses each entropy by itself and takes neither ema_beta nor scale')
        check_range("stop_threshold", self.stop_threshold, 0, 1)
        if not (self.stop_lambda > 0 and math.isfinite(self.stop_lambda)):
            raise ValueError(f"stop_lambda must be above 0 and finite, got {self.stop_lambda}")
        for name in ("stop_threshold", "stop_lambda"):
            if self.mode == "gamma" and getattr(self, name) != getattr(EGAGConfig, name):
                raise ValueError(f'{name}={getattr(self, name)} needs mode "stop"')

    def within(self, levels: int) -> EGAGConfig:
        """The same for trees of at most `levels` levels, with a gamma_max."""
        most = levels if self.gamma_max is None else min(self.gamma_max, levels)
        return replace(self, gamma_min=min(self.gamma_min, most), gamma_max=most)


def adaptive_gamma(h: float, gamma_min: int, gamma_max: int) -> int:
    """floor((1 - h) gamma_max), kept between gamma_min and gamma_max; h: a normalised entropy."""
    return min(max(math.floor((1 - h) * gamma_max + 1e-9), gamma_min), gamma_max)


H_NORM, H_EMA, GAMMA, H_BEFORE = range(4)


class GuideTensors(NamedTuple):
    """The rule's state of each sequence."""

    values: Tensor
    """[B, 4] float64: the normalised entropy at the root, its moving average, the tree's depth limit, and the average
    before this root, so that a tree can be grown again. The average is NaN before a sequence's first tree."""
    root: Tensor
    """[B] int32: the committed tokens at that time, -1 before the first tree."""

    @staticmethod
    def new(slots: int, device: torch.device) -> GuideTensors:
        """For sequences that have not begun."""
        values = torch.zeros(slots, 4, dtype=torch.float64, device=device)
        guide = GuideTensors(values, torch.zeros(slots, dtype=torch.int32, device=device))
        guide.begin()
        return guide

    def begin(self, entering: Tensor | bool = True) -> None:
        """Forget the past, in place. entering: only of these sequences, [B] bool; True: of all."""
        entering = torch.as_tensor(entering, device=self.root.device)
        self.values.masked_fill_(entering[..., None], float("nan"))
        self.root.masked_fill_(entering, -1)

    @property
    def gamma(self) -> Tensor:
        """[B] float64, a view."""
        return self.values[:, GAMMA]


def nats_of(config: EGAGConfig, vocabulary: int) -> float:
    """The entropy that counts as 1."""
    return (math.log(vocabulary) or 1.0) if config.scale is None else config.scale


def check_row_entropy(logits: Tensor) -> None:
    check_tensors("row_entropy", {"logits": (logits, "R>0 V>0", FLOATS)})


def check_choose_gamma(
    entropy: Tensor, lengths: Tensor, guide: GuideTensors, config: EGAGConfig, vocabulary: int
) -> None:
    check_tensors("choose_gamma", {**_kept(guide, lengths), "entropy": (entropy, "B, contiguous", torch.float32)})
    if config.gamma_max is None or vocabulary < 1:
        raise ValueError(f"choose_gamma: expected a gamma_max and a vocabulary, got {config.gamma_max}, {vocabulary}")


def check_clip_depth(
    tokens: Tensor, scores: Tensor, depths: Tensor, guide: GuideTensors, lengths: Tensor, limits: Tensor
) -> None:
    tensors = {
        **_kept(guide, lengths),
        "limits": (limits, "B, contiguous", torch.int32),
        "depths": (depths, "C, contiguous", torch.int32),
        "tokens": (tokens, "B C, contiguous", torch.int64),
        "scores": (scores, "B C, contiguous", torch.float32),
    }
    check_tensors("clip_depth", tensors)


def _kept(guide: GuideTensors, lengths: Tensor) -> dict[str, tuple[Any, str, torch.dtype]]:
    return {
        "lengths": (lengths, "B, contiguous", torch.int32),
        "guide.values": (guide.values, "B 4, contiguous", torch.float64),
        "guide.root": (guide.root, "B, contiguous", torch.int32),
    }
