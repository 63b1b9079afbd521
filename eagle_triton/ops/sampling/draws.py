"""Draws tokens: the distribution itself, inverse-CDF samples, and counter-based random numbers.

| name   | shape, dtype        | meaning                                                                 |
|---|---|---|
| logits | [B, N, V] any float |                                                                         |
| params | SamplingTensors, [B] | read on the device                                                      |
| probs  | [B, V] f32          | weights, not necessarily of sum 1                                       |
| coins  | [B] f32             | uniform numbers in [0, 1)                                               |
| positions | [B, n] int32     | the position of a token in its sequence                                 |
| sums   | [B, C] f64          | mass per CHUNK tokens                                                   |

filter_thresholds.py finds the tokens of each row that the filters keep. A sample takes two steps: a grid of programs
sums chunks, then one program per row finds the chunk and the token in it. Numerics: weights in fp32, cumulated in fp64,
in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.sampling import SamplingTensors, check_params, check_sample, check_uniform_at
from eagle_triton.ops.sampling.filter_thresholds import row_thresholds, scale_of, token_weight
from eagle_triton.ops.views import Matrix, Vector, view
from eagle_triton.runtime.launch import launch

_NOWHERE = tl.constexpr(2**31 - 1)


def chunk_of(vocabulary: int) -> int:
    """Tokens per program of a kernel that sums or draws."""
    return min(4096, max(16, triton.next_power_of_2(vocabulary)))


@triton.jit
def coin_of(seed, step, index):
    """The uniform number `index` of a decode step, in [0, 1) (Philox 4x32-10)."""
    zero = index * 0
    word, _, _, _ = tl.philox(seed, index, (zero + (step & 0xFFFFFFFF)).to(tl.uint32), zero, zero)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def uniform_of(seed, position, first, COUNT: tl.constexpr):
    """Uniform numbers in (0, 1) of the COUNT tokens from `first` on (both multiples of 4) at an absolute position; see
    reference.sampling.uniform_at."""
    group = first // 4 + tl.arange(0, COUNT // 4)
    zero = group * 0
    one, two, three, four = tl.philox(seed, group, zero + position, zero + 1, zero)
    word = tl.interleave(tl.interleave(one, three), tl.interleave(two, four))
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def log_exponential(u):
    """log of the exponential variate -log(1 - u): negated Gumbel noise."""
    small = u + u * u * (0.5 + u * (0.3333333333333333 + u * 0.25))
    return tl.log(tl.where(u < 0.015625, small, -tl.log(1.0 - u)))


@triton.jit
def choose_chunk(sums, coin):
    """Inverse CDF over chunks: sums [C] f64; returns the chunk, and coin * total minus the sums before it."""
    lane = tl.arange(0, sums.shape[0])
    target = coin.to(tl.float64) * tl.sum(sums, 0)
    hit = (tl.cumsum(sums, 0) > target) & (sums > 0)
    first = tl.min(tl.where(hit, lane, _NOWHERE), 0)
    last = tl.max(tl.where(sums > 0, lane, 0), 0)
    chunk = tl.where(first < _NOWHERE, first, last)
    return chunk, target - tl.sum(tl.where(lane < chunk, sums, 0.0), 0)


@triton.jit
def choose_token(weight, index, target, vocabulary):
    """Inverse CDF inside a chunk: the first token with a cumulated weight above `target`, else the last with a
    weight."""
    hit = (tl.cumsum(weight.to(tl.float64), 0) > target) & (weight > 0)
    first = tl.min(tl.where(hit, index, _NOWHERE), 0)
    last = tl.max(tl.where(weight > 0, index, -1), 0)
    return tl.where(first < _NOWHERE, first, tl.where(last >= 0, last, vocabulary - 1))


@triton.jit
def _probabilities_kernel(
    x, temperature_ptr, min_p_ptr, thresholds_ptr, out_ptr, nodes, vocabulary, CHUNK: tl.constexpr
):
    """Grid (R, chunks): write one chunk of a row's distribution."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocabulary
    logit = tl.load(x.ptr + row * x.row + index * x.item, mask=inside, other=float("-inf")).to(tl.float32)
    own = thresholds_ptr + row * 4
    scale, min_p = scale_of(tl.load(temperature_ptr + row // nodes)), tl.load(min_p_ptr + row // nodes)
    out = token_weight(own, logit, index, min_p, scale) * tl.load(own + 2)
    tl.store(out_ptr + row * vocabulary + index, out, mask=inside)


@triton.jit
def _uniform_kernel(seed_ptr, step_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Grid (B, blocks): BLOCK random numbers of one sequence."""
    batch = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    coins = coin_of(tl.load(seed_ptr + batch), tl.load(step_ptr + batch), index)
    tl.store(out_ptr + batch.to(tl.int64) * count + index, coins, mask=index < count)


@triton.jit
def _uniform_at_kernel(seed_ptr, positions_ptr, out_ptr, count, vocabulary, BLOCK: tl.constexpr):
    """Grid (B * n, blocks): the random numbers of BLOCK tokens at one position."""
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK
    index = first + tl.arange(0, BLOCK)
    u = uniform_of(tl.load(seed_ptr + row // count), tl.load(positions_ptr + row), first, BLOCK)
    tl.store(out_ptr + row.to(tl.int64) * vocabulary + index, u, mask=index < vocabulary)


@triton.jit
def _chunk_sums_kernel(probs, sums_ptr, vocabulary, chunks, CHUNK: tl.constexpr):
    """Grid (B, chunks): mass of one chunk, fp64."""
    batch, chunk = tl.program_id(0), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    row = probs.ptr + batch.to(tl.int64) * probs.row
    prob = tl.load(row + index * probs.item, mask=index < vocabulary, other=0.0)
    tl.store(sums_ptr + batch * chunks + chunk, tl.sum(prob.to(tl.float64), 0))


@triton.jit
def _sample_kernel(probs, coins, sums_ptr, out_ptr, vocabulary, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Grid (B,): inverse-CDF sample of one row."""
    batch = tl.program_id(0)
    lane = tl.arange(0, CHUNKS)
    sums = tl.load(sums_ptr + batch * chunks + lane, mask=lane < chunks, other=0.0)
    chunk, target = choose_chunk(sums, tl.load(coins.ptr + batch * coins.item))
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    row = probs.ptr + batch.to(tl.int64) * probs.row
    prob = tl.load(row + index * probs.item, mask=index < vocabulary, other=0.0)
    tl.store(out_ptr + batch, choose_token(prob, index, target, vocabulary).to(tl.int64))


def probabilities(logits: Tensor, params: SamplingTensors, top_p_first: bool = False) -> Tensor:
    """The distribution that sampling follows, float32 [B, N, V]; see reference.sampling.probabilities.

    Raises ValueError if logits are not [B, N, V] of fp16, bf16 or fp32, or params not [B] tensors of their dtypes.
    """
    thresholds = row_thresholds("probabilities", logits, params, top_p_first, argmax_at_0=False)
    _, nodes, vocabulary = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    x, chunk = logits.reshape(-1, vocabulary), chunk_of(vocabulary)
    launch(_probabilities_kernel, (len(x), triton.cdiv(vocabulary, chunk)))(
        view(Matrix, x), params.temperature, params.min_p, thresholds, out, nodes, vocabulary, CHUNK=chunk
    )
    return out


def uniform(params: SamplingTensors, count: int) -> Tensor:
    """`count` uniform numbers in [0, 1) per sequence, float32 [B, count]; bit for bit as in the reference."""
    check_params("uniform", params, len(params.seed), params.seed.device)
    if count < 1:
        raise ValueError(f"uniform: count must be at least 1, got {count}")
    batch = len(params.seed)
    out = torch.empty(batch, count, dtype=torch.float32, device=params.seed.device)
    block = min(1024, triton.next_power_of_2(count))
    launch(_uniform_kernel, (batch, triton.cdiv(count, block)))(params.seed, params.step, out, count, BLOCK=block)
    return out


def uniform_at(params: SamplingTensors, positions: Tensor, vocabulary: int) -> Tensor:
    """A uniform number in (0, 1) for every token at absolute positions [B, n] int32: float32 [B, n, V]; bit for bit as
    in the reference. Raises ValueError if shapes, dtypes or devices do not fit."""
    check_uniform_at(params, positions, vocabulary)
    positions = positions.contiguous()
    out = torch.empty(*positions.shape, vocabulary, dtype=torch.float32, device=positions.device)
    block = min(1024, max(4, triton.next_power_of_2(vocabulary)))
    launch(_uniform_at_kernel, (positions.numel(), triton.cdiv(vocabulary, block)))(
        params.seed, positions, out, positions.shape[1], vocabulary, BLOCK=block
    )
    return out


def sample(probs: Tensor, coin: Tensor) -> Tensor:
    """Inverse-CDF sample: the first token where the cumulated mass passes coin * total. [B, V], [B] -> int64 [B].

    Only tokens with mass > 0 are returned; rounding that passes the end gives the last of them. Raises ValueError
    unless probs [B, V] and coin [B] are float32 on one device.
    """
    check_sample(probs, coin)
    batch, vocabulary = probs.shape
    chunk = chunk_of(vocabulary)
    chunks = triton.cdiv(vocabulary, chunk)
    sums = torch.empty(batch, chunks, dtype=torch.float64, device=probs.device)
    out = torch.empty(batch, dtype=torch.int64, device=probs.device)
    launch(_chunk_sums_kernel, (batch, chunks))(view(Matrix, probs), sums, vocabulary, chunks, CHUNK=chunk)
    launch(_sample_kernel, (batch,))(
        view(Matrix, probs),
        view(Vector, coin),
        sums,
        out,
        vocabulary,
        chunks,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
    )
    return out
