"""Mixtures of experts: their router, their stacked weights and a shared expert; or the reason for calling the block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.model_view import Layer
from eagle_triton.engine.model.model_watch import interference
from eagle_triton.engine.model.module_kinds import is_plain_linear, is_plain_tensor, is_sharded_tensor, local_part
from eagle_triton.engine.model.modules import MLP, Experts, ExpertWeights
from eagle_triton.engine.operations import make_operations
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.float8_experts import (
    OF_INPUTS,
    SCALE,
    Float8Experts,
    is_float8_experts,
    read_float8_experts,
)
from eagle_triton.families.reading.module_reader import ModuleReader
from eagle_triton.families.reading.sharded import Styles, ranks_of
from eagle_triton.models.families import LLAMA, UNGATED
from eagle_triton.models.four_bit_experts import FourBitExperts
from eagle_triton.models.mxfp4 import NAMES, Mxfp4Experts
from eagle_triton.operands.experts import ExpertWeight, Routing
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.mxfp4_weight import Mxfp4Weight

SHARED = ("shared_expert", "shared_experts", "shared_mlp")
CHILDREN = frozenset({"experts", "gate", "router", "shared_expert_gate", *SHARED})
STORED: dict[str, tuple[type[Mxfp4Weight | FourBitExpertWeight], str]] = {
    "mxfp4": (Mxfp4Weight, "MXFP4"),
    "experts_in_four_bits": (FourBitExpertWeight, "four bits"),
}
"""Weights that stay as they are stored: the name of their note in the report, and what it calls them."""

OTHER_LAYOUT = "Mxfp4GptOssExperts"  # transformers' class of MXFP4 experts in a kernel's own layout
CORRECTIONS = ("e_score_correction_bias", "expert_bias")  # of scores, in a router or beside it
SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # of the chosen experts' weights
EPS = (1e-6,)  # what routers add to the sum of scores, besides Routing's own
INNER = ("gate", "wg")  # a router's module with its weight
STATISTICS = "moe_statics"  # ERNIE's, a router's module with its correction
OF_ROUTERS = ("weight", "bias", *(f"{name}.weight" for name in INNER), CORRECTIONS[0], f"{STATISTICS}.{CORRECTIONS[0]}")
LAYOUTS = (None, "eager", "grouped_mm", "batched_mm")  # transformers' ways to run stacked weights in place


BESIDE_UNGATED = replace(LLAMA, mlp_projections=UNGATED)  # shared experts beside experts without a gate


class _CalledAsItIs(Exception):
    """Why the weights of a mixture cannot be read, so its module is called."""


class RoutedExperts(nn.Module):
    """A router and experts, called one after the other.

    router: x [n, H] -> (logits, weights [n, k], experts [n, k] int64). experts: x [n, H], the experts of each row and
    their weights times `scale` -> [n, H].
    """

    def __init__(self, router: Callable[..., Any], experts: Callable[..., Tensor], scale: float = 1.0):
        super().__init__()
        self.router, self.experts, self.scale = router, experts, scale

    def forward(self, x: Tensor, normed: Tensor | None = None) -> Tensor:
        """x [B, n, H]: the router's input. normed: the experts' input; None: x, too. Returns [B, n, H]."""
        _, weights, chosen = self.router(x.flatten(0, -2))
        rows = (x if normed is None else normed).flatten(0, -2)
        found = self.experts(rows, chosen, weights if self.scale == 1.0 else weights * self.scale)
        return found.view_as(x)


def read_experts(
    block: nn.Module, dtype: torch.dtype, *, root: str, styles: Styles | None = None, float8: bool = False
) -> Experts:
    """A mixture of experts in a model of this dtype. root: its name in messages. styles: see ModuleReader. float8:
    whether to read experts in FP8; families/reading/quantised.py decides that.

    The meaning of its weights is tested on random rows. A block that is not understood is called as a module. Raises
    UnsupportedModelError for such a block that ranks share, and for FP8 experts that should be read but cannot be.
    """
    chosen, count = _known_numbers(block)
    experts: Any = block.experts
    ranks = None if isinstance(experts, nn.ModuleList) else ranks_of(experts)
    in_float8 = None
    if is_float8_experts(experts):
        if ranks is not None:
            raise UnsupportedModelError(f"{root} has experts in FP8, which ranks cannot share (tp_plan)", "devices")
        if not float8:
            return Experts(
                block, chosen, count, reason=f'{root} has experts in FP8, and activations="as published" calls them'
            )
        in_float8 = read_float8_experts(experts, f"{root}.experts")
    try:
        weights = _weights(block, dtype, root, styles or {}, in_float8)
    except (_CalledAsItIs, UnsupportedModelError) as error:  # UnsupportedModelError is for a shared expert
        reason = f"{root} {error}" if isinstance(error, _CalledAsItIs) else str(error)
        if ranks is not None:
            raise UnsupportedModelError(
                f"{reason}; experts that ranks share (tp_plan) must be read", "devices"
            ) from None
        return Experts(block, chosen, count, reason=reason)
    routed = None
    router, scale = _Router(block), _scale_beside_router(block)
    if in_float8 is not None:
        routed = RoutedExperts(router, in_float8.of_many_rows, scale)
    elif ranks is not None:
        routed = RoutedExperts(router, own_experts(experts), scale)
    elif (mlp := weights.shared) and any(product.weight is None for product in (*mlp.inputs, mlp.down)):
        # The block must not call these modules of a shared expert if families/reading/quantised.py reads them: they
        # may still be compressed, or round their inputs.
        routed = RoutedExperts(router, experts, scale)
    return Experts(block, weights.routing.chosen, len(weights.router), weights, routed=routed, summed_over=ranks)


class SharedBeside(nn.Module):
    """A mixture that is called as a module, and the shared MLP beside it."""

    def __init__(self, block: nn.Module, shared: nn.Module):
        super().__init__()
        self.block, self.shared, self.experts = block, shared, block.experts

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.shared(x)


def with_shared(mixture: Experts, mlp: MLP, module: nn.Module) -> Experts:
    """A mixture with an MLP beside it as its shared expert. module: the MLP's."""
    block: Any = mixture.module
    if mixture.weights is None:
        return replace(mixture, module=SharedBeside(block, module))
    return replace(mixture, weights=replace(mixture.weights, shared=mlp), routed=mixture.routed or block)


