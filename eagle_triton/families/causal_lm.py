"""A plain Hugging Face language model, as the target or as the draft of another one.

Every architecture of `models/families.py` is read here. Only modules of a new kind need more than a row there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
from eagle_triton.engine.model.mixers import Mixer
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.module_kinds import is_mixture
from eagle_triton.engine.model.modules import MLP, Experts, ExpertsBeside, LayerInputBlock, LayerInputs, Rotary
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnknownLayerError, UnsupportedModelError
from eagle_triton.families.reading.experts import RoutedExperts, own_experts, read_experts, with_shared
from eagle_triton.families.reading.latent_attention import read_latent_attention
from eagle_triton.families.reading.module_reader import (
    ModuleReader,
    check_dtype,
    check_fits_target,
    check_no_adapter,
    check_readable,
    read_embedding_scale,
    read_rotary,
)
from eagle_triton.families.reading.recurrent import read_gated_delta, read_mamba2, read_short_conv
from eagle_triton.families.reading.sharded import ranks_of, styles_of
from eagle_triton.models.families import (
    FAMILIES,
    Family,
    check_config,
    family_of,
    logit_cap,
    logit_scales,
    short_rope_length,
    text_config,
    unknown_family,
)

LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "conv")
MLP_BLOCKS = ("mlp", "moe")  # kinds of layers without a mixer
MIXERS = ("self_attn", "linear_attn", "mamba", "conv", "mixer")
# Whose frequencies do not depend on the length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "ntk_alpha")


def check_causal_lm(model: Any, root: str) -> None:
    """Raise UnsupportedModelError unless `model` is a causal language model of a known architecture."""
    if isinstance(model, nn.Module):
        check_no_adapter(model, root)
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        load = f"; load it with AutoModelForCausalLM.from_pretrained({model!r})" if isinstance(model, str) else ""
        raise UnsupportedModelError(
            f"{root} must be a causal language model of transformers, got {type(model).__name__}{load}"
        )
    if family_of(config) is None:
        raise UnsupportedModelError(f"{root} is a {type(model).__name__}: {unknown_family(config)}")
    if not isinstance(getattr(model, "lm_head", None), nn.Module):
        raise UnsupportedModelError(
            f"{root} must be a causal language model with an lm_head, got {type(model).__name__}"
        )


def body_path(model: Any) -> str:
    """The dotted path of the module that has the language model's layers and embedding."""
    return "model.language_model" if hasattr(model.model, "language_model") else "model"


def read_causal_lm(model: Any, feature_layers: Sequence[int] = (), *, root: str = "model") -> ModelView:
    """References to a causal language model's parts.

    feature_layers: the layers with inputs that feed an EAGLE-3 head. root: the model's name in messages. Raises
    UnsupportedModelError for another architecture, and for weights that are not all on one device and of one dtype.
    Modules other than a plain nn.Linear are called as modules.
    """
    check_causal_lm(model, root)
    check_readable(model, root)
    read = ModuleReader(model, root, styles_of(model))
    read.at("model")
    path = body_path(model)
    inner = read.at(path)
    body, where = inner.module, inner.path
    config, family = text_config(model.config), family_of(model.config)
    assert family is not None
    if reason := check_config(config, where):
        raise UnknownLayerError(reason)
    check_forward_fields(body, config, family, where)
    table = inner.at(family.embedding)
    if family.scaled_embedding and not hasattr(table.module, "embed_scale"):
        raise UnsupportedModelError(
            f"{table.path} must scale its output, as in transformers 5, got {table.module}", "families"
        )
    embedding = inner.target_embedding(family.embedding)
    check_dtype(embedding.dtype, f"{table.path}.weight")
    read, inner = (replace(reader, dtype=embedding.dtype) for reader in (read, inner))
    layers = LayerReader(inner, config).layers()
    if family.single_blocks and feature_layers:
        raise UnsupportedModelError(f"{root} has features between its blocks, which a head cannot read here", "heads")
    if wrong := [index for index in feature_layers if not 0 <= index < len(layers)]:
        raise UnsupportedModelError(f"{where}.layers has {len(layers)} layers, and none numbered {wrong}", "heads")
    eos = getattr(model.generation_config, "eos_token_id", None)
    norm = inner.norm(family.last_norm, layer_norm=family.layer_norm)
    factor, divisor = logit_scales(model)
    scale = read_embedding_scale(table.module) * inner.factor(family.embedding_scale)
    rooted = _field(config, family.root_scaled_embedding, False)
    view = ModelView(
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=replace(
            read.projection("lm_head"),
            factor=factor,
            divisor=divisor,
            cap=logit_cap(model.config),
        ),
        embedding_scale=scale * config.hidden_size**0.5 if rooted else scale,
        embedding_norm=replace(table, dtype=embedding.dtype).norm("embed_norm", like=norm.weight)
        if family.normed_embedding
        else None,
        layer_inputs=_read_layer_inputs(inner) if family.layer_inputs else None,
        feature_layers=tuple(feature_layers),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        pad_token_id=getattr(text_config(model.config), "pad_token_id", None),
        ranks=ranks_of(model),
        short_rope_length=short_rope_length(config),
    )
    if view.ranks is not None:
        _check_shared_experts(view, where)
    return view


