"""Cases of products, by the shapes of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle_triton.operands.linear import Weight
from eagle_triton.ops.linear import linear, linear_stack, linear_swiglu
from eagle_triton.runtime.row_formats import ProductRows
from tests.compile_cases._launches import launches

SHAPES = {  # the rows of each weight, two of which are gate and up; and K
    "8b qkv": ((4096, 1024, 1024), 4096),
    "8b o": ((4096,), 4096),
    "8b gate_up": ((14336, 14336), 4096),
    "8b down": ((4096,), 14336),
    "8b head": ((128256,), 4096),
    "9b gated delta": ((8192, 4096, 32, 32), 4096),
    "1b qkv": ((2048, 512, 512), 2048),
    "1b gate_up": ((8192, 8192), 2048),
    "32b gate_up": ((25600, 25600), 5120),
}
EVERYWHERE = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Targets of the kernels that are chosen on any device."""


def products(
    name: str,
    x: Callable[..., ProductRows],
    rows: int,
    cols: Sequence[int],
    depth: int,
    weight: Callable[[int, int], Weight],
    bias: Callable[[int], Any] = lambda size: None,
    **how: Any,
) -> list[tuple]:
    """The cases of one launch. x, weight and bias make these from their shapes; how: options of the product."""
    given, weights = x(rows, depth), [weight(size, depth) for size in cols]
    biases = [bias(size) for size in cols]
    name = f"{name} {rows} rows"
    if len(cols) == 2:
        return launches(name, linear_swiglu, given, *weights, **how)
    if len(cols) == 1:
        return launches(name, linear, given, *weights, *biases, **how)
    return launches(name, linear_stack, given, weights, biases, **how)
