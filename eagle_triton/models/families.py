"""How the forward of each target family differs from Llama's, as data.

A family is a row of FAMILIES, by its `model_type`. Biases, head sizes, q/k norms, kinds of norms, score scales and
sinks are read from the modules (families/reading) instead. `check_config` refuses, by name, a configuration field that
changes a forward and is covered by neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

Norms = tuple[str | None, str | None, str | None, str | None]


def text_config(config: Any) -> Any:
    """The language model's part of a configuration; the configuration itself, unless the model also reads images."""
    return getattr(config, "text_config", config)


def short_rope_length(config: Any) -> int | None:
    """With longrope: the longest text that is rotated by the short factors. All tokens of a longer one are rotated by
    the long factors. None: the frequencies do not depend on the length. config: of the language model."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    name = "original_max_position_embeddings"  # transformers 4 has it beside the rotary parameters
    return rope.get(name) or getattr(config, name, config.max_position_embeddings)


def position_limit(config: Any) -> int | None:
    """The most tokens of a text that is decoded with one set of rotary frequencies; None if the configuration, of the
    language model, has no limit."""
    limits = getattr(config, "max_position_embeddings", None), short_rope_length(config)
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class Family:
    """Names of a layer's modules, names of configuration fields, and switches. The defaults are Llama's."""

    norms: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
    """Before and after the mixer, before and after the MLP."""
    recurrent_norms: Norms | None = None
    """The same of layers without attention, if they have others."""
    mlp: str = "mlp"
    mlp_projections: tuple[str | None, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The first is None in MLPs without a gate."""
    layer_norm: bool = False
    """The norms of layers and the last one are LayerNorms."""
    parallel: bool = False
    """The MLP reads the same normed input as attention."""
    parallel_switch: str | None = None
    """Attribute of layers: whether it does."""
    output: str = "o_proj"
    """Attention's output projection."""
    attention: str = "self_attn"
    rotary: str | None = "rotary_emb"
    """None: nothing rotates."""
    optional_rotary: bool = False
    """Without a rope_theta nothing rotates."""
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    single_blocks: bool = False
    """Each module of `layers` has one norm, and a mixer or an MLP, and all of these have the name of `attention`."""
    qkv: str | None = None
    """One projection for queries, keys and values."""
    gate_up: str | None = None
    """One projection for gate and up."""
    experts: str | None = None
    """A mixture that some layers have beside their MLP. It reads the same rows, and the outputs are added up."""
    experts_beside: tuple[str, str, str] | None = None
    """Norms of layers with `router` and `experts` beside their MLP: after the MLP, before and after the experts."""
    window: Literal["none", "by_layer", "all"] = "none"
    """The layers that see only config.sliding_window: those in layer_types, or all."""
    rotary_switch: str | None = None
    """Attribute of attention modules: whether queries and keys rotate."""
    rotary_in_windows: bool = False
    """If some layers have a window, those without one do not rotate."""
    rotary_pairs: bool = False
    """Neighbouring elements of a head rotate together, instead of elements half the rotated width apart."""
    rotary_interleave: str | None = None
    """Configuration field that says so."""
    rotary_in_fp32: bool = False
    """Cosine and sine are not rounded to the model's dtype."""
    rotary_terms_in_fp32: bool = False
    """Only the rotated values are rounded to it, and cosine and sine."""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Norms of queries and keys, if attention modules have them."""
    norm_last: bool = False
    """These norms come after the rotation."""
    rotary_by_layer: bool = False
    """config.layer_rope_theta has a number for each layer; layers with 0 do not rotate."""
    query_temperature: bool = False
    """Queries are scaled up with their positions, by rope_parameters' llama_4_scaling_beta."""
    query_scale: str | None = None
    """Attribute of attention modules: a factor for queries, beside the usual scale."""
    gate: tuple[str, str] | None = None
    """The projection that gates attention's heads, and its activation."""
    score_cap: str | None = None
    """Field of the soft cap of attention scores."""
    scaled_embedding: bool = False
    """The embedding module itself scales its output. In transformers 4 some forwards do it instead."""
    embedding_scale: str | None = None
    """Attribute of the module that has the layers: a factor for embeddings."""
    root_scaled_embedding: str | None = None
    """Field that says whether embeddings are multiplied by the root of their size."""
    normed_embedding: bool = False
    """The embedding module norms its output, by an RMSNorm `embed_norm` without a weight."""
    update_scale: str | None = None
    """Attribute of layers: a factor for the outputs of mixer and MLP before they are added to the residual stream."""
    shared_caches: bool = False
    """A layer with `is_kv_shared_layer` reads the keys and values of the last earlier layer of its kind without it."""
    layer_inputs: bool = False
    """Layers may read their own embeddings, from `embed_tokens_per_layer`."""
    layer_scale: str | None = None
    """Name of a layer's buffer [1] that multiplies the residual stream at its end."""
    logit_divisor: str | None = None
    logit_factor: str | None = None
    """Field of the factor of logits. If the model has an attribute of this name, its forward reads that."""
    logit_cap: str | None = None
    """Field of the soft cap of logits."""
    shown_by_modules: tuple[str, ...] = ()
    """Further fields that only change which modules are made."""
    recurrent: bool = False
    """Has gated delta nets, Mamba-2 or short convolutions. No EaModel then: their states cannot be cut back to an
    accepted path."""

    @property
    def config_fields(self) -> Iterator[str]:
        """Configuration fields that the row names. Modules have scales of embeddings and updates by the same names."""
        names = self.score_cap, self.embedding_scale, self.root_scaled_embedding, self.update_scale, self.query_scale
        yield from filter(None, (*names, self.logit_divisor, self.logit_factor, self.logit_cap, self.rotary_interleave))
        if self.rotary_by_layer:
            yield "layer_rope_theta"
        yield from self.shown_by_modules


