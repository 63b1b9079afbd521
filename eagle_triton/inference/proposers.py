"""Make the draft that a configuration describes."""

from __future__ import annotations

import torch

from eagle_triton.engine.drafts.beams import ScoringDraft
from eagle_triton.engine.drafts.block import BlockDraft
from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
from eagle_triton.engine.drafts.counted import CountedDraft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.eagle import EagleDraft
from eagle_triton.engine.drafts.hybrid import ContinuedDraft, WrappedDraft, scoring, with_suffix_drafts
from eagle_triton.engine.drafts.mtp import MTPDraft
from eagle_triton.engine.drafts.repeats import KEEP, MIN_MATCH, NgramSource, OutputRing, RepeatDraft, SuffixSource
from eagle_triton.engine.drafts.shared_keys import SharedKeysDraft
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.inference.config import TREE, EAGLEConfig
from eagle_triton.inference.speculative_config import SpecMethod, SpeculativeConfig
from eagle_triton.operands.suffix_match import SuffixRules
from eagle_triton.values import check_range

WITH_MODEL: dict[str | None, tuple[type[Draft], ...]] = {
    SpecMethod.EAGLE: (EagleDraft,),
    SpecMethod.DFLASH: (BlockDraft,),
    SpecMethod.DSPARK: (BlockDraft,),
    SpecMethod.DRAFT_MODEL: (CausalLMDraft, SharedKeysDraft),
    SpecMethod.MTP: (MTPDraft,),
}
"""Methods whose drafts all come from a model, and the kinds of draft that they take."""


def needs_model(config: EAGLEConfig) -> bool:
    """Whether drafts come from a model: a head, MTP layers or a language model."""
    if config.speculative is None:
        return not config.suffix_drafts
    return config.speculative.method in (*WITH_MODEL, SpecMethod.HYBRID)


def propose_with(config: EAGLEConfig, view: ModelView, model: Draft | None) -> Draft | None:
    """The draft of a configuration. model: the draft model, None if drafts come from repetition alone.

    A draft that is complete is returned. Raises ValueError for options that contradict each other, and names both.
    """
    options = config.speculative
    if options is None:
        if given := [name for name in TREE if getattr(config, name) != getattr(EAGLEConfig, name)]:
            _check_tree_is_read(", ".join(given), config, model)
        if not config.suffix_drafts:
            return model
        return with_suffix_drafts(model, config.suffix_drafts, view.device, config.suffix_ring)
    if isinstance(model, (RepeatDraft, CountedDraft, WrappedDraft)):  # from create_proposer
        return model
    if options.method in WITH_MODEL:
        if not isinstance(model, WITH_MODEL[options.method]):
            fitting = " or ".join(str(method) for method, kinds in WITH_MODEL.items() if isinstance(model, kinds))
            its = f"; its method is {fitting}" if fitting else ""
            raise ValueError(f"method {options.method} does not draft with {type(model).__name__}{its}")
        return model
    if outside := [token for token in options.ban_tokens if token >= view.vocab_size]:
        raise ValueError(f"ban_tokens: tokens must lie in 0..{view.vocab_size - 1}, got {outside}")
    if options.method is SpecMethod.SUFFIX:
        return RepeatDraft(_suffix_source(options, config.suffix_ring, view.device))
    if options.method is SpecMethod.NGRAM:
        return RepeatDraft(_ngram_source(options, options.num_speculative_tokens, 1))
    if options.method is SpecMethod.NASD:
        return _counted(options, view)
    if options.method is SpecMethod.HYBRID:
        return _continued(options, scoring(model, "method hybrid"))
    return None


def _check_tree_is_read(given: str, config: EAGLEConfig, model: Draft | None) -> None:
    """Raise ValueError for tree options that would have no effect."""
    if model is None and config.suffix_drafts:
        raise ValueError(f"{given}: no draft model is given, so there is no tree to shape")
    if model is not None and not model.any_tree:
        raise ValueError(f"{given}: {type(model).__name__} drafts its own tree only")


def _suffix_source(options: SpeculativeConfig, ring_tokens: int, device: torch.device) -> SuffixSource:
    rules = SuffixRules(
        max_tree_depth=options.suffix_decoding_max_tree_depth,
        max_spec_factor=options.suffix_decoding_max_spec_factor,
        min_token_prob=options.suffix_decoding_min_token_prob,
        banned=tuple(options.ban_tokens),
        min_match=MIN_MATCH,
        keep=KEEP,
    )
    most = options.suffix_decoding_max_cached_requests
    if most > 0 and not ring_tokens:
        raise ValueError(f"suffix_decoding_max_cached_requests={most} needs a suffix_ring, and suffix_ring is 0")
    ring = OutputRing(ring_tokens, device, None if most < 0 else most) if most and ring_tokens else None
    return SuffixSource(options.num_speculative_tokens, rules, ring)


def _ngram_source(options: SpeculativeConfig, places: int, least: int) -> NgramSource:
    return NgramSource(places, options.max_ngram_size, least, options.match, options.joined)  # type: ignore[arg-type]


def _counted(options: SpeculativeConfig, view: ModelView) -> CountedDraft:
    check_range("filler_top_k", options.filler_top_k, 1, view.vocab_size)
    return CountedDraft(
        options.num_speculative_tokens,
        options.ngram_n,
        options.ngram_storage,  # type: ignore[arg-type]
        options.filler_top_k,
        options.filler_weight,
        options.reset_in_between,
    )


def _continued(options: SpeculativeConfig, model: ScoringDraft) -> Draft:
    further = options.num_speculative_tokens - options.num_model_steps
    if not further:
        return model
    return ContinuedDraft(model, _ngram_source(options, further, options.min_ngram_size), options.num_model_steps)
