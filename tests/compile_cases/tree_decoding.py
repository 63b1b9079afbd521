"""Production settings of the kernels that grow a tree: N 60, K 10, D 8, V 128256 and 32000."""

from eagle_triton.ops.tree import (
    _build_tree_kernel,
    _expand_beam_kernel,
    _topk_chunk_kernel,
    _topk_merge_kernel,
    topk_chunk_of,
)
from eagle_triton.runtime.launch import EXACT
from eagle_triton.tree_decoding import topk_warps

_TYPES = {"tokens_ptr": "*i64", "parents_ptr": "*i32", "peaks_ptr": "*fp32"}


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


_BEAM = {"parents_ptr": "*fp32", "log_probs_ptr": "*fp32", "ancestors_ptr": "*i64"}
_BEAM |= {"chosen_ptr": "*i64", "selected_ptr": "*i64", "child_scores_ptr": "*fp32", "parents_out_ptr": "*i64"}
_BEAM |= {"tokens_out_ptr": "*i64", "scores_out_ptr": "*fp32", "ancestors_out_ptr": "*i64"}
_BEAM |= {"children_ptr": "*i64"}
_BUILD = dict.fromkeys(("root_ptr", "candidates_ptr", "beam_ptr", "ancestors_ptr"), "*i64")
_BUILD |= {"scores_ptr": "*fp32", "depths_ptr": "*i32", "scratch_ptr": "*i32", "selected_ptr": "*i64"}
_BUILD |= {"grafted_ptr": "*i32", "lengths_ptr": "*i32"}
_TREE = {"CANDIDATES": 1024, "NODES": 64, "PAIRS": 64, "DOUBLINGS": 6}
CASES = [
    *(case for dtype in ("bf16", "fp16") for vocabulary in (32000, 128256) for case in _topk(dtype, vocabulary)),
    _case(
        "expand beam",
        _expand_beam_kernel,
        _BEAM,
        {"CHILDREN": 128, "WIDTH": 16, "selected_ptr": None},
        {**EXACT, "num_warps": 1},
    ),
    _case(
        "expand beam fixed",
        _expand_beam_kernel,
        _BEAM,
        {"CHILDREN": 128, "WIDTH": 16, "children_ptr": None},
        {**EXACT, "num_warps": 1},
    ),
    _case(
        "build tree",
        _build_tree_kernel,
        _BUILD,
        {**_TREE, "selected_ptr": None, "grafted_ptr": None},
        {**EXACT, "num_warps": 2},
    ),
    _case("build tree grafted", _build_tree_kernel, _BUILD, {**_TREE, "selected_ptr": None}, {**EXACT, "num_warps": 2}),
    _case(
        "build tree fixed",
        _build_tree_kernel,
        _BUILD,
        {**_TREE, "scratch_ptr": None, "grafted_ptr": None, "lengths_ptr": None},
        {**EXACT, "num_warps": 2},
    ),
]
