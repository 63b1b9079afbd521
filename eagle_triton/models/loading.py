"""Reading targets and draft heads from disk or the hub, in every layout in which people publish them.

Heads come in two layouts. SafeAILab's: config fields at the top level, the EAGLE-3 layer called `midlayer`. That of
speculators, vLLM and SGLang: the layer called `layers.0`, an optional `model.` prefix, the sizes in
`transformer_layer_config`, target layers named by `eagle_aux_hidden_state_layer_ids`. Both become the names of
`heads`. Everything is checked before anything is built.
"""

import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from eagle_triton.demo import path_of

from .head_fields import check_head_fields
from .heads import DraftConfig, DraftHead, Eagle1Head, Eagle3Head
from .mtp import INDEX, mtp_names
from .target import SUPPORTED, check_architecture, default_feature_layers

TARGET_FOLDER = "target"
HEAD_FOLDERS = {True: "eagle3", False: "eagle1"}  # by use_eagle3
TREE_FIELDS = ("total_token", "depth", "top_k", "threshold", "tree_choices")

EMBEDDING = "model.embed_tokens.weight"  # of every target here

HUB = ("token", "cache_dir", "local_files_only", "force_download")  # how to reach the hub, whatever is fetched
OF_A_REPOSITORY = ("revision", "code_revision", "subfolder", "trust_remote_code", "proxies")  # for the target's alone

# Tensors that some exporters add and no head uses: the target's own, for training, and constants.
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


def locate(
    base_model_path: str,
    ea_model_path: str | None,
    use_eagle3: bool | None,
    names: tuple[str, str] = ("base_model_path", "ea_model_path"),
) -> tuple[str, str, bool | None]:
    """Where target and head are: (target path or hub id, head path or hub id, whether it is an EAGLE-3 head; None: its
    weights tell, and of two in one directory it is the one).

    `base_model_path` alone is "demo" or a directory with the subfolders that `save_pretrained` writes; if it holds
    one head only, that one is taken. With another head it may be one, too: the target in it is meant. names: what the
    caller's users call the two. Raises ValueError or FileNotFoundError.
    """
    if ea_model_path is not None:
        places = (
            directory_or_hub_id(names[0], saved_target(base_model_path)),
            directory_or_hub_id(names[1], path_of(ea_model_path, HEAD_FOLDERS[use_eagle3 is not False])),
        )
        return *places, use_eagle3
    root = Path(directory_or_hub_id(names[0], path_of(base_model_path)))
    heads = [kind for kind, folder in HEAD_FOLDERS.items() if (root / folder / "config.json").is_file()]
    if not heads or not (root / TARGET_FOLDER / "config.json").is_file():
        raise _without_head(root, names[1])
    kind = use_eagle3 if use_eagle3 in heads else heads[0]
    return str(root / TARGET_FOLDER), str(root / HEAD_FOLDERS[kind]), kind


def directory_or_hub_id(name: str, path: str | Path) -> str:
    """A directory, or what may be a hub id. Raises FileNotFoundError for a path that does not exist, ValueError for a
    file."""
    text, place = str(path), Path(path).expanduser()
    if place.is_dir():
        return str(place)
    if place.exists():
        raise ValueError(f"{name}: expected a directory or a hub id, {text!r} is a file")
    nested = os.sep in text or "/" in text
    if text.startswith((".", "~")) or place.anchor or (nested and place.parent.is_dir()):
        raise FileNotFoundError(f"{name}: {text!r} does not exist")
    return text


def is_saved_pair(path: str | Path) -> bool:
    """Whether a path is "demo", or a directory with what `save_pretrained` writes: a target, and heads beside it."""
    root = Path(path_of(path)).expanduser()
    places = [root / folder / "config.json" for folder in (TARGET_FOLDER, *HEAD_FOLDERS.values())]
    return places[0].is_file() and any(place.is_file() for place in places[1:])


def saved_target(path: str | Path) -> str:
    """The target in a directory that `save_pretrained` has written; any other path, or hub id, as it is.

    Models of this package may be given by their names.
    """
    place = Path(path_of(path)).expanduser() / TARGET_FOLDER
    return str(place) if (place / "config.json").is_file() else path_of(path)


