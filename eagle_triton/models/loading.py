"""Finds targets and draft heads, on disk or on the hub, and reads targets."""

import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from packaging.version import Version
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from eagle_triton.demo import path_of

from .checkpoint import Checkpoint, fetch_from_hub, names_in
from .families import expected_families
from .four_bit_experts import for_packed, is_packed
from .gptq import UnreadableError, for_gptq, is_gptq
from .mtp import mtp_names
from .mxfp4 import is_mxfp4, read_mxfp4
from .target import check_architecture

log = logging.getLogger(__name__)

TARGET_FOLDER = "target"
HEAD_FOLDERS = {True: "eagle3", False: "eagle1"}  # by use_eagle3

EMBEDDING = "embed_tokens.weight"  # the end of its name in every supported target

# transformers' name of the argument
DTYPE = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"

HUB = ("token", "cache_dir", "local_files_only", "force_download")  # access to the hub
OF_A_REPOSITORY = ("revision", "code_revision", "subfolder", "trust_remote_code", "proxies")  # only for the target

# Tensors that some exporters add and no head uses: constants, and copies of the target's for training.
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")

# Scales for a quantised cache, by the names of several exporters. Here keys and values are not quantised.
OF_A_CACHE = (
    *("self_attn.k_scale", "self_attn.v_scale", "k_proj.k_scale", "v_proj.v_scale"),
    *("k_proj.output_scale", "v_proj.output_scale"),
)

EXPERTS = "; for quantised mixtures see docs/limits.md#experts-in-four-bits"  # ends a message


