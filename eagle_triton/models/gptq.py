"""Targets by GPTQ and AWQ, loaded into the layout of compressed-tensors, experts too.

gptqmodel, the package of both formats, replaces linear layers only, so experts, which transformers 5 stacks in one
module, would stay random. Here words, scales and zeros are put in rows while they are loaded, and four_bit_experts.py
does the rest. The numbers do not change. Targets without experts are loaded so if gptqmodel is not installed.

| format | qweight, int32                                | qzeros, int32                                              |
|--------|-----------------------------------------------|------------------------------------------------------------|
| GPTQ   | [K / 8, N]: word (r, n) holds the numbers of  | [K / group, N / 8]: word (g, c) holds the zeros of columns |
|        | rows 8r to 8r + 7, the first in its low bits  | 8c to 8c + 7; less 1 in the first version of the format    |
| AWQ    | [K, N / 8]: word (k, c) holds the numbers of  | [K / group, N / 8], in the same order of columns           |
|        | columns 8c + 0, 2, 4, 6, 1, 3, 5 and 7        |                                                            |

scales are [K / group, N] in 16 bits. g_idx [K] int32 is the group of each row of GPTQ.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from torch import Tensor, nn

from .four_bit_experts import FORMAT, MIDDLE, WORD, is_stacked, registered, stored_names, unpacked
from .mxfp4 import NAMES

METHODS = ("gptq", "awq")
WORDS = ("qweight", "qzeros", "g_idx")  # of a matrix
OURS = "GPTQ or AWQ in the layout of compressed-tensors"
"""The quantizer's name in transformers' table."""

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How configurations name the number of experts."""

READ = {
    *("act_bits", "backend", "bits", "data_type", "desc_act", "dynamic", "group_size", "method", "pack_dtype"),
    *("q_group_size", "quant_method", "sym", "w_bit", "zero_point"),
}
LAYOUT = ("version", "checkpoint_format", "format")  # the first that there is
WITHOUT_EFFECT = {
    *("act_group_aware", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment"),
    *("damp_percent", "dataset", "gptaq", "max_input_length", "meta", "model_file_base_name", "model_name_or_path"),
    *("model_seqlen", "module_name_preceding_first_block", "mse", "offload_to_disk", "pad_token_id", "static_groups"),
    *("tokenizer", "true_sequential", "modules_in_block_to_quantize", "modules_to_not_convert"),
    *("disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"),
    *("use_cuda_fp16", "use_exllama"),
    # of auto-round, which writes both formats
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp", "autoround_version", "enable_minmax_tuning"),
    *("enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps", "iters", "low_gpu_mem_usage"),
    *("lr", "minmax_lr", "nsamples", "provider", "quant_block_list", "scale_dtype", "seqlen", "supported_types"),
    *("to_quant_block_names",),
}
"""Fields for the calibration, for other kernels, and for which layers are quantised. The last are not needed, because
the stored tensors show this."""


class UnreadableError(BaseException):
    """Why a matrix is not read. transformers catches every Exception of a conversion, and shows it in a log only."""


def is_gptq(config: Any) -> bool:
    """Whether this is the configuration of a checkpoint by GPTQ or AWQ, which this transformers can load with
    `for_gptq`, and no other package loads."""
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, Mapping) or stored.get("quant_method") not in METHODS:
        return False
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ours = any(getattr(text, name, None) for name in COUNTS) or find_spec("gptqmodel") is None
    return ours and Version(transformers.__version__) >= Version("5.24")


def for_gptq(config: Any) -> Any:
    """A copy of such a configuration, with which transformers' `from_pretrained` keeps the weights in four bits. Raises
    ValueError like `scheme_of`, and without compressed-tensors."""
    config, stored = copy.deepcopy(config), dict(config.quantization_config)
    if find_spec("compressed_tensors") is None:
        raise ValueError(f"weights by {stored['quant_method']} need the package compressed-tensors: install it")
    _register()
    config.quantization_config = {
        "quant_method": OURS,
        "stored": stored,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme_of(stored)}},
    }
    return config