def _without_head(root: Path, name: str) -> Exception:
    """What to raise for a target that comes alone: for what it is, if no head could help it."""
    if not root.is_dir():
        return FileNotFoundError(
            f"{name}: needed, because {root.as_posix()!r} is no directory here, and as a hub id it names a "
            "target without a head: pass the directory or hub id of the EAGLE head too"
        )
    if (root / "config.json").is_file():
        read_target_config(str(root))
    return FileNotFoundError(
        f"{name}: needed, because {str(root)!r} does not hold both a target and a head (subfolders "
        f"{TARGET_FOLDER!r} and {' or '.join(HEAD_FOLDERS.values())})"
    )


@dataclass(frozen=True)
class HubArguments:
    """Keyword arguments with which the target's files (configuration, tokenizer) and the head's are fetched."""

    target: dict[str, Any]
    head: dict[str, Any]

    @staticmethod
    def of(target_path: str, head_path: str, ea_revision: str | None, given: Mapping[str, Any]) -> "HubArguments":
        """From the keyword arguments of `EaModel.from_pretrained`, which says what they mean.

        Raises ValueError for the revision of a local directory.
        """
        revision = given.get("revision")
        if ea_revision is None and head_path == target_path:
            ea_revision = revision
        for name, value, path in (("revision", revision, target_path), ("ea_revision", ea_revision, head_path)):
            if value is not None and Path(path).is_dir():
                raise ValueError(f"{name}: {path!r} is a local directory, which has no revisions; got {value!r}")
        target = {name: given[name] for name in (*HUB, *OF_A_REPOSITORY) if name in given}
        head = {name: given[name] for name in HUB if name in given}
        return HubArguments(target, head if ea_revision is None else {**head, "revision": ea_revision})


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no load reports from transformers inside; its settings come back after."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# --- the target ---


def read_target_config(path: str, hybrids: bool = False, whose: str = "target", **hub: Any) -> Any:
    """The target's config; `hub`: where in it, and how to reach the hub, as transformers takes it.

    hybrids, whose: see check_architecture.
    Raises FileNotFoundError without a config.json, ValueError for an unknown architecture.
    """
    path = directory_or_hub_id(whose, path)
    if Path(path).is_dir() and not (Path(path) / hub.get("subfolder", "") / "config.json").is_file():
        raise FileNotFoundError(f"{whose}: no config.json in {path!r}")
    try:
        config = AutoConfig.from_pretrained(path, **hub)
    except (ValueError, KeyError) as error:
        _check_no_head(f"{whose} {path!r}", _stored_names(path))
        raise ValueError(f"{whose} {path!r}: expected one of {', '.join(SUPPORTED)}: {error}") from error
    except OSError as error:
        raise FileNotFoundError(f"{whose} {path!r}: {error}") from error
    check_architecture(config, hybrids, whose)
    return config


