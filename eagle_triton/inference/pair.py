"""A draft and a target, in whatever form they come, as the engine reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from eagle_triton.engine.drafts.beams import BeamDraft, with_vocabulary
from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.float8 import float8_draft
from eagle_triton.engine.drafts.hybrid import scoring
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.families import own_ea_model as native
from eagle_triton.families.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.families.reading.float8 import with_float8
from eagle_triton.families.reading.module_reader import UnsupportedModelError, check_readable
from eagle_triton.families.reading.mtp import read_mtp
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.draft_choice import choose_draft
from eagle_triton.inference.given_models import draft_in_memory, target_in_memory
from eagle_triton.inference.proposers import needs_model, propose_with
from eagle_triton.inference.speculative_config import SpecMethod
from eagle_triton.integration import FAMILIES
from eagle_triton.models.generate_arguments import max_positions
from eagle_triton.models.heads import DraftHead
from eagle_triton.models.mtp import MTPHead


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
    choice, config = choose_draft(draft_model, target_model, config)
    target, tokenizer = target_in_memory(target_model, choice, config, device, tp_plan)
    check_readable(target, "target_model")
    base = target if _family(target) is None else target.base_model
    model = draft_in_memory(choice, target, base)
    if model is None and needs_model(config):
        raise _without_draft(base, config)
    view, draft = _read(target, base, model, config)
    read = with_float8(view, draft, _models(target, model), config.activations)
    view, draft = read.view, read.draft
    _check_tree(view, draft, config)
    _check_places(view, draft, device)
    _check_dtype(view, target_model, config)
    draft = _with_options(draft, view, config)
    notes = {} if read.note is None else {"activations": read.note}
    if config.drafting_dtype is not None:
        draft, notes["draft_dtype"] = float8_draft(draft)
    stop_ids, positions = _stop_ids(tokenizer, view), max_positions(base)
    return Pair(target, model, view, draft, tokenizer, stop_ids, positions, read.modules, notes)


def _family(model: Any) -> Any | None:
    """The adapter of an EaModel, None for anything else."""
    return next((family for family in FAMILIES if family.recognise(model)), None)


def _without_draft(base: Any, config: EAGLEConfig) -> Exception:
    """What to raise where a model is to draft, and there is none."""
    _ = read_causal_lm(base, root="target_model")  # a target that no draft could help is called that
    if config.speculative is not None and config.speculative.method is SpecMethod.DRAFT_MODEL:
        return UnsupportedModelError(
            "draft_model: method draft_model needs a causal language model with the target's vocabulary, here or as "
            "the configuration's model"
        )
    return UnsupportedModelError(
        "draft_model: a target without a head needs one: an EAGLE head, or a causal language model with its vocabulary"
    )


def _read(target: Any, base: Any, model: Any | None, config: EAGLEConfig) -> tuple[ModelView, Draft | None]:
    """Target and draft as the engine reads them. A head decides which of the target's layers it sees."""
    family = _family(target)
    if model is None or isinstance(model, Draft):
        view = read_causal_lm(base, root="target_model") if family is None else family.read(target)[0]
        return view, model
    if family is not None and (model is target or model is target.ea_layer):
        view, draft = family.read(target)
        return view, draft
    if isinstance(model, DraftHead) or _family(model) is not None:
        return native.read_pair(base, model if isinstance(model, DraftHead) else model.ea_layer)
    view = read_causal_lm(base, root="target_model")
    if isinstance(model, MTPHead):
        return view, read_mtp(model, view, config.tree)
    return view, draft_from_causal_lm(model, view, config.tree, root="draft_model")


def _check_tree(view: ModelView, draft: Draft | None, config: EAGLEConfig) -> None:
    """ValueError for a tree that the target cannot verify, the configured one or the draft's own."""
    if draft is not None and config.speculative is None:
        view.check_tree(config.tree() if draft.any_tree else draft.read_tree(), "num_draft_tokens")


def _with_options(draft: Draft | None, view: ModelView, config: EAGLEConfig) -> Draft | None:
    """The draft that the configuration makes of the one that was read, or of none."""
    if config.draft_vocabulary is not None:
        draft = with_vocabulary(scoring(draft, "draft_vocabulary"), config.draft_vocabulary)
    if config.egag is not None:
        draft = replace(scoring(draft, "egag"), egag=config.egag)
    vocabulary = None if draft is None else draft.vocabulary
    if config.speculative is None and vocabulary is not None and config.topk > vocabulary:
        raise ValueError(f"topk must not pass the draft's vocabulary ({vocabulary}), got {config.topk}")
    return propose_with(config, view, draft)


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
