"""Projections that were published with FP8 weights, read as what they are: values of eight bits and their scales.

transformers keeps them in modules of its own, torchao in a tensor of its own, which a plain linear layer has for a
weight, compressed-tensors beside the scale in a plain linear layer, until the model's first forward decompresses it.
Most of them round their inputs to eight bits too before they multiply. Here the inputs stay as they are
(`activations="exact"`), or the module is called (`"as published"`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.module_kinds import (
    has_experts,
    is_mixture,
    is_plain_tensor,
    is_sharded_tensor,
    is_tensor_parallel_forward,
    local_part,
    stored_tensors,
)
from eagle_triton.engine.model.modules import Projection, with_projections
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.float8_modules import SCALES, name_of_scale
from eagle_triton.families.reading.module_reader import FLOAT8
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight

EXACT, AS_PUBLISHED = "exact", "as published"
ACTIVATIONS = (EXACT, AS_PUBLISHED)
REMEDY = f'; activations="{AS_PUBLISHED}" calls the module as it is'

WRAPPER, WRAPPED = "Float8Tensor", ("qdata", "scale")
"""torchao's tensor with FP8 weights, and all that it is made of. Its `block_size` are the rows and
columns that share a scale."""


COMPRESSED, FORWARD = "compressed", "compressed_tensors.quantization."
"""What compressed-tensors calls the state of a layer before the first forward, and where that layer's comes from."""


class Float8Reading(NamedTuple):
    """A target and its draft with their FP8 projections as they are to be run."""

    view: ModelView
    draft: Draft | None
    modules: frozenset[nn.Module]  # whose weights are read
    note: str | None  # what a report says of them, None where there are none


def check_activations(activations: str) -> None:
    """Raise ValueError for what `with_float8` does not know."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be {' or '.join(map(repr, ACTIVATIONS))}, got {activations!r}")


def with_float8(
    view: ModelView, draft: Draft | None, roots: Mapping[str, nn.Module], activations: str = EXACT
) -> Float8Reading:
    """What was read of the models, with FP8 modules read by weights and scales; nothing is copied.

    roots: the models that it was read from, by the names that messages call them. activations: "as published" leaves
    the modules to be called as they are. Raises UnsupportedModelError for FP8 weights that cannot be read, and for
    those that ranks share and that would be called; ValueError for "as published" where there are none.
    """
    paths = {module: f"{root}.{path}" for root, model in roots.items() for path, module in model.named_modules()}
    read: dict[nn.Module, Projection] = {}
    called: set[nn.Module] = set()

    def change(projection: Projection) -> Projection:
        module = projection.module
        if not isinstance(module, nn.Module) or not is_float8_module(module):
            return projection
        path = paths.get(module, type(module).__name__)
        if activations == AS_PUBLISHED or not _is_known(module):
            if _is_sharded(module):
                raise UnsupportedModelError(
                    f"{path}.weight is sharded over several devices (tp_plan), and a module that is called as it is "
                    f'must be whole: ranks share FP8 weights where activations="{EXACT}" and the module is of '
                    f"{', '.join(SCALES)} and has their forward",
                    "devices",
                )
            called.add(module)
            return projection
        if module not in read:
            read[module] = _with_ranks(read_float8(module, path, view.dtype), projection)
        return read[module]

    view, draft = with_projections(view, change), with_projections(draft, change)
    for module, path in paths.items():
        if _is_compressed(module) and module not in read:
            raise UnsupportedModelError(
                f"{path} is compressed until the model's own forward runs, and cannot be called before: load it with "
                "CompressedTensorsConfig(dequantize=True)",
                "quantisation",
            )
    mixtures = [module if is_mixture(module) else module.experts for module in paths if has_experts(module)]
    experts = sum(isinstance(mixture, nn.Module) and _holds_float8(mixture) for mixture in mixtures)
    if activations == AS_PUBLISHED and not (called or experts):
        raise ValueError(f'activations="{AS_PUBLISHED}": no projection of the model has FP8 weights')
    notes = []
    if read:
        notes.append(
            f"{EXACT}: {len(read)} FP8 projections are read by their weights, and their inputs are not rounded"
        )
    if called:
        notes.append(f"{AS_PUBLISHED}: {len(called)} FP8 projections are called as they are, and round as they do")
    if experts:
        notes.append(f"{experts} mixtures of experts with FP8 weights are called as they are, and round as they do")
    return Float8Reading(view, draft, frozenset(read), "; ".join(notes) or None)


def note_on_called(projections: Sequence[tuple[str, nn.Module]]) -> str | None:
    """What a report says of projections, by their dotted paths, that are called as the modules they are, but for those
    with FP8 weights, of which `Float8Reading.note` tells; None if there are none."""
    others = [(path, module) for path, module in projections if not is_float8_module(module)]
    if not others:
        return None
    kinds = Counter(_name_of_class(module) for _, module in others)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{len(others)} are called as the modules they are, in their own time: {named}; the first is {others[0][0]}"


def _name_of_class(module: nn.Module) -> str:
    package = type(module).__module__.partition(".")[0]
    own = " with a forward of its own" if "forward" in vars(module) else ""
    return f"{package}.{type(module).__name__}{own}"


def _with_ranks(found: Projection, shared: Projection) -> Projection:
    """What was found, shared as the projection in whose place it comes. One rank adds the bias of what is summed."""
    ranks = shared.summed_over
    bias = found.bias if ranks is None or ranks.rank == 0 else None
    return Projection(found.weight, bias, summed_over=ranks, joined_over=shared.joined_over)


def _is_sharded(module: nn.Module) -> bool:
    return any(is_sharded_tensor(tensor) for tensor in module.parameters(recurse=False))


def is_float8_module(module: nn.Module) -> bool:
    """Whether a module is of a class that holds FP8 weights, or a linear layer whose weight is compressed to such or
    wraps them."""
    return (
        name_of_scale(module) is not None
        or _wraps_float8(module)
        or (_is_compressed(module) and _dtype(module) in FLOAT8)
    )


def _is_compressed(module: nn.Module) -> bool:
    """Whether compressed-tensors still has to decompress a module."""
    status: Any = getattr(module, "quantization_status", None)
    return getattr(module, "quantization_scheme", None) is not None and getattr(status, "value", status) == COMPRESSED


def _dtype(module: nn.Module) -> torch.dtype | None:
    return getattr(getattr(module, "weight", None), "dtype", None)


def _holds_float8(module: nn.Module) -> bool:
    return any(part.dtype in FLOAT8 for tensor in module.parameters() for part in stored_tensors(tensor))


def _wraps_float8(module: nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None) if isinstance(module, nn.Linear) else None
    if not isinstance(weight, Tensor) or is_sharded_tensor(weight) or not hasattr(weight, "__tensor_flatten__"):
        return False
    return any(part.dtype in FLOAT8 and part.numel() == weight.numel() for part in stored_tensors(weight))


def _is_known(module: nn.Module) -> bool:
    """Whether a module computes what one of the classes in SCALES does, or a linear layer with a compressed weight or
    torchao's, and nothing of its own around the same weights."""
    kind, own = type(module), vars(module).get("forward")
    if _is_compressed(module):
        source = getattr(getattr(own, "__func__", None), "__globals__", {}).get("__name__", "")
        return kind is nn.Linear and (own is None or source.startswith(FORWARD))
    if own is not None and not is_tensor_parallel_forward(own):
        return False
    if _wraps_float8(module):
        weight: Any = module.weight
        named = any(base.__name__ == WRAPPER for base in type(weight).__mro__)
        return kind is nn.Linear and named and tuple(weight.__tensor_flatten__()[0]) == WRAPPED
    return any(base.__name__ in SCALES and vars(base).get("forward") is kind.forward for base in kind.__mro__)


