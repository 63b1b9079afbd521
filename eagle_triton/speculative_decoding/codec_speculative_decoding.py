"""Speculative decoding with two encoder-decoder models."""

from __future__ import annotations

from typing import Any

import torch

from eagle_triton.speculative_decoding.arguments import check_gamma, checked_end_tokens, longest
from eagle_triton.speculative_decoding.base_decoding import GREEDY
from eagle_triton.speculative_decoding.codec_base_decoding import start_token
from eagle_triton.speculative_decoding.egag import EntropyGuide, egag_config
from eagle_triton.speculative_decoding.logits_processor import LogitsProcessor
from eagle_triton.speculative_decoding.readers import EncoderDecoderReader
from eagle_triton.speculative_decoding.speculative_decoding import SpeculativeDecoding, checked_pair
from eagle_triton.speculative_decoding.steps import StepRecord, Text


@torch.inference_mode()
def speculative_generate_encoder_decoder(
    inputs: list[int],
    drafter: Any,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    use_egag: bool = False,
    gamma_min: int = 1,
    gamma_max: int | None = None,
    egag_ema_beta: float = 0.0,
    logits_processor: LogitsProcessor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    egag_scale: float | None = None,
    egag_mode: str = "gamma",
    egag_stop_threshold: float = 0.3,
    egag_stop_lambda: float = 0.2,
    generator: torch.Generator | None = None,
    trace: list[StepRecord] | None = None,
) -> tuple[list[int], float]:
    """(the decoder's tokens for the encoder's `inputs`, accepted drafts by proposed ones).

    drafter, target: encoder-decoder models of transformers with one vocabulary; each encodes `inputs` by itself. The
    tokens begin with the target's start token, see `autoregressive_generate_encoder_decoder`. The models' own forward
    decodes; everything else is as in `speculative_generate`.
    """
    check_gamma(gamma)
    most = gamma if gamma_max is None else gamma_max
    egag = egag_config(gamma_min, most, egag_ema_beta, egag_scale, egag_mode, egag_stop_threshold, egag_stop_lambda)
    _, prompt = checked_pair(inputs, drafter, target, tokenizer)
    readers = (
        EncoderDecoderReader(drafter, prompt, use_cache, "drafter"),
        EncoderDecoderReader(target, prompt, use_cache, "target"),
    )
    start = [start_token(target, pad_token_id)]
    text = Text(start, longest(start, max_gen_len, readers[1]), checked_end_tokens(eos_tokens_id))
    decoding = SpeculativeDecoding(
        *readers, logits_processor, gamma, EntropyGuide(egag) if use_egag else None, skip_sample_adjustment, generator
    )
    decoding.run(text, first_target, trace, debug, tokenizer)
    return text.tokens, text.acceptance_rate
