"""Unrolled training of a draft head: passes over its own output, each row seeing what it would see in decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F


def unroll_mask(length: int, step: int, device: torch.device) -> torch.Tensor:
    """[1, 1, length, (step+1)*length] bool: what row t of pass `step` sees of the passes so far.

    Of pass 0 the rows with true features, positions <= t - step; of pass j >= 1 the one row of its own
    chain, position t - step + j (itself, for j = step). That is what a draft chain sees in decoding.
    """
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None]
    blocks = [column <= row - step] + [column == row - step + j for j in range(1, step + 1)]
    return torch.cat(blocks, dim=1)[None, None]


def unroll(head, features: torch.Tensor, ids: torch.Tensor, passes: int) -> Iterator[torch.Tensor]:
    """Hidden states [B, T, H] of each pass; pass s >= 1 takes the output of pass s-1, one row earlier."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
    cache, hidden = None, features
    for step in range(passes):
        mask = unroll_mask(ids.shape[1], step, ids.device)
        hidden, cache = head(hidden, ids, cache=cache, position_ids=positions, attention_mask=mask)
        yield hidden
        hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
