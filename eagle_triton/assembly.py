"""Make an engine from a model, a draft and options, for all entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle_triton.engine.drafts.beams import vocabulary_note, with_vocabulary
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.hybrid import scoring, scoring_draft_of, with_suffix_drafts
from eagle_triton.engine.drafts.quantised import quantised_draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.model_watch import ModelWatch
from eagle_triton.engine.operations import choose_operations
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families import eagle_llm, own_ea_model, safeailab
from eagle_triton.families.assistants import draft_from_assistant
from eagle_triton.families.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.families.reading.activations import note_on_activations
from eagle_triton.families.reading.block_drafter import read_block_drafter
from eagle_triton.families.reading.experts import blocks_read, note_on_mixtures, notes_on_stored
from eagle_triton.families.reading.module_reader import check_readable
from eagle_triton.families.reading.mtp import read_mtp
from eagle_triton.families.reading.quantised import note_on_called, with_quantised
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.block_loading import block_drafter_of, check_fits, is_block_assistant
from eagle_triton.models.families import shares_keys, text_config
from eagle_triton.models.heads import DraftHead
from eagle_triton.models.mtp import MTPHead
from eagle_triton.options import EngineOptions, PatchOptions

EA_PACKAGES: tuple[ModuleType, ...] = (own_ea_model, safeailab, eagle_llm)
"""The families of EaModels. A module has recognise, read, patch_points, module_patch_points and drop_caches."""

_COMPUTED_AGAIN = (
    "keys and values of earlier prompts are computed again in 16 bits, where reused ones might change a token; "
    "prefixes=True reuses them"
)


class Assembled(NamedTuple):
    """An engine with the draft as it was read. drafting: the draft to use, perhaps with quantised copies."""

    engine: Engine
    drafting: Draft | None
    read_modules: frozenset[nn.Module]  # quantised projections, mixtures of experts: their weights are read
    copied: dict[str, Tensor]  # see ModelWatch


def ea_package_of(model: Any) -> ModuleType | None:
    """The file of `families/` that reads an EaModel, by the package that it is from; None for anything else."""
    return next((package for package in EA_PACKAGES if package.recognise(model)), None)


def read(
    target: Any, draft: Any, tree: Callable[[], TreeSpec], names: tuple[str, str] = ("model", "draft")
) -> tuple[ModelView, Draft | None]:
    """Read a target and a draft for the engine. A head decides which of the target's layers it reads.

    target: an EaModel of any package, or a causal language model. draft: the target's own head, another head, or an
    EaModel for its head; a block drafter; multi-token-prediction layers; a causal language model; a `Draft`; or None.
    tree: for drafts without a tree of their own. names: of target and draft in messages. Raises UnsupportedModelError
    for an unknown model, TypeError for a draft of another type.
    """
    package = ea_package_of(target)
    if package is not None and draft in (target, target.ea_layer):
        return package.read(target)
    base = target if package is None else target.base_model
    if isinstance(draft, DraftHead) or ea_package_of(draft) is not None:
        return own_ea_model.read_pair(base, draft if isinstance(draft, DraftHead) else draft.ea_layer)
    if isinstance(draft, Draft) and draft.feature_layers and package in (None, own_ea_model):
        return read_causal_lm(base, draft.feature_layers, root=names[0]), draft
    view = read_causal_lm(base, root=names[0]) if package is None else package.read(target)[0]
    if draft is None or isinstance(draft, Draft):
        return view, draft
    if isinstance(draft, MTPHead):
        return view, read_mtp(draft, view, tree, root=names[1])
    if not isinstance(draft, nn.Module):
        raise TypeError(f"{names[1]} must be None, a head, a model, a Draft or a name, got {type(draft).__name__}")
    return read_draft(draft, view, base, tree, root=names[1])


def read_draft(
    model: nn.Module, view: ModelView, target: Any, tree: Callable[[], TreeSpec], *, root: str = "draft"
) -> tuple[ModelView, Draft]:
    """A model as the draft of a target, and the target's view with the features that this draft reads.

    model: a block drafter, ours or one of transformers; an assistant that reads its target's keys and values; or a
    causal language model. view: of `target`, the Hugging Face model. tree: for drafts without a tree of their own.
    root: the draft's name in messages. Raises UnsupportedModelError for a model that is unknown or does not fit.
    """
    if isinstance(model, BlockDrafter) or is_block_assistant(model):
        drafter = _block_drafter(model, target, root)
        view = replace(view, feature_layers=drafter.config.feature_layers)
        return view, read_block_drafter(drafter, view, root=root)
    view = replace(view, feature_layers=())  # without those of a head
    if shares_keys(model):
        return view, draft_from_assistant(model, view, target.config, tree, root=root)
    return view, draft_from_causal_lm(model, view, tree, root=root)


def _block_drafter(model: nn.Module, target: Any, root: str) -> BlockDrafter:
    """A block drafter, ours or one of transformers, as one of ours that fits the target."""
    config = text_config(target.config)
    try:
        if not isinstance(model, BlockDrafter):
            return block_drafter_of(model, config)
        check_fits(model.config, config)
    except ValueError as error:
        raise UnsupportedModelError(f"{root}: {error}", "block-drafters") from error
    return model


def assemble(
    target: Any,
    draft: Any,
    options: EngineOptions,
    roots: Mapping[str, nn.Module],
    tree: Callable[[], TreeSpec],
    *,
    propose: Callable[[ModelView, Draft | None], Draft | None] | None = None,
    kernels: bool | None = None,
    cuda_graph: bool | None = None,
) -> Assembled:
    """An engine for a target and a draft, in the forms that `read` takes.

    roots: the models that are read, by names for messages, the target first. propose: makes the final draft from the
    one that was read, or from None; without it only `suffix_drafts` is added. kernels, cuda_graph: as in
    `PatchOptions`, for options that lack them. Raises UnsupportedModelError or ValueError for what cannot be used.
    """
    patch = options if isinstance(options, PatchOptions) else None
    first, *others = roots
    if isinstance(target, nn.Module):  # the reader refuses anything else
        check_readable(target, first)
    view, drafted = read(target, draft, tree, (first, others[0] if others else "draft"))
    reading = with_quantised(view, drafted, roots, options.activations)
    view, drafted = reading.view, reading.draft
    layers = (*view.layers, *getattr(drafted, "layers", ()))
    read_modules = reading.modules | blocks_read(layers)
    notes = dict(reading.notes)
    if options.draft_vocabulary is not None:
        drafted = with_vocabulary(scoring(drafted, "draft_vocabulary"), options.draft_vocabulary)
        notes["draft_vocabulary"] = vocabulary_note(scoring_draft_of(drafted))
    if propose is not None:
        drafted = propose(view, drafted)
    elif options.suffix_drafts:
        drafted = with_suffix_drafts(drafted, options.suffix_drafts, view.device)
    watch = ModelWatch(roots, read_modules, reading.copied)
    if (called := note_on_called(watch.called_projections())) is not None:
        notes["projections"] = called
        if patch is not None and patch.strict:
            raise UnsupportedModelError(f"projections: {called}", "projections")
    notes |= notes_on_stored(layers)
    if (called := note_on_mixtures(layers)) is not None:
        notes["experts"] = called
    if (called := note_on_activations(layers)) is not None:
        notes["activation"] = called
    prefixes = bool(options.prefixes)
    if options.prefixes == "auto" and view.dtype != torch.float32 and view.by_token:  # others reuse nothing, and say so
        prefixes, notes["prefixes"] = False, _COMPUTED_AGAIN
    verification = options.verification
    if not verification.lossless:
        notes["verification"] = verification.summary
    operations, graph = choose_operations(
        view.device, patch.kernels if patch else kernels, patch.cuda_graph if patch else cuda_graph
    )
    engine = Engine(
        view,
        drafted,
        operations,
        graph,
        _megakernel(patch, view, operations.kernels) if patch is not None else False,
        patch is not None and patch.strict,
        watch,
        verification,
        cache_tokens=options.cache_tokens,
        prefixes=prefixes,
        one_launch=patch is None or patch.megakernel is not False,
    )
    engine.notes.update(notes)
    if options.drafting_dtype is not None:
        drafted, engine.notes["draft_dtype"] = quantised_draft(drafted, options.drafting_dtype)
    return Assembled(engine, drafted, read_modules, reading.copied)


def _megakernel(options: PatchOptions, view: ModelView, kernels: bool) -> bool | None:
    """Whether the engine uses the megakernel; None: if it is faster. Raises if it is required but not possible."""
    if options.megakernel is not True:
        return None if options.megakernel == "auto" else False
    if view.ranks is not None:
        raise UnsupportedModelError(
            "megakernel=True: not supported yet where ranks share the target (tp_plan); leave it out", "devices"
        )
    if not kernels:
        raise ValueError(f"megakernel=True needs a GPU and kernels, got {view.device} and kernels={options.kernels}")
    return True
