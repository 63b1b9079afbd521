"""Checks of the arguments of a layer's small operations."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.shapes import FLOATS, check_tensors
from eagle_triton.runtime.split_sums import Product, SharedRows, SplitSums

ACTIVATIONS = ("silu", "gelu_tanh")  # of gates
UNGATED_ACTIVATIONS = (*ACTIVATIONS, "gelu", "relu2")
HEAD_GATES = ("sigmoid", "softplus")


def check_rms_norm(
    name: str,
    x: Product,
    weight: Tensor | tuple[Tensor, ...],
    residual: Tensor | None = None,
    total: Tensor | None = None,
    own_weight: Tensor | None = None,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
) -> None:
    if bias is not None and isinstance(weight, tuple):
        raise ValueError(f"{name}: bias must be None with several weights")
    if own_weight is not None and (subtract_mean or bias is not None):
        raise ValueError(f"{name}: own_weight must be None for norms that subtract the mean or have a bias")
    if isinstance(weight, tuple):
        if not weight or x.shape[-2:-1] != (len(weight),):
            raise ValueError(f"{name}: x must be [..., {len(weight)}, H] for {len(weight)} weights, got {[*x.shape]}")
        for one in weight[1:]:
            check_tensors(name, {"x": (x, x.shape, FLOATS), "weight": (one, x.shape[-1:], x.dtype)})
        weight = weight[0]
    tensors = {
        "x": (x, x.shape or "... H", FLOATS),
        "weight": (weight, x.shape[-1:], x.dtype),
        "residual": (residual, x.shape, x.dtype),
        "total": (total, x.shape, x.dtype),
        "own_weight": (own_weight, x.shape[-1:], x.dtype),
        "bias": (bias, x.shape[-1:], x.dtype),
    }
    check_tensors(name, tensors)
    _check_evenly_spaced(name, total)


def check_embed_rms_norm(
    tokens: Tensor,
    embedding: Tensor | SharedRows,
    weight: Tensor,
    total: Tensor | None,
    bias: Tensor | None = None,
) -> None:
    tensors = {
        "tokens": (tokens, "...", torch.int64),
        "embedding": (embedding, "V H", FLOATS),
        "weight": (weight, "H", embedding.dtype),
        "total": (total, "... H", embedding.dtype),
        "bias": (bias, "H", embedding.dtype),
    }
    check_tensors("embed_rms_norm", tensors)
    _check_evenly_spaced("embed_rms_norm", total)


def _check_evenly_spaced(name: str, total: Tensor | None) -> None:
    if total is None:
        return
    if total.stride(-1) != 1 or total.reshape(-1, total.shape[-1]).data_ptr() != total.data_ptr():  # a copy
        raise ValueError(f"{name}: total's rows must be contiguous and evenly spaced, got strides {total.stride()}")


def check_add(x: Product, residual: Tensor | None) -> None:
    check_tensors("add", {"x": (x, x.shape, None), "residual": (residual, x.shape, x.dtype)})


def check_float8_pair(x: Tensor) -> None:
    check_tensors("float8_pair", {"x": (x, "... K", torch.bfloat16)})


def check_rotary_append(
    q: Tensor | SplitSums,
    k: Tensor | SplitSums | None,
    v: Tensor | SplitSums | None,
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    norms: tuple[Tensor | None, Tensor | None, Tensor | None],
    table: Tensor | None = None,
    temperature: tuple[float, int] | None = None,
) -> None:
    name = "rotary_append"
    tensors = {
        "q": (q, "B N Hq d", FLOATS),
        "k": (k, "B N Hkv d", q.dtype),
        "v": (v, "B N Hkv d" if k is None else k.shape, q.dtype),
        **{f"{name}_norm": (norm, "d", q.dtype) for name, norm in zip("qkv", norms, strict=True)},
        "cache": (cache, "2 B Hkv T d, contiguous rows" if table is None else "2 P Hkv R d, contiguous rows", None),
        "table": (table, "B M>0", torch.int32),
        "first_row": (first_row, "B", torch.int32),
        "depths": (depths, "B N", torch.int32),
        "inv_freq": (inv_freq, "half", None),
    }
    sizes = check_tensors(name, tensors)
    heads, dim, half = sizes["Hq"], sizes["d"], sizes["half"]
    if dim % 2 or half > dim // 2 or heads % max(sizes["Hkv"], 1):
        raise ValueError(
            f"{name}: d must be even, inv_freq at most half of it, and Hq a multiple of Hkv, got d = {dim}, "
            f"{half} frequencies, {heads} and {sizes['Hkv']} heads"
        )
    if (k is None) != (v is None):
        raise ValueError(f"{name}: k and v must be given together, got {'v' if k is None else 'k'} alone")
    if temperature is not None and temperature[1] < 1:
        raise ValueError(f"{name}: temperature must be (beta, a length of at least 1), got {temperature}")


def check_latent_append(
    q: Tensor,
    latents: Tensor | SplitSums,
    norm: Tensor,
    cache: Tensor,
    first_row: Tensor,
    depths: Tensor | None,
    inv_freq: Tensor,
    out: Tensor,
    table: Tensor | None = None,
    temperature: tuple[float, int] | None = None,
    unrotated: Tensor | None = None,
) -> None:
    if (temperature is None) != (unrotated is None):
        raise ValueError("latent_append: give both temperature and unrotated, or neither of them")
    if temperature is not None and temperature[1] < 1:
        raise ValueError(f"latent_append: temperature must be (beta, a length of at least 1), got {temperature}")
    rotated = 2 * inv_freq.numel()
    tensors = {
        "norm": (norm, "rank>0", FLOATS),
        "inv_freq": (inv_freq, "half>0", torch.float32),
        "q": (q, "B N Hq r", norm.dtype),
        "out": (out, "B N Hq r, contiguous rows", norm.dtype),
        "unrotated": (unrotated, "B N Hq o, contiguous rows", norm.dtype),
        "latents": (latents, "B N width", norm.dtype),
        "cache": (cache, f"1 {'B' if table is None else 'P'} 1 T width, contiguous rows", None),
        "table": (table, "B M>0", torch.int32),
        "first_row": (first_row, "B", torch.int32),
        "depths": (depths, "B N", torch.int32),
    }
    check_tensors("latent_append", tensors, r=rotated, width=norm.numel() + rotated)


def check_activation(name: str, activation: str, known: tuple[str, ...] = ACTIVATIONS) -> None:
    if activation not in known:
        raise ValueError(f"{name}: activation must be {' or '.join(known)}, got {activation!r}")


def check_swiglu(gate: Tensor, up: Tensor, activation: str = "silu") -> None:
    check_tensors("swiglu", {"gate": (gate, gate.shape, FLOATS), "up": (up, gate.shape, gate.dtype)})
    check_activation("swiglu", activation)


def check_activate(x: Product, activation: str) -> None:
    check_tensors("activate", {"x": (x, "... I", FLOATS)})
    check_activation("activate", activation, UNGATED_ACTIVATIONS)


def check_gate_heads(x: Tensor, gate: Tensor, activation: str = "sigmoid") -> None:
    by_head = gate.shape[-1:] == (1,)
    shape = (*x.shape[:-1], 1) if by_head else x.shape
    check_tensors("gate_heads", {"x": (x, "B n Hq d", FLOATS), "gate": (gate, shape, x.dtype)})
    if activation not in HEAD_GATES:
        raise ValueError(f"gate_heads: activation must be {' or '.join(HEAD_GATES)}, got {activation!r}")