def load_target(path: str, hybrids: bool = False, whose: str = "target", **kwargs: Any) -> nn.Module:
    """The target in eval mode, fp32 unless `dtype` (or `torch_dtype`) says otherwise; kwargs go to transformers.
    hybrids, whose: see check_architecture.

    Raises FileNotFoundError for missing files, ValueError for a draft head, for files that cannot be read, lack weights
    or have them of other shapes than config.json says, and for a `tp_plan` that is none, or without processes to spread
    the target over.
    """
    if kwargs.get("tp_plan") is not None:
        _check_plan(kwargs["tp_plan"])
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or torch.float32
    kwargs.pop("torch_dtype", None)
    kwargs["dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"] = dtype
    named = f"{whose} {path!r}"
    try:
        model, info = _read_target(path, kwargs)
    except (SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{named}: the weights cannot be read: {error}") from error
    except OSError as error:
        raise FileNotFoundError(f"{named}: {error}") from error
    except ValueError as error:  # of transformers 4, which takes a head's names for damage
        _check_no_head(named, _stored_names(path))
        raise ValueError(f"{named}: {error}") from error
    check_architecture(model.config, hybrids, whose)
    unexpected = set(info["unexpected_keys"])
    _check_no_head(named, unexpected)
    if not kwargs.get("ignore_mismatched_sizes"):
        _check_shapes(named, model, info["mismatched_keys"])
    check_keys(named, info["missing_keys"], unexpected - mtp_names(unexpected))
    return _in_one_dtype(model, dtype).eval()


def _read_target(path: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers says of its tensors; those whose shapes do not fit are among that."""
    try:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    except RuntimeError as error:
        if not re.search("size mismatch|ignore_mismatched_sizes", str(error)):
            raise
    return _read_target(path, {**options, "ignore_mismatched_sizes": True})


def _check_shapes(named: str, model: nn.Module, mismatched: Iterable[Any]) -> None:
    """ValueError naming a tensor that does not fit; transformers 4 does not say what shape it has."""
    for found in sorted(mismatched):
        name, got = (found, "") if isinstance(found, str) else (found[0], f", got {list(found[1])}")
        expected = list(model.state_dict()[name].shape)
        raise ValueError(f"{named}: {name} must be {expected} after config.json{got}")


def _stored_names(path: str) -> set[str]:
    """The names of the tensors in a directory; none for a hub id."""
    files = [file for kind in ("*.safetensors", "pytorch_model*.bin") for file in Path(path).glob(kind)]
    return {name for file in files for name in tensor_names(file)}


def _check_no_head(named: str, tensors: Iterable[str]) -> None:
    """ValueError if these are tensors of a draft head; named: what to call it."""
    if "fc.weight" in {name.removeprefix("model.") for name in tensors}:
        raise ValueError(
            f"{named} is a draft head, by its fc.weight, and no causal language model: give it where a head is taken "
            "(--head, or draft_model of EAGLEInference)"
        )


def _check_plan(tp_plan: Any) -> None:
    if isinstance(tp_plan, str) and tp_plan != "auto":
        raise ValueError(f'tp_plan must be "auto", transformers\' own for the model, or a plan, got {tp_plan!r}')
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("tp_plan spreads a target over processes: start them by torchrun --nproc-per-node N")


def _in_one_dtype(model: Any, dtype: Any) -> nn.Module:
    """A target whose FP8 weights transformers has made wide, as it does where no GPU is: those come in `dtype`, and the
    other parameters in the checkpoint's. Buffers, rotary frequencies among them, stay as they are."""
    parameters = list(model.parameters())
    found = [parameter.dtype for parameter in parameters]
    wide = all(kind.is_floating_point and kind.itemsize > 1 for kind in found)
    if wide and dtype in found and model.get_input_embeddings().weight.dtype != dtype:
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
    return model


def load_tokenizer(path: str, **hub: Any) -> Any | None:
    """The tokenizer that lies beside the target, None if a local directory holds none; `hub`: as for its config."""
    local = Path(path) / hub.get("subfolder", "")
    if local.is_dir() and not any(local.glob("tokenizer*")) and not (local / "vocab.json").is_file():
        return None
    with quiet():
        return AutoTokenizer.from_pretrained(path, **hub)


def read_target_embedding(path: str, **hub: Any) -> Tensor:
    """The embedding [V, H] of a target, alone, from the safetensors of a directory or hub id. hub: as for `read_head`.

    Raises FileNotFoundError where there are none, ValueError where they hold no embedding or cannot be read.
    """
    folder = Path(directory_or_hub_id("target", path))
    if not folder.is_dir():
        folder = _fetch_target(path, [INDEX], hub)
        named = _weight_map(folder).get(EMBEDDING)
        folder = _fetch_target(path, [named or "*.safetensors"], hub)
    files = [folder / name for name in (_weight_map(folder).get(EMBEDDING),) if name] or sorted(
        folder.glob("*.safetensors")
    )
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"target: no safetensors with {EMBEDDING} in {path!r}")
    for file in files:
        if EMBEDDING in tensor_names(file):
            with safe_open(file, "pt") as tensors:
                return tensors.get_tensor(EMBEDDING)
    raise ValueError(f"target: no {EMBEDDING} in {path!r}")


def tensor_names(file: Path) -> list[str]:
    """The names of the tensors in a file of safetensors, or of torch's. Raises ValueError for one that cannot be
    read."""
    try:
        if file.suffix != ".safetensors":
            return list(torch.load(file, "cpu", weights_only=True, mmap=True))
        with safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{str(file)!r} cannot be read, truncated or not weights: {error}") from error


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file has which tensor, empty where no index says."""
    index = folder / INDEX
    return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) if index.is_file() else {}


def _fetch_target(path: str, patterns: list[str], hub: Mapping[str, Any]) -> Path:
    try:
        return Path(snapshot_download(path, allow_patterns=patterns, **hub))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"target: {path!r} is no directory, and no hub id to be had: {error}") from error


# --- the head ---


def read_head(path: str, **hub: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(content of config.json, tensors under their published names) of a head, from a directory or a hub id.

    Weights are *.safetensors, else pytorch_model.bin. hub: `revision`, `token` and others of `snapshot_download`.
    Raises FileNotFoundError for missing files, ValueError for files that cannot be read.
    """
    directory = Path(directory_or_hub_id("draft head", path))
    if not directory.is_dir():
        files_of_a_head = ["config.json", "*.safetensors", "pytorch_model.bin"]
        try:
            directory = Path(snapshot_download(str(path), allow_patterns=files_of_a_head, **hub))
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"draft head: {path!r} is no directory, and no hub id to be had: {error}"
            ) from error
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
    """The object in a file. Raises ValueError for what is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"draft head: {str(file)!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"draft head: {str(file)!r} must hold an object, got {type(found).__name__}")
    return found


def read_draft_config(raw: Mapping[str, Any]) -> DraftConfig:
    """The config of a head from config.json, either layout.

    Target layers: a top-level `eagle_aux_hidden_state_layer_ids` names layers by their input, as vLLM reads it; the
    same field inside `eagle_config` by their output, as SGLang does. Raises ValueError for what no head here does.
    """
    config = dict(raw)
    if nested := config.pop("transformer_layer_config", None):
        if "norm_before_residual" not in config:
            raise ValueError("draft head: config.json lacks norm_before_residual, which this layout must state")
        config = {**nested, **{name: value for name, value in config.items() if value is not None}}
    check_head_fields(config)
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise ValueError("draft head: EAGLE-3 without auxiliary hidden states is not supported")
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    outputs = eagle.get("eagle_aux_hidden_state_layer_ids")
    config["feature_layers"] = inputs or (outputs and [layer + 1 for layer in outputs])
    return DraftConfig.from_dict(config)


def rename_tensors(tensors: Mapping[str, Tensor], use_eagle3: bool) -> dict[str, Tensor]:
    """Published names, either layout, to those of `heads`; tensors that no head uses are left out."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if use_eagle3 and name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        if not name.endswith(UNUSED):
            renamed[name] = tensor
    return renamed


