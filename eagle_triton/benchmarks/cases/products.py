"""Products with the weights of a decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.benchmarks.cases.case import Case, Provider, Random, Sizes, ours, provider_name
from eagle_triton.engine.operations import Operations


def product_cases(ops: Operations, sizes: Sizes, random: Random, rows: int) -> Iterator[Case]:
    """The seven products of a decode step; torch gets weights that stand together concatenated."""
    hidden, qkv = sizes.hidden, sizes.qkv
    shapes = {
        "qkv": (qkv, hidden),
        "o": ((hidden,), qkv[0]),
        "gate, up": ((sizes.inner, sizes.inner), hidden),
        "down": ((hidden,), sizes.inner),
        "head": ((sizes.vocab,), hidden),
        "draft qkv": (qkv, 2 * hidden),
        "draft head": ((sizes.draft_vocab,), hidden),
    }
    for name, (cols, depth) in shapes.items():
        yield product_case(ops, random, rows, name, cols, depth)


def product_case(ops: Operations, random: Random, rows: int, name: str, cols: tuple[int, ...], depth: int) -> Case:
    """x @ weights, of several weights side by side, SwiGLU for two."""

    def make(generator: torch.Generator) -> tuple:
        joined = random.normal(generator, sum(cols), depth, std=depth**-0.5)
        return random.normal(generator, rows, depth), joined, joined.split(cols)

    def cublas(x: Tensor, joined: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return F.linear(x, joined)

    def swiglu(out: Tensor, *_: Any) -> Tensor:
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up

    def product(x: Tensor, joined: Tensor, weights: tuple[Tensor, ...], **keep_splits: Any) -> Any:
        if len(weights) == 1:
            return ops.linear(x, weights[0], **keep_splits)
        return ops.linear_stack(x, weights, [None] * len(weights), **keep_splits)

    def total(outs: Any, *_: Any) -> Tensor:
        outs = outs if isinstance(outs, tuple) else (outs,)
        return torch.cat([out if isinstance(out, Tensor) else out.total() for out in outs], dim=-1)

    if len(cols) == 2:
        providers = [
            Provider("cublas, activation not timed", cublas, swiglu),
            Provider("cublas, silu, mul", lambda *inputs: swiglu(cublas(*inputs))),
            ours(ops, lambda x, joined, weights: ops.linear_swiglu(x, *weights)),
        ]
    else:
        providers = [Provider("cublas", cublas), ours(ops, product, total)]
        if _splits(product, make, random):
            providers.append(
                Provider(f"{provider_name(ops)}, keep_splits sum", partial(product, keep_splits=True), total, True)
            )
    finish = swiglu if len(cols) == 2 else lambda out: out
    width = cols[0] if len(cols) == 2 else sum(cols)
    return Case(
        f"products, {rows} rows",
        f"{name} {sum(cols)}x{depth}, {rows} rows",
        make,
        lambda *inputs: finish(cublas(*inputs)),
        providers,
        (sum(cols) * depth + rows * (depth + width)) * random.dtype.itemsize,
        least_speedup=1.0,
    )


def _splits(product: Callable[..., Any], make: Callable[..., tuple], random: Random) -> bool:
    """Whether this product comes in parts when it may."""
    out = product(*make(torch.Generator(random.device).manual_seed(0)), keep_splits=True)
    return not isinstance(out[0] if isinstance(out, tuple) else out, Tensor)
