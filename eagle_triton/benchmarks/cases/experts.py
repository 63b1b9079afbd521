"""The operations of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.benchmarks.cases.case import Case, Provider, Random, ours, reference_case
from eagle_triton.engine.operations import Operations
from eagle_triton.operands.experts import Routes, Routing
from eagle_triton.reference import experts
from eagle_triton.runtime.split_sums import SplitSums, total_of


class MixtureSizes(NamedTuple):
    """Sizes of a layer's mixture: each row takes `chosen` of `experts`."""

    experts: int
    chosen: int
    hidden: int
    inner: int


def expert_cases(ops: Operations, sizes: MixtureSizes, random: Random, rows: int) -> Iterator[Case]:
    """The router, the chosen experts' products, and a shared expert, over rows that choose at random."""
    count, chosen, hidden, inner = sizes
    routing, element = Routing(chosen), random.dtype.itemsize

    def router(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return random.normal(generator, rows, hidden), random.normal(generator, count, hidden, std=hidden**-0.5)

    def sorted_weights(routes: Routes, *_: Tensor) -> Tensor:
        return routes.weights.float().sort(1).values  # two experts may have one score in 16 bits

    yield reference_case(
        ops,
        "experts",
        f"route, {chosen} of {count}, {rows} rows",
        router,
        lambda x, weight: experts.route(x, weight, None, None, routing),
        lambda x, weight: ops.route(x, weight, None, None, routing),
        (rows + count) * hidden * element,
        finish=sorted_weights,
    )

    def weights(generator: torch.Generator) -> tuple:
        x, weight = router(generator)
        gate_up = random.normal(generator, count, 2 * inner, hidden, std=hidden**-0.5)
        down = random.normal(generator, count, hidden, inner, std=inner**-0.5)
        return x, gate_up, down, experts.route(x, weight, None, None, routing)

    def reference(x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> Tensor:
        return experts.experts_down(experts.experts_swiglu(x, gate_up, None, routes), down, None, routes).total()

    def kernels(x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> SplitSums:
        return ops.experts_down(ops.experts_swiglu(x, gate_up, None, routes), down, None, routes)

    hit = count * (1 - (1 - chosen / count) ** rows)
    yield Case(
        "experts",
        f"products of {chosen} of {count} experts, {rows} rows",
        weights,
        reference,
        [Provider("sort, grouped_mm", _grouped), ours(ops, kernels, lambda out, *_: total_of(out))],
        round(hit * 3 * hidden * inner * element),
    )

    def shared(generator: torch.Generator) -> tuple[Tensor, ...]:
        routed, own, x = (random.normal(generator, rows, hidden) for _ in range(3))
        return routed, own, x, random.normal(generator, 1, hidden, std=hidden**-0.5)

    yield Case(
        "experts",
        f"add_shared_expert [{rows}, {hidden}]",
        shared,
        experts.add_shared_expert,
        [
            Provider("linear, sigmoid, mul, add", experts.add_shared_expert),
            ours(ops, ops.add_shared_expert),
        ],
        4 * rows * hidden * element,
    )


def _grouped(x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> Tensor:
    """Pairs of a row and an expert sorted by expert, and torch's grouped products over them."""
    rows, chosen = routes.experts.shape
    of_pair, pairs = routes.experts.flatten().long().sort()
    counts = torch.zeros(len(gate_up), dtype=torch.int32, device=x.device)
    ends = counts.scatter_add(0, of_pair, torch.ones_like(pairs, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[pairs // chosen], gate_up.mT, offs=ends).chunk(2, dim=1)
    out = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends) * routes.weights.flatten()[pairs, None]
    return torch.empty_like(out).index_copy(0, pairs, out).view(rows, chosen, -1).sum(1)