def own_experts(experts: nn.Module) -> nn.Module:
    """A copy of experts that ranks share, with this rank's part of the weights and the forward of their class. Its
    output is this rank's part of a sum."""
    own = copy.copy(experts)
    vars(own).pop("forward", None)
    parts = {name: nn.Parameter(local_part(tensor), requires_grad=False) for name, tensor in experts.named_parameters()}
    vars(own)["_parameters"] = parts
    return own


def blocks_read(layers: Iterable[Layer]) -> frozenset[nn.Module]:
    """The mixtures of these layers that are read by their weights."""
    mixtures = (mixture for layer in layers for mixture in layer.mixtures)
    return frozenset(mixture.module for mixture in mixtures if mixture.weights is not None)


def notes_on_stored(layers: Iterable[Layer]) -> dict[str, str]:
    """The report's notes on mixtures that are read in four bits, by name."""
    read = [mixture.weights for layer in layers for mixture in layer.mixtures if mixture.weights is not None]
    parts = [part for weights in read for part in (weights.gate_up, weights.down)]
    notes = {}
    for name, (kind, called) in STORED.items():
        stored = [part for part in parts if isinstance(part, kind)]
        if stored:
            size = sum(tensor.nbytes for part in stored for tensor in part.tensors) / 2**20
            notes[name] = f"{len(stored) // 2} mixtures are read in {called}, {size:,.1f} MiB"
    return notes


def note_on_mixtures(layers: Iterable[Layer]) -> str | None:
    """The report's note on mixtures that are called as modules; None if there are none."""
    reasons = [mixture.reason for layer in layers for mixture in layer.mixtures if mixture.weights is None]
    if not reasons:
        return None
    return f"{len(reasons)} mixtures are called as modules, at their own speed; the first: {reasons[0]}"


def _known_numbers(block: nn.Module) -> tuple[int, int]:
    """The number of experts per row and of all experts, from the block's modules; (0, 0) if these do not have them."""
    experts, router = block.experts, _router_of(block)
    count = len(experts) if isinstance(experts, nn.ModuleList) else getattr(experts, "num_experts", 0)
    chosen = getattr(router, "top_k", getattr(block, "top_k", 0))
    return (chosen, count) if 0 < chosen <= count else (0, 0)


def _router_of(block: nn.Module) -> Any:
    return getattr(block, "gate", None) or getattr(block, "router", None)


