"""How deep to draft, by the entropy of the logits that drafts are chosen from (EGAG).

| name    | shape, dtype    | meaning                                                                             |
|---|---|---|
| logits  | [R, V] any float | any strides                                                                        |
| entropy | [R] f32         | of their softmax, in nats                                                           |
| guide   | [B, 4] f64, [B] i32 | each sequence's averages, see `GuideTensors`                                    |

Numerics: entropies in fp32, log S - T / S with S = sum e^(x - max) and T = sum (x - max) e^(x - max), summed within
parts of a row and then over the parts; averages of entropies in fp64, as in Python.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands import adaptive_length as operands
from eagle_triton.operands.adaptive_length import EGAGConfig, GuideTensors, nats_of
from eagle_triton.ops.views import Matrix, view
from eagle_triton.runtime.overlap import await_inputs, overlapped

_PART, _WARPS = 2048, 4  # tokens of a program
_SLOTS = 32  # sequences of a program
_H_NORM, _H_EMA = tl.constexpr(operands.H_NORM), tl.constexpr(operands.H_EMA)
_GAMMA, _H_BEFORE = tl.constexpr(operands.GAMMA), tl.constexpr(operands.H_BEFORE)


class EntropyParts(NamedTuple):
    """For each part of a row [R, parts]: the largest value max, and the sums of e^d and of d e^d, where d = x - max."""

    peaks: Tensor
    sums: Tensor
    weighted: Tensor


@triton.jit
def _entropy_parts_kernel(x, found, vocabulary, PART: tl.constexpr, PDL: tl.constexpr):
    """Grid (R, parts): the EntropyParts of one part of a row."""
    await_inputs(PDL)
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    index = part * PART + tl.arange(0, PART)
    x = tl.load(x.ptr + row * x.row + index * x.item, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    broken = tl.max(tl.where((x != x) | (x == float("inf")), 1, 0), 0) > 0
    peak = tl.max(tl.where(x == x, x, float("-inf")), 0)
    distance = tl.where(x == float("-inf"), float("-inf"), x - peak)
    weight = tl.exp(distance)
    out = row * parts + part
    tl.store(found.peaks + out, tl.where(broken, float("nan"), peak))
    tl.store(found.sums + out, tl.sum(weight, 0))
    tl.store(found.weighted + out, tl.sum(tl.where(x == float("-inf"), 0.0, distance * weight), 0))


@triton.jit
def _entropy_merge_kernel(found, entropy_ptr, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    """Grid (R,): the entropy of a row from its parts."""
    await_inputs(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    inside = part < parts
    peaks = tl.load(found.peaks + row * parts + part, mask=inside, other=float("-inf"))
    sums = tl.load(found.sums + row * parts + part, mask=inside, other=0.0)
    weighted = tl.load(found.weighted + row * parts + part, mask=inside, other=0.0)
    broken = tl.max(tl.where(peaks != peaks, 1, 0), 0) > 0
    peak = tl.max(tl.where(peaks == peaks, peaks, float("-inf")), 0)
    empty = peaks == float("-inf")
    below = tl.where(empty, 0.0, peaks - peak)
    scale = tl.where(empty, 0.0, tl.exp(below))
    total = tl.sum(tl.where(empty, 0.0, sums * scale), 0)
    first = tl.sum(tl.where(empty, 0.0, (weighted + below * sums) * scale), 0)
    value = tl.maximum(tl.log(total) - first / total, 0.0)
    broken = broken | (peak == float("-inf"))
    tl.store(entropy_ptr + row, tl.where(broken, float("nan"), value))


def row_entropy(logits: Tensor) -> Tensor:
    """Entropy of each row of logits in nats, float32 [R]; see reference.adaptive_length.row_entropy."""
    operands.check_row_entropy(logits)
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _PART)
    found = EntropyParts(*torch.empty(3, rows, parts, dtype=torch.float32, device=logits.device))
    entropy = torch.empty(rows, dtype=torch.float32, device=logits.device)
    overlapped(_entropy_parts_kernel, (rows, parts), logits.device)(
        view(Matrix, logits), found, vocabulary, PART=_PART, num_warps=_WARPS
    )
    overlapped(_entropy_merge_kernel, (rows,), logits.device)(
        found, entropy, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return entropy


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["lengths_ptr", "values_ptr", "root_ptr"])
def _choose_gamma_kernel(
    entropy_ptr,
    lengths_ptr,
    values_ptr,
    root_ptr,
    batch,
    NATS: tl.constexpr,
    BETA: tl.constexpr,
    GAMMA_MIN: tl.constexpr,
    GAMMA_MAX: tl.constexpr,
    FOLLOWS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B / SLOTS,): a program updates the averages of SLOTS sequences and chooses their gamma."""
    await_inputs(PDL)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < batch
    values = values_ptr + slot * 4
    length = tl.load(lengths_ptr + slot, mask=inside, other=0)
    again = tl.load(root_ptr + slot, mask=inside, other=0) == length
    former = tl.load(values + _H_EMA, mask=inside, other=0.0)
    before = tl.where(again, tl.load(values + _H_BEFORE, mask=inside, other=0.0), former)
    value = tl.load(entropy_ptr + slot, mask=inside, other=0.0) / NATS
    broken = value != value
    h = tl.where(value > 1.0, 1.0, value).to(tl.float64)
    averaged = BETA * before + (1.0 - BETA) * h
    ema = tl.where(before != before, h, averaged)
    ema = tl.where(broken, before, ema)
    most = tl.full((SLOTS,), GAMMA_MAX, tl.float64)
    gamma = most
    if FOLLOWS:
        gamma = tl.floor((1.0 - ema) * GAMMA_MAX + 1e-9)
        gamma = tl.where(gamma > GAMMA_MAX, most, gamma)
    gamma = tl.where(broken | (gamma < GAMMA_MIN), tl.full((SLOTS,), GAMMA_MIN, tl.float64), gamma)
    tl.store(values + _H_NORM, h, mask=inside)
    tl.store(values + _H_EMA, ema, mask=inside)
    tl.store(values + _GAMMA, gamma, mask=inside)
    tl.store(values + _H_BEFORE, before, mask=inside)
    tl.store(root_ptr + slot, length, mask=inside)


