"""A target with its projections in eight bits, in the fine-grained layout that transformers, vLLM and SGLang load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from eagle_triton.export.contents import ExportError
from eagle_triton.export.folder import free_folder, made_whole
from eagle_triton.models.loading import directory_or_hub_id, read_target_config, saved_target, tensor_names
from eagle_triton.runtime.float8_weight import BLOCK, quantised

FORMATS = ("fp8",)
KEPT = ("lm_head", "model.embed_tokens")  # as they are: few layers, and the ones that rounding harms most
INDEX = "model.safetensors.index.json"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose projections are all plain nn.Linear
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
DESCRIPTIONS = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*")
ELSEWHERE = ("*/*", "consolidated*")  # of a hub id: the same weights again, in other layouts


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """The result of `quantize_checkpoint`: the folder, how many projections are in eight bits, and the bytes of all
    tensors before and after. notes: sentences on who may not take it."""

    folder: Path
    projections: int
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "folder": str(self.folder), "notes": list(self.notes)}


def quantize_checkpoint(target: str | Path, path: str | Path, to: str = "fp8") -> QuantizedCheckpoint:
    """Write a checkpoint with float8_e4m3fn weights and an fp32 scale for each block of 128 by 128.

    target: directory or hub id of a dense Llama, Mistral, Qwen2 or Qwen3, or "demo"; of a directory that
    `EaModel.save_pretrained` wrote, the target. path: a directory that does not exist yet, or is empty. All projections
    of the layers are rounded, each block so that its largest number becomes 448; vocabulary projection, embedding,
    norms and biases keep their bits, and so do the tokenizer and other files. One file of weights after the other is
    read, and the same number is written.

    Raises ExportError, a ValueError, for a checkpoint that is quantised already, weights that are not finite or not
    there, and other formats than safetensors; ValueError for another architecture and another `to`; FileNotFoundError
    for missing files, FileExistsError for a directory that holds something. Nothing is written then.
    """
    if to not in FORMATS:
        raise ValueError(f"to must be {' or '.join(FORMATS)}, got {to!r}")
    folder = free_folder(path)
    _configuration(_fetched(target, DESCRIPTIONS), target)  # before gigabytes are fetched
    source = _fetched(target, (*DESCRIPTIONS, "*.safetensors"))
    config, raw = _configuration(source, target)
    files = _weight_files(source)
    wanted = _projections(config)
    if missing := sorted(wanted.keys() - {name for names in files.values() for name in names}):
        raise ExportError(f"{missing[0]} is not among the tensors of {str(source)!r}")
    before, after, placed = 0, 0, {}
    with made_whole(folder) as beside:
        for file, names in files.items():
            tensors, read = _rounded(source / file, names, wanted)
            before += read
            after += sum(tensor.nbytes for tensor in tensors.values())
            placed.update(dict.fromkeys(tensors, file))
            save_file(tensors, beside / file, metadata={"format": "pt"})
        if (source / INDEX).is_file():
            index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(placed.items()))}
            (beside / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(KEPT),
        }
        (beside / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for other in source.iterdir():
            if other.is_file() and other.name != "config.json" and not other.name.endswith(WEIGHTS):
                shutil.copyfile(other, beside / other.name)
    return QuantizedCheckpoint(folder, len(wanted), before, after, _notes(config))


def _configuration(source: Path, target: str | Path) -> tuple[Any, dict[str, Any]]:
    """The configuration of a target that may be quantised, as transformers has it and as it is written."""
    config = read_target_config(str(source), engine=True)
    if config.model_type not in FAMILIES:
        raise ExportError(
            f"target {str(target)!r}: only {', '.join(FAMILIES)} are written in eight bits, got model_type "
            f"{config.model_type!r}"
        )
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for name in ("quantization_config", "compression_config"):
        if raw.get(name):
            method = raw[name].get("quant_method", "") if isinstance(raw[name], dict) else raw[name]
            raise ExportError(f"config.json: {name} says that {str(target)!r} is quantised already, by {method!r}")
    return config, raw


def _fetched(target: str | Path, patterns: tuple[str, ...]) -> Path:
    """The directory of a target; of a hub id, one that has what fits the patterns. Raises FileNotFoundError without
    one, ValueError for a file."""
    name = str(target)
    place = Path(saved_target(name)).expanduser()
    if place.is_dir():
        return place
    name = directory_or_hub_id("target", name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(ELSEWHERE)))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"target: {name!r} is no directory, and no hub id to be had: {error}") from error


def _weight_files(source: Path) -> dict[str, list[str]]:
    """The files of safetensors that hold a target, and the tensors of each."""
    if (source / INDEX).is_file():
        named = _index(source / INDEX)
    else:
        named = [file.name for file in source.glob("model*.safetensors")]
    files = sorted(set(named))
    if not files:
        others = sorted(file.name for file in source.iterdir() if file.name.endswith(WEIGHTS))
        found = f"holds {', '.join(others)}" if others else "holds no weights"
        raise ExportError(f"target: only safetensors are read, and {str(source)!r} {found}")
    if lost := [file for file in files if not (source / file).is_file()]:
        raise FileNotFoundError(f"target: {INDEX} names {lost[0]}, which is not in {str(source)!r}")
    return {file: tensor_names(source / file) for file in files}


def _index(file: Path) -> list[str]:
    """The files that an index names, once for each tensor."""
    try:
        names = list(dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"]).values())
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{str(file)!r} is no index of weights: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):  # beside it, nowhere else
            raise ExportError(f"{str(file)!r} is no index of weights: {name!r} is no file of safetensors beside it")
    return names


def _projections(config: Any) -> dict[str, torch.Size]:
    """The names and shapes of the weights that are rounded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {f"{name}.weight": module.weight.shape for name, module in linear.items() if name not in KEPT}


def _rounded(file: Path, names: Iterable[str], wanted: dict[str, torch.Size]) -> tuple[dict[str, Tensor], int]:
    """The tensors of a file as they are to be written, and the bytes that they had."""
    tensors: dict[str, Tensor] = {}
    size = 0
    try:
        with safe_open(file, "pt") as stored:
            for name in names:
                tensor = stored.get_tensor(name)
                size += tensor.nbytes
                if name not in wanted:
                    tensors[name] = tensor
                    continue
                if tensor.dtype not in DTYPES:
                    raise ExportError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
                if tensor.shape != wanted[name]:
                    raise ExportError(f"{name} must be {list(wanted[name])} by config.json, got {list(tensor.shape)}")
                try:
                    weight = quantised(tensor, block=True)
                except ValueError as error:
                    raise ExportError(f"{name}: {error}") from error
                tensors[name], tensors[f"{name}_scale_inv"] = weight.tensors
    except SafetensorError as error:
        raise ExportError(f"{str(file)!r} cannot be read, truncated or not weights: {error}") from error
    return tensors, size


def _notes(config: Any) -> tuple[str, ...]:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "queries": config.num_attention_heads * head,
        "keys": config.num_key_value_heads * head,
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if size % BLOCK]
    if not odd:
        return ()
    return (f"{', '.join(odd)}: no multiple of {BLOCK}, which vLLM and SGLang ask for; transformers takes it",)