class _Router:
    """A block's router with its weight, and with the correction of scores that it has itself or that the block passes
    to it."""

    def __init__(self, block: nn.Module):
        self.module = _router_of(block)
        name = next((name for name in INNER if name in self.module._modules), None)
        self._takes_batches = name is not None  # AFMoE's, [B, n, H]
        self._name = "weight" if name is None else f"{name}.weight"
        self.weight = (self.module if name is None else self.module._modules[name])._parameters.get("weight")
        statistics = self.module._modules.get(STATISTICS, self.module)
        own, beside = ({**part._parameters, **part._buffers} for part in (statistics, block))
        self._beside = next((beside[name] for name in CORRECTIONS if name in beside), None)
        self.correction = own.get(CORRECTIONS[0]) if self._beside is None else self._beside
        if self.correction is not None and statistics is not self.module and is_plain_tensor(self.correction):
            self.correction = self.correction.squeeze(0)  # [1, E]

    def __call__(self, rows: Tensor, weight: Tensor | None = None) -> Any:
        """rows [n, H] -> (logits [n, E], weights [n, k], experts [n, k] int64), or what the router returns. weight
        [E, H]: in place of its own."""
        inputs = (rows,) if self._beside is None else (rows[None] if self._takes_batches else rows, self._beside)
        if weight is None:
            return self.module(*inputs)
        return torch.func.functional_call(self.module, {self._name: weight}, inputs)


def _scale_beside_router(block: nn.Module) -> float:
    """The factor by which the block itself multiplies the chosen experts' sum."""
    scaled_there = any(hasattr(_router_of(block), name) for name in SCALES)
    return 1.0 if scaled_there else float(getattr(block, SCALES[0], 1.0))


def _weights(
    block: nn.Module, dtype: torch.dtype, root: str, styles: Styles, in_float8: Float8Experts | None
) -> ExpertWeights:
    if reason := interference(block, root):
        raise _CalledAsItIs(f"has a part that is not read: {reason}")
    parts = {name for name, part in block.named_children() if not isinstance(part, nn.Identity)}
    if unknown := sorted(parts - CHILDREN):
        raise _CalledAsItIs(f"has {', '.join(unknown)}, which is not known here")
    if getattr(block, "jitter_noise", 0):
        raise _CalledAsItIs(f"has jitter_noise {block.jitter_noise}")
    experts: Any = block.experts
    spread = any(map(is_sharded_tensor, experts.parameters()))
    parameters = {
        name: local_part(tensor) if is_sharded_tensor(tensor) else tensor
        for name, tensor in experts.named_parameters()
        if name not in OF_INPUTS
    }
    if type(experts).__name__ == OTHER_LAYOUT:
        raise _CalledAsItIs(
            "has experts in MXFP4 in the layout of a kernel, which cannot be read: give EAGLEInference or EaModel the "
            "model's path, and they load the experts as published"
        )
    gated = getattr(experts, "has_gate", True)
    names = NAMES if gated else ("up_proj", NAMES[1])
    expected = _expected(experts, names, dtype, in_float8 is not None)
    layout_is_said = hasattr(experts, "is_transposed") and hasattr(experts, "is_concatenated")
    if not layout_is_said or parameters.keys() != expected.keys():
        raise _CalledAsItIs(f"has experts of {type(experts).__name__}, which are not stacked as in transformers 5")
    for name, tensor in parameters.items() if in_float8 is None else ():
        if not is_plain_tensor(tensor) or tensor.dtype != expected[name]:
            raise _CalledAsItIs(
                f"has experts.{name} in {tensor.dtype} and {type(tensor.data).__name__}, not {expected[name]}"
            )
    implementation = getattr(experts.config, "_experts_implementation", None)
    if implementation not in LAYOUTS:
        raise _CalledAsItIs(f"has experts_implementation {implementation!r}")
    odd = ("has_post_expert_norm", "_is_expert_parallel")
    if any(getattr(experts, name, False) for name in odd):
        raise _CalledAsItIs("has experts with a norm, or spread over ranks")
    if spread and (experts.is_transposed or not experts.is_concatenated or not gated):
        raise _CalledAsItIs("has experts in another layout than Qwen3-MoE's")
    interleaved, clamp = _gate_of(experts) if gated else (False, None)
    if not gated:
        ModuleReader(experts, f"{root}.experts").activation("act_fn", ("relu2",))
    gate_up: ExpertWeight
    down: ExpertWeight
    if in_float8 is None:
        gate_up, down = (_stacked(experts, parameters, name) for name in names)
    else:
        _, gate_up, down = in_float8
    router = _Router(block)
    if other := [name for name in (*block._parameters, *block._buffers) if name not in CORRECTIONS]:
        raise _CalledAsItIs(f"has {other[0]}, which is not known here")
    for name, _ in (*router.module.named_parameters(), *router.module.named_buffers()):
        if name not in OF_ROUTERS:
            raise _CalledAsItIs(f"has {name} in its router, which is not read")
    shared = next((name for name in SHARED if hasattr(block, name)), None)
    routing = _routing_of(router, dtype)
    return ExpertWeights(
        routing=replace(routing, scale=routing.scale * _scale_beside_router(block)),
        router=router.weight,
        router_bias=router.module._parameters.get("bias"),
        correction=router.correction,
        gate_up=gate_up,
        gate_up_bias=parameters.get(f"{names[0]}_bias"),
        down=down,
        down_bias=parameters.get(f"{names[1]}_bias"),
        interleaved=interleaved,
        clamp=clamp,
        gated=gated,
        shared=None
        if shared is None
        else ModuleReader(block, root, styles).mlp(shared, LLAMA if gated else BESIDE_UNGATED),
        shared_gate=_gate_of_shared(block),
    )


