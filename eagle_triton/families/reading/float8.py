"""Reads projections with published FP8 weights: values of eight bits and their scales.

transformers keeps them in its own modules; torchao in its own tensor, the weight of a plain linear layer;
compressed-tensors in a plain linear layer beside the scale, until the model's first forward decompresses them. Most of
them also round their inputs to eight bits before they multiply. Here the inputs are not rounded
(`activations="exact"`), or the module is called (`"as published"`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.module_kinds import is_sharded_tensor, is_tensor_parallel_forward, stored_tensors
from eagle_triton.engine.model.modules import Projection
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.module_reader import FLOAT8
from eagle_triton.families.reading.quantised_modules import (
    CALLED,
    DEQUANTIZE,
    SCALES,
    check_outputs,
    is_compressed,
    is_known_compressed,
    name_of_scale,
    plain,
    tensor_of,
    unreadable,
)
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight

WRAPPER, WRAPPED = "Float8Tensor", ("qdata", "scale")
"""torchao's tensor with FP8 weights, and the names of its parts. Its `block_size` is the number of rows and columns
that share a scale."""


def is_float8_module(module: nn.Module) -> bool:
    """Whether a module's class holds FP8 weights, or it is a linear layer with a weight that is compressed to FP8 or
    wraps FP8."""
    return (
        name_of_scale(module) is not None
        or _wraps_float8(module)
        or (is_compressed(module) and _dtype(module) in FLOAT8)
    )


def _dtype(module: nn.Module) -> torch.dtype | None:
    return getattr(getattr(module, "weight", None), "dtype", None)


def holds_float8(module: nn.Module) -> bool:
    """Whether any parameter inside a module is in FP8."""
    return any(part.dtype in FLOAT8 for tensor in module.parameters() for part in stored_tensors(tensor))


def _wraps_float8(module: nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None) if isinstance(module, nn.Linear) else None
    if not isinstance(weight, Tensor) or is_sharded_tensor(weight) or not hasattr(weight, "__tensor_flatten__"):
        return False
    return any(part.dtype in FLOAT8 and part.numel() == weight.numel() for part in stored_tensors(weight))


def is_known_float8(module: nn.Module) -> bool:
    """Whether a module computes exactly what its known class does: one of SCALES, or a linear layer with a compressed
    weight or torchao's."""
    kind, own = type(module), vars(module).get("forward")
    if is_compressed(module):
        return is_known_compressed(module)
    if own is not None and not is_tensor_parallel_forward(own):
        return False
    if _wraps_float8(module):
        weight: Any = module.weight
        named = any(base.__name__ == WRAPPER for base in type(weight).__mro__)
        return kind is nn.Linear and named and tuple(weight.__tensor_flatten__()[0]) == WRAPPED
    return any(base.__name__ in SCALES and vars(base).get("forward") is kind.forward for base in kind.__mro__)


def read_float8(module: nn.Module, path: str, dtype: torch.dtype) -> Projection:
    """The weight, scales and bias of such a module at the dotted path `path`, in a model of this dtype. If ranks share
    it, this rank's part, as checked by `sharded.check_sharding`.

    Raises UnsupportedModelError unless they are e4m3 without NaN, with finite scales for blocks of 128, rows or all.
    """
    remedy = DEQUANTIZE if is_compressed(module) else CALLED
    check_outputs(module, path)
    name, weight, of_scale, scale, blocks = _parts(module, path, remedy)
    if weight is None or weight.dtype != torch.float8_e4m3fn or weight.dim() != 2 or weight.stride(1) != 1:
        got = "nothing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        message = f"{path}.{name} must be float8_e4m3fn [out, in], rows contiguous, got {got}"
        if weight is not None and weight.element_size() > 1:  # cast: the module does not apply its scale to it
            raise UnsupportedModelError(message, "quantisation")
        raise unreadable(message, remedy)
    whole = module.weight.shape if isinstance(module.weight, Tensor) else weight.shape
    if isinstance(module, nn.Linear) and tuple(whole) != (module.out_features, module.in_features):
        sizes = [module.out_features, module.in_features]
        raise UnsupportedModelError(f"{path}.{name} must be {sizes}, got {list(whole)}", "quantisation")
    if scale is None:
        raise UnsupportedModelError(
            f"{path}.{of_scale} is missing: the weight's numbers mean nothing without it", "quantisation"
        )
    if blocks is not None and tuple(blocks) != (BLOCK, BLOCK):
        raise unreadable(f"{path} must have scales for blocks of {BLOCK} by {BLOCK}, got {list(blocks)}", remedy)
    try:
        found = Float8Weight(weight.detach(), _as_read(scale.detach(), len(weight), blocks is not None))
    except ValueError as error:
        raise unreadable(f"{path}.{of_scale}: {error}", remedy) from error
    if not found.scale.isfinite().all():
        raise UnsupportedModelError(f"{path}.{of_scale} must be finite", "quantisation")
    if has_nan(found.values):
        raise UnsupportedModelError(f"{path}.{name} must be finite, got NaN", "quantisation")
    bias = tensor_of(module, "bias", path, remedy)
    if bias is not None and (bias.dtype != dtype or tuple(bias.shape) != (len(weight),)):
        raise unreadable(f"{path}.bias must be {dtype} [{len(weight)}], got {bias.dtype} {list(bias.shape)}", remedy)
    return Projection(found, bias)