LLAMA = Family()
UNGATED = (None, "up_proj", "down_proj")
SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
AFTER_BLOCKS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
EXPERTS = (
    *("num_experts_per_tok", "num_local_experts", "num_experts", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size", "router_jitter_noise"),
    *("n_shared_experts", "n_routed_experts", "routed_scaling_factor", "n_group", "topk_group"),
    *("num_shared_experts", "first_k_dense_replace", "mlp_layer_types"),
)
"""Fields of mixtures of experts. families/reading/experts.py reads their effect from the modules."""
MULTIPLIED: dict[str, Any] = dict(embedding_scale="embedding_multiplier", update_scale="residual_multiplier")
GRANITE = Family(**MULTIPLIED, logit_divisor="logits_scaling", shown_by_modules=("attention_multiplier",))
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
GLM4_MOE = Family(shown_by_modules=("use_qk_norm", *MTP_LAYERS, *EXPERTS))
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
"""Fields of multi-head latent attention."""
DEEPSEEK_V3 = Family(rotary_interleave="rope_interleave", shown_by_modules=(*MTP_LAYERS, *LATENT, *EXPERTS))
ERNIE = Family(rotary_pairs=True, rotary_in_fp32=True, shown_by_modules=("use_bias",))
GRANITE_SHARED = replace(
    GRANITE,
    mlp="shared_mlp",
    mlp_projections=("gate_proj", "up_proj", "output_linear"),
    gate_up="input_linear",
    experts="block_sparse_moe",
    shown_by_modules=(*GRANITE.shown_by_modules, "shared_intermediate_size", *EXPERTS),
)
HUNYUAN = Family(head_norms=("query_layernorm", "key_layernorm"), norm_last=True, shown_by_modules=("eod_token_id",))
EXAONE4 = Family(
    norms=AFTER_BLOCKS, window="by_layer", rotary_in_windows=True, shown_by_modules=("sliding_window_pattern",)
)
COHERE = Family(
    norms=("input_layernorm", None, None, None),
    layer_norm=True,
    parallel=True,
    rotary_pairs=True,
    rotary_terms_in_fp32=True,
    logit_factor="logit_scale",
    shown_by_modules=("layer_norm_eps",),
)
GATED_DELTA = Family(
    recurrent=True,
    shown_by_modules=(
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    ),
)

LFM2 = Family(
    norms=("operator_norm", None, "ffn_norm", None),
    mlp="feed_forward",
    mlp_projections=("w1", "w3", "w2"),
    output="out_proj",
    last_norm="embedding_norm",
    head_norms=("q_layernorm", "k_layernorm"),
    recurrent=True,
    shown_by_modules=(
        *("norm_eps", "conv_bias", "conv_L_cache", "block_multiple_of", "block_ffn_dim_multiplier"),
        *("block_auto_adjust_ff_dim", "full_attn_idxs"),
    ),
)

MAMBA2 = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand"),
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "position_embedding_type"),
    *("attn_layer_indices", "num_logits_to_keep", "z_loss_coefficient"),
    *("layers_block_type", "mlp_hidden_act", "use_mamba_kernels", "ssm_state_size", "mamba_num_heads"),
    *("mamba_head_dim", "mamba_hidden_act", "n_groups", "conv_kernel", "expand", "time_step_min", "time_step_max"),
    *("time_step_floor", "use_conv_bias", "chunk_size", "mamba_ssm_cache_dtype", "layer_norm_epsilon", "use_bias"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap", "residual_in_fp32"),
    *("mtp_layers_block_type", "hidden_dropout", "rescale_prenorm_residual"),
)
"""Fields of models with Mamba-2's layers."""

