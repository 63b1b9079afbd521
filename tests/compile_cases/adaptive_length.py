"""Production settings of the kernels that bound a tree's depth: V 32000 and 128256, trees up to 1024 candidates."""

from eagle_triton.operands.adaptive_length import EGAGConfig, GuideTensors
from eagle_triton.ops.adaptive_length import choose_gamma, clip_depth, row_entropy
from tests.compile_cases._launches import FLOATS, fp32, fp64, i32, i64, launches

_GUIDE, _LENGTHS = GuideTensors(fp64(4, 4), i32(4)), i32(4)
_RULE, _STOPPING = EGAGConfig(gamma_max=6, ema_beta=0.9), EGAGConfig(gamma_max=7, mode="stop")


def _clip_depth(candidates: int, config: EGAGConfig, levels: int | None) -> None:
    given = i64(4, candidates), fp32(4, candidates), i32(candidates), _GUIDE, _LENGTHS, _LENGTHS
    clip_depth(*given, config, levels)


CASES = [
    *launches("entropy bf16", row_entropy, FLOATS["bf16"](4, 128256)),
    *launches("entropy fp16", row_entropy, FLOATS["fp16"](4, 32000)),
    *launches("entropy fp32", row_entropy, FLOATS["fp32"](4, 32000)),
    *launches("gamma", choose_gamma, fp32(4), _LENGTHS, _GUIDE, _RULE, 128256),
    *launches("gamma, stopping", choose_gamma, fp32(4), _LENGTHS, _GUIDE, _STOPPING, 128256),
    *launches("a chain", _clip_depth, 7, _RULE, None),
    *launches("a tree", _clip_depth, 710, _STOPPING, 8),
]
