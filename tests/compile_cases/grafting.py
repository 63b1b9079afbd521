"""Production settings of grafting: a tree of 60 nodes and ten children each, 16 drafts from repetition."""

from eagle_triton.ops.grafting import _count_right_kernel, _estimate_scores_kernel, _graft_kernel
from eagle_triton.runtime.launch import EXACT

_TYPES = dict.fromkeys(("candidates_ptr", "beam_ptr", "tokens_ptr", "drafted_ptr", "candidates_out_ptr"), "*i64")
_TYPES |= dict.fromkeys(("scores_ptr", "estimates_ptr", "scores_out_ptr", "probs_ptr"), "*fp32")
_TYPES |= {"from_ring_ptr": "*i1"}


def _case(name, kernel, values, warps):
    values = {**values, "PLACES": 16}
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    signature = {**types, **_TYPES, **dict.fromkeys(values, "constexpr")}
    signature = {name: signature[name] for name in kernel.arg_names}
    return name, kernel, signature, values, {**EXACT, "num_warps": warps}


CASES = [
    _case("graft", _graft_kernel, {"CANDIDATES": 1024, "SLOTS": 128, "K": 16}, 2),
    _case("estimate scores", _estimate_scores_kernel, {}, 1),
    _case("count right", _count_right_kernel, {"BLOCK": 128, "BUCKETS": 32}, 1),
]
