"""Production settings of the logit processing kernels: N 60, V 128256."""

from eagle_triton.operands.logit_processing import LogitRules
from eagle_triton.ops.logit_processing import mask_tokens, process_logits
from tests.compile_cases._launches import FLOATS, fp32, i1, i32, i64, launches, u8

_V = 128256
_RULES = LogitRules(fp32(4), fp32(4, _V), u8(4, _V), i32(4), fp32(4), fp32(4), i32(4, _V), i32(4))


def _process(dtype: str) -> None:
    process_logits(FLOATS[dtype](4, 60, _V), i64(4, 60), i64(4, 60, 1), _RULES, i32(4), i64(4, 9))


CASES = [
    *(case for dtype in ("bf16", "fp16") for case in launches(dtype, _process, dtype)),
    *(
        case
        for dtype in ("bf16", "fp32")
        for case in launches(dtype, mask_tokens, FLOATS[dtype](4, 60, _V), i32(4, 60, _V // 32), i1(4))
    ),
]
