"""Production settings of the drawing kernels: V 128256."""

from eagle_triton.ops.sampling.draws import (
    _chunk_sums_kernel,
    _probabilities_kernel,
    _sample_kernel,
    _uniform_at_kernel,
    _uniform_kernel,
    chunk_of,
)

_TYPES = {
    **dict.fromkeys(("temperature_ptr", "min_p_ptr", "thresholds_ptr", "out_ptr", "probs_ptr", "coins_ptr"), "*fp32"),
    **dict.fromkeys(("seed_ptr", "step_ptr"), "*i64"),
    "positions_ptr": "*i32",
    "sums_ptr": "*fp64",
}
_SIZES = {"CHUNK": chunk_of(128256), "CHUNKS": 32, "BLOCK": 64, "stride_xv": 1, "stride_pv": 1}


def _case(name: str, kernel, **types: str) -> tuple:
    constexprs = {key: value for key, value in _SIZES.items() if key in kernel.arg_names}
    types = {**_TYPES, **types}
    signature = {key: "constexpr" if key in constexprs else types.get(key, "i32") for key in kernel.arg_names}
    aligned = tuple(key for key in ("vocabulary", "stride_xr", "stride_pb") if key in signature)
    return name, kernel, signature, constexprs, {"num_warps": 4, "aligned": aligned}


CASES = [
    _case("probabilities bf16", _probabilities_kernel, x_ptr="*bf16"),
    _case("probabilities fp16", _probabilities_kernel, x_ptr="*fp16"),
    _case("uniform", _uniform_kernel),
    _case("uniform at", _uniform_at_kernel),
    _case("chunk sums", _chunk_sums_kernel),
    _case("sample", _sample_kernel, out_ptr="*i64"),
]