def _read_layer_inputs(read: ModuleReader) -> LayerInputs | None:
    body, where = read.module, read.path
    if not hasattr(body, "embed_tokens_per_layer"):
        return None
    table = read.target_embedding("embed_tokens_per_layer")
    if not isinstance(table, torch.Tensor) or len(table) < len(body.embed_tokens.weight):
        raise UnknownLayerError(
            f"{where}.embed_tokens_per_layer must have a row for each of {len(body.embed_tokens.weight)} tokens on one "
            f"device, got {len(table) if isinstance(table, torch.Tensor) else 'a part of them'}"
        )
    return LayerInputs(
        table=table,
        table_scale=read_embedding_scale(body.embed_tokens_per_layer),
        projection=read.projection("per_layer_model_projection"),
        projection_scale=read.value("per_layer_model_projection_scale", float),
        norm=read.norm("per_layer_projection_norm"),
        scale=read.value("per_layer_input_scale", float),
    )


def _field(config: Any, name: str | None, neutral: Any) -> Any:
    """A field that a family names; `neutral` if it names none, or if the configuration has None."""
    value = None if name is None else getattr(config, name)
    return neutral if value is None else value


def check_forward_fields(body: Any, config: Any, family: Family, where: str) -> None:
    """Raise UnsupportedModelError for a field with which the body's own forward differs from the engine.

    engine/model/model_watch.py checks that the fields which a forward reads each time do not change later.
    """
    layers, used = len(body.layers), config.num_hidden_layers
    if len(range(layers)[:used]) < layers:
        raise UnknownLayerError(
            f"{where}.config.num_hidden_layers is {used}, so the forward would not use all {layers} layers: "
            f"remove the other layers (model.layers = model.layers[:{used}]) or set it to {layers}"
        )
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager"):
        raise UnknownLayerError(f"{where}.config: attn_implementation must be 'sdpa' or 'eager', got {attention!r}")
    capped = _field(config, family.score_cap, None) is not None
    if attention == "sdpa" and capped and not getattr(type(body), "_supports_sdpa", True):
        raise UnknownLayerError(
            f"{where}.config: attn_implementation must be 'eager', got 'sdpa', which this transformers refuses for "
            f"capped scores ({family.score_cap})"
        )
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    wrong = {"none": "sliding_attention", "all": "full_attention"}.get(family.window)
    for index, layer in enumerate(body.layers):
        for name in MIXERS:
            mixer: Any = getattr(layer, name, None)
            path = f"{where}.layers.{index}.{name}"
            if getattr(mixer, "is_causal", True) is not True:
                raise UnknownLayerError(f"{path}.is_causal must be True, got {mixer.is_causal!r}")
            place = getattr(mixer, "layer_idx", index)
            if place != index:
                raise UnknownLayerError(
                    f"{path}.layer_idx must be {index}, got {place}: the forward finds its part of the cache by it. "
                    "Set it again after layers were removed, copied or moved"
                )
        kind = kinds[index] if kinds else "sliding_attention"
        if kind not in LAYER_TYPES and not (family.single_blocks and kind in MLP_BLOCKS):
            raise UnknownLayerError(f"{where}.config.layer_types[{index}] must be one of {LAYER_TYPES}, got {kind!r}")
        if window is not None and kind == wrong:
            masks = "masks no window" if family.window == "none" else "masks a window in all layers"
            raise UnknownLayerError(
                f"{where}.config.sliding_window is {window} and layer {index} is {kind}, but the forward of "
                f"{config.model_type} {masks}: set sliding_window to None, or leave layer_types out"
            )
        if window is not None and window < 2 and kind == "sliding_attention" and family.window != "none":
            raise UnknownLayerError(
                f"{where}.config.sliding_window must be at least 2, got {window}: with so small a window, transformers "
                "keeps all tokens in its cache, so its forward sees more of them with a cache than without"
            )


