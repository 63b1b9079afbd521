"""Decoding with an encoder-decoder model, a token for each forward of its decoder."""

from __future__ import annotations

from typing import Any

import torch

from eagle_triton.speculative_decoding.arguments import checked_end_tokens, checked_prompt, longest
from eagle_triton.speculative_decoding.base_decoding import GREEDY, continue_text
from eagle_triton.speculative_decoding.logits_processor import LogitsProcessor
from eagle_triton.speculative_decoding.readers import CausalReader, EncoderDecoderReader
from eagle_triton.speculative_decoding.steps import Text


@torch.inference_mode()
def autoregressive_generate_encoder_decoder(
    inputs: list[int],
    model: Any,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor = GREEDY,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    debug: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> list[int]:
    """The decoder's tokens for the encoder's `inputs`: its start token, then up to max_gen_len.

    model: an encoder-decoder model of transformers (T5, BART and their like). The start token is
    config.decoder_start_token_id, or pad_token_id where that is not set. The engine has no encoders: the model's own
    forward decodes. The rest as in `autoregressive_generate`.
    """
    prompt = checked_prompt(inputs, CausalReader(model))
    reader = EncoderDecoderReader(model, prompt, use_cache)
    start = [start_token(model, pad_token_id)]
    text = Text(start, longest(start, max_gen_len, reader), checked_end_tokens(eos_tokens_id))
    continue_text(text, reader, logits_processor, generator, debug)
    return text.tokens


def start_token(model: Any, pad_token_id: int) -> int:
    """The token that a decoder begins with."""
    start = getattr(model.config, "decoder_start_token_id", None)
    return pad_token_id if start is None else int(start)
