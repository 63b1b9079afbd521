"""Makes targets with quantised weights to time, in the layouts of packages that need not be installed."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.engine.drafts.quantised import GROUPS, in_four_bits
from eagle_triton.engine.model.module_kinds import PROJECTIONS, is_plain_linear
from eagle_triton.families.reading.float8_experts import SCALE, Float8Experts
from eagle_triton.models.four_bit_experts import FourBitExperts, is_stacked
from eagle_triton.models.mxfp4 import NAMES, Mxfp4Experts
from eagle_triton.runtime import float8_expert_weight, four_bit_weight
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight, quantised
from eagle_triton.runtime.four_bit_weight import FourBitWeight, NestedScale, Packing, packed

KEPT = "lm_head"  # in 16 bits in published models
COMPRESSED_FORWARD = "compressed_tensors.quantization.lifecycle.forward"
BLOCKSIZE = 64  # of bitsandbytes, whose scales are in blocks of 256


class FP8Linear(nn.Linear):
    """With the tensors of transformers' module of this name. Its forward multiplies by the dequantised weights in fp32,
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


class FP8Experts(nn.Module):
    """With the tensors of transformers' module of this name. Its forward multiplies by the dequantised weights, rounded
    to x's dtype and made anew in each call."""

    block_size = (BLOCK, BLOCK)
    is_transposed, is_concatenated, has_gate, has_bias = False, True, True, False
    has_post_expert_norm, _is_expert_parallel = False, False

    def __init__(self, experts: Any) -> None:
        """experts: transformers' stacked experts without biases."""
        super().__init__()
        self.config, self.act_fn, self.num_experts = experts.config, experts.act_fn, experts.num_experts
        for name in NAMES:
            weight = float8_expert_weight.quantised(getattr(experts, name).detach())
            setattr(self, name, nn.Parameter(weight.values, requires_grad=False))
            setattr(self, name + SCALE, nn.Parameter(weight.scales, requires_grad=False))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = (Float8ExpertWeight(getattr(self, name), getattr(self, name + SCALE)) for name in NAMES)
        return Float8Experts(self, gate_up, down).of_many_rows(x, chosen, weights)


class Linear4bit(nn.Linear):
    """With the tensors of bitsandbytes' module of this name, and nested scales. Its forward multiplies by the
    dequantised weights, made anew in each call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rows, depth = weight.shape
        super().__init__(depth, rows, bias is not None, device="meta")
        four = in_nf4(weight)
        parameter: Any = nn.Parameter(four.packed.view(torch.uint8).view(-1, 1), requires_grad=False)
        assert four.nested is not None
        parameter.quant_state = SimpleNamespace(
            quant_type="nf4",
            shape=torch.Size((rows, depth)),
            blocksize=four.group,
            code=four.table,
            absmax=four.scale.view(-1),
            offset=four.nested.offset,
            state2=SimpleNamespace(code=four.nested.code, absmax=four.nested.scale, blocksize=four.nested.block),
        )
        self.weight = parameter
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        stored: Any = self.weight
        state = stored.quant_state
        nested = NestedScale(state.state2.code, state.state2.absmax, state.offset, state.state2.blocksize)
        words = stored.view(-1).view(torch.int32).view(self.out_features, -1)
        scale = state.absmax.view(self.out_features, -1)
        weight = FourBitWeight(words, Packing.ROWS_HIGH_FIRST, scale, state.blocksize, table=state.code, nested=nested)
        return nn.functional.linear(x, weight.dequantised(x.dtype), self.bias)


# By this the engine recognises the package's modules.
Linear4bit.__module__ = Linear4bit.forward.__module__ = "bitsandbytes.nn.modules"


def compressed(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A linear layer in the state of compressed-tensors before the model's first forward: symmetric, in groups of 128.
    Its forward keeps that state, and multiplies by the dequantised weights, made anew in each call."""
    rows, depth = weight.shape
    four, module = in_four_bits(weight), nn.Linear(depth, rows, bias is not None, device="meta")
    stand_in: Any = module
    del stand_in.weight
    stand_in.weight_packed = nn.Parameter(four.packed, requires_grad=False)
    stand_in.weight_scale = nn.Parameter(four.scale, requires_grad=False)
    stand_in.weight_shape = nn.Parameter(torch.tensor([rows, depth], device=weight.device), requires_grad=False)
    if bias is not None:
        stand_in.bias = nn.Parameter(bias, requires_grad=False)
    scheme = SimpleNamespace(num_bits=4, type="int", symmetric=True, group_size=four.group)
    stand_in.quantization_scheme, stand_in.quantization_status = SimpleNamespace(weights=scheme), "compressed"
    home = {**globals(), "__name__": COMPRESSED_FORWARD}  # by which the engine recognises it
    stand_in.forward = MethodType(FunctionType(_compressed_forward.__code__, home), module)
    return module


def _compressed_forward(self: Any, x: Tensor) -> Tensor:
    group = self.quantization_scheme.weights.group_size
    weight = FourBitWeight(self.weight_packed, Packing.ROWS, self.weight_scale, group)
    return nn.functional.linear(x, weight.dequantised(x.dtype), self.bias)