def draft_from_causal_lm(
    model: nn.Module, target: ModelView, read_tree: Callable[[], TreeSpec], *, root: str = "draft_model"
) -> CausalLMDraft:
    """A causal language model as the draft of `target`; `read_tree` gives the tree to draft in the next generation.

    Its dtype and device must be the target's, and its vocabulary too, but for padding of at most a hundredth. Raises
    UnsupportedModelError otherwise, and for a model that `read_causal_lm` refuses.
    """
    view = read_causal_lm(model, root=root)
    if recurrent := [index for index, layer in enumerate(view.layers) if not layer.mixer.by_token]:
        raise UnsupportedModelError(
            f"{root}: layers {recurrent} are recurrent. A draft of the engine needs attention, because each branch "
            "of its tree would need its own states",
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
            f"{root} and the target do not fit: vocabulary {mine}, the target's is {others}. For another tokenizer, "
            "use transformers' universal assisted generation: generate(assistant_model=..., tokenizer=..., "
            "assistant_tokenizer=...)",
            "heads",
        )
    check_fits_target(root, target, others, view.embedding)
    embedding, head = view.embedding, view.head
    if mine > others:  # its padding is no token of the target's
        if not isinstance(head.weight, torch.Tensor):
            raise UnsupportedModelError(
                f"{root} and the target do not fit: vocabulary {mine}, the target's is {others}, and the surplus rows "
                "cannot be left out of a vocabulary projection that is not a plain matrix",
                "heads",
            )
        embedding = embedding[:others]
        head = replace(head, weight=head.weight[:others], bias=None if head.bias is None else head.bias[:others])
    return CausalLMDraft(
        embedding=embedding,
        layers=view.layers,
        head=head,
        tree_reader=read_tree,
        norm=view.norm,
        embedding_scale=view.embedding_scale,
        embedding_norm=view.embedding_norm,
        layer_inputs=view.layer_inputs,
        padding=max(others - mine, 0),
    )


def _check_shared_experts(view: ModelView, where: str) -> None:
    """Raise UnsupportedModelError for experts that are whole on each of several ranks."""
    for index, layer in enumerate(view.layers):
        if any(mixture.summed_over is None for mixture in layer.mixtures):
            raise UnsupportedModelError(
                f"{where}.layers.{index} has experts that the tp_plan leaves whole on every rank, so sharing saves "
                "little: load the model on one device",
                "devices",
            )


def _check_flag(read: ModuleReader, name: str, expected: object) -> None:
    """Raise UnsupportedModelError if a layer has a flag of another value than its modules and configuration say."""
    found = getattr(read.module, name, expected)
    if found != expected and (isinstance(found, bool) or found in (*LAYER_TYPES, *MLP_BLOCKS)):
        raise UnknownLayerError(f"{read.path}.{name} must be {expected!r}, as the layer was made, got {found!r}")


