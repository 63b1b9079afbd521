"""The layout that SafeAILab/EAGLE's EaModel loads. Facts from its code at commit cb7e084."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from eagle_triton.export.contents import ExportError, HeadContents
from eagle_triton.export.flat_config import check_llama_layer, check_no_window, layer_fields
from eagle_triton.export.launch_plan import LaunchPlan
from eagle_triton.models.target import default_feature_layers

TARGETS = {True: ("llama", "qwen3"), False: ("llama", "mixtral", "qwen2", "qwen3")}  # model_types, by EAGLE-3 or not
DEFAULT_THETA = 10000.0  # the only base of its scaled rotary embeddings


def check(head: HeadContents) -> None:
    """Raise ExportError for something that SafeAILab's EaModel cannot do."""
    config, family = head.config, head.target.family
    if family not in TARGETS[head.eagle3]:
        kind = "EAGLE-3" if head.eagle3 else "EAGLE-1/2"
        raise ExportError(
            f"SafeAILab: {kind} heads for a target of model_type {family!r} are not supported; supported are those for "
            f"{', '.join(TARGETS[head.eagle3])}"
        )
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ExportError(
            f"SafeAILab: head_dim={config.head_dim} is not read by it: heads are hidden_size / num_attention_heads "
            f"({config.hidden_size // config.num_attention_heads}) wide"
        )
    _check_rope(head)
    check_no_window(head, "SafeAILab")
    if head.eagle3:
        _check_eagle3(head)


def _check_rope(head: HeadContents) -> None:
    scaling, theta = head.config.rope_scaling, head.config.rope_theta
    if scaling is None:
        return
    if scaling["rope_type"] != "linear" or not scaling["factor"] > 1:
        raise ExportError(f"SafeAILab: rope_scaling must be linear with a factor above 1 or missing, got {scaling}")
    if theta != DEFAULT_THETA:
        raise ExportError(f"SafeAILab: rope_theta must be {DEFAULT_THETA:g} beside a rope_scaling, got {theta:g}")


def _check_eagle3(head: HeadContents) -> None:
    check_llama_layer(head, "SafeAILab")
    for name in head.eagle31_fields:
        raise ExportError(f"SafeAILab: {name}=True is not read by it; vLLM reads it (to='vllm')")
    usual = default_feature_layers(head.target.config.num_hidden_layers)
    if head.feature_layers != usual:
        raise ExportError(
            f"SafeAILab: eagle_aux_hidden_state_layer_ids must be {list(usual)}, which it collects from this "
            f"target; got {list(head.feature_layers)}"
        )


def config(head: HeadContents) -> dict[str, Any]:
    """config.json."""
    fields = layer_fields(head)
    del fields["rope_parameters"]
    fields["bias"] = head.config.bias  # of fc, here
    if scaling := head.config.rope_scaling:
        fields["rope_scaling"] = dict(type=scaling["rope_type"], factor=float(scaling["factor"]))
    named = dict(architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype=head.dtype)
    config: dict[str, Any] = {**named, **fields}
    if head.eagle3:
        config["draft_vocab_size"] = head.config.draft_vocab_size
        if head.has_own_width:
            config["target_hidden_size"] = head.config.target_hidden_size
    elif head.config.qkv_bias:
        config["qkv_bias"] = True
    return config


def tensors(head: HeadContents) -> dict[str, Tensor]:
    """model.safetensors, with the names of `models.heads`."""
    return dict(head.tensors)


def plan(head: HeadContents, folder: Path, ranks: int) -> LaunchPlan:
    """It has no server, only a call in Python. ranks: 1; others were refused before."""
    arguments = dict(
        use_eagle3=head.eagle3,
        base_model_path=head.target.path,
        ea_model_path=str(folder),
        total_token=head.tree.total_token,
        depth=head.tree.depth,
        top_k=head.tree.top_k,
    )
    notes = ("SafeAILab/EAGLE has no server: its EaModel decodes one sequence", *head.notes)
    return LaunchPlan(folder, (), "eagle.model.ea_model.EaModel:from_pretrained", arguments, notes)