def read_float8(module: nn.Module, path: str, dtype: torch.dtype) -> Projection:
    """The weight, scales and bias of such a module, whose dotted path is `path`, in a model of some dtype: this rank's
    part of them where ranks share it, as `sharded.check_sharding` has found it to be.

    Raises UnsupportedModelError unless they are e4m3 without NaN, with finite scales for blocks of 128, rows or all.
    """
    name, weight, of_scale, scale, blocks = _parts(module, path)
    if weight is None or weight.dtype != torch.float8_e4m3fn or weight.dim() != 2 or weight.stride(1) != 1:
        got = "nothing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        message = f"{path}.{name} must be float8_e4m3fn [out, in], rows contiguous, got {got}"
        if weight is not None and weight.element_size() > 1:  # a cast, to which the module does not apply its scale
            raise UnsupportedModelError(message, "quantisation")
        raise _unreadable(message)
    whole = module.weight.shape if isinstance(module.weight, Tensor) else weight.shape
    if isinstance(module, nn.Linear) and tuple(whole) != (module.out_features, module.in_features):
        sizes = [module.out_features, module.in_features]
        raise UnsupportedModelError(f"{path}.{name} must be {sizes}, got {list(whole)}", "quantisation")
    if scale is None:
        raise UnsupportedModelError(
            f"{path}.{of_scale} is missing: what the weight's numbers stand for is not known", "quantisation"
        )
    if blocks is not None and tuple(blocks) != (BLOCK, BLOCK):
        raise _unreadable(f"{path} must have scales for blocks of {BLOCK} by {BLOCK}, got {list(blocks)}")
    try:
        found = Float8Weight(weight.detach(), _as_read(scale.detach(), len(weight), blocks is not None))
    except ValueError as error:
        raise _unreadable(f"{path}.{of_scale}: {error}") from error
    if not found.scale.isfinite().all():
        raise UnsupportedModelError(f"{path}.{of_scale} must be finite, and is not", "quantisation")
    if has_nan(found.values):
        raise UnsupportedModelError(f"{path}.{name} must be finite, and holds NaN", "quantisation")
    bias = _tensor(module, "bias", path)
    if bias is not None and (bias.dtype != dtype or tuple(bias.shape) != (len(weight),)):
        raise _unreadable(f"{path}.bias must be {dtype} [{len(weight)}], got {bias.dtype} {list(bias.shape)}")
    return Projection(found, bias)


