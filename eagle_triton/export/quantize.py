"""Writes a target with projections in eight or four bits, in layouts that transformers, vLLM and SGLang load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from eagle_triton.export.contents import ExportError
from eagle_triton.export.folder import free_folder, made_whole
from eagle_triton.export.text_loss import LossOnText, TextLoss
from eagle_triton.models.checkpoint import INDEX, fetch_from_hub, names_in, read_index
from eagle_triton.models.four_bit_experts import is_stacked
from eagle_triton.models.loading import directory_or_hub_id, read_target_config, saved_target
from eagle_triton.runtime import float8_weight, four_bit_weight
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight
from eagle_triton.runtime.four_bit_weight import FourBitWeight

GROUPS = (128, 64, 32)  # columns of a row that share a scale in int4: those that vLLM and SGLang support
KEPT = ("lm_head", "model.embed_tokens")  # not rounded: few layers, which rounding harms most
_UNFUSED = (
    *("llama", "mistral", "qwen2", "qwen3", "ministral", "ministral3", "smollm3", "granite"),
    *("olmo2", "olmo3", "gemma2", "gemma3_text"),
)
_FUSED = ("phi3", "glm4")
_MIXTURES = ("qwen3_moe",)
WRITABLE = {"fp8": _UNFUSED, "int4": (*_UNFUSED, *_FUSED, *_MIXTURES)}
"""The families for each format: those with projections of plain nn.Linear in a checkpoint. One projection for queries,
keys and values, or for gate and up, is not read here."""
ROUTER = ".gate"  # the end of its name; a linear layer in other engines
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
DESCRIPTIONS = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*")
ELSEWHERE = ("*/*", "consolidated*")  # in a hub id: the same weights in other layouts
WHOLE = "model.safetensors"  # transformers reads an index only if this file is not there
TEMPLATES = "additional_chat_templates"  # a directory: those of a tokenizer that has several


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """The result of `quantize_checkpoint`: the folder, the number of rounded projections, and the bytes of all tensors
    before and after. notes: sentences on engines that may not load it. loss: on the text, if one was given."""

    folder: Path
    projections: int
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...] = ()
    loss: TextLoss | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "folder": str(self.folder), "notes": list(self.notes)}


@dataclass(frozen=True)
class _Float8:
    """transformers' fine-grained layout: float8_e4m3fn, an fp32 scale for each block of 128 by 128."""

    def rounded(self, name: str, weight: Tensor) -> tuple[Float8Weight, dict[str, Tensor]]:
        """A rounded weight, and the tensors to write for it."""
        found = float8_weight.quantised(weight, block=True)
        return found, {name: found.values, f"{name}_scale_inv": found.scale}

    @property
    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(KEPT),
        }

    def notes(self, shapes: Iterable[torch.Size]) -> tuple[str, ...]:
        if not (odd := _no_multiples(shapes, BLOCK, BLOCK)):
            return ()
        return (f"{odd}: not multiples of {BLOCK} by {BLOCK}, which vLLM and SGLang need; transformers does not",)


@dataclass(frozen=True)
class _Int4:
    """compressed-tensors' w4a16, pack-quantized: -8 to 7, a scale in the weight's dtype for each group of a row."""

    group: int
    mixture: bool = False

    def rounded(self, name: str, weight: Tensor) -> tuple[FourBitWeight, dict[str, Tensor]]:
        """A rounded weight, and the tensors to write for it."""
        found = four_bit_weight.quantised(weight, self.group)
        shape = torch.tensor(weight.shape)
        return found, {f"{name}_packed": found.packed, f"{name}_scale": found.scale, f"{name}_shape": shape}

    @property
    def config(self) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.group,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "ignore": ["lm_head", *((f"re:.*{re.escape(ROUTER)}$",) if self.mixture else ())],
            "kv_cache_scheme": None,
        }

    def notes(self, shapes: Iterable[torch.Size]) -> tuple[str, ...]:
        smaller = f"groups of {self.group}, because {GROUPS[0]} does not divide the columns of every projection"
        odd = _no_multiples(shapes, 64, 128)
        return (
            *((smaller,) if self.group < GROUPS[0] else ()),
            *((f"{odd}: not multiples of 64 by 128, which SGLang needs; vLLM and transformers do not",) * bool(odd)),
        )


