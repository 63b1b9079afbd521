"""What tools/tune_linear.py --rotary runs: q, k and v, rotated and appended, by one launch and by two."""

from __future__ import annotations

import argparse
import csv
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle_triton.layers import rotary_append
from eagle_triton.linear import linear_rotary_append, linear_stack
from eagle_triton.models.shapes import SHAPES
from tools.tuning.graph_time import time_graph
from tools.tuning.products import make_weights, pause, products_of

LENGTH = 512  # committed tokens
_PAGE = 64


class Tree:
    """One of `rows` nodes behind LENGTH tokens, at a layer of a model."""

    def __init__(self, shape: str, rows: int, device: str, dtype: torch.dtype = torch.bfloat16):
        sizes = SHAPES[shape]
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.dim, pages = sizes.get("head_dim", sizes["hidden_size"] // heads), (LENGTH + rows) // _PAGE + 1
        self.x = torch.randn(1, rows, sizes["hidden_size"], device=device).to(dtype)
        self.cache = torch.zeros(2, pages + 1, kv_heads, _PAGE, self.dim, device=device, dtype=dtype)
        self.first_row = torch.tensor([LENGTH], dtype=torch.int32, device=device)
        self.depths = torch.arange(rows, dtype=torch.int32, device=device)[None] // 8
        self.inv_freq = 500_000.0 ** -(torch.arange(0, self.dim, 2, device=device) / self.dim)
        self.table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]

    def by_two(self, weights: list[Tensor]) -> Tensor:
        """As the launches are chosen today."""
        products = linear_stack(self.x, weights, [None] * 3, keep_splits=True)
        q, k, v = (product.unflatten(-1, (-1, self.dim)) for product in products)
        return rotary_append(q, k, v, self.cache, self.first_row, self.depths, self.inv_freq, table=self.table)

    def by_one(self, weights: list[Tensor], settings: Any) -> Tensor:
        rest = self.cache, self.first_row, self.depths, self.inv_freq
        return linear_rotary_append(self.x, weights, [None] * 3, *rest, table=self.table, settings=settings)


def sweep(args: argparse.Namespace) -> None:
    """Check and time what the options ask for, behind a small kernel, and print it."""
    weights: list[Any] = make_weights(products_of(args.shape)["qkv"], "cuda")
    records = [("rows", "settings", "us")]
    for rows in args.rows:
        two, *ones = times(args.shape, rows, weights)
        for us, error, name in [two, *sorted(ones, key=lambda row: row[0])[: args.top]]:
            print(f"{rows} rows: {us:7.2f} us  {name}  {error:.1e}", flush=True)
        records += [(str(rows), name, f"{us:.2f}") for us, _, name in (two, *ones)]
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows(records)


def times(shape: str, rows: int, weights: list[Any]) -> list[tuple[float, float, str]]:
    """Microseconds, relative error and name: of two launches, then of one by each setting that runs."""
    from eagle_triton.linear.streamed_rotary import candidates

    tree, exact = (Tree(shape, rows, "cuda", dtype) for dtype in (torch.bfloat16, torch.float32))
    exact.x.copy_(tree.x)
    expected = exact.by_two([weight.float() for weight in weights[0]])

    def measured(run: Callable[[list[Tensor]], Tensor]) -> tuple[float, float]:
        tree.cache.zero_()
        pairs = (run(weights[0]), expected), (tree.cache, exact.cache)
        error = max(((found.float() - one).norm() / one.norm()).item() for found, one in pairs)
        if not error < 5e-3:
            raise ArithmeticError(f"relative error {error}")
        return time_graph([lambda some=some: (pause(), run(some)) for some in weights]), error

    found = [(*measured(tree.by_two), "two launches")]
    for settings in candidates(rows):
        try:
            found.append((*measured(functools.partial(tree.by_one, settings=settings)), str(tuple(settings))))
        except Exception as error:
            print(f"  {settings} failed: {type(error).__name__}: {str(error)[:100]}", flush=True)
    return found
