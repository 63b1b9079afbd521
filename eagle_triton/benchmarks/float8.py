"""Targets with FP8 weights to time, made of others in the fine-grained layout, and without a kernel from the hub."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from eagle_triton.engine.drafts.float8 import float8_draft
from eagle_triton.engine.model.module_kinds import PROJECTIONS, is_plain_linear
from eagle_triton.families import own_ea_model as native
from eagle_triton.families.reading.float8 import Float8Reading, with_float8
from eagle_triton.models.ea_model import EaModel
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight, quantised

KEPT = "lm_head"  # in 16 bits in published models


class FP8Linear(nn.Linear):
    """Tensors as transformers' module of this name has them. Its forward is what the engine is compared with: the
    product with the weights themselves in fp32, made again in each call."""

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


def read(model: EaModel, args: argparse.Namespace, notes: list[str]) -> Float8Reading:
    """The target and the head as the engine reads them, the head in FP8 where --draft-weights says so."""
    found = with_float8(*native.read(model), {"model": model})
    if found.note is not None:
        notes.append(f"activations: {found.note}")
    if args.draft_weights is None:
        return found
    draft, note = float8_draft(found.draft)
    notes.append(f"draft: {note}")
    return found._replace(draft=draft)
