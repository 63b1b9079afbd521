"""How deep to draft, by the entropy of what is drafted from (EGAG): its rule, and what the engine keeps of it.

A sure draft (low entropy) may draft deeper than a doubtful one. The entropy is that of the logits from which the first
draft of a step is drawn, so it costs no pass; it is of the raw logits at temperature 1. The depth depends on the text
and the draft alone, never on what the target says in the same step: output keeps the target's distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class EGAGConfig:
    """How the number of drafts follows the entropy. Raises ValueError for values that cannot be.

    gamma_min, gamma_max: its bounds; gamma_max None: as many as are drafted otherwise. ema_beta: the weight of former
    steps in a moving average of the normalised entropy, 0: none. scale: the nats that count as 1; None: ln V. Drafters
    are seldom above 3 nats, far below ln V, so a scale of 3.0 lets the number move more.

    mode: "gamma" fixes the number before drafting. "stop" asks before each draft after gamma_min, and stops where
    1 - sqrt(stop_lambda * entropy), a lower bound on the probability of acceptance, is below stop_threshold (Agrawal
    et al., AdaEDL, arXiv 2410.18351); it takes neither ema_beta nor scale.

    exact: in the engine, run the draft gamma_max times in every step, and leave places empty. Otherwise the passes
    follow the largest gamma of the running sequences a step or two late, and a gamma that rises faster is clipped.
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
            value = getattr(self, name)
            if not (value is None and name == "gamma_max") and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an integer, got {value!r:.60}")
        for name in ("ema_beta", "scale", "stop_threshold", "stop_lambda"):
            value = getattr(self, name)
            if not (value is None and name == "scale") and (isinstance(value, bool) or not isinstance(value, Real)):
                raise TypeError(f"{name} must be a number, got {value!r:.60}")
        if not isinstance(self.exact, bool):
            raise TypeError(f"exact must be True or False, got {self.exact!r:.60}")
        if self.gamma_min < 1:
            raise ValueError(f"gamma_min must be at least 1, got {self.gamma_min}")
        if self.gamma_max is not None and self.gamma_max < self.gamma_min:
            raise ValueError(f"gamma_max must be at least gamma_min ({self.gamma_min}), got {self.gamma_max}")
        if not 0 <= self.ema_beta < 1:
            raise ValueError(f"ema_beta must be at least 0 and below 1, got {self.ema_beta}")
        if self.scale is not None and not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale must be above 0 and finite, in nats, or None for ln V, got {self.scale}")
        if self.mode not in ("gamma", "stop"):
            raise ValueError(f'mode must be "gamma" or "stop", got {self.mode!r:.60}')
        if self.mode == "stop" and (self.ema_beta or self.scale is not None):
            raise ValueError('mode "stop" looks at each entropy by itself: no ema_beta and no scale')
        if not 0 <= self.stop_threshold <= 1:
            raise ValueError(f"stop_threshold must lie in 0..1, got {self.stop_threshold}")
        if not (self.stop_lambda > 0 and math.isfinite(self.stop_lambda)):
            raise ValueError(f"stop_lambda must be above 0 and finite, got {self.stop_lambda}")
        for name in ("stop_threshold", "stop_lambda"):
            if self.mode == "gamma" and getattr(self, name) != getattr(EGAGConfig, name):
                raise ValueError(f'{name}={getattr(self, name)} is read in mode "stop" alone')

    def within(self, levels: int) -> EGAGConfig:
        """The same for trees that are no deeper than so many levels, with a gamma_max."""
        most = levels if self.gamma_max is None else min(self.gamma_max, levels)
        return replace(self, gamma_min=min(self.gamma_min, most), gamma_max=most)


def adaptive_gamma(h: float, gamma_min: int, gamma_max: int) -> int:
    """floor((1 - h) gamma_max), but no less than gamma_min and no more than gamma_max; h: a normalised entropy."""
    return min(max(math.floor((1 - h) * gamma_max + 1e-9), gamma_min), gamma_max)


H_NORM, H_EMA, GAMMA, H_BEFORE = range(4)


class GuideTensors(NamedTuple):
    """What is kept of each sequence."""

    values: Tensor
    """[B, 4] float64: the normalised entropy at the root, its moving average, how deep the tree may be, and the average
    before this root, so that a tree can be grown again. The average is NaN before a sequence's first tree."""
    root: Tensor
    """[B] int32: how many committed tokens there were, -1 before the first tree."""

    @staticmethod
    def new(slots: int, device: torch.device) -> GuideTensors:
        """For sequences that have not begun."""
        values = torch.zeros(slots, 4, dtype=torch.float64, device=device)
        guide = GuideTensors(values, torch.zeros(slots, dtype=torch.int32, device=device))
        guide.begin()
        return guide

    def begin(self, entering: Tensor | bool = True) -> None:
        """Forget what was before, in place; entering: of which sequences, [B] bool, or of all."""
        entering = torch.as_tensor(entering, device=self.root.device)
        self.values.masked_fill_(entering[..., None], float("nan"))
        self.root.masked_fill_(entering, -1)

    @property
    def gamma(self) -> Tensor:
        """[B] float64, a view."""
        return self.values[:, GAMMA]


