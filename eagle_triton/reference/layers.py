"""RMSNorm, rotary embedding with the cache append, and the activations: SwiGLU and the gate of attention heads."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.reference.attention import check_table
from eagle_triton.reference.kv_cache import write_rows
from eagle_triton.runtime.float8_pair import GROUP, LOW, Float8Pair, whole_of
from eagle_triton.runtime.split_sums import Product, SharedRows, SplitSums, total_of


def rms_norm(
    x: Product,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    in_draft_pass: bool = False,
    for_float8: bool = False,
) -> Tensor | Float8Pair:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang & Sennrich 2019), statistics in fp32.

    x [..., H], weight [H]. Rounded as Hugging Face models do: the normalised value to x's dtype before the weight; with
    `zero_centred`, where 1 + weight stands for the weight (Gemma, Qwen3.5), only their product. `in_draft_pass` and
    `for_float8` matter to the kernel alone.
    """
    check_rms_norm("rms_norm", x, weight)
    x = total_of(x)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centred:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def embed_rms_norm(
    tokens: Tensor,
    embedding: Tensor | SharedRows,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    in_draft_pass: bool = False,
    total: Tensor | None = None,
    for_float8: bool = False,
) -> tuple[Tensor | Float8Pair, Tensor]:
    """(rms_norm(x), x) of x = embedding[max(tokens, 0)], [..., H] each. tokens [...] int64, embedding [V, H], weight
    [H]. `total` [..., H]: where x is written."""
    check_embed_rms_norm(tokens, embedding, weight, total)
    x = embedding[tokens.clamp(min=0)]
    return rms_norm(x, weight, eps, zero_centred=zero_centred), x if total is None else total.copy_(x)


def add_rms_norm(
    x: Product,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    in_draft_pass: bool = False,
    total: Tensor | None = None,
    for_float8: bool = False,
) -> tuple[Tensor | Float8Pair, Tensor]:
    """(rms_norm(x + residual), x + residual), [..., H] each. x, residual [..., H], weight [H]. `total` [..., H]: where
    the sum is written."""
    check_rms_norm("add_rms_norm", x, weight, residual, total)
    both = total_of(x) + residual
    return rms_norm(both, weight, eps, zero_centred=zero_centred), both if total is None else total.copy_(both)


def add(x: Product, residual: Tensor | None = None) -> Tensor:
    """x + residual, or the sum of a product's parts alone: [..., H]."""
    check_add(x, residual)
    x = total_of(x)
    return x if residual is None else x + residual


def float8_pair(x: Tensor) -> Float8Pair:
    """x [..., K] bf16 as a pair of e4m3 numbers for each, and a power of two for 128 columns of a row."""
    check_float8_pair(x)
    rows, size = x.shape[:-1].numel(), x.shape[-1]
    wide = torch.nn.functional.pad(x.reshape(rows, size).float(), (0, -size % GROUP)).view(rows, -1, GROUP)
    largest = wide.abs().amax(-1, keepdim=True) if size else wide.new_zeros(rows, 0, 1)
    exponent = torch.frexp(largest).exponent.float() - 8  # of the scale: the largest becomes [128, 256)
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent)).clamp(-126, 120)
    scale = torch.exp2(exponent)
    wide = wide / scale
    high = wide.to(torch.float8_e4m3fn)
    low = ((wide - high.float()) * LOW).to(torch.float8_e4m3fn)
    scale = torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))
    parts = torch.stack([part.view(torch.uint8).flatten(1)[:, :size] for part in (high, low)])
    return Float8Pair(parts.view(torch.float8_e4m3fn), scale[..., 0].T.contiguous(), x.shape, x.dtype)


def check_float8_pair(x: Tensor) -> None:
    """Raise ValueError unless x can be a pair."""
    if x.dtype != torch.bfloat16 or x.dim() < 1:
        raise ValueError(f"float8_pair: x must be bfloat16 [..., K], got {x.dtype} {tuple(x.shape)}")


