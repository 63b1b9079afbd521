"""Block drafters from checkpoints, in the layouts of z-lab, SpecForge, JetSpec, DeepSpec and speculators."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.demo import BLOCKS, path_of

from .block_drafter import BlockDrafter, BlockDrafterConfig
from .head_fields import check_head_fields
from .head_loading import load_tensors, read_head
from .heads import ROPE_TYPES, rope_of, rope_type

WHAT = "block drafter"
RENAMED = (
    ("logit_head.", ""),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("midlayer.", "layers.0."),
)
UNUSED = ("rotary_emb.inv_freq", "t2d", "verifier_norm.weight", "verifier_lm_head.weight", "confidence_head.")
BIDIRECTIONAL = ("muse_glimmer_assistant",)  # model types with blocks that are not causal, also in sliding windows
DOMINO = ("domino", "causal_v5")  # checkpoints' names of its projector
READ = (  # fields of a config.json that are read here, beside sizes
    *("is_causal", "causal", "causal_head", "sliding_window", "use_sliding_window", "sliding_window_non_causal"),
    *("layer_types", "max_window_layers", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)


def is_block_drafter(names: Iterable[str]) -> bool:
    """Whether these are the names of a block drafter's tensors. It has a norm of the target's features outside its
    layers. An EAGLE head has that norm inside its layer, or none."""
    names = {_renamed(name) for name in names}
    return {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.o_proj.weight"} <= names


def load_block_drafter(path: str, target_config: Any, **hub: Any) -> BlockDrafter:
    """A block drafter of a target with this configuration, from a directory or a hub id, on the CPU.

    hub: `revision`, `token` and others of `snapshot_download`. Raises FileNotFoundError for missing files,
    ValueError for unreadable files, a drafter that does not fit the target, or an unknown computation.
    """
    raw, stored = read_head(path, **hub)
    if not is_block_drafter(stored):
        raise ValueError(f"{path!r} is not a block drafter: it lacks fc, hidden_norm, norm or layers")
    if path in map(path_of, BLOCKS) and target_config.model_type != "llama":  # demo-gdn has the demo's sizes
        raise ValueError(
            f"{WHAT} and target do not fit: {path!r} drafts for the Llama 'demo', got a {target_config.model_type}"
        )
    return _made(f"{WHAT} {path!r}", raw, stored, target_config)


def is_block_assistant(module: Any) -> bool:
    """Whether this is a block drafter of transformers, such as Muse-Glimmer's assistant."""
    known = isinstance(module, nn.Module) and type(module).__module__.startswith("transformers.models.")
    return known and is_block_drafter(name for name, _ in module.named_parameters())


def block_drafter_of(assistant: Any, target_config: Any) -> BlockDrafter:
    """A block drafter of transformers as one of ours, with the same parameters. Raises as `load_block_drafter`."""
    parameters = dict(assistant.named_parameters())
    return _made(f"{WHAT} {type(assistant).__name__}", assistant.config.to_dict(), parameters, target_config)


def _made(whose: str, raw: Mapping[str, Any], stored: Mapping[str, Tensor], target_config: Any) -> BlockDrafter:
    """The drafter with these tensors, by their stored names. whose: its name in errors."""
    tensors = {_renamed(name): tensor for name, tensor in stored.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(UNUSED)}
    config = read_block_config(raw, tensors, target_config)
    check_fits(config, target_config)
    with torch.device("meta"):
        drafter = BlockDrafter(config)
    if drafter.d2t is None:
        offsets = tensors.pop("d2t", None)
        if offsets is not None and offsets.any():
            raise ValueError(f"{WHAT}: d2t reorders a full vocabulary, which is not supported")
    elif "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
    load_tensors(whose, drafter, tensors)
    return drafter.eval()