def choose_gamma(entropy: Tensor, lengths: Tensor, guide: GuideTensors, config: EGAGConfig, vocabulary: int) -> None:
    """Update `guide` in place by the entropies at the sequences' roots; see reference.adaptive_length.choose_gamma.

    Raises ValueError if shapes or dtypes do not fit, or without a gamma_max.
    """
    operands.check_choose_gamma(entropy, lengths, guide, config, vocabulary)
    batch = len(lengths)
    overlapped(_choose_gamma_kernel, (triton.cdiv(batch, _SLOTS),), lengths.device)(
        entropy,
        lengths,
        *guide,
        batch,
        NATS=float(nats_of(config, vocabulary)),
        BETA=float(config.ema_beta),
        GAMMA_MIN=config.gamma_min,
        GAMMA_MAX=config.gamma_max,
        FOLLOWS=config.mode == "gamma",
        SLOTS=_SLOTS,
        num_warps=1,
    )


@triton.jit(do_not_specialize_on_alignment=["values_ptr", "lengths_ptr", "limits_ptr"])
def _clip_depth_kernel(
    tokens_ptr,
    scores_ptr,
    depths_ptr,
    values_ptr,
    lengths_ptr,
    limits_ptr,
    count,
    levels,
    GAMMA_MAX: tl.constexpr,
    STOPPED: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): a program removes one sequence's candidates that are deeper than gamma."""
    await_inputs(PDL)
    batch, index = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    inside = index < count
    score = tl.load(scores_ptr + batch * count + index, mask=inside, other=float("-inf"))
    depth = tl.load(depths_ptr + index, mask=inside, other=0)
    gone = score == float("-inf")
    gamma = tl.load(values_ptr + batch * 4 + _GAMMA)
    room = tl.load(limits_ptr + batch) - tl.load(lengths_ptr + batch) - 1
    if STOPPED:
        reached = tl.max(tl.where(gone, 0, depth), 0)
        gamma = tl.where(reached >= tl.minimum(levels, room), GAMMA_MAX, reached).to(tl.float64)
        tl.store(values_ptr + batch * 4 + _GAMMA, gamma)
    hidden = gone | ~(depth.to(tl.float64) <= gamma) | (depth > room)
    tl.store(tokens_ptr + batch * count + index, tl.full((COUNT,), -1, tl.int64), mask=inside & hidden)
    tl.store(scores_ptr + batch * count + index, tl.full((COUNT,), float("-inf"), tl.float32), mask=inside & hidden)


def clip_depth(
    tokens: Tensor,
    scores: Tensor,
    depths: Tensor,
    guide: GuideTensors,
    lengths: Tensor,
    limits: Tensor,
    config: EGAGConfig,
    levels: int | None = None,
) -> None:
    """Remove candidates deeper than gamma in place; see reference.adaptive_length.clip_depth.

    Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_clip_depth(tokens, scores, depths, guide, lengths, limits)
    batch, count = tokens.shape
    overlapped(_clip_depth_kernel, (batch,), tokens.device)(
        tokens,
        scores,
        depths,
        guide.values,
        lengths,
        limits,
        count,
        0 if levels is None else levels,
        GAMMA_MAX=config.gamma_max,
        STOPPED=levels is not None,
        COUNT=triton.next_power_of_2(count),
        num_warps=1 if count <= 256 else 4,
    )
