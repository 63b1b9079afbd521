"""Attention of new nodes over the cache: all committed keys, and of the new keys those that are ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.runtime.float8_pair import Float8Pair

WORD = 64  # bits in one word of an ancestor mask


def ancestor_matrix(ancestors: Tensor, columns: int) -> Tensor:
    """Unpack ancestor words [B, N, W] int64 into a bool matrix [B, N, columns]: bit j of row i says that i sees j."""
    column = torch.arange(columns, device=ancestors.device)
    words = ancestors.gather(-1, (column // WORD).expand(*ancestors.shape[:-1], columns))
    return (words >> (column % WORD)) & 1 == 1


def pack_ancestors(matrix: Tensor) -> Tensor:
    """Pack a bool matrix [B, N, M] into ancestor words [B, N, ceil(M / 64)] int64; the inverse of unpacking."""
    *shape, columns = matrix.shape
    words = -(-columns // WORD)
    padded = torch.nn.functional.pad(matrix.long(), (0, words * WORD - columns)).view(*shape, words, WORD)
    return (padded << torch.arange(WORD, device=matrix.device)).sum(-1)  # bit 63 wraps into the sign, as it should


def tree_attention(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None = None,
    *,
    scale: float,
    sliding_window: int | None = None,
    new_keys: int | None = None,
    launch_nodes: int | None = None,
    table: Tensor | None = None,
    read_early: bool = False,
    for_float8: bool = False,
) -> Tensor | Float8Pair:
    """softmax(scale * q k^T + mask) v for N new nodes per sequence, whose keys are in the cache already.

    q [B, N, Hq, d]; cache [2, B, Hkv, T, d] (keys, values of one layer), Hq a multiple of Hkv; lengths [B] int32:
    rows 0..lengths-1 are committed and visible to every node. Row lengths + j belongs to new key j, visible to node i
    iff bit j of ancestors [B, N, W] int64 is set; without `ancestors`, iff j <= i (causal). With `sliding_window` a
    node at position p sees positions > p - sliding_window only; a node's position is lengths + its ancestor count - 1.
    `new_keys`, 1 to 64 W and with `ancestors` alone: no node sees a new key from that number on, whatever its bits say,
    which still count for its position.
    Returns [B, N, Hq, d] in q's dtype, computed in fp32. A row with nothing to see gives 0.

    With a `table` [B, M] int32 the cache is [2, P, Hkv, R, d], and row t of sequence b is row t % R of page
    table[b, t // R]: M = 1 says where each sequence's rows lie, more that they lie in pages. T = M * R.
    `launch_nodes`, `read_early` and `for_float8` are for the kernels, and change no result.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_tree_attention(q, cache, lengths, ancestors, scale, sliding_window, table, new_keys)
    _, nodes, heads, _ = q.shape
    kv_heads, page_rows, capacity = cache.shape[2], cache.shape[3], capacity_of(cache, table)
    matrix = None if ancestors is None else ancestor_matrix(ancestors, ancestors.shape[-1] * WORD)
    rows = capacity
    if not q.is_cuda:  # where there is nothing to wait for
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
        behind = torch.arange(rows, device=lengths.device) - lengths[:, None].long() >= new_keys
        visible = visible & ~behind[:, None]

    keys, values = cache[:, :, :, :rows].float()
    grouped = q.float().unflatten(2, (kv_heads, heads // kv_heads))
    scores = torch.einsum("bnhgd,bhtd->bhgnt", grouped, keys) * scale
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    empty = ~visible.any(-1)[:, None, None, :, None]
    weights = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0)  # softmax of a row without keys is NaN
    values = values.masked_fill(~visible.any(1)[:, None, :, None], 0.0)  # a weight of 0 does not hide a NaN
    return torch.einsum("bhgnt,bhtd->bnhgd", weights, values).reshape(q.shape).to(q.dtype)


def capacity_of(cache: Tensor, table: Tensor | None) -> int:
    """The rows that a sequence may have: of a cache [2, B, Hkv, T, d], or of one in pages [2, P, Hkv, R, d]."""
    return cache.shape[-2] * (1 if table is None else table.shape[1])


def check_table(name: str, table: Tensor | None, batch: int, device: torch.device) -> None:
    """Raise ValueError, in the name of an operation, unless this is a table of `batch` sequences, or None."""
    if table is None:
        return
    if table.dim() != 2 or len(table) != batch or not table.shape[1] or table.dtype != torch.int32:
        raise ValueError(f"{name}: table must be int32 [{batch}, M], got {table.dtype} {tuple(table.shape)}")
    if table.device != device:
        raise ValueError(f"{name}: all tensors must be on one device, got a table on {table.device}, not {device}")


def check_tree_attention(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    scale: float,
    sliding_window: int | None,
    table: Tensor | None = None,
    new_keys: int | None = None,
) -> None:
    """Raise ValueError, with what was expected and what came, if the arguments of tree_attention do not fit."""
    fits = q.dim() == 4 and cache.dim() == 5 and cache.shape[0] == 2 and cache.shape[4] == q.shape[3]
    if not fits or (table is None and cache.shape[1] != q.shape[0]):
        raise ValueError(
            "tree_attention: q must be [B, N, Hq, d] and cache [2, B, Hkv, T, d] with the same B and d, or, with a "
            f"table, [2, P, Hkv, R, d], got q {tuple(q.shape)} and cache {tuple(cache.shape)}"
        )
    check_table("tree_attention", table, len(q), q.device)
    batch, nodes, heads, _ = q.shape
    if heads % cache.shape[2]:
        raise ValueError(
            f"tree_attention: Hq must be a multiple of the cache's {cache.shape[2]} heads, got Hq = {heads}"
        )
    if q.dtype != cache.dtype:
        raise ValueError(f"tree_attention: q and cache must have one dtype, got {q.dtype} and {cache.dtype}")
    if lengths.shape != (batch,) or lengths.dtype != torch.int32:
        raise ValueError(f"tree_attention: lengths must be int32 [{batch}], got {lengths.dtype} {tuple(lengths.shape)}")
    if ancestors is not None and (
        ancestors.dim() != 3
        or ancestors.shape[:2] != (batch, nodes)
        or not ancestors.shape[2]
        or ancestors.dtype != torch.int64
    ):
        raise ValueError(
            f"tree_attention: ancestors must be int64 [{batch}, {nodes}, W], got {ancestors.dtype} "
            f"{tuple(ancestors.shape)}"
        )
    devices = {tensor.device for tensor in (q, cache, lengths, ancestors) if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"tree_attention: all tensors must be on one device, got {sorted(map(str, devices))}")
    if not scale > 0:
        raise ValueError(f"tree_attention: scale must be positive, got {scale}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"tree_attention: sliding_window must be at least 1, got {sliding_window}")
    most = 0 if ancestors is None else WORD * ancestors.shape[2]
    if new_keys is not None and (type(new_keys) is not int or not 1 <= new_keys <= most):
        bits = "no ancestors" if ancestors is None else f"ancestors of {ancestors.shape[2]} words"
        raise ValueError(f"tree_attention: new_keys must be 1 to 64 * W of the ancestors, got {new_keys!r} and {bits}")


def _visible(lengths: Tensor, matrix: Tensor | None, nodes: int, rows: int, sliding_window: int | None) -> Tensor:
    """Which of the first `rows` cache rows each new node sees: bool [B, N, rows]. matrix: bool [B, N, new keys]."""
    device = lengths.device
    row = torch.arange(rows, device=device)
    new = row - lengths[:, None].long()  # [B, rows]: index among the new keys, negative for committed rows
    if matrix is None:
        depth = torch.arange(nodes, device=device).expand(len(lengths), nodes)
        visible = new[:, None] <= depth[:, :, None]
        key_position = row.expand(len(lengths), 1, rows)
    else:
        columns = matrix.shape[-1]
        index = new.clamp(0, columns - 1)[:, None].expand(-1, nodes, -1)
        visible = (new < 0)[:, None] | (matrix.gather(-1, index) & (new < columns)[:, None])
        depth = matrix.sum(-1) - 1
        # an ancestor's depth is its rank among the ancestors, because a parent's index is below its child's
        rank = (matrix.cumsum(-1) - 1).gather(-1, index)
        key_position = torch.where((new < 0)[:, None], row, lengths[:, None, None] + rank)
    if sliding_window is not None:
        position = lengths[:, None, None] + depth[:, :, None]
        visible = visible & (key_position > position - sliding_window)
    return visible
