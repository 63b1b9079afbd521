"""Attention of consecutive rows of one long prompt over all rows before them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_triton.operands.attention import check_prompt_attention
from eagle_triton.reference.attention import tree_attention


def prompt_attention(
    q: Tensor,
    cache: Tensor,
    start: int,
    end: int,
    *,
    scale: float,
    table: Tensor,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v for tokens start .. end - 1 of one prompt, with their keys in the cache already.

    q [N, Hq, d], N >= end - start: row i is token start + i and sees tokens 0 .. start + i; cache [2, P, Hkv, R, d]
    (keys, values of one layer) in q's dtype, Hq a multiple of Hkv; table [M] int32: token t is row t % R of page
    table[t // R]. start and end are on the host; start is a multiple of R. `sinks` and `softcap` as in
    `tree_attention`. Returns [N, Hq, d] in q's dtype, computed in fp32; rows from end - start on mean nothing. Raises
    ValueError if shapes, dtypes or devices do not fit.
    """
    check_prompt_attention(q, cache, start, end, scale, table, sinks, softcap)
    out, count = torch.zeros_like(q), end - start
    lengths = torch.full((1,), start, dtype=torch.int32, device=q.device)
    options: dict[str, Any] = {"scale": scale, "table": table[None], "sinks": sinks, "softcap": softcap}
    out[:count] = tree_attention(q[None, :count], cache, lengths, **options)[0]
    return out