def locate(
    base_model_path: str,
    ea_model_path: str | None,
    use_eagle3: bool | None,
    names: tuple[str, str] = ("base_model_path", "ea_model_path"),
) -> tuple[str, str, bool | None]:
    """Where target and head are: (target path or hub id, head path or hub id, whether it is an EAGLE-3 head; None: its
    weights decide).

    Without `ea_model_path`, `base_model_path` is "demo" or a directory with the subfolders that `save_pretrained`
    writes; use_eagle3=None prefers an EAGLE-3 head. With `ea_model_path`, such a directory means its target. names:
    the two arguments' names in errors. Raises ValueError or FileNotFoundError.
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
    """A directory, or a name that may be a hub id. Raises FileNotFoundError if a path does not exist, ValueError if it
    is a file."""
    text = str(path)
    try:
        place = Path(path).expanduser()
    except RuntimeError as error:  # no such user
        raise FileNotFoundError(f"{name}: {text!r} does not exist") from error
    if place.is_dir():
        return str(place)
    if place.exists():
        raise ValueError(f"{name}: expected a directory or a hub id, {text!r} is a file")
    nested = os.sep in text or "/" in text
    if text.startswith((".", "~")) or place.anchor or (nested and place.parent.is_dir()):
        raise FileNotFoundError(f"{name}: {text!r} does not exist")
    return text


def is_saved_pair(path: str | Path) -> bool:
    """Whether a path is "demo", or a directory that `save_pretrained` wrote: a target, and heads beside it."""
    root = Path(path_of(path)).expanduser()
    places = [root / folder / "config.json" for folder in (TARGET_FOLDER, *HEAD_FOLDERS.values())]
    return places[0].is_file() and any(place.is_file() for place in places[1:])


def saved_target(path: str | Path) -> str:
    """The target in a directory that `save_pretrained` wrote; any other path or hub id unchanged.

    Models of this package may be given by name.
    """
    place = Path(path_of(path)).expanduser() / TARGET_FOLDER
    return str(place) if (place / "config.json").is_file() else path_of(path)


def _without_head(root: Path, name: str) -> Exception:
    """The error for a target without a head. Raises ValueError if it is not a supported target."""
    if not root.is_dir():
        return FileNotFoundError(
            f"{name}: needed, because {root.as_posix()!r} is not a directory here, and as a hub id it names a "
            "target without a head: give the directory or hub id of the EAGLE head, too"
        )
    if (root / "config.json").is_file():
        read_target_config(str(root))
    return FileNotFoundError(
        f"{name}: needed, because {str(root)!r} does not hold both a target and a head (subfolders "
        f"{TARGET_FOLDER!r} and {' or '.join(HEAD_FOLDERS.values())})"
    )


@dataclass(frozen=True)
class HubArguments:
    """Keyword arguments for fetching the target's files (configuration, tokenizer) and the head's."""

    target: dict[str, Any]
    head: dict[str, Any]

    @staticmethod
    def of(target_path: str, head_path: str, ea_revision: str | None, given: Mapping[str, Any]) -> "HubArguments":
        """From the keyword arguments of `EaModel.from_pretrained`, which documents them.

        Raises ValueError for the revision of a local directory.
        """
        revision = given.get("revision")
        if ea_revision is None and head_path == target_path:
            ea_revision = revision
        for name, value, path in (("revision", revision, target_path), ("ea_revision", ea_revision, head_path)):
            if value is not None and Path(path).is_dir():
                raise ValueError(f"{name}: {path!r} is a local directory, which has no revisions, got {value!r}")
        target = {name: given[name] for name in (*HUB, *OF_A_REPOSITORY) if name in given}
        head = {name: given[name] for name in HUB if name in given}
        return HubArguments(target, head if ea_revision is None else {**head, "revision": ea_revision})


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off transformers' progress bars and load reports inside the block."""
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
    """The target's config. hub: revision, subfolder and access to the hub, in transformers' terms.

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
        raise ValueError(f"{whose} {path!r}: {expected_families()}. transformers says: {error}") from error
    except OSError as error:
        raise FileNotFoundError(f"{whose} {path!r}: {error}") from error
    check_architecture(config, engine, whose)
    return config


def _check_reachable(path: str, whose: str, hub: Mapping[str, Any]) -> None:
    """Raise FileNotFoundError if a hub id is not in the cache and the hub does not answer. Without this check,
    transformers would retry each file for half a minute. It reports all other errors itself."""
    config = f"{hub['subfolder']}/config.json" if hub.get("subfolder") else "config.json"
    options = {name: hub[name] for name in (*HUB, "revision") if name in hub}
    try:
        snapshot_download(path, allow_patterns=[config], **options)
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{whose} {path!r} is not a directory here, not in the hub's cache, and cannot be fetched: {error}"
        ) from error
    except (OSError, ValueError):
        pass


def load_target(path: str, engine: bool = False, whose: str = "target", **kwargs: Any) -> nn.Module:
    """The target in eval mode, fp32 unless `dtype` (or `torch_dtype`) is given; kwargs go to transformers.
    engine, whose: see check_architecture. Experts in MXFP4 and in four bits stay so, unless kwargs have a
    quantization_config: see mxfp4.py and four_bit_experts.py.

    Raises FileNotFoundError for missing files. Raises ValueError for a draft head, for unreadable files, for weights or
    shapes that differ from config.json, without the package that a quantised target needs, for an invalid `tp_plan`,
    and for one without several processes.
    """
    if (tp_plan := kwargs.get("tp_plan")) is not None:
        if isinstance(tp_plan, str) and tp_plan != "auto":
            raise ValueError(f'tp_plan must be "auto" (transformers\' plan for the model) or a plan, got {tp_plan!r}')
        if "WORLD_SIZE" not in os.environ:
            raise ValueError("tp_plan needs several processes: start them with torchrun --nproc-per-node N")
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or torch.float32
    kwargs.pop("torch_dtype", None)
    kwargs[DTYPE] = dtype
    named = f"{whose} {path!r}"
    try:
        model, info = _reader_of(path, kwargs)(path, kwargs)
    except (SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{named}: the weights cannot be read: {error}") from error
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        raise ValueError(f"{named}: {error}") from error  # such as a missing package for quantised weights
    except OSError as error:
        raise FileNotFoundError(f"{named}: {error}") from error
    except RuntimeError as error:
        if "automatic conversion" not in str(error):
            raise
        raise ValueError(  # it refers to a report that is not shown
            f"{named}: transformers cannot convert its weights; AutoModelForCausalLM.from_pretrained({path!r}) shows "
            f"which and why{EXPERTS}"
        ) from error
    except ValueError as error:  # transformers 4 reports a head's names as damaged weights
        _check_no_head(named, _stored_names(path))
        raise ValueError(f"{named}: {error}") from error
    check_architecture(model.config, engine, whose)
    unexpected = set(info["unexpected_keys"])
    _check_no_head(named, unexpected)
    if scales := {name for name in unexpected if name.endswith(OF_A_CACHE)}:
        log.warning("%s: keys and values are not quantised, so %s and its like are not used", named, min(scales))
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # these have no scale, even in a module of FP8
    missing = [name for name in info["missing_keys"] if name.removesuffix("_scale_inv") not in tied]
    try:
        if not kwargs.get("ignore_mismatched_sizes"):
            _check_shapes(named, model, info["mismatched_keys"])
        check_keys(named, missing, unexpected - mtp_names(unexpected) - scales)
    except ValueError as error:
        stored: Any = getattr(model.config, "quantization_config", None)
        method = stored.get("quant_method") if isinstance(stored, Mapping) else None
        if method and not AutoHfQuantizer.supports_quant_method(stored):  # it only warns, and loads plain weights
            raise ValueError(f"{error}; this transformers does not know its quant_method, {method!r}") from None
        if ".experts." in str(error) and stored is not None:
            raise ValueError(f"{error}{EXPERTS}") from None
        raise
    return _in_one_dtype(model, dtype).eval()


def is_assistant(names: Iterable[str]) -> bool:
    """Whether these are the names of the tensors of an assistant that drafts with its target's keys and values."""
    return {"pre_projection.weight", "post_projection.weight"} <= {*names}


