"""Production settings of rms_norm, rotary_append, swiglu, activate and gate_heads: 8b and 1b shapes, whole and partial
products; those of Qwen3.5 and Qwen3-Next, zero-centred norms and a quarter of each head rotated; Hunyuan-7B's heads,
Laguna's gates, the latents of GLM-4.7-Flash and DeepSeek-V2, and LayerNorms of Command-R, StarCoder 2 and Nemotron."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.layers import UNGATED_ACTIVATIONS
from eagle_triton.ops.layers import (
    activate,
    add,
    add_rms_norm,
    embed_rms_norm,
    float8_pair,
    gate_heads,
    latent_append,
    rms_norm,
    rotary_append,
    swiglu,
)
from eagle_triton.ops.linear.side_by_side import parts_of
from eagle_triton.runtime.row_formats import RowFormat
from eagle_triton.runtime.split_sums import SharedRows, SharedSums, SplitSums
from tests.compile_cases._launches import HOPPER, bf16, fp16, fp32, i32, i64, launches, peers_of


def product_of(splits: int, *shape: int) -> Tensor | SplitSums:
    """A product in bf16; its sums, if it has splits."""
    return bf16(*shape) if splits == 1 else SplitSums(fp32(splits, *shape), torch.bfloat16)


def _norms(size: int, splits: int) -> list[tuple]:
    x, residual, weight = product_of(splits, 60, size), bf16(60, size), bf16(size)
    name, summed = f"{size} splits {splits}", (add_rms_norm, x, residual, weight, 1e-5)
    plain = fp16(60, size) if splits == 1 else SplitSums(fp32(splits, 60, size), torch.float16)
    in_words = dict(round_first=False, row_format=RowFormat.WORD_ORDER)
    return [
        *launches(f"residual {name}", *summed),
        *launches(f"of a norm {name}", *summed, own_weight=weight),
        *launches(name, rms_norm, plain, fp16(size), 1e-5),
        *launches(f"zero-centred {name}", *summed, zero_centred=True),
        *launches(f"rounded once, in the order of words {name}", *summed, **in_words),
    ]


def _other_norms(size: int) -> list[tuple]:
    weight, pair = bf16(size), dict(row_format=RowFormat.FLOAT8_PAIR)
    summed = product_of(4, 60, size), bf16(60, size), weight, 1e-5
    return [
        *launches(f"{size} with its pair", add_rms_norm, *summed, **pair, targets=HOPPER),
        *launches(f"embedding {size}", embed_rms_norm, i64(60), bf16(32000, size), weight, 1e-5),
        *launches(f"{size} with 3 weights", rms_norm, bf16(60, 3, size), (weight,) * 3, 1e-5),
    ]


def _layer_norms(size: int, splits: int) -> list[tuple]:
    weight, summed = bf16(size), (add_rms_norm, product_of(splits, 60, size), bf16(60, size), bf16(size), 1e-5)
    kind, name = dict(subtract_mean=True), f"{size} splits {splits}"
    return [
        *launches(f"LayerNorm {name}", *summed, **kind),
        *launches(f"LayerNorm with a bias {name}", *summed, **kind, bias=weight),
        *launches(f"zero-centred LayerNorm {name}", *summed, **kind, bias=weight, zero_centred=True),
    ]


def _of_ranks(size: int, ranks: int, splits: int, rows: int) -> list[tuple]:
    """Of few rows, which are sent, or of many."""
    summed = SharedSums(product_of(splits, rows, size), torch.bfloat16, peers_of(ranks, 512, 4 * size))
    name = f"{rows} rows of {size}, splits {splits} of {ranks} ranks"
    return launches(name, add_rms_norm, summed, bf16(rows, size), bf16(size), 1e-5)


_PEERS = peers_of(3, 512, 4 * 4096)
_SHARED = SharedSums(bf16(10, 4096), torch.bfloat16, _PEERS)
_OF_RANKS = add_rms_norm, _SHARED, bf16(10, 4096), bf16(4096), 1e-5


def _rotary(
    heads: int,
    group: int,
    dim: int,
    *,
    splits: int = 1,
    turned: int | None = None,
    norms: str = "",
    pages: bool = False,
    alone: bool = False,
    chain: bool = False,
    **options,
) -> list[tuple]:
    """turned: columns of a head; norms: of "q", "k" and "v"; alone: queries without keys and values; chain: without
    depths."""
    cols = [heads * group * dim, heads * dim, heads * dim]
    whole = bf16(240, sum(cols)) if splits == 1 else fp32(splits, 240, sum(cols))
    parts = parts_of(whole, cols, torch.Size((4, 60)), torch.bfloat16)
    queries, *own = (part.unflatten(-1, (-1, dim)) for part in parts)
    cache = bf16(2, 40, heads, 64, dim) if pages else bf16(2, 4, heads, 600, dim)
    kind = "pages" * pages, "" if turned is None else f"turned {turned}", *norms, *options
    name = " ".join([f"d {dim} group {group} splits {splits}", *filter(None, kind)])
    options |= {f"{name}_norm": bf16(dim) for name in norms}
    return launches(
        name,
        rotary_append,
        queries,
        *((None, None) if alone else own),
        cache,
        i32(4),
        None if chain else i32(4, 60),
        fp32((dim if turned is None else turned) // 2),
        table=i32(4, 10) if pages else None,
        **options,
    )


def _latents(heads: int, splits: int, rank: int = 512, rotated: int = 64, **options) -> list[tuple]:
    """Of a stacked product with the queries' latents before them."""
    whole = bf16(4, 60, rank + rotated + 768) if splits == 1 else fp32(splits, 4, 60, rank + rotated + 768)
    latents = whole[..., 768:]
    q, out = bf16(4, 60, heads, rotated + 192)[..., 192:], bf16(4, 60, heads, rotated + rank)[..., rank:]
    return launches(
        " ".join([f"{heads} heads of {rank} and {rotated} splits {splits}", *options]),
        latent_append,
        q,
        latents if splits == 1 else SplitSums(latents, torch.bfloat16),
        bf16(rank),
        1e-5,
        bf16(1, 40, 1, 64, rank + rotated),
        i32(4),
        i32(4, 60),
        fp32(rotated // 2),
        out=out,
        table=i32(4, 10),
        unrotated=bf16(4, 60, heads, 64) if "temperature" in options else None,
        **options,
    )


_ONCE = dict(round_first=False)
_GEMMA4 = dict(pages=True, **_ONCE)
CASES = [
    *_norms(4096, 1),
    *_norms(4096, 2),
    *_other_norms(4096),
    *_other_norms(2048),
    *_layer_norms(4096, 1),
    *_layer_norms(6144, 2),
    *launches("pairs", float8_pair, bf16(60, 4096), targets=HOPPER),
    *(
        case
        for size, ranks, splits in ((8192, 2, 2), (4096, 2, 1), (8192, 8, 1), (4096, 3, 3))
        for rows in (60, 10)
        for case in _of_ranks(size, ranks, splits, rows)
    ),
    *launches("of 3 ranks", embed_rms_norm, i64(10), SharedRows(bf16(32000, 4096), _PEERS), bf16(4096), 1e-5),
    *launches("of 3 ranks rounded once", *_OF_RANKS, **_ONCE),
    *launches("of 3 ranks zero-centred", *_OF_RANKS, zero_centred=True),
    *launches("LayerNorm of 3 ranks", *_OF_RANKS, subtract_mean=True, bias=bf16(4096)),
    *launches("sum of 3 ranks", add, _SHARED),
    *(case for splits in (1, 2) for norms in ("qk", "") for case in _rotary(8, 4, 128, splits=splits, norms=norms)),
    *(case for norms in ("qk", "") for case in _rotary(8, 4, 64, splits=2, norms=norms)),
    *(case for dim in (64, 128) for case in _rotary(8, 4, dim, splits=2, pages=True)),
    *_rotary(8, 1, 128, splits=4, norms="qk", chain=True),  # keys in the queries' place
    *_rotary(4, 6, 256, turned=64, norms="qk", zero_centred=True),
    *_rotary(2, 8, 256, turned=64, norms="qk", zero_centred=True),
    *_rotary(2, 8, 256, turned=64, norms="qk", **_ONCE),
    *_rotary(4, 8, 512, norms="qkv", **_GEMMA4),
    *_rotary(2, 8, 512, splits=2, norms="qkv", **_GEMMA4),
    *_rotary(16, 2, 256, norms="qkv", **_GEMMA4),
    *_rotary(16, 2, 512, norms="q", alone=True, **_GEMMA4),
    *(
        case
        for turned, splits in ((128, 2), (64, 1))
        for kind in (
            dict(pairs=True),
            dict(round_tables=False),
            dict(pairs=True, round_terms=False),
            dict(temperature=(0.1, 16384)),
        )
        for case in _rotary(8, 4, 128, turned=turned, splits=splits, **kind)
    ),
    *_rotary(8, 4, 128, turned=0),
    *_rotary(8, 4, 128, splits=2, norms="qk", norm_last=True),
    *_latents(20, 2, pairs=True),
    *_latents(128, 1, pairs=True, round_tables=False),
    *_latents(32, 1, 256, pairs=True, temperature=(0.1, 8192)),
    *launches("silu", swiglu, bf16(60, 14336), bf16(60, 14336)),
    *launches("gelu_tanh", swiglu, bf16(60, 14336), bf16(60, 14336), "gelu_tanh"),
    *(
        case
        for name in UNGATED_ACTIVATIONS
        for splits in (1, 2)
        for case in launches(f"{name} of {splits}", activate, product_of(splits, 60, 24576), name)
    ),
    *launches("gated heads", gate_heads, bf16(4, 60, 24, 256), bf16(4, 60, 24, 256)),
    *launches("one gate", gate_heads, bf16(4, 60, 48, 128), bf16(4, 60, 48, 1), "softplus"),
]