def row_entropy(logits: Tensor) -> Tensor:
    """-sum p ln p in nats of p = softmax(logits), 0 ln 0 being 0. logits [R, V] any float; returns float32 [R].

    NaN for a row with a NaN or +inf, or of -inf alone.
    """
    check_row_entropy(logits)
    return torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1)


def choose_gamma(entropy: Tensor, lengths: Tensor, guide: GuideTensors, config: EGAGConfig, vocabulary: int) -> None:
    """Let `guide` follow the entropies at the sequences' roots, in place.

    entropy [B] float32 in nats, lengths [B] int32: committed tokens. vocabulary: V, of the logits. The same length as
    before means the same root, whose entropy counts once. A NaN gives gamma_min and is no part of an average.
    Raises ValueError if shapes or dtypes do not fit, or without a gamma_max.
    """
    check_choose_gamma(entropy, lengths, guide, config, vocabulary)
    assert config.gamma_max is not None
    _, former, _, kept = guide.values.unbind(1)
    before = torch.where(guide.root == lengths, kept, former)
    h = (entropy / nats_of(config, vocabulary)).clamp(max=1.0).double()
    averaged = torch.where(before.isnan(), h, config.ema_beta * before + (1 - config.ema_beta) * h)
    ema = torch.where(h.isnan(), before, averaged)
    gamma = ((1 - ema) * config.gamma_max + 1e-9).floor().clamp(config.gamma_min, config.gamma_max)
    gamma = gamma.new_full(gamma.shape, config.gamma_max) if config.mode == "stop" else gamma
    gamma = gamma.masked_fill(h.isnan(), config.gamma_min)
    guide.values.copy_(torch.stack((h, ema, gamma, before), dim=1))
    guide.root.copy_(lengths)


def clip_depth(
    tokens: Tensor,
    scores: Tensor,
    depths: Tensor,
    guide: GuideTensors,
    lengths: Tensor,
    limits: Tensor,
    config: EGAGConfig,
    levels: int | None = None,
) -> None:
    """Take candidates away that lie deeper than gamma, and those of score -inf, in place: token -1, score -inf.

    tokens [B, C] int64, scores [B, C] float32, depths [C] int32, 1 for the root's children. Nor may a draft stand where
    a sequence of at most `limits` [B] int32 tokens has no room for it; lengths [B] int32: committed tokens, without the
    root. levels: how many were scored, where drafting stopped by itself; gamma
    becomes the depth that was reached, gamma_max if that is all of them, or all that there is room for.
    Raises ValueError if shapes or dtypes do not fit.
    """
    check_clip_depth(tokens, scores, depths, guide, lengths, limits)
    gone = scores == float("-inf")
    room = limits - lengths - 1
    if levels is not None and config.gamma_max is not None:
        reached = torch.where(gone, 0, depths).amax(1)
        guide.gamma.copy_(torch.where(reached >= room.clamp(max=levels), config.gamma_max, reached))
    gone |= ~(depths <= torch.minimum(guide.gamma, room.double())[:, None])
    tokens.masked_fill_(gone, -1)
    scores.masked_fill_(gone, float("-inf"))


def nats_of(config: EGAGConfig, vocabulary: int) -> float:
    """The entropy that counts as 1."""
    return (math.log(vocabulary) or 1.0) if config.scale is None else config.scale


def check_row_entropy(logits: Tensor) -> None:
    if logits.ndim != 2 or not logits.numel() or not logits.is_floating_point():
        raise ValueError(f"row_entropy: logits must be floating-point [R, V], got {logits.dtype} {tuple(logits.shape)}")


def check_choose_gamma(
    entropy: Tensor, lengths: Tensor, guide: GuideTensors, config: EGAGConfig, vocabulary: int
) -> None:
    batch = len(lengths)
    _check("choose_gamma", lengths.device, entropy=(entropy, (batch,), torch.float32), **_of(guide, lengths))
    if config.gamma_max is None or vocabulary < 1:
        raise ValueError(f"choose_gamma: a gamma_max and a vocabulary expected, got {config.gamma_max}, {vocabulary}")


def check_clip_depth(
    tokens: Tensor, scores: Tensor, depths: Tensor, guide: GuideTensors, lengths: Tensor, limits: Tensor
) -> None:
    batch, count = len(lengths), len(depths)
    _check(
        "clip_depth",
        lengths.device,
        tokens=(tokens, (batch, count), torch.int64),
        scores=(scores, (batch, count), torch.float32),
        depths=(depths, (count,), torch.int32),
        limits=(limits, (batch,), torch.int32),
        **_of(guide, lengths),
    )


_Wanted = tuple[Tensor, tuple[int, ...], torch.dtype]


def _of(guide: GuideTensors, lengths: Tensor) -> dict[str, _Wanted]:
    batch = len(lengths)
    return {
        "lengths": (lengths, (batch,), torch.int32),
        "guide.values": (guide.values, (batch, 4), torch.float64),
        "guide.root": (guide.root, (batch,), torch.int32),
    }


def _check(function: str, device: torch.device, **wanted: _Wanted) -> None:
    for name, (value, shape, dtype) in wanted.items():
        if tuple(value.shape) != shape or value.dtype != dtype or value.device != device or not value.is_contiguous():
            raise ValueError(
                f"{function}: {name} must be contiguous {dtype} {list(shape)} on {device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
