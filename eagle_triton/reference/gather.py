"""Picks rows by index."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.gather import check_gather_rows, check_sequence_rows


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out[b, i] = x[b, max(index[b, i], 0)]. x [B, P, H], index [B, n] integers below P; returns [B, n, H].

    Raises ValueError if shapes or dtypes do not fit.
    """
    check_gather_rows(x, index, out)
    rows = index.clamp(min=0).long()[:, :, None].expand(-1, -1, x.shape[2])
    return torch.gather(x, 1, rows) if out is None else torch.gather(x, 1, rows, out=out)


def sequence_rows(tokens: Tensor, first: Tensor, count: int, offset: int = 0, *, out: Tensor | None = None) -> Tensor:
    """`count` columns of each sequence from first + offset on. Past the end the last column is repeated.

    tokens [B, C] int64, first [B] int32; returns [B, count] int64, in `out` if given. Raises ValueError if shapes or
    dtypes do not fit.
    """
    check_sequence_rows(tokens, first, count, out)
    columns = first[:, None].long() + torch.arange(offset, offset + count, device=first.device)
    return torch.gather(tokens, 1, columns.clamp(max=tokens.shape[1] - 1), out=out)
