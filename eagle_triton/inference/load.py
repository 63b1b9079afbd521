"""Make an engine from a draft and a target in any form: find out which draft is meant, load, assemble."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_triton.assembly import assemble, ea_package_of
from eagle_triton.demo import path_of
from eagle_triton.draft_choice import (
    NGRAM,
    NOTHING,
    OWN_HEAD,
    OWN_LAYERS,
    SUFFIX,
    DraftChoice,
    choose_at,
    choose_given,
    load_draft,
)
from eagle_triton.engine.drafts.beams import BeamDraft, ScoringDraft
from eagle_triton.engine.drafts.block import BlockDraft
from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.hybrid import model_of, scoring
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.causal_lm import read_causal_lm
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.proposers import needs_model, propose_with
from eagle_triton.inference.speculative_config import SpecMethod, SpeculativeConfig
from eagle_triton.models.ea_model import EaModel
from eagle_triton.models.families import text_config
from eagle_triton.models.generate_arguments import max_positions
from eagle_triton.models.loading import (
    is_saved_pair,
    load_target,
    load_tokenizer,
    locate,
    read_target_config,
    saved_target,
)
from eagle_triton.models.mtp import has_mtp


@dataclass(frozen=True)
class Pair:
    """The models of an EAGLEInference, kept alive here, and the engine that reads them.

    `tokenizer` may be None.
    """

    target_model: Any
    draft_model: Any
    engine: Engine
    tokenizer: Any | None
    stop_ids: frozenset[int]
    max_positions: int | None  # the longest sequence that the target supports

    @property
    def view(self) -> ModelView:
        return self.engine.view

    @property
    def draft(self) -> Draft | None:
        """The draft, None if nothing is drafted."""
        return self.engine.draft


def load_pair(
    draft_model: Any,
    target_model: Any,
    config: EAGLEConfig,
    device: torch.device | None,
    tp_plan: str | None = None,
    kernels: bool | None = None,
    cuda_graph: bool | None = None,
) -> Pair:
    """An engine for a draft and a target. Arguments: see `EAGLEInference`; device: None: anywhere.

    Raises UnsupportedModelError for an unknown model, and ValueError for a draft that does not fit, for models on
    another device or in another dtype than configured, and for options that would have no effect.
    """
    choice, config = choose_draft(draft_model, target_model, config)
    target, tokenizer = target_in_memory(target_model, choice, config, device, tp_plan)
    base = target if ea_package_of(target) is None else target.base_model
    if choice.kind == "head" and target is not target_model:
        choice = OWN_HEAD  # it was loaded with the target
    draft = load_draft(choice, target, "target_model")
    if draft is None and needs_model(config):
        raise _without_draft(base, config)
    roots = {"target_model": target}
    if isinstance(draft, nn.Module) and draft not in (target, getattr(target, "ea_layer", None)):
        roots["draft_model"] = draft

    def propose(view: ModelView, read: Draft | None) -> Draft | None:
        _check_tree(view, read, config)
        _check_places(view, read, device)
        _check_dtype(view, target_model, config)
        return _with_options(read, view, config)

    engine, drafting, *_ = assemble(
        target, draft, config, roots, config.tree, propose=propose, kernels=kernels, cuda_graph=cuda_graph
    )
    engine.draft = drafting
    return Pair(target, draft, engine, tokenizer, _stop_ids(tokenizer, engine.view), max_positions(base))


def create_proposer(
    config: SpeculativeConfig,
    target_model: Any,
    draft_model: Any = None,
    *,
    device: str | torch.device | None = None,
) -> Draft | None:
    """The draft that a configuration describes; None for naive. `EAGLEInference(draft, target_model, config)` decodes
    with it; `config` gives the length of chains and how they are judged.

    target_model, draft_model: as for `EAGLEInference`; device: where these must be. Raises as `EAGLEInference` does.
    """
    if not isinstance(config, SpeculativeConfig):
        raise TypeError(f"config must be a SpeculativeConfig, got {type(config).__name__}")
    where = None if device is None else torch.device(device)
    return load_pair(draft_model, target_model, EAGLEConfig(speculative=config), where).draft


def _without_draft(base: Any, config: EAGLEConfig) -> Exception:
    """The error for a method that needs a draft model, if there is none."""
    read_causal_lm(base, root="target_model")  # raises if no draft could help the target
    if config.speculative is not None and config.speculative.method is SpecMethod.DRAFT_MODEL:
        return UnsupportedModelError(
            "draft_model: method draft_model needs a causal language model with the target's vocabulary, here or as "
            "the configuration's model"
        )
    return UnsupportedModelError(
        "draft_model: the target has no head, so give an EAGLE head, a block drafter, an assistant, a causal language "
        "model with the target's vocabulary, or a name: suffix, ngram, mtp"
    )


def _check_tree(view: ModelView, draft: Draft | None, config: EAGLEConfig) -> None:
    """Raise ValueError if the target cannot verify the configured tree, or the draft's own."""
    options = config.speculative
    if draft is not None and (options is None or options.method in (SpecMethod.DFLASH, SpecMethod.DSPARK)):
        tree = tree_of(draft, config)
        view.check_tree(tree, "num_draft_tokens")
        draft.check_tree(tree)


