"""Production settings of gather_rows and sequence_rows: features of the 8b shape, the tokens of a step."""

from eagle_triton.ops.gather import gather_rows, sequence_rows
from tests.compile_cases._launches import bf16, fp32, i32, i64, launches

CASES = [
    *launches("features", gather_rows, bf16(1, 60, 12288), i32(1, 9)),
    *launches("logits", gather_rows, fp32(1, 60, 32000), i64(1, 9)),
    *launches("tokens", sequence_rows, i64(1, 600), i32(1), 8),
]
