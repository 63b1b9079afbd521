"""Attention of a tree's nodes, and the commit of its accepted path to the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from eagle_triton.benchmarks.cases.case import ACCEPTED_PATH, NODES, Case, CaseMaker, Sizes
from eagle_triton.engine.state import capacity_bucket
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.reference import tree_decoding


def attention_case(maker: CaseMaker, sizes: Sizes, nodes: int, batch: int, keys: int, target_us: float) -> Case:
    """The nodes of a tree attend to `keys` committed rows of their sequence and to each other; torch gets finished
    masks."""
    heads, kv_heads, width, device = sizes.heads, sizes.kv_heads, sizes.width, maker.device
    group, rows, capacity = heads // kv_heads, keys + nodes, capacity_bucket(keys + nodes)
    matrix = tree_decoding._ancestor_closure(maker.parents(nodes))
    ancestors = pack_ancestors(matrix).repeat(batch, 1, 1)
    lengths, scale = maker.int32(*[keys] * batch), width**-0.5
    visible = torch.ones(nodes, rows, dtype=torch.bool, device=device)
    visible[:, keys:] = matrix[0]
    bias = None
    if nodes > 1:
        bias = torch.zeros(nodes * group, -(-rows // 8) * 8, dtype=maker.dtype, device=device)[:, :rows]  # aligned
        bias.masked_fill_(~visible.repeat_interleave(group, 0), float("-inf"))

    def make(generator: torch.Generator) -> tuple:
        q = maker.normal(generator, batch, nodes, heads, width)
        packed = q.view(batch, nodes, kv_heads, group, width).transpose(1, 2).reshape(batch, kv_heads, -1, width)
        return q, packed, maker.normal(generator, 2, batch, kv_heads, capacity, width)

    def attend(ops: Any, q: Tensor, packed: Tensor, cache: Tensor) -> Any:
        return ops.tree_attention(q, cache, lengths, ancestors, scale=scale, new_keys=nodes)

    def sdpa(q: Tensor, packed: Tensor, cache: Tensor) -> Tensor:
        """The heads of a group packed into rows, so that keys are not repeated."""
        k, v = cache[:, :, :, :rows]
        return F.scaled_dot_product_attention(packed, k, v, bias, scale=scale)

    def unpack(out: Tensor, *_: Tensor) -> Tensor:
        return out.view(batch, kv_heads, nodes, group, width).transpose(1, 2).reshape(batch, nodes, heads, width)

    others: dict[str, Any] = {"sdpa": (sdpa, unpack)}
    if maker.cuda:
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        for backend in backends if bias is not None else [*backends, SDPBackend.FLASH_ATTENTION]:
            others[f"sdpa {backend.name.lower()}"] = sdpa_kernel(backend)(sdpa), unpack
        for name, query_block, options in (
            ("flex_attention", 128, {"FORCE_USE_FLEX_ATTENTION": True}),
            ("flex decoding", 256, {}),  # packs the heads of a group: 4 x 64 rows must divide the mask's block
        ):
            others[name] = _flex(visible, scale, query_block, options), lambda out, *_: out.transpose(1, 2)
    name = f"tree attention, {nodes} nodes, {keys} keys" if nodes > 1 else f"attention, {batch} sequences, {keys} keys"
    moved = 2 * batch * (rows * kv_heads + nodes * heads) * width * maker.dtype.itemsize
    least = 1.5 if nodes > 1 else None
    return maker.case("attention", name, make, attend, moved, target_us, others=others, least_speedup=least)


def _flex(visible: Tensor, scale: float, query_block: int, options: Any) -> Callable[..., Tensor]:
    """flex_attention as compiled by torch for a mask [nodes, rows] of all sequences."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    nodes, rows = visible.shape
    mask = create_block_mask(
        lambda b, h, i, j: visible[i, j], None, None, nodes, rows, visible.device, (query_block, 128)
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, packed: Tensor, cache: Tensor) -> Tensor:
        k, v = cache[:, :, :, :rows]
        return compiled(q.transpose(1, 2), k, v, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options)

    return call


def commit_case(maker: CaseMaker, sizes: Sizes) -> Case:
    """The accepted path of a tree moves together, in every layer."""
    path, keys = maker.int32(*ACCEPTED_PATH)[None], 512 if maker.cuda else 64
    count, capacity = path.shape[1], capacity_bucket(keys + NODES)
    lengths, accepted = maker.int32(keys), maker.int32(count - 1)
    source, target = keys + path[0].long(), keys + torch.arange(count, device=maker.device)

    def kept(_: Any, cache: Tensor) -> Tensor:
        return cache[:, :, :, :, keys : keys + count]

    def index_copy(cache: Tensor) -> None:
        cache.index_copy_(4, target, cache.index_select(4, source))

    return maker.case(
        "cache",
        f"commit, {count} rows over {sizes.layers} layers",
        lambda generator: (maker.normal(generator, sizes.layers, 2, 1, sizes.kv_heads, capacity, sizes.width),),
        lambda ops, cache: ops.commit(cache, lengths, path, accepted),
        2 * count * sizes.layers * 2 * sizes.kv_heads * sizes.width * maker.dtype.itemsize,
        6,
        others={"index_select, index_copy": (index_copy, kept)},
        finish=kept,
    )