def _expected(experts: Any, names: tuple[str, str], dtype: torch.dtype, float8: bool) -> dict[str, torch.dtype]:
    """The parameters of stacked experts in a model of this dtype, and their dtypes; of FP8 only the names matter."""
    if isinstance(experts, Mxfp4Experts):
        parts = {"_blocks": torch.uint8, "_scales": torch.uint8}
    elif isinstance(experts, FourBitExperts):
        parts = {f"_{part}": kind for part, kind in experts.parts(dtype).items()}
    else:
        parts = {"": dtype, SCALE: dtype} if float8 else {"": dtype}
    if getattr(experts, "has_bias", False):
        parts["_bias"] = dtype
    return {name + part: kind for name in names for part, kind in parts.items()}


def _stacked(experts: Any, parameters: Mapping[str, Tensor], name: str) -> ExpertWeight:
    """A projection of all experts, [E, N, K]."""
    try:
        if isinstance(experts, Mxfp4Experts):
            return Mxfp4Weight(parameters[f"{name}_blocks"], parameters[f"{name}_scales"])
        if isinstance(experts, FourBitExperts):
            zeros = parameters.get(f"{name}_zero_point")
            return FourBitExpertWeight(parameters[f"{name}_packed"], parameters[f"{name}_scale"], zeros)
    except ValueError as error:
        raise _CalledAsItIs(f"has experts.{name} that does not fit: {error}") from error
    return parameters[name].transpose(1, 2) if experts.is_transposed else parameters[name]


def _gate_of(experts: Any) -> tuple[bool, tuple[float, float] | None]:
    """Whether gate and up are interleaved, and the bounds of a clamped SwiGLU; both are found by running it."""
    both = torch.linspace(-9, 9, 64, device="cpu").pow(3).view(1, -1)  # beyond any limit
    interleaved, clamp = not experts.is_concatenated, None
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
    expected = nn.functional.silu(gate) * up
    if hasattr(experts, "limit") and hasattr(experts, "alpha"):
        clamp = float(experts.limit), float(experts.alpha)
        gate, up = gate.clamp(max=clamp[0]), up.clamp(-clamp[0], clamp[0])
        expected = (up + 1) * gate * torch.sigmoid(clamp[1] * gate)
    if not torch.allclose(experts._apply_gate(both), expected, atol=1e-5):
        raise _CalledAsItIs("has another activation than SwiGLU")
    return interleaved, clamp


