"""Production settings of mixtures: Qwen3-30B-A3B, Mixtral-8x7B, gpt-oss-20b, the routers of GLM-4.5-Air and MiniMax-M2,
and products in fp32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_triton.operands.experts import ExpertWeight, Routes, Routing
from eagle_triton.ops.experts import add_shared_expert, experts_down, experts_swiglu, route
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.float8_weight import BLOCK
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.four_bit_weight import WORD
from eagle_triton.runtime.mxfp4_weight import GROUP, Mxfp4Weight
from eagle_triton.runtime.split_sums import SplitSums
from tests.compile_cases._launches import HOPPER, bf16, empty, fp16, fp32, i32, i64, launches, u8
from tests.compile_cases._products import EVERYWHERE

_ROWS = 60
_SHAPES = {  # experts, and those of a row; the rows of gate or of up, and their columns
    "30b-a3b": (128, 8, 768, 2048),
    "8x7b": (8, 2, 14336, 4096),
    "gpt-oss": (32, 4, 2880, 2880),
    "nemotron-3": (128, 6, 1856, 2688),
}


def _transposed(experts: int, rows: int, depth: int) -> Tensor:
    """As gpt-oss has them in bf16."""
    return bf16(experts, depth, rows).mT


def _mxfp4(experts: int, rows: int, depth: int) -> Mxfp4Weight:
    return Mxfp4Weight(u8(experts, rows, depth // GROUP, GROUP // 2), u8(experts, rows, depth // GROUP))


def _float8(experts: int, rows: int, depth: int) -> Float8ExpertWeight:
    values = empty(experts, rows, depth, dtype=torch.float8_e4m3fn)
    return Float8ExpertWeight(values, fp32(experts, -(-rows // BLOCK), -(-depth // BLOCK)))


def _int4(
    experts: int, rows: int, depth: int, scale: Callable[..., Tensor] = bf16, group: int | None = 128, zeros=False
) -> FourBitExpertWeight:
    """group: None for a whole row."""
    groups = depth // (group or depth)
    zero = i32(experts, rows // WORD, groups) if zeros else None
    return FourBitExpertWeight(i32(experts, rows, depth // WORD), scale(experts, rows, groups), zero)


def _products(
    name: str,
    shape: str,
    x: Callable[..., Tensor],
    weight: Callable[[int, int, int], ExpertWeight],
    rows: int = _ROWS,
    routed: Callable[..., Tensor] | None = None,
    as_gpt_oss: bool = False,
    gated: bool = True,
    **how: Any,
) -> list[tuple]:
    """Of gate and up, and of down. routed: the weights of a row's experts, in x's dtype if left out."""
    experts, chosen, inner, width = _SHAPES[shape]
    slots = min(experts, rows * chosen)
    routes = Routes(i32(rows, chosen), (routed or x)(rows, chosen), i32(slots), i64(slots))
    options = dict(interleaved=True, clamp=(7.0, 1.702)) if as_gpt_oss else {}
    biases = (x(experts, 2 * inner), x(experts, width)) if as_gpt_oss else (None, None)
    both, down = weight(experts, (2 if gated else 1) * inner, width), weight(experts, width, inner)
    options |= {} if gated else dict(gated=False)
    name = f"{name} {shape} {rows} rows"
    return [
        *launches(name, experts_swiglu, x(rows, width), both, biases[0], routes, **options, **how),
        *launches(name, experts_down, x(rows, chosen, inner), down, biases[1], routes, **how),
    ]


def _router(name: str, experts: int, routing: Routing, bias: Tensor | None = None) -> list[tuple]:
    """Logits in fp32 have a weight in fp32, and a correction."""
    dtype = bf16 if routing.rounded_logits else fp32
    correction = None if routing.rounded_logits and routing.score != "sigmoid" else dtype(experts)
    return launches(name, route, bf16(_ROWS, 2048), dtype(experts, 2048), bias, correction, routing)


_portable = partial(_products, targets=EVERYWHERE)
_on_hopper = partial(_products, targets=HOPPER, options={"distinct": True})
CASES = [
    *_router("router 8 of 128", 128, Routing(8)),
    *_router("router 10 of 512", 512, Routing(10)),
    *_router("router 4 of 32 biased", 32, Routing(4, "softmax_of_chosen"), bf16(32)),
    *_router("router 8 of 128 fp32", 128, Routing(8, "sigmoid", weights_in_fp32=True, rounded_logits=False)),
    *_router("router 6 of 64 fp32 softmax", 64, Routing(6, rounded_logits=False)),
    *_router(
        "router 8 of 256 in groups fp32",
        256,
        Routing(8, "sigmoid", weights_in_fp32=True, groups=8, chosen_groups=4, rounded_logits=False),
    ),
    *_router("router 8 of 256 rounded", 256, Routing(8, "sigmoid", weights_in_fp32=True)),
    *_portable("bf16", "30b-a3b", bf16, bf16),
    *_portable("bf16", "8x7b", bf16, bf16, routed=fp32),
    *_portable("bf16", "nemotron-3", bf16, bf16, routed=fp32, gated=False),
    *_portable("bf16", "gpt-oss", bf16, _transposed, as_gpt_oss=True),
    *_portable("fp32", "30b-a3b", fp32, fp32),
    *_portable("MXFP4", "gpt-oss", bf16, _mxfp4, as_gpt_oss=True),
    *_portable("MXFP4 fp16", "30b-a3b", fp16, _mxfp4, as_gpt_oss=True),
    *_portable("MXFP4 fp32", "gpt-oss", fp32, _mxfp4, as_gpt_oss=True),
    *_portable("FP8", "30b-a3b", bf16, _float8),
    *_portable("FP8 fp16", "8x7b", fp16, _float8),
    *_portable("FP8 fp32", "30b-a3b", fp32, _float8),
    *_portable("int4", "30b-a3b", bf16, _int4),
    *_portable("int4 zeros", "30b-a3b", bf16, partial(_int4, group=64, zeros=True)),
    *_portable("int4 fp16", "8x7b", fp16, partial(_int4, scale=fp16, group=32, zeros=True)),
    *_portable("int4 fp32", "30b-a3b", fp32, partial(_int4, scale=fp32, group=None)),
    *_on_hopper("MXFP4", "gpt-oss", bf16, _mxfp4, 1, as_gpt_oss=True),
    *_on_hopper("MXFP4", "30b-a3b", bf16, _mxfp4, 1, as_gpt_oss=True),
    *_on_hopper("MXFP4", "gpt-oss", bf16, _mxfp4, 16, fp32),
    *_on_hopper("MXFP4", "gpt-oss", bf16, _mxfp4, 60, fp32),
    *_on_hopper("int4", "30b-a3b", bf16, _int4, 1),
    *_on_hopper("int4", "30b-a3b", bf16, _int4, 60),
    *_on_hopper("int4 zeros", "30b-a3b", bf16, partial(_int4, group=32, zeros=True), 60),
    *_on_hopper("int4", "8x7b", bf16, _int4, 16),
    *_on_hopper("int4", "8x7b", bf16, _int4, 60, options={"distinct": True, "local": {"down_kernel": 24}}),
    *_on_hopper("int4 zeros", "8x7b", bf16, partial(_int4, group=32, zeros=True), 60),
    *_on_hopper("int4 zeros of a row", "30b-a3b", bf16, partial(_int4, group=None, zeros=True), 1),
    *launches(
        "shared expert",
        add_shared_expert,
        SplitSums(fp32(8, _ROWS, 2048), torch.bfloat16),
        bf16(_ROWS, 2048),
        bf16(_ROWS, 2048),
        bf16(1, 2048),
    ),
]