def tree_of(draft: Draft, config: EAGLEConfig) -> TreeSpec:
    """The tree of a draft, without drafts from earlier text: its own if it has no other, or if it is a block drafter
    and none is configured; otherwise the configured one."""
    if not draft.any_tree:
        return draft.read_tree()
    model = model_of(draft)
    return model.read_tree() if isinstance(model, BlockDraft) and not config.has_tree else config.tree()


def _with_options(draft: Draft | None, view: ModelView, config: EAGLEConfig) -> Draft | None:
    """The draft as the configuration completes it; draft: the one that was read, if any."""
    if config.egag is not None:
        if not isinstance(draft := scoring(draft, "egag"), BeamDraft):
            raise ValueError(
                "egag ends drafts level by level, and a block drafter scores all levels at once: leave egag out"
            )
        draft = replace(draft, egag=config.egag)
    return propose_with(config, view, draft)


def _check_places(view: ModelView, draft: Draft | None, device: torch.device | None) -> None:
    if isinstance(draft, ScoringDraft) and draft.embedding.device != view.device:
        raise ValueError(f"draft_model lies on {draft.embedding.device}, target_model on {view.device}: move one")
    if device is not None and (device.type != view.device.type or device.index not in (None, view.device.index)):
        raise ValueError(f"device={str(device)!r}, but the models lie on {view.device}: move them with .to({device})")
    padding = draft.padding if isinstance(draft, CausalLMDraft) else 0
    if isinstance(draft, ScoringDraft) and draft.embedding.shape[0] + padding != view.vocab_size:
        raise ValueError(
            f"draft and target do not fit: the draft's vocabulary has {draft.embedding.shape[0]} tokens, the target's "
            f"{view.vocab_size}"
        )


def _check_dtype(view: ModelView, target_model: Any, config: EAGLEConfig) -> None:
    """Raise ValueError if a loaded target has another dtype. A target given by path is loaded in the configured one."""
    if isinstance(target_model, nn.Module) and config.dtype not in (None, view.dtype):
        raise ValueError(
            f"dtype={config.dtype}, but target_model is in {view.dtype}: load it in that dtype, or give its path "
            "(dtype applies only to paths)"
        )


def _stop_ids(tokenizer: Any | None, view: ModelView) -> frozenset[int]:
    """The target's end tokens, else the tokenizer's."""
    end = getattr(tokenizer, "eos_token_id", None)
    return frozenset(view.eos_token_ids or (() if end is None else (end,)))


# --- which draft is meant, before anything is loaded ---


def choose_draft(draft_model: Any, target_model: Any, config: EAGLEConfig) -> tuple[DraftChoice, EAGLEConfig]:
    """The draft that is meant, and the configuration, with what the draft's name implies.

    Arguments: see `EAGLEInference`. Raises ValueError if draft and configuration contradict each other.
    """
    if draft_model is None:
        return _by_configuration(target_model, config), config
    _check_may_be_given(draft_model, config)
    return choose_given(draft_model, config, "draft_model")


def _check_may_be_given(draft_model: Any, config: EAGLEConfig) -> None:
    """Raise ValueError for a draft if the method needs none, or names another."""
    options = config.speculative
    if options is None:
        return
    if isinstance(draft_model, str) and draft_model in (SUFFIX, NGRAM):
        raise ValueError(
            f'draft_model="{draft_model}" and speculative (method {options.method}) both choose how to draft: give one'
        )
    if not needs_model(config) and not isinstance(draft_model, Draft):
        raise ValueError(
            f"draft_model: method {options.method} drafts without a model; to combine both in one tree, leave out "
            "speculative and set suffix_drafts"
        )
    if options.model is not None:
        raise ValueError(f"give the draft once: draft_model, or model={options.model!r} of speculative")


