"""Production settings of the logit processing kernel: N 60, V 128256."""

from eagle_triton.ops.logit_processing import _CHUNK, _process_logits_kernel

_TYPES = {
    **dict.fromkeys(("tokens_ptr", "ancestors_ptr", "stops_ptr"), "*i64"),
    **dict.fromkeys(("penalty_ptr", "bias_ptr", "out_ptr"), "*fp32"),
    **dict.fromkeys(("least_ptr", "lengths_ptr"), "*i32"),
    "seen_ptr": "*u8",
}
_SIZES = {"NODES": 64, "STOPS": 16, "CHUNK": _CHUNK, "stride_xv": 1}


def _case(dtype: str) -> tuple:
    types = {**_TYPES, "x_ptr": f"*{dtype}"}
    names = _process_logits_kernel.arg_names
    signature = {name: "constexpr" if name in _SIZES else types.get(name, "i32") for name in names}
    aligned = ("vocabulary", "stride_xb", "stride_xn", "stride_bb", "stride_sb")
    return f"process logits {dtype}", _process_logits_kernel, signature, _SIZES, {"num_warps": 8, "aligned": aligned}


CASES = [_case("bf16"), _case("fp16")]
