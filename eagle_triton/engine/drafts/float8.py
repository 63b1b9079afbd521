"""Drafts with projections in eight bits: half the bytes, and nearly the same acceptance."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model.modules import Projection, with_projections
from eagle_triton.runtime.float8_weight import Float8Weight, quantised
from eagle_triton.runtime.four_bit_weight import FourBitWeight

FP8 = "fp8"
ROWS = 8192  # rows of a weight that are converted to fp32 at a time


def check_draft_dtype(draft_dtype: str | None) -> None:
    """Raise ValueError unless this is None or FP8."""
    if draft_dtype not in (None, FP8):
        raise ValueError(f'draft_dtype must be None (the dtype of the model) or "{FP8}", got {draft_dtype!r}')


def float8_draft(draft: Draft | None) -> tuple[Draft, str]:
    """The draft with its projections copied to eight bits, with a scale for each row; and the report's note on it.

    A projection shared with the target is copied too, and the target's does not change. Projections in FP8 and in
    four bits are used as they are. Norms, biases and the embedding are not copied. Raises ValueError for a draft
    without projections, or with one that is not a plain, finite matrix.
    """
    made: dict[int, Projection] = {}
    found: list[Projection] = []

    def change(projection: Projection) -> Projection:
        found.append(projection)
        if isinstance(projection.weight, Float8Weight | FourBitWeight):
            return projection
        if projection.weight is None:
            kind = type(projection.module).__name__
            raise ValueError(f'draft_dtype="{FP8}": a projection of the draft is not a plain matrix but a {kind}')
        if id(projection) not in made:
            made[id(projection)] = replace(projection, weight=_quantised(projection.weight))
        return made[id(projection)]

    changed = with_projections(draft, change)
    if draft is None or not found:
        raise ValueError(
            f'draft_dtype="{FP8}" needs a draft with weights, a head or a language model, got {type(draft).__name__}'
        )
    copies = [projection.weight for projection in made.values() if isinstance(projection.weight, Float8Weight)]
    size = sum(tensor.nbytes for weight in copies for tensor in weight.tensors) / 2**20
    return changed, f"{FP8}: {len(copies)} projections of the draft are copies in eight bits, {size:.1f} MiB"


def _quantised(weight: Tensor) -> Float8Weight:
    """A weight in eight bits with a scale for each row; some rows are converted at a time."""
    try:
        parts = [quantised(rows) for rows in weight.split(ROWS)]
    except ValueError as error:
        raise ValueError(f'draft_dtype="{FP8}": {error}') from error
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Float8Weight(values, torch.cat([part.scale for part in parts]))
