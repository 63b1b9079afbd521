"""Choose and mask tokens, and pad tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_triton.engine.operations import module_of
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.operands.sampling import SamplingTensors
from eagle_triton.operands.tree_decoding import Expansion


def fast_topk_torch(scores: Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest scores along `dim` and their indices. Raises ValueError unless 1 <= k <= their number."""
    size = scores.shape[dim]
    if not 1 <= k <= size:
        raise ValueError(f"fast_topk_torch: k must be in 1..{size}, got {k}")
    best = scores.max(dim=dim, keepdim=True) if k == 1 else scores.topk(k, dim=dim, sorted=sorted)
    return best.values, best.indices


def select_top_k_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the k most likely tokens, and these tokens, best first, ties to the lower id.

    logits [bs, V] or [bs, n, V]; returns float32 and int64 [..., k] of the same leading shape. NaN counts as -inf.
    Raises ValueError unless 1 <= k <= V.
    """
    scores, tokens = module_of("tree_decoding", logits.is_cuda).topk(logits.flatten(0, -2), k)
    return scores.unflatten(0, logits.shape[:-1]), tokens.unflatten(0, logits.shape[:-1])


def expand_beam(
    parent_scores: Tensor,
    log_probs: Tensor,
    tokens: Tensor,
    parent_ancestors: Tensor,
    first_slot: int,
    width: int,
    selected: Tensor | None = None,
) -> Expansion:
    """Score the children of a level's nodes and choose the next beam; see `reference.tree_decoding.expand_beam`."""
    function = module_of("tree_decoding", log_probs.is_cuda).expand_beam
    return function(parent_scores, log_probs, tokens, parent_ancestors, first_slot, width, selected)


def sample_from_logits(
    logits: Tensor,
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
    *,
    min_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token for each row of logits [bs, V]: int64 [bs].

    Temperature 0 takes the argmax. Order: temperature, top-k, top-p (with the token that crosses p), min-p. Raises
    ValueError for a bad value.
    """
    given: dict[str, Any] = dict(top_p=top_p, top_k=top_k, min_p=min_p)
    asked = {name: value for name, value in given.items() if value is not None}
    sampling = SamplingParams(temperature=temperature, seed=0, **asked)
    if sampling.greedy:
        return logits.argmax(-1)
    module, device, rows = module_of("ops.sampling", logits.is_cuda), logits.device, len(logits)
    params = SamplingTensors.zeros(rows, device)
    SamplingParams.write([sampling] * rows, params, torch.arange(rows, device=device))
    probs = module.probabilities(logits[:, None].contiguous(), params)[:, 0].contiguous()
    coins = torch.rand(rows, generator=generator, device=device if generator is None else generator.device)
    return module.sample(probs, coins.to(device))


def generate_token_bitmask(token_ids: Tensor, vocab_size: int, packed: bool = False) -> Tensor:
    """Which tokens of the vocabulary are in token_ids [bs, m]: bool [bs, vocab_size].

    Ids outside the vocabulary are ignored. packed: int32 [bs, ceil(vocab_size / 32)], token t is bit t % 32 of word t
    // 32, as in grammar back ends. Raises ValueError for a vocabulary below 1.
    """
    if vocab_size < 1:
        raise ValueError(f"generate_token_bitmask: vocab_size must be at least 1, got {vocab_size}")
    words = -(-vocab_size // 32)
    inside = (token_ids >= 0) & (token_ids < vocab_size)
    mask = torch.zeros(len(token_ids), 32 * words + 1, dtype=torch.bool, device=token_ids.device)
    mask.scatter_(1, torch.where(inside, token_ids, 32 * words).long(), True)
    if not packed:
        return mask[:, :vocab_size].contiguous()
    bits = mask[:, :-1].view(len(token_ids), words, 32).long() << torch.arange(32, device=token_ids.device)
    total = bits.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def pad_to_alignment(tensor: Tensor, alignment: int, dim: int = 0, value: float = 0.0) -> Tensor:
    """Pad the end of dimension `dim` to a multiple of `alignment`. Raises ValueError for an alignment below 1."""
    if alignment < 1:
        raise ValueError(f"pad_to_alignment: alignment must be at least 1, got {alignment}")
    missing = -tensor.shape[dim] % alignment
    further = tensor.dim() - 1 - dim % tensor.dim()  # dimensions, which `pad` names first
    return pad(tensor, [0, 0] * further + [0, missing], value=value) if missing else tensor


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n; 1 for n <= 0."""
    return 1 if n <= 0 else 1 << (n - 1).bit_length()
