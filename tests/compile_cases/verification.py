"""Production settings of the verification kernels: N 60, D 8, V 128256."""

import triton

from eagle_triton.benchmarks.acceptance import _scheduled_path_kernel
from eagle_triton.ops.sampling.draws import chunk_of
from eagle_triton.ops.verification.rejection import _final_token_kernel, _sampled_walk_kernel
from eagle_triton.ops.verification.target_match import (
    _NOISE_PART,
    _NOISE_WARPS,
    Scores,
    _noise_kernel,
    _perturb_kernel,
    _target_walk_kernel,
)
from eagle_triton.ops.verification.topp import _rank_kernel, _topp_walk_kernel
from eagle_triton.ops.verification.update import Accepted, Sequences, StopRules, _update_sequence_kernel
from eagle_triton.ops.verification.walks import Walk, _first_path_kernel, _greedy_walk_kernel
from eagle_triton.ops.views import Matrix, Rows
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import signature_of, typed

_LONG = typed(Rows, "*i64")
_TYPES = {
    **dict.fromkeys(("temperature_ptr", "min_p_ptr", "peaks_ptr", "thresholds_ptr", "noise_ptr"), "*fp32"),
    **dict.fromkeys(("seed_ptr", "step_ptr", "tokens_ptr"), "*i64"),
    **dict.fromkeys(("parents_ptr", "places_ptr", "lengths_ptr", "depths_ptr", "ranks_ptr"), "*i32"),
    **dict.fromkeys(("tokens_strides", "parents_strides", "depths_strides"), ("i32", "i32")),
    "nan_ptr": "*i1",
    "sums_ptr": "*fp64",
    "walk": Walk("*i32", "*i32", "*i64"),
    "best": Scores("*fp32", "*fp32", "*i32"),
    "sequences": Sequences(_LONG, "i32", "*i32", "*i1", _LONG, "*i64", "*i32"),
    "tree_tokens": _LONG,
    "accepted": Accepted(typed(Rows, "*i32"), "i32", "*i32", "*i64", "*i1"),
    "rules": StopRules(_LONG, "i32", "*i32", "*i1"),
}
_WALK = {"NODES": 64, "CHUNKS": 32, "PARTS": 32, "STEPS": 16, "CHUNK": chunk_of(128256), "PAIRS": 64, "x.item": 1}
_NOISE = {"PART": _NOISE_PART, "PARTS": triton.next_power_of_2(triton.cdiv(128256, _NOISE_PART))}


def _case(name: str, kernel, constants: dict, options: dict, dtype: str = "bf16") -> tuple:
    types = {**_TYPES, "x": typed(Matrix, f"*{dtype}")}
    return name, kernel, *signature_of(kernel, types, constants), {**NO_FMA_FUSION, **options}


CASES = [
    _case("greedy walk", _greedy_walk_kernel, _WALK, {"num_warps": 8}),
    *(
        _case(
            f"{name} {dtype}",
            kernel,
            {**_WALK, "PDL": pdl},
            {"num_warps": 8, "aligned": ("vocabulary", "x.row"), "targets": targets},
            dtype,
        )
        for name, kernel in (("sampled walk", _sampled_walk_kernel), ("final token", _final_token_kernel))
        for dtype in ("bf16", "fp16")
        for pdl, targets in ((False, ("sm_80", "gfx942")), (True, ("sm_90", "sm_100")))
    ),
    *(
        _case(
            f"{name} {dtype}",
            kernel,
            {**_WALK, **_NOISE, **constexprs},
            {"num_warps": warps, "aligned": ("vocabulary", "x.row")},
            dtype,
        )
        for name, kernel, constexprs, warps in (
            ("noise", _perturb_kernel, {"noise_ptr": None}, _NOISE_WARPS),
            ("noise without filters", _perturb_kernel, {"noise_ptr": None, "thresholds_ptr": None}, _NOISE_WARPS),
            ("shared noise", _perturb_kernel, {}, _NOISE_WARPS),
            ("shared noise without filters", _perturb_kernel, {"thresholds_ptr": None}, _NOISE_WARPS),
            ("rank", _rank_kernel, {}, 8),
            ("top-p walk", _topp_walk_kernel, {"ranks_ptr": None}, 8),
            ("top-p walk with a window", _topp_walk_kernel, {}, 8),
        )
        for dtype in ("bf16", "fp16")
    ),
    _case("noise of levels", _noise_kernel, _NOISE, {"num_warps": _NOISE_WARPS, "aligned": ("vocabulary",)}),
    _case("target walk", _target_walk_kernel, {**_WALK, **_NOISE}, {"num_warps": 8}),
    _case("first path", _first_path_kernel, _WALK, {"num_warps": 1}),
    (
        "scheduled path",
        _scheduled_path_kernel,
        {
            **dict.fromkeys(("parents_ptr", "path_ptr", "accepted_ptr"), "*i32"),
            **{"step_ptr": "*i64", "mean": "fp32", "nodes": "i32"},
            **dict.fromkeys(("DEPTH", "BLOCK_N", "BLOCK_D"), "constexpr"),
        },
        {"DEPTH": 15, "BLOCK_N": 64, "BLOCK_D": 16},
        {"num_warps": 1},
    ),
    _case("update sequence", _update_sequence_kernel, {"STEPS": 16, "STOPS": 16}, {"num_warps": 1}),
]
