"""Production settings of the gated delta rule: Qwen3.5 and Qwen3-Next, H 16, HV 32 and 48, K = V = 128, bf16."""

from itertools import product

from eagle_triton.ops.gated_delta import chunk, commit, conv, norm, recurrent, tree
from eagle_triton.runtime.launch import EXACT

_TYPES = {
    **dict.fromkeys(("A_log_ptr", "dt_bias_ptr", "state_ptr", "states_ptr", "gates_ptr"), "*fp32"),
    **dict.fromkeys(("matrices_ptr", "factors_ptr"), "*fp32"),
    **dict.fromkeys(("path_ptr", "accepted_ptr", "slots_ptr", "starts_ptr", "counts_ptr"), "*i32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    "ancestors_ptr": "*i64",
}
_ODD = ("stride_ar", "stride_br", "stride_wc", "stride_wt", "stride_ab", "stride_an", "stride_pb", "stride_cb")


def _case(name, kernel, constexprs, warps, absent=(), stages=1, **more):
    """`absent`: pointers that are None."""
    constexprs = {**constexprs, **dict.fromkeys(absent)}
    signature = {
        argument: "constexpr"
        if argument in constexprs
        else _TYPES.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
    }
    aligned = [name for name in kernel.arg_names if name.startswith("stride_") and name not in _ODD]
    options = {**EXACT, "num_warps": warps, "num_stages": stages, "aligned": aligned, **more}
    return name, kernel, signature, constexprs, options


PIECES = {"": ("slots_ptr", "starts_ptr", "counts_ptr"), " of pieces": ()}  # what is absent
PARTS = {"ptx": ("sm_80", "sm_90", "sm_100"), "portable": ("gfx942",)}
MMA = {"without": ("wgmma",)}  # see dots.py

CASES = []
for _heads in (32, 48):
    _shape = {"H": 16, "HV": _heads, "K": 128, "V": 128, "BLOCK_K": 128}
    for _nodes, (_parts, _targets) in product((16, 64), PARTS.items()):
        _parts = _parts.replace("ptx", "ptx in turn")
        _values = {**_shape, "PARTS": _parts, "BLOCK_N": _nodes, "BLOCK_V": tree.BLOCK_V}
        _name, _options = f"delta_tree {_nodes} nodes HV {_heads}", {"targets": _targets, **MMA}
        CASES.append(_case(_name, tree._delta_tree_kernel, _values, tree.WARPS, **_options))
    for _keep in (True, False):
        _values = {**_shape, "KEEP": _keep, "BLOCK_V": recurrent.BLOCK_V}
        _absent = ("gates_ptr",) if _keep else ()
        _name = f"delta_{'recurrent' if _keep else 'tree 1 node'} HV {_heads}"
        CASES.append(_case(_name, recurrent._delta_recurrent_kernel, _values, recurrent.WARPS, _absent))
    for (_stages, _parts, _targets), (_kind, _absent) in product(
        ((2, "ptx", ("sm_90", "sm_100")), (1, "ptx", ("sm_80",)), (1, "portable", ("gfx942",))), PIECES.items()
    ):
        _name, _options = f"delta_chunk HV {_heads}{_kind}", {"targets": _targets, "stages": _stages, **MMA}
        _values = {**_shape, "PARTS": _parts, "BLOCK_V": chunk.BLOCK_V}
        _options |= {"local": 8} if _kind else {}  # an address
        CASES.append(_case(_name, chunk._delta_chunk_kernel, _values, chunk.WARPS, _absent, **_options))
    for (_parts, _targets), (_kind, _absent) in product(PARTS.items(), PIECES.items()):
        _values = {**{name: value for name, value in _shape.items() if name != "V"}, "PARTS": _parts}
        _name, _options = f"delta_chunk's matrices HV {_heads}{_kind}", {"targets": _targets, **MMA}
        CASES.append(_case(_name, chunk._chunk_matrices_kernel, _values, chunk.MATRICES_WARPS, _absent[2:], **_options))
    _values = {**_shape, "KEPT": 3, "BLOCK_W": 4, "BLOCK_C": commit.BLOCK_C, "BLOCK_V": recurrent.BLOCK_V}
    CASES.append(_case(f"commit_states HV {_heads}", commit._commit_states_kernel, _values, recurrent.WARPS))
    _values = {"R": _heads // 16, "HV": _heads, "V": 128, "HEADS": norm.TILE // 128, "BLOCK_V": 128}
    CASES.append(_case(f"gated_norm HV {_heads}", norm._gated_norm_kernel, _values, norm.WARPS))
    _values = {"KEYS": 2048, "VALUES": 128 * _heads, "K": 128, "RV": 8 * _heads, "TAPS": 4, "BLOCK_T": 4}
    _chain = ("ancestors_ptr", "raw_ptr")
    for _nodes, _kind, _absent in (
        (conv.BLOCK_N, "tree", PIECES[""]),
        (1, "tree", PIECES[""]),
        (conv.BLOCK_N, "chain", (*_chain, *PIECES[""])),
        (conv.BLOCK_N, "pieces", _chain),
    ):
        _name = f"causal_conv {_kind} by {_nodes} HV {_heads}"
        _blocks = {"BLOCK_N": _nodes, "BLOCK_C": conv.BLOCK_C}
        CASES.append(
            _case(_name, conv._causal_conv_kernel, {**_values, **_blocks}, conv.warps(_nodes, conv.BLOCK_C), _absent)
        )
