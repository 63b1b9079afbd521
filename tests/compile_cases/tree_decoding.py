"""Production settings of the kernels that grow a tree: N 60, K 10, D 8, V 128256 and 32000; and those of block drafters
whose paths have states: N 60, K 8, D 16, and the 64 best of V 151936."""

from eagle_triton.ops.tree import (
    Beam,
    ChunkBest,
    Lists,
    _best_first_tree_kernel,
    _build_tree_kernel,
    _expand_beam_kernel,
    _topk_chunk_kernel,
    _topk_merge_kernel,
    topk_chunk_of,
)
from eagle_triton.ops.views import Cube, Matrix
from eagle_triton.runtime.launch import NO_FMA_FUSION
from eagle_triton.tree_decoding import topk_warps
from tests.compile_cases._views import signature_of, typed


def _case(name: str, kernel, types: dict, constants: dict, warps: int, aligned: tuple[str, ...] = ()) -> tuple:
    return (
        name,
        kernel,
        *signature_of(kernel, types, constants),
        {**NO_FMA_FUSION, "num_warps": warps, "aligned": aligned},
    )


def _topk(dtype: str, vocabulary: int, k: int = 10) -> list[tuple]:
    chunk = topk_chunk_of(vocabulary)
    chunks = -(-vocabulary // chunk)
    types = {"x": typed(Matrix, f"*{dtype}"), "best": ChunkBest("*i64", "*fp32", "*fp32"), "offsets_ptr": "*i64"}
    types |= {"values_out_ptr": "*fp32", "tokens_out_ptr": "*i64"}
    first = {"K": k, "CHUNK": chunk}
    merge = {"K": k, "CHUNKS": 1 << (chunks - 1).bit_length(), "WIDTH": 1 << (k - 1).bit_length()}
    merge["CANDIDATES"] = 1 << (chunks * k - 1).bit_length()
    warps, aligned = topk_warps(vocabulary), ("vocabulary", "x.row")
    return [
        _case(f"topk chunk {dtype} {vocabulary}", _topk_chunk_kernel, types, first, warps, aligned),
        _case(f"topk merge {dtype} {vocabulary}", _topk_merge_kernel, types, merge, warps, aligned),
    ]


_PAIR, _TRIPLE = ("i32",) * 2, ("i32",) * 3
_BEAM = {
    "parents_ptr": "*fp32",
    "parents_strides": _PAIR,
    "log_probs": typed(Cube, "*fp32"),
    "tokens": typed(Matrix, "*i64"),
}
_BEAM |= {"ancestors": typed(Cube, "*i64"), "selected_ptr": "*i64", "children_ptr": "*i64"}
_BEAM |= {"child_scores_ptr": "*fp32", "chosen_ptr": "*i64"}
_BEAM |= {"beam": Beam("*i64", "*i64", "*fp32", "*i64")}
_BUILD = dict.fromkeys(("candidates", "beam"), typed(Lists, "*i64"))
_BUILD |= dict.fromkeys(("root_ptr", "tokens_ptr", "ancestors_ptr"), "*i64")
_BUILD |= dict.fromkeys(("lengths_ptr", "parents_ptr", "depths_ptr"), "*i32")
_BUILD |= {
    "root_strides": _PAIR,
    "tree_strides": (_PAIR, _PAIR, _PAIR, _TRIPLE),
    "scores": typed(Matrix, "*fp32"),
    "selected_ptr": "*i64",
}
_BUILD |= {"grafted": typed(Lists, "*i32"), "scratch_ptr": "*i32"}
_BEST = {
    **{name: kind for name, kind in _BUILD.items() if name.endswith(("_ptr", "_strides"))},
    **dict.fromkeys(("log_probs_ptr", "scores_ptr"), "*fp32"),
    **dict.fromkeys(("choices_ptr", "rows_ptr"), "*i64"),
}
_ALIKE = {"ROWS": 1, "rows_ptr": None}
_LEVEL = {"CHILDREN": 128, "WIDTH": 16}
_TREE = {"CANDIDATES": 1024, "NODES": 64, "PAIRS": 64, "DOUBLINGS": 6}
_LANES = {**_TREE, "CANDIDATES": 8192, "selected_ptr": None, "grafted": None}
_CHOSEN = {"scratch_ptr": None, "grafted": None, "lengths_ptr": None}
CASES = [
    *(case for dtype in ("bf16", "fp16") for vocabulary in (32000, 128256) for case in _topk(dtype, vocabulary)),
    *_topk("bf16", 151936, 64),
    _case("expand beam", _expand_beam_kernel, _BEAM, {**_LEVEL, "selected_ptr": None}, 1),
    _case("expand beam fixed", _expand_beam_kernel, _BEAM, {**_LEVEL, "children_ptr": None}, 1),
    _case("expand lanes", _expand_beam_kernel, _BEAM, {"CHILDREN": 512, "WIDTH": 64, "selected_ptr": None}, 1),
    _case("build tree", _build_tree_kernel, _BUILD, {**_TREE, "selected_ptr": None, "grafted": None}, 2),
    _case("build tree of lanes", _build_tree_kernel, _BUILD, _LANES, 4),
    _case("build tree grafted", _build_tree_kernel, _BUILD, {**_TREE, "selected_ptr": None}, 2),
    _case("build tree fixed", _build_tree_kernel, _BUILD, {**_TREE, **_CHOSEN}, 2),
    *(
        _case(name, _best_first_tree_kernel, _BEST, {"DOUBLINGS": 4, **sizes}, 1)
        for name, sizes in {
            "best-first tree 64": {**_ALIKE, "K": 8, "PLACES": 8, "NODES": 64},
            "best-first tree 256": {**_ALIKE, "K": 16, "PLACES": 16, "NODES": 256},
            "best-first chain": {**_ALIKE, "K": 1, "PLACES": 1, "NODES": 16},
            "best-first tree of rows": {"ROWS": 16, "K": 8, "PLACES": 128, "NODES": 128},
            "best-first tree of 64 rows": {"ROWS": 64, "K": 8, "PLACES": 512, "NODES": 64},
        }.items()
    ),
]
