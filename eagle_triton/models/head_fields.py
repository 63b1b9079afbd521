"""Checks for fields of a head's config.json that ask for computations that heads here do not have.

Some settings do not show in the weights: a norm without weights, a scale, a window. A head with such a setting would
load, and its wrong drafts would show only in low acceptance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Values of these fields that change nothing, besides None, False and 0.
SCALES = {
    "attention_multiplier": (),  # replaces 1 / sqrt(d)
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "partial_rotary_factor": (1,),
    "query_pre_attn_scalar": (),  # replaces d in 1 / sqrt(d)
    "residual_multiplier": (1,),
    "scale_emb": (1,),
}

# Switches that are read elsewhere, that change nothing, or that the weights show.
READ = (
    *("attention_bias", "bias", "mlp_bias", "norm_before_residual", "qkv_bias", "use_sliding_window"),
    *("fc_norm", "norm_before_fc", "norm_output", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
)
SWITCH = re.compile("norm|resid|rope|rotary|scal|softcap|gate|gating|window|bias")

# How layers of these families use weights with the same names and shapes as Llama's. Other families' layers differ in
# their weights, which loading compares by name and shape (Phi's packed projections, the experts of gpt-oss).
OTHER_FAMILIES = {
    "cohere": "norms that subtract the mean",
    "gemma": "norms by 1 + weight",
    "glm": "rotation of a part of each head",
    "granite": "scores that are not divided by sqrt(head_dim)",
    "minicpm": "scaled residuals",
}

# Architectures with Llama's layer. Their model_type is often the target's, which trainers leave there.
LLAMA_HEAD = re.compile("(eagle3?)?llama(forcausallm|eagle3draftmodel)|llamaforcausallmeagle3?", re.IGNORECASE)


def check_head_fields(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that asks for a computation that heads here do not have."""
    rope = config.get("rope_parameters") or {}
    if kinds := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"draft head: rope_parameters in config.json must be for the head's own layer, got some for each of {kinds}"
        )
    nested = {**rope, **(config.get("eagle_config") or {})}
    for name, value in {**nested, **config}.items():
        neutral = value is None or value is False or value == 0 or value in SCALES.get(name, ())
        switched_on = value is True and name not in READ and SWITCH.search(name)
        if switched_on or (name in SCALES and not neutral):
            raise ValueError(
                f"draft head: {name}={value!r} in config.json is not supported, its drafts would be wrong "
                "(docs/limits.md#heads)"
            )
    family, architectures = str(config.get("model_type") or ""), config.get("architectures") or ()
    difference = next((what for name, what in OTHER_FAMILIES.items() if family.startswith(name)), None)
    if difference is not None and not any(map(LLAMA_HEAD.fullmatch, architectures)):
        raise ValueError(
            f"draft head: model_type {family!r} in config.json is for a layer with {difference}, and only Llama's is "
            f"supported: set it to 'llama' if the head has Llama's layer; got architectures {list(architectures)} "
            "(docs/limits.md#heads)"
        )


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """The number of tokens, itself and those right before it, that each token sees in a head's layers; None: all.

    config: the content of config.json. Its `layer_types` decide whether layers slide, as in speculators and vLLM.
    Raises ValueError for layers of different kinds, for a window without its size, and for one without `layer_types`,
    which some programs would use and others not.
    """
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings") or 2048
    kinds = (config.get("layer_types") or ())[: config.get("num_hidden_layers") or 1]
    if len(set(kinds)) > 1 or not {"sliding_attention", "full_attention"}.issuperset(kinds):
        raise ValueError(
            "draft head: layer_types in config.json must be all 'full_attention' or all 'sliding_attention', got "
            f"{list(kinds)} (docs/limits.md#heads)"
        )
    slides, wanted = "sliding_attention" in kinds, config.get("use_sliding_window") is not False
    if slides and not (wanted and isinstance(window, int) and window > 0):
        raise ValueError(
            "draft head: layer_types in config.json is sliding_attention, so sliding_window must be a number of tokens "
            f"and use_sliding_window not false, got {window} and {config.get('use_sliding_window')}"
        )
    if not kinds and wanted and window is not None and window < positions:
        raise ValueError(
            f"draft head: sliding_window={window} in config.json is ambiguous: set layer_types to "
            "['sliding_attention'] or ['full_attention'], as the head was trained"
        )
    return window if slides else None
