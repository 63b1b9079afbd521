"""Targets with FP8 weights to time, made of others in the fine-grained layout, and without a kernel from the hub."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.module_kinds import PROJECTIONS, is_plain_linear
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight, quantised

KEPT = "lm_head"  # in 16 bits in published models


class FP8Linear(nn.Linear):
    """Has the tensors of transformers' module of this name. Its forward multiplies by the dequantised weights in fp32,
    made anew in each call; the engine is compared with it."""

    weight_scale_inv: nn.Parameter
    block_size = (BLOCK, BLOCK)

    def __init__(self, weight: Float8Weight, bias: Tensor | None) -> None:
        rows, depth = weight.shape
        super().__init__(depth, rows, bias is not None, device="meta")
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(weight.scale, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = Float8Weight(self.weight, self.weight_scale_inv).dequantised()
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x.float(), weight, bias).to(x.dtype)


@torch.no_grad()
def round_target(model: nn.Module) -> None:
    """Put FP8 modules in the places of a model's projections, but for its vocabulary's, one after another."""
    for name, module in list(model.named_modules()):
        last = name.rpartition(".")[2]
        if last in PROJECTIONS and last != KEPT and is_plain_linear(module):
            bias = None if module.bias is None else module.bias.detach()
            model.set_submodule(name, FP8Linear(quantised(module.weight, block=True), bias))
