"""Reads stacked experts with published FP8 weights: values and scales, without a copy.

transformers keeps them in its own module, which also rounds its inputs to eight bits, and multiplies by kernels that it
downloads. Here the inputs are not rounded, as in float8.py.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.float8 import has_nan
from eagle_triton.families.reading.module_reader import FLOAT8
from eagle_triton.families.reading.quantised_modules import tensor_of, unreadable
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.float8_weight import BLOCK

KIND = "FP8Experts"  # transformers' class, known by its name
GATE_UP, DOWN = "gate_up_proj", "down_proj"
SCALE = "_scale_inv"  # suffix of a weight's name
OF_INPUTS = frozenset({f"{name}_activation_scale" for name in (GATE_UP, DOWN)})  # for rounding its inputs


def is_float8_experts(module: nn.Module) -> bool:
    """Whether a module is transformers' class of stacked experts, has its forward, and holds FP8 weights."""
    known = any(
        base.__name__ == KIND and vars(base).get("forward") is type(module).forward for base in type(module).__mro__
    )
    return known and getattr(getattr(module, DOWN, None), "dtype", None) in FLOAT8


class Float8Experts(NamedTuple):
    """The weights of such a module."""

    module: Any
    gate_up: Float8ExpertWeight  # [E, 2I, H]
    down: Float8ExpertWeight  # [E, H, I]

    @torch.no_grad()
    def of_many_rows(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [n, H] by the experts `chosen` [n, k] int64 of each row, times `weights` [n, k]: [n, H].

        Runs transformers' code for plain weights, which are made in x's dtype for the time of the call.
        """
        from transformers.integrations.moe import grouped_mm_experts_forward

        wide = copy.copy(self.module)
        wide._parameters = {GATE_UP: self.gate_up.dequantised(x.dtype), DOWN: self.down.dequantised(x.dtype)}
        return grouped_mm_experts_forward(wide, x, chosen, weights)


def read_float8_experts(module: nn.Module, path: str) -> Float8Experts:
    """The weights of such a module at the dotted path `path`.

    Raises UnsupportedModelError unless they are e4m3 without NaN, with finite scales for blocks of 128.
    """
    blocks: Any = getattr(module, "block_size", None)
    if blocks is None or tuple(blocks) != (BLOCK, BLOCK):
        raise unreadable(f"{path} must have scales for blocks of {BLOCK} by {BLOCK}, got {blocks}")
    found = Float8Experts(module, _weight(module, GATE_UP, path), _weight(module, DOWN, path))
    rows = found.gate_up.shape[1]
    if rows % (2 * BLOCK):
        raise unreadable(
            f"{path}.{GATE_UP} must have a multiple of {2 * BLOCK} rows, so that gate and up share no block, got {rows}"
        )
    return found


def _weight(module: nn.Module, name: str, path: str) -> Float8ExpertWeight:
    values, scales = (tensor_of(module, part, path) for part in (name, name + SCALE))
    for part, tensor in ((name, values), (name + SCALE, scales)):
        if tensor is None:
            raise UnsupportedModelError(f"{path}.{part} is missing", "quantisation")
    assert values is not None and scales is not None
    try:
        found = Float8ExpertWeight(values.detach(), scales.detach())
    except ValueError as error:
        raise unreadable(f"{path}.{name}: {error}") from error
    if not scales.isfinite().all():
        raise UnsupportedModelError(f"{path}.{name}{SCALE} must be finite", "quantisation")
    if has_nan(values):
        raise UnsupportedModelError(f"{path}.{name} must be finite, got NaN", "quantisation")
    return found
