"""A draft and a target, in whatever form they come, as the engine reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_triton.adapters import native
from eagle_triton.adapters.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.adapters.float8 import with_float8
from eagle_triton.adapters.module_reader import UnsupportedModelError, check_readable
from eagle_triton.adapters.mtp import read_mtp
from eagle_triton.demo import DRAFT, path_of
from eagle_triton.engine.drafts.beams import BeamDraft, with_vocabulary
from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.float8 import float8_draft
from eagle_triton.engine.drafts.hybrid import scoring, with_suffix_drafts
from eagle_triton.engine.drafts.repeats import NgramSource, RepeatDraft
from eagle_triton.engine.model import ModelView
from eagle_triton.integration import FAMILIES, NGRAM, NGRAM_DRAFTS, SUFFIX, SUFFIX_DRAFTS
from eagle_triton.models.ea_model import EaModel
from eagle_triton.models.generate_arguments import max_positions
from eagle_triton.models.heads import DraftHead
from eagle_triton.models.loading import load_target, load_tokenizer, locate, read_target_config, saved_target
from eagle_triton.models.mtp import MTP, MTPHead, has_mtp, load_mtp
from eagle_triton.models.target import text_config
from eagle_triton.speculative.config import EAGLEConfig
from eagle_triton.speculative.proposers import needs_model, propose_with
from eagle_triton.speculative.speculative_config import SpecMethod

_NAMES = "target", "draft"  # of paths, in what is said of them


@dataclass(frozen=True)
class Pair:
    """What EAGLEInference decodes with. The models given, kept alive here, and as the engine reads them.

    `tokenizer` may be None.
    """

    target_model: Any
    draft_model: Any
    view: ModelView
    draft: Draft | None  # None: nothing is drafted
    tokenizer: Any | None
    stop_ids: frozenset[int]
    max_positions: int | None  # the most tokens of a sequence that the target was made for
    float8_modules: frozenset[nn.Module] = frozenset()  # whose weights are read
    notes: dict[str, str] = field(default_factory=dict)  # what a report says of them, and of the draft

    @property
    def models(self) -> dict[str, nn.Module]:
        """Those that were read, by the names that messages call them."""
        return _models(self.target_model, self.draft_model)


def _models(target_model: Any, draft_model: Any) -> dict[str, nn.Module]:
    models = {"target_model": target_model}
    part_of_target = draft_model in (target_model, getattr(target_model, "ea_layer", None))
    if isinstance(draft_model, nn.Module) and not part_of_target:
        models["draft_model"] = draft_model
    return models


def read_pair(
    draft_model: Any, target_model: Any, config: EAGLEConfig, device: torch.device | None, tp_plan: str | None = None
) -> Pair:
    """Read a draft for a target.

    target_model: an EaModel of any family, a Hugging Face causal language model, or the path or hub id of one ("demo":
    the checkpoint of this package). draft_model: None for the head of a target that is an EaModel, an EaModel whose
    head is meant, a draft head, "mtp" for the multi-token-prediction layers beside the target's weights, or what
    `load_mtp` makes of them, a causal language model with the target's vocabulary, "suffix" or "ngram" for drafts from
    text that occurred before, a `Draft` of one's own, or, beside a target's path, that of a head. What is configured to
    draft without a model needs none. device: where the models must lie, None: wherever they do. tp_plan: how a target
    is spread over ranks that is given by its path, None: not at all. Raises UnsupportedModelError for what is not
    known, ValueError for a draft that does not fit, models that lie elsewhere or are of another dtype than the
    configuration says, and options that would not be read.
    """
    _check_named(draft_model, config)
    draft_model = _configured_head(draft_model, config)
    if isinstance(draft_model, (str, Path)) and str(draft_model) == DRAFT:
        options = f'SpeculativeConfig(method="draft_model", model="{DRAFT}")'
        raise ValueError(f'draft_model: "{DRAFT}" is a causal language model, no head: it drafts with {options}')
    if draft_model is None and isinstance(target_model, (str, Path)) and _takes_mtp(config):
        draft_model = MTP if has_mtp(path_of(target_model)) else None
    target, tokenizer = _load_target(draft_model, target_model, config, device, tp_plan)
    draft_model = _configured_model(draft_model, target, config)
    check_readable(target, "target_model")
    family = _family(target)
    base = target if family is None else target.base_model
    if draft_model is None and _is_hybrid(config) and not hasattr(target, "ea_layer"):
        draft_model = MTP
    if draft_model == MTP:
        where = None if config.speculative is None else config.speculative.model
        draft_model = load_mtp(base, None if where is None else path_of(where))
    elif draft_model is None or _is_path(draft_model):
        draft_model = getattr(target, "ea_layer", None)
    elif isinstance(draft_model, str):
        draft_model, config = _repeating(draft_model, config, next(base.parameters()).device)
    if config.speculative is not None and not needs_model(config) and not isinstance(draft_model, Draft):
        draft_model = None
    elif draft_model is None and needs_model(config):
        _ = read_causal_lm(base, root="target_model")  # a target that no draft could help is called that
        if config.speculative is not None and config.speculative.method is SpecMethod.DRAFT_MODEL:
            raise UnsupportedModelError(
                "draft_model: method draft_model needs a causal language model with the target's vocabulary, here or "
                "as the configuration's model"
            )
        raise UnsupportedModelError(
            "draft_model: a target without a head needs one: an EAGLE head, or a causal language model with its "
            "vocabulary"
        )
    view: ModelView
    draft: Draft | None
    if draft_model is None:
        view = read_causal_lm(base, root="target_model") if family is None else family.read(target)[0]
        draft = None
    elif isinstance(draft_model, Draft):
        view = read_causal_lm(base, root="target_model") if family is None else family.read(target)[0]
        draft = draft_model
    elif family is not None and (draft_model is target or draft_model is target.ea_layer):
        view, draft = family.read(target)
    elif isinstance(draft_model, MTPHead):
        view = read_causal_lm(base, root="target_model")
        draft = read_mtp(draft_model, view, config.tree)
    elif isinstance(draft_model, DraftHead) or _family(draft_model) is not None:
        head = draft_model if isinstance(draft_model, DraftHead) else draft_model.ea_layer
        view, draft = native.read_pair(base, head)
    else:
        view = read_causal_lm(base, root="target_model")
        draft = draft_from_causal_lm(draft_model, view, config.tree, root="draft_model")
    read = with_float8(view, draft, _models(target, draft_model), config.activations)
    view, draft = read.view, read.draft
    if draft is not None and config.speculative is None:
        view.check_tree(config.tree() if draft.any_tree else draft.read_tree(), "num_draft_tokens")
    _check_places(view, draft, device)
    _check_dtype(view, target_model, config)
    if config.draft_vocabulary is not None:
        draft = with_vocabulary(scoring(draft, "draft_vocabulary"), config.draft_vocabulary)
    if config.egag is not None:
        draft = replace(scoring(draft, "egag"), egag=config.egag)
    vocabulary = None if draft is None else draft.vocabulary
    if config.speculative is None and vocabulary is not None and config.topk > vocabulary:
        raise ValueError(f"topk must not pass the draft's vocabulary ({vocabulary}), got {config.topk}")
    stop_ids, positions = _stop_ids(tokenizer, view), max_positions(base)
    draft = propose_with(config, view, draft)
    notes = {} if read.note is None else {"activations": read.note}
    if config.drafting_dtype is not None:
        draft, notes["draft_dtype"] = float8_draft(draft)
    return Pair(target, draft_model, view, draft, tokenizer, stop_ids, positions, read.modules, notes)


def _is_path(draft_model: Any) -> bool:
    """Whether a head is given by its path, and no draft by its name."""
    return isinstance(draft_model, (str, Path)) and str(draft_model) not in (MTP, SUFFIX, NGRAM)


def _check_named(draft_model: Any, config: EAGLEConfig) -> None:
    """ValueError for drafts from repetition beside a method, which says how to draft too."""
    if isinstance(draft_model, str) and draft_model in (SUFFIX, NGRAM) and config.speculative is not None:
        method = config.speculative.method
        raise ValueError(f'draft_model: "{draft_model}" says how to draft, and so does speculative, by method {method}')


def _repeating(name: str, config: EAGLEConfig, device: torch.device) -> tuple[Draft, EAGLEConfig]:
    """The draft from repetition of a name, and what is left of the configuration for it to be read with."""
    if name == NGRAM:
        return RepeatDraft(NgramSource(NGRAM_DRAFTS)), config
    draft = with_suffix_drafts(None, config.suffix_drafts or SUFFIX_DRAFTS, device, config.suffix_ring)
    return draft, config.changed(suffix_drafts=0, suffix_ring=EAGLEConfig.suffix_ring)


def _configured_head(draft_model: Any, config: EAGLEConfig) -> Any:
    """The draft that was given, or the head whose path the configuration has."""
    options = config.speculative
    if options is None:
        return draft_model
    if draft_model is not None and not needs_model(config) and not isinstance(draft_model, Draft):
        raise ValueError(
            f"draft_model: method {options.method} drafts without a model; for one tree of both leave speculative out "
            "and set suffix_drafts"
        )
    if draft_model is not None and options.model is not None:
        raise ValueError(f"draft_model was given, and model={options.model!r} in the configuration too")
    if options.method is SpecMethod.MTP or (options.method is SpecMethod.HYBRID and options.model is not None):
        return MTP if draft_model is None else draft_model
    if options.method is SpecMethod.HYBRID:
        return draft_model
    return draft_model if options.model is None or options.method is SpecMethod.DRAFT_MODEL else options.model


def _takes_mtp(config: EAGLEConfig) -> bool:
    """Whether drafts come of MTP layers where they lie beside the target, and nobody says from where."""
    return config.speculative is None or _is_hybrid(config)


def _is_hybrid(config: EAGLEConfig) -> bool:
    """Whether n-grams follow a model's drafts: those of a head, where the target has one, else of its MTP layers."""
    return config.speculative is not None and config.speculative.method is SpecMethod.HYBRID