def rotary_append(
    q: Tensor | SplitSums,
    k: Tensor | SplitSums,
    v: Tensor | SplitSums,
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    *,
    skip: int = 0,
    attention_scaling: float = 1.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    zero_centred: bool = False,
    table: Tensor | None = None,
) -> Tensor:
    """Norm (optional), rotate q and k by their positions, and write k and v to the cache. Returns the rotated q.

    q [B, N, Hq, d]; k, v [B, N, Hkv, d]; cache [2, B, Hkv, T, d], of which N rows are written in place, `skip` behind
    first_row [B] int32; positions are first_row + depths [B, N] int32, without depths those of the rows; inv_freq
    [r / 2] fp32, angle = position * inv_freq, both halves of a head's first r <= d elements use the same angles (Su et
    al. 2021, half-rotation layout), the rest does not turn; cos and sin times attention_scaling. q_norm, k_norm [d]:
    per-head RMSNorm weights (Qwen3), see rms_norm for `zero_centred`. table: of a cache in pages, see tree_attention.
    Rows beyond the capacity are not written.
    """
    check_rotary_append(q, k, v, cache, first_row, depths, inv_freq, q_norm, k_norm, table)
    q, k, v = total_of(q), total_of(k), total_of(v)
    if q_norm is not None:
        q = whole_of(rms_norm(q, q_norm, eps, zero_centred=zero_centred))
    if k_norm is not None:
        k = whole_of(rms_norm(k, k_norm, eps, zero_centred=zero_centred))
    rows = first_row + skip
    if depths is None:
        positions = rows[:, None] + torch.arange(q.shape[1], device=q.device)
    else:
        positions = first_row[:, None] + depths
    angle = positions[..., None].float() * inv_freq.float()
    cos = (angle.cos() * attention_scaling).to(q.dtype)[:, :, None]
    sin = (angle.sin() * attention_scaling).to(q.dtype)[:, :, None]
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    write_rows(cache, torch.stack((k, v), dim=2), rows, table)
    return q


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), elementwise; [..., I] each."""
    check_swiglu(gate, up)
    return torch.nn.functional.silu(gate) * up


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), elementwise: attention with an output gate (Qiu et al. 2025). [B, n, Hq, d] each."""
    check_gate_heads(x, gate)
    return x * torch.sigmoid(gate)