def _by_configuration(target_model: Any, config: EAGLEConfig) -> DraftChoice:
    """The draft that the configuration names, or else the one that comes with the target."""
    options = config.speculative
    if options is None:
        return _with_the_target(target_model, config)
    if not needs_model(config):
        return NOTHING
    if options.model is None:
        return OWN_LAYERS if options.method is SpecMethod.MTP else _with_the_target(target_model, config)
    if options.method in (SpecMethod.MTP, SpecMethod.HYBRID):
        return DraftChoice("layers", path_of(options.model))
    if options.method is SpecMethod.DRAFT_MODEL:
        return choose_at(options.model, "model")
    return choose_at(options.model)


def _with_the_target(target_model: Any, config: EAGLEConfig) -> DraftChoice:
    """The draft that comes with the target: MTP layers or a head at its path, or the head of an EaModel."""
    method = None if config.speculative is None else config.speculative.method
    if isinstance(target_model, (str, Path)):
        if method in (None, SpecMethod.HYBRID) and has_mtp(path_of(target_model)):
            return OWN_LAYERS
        return OWN_HEAD if needs_model(config) and method is not SpecMethod.DRAFT_MODEL else NOTHING
    if hasattr(target_model, "ea_layer"):
        return OWN_HEAD
    return OWN_LAYERS if method is SpecMethod.HYBRID else NOTHING


def comes_with_draft(path: str) -> bool:
    """Whether the path of a target has a draft for it: MTP layers, or a head."""
    return is_saved_pair(path) or has_mtp(path_of(path))


# --- loading ---


def target_in_memory(
    target_model: Any, choice: DraftChoice, config: EAGLEConfig, device: torch.device | None, tp_plan: str | None
) -> tuple[Any, Any | None]:
    """The target, and its tokenizer if one is known. The target is an EaModel if its path, or the draft's, has a head.

    Arguments: see `load_pair`. Raises TypeError for other objects, ValueError or FileNotFoundError for a wrong path.
    """
    if isinstance(target_model, (str, Path)):
        return _load(str(target_model), choice, config, device, tp_plan)
    if tp_plan is not None:
        raise ValueError("tp_plan needs target_model as a path: a loaded model cannot be spread over ranks")
    if not isinstance(target_model, nn.Module):
        raise TypeError(
            f"target_model must be an EaModel, a causal language model or a path, got {type(target_model).__name__}"
        )
    return target_model, getattr(target_model, "tokenizer", None)


def _load(
    path: str, choice: DraftChoice, config: EAGLEConfig, device: torch.device | None, tp_plan: str | None
) -> tuple[Any, Any | None]:
    """Weights are loaded straight to the device, or to the devices of the ranks that share the target."""
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if tp_plan is not None and where.type == "cpu" and torch.cuda.is_available():
        raise ValueError(
            "device='cpu' with tp_plan: transformers puts ranks on the GPUs that it sees; hide them "
            '(CUDA_VISIBLE_DEVICES="")'
        )
    with_head, head = choice.kind in ("head", "own head"), choice.place
    if with_head:
        locate(path, head, None, ("target", "draft"))  # raises with these names
    place = saved_target(path)
    dtype = config.dtype or (torch.float32 if where.type == "cpu" else _stored_dtype(place))
    placed: dict[str, Any] = {"device_map": {"": where}} if tp_plan is None else {"tp_plan": tp_plan}
    if with_head:
        model = EaModel.from_pretrained(path, head, None, dtype=dtype, **placed)
        return model, model.tokenizer
    read_target_config(place, engine=True)
    return load_target(place, engine=True, dtype=dtype, **placed), load_tokenizer(place)


def _stored_dtype(path: str) -> torch.dtype:
    """The dtype in a checkpoint's configuration, float32 if it has none."""
    config = read_target_config(path, engine=True)
    parts = (config, text_config(config))
    named = [getattr(part, name, None) for part in parts for name in ("dtype", "torch_dtype")]
    return next((dtype for dtype in named if isinstance(dtype, torch.dtype)), torch.float32)
