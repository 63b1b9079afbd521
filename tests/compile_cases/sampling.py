"""Production settings of the drawing kernels: V 128256."""

from eagle_triton.ops.sampling.draws import (
    _chunk_sums_kernel,
    _probabilities_kernel,
    _sample_kernel,
    _uniform_at_kernel,
    _uniform_kernel,
    chunk_of,
)
from eagle_triton.ops.views import Matrix, Vector
from tests.compile_cases._views import signature_of, typed

_TYPES = {
    **dict.fromkeys(("temperature_ptr", "min_p_ptr", "thresholds_ptr", "out_ptr"), "*fp32"),
    "probs": typed(Matrix, "*fp32"),
    "coins": typed(Vector, "*fp32"),
    **dict.fromkeys(("seed_ptr", "step_ptr"), "*i64"),
    "positions_ptr": "*i32",
    "sums_ptr": "*fp64",
}
_SIZES = {"CHUNK": chunk_of(128256), "CHUNKS": 32, "BLOCK": 64, "x.item": 1, "probs.item": 1}


def _case(name: str, kernel, **types) -> tuple:
    options = {"num_warps": 4, "aligned": ("vocabulary", "x.row", "probs.row")}
    return name, kernel, *signature_of(kernel, {**_TYPES, **types}, _SIZES), options


CASES = [
    _case("probabilities bf16", _probabilities_kernel, x=typed(Matrix, "*bf16")),
    _case("probabilities fp16", _probabilities_kernel, x=typed(Matrix, "*fp16")),
    _case("uniform", _uniform_kernel),
    _case("uniform at", _uniform_at_kernel),
    _case("chunk sums", _chunk_sums_kernel),
    _case("sample", _sample_kernel, out_ptr="*i64"),
]
