"""Our own EaModel (models/), around a Hugging Face model of any family that is not recurrent."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from eagle_triton.engine.drafts.eagle import Eagle1Draft, Eagle3Draft, EagleDraft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.mixers import Attention
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.modules import Rotary
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families import safeailab as upstream
from eagle_triton.families.causal_lm import check_causal_lm, read_causal_lm
from eagle_triton.families.reading.module_reader import ModuleReader, check_fits_target, check_readable
from eagle_triton.families.reading.sharded import share_head
from eagle_triton.families.topk_generate import draft_patch_point
from eagle_triton.models import heads
from eagle_triton.models.ea_model import EaModel
from eagle_triton.models.families import text_config
from eagle_triton.models.head_loading import check_fit
from eagle_triton.models.target import default_feature_layers
from eagle_triton.patching import PatchPoint


def recognise(model: Any) -> bool:
    """Whether `model` is of this family."""
    return isinstance(model, EaModel)


def read(model: EaModel) -> tuple[ModelView, EagleDraft]:
    """References to the target's and the head's parts. Raises UnsupportedModelError for unknown parts."""
    target = read_target(model)
    return target, read_head(model.ea_layer, target)


def read_target(model: EaModel) -> ModelView:
    """The Hugging Face model below `model.base_model`."""
    return read_causal_lm(model.base_model, model.feature_layers or (), root="model.base_model")


def read_pair(target: Any, head: heads.DraftHead) -> tuple[ModelView, EagleDraft]:
    """A plain causal language model and a draft head, read like an EaModel of the two.

    Raises UnsupportedModelError for an unknown target, ValueError for a head that does not fit it.
    """
    check_causal_lm(target, "target_model")
    check_fit(head.config, target.config, isinstance(head, heads.Eagle3Head))
    head.init_tree()
    layers = feature_layers(head, text_config(target.config).num_hidden_layers)
    view = read_causal_lm(target, layers, root="target_model")
    return view, read_head(head, view, root="draft_model")


def feature_layers(head: heads.DraftHead, layers: int) -> tuple[int, ...]:
    """The target layers with the inputs that feed `head`: its own choice or the usual three. layers: in the target.

    Empty for an EAGLE-1/2 head. Raises ValueError for a target that is too small for the usual three.
    """
    if not isinstance(head, heads.Eagle3Head):
        return ()
    return head.config.feature_layers or default_feature_layers(layers)


def read_head(head: heads.DraftHead, target: ModelView, *, root: str = "model.ea_layer") -> EagleDraft:
    """A draft head of `target`. root: the head's name in messages.

    Raises UnsupportedModelError unless it has the target's vocabulary, dtype and device.
    """
    check_readable(head, root)
    rotary = Rotary(heads.rotary_frequencies(head.config, target.device), heads.rotary_scale(head.config))
    eagle3 = isinstance(head, heads.Eagle3Head)
    read = ModuleReader(head, root)
    count = 1 if eagle3 else len(read.value("layers", nn.ModuleList))
    paths = ["midlayer"] if eagle3 else [f"layers.{index}" for index in range(count)]
    norm = read.value(f"{paths[0]}.post_attention_layernorm.weight", torch.Tensor)
    check_fits_target(root, target, head.config.vocab_size, norm)  # a norm is never quantised
    sizes = head.config
    shared: dict[str, Any] = dict(
        embedding=read.embedding("embed_tokens"),
        fc=read.projection("fc"),
        layers=tuple(
            read.layer(
                path,
                rotary,
                num_heads=sizes.num_attention_heads,
                num_kv_heads=sizes.num_key_value_heads,
                head_dim=sizes.head_dim,
                sliding_window=sizes.sliding_window,
            )
            for path in paths
        ),
        tree_reader=lambda: read_tree(head),
        feature_layers=target.feature_layers,
        d2t=head.d2t,
    )
    draft: EagleDraft
    if not eagle3:
        draft = Eagle1Draft(head=target.head, **shared)
    else:
        feature_norms = len(read.value("fc_norm", nn.ModuleList)) if sizes.fc_norm else 0
        draft = Eagle3Draft(
            head=read.projection("lm_head"),
            hidden_norm=read.norm("midlayer.hidden_norm"),
            norm=read.norm("norm"),
            norm_before_residual=sizes.norm_before_residual,
            norm_before_fc=read.norm("input_norm") if sizes.norm_before_fc else None,
            fc_norms=tuple(read.norm(f"fc_norm.{index}") for index in range(feature_norms)),
            norm_output=sizes.norm_output,
            **shared,
        )
    return draft if target.ranks is None else share_head(draft, target.ranks)  # all ranks read it


def read_tree(head: heads.DraftHead) -> TreeSpec:
    """The current tree parameters."""
    if head.tree_choices is not None:
        return TreeSpec.fixed(head.tree_choices)
    return TreeSpec.dynamic(head.total_tokens + 1, head.depth, head.top_k)


def module_patch_points(model: Any, engine: Engine) -> tuple[tuple[PatchPoint, ...], dict[str, str]]:
    """`ea_layer.topK_genrate` and every `self_attn.forward`; and the methods that are not replaced, with the reason."""
    if not all(isinstance(layer.mixer, Attention) for layer in engine.view.layers):
        return (draft_patch_point(model, engine),), {"self_attn.forward": "the originals run, which attend latents"}
    patch_points, skipped = upstream.module_patch_points(model, engine)
    attentions = [patch_point for patch_point in patch_points if patch_point.attribute == "forward"]
    if any("shared_kv_states" in inspect.signature(patch_point.owner.forward).parameters for patch_point in attentions):
        patch_points = tuple(patch_point for patch_point in patch_points if patch_point not in attentions)
        skipped |= {"self_attn.forward": "the originals run, because they pass keys and values to each other"}
    return patch_points, skipped


def patch_points(model: Any, engine: Engine) -> tuple[PatchPoint, ...]:
    """The four generating methods of the original interface."""

    def remember() -> None:
        model.accept_lengths = engine.accept_lengths

    return upstream.patch_points(model, engine, after_step=remember, greedy_count_is_tensor=False)


def drop_caches(model: Any) -> None:
    """Drop the caches that the original and the engine must not take over from each other."""
    model.ea_layer.reset_kv()
    model.accept_lengths = []