def quantize_checkpoint(
    target: str | Path, path: str | Path, to: str = "fp8", *, text: str | Path | None = None, device: str = "cpu"
) -> QuantizedCheckpoint:
    """Write a checkpoint with its projections in eight or four bits, rounded to the nearest.

    target: directory or hub id of a model of WRITABLE[to], or "demo"; of a directory that `EaModel.save_pretrained`
    wrote, the target. path: a directory that does not exist yet, or is empty. to: "fp8", float8_e4m3fn with an fp32
    scale for each block of 128 by 128, so that its largest number becomes 448; or "int4", compressed-tensors'
    pack-quantized layout with a scale for each group of 128 columns of a row; the group is 64 or 32 if 128 does not
    divide the columns of every projection. Vocabulary projection, embedding, norms, biases, routers, the tokenizer and
    other files do not change. One file of weights after the other is read, and the same number is written.

    text: a file in UTF-8. The model's loss on its first 1,024 tokens is measured before and after. This loads the whole
    model on `device`, in the dtype of its config.json.

    Raises ExportError, a ValueError, for a checkpoint that is quantised already, for missing weights or weights that
    are not finite, for a number of columns that is not a multiple of 32, and for formats other than safetensors;
    ValueError for another architecture, another `to`, and a text of less than two tokens; FileNotFoundError for missing
    files, FileExistsError for a directory that is not empty. Nothing is written then.
    """
    if to not in WRITABLE:
        raise ValueError(f"to must be {' or '.join(WRITABLE)}, got {to!r}")
    folder = free_folder(path)
    config, raw = _configuration(_fetched(target, DESCRIPTIONS), target, to)  # before gigabytes are fetched
    _fetched(target, (f"{TEMPLATES}/*.jinja",), ())
    source = _fetched(target, (*DESCRIPTIONS, "*.safetensors"))
    files = _weight_files(source)
    wanted = _projections(config)
    if missing := sorted(wanted.keys() - {name for names in files.values() for name in names}):
        raise ExportError(
            f"{missing[0]} is not among the tensors of {str(source)!r}: it is no whole {config.model_type} model. "
            "Drafts are quantised when they are loaded (draft_dtype)"
        )
    layout = _Float8() if to == "fp8" else _Int4(_group(wanted), config.model_type in _MIXTURES)
    model = None if text is None else LossOnText(source, Path(text), device)
    before, after, placed = 0, 0, {}
    with made_whole(folder) as beside:
        for file, names in files.items():
            tensors, read = _rounded(source / file, names, wanted, layout, model)
            before += read
            after += sum(tensor.nbytes for tensor in tensors.values())
            placed.update(dict.fromkeys(tensors, file))
            save_file(tensors, beside / file, metadata={"format": "pt"})
        if [*files] != [WHOLE] and (source / INDEX).is_file():
            index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(placed.items()))}
            (beside / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        raw["quantization_config"] = layout.config
        (beside / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for other in source.iterdir():
            if other.is_file() and other.name != "config.json" and not other.name.endswith(WEIGHTS):
                shutil.copyfile(other, beside / other.name)
        if (source / TEMPLATES).is_dir():
            shutil.copytree(source / TEMPLATES, beside / TEMPLATES, copy_function=shutil.copyfile)
        loss = None if model is None else model.result()
    notes = layout.notes(wanted.values())
    if config.model_type in _FUSED:
        notes += (f"the joined projections of {config.model_type} are not read by this package in {to}",)
    return QuantizedCheckpoint(folder, len(wanted), before, after, notes, loss)


def _configuration(source: Path, target: str | Path, to: str) -> tuple[Any, dict[str, Any]]:
    """The configuration of a target that may be quantised: transformers' object, and the content of config.json."""
    config = read_target_config(str(source), engine=True)
    if config.model_type not in WRITABLE[to]:
        raise ExportError(
            f"target {str(target)!r}: only {', '.join(WRITABLE[to])} can be written in {to}, got model_type "
            f"{config.model_type!r}"
        )
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for name in ("quantization_config", "compression_config"):
        if raw.get(name):
            method = raw[name].get("quant_method", "") if isinstance(raw[name], dict) else raw[name]
            raise ExportError(f"config.json: {str(target)!r} is quantised already, by {method!r} (field {name})")
    return config, raw


def _fetched(target: str | Path, patterns: tuple[str, ...], but: tuple[str, ...] = ELSEWHERE) -> Path:
    """The directory of a target; for a hub id, one with the files that match the patterns, but not those of `but`.
    Raises FileNotFoundError if there is none, ValueError for a file."""
    name = str(target)
    place = Path(saved_target(name)).expanduser()
    if place.is_dir():
        return place
    name = directory_or_hub_id("target", name)
    return fetch_from_hub("target", name, list(patterns), {"ignore_patterns": list(but)})


def _weight_files(source: Path) -> dict[str, list[str]]:
    """The safetensors files of a target, and the tensors in each."""
    if (source / WHOLE).is_file():
        return {WHOLE: names_in(source / WHOLE)}
    try:
        index = read_index(source / INDEX) if (source / INDEX).is_file() else {}
    except ValueError as error:
        raise ExportError(str(error)) from error
    for name in index.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):  # only files beside it
            raise ExportError(
                f"{str(source / INDEX)!r} is not an index of weights: {name!r} is not a safetensors file beside it"
            )
    files = sorted(set(index.values()) if index else {file.name for file in source.glob("model*.safetensors")})
    if not files:
        others = sorted(file.name for file in source.iterdir() if file.name.endswith(WEIGHTS))
        found = f"has {', '.join(others)}" if others else "has no weights"
        raise ExportError(f"target: only safetensors are read, and {str(source)!r} {found}")
    if lost := [file for file in files if not (source / file).is_file()]:
        raise FileNotFoundError(f"target: {INDEX} names {lost[0]}, which is not in {str(source)!r}")
    return {file: names_in(source / file) for file in files}


def _projections(config: Any) -> dict[str, torch.Size]:
    """The names in a checkpoint, and the shapes, of the weights to round."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path not in KEPT and not path.endswith(ROUTER):
            found[f"{path}.weight"] = module.weight.shape
        if is_stacked(module):
            count, width, inner = module.down_proj.shape
            shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
            for number in range(count):
                found |= {f"{path}.{number}.{name}_proj.weight": torch.Size(sizes) for name, sizes in shapes.items()}
    return found


def _group(wanted: dict[str, torch.Size]) -> int:
    """The largest of GROUPS that divides the columns of every projection."""
    for name, (_, columns) in wanted.items():
        if columns % GROUPS[-1]:
            raise ExportError(f"{name} must have a multiple of {GROUPS[-1]} columns, got {columns}")
    return next(group for group in GROUPS if all(columns % group == 0 for _, columns in wanted.values()))


def _rounded(
    file: Path, names: Iterable[str], wanted: dict[str, torch.Size], layout: _Float8 | _Int4, model: LossOnText | None
) -> tuple[dict[str, Tensor], int]:
    """The tensors to write for a file, and the bytes that they had. The model, if given, gets the rounded weights."""
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
                    weight, written = layout.rounded(name, tensor)
                except ValueError as error:
                    raise ExportError(f"{name}: {error}") from error
                tensors.update(written)
                if model is not None:
                    model.replace(name, weight)
    except SafetensorError as error:
        raise ExportError(f"{str(file)!r} cannot be read, truncated or not weights: {error}") from error
    return tensors, size


def _no_multiples(shapes: Iterable[torch.Size], rows: int, columns: int) -> str:
    """The shapes with sides that are not multiples of these, each once."""
    odd = dict.fromkeys(shape for shape in shapes if shape[0] % rows or shape[1] % columns)
    return ", ".join(str(list(shape)) for shape in odd)
