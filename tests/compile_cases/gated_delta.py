"""Production settings of the gated delta rule: Qwen3.5, H 16, HV 48, K = V = 128, bf16; HV 32 has the same code."""

from itertools import product

from eagle_triton.ops.gated_delta import chunk, commit, conv, norm, recurrent, tree
from eagle_triton.ops.gated_delta.commit import LayerGates, LayerRows, LayerStates
from eagle_triton.ops.gated_delta.recurrent import GateInputs, HeadShape, HeadValues, States
from eagle_triton.ops.views import BatchedRows, Heads, Matrix
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed

_HEAD_VALUES, _ROWS, _HEADS = (typed(view, "*bf16") for view in (HeadValues, BatchedRows, Heads))
_LAYER_ROWS = typed(LayerRows, "*bf16")
_TYPES = {
    **dict.fromkeys(("mixed", "window", "out", "raw"), _ROWS),
    **dict.fromkeys(("q", "k", "v", "x", "z"), _HEADS),
    "gate_inputs": GateInputs(_HEAD_VALUES, _HEAD_VALUES, "*fp32", "*fp32"),
    "states": typed(States, "*fp32"),
    "weight": typed(Matrix, "*bf16"),
    **dict.fromkeys(("gates_ptr", "matrices_ptr", "factors_ptr"), "*fp32"),
    **dict.fromkeys(("path_ptr", "accepted_ptr", "slots_ptr", "starts_ptr", "counts_ptr"), "*i32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    "ancestors_ptr": "*i64",
}
_OF_LAYERS = {
    "states": typed(LayerStates, "*fp32"),
    "gates": typed(LayerGates, "*fp32"),
    **dict.fromkeys(("windows", "raw", "mixed"), _LAYER_ROWS),
}
_ALIGNED = ["gate_inputs.a.head", *(f"gate_inputs.b.{field}" for field in ("batch", "row", "head"))]
_ALIGNED += ["stride_tb", "stride_tn", "stride_gb", "stride_gn", "stride_gg"]


def _case(name, kernel, constexprs, warps, absent=(), stages=1, types=_TYPES, **more):
    """`absent`: arguments that are None."""
    constexprs = {**constexprs, **dict.fromkeys(absent)}
    signature = {
        argument: "constexpr"
        if argument in constexprs
        else types.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
    }
    aligned = [*_ALIGNED]
    for argument, kind in signature.items():
        if not isinstance(kind, str | GateInputs | Matrix):
            aligned += [f"{argument}.{field}" for field in kind._fields]
    options = {**NO_FMA_FUSION, "num_warps": warps, "num_stages": stages, "aligned": aligned, **more}
    return name, kernel, signature, constexprs, options


PIECES = {"": ("slots_ptr", "starts_ptr", "counts_ptr"), " of pieces": ()}  # what is absent
PARTS = {"ptx": ("sm_80", "sm_90", "sm_100"), "portable": ("gfx942",)}
MMA = {"without": ("wgmma",)}  # see dots.py

CASES = []
_HV = 48  # 3 for each head of k, which is no power of two
_shape = HeadShape(H=16, HV=_HV, K=128, V=128, BLOCK_K=128, BLOCK_V=recurrent.BLOCK_V)
for _nodes, (_parts, _targets) in product((16, 64), PARTS.items()):
    _parts = _parts.replace("ptx", "ptx in turn")
    _values = {"SHAPE": _shape._replace(BLOCK_V=tree.BLOCK_V), "PARTS": _parts, "BLOCK_N": _nodes}
    _name, _options = f"delta_tree {_nodes} nodes", {"targets": _targets, **MMA}
    CASES.append(_case(_name, tree._delta_tree_kernel, _values, tree.WARPS, **_options))
for _keep in (True, False):
    _values = {"SHAPE": _shape, "KEEP": _keep}
    _absent = ("gates_ptr",) if _keep else ()
    _name = f"delta_{'recurrent' if _keep else 'tree 1 node'}"
    CASES.append(_case(_name, recurrent._delta_recurrent_kernel, _values, recurrent.WARPS, _absent))
_of_chunks = _shape._replace(BLOCK_V=chunk.BLOCK_V)
for (_stages, _parts, _targets), (_kind, _absent) in product(
    ((2, "ptx", ("sm_90", "sm_100")), (1, "ptx", ("sm_80",)), (1, "portable", ("gfx942",))), PIECES.items()
):
    _name, _options = f"delta_chunk{_kind}", {"targets": _targets, "stages": _stages, **MMA}
    _values = {"SHAPE": _of_chunks, "PARTS": _parts}
    _options |= {"local": 8} if _kind else {}  # an address
    CASES.append(_case(_name, chunk._delta_chunk_kernel, _values, chunk.WARPS, _absent, **_options))
for (_parts, _targets), (_kind, _absent) in product(PARTS.items(), PIECES.items()):
    _values = {"SHAPE": _of_chunks, "PARTS": _parts}
    _name, _options = f"delta_chunk's matrices{_kind}", {"targets": _targets, **MMA}
    CASES.append(_case(_name, chunk._chunk_matrices_kernel, _values, chunk.MATRICES_WARPS, _absent[2:], **_options))
_values = {"SHAPE": _shape, "KEPT": 3, "BLOCK_W": 4, "BLOCK_C": commit.BLOCK_C}
CASES.append(_case("commit_states", commit._commit_states_kernel, _values, recurrent.WARPS, types=_TYPES | _OF_LAYERS))
_values = {"R": _HV // 16, "HV": _HV, "V": 128, "HEADS": norm.TILE // 128, "BLOCK_V": 128}
CASES.append(_case("gated_norm", norm._gated_norm_kernel, _values, norm.WARPS))
_chain = ("ancestors_ptr", "raw")
for _nodes, _kind, _absent in (
    (conv.BLOCK_N, "tree", PIECES[""]),
    (1, "tree", PIECES[""]),
    (conv.BLOCK_N, "chain", (*_chain, *PIECES[""])),
    (conv.BLOCK_N, "pieces", _chain),
):
    _name = f"causal_conv {_kind} by {_nodes}"
    _values = {"SHAPE": conv.ConvShape(2048, 128 * _HV, 128, 8 * _HV, 4, 4, _nodes, conv.BLOCK_C)}
    CASES.append(_case(_name, conv._causal_conv_kernel, _values, conv.warps(_nodes, conv.BLOCK_C), _absent))
