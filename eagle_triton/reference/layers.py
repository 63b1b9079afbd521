"""Norms, rotary embedding with the cache append, and the activations: SwiGLU, others, the gate of attention heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_triton.operands import layers as operands
from eagle_triton.reference.kv_cache import write_rows
from eagle_triton.runtime.row_formats import GROUP, LOW, Float8Pair, ProductRows, RowFormat, whole_of
from eagle_triton.runtime.split_sums import Product, SharedRows, SplitSums, total_of


def rms_norm(
    x: Product,
    weight: Tensor | tuple[Tensor, ...],
    eps: float,
    *,
    zero_centred: bool = False,
    round_first: bool = True,
    subtract_mean: bool = False,
    bias: Tensor | None = None,
    in_draft_pass: bool = False,
    row_format: RowFormat | None = None,
) -> ProductRows:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang & Sennrich 2019), statistics in fp32.

    x [..., H], weight [H]; with several weights, x [..., G, H] has a row for each. Rounded like in Hugging Face's
    models: the normalised value to x's dtype before the weight (Llama); without `round_first` (gpt-oss, OLMo 2), and
    with `zero_centred`, where the factor is 1 + weight (Gemma, Qwen3.5), only the product. `in_draft_pass` and
    `row_format` are for the kernel only.

    LayerNorm (Ba et al. 2016) is the same with `subtract_mean`: the row's mean is subtracted first. bias [H] is added
    to the product. It rounds once too, and with `zero_centred` also 1 + weight (Nemotron).
    """
    operands.check_rms_norm("rms_norm", x, weight, bias=bias, subtract_mean=subtract_mean)
    if isinstance(weight, tuple):
        weight = torch.stack(weight)
    x = total_of(x)
    wide = x.float()
    if subtract_mean:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centred:
        factor = 1.0 + weight.float()
        product = normed * (factor.to(x.dtype).float() if subtract_mean else factor)
    elif subtract_mean or not round_first:
        product = weight.float() * normed
    else:
        product = weight * normed.to(x.dtype)
    return (product if bias is None else product + bias.float()).to(x.dtype)


def embed_rms_norm(
    tokens: Tensor,
    embedding: Tensor | SharedRows,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    round_first: bool = True,
    subtract_mean: bool = False,
    bias: Tensor | None = None,
    in_draft_pass: bool = False,
    total: Tensor | None = None,
    row_format: RowFormat | None = None,
) -> tuple[ProductRows, Tensor]:
    """(rms_norm(x), x) for x = embedding[max(tokens, 0)], [..., H] each. tokens [...] int64, embedding [V, H], weight
    [H]. `total` [..., H]: x is written here."""
    operands.check_embed_rms_norm(tokens, embedding, weight, total, bias)
    x = embedding[tokens.clamp(min=0)]
    kind: dict[str, Any] = dict(zero_centred=zero_centred, round_first=round_first)
    out = rms_norm(x, weight, eps, subtract_mean=subtract_mean, bias=bias, **kind)
    return out, x if total is None else total.copy_(x)


def add_rms_norm(
    x: Product,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    round_first: bool = True,
    subtract_mean: bool = False,
    bias: Tensor | None = None,
    in_draft_pass: bool = False,
    total: Tensor | None = None,
    row_format: RowFormat | None = None,
    own_weight: Tensor | None = None,
) -> tuple[ProductRows, Tensor]:
    """(rms_norm(x + residual), x + residual), [..., H] each. x, residual [..., H], weight [H]. total [..., H]: the sum
    is written here. own_weight [H]: x is its RMSNorm with this weight first."""
    operands.check_rms_norm("add_rms_norm", x, weight, residual, total, own_weight, bias, subtract_mean)
    kind: dict[str, Any] = dict(zero_centred=zero_centred, round_first=round_first)
    if own_weight is not None:
        x = whole_of(rms_norm(x, own_weight, eps, **kind))
    both = total_of(x) + residual
    out = rms_norm(both, weight, eps, subtract_mean=subtract_mean, bias=bias, **kind)
    return out, both if total is None else total.copy_(both)


def add(x: Product, residual: Tensor | None = None) -> Tensor:
    """x + residual, or without a residual the sum of a product's parts: [..., H]."""
    operands.check_add(x, residual)
    x = total_of(x)
    return x if residual is None else x + residual