def scheme_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What the weights are, in the terms of compressed-tensors. stored: the checkpoint's quantization_config. Raises
    ValueError for a field that asks for another layout or is not known."""
    method, layout = stored["quant_method"], _layout_of(stored)
    group, dynamic = stored.get("group_size", stored.get("q_group_size", 128)), stored.get("dynamic") or {}
    found: dict[str, tuple[Any, bool]] = {
        "bits": (bits := stored.get("bits", stored.get("w_bit")), bits == 4),
        "version or format": (layout, layout in (("gemm",) if method == "awq" else ("gptq", "gptq_v2"))),
        "group_size": (group, isinstance(group, int) and (group == -1 or group > 0)),
        "desc_act": (stored.get("desc_act"), not stored.get("desc_act")),
        "pack_dtype": (stored.get("pack_dtype"), stored.get("pack_dtype") in ("int32", None)),
        "backend": (stored.get("backend"), stored.get("backend") != "llm-awq"),  # of another order
        "method": (stored.get("method"), stored.get("method") in (method, None)),
        "data_type": (stored.get("data_type"), stored.get("data_type") in ("int", None)),
        "act_bits": (stored.get("act_bits"), (stored.get("act_bits") or 16) >= 16),  # 16: inputs are not rounded
        "dynamic": (
            dynamic,
            isinstance(dynamic, Mapping)
            and all(name.startswith("-:") or rule in ({}, True) for name, rule in dynamic.items()),
        ),
    }
    others = stored.keys() - {*READ, *LAYOUT, *WITHOUT_EFFECT}
    found |= {name: (stored[name], not stored[name]) for name in others}
    if wrong := [f"{name} = {value!r}" for name, (value, readable) in sorted(found.items()) if not readable]:
        raise ValueError(f"weights by {method} with {', '.join(wrong)} in quantization_config are not read")
    sizes = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    symmetric = not stored.get("zero_point", True) if method == "awq" else stored.get("sym", True)
    return {"num_bits": 4, "type": "int", "symmetric": bool(symmetric), "dynamic": False, **sizes}


def _layout_of(stored: Mapping[str, Any]) -> str:
    named = (stored[name] for name in LAYOUT if stored.get(name))
    return str(next(named, "gemm" if stored["quant_method"] == "awq" else "gptq")).lower()


def in_rows(
    layout: str, symmetric: bool, words: Tensor, zeros: Tensor, groups: Tensor | None = None
) -> tuple[Tensor, ...]:
    """A matrix [N, K] as compressed-tensors has it: words [N, K / 8], and unless `symmetric` zeros [N / 8, K / group].

    layout: gptq, gptq_v2 or gemm. words, zeros: qweight and qzeros. groups: g_idx. Raises ValueError for rows that are
    not in the order of their groups, for zeros of a symmetric matrix that are not 8, and for zeros that may be 0 or 16.
    """
    if any(part.dtype != torch.int32 or part.dim() != 2 for part in (words, zeros)):
        kinds = [f"{part.dtype} {list(part.shape)}" for part in (words, zeros)]
        raise ValueError(f"its qweight and qzeros must be int32 matrices, got {' and '.join(kinds)}")
    points, depth = unpacked(zeros), len(words) * (1 if layout == "gemm" else WORD)
    if groups is not None:
        in_order = torch.arange(depth, device=groups.device) * len(points) // depth
        if not torch.equal(groups.long(), in_order):
            raise ValueError("its g_idx must be in the order of its groups (desc_act is not read)")
    if layout == "gemm":
        words, points = _packed(_in_order(unpacked(words)).T.contiguous()), _in_order(points)
    else:
        words = words.T.contiguous()
    if layout == "gptq":
        if (points == 15).any():
            raise ValueError("its qzeros are stored less 1, so that 15 may mean 0 or 16: save it in format gptq_v2")
        points = points + 1
    if symmetric:
        if (points != MIDDLE).any():
            raise ValueError("its scheme is symmetric, so all qzeros must mean 8, and some do not")
        return (words,)
    return words, _packed(points).T.contiguous()


def _in_order(numbers: Tensor) -> Tensor:
    """Numbers [..., 8n] from AWQ's words, in the order of the columns."""
    return numbers.unflatten(-1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(-2)


def _packed(numbers: Tensor) -> Tensor:
    """The inverse of `unpacked`: int8 [..., 8n] -> int32 [..., n]."""
    pairs = numbers.view(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)


@cache
def _register() -> None:
    """Add the quantizer to transformers' table."""
    from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter
    from transformers.quantizers.auto import register_quantization_config, register_quantizer

    OurConfig: Any
    OurQuantizer: Any
    OurConfig, OurQuantizer = registered()

    class InRows(ConversionOps):
        """`in_rows` of a layer's matrix, with its shape, or of all experts', stacked, with gate above up."""

        supports_many_to_many = True

        def __init__(self, layout: str, symmetric: bool, stacked: bool) -> None:
            self.layout, self.symmetric, self.stacked = layout, symmetric, stacked

        @torch.no_grad()
        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **where: Any
        ) -> dict[str, Any]:
            try:
                return self._converted(input_dict, source_patterns, target_patterns)
            except Exception as error:
                raise UnreadableError(f"{where['full_layer_name']}: {error}") from error

        def _converted(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str]
        ) -> dict[str, Any]:
            projections: dict[str, dict[str, Any]] = {}
            for pattern in source_patterns:
                projection, _, name = pattern.rpartition(".")
                projections.setdefault(projection, {})[name] = input_dict.pop(pattern, [])
            parts: list[tuple[Tensor, ...]] = []
            for tensors in projections.values():
                counts = {name: len(found) for name, found in tensors.items() if found or name != "g_idx"}
                if len({*counts.values()}) > 1 or not counts["qweight"]:
                    raise ValueError(f"there must be one tensor of each kind for a matrix, got {counts}")
                places = tensors["g_idx"] or [None] * counts["qweight"]
                stored = zip(tensors["qweight"], tensors["qzeros"], places, strict=True)
                rows = [in_rows(self.layout, self.symmetric, *each) for each in stored]
                parts.append(tuple(map(torch.stack, zip(*rows, strict=True))))
            found = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
            if not self.stacked:
                found = [words, *_] = [part[0] for part in found]
                count, width = words.shape
                found.insert(1, words.new_tensor([count, WORD * width], dtype=torch.int64))
            return dict(zip(target_patterns, found, strict=True))

    class Transposed(ConversionOps):
        """Transposes each matrix of the lists."""

        def convert(self, input_dict: dict[str, Any], *_: Any, **where: Any) -> dict[str, Any]:
            for pattern, matrices in input_dict.items():
                if len(shapes := {matrix.shape for matrix in matrices}) > 1:
                    shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
                    raise UnreadableError(f"{where['full_layer_name']}: {pattern} has matrices of {shown}")
            return {pattern: [matrix.T for matrix in matrices] for pattern, matrices in input_dict.items()}

    @register_quantization_config(OURS)
    class Config(OurConfig):
        def __init__(self, stored: Mapping[str, Any], **fields: Any) -> None:
            super().__init__(**fields)
            self.stored, self.quant_method = stored, OURS

    @register_quantizer(OURS)
    class Quantizer(OurQuantizer):
        shapes = False

        def __init__(self, quantization_config: Any, **options: Any) -> None:
            self.stored = quantization_config.stored
            self.symmetric = scheme_of(self.stored)["symmetric"]
            super().__init__(quantization_config, **options)

        def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
            files = options["checkpoint_files"] or ()
            names = _names_in(model, stored_names(files))
            _ignore_zero_biases(model, names, files)
            self.in_words = {name for name, stored in names.items() if stored.endswith(".qweight")}
            linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
            quantised = {name for name in linear if f"{name}.weight" in self.in_words}
            self.compressor.quantization_config.ignore = [*(linear - quantised)]
            super()._process_model_before_weight_loading(model, **options)

        def packed_experts(self, model: Any, _: Mapping[str, Any]) -> set[str]:
            stacked = {name for name, module in model.named_modules() if is_stacked(module)}
            return {name for name in stacked if f"{name}.{NAMES[0]}" in self.in_words}

        def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
            params, zeros = dict(model.named_parameters()), [] if self.symmetric else ["zero_point"]
            found, layout = list[Any](), _layout_of(self.stored)
            for converter in weight_conversions:
                found.append(converter)
                (target, *_), sources = converter._original_target_patterns, converter._original_source_patterns
                stacked = any(name.endswith(f"{target}_packed") for name in params)
                if not stacked or not isinstance(converter, WeightConverter):
                    continue
                starts = [source.removesuffix("weight") for source in sources]
                targets = [f"{target}_{part}" for part in ("packed", *zeros)]
                read = [start + word for start in starts for word in WORDS]
                found.append(converter.copy(read, targets, operations=[InRows(layout, self.symmetric, True)]))
                scales = [f"{start}scales" for start in starts]
                operations = [Transposed(), *converter.operations]
                found.append(converter.copy(scales, [f"{target}_scale"], operations=operations))
            targets = [f"weight_{part}" for part in ("packed", "shape", *zeros)]
            found.append(WeightConverter([*WORDS], targets, [InRows(layout, self.symmetric, False)]))
            found.append(WeightConverter(["scales"], ["weight_scale"], [Transpose(0, 1)]))
            return found

        def is_serializable(self) -> bool:
            raise ValueError("weights by GPTQ and AWQ are not written again: use the checkpoint they come from")


