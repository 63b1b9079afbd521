"""Attention's launchers: they check, choose the kernel, and have the splits added up."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle_triton import kv_cache
from eagle_triton.attention.kernels import _merge_kernel, _tree_attention_kernel
from eagle_triton.attention.settings import (
    MERGE_REGISTERS,
    Settings,
    merge_rows_of,
    settings_for,
    settings_for_pieces,
)
from eagle_triton.layers.float8_pair import empty_pair
from eagle_triton.reference.attention import WORD, capacity_of, check_tree_attention
from eagle_triton.runtime.fallback import gluon_module
from eagle_triton.runtime.float8_pair import GROUP, Float8Pair, takes_pairs
from eagle_triton.runtime.launch import EXACT, launch
from eagle_triton.runtime.overlap import can_overlap, prefer_shared_memory

_TILE_ROWS = 64  # no tile of keys has more
_PIECE_NODES = 16  # pieces of prompts have as many at least


@overload
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
    for_float8: Literal[False] = False,
) -> Tensor: ...


@overload
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
    for_float8: bool,
) -> Tensor | Float8Pair: ...


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

    q [B, N, Hq, d]; cache [2, B, Hkv, T, d] in q's dtype (fp16, bf16 or fp32), d <= 256; lengths [B] int32; ancestors
    [B, N, W] int64 or None (causal); `scale` > 0. See `reference.attention.tree_attention` for who sees what, and for
    the `table` of a cache in pages, which must be of 64 rows or a multiple where a sequence has several. `new_keys`,
    1 to 64 W and with `ancestors` alone: no node sees a new key from that number on, whatever its bits say: fewer are
    read.
    The last dimension of every tensor must be contiguous; its other strides are free. `launch_nodes`: choose the
    launch settings for that many nodes. `read_early`: lengths, table and committed rows were written before the last
    product, and behind that only kernels of runtime/overlap.py were launched; then they may be read before these end.
    Returns [B, N, Hq, d]; with `for_float8`, whose reader is a product with weights of eight bits, a Float8Pair
    [B, N, Hq * d] where that is of use to it and splits are added up. Raises ValueError before the launch if shapes,
    dtypes, strides or devices do not fit.
    """
    check_tree_attention(q, cache, lengths, ancestors, scale, sliding_window, table, new_keys)
    _check_kernel_limits(q, cache, lengths, ancestors, table)
    rows = (launch_nodes or q.shape[1]) * (q.shape[2] // cache.shape[2])
    use = settings_for(rows, q.shape[3], cache.shape[2], len(q), q.dtype, _capability(q.device))
    if ancestors is None and q.shape[1] >= _PIECE_NODES and table is not None:
        use = settings_for_pieces(use, rows, len(q) * cache.shape[2])
    return _launch(
        q,
        cache,
        lengths,
        ancestors,
        scale,
        sliding_window,
        use,
        table,
        new_keys=new_keys,
        read_early=read_early,
        for_float8=for_float8,
    )


def attend_committed(q: Tensor, cache: Tensor, length: int, *, scale: float, table: Tensor) -> tuple[Tensor, Tensor]:
    """What N nodes of each sequence, however many, see of its first `length` rows, all that the table's pages have.

    q, cache and table as in `tree_attention`, length = M * R. Returns [B, N, Hq, d], and the natural logarithm of the
    sum of each row's weights, [B, Hq, N] float32, by which others can be added. Raises ValueError before the launch if
    shapes, dtypes, strides, devices or the length do not fit.
    """
    lengths = torch.full((len(q),), length, dtype=torch.int32, device=q.device)
    check_tree_attention(q, cache, lengths, None, scale, None, table)
    _check_kernel_limits(q, cache, lengths, None, table)
    if length != capacity_of(cache, table):
        raise ValueError(
            f"attend_committed: length must be all {capacity_of(cache, table)} rows of the table's pages, got {length}"
        )
    batch, nodes, heads, width = q.shape
    rows = nodes * (heads // cache.shape[2])
    use = settings_for(rows, width, cache.shape[2], batch, q.dtype, _capability(q.device))
    lse = torch.empty(batch, heads, nodes, dtype=torch.float32, device=q.device)
    use = use._replace(splits=1, programs=1, pdl=0)
    out = _launch(q, cache, lengths, None, scale, None, use, table, lse)
    assert isinstance(out, Tensor)
    return out, lse


def _capability(device: torch.device) -> tuple[int, int] | None:
    """That of a CUDA device, None elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None


def _check_kernel_limits(
    q: Tensor, cache: Tensor, lengths: Tensor, ancestors: Tensor | None, table: Tensor | None
) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or q.shape[-1] > 256:
        raise ValueError(
            f"tree_attention: q must be fp16, bf16 or fp32 with d <= 256, got {q.dtype} and d = {q.shape[-1]}"
        )
    if table is not None and table.shape[1] > 1 and cache.shape[3] % _TILE_ROWS:
        raise ValueError(
            f"tree_attention: pages must have a multiple of {_TILE_ROWS} rows, a tile's, got {cache.shape[3]}"
        )
    named = {"q": q, "cache": cache, "lengths": lengths, "ancestors": ancestors, "table": table}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"tree_attention: {name} must have stride 1 in its last dimension, got strides {tensor.stride()}"
            )
    elements = q.shape[1] * max(q.stride(1), q.shape[2] * q.shape[3])
    if elements >= 2**31:  # offsets within one sequence's q and out are int32
        raise ValueError(f"tree_attention: q must span less than 2^31 elements per sequence, got {elements}")


def _launch(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    scale: float,
    sliding_window: int | None,
    use: Settings,
    table: Tensor | None = None,
    lse: Tensor | None = None,
    new_keys: int | None = None,
    read_early: bool = False,
    for_float8: bool = False,
) -> Tensor | Float8Pair:
    assert use.programs in (1, use.splits), "a program takes one split or all"
    assert lse is None or use.programs == 1, "a merge gives no log-sum-exp"
    batch, nodes, heads, width = q.shape
    kv_heads, capacity = cache.shape[2], capacity_of(cache, table)
    group, rows = heads // kv_heads, nodes * (heads // kv_heads)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    block_d = max(16, triton.next_power_of_2(width))
    partial = softmax = pair = None
    if use.programs > 1:
        flat = out.flatten(-2)
        if for_float8 and width == GROUP and takes_pairs(flat):
            pair = empty_pair(flat.shape, out)  # instead of `out`, in which nothing is written then
        partial = torch.empty(batch, kv_heads, use.programs, rows, width, dtype=torch.float32, device=q.device)
        softmax = torch.empty(batch, kv_heads, use.programs, 2, rows, dtype=torch.float32, device=q.device)
    rows_of_memory = None
    if sliding_window is None and (use.tma or use.streamed):
        rows_of_memory = _rows_of_memory(cache)
    pdl = use.pdl if use.programs > 1 and can_overlap(q.device) else 0
    shared = {
        "D": width,
        "GROUP": group,
        "HEADS": kv_heads,
        "SPLITS": use.splits,
        "MIN_TILES": use.min_tiles,
    }
    words = 0 if ancestors is None else ancestors.shape[-1]
    new_keys = nodes if ancestors is None else new_keys or WORD * words
    merged = {"WINDOW": sliding_window is not None, "PDL": pdl, "BLOCK_N": use.block_n, "BLOCK_D": block_d}
    strides = (*q.stride()[:3], *cache.stride()[:3], 0 if table is None else table.stride(0))
    strides += ((0, 0) if ancestors is None else ancestors.stride()[:2]) + out.stride()[:3]
    scale_log2, page_rows = scale * math.log2(math.e), kv_cache.page_rows(cache, table)
    streamed = _streamed() if use.streamed and rows_of_memory is not None and lse is None else None
    if streamed is not None and ancestors is not None:
        assert use.block_n == streamed.ROWS, "its splits are of the tiles that both kernels have"
        compiled = launch(
            streamed.tree_attention_kernel, (triton.cdiv(rows, streamed.ROWS), batch * kv_heads, use.programs)
        )(
            q,
            streamed.descriptor(rows_of_memory, block_d),
            table,
            lengths,
            ancestors,
            out,
            partial,
            softmax,
            *strides,
            nodes,
            new_keys,
            capacity,
            scale_log2,
            **shared,
            WORDS=words,
            PAGE=page_rows,
            PROGRAMS=use.programs,
            NODES=streamed.nodes_for(nodes, words),
            STAGES=streamed.stages_of(width),
            READ_EARLY=read_early,
            num_warps=4,
            maxnreg=streamed.REGISTERS,
            launch_pdl=True,
            **EXACT,
        )
    else:
        desc = None
        if use.tma and rows_of_memory is not None:
            desc = TensorDescriptor.from_tensor(rows_of_memory, [use.block_n, block_d])
        compiled = launch(_tree_attention_kernel, (triton.cdiv(rows, use.block_m), batch * kv_heads, use.programs))(
            q,
            cache,
            desc,
            table,
            lengths,
            ancestors,
            out,
            partial,
            lse if softmax is None else softmax,
            *strides,
            nodes,
            new_keys,
            capacity,
            scale_log2,
            sliding_window or 0,
            **shared,
            WORDS=words,
            **merged,
            STRIDE_T=cache.stride(3),
            PAGE=page_rows,
            PROGRAMS=use.programs,
            TMA=desc is not None,
            BLOCK_M=use.block_m,
            BLOCK_T=use.block_t,
            num_warps=use.num_warps,
            num_stages=use.num_stages,
            **EXACT,
            **({"launch_pdl": True} if pdl == 2 else {}),
            **({"maxnreg": use.maxnreg} if use.maxnreg else {}),
        )
    prefer_shared_memory(compiled)
    if use.programs > 1:
        block_s = triton.next_power_of_2(use.splits)
        block_r = merge_rows_of(use.splits, width)
        compiled = launch(_merge_kernel, (triton.cdiv(rows, block_r), batch * kv_heads))(
            partial,
            softmax,
            lengths,
            out,
            None if pair is None else pair.parts,
            None if pair is None else pair.scale,
            *out.stride()[:3],
            nodes,
            batch * nodes,
            new_keys,
            capacity,
            sliding_window or 0,
            **shared,
            **merged,
            BLOCK_R=block_r,
            BLOCK_S=block_s,
            num_warps=1,
            **EXACT,
            **({"maxnreg": MERGE_REGISTERS} if pdl and use.splits == 8 else {}),
            **({"launch_pdl": True} if pdl else {}),
        )
        prefer_shared_memory(compiled)
    return out if pair is None else pair


def _streamed() -> Any:
    return gluon_module("eagle_triton.attention.streamed")


def _rows_of_memory(cache: Tensor) -> Tensor | None:
    """All rows of the memory that a cache [2, P, Hkv, R, d] lies in, from its first to its last, as a descriptor takes
    them: [n, d]. None if it cannot."""
    width = cache.shape[4]
    aligned = cache.data_ptr() % 16 == 0 and width * cache.element_size() % 16 == 0
    if (
        not cache.numel()
        or not aligned
        or cache.stride(3) != width
        or any(stride % width for stride in cache.stride()[:3])
    ):
        return None
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:4], cache.stride()[:4], strict=True))
    rows = last // width + 1
    return cache.as_strided((rows, width), (width, 1)) if rows < 2**31 else None  # its coordinates are int32
