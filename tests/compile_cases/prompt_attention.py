"""Production settings of what stands around cuDNN's attention of a long prompt: heads of 64, 80 and 128."""

import torch

from eagle_triton.ops.prompt_attention import _added_up, _Part, _taken
from tests.compile_cases._launches import empty, fp32, i32, launches


def _cases(width: int, dtype: torch.dtype) -> list[tuple]:
    def empties(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=dtype)

    part, sums = (_Part(out, fp32(32, 2048)) for out in (empties(2048, 32, width), fp32(2048, 32, width)))
    cache, room = empties(2, 512, 8, 64, width), empties(2 * 8 * 2048 * width)
    name = f"d {width} {dtype}"
    return [
        *launches(name, _taken, cache, i32(512), 16384, 2048, 2000, room),
        *launches(f"some {name}", _added_up, [part] * 2, dtype),
        *launches(f"more {name}", _added_up, [sums, part], dtype),
        *launches(f"first {name}", _added_up, [part] * 4, torch.float32),
        *launches(f"sinks {name}", _added_up, [part] * 2, dtype, empties(32)),
    ]


CASES = [
    *_cases(128, torch.bfloat16),
    *_cases(64, torch.bfloat16),
    *_cases(80, torch.float16),
    *_cases(128, torch.float16),
]
