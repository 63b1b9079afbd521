"""Shared by launchers of several products side by side: their output, and the weights and biases of one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from eagle_triton.runtime.row_formats import ProductRows
from eagle_triton.runtime.split_sums import SplitSums

Kind = TypeVar("Kind")


def empty_output(x: ProductRows, cols: Sequence[int], splits: int, apart: bool | None = None) -> Tensor:
    """Memory for the products of x [..., K] with these columns: [rows, sum of cols] as x, or fp32 [splits, rows, sum of
    cols] if split sums stay apart. apart: by default, if there are several splits."""
    rows, width = x.shape[:-1].numel(), sum(cols)
    if splits > 1 if apart is None else apart:
        return torch.empty(splits, rows, width, dtype=torch.float32, device=x.device)
    return torch.empty(rows, width, dtype=x.dtype, device=x.device)


def as_kernels_take(
    weights: Sequence[Kind], cols: Sequence[int], biases: Sequence[Tensor | None]
) -> tuple[list[Kind], list[int], list[Tensor | None]]:
    """Weights, columns and biases of one launch, as kernels take them: one, three or four; biases for all or none."""
    weights, cols, biases = list(weights), list(cols), list(biases)
    if len(weights) == 2:
        weights, cols, biases = [*weights, weights[1]], [*cols, 0], [*biases, biases[1]]
    some = next((bias for bias in biases if bias is not None), None)
    if some is not None:
        biases = [
            some.new_zeros(n) if bias is None else bias.contiguous() for n, bias in zip(cols, biases, strict=True)
        ]
    return weights, cols, biases


def parts_of(out: Tensor, cols: Sequence[int], lead: torch.Size, dtype: torch.dtype) -> list[Tensor | SplitSums]:
    """Views of the output of several products: each one's [*lead, n], or its split sums."""
    parts = zip(out.split(list(cols), dim=-1), cols, strict=True)
    if out.dim() == 3:
        return [SplitSums(sums.view(len(sums), *lead, n), dtype) for sums, n in parts]
    return [part.view(*lead, n) for part, n in parts]
