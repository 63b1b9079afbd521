"""Operands of mixtures of experts: the rule of routing, and the checks of arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.shapes import FLOATS, check_tensors
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.mxfp4_weight import Mxfp4Weight
from eagle_triton.runtime.split_sums import Product

MAX_ROWS = 64
"""Rows of one call: an expert's rows are the bits of a word."""

ExpertWeight = Tensor | Mxfp4Weight | FourBitExpertWeight | Float8ExpertWeight  # [E, N, K]

SCORES = ("softmax", "softmax_of_chosen", "sigmoid")
"""Scores from a router's logits, in fp32. softmax: over all experts. softmax_of_chosen: over the chosen ones. sigmoid:
of each logit. To softmax and sigmoid a correction may be added only for the choice (ERNIE 4.5, DeepSeek-V3)."""


@dataclass(frozen=True)
class Routing:
    """How a router's scores become experts and weights.

    chosen: experts per row. renormalised: the chosen experts' scores are divided by their sum. weights_in_fp32: weights
    are not rounded to the rows' dtype. scale: a factor of the weights. rounded_logits: logits are rounded to the rows'
    dtype, as a product of rows and weights in this dtype is; otherwise they are fp32. The others are for "sigmoid":
    groups, chosen_groups: the experts form `groups` equal groups, and a row chooses among those with the largest sums
    of their two best scores. rounded_scores: sigmoids are rounded, too. eps: is added to the sum of renormalised
    scores.
    """

    chosen: int
    score: str = "softmax"
    renormalised: bool = True
    weights_in_fp32: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    rounded_logits: bool = True
    rounded_scores: bool = False
    eps: float = 1e-20

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {SCORES}, got {self.score!r}")
        if self.chosen < 1 or not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(
                "chosen must be positive, and chosen_groups between 1 and groups, got chosen "
                f"{self.chosen}, chosen_groups {self.chosen_groups} and groups {self.groups}"
            )
        if self.score == "softmax_of_chosen" and not self.renormalised:
            raise ValueError('score "softmax_of_chosen" sums to 1: renormalised must be True')
        of_sigmoid = self.groups, self.rounded_scores, self.eps
        if self.score != "sigmoid" and of_sigmoid != (1, False, Routing.eps):
            raise ValueError(f'groups, rounded_scores and eps need score "sigmoid", got {self.score!r}')
        if self.rounded_scores and not self.rounded_logits:
            raise ValueError("rounded_scores need rounded_logits")


class Routes(NamedTuple):
    """The experts of n rows, k of E for each, and the same by experts.

    experts [n, k] int32: by falling score, equal scores by index. weights [n, k]: in the rows' dtype or fp32. hit [S]
    int32, S = min(E, n * k): the experts that some row has chosen, by index. rows [S] int64: bit r is set if row r has
    chosen the expert. Unused slots of hit and rows hold 0.
    """

    experts: Tensor
    weights: Tensor
    hit: Tensor
    rows: Tensor


def check_route(x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing) -> None:
    name = "route"
    sizes = check_tensors(
        name,
        {
            "x": (x, "... H", FLOATS),
            "weight": (weight, "E H", x.dtype if routing.rounded_logits else (x.dtype, torch.float32)),
            "bias": (bias, "E", weight.dtype),
            "correction": (correction, "E", FLOATS),
        },
    )
    _check_rows(name, x.shape[:-1].numel())
    experts = sizes["E"]
    if correction is not None and routing.score == "softmax_of_chosen":
        raise ValueError(f'{name}: correction needs routing.score "sigmoid" or "softmax", got {routing.score!r}')
    if routing.chosen > experts:
        raise ValueError(f"{name}: routing.chosen must be at most the {experts} experts, got {routing.chosen}")
    if experts % routing.groups or (routing.groups > 1 and experts < 2 * routing.groups):
        raise ValueError(
            f"{name}: routing.groups must divide the {experts} experts into groups of two or more, got {routing.groups}"
        )


def check_experts_swiglu(
    x: Tensor, gate_up: ExpertWeight, bias: Tensor | None, routes: Routes, gated: bool = True
) -> None:
    name = "experts_swiglu"
    check_tensors(
        name,
        {
            "x": (x, "... H", FLOATS),
            "gate_up": (gate_up, "E J H", _dtype_of(gate_up, x)),
            "gate_up.scales": (_scales_of(gate_up), "E J G", x.dtype),
            "bias": (bias, "E J", x.dtype),
            **_parts(routes),
        },
        n=x.shape[:-1].numel(),
    )
    _check_rows(name, x.shape[:-1].numel())
    if gated and gate_up.shape[1] % 2:
        raise ValueError(f"{name}: gate_up must have an even number of rows, got {gate_up.shape[1]}")


def check_experts_down(inner: Tensor, down: ExpertWeight, bias: Tensor | None, routes: Routes) -> None:
    name = "experts_down"
    check_tensors(
        name,
        {
            "inner": (inner, "n k I, contiguous", FLOATS),
            "down": (down, "E H I", _dtype_of(down, inner)),
            "down.scales": (_scales_of(down), "E H G", inner.dtype),
            "bias": (bias, "E H", inner.dtype),
            **_parts(routes),
            "routes.weights": (routes.weights, "n k, contiguous", (inner.dtype, torch.float32)),
        },
    )
    _check_rows(name, inner.shape[0])


def check_add_shared_expert(routed: Product, shared: Product, x: Tensor, gate: Tensor) -> None:
    check_tensors(
        "add_shared_expert",
        {
            "x": (x, "... H", FLOATS),
            "routed": (routed, x.shape, x.dtype),
            "shared": (shared, x.shape, x.dtype),
            "gate": (gate, "1 H, contiguous", x.dtype),
        },
    )


def _dtype_of(weight: ExpertWeight, x: Tensor) -> torch.dtype | None:
    """The dtype that a weight must have; weights in four and eight bits fit any."""
    return x.dtype if isinstance(weight, Tensor) else None


def _scales_of(weight: ExpertWeight) -> Tensor | None:
    """The scales that must be in x's dtype, so that a weight is rounded once."""
    return weight.scales if isinstance(weight, FourBitExpertWeight) else None


def _parts(routes: Routes) -> dict[str, tuple[object, object, object]]:
    return {
        "routes.experts": (routes.experts, "n k, contiguous", torch.int32),
        "routes.hit": (routes.hit, "S, contiguous", torch.int32),
        "routes.rows": (routes.rows, "S, contiguous", torch.int64),
    }


def _check_rows(name: str, rows: int) -> None:
    if rows > MAX_ROWS:
        raise ValueError(f"{name}: at most {MAX_ROWS} rows, got {rows}")