class LayerReader:
    """Reads the layers of a body."""

    def __init__(self, body: ModuleReader, config: Any, sources: Mapping[str, int] | None = None):
        """body: reads the module with the layers; its dtype is the model's. config: of the language model. sources: for
        a model with layers that all read keys and values of another model's, these layers by kind."""
        assert body.dtype is not None
        self._body, self._dtype, self._config, self._sources = body, body.dtype, config, sources
        self._family = FAMILIES[config.model_type]
        name = self._family.rotary
        optional = getattr(config, "position_embedding_type", "rope") != "rope"  # Granite 4's
        if self._family.optional_rotary:
            optional = (config.rope_parameters or {}).get("rope_theta") is None
        missing = name is None or (optional and getattr(body.module, name, body) is None)
        self._rotary = None if name is None or missing else body.at(name)
        self._local_rotary = getattr(body.module, "rotary_emb_local", None)  # Gemma 3's, in transformers 4
        self._rotaries: dict[tuple[str | None, float | None], Rotary] = {}  # by kind of layer and theta

    def layers(self) -> tuple[Layer, ...]:
        """All of them. A block that has only an MLP belongs to the layer of the mixer before it."""
        count = len(self._body.module.layers)
        if not self._family.single_blocks:
            return tuple(map(self.layer, range(count)))
        (input_norm, _, post_norm, _), found = self._family.norms, list[Layer]()
        assert input_norm is not None and post_norm is not None
        for index in range(count):
            read = self._body.at(f"layers.{index}")
            _check_flag(read, "block_type", self._config.layer_types[index])
            if self._config.layer_types[index] not in MLP_BLOCKS:
                found.append(Layer(read.norm(input_norm), self._mixer(read, index), None, None))
            elif found and found[-1].mlp is None:
                found[-1] = replace(found[-1], post_norm=read.norm(post_norm), mlp=self._feed_forward(read))
            else:
                raise UnknownLayerError(f"{read.path} has an MLP, and must follow a block with attention or Mamba-2")
        return tuple(found)

    def layer(self, index: int) -> Layer:
        family, read = self._family, self._body.at(f"layers.{index}")
        switch = family.parallel_switch
        parallel = family.parallel if switch is None else read.value(switch, bool)
        absent = (nn.Identity, type(None)) if parallel else nn.Identity
        names = family.norms if hasattr(read.module, family.attention) else family.recurrent_norms or family.norms
        norms = [
            None
            if name is None or isinstance(read.value(name), absent)
            else read.norm(name, layer_norm=family.layer_norm)
            for name in names
        ]
        input_norm, mixer_norm, post_norm, mlp_norm = norms
        return Layer(
            input_norm=input_norm,
            mixer=self._mixer(read, index),
            post_norm=post_norm,
            mlp=self._feed_forward(read),
            mixer_norm=mixer_norm,
            mlp_norm=mlp_norm,
            update_scale=read.factor(family.update_scale),
            scale=self._scale(read),
            beside=self._beside(read),
            input_block=self._input_block(read),
            parallel=parallel,
        )

    def _feed_forward(self, read: ModuleReader) -> MLP | Experts:
        def mixture(name: str) -> Experts:
            block = read.at(name)
            if not is_mixture(block.module):  # Granite's, under transformers 4
                raise UnknownLayerError(f"{block.path} must have experts and a router, got {block.module}")
            return read_experts(block.module, self._dtype, root=block.path, styles=block.styles)

        family, mlp = self._family, read.value(self._family.mlp)
        beside = None if family.experts is None else read.value(family.experts)
        if family.experts is not None:
            _check_flag(read, "has_experts", beside is not None)
        if beside is None:
            return mixture(family.mlp) if is_mixture(mlp) else read.mlp(family.mlp, family)
        assert family.experts is not None
        found = mixture(family.experts)
        return found if mlp is None else with_shared(found, read.mlp(family.mlp, family), mlp)

    def _input_block(self, read: ModuleReader) -> LayerInputBlock | None:
        if not (self._family.layer_inputs and hasattr(read.module, "per_layer_input_gate")):
            return None
        return LayerInputBlock(
            gate=read.projection("per_layer_input_gate"),
            projection=read.projection("per_layer_projection"),
            norm=read.norm("post_per_layer_input_norm"),
            activation=read.activation("act_fn"),
        )

    def _reads_layer(self, index: int) -> int | None:
        """The layer that has the keys and values which layer `index` reads; None: its own."""
        if not self._family.shared_caches:
            return None
        readers = [self._body.at(f"layers.{place}.self_attn") for place in range(index + 1)]
        *before, mine = (reader.module for reader in readers)
        if self._sources is not None:
            return self._sources[mine.layer_type]
        if not readers[-1].value("is_kv_shared_layer", bool):
            return None
        owners = [i for i, other in enumerate(before) if not other.is_kv_shared_layer]
        sources = [i for i in owners if before[i].layer_type == mine.layer_type]
        if not sources:
            raise UnknownLayerError(
                f"{readers[-1].path} reads the keys and values of an earlier layer of {mine.layer_type}, but no "
                "earlier layer has any"
            )
        return sources[-1]

    def _beside(self, read: ModuleReader) -> ExpertsBeside | None:
        names = self._family.experts_beside
        if names is None or not hasattr(read.module, "experts"):
            return None
        router, experts = read.value("router", nn.Module), read.value("experts", nn.Module)
        ranks, reason = ranks_of(experts), f"{read.path} has experts beside its MLP"
        block = Experts(
            RoutedExperts(router, experts if ranks is None else own_experts(experts)),
            self._config.top_k_experts,
            self._config.num_experts,
            reason=reason,
            summed_over=ranks,
        )
        return ExpertsBeside(block, *map(read.norm, names))

    def _scale(self, read: ModuleReader) -> torch.Tensor | None:
        name = self._family.layer_scale
        if name is None:
            return None
        scale = read.value(name, torch.Tensor)
        if scale.shape != (1,):
            raise UnknownLayerError(f"{read.path}.{name} must be a tensor [1], got {[*scale.shape]}")
        return scale

    def _mixer(self, read: ModuleReader, index: int) -> Mixer:
        if hasattr(read.module, "linear_attn"):
            return read_gated_delta(read.at("linear_attn"))
        for name in ("mamba", "mixer"):
            if hasattr(getattr(read.module, name, None), "A_log"):
                return read_mamba2(read.at(name))
        if hasattr(read.module, "conv"):
            return read_short_conv(read.at("conv"))
        family, config, attention = self._family, self._config, read.at(self._family.attention)
        kinds = getattr(config, "layer_types", None)
        if hasattr(attention.module, "kv_a_proj_with_mqa"):
            rotary = self._rotary_of(index, kinds)
            if family.rotary_interleave is not None:
                own = attention.value("config")
                rotary = replace(rotary, pairs=bool(getattr(own, family.rotary_interleave)))
            return read_latent_attention(attention, rotary)
        by_layer = getattr(config, "num_attention_heads_per_layer", None)
        heads = config.num_attention_heads if by_layer is None else by_layer[index]
        ignores_cap = getattr(config, "_attn_implementation", None) == "sdpa"  # as in transformers (5.17)
        slides = family.window == "all" or (kinds is not None and kinds[index] == "sliding_attention")
        return read.attention(
            self._rotary_of(index, kinds),
            num_heads=heads,
            num_kv_heads=heads // attention.value("num_key_value_groups", int),
            head_dim=attention.module.head_dim,
            scale=attention.value("scaling", (float, int)) * attention.factor(family.query_scale),
            sliding_window=getattr(config, "sliding_window", None) if slides else None,
            softcap=None if ignores_cap else _field(config, family.score_cap, None),
            reads_layer=self._reads_layer(index),
            family=family,
        )

    def _rotary_of(self, index: int, kinds: Sequence[str] | None) -> Rotary:
        """The rotary embedding of a layer. Some models have one for each kind of layer, or for each theta."""
        if self._rotary is None:
            return read_rotary(torch.empty(0, device=next(self._body.module.parameters()).device), 1.0, self._body.path)
        module = self._rotary.module
        kind = kinds[index] if kinds is not None else None
        if self._local_rotary is not None and kind == "sliding_attention":
            module = self._local_rotary
        theta = self._config.layer_rope_theta[index] if self._family.rotary_by_layer else None
        if theta and hasattr(self._body.module, "rotary_embs"):  # Granite's, one for each theta
            embeddings = self._body.value("rotary_embs", nn.ModuleList)
            module = next(each for each in embeddings if each.config.rope_parameters["rope_theta"] == theta)
        prefix = f"{kind}_" if hasattr(module, "layer_types") else ""
        rotary = self._rotaries.get((kind, theta))
        if rotary is None:
            rope_type = getattr(module, "rope_type", "default")
            rope_type = rope_type.get(kind, "default") if isinstance(rope_type, dict) else rope_type
            short = rope_type == "longrope" and short_rope_length(self._config) is not None
            if rope_type not in ROPE_TYPES and not short:
                raise UnknownLayerError(f"{self._rotary.path} must be one of {ROPE_TYPES}, got rope_type {rope_type!r}")
            read = ModuleReader(module, self._rotary.path)
            inv_freq = read.value(f"{prefix}inv_freq")
            if short:  # inv_freq are those of the last forward; transformers 4 does not move the original ones
                inv_freq = read.value("original_inv_freq", torch.Tensor).to(inv_freq.device)
            rotary = self._rotaries[kind, theta] = read_rotary(
                inv_freq,
                getattr(module, f"{prefix}attention_scaling", 1.0),
                self._rotary.path,
                pairs=self._family.rotary_pairs,
                round_tables=not self._family.rotary_in_fp32,
                round_terms=not self._family.rotary_terms_in_fp32,
                temperature=self._temperature() if self._family.query_temperature else None,
            )
        attention, rotates = self._body.at(f"layers.{index}.self_attn"), True
        if self._family.rotary_switch is not None:
            rotates = bool(attention.value(self._family.rotary_switch, (int, type(None))))
        if theta is not None:
            rotates = bool(theta)
        if self._family.rotary_in_windows:
            rotates = attention.value("sliding_window") is None or attention.value("is_sliding", bool)
        return rotary if rotates else replace(rotary, inv_freq=rotary.inv_freq[:0])

    def _temperature(self) -> tuple[float, int] | None:
        rope = self._config.rope_parameters
        beta = rope.get("llama_4_scaling_beta")
        return None if not beta else (float(beta), int(rope["original_max_position_embeddings"]))
