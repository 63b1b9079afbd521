"""Production settings of mixtures: Qwen3-30B-A3B, gpt-oss-20b, GLM-4.5-Air's router, and products in fp32."""

import torch
import triton
import triton.language as tl

from eagle_triton.operands.experts import Routes
from eagle_triton.ops.experts.hopper_experts import WORDS, _Part, _Weight, down_kernel, swiglu_kernel
from eagle_triton.ops.experts.products import (
    _experts_down_kernel,
    _experts_swiglu_kernel,
    _RoutesParts,
    settings_of,
)
from eagle_triton.ops.experts.routing import (
    _DEPTH,
    _EXPERTS,
    _PLACES,
    _ROWS,
    ROW_TILE,
    _route_kernel,
    _Scratch,
    depth_of_step,
)
from eagle_triton.ops.experts.shared import _BLOCK, _add_shared_expert_kernel
from eagle_triton.ops.layers.values import SplitRows
from eagle_triton.ops.views import Cube, Matrix, Rows, Vector
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.launch import NO_FMA_FUSION
from eagle_triton.runtime.mxfp4_weight import Mxfp4Weight
from tests.compile_cases._views import signature_of, typed

_ALIGNED = (
    *("depth", "size", "width", "weight.batch", "weight.row", "weight.item", "x.row", "bias.row", "experts"),
    *("weight.rows", "weight.depth", "weight.bias.row"),
    *("routed.split", "routed.row", "shared.split", "shared.row"),
)
_ROUTES = _RoutesParts("*i32", "*i32", "*i64")


def _case(name, kernel, types, constants, **options):
    signature, constexprs = signature_of(kernel, types, constants)
    return name, kernel, signature, constexprs, {**NO_FMA_FUSION, "num_warps": 4, "aligned": _ALIGNED, **options}


def _router(name, experts, chosen, score="softmax", groups=1, biased=False, dtype="bf16", weights="bf16"):
    """weights: of the router's matrix, and for sigmoid what the experts' weights are."""
    width = experts // groups if groups > 1 else min(experts, _PLACES)
    step = depth_of_step(torch.float32 if weights == "fp32" else torch.bfloat16)
    types = {
        "x": typed(Rows, f"*{dtype}"),
        "weight": typed(Matrix, f"*{weights}"),
        "bias": typed(Vector, f"*{weights}") if biased else None,
        "correction": typed(Vector, "*fp32") if score == "sigmoid" else None,
        "scratch": _Scratch("*fp32", "*i64", "*i32"),
        "routes": Routes("*i32", f"*{weights}", "*i32", "*i64"),
        "scale": "fp32",
    }
    constants = {
        "weight.item": 1, **{f"{name}.item": 1 for name in ("bias", "correction") if types[name]},
        "KIND": tl.bfloat16, "SCORE": score, "RENORMALISED": True, "CHOSEN": chosen,
        "CHOSEN_GROUPS": groups // 2 if groups > 1 else None, "SPLITS": 8, "STEPS": _DEPTH // step, "BLOCK_K": step,
        "BLOCK_E": _EXPERTS, "BLOCK_G": experts // width, "BLOCK_M": width, "BLOCK_J": triton.next_power_of_2(chosen),
    }  # fmt: skip
    return _case(name, _route_kernel, types, constants, num_warps=_ROWS)


