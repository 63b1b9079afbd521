"""Operands of sampling and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.shapes import LOGITS, check_tensors


class SamplingTensors(NamedTuple):
    """Per-sequence sampling parameters, each [B], at fixed addresses so that a graph can replay.

    temperature float32 (0: greedy), top_k int32 (0: off), top_p float64 (1: off), min_p float32 (0: off),
    seed int64, step int64 (decode steps done: the random counter).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    step: Tensor

    @staticmethod
    def zeros(batch: int, device: torch.device) -> SamplingTensors:
        """Parameters of `batch` sequences, all 0."""
        return SamplingTensors(*(torch.zeros(batch, dtype=dtype, device=device) for dtype in _DTYPES))


_DTYPES = (torch.float32, torch.int32, torch.float64, torch.float32, torch.int64, torch.int64)


def check_logits(name: str, logits: Tensor) -> dict[str, Any]:
    return check_tensors(name, {"logits": (logits, "B>0 N>0 V>0", LOGITS)})


def check_params(name: str, params: SamplingTensors, batch: int, device: torch.device) -> None:
    tensors = {
        field: (value, (batch,) if value.is_contiguous() else "B, contiguous", dtype)
        for field, value, dtype in zip(params._fields, params, _DTYPES, strict=True)
    }
    check_tensors(name, tensors, device=device, B=batch)


def check_uniform_at(params: SamplingTensors, positions: Tensor, vocabulary: int) -> None:
    batch, device = len(params.seed), params.seed.device
    check_params("uniform_at", params, batch, device)
    check_tensors("uniform_at", {"positions": (positions, "B n", torch.int32)}, device=device, B=batch)
    if vocabulary < 1:
        raise ValueError(f"uniform_at: vocabulary must be at least 1, got {vocabulary}")


def check_sample(probs: Tensor, coin: Tensor) -> None:
    check_tensors("sample", {"probs": (probs, "B>0 V>0", torch.float32), "coin": (coin, "B", torch.float32)})
