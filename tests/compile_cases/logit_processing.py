"""Production settings of the logit processing kernels: N 60, V 128256."""

from eagle_triton.operands.logit_processing import MASK_WORD
from eagle_triton.ops.logit_processing import _CHUNK, _mask_tokens_kernel, _process_logits_kernel
from eagle_triton.ops.views import BatchedRows, Cube, Matrix
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


def _mask_case(dtype: str) -> tuple:
    sizes = {"WORD": MASK_WORD, "CHUNK": _CHUNK}
    views = {"logits": typed(Cube, f"*{dtype}")._replace(item="constexpr"), "allowed": typed(BatchedRows, "*i32")}
    names = _mask_tokens_kernel.arg_names
    types = {**views, "restricted_ptr": "*i1"}
    signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in names}
    constexprs = {**sizes, (names.index("logits"), Cube._fields.index("item")): 1}
    aligned = ("vocabulary", "logits.batch", "logits.row", "allowed.batch", "allowed.row")
    return (f"mask tokens {dtype}", _mask_tokens_kernel, signature, constexprs, {"num_warps": 8, "aligned": aligned})


CASES = [_case("bf16"), _case("fp16"), _mask_case("bf16"), _mask_case("fp32")]
