"""Checks for fields of a head's config.json that ask for computations that no head here does.

Some settings do not show in the weights: a norm without weights, a scale, a window. A head with such a setting would
load, and its wrong drafts would show only in low acceptance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Values of these fields that change nothing, beside None, False and 0.
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

# Switches that are read, or that change nothing or only what the weights show.
READ = (
    *("attention_bias", "bias", "mlp_bias", "norm_before_residual", "qkv_bias", "use_sliding_window"),
    *("fc_norm", "norm_before_fc", "norm_output", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
)
SWITCH = re.compile("norm|resid|rope|rotary|scal|softcap|gate|gating|window|bias")

# Families with layers that use weights of the same names and shapes differently.
OTHER_FAMILIES = ("cohere", "gemma", "glm", "gpt", "granite", "minicpm", "phi")

# Architectures with Llama's layer, whatever model_type says: trainers leave the target's there.
LLAMA_HEAD = re.compile("((eagle|eagle3)?llamaforcausallm|llamaforcausallm(eagle|eagle3))", re.IGNORECASE)


def check_head_fields(config: Mapping[str, Any]) -> None:
    """ValueError for a field that asks for something no head here does. Fields that ask for nothing may be there."""
    nested = {**(config.get("rope_parameters") or {}), **(config.get("eagle_config") or {})}
    for name, value in {**nested, **config}.items():
        neutral = value is None or value is False or value == 0 or value in SCALES.get(name, ())
        switched_on = value is True and name not in READ and SWITCH.search(name)
        if switched_on or (name in SCALES and not neutral):
            raise ValueError(
                f"draft head: {name}={value!r} in config.json is not supported, its drafts would be wrong "
                "(docs/limits.md#heads)"
            )
    family = str(config.get("model_type") or "")
    if family.startswith(OTHER_FAMILIES) and not any(map(LLAMA_HEAD.fullmatch, config.get("architectures") or ())):
        raise ValueError(
            f"draft head: a layer of model_type {family!r} is not supported, only Llama's (docs/limits.md#heads)"
        )
    _check_window(config)


def _check_window(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a sliding window: a head attends to its whole sequence."""
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings", 2048)
    slides = window is not None and config.get("use_sliding_window") is not False and window < positions
    if slides or "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError(
            f"draft head: sliding-window attention is not supported, got sliding_window={window} (docs/limits.md#heads)"
        )