def is_eagle3(tensors: Iterable[str]) -> bool:
    """Whether tensors of these names, in any layout, are an EAGLE-3 head's: none before it norms the hidden states."""
    return any(name.endswith("hidden_norm.weight") for name in tensors)


def settle_biases(config: DraftConfig, tensors: dict[str, Tensor]) -> DraftConfig:
    """The config with the biases that the weights show, which engines name otherwise or not at all.

    vLLM, SGLang and speculators have a bias in `o_proj` wherever queries have one. No head here has: zeros are left out
    of `tensors`.
    """
    for name in [name for name in tensors if name.endswith("o_proj.bias")]:
        if not tensors[name].any():
            del tensors[name]
    queries = any(name.endswith("q_proj.bias") for name in tensors)
    return config.replace(bias=config.bias or "fc.bias" in tensors, qkv_bias=config.qkv_bias or queries)


def load_head(path: str, use_eagle3: bool | None, target_config: Any, tree: Mapping[str, Any], **hub: Any) -> DraftHead:
    """A head that fits the target. Without an embedding of its own, `embed_tokens.weight` stays on the meta device.

    use_eagle3: whether it is an EAGLE-3 head; None: its weights tell. tree: keyword arguments of `DraftHead`; where
    `save_pretrained` stored a tree, None takes the stored value. hub: as for `read_head`.
    Raises FileNotFoundError and ValueError, before any weight of the target is read.
    """
    raw, tensors = read_head(path, **hub)
    config = read_draft_config(raw)
    found = is_eagle3(tensors)
    if use_eagle3 is False and found:
        raise ValueError(f"draft head {path!r} is an EAGLE-3 head by its weights, and use_eagle3 is False")
    if use_eagle3 and not found and not any("midlayer." in name for name in tensors):
        raise ValueError(f"draft head {path!r} is an EAGLE-1/2 head by its weights, and use_eagle3 is True")
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
    expected = head.state_dict()
    borrowed = {"embed_tokens.weight"} if config.hidden_size == target_config.hidden_size else set()
    check_keys(f"draft head {path!r}", expected.keys() - tensors.keys() - borrowed, tensors.keys() - expected.keys())
    if wrong := [name for name, tensor in tensors.items() if tensor.shape != expected[name].shape]:
        name = wrong[0]
        raise ValueError(
            f"draft head {path!r}: {name} must be {list(expected[name].shape)} after config.json and target, "
            f"got {list(tensors[name].shape)}"
        )
    head.load_state_dict(tensors, strict=False, assign=True)
    return head