@torch.no_grad()
def _routing_of(router: _Router, dtype: torch.dtype) -> Routing:
    """The routing that gives random rows the router's weights; if several do, the nearest one."""
    weight, correction, kind = router.weight, router.correction, type(router.module).__name__
    if weight is None or not is_plain_tensor(weight) or weight.dtype not in (dtype, torch.float32):
        raise _CalledAsItIs(f"has a router of {kind} without a plain weight in {dtype}")
    if correction is not None and not is_plain_tensor(correction):
        raise _CalledAsItIs(f"has a correction of scores that is no plain tensor in its router of {kind}")
    if cap := getattr(router.module, "router_logit_softcapping", 0):  # Laguna's; small logits would not show it
        raise _CalledAsItIs(f"has router_logit_softcapping {cap}")
    rows, weight = _probe(weight, dtype)
    out = router(rows, weight)
    if not (isinstance(out, tuple) and len(out) == 3 and hasattr(router.module, "top_k")):
        raise _CalledAsItIs(f"has a router of {kind}, which does not return weights and experts")
    logits, experts = (out[2], out[0]) if out[2].is_floating_point() else (out[0], out[2])  # GraniteMoE's, under 5.17
    if not (out[1].shape == experts.shape == (len(rows), router.module.top_k)):
        raise _CalledAsItIs(f"has a router of {kind}, which chooses in an unknown way")
    given, theirs = out[1].sort(dim=1).values.float(), experts.sort(dim=1).values
    near = 1e-4 if dtype == torch.float32 else 0.02
    ops, bias, judged = make_operations(kernels=False), router.module._parameters.get("bias"), []
    routings = _possible_routings(router, dtype, weights_in_fp32=out[1].dtype == torch.float32)
    for routing in routings:
        found = ops.route(rows, weight, bias, correction, routing)
        weights, ours = found.weights.sort(dim=1).values.float(), found.experts.long().sort(dim=1).values
        same = (ours == theirs).all(1)
        if correction is None:  # of equal logits, either expert may be chosen
            equals = (logits.gather(1, chosen).sort(dim=1).values for chosen in (ours, theirs))
            same |= torch.eq(*equals).all(1)
        fits = torch.isclose(weights, given, rtol=near, equal_nan=True).all(1) & same
        judged.append((float(fits.float().mean()), float((weights == given).float().mean())))
    best = judged.index(max(judged))
    if judged[best][0] < 0.75:  # of scores that are equal within rounding, another expert may be chosen
        raise _CalledAsItIs(f"has a router of {kind}, which chooses in an unknown way")
    return routings[best]


def _possible_routings(router: _Router, dtype: torch.dtype, weights_in_fp32: bool) -> list[Routing]:
    """The routings that a router with these attributes may compute, the most usual first."""
    module, weight = router.module, router.weight
    renormalised = bool(getattr(module, "norm_topk_prob", True))
    scale = float(next((getattr(module, name) for name in SCALES if hasattr(module, name)), 1.0))
    of_softmax = Routing(module.top_k, "softmax", renormalised=renormalised, weights_in_fp32=weights_in_fp32)
    of_sigmoid = replace(
        of_softmax,
        score="sigmoid",
        groups=getattr(module, "num_group", None) or 1,
        chosen_groups=getattr(module, "topk_group", None) or 1,
        scale=scale,
    )
    softmaxes, sigmoids = [of_softmax], [of_sigmoid]
    if scale != 1.0:
        softmaxes.append(replace(of_softmax, scale=scale))
    if renormalised and router.correction is None:
        softmaxes.append(replace(of_softmax, score="softmax_of_chosen"))  # equal up to rounding
    if not hasattr(module, "norm_topk_prob"):  # DeepSeek-V2's never is
        softmaxes.append(replace(of_softmax, renormalised=False, scale=scale))
    if renormalised:
        sigmoids += [replace(of_sigmoid, eps=eps) for eps in EPS]
    in_fp32 = [replace(routing, rounded_logits=False) for routing in (*softmaxes, *sigmoids)]
    if weight.dtype != dtype:
        return in_fp32
    rounded_scores = [replace(routing, rounded_scores=True) for routing in sigmoids]
    return [*softmaxes, *in_fp32, *sigmoids, *rounded_scores]


def _probe(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [64, H] and a router's weight like this one, [E, H]. The last rows have small sigmoids, in which an epsilon
    shows."""
    source = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device="cpu", dtype=torch.float32)

    rows, other = random(64, weight.shape[1]), random(*weight.shape) * 2 * weight.shape[1] ** -0.5
    rows[:, 0], rows[40:, 0], other[:, 0] = 0, -13, 1
    return rows.to(weight.device, dtype), other.to(weight.device, weight.dtype)


def _gate_of_shared(block: nn.Module) -> Tensor | None:
    gate: Any = getattr(block, "shared_expert_gate", None)
    if gate is None:
        return None
    if not is_plain_linear(gate) or gate.bias is not None or not gate.weight.is_contiguous():
        raise _CalledAsItIs("has a shared_expert_gate that is not a plain nn.Linear without bias")
    return gate.weight
