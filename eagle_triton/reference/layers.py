"""RMSNorm, rotary embedding with the cache append, and the SwiGLU activation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang & Sennrich 2019), statistics in fp32.

    x [..., H], weight [H]. With `residual` [..., H], x + residual is normalised and the sum is returned too:
    (normed, sum). The normalised value is rounded to x's dtype before the weight, as Hugging Face models do.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if residual is None else (normed, total)


def rotary_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    first_row: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    attention_scaling: float = 1.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm (optional), rotate q and k by their positions, and write k and v to the cache. Returns the rotated q.

    q [B, N, Hq, d]; k, v [B, N, Hkv, d]; cache [2, B, Hkv, T, d], rows first_row .. first_row + N of it are written in
    place, first_row [B] int32; positions [B, N] int32; inv_freq [d / 2] fp32, angle = position * inv_freq, both halves
    of a head use the same angles (Su et al. 2021, half-rotation layout); cos and sin times attention_scaling.
    q_norm, k_norm [d]: per-head RMSNorm weights (Qwen3). Rows beyond the capacity are not written (GPU) or raise
    ValueError (CPU).
    """
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    angle = positions[..., None].float() * inv_freq.float()
    cos = (angle.cos() * attention_scaling).to(q.dtype)[:, :, None]
    sin = (angle.sin() * attention_scaling).to(q.dtype)[:, :, None]
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    count, capacity = k.shape[1], cache.shape[3]
    rows = first_row[:, None].long() + torch.arange(count, device=cache.device)
    if not cache.is_cuda and int(rows.max()) >= capacity:
        raise ValueError(f"rotary_append: row {int(rows.max())} exceeds the capacity of {capacity}")
    batch = torch.arange(len(rows), device=cache.device)[:, None]
    cache.permute(1, 3, 0, 2, 4)[batch, rows] = torch.stack((k, v), dim=2).to(cache.dtype)
    return q


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), elementwise; [..., I] each."""
    return torch.nn.functional.silu(gate) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