GEMMA2 = Family(
    norms=SANDWICH,
    scaled_embedding=True,
    window="by_layer",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    shown_by_modules=("query_pre_attn_scalar",),
)

GEMMA4 = Family(
    norms=SANDWICH,
    scaled_embedding=True,
    window="by_layer",
    shared_caches=True,
    layer_scale="layer_scalar",
    logit_cap="final_logit_softcapping",
    shown_by_modules=("attention_k_eq_v", "use_double_wide_mlp", "num_kv_shared_layers"),
)

BEFORE_AND_AFTER_MLP = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(window="all"),
    "qwen2": Family(window="by_layer"),
    "qwen3": Family(window="by_layer"),
    "ministral": Family(window="by_layer"),
    "ministral3": Family(window="all", query_temperature=True),
    "phi3": Family(
        window="all",
        qkv="qkv_proj",
        gate_up="gate_up_proj",
        shown_by_modules=("original_max_position_embeddings",),
    ),
    "smollm3": Family(
        window="by_layer", rotary_switch="use_rope", shown_by_modules=("no_rope_layers", "no_rope_layer_interval")
    ),
    "granite": GRANITE,
    "granite_swa": replace(GRANITE, window="by_layer", rotary_by_layer=True),
    "granitemoe": replace(GRANITE, mlp="block_sparse_moe", shown_by_modules=(*GRANITE.shown_by_modules, *EXPERTS)),
    "granitemoeshared": GRANITE_SHARED,
    "granitemoe_swa": replace(GRANITE_SHARED, window="by_layer", rotary_by_layer=True),
    "granitemoehybrid": replace(
        GRANITE_SHARED, recurrent=True, shown_by_modules=(*GRANITE_SHARED.shown_by_modules, *MAMBA2)
    ),
    "nemotron_h": Family(
        norms=("norm", None, "norm", None),
        attention="mixer",
        mlp="mixer",
        mlp_projections=UNGATED,
        rotary=None,
        embedding="embeddings",
        last_norm="norm_f",
        single_blocks=True,
        recurrent=True,
        shown_by_modules=(*MAMBA2, *MTP_LAYERS, *EXPERTS),
    ),
    "bamba": Family(
        norms=("input_layernorm", None, "pre_ff_layernorm", None),
        mlp="feed_forward",
        last_norm="final_layernorm",
        recurrent=True,
        shown_by_modules=MAMBA2,
    ),
    "hyperclovax": Family(
        **MULTIPLIED,
        logit_factor="logits_scaling",
        norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        shown_by_modules=("attention_multiplier", "use_post_norm"),
    ),
    "seed_oss": Family(shown_by_modules=("attention_out_bias",)),
    "exaone": Family(),
    "exaone4": EXAONE4,
    "exaone_moe": replace(EXAONE4, norms=Family.norms, shown_by_modules=(*EXAONE4.shown_by_modules, *EXPERTS)),
    "internlm3": Family(),
    "iquestcoder": Family(),
    "cwm": Family(window="by_layer"),
    "helium": Family(rotary_pairs=True),
    "starcoder2": Family(
        mlp_projections=(None, "c_fc", "c_proj"),
        layer_norm=True,
        window="all",
        shown_by_modules=("norm_epsilon", "use_bias", "embedding_dropout"),
    ),
    "cohere": COHERE,
    "cohere2": replace(COHERE, window="by_layer", rotary_switch="sliding_window"),
    "stablelm": Family(
        layer_norm=True,
        parallel_switch="use_parallel_residual",
        shown_by_modules=("layer_norm_eps", "use_qkv_bias", "use_parallel_residual"),
    ),
    "phi": Family(
        norms=("input_layernorm", None, None, None),
        mlp_projections=(None, "fc1", "fc2"),
        layer_norm=True,
        parallel=True,
        output="dense",
        last_norm="final_layernorm",
        shown_by_modules=("layer_norm_eps",),
    ),
    "jais2": Family(mlp_projections=UNGATED, layer_norm=True, shown_by_modules=("layer_norm_eps",)),
    "arcee": Family(mlp_projections=UNGATED),
    "apertus": Family(norms=("attention_layernorm", None, "feedforward_layernorm", None), mlp_projections=UNGATED),
    "nemotron": Family(mlp_projections=UNGATED, layer_norm=True, shown_by_modules=("norm_eps",)),
    "ernie4_5": ERNIE,
    "ernie4_5_moe": replace(
        ERNIE,
        shown_by_modules=(
            *ERNIE.shown_by_modules,
            *("moe_k", "moe_num_experts", "moe_num_shared_experts", "moe_norm_min"),
            *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", *EXPERTS),
        ),
    ),
    "glm": Family(gate_up="gate_up_proj", rotary_pairs=True),
    "glm4": Family(
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        gate_up="gate_up_proj",
        rotary_pairs=True,
    ),
    "glm4_moe": GLM4_MOE,
    "sarvam_moe": GLM4_MOE,
    "glm4_moe_lite": DEEPSEEK_V3,
    "deepseek_v2": Family(rotary_pairs=True, rotary_in_fp32=True, shown_by_modules=("topk_method", *LATENT, *EXPERTS)),
    "deepseek_v3": DEEPSEEK_V3,
    "sarvam_mla": DEEPSEEK_V3,
    "mistral4": replace(DEEPSEEK_V3, query_temperature=True, shown_by_modules=(*LATENT, *EXPERTS)),
    "youtu": replace(DEEPSEEK_V3, shown_by_modules=("embedding_initializer_range", *LATENT)),
    "dots1": Family(window="by_layer", shown_by_modules=EXPERTS),
    "solar_open": Family(shown_by_modules=EXPERTS),
    "mellum": Family(window="by_layer", shown_by_modules=(*MTP_LAYERS, *EXPERTS)),
    "olmo2": Family(norms=AFTER_BLOCKS, rotary_in_fp32=True),
    "olmo3": Family(norms=AFTER_BLOCKS, rotary_in_fp32=True, window="by_layer"),
    "olmoe": Family(shown_by_modules=EXPERTS),
    "flex_olmo": Family(norms=AFTER_BLOCKS, rotary_in_fp32=True, shown_by_modules=EXPERTS),
    "gemma": Family(scaled_embedding=True),
    "gemma2": GEMMA2,
    "vaultgemma": replace(GEMMA2, norms=("input_layernorm", None, "pre_feedforward_layernorm", None)),
    "gemma3_text": replace(
        GEMMA2,
        score_cap=None,
        shown_by_modules=("query_pre_attn_scalar", "_sliding_window_pattern", "attn_logit_softcapping"),
    ),
    "gemma4_text": replace(
        GEMMA4,
        experts_beside=(
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ),
        layer_inputs=True,
        shown_by_modules=(
            *GEMMA4.shown_by_modules,
            *("enable_moe_block", "top_k_experts", *EXPERTS),
            *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
        ),
    ),
    "gemma4_unified_text": GEMMA4,
    "qwen3_moe": Family(window="all", shown_by_modules=EXPERTS),
    "qwen2_moe": Family(window="by_layer", shown_by_modules=("qkv_bias", *EXPERTS)),
    "mixtral": Family(window="all", shown_by_modules=EXPERTS),
    "gpt_oss": Family(window="by_layer", shown_by_modules=("swiglu_alpha", "swiglu_limit", *EXPERTS)),
    "qwen2_vl_text": Family(window="by_layer"),
    "qwen2_5_vl_text": Family(window="by_layer"),
    "qwen3_vl_text": Family(),
    "qwen3_vl_moe_text": Family(shown_by_modules=EXPERTS),
    "afmoe": Family(
        norms=BEFORE_AND_AFTER_MLP,
        window="by_layer",
        rotary_switch="is_local_attention",
        gate=("gate_proj", "sigmoid"),
        root_scaled_embedding="mup_enabled",
        shown_by_modules=("num_dense_layers", "route_scale", "global_attn_every_n_layers", *EXPERTS),
    ),
    "laguna": Family(
        window="by_layer",
        gate=("g_proj", "softplus"),
        shown_by_modules=(
            *("gating", "num_attention_heads_per_layer", "moe_routed_scaling_factor"),
            *("moe_apply_router_weight_on_input", "moe_router_logit_softcapping", *EXPERTS),
        ),
    ),
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": replace(HUNYUAN, shown_by_modules=("eod_token_id", "sep_token_id", "moe_topk", *EXPERTS)),
    "minimax_m2": Family(shown_by_modules=EXPERTS),
    "hy_v3": Family(shown_by_modules=("router_scaling_factor", "enable_moe_fp32_combine", *EXPERTS)),
    "muse_glimmer_text": Family(
        norms=SANDWICH,
        window="by_layer",
        rotary_by_layer=True,
        query_scale="qk_scale_factor",
        gate=("gate_proj", "sigmoid"),
        normed_embedding=True,
        logit_factor="output_multiplier",
        logit_cap="final_logit_softcapping",
        shown_by_modules=("post_norm_eps",),
    ),
    "lfm2": LFM2,
    "lfm2_moe": replace(
        LFM2,
        rotary="pos_emb",
        shown_by_modules=(*LFM2.shown_by_modules, "num_dense_layers", "use_expert_bias", *EXPERTS),
    ),
    "lfm3": replace(
        LFM2,
        norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
        output="o_proj",
        head_norms=("q_norm", "k_norm"),
        window="by_layer",
        rotary_in_fp32=True,
        gate=("g_proj", "sigmoid"),
        shown_by_modules=(*LFM2.shown_by_modules, "use_sandwich_norm", "use_attention_gate"),
    ),
    "flint": Family(window="by_layer", rotary_switch="sliding_window", shown_by_modules=EXPERTS),
    "lara_mini": replace(
        GATED_DELTA,
        window="by_layer",
        rotary_switch="sliding_window",
        shown_by_modules=(*GATED_DELTA.shown_by_modules, *EXPERTS),
    ),
    "qwen3_next": replace(GATED_DELTA, shown_by_modules=(*GATED_DELTA.shown_by_modules, *EXPERTS)),
    "qwen3_5_text": GATED_DELTA,
    "olmo_hybrid": replace(
        GATED_DELTA,
        norms=AFTER_BLOCKS,
        recurrent_norms=LLAMA.norms,
        optional_rotary=True,
        rotary_in_fp32=True,
        shown_by_modules=(
            *GATED_DELTA.shown_by_modules,
            *("linear_allow_neg_eigval", "linear_a_log_min", "linear_a_log_max"),
            *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
        ),
    ),
    "qwen3_5_moe_text": replace(GATED_DELTA, shown_by_modules=(*GATED_DELTA.shown_by_modules, *EXPERTS)),
}
WITH_IMAGES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4"),
    *("gemma4_unified", "mistral3", "llava", "llava_next", "llava_onevision", "internvl", "muse_glimmer", "exaone4_5"),
)
"""Models that also read images. Only their language models are read, and prompts with images run the original."""

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Models that draft with the keys and values of a target."""

NEUTRAL_FIELDS = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act", "hidden_activation"),
        *("attention_bias", "mlp_bias", "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_dropout"),
        "residual_dropout",
        *("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "use_cache"),
        *("output_router_logits", "router_aux_loss_coef", "pretraining_tp", "use_bidirectional_attention"),
    }
)
"""Fields that modules show, that are checked where they are read, or that no forward reads while decoding."""


READ_OF_ALL: dict[str, tuple[bool | None, str]] = {
    "is_causal": (True, "lets tokens see later ones"),
    "attention_chunk_size": (None, "drops keys from the cache"),
    "kv_sharing_modes": (None, "lets layers share keys"),
}
"""Fields that transformers' masks and caches read of any configuration: their neutral values, and what others do."""


