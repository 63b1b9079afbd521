"""Shared by readers of quantised modules: the known classes, and reading their tensors.

Classes are known by name; none of their packages is ever imported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from eagle_triton.engine.model.module_kinds import is_plain_tensor, is_sharded_tensor, local_part
from eagle_triton.errors import UnsupportedModelError

EXACT, AS_PUBLISHED = ACTIVATIONS = "exact", "as published"
CALLED = f'activations="{AS_PUBLISHED}" calls the module as it is'

DEQUANTIZE = (
    "load a checkpoint of compressed-tensors with CompressedTensorsConfig(dequantize=True), and one of GPTQ or AWQ by "
    "transformers and gptqmodel"
)

FINE_GRAINED = "weight_scale_inv"

SCALES = {
    "FP8Linear": FINE_GRAINED,  # transformers, fine-grained: blocks, or one for all
    "CompressedTensorsFP8Linear": "weight_scale",  # transformers, compressed-tensors: one for each row, or for all
    "FbgemmFp8Linear": "weight_scale",  # transformers, fbgemm: one for each row
}
"""The classes of modules that hold FP8 weights, and their names of the scales."""

COMPRESSED, FORWARD = "compressed", "compressed_tensors.quantization."
"""Attributes of compressed-tensors: the state of a compressed layer, and the module of its forward."""


def check_activations(activations: str) -> None:
    """Raise ValueError unless `activations` is one of ACTIVATIONS."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be {' or '.join(map(repr, ACTIVATIONS))}, got {activations!r}")


def name_of_scale(module: nn.Module) -> str | None:
    """The name of the scale in a module of one of the classes in SCALES; None for other modules."""
    return next((SCALES[base.__name__] for base in type(module).__mro__ if base.__name__ in SCALES), None)


def is_compressed(module: nn.Module) -> bool:
    """Whether compressed-tensors still has to decompress a module."""
    status: Any = getattr(module, "quantization_status", None)
    return getattr(module, "quantization_scheme", None) is not None and getattr(status, "value", status) == COMPRESSED


def is_known_compressed(module: nn.Module) -> bool:
    """Whether such a module is a linear layer with that package's forward."""
    own = vars(module).get("forward")
    source = getattr(getattr(own, "__func__", None), "__globals__", {}).get("__name__", "")
    return type(module) is nn.Linear and (own is None or source.startswith(FORWARD))


def check_outputs(module: nn.Module, path: str) -> None:
    """Raise UnsupportedModelError for a layer of compressed-tensors that rounds what it computes."""
    if getattr(getattr(module, "quantization_scheme", None), "output_activations", None) is not None:
        raise unreadable(f"{path} must not round its outputs (output_activations)", DEQUANTIZE)


def tensor_of(module: nn.Module, name: str, path: str, remedy: str = CALLED) -> Tensor | None:
    """A module's parameter or buffer, this rank's part of it; None if it has none of this name.

    Raises UnsupportedModelError, with the remedy, for other attributes and other kinds of tensors.
    """
    tensor = getattr(module, name, None)
    if tensor is None:
        return None
    if all(tensor is not own for own in (*module._parameters.values(), *module._buffers.values())):
        raise unreadable(f"{path}.{name} must be a parameter or a buffer, so that changes are seen", remedy)
    return plain(local_part(tensor) if is_sharded_tensor(tensor) else tensor, f"{path}.{name}", remedy)


def plain(tensor: Any, where: str, remedy: str = CALLED) -> Tensor:
    """A tensor that a kernel may read. Raises UnsupportedModelError for anything else."""
    if not isinstance(tensor, Tensor) or not is_plain_tensor(tensor):
        kind = type(getattr(tensor, "data", tensor)).__name__
        raise unreadable(f"{where} must be a plain tensor, got {kind}", remedy)
    return tensor


def unreadable(message: str, remedy: str = CALLED) -> UnsupportedModelError:
    """The error for a module that is not read, with what to do instead."""
    return UnsupportedModelError(f"{message}; {remedy}", "quantisation")
