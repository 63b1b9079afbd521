"""Mixtures of experts over few rows: the router, the chosen experts' products, and a shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.operands import experts as operands
from eagle_triton.operands.experts import ExpertWeight, Routes, Routing
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.split_sums import Product, SplitSums, total_of


def route(x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing) -> Routes:
    """The experts that each row chooses, and their weights.

    x [..., H] of n <= 64 rows, weight [E, H], bias [E], correction [E], added to scores only for the choice. The weight
    may be fp32 if logits are not rounded. Equal scores are ordered by index. Raises ValueError if shapes, dtypes or
    sizes do not fit.
    """
    operands.check_route(x, weight, bias, correction, routing)
    x = x.reshape(-1, x.shape[-1])
    if routing.rounded_logits and routing.score != "sigmoid":
        logits = F.linear(x, weight, bias).float()
    else:
        logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        logits = logits.to(x.dtype).float() if routing.rounded_logits else logits
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits
    scores = scores.to(x.dtype).float() if routing.rounded_scores else scores
    order = scores
    if correction is not None:
        order = (logits.softmax(1) if routing.score == "softmax" else scores) + correction
    if routing.chosen_groups < routing.groups:
        order = _in_best_groups(order, routing)
    experts = _best(order, routing.chosen)
    weights = scores.gather(1, experts)
    if routing.score == "softmax":
        weights = logits.softmax(1).gather(1, experts)
        if routing.renormalised:
            weights = weights / weights.sum(1, keepdim=True)
    elif routing.score == "softmax_of_chosen":
        weights = weights.softmax(1)
    elif routing.renormalised:
        weights = weights / (weights.sum(1, keepdim=True) + routing.eps)
    weights = weights * routing.scale
    hit, rows = _by_experts(experts, len(weight))
    return Routes(experts.int(), weights if routing.weights_in_fp32 else weights.to(x.dtype), hit, rows)


def _best(order: Tensor, count: int) -> Tensor:
    """The indices of the largest values of each row, equal ones by index."""
    return order.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(order: Tensor, routing: Routing) -> Tensor:
    grouped = order.unflatten(1, (routing.groups, -1))
    best = _best(grouped.topk(2, dim=-1).values.sum(-1), routing.chosen_groups)
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _by_experts(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """hit and rows of Routes, without waiting for the device."""
    chosen = torch.zeros(len(experts), count, dtype=torch.int64, device=experts.device).scatter(1, experts, 1)
    bits = torch.arange(len(experts), device=experts.device)
    rows = (chosen << bits[:, None]).sum(0)
    hit = (rows == 0).int().sort(stable=True).indices[: min(count, experts.numel())]
    rows = rows[hit]
    return hit.masked_fill(rows == 0, 0).int(), rows


def experts_swiglu(
    x: Tensor,
    gate_up: ExpertWeight,
    bias: Tensor | None,
    routes: Routes,
    *,
    interleaved: bool = False,
    clamp: tuple[float, float] | None = None,
    gated: bool = True,
) -> Tensor:
    """silu(gate(x)) * up(x) by each expert of each row. x [..., H] of n rows, gate_up [E, 2I, H], a tensor or in
    MXFP4, four bits or FP8, bias [E, 2I]; returns [n, k, I]. Without `gated`, relu(up(x))^2 with gate_up [E, I, H].

    The first half of an expert's rows is its gate, or with `interleaved` every other row from the first. clamp
    (limit, alpha): gate and up are bounded by the limit (the gate only from above), and the result is
    (up + 1) * gate * sigmoid(alpha * gate), as in gpt-oss. Every operation rounds to x's dtype.
    """
    operands.check_experts_swiglu(x, gate_up, bias, routes, gated)
    x = x.reshape(-1, x.shape[-1])
    out = x.new_zeros(*routes.experts.shape, gate_up.shape[1] // (2 if gated else 1))
    for slot in range(len(routes.hit)):
        both = _product(x, gate_up, bias, routes, slot)
        if gated:
            gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
            inner = _gated(gate, up, clamp)
        else:
            inner = F.relu(both).square()
        out = torch.where(_taken(routes, slot), inner[:, None], out)
    return out


def experts_down(inner: Tensor, down: ExpertWeight, bias: Tensor | None, routes: Routes) -> SplitSums:
    """The sum of down(inner) of each row's experts, times their weights: [n, H] as k parts.

    inner [n, k, I], down [E, H, I], a tensor or in MXFP4, four bits or FP8, bias [E, H]. A part is rounded to inner's
    dtype before it is multiplied by its weight, and again after that unless weights are in fp32.
    """
    operands.check_experts_down(inner, down, bias, routes)
    parts = inner.new_zeros(*inner.shape[:2], down.shape[1])
    for slot in range(len(routes.hit)):
        parts = torch.where(_taken(routes, slot), _product(inner, down, bias, routes, slot), parts)
    return SplitSums((parts * routes.weights[..., None]).float().transpose(0, 1), inner.dtype)


def _product(x: Tensor, weight: ExpertWeight, bias: Tensor | None, routes: Routes, slot: int) -> Tensor:
    """Rows of x by the expert of a slot; the bias is added to a rounded product."""
    expert = routes.hit[slot : slot + 1].long()
    if isinstance(weight, Float8ExpertWeight):
        out = F.linear(x.float(), weight.dequantised(torch.float32, expert)[0]).to(x.dtype)
    else:
        chosen = weight.index_select(0, expert) if isinstance(weight, Tensor) else weight.dequantised(x.dtype, expert)
        out = F.linear(x, chosen[0])
    return out if bias is None else out + bias.index_select(0, expert)


def _taken(routes: Routes, slot: int) -> Tensor:
    """[n, k, 1]: whether each choice is the slot's expert."""
    return (routes.experts == routes.hit[slot])[..., None]


def _gated(gate: Tensor, up: Tensor, clamp: tuple[float, float] | None) -> Tensor:
    if clamp is None:
        return F.silu(gate) * up
    limit, alpha = clamp
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def add_shared_expert(routed: Product, shared: Product, x: Tensor, gate: Tensor) -> Tensor:
    """routed + sigmoid(x @ gate.T) * shared, [..., H] each, gate [1, H]; each operation rounds to x's dtype."""
    operands.check_add_shared_expert(routed, shared, x, gate)
    return total_of(routed) + torch.sigmoid(F.linear(x, gate)) * total_of(shared)
