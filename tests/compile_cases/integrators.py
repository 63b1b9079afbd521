"""Production settings of the integrators' kernels: N 60 (bit-packed: 32), D 8, V 128256."""

from eagle_triton.integrators import (
    Accepted,
    Chunks,
    Links,
    Probabilities,
    TreeTokens,
    _final_token_kernel,
    _rest_sums_kernel,
    build_tree_kernel_triton,
    tree_speculative_sampling_kernel,
    verify_tree_greedy_kernel,
)
from eagle_triton.ops.sampling.draws import chunk_of

_TYPES = {
    **dict.fromkeys(("parent_list_ptr", "top_scores_index_ptr", "starts_ptr", "positions_ptr"), "*i64"),
    **dict.fromkeys(("candidates_ptr", "target_ptr", "ends_ptr"), "*i64"),
    **dict.fromkeys(("seq_lens_ptr", "parents_ptr", "status_ptr"), "*i32"),
    "coins_ptr": "*fp32",
    **dict.fromkeys(("threshold_single", "threshold_acc"), "fp32"),
    "links": Links("*i64", "*i64", "*i64"),
    "tokens": TreeTokens("*i64", "*i64", "*i64"),
    "accepted": Accepted("*i32", "*i32", "*i32"),
    "probabilities": Probabilities("*fp32", "*fp32"),
    "chunks": Chunks("*fp64", "*fp32", "*i32"),
}
_SIZES = {"NODES": 64, "PAIRS": 64, "CHUNK": chunk_of(128256), "CHUNKS": 32}


def _case(name: str, kernel, warps: int, sizes: dict | None = None, **types: str) -> tuple:
    constexprs = {key: value for key, value in {**_SIZES, **(sizes or {})}.items() if key in kernel.arg_names}
    types = {**_TYPES, **types}
    signature = {key: "constexpr" if key in constexprs else types.get(key, "i32") for key in kernel.arg_names}
    aligned = ("vocabulary",) if "vocabulary" in signature else ()
    return name, kernel, signature, constexprs, {"num_warps": warps, "aligned": aligned}


_WITHOUT = {"starts_ptr": None, "status_ptr": None}
_IN_PLACE = {"tokens": None, "status_ptr": None}

CASES = [
    _case("build full mask", build_tree_kernel_triton, 4, {"MODE": 0}, mask_ptr="*i1"),
    _case("build in place", build_tree_kernel_triton, 4, {"MODE": 0, **_IN_PLACE}, mask_ptr="*i1"),
    _case("build tree mask", build_tree_kernel_triton, 4, {"MODE": 1, **_WITHOUT}, mask_ptr="*i1"),
    _case(
        "build packed", build_tree_kernel_triton, 4, {"MODE": 2, "NODES": 32, "PAIRS": 32, **_WITHOUT}, mask_ptr="*i32"
    ),
    _case("greedy", verify_tree_greedy_kernel, 1),
    _case("sampling", tree_speculative_sampling_kernel, 1),
    _case("rest sums", _rest_sums_kernel, 4),
    _case("final token", _final_token_kernel, 8),
]