def fit_head(head: DraftHead, target: Any) -> DraftHead:
    """A head of `load_head` in eval mode, where its target lies and of its dtype. An embedding that the checkpoint left
    to the target is copied."""
    if head.embed_tokens.weight.is_meta:
        borrow_embedding(head, target)
    embedding = target.get_input_embeddings().weight  # of the model's dtype, also where projections have FP8 weights
    return head.to(device=embedding.device, dtype=embedding.dtype).eval()


def borrow_embedding(head: DraftHead, target: Any) -> None:
    """Give a head a copy of its target's embedding, whole where that is spread over ranks, all of which call this."""
    shared = target.get_input_embeddings().weight.detach()
    head.embed_tokens.weight = nn.Parameter(shared.full_tensor() if is_sharded(target) else shared.clone())


def is_sharded(target: nn.Module) -> bool:
    """Whether a target's weights are spread over ranks (tp_plan), each of which has loaded a part."""
    return any(hasattr(weight, "full_tensor") for weight in target.parameters())


def resolve_tree(asked: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Tree arguments: what was asked for, else what was stored, else left to `DraftHead`'s defaults.

    A stored fixed tree gives way to any size of a dynamic one.
    """
    if any(asked.get(name) is not None for name in ("total_token", "depth", "top_k")):
        stored = {**stored, "tree_choices": None}
    merged = {name: stored.get(name) if asked.get(name) is None else asked[name] for name in TREE_FIELDS}
    return {name: value for name, value in merged.items() if value is not None}


def settle_vocabulary(config: DraftConfig, tensors: dict[str, Tensor]) -> None:
    """Complete and check the vocabulary tables `d2t` and `t2d` of an EAGLE-3 checkpoint, in place.

    A full draft vocabulary has none; a missing `t2d` follows from `d2t`. Raises ValueError for a `d2t` that leaves
    the target's vocabulary or names a token twice.
    """
    offsets = tensors.get("d2t")
    if config.draft_vocab_size == config.vocab_size:
        if offsets is not None and offsets.any():
            raise ValueError("draft head: d2t reorders a full vocabulary, which is not supported")
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
    elif offsets is not None:
        ids = offsets.long() + torch.arange(len(offsets))
        if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(
                f"draft head: d2t must map draft ids to different target ids below {config.vocab_size}, "
                f"got {int(ids.min())}..{int(ids.max())}"
            )
        tensors["d2t"] = offsets.long()
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)


def check_fit(config: DraftConfig, target_config: Any, use_eagle3: bool) -> None:
    """ValueError unless a head of this config can serve the target: vocabulary, hidden size, feature layers."""
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
            raise ValueError("draft head: target features as wide as its hidden states cannot be told apart")


def check_keys(whose: str, missing: Any, unexpected: Any) -> None:
    """ValueError naming tensors that a checkpoint lacks or has too many of; `whose`: what to call it."""
    unexpected = [name for name in unexpected if not name.endswith(UNUSED)]
    for names, what in ((missing, "lacks"), (unexpected, "has unexpected")):
        if names:
            names = sorted(names)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{whose}: the checkpoint {what} {', '.join(names[:5])}{more}")
