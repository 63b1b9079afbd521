"""Production settings of the kernels that bound a tree's depth: V 32000 and 128256, trees up to 1024 candidates."""

from eagle_triton.ops.adaptive_length import (
    _PART,
    _SLOTS,
    _WARPS,
    EntropyParts,
    _choose_gamma_kernel,
    _clip_depth_kernel,
    _entropy_merge_kernel,
    _entropy_parts_kernel,
)
from eagle_triton.ops.views import Matrix
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

_TYPES = {"found": EntropyParts("*fp32", "*fp32", "*fp32")}
_TYPES |= dict.fromkeys(("entropy_ptr", "scores_ptr"), "*fp32")
_TYPES |= dict.fromkeys(("lengths_ptr", "limits_ptr", "root_ptr", "depths_ptr"), "*i32")
_TYPES |= {"values_ptr": "*fp64", "tokens_ptr": "*i64"}


def _case(name, kernel, constexprs, warps, **types):
    types = {**_TYPES, **types}
    signature = {name: "constexpr" if name in constexprs else types.get(name, "i32") for name in kernel.arg_names}
    return name, kernel, signature, constexprs, {**NO_FMA_FUSION, "num_warps": warps}


_RULE = {"NATS": 11.76, "BETA": 0.9, "GAMMA_MIN": 1, "GAMMA_MAX": 6, "SLOTS": _SLOTS}
CASES = [
    *(
        _case(f"entropy parts {dtype}", _entropy_parts_kernel, {"PART": _PART}, _WARPS, x=typed(Matrix, f"*{dtype}"))
        for dtype in ("bf16", "fp16", "fp32")
    ),
    _case("entropy merge", _entropy_merge_kernel, {"PARTS": 64}, 1),
    _case("choose gamma", _choose_gamma_kernel, {**_RULE, "FOLLOWS": True}, 1),
    _case("choose gamma, stopping", _choose_gamma_kernel, {**_RULE, "FOLLOWS": False}, 1),
    _case("clip depth of a chain", _clip_depth_kernel, {"GAMMA_MAX": 6, "STOPPED": False, "COUNT": 8}, 1),
    _case("clip depth of a tree", _clip_depth_kernel, {"GAMMA_MAX": 7, "STOPPED": True, "COUNT": 1024}, 4),
]
