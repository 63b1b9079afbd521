"""The small operations between products: norms, rotary embedding with the cache append, SwiGLU, gated heads.

    rms_norm:       out = weight * x / sqrt(mean(x^2) + eps);  zero-centred: (1 + weight) * ...
                    LayerNorm: the same of x - mean(x), + bias
    embed_rms_norm: total = embedding[tokens];  out = rms_norm(total)
    add_rms_norm:   total = x + residual;  out = rms_norm(total)
    add:            out = x (+ residual)
    rotary_append:  q, k = rotate(norm(q), angle), rotate(norm(k), angle);  cache rows first_row + skip.. = k, v
                    a node's position is first_row + its depth, or that of its row without depths
                    rotate((a, b, c), angle) = (a cos - b sin, b cos + a sin, c), a and b the halves of a head's first
                    r elements, or with pairs its even and odd ones; c the rest, which is empty if r = d
    latent_append:  cache rows first_row + skip.. = (norm(c), rotate(k)) of latents (c, k);  out = rotate(q)
    swiglu:         out = silu(gate) * up, or gelu(gate) * up
    activate:       out = silu(x), gelu(x) or relu(x)^2
    gate_heads:     out = x * sigmoid(gate)
    float8_pair:    x = scale * (high + low / 16), parts in e4m3, for products of eight bits; norms make it, too

| name                 | shape               | dtype, layout                                                    |
|----------------------|---------------------|------------------------------------------------------------------|
| x, residual          | [..., H]            | fp16, bf16 or fp32; rows may be strided                          |
| out, total           | [..., H]            | as x; a given total may be strided                               |
| tokens, embedding    | [...], [V, H]       | int64; as x, rows are contiguous                                 |
| q; k, v              | [B, N, Hq | Hkv, d] | as x; any strides but a contiguous d                             |
| x, gate of heads     | [B, n, Hq, d]       | as x; any strides but a contiguous d                             |
| cache                | [2, B, Hkv, T, d]   | fp16, bf16 or fp32; any strides but a contiguous d               |
| q; latents           | [B, N, Hq, r], [B, N, rank + r] | of latent_append, with a cache [1, B, 1, T, rank + r] |
| first_row, depths    | [B], [B, N]         | int32                                                            |
| inv_freq             | [r / 2]             | fp32; angle = position * inv_freq; [0]: nothing turns            |

x, latents, or q, k and v together, may be `SplitSums`: partial sums of products, added here in their order. x of a norm
or sum may be `SharedSums`: each rank has a part of a product. Then all ranks call the operation with equal shapes. Each
stores its part where the others see it, waits for theirs, and adds all in the order of the ranks. The bits are those of
a norm that reads the parts as splits (`runtime/peer_memory.py`; ValueError for more rows than there is room for).

Numerics: computed in fp32 and rounded to the output's dtype wherever Hugging Face's models round: a product before a
residual is added or before it is rotated, a normalised value before its weight (but not before a zero-centred one, or
without `round_first`, or in a LayerNorm), sine and cosine, both terms of a rotation (not with fp32 tables, or without
`round_terms`), silu(gate) and sigmoid(gate).
This costs nothing and keeps 16-bit outputs closest to the original's. An angle is the fp32 product, as in the models.
It is reduced to a quarter turn in fp64, so sine and cosine are accurate to fp32 at any position and need no local
memory.

The operations are in `norms.py`, `rotary.py`, `latent.py`, `gates.py` and `fp8_pair_rows.py`. `values.py` has what they
share.
"""

from eagle_triton.ops.layers.fp8_pair_rows import float8_pair
from eagle_triton.ops.layers.gates import activate, gate_heads, swiglu
from eagle_triton.ops.layers.latent import latent_append
from eagle_triton.ops.layers.norms import add, add_rms_norm, embed_rms_norm, rms_norm
from eagle_triton.ops.layers.rotary import rotary_append

__all__ = [
    "activate",
    "add",
    "add_rms_norm",
    "embed_rms_norm",
    "float8_pair",
    "gate_heads",
    "latent_append",
    "rms_norm",
    "rotary_append",
    "swiglu",
]
