"""Targets by compressed-tensors with packed integers: experts stay in four bits.

transformers would dequantise experts, and would not load zeros. Here its quantizer has a subclass under a name of its
own, which puts a module in place of each layer's experts before the weights are loaded. transformers then stacks words,
scales and zeros as it stacks plain weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from .checkpoint import names_in
from .mxfp4 import NAMES

WORD, MIDDLE = 8, 8  # numbers in a word; the number that stands for zero in a symmetric scheme
AT_ONCE = 2**26  # numbers that are dequantised at once, to save memory
METHOD, FORMAT = "compressed-tensors", "pack-quantized"
OURS = "compressed-tensors with experts in four bits"
"""The subclass's name in transformers' table. The configuration of a loaded model has compressed-tensors' name."""


class FourBitExperts(nn.Module):
    """The experts of a layer, with the tensors of a checkpoint of compressed-tensors, stacked.

    | name            | shape                 | dtype                                                               |
    |-----------------|-----------------------|---------------------------------------------------------------------|
    | NAME_packed     | [E, N, K / 8]         | int32: word c of a row holds number 8c + t in its bits 4t to 4t + 3 |
    | NAME_scale      | [E, N, K / group]     | the model's                                                         |
    | NAME_zero_point | [E, N / 8, K / group] | int32: word r holds the zeros of rows 8r to 8r + 7; missing in a    |
    |                 |                       | symmetric scheme, in which all are 8                                |
    | NAME_shape      | [E, 2]                | int64: N and K; for gate_up_proj [E, 4], those of gate and of up;   |
    |                 |                       | missing where the checkpoint has none                               |

    The forward is transformers'. It runs over weights in the dtype of the input, which are made for the time of the
    call: of the chosen experts, or of all if there are as many choices as experts.
    """

    is_transposed, is_concatenated, has_bias = False, True, False
    _dense: Any  # transformers' module on the meta device: its code runs here; not a submodule

    def __init__(self, experts: Any, group: int | None, symmetric: bool, shapes: bool = True) -> None:
        """experts: transformers' module; only its sizes and code are used. group: columns that share a scale; None:
        all. shapes: the checkpoint has them. Raises ValueError for sizes that are no whole groups and words."""
        super().__init__()
        self.config, self.num_experts = experts.config, experts.num_experts
        self.symmetric, self.shapes = symmetric, shapes
        for name in NAMES:
            dense = getattr(experts, name)
            count, rows, depth = dense.shape
            width = group or depth
            if depth % width or depth % WORD or rows % (2 * WORD):
                raise ValueError(
                    f"experts.{name}, {[rows, depth]} for an expert, must have whole groups of {width} columns, and "
                    f"rows and columns in whole words of {WORD}"
                )
            sizes = {
                "packed": (count, rows, depth // WORD),
                "scale": (count, rows, depth // width),
                "zero_point": (count, rows // WORD, depth // width),
                "shape": (count, 4 if name == NAMES[0] else 2),
            }
            for part, dtype in self.parts(dense.dtype).items():
                tensor = torch.empty(sizes[part], dtype=dtype, device="meta")
                self.register_parameter(f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))
        self.__dict__["_dense"] = experts.to("meta")

    def parts(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The ends of the parameters' names, and their dtypes in a model of this dtype."""
        zeros = {} if self.symmetric else {"zero_point": torch.int32}
        shapes = {"shape": torch.int64} if self.shapes else {}
        return {"packed": torch.int32, "scale": dtype, **zeros, **shapes}

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self._dense._apply_gate(gate_up)

    @torch.no_grad()
    def dequantised(self, name: str, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights [n, N, K] of a projection of the experts with these numbers, int64 [n]; rounded once."""
        words, scales = getattr(self, f"{name}_packed"), getattr(self, f"{name}_scale")
        zeros = getattr(self, f"{name}_zero_point", None)
        _, rows, width = words.shape
        out = words.new_empty(len(experts), rows, width * WORD, dtype=dtype)
        few = max(1, AT_ONCE // (rows * width * WORD))
        for place, some in zip(out.split(few), experts.split(few), strict=True):
            scale = scales[some][..., None]
            numbers = unpacked(words[some]).unflatten(2, (scale.shape[2], -1))
            middle = MIDDLE if zeros is None else unpacked(zeros[some].mT).mT[..., None]
            differences = (numbers - middle).to(torch.promote_types(dtype, scale.dtype))  # exact
            place.copy_(differences.mul_(scale).flatten(2))
        return out

    @torch.no_grad()
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [n, H] by the experts `chosen` [n, k] int64 of each row, times `weights` [n, k]: [n, H]."""
        taken, places = torch.arange(self.num_experts, device=chosen.device), chosen
        if chosen.numel() < self.num_experts:  # only then, because it waits for the device
            taken, places = chosen.unique(return_inverse=True)
        few = copy.copy(self._dense)
        few.num_experts = len(taken)
        few._parameters = {name: self.dequantised(name, taken, x.dtype) for name in NAMES}
        return few(x, places, weights)


def unpacked(words: Tensor) -> Tensor:
    """The numbers in words, 0 to 15, lowest bits first: int32 [..., n] -> int8 [..., 8n]."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).view(torch.int8)


def is_packed(config: Any) -> bool:
    """Whether this is the configuration of a checkpoint of compressed-tensors with packed integers, which this
    transformers can load with `for_packed`."""
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, Mapping) or stored.get("quant_method") != METHOD:
        return False
    groups = (stored.get("config_groups") or {}).values()
    formats = [stored, *(group for group in groups if isinstance(group, Mapping))]
    return Version(transformers.__version__) >= Version("5.24") and any(one.get("format") == FORMAT for one in formats)


def for_packed(config: Any) -> Any:
    """A copy of such a configuration, with which transformers' `from_pretrained` keeps experts in four bits."""
    registered()
    config = copy.deepcopy(config)
    config.quantization_config = {**config.quantization_config, "quant_method": OURS}
    return config


@cache
def registered() -> tuple[Any, Any]:
    """The subclasses of the configuration and of the quantizer, in transformers' tables."""
    from transformers import CompressedTensorsConfig
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    @register_quantization_config(OURS)
    class Config(CompressedTensorsConfig):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**{**fields, "quant_method": METHOD})
            self.quant_method: Any = OURS

    @register_quantizer(OURS)
    class Quantizer(CompressedTensorsHfQuantizer):
        shapes = True  # whether the checkpoint has those of matrices

        def __init__(self, quantization_config: Any, **options: Any) -> None:
            quantization_config.quant_method = QuantizationMethod.COMPRESSED_TENSORS  # it is chosen by now
            super().__init__(quantization_config, **options)

        def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
            super()._process_model_before_weight_loading(model, **options)
            _make_room_for_zeros(model)
            _replace_experts(
                model, self.compressor.quantization_config, self.packed_experts(model, options), self.shapes
            )

        def packed_experts(self, model: Any, options: Mapping[str, Any]) -> set[str]:
            """The paths of stacked experts that the checkpoint has in words."""
            names = stored_names(options["checkpoint_files"])
            packed = any(".experts." in name and name.endswith(".weight_packed") for name in names)
            return {name for name, module in model.named_modules() if packed and is_stacked(module)}

    return Config, Quantizer


def _make_room_for_zeros(model: nn.Module) -> None:
    """Give linear layers the sizes of packed zeros. compressed-tensors 0.20 leaves the sizes of single numbers."""
    for module in model.modules():
        zeros, words = (module._parameters.get(f"weight_{name}") for name in ("zero_point", "packed"))
        if words is not None and zeros is not None and zeros.dtype != torch.int32:
            scheme: Any = module.quantization_scheme
            bits = scheme.weights.num_bits
            room = torch.empty(-(-zeros.shape[0] * bits // 32), *zeros.shape[1:], dtype=torch.int32, device="meta")
            module.weight_zero_point = nn.Parameter(room, requires_grad=False)


def stored_names(files: Iterable[str] | None) -> set[str]:
    """The names of all tensors in these files."""
    return {name for file in files or () for name in names_in(Path(file))}


def _replace_experts(model: Any, config: Any, paths: Iterable[str], shapes: bool = True) -> None:
    """Put FourBitExperts in place of stacked experts if the scheme of experts has integers of four bits."""
    from transformers.integrations.compressed_tensors import get_experts_scheme

    args = get_experts_scheme(config).weights
    if args is None or (args.num_bits, args.type) != (4, "int"):
        return
    for path in paths:
        experts = FourBitExperts(model.get_submodule(path), args.group_size, args.symmetric, shapes)
        model.set_submodule(path, experts)


def is_stacked(module: nn.Module) -> bool:
    """Whether a module has transformers' usual layout of stacked experts, [E, N, K] without biases."""
    return (
        module._parameters.keys() == {*NAMES}
        and getattr(module, "is_transposed", None) is False
        and getattr(module, "is_concatenated", None) is True
    )
