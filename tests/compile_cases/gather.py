"""Production settings of gather_rows and sequence_rows: features of the 8b shape, the tokens of a step."""

from eagle_triton.ops.gather import _gather_rows_kernel, _sequence_rows_kernel
from eagle_triton.ops.views import BatchedRows, Matrix
from eagle_triton.runtime.launch import NO_FMA_FUSION
from tests.compile_cases._views import typed


def _case(name, kernel, values, warps, **types):
    signature = {name: "constexpr" if name in values else types.get(name, "i32") for name in kernel.arg_names}
    return (
        name,
        kernel,
        signature,
        values,
        {**NO_FMA_FUSION, "num_warps": warps, "aligned": ("size", "x.batch", "x.row")},
    )


CASES = [
    _case(
        name,
        _gather_rows_kernel,
        {"BLOCK": 1024},
        4,
        **dict.fromkeys(("x", "out"), typed(BatchedRows, f"*{dtype}")),
        index=typed(Matrix, f"*{integers}"),
    )
    for name, dtype, integers in (("features", "bf16", "i32"), ("logits", "fp32", "i64"))
]
CASES += [
    _case("tokens", _sequence_rows_kernel, {"BLOCK": 8}, 1, tokens_ptr="*i64", first_ptr="*i32", out_ptr="*i64"),
]