def fit_block_drafter(drafter: BlockDrafter, target: Any) -> BlockDrafter:
    """The drafter with its target's device and dtype. It shares the target's embedding or vocabulary projection if its
    own is a copy of that."""
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    drafter = drafter.to(device=embedding.device, dtype=embedding.dtype)
    changes: dict[str, Any] = {}
    if drafter.embed_tokens is not None and torch.equal(drafter.embed_tokens.weight, embedding):
        drafter.embed_tokens, changes["own_embedding"] = None, False
    own = drafter.lm_head
    if own is not None and own.weight.shape == head.shape and torch.equal(own.weight, head.to(own.weight.dtype)):
        drafter.lm_head, changes["own_head"] = None, False
    drafter.config = replace(drafter.config, **changes)
    return drafter


def read_block_config(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target_config: Any) -> BlockDrafterConfig:
    """The configuration, from a config.json and the tensors beside it, by their names here.

    config.json counts target layers by their outputs (-1: the embedding); in speculators' layout, which has
    `speculators_model_type`, by their inputs. Raises ValueError for missing fields and for fields that ask for another
    computation.
    """
    nested = dict(raw.get("dflash_config") or {})
    config = {**(raw.get("transformer_layer_config") or {}), **raw, **nested}
    if config.get("model_type") in BIDIRECTIONAL:  # they have neither an embedding nor a head of their own
        config = {"is_causal": False, "vocab_size": target_config.vocab_size, **config}
        if window := config.get("sliding_window"):
            config["sliding_window"] = window + 1  # transformers' masks show as many tokens before a row
    _check_fields(config)
    speculators = "speculators_model_type" in raw
    markov = tensors.get("markov_head.markov_w1.weight")
    gru, projected = tensors.get("prefix_gru.weight_hh_l0"), tensors.get("embed_proj.0.weight")
    if gru is None and nested.get("projector_type") in DOMINO:
        raise ValueError(
            f"{WHAT}: projector_type {nested['projector_type']!r} needs the tensors prefix_gru and embed_proj"
        )
    # names in DeepSpec (only DSpark's drafters have a Markov head), SpecForge and speculators
    dspark = "dspark" in (nested.get("projector_type"), raw.get("speculators_model_type"))
    shifted = config.get("sample_from_anchor", "num_anchors" in config or dspark or bool(config.get("shift_label")))
    named = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    layers = config.get(named)
    if not speculators:
        if layers is None and config.get("num_target_layers"):
            layers = default_target_layers(config["num_target_layers"], config["num_hidden_layers"])
        layers = None if layers is None else [layer + 1 for layer in layers]
    needed = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
    missing = sorted(name for name in (*needed, "block_size", "mask_token_id") if config.get(name) is None)
    if missing or layers is None:
        raise ValueError(f"{WHAT}: config.json lacks {', '.join(sorted([*missing, *([] if layers else [named])]))}")
    _check_training(config, target_config)
    theta, scaling = rope_of(config)
    if rope_type(scaling) not in ROPE_TYPES:
        raise ValueError(f"{WHAT}: rope_scaling must be one of {ROPE_TYPES}, got {scaling}")
    heads = config["num_attention_heads"]
    causal, windows = _visibility(config, speculators)
    head = tensors.get("lm_head.weight")
    return BlockDrafterConfig(
        **{name: config[name] for name in needed},
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=tensors["layers.0.self_attn.q_proj.weight"].shape[0] // heads,
        draft_vocab_size=config["vocab_size"] if head is None else len(head),
        block_size=config["block_size"],
        mask_token_id=config["mask_token_id"],
        feature_layers=tuple(layers),
        causal=causal,
        windows=windows,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        shifted=bool(shifted),
        markov_head=None if markov is None else config.get("markov_head_type") or "vanilla",
        markov_rank=0 if markov is None else markov.shape[1],
        gru_size=0 if gru is None else config.get("gru_hidden_dim") or gru.shape[1],
        gru_rank=0 if gru is None else config.get("emb_dim") or (0 if projected is None else len(projected)),
        gru_start=0 if gru is None else config.get("pure_draft_prefix_len") or 0,
        conv_taps=config.get("conv_kernel_size") or 0,
        conv_group=config.get("conv_group_size") or 0,
        selector_top_k=config.get("selector_top_k") or 0,
        selector_rank=config.get("selector_rank") or 0,
        own_embedding="embed_tokens.weight" in tensors,
        own_head=head is not None,
        embedding_scale=float(config.get("input_embedding_scale") or 1.0),
        logit_scale=float(config.get("output_multiplier") or 1.0),
        logit_cap=config.get("final_logit_softcapping") or None,
    )


