"""A bare Hugging Face language model: as the target, or as the draft of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
from eagle_triton.engine.model.gated_delta import GatedDelta
from eagle_triton.engine.model.mixers import Attention, Mixer
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.module_kinds import is_mixture
from eagle_triton.engine.model.modules import MLP, Experts, Projection, Rotary
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.gated_delta import read_gated_delta
from eagle_triton.families.reading.module_reader import (
    attribute_at,
    check_dtype,
    check_fits_target,
    check_no_adapter,
    check_readable,
    check_silu,
    read_attention,
    read_mlp,
    read_norm,
    read_projection,
    read_rotary,
    read_target_embedding,
)
from eagle_triton.families.reading.sharded import ranks_of
from eagle_triton.models.target import HYBRIDS, SUPPORTED, text_config
from eagle_triton.runtime.float8_weight import Float8Weight

ROPE_TYPES = ("default", "linear", "llama3")  # frequencies that do not depend on the length


def check_causal_lm(model: Any, root: str) -> None:
    """Raise UnsupportedModelError unless `model` is a causal language model of a known architecture."""
    if isinstance(model, nn.Module):
        check_no_adapter(model, root)
    kind, known = getattr(getattr(model, "config", None), "model_type", None), (*SUPPORTED, *HYBRIDS)
    if kind not in known or not isinstance(getattr(model, "lm_head", None), nn.Module):
        raise UnsupportedModelError(
            f"{root} must be a causal language model of {', '.join(known)}, got {type(model).__name__} "
            f"(model_type {kind!r})"
        )


def body_path(model: Any) -> str:
    """The dotted path of the language model's layers and their embedding."""
    return "model.language_model" if hasattr(model.model, "language_model") else "model"


def read_causal_lm(model: Any, feature_layers: Sequence[int] = (), *, root: str = "model") -> ModelView:
    """References to a causal language model's parts.

    feature_layers: the layers whose inputs feed an EAGLE-3 head. root: what messages call the model. Raises
    UnsupportedModelError for another architecture, and for weights that are not all on one device and of one dtype
    (modules that are no plain nn.Linear are called as they are).
    """
    check_causal_lm(model, root)
    check_readable(model, root)
    attribute_at(model, "model", nn.Module, root=root)
    path = body_path(model)
    body, where = attribute_at(model, path, nn.Module, root=root), f"{root}.{path}"
    check_forward_fields(body, body.config, where)
    rotary_module = attribute_at(body, "rotary_emb", nn.Module, root=where)
    rope_type = getattr(rotary_module, "rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{where}.rotary_emb must be one of {ROPE_TYPES}, got rope_type {rope_type!r}", "layer-types"
        )
    scaling = getattr(rotary_module, "attention_scaling", 1.0)
    rotary = read_rotary(rotary_module.inv_freq, scaling, f"{where}.rotary_emb")
    layers = tuple(_layer(model, path, index, rotary, root) for index in range(len(body.layers)))
    if wrong := [index for index in feature_layers if not 0 <= index < len(layers)]:
        raise UnsupportedModelError(f"{where}.layers has {len(layers)} layers: no features of layers {wrong}", "heads")
    eos = getattr(model.generation_config, "eos_token_id", None)
    view = ModelView(
        embedding=read_target_embedding(body, "embed_tokens", root=where),
        layers=layers,
        norm=read_norm(body, "norm", root=where),
        head=read_projection(model, "lm_head", root=root),
        feature_layers=tuple(feature_layers),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        pad_token_id=getattr(text_config(model.config), "pad_token_id", None),
        ranks=ranks_of(model),
    )
    if view.ranks is not None:
        _check_shared_layers(view, where)
    _check_dtypes(view, root, path)
    return view


def check_forward_fields(body: Any, config: Any, where: str) -> None:
    """Raise UnsupportedModelError for a field with which the body's own forward computes something else than we do.

    engine/model/model_watch.py sees that the fields which a forward reads each time stay as they were.
    """
    layers, used = len(body.layers), config.num_hidden_layers
    if len(range(layers)[:used]) < layers:
        raise UnsupportedModelError(
            f"{where}.config.num_hidden_layers is {used}, so the forward would use that many of the {layers} layers: "
            f"remove the other layers (model.layers = model.layers[:{used}]) or set it to {layers}",
            "layer-types",
        )
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager"):
        raise UnsupportedModelError(
            f"{where}.config: attn_implementation must be 'sdpa' or 'eager', got {attention!r}", "layer-types"
        )
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    for index, layer in enumerate(body.layers):
        if getattr(getattr(layer, "self_attn", None), "is_causal", True) is not True:
            raise UnsupportedModelError(
                f"{where}.layers.{index}.self_attn.is_causal must be True, got {layer.self_attn.is_causal!r}",
                "layer-types",
            )
        if window is None:
            continue
        kind = kinds[index] if kinds else "sliding_attention"
        if (config.model_type, kind) in (("llama", "sliding_attention"), ("mistral", "full_attention")):
            masks = "masks no window" if config.model_type == "llama" else "masks a window in all layers"
            raise UnsupportedModelError(
                f"{where}.config.sliding_window is {window} and layer {index} is {kind}, but the forward of "
                f"{config.model_type} {masks}: set sliding_window to None, or leave layer_types out",
                "layer-types",
            )


