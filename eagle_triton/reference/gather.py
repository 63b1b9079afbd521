"""Reference implementations of picking rows, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out[b, i] = x[b, max(index[b, i], 0)]. x [B, P, H], index [B, n] integers below P; returns [B, n, H].

    Raises ValueError if shapes or dtypes do not fit.
    """
    check_gather_rows(x, index, out)
    rows = index.clamp(min=0).long()[:, :, None].expand(-1, -1, x.shape[2])
    return torch.gather(x, 1, rows) if out is None else torch.gather(x, 1, rows, out=out)


def sequence_rows(tokens: Tensor, first: Tensor, count: int, offset: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Columns first + offset .. first + offset + count of each sequence, the last one again beyond the end.

    tokens [B, C] int64, first [B] int32; returns [B, count] int64, which is `out` if that is given. Raises ValueError
    if shapes or dtypes do not fit.
    """
    check_sequence_rows(tokens, first, count, out)
    columns = first[:, None].long() + torch.arange(offset, offset + count, device=first.device)
    return torch.gather(tokens, 1, columns.clamp(max=tokens.shape[1] - 1), out=out)


def check_gather_rows(x: Tensor, index: Tensor, out: Tensor | None) -> None:
    if x.ndim != 3 or index.ndim != 2 or index.shape[0] != x.shape[0] or not x.shape[1]:
        raise ValueError(
            f"gather_rows: x must be [B, P, H] and index [B, n], got {tuple(x.shape)} and {tuple(index.shape)}"
        )
    if index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"gather_rows: index must be int32 or int64, got {index.dtype}")
    shape = (*index.shape, x.shape[2])
    if out is not None and (out.shape != shape or out.dtype != x.dtype):
        raise ValueError(f"gather_rows: out must be {x.dtype} {shape}, got {out.dtype} {tuple(out.shape)}")


def check_sequence_rows(tokens: Tensor, first: Tensor, count: int, out: Tensor | None) -> None:
    if tokens.ndim != 2 or first.shape != tokens.shape[:1] or count < 1:
        raise ValueError(
            f"sequence_rows: tokens must be [B, C], first [B] and count at least 1, got {tuple(tokens.shape)}, "
            f"{tuple(first.shape)} and {count}"
        )
    if tokens.dtype != torch.int64 or first.dtype != torch.int32:
        raise ValueError(f"sequence_rows: tokens must be int64 and first int32, got {tokens.dtype} and {first.dtype}")
    shape = (len(tokens), count)
    if out is not None and (out.shape != shape or out.dtype != tokens.dtype):
        raise ValueError(f"sequence_rows: out must be {tokens.dtype} {shape}, got {out.dtype} {tuple(out.shape)}")
