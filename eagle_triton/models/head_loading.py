"""Reads draft heads from disk or the hub, in both published layouts.

SafeAILab's layout: config fields at the top level, the EAGLE-3 layer is called `midlayer`. The layout of speculators,
vLLM and SGLang: the layer is called `layers.0`, an optional `model.` prefix, sizes in `transformer_layer_config`,
target layers in `eagle_aux_hidden_state_layer_ids`. Both are converted to the names in heads.py. Everything is checked
before anything is built.
"""

import json
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .checkpoint import fetch_from_hub
from .families import text_config
from .head_fields import check_head_fields
from .heads import EAGLE31_FIELDS, DraftConfig, DraftHead, Eagle1Head, Eagle3Head
from .loading import UNUSED, check_keys, directory_or_hub_id
from .target import default_feature_layers

TREE_FIELDS = ("total_token", "depth", "top_k", "threshold", "tree_choices")


def read_head(path: str, **hub: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(content of config.json, tensors by their published names) of a head, from a directory or a hub id.

    Weights are *.safetensors, else pytorch_model.bin. hub: `revision`, `token` and others of `snapshot_download`.
    Raises FileNotFoundError for missing files, ValueError for files that cannot be read.
    """
    directory = Path(directory_or_hub_id("draft head", path))
    if not directory.is_dir():
        patterns = ["config.json", "*.safetensors", "pytorch_model.bin"]
        directory = fetch_from_hub("draft head", str(path), patterns, hub)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"draft head: no config.json in {path!r}")
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model.bin"))
    if not files:
        raise FileNotFoundError(f"draft head: no weights (*.safetensors or pytorch_model.bin) in {path!r}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"draft head: {str(file)!r} cannot be read, truncated or not weights: {error}") from error
    return _read_json(directory / "config.json"), tensors


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"draft head: {str(file)!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"draft head: {str(file)!r} must hold an object, got {type(found).__name__}")
    return found


def read_draft_config(raw: Mapping[str, Any]) -> DraftConfig:
    """The config of a head from config.json, in either layout.

    Target layers: a top-level `eagle_aux_hidden_state_layer_ids` counts layers by their inputs, as in vLLM; inside
    `eagle_config` by their outputs, as in SGLang. The fields of EAGLE 3.1 may be in either place; those in
    `eagle_config`, where NVIDIA's heads have them, take precedence. Raises ValueError for a computation that heads here
    do not have.
    """
    config = dict(raw)
    if nested := config.pop("transformer_layer_config", None):
        if "norm_before_residual" not in config:
            raise ValueError("draft head: config.json lacks norm_before_residual, which this layout needs")
        config = {**nested, **{name: value for name, value in config.items() if value is not None}}
    check_head_fields(config)
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise ValueError("draft head: EAGLE-3 without auxiliary hidden states is not supported")
    config |= {name: eagle[name] for name in EAGLE31_FIELDS if name in eagle}
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    outputs = eagle.get("eagle_aux_hidden_state_layer_ids")
    config["feature_layers"] = inputs or (outputs and [layer + 1 for layer in outputs])
    return DraftConfig.from_dict(config)


def rename_tensors(tensors: Mapping[str, Tensor], use_eagle3: bool) -> dict[str, Tensor]:
    """Tensors by their names in heads.py, from the published names of either layout, without unused ones."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if use_eagle3 and name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        if not name.endswith(UNUSED):
            renamed[name] = tensor
    return renamed


def settle_biases(config: DraftConfig, tensors: dict[str, Tensor]) -> DraftConfig:
    """The config with the biases that the weights have. Configs name them differently, or not at all.

    In vLLM, SGLang and speculators `o_proj` has a bias if the queries have one. Heads here do not: a bias of zeros is
    removed from `tensors`.
    """
    for name in [name for name in tensors if name.endswith("o_proj.bias")]:
        if not tensors[name].any():
            del tensors[name]
    queries = any(name.endswith("q_proj.bias") for name in tensors)
    return config.replace(bias=config.bias or "fc.bias" in tensors, qkv_bias=config.qkv_bias or queries)


def load_head(path: str, use_eagle3: bool | None, target_config: Any, tree: Mapping[str, Any], **hub: Any) -> DraftHead:
    """A head that fits the target. If it has no embedding, `embed_tokens.weight` stays on the meta device.

    use_eagle3: whether it is an EAGLE-3 head; None: its weights decide. tree: keyword arguments of `DraftHead`; None
    takes the value that `save_pretrained` stored, if any. hub: see `read_head`.
    Raises FileNotFoundError and ValueError, before any weight of the target is read.
    """
    from .block_loading import is_block_drafter  # it imports this module

    target_config = text_config(target_config)
    raw, tensors = read_head(path, **hub)
    if is_block_drafter(tensors):
        raise ValueError(
            f"draft head: {path!r} is a block drafter, which is not part of an EaModel: give it as the draft of "
            "optimize_with_triton or EAGLEInference, or as --block-drafter"
        )
    if any(name.endswith("mask_hidden") for name in tensors):
        raise ValueError(
            f"draft head: {path!r} is a P-EAGLE head (it has the tensor mask_hidden), which drafts all levels in one "
            "pass. That is not supported: give an EAGLE-3 head, which drafts level by level, or a block drafter"
        )
    of_head = any("midlayer." in name or name.removeprefix("model.") == "fc.weight" for name in tensors)
    if "model.norm.weight" in tensors and not of_head:
        load = "AutoModelForCausalLM.from_pretrained"
        if raw.get("quantization_config"):  # transformers may leave its experts random
            load = "eagle_triton.models.loading.load_target"
        raise ValueError(
            f"draft head: {path!r} is a causal language model, not a head. To draft with it, load it and give it to "
            f"optimize_with_triton or EAGLEInference: draft={load}({path!r}). EAGLEInference also takes its path, by "
            f'SpeculativeConfig(method="draft_model", model={path!r})'
        )
    config = read_draft_config(raw)
    found = any(name.endswith("hidden_norm.weight") for name in tensors)  # only EAGLE-3 norms the hidden states
    if use_eagle3 is False and found:
        raise ValueError(f"draft head {path!r} is an EAGLE-3 head by its weights, got use_eagle3=False")
    if use_eagle3 and not found and not any("midlayer." in name for name in tensors):
        raise ValueError(f"draft head {path!r} is an EAGLE-1/2 head by its weights, got use_eagle3=True")
    use_eagle3 = found if use_eagle3 is None else use_eagle3
    tensors = rename_tensors(tensors, use_eagle3)
    config = settle_biases(config, tensors)
    query = tensors.get("midlayer.self_attn.q_proj.weight" if use_eagle3 else "layers.0.self_attn.q_proj.weight")
    if query is not None:  # some configs leave head_dim out or wrong; the weights decide
        config = config.replace(head_dim=query.shape[0] // config.num_attention_heads)
    if not use_eagle3:
        config = config.replace(draft_vocab_size=config.vocab_size)
    check_fit(config, target_config, use_eagle3)

    with torch.device("meta"):
        head = (Eagle3Head if use_eagle3 else Eagle1Head)(config, **resolve_tree(tree, raw.get("tree") or {}))
    head.init_tree()
    if use_eagle3:
        settle_vocabulary(config, tensors)
    borrowed = {"embed_tokens.weight"} if config.hidden_size == target_config.hidden_size else set()
    load_tensors(f"draft head {path!r}", head, tensors, borrowed)
    return head


def load_tensors(whose: str, module: nn.Module, tensors: Mapping[str, Tensor], borrowed: Collection[str] = ()) -> None:
    """Give a module on the meta device its tensors. borrowed: may be missing. whose: the module's name in errors.

    Raises ValueError for missing or unexpected tensors and for wrong shapes.
    """
    expected = module.state_dict()
    check_keys(whose, expected.keys() - tensors.keys() - set(borrowed), tensors.keys() - expected.keys())
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{whose}: by config.json and target, {name} must be {list(expected[name].shape)}, "
                f"got {list(tensor.shape)}"
            )
    module.load_state_dict(dict(tensors), strict=False, assign=True)


def fit_head(head: DraftHead, target: Any) -> DraftHead:
    """A head of `load_head` in eval mode, with its target's device and dtype. If it has no embedding, the target's
    weights are copied. Some targets (Gemma, Granite) scale their embedding; the head does not, as in other engines."""
    if head.embed_tokens.weight.is_meta:
        borrow_embedding(head, target)
    embedding = target.get_input_embeddings().weight  # has the model's dtype even if projections are FP8
    return head.to(device=embedding.device, dtype=embedding.dtype).eval()


def borrow_embedding(head: DraftHead, target: Any) -> None:
    """Give a head a whole copy of its target's embedding. If ranks share the embedding, all of them must call this."""
    shared = target.get_input_embeddings().weight.detach()
    # transformers may leave it whole even if ranks share the rest
    head.embed_tokens.weight = nn.Parameter(shared.full_tensor() if _is_spread(shared) else shared.clone())


def is_sharded(target: nn.Module) -> bool:
    """Whether ranks share a target's weights (tp_plan)."""
    return any(map(_is_spread, target.parameters()))


def _is_spread(weight: Tensor) -> bool:
    return hasattr(weight, "full_tensor")  # torch's DTensor


def resolve_tree(asked: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Tree arguments: those given, else those stored, else `DraftHead`'s defaults.

    If a size of a dynamic tree is given, a stored fixed tree is ignored.
    """
    if any(asked.get(name) is not None for name in ("total_token", "depth", "top_k")):
        stored = {**stored, "tree_choices": None}
    merged = {name: stored.get(name) if asked.get(name) is None else asked[name] for name in TREE_FIELDS}
    return {name: value for name, value in merged.items() if value is not None}


def settle_vocabulary(config: DraftConfig, tensors: dict[str, Tensor]) -> None:
    """Complete and check the vocabulary tables `d2t` and `t2d` of an EAGLE-3 checkpoint, in place.

    A full draft vocabulary has none. A missing `t2d` is computed from `d2t`. Raises ValueError for a `d2t` with tokens
    outside the target's vocabulary, or with a token twice.
    """
    offsets = tensors.get("d2t")
    if config.draft_vocab_size == config.vocab_size:
        if offsets is not None and offsets.any():
            raise ValueError("draft head: d2t reorders a full vocabulary, which is not supported")
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
    elif offsets is not None:
        ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
        if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(
                f"draft head: d2t must map draft ids to different target ids below {config.vocab_size}, "
                f"got {int(ids.min())}..{int(ids.max())}"
            )
        tensors["d2t"] = offsets.long()
        known = torch.zeros(config.vocab_size, dtype=torch.bool, device=offsets.device)
        tensors["t2d"] = known.index_fill(0, ids, True)


def check_fit(config: DraftConfig, target_config: Any, use_eagle3: bool) -> None:
    """Raise ValueError unless a head of this config fits the target: vocabulary, hidden size, feature layers."""
    target_config = text_config(target_config)
    if config.vocab_size != target_config.vocab_size:
        raise ValueError(
            f"head and target do not fit: the head's vocabulary has {config.vocab_size} tokens, "
            f"the target's {target_config.vocab_size}"
        )
    width = config.target_hidden_size if use_eagle3 else config.hidden_size
    if width != target_config.hidden_size:
        raise ValueError(
            f"head and target do not fit: the head expects hidden size {width}, "
            f"the target has {target_config.hidden_size}"
        )
    if use_eagle3:
        if config.num_hidden_layers != 1:
            raise ValueError(f"draft head: EAGLE-3 heads have one layer, got {config.num_hidden_layers}")
        layers = config.feature_layers or default_feature_layers(target_config.num_hidden_layers)
        if any(not 0 <= layer < target_config.num_hidden_layers for layer in layers):
            raise ValueError(
                f"head and target do not fit: the head sees layers {list(layers)}, "
                f"the target has {target_config.num_hidden_layers}"
            )
        if len(layers) * config.target_hidden_size == config.hidden_size:
            raise ValueError("draft head: target features and hidden states must differ in width, to be told apart")
