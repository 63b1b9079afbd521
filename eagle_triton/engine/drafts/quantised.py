"""Drafts with projections in eight or four bits: a half or a quarter of the bytes, and nearly the same acceptance."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model.modules import Projection, with_projections
from eagle_triton.runtime import float8_weight, four_bit_weight
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.four_bit_weight import FourBitWeight

FP8, INT4 = "fp8", "int4"
BITS = {FP8: "eight", INT4: "four"}  # of a number
GROUPS = (128, 64, 32)  # columns that share a scale in four bits: the largest of these that divides K
ROWS = 2048  # rows of a weight that are converted to fp32 at a time


def check_draft_dtype(draft_dtype: str | None) -> None:
    """Raise ValueError unless this is None, FP8 or INT4."""
    if draft_dtype not in (None, *BITS):
        names = " or ".join(f'"{name}"' for name in BITS)
        raise ValueError(f"draft_dtype must be None (the dtype of the model), {names}, got {draft_dtype!r}")


def quantised_draft(draft: Draft | None, dtype: str) -> tuple[Draft, str]:
    """The draft with its projections copied; and the report's note on it.

    dtype: FP8, with a scale for each row, or INT4, with one for each group of columns of a row. A projection shared
    with the target is copied too, and the target's does not change. Projections in FP8 and in four bits are used
    unchanged. Norms, biases and the embedding are not copied. Raises ValueError for a draft without projections, for a
    projection that is not a plain, finite matrix, and with INT4 for columns that are no multiple of 32.
    """
    made: dict[int, Projection] = {}
    copies: list[Float8Weight | FourBitWeight] = []
    found: list[Projection] = []

    def change(projection: Projection) -> Projection:
        found.append(projection)
        if projection.weight is None:
            kind = type(projection.module).__name__
            raise ValueError(f'draft_dtype="{dtype}": a projection of the draft is not a plain matrix but a {kind}')
        if not isinstance(projection.weight, Tensor):
            return projection
        if id(projection) not in made:
            copies.append(_quantised(projection.weight, dtype))
            made[id(projection)] = replace(projection, weight=copies[-1])
        return made[id(projection)]

    changed = with_projections(draft, change)
    if draft is None or not found:
        raise ValueError(
            f'draft_dtype="{dtype}" needs a draft with weights, a head or a language model, got {type(draft).__name__}'
        )
    size = sum(tensor.nbytes for weight in copies for tensor in weight.tensors) / 2**20
    return changed, f"{dtype}: {len(copies)} projections of the draft are copies in {BITS[dtype]} bits, {size:.1f} MiB"


def _quantised(weight: Tensor, dtype: str) -> Float8Weight | FourBitWeight:
    """A weight in this dtype. It is converted part by part."""
    try:
        return _in_eight_bits(weight) if dtype == FP8 else in_four_bits(weight)
    except ValueError as error:
        raise ValueError(f'draft_dtype="{dtype}": {error}') from error


def _in_eight_bits(weight: Tensor) -> Float8Weight:
    parts = [float8_weight.quantised(rows) for rows in weight.split(ROWS)]
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Float8Weight(values, torch.cat([part.scale for part in parts]))


def in_four_bits(weight: Tensor) -> FourBitWeight:
    """A matrix [N, K] in four bits, with the largest of GROUPS that divides K. Raises ValueError if none does."""
    depth = weight.shape[1]
    group = next((group for group in GROUPS if depth % group == 0), None)
    if group is None:
        raise ValueError(f"the columns of a weight must be a multiple of {GROUPS[-1]}, got {depth}")
    parts = [four_bit_weight.quantised(rows, group) for rows in weight.split(ROWS)]
    return replace(
        parts[0], packed=torch.cat([part.packed for part in parts]), scale=torch.cat([part.scale for part in parts])
    )
