"""Production settings of the logit processing kernel: N 60, V 128256."""

from eagle_triton.ops.logit_processing import _CHUNK, _process_logits_kernel
from eagle_triton.ops.views import Cube, Matrix
from tests.compile_cases._views import typed

_TYPES = {
    **dict.fromkeys(("tokens_ptr", "ancestors_ptr", "stops_ptr"), "*i64"),
    **dict.fromkeys(("penalty_ptr", "presence_ptr", "frequency_ptr", "out_ptr"), "*fp32"),
    **dict.fromkeys(("least_ptr", "lengths_ptr", "answer_ptr"), "*i32"),
    "bias": typed(Matrix, "*fp32"),
    "seen": typed(Matrix, "*u8"),
    "counts": typed(Matrix, "*i32"),
}
_SIZES = {"NODES": 64, "STOPS": 16, "CHUNK": _CHUNK}


def _case(dtype: str) -> tuple:
    types = {**_TYPES, "logits": typed(Cube, f"*{dtype}")._replace(item="constexpr")}
    names = _process_logits_kernel.arg_names
    signature = {name: "constexpr" if name in _SIZES else types.get(name, "i32") for name in names}
    constexprs = {**_SIZES, (names.index("logits"), Cube._fields.index("item")): 1}
    aligned = ("vocabulary", "logits.batch", "logits.row", "bias.row", "seen.row", "counts.row")
    return (
        f"process logits {dtype}",
        _process_logits_kernel,
        signature,
        constexprs,
        {"num_warps": 8, "aligned": aligned},
    )


CASES = [_case("bf16"), _case("fp16")]
