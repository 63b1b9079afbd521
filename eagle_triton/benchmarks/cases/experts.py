"""The operations of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.benchmarks.cases.case import Case, CaseMaker
from eagle_triton.operands.experts import Routes, Routing
from eagle_triton.reference import experts
from eagle_triton.runtime.split_sums import total_of


class MixtureSizes(NamedTuple):
    """Sizes of a layer's mixture: each row takes `chosen` of `experts`."""

    experts: int
    chosen: int
    hidden: int
    inner: int


def expert_cases(maker: CaseMaker, sizes: MixtureSizes, rows: int) -> Iterator[Case]:
    """The router, the chosen experts' products, and a shared expert, over rows that choose at random."""
    count, chosen, hidden, inner = sizes
    routing, element = Routing(chosen), maker.dtype.itemsize

    def router(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return maker.normal(generator, rows, hidden), maker.normal(generator, count, hidden, std=hidden**-0.5)

    yield maker.case(
        "experts",
        f"route, {chosen} of {count}, {rows} rows",
        router,
        lambda ops, x, weight: ops.route(x, weight, None, None, routing),
        (rows + count) * hidden * element,
        finish=lambda routes, *_: routes.weights.float().sort(1).values,  # two experts may have equal scores in 16 bits
    )

    def weights(generator: torch.Generator) -> tuple:
        x, weight = router(generator)
        gate_up = maker.normal(generator, count, 2 * inner, hidden, std=hidden**-0.5)
        down = maker.normal(generator, count, hidden, inner, std=inner**-0.5)
        return x, gate_up, down, experts.route(x, weight, None, None, routing)

    def products(ops: Any, x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> Any:
        return ops.experts_down(ops.experts_swiglu(x, gate_up, None, routes), down, None, routes)

    yield maker.case(
        "experts",
        f"products of {chosen} of {count} experts, {rows} rows",
        weights,
        products,
        round(count * (1 - (1 - chosen / count) ** rows) * 3 * hidden * inner * element),
        others={"sort, grouped_mm": _grouped},
        finish=lambda out, *_: total_of(out),
    )

    def shared(generator: torch.Generator) -> tuple[Tensor, ...]:
        inputs = (maker.normal(generator, rows, hidden) for _ in range(3))
        return *inputs, maker.normal(generator, 1, hidden, std=hidden**-0.5)

    name, moved = f"add_shared_expert [{rows}, {hidden}]", 4 * rows * hidden * element
    others = {"linear, sigmoid, mul, add": experts.add_shared_expert}
    yield maker.case("experts", name, shared, lambda ops, *inputs: ops.add_shared_expert(*inputs), moved, others=others)


def _grouped(x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> Tensor:
    """torch's grouped products over pairs of a row and an expert, sorted by expert."""
    rows, chosen = routes.experts.shape
    of_pair, pairs = routes.experts.flatten().long().sort()
    counts = torch.zeros(len(gate_up), dtype=torch.int32, device=x.device)
    ends = counts.scatter_add(0, of_pair, torch.ones_like(pairs, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[pairs // chosen], gate_up.mT, offs=ends).chunk(2, dim=1)
    out = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends) * routes.weights.flatten()[pairs, None]
    return torch.empty_like(out).index_copy(0, pairs, out).view(rows, chosen, -1).sum(1)
