"""Production settings of grafting: a tree of 60 nodes and ten children each, 16 drafts from repetition."""

from eagle_triton.ops.grafting import Counts, _count_right_kernel, _estimate_scores_kernel, _graft_kernel
from eagle_triton.ops.views import Matrix
from eagle_triton.reference.grafting import Grafted
from eagle_triton.reference.suffix_match import RepeatDrafts
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

_TYPES = {
    **dict.fromkeys(("candidates", "beam_candidates", "tokens", "drafted"), typed(Matrix, "*i64")),
    **dict.fromkeys(("scores", "estimates"), typed(Matrix, "*fp32")),
    **dict.fromkeys(("parents", "named"), typed(Matrix, "*i32")),
    "grafted": Grafted("*i64", "*fp32", "*i32"),
    "drafts": RepeatDrafts("*i64", "*i32", "*fp32", "*i32", "*i32", "*i1"),
    "counts": typed(Counts, "*i32"),
    "scores_ptr": "*fp32",
}


def _case(name, kernel, values, warps):
    values = {**values, "PLACES": 16}
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    signature = {**types, **_TYPES, **dict.fromkeys(values, "constexpr")}
    signature = {name: signature[name] for name in kernel.arg_names}
    return name, kernel, signature, values, {**NO_FMA_FUSION, "num_warps": warps}


CASES = [
    _case("graft", _graft_kernel, {"CANDIDATES": 1024, "SLOTS": 128, "K": 16, "named": None}, 2),
    _case("graft into a tree", _graft_kernel, {"CANDIDATES": 128, "SLOTS": 1, "K": 1}, 2),
    _case("estimate scores", _estimate_scores_kernel, {}, 1),
    _case("count right", _count_right_kernel, {"BLOCK": 128, "BUCKETS": 32}, 1),
]