class _Parts(NamedTuple):
    """The parts of a module's weight, with their names inside the module."""

    name: str
    values: Tensor | None
    of_scale: str
    scale: Tensor | None
    blocks: tuple[int, ...] | None  # rows and columns that share a scale; None: whole rows, or all


def _parts(module: nn.Module, path: str, remedy: str) -> _Parts:
    if not _wraps_float8(module):
        if is_compressed(module):
            scheme: Any = module.quantization_scheme
            name, blocks = "weight_scale", getattr(scheme.weights, "block_structure", None)
            if getattr(module, "weight_zero_point", None) is not None:
                raise unreadable(f"{path}.weight_zero_point must be None: the weight's numbers are signed", remedy)
        else:
            name = name_of_scale(module) or ""
            blocks = getattr(module, "block_size", None)
        values, scale = (tensor_of(module, part, path, remedy) for part in ("weight", name))
        return _Parts("weight", values, name, scale, blocks)
    weight = module._parameters.get("weight")
    if weight is None:
        raise unreadable(f"{path}.weight must be a parameter, so that changes are seen")
    names = [f"weight.{name}" for name in WRAPPED]
    values, scale = (
        None if getattr(weight, part) is None else plain(getattr(weight, part), f"{path}.{name}")
        for part, name in zip(WRAPPED, names, strict=True)
    )
    if values is None or scale is None:
        return _Parts(names[0], values, names[1], scale, None)
    if values.shape != weight.shape:
        raise unreadable(f"{path}.{names[0]} must be {list(weight.shape)} as the weight, got {list(values.shape)}")
    return _Parts(names[0], values, names[1], scale, _blocks(values, scale, getattr(weight, "block_size", None), path))


def _blocks(values: Tensor, scale: Tensor, size: Any, path: str) -> tuple[int, ...] | None:
    """Rows and columns that share a scale, by the scale's shape, by which torchao multiplies; None for whole rows, or
    all. Raises UnsupportedModelError if the tensor's own block_size differs."""
    whole = tuple(values.shape)
    parts = (1,) * len(whole) if scale.numel() == 1 else tuple(scale.shape)
    if len(parts) != len(whole) or any(not n or of % n for of, n in zip(whole, parts, strict=True)):
        raise unreadable(f"{path}.weight.scale must divide the weight's {list(whole)} evenly, got {list(scale.shape)}")
    shared = tuple(of // n for of, n in zip(whole, parts, strict=True))
    if size and tuple(size) != shared:
        raise unreadable(f"{path}.weight.block_size must be {list(shared)} with these scales, got {list(size)}")
    return None if shared in (whole, (1, *whole[1:])) else shared


def has_nan(values: Tensor) -> bool:
    """Whether a float8_e4m3fn tensor holds NaN, the bits 0x7f and 0xff. It has no infinities."""
    rows = values.view(torch.uint8)
    return bool((rows.bitwise_and(0x7F) == 0x7F).any())


def _as_read(scale: Tensor, rows: int, in_blocks: bool) -> Tensor:
    """The scales in a Float8Weight's form, in their own memory: [rows, 1], even if stored as one row."""
    if in_blocks:
        return scale
    if scale.numel() == 1:
        return scale.view(1, 1)
    return scale.view(rows, 1) if tuple(scale.shape) in ((rows,), (1, rows)) and scale.is_contiguous() else scale
