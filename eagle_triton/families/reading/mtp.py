"""Multi-token-prediction layers as a draft of the target that they were published with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from eagle_triton.engine.drafts.mtp import MTPDraft, MTPUnit
from eagle_triton.engine.model.latent_attention import LatentAttention
from eagle_triton.engine.model.mixers import Attention
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.module_kinds import is_mixture
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.experts import read_experts
from eagle_triton.families.reading.latent_attention import read_latent_attention
from eagle_triton.families.reading.module_reader import ModuleReader, check_fits_target, check_readable
from eagle_triton.families.reading.sharded import share_layer
from eagle_triton.models.mtp import MTPHead


def read_mtp(
    head: MTPHead, target: ModelView, read_tree: Callable[[], TreeSpec], *, root: str = "draft_model"
) -> MTPDraft:
    """MTP layers as the draft of `target`; `read_tree` gives the tree to draft in the next generation.

    Ranks that share the target have whole layers, read their parts of them, and copy the whole embedding. Raises
    UnsupportedModelError unless the layers have the target's device, dtype and kind of attention.
    """
    check_readable(head, root)
    if target.feature_layers:
        raise UnsupportedModelError(f"{root}: MTP layers read only the target's last hidden states", "heads")
    attention = (Attention, LatentAttention)
    like = next((layer.mixer for layer in target.layers if isinstance(layer.mixer, attention)), None)
    if like is None:
        raise UnsupportedModelError(
            f"{root}: the target must have an attention layer, which an MTP layer resembles", "heads"
        )
    units = tuple(_unit(unit, like, target, f"{root}.units.{index}") for index, unit in enumerate(head.units))
    check_fits_target(root, target, target.vocab_size, units[0].norm.weight)
    if units[0].norm.weight.shape[0] != target.hidden_size:
        raise UnsupportedModelError(
            f"{root} and the target do not fit: hidden size {units[0].norm.weight.shape[0]}, the target's is "
            f"{target.hidden_size}",
            "heads",
        )
    return MTPDraft(
        embedding=target.embedding if isinstance(target.embedding, Tensor) else target.embedding.whole(),
        layers=tuple(unit.layer for unit in units),
        head=target.head,
        tree_reader=read_tree,
        units=units,
    )


def _unit(unit: Any, like: Attention | LatentAttention, target: ModelView, root: str) -> MTPUnit:
    """like: an attention layer of the target, perhaps with only this rank's heads."""
    read, ranks = ModuleReader(unit, root), target.ranks
    mlp, parts = read.at("layer.mlp"), 1 if like.o.summed_over is None else like.o.summed_over.size
    if ranks is not None and is_mixture(mlp.module):
        raise UnsupportedModelError(
            f"{mlp.path} is a mixture of experts in a multi-token-prediction layer, which ranks cannot share "
            "(tp_plan): draft without it, or load the target on one device",
            "devices",
        )
    shape: dict[str, Any]
    if isinstance(like, LatentAttention):
        shape = dict(mixer=read_latent_attention(read.at("layer.self_attn"), like.rotary))
    else:
        shape = dict(
            num_heads=like.num_heads * parts,
            num_kv_heads=like.num_kv_heads * parts,
            head_dim=like.head_dim,
            scale=like.scale,
            sliding_window=like.sliding_window,
        )
    experts = read_experts(mlp.module, target.dtype, root=mlp.path) if is_mixture(mlp.module) else None
    layer = read.layer("layer", like.rotary, mlp=experts, **shape)
    return MTPUnit(
        token_norm=read.norm("token_norm"),
        hidden_norm=read.norm("hidden_norm"),
        fc=read.projection("fc"),
        layer=layer if ranks is None else share_layer(layer, ranks),
        norm=read.norm("norm"),
    )