def _product(name, kernel, columns, depth, chosen, dtype="bf16", as_gpt_oss=False, weights=None, packed=None, group=0):
    """group: of weights in four bits, which have zeros with groups of less than 128."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    settings = settings_of(kind, columns, depth, chosen, packed, kernel is _experts_swiglu_kernel)
    word, scale, group = {
        None: (f"*{dtype}", None, 0),
        Mxfp4Weight: ("*u8", "*u8", Mxfp4Weight.group),
        FourBitExpertWeight: ("*u8", f"*{dtype}", group),
        Float8ExpertWeight: ("*u8", "*fp32", 0),
    }[packed]
    zeros = packed is FourBitExpertWeight and group < 128
    types = {
        "x": typed(Rows, f"*{dtype}"),
        "inner_ptr": f"*{dtype}",
        "weight": typed(Cube, word),
        "scales": typed(Cube, scale) if packed else None,
        "zeros": typed(Cube, "*i32") if zeros else None,
        "bias": typed(Rows, f"*{dtype}") if as_gpt_oss else None,
        "weights_ptr": f"*{weights or dtype}",
        "routes": _ROUTES,
        "out_ptr": f"*{dtype}" if kernel is _experts_swiglu_kernel else "*fp32",
        "limit": "fp32",
        "alpha": "fp32",
    }
    constants = {
        "weight.row" if as_gpt_oss and not packed else "weight.item": 1, **({"scales.item": 1} if packed else {}),
        **({"zeros.item": 1} if zeros else {}),
        "CHOSEN": chosen, "INTERLEAVED": as_gpt_oss, "CLAMPED": as_gpt_oss, "BLOCK_M": ROW_TILE,
        "BLOCK_N": settings.columns, "BLOCK_K": settings.depth, "BLOCK_J": triton.next_power_of_2(chosen),
        "EVEN_K": True, "GROUP": group,
    }  # fmt: skip
    return _case(name, kernel, types, constants, num_warps=settings.warps, num_stages=settings.stages)


def _hopper_product(name, kernel, rows, as_gpt_oss=True, weights="bf16", group=0, zeros=False, height=64):
    """Of gpt-oss's sizes in MXFP4, or of integers with groups of so many columns."""
    of_gates = "interleaved" if as_gpt_oss else "halves"
    part = _Part("down" if kernel is down_kernel else of_gates, height)
    box = height // 2 if part.kind == "halves" else height
    bias = Rows("*bf16", "i32") if as_gpt_oss else None
    weight = _Weight("*bf16" if group else "*u8", "*i32" if zeros else None, bias, "i32", "i32")
    types = {
        "x": Rows("*bf16", "i32"), "inner_ptr": "*bf16", "desc": f"tensordesc<i32[{box}, 32],{WORDS!r}>",
        "weight": weight, "weights_ptr": f"*{weights}", "routes": _ROUTES,
        "out_ptr": "*bf16" if kernel is swiglu_kernel else "*fp32", "limit": "fp32", "alpha": "fp32",
    }  # fmt: skip
    constants = {
        "CHOSEN": 4, "PART": part, "CLAMPED": as_gpt_oss, "BLOCK_J": 4, "ONE": rows == 1,
        "MANY": rows > 16, "GROUP": group or Mxfp4Weight.group,
    }  # fmt: skip
    return _case(name, kernel, types, constants, num_warps=4, targets=["sm_90"], distinct=True)