def _configured_model(draft_model: Any, target: nn.Module, config: EAGLEConfig) -> Any:
    """The draft that was given, or the language model whose path the configuration has, as its target lies."""
    options = config.speculative
    if options is None or options.model is None or options.method is not SpecMethod.DRAFT_MODEL:
        return draft_model
    beside = next(target.parameters())
    path = path_of(options.model, "target")
    read_target_config(path, whose=_NAMES[1])
    return load_target(path, whose=_NAMES[1], dtype=beside.dtype).to(beside.device)


def _load_target(
    draft_model: Any, target_model: Any, config: EAGLEConfig, device: torch.device | None, tp_plan: str | None
) -> tuple[Any, Any | None]:
    """The target, and its tokenizer if one is known."""
    if not isinstance(target_model, (str, Path)):
        if tp_plan is not None:
            raise ValueError("tp_plan goes with a target_model that is given by its path; another is spread as it is")
        if _is_path(draft_model):
            raise TypeError("draft_model: a path goes with a target_model that is given by its path too")
        if not isinstance(target_model, nn.Module):
            raise TypeError(
                f"target_model must be an EaModel, a causal language model or a path, got {type(target_model).__name__}"
            )
        return target_model, getattr(target_model, "tokenizer", None)
    path = path_of(target_model)
    shared: dict[str, Any] = {} if tp_plan is None else {"tp_plan": tp_plan}
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with_head = _is_path(draft_model) or (draft_model is None and _of_head(config))
    head = str(draft_model) if with_head and draft_model is not None else None
    if with_head:
        locate(path, head, None, _NAMES)  # which says what is wrong by these names
    dtype = config.dtype or (torch.float32 if where.type == "cpu" else _stored_dtype(saved_target(path)))
    if with_head:
        model = EaModel.from_pretrained(str(target_model), head, None, dtype=dtype, **shared)
        return model if shared else model.to(where), model.tokenizer
    path = saved_target(path)
    read_target_config(path, hybrids=True)
    target = load_target(path, hybrids=True, dtype=dtype, **shared)
    return target if shared else target.to(where), load_tokenizer(path)


