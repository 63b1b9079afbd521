"""Speculative decoding as functions over any transformers model: with a drafter, n-grams, or adaptive draft lengths.

`speculative_generate` drafts with a smaller model: a fixed number of tokens, or the number that EGAG allows by the
drafter's entropy. `ngram_assisted_speculative_generate` drafts with counted n-grams. `autoregressive_generate` and
`beam_search_generate` decode without drafts. The `_encoder_decoder` functions are for T5 and similar models. There are
also logits processors, n-gram storages, `prune_cache` and functions that print steps.

Greedy decoding with use_cache=True runs on the engine if that supports the models and gives the same tokens. Everything
else runs by the models' own forward, on their devices. The log says which, and why; `engine=True` and `engine=False`
demand one. The last engine is kept until `release_engine()`. The models are not changed. docs/speculative-decoding.md
has examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_triton.lazy import public_names

if TYPE_CHECKING:
    from eagle_triton.speculative_decoding.base_decoding import autoregressive_generate as autoregressive_generate
    from eagle_triton.speculative_decoding.base_decoding import (
        autoregressive_generate_encoder_decoder as autoregressive_generate_encoder_decoder,
    )
    from eagle_triton.speculative_decoding.base_decoding import beam_search_generate as beam_search_generate
    from eagle_triton.speculative_decoding.caching import prune_cache as prune_cache
    from eagle_triton.speculative_decoding.egag import EGAGConfig as EGAGConfig
    from eagle_triton.speculative_decoding.egag import adaptive_gamma as adaptive_gamma
    from eagle_triton.speculative_decoding.egag import normalized_entropy as normalized_entropy
    from eagle_triton.speculative_decoding.engine_decoding import release_engine as release_engine
    from eagle_triton.speculative_decoding.logits_processor import GreedyProcessor as GreedyProcessor
    from eagle_triton.speculative_decoding.logits_processor import LogitsProcessor as LogitsProcessor
    from eagle_triton.speculative_decoding.logits_processor import MultinomialProcessor as MultinomialProcessor
    from eagle_triton.speculative_decoding.logits_processor import NucleusProcessor as NucleusProcessor
    from eagle_triton.speculative_decoding.logits_processor import TopKNucleusProcessor as TopKNucleusProcessor
    from eagle_triton.speculative_decoding.logits_processor import TopKProcessor as TopKProcessor
    from eagle_triton.speculative_decoding.ngram_assisted import (
        ngram_assisted_speculative_generate as ngram_assisted_speculative_generate,
    )
    from eagle_triton.speculative_decoding.ngram_storage import INgramStorage as INgramStorage
    from eagle_triton.speculative_decoding.ngram_storage import NGramStorage as NGramStorage
    from eagle_triton.speculative_decoding.ngram_storage import OneLevelNGramStorage as OneLevelNGramStorage
    from eagle_triton.speculative_decoding.printing import beam_search_step as beam_search_step
    from eagle_triton.speculative_decoding.printing import end_token_found as end_token_found
    from eagle_triton.speculative_decoding.printing import initial_step as initial_step
    from eagle_triton.speculative_decoding.printing import speculative_step as speculative_step
    from eagle_triton.speculative_decoding.printing import token_ids_to_string as token_ids_to_string
    from eagle_triton.speculative_decoding.speculative_decoding import max_fn as max_fn
    from eagle_triton.speculative_decoding.speculative_decoding import speculative_generate as speculative_generate
    from eagle_triton.speculative_decoding.speculative_decoding import (
        speculative_generate_encoder_decoder as speculative_generate_encoder_decoder,
    )
    from eagle_triton.speculative_decoding.steps import StepRecord as StepRecord

__all__, __getattr__, __dir__ = public_names(__name__)
