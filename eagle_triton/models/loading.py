"""Where targets and draft heads lie, on disk or on the hub, and reading targets."""

import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as transformers_logging

from eagle_triton.demo import path_of

from .mtp import INDEX, mtp_names
from .target import check_architecture

TARGET_FOLDER = "target"
HEAD_FOLDERS = {True: "eagle3", False: "eagle1"}  # by use_eagle3

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


def read_target_config(path: str, engine: bool = False, whose: str = "target", **hub: Any) -> Any:
    """The target's config; `hub`: where in it, and how to reach the hub, as transformers takes it.

    engine, whose: see check_architecture.
    Raises FileNotFoundError without a config.json, ValueError for an unknown architecture.
    """
    path = directory_or_hub_id(whose, path)
    if Path(path).is_dir() and not (Path(path) / hub.get("subfolder", "") / "config.json").is_file():
        raise FileNotFoundError(f"{whose}: no config.json in {path!r}")
    if not Path(path).is_dir():
        _check_reachable(path, whose, hub)
    try:
        config = AutoConfig.from_pretrained(path, **hub)
    except (ValueError, KeyError) as error:
        _check_no_head(f"{whose} {path!r}", _stored_names(path))
        raise ValueError(f"{whose} {path!r}: {error}") from error
    except OSError as error:
        raise FileNotFoundError(f"{whose} {path!r}: {error}") from error
    check_architecture(config, engine, whose)
    return config


def _check_reachable(path: str, whose: str, hub: Mapping[str, Any]) -> None:
    """FileNotFoundError for a hub id that is not in the cache, if the hub does not answer: asked for one file after the
    other, it is tried again for half a minute. What else is wrong, transformers says."""
    config = f"{hub['subfolder']}/config.json" if hub.get("subfolder") else "config.json"
    options = {name: hub[name] for name in (*HUB, "revision") if name in hub}
    try:
        snapshot_download(path, allow_patterns=[config], **options)
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{whose} {path!r} is no directory here, not in the hub's cache, and cannot be fetched: {error}"
        ) from error
    except (OSError, ValueError):
        pass


def load_target(path: str, engine: bool = False, whose: str = "target", **kwargs: Any) -> nn.Module:
    """The target in eval mode, fp32 unless `dtype` (or `torch_dtype`) says otherwise; kwargs go to transformers.
    engine, whose: see check_architecture.

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
    check_architecture(model.config, engine, whose)
    unexpected = set(info["unexpected_keys"])
    _check_no_head(named, unexpected)
    if not kwargs.get("ignore_mismatched_sizes"):
        _check_shapes(named, model, info["mismatched_keys"])
    check_keys(named, info["missing_keys"], unexpected - mtp_names(unexpected))
    return _in_one_dtype(model, dtype).eval()


def _read_target(
    path: str, options: Mapping[str, Any], kind: type[Any] = AutoModelForCausalLM
) -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers says of its tensors; those whose shapes do not fit are among that.

    kind: the class that loads it. Some models that see are no causal language models to transformers.
    """
    try:
        with quiet():
            return kind.from_pretrained(path, output_loading_info=True, **options)
    except ValueError as error:
        if kind is AutoModelForImageTextToText or "Unrecognized configuration class" not in str(error):
            raise
        return _read_target(path, options, AutoModelForImageTextToText)
    except RuntimeError as error:
        asked = options.get("ignore_mismatched_sizes")
        if asked or not re.search("size mismatch|ignore_mismatched_sizes", str(error)):
            raise
    return _read_target(path, {**options, "ignore_mismatched_sizes": True}, kind)


def _check_shapes(named: str, model: nn.Module, mismatched: Iterable[Any]) -> None:
    """ValueError naming a tensor that does not fit; transformers 4 does not say what shape it has."""
    for found in sorted(mismatched):
        name, got = (found, "") if isinstance(found, str) else (found[0], f", got {list(found[1])}")
        expected = list(model.state_dict()[name].shape)
        raise ValueError(f"{named}: {name} must be {expected} after config.json{got}")


def _stored_names(path: str) -> set[str]:
    """The names of the tensors in a directory, as far as its files tell; none for a hub id."""
    names: set[str] = set()
    for kind in ("*.safetensors", "pytorch_model*.bin"):
        for file in Path(path).glob(kind):
            with suppress(ValueError):  # of a file that cannot be read: what is wrong with the target is said anyway
                names |= set(tensor_names(file))
    return names


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


def check_keys(whose: str, missing: Any, unexpected: Any) -> None:
    """ValueError naming tensors that a checkpoint lacks or has too many of; `whose`: what to call it."""
    unexpected = [name for name in unexpected if not name.endswith(UNUSED)]
    for names, what in ((missing, "lacks"), (unexpected, "has unexpected")):
        if names:
            names = sorted(names)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{whose}: the checkpoint {what} {', '.join(names[:5])}{more}")
