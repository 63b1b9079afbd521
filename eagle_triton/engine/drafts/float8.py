"""A draft whose projections are read in eight bits: half the bytes, and drafts that are right nearly as often."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model.modules import Projection, with_projections
from eagle_triton.runtime.float8_weight import Float8Weight, quantised

FP8 = "fp8"
ROWS = 8192  # of a weight that are in fp32 at a time


def check_draft_dtype(draft_dtype: str | None) -> None:
    """Raise ValueError for what a draft's projections cannot be."""
    if draft_dtype not in (None, FP8):
        raise ValueError(f'draft_dtype must be None, for that of the model, or "{FP8}", got {draft_dtype!r}')


def float8_draft(draft: Draft | None) -> tuple[Draft, str]:
    """The same draft with copies of its projections in eight bits, a scale for each row; and what a report says of it.

    A projection that it borrows from the target is copied too, the target's stays as it is; what is FP8 already is
    taken as it lies. Norms, biases and the embedding are the draft's own. Raises ValueError for a draft without
    projections, or with one that is no plain, finite matrix.
    """
    made: dict[int, Projection] = {}
    found: list[Projection] = []

    def change(projection: Projection) -> Projection:
        found.append(projection)
        if isinstance(projection.weight, Float8Weight):
            return projection
        if projection.weight is None:
            kind = type(projection.module).__name__
            raise ValueError(f'draft_dtype="{FP8}": the draft has a projection that is no plain matrix, a {kind}')
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
    """A weight with a scale for each row, made of some rows at a time."""
    try:
        parts = [quantised(rows) for rows in weight.split(ROWS)]
    except ValueError as error:
        raise ValueError(f'draft_dtype="{FP8}": {error}') from error
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Float8Weight(values, torch.cat([part.scale for part in parts]))