def load_assistant(path: str, target: nn.Module) -> nn.Module:
    """An assistant that drafts with the keys and values of `target` (Gemma 4's), with its device and dtype.

    path: a directory or hub id. Raises FileNotFoundError for missing files, ValueError if it cannot be read.
    """
    beside, named = next(target.parameters()), f"draft {path!r}"
    try:
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **{DTYPE: beside.dtype})
    except OSError as error:
        raise FileNotFoundError(f"{named}: {error}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:  # also of a config.json of another kind
        raise ValueError(f"{named}: {error}") from error
    check_keys(named, info["missing_keys"], info["unexpected_keys"])
    return model.to(beside.device).eval()


def _reader_of(path: str, options: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], tuple[Any, dict[str, Any]]]:
    """The function that reads a target: with experts that stay as they are stored, or as transformers loads it."""
    if options.get("quantization_config") is not None or Version(transformers.__version__).major < 5:
        return _read_target
    try:
        config = AutoConfig.from_pretrained(path, **_hub_options(options))
    except (OSError, ValueError, KeyError):
        return _read_target  # it will raise the error
    if is_mxfp4(config):
        return _read_mxfp4
    by_transformers = options.get("tp_plan") is not None or options.get("config") is not None
    packed = is_packed(config) or is_gptq(config)
    return _read_packed if packed and not by_transformers else _read_target


def _hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in (*HUB, *OF_A_REPOSITORY) if name in options}


def _read_packed(path: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Like _read_target, for a checkpoint of compressed-tensors with packed integers, or by GPTQ or AWQ."""
    hub = _hub_options(options)
    others = {name: value for name, value in options.items() if name not in hub and name != "dtype"}
    config, others = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **hub, **others)
    config = for_packed(config) if is_packed(config) else for_gptq(config)
    try:
        return _read_target(path, {**hub, "dtype": options["dtype"], **others, "config": config})
    except UnreadableError as error:
        raise ValueError(str(error)) from error


def _read_mxfp4(path: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Like _read_target, for a gpt-oss in MXFP4. Raises ValueError for options that only transformers takes."""
    hub = _hub_options(options)
    if others := sorted(options.keys() - hub.keys() - {"dtype", "device_map"}):
        raise ValueError(
            f"{', '.join(others)}: not supported with a gpt-oss in MXFP4, because its experts are read as stored; "
            "quantization_config=Mxfp4Config(dequantize=True) lets transformers load it in 16 bits"
        )
    device = _one_device(options.get("device_map"))
    folder, config = Path(path), AutoConfig.from_pretrained(path, **hub)
    if not folder.is_dir():
        known = {name: value for name, value in hub.items() if name in (*HUB, "revision")}
        folder = fetch_from_hub("target", path, ["*.json", "model*.safetensors"], known)
    dtype = options["dtype"]
    if isinstance(dtype, str):
        wanted, dtype = dtype, config.dtype if dtype == "auto" else getattr(torch, dtype, None)
        if wanted != "auto" and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype must be a dtype of torch, its name or 'auto', got {wanted!r}")
    return read_mxfp4(folder / hub.get("subfolder", ""), config, dtype or torch.float32, device)


def _one_device(device_map: Any) -> torch.device:
    """The one device that a device_map names for the whole model."""
    if isinstance(device_map, Mapping) and set(device_map) == {""}:
        device_map = device_map[""]
    if device_map == "auto" and torch.cuda.device_count() <= 1:
        device_map = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device_map, int):
        device_map = f"cuda:{device_map}"
    try:
        return torch.device("cpu" if device_map is None else device_map)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device_map must name one device for a gpt-oss in MXFP4, got {device_map!r}") from error