CASES = [
    _router("router 8 of 128", 128, 8),
    _router("router 10 of 512", 512, 10),
    _router("router 4 of 32 biased", 32, 4, "softmax_of_chosen", biased=True),
    _router("router 8 of 128 fp32", 128, 8, "sigmoid", weights="fp32"),
    _router("router 8 of 256 in groups fp32", 256, 8, "sigmoid", groups=8, weights="fp32"),
    _product("gate_up 30b-a3b", _experts_swiglu_kernel, 768, 2048, 8),
    _product("gate_up 8x7b", _experts_swiglu_kernel, 14336, 4096, 2),
    _product("gate_up gpt-oss", _experts_swiglu_kernel, 2880, 2880, 4, as_gpt_oss=True),
    _product("gate_up gpt-oss MXFP4", _experts_swiglu_kernel, 2880, 2880, 4, as_gpt_oss=True, packed=Mxfp4Weight),
    _product("gate_up MXFP4 fp16", _experts_swiglu_kernel, 2880, 2880, 4, "fp16", as_gpt_oss=True, packed=Mxfp4Weight),
    _product("gate_up 30b-a3b FP8", _experts_swiglu_kernel, 768, 2048, 8, packed=Float8ExpertWeight),
    _product("gate_up FP8 fp16", _experts_swiglu_kernel, 14336, 4096, 2, "fp16", packed=Float8ExpertWeight),
    _product("gate_up 30b-a3b int4", _experts_swiglu_kernel, 768, 2048, 8, packed=FourBitExpertWeight, group=128),
    _product("gate_up int4 fp16", _experts_swiglu_kernel, 14336, 4096, 2, "fp16", packed=FourBitExpertWeight, group=32),
    _product("gate_up fp32", _experts_swiglu_kernel, 768, 2048, 8, "fp32"),
    _product("down 30b-a3b", _experts_down_kernel, 2048, 768, 8),
    _product("down 8x7b", _experts_down_kernel, 4096, 14336, 2, weights="fp32"),
    _product("down gpt-oss", _experts_down_kernel, 2880, 2880, 4, as_gpt_oss=True),
    _product("down gpt-oss MXFP4", _experts_down_kernel, 2880, 2880, 4, as_gpt_oss=True, packed=Mxfp4Weight),
    _product("down MXFP4 fp32", _experts_down_kernel, 2880, 2880, 4, "fp32", as_gpt_oss=True, packed=Mxfp4Weight),
    _hopper_product("gate_up gpt-oss MXFP4 on Hopper", swiglu_kernel, 1),
    _hopper_product("gate_up MXFP4 on Hopper, few rows", swiglu_kernel, 16, as_gpt_oss=False),
    _hopper_product("gate_up MXFP4 on Hopper, rows", swiglu_kernel, 60, as_gpt_oss=False),
    _hopper_product("gate_up MXFP4 on Hopper, half as high", swiglu_kernel, 1, height=32),
    _hopper_product("down gpt-oss MXFP4 on Hopper", down_kernel, 1, height=32),
    _hopper_product("down MXFP4 on Hopper, few rows", down_kernel, 16, as_gpt_oss=False, weights="fp32"),
    _hopper_product("down MXFP4 on Hopper, rows", down_kernel, 60, as_gpt_oss=False, weights="fp32"),
    _hopper_product("gate_up int4 on Hopper", swiglu_kernel, 1, as_gpt_oss=False, group=128, height=32),
    _hopper_product("gate_up int4 on Hopper, rows", swiglu_kernel, 60, as_gpt_oss=False, group=32, zeros=True),
    _hopper_product("down int4 on Hopper", down_kernel, 1, as_gpt_oss=False, group=768, zeros=True),
    _hopper_product("down int4 on Hopper, rows", down_kernel, 60, as_gpt_oss=False, group=128),
    _product("down 30b-a3b FP8", _experts_down_kernel, 2048, 768, 8, packed=Float8ExpertWeight),
    _product("down FP8 fp32", _experts_down_kernel, 2048, 768, 8, "fp32", packed=Float8ExpertWeight),
    _product("down 30b-a3b int4", _experts_down_kernel, 2048, 768, 8, packed=FourBitExpertWeight, group=128),
    _product("down int4 zeros", _experts_down_kernel, 2048, 768, 8, packed=FourBitExpertWeight, group=64),
    _product("down int4 fp32", _experts_down_kernel, 2048, 768, 8, "fp32", packed=FourBitExpertWeight, group=768),
    _product("down fp32", _experts_down_kernel, 2048, 768, 8, "fp32"),
    _case(
        "shared expert",
        _add_shared_expert_kernel,
        {
            "routed": typed(SplitRows, "*fp32"),
            "shared": typed(SplitRows, "*bf16"),
            "x": typed(Rows, "*bf16"),
            "gate_ptr": "*bf16",
            "out_ptr": "*bf16",
        },
        {"ROUTED": 8, "SHARED": 1, "BLOCK": _BLOCK},
    ),
]