class _Parts(NamedTuple):
    """What a module's weight is made of, by its names below the module."""

    name: str
    values: Tensor | None
    of_scale: str
    scale: Tensor | None
    blocks: tuple[int, ...] | None  # that share a scale; None: rows, or all


def _parts(module: nn.Module, path: str) -> _Parts:
    if not _wraps_float8(module):
        if _is_compressed(module):
            scheme: Any = module.quantization_scheme
            name, blocks = "weight_scale", getattr(scheme.weights, "block_structure", None)
            if getattr(module, "weight_zero_point", None) is not None:
                raise _unreadable(f"{path}.weight_zero_point must be none, the weight's numbers being signed")
        else:
            name = name_of_scale(module) or ""
            blocks = getattr(module, "block_size", None)
        return _Parts("weight", _tensor(module, "weight", path), name, _tensor(module, name, path), blocks)
    weight = module._parameters.get("weight")
    if weight is None:
        raise _unreadable(f"{path}.weight must be a parameter, so that changes are seen")
    names = [f"weight.{name}" for name in WRAPPED]
    values, scale = (
        None if getattr(weight, part) is None else _plain(getattr(weight, part), f"{path}.{name}")
        for part, name in zip(WRAPPED, names, strict=True)
    )
    if values is None or scale is None:
        return _Parts(names[0], values, names[1], scale, None)
    if values.shape != weight.shape:
        raise _unreadable(f"{path}.{names[0]} must be {list(weight.shape)} as the weight, got {list(values.shape)}")
    return _Parts(names[0], values, names[1], scale, _blocks(values, scale, getattr(weight, "block_size", None), path))


def _blocks(values: Tensor, scale: Tensor, size: Any, path: str) -> tuple[int, ...] | None:
    """Rows and columns that share a scale, by the scale's shape, which is what torchao multiplies by; None for whole
    rows, or all. Raises UnsupportedModelError where the size that the tensor names is another."""
    whole = tuple(values.shape)
    parts = (1,) * len(whole) if scale.numel() == 1 else tuple(scale.shape)
    if len(parts) != len(whole) or any(not n or of % n for of, n in zip(whole, parts, strict=True)):
        raise _unreadable(f"{path}.weight.scale must divide the weight's {list(whole)} evenly, got {list(scale.shape)}")
    shared = tuple(of // n for of, n in zip(whole, parts, strict=True))
    if size and tuple(size) != shared:
        raise _unreadable(f"{path}.weight.block_size must be {list(shared)} with these scales, got {list(size)}")
    return None if shared in (whole, (1, *whole[1:])) else shared


def has_nan(values: Tensor) -> bool:
    """Whether a float8_e4m3fn tensor holds NaN, which are the bits 0x7f and 0xff. It has no infinities."""
    rows = values.view(torch.uint8)
    return bool((rows.bitwise_and(0x7F) == 0x7F).any())


def _as_read(scale: Tensor, rows: int, in_blocks: bool) -> Tensor:
    """The scales as a Float8Weight has them, in their own memory: [rows, 1] also where they lie as a row."""
    if in_blocks:
        return scale
    if scale.numel() == 1:
        return scale.view(1, 1)
    return scale.view(rows, 1) if tuple(scale.shape) in ((rows,), (1, rows)) and scale.is_contiguous() else scale


def _tensor(module: nn.Module, name: str, path: str) -> Tensor | None:
    tensor = getattr(module, name, None)
    if tensor is None:
        return None
    if all(tensor is not own for own in (*module._parameters.values(), *module._buffers.values())):
        raise _unreadable(f"{path}.{name} must be a parameter or a buffer, so that changes are seen")
    return _plain(local_part(tensor) if is_sharded_tensor(tensor) else tensor, f"{path}.{name}")


def _plain(tensor: Any, where: str) -> Tensor:
    if not isinstance(tensor, Tensor) or not is_plain_tensor(tensor):
        kind = type(getattr(tensor, "data", tensor)).__name__
        raise _unreadable(f"{where} must be a plain tensor, got {kind}")
    return tensor


def _unreadable(message: str) -> UnsupportedModelError:
    return UnsupportedModelError(message + REMEDY, "quantisation")
