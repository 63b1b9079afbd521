"""The layout that vLLM and SGLang both read: all fields at the top level of config.json, the layers called `layers.N`.

Fields that they read (vLLM 0.20.2, SGLang 0.5.13): vLLM `eagle_aux_hidden_state_layer_ids` at the top level, layers by
their input, and norm_before_residual; SGLang those in `eagle_config`, layers by their output. Both make biases in
attention if `attention_bias` or `bias` is true, in `o_proj` too. Of the fields of EAGLE 3.1 vLLM reads norm_before_fc,
SGLang fc_norm and norm_output; later versions of both read all three, at the top level.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from eagle_triton.export.contents import ExportError, HeadContents

EAGLE3 = "LlamaForCausalLMEagle3"  # a name that both engines know
LAYER_FIELDS = (  # fields with the same names in a DraftConfig
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_scaling"),
)


def flat_config(head: HeadContents, architecture: str) -> dict[str, Any]:
    """config.json of a head. architecture: the class that reads it."""
    sizes = layer_fields(head)
    config: dict[str, Any] = dict(architectures=[architecture], model_type="llama", dtype=head.dtype, **sizes)
    if head.eagle3:
        layers = list(head.feature_layers)
        config |= dict(
            draft_vocab_size=head.config.draft_vocab_size,
            norm_before_residual=head.config.norm_before_residual,
            **head.eagle31_fields,
            eagle_aux_hidden_state_layer_ids=layers,
            eagle_config=dict(
                use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=[layer - 1 for layer in layers]
            ),
        )
        if head.has_own_width:  # a field that must be a number if it is present
            config["target_hidden_size"] = head.config.target_hidden_size
    return config


def unread_fields_note(head: HeadContents, engine: str, version: str, read: Collection[str]) -> tuple[str, ...]:
    """A note on the fields of EAGLE 3.1 that a version of an engine would ignore. read: those that it reads."""
    unread = [name for name in head.eagle31_fields if name not in read]
    if not unread:
        return ()
    return (f"{engine} {version} ignores {' and '.join(unread)}: use a later version",)


def layer_fields(head: HeadContents) -> dict[str, Any]:
    """Sizes, positions and switches of a Llama layer, by transformers' names before and since its version 5."""
    config, sliding = head.config, {}
    if config.sliding_window is not None:
        kinds = ["sliding_attention"] * config.num_hidden_layers
        sliding = dict(sliding_window=config.sliding_window, use_sliding_window=True, layer_types=kinds)
    return {name: getattr(config, name) for name in LAYER_FIELDS} | dict(
        **sliding,
        rope_parameters={"rope_theta": config.rope_theta, **(config.rope_scaling or {"rope_type": "default"})},
        attention_bias=config.qkv_bias,
        bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    )


def layer_tensors(head: HeadContents) -> dict[str, Tensor]:
    """The tensors with layers called `layers.N`, and zeros for biases in `o_proj`, which heads here do not have."""
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}
    if head.config.qkv_bias:
        for name in [name for name in tensors if name.endswith("o_proj.weight")]:
            weight = tensors[name]
            tensors[name.replace("weight", "bias")] = torch.zeros(weight.shape[0], dtype=weight.dtype)
    return tensors


def check_no_window(head: HeadContents, engine: str) -> None:
    """Raise ExportError for a head with a sliding window, if the engine's heads attend to all tokens."""
    if head.config.sliding_window is not None:
        raise ExportError(
            f"{engine}: sliding_window={head.config.sliding_window} is not read by it: its heads attend to all tokens. "
            "vLLM reads it (to='vllm')"
        )


def check_activation(head: HeadContents, engine: str) -> None:
    """Raise ExportError for a head with another activation than SiLU, if the engine's heads have only that."""
    if head.config.hidden_act != "silu":
        raise ExportError(
            f"{engine}: hidden_act={head.config.hidden_act!r} is not supported: its heads have 'silu'. SafeAILab's "
            "EaModel has others (to='safeailab')"
        )


def check_llama_layer(head: HeadContents, engine: str) -> None:
    """Raise ExportError for an EAGLE-3 layer of another kind than the engine's."""
    if head.config.norm_before_residual:
        raise ExportError(f"{engine}: norm_before_residual=True is not read by it; vLLM reads it (to='vllm')")
    if head.config.qkv_bias:
        raise ExportError(
            f"{engine}: midlayer.self_attn.q_proj.bias would be left out: its EAGLE-3 layer has no biases; vLLM's has "
            "(to='vllm')"
        )


def check_layers_in_order(head: HeadContents, engine: str) -> None:
    """Raise ExportError for feature layers that an engine, which collects them as it runs, would reorder."""
    layers = head.feature_layers
    if list(layers) != sorted(set(layers)):
        raise ExportError(
            f"{engine}: eagle_aux_hidden_state_layer_ids must be ascending, because it passes features on in the order "
            f"of the layers; got {list(layers)}"
        )
