"""Decay and strength of each token, from a layer's projections: Gated Delta Networks (arXiv 2412.06464), section 3."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias), the logarithm of the decay, and the strength sigmoid(b).

    A_log, dt_bias [HV]; a, b [M, HV] or [B, T, HV], any floats. softplus(x) = log(1 + exp(beta x)) / beta, or x itself
    if beta x is above `threshold`. Returns two float32 tensors [1, M, HV] or [B, T, HV]; sigmoid(b) is rounded to b's
    dtype, as in Hugging Face's models. It runs in plain torch: the engine's kernels compute gates themselves. Raises
    ValueError if shapes do not fit.
    """
    heads = A_log.shape[-1:]
    if a.dim() not in (2, 3) or a.shape != b.shape or not heads == dt_bias.shape == a.shape[-1:]:
        raise ValueError(
            "fused_gdn_gating: A_log and dt_bias must be [HV], a and b [M, HV] or [B, T, HV], got "
            f"{list(A_log.shape)}, {list(dt_bias.shape)}, {list(a.shape)} and {list(b.shape)}"
        )
    g = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    strength = b.sigmoid().float()
    return (g, strength) if a.dim() == 3 else (g[None], strength[None])


def compute_gating_params(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`fused_gdn_gating` with the models' softplus: g and beta for rules that take them."""
    return fused_gdn_gating(A_log, a, b, dt_bias)
