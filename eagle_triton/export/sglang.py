"""SGLang: one folder that its server takes as the draft model. Facts from the code of SGLang 0.5.13."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_triton.export.contents import EMBEDDING, ExportError, HeadContents, Target
from eagle_triton.export.flat_config import (
    EAGLE3,
    check_activation,
    check_layers_in_order,
    check_llama_layer,
    check_no_window,
    flat_config,
    layer_tensors,
    unread_fields_note,
)
from eagle_triton.export.launch_plan import LaunchPlan, flags

EAGLE1 = "LlamaForCausalLMEagle"
EAGLE3_TARGETS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")  # model_types
BACKENDS = "trees need pages of one token, or one of SGLang's attention backends fa3, flashinfer and triton"


def check(head: HeadContents) -> None:
    """Raise ExportError for something that SGLang cannot do."""
    check_no_window(head, "SGLang")
    check_activation(head, "SGLang")
    if EMBEDDING in head.tensors and not head.has_own_width:
        raise ExportError(
            f"SGLang: {EMBEDDING} differs from the target's, but SGLang gives every head of the target's width the "
            "target's; vLLM keeps it (to='vllm')"
        )
    if not head.eagle3:
        return
    if head.target.family not in EAGLE3_TARGETS:
        raise ExportError(
            f"SGLang: EAGLE-3 heads for a target of model_type {head.target.family!r} are not known to run on it; "
            f"those for {', '.join(EAGLE3_TARGETS)} are"
        )
    check_layers_in_order(head, "SGLang")
    if 0 in head.feature_layers:
        raise ExportError(
            f"SGLang: eagle_aux_hidden_state_layer_ids={list(head.feature_layers)} begin with the embedding (0), which "
            "it cannot pass on; vLLM can (to='vllm')"
        )
    check_llama_layer(head, "SGLang")


def config(head: HeadContents) -> dict[str, Any]:
    """config.json."""
    return flat_config(head, EAGLE3 if head.eagle3 else EAGLE1)


def tensors(head: HeadContents) -> dict[str, Tensor]:
    """model.safetensors. An EAGLE-1 head's fc has a bias in SGLang, which would be random without a tensor."""
    named = layer_tensors(head)
    if not head.eagle3 and "fc.bias" not in named:
        named["fc.bias"] = torch.zeros(head.config.hidden_size, dtype=named["fc.weight"].dtype)
    return named


def plan(head: HeadContents, folder: Path, ranks: int) -> LaunchPlan:
    """ranks: GPUs that share the target and the head."""
    speculative = dict(
        speculative_algorithm="EAGLE3" if head.eagle3 else "EAGLE",
        speculative_draft_model_path=str(folder),
        speculative_num_steps=head.tree.levels,
        speculative_eagle_topk=head.tree.top_k,
        speculative_num_draft_tokens=head.tree.total_token,
    )
    unread = unread_fields_note(head, "SGLang", "0.5.13", ("fc_norm", "norm_output"))
    notes = (*((BACKENDS,) if head.tree.top_k > 1 else ()), *unread, *head.notes)
    return launch(head.target, folder, speculative, ranks, notes)


def launch(
    target: Target, folder: Path, speculative: Mapping[str, Any], ranks: int, notes: tuple[str, ...]
) -> LaunchPlan:
    """A server of the target that drafts by speculative arguments; ranks: as in `plan`."""
    shared = dict(tp_size=ranks) if ranks > 1 else {}
    arguments: dict[str, Any] = dict(model_path=target.path, **shared, **speculative)
    command = ("python", "-m", "sglang.launch_server", *flags(arguments))
    return LaunchPlan(folder, command, "sglang.Engine", arguments, notes)
