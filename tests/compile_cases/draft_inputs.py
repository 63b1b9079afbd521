"""Production settings of draft_inputs: 8b and 1b shapes, the beam passes and the pass over emitted tokens; zero-centred
norms."""

from eagle_triton.ops.draft_inputs import Norm, _draft_inputs_kernel
from eagle_triton.ops.views import Matrix
from eagle_triton.runtime.launch import DRAFT_WARPS, NO_FMA_FUSION
from tests.compile_cases._views import typed


def _case(name, size, parents=True, norms=True, splits=1, zero_centred=False, round_first=True):
    names = _draft_inputs_kernel.arg_names
    constexprs = {
        "size": size,
        "BLOCK": size,
        "SPLITS": splits,
        "ZERO_CENTRED": zero_centred,
        "ROUND_FIRST": round_first,
    }
    if not parents:
        constexprs["parents_ptr"] = None
    if not norms:
        constexprs |= {(names.index(norm), 0): None for norm in ("token_norm", "feature_norm")}
    types = {
        **dict.fromkeys(("parents_ptr", "tokens_ptr"), "*i64"),
        **dict.fromkeys(("token_norm", "feature_norm"), Norm("*bf16" if norms else "constexpr", "fp32")),
        "embedding": typed(Matrix, "*bf16"),
    }
    if splits > 1:
        types["values_ptr"] = "*fp32"
    signature = {
        argument: "constexpr"
        if argument in constexprs
        else types.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
        for argument in names
    }
    options = {**NO_FMA_FUSION, "num_warps": DRAFT_WARPS, "aligned": ("stride_split", "embedding.row")}
    return name, _draft_inputs_kernel, signature, constexprs, options


CASES = [
    case
    for size in (4096, 2048)
    for case in (
        _case(f"beam {size}", size),
        _case(f"emitted {size}", size, parents=False, splits=4),
        _case(f"eagle1 {size}", size, norms=False),
        _case(f"zero-centred {size}", size, zero_centred=True),
        _case(f"rounded once {size}", size, round_first=False),
    )
]
