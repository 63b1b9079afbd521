"""Sampling distributions (temperature, top-k, top-p, min-p) and counter-based random numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


class SamplingTensors(NamedTuple):
    """Per-sequence sampling parameters, each [B]; a static place on the device, so that a graph can replay.

    temperature float32 (0: greedy), top_k int32 (0: off), top_p float32 (1: off), min_p float32 (0: off),
    seed int64, step int64 (decode steps done: the random counter).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    step: Tensor


def probabilities(logits: Tensor, params: SamplingTensors, top_p_first: bool = False) -> Tensor:
    """The distribution that sampling follows, float32 [B, N, V].

    logits [B, N, V]. Order: temperature, then top-k, then top-p on what is left (Hugging Face); with `top_p_first`
    top-p, then top-k (the original EaModel). Top-p keeps the token that crosses p (Holtzman et al. 2020); min-p drops
    tokens below min_p times the largest probability, last. Tokens equal to the last one kept are kept too.
    A temperature of 0 is taken as 1: greedy sequences use their argmax and never read this.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_logits("probabilities", logits)
    check_params("probabilities", params, len(logits), logits.device)
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0)[:, None, None]
    scaled = logits.float() / temperature
    for name in ("top_p", "top_k") if top_p_first else ("top_k", "top_p"):
        scaled = _keep_top_p(scaled, params.top_p) if name == "top_p" else _keep_top_k(scaled, params.top_k)
    probs = torch.softmax(scaled, dim=-1)
    floor = params.min_p[:, None, None] * probs.amax(-1, keepdim=True)
    probs = probs.masked_fill(probs < floor, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    vocabulary = logits.shape[-1]
    ordered = logits.sort(dim=-1, descending=True).values
    count = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).long()
    last = ordered.gather(-1, (count - 1)[:, None, None].expand(*logits.shape[:2], 1))
    return logits.masked_fill(logits < last, float("-inf"))


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    ordered, _ = logits.sort(dim=-1, descending=True)
    probs = torch.softmax(ordered, dim=-1)
    before = probs.cumsum(-1) - probs  # the mass of strictly better tokens
    keep = (before < top_p[:, None, None]) | (top_p >= 1)[:, None, None]
    keep[..., 0] = True
    last = ordered.masked_fill(~keep, float("inf")).amin(-1, keepdim=True)
    return logits.masked_fill(logits < last, float("-inf"))


def uniform(params: SamplingTensors, count: int) -> Tensor:
    """`count` uniform numbers in [0, 1) per sequence, float32 [B, count], a function of (seed, step, index) alone.

    Philox 4x32-10 (Salmon et al. 2011): key = seed, counter = (index, step, 0, 0), the first output word's upper
    24 bits. Raises ValueError unless count >= 1.
    """
    check_params("uniform", params, len(params.seed), params.seed.device)
    if count < 1:
        raise ValueError(f"uniform: count must be at least 1, got {count}")
    index = torch.arange(count, device=params.seed.device).expand(len(params.seed), count)
    step = params.step[:, None].expand_as(index)
    c0, c1, c2, c3 = index & _MASK, step & _MASK, torch.zeros_like(index), torch.zeros_like(index)
    k0 = (params.seed & _MASK)[:, None].expand_as(index)
    k1 = ((params.seed >> 32) & _MASK)[:, None].expand_as(index)
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return (c0 >> 8).float() * 2.0**-24


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 without overflow."""
    low = constant * (x & 0xFFFF)  # < 2^48
    high = constant * (x >> 16) + (low >> 16)  # < 2^49
    return (high >> 16) & _MASK, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def sample(probs: Tensor, coin: Tensor) -> Tensor:
    """Inverse-CDF sample: the first token whose cumulated mass passes coin * total. [B, V], [B] -> int64 [B].

    Only tokens with mass > 0 are returned; rounding that passes the end gives the last of them. Raises ValueError
    unless both are float32 and fit.
    """
    check_sample(probs, coin)
    cumulated = probs.double().cumsum(-1)
    passed = (cumulated > coin.double()[:, None] * cumulated[:, -1:]) & (probs > 0)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.where(passed.any(-1), passed.int().argmax(-1), last)


def check_logits(name: str, logits: Tensor) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    if logits.ndim != 3 or logits.dtype not in dtypes or not logits.numel():
        raise ValueError(
            f"{name}: logits must be [B, N, V] of float16, bfloat16 or float32, got {logits.dtype} {list(logits.shape)}"
        )


def check_params(name: str, params: SamplingTensors, batch: int, device: torch.device) -> None:
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    for field, value, dtype in zip(params._fields, params, dtypes, strict=True):
        if value.shape != (batch,) or value.dtype != dtype or value.device != device or not value.is_contiguous():
            raise ValueError(
                f"{name}: {field} must be contiguous {dtype} [{batch}] on {device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )


def check_sample(probs: Tensor, coin: Tensor) -> None:
    if probs.ndim != 2 or probs.dtype != torch.float32 or not probs.numel():
        raise ValueError(f"sample: probs must be float32 [B, V], got {probs.dtype} {list(probs.shape)}")
    if coin.shape != probs.shape[:1] or coin.dtype != torch.float32 or coin.device != probs.device:
        raise ValueError(
            f"sample: coin must be float32 [{len(probs)}] on {probs.device}, got {coin.dtype} {list(coin.shape)} on "
            f"{coin.device}"
        )
