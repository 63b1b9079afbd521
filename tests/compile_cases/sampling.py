"""Production settings of the kernels that find thresholds and draw: V 128256."""

from eagle_triton.ops.sampling import probabilities, sample, uniform, uniform_at
from tests.compile_cases._launches import bf16, fp16, fp32, i32, launches, params_of

_PARAMS = params_of(4)

CASES = [
    *launches("bf16", probabilities, bf16(4, 60, 128256), _PARAMS, top_p_first=True),
    *launches("fp16", probabilities, fp16(4, 60, 128256), _PARAMS),
    *launches("coins", uniform, _PARAMS, 61),
    *launches("noise", uniform_at, _PARAMS, i32(4, 9), 128256),
    *launches("a token", sample, fp32(4, 128256), fp32(4)),
]
