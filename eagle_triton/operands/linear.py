"""The weights that products take, and the check of their arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eagle_triton.operands.shapes import FLOATS, check_tensors
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.four_bit_weight import FourBitWeight
from eagle_triton.runtime.row_formats import ProductRows

Weight = Tensor | Float8Weight | FourBitWeight  # [N, K]


def check_product(
    name: str,
    x: ProductRows,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    same: bool = False,
    keep_splits: bool = False,
) -> None:
    """Check a product's arguments. `same`: all weights must have one shape."""
    if keep_splits and residual is not None:
        raise ValueError(f"{name}: residual must be None with keep_splits, because the product's reader adds it")
    if not weights or len(weights) != len(biases):
        raise ValueError(f"{name}: expected one bias or None per weight, got {len(weights)} and {len(biases)}")
    tensors: dict[str, tuple[object, object, object]] = {"x": (x, x.shape or "... K", FLOATS)}
    for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        shape = (*weights[0 if same else place].shape[:1], *x.shape[-1:])
        plain = isinstance(weight, Tensor)
        values = weight.values if isinstance(weight, Float8Weight) else weight
        tensors[f"weight {place}"] = values, shape, x.dtype if plain else None
        if bias is not None:
            tensors[f"bias {place}"] = bias, shape[:1], x.dtype
    if residual is not None:
        tensors["residual"] = residual, (*x.shape[:-1], *weights[0].shape[:1]), x.dtype
    check_tensors(name, tensors)
