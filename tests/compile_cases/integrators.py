"""Production settings of the integrators' kernels: N 60 (bit-packed: 32), D 8, V 128256."""

from eagle_triton.integrators import (
    build_tree_efficient_triton,
    build_tree_in_place,
    tree_speculative_sampling_target_only,
    verify_tree_greedy_triton,
)
from eagle_triton.operands.integrators import TreeMaskMode
from tests.compile_cases._launches import fp32, i1, i32, i64, launches

_LINKS = i64(4, 60), i64(4, 60), i64(4, 60)
_WALK = i32(240), i32(4, 9), i32(4), i64(4, 60), *_LINKS
_PROBABILITIES = fp32(4, 60, 128256)


def _build(mode: TreeMaskMode, nodes: int, **options) -> None:
    drafts = i64(4, nodes - 1)
    given = i64(4), i64(4, 71), drafts, drafts, i32(4), 2000, 10, 8, nodes
    build_tree_efficient_triton(*given, mode, **options)


def _build_in_place() -> None:
    build_tree_in_place(i64(4, 71), i64(4, 59), i32(4), i1(500_000), i64(240), *_LINKS, 10, 8, 60)


def _sample() -> None:
    coins = fp32(4, 60), fp32(4)
    tree_speculative_sampling_target_only(*_WALK, *coins, _PROBABILITIES, _PROBABILITIES)


CASES = [
    *launches("full mask", _build, TreeMaskMode.FULL_MASK, 60, status=i32(4)),
    *launches("in place", _build_in_place),
    *launches("tree mask", _build, TreeMaskMode.QLEN_ONLY, 60),
    *launches("packed", _build, TreeMaskMode.QLEN_ONLY_BITPACKING, 32),
    *launches("greedy", verify_tree_greedy_triton, *_WALK, i64(4, 60)),
    *launches("sampling", _sample),
]