def draft_from_causal_lm(
    model: nn.Module, target: ModelView, read_tree: Callable[[], TreeSpec], *, root: str = "draft_model"
) -> CausalLMDraft:
    """A causal language model as the draft of `target`; `read_tree` gives the tree to draft in the next generation.

    Only the vocabulary, but for padding of a hundredth at most, the dtype and the device must be the target's. Raises
    UnsupportedModelError otherwise, and for what `read_causal_lm` refuses.
    """
    view = read_causal_lm(model, root=root)
    if recurrent := [index for index, layer in enumerate(view.layers) if not isinstance(layer.mixer, Attention)]:
        raise UnsupportedModelError(
            f"{root}: layers {recurrent} are recurrent, and a draft of the engine needs attention, because each branch "
            "of its tree would need states of its own",
            "heads",
        )
    if not isinstance(view.embedding, torch.Tensor) or view.ranks is not None:
        raise UnsupportedModelError(
            f"{root}.model is sharded over several devices (tp_plan): a draft must be whole on each rank, load it "
            "without tp_plan",
            "devices",
        )
    mine, others = view.vocab_size, target.vocab_size
    if 100 * abs(mine - others) > max(mine, others):
        raise UnsupportedModelError(
            f"{root} and the target do not fit: vocabulary {mine}, the target's is {others}; for another tokenizer "
            "there is universal assisted generation in transformers: generate(assistant_model=..., tokenizer=..., "
            "assistant_tokenizer=...)",
            "heads",
        )
    check_fits_target(root, target, others, view.embedding)
    embedding, head = view.embedding, view.head
    if mine > others:  # its padding names no token of the target's
        if not isinstance(head.weight, torch.Tensor):
            raise UnsupportedModelError(
                f"{root} and the target do not fit: vocabulary {mine}, the target's is {others}, and the rows that are "
                "too many cannot be left out of a vocabulary projection that is no plain matrix",
                "heads",
            )
        embedding = embedding[:others]
        head = Projection(head.weight[:others], None if head.bias is None else head.bias[:others])
    return CausalLMDraft(
        embedding=embedding,
        layers=view.layers,
        head=head,
        tree_reader=read_tree,
        norm=view.norm,
        padding=max(others - mine, 0),
    )


def _check_shared_layers(view: ModelView, where: str) -> None:
    """Raise UnsupportedModelError for a layer that is not yet known over several ranks."""
    for index, layer in enumerate(view.layers):
        if not (isinstance(layer.mixer, Attention) and isinstance(layer.mlp, MLP)):
            part = "mlp" if isinstance(layer.mixer, Attention) else "linear_attn"
            raise UnsupportedModelError(
                f"{where}.layers.{index}.{part}: over several ranks (tp_plan) every layer must be attention and a "
                "SwiGLU block; load the model on one device",
                "devices",
            )


def _layer(model: Any, body: str, index: int, rotary: Rotary, root: str) -> Layer:
    path = f"{body}.layers.{index}"
    layer, where = attribute_at(model, path, nn.Module, root=root), f"{root}.{path}"
    mlp = attribute_at(layer, "mlp", nn.Module, root=where)
    if not is_mixture(mlp):
        check_silu(attribute_at(mlp, "act_fn", root=f"{where}.mlp"), f"{where}.mlp.act_fn")
    return Layer(
        input_norm=read_norm(layer, "input_layernorm", root=where),
        mixer=_mixer(layer, text_config(model.config), index, rotary, where),
        post_norm=read_norm(layer, "post_attention_layernorm", root=where),
        mlp=Experts(mlp) if is_mixture(mlp) else read_mlp(layer, root=where),
    )


def _mixer(layer: nn.Module, config: Any, index: int, rotary: Rotary, where: str) -> Mixer:
    if hasattr(layer, "linear_attn"):
        return read_gated_delta(layer, "linear_attn", root=where)
    attention = attribute_at(layer, "self_attn", nn.Module, root=where)
    kinds = getattr(config, "layer_types", None)
    slides = kinds[index] == "sliding_attention" if kinds else True
    return read_attention(
        layer,
        rotary,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        sliding_window=getattr(config, "sliding_window", None) if slides else None,
        root=where,
    )


def _check_dtypes(view: ModelView, root: str, body: str) -> None:
    """Raise UnsupportedModelError for a plain weight that is not of the embedding's dtype. FP8 projections are modules
    still, see families/reading/float8.py."""
    check_dtype(view.dtype, f"{root}.{body}.embed_tokens.weight")
    for path, tensor in _plain_weights(view, body):
        if isinstance(tensor, torch.Tensor) and tensor.dtype != view.dtype:
            raise UnsupportedModelError(
                f"{root}.{path} must be {view.dtype} as the embedding is, or a module of its own kind, "
                f"got {tensor.dtype}",
                "weights",
            )


def _plain_weights(view: ModelView, body: str) -> Iterator[tuple[str, torch.Tensor | Float8Weight | None]]:
    """Dotted paths and tensors of the norms and of the projections that are no modules."""
    yield f"{body}.norm", view.norm.weight
    yield "lm_head", view.head.weight
    for index, layer in enumerate(view.layers):
        path, mixer, mlp = f"{body}.layers.{index}", layer.mixer, layer.mlp
        if layer.input_norm is not None:
            yield f"{path}.input_layernorm", layer.input_norm.weight
        yield f"{path}.post_attention_layernorm", layer.post_norm.weight
        if isinstance(mixer, Attention):
            for name in ("q", "k", "v", "o"):
                projection = getattr(mixer, name)
                yield f"{path}.self_attn.{name}_proj.weight", projection.weight
                yield f"{path}.self_attn.{name}_proj.bias", projection.bias
        elif isinstance(mixer, GatedDelta):  # A_log and dt_bias may be wider
            for index, projection in enumerate((*mixer.inputs, mixer.o)):
                yield f"{path}.linear_attn's projection {index}", projection.weight
            yield f"{path}.linear_attn.conv1d.weight", mixer.conv
            yield f"{path}.linear_attn.norm.weight", mixer.norm.weight
        if isinstance(mlp, MLP):
            for name in ("gate", "up", "down"):
                yield f"{path}.mlp.{name}_proj", getattr(mlp, name).weight