def family_of(config: Any) -> Family | None:
    """The row for a configuration; None for an unknown family."""
    kind = getattr(config, "model_type", None)
    language = getattr(text_config(config), "model_type", "")
    return FAMILIES.get(language) if kind == language or kind in WITH_IMAGES else None


def shares_keys(model: Any) -> bool:
    """Whether a model drafts with the keys and values of a target."""
    return getattr(getattr(model, "config", None), "model_type", None) in ASSISTANTS


def logit_cap(config: Any) -> float | None:
    """The soft cap of a target's logits; None: there is none. The forward of a Gemma 3 that reads images has none,
    whatever its language model's configuration has."""
    field = FAMILIES[text_config(config).model_type].logit_cap
    return getattr(text_config(config), field, None) if field and config.model_type != "gemma3" else None


def logit_scales(model: Any) -> tuple[float, float]:
    """The numbers that a target's logits are multiplied and divided by."""
    config = text_config(model.config)
    family = FAMILIES[config.model_type]
    name = family.logit_factor
    factor = name and getattr(model if hasattr(model, name) else config, name)
    divisor = family.logit_divisor and getattr(config, family.logit_divisor)  # Granite's forward reads no other
    return 1.0 if factor is None else float(factor), 1.0 if divisor is None else float(divisor)