def check_rms_norm(
    name: str,
    x: Product,
    weight: Tensor,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Raise ValueError unless these are operands of rms_norm or add_rms_norm."""
    _check_shape(name, "weight", weight, x.shape[-1:])
    if residual is not None:
        _check_shape(name, "residual", residual, x.shape)
    _check_total(name, total, x.shape)
    _check_same_on_all_ranks(name, x, weight, residual, total)


def check_embed_rms_norm(tokens: Tensor, embedding: Tensor | SharedRows, weight: Tensor, total: Tensor | None) -> None:
    """Raise ValueError unless these are operands of embed_rms_norm."""
    name = "embed_rms_norm"
    if tokens.dtype != torch.int64 or tokens.device != embedding.device or embedding.dim() != 2:
        raise ValueError(
            f"{name}: tokens must be int64 on {embedding.device} and embedding [V, H], got {tokens.dtype} on "
            f"{tokens.device} and {tuple(embedding.shape)}"
        )
    _check_shape(name, "weight", weight, embedding.shape[1:])
    _check_total(name, total, (*tokens.shape, embedding.shape[1]))
    _check_same_on_all_ranks(name, embedding, weight, total)


def check_add(x: Product, residual: Tensor | None) -> None:
    """Raise ValueError unless these are operands of add."""
    if residual is not None:
        _check_shape("add", "residual", residual, x.shape)
        _check_same_on_all_ranks("add", x, residual)


def check_rotary_append(
    q: Tensor | SplitSums,
    k: Tensor | SplitSums,
    v: Tensor | SplitSums,
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    table: Tensor | None = None,
) -> None:
    """Raise ValueError unless these are operands of rotary_append."""
    name = "rotary_append"
    if q.dim() != 4 or k.dim() != 4 or q.shape[3] % 2 or q.shape[2] % max(k.shape[2], 1):
        raise ValueError(
            f"{name}: q must be [B, N, Hq, d] and k [B, N, Hkv, d] with d even and Hq a multiple of Hkv, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    batch, count, _, dim = q.shape
    heads = k.shape[2]
    _check_shape(name, "k", k, (batch, count, heads, dim))
    _check_shape(name, "v", v, k.shape)
    for norm in (q_norm, k_norm):
        if norm is not None:
            _check_shape(name, "q_norm and k_norm", norm, (dim,))
    _check_same_on_all_ranks(name, q, k, v, q_norm, k_norm)
    if cache.dim() != 5:
        raise ValueError(f"{name}: cache must be [2, B, Hkv, T, d], got {tuple(cache.shape)}")
    pages = batch if table is None else cache.shape[1]
    _check_shape(name, "cache", cache, (2, pages, heads, cache.shape[3], dim))
    if cache.stride(4) != 1:
        raise ValueError(f"{name}: the cache's last dimension must be contiguous, got strides {cache.stride()}")
    check_table(name, table, batch, q.device)
    _check_shape(name, "first_row", first_row, (batch,))
    if depths is not None:
        _check_shape(name, "depths", depths, (batch, count))
    if inv_freq.dim() != 1 or not 0 < len(inv_freq) <= dim // 2:
        raise ValueError(f"{name}: inv_freq must have 1 to {dim // 2} elements, got {tuple(inv_freq.shape)}")
    for label, indices in (("first_row", first_row), ("depths", depths)):
        if indices is not None and indices.dtype != torch.int32:
            raise ValueError(f"{name}: {label} must be int32, got {indices.dtype}")
    for other in (cache, first_row, depths, inv_freq):
        if other is not None and other.device != q.device:
            raise ValueError(f"{name}: all tensors must be on {q.device}, got one on {other.device}")


def check_swiglu(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError unless these are operands of swiglu."""
    _check_shape("swiglu", "up", up, gate.shape)
    _check_same_on_all_ranks("swiglu", gate, up)


def check_gate_heads(x: Tensor, gate: Tensor) -> None:
    """Raise ValueError unless these are operands of gate_heads."""
    if x.dim() != 4:
        raise ValueError(f"gate_heads: x must be [B, n, Hq, d], got {tuple(x.shape)}")
    _check_shape("gate_heads", "gate", gate, x.shape)
    _check_same_on_all_ranks("gate_heads", x, gate)


def _check_shape(name: str, label: str, tensor: Product, expected: tuple[int, ...]) -> None:
    if tensor.shape != tuple(expected):
        raise ValueError(f"{name}: {label} must be {tuple(expected)}, got {tuple(tensor.shape)}")


def _check_total(name: str, total: Tensor | None, shape: tuple[int, ...]) -> None:
    """A total's rows are contiguous, and follow each other at one distance."""
    if total is None:
        return
    _check_shape(name, "total", total, shape)
    if total.stride(-1) != 1 or total.reshape(-1, shape[-1]).data_ptr() != total.data_ptr():  # a copy
        raise ValueError(f"{name}: total's rows must be contiguous and evenly spaced, got strides {total.stride()}")


def _check_same_on_all_ranks(name: str, first: Product | SharedRows, *others: Product | None) -> None:
    if not first.dtype.is_floating_point:
        raise ValueError(f"{name}: expected floating point tensors, got {first.dtype}")
    for other in others:
        if other is not None and (other.dtype != first.dtype or other.device != first.device):
            raise ValueError(f"{name}: expected {first.dtype} on {first.device}, got {other.dtype} on {other.device}")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
