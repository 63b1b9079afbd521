"""Production settings of the verification kernels: N 60, D 8, V 128256."""

import torch

from eagle_triton.benchmarks.acceptance import launch_scheduled_path
from eagle_triton.operands.verification import REPORT_TOKENS, Stops
from eagle_triton.ops import verification as kernels
from tests.compile_cases._launches import FLOATS, i1, i32, i64, launches, params_of

_TOKENS, _PARENTS, _LENGTHS, _PARAMS = i64(4, 60), i32(4, 60), i32(4), params_of(4)
_TREE = _TOKENS, _PARENTS, 8
_PLACES = _PARAMS, _LENGTHS, i32(4, 60)
_STOPS = Stops(i64(4, 9), i32(4), i1(4))


def _cases(name: str) -> list[tuple]:
    logits: torch.Tensor = FLOATS[name](4, 60, 128256)
    chain = logits[:, :9], _TOKENS[:, :9], _PARENTS[:, :9], 8
    of_chain = _PARAMS, _LENGTHS, i32(4, 9)
    match, topp, nan = kernels.verify_target_match, kernels.verify_topp, i1(4)
    return [
        *launches(f"greedy {name}", kernels.verify_greedy, logits, *_TREE, nan=nan),
        *launches(f"rejection {name}", kernels.verify_sampling, logits, *_TREE, _PARAMS, True, nan=nan),
        *launches(f"match {name}", match, logits, *_TREE, *_PLACES, nan=nan),
        *launches(f"match without filters {name}", match, logits, *_TREE, *_PLACES, filtered=False, nan=nan),
        *launches(f"match of a chain {name}", match, *chain, *of_chain, nan=nan),
        *launches(f"unfiltered match of a chain {name}", match, *chain, *of_chain, filtered=False, nan=nan),
        *launches(f"top-p {name}", topp, logits, *_TREE, *_PLACES, nan=nan),
        *launches(f"top-p in a window {name}", topp, logits, *_TREE, *_PLACES, window=2, nan=nan),
    ]


def _update_sequence() -> None:
    report = i64(4, REPORT_TOKENS + 10)
    kernels.update_sequence(
        i64(4, 600), _LENGTHS, i1(4), _TOKENS, i32(4, 9), i32(4), i64(4), i1(4), _STOPS, report, i64(4)
    )


CASES = [
    *_cases("bf16"),
    *_cases("fp16"),
    *launches("first path", kernels.first_path, _PARENTS, 8),
    *launches("scheduled path", launch_scheduled_path, _PARENTS, 15, i64(4), 2.5),
    *launches("update", _update_sequence),
]
