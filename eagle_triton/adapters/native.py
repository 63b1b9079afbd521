"""Our own EaModel (models/), around a Hugging Face Llama, Mistral, Qwen2 or Qwen3."""

from __future__ import annotations

from typing import Any

from torch import nn

from eagle_triton.adapters import reading
from eagle_triton.adapters.reading import UnsupportedModelError
from eagle_triton.adapters.view import MLP, Attention, DraftView, Layer, ModelView, Norm, Rotary
from eagle_triton.models import heads
from eagle_triton.models.ea_model import EaModel
from eagle_triton.tree_spec import TreeSpec

ROPE_TYPES = ("default", "linear", "llama3")  # frequencies that do not depend on the length


def recognise(model: Any) -> bool:
    """Whether `model` is of this family."""
    return isinstance(model, EaModel)


def read(model: EaModel) -> tuple[ModelView, DraftView]:
    """References to the target's and the head's parts. Raises UnsupportedModelError for what is not known."""
    target = read_target(model)
    return target, read_head(model, target)


def read_target(model: EaModel) -> ModelView:
    """The Hugging Face model below `model.base_model`."""
    config, root = model.base_model.config, "model.base_model"
    body = reading.child(model, "base_model.model", nn.Module)
    rotary_module = reading.child(body, "rotary_emb", nn.Module, root=f"{root}.model")
    rope_type = getattr(rotary_module, "rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(f"{root}.model.rotary_emb must be one of {ROPE_TYPES}, got rope_type {rope_type!r}")
    rotary = reading.rotary(
        rotary_module.inv_freq, getattr(rotary_module, "attention_scaling", 1.0), f"{root}.model.rotary_emb"
    )
    layers = tuple(_target_layer(model, index, rotary) for index in range(len(body.layers)))
    eos = getattr(model.base_model.generation_config, "eos_token_id", None)
    return ModelView(
        embedding=reading.child(body, "embed_tokens.weight", root=f"{root}.model"),
        layers=layers,
        norm=reading.norm(model, "base_model.model.norm"),
        head=reading.projection(model, "base_model.lm_head"),
        feature_layers=tuple(model.feature_layers or ()),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        pad_token_id=config.pad_token_id,
    )


def _target_layer(model: EaModel, index: int, rotary: Rotary) -> Layer:
    path, config = f"base_model.model.layers.{index}", model.base_model.config
    attention = reading.child(model, f"{path}.self_attn", nn.Module)
    reading.silu(reading.child(model, f"{path}.mlp.act_fn"), f"model.{path}.mlp.act_fn")
    has_norms = hasattr(attention, "q_norm")
    kinds = getattr(config, "layer_types", None)
    slides = kinds[index] == "sliding_attention" if kinds else True
    return Layer(
        input_norm=reading.norm(model, f"{path}.input_layernorm"),
        attention=Attention(
            *(reading.projection(model, f"{path}.self_attn.{name}_proj") for name in "qkvo"),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            rotary=rotary,
            q_norm=reading.norm(model, f"{path}.self_attn.q_norm") if has_norms else None,
            k_norm=reading.norm(model, f"{path}.self_attn.k_norm") if has_norms else None,
            sliding_window=getattr(config, "sliding_window", None) if slides else None,
        ),
        post_norm=reading.norm(model, f"{path}.post_attention_layernorm"),
        mlp=reading.mlp(model, f"{path}.mlp"),
    )


def read_head(model: EaModel, target: ModelView) -> DraftView:
    """The draft head below `model.ea_layer`."""
    head = model.ea_layer
    rotary = Rotary(heads.rotary_frequencies(head.config, target.device))
    eagle3 = isinstance(head, heads.Eagle3Head)
    paths = ["midlayer"] if eagle3 else [f"layers.{index}" for index in range(len(head.layers))]
    root = "model.ea_layer"
    return DraftView(
        kind="eagle3" if eagle3 else "eagle1",
        embedding=head.embed_tokens.weight,
        fc=reading.projection(head, "fc", root=root),
        layers=tuple(_head_layer(head, path, rotary) for path in paths),
        head=reading.projection(head, "lm_head", root=root) if eagle3 else target.head,
        read_tree=lambda: read_tree(head),
        hidden_norm=reading.norm(head, "midlayer.hidden_norm", root=root) if eagle3 else None,
        norm=reading.norm(head, "norm", root=root) if eagle3 else None,
        d2t=head.d2t,
        norm_before_residual=head.config.norm_before_residual,
    )


def read_tree(head: heads.DraftHead) -> TreeSpec:
    """The tree parameters as they are now."""
    if head.tree_choices is not None:
        return TreeSpec.fixed(head.tree_choices)
    return TreeSpec.dynamic(head.total_tokens + 1, head.depth, head.top_k)


def _head_layer(head: heads.DraftHead, path: str, rotary: Rotary) -> Layer:
    root, config = "model.ea_layer", head.config

    def norm(name: str) -> Norm:
        return reading.norm(head, f"{path}.{name}", root=root)

    return Layer(
        input_norm=norm("input_layernorm") if hasattr(head.get_submodule(path), "input_layernorm") else None,
        attention=Attention(
            *(reading.projection(head, f"{path}.self_attn.{name}_proj", root=root) for name in "qkvo"),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            rotary=rotary,
        ),
        post_norm=norm("post_attention_layernorm"),
        mlp=MLP(*(reading.projection(head, f"{path}.mlp.{name}_proj", root=root) for name in ("gate", "up", "down"))),
    )
