"""Production settings of the drafting and verification kernels: N 60, K 10, D 8, V 128256 and 32000."""

from eagle_triton.runtime.launch import EXACT
from eagle_triton.sampling.draws import chunk_of
from eagle_triton.tree_decoding import (
    _build_tree_kernel,
    _expand_beam_kernel,
    _topk_chunk_kernel,
    _topk_merge_kernel,
    topk_chunk_of,
    topk_warps,
)
from eagle_triton.verification import (
    _final_token_kernel,
    _greedy_walk_kernel,
    _sampled_walk_kernel,
    _update_sequence_kernel,
)

_TYPES = {
    "temperature_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "seed_ptr": "*i64",
    "step_ptr": "*i64",
    "tokens_ptr": "*i64",
    "parents_ptr": "*i32",
    "path_ptr": "*i32",
    "accepted_ptr": "*i32",
    "next_ptr": "*i64",
    "nan_ptr": "*i1",
    "places_ptr": "*i32",
    "peaks_ptr": "*fp32",
    "thresholds_ptr": "*fp32",
    "sums_ptr": "*fp64",
}


def _signature(kernel, types: dict[str, str], constexprs: dict) -> dict[str, str]:
    """Every argument's type: as named, else a 32-bit integer."""
    return {name: "constexpr" if name in constexprs else types.get(name, "i32") for name in kernel.arg_names}


def _case(name: str, kernel, types: dict[str, str], constexprs: dict, options: dict) -> tuple:
    constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
    return name, kernel, _signature(kernel, {**_TYPES, **types}, constexprs), constexprs, options


def _topk(dtype: str, vocabulary: int) -> list[tuple]:
    chunk = topk_chunk_of(vocabulary)
    chunks = -(-vocabulary // chunk)
    types = {"x_ptr": f"*{dtype}", "ranks_ptr": "*i64", "sums_ptr": "*fp32", "offsets_ptr": "*i64"}
    types |= {"values_out_ptr": "*fp32", "tokens_out_ptr": "*i64"}
    sizes = {"K": 10, "CHUNK": chunk, "CHUNKS": 1 << (chunks - 1).bit_length(), "WIDTH": 16}
    sizes["CANDIDATES"] = 1 << (chunks * 10 - 1).bit_length()
    options = {**EXACT, "num_warps": topk_warps(vocabulary), "aligned": ("vocabulary", "stride_xr")}
    return [
        _case(f"topk chunk {dtype} {vocabulary}", _topk_chunk_kernel, types, sizes, options),
        _case(f"topk merge {dtype} {vocabulary}", _topk_merge_kernel, types, sizes, options),
    ]


_WALK = {"NODES": 64, "CHUNKS": 32, "PARTS": 32, "STEPS": 16, "CHUNK": chunk_of(128256), "PAIRS": 64, "stride_xv": 1}
_LOGITS = {"aligned": ("vocabulary", "stride_xr")}
_BEAM = {"parents_ptr": "*fp32", "log_probs_ptr": "*fp32", "ancestors_ptr": "*i64"}
_BEAM |= {"chosen_ptr": "*i64", "selected_ptr": "*i64", "child_scores_ptr": "*fp32", "parents_out_ptr": "*i64"}
_BEAM |= {"tokens_out_ptr": "*i64", "scores_out_ptr": "*fp32", "ancestors_out_ptr": "*i64"}
_BUILD = dict.fromkeys(("root_ptr", "candidates_ptr", "beam_ptr", "ancestors_ptr"), "*i64")
_BUILD |= {"scores_ptr": "*fp32", "depths_ptr": "*i32", "scratch_ptr": "*i32", "selected_ptr": "*i64"}
_TREE = {"CANDIDATES": 1024, "NODES": 64, "PAIRS": 64, "DOUBLINGS": 6}
_UPDATE = dict.fromkeys(("sequence_ptr", "stop_ids_ptr", "report_ptr"), "*i64")
_UPDATE |= {"lengths_ptr": "*i32", "limit_ptr": "*i32", "active_ptr": "*i1", "exact_ptr": "*i1"}

CASES = [
    *(case for dtype in ("bf16", "fp16") for vocabulary in (32000, 128256) for case in _topk(dtype, vocabulary)),
    _case(
        "expand beam",
        _expand_beam_kernel,
        _BEAM,
        {"CHILDREN": 128, "WIDTH": 16, "selected_ptr": None},
        {**EXACT, "num_warps": 1},
    ),
    _case("expand beam fixed", _expand_beam_kernel, _BEAM, {"CHILDREN": 128, "WIDTH": 16}, {**EXACT, "num_warps": 1}),
    _case("build tree", _build_tree_kernel, _BUILD, {**_TREE, "selected_ptr": None}, {**EXACT, "num_warps": 2}),
    _case("build tree fixed", _build_tree_kernel, _BUILD, {**_TREE, "scratch_ptr": None}, {**EXACT, "num_warps": 2}),
    _case("greedy walk", _greedy_walk_kernel, {}, _WALK, {**EXACT, "num_warps": 8}),
    *(
        _case(
            f"{name} {dtype}",
            kernel,
            {"x_ptr": f"*{dtype}"},
            {**_WALK, "PDL": pdl},
            {**EXACT, "num_warps": 8, **_LOGITS, "targets": targets},
        )
        for name, kernel in (("sampled walk", _sampled_walk_kernel), ("final token", _final_token_kernel))
        for dtype in ("bf16", "fp16")
        for pdl, targets in ((False, ("sm_80", "gfx942")), (True, ("sm_90", "sm_100")))
    ),
    _case(
        "update sequence",
        _update_sequence_kernel,
        _UPDATE,
        {"STEPS": 16, "STOPS": 16},
        {**EXACT, "num_warps": 1},
    ),
]
