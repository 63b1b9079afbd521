"""Products with the weights of a decode step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.benchmarks.cases.case import Case, CaseMaker, Provider, Sizes, output


def product_cases(maker: CaseMaker, sizes: Sizes, rows: int) -> Iterator[Case]:
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
        yield product_case(maker, rows, name, cols, depth)


def product_case(maker: CaseMaker, rows: int, name: str, cols: tuple[int, ...], depth: int) -> Case:
    """x @ weights, of several weights side by side, SwiGLU for two."""

    def make(generator: torch.Generator) -> tuple:
        joined = maker.normal(generator, sum(cols), depth, std=depth**-0.5)
        return maker.normal(generator, rows, depth), joined, joined.split(cols)

    def cublas(x: Tensor, joined: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return F.linear(x, joined)

    def swiglu(out: Tensor, *_: Any) -> Tensor:
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up

    def product(ops: Any, x: Tensor, joined: Tensor, weights: tuple[Tensor, ...], **keep_splits: Any) -> Any:
        if len(weights) == 2:
            return ops.linear_swiglu(x, *weights)
        if len(weights) == 1:
            return ops.linear(x, weights[0], **keep_splits)
        return ops.linear_stack(x, weights, [None] * len(weights), **keep_splits)

    def total(outs: Any, *_: Any) -> Tensor:
        outs = outs if isinstance(outs, tuple) else (outs,)
        return torch.cat([out if isinstance(out, Tensor) else out.total() for out in outs], dim=-1)

    def in_parts(*inputs: Any) -> Any:
        return product(maker.ops, *inputs, keep_splits=True)

    two = len(cols) == 2
    others: dict[str, Any] = {"cublas": cublas}
    if two:
        others = {"cublas, activation not timed": (cublas, swiglu)}
        others["cublas, silu, mul"] = lambda *inputs: swiglu(cublas(*inputs))
    width = cols[0] if two else sum(cols)
    case = maker.case(
        f"products, {rows} rows", f"{name} {sum(cols)}x{depth}, {rows} rows", make, product,
        (sum(cols) * depth + rows * (depth + width)) * maker.dtype.itemsize,
        others=others, finish=output if two else total, least_speedup=1.0,
    )  # fmt: skip
    out = None if two else in_parts(*make(torch.Generator(maker.device).manual_seed(0)))
    if two or isinstance(out[0] if isinstance(out, tuple) else out, Tensor):
        return case
    parts = Provider(f"{maker.our_name}, keep_splits sum", in_parts, total, ours=True)
    return replace(case, providers=[*case.providers, parts])