def _read_target(
    path: str, options: Mapping[str, Any], kind: type[Any] = AutoModelForCausalLM
) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report on its tensors, with those of other shapes.

    kind: the class that loads it. Some models that read images are no causal language models to transformers.
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
    """Raise ValueError naming a tensor with another shape. transformers 4 does not report that shape."""
    for found in sorted(mismatched):
        name, got = (found, "") if isinstance(found, str) else (found[0], f", got {list(found[1])}")
        expected = list(model.state_dict()[name].shape)
        raise ValueError(f"{named}: by config.json {name} must be {expected}{got}")


def _stored_names(path: str) -> set[str]:
    """The names of the tensors in the readable files of a directory; none for a hub id."""
    names: set[str] = set()
    for kind in ("*.safetensors", "pytorch_model*.bin"):
        for file in Path(path).glob(kind):
            with suppress(ValueError):  # an unreadable file; the caller raises an error anyway
                names |= set(names_in(file))
    return names


def _check_no_head(named: str, tensors: Iterable[str]) -> None:
    """Raise ValueError if these are the tensors of a draft head. named: the model's name in the error."""
    if "fc.weight" in {name.removeprefix("model.") for name in tensors}:
        raise ValueError(
            f"{named} is a draft head (it has fc.weight), not a causal language model: give it as the head "
            "(--head, for a block drafter --block-drafter, or draft_model of EAGLEInference)"
        )


def _in_one_dtype(model: Any, dtype: Any) -> nn.Module:
    """Cast all parameters to `dtype` if transformers has dequantised FP8 weights, which it does without a GPU. They
    then have `dtype`, and the others the checkpoint's. Buffers, such as rotary frequencies, do not change."""
    parameters = list(model.parameters())
    found = [parameter.dtype for parameter in parameters]
    wide = all(kind.is_floating_point and kind.itemsize > 1 for kind in found)
    if wide and dtype in found and model.get_input_embeddings().weight.dtype != dtype:
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
    return model


def load_tokenizer(path: str, **hub: Any) -> Any | None:
    """The tokenizer of the target; None if a local directory has none. hub: see read_target_config."""
    local = Path(path) / hub.get("subfolder", "")
    if local.is_dir() and not any(local.glob("tokenizer*")) and not (local / "vocab.json").is_file():
        return None
    with quiet():
        return AutoTokenizer.from_pretrained(path, **hub)


def read_target_embedding(path: str, **hub: Any) -> Tensor:
    """Only the embedding [V, H] of a target, from the safetensors of a directory or hub id. hub: see `read_head`.

    Raises FileNotFoundError without such files, ValueError if they hold no embedding or cannot be read.
    """
    checkpoint = Checkpoint(directory_or_hub_id("target", path), hub, "target")
    name = next((name for name in checkpoint.files if name.endswith(EMBEDDING)), None)
    if name is None:
        raise ValueError(f"target: no {EMBEDDING} in {path!r}")
    return checkpoint.read(name)[""]


def check_keys(whose: str, missing: Any, unexpected: Any) -> None:
    """Raise ValueError naming a checkpoint's missing or unexpected tensors. whose: its name in the error."""
    unexpected = [name for name in unexpected if not name.endswith(UNUSED)]
    for names, what in ((missing, "lacks"), (unexpected, "has unexpected")):
        if names:
            names = sorted(names)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{whose}: the checkpoint {what} {', '.join(names[:5])}{more}")