def default_target_layers(target_layers: int, layers: int) -> list[int]:
    """The target layers, counted by their outputs, of a checkpoint that does not name them: evenly spaced from the
    second to the third last, the choice of z-lab's, SpecForge's and JetSpec's trainers."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + index * (target_layers - 4) / (layers - 1)) for index in range(layers)]


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("candidate_selector.") and name.endswith("_codebook"):
        return f"{name}.weight"
    for old, new in RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _check_fields(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{WHAT}: hidden_act must be 'silu', got {config['hidden_act']!r}")
    if config.get("use_aux_hidden_state") is False:
        raise ValueError(f"{WHAT}: use_aux_hidden_state=False is not supported: it reads features of target layers")
    for name, supported in (("use_swa", False), ("is_neox_style", True)):
        if config.get(name) not in (None, supported):
            raise ValueError(f"{WHAT}: {name}={config[name]} is not supported")
    if (attention := config.get("attention_mode")) not in (None, "gqa", "mha"):
        raise ValueError(f"{WHAT}: attention_mode must be gqa or mha, got {attention!r}")
    check_head_fields({name: value for name, value in config.items() if name not in READ})


def check_fits(config: BlockDrafterConfig, target: Any) -> None:
    """Raise ValueError unless a block drafter fits a target with this configuration, by its sizes and layers."""
    for name in ("hidden_size", "vocab_size"):
        if (mine := getattr(config, name)) != (theirs := getattr(target, name)):
            raise ValueError(f"{WHAT} and target do not fit: {name} is {mine}, but {theirs} in the target")
    layers, count = list(config.feature_layers), target.num_hidden_layers
    if any(not 0 <= layer < count for layer in layers):
        raise ValueError(
            f"{WHAT} and target do not fit: it reads the inputs of layers {layers}, the target has {count} layers"
        )


def _check_training(config: Mapping[str, Any], target: Any) -> None:
    """Raise ValueError for a checkpoint that says that it was trained for another target."""
    for name, has in (("target_hidden_size", target.hidden_size), ("num_target_layers", target.num_hidden_layers)):
        if config.get(name) not in (None, has):
            raise ValueError(
                f"{WHAT} and target do not fit: it was trained for {name} {config[name]}, the target has {has}"
            )


def _visibility(config: Mapping[str, Any], speculators: bool) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """For each layer, whether it is causal in a block, and its window.

    is_causal, causal or causal_head decide for all layers; without them, layers with a sliding window are causal.
    """
    count = config["num_hidden_layers"]
    window, switched = config.get("sliding_window"), config.get("use_sliding_window")
    first = config.get("max_window_layers", 28) if switched and window else count  # as in transformers' Qwen3Config
    types = config.get("layer_types") or [
        "sliding_attention" if index >= first else "full_attention" for index in range(count)
    ]
    if len(types) != count or set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{WHAT}: layer_types must be full_attention or sliding_attention for each of {count} layers, got {types}"
        )
    slides = [kind == "sliding_attention" for kind in types]
    if any(slides) and (not window or switched is False):
        raise ValueError(
            f"{WHAT}: layers with sliding_attention need sliding_window, and no use_sliding_window=False, got "
            f"sliding_window={window!r}, use_sliding_window={switched!r}"
        )
    said = next((config[name] for name in ("is_causal", "causal", "causal_head") if config.get(name) is not None), None)
    if speculators:
        said = False if config.get("sliding_window_non_causal") else None
    causal = tuple(slides) if said is None else (bool(said),) * count
    return causal, tuple(window if slide else None for slide in slides)
