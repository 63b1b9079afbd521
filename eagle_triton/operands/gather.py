"""Checks of the operands that pick rows."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.shapes import INTEGERS, check_tensors


def check_gather_rows(x: Tensor, index: Tensor, out: Tensor | None) -> None:
    tensors = {"x": (x, "B P>0 H", None), "index": (index, "B n", INTEGERS), "out": (out, "B n H", x.dtype)}
    check_tensors("gather_rows", tensors)


def check_sequence_rows(tokens: Tensor, first: Tensor, count: int, out: Tensor | None) -> None:
    if count < 1:
        raise ValueError(f"sequence_rows: count must be at least 1, got {count}")
    tensors = {
        "tokens": (tokens, "B C", torch.int64),
        "first": (first, "B", torch.int32),
        "out": (out, "B count", torch.int64),
    }
    check_tensors("sequence_rows", tensors, count=count)
