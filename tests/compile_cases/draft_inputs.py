"""Production settings of draft_inputs: 8b and 1b shapes, the beam passes and the pass over emitted tokens; zero-centred
norms."""

from eagle_triton.ops.draft_inputs import draft_inputs
from eagle_triton.runtime.split_sums import SplitSums
from tests.compile_cases._launches import bf16, fp32, i64, launches


def _cases(size: int) -> list[tuple]:
    level, tree = bf16(1, 10, size), (i64(1, 10), i64(1, 10), bf16(32000, size))
    norms = dict(token_norm=bf16(size), feature_norm=bf16(size))
    emitted = SplitSums(fp32(4, 1, 9, size), level.dtype)
    return [
        *launches(f"beam {size}", draft_inputs, level, *tree, **norms),
        *launches(f"emitted {size}", draft_inputs, emitted, None, i64(1, 9), tree[-1], **norms),
        *launches(f"eagle1 {size}", draft_inputs, level, *tree),
        *launches(f"zero-centred {size}", draft_inputs, level, *tree, **norms, zero_centred=True),
        *launches(f"rounded once {size}", draft_inputs, level, *tree, **norms, round_first=False),
    ]


CASES = [*_cases(4096), *_cases(2048)]
