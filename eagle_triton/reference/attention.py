"""Attention of new nodes over the cache: all committed keys, and the new keys of ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.ancestors import WORD, ancestor_matrix
from eagle_triton.operands.attention import check_tree_attention
from eagle_triton.operands.kv_cache import capacity_of
from eagle_triton.runtime.row_formats import ProductRows, RowFormat


def tree_attention(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None = None,
    *,
    scale: float,
    sliding_window: int | None = None,
    new_keys: int | None = None,
    tune_for_nodes: int | None = None,
    table: Tensor | None = None,
    prefetch_before_wait: bool = False,
    row_format: RowFormat | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    value_width: int | None = None,
) -> ProductRows:
    """softmax(scale * q k^T + mask) v for N new nodes per sequence. Their keys are in the cache already.

    q [B, N, Hq, d]; cache [2, B, Hkv, T, d] (keys, values of one layer), Hq a multiple of Hkv; lengths [B] int32:
    rows 0..lengths-1 are committed and visible to every node. Row lengths + j belongs to new key j, visible to node i
    iff bit j of ancestors [B, N, W] int64 is set; without `ancestors`, iff j <= i (causal). With `sliding_window` a
    node at position p sees positions > p - sliding_window only; a node's position is lengths + its ancestor count - 1.
    `new_keys`, 1 to 64 W, only with `ancestors`: no node sees new keys from this number on, even if its bits are set;
    the bits still count for its position.
    `sinks` [Hq], fp32 or of q's dtype: the softmax has one more column with this logit, which `scale` and `softcap` do
    not change; its weight is dropped (gpt-oss). `softcap` > 0: scores are softcap * tanh(scale * q k^T / softcap)
    before anything is masked, as in Gemma 2. Returns [B, N, Hq, d] in q's dtype, computed in fp32. A row with nothing
    to see gives 0.

    With a `table` [B, M] int32 the cache is [2, P, Hkv, R, d], and row t of sequence b is row t % R of page
    table[b, t // R]. With M = 1 each sequence is in one page. T = M * R.
    With a `value_width` e < d the values are the first e columns of the keys (multi-head latent attention). The cache
    is then [1, B, Hkv, T, d], or [1, P, Hkv, R, d], and the result [B, N, Hq, e].
    `tune_for_nodes`, `prefetch_before_wait` and `row_format` are for the kernels, and do not change the result.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_tree_attention(
        q, cache, lengths, ancestors, scale, sliding_window, table, new_keys, sinks, softcap, value_width
    )
    _, nodes, heads, _ = q.shape
    kv_heads, page_rows, capacity = cache.shape[2], cache.shape[3], capacity_of(cache, table)
    matrix = None if ancestors is None else ancestor_matrix(ancestors, ancestors.shape[-1] * WORD)
    rows = capacity
    if not q.is_cuda:  # reading lengths does not wait for a device
        if matrix is not None:
            seen = matrix.flatten(0, 1).any(0).nonzero()
            matrix = matrix[..., : int(seen[-1]) + 1 if len(seen) else 1]
        rows = min(capacity, int(lengths.max()) + (nodes if matrix is None else matrix.shape[-1]))
    if table is not None:
        pages = table[:, : max(-(-rows // page_rows), 1)].long()
        cache = cache[:, :, :, :rows][:, pages]  # [2, B, W, Hkv, R, d]
        cache = cache.movedim(2, 3).flatten(3, 4)  # [2, B, Hkv, T, d]
    visible = _visible(lengths, matrix, nodes, rows, sliding_window)
    if new_keys is not None:
        hidden = torch.arange(rows, device=lengths.device) - lengths[:, None].long() >= new_keys
        visible = visible & ~hidden[:, None]

    keys, values = (side[:, :, :rows].float() for side in (cache[0], cache[-1]))
    values = values[..., :value_width]
    grouped = q.float().unflatten(2, (kv_heads, heads // kv_heads))
    scores = torch.einsum("bnhgd,bhtd->bhgnt", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(kv_heads, -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, column], dim=-1)
    empty = ~visible.any(-1)[:, None, None, :, None]
    weights = torch.softmax(scores, dim=-1)[..., :rows]
    weights = weights.masked_fill(empty, 0.0)  # softmax of a row without keys is NaN
    values = values.masked_fill(~visible.any(1)[:, None, :, None], 0.0)  # a weight of 0 does not hide a NaN
    return torch.einsum("bhgnt,bhtd->bnhgd", weights, values).flatten(2, 3).to(q.dtype)


def _visible(lengths: Tensor, matrix: Tensor | None, nodes: int, rows: int, sliding_window: int | None) -> Tensor:
    """Which of the first `rows` cache rows each new node sees: bool [B, N, rows]. matrix: bool [B, N, new keys]."""
    device = lengths.device
    row = torch.arange(rows, device=device)
    new = row - lengths[:, None].long()  # [B, rows]: index among the new keys, negative for committed rows
    if matrix is None:
        depth = torch.arange(nodes, device=device).expand(len(lengths), nodes)
        visible = new[:, None] <= depth[:, :, None]
    else:
        columns = matrix.shape[-1]
        index = new.clamp(0, columns - 1)[:, None].expand(-1, nodes, -1)
        visible = (new < 0)[:, None] | (matrix.gather(-1, index) & (new < columns)[:, None])
    if sliding_window is None:
        return visible
    key_position = row.expand(len(lengths), 1, rows)
    if matrix is not None:
        depth = matrix.sum(-1) - 1
        # an ancestor's depth is its rank among the ancestors, because a parent's index is below its child's
        rank = (matrix.cumsum(-1) - 1).gather(-1, index)
        key_position = torch.where((new < 0)[:, None], row, lengths[:, None, None] + rank)
    position = lengths[:, None, None] + depth[:, :, None]
    return visible & (key_position > position - sliding_window)
