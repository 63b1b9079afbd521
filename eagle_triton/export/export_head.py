"""Reads a head, checks it for an engine, writes it in the engine's layout, and returns how to serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from eagle_triton.export import block_drafter, safeailab, sglang, speculators, vllm
from eagle_triton.export.block_drafter import BlockContents
from eagle_triton.export.contents import ExportError, HeadContents, read_contents
from eagle_triton.export.engines import ENGINES, METHODS_FOR_OPTION
from eagle_triton.export.folder import free_folder, made_whole
from eagle_triton.export.launch_plan import LaunchPlan
from eagle_triton.values import check_choice, check_range, checked_integer

LAYOUTS: dict[str, ModuleType] = dict(vllm=vllm, sglang=sglang, speculators=speculators, safeailab=safeailab)
"""Each has check, config, tensors and plan for a head."""

_UNSET = {"tensor_parallel_size": 1}  # and None the others
_MIN = {"total_token": 2}


def export_head(
    head: Any,
    to: str,
    path: str | Path,
    target: Any = None,
    *,
    total_token: int | None = None,
    depth: int | None = None,
    top_k: int | None = None,
    num_speculative_tokens: int | None = None,
    tensor_parallel_size: int = 1,
) -> LaunchPlan:
    """Write a draft head or a block drafter in the layout of an engine. Returns how to serve it.

    head: an EaModel, a draft head, a block drafter, or a directory or hub id of one in any layout that this package
    reads; "demo" and directories that `EaModel.save_pretrained` wrote include the target. to: "vllm", "sglang", and for
    heads "speculators" or "safeailab". path: a directory that does not exist yet, or is empty; it gets config.json and
    model.safetensors. target: directory or hub id of the model that the head drafts for; for a head in memory it may be
    the model itself; None: the one beside `head`.

    total_token, depth, top_k: the tree, as in `EaModel.from_pretrained`, without total_token=-1; None: the head's own.
    SGLang drafts that tree. vLLM drafts only chains: as deep as the tree, or of num_speculative_tokens drafts per step.
    A block drafter drafts the chain of its block in both, and takes no tree. tensor_parallel_size: GPUs that share
    target and head.

    Tensors keep their dtype and their bits. The target's embedding is left out: engines take it from the target.
    `max_position_embeddings` is raised to the target's.

    Raises ExportError, a ValueError, with what the engine cannot do; ValueError, TypeError and FileNotFoundError like
    loading, and FileExistsError for a directory that is not empty. Nothing is written then.
    """
    tree = dict(total_token=total_token, depth=depth, top_k=top_k)
    options = dict(num_speculative_tokens=num_speculative_tokens, tensor_parallel_size=tensor_parallel_size)
    check_options(to, {**tree, **options})
    folder = free_folder(path)
    if block_drafter.is_block(head):
        drafter = block_drafter.read_block(head, target)
        block_drafter.check(drafter, to, {**tree, **options})
        _check_ranks(drafter, tensor_parallel_size)
        plan = block_drafter.plan(drafter, to, folder, num_speculative_tokens, tensor_parallel_size)
        _write(folder, block_drafter.config(drafter), block_drafter.tensors(drafter))
        return plan
    contents, layout = read_contents(head, target, tree, num_speculative_tokens), LAYOUTS[to]
    _check_ranks(contents, tensor_parallel_size)
    layout.check(contents)
    plan = layout.plan(contents, folder, tensor_parallel_size)
    if to == "vllm":
        plan = replace(plan, notes=(*plan.notes, *_for_sglang(contents)))
    _write(folder, layout.config(contents), layout.tensors(contents))
    return plan


def check_options(to: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown engine, an option that it does not read, or one out of range; TypeError for
    anything but an int. options: the names in METHODS_FOR_OPTION, and depth, which all read."""
    check_choice("to", to, ENGINES)
    for name, value in options.items():
        unset, readers = _UNSET.get(name), METHODS_FOR_OPTION.get(name, ENGINES)
        if value is None and unset is None:
            continue
        checked_integer(name, value)
        if to not in readers and value != unset:
            raise ValueError(f"{name}={value} is not read by {to}, but by {', '.join(readers)}")
        check_range(name, value, _MIN.get(name, 1))
    if options["depth"] is not None and options["num_speculative_tokens"] is not None:
        raise ValueError("depth and num_speculative_tokens must not both be given: each sets the length of a chain")


def _check_ranks(head: HeadContents | BlockContents, ranks: int) -> None:
    """Raise ExportError unless engines can divide the layers of both models by this number of GPUs."""
    for owner, config in (("head", head.config), ("target", head.target.config)):
        for name in ("num_attention_heads", "intermediate_size"):
            if (size := getattr(config, name)) % ranks:
                raise ExportError(f"tensor_parallel_size={ranks} must divide the {owner}'s {name}, which is {size}")
        keys = config.num_key_value_heads
        if keys % ranks and ranks % keys:
            raise ExportError(
                f"tensor_parallel_size={ranks} must divide the {owner}'s num_key_value_heads, or be a multiple of it, "
                f"which is {keys}"
            )


def _for_sglang(head: HeadContents) -> tuple[str, ...]:
    """Whether SGLang serves a folder that was written for vLLM."""
    if not head.eagle3:
        return ()
    try:
        sglang.check(head)
    except ExportError as error:
        return (f"SGLang does not serve this folder: {error}",)
    return ("SGLang serves the same folder: its layout is the same",)


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    with made_whole(folder) as beside:
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
