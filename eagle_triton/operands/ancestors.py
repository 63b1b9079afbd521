"""Ancestor masks: which nodes of a tree see which, packed into words of 64 bits. Bit j of row i: node i sees node j."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 64  # bits in one word of an ancestor mask


def ancestor_matrix(ancestors: Tensor, columns: int) -> Tensor:
    """Unpack ancestor words [B, N, W] int64 into a bool matrix [B, N, columns]: bit j of row i says that i sees j."""
    bits = ancestors[..., None] >> torch.arange(WORD, device=ancestors.device)
    return (bits & 1 == 1).flatten(-2)[..., :columns]


def pack_ancestors(matrix: Tensor) -> Tensor:
    """Pack a bool matrix [B, N, M] into ancestor words [B, N, ceil(M / 64)] int64: the inverse of `ancestor_matrix`."""
    *shape, columns = matrix.shape
    words = -(-columns // WORD)
    padded = torch.nn.functional.pad(matrix.long(), (0, words * WORD - columns)).view(*shape, words, WORD)
    return (padded << torch.arange(WORD, device=matrix.device)).sum(-1)  # bit 63 becomes the sign
