"""A bare Hugging Face Llama, Mistral, Qwen2 or Qwen3: as the target, or as the draft of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from eagle_triton.adapters.module_reader import (
    UnsupportedModelError,
    attribute_at,
    check_dtype,
    check_fits_target,
    check_readable,
    check_silu,
    read_embedding,
    read_layer,
    read_norm,
    read_projection,
    read_rotary,
)
from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
from eagle_triton.engine.model import Layer, ModelView
from eagle_triton.engine.modules import Rotary
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.models.target import SUPPORTED

ROPE_TYPES = ("default", "linear", "llama3")  # frequencies that do not depend on the length


def check_causal_lm(model: Any, root: str) -> None:
    """Raise UnsupportedModelError unless `model` is a causal language model of a known architecture."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in SUPPORTED or not isinstance(getattr(model, "lm_head", None), nn.Module):
        raise UnsupportedModelError(
            f"{root} must be a causal language model of {', '.join(SUPPORTED)}, got {type(model).__name__} "
            f"(model_type {kind!r})"
        )


def read_causal_lm(model: Any, feature_layers: Sequence[int] = (), *, root: str = "model") -> ModelView:
    """References to a causal language model's parts.

    feature_layers: the layers whose inputs feed an EAGLE-3 head. root: what messages call the model. Raises
    UnsupportedModelError for another architecture, and for weights that are not all on one device and of one dtype
    (modules that are no plain nn.Linear are called as they are).
    """
    check_causal_lm(model, root)
    check_readable(model, root)
    body = attribute_at(model, "model", nn.Module, root=root)
    where = f"{root}.model"
    rotary_module = attribute_at(body, "rotary_emb", nn.Module, root=where)
    rope_type = getattr(rotary_module, "rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{where}.rotary_emb must be one of {ROPE_TYPES}, got rope_type {rope_type!r}", "layer-types"
        )
    scaling = getattr(rotary_module, "attention_scaling", 1.0)
    rotary = read_rotary(rotary_module.inv_freq, scaling, f"{where}.rotary_emb")
    layers = tuple(_layer(model, index, rotary, root) for index in range(len(body.layers)))
    if wrong := [index for index in feature_layers if not 0 <= index < len(layers)]:
        raise UnsupportedModelError(
            f"{root}.model.layers has {len(layers)} layers: no features of layers {wrong}", "heads"
        )
    eos = getattr(model.generation_config, "eos_token_id", None)
    view = ModelView(
        embedding=read_embedding(body, "embed_tokens", root=where),
        layers=layers,
        norm=read_norm(body, "norm", root=where),
        head=read_projection(model, "lm_head", root=root),
        feature_layers=tuple(feature_layers),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        pad_token_id=model.config.pad_token_id,
    )
    _check_dtypes(view, root)
    return view


def draft_from_causal_lm(
    model: nn.Module, target: ModelView, read_tree: Callable[[], TreeSpec], *, root: str = "draft_model"
) -> CausalLMDraft:
    """A causal language model as the draft of `target`; `read_tree` gives the tree to draft in the next generation.

    Only the vocabulary, the dtype and the device must be the target's. Raises UnsupportedModelError otherwise, and
    for what `read_causal_lm` refuses.
    """
    view = read_causal_lm(model, root=root)
    check_fits_target(root, target, view.vocab_size, view.embedding)
    return CausalLMDraft(
        embedding=view.embedding, layers=view.layers, head=view.head, tree_reader=read_tree, norm=view.norm
    )


def _layer(model: Any, index: int, rotary: Rotary, root: str) -> Layer:
    path, config = f"model.layers.{index}", model.config
    attention = attribute_at(model, f"{path}.self_attn", nn.Module, root=root)
    check_silu(attribute_at(model, f"{path}.mlp.act_fn", root=root), f"{root}.{path}.mlp.act_fn")
    kinds = getattr(config, "layer_types", None)
    slides = kinds[index] == "sliding_attention" if kinds else True
    return read_layer(
        model,
        path,
        rotary,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        sliding_window=getattr(config, "sliding_window", None) if slides else None,
        root=root,
    )


def _check_dtypes(view: ModelView, root: str) -> None:
    """Raise UnsupportedModelError for a plain weight that is not of the embedding's dtype."""
    check_dtype(view.dtype, f"{root}.model.embed_tokens.weight")
    for path, tensor in _plain_weights(view):
        if tensor is not None and tensor.dtype != view.dtype:
            raise UnsupportedModelError(
                f"{root}.{path} must be {view.dtype} as the embedding is, or a module of its own kind, "
                f"got {tensor.dtype}",
                "weights",
            )


def _plain_weights(view: ModelView) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Dotted paths and tensors of the norms and of the projections that are no modules."""
    yield "model.norm", view.norm.weight
    yield "lm_head", view.head.weight
    for index, layer in enumerate(view.layers):
        path, attention, mlp = f"model.layers.{index}", layer.mixer, layer.mlp
        if layer.input_norm is not None:
            yield f"{path}.input_layernorm", layer.input_norm.weight
        yield f"{path}.post_attention_layernorm", layer.post_norm.weight
        for name in ("q", "k", "v", "o"):
            projection = getattr(attention, name)
            yield f"{path}.self_attn.{name}_proj.weight", projection.weight
            yield f"{path}.self_attn.{name}_proj.bias", projection.bias
        for name in ("gate", "up", "down"):
            yield f"{path}.mlp.{name}_proj", getattr(mlp, name).weight
