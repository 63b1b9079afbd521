"""Reads projections with weights of four bits, without a copy of their words.

compressed-tensors keeps words beside their scales in a plain linear layer, until the model's first forward decompresses
it. bitsandbytes keeps bytes in a parameter with a state. gptqmodel keeps words in its own modules, one class for each
layout. The weight equals the package's own dequantisation, rounded to the model's dtype once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.model_watch import PACKED_FOR_A_CPU
from eagle_triton.engine.model.modules import Projection
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.quantised_modules import (
    CALLED,
    DEQUANTIZE,
    check_outputs,
    is_compressed,
    is_known_compressed,
    plain,
    tensor_of,
    unreadable,
)
from eagle_triton.runtime.four_bit_weight import WORD, FourBitWeight, NestedScale, Packing

BITSANDBYTES, GPTQMODEL = "bitsandbytes", "gptqmodel"
LINEAR = "Linear4bit"
BY_COLUMNS, MARLIN, MARLIN_WITH_ZEROS = ("TorchLinear", "TritonV2Linear"), "MarlinLinear", "AwqMarlinLinear"
"""gptqmodel's classes that are read: with the layout of GPTQ's checkpoints, and with Marlin's."""

BASES = {
    "GPTQQuantLinear": 'GPTQConfig(bits=4, backend="gptq_marlin") or backend="gptq_torch"',
    "AWQuantLinear": 'AwqConfig(backend="marlin")',
}
"""gptqmodel's base classes, and how transformers loads such a layer in a layout that is read."""

QUANTISED_TYPES = ("nf4", "fp4")


def is_four_bit_module(module: nn.Module) -> bool:
    """Whether a module is a linear layer with weights of four bits, from a supported package."""
    if is_compressed(module):
        scheme: Any = module.quantization_scheme
        kind = getattr(scheme.weights, "num_bits", None), getattr(scheme.weights, "type", None)
        words = getattr(module, "weight_packed", None)
        return kind == (4, "int") and isinstance(words, Tensor) and words.dtype == torch.int32
    if _base(module, BITSANDBYTES, (LINEAR,)) is not None:
        return True
    return _base(module, GPTQMODEL, tuple(BASES)) is not None and getattr(module, "bits", None) == 4


def is_known_four_bits(module: nn.Module) -> bool:
    """Whether such a module computes exactly what its package's class does."""
    if is_compressed(module):
        return is_known_compressed(module)
    own = vars(module).get("forward")  # removed hooks of accelerate leave the class's here
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return False
    home = type(module).forward.__module__ or ""
    return home.partition(".")[0] in (BITSANDBYTES, GPTQMODEL)


def read_four_bits(module: nn.Module, path: str, dtype: torch.dtype) -> tuple[Projection, str]:
    """The weight and bias of such a module at the dotted path `path`, in a model of this dtype; and its name in the
    report.

    Raises UnsupportedModelError, with a remedy, for a layout, version or state that is not known.
    """
    remedy = DEQUANTIZE if is_compressed(module) else CALLED
    bias = tensor_of(module, "bias", path, remedy)
    try:
        if is_compressed(module):
            weight, kind = _compressed(module, path), "of compressed-tensors"
        elif _base(module, BITSANDBYTES, (LINEAR,)) is not None:
            weight, kind = _bitsandbytes(module, path)
        elif type(module).__name__ in BY_COLUMNS:
            weight, kind = _by_columns(module, path), "of GPTQ"
        elif type(module).__name__ in (MARLIN, MARLIN_WITH_ZEROS):
            weight, kind = _marlin(module, path), f"of {type(module).__name__}"
            bias = None if bias is None else _in_order(bias, path)
        else:
            raise unreadable(f"{path} is a {type(module).__name__}, and its layout is not read", _other_layout(module))
    except ValueError as error:
        if isinstance(error, UnsupportedModelError):
            raise
        raise unreadable(f"{path}: {error}", remedy) from error  # FourBitWeight's own message
    sizes: Any = (module.out_features, module.in_features)
    if tuple(weight.shape) != sizes:
        raise unreadable(f"{path} must have packed words for {list(sizes)}, got words for {list(weight.shape)}", remedy)
    if weight.table is None and weight.scale.dtype != dtype:
        cast = ", or call it once, which casts them" if weight.packing is Packing.MARLIN else ""
        raise unreadable(
            f"{path} must have scales in {dtype}, the model's dtype, got {weight.scale.dtype}: load the model with "
            f"dtype={weight.scale.dtype}{cast}",
            remedy,
        )
    if bias is not None and (bias.dtype != dtype or tuple(bias.shape) != sizes[:1]):
        raise unreadable(
            f"{path}.bias must be {dtype}, the model's dtype, [{sizes[0]}], got {bias.dtype} {list(bias.shape)}: load "
            "the model in one dtype",
            remedy,
        )
    if not all(part.isfinite().all() for part in weight.tensors if part.is_floating_point()):
        raise UnsupportedModelError(f"{path} must have finite scales", "quantisation")
    return Projection(weight, bias), f"{kind} in groups of {weight.group}"