def float8_pair(x: Tensor) -> Float8Pair:
    """x [..., K] bf16 as pairs of e4m3 numbers, with a power of two for every 128 columns of a row."""
    operands.check_float8_pair(x)
    rows, size = x.shape[:-1].numel(), x.shape[-1]
    wide = torch.nn.functional.pad(x.reshape(rows, size).float(), (0, -size % GROUP)).view(rows, -1, GROUP)
    largest = wide.abs().amax(-1, keepdim=True) if size else wide.new_zeros(rows, 0, 1)
    exponent = torch.frexp(largest).exponent.float() - 8  # of the scale, which brings the largest to [128, 256)
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent)).clamp(-126, 120)
    scale = torch.exp2(exponent)
    wide = wide / scale
    high = wide.to(torch.float8_e4m3fn)
    low = ((wide - high.float()) * LOW).to(torch.float8_e4m3fn)
    scale = torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))
    parts = torch.stack([part.view(torch.uint8).flatten(1)[:, :size] for part in (high, low)])
    return Float8Pair(parts.view(torch.float8_e4m3fn), scale[..., 0].T.contiguous(), x.shape, x.dtype)


def rotary_append(
    q: Tensor | SplitSums,
    k: Tensor | SplitSums | None,
    v: Tensor | SplitSums | None,
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    *,
    skip: int = 0,
    attention_scaling: float = 1.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: float = 0.0,
    zero_centred: bool = False,
    round_first: bool = True,
    table: Tensor | None = None,
    pairs: bool = False,
    round_tables: bool = True,
    round_terms: bool = True,
    temperature: tuple[float, int] | None = None,
    norm_last: bool = False,
) -> Tensor:
    """Norm (optional), rotate q and k by their positions, and write k and v to the cache. Returns the rotated q.

    q [B, N, Hq, d]; k, v [B, N, Hkv, d]; cache [2, B, Hkv, T, d]: N rows are written in place, from row first_row [B]
    int32 + `skip` on. Positions are first_row + depths [B, N] int32, or without depths the rows' own. inv_freq
    [r / 2] fp32: angle = position * inv_freq. Both halves of a head's first r <= d elements use the same angles (Su et
    al. 2021, half-rotation layout); the rest is not rotated; cos and sin are multiplied by attention_scaling. q_norm,
    k_norm [d]: per-head RMSNorm weights (Qwen3), and v_norm [d] (Gemma 4), see rms_norm for `zero_centred` and
    `round_first`. table: of a cache in pages, see tree_attention. Rows beyond the capacity are not written; without k
    and v none are.

    Differences between models: with empty frequencies, [0], nothing is rotated (SmolLM3). `pairs`: elements 2i and
    2i + 1 rotate together instead of i and i + r / 2 (GLM-4). Without `round_tables` cos and sin stay fp32, and the
    rotated values are rounded once (OLMo 2). Without `round_terms` cos and sin are rounded, and then the rotated values
    (Cohere). temperature (beta, length): the rotated q is multiplied by 1 + beta * log(1 + floor(position / length)) in
    its own dtype (Ministral 3). `norm_last`: q and k are normed after the rotation (Hunyuan).
    """
    norms = q_norm, k_norm, v_norm
    operands.check_rotary_append(q, k, v, cache, first_row, depths, inv_freq, norms, table, temperature)
    kind: dict[str, Any] = dict(zero_centred=zero_centred, round_first=round_first)

    def normed(x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else whole_of(rms_norm(x, norm, eps, **kind))

    q, *own = (total_of(x) for x in (q, k, v) if x is not None)
    if own:
        own[1] = normed(own[1], v_norm)
    if not norm_last:
        q, own[:1] = normed(q, q_norm), [normed(part, k_norm) for part in own[:1]]
    rows = first_row + skip
    positions = _positions(first_row, depths, skip, q.shape[1])
    cos, sin = _cos_sin(positions, inv_freq, attention_scaling, q.dtype if round_tables else torch.float32)
    if not round_terms:
        cos, sin = cos.float(), sin.float()
    q, own[:1] = _rotate(q, cos, sin, pairs), [_rotate(part, cos, sin, pairs) for part in own[:1]]
    if norm_last:
        q, own[:1] = normed(q, q_norm), [normed(part, k_norm) for part in own[:1]]
    if temperature is not None:
        q = q * _factor(positions, temperature, q.dtype)
    if own:
        write_rows(cache, torch.stack(own, dim=2), rows, table)
    return q


def latent_append(
    q: Tensor,
    latents: Tensor | SplitSums,
    norm: Tensor,
    eps: float,
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    *,
    out: Tensor,
    skip: int = 0,
    attention_scaling: float = 1.0,
    zero_centred: bool = False,
    round_first: bool = True,
    table: Tensor | None = None,
    pairs: bool = False,
    round_tables: bool = True,
    temperature: tuple[float, int] | None = None,
    unrotated: Tensor | None = None,
) -> Tensor:
    """Norm latents and rotate the key beside them, and write both to the cache; rotate q into `out`, which is returned.

    For multi-head latent attention (DeepSeek-AI, arXiv 2405.04434). latents [B, N, rank + r]: a token's compressed keys
    and values, which are normed with the weight `norm` [rank], and one key of r elements for all heads. q, out [B, N,
    Hq, r]: what rotates of the queries. cache [1, B, 1, T, rank + r], or with a `table` in pages: N rows are written,
    from row first_row [B] int32 + `skip` on. With a temperature the other elements of the queries, `unrotated` [B, N,
    Hq, o], are multiplied in place, too. For positions, inv_freq [r / 2] and the other arguments see
    `rotary_append`, for norms `rms_norm`.
    """
    operands.check_latent_append(
        q, latents, norm, cache, first_row, depths, inv_freq, out, table, temperature, unrotated
    )
    latents = total_of(latents)
    normed = whole_of(
        rms_norm(latents[..., : len(norm)], norm, eps, zero_centred=zero_centred, round_first=round_first)
    )
    positions = _positions(first_row, depths, skip, q.shape[1])
    cos, sin = _cos_sin(positions, inv_freq, attention_scaling, q.dtype if round_tables else torch.float32)
    key = _rotate(latents[:, :, None, len(norm) :], cos, sin, pairs)
    new = torch.cat([normed[:, :, None], key], dim=-1)
    write_rows(cache, new[:, :, None], first_row + skip, table)
    out.copy_(_rotate(q, cos, sin, pairs))
    if temperature is not None and unrotated is not None:
        factor = _factor(positions, temperature, q.dtype)
        out.mul_(factor)
        unrotated.mul_(factor)
    return out


def _factor(positions: Tensor, temperature: tuple[float, int], dtype: torch.dtype) -> Tensor:
    """1 + beta * log(1 + floor(position / length)), [B, N, 1, 1], of temperature (beta, length)."""
    beta, length = temperature
    return (1 + beta * torch.log(1 + torch.floor(positions / length))).to(dtype)[:, :, None, None]


def _positions(first_row: Tensor, depths: Tensor | None, skip: int, count: int) -> Tensor:
    """The positions [B, N] of new rows."""
    if depths is None:
        return (first_row + skip)[:, None] + torch.arange(count, device=first_row.device)
    return first_row[:, None] + depths


def _cos_sin(positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, N, 1, r / 2] of positions [B, N]."""
    angle = positions[..., None].float() * inv_freq.float()
    cos, sin = ((part[:, :, None] * scaling).to(dtype) for part in (angle.cos(), angle.sin()))
    return cos, sin


def swiglu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """silu(gate) * up (Shazeer 2020), elementwise; [..., I] each. activation "gelu_tanh": gelu with its tanh
    approximation instead of silu (Gemma)."""
    operands.check_swiglu(gate, up, activation)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def activate(x: Product, activation: str) -> Tensor:
    """activation(x), elementwise, of an MLP without a gate; [..., I]. x may be in splits.

    "silu", "gelu_tanh", "gelu" (Hendrycks & Gimpel 2016, exact), or "relu2", max(x, 0)^2 (So et al. 2021). Rounded
    once.
    """
    operands.check_activate(x, activation)
    x = total_of(x)
    if activation == "relu2":
        return torch.nn.functional.relu(x).square()
    if activation == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gate_heads(x: Tensor, gate: Tensor, activation: str = "sigmoid") -> Tensor:
    """x * activation(gate): attention with an output gate (Qiu et al. 2025), "sigmoid" or "softplus". x [B, n, Hq, d];
    gate of the same shape, or [B, n, Hq, 1]. Softplus is log(1 + exp(gate)), rounded once."""
    operands.check_gate_heads(x, gate, activation)
    if activation == "softplus":
        return x * torch.nn.functional.softplus(gate.float()).to(x.dtype)
    return x * torch.sigmoid(gate)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if pairs else (turned[..., :half], turned[..., half:])
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    turned = torch.stack(parts, dim=-1).flatten(-2) if pairs else torch.cat(parts, dim=-1)
    return torch.cat((turned, rest), dim=-1)
