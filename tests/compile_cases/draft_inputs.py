"""Production settings of draft_inputs: 8b and 1b shapes, the beam passes and the pass over emitted tokens; zero-centred
norms."""

from eagle_triton.ops.draft_inputs import _draft_inputs_kernel
from eagle_triton.runtime.launch import DRAFT_WARPS, EXACT


def _case(name, size, absent=(), splits=1, zero_centred=False):
    constexprs = {"size": size, "BLOCK": size, "SPLITS": splits, "ZERO_CENTRED": zero_centred, **dict.fromkeys(absent)}
    types = {"parents_ptr": "*i64", "tokens_ptr": "*i64", "token_eps": "fp32", "feature_eps": "fp32"}
    if splits > 1:
        types["features_ptr"] = "*fp32"
    signature = {
        argument: "constexpr"
        if argument in constexprs
        else types.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
        for argument in _draft_inputs_kernel.arg_names
    }
    options = {**EXACT, "num_warps": DRAFT_WARPS, "aligned": ("stride_fs", "stride_e")}
    return name, _draft_inputs_kernel, signature, constexprs, options


CASES = [
    case
    for size in (4096, 2048)
    for case in (
        _case(f"beam {size}", size),
        _case(f"emitted {size}", size, ("parents_ptr",), 4),
        _case(f"eagle1 {size}", size, ("token_norm_ptr", "feature_norm_ptr")),
        _case(f"zero-centred {size}", size, zero_centred=True),
    )
]
