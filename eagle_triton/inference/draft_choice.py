"""Which draft is meant, by what was handed in and by the configuration, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_triton.demo import DRAFT, path_of
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.repeats import NgramSource, RepeatDraft
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.proposers import needs_model
from eagle_triton.inference.speculative_config import SpecMethod
from eagle_triton.integration import NGRAM, NGRAM_DRAFTS, SUFFIX, SUFFIX_DRAFTS
from eagle_triton.models.mtp import MTP, has_mtp


@dataclass(frozen=True)
class Nothing:
    """No model drafts: what the configuration makes of repetition does, or nothing."""


@dataclass(frozen=True)
class InMemory:
    """A head, an EaModel whose head is meant, MTP layers, a language model, or a `Draft`."""

    model: Any


@dataclass(frozen=True)
class OwnHead:
    """The head of an EaModel, which the target is, or of a directory with a target and heads."""


@dataclass(frozen=True)
class HeadAt:
    """A head by its path."""

    path: str


@dataclass(frozen=True)
class LayersAt:
    """Multi-token-prediction layers; path None: those beside the target's weights."""

    path: str | None


@dataclass(frozen=True)
class ModelAt:
    """A causal language model by its path."""

    path: str


DraftChoice = Nothing | InMemory | OwnHead | HeadAt | LayersAt | ModelAt


def choose_draft(draft_model: Any, target_model: Any, config: EAGLEConfig) -> tuple[DraftChoice, EAGLEConfig]:
    """The draft that is meant, and the configuration with what a draft's name says of it; arguments as of `read_pair`.

    Raises ValueError where draft and configuration contradict each other.
    """
    if isinstance(draft_model, str) and draft_model in (SUFFIX, NGRAM):
        return _repeating(draft_model, config)
    if draft_model is None:
        return _by_configuration(target_model, config), config
    _check_may_be_given(draft_model, config)
    if draft_model == MTP:
        return LayersAt(None), config
    if isinstance(draft_model, (str, Path)):
        return _head_at(str(draft_model)), config
    return InMemory(draft_model), config


def _repeating(name: str, config: EAGLEConfig) -> tuple[DraftChoice, EAGLEConfig]:
    """Drafts from repetition that were asked for by their names. A head that the target has is left out."""
    if config.speculative is not None:
        method = config.speculative.method
        raise ValueError(f'draft_model: "{name}" says how to draft, and so does speculative, by method {method}')
    if name == NGRAM:
        return InMemory(RepeatDraft(NgramSource(NGRAM_DRAFTS))), config
    return Nothing(), config.changed(suffix_drafts=config.suffix_drafts or SUFFIX_DRAFTS)


def _check_may_be_given(draft_model: Any, config: EAGLEConfig) -> None:
    """ValueError for a draft beside a method that needs none, or that names another."""
    options = config.speculative
    if options is None:
        return
    if not needs_model(config) and not isinstance(draft_model, Draft):
        raise ValueError(
            f"draft_model: method {options.method} drafts without a model; for one tree of both leave speculative out "
            "and set suffix_drafts"
        )
    if options.model is not None:
        raise ValueError(f"draft_model was given, and model={options.model!r} in the configuration too")


def _by_configuration(target_model: Any, config: EAGLEConfig) -> DraftChoice:
    """The draft that the configuration names, else the one that comes with the target."""
    options = config.speculative
    if options is None:
        return _with_the_target(target_model, config)
    if not needs_model(config):
        return Nothing()
    if options.model is None:
        return LayersAt(None) if options.method is SpecMethod.MTP else _with_the_target(target_model, config)
    if options.method in (SpecMethod.MTP, SpecMethod.HYBRID):
        return LayersAt(path_of(options.model))
    if options.method is SpecMethod.DRAFT_MODEL:
        return ModelAt(path_of(options.model, "target"))
    return _head_at(options.model)


def _with_the_target(target_model: Any, config: EAGLEConfig) -> DraftChoice:
    """What the target brings: of a path MTP layers, else a head, of a model its head."""
    method = None if config.speculative is None else config.speculative.method
    if isinstance(target_model, (str, Path)):
        if method in (None, SpecMethod.HYBRID) and has_mtp(path_of(target_model)):
            return LayersAt(None)
        return OwnHead() if needs_model(config) and method is not SpecMethod.DRAFT_MODEL else Nothing()
    if hasattr(target_model, "ea_layer"):
        return OwnHead()
    return LayersAt(None) if method is SpecMethod.HYBRID else Nothing()


def _head_at(path: str) -> HeadAt:
    if path == DRAFT:
        options = f'SpeculativeConfig(method="draft_model", model="{DRAFT}")'
        raise ValueError(f'draft_model: "{DRAFT}" is a causal language model, no head: it drafts with {options}')
    return HeadAt(path)
