"""Compares outputs with the target's own before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.models.families import text_config

MARGIN_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.05}
"""The most by which the logit of a greedy choice may fall short of the best one, through rounding, by the dtype of the
weights, for up to BOUND_LAYERS layers; for more see margin_bound.

bfloat16 on an H200, random weights of Llama-3.1-8B's shape, 16 prompts of 512 tokens: transformers' logits are 0.086
(std) off its logits with the same weights in fp32. Of 384 greedy choices, 56 of ours were not the best of fp32, by at
most 0.34; of transformers' own 57, by at most 0.31. Prompts gave the same tokens together and alone.
"""
BOUND_LAYERS = 32
CHECKED = 8  # tokens of each sequence that callers compare
MIN_BEST = 0.25  # share of greedy choices that must be the best: rounding decides now and then, not nearly always
MASS_BOUND = 0.02  # the probability that rounding may move across the edge of a nucleus
OWN_ROUNDING = 3.0
"""How far the tokens of a mixture of experts may fall short on average, in multiples of the effect of its own rounding.

In 16 bits, rounding sometimes decides which experts a row takes, and then logits are others. bfloat16 on a CPU,
mixtures of 16 layers with loud random experts: our tokens fell short of the best of transformers' logits by 0.24 to
1.05 on average of nine, and transformers' own, with embeddings changed by rounding, by 0.41 to 0.80. With the random
weights of models/shapes.py, by less than 0.02.
"""


@torch.no_grad()
def check_parity(target: PreTrainedModel, sequence: Tensor, prompt_length: int, sampling: SamplingParams) -> None:
    """Raise ValueError unless the target gives every new token after those before it, up to rounding.

    target: a Hugging Face causal language model, which runs once over the sequence, int64 [L]. Greedy tokens must have
    the best logit, some of them exactly. Sampled ones must lie in the nucleus (temperature and top-p; other filters are
    ignored). Tokens of a mixture of experts in 16 bits are judged by their mean, see OWN_ROUNDING; the target then runs
    twice.
    """
    if not prompt_length < len(sequence):
        raise ValueError(f"parity: no token was generated after the prompt's {prompt_length} tokens; nothing is timed")
    logits, chosen = _logits(target, sequence, prompt_length), sequence[prompt_length:, None]
    if not logits.isfinite().all():
        raise ValueError("parity: the target's own logits are not finite; nothing is timed")
    flips = target.dtype != torch.float32 and any(name.endswith(".experts") for name, _ in target.named_modules())
    if sampling.greedy:
        excess = _shortfall(logits, chosen)
        bound, what = margin_bound(target), "its logit is {:.3g} below the best one"
        if flips:
            with _rounded_otherwise(target):
                other = _logits(target, sequence, prompt_length)
            bound += OWN_ROUNDING * float(_shortfall(logits, other.argmax(-1, keepdim=True)).mean())
        elif (excess == 0).float().mean() < MIN_BEST:
            bound = 0.0  # rounding excuses nothing
    else:
        probs = (logits / sampling.temperature).softmax(-1)
        excess = torch.where(probs > probs.gather(1, chosen), probs, 0.0).sum(-1) - sampling.top_p
        bound, what = MASS_BOUND, "it lies outside the nucleus by a probability of {:.3g}"
    worst = int(excess.argmax())
    judged = float(excess.clamp(min=0).mean() if flips else excess[worst])
    if not judged < bound:
        raise ValueError(
            f"parity: token {worst + 1} after the prompt is not the target's: {what.format(float(excess[worst]))}; "
            "nothing is timed"
        )


def _logits(target: Any, sequence: Tensor, prompt_length: int) -> Tensor:
    """The logits of the tokens after the prompt, [L - prompt_length, V] fp32."""
    hidden = target.model(sequence[None], use_cache=False).last_hidden_state[0, prompt_length - 1 : -1]
    return target.lm_head(hidden).float()


def _shortfall(logits: Tensor, chosen: Tensor) -> Tensor:
    """The best logit less the logit of each token [n, 1], from logits [n, V]."""
    return logits.amax(-1) - logits.gather(1, chosen)[:, 0]


@contextmanager
def _rounded_otherwise(target: PreTrainedModel) -> Iterator[None]:
    """Inside, each element of the embeddings is changed by at most the distance of two neighbouring numbers."""
    source = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, inputs: Any, found: Tensor) -> Tensor:
        noise = torch.rand(found.shape, generator=source).to(found.device) * 2 - 1
        return (found * (1 + torch.finfo(found.dtype).eps * noise)).to(found.dtype)

    hook = target.get_input_embeddings().register_forward_hook(shake)
    try:
        yield
    finally:
        hook.remove()


def margin_bound(target: PreTrainedModel) -> float:
    """MARGIN_BOUND for a model; it grows with the layers.

    bfloat16, random weights of Llama-3.3-70B's shape over two H200, 8, 32 and 80 layers, 192 greedy choices each: ours
    differ from transformers' by 0.06, 0.14 and 0.29 (std), and fall short of its best by 0.13, 0.41 and 0.91 at most.
    """
    return MARGIN_BOUND[target.dtype] * max(1.0, text_config(target.config).num_hidden_layers / BOUND_LAYERS)
