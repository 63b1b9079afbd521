"""Production settings of gather_rows and sequence_rows: features of the 8b shape, the tokens of a step."""

from eagle_triton.ops.gather import _gather_rows_kernel, _sequence_rows_kernel
from eagle_triton.runtime.launch import EXACT


def _case(name, kernel, values, warps, **types):
    signature = {name: "constexpr" if name in values else types.get(name, "i32") for name in kernel.arg_names}
    return name, kernel, signature, values, {**EXACT, "num_warps": warps, "aligned": ("size", "stride_xb", "stride_xp")}


CASES = [
    _case("features", _gather_rows_kernel, {"BLOCK": 1024}, 4, x_ptr="*bf16", index_ptr="*i32", out_ptr="*bf16"),
    _case("logits", _gather_rows_kernel, {"BLOCK": 1024}, 4, x_ptr="*fp32", index_ptr="*i64", out_ptr="*fp32"),
    _case("tokens", _sequence_rows_kernel, {"BLOCK": 8}, 1, tokens_ptr="*i64", first_ptr="*i32", out_ptr="*i64"),
]