def _names_in(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """The stored names, by the names of the model's tensors that they become or are a part of. A qweight counts as a
    weight."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules, known = get_model_conversion_mapping(model), dict.fromkeys(model.state_dict(), True)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    weights = {re.sub(r"\.qweight$", ".weight", name): name for name in stored}
    prefix = model.base_model_prefix
    return {rename_source_key(name, renamings, converters, prefix, known)[0]: weights[name] for name in weights}


def _ignore_zero_biases(model: Any, names: Mapping[str, str], files: Iterable[str]) -> None:
    """Let the loading pass over biases of zeros, which some versions of the packages write for layers that have none.
    Raises ValueError for others. names: see _names_in."""
    if not all(str(file).endswith(".safetensors") for file in files):
        return
    stored = stored_names(files)
    biases = {names[name] for name in names.keys() - model.state_dict().keys() if name.endswith(".bias")}
    ends = {name.split(".")[-2] for name in biases if f"{name.removesuffix('bias')}qweight" in stored}
    biases = {name for name in biases if name.split(".")[-2] in ends}
    for file in files if biases else ():
        with safe_open(file, "pt") as tensors:
            for name in sorted(biases.intersection(tensors.keys())):
                if tensors.get_tensor(name).any():
                    raise ValueError(f"it has {name}, which is not zero, and the model has no such bias")
    ignored = {rf"\.{re.escape(end)}\.bias$" for end in ends}
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}