def _of_head(config: EAGLEConfig) -> bool:
    """Whether a target that is given alone brings a head."""
    options = config.speculative
    return needs_model(config) and (options is None or options.method is not SpecMethod.DRAFT_MODEL)


def _stored_dtype(path: str) -> torch.dtype:
    """The dtype that a checkpoint's configuration names, float32 if it names none."""
    config = read_target_config(path, hybrids=True)
    parts = (config, text_config(config))
    named = [getattr(part, name, None) for part in parts for name in ("dtype", "torch_dtype")]
    return next((dtype for dtype in named if isinstance(dtype, torch.dtype)), torch.float32)


def _family(model: Any) -> Any | None:
    """The adapter of an EaModel, None for anything else."""
    return next((adapter for adapter, _ in FAMILIES if adapter.recognise(model)), None)


def _check_places(view: ModelView, draft: Draft | None, device: torch.device | None) -> None:
    if isinstance(draft, BeamDraft) and draft.embedding.device != view.device:
        raise ValueError(f"draft_model lies on {draft.embedding.device}, target_model on {view.device}")
    if device is not None and (device.type != view.device.type or device.index not in (None, view.device.index)):
        raise ValueError(f"device={str(device)!r}, but the models lie on {view.device}: move them with .to({device})")
    padding = draft.padding if isinstance(draft, CausalLMDraft) else 0
    if isinstance(draft, BeamDraft) and draft.embedding.shape[0] + padding != view.vocab_size:
        raise ValueError(
            f"draft and target do not fit: the draft's vocabulary has {draft.embedding.shape[0]} tokens, the target's "
            f"{view.vocab_size}"
        )


def _check_dtype(view: ModelView, target_model: Any, config: EAGLEConfig) -> None:
    """ValueError for a dtype that a loaded target does not have; one that is given by its path has been cast to it."""
    if isinstance(target_model, nn.Module) and config.dtype not in (None, view.dtype):
        raise ValueError(
            f"dtype={config.dtype}, but target_model is in {view.dtype}: load it so, or give its path, of which alone "
            "that is read"
        )


def _stop_ids(tokenizer: Any | None, view: ModelView) -> frozenset[int]:
    """The target's end tokens, else the tokenizer's."""
    end = getattr(tokenizer, "eos_token_id", None)
    return frozenset(view.eos_token_ids or (() if end is None else (end,)))
