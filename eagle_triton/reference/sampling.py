"""Sampling distributions (temperature, top-k, top-p, min-p) and counter-based random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.sampling import SamplingTensors, check_logits, check_params, check_sample, check_uniform_at

_MASK = 0xFFFFFFFF


def probabilities(logits: Tensor, params: SamplingTensors, top_p_first: bool = False) -> Tensor:
    """The distribution for sampling, float32 [B, N, V].

    logits [B, N, V]. Order: temperature, top-k, top-p on the rest (Hugging Face), or with `top_p_first` top-p before
    top-k (the original EaModel); min-p last. Each filter keeps the same tokens as transformers' processors. Top-k also
    keeps tokens equal to the k-th. Top-p (Holtzman et al. 2020) sorts tokens from worst to best, equal ones by
    ascending index, and drops tokens while their cumulated probability is at most 1 - top_p; the last token is always
    kept. So of equal tokens at the cut, those with higher indices are kept. Min-p drops tokens below min_p times the
    largest probability, so it keeps or drops equal tokens together.

    On a CPU this is transformers' arithmetic to the bit, with a stable sort. Kernels add in another order. So they may
    decide differently about a token if its sum differs from 1 - top_p, or its probability from min-p's floor, by no
    more than rounding.
    Temperature 0 is treated as 1: greedy sequences use their argmax and never read this.
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
    ordered, index = logits.sort(dim=-1, stable=True)
    dropped = torch.softmax(ordered, dim=-1).cumsum(-1) <= (1 - top_p).float()[:, None, None]
    dropped &= (top_p < 1)[:, None, None]
    dropped[..., -1] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), float("-inf"))


def uniform(params: SamplingTensors, count: int) -> Tensor:
    """`count` uniform numbers in [0, 1) per sequence, float32 [B, count], a function of (seed, step, index) only.

    Philox 4x32-10: key = seed, counter = (index, step, 0, 0), the first output word's upper 24 bits. Raises ValueError
    unless count >= 1.
    """
    check_params("uniform", params, len(params.seed), params.seed.device)
    if count < 1:
        raise ValueError(f"uniform: count must be at least 1, got {count}")
    index = torch.arange(count, device=params.seed.device).expand(len(params.seed), count)
    step, zero = params.step[:, None].expand_as(index), torch.zeros_like(index)
    word, _, _, _ = _philox(params.seed[:, None], index, step & _MASK, zero, zero)
    return (word >> 8).float() * 2.0**-24


def uniform_at(params: SamplingTensors, positions: Tensor, vocabulary: int) -> Tensor:
    """A uniform number in (0, 1) for every token of the vocabulary at absolute positions: float32 [B, n, V].

    positions [B, n] int32: the token's position in its sequence, from 0 on. The numbers are a function of (seed,
    position, token) only. Philox 4x32-10: key = seed, counter = (token // 4, position, 1, 0), output word token % 4;
    the 1 makes the counters differ from `uniform`'s. The number is (word + 1/2) / 2^32 rounded to float32, at most
    1 - 2^-24. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_uniform_at(params, positions, vocabulary)
    token = torch.arange(-(-vocabulary // 4), device=positions.device).expand(*positions.shape, -1)
    position, zero = positions[..., None].long().expand_as(token), torch.zeros_like(token)
    words = _philox(params.seed[:, None, None], token, position & _MASK, zero + 1, zero)
    word = torch.stack(words, dim=-1).flatten(2)[..., :vocabulary]
    return ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(params: SamplingTensors, positions: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise for every token at absolute positions [B, n] int32: float32 [B, n, V].

    -log(-log(1 - u)) of `uniform_at`. Small u are finely spaced, and so is large noise, which decides.
    """
    u = uniform_at(params, positions, vocabulary)
    return -torch.where(u < 2.0**-6, u + u * u * (0.5 + u * (1 / 3 + u / 4)), -torch.log(1 - u)).log()


def gumbel_sample(
    logits: Tensor, noise: Tensor, params: SamplingTensors, top_p_first: bool = False, filtered: bool = True
) -> Tensor:
    """A sample of each row's filtered distribution: the kept token with the largest logit / T + noise, int64 [B].

    logits, noise [B, V]. Ties go to the lower token; temperature 0 takes the argmax. filtered: False skips the filters,
    which must all be off.
    """
    hot = params.temperature[:, None] > 0
    gap = logits.float() - logits.float().amax(-1, keepdim=True)
    perturbed = gap / torch.where(hot, params.temperature[:, None], 1.0) + noise
    if filtered:
        perturbed = perturbed.masked_fill(probabilities(logits[:, None], params, top_p_first)[:, 0] == 0, float("-inf"))
    return torch.where(hot, perturbed, logits.float()).argmax(-1)


def _philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox 4x32-10 (Salmon et al. 2011). Words and counters are int64 below 2^32."""
    k0, k1 = (seed & _MASK).expand_as(c0), ((seed >> 32) & _MASK).expand_as(c0)
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 without overflow."""
    low = constant * (x & 0xFFFF)  # < 2^48
    high = constant * (x >> 16) + (low >> 16)  # < 2^49
    return (high >> 16) & _MASK, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def sample(probs: Tensor, coin: Tensor) -> Tensor:
    """Inverse-CDF sample: the first token with a cumulated mass above coin * total. [B, V], [B] -> int64 [B].

    Only tokens with mass > 0 are returned: the last of them, if by rounding no token qualifies. Raises ValueError
    unless both are float32 and fit.
    """
    check_sample(probs, coin)
    cumulated = probs.double().cumsum(-1)
    passed = (cumulated > coin.double()[:, None] * cumulated[:, -1:]) & (probs > 0)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.where(passed.any(-1), passed.int().argmax(-1), last)