def _base(module: nn.Module, package: str, names: tuple[str, ...]) -> type | None:
    """The first of a module's base classes that has one of these names and is from this package."""
    for base in type(module).__mro__:
        if base.__name__ in names and base.__module__.partition(".")[0] == package:
            return base
    return None


def _other_layout(module: nn.Module) -> str:
    base = _base(module, GPTQMODEL, tuple(BASES))
    assert base is not None
    return f"load the model with {BASES[base.__name__]}; {CALLED}"


def _required(module: nn.Module, name: str, path: str, remedy: str = CALLED) -> Tensor:
    tensor = tensor_of(module, name, path, remedy)
    if tensor is None:
        raise unreadable(f"{path}.{name} is missing", remedy)
    return tensor.detach()


def _compressed(module: Any, path: str) -> FourBitWeight:
    """The weight of a linear layer that compressed-tensors has not decompressed yet."""
    args = module.quantization_scheme.weights
    check_outputs(module, path)
    if getattr(module, "weight_g_idx", None) is not None:
        raise unreadable(f"{path}.weight_g_idx must be None: groups by activation order are not read", DEQUANTIZE)
    words, scale, shape = (
        _required(module, f"weight_{name}", path, DEQUANTIZE) for name in ("packed", "scale", "shape")
    )
    sizes = [module.out_features, module.in_features]
    if shape.tolist() != sizes or sizes[1] % WORD:
        raise unreadable(
            f"{path}.weight_shape must be {sizes} with whole words of {WORD} columns, got {shape.tolist()}: padded "
            "columns are not read",
            DEQUANTIZE,
        )
    if args.symmetric and getattr(module, "weight_zero_point", None) is not None:
        raise unreadable(f"{path}.weight_zero_point must be None in a symmetric scheme", DEQUANTIZE)
    zero = None if args.symmetric else _required(module, "weight_zero_point", path, DEQUANTIZE)
    group = sizes[1] if args.group_size in (None, -1) else args.group_size
    return FourBitWeight(words, Packing.ROWS, scale, group, zero)


