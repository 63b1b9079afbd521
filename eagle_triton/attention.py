"""Attention of trees and of pieces of prompts over the cache: chooses kernels and settings, and launches them.

The kernels are in ops/attention_tiles.py, and for trees on Hopper in ops/attention_hopper.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle_triton import kv_cache
from eagle_triton.operands.ancestors import WORD
from eagle_triton.operands.attention import check_tree_attention
from eagle_triton.operands.kv_cache import capacity_of
from eagle_triton.ops.attention_tiles import (
    HeadSizes,
    KeyLayout,
    Parts,
    Splits,
    Tiles,
    _merge_kernel,
    _tree_attention_kernel,
)
from eagle_triton.ops.layers.fp8_pair_rows import empty_pair
from eagle_triton.ops.views import BatchedRows, Heads, KeyValues, PairParts, view
from eagle_triton.runtime.fallback import gluon_module, triton_version
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch
from eagle_triton.runtime.overlap import can_overlap, overlapped_on_hopper, prefer_shared_memory
from eagle_triton.runtime.row_formats import (
    GROUP,
    Float8Pair,
    FormattedRows,
    ProductRows,
    RowFormat,
    WordOrdered,
    has_format,
)

_TILE_ROWS = 64  # a tile of keys has at most this many
_PIECE_NODES = 16  # a piece of a prompt has at least this many
MERGE_REGISTERS = 64  # for 8 splits: on Hopper two of its programs fit beside two of attention's


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
    """softmax(scale * q k^T + mask) v for N new nodes per sequence, which have their keys in the cache already.

    q [B, N, Hq, d]; cache [2, B, Hkv, T, d] in q's dtype (fp16, bf16 or fp32), d <= 512; lengths [B] int32; ancestors
    [B, N, W] int64 or None (causal); `scale` > 0. `reference.attention.tree_attention` says which keys a node sees, and
    what the `table` of a cache in pages is. If a sequence has several pages, these have 64 rows or a multiple.
    `value_width`: see the reference; at most 512, and d at most 256 larger.
    `new_keys` (1 to 64 W, only with `ancestors`): nodes see only this many first new keys, whatever the bits say; the
    rest are not read. `sinks` [Hq], fp32 or of q's dtype, and `softcap` > 0: see the reference.
    The last dimension of every tensor must be contiguous; its other strides are free. `tune_for_nodes`: choose the
    launch settings for this number of nodes. `prefetch_before_wait`: read lengths, table and committed rows before
    earlier kernels end. These must have been written before the last product, and only kernels of runtime/overlap.py
    may follow that. Returns [B, N, Hq, d], or [B, N, Hq * d] in `row_format`, which the next product reads, where that
    is useful (a pair only if splits are added up). Raises ValueError before the launch if arguments do not fit.
    """
    check_tree_attention(
        q, cache, lengths, ancestors, scale, sliding_window, table, new_keys, sinks, softcap, value_width
    )
    width = value_width or q.shape[3]
    _check_kernel_limits(q, cache, lengths, ancestors, table, sinks, width)
    rows = (tune_for_nodes or q.shape[1]) * (q.shape[2] // cache.shape[2])
    use = settings_for(
        rows, width, cache.shape[2], len(q), q.dtype, _capability(q.device), sliding_window, value_width is not None
    )
    if ancestors is None and q.shape[1] >= _PIECE_NODES and table is not None:
        use = settings_for_pieces(use, rows, len(q) * cache.shape[2])
    return _launch(
        q, cache, lengths, ancestors, scale, sliding_window, use, table,
        new_keys=new_keys, prefetch_before_wait=prefetch_before_wait, row_format=row_format,
        sinks=sinks, softcap=softcap, value_width=value_width,
    )  # fmt: skip


def attend_committed(q: Tensor, cache: Tensor, length: int, *, scale: float, table: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of any number of nodes over the first `length` rows of their sequence, all rows of its pages.

    q, cache and table as in `tree_attention`, length = M * R. Returns [B, N, Hq, d], and the log-sum-exp of each row,
    [B, Hq, N] float32, to add other parts. Raises ValueError before the launch if arguments do not fit.
    """
    lengths = torch.full((len(q),), length, dtype=torch.int32, device=q.device)
    check_tree_attention(q, cache, lengths, None, scale, None, table)
    _check_kernel_limits(q, cache, lengths, None, table)
    if length != capacity_of(cache, table):
        raise ValueError(
            f"attend_committed: length must be {capacity_of(cache, table)}, all rows of the table's pages, got {length}"
        )
    batch, nodes, heads, width = q.shape
    rows = nodes * (heads // cache.shape[2])
    use = settings_for(rows, width, cache.shape[2], batch, q.dtype, _capability(q.device))
    lse = torch.empty(batch, heads, nodes, dtype=torch.float32, device=q.device)
    use = use._replace(splits=1, programs=1, pdl=0)
    out = _launch(q, cache, lengths, None, scale, None, use, table, lse)
    assert isinstance(out, Tensor)
    return out, lse


class Settings(NamedTuple):
    """The launch settings of one shape.

    The keys are split into up to `splits` parts of at least `min_tiles` tiles. If `programs` equals `splits`, a second
    kernel adds the parts up; if it is 1, the one program does. Both give the same bits. block_m rows, block_n keys per
    tile (block_t in tiles with new keys). tma: load committed keys by a tensor descriptor. pdl: 1 lets the merge start
    early, 2 the attention kernel too. maxnreg caps the registers. streamed: use the kernel for Hopper where it supports
    the case; it has its own tiles and registers, and always starts early.
    """

    block_m: int
    block_n: int
    splits: int
    programs: int
    min_tiles: int
    num_warps: int
    num_stages: int
    block_t: int = 64
    tma: bool = False
    pdl: int = 0
    maxnreg: int = 0
    streamed: bool = False


def settings_for(
    rows: int,
    width: int,
    kv_heads: int,
    batch: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    sliding_window: int | None = None,
    of_latents: bool = False,
) -> Settings:
    """The launch settings for `rows` = N * G query rows per key/value head.

    Settings do not depend on lengths, nor `splits` on the batch, so output bits depend on neither. `capability` is that
    of a CUDA device, None elsewhere. of_latents: values are a part of the keys. The times are in docs/speed-notes.md,
    "Attention of trees".
    """
    hopper = capability is not None and capability[0] in (9, 10)
    num_stages = 3 if hopper and width <= 256 else 2
    wide, widest = width > 128, width > 256
    wide_tree = hopper and wide and not widest and 16 < rows <= 1024 and dtype != torch.float32
    if dtype == torch.float32:
        block_m, block_n, num_stages = (16 if rows <= 16 or wide else 32), (16 if wide else 32), 1
    elif rows <= 16:
        block_m, block_n = 16, 32 if wide else 64
    elif widest:  # sums of more rows do not fit in the registers; on AMD not even those of 32
        block_m, block_n = 16 if capability is None else 32, 32
    else:
        block_m, block_n = 64, 32 if wide and not wide_tree else 64
    if capability is None:  # CDNA 3 GPUs, for which this is compiled, have 64 KiB of shared memory
        num_stages = 1
    few_rows = rows <= 64
    if wide_tree and (few_rows or sliding_window is not None):
        block_m = 32  # more programs; with many keys, more rows in each are better
    if rows > 1024:  # the row blocks of a prompt's chunk fill the device
        splits = programs = 1
    else:
        for_a_split = max(kv_heads * triton.cdiv(rows, block_m), 1)  # programs of one sequence
        splits = _power_of_two(min(264 // for_a_split, 8 if capability is None or (wide_tree and not few_rows) else 16))
        programs = splits if for_a_split * batch < (128 if few_rows else 256) else 1
        if widest and programs < splits:  # a program that adds up its splits holds the sums of two
            block_m = 16
    num_warps = 8 if widest and capability is not None else 4  # as in the megakernel: launch.DRAFT_WARPS
    if of_latents and dtype != torch.float32:  # all query heads are rows of one key head
        block_m, num_warps = 16 if rows <= 128 else block_m, 4
        splits = programs = min(16, _power_of_two(1024 // triton.cdiv(rows, block_m)))
    return Settings(
        block_m,
        block_n,
        splits,
        programs,
        2 if few_rows or wide_tree else 4,
        num_warps,
        num_stages,
        32 if wide_tree and block_m == 64 else min(block_n, 64),  # else the sums of a tile do not fit in the registers
        pdl=2 if hopper else 0,
        tma=hopper and rows > 16 and dtype != torch.float32 and not widest,
        streamed=capability == (9, 0) and dtype.itemsize == 2 and 64 <= width <= 128 and triton_version() >= (3, 6),
    )


def settings_for_pieces(use: Settings, rows: int, heads: int) -> Settings:
    """The settings `use`, changed for pieces of prompts with `rows` query rows in all for each of `heads` heads.

    One split if these fill the device, otherwise sixteen (docs/speed-notes.md, "Attention of trees").
    """
    if heads * triton.cdiv(rows, use.block_m) >= 96:
        return use._replace(splits=1, programs=1, pdl=0)
    return use._replace(splits=16, programs=16, min_tiles=1)


def _power_of_two(count: int) -> int:
    """The largest power of two up to `count`, at least 1, so that few variants are compiled."""
    return 1 << (max(count, 1).bit_length() - 1)


def merge_rows_of(splits: int, width: int) -> int:
    """Rows of a program of the merge: each thread of its one warp has 64 loads in flight. No sum crosses threads."""
    return max(1, 2048 // (triton.next_power_of_2(splits) * max(16, triton.next_power_of_2(width))))


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None


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
    prefetch_before_wait: bool = False,
    row_format: RowFormat | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    value_width: int | None = None,
) -> ProductRows:
    assert use.programs in (1, use.splits), "a program takes one split or all"
    assert lse is None or use.programs == 1, "a merge gives no log-sum-exp"
    batch, nodes, heads, _ = q.shape
    width = value_width or q.shape[3]
    kv_heads, capacity = cache.shape[2], capacity_of(cache, table)
    group, rows = heads // kv_heads, nodes * (heads // kv_heads)
    out = torch.empty(*q.shape[:3], width, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    parts, formatted = None, _formatted(out.flatten(-2), width, row_format, use.programs > 1)
    if use.programs > 1:
        sums = torch.empty(batch, kv_heads, use.programs, rows, width, dtype=torch.float32, device=q.device)
        parts = Parts(sums, torch.empty(*sums.shape[:3], 2, rows, dtype=torch.float32, device=q.device))
    words = 0 if ancestors is None else ancestors.shape[-1]
    new_keys = nodes if ancestors is None else new_keys or WORD * words
    columns = max(16, triton.next_power_of_2(width))
    if value_width is not None:
        use = use._replace(tma=False, streamed=False)
    streams = use.streamed and ancestors is not None and lse is None and softcap is None
    if sliding_window is not None:
        use = use._replace(tma=False)
        streams = streams and sliding_window >= WORD * words  # a smaller one may hide new keys
    streamed, desc = _hopper_kernels(use, cache, columns, streams)
    pdl = use.pdl if parts is not None and can_overlap(q.device) else 0
    sizes: dict[str, Any] = {
        "SIZES": HeadSizes(width, group, kv_heads, isinstance(formatted, WordOrdered), q.shape[3] - width),
        "SPLITS": Splits(use.splits, use.programs, use.min_tiles),
    }
    keys = KeyLayout(kv_cache.page_rows(cache, table), cache.stride(3), words)
    operands = (
        view(Heads, q), view(KeyValues, cache), desc, table, 0 if table is None else table.stride(0), lengths,
        view(BatchedRows, ancestors), view(Heads, out), parts, nodes, new_keys, capacity,
        (softcap or scale) * math.log2(math.e), sinks,
    )  # fmt: skip

    if streamed is not None:
        grid = triton.cdiv(rows, streamed.ROWS), batch * kv_heads, use.programs
        overlapped_on_hopper(streamed.tree_attention_kernel, grid)(
            *operands, sliding_window, KEYS=keys, **sizes, NODES=streamed.nodes_for(nodes, words),
            STAGES=streamed.stages_of(width), READ_EARLY=prefetch_before_wait, num_warps=4, maxnreg=streamed.REGISTERS,
        )  # fmt: skip
    else:
        grid = triton.cdiv(rows, use.block_m), batch * kv_heads, use.programs
        compiled = launch(_tree_attention_kernel, grid)(
            *operands, sliding_window, lse, None if softcap is None else scale / softcap, KEYS=keys, **sizes,
            TILES=Tiles(use.block_m, use.block_n, use.block_t, columns), PDL=pdl,
            num_warps=use.num_warps, num_stages=use.num_stages, **NO_FMA_FUSION,
            **({"launch_pdl": True} if pdl == 2 else {}), **({"maxnreg": use.maxnreg} if use.maxnreg else {}),
        )  # fmt: skip
        prefer_shared_memory(compiled)

    if parts is not None:
        block_r = merge_rows_of(use.splits, width)
        compiled = launch(_merge_kernel, (triton.cdiv(rows, block_r), batch * kv_heads))(
            parts, lengths, view(Heads, out), PairParts.of(formatted if isinstance(formatted, Float8Pair) else None),
            nodes, batch * nodes, new_keys, capacity, sliding_window, **sizes, BLOCK_N=use.block_n, BLOCK_R=block_r,
            BLOCK_D=columns, PDL=pdl,
            num_warps=1, **NO_FMA_FUSION, **({"maxnreg": MERGE_REGISTERS} if pdl and use.splits == 8 else {}),
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
        prefer_shared_memory(compiled)
    return out if formatted is None else formatted


def _formatted(out: Tensor, width: int, row_format: RowFormat | None, merged: bool) -> FormattedRows | None:
    """What is written instead of `out` [B, N, Hq * d]: a pair (only by a merge), or `out` in another order; None: `out`
    itself. width: d."""
    if not has_format(out, row_format):
        return None
    if row_format is RowFormat.WORD_ORDER:
        return WordOrdered(out.view(-1, out.shape[-1]), out.shape) if width % 32 == 0 else None
    return empty_pair(out.shape, out) if merged and width == GROUP else None


def _hopper_kernels(use: Settings, cache: Tensor, columns: int, streams: bool) -> tuple[Any, TensorDescriptor | None]:
    """ops/attention_hopper.py if its kernel can be used, else None; and the cache's descriptor, if one is used.

    streams: whether that kernel supports the case.
    """
    rows = _rows_of_memory(cache) if streams or use.tma else None
    if rows is None:
        return None, None
    streamed = _streamed() if streams else None
    if streamed is not None:
        assert use.block_n == streamed.ROWS, "its splits are of the tiles that both kernels have"
        return streamed, streamed.descriptor(rows, columns)
    return None, TensorDescriptor.from_tensor(rows, [use.block_n, columns]) if use.tma else None


def _streamed() -> Any:
    return gluon_module("eagle_triton.ops.attention_hopper")


def _rows_of_memory(cache: Tensor) -> Tensor | None:
    """The memory between the first and the last row of a cache [2, P, Hkv, R, d] as rows [n, d] for a descriptor.

    None if a descriptor cannot describe it.
    """
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
    return cache.as_strided((rows, width), (width, 1)) if rows < 2**31 else None  # coordinates are int32


def _check_kernel_limits(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    table: Tensor | None,
    sinks: Tensor | None = None,
    width: int | None = None,
) -> None:
    width = width or q.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or width > 512 or q.shape[-1] > width + 256:
        got = f"{q.dtype} and d = {q.shape[-1]}"
        if width < q.shape[-1]:
            got += f" with value_width={width}"
        raise ValueError(
            f"tree_attention: q must be fp16, bf16 or fp32 with d <= 512, or with value_width <= 512 and d at most 256 "
            f"larger, got {got}"
        )
    if table is not None and table.shape[1] > 1 and cache.shape[3] % _TILE_ROWS:
        raise ValueError(
            f"tree_attention: pages must have a multiple of {_TILE_ROWS} rows, a tile's, got {cache.shape[3]}"
        )
    named = {"q": q, "cache": cache, "lengths": lengths, "ancestors": ancestors, "table": table, "sinks": sinks}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"tree_attention: {name} must have stride 1 in its last dimension, got strides {tensor.stride()}"
            )
    elements = q.shape[1] * max(q.stride(1), q.shape[2] * q.shape[3])
    if elements >= 2**31:  # offsets within one sequence's q and out are int32
        raise ValueError(f"tree_attention: q must span less than 2^31 elements per sequence, got {elements}")