def expected_families() -> str:
    """The known families, for messages."""
    names = (*FAMILIES, *WITH_IMAGES)
    recurrent = [
        name for name in names if getattr(FAMILIES.get(name, FAMILIES.get(f"{name}_text")), "recurrent", False)
    ]
    others = [name for name in names if name not in recurrent]
    return f"supported are {', '.join(others)}; and without an EAGLE head, so not in an EaModel: {', '.join(recurrent)}"


def unknown_family(config: Any) -> str:
    """Why a configuration has no row, or why it can have no head."""
    kind = getattr(config, "model_type", None)
    if (family := family_of(config)) is not None and family.recurrent:
        return f"model_type {kind!r} has no EAGLE heads: use EAGLEInference or optimize_with_triton"
    return f"model_type {kind!r} is not supported; {expected_families()}"


def check_config(config: Any, where: str) -> str | None:
    """A sentence about the first configuration field of a known family that asks for something its row does not cover;
    None if there is none. Other fields that the class does not declare are ignored: no forward reads them."""
    config = text_config(config)
    family = FAMILIES[config.model_type]
    if reason := _varied(config):
        return f"{where}.config: {config.model_type} {reason}"
    for name, (neutral, effect) in READ_OF_ALL.items():
        value, read = getattr(config, name, None), name == "kv_sharing_modes" and family.shared_caches
        if value not in (neutral, None) and not read:
            return f"{where}.config.{name} must be {neutral}: {value!r} {effect}"
    known = {*NEUTRAL_FIELDS, *family.config_fields, *fields_of_all()}
    for name, default in declared_fields(type(config)).items():
        if name not in known and getattr(config, name, default) not in (default, None, False):
            return (
                f"{where}.config.{name} is {getattr(config, name)!r}, which may change the forward of "
                f"{config.model_type} in an unknown way: set it to {default!r} if the checkpoint does not need it"
            )
    return None


def _varied(config: Any) -> str | None:
    """The differences between layers by per_layer_config (transformers 5), without those that modules show."""
    if not getattr(config, "is_heterogeneous", False):
        return None
    fields = config.per_layer_attributes - {"head_dim", "num_key_value_heads"}
    if fields or any(layer.skip for layer in config.per_layer_config):
        return f"has layers that differ in {', '.join(sorted(fields)) or 'parts that are skipped'} (per_layer_config)"
    return None


def declared_fields(config_class: type) -> dict[str, Any]:
    """The fields that a class of configurations declares, and their defaults."""
    return {
        name: None if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in inspect.signature(config_class).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def fields_of_all() -> set[str]:
    """The fields of every configuration."""
    from transformers import PretrainedConfig

    return {*declared_fields(PretrainedConfig), *vars(PretrainedConfig())}
