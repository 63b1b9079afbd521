"""vLLM: one folder that `vllm serve` takes as the model of its speculative config. Facts from vLLM 0.20.2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle_triton.export.contents import ExportError, HeadContents, Target
from eagle_triton.export.flat_config import (
    EAGLE3,
    check_activation,
    check_layers_in_order,
    flat_config,
    layer_tensors,
    unread_fields_note,
)
from eagle_triton.export.launch_plan import LaunchPlan, flags

EAGLE1 = "EagleLlamaForCausalLM"
FEATURES = 3  # width of `fc`, in target layers
EAGLE3_TARGETS = ("llama", "qwen", "gpt_oss")  # parts of model_type, of the families that are targets here
CHAIN = "vLLM drafts a chain of {} tokens per step, not a tree of {} nodes: another number of drafts is accepted"


def check(head: HeadContents) -> None:
    """Raise ExportError for something that vLLM cannot do."""
    if "fc.bias" in head.tensors:
        raise ExportError("vLLM: fc.bias is not zero, but its EAGLE-1 heads have none; SGLang's have one (to='sglang')")
    if head.eagle3:
        check_eagle3(head)
        return
    check_activation(head, "vLLM")
    if head.config.sliding_window is not None:
        raise ExportError(
            f"vLLM: sliding_window={head.config.sliding_window} is only read for EAGLE-3 heads, and this is an "
            "EAGLE-1/2 head"
        )


def check_eagle3(head: HeadContents) -> None:
    """Raise ExportError for an EAGLE-3 head that vLLM cannot run, in any layout."""
    check_activation(head, "vLLM")
    check_layers_in_order(head, "vLLM")
    if len(head.feature_layers) != FEATURES:
        raise ExportError(
            f"vLLM: eagle_aux_hidden_state_layer_ids must name {FEATURES} layers, the features that its fc takes; got "
            f"{list(head.feature_layers)}"
        )
    if not any(family in head.target.family for family in EAGLE3_TARGETS):
        raise ExportError(f"vLLM: EAGLE-3 heads for a target of model_type {head.target.family!r} are not supported")


def config(head: HeadContents) -> dict[str, Any]:
    """config.json. An EAGLE-1 head's has qkv_bias, so that `o_proj` has no bias."""
    if head.eagle3:
        return flat_config(head, EAGLE3)
    return {**flat_config(head, EAGLE1), "attention_bias": False, "qkv_bias": head.config.qkv_bias}


def tensors(head: HeadContents) -> dict[str, Tensor]:
    """model.safetensors."""
    named = layer_tensors(head)
    return named if head.eagle3 else {name: value for name, value in named.items() if not name.endswith("o_proj.bias")}


def plan(head: HeadContents, folder: Path, ranks: int) -> LaunchPlan:
    """ranks: GPUs that share the target, and the head with it."""
    method = "eagle3" if head.eagle3 else "eagle"
    speculative = dict(method=method, model=str(folder), num_speculative_tokens=head.chain)
    return launch(head.target, folder, speculative, ranks, chain_notes(head))


def launch(
    target: Target, folder: Path, speculative: Mapping[str, Any], ranks: int, notes: tuple[str, ...]
) -> LaunchPlan:
    """A server of the target that drafts by a speculative config; ranks: as in `plan`."""
    shared: dict[str, Any] = {}
    if ranks > 1:
        shared["tensor_parallel_size"] = ranks
        speculative = {**speculative, "draft_tensor_parallel_size": ranks}
    return LaunchPlan(
        folder,
        ("vllm", "serve", target.path, *flags({**shared, "speculative_config": speculative})),
        "vllm.LLM",
        dict(model=target.path, **shared, speculative_config=speculative),
        notes,
    )


def chain_notes(head: HeadContents) -> tuple[str, ...]:
    """Notes on what vLLM does differently."""
    tree, chain = head.tree, head.chain
    told = CHAIN.format(chain, tree.total_token)
    branches = tree.total_token > tree.levels + 1
    unread = unread_fields_note(head, "vLLM", "0.20.2", ("norm_before_fc",))
    return (*((told,) if branches or chain != tree.levels else ()), *unread, *head.notes)
