"""Block drafters in z-lab's layout, which vLLM and SGLang serve. Facts from vLLM's models/qwen3_dflash.py at commit
036a00d1f5 and SGLang's models/dflash.py at 003b23d738.

Both draft the chain of a block. A layer is causal if it has a sliding window; in vLLM `is_causal`, if given, decides
instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle_triton.demo import path_of
from eagle_triton.export import sglang, vllm
from eagle_triton.export.contents import ExportError, Target, dtype_name, settled_scaling
from eagle_triton.export.launch_plan import LaunchPlan
from eagle_triton.export.source import find_source
from eagle_triton.models.block_drafter import BlockDrafter, BlockDrafterConfig
from eagle_triton.models.block_loading import check_fits, is_block_drafter, load_block_drafter
from eagle_triton.models.families import text_config
from eagle_triton.models.loading import read_target_config
from eagle_triton.models.mtp import tensor_names

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "attention_bias", "block_size"),
)
DFLASH2 = {  # fields of config.json, and of a drafter
    "conv_kernel_size": "conv_taps",
    "conv_group_size": "conv_group",
    "selector_top_k": "selector_top_k",
    "selector_rank": "selector_rank",
}


@dataclass(frozen=True)
class BlockContents:
    """A block drafter independent of layouts; `tensors` have the names of `models.block_drafter`."""

    config: BlockDrafterConfig
    tensors: Mapping[str, Tensor]
    target: Target

    @property
    def windows(self) -> set[int]:
        """The sizes of its layers' sliding windows."""
        return {window for window in self.config.windows if window is not None}


def is_block(head: Any) -> bool:
    """Whether the head that `export_head` got is a block drafter."""
    if isinstance(head, (str, Path)):
        return is_block_drafter(tensor_names(path_of(head)))
    return isinstance(head, BlockDrafter)


def read_block(head: Any, target: Any) -> BlockContents:
    """A block drafter from an argument of `export_head`. Raises the same errors."""
    source = find_source(head, target)
    config = text_config(read_target_config(source.path, True) if source.model is None else source.model.config)
    found = source.head
    drafter = found if isinstance(found, BlockDrafter) else load_block_drafter(path_of(str(found)), config)
    check_fits(drafter.config, config)
    settled = replace(drafter.config, rope_scaling=settled_scaling(drafter.config))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    return BlockContents(settled, tensors, Target(source.path_for_commands, config))


def check(drafter: BlockContents, to: str, options: Mapping[str, Any]) -> None:
    """Raise ExportError for something that an engine cannot do; ValueError for options that are not read."""
    if to not in NAMES:
        raise ExportError(f"to={to!r} does not support block drafters; {' and '.join(NAMES)} do")
    for name in ("total_token", "depth", "top_k"):
        if options[name] is not None:
            raise ValueError(f"{name}={options[name]} must be left out for a block drafter, which drafts a chain")
    config, engine = drafter.config, NAMES[to]
    if (options["num_speculative_tokens"] or 1) > config.drafts:
        raise ValueError(
            f"num_speculative_tokens must be at most {config.drafts}, the drafts of a block, got "
            f"{options['num_speculative_tokens']}"
        )
    scales = {name: getattr(config, name) for name in ("embedding_scale", "logit_scale", "logit_cap")}
    changed = [f"{name}={value}" for name, value in scales.items() if value != getattr(BlockDrafterConfig, name)]
    for found, what in (
        (config.shifted, "shifted=True: its rows draft the token after their own"),
        (config.markov_head, f"markov_head={config.markov_head!r}"),
        (config.gru_size, "Domino's recurrent correction"),
        (config.own_embedding, "embed_tokens.weight; if it equals the target's, fit_block_drafter leaves it out"),
        (config.own_head, "lm_head.weight; if it equals the target's, fit_block_drafter leaves it out"),
        (not config.qk_norm, "qk_norm=False"),
        (changed, ", ".join(changed)),
        (0 in config.feature_layers, "features of the embedding (layer 0)"),
        (len(drafter.windows) > 1, f"windows of several sizes, {sorted(drafter.windows)}"),
    ):
        if found:
            raise ExportError(f"{engine}: the block drafter has {what}, which cannot be exported to it")
    causal_where_sliding = config.causal == tuple(window is not None for window in config.windows)
    if not (causal_where_sliding or (to == "vllm" and len(set(config.causal)) == 1)):
        raise ExportError(
            f"{engine}: causal={config.causal} with windows={config.windows} is not supported: causal must be True "
            f"exactly for layers with a window, or{' in vLLM' * (to != 'vllm')} the same for all layers"
        )
    if not any(family in drafter.target.family for family in vllm.EAGLE3_TARGETS):
        raise ExportError(
            f"{engine}: block drafters for a target of model_type {drafter.target.family!r} are not known to run on "
            f"it; those for {', '.join(vllm.EAGLE3_TARGETS)} are"
        )


def config(drafter: BlockContents) -> dict[str, Any]:
    """config.json, the same for both."""
    config, target = drafter.config, drafter.target.config
    second = bool(config.conv_taps or config.selector_top_k)
    own = dict(
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=[layer - 1 for layer in config.feature_layers],
    )
    fields: dict[str, Any] = dict(
        architectures=["DFlash2DraftModel" if second else "DFlashDraftModel"],
        model_type="qwen3",
        dtype=dtype_name(drafter.tensors),
        **{name: getattr(config, name) for name in SIZES},
        hidden_act="silu",
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **(config.rope_scaling or {"rope_type": "default"})},
        tie_word_embeddings=False,
        num_target_layers=target.num_hidden_layers,
        layer_types=["full_attention" if window is None else "sliding_attention" for window in config.windows],
        sliding_window=next(iter(drafter.windows), None),
        use_sliding_window=bool(drafter.windows),
        dflash_config=own | ({theirs: getattr(config, ours) for theirs, ours in DFLASH2.items()} if second else {}),
    )
    return fields | ({"is_causal": config.causal[0]} if len(set(config.causal)) == 1 else {})


def tensors(drafter: BlockContents) -> dict[str, Tensor]:
    """model.safetensors."""
    return {name.replace("_codebook.weight", "_codebook"): tensor for name, tensor in drafter.tensors.items()}


def plan(drafter: BlockContents, to: str, folder: Path, chain: int | None, ranks: int) -> LaunchPlan:
    """chain: drafts per step of vLLM; None: a block's. ranks: GPUs that share the target and the drafter."""
    config, notes = drafter.config, []
    if config.conv_taps or config.selector_top_k:
        notes.append(f"DFlash2 needs a version of {NAMES[to]} that lists DFlash2DraftModel")
    if to == "sglang":
        arguments = dict(
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=str(folder),
            speculative_num_draft_tokens=config.drafts + 1,
        )
        return sglang.launch(drafter.target, folder, arguments, ranks, tuple(notes))
    if len(set(config.windows)) > 1:
        notes.append("vLLM runs layers with and without windows only in its newer runner: VLLM_USE_V2_MODEL_RUNNER=1")
    chain = chain or config.drafts
    if chain < config.drafts and not all(config.causal):
        notes.append(
            f"vLLM shortens the block to {chain} drafts; rows of the block see each other, so all drafts differ"
        )
    speculative = dict(method="dflash", model=str(folder), num_speculative_tokens=chain)
    return vllm.launch(drafter.target, folder, speculative, ranks, tuple(notes))