def experts_in_four_bits(experts: Any, group: int | None = None) -> FourBitExperts:
    """The stacked experts of a layer in the state of compressed-tensors: symmetric, in groups of 128 columns, or fewer
    if 128 does not divide all columns."""
    dense = {name: getattr(experts, name).detach() for name in NAMES}
    group = group or next(size for size in GROUPS if all(weight.shape[2] % size == 0 for weight in dense.values()))
    stored = FourBitExperts(experts, group, symmetric=True)
    for name, weight in dense.items():
        found = [four_bit_weight.quantised(one, group) for one in weight]
        rows, depth = weight.shape[1:]
        shape = [rows // 2, depth] * 2 if name == NAMES[0] else [rows, depth]
        parts = {
            "packed": torch.stack([one.packed for one in found]),
            "scale": torch.stack([one.scale for one in found]),
            "shape": torch.tensor([shape] * len(weight), device=weight.device),
        }
        for part, tensor in parts.items():
            setattr(stored, f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))
    return stored


def in_nf4(weight: Tensor) -> FourBitWeight:
    """A matrix [N, K] in NormalFloat with nested scales (Dettmers et al., "QLoRA", 2023, section 3). Raises ValueError
    unless blocks of 64 divide K."""
    rows, depth = weight.shape
    if depth % BLOCKSIZE:
        raise ValueError(f"nf4 needs columns that are a multiple of {BLOCKSIZE}, got {depth}")
    table = _normal_float().to(weight.device)
    blocks = weight.detach().float().view(-1, BLOCKSIZE)
    largest = blocks.abs().amax(1)
    offset = largest.mean()
    parts = nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
    code, outer = torch.linspace(-1, 1, 256, device=weight.device), parts.abs().amax(1).clamp(min=1e-12)
    inner = ((parts / outer[:, None] + 1) * 127.5).round().to(torch.uint8).view(-1)[: len(largest)]
    nested = NestedScale(code, outer, offset)
    middles = (table[1:] + table[:-1]) / 2
    numbers = torch.bucketize(blocks / largest.clamp(min=1e-12)[:, None], middles).to(torch.uint8)
    words = packed(numbers.view(rows, depth // 2, 2).flip(-1).reshape(rows, depth))
    scale = inner.view(rows, depth // BLOCKSIZE)
    return FourBitWeight(words, Packing.ROWS_HIGH_FIRST, scale, BLOCKSIZE, table=table, nested=nested)


def _normal_float() -> Tensor:
    """The 16 numbers of nf4: quantiles of the normal distribution, seven below zero and eight above, the largest 1."""
    least = 1 - 0.5 * (1 / 32 + 1 / 30)
    above = torch.special.ndtri(torch.linspace(least, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(least, 0.5, 8, dtype=torch.float64)[:-1])
    found = torch.cat([above, below, above.new_zeros(1)]).sort().values
    return (found / found.max()).float()


def in_mxfp4(experts: Any) -> Mxfp4Experts:
    """The experts of a layer of gpt-oss, rounded: the largest of 32 numbers to 4 or 6 times a power of two."""
    dense = {name: getattr(experts, name).detach().mT for name in NAMES}
    packed = Mxfp4Experts(experts)
    for name, weight in dense.items():
        blocks, scales = zip(*map(_in_mxfp4, weight), strict=True)  # one expert at a time, to save memory
        setattr(packed, f"{name}_blocks", nn.Parameter(torch.stack(blocks), requires_grad=False))
        setattr(packed, f"{name}_scales", nn.Parameter(torch.stack(scales), requires_grad=False))
    return packed


def _in_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of a matrix [N, K]."""
    groups = weight.float().contiguous().unflatten(1, (-1, 32))
    power = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = groups * torch.exp2(-power)[..., None]
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    numbers = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    return numbers[..., ::2] | (numbers[..., 1::2] << 4), (power + 127).to(torch.uint8)


TARGETS: dict[str, Callable[[Tensor, Tensor | None], nn.Module]] = {  # projections, by names of `--target-weights`
    "fp8": lambda weight, bias: FP8Linear(quantised(weight, block=True), bias),
    "int4": compressed,
    "nf4": Linear4bit,
}


@torch.no_grad()
def round_target(model: nn.Module, kind: str) -> None:
    """Replace a model's projections, except the vocabulary projection, by modules with quantised weights of one of
    TARGETS; with "fp8" and "int4" its experts, too; with "mxfp4" only these.

    Raises ValueError for "mxfp4" and a model other than gpt-oss."""
    if kind == "mxfp4":
        mixtures = [layer.mlp for layer in model.model.layers if model.config.model_type == "gpt_oss"]  # type: ignore
        if not mixtures:
            raise ValueError("--target-weights mxfp4 needs the experts of gpt-oss: use --shape gpt-oss-20b")
        for mixture in mixtures:
            mixture.experts = in_mxfp4(mixture.experts)
        return
    for name in [name for name, module in model.named_modules() if kind == "int4" and is_stacked(module)]:
        model.set_submodule(name, experts_in_four_bits(model.get_submodule(name)))
    for name in [name for name, _ in model.named_modules()]:
        last = name.rpartition(".")[2]
        module: Any = model.get_submodule(name)  # one at a time, to save memory
        if kind == "fp8" and last == "experts" and getattr(module, "has_bias", None) is False:
            model.set_submodule(name, FP8Experts(module))
        if last in PROJECTIONS and last != KEPT and is_plain_linear(module):
            bias = None if module.bias is None else module.bias.detach()
            model.set_submodule(name, TARGETS[kind](module.weight, bias))