def _bitsandbytes(module: Any, path: str) -> tuple[FourBitWeight, str]:
    weight = module._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    if weight is None or state is None:
        raise unreadable(f"{path}.weight has no quant_state: move the model to its device first, which quantises it")
    if getattr(state, "packing_format_for_cpu", False):
        raise unreadable(f"{path}.weight {PACKED_FOR_A_CPU}")
    rows, depth = sizes = module.out_features, module.in_features
    if state.quant_type not in QUANTISED_TYPES:
        raise unreadable(f"{path}.weight must be {' or '.join(QUANTISED_TYPES)}, got {state.quant_type!r}")
    if tuple(state.shape) != sizes:
        raise unreadable(f"{path}.weight must be quantised as {list(sizes)}, got {list(state.shape)}")
    if depth % state.blocksize:
        raise unreadable(
            f"{path} must have in_features that are a multiple of its blocks of {state.blocksize}, got {depth}: blocks "
            "that span rows are not read"
        )
    where = f"{path}.weight"
    words = _words_of(plain(weight.data, where), where, rows, depth)
    nested, inner = None, getattr(state, "state2", None)
    if inner is not None:
        parts = {"state2.code": inner.code, "state2.absmax": inner.absmax, "offset": state.offset}
        code, absmax, offset = (plain(part, f"{where}.quant_state.{name}") for name, part in parts.items())
        nested = NestedScale(code, absmax, offset, inner.blocksize)
    scale, table = (plain(getattr(state, name), f"{where}.quant_state.{name}") for name in ("absmax", "code"))
    if scale.numel() != rows * depth // state.blocksize or not scale.is_contiguous():
        raise unreadable(f"{where}.quant_state.absmax must hold a number for each block, got {list(scale.shape)}")
    scale = scale.view(rows, depth // state.blocksize)
    found = FourBitWeight(words, Packing.ROWS_HIGH_FIRST, scale, state.blocksize, table=table, nested=nested)
    return found, f"of bitsandbytes ({state.quant_type}{', nested scales' if nested else ''})"


def _words_of(stored: Tensor, where: str, rows: int, depth: int) -> Tensor:
    """Bytes, which may be stored as another dtype, as words [rows, depth / 8]."""
    size, start = stored.numel() * stored.element_size(), stored.storage_offset() * stored.element_size()
    if 2 * size != rows * depth or start % 4 or not stored.is_contiguous():
        raise unreadable(
            f"{where} must hold {rows * depth // 2} bytes, contiguous from a multiple of 4, got {list(stored.shape)}"
        )
    return stored.view(-1).view(torch.uint8).view(torch.int32).view(rows, depth // WORD)


def _by_columns(module: Any, path: str) -> FourBitWeight:
    """The weight of a layer of gptqmodel with the words of a GPTQ checkpoint."""
    _check_gptqmodel(module, path)
    depth, group = module.in_features, module.group_size
    groups = _required(module, "g_idx", path)
    if not torch.equal(groups, torch.arange(depth, device=groups.device, dtype=groups.dtype) // group):
        raise unreadable(f"{path}.g_idx must be k // {group}: columns in another order (desc_act) are not read")
    published = getattr(module, "format", None)
    if getattr(published, "value", published) == "gptq" and module.qzero_format() != 2:
        raise unreadable(
            f"{path}.qzeros must be the zeros, got zeros less 1, as a checkpoint of format 'gptq' stores them: load "
            "the model with gptqmodel or transformers, which add the 1"
        )
    words, scale, zero = (_required(module, name, path) for name in ("qweight", "scales", "qzeros"))
    return FourBitWeight(words, Packing.COLUMNS, scale.T, group, zero.T)


def _marlin(module: Any, path: str) -> FourBitWeight:
    """The weight of a layer of gptqmodel, after its post_init has put the words into Marlin's order."""
    _check_gptqmodel(module, path)
    if getattr(module, "_marlin_tile_padding", None) is not None:
        raise unreadable(f"{path} is padded to {list(module._marlin_tile_padding)}, which is not read")
    if _required(module, "g_idx", path).numel():
        raise unreadable(f"{path}.g_idx must be empty: columns in another order (desc_act) are not read")
    if module.group_size == module.in_features:
        raise unreadable(f"{path} must have several groups of columns: one group's order of scales is not read")
    words, scale = (_required(module, name, path) for name in ("qweight", "scales"))
    zero = None if type(module).__name__ == MARLIN else _required(module, "qzeros", path).T
    return FourBitWeight(words, Packing.MARLIN, scale.T, module.group_size, zero)


def _check_gptqmodel(module: Any, path: str) -> None:
    if getattr(module, "adapter", None) is not None:
        raise unreadable(f"{path}.adapter must be None, got a {type(module.adapter).__name__}")
    if getattr(module, "online_full_had", False) or getattr(module, "online_partial_had", False):
        raise unreadable(f"{path} must not rotate its input")


def _in_order(bias: Tensor, path: str) -> Tensor:
    """A copy of a bias in Marlin's order: element 32i + 8b + 2l + c is at 32i + 8l + 2b + c."""
    if bias.dim() != 1 or len(bias) % 32:
        raise unreadable(f"{path}.bias must be 1-D, its length a multiple of 32, got {list(bias.shape)}")
    return bias.detach().unflatten(0, (-1, 4, 4, 2)).transpose(1, 2).flatten()
