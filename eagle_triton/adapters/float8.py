"""Projections that were published with FP8 weights, read as what they are: values of eight bits and their scales.

transformers keeps them in modules of its own, each of which rounds its inputs to eight bits too before it multiplies.
Here the inputs stay as they are (`activations="exact"`), or the module is called (`"as published"`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eagle_triton.adapters.module_reader import UnsupportedModelError
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model import ModelView
from eagle_triton.engine.model_watch import is_plain_tensor
from eagle_triton.engine.modules import Projection, with_projections
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight

EXACT, AS_PUBLISHED = "exact", "as published"
ACTIVATIONS = (EXACT, AS_PUBLISHED)
REMEDY = f'; activations="{AS_PUBLISHED}" calls the module as it is'

SCALES = {
    "FP8Linear": "weight_scale_inv",  # transformers, fine-grained: blocks, or one for all
    "CompressedTensorsFP8Linear": "weight_scale",  # transformers, compressed-tensors: one for each row, or for all
    "FbgemmFp8Linear": "weight_scale",  # transformers, fbgemm: one for each row
}
"""Classes of modules that hold FP8 weights, and what they call the scales. Looked at, never imported."""


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
    """What adapters have read, its FP8 modules read by weights and scales, of which nothing is copied.

    roots: the models that it was read from, by the names that messages call them. activations: "as published" leaves
    the modules to be called as they are. Raises UnsupportedModelError for FP8 weights that cannot be read, ValueError
    for "as published" where there are none.
    """
    paths = {module: f"{root}.{path}" for root, model in roots.items() for path, module in model.named_modules()}
    read: dict[nn.Module, Projection] = {}
    called: set[nn.Module] = set()

    def change(projection: Projection) -> Projection:
        module = projection.module
        if not isinstance(module, nn.Module) or not is_float8_module(module):
            return projection
        if activations == AS_PUBLISHED or "forward" in vars(module) or not _is_known(type(module)):
            called.add(module)
            return projection
        if module not in read:
            read[module] = read_float8(module, paths.get(module, type(module).__name__), view.dtype)
        return read[module]

    view, draft = with_projections(view, change), with_projections(draft, change)
    if activations == AS_PUBLISHED and not called:
        raise ValueError(f'activations="{AS_PUBLISHED}": no projection of the model has FP8 weights')
    notes = []
    if read:
        notes.append(
            f"{EXACT}: {len(read)} FP8 projections are read by their weights, and their inputs are not rounded"
        )
    if called:
        notes.append(f"{AS_PUBLISHED}: {len(called)} FP8 projections are called as they are, and round their inputs")
    return Float8Reading(view, draft, frozenset(read), "; ".join(notes) or None)


def is_float8_module(module: nn.Module) -> bool:
    """Whether a module is of a class that holds FP8 weights."""
    return any(base.__name__ in SCALES for base in type(module).__mro__)


def _is_known(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class is that of one in SCALES, and not one of its own around the same weights."""
    return any(base.__name__ in SCALES and vars(base).get("forward") is kind.forward for base in kind.__mro__)


def read_float8(module: nn.Module, path: str, dtype: torch.dtype) -> Projection:
    """The weight, scales and bias of such a module, whose dotted path is `path`, in a model of some dtype.

    Raises UnsupportedModelError unless they are e4m3 without NaN, with finite scales for blocks of 128, rows or all.
    """
    name = next(SCALES[base.__name__] for base in type(module).__mro__ if base.__name__ in SCALES)
    weight, scale, bias = (_tensor(module, part, path) for part in ("weight", name, "bias"))
    if weight is None or weight.dtype != torch.float8_e4m3fn or weight.dim() != 2 or weight.stride(1) != 1:
        got = "nothing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        raise _unreadable(f"{path}.weight must be float8_e4m3fn [out, in], rows contiguous, got {got}")
    if scale is None:
        raise UnsupportedModelError(
            f"{path}.{name} is missing: what the weight's numbers stand for is not known", "quantisation"
        )
    blocks = getattr(module, "block_size", None)
    if blocks is not None and tuple(blocks) != (BLOCK, BLOCK):
        raise _unreadable(f"{path} must have scales for blocks of {BLOCK} by {BLOCK}, got {list(blocks)}")
    try:
        found = Float8Weight(weight.detach(), _as_read(scale.detach(), len(weight), blocks is not None))
    except ValueError as error:
        raise _unreadable(f"{path}.{name}: {error}") from error
    if not found.scale.isfinite().all():
        raise UnsupportedModelError(f"{path}.{name} must be finite, and is not", "quantisation")
    if has_nan(found.values):
        raise UnsupportedModelError(f"{path}.weight must be finite, and holds NaN", "quantisation")
    if bias is not None and (bias.dtype != dtype or tuple(bias.shape) != (len(weight),)):
        raise _unreadable(f"{path}.bias must be {dtype} [{len(weight)}], got {bias.dtype} {list(bias.shape)}")
    return Projection(found, bias)


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
        raise _unreadable(f"{path}.{name} must be a parameter or a buffer, whose changes are seen")
    if not is_plain_tensor(tensor):
        kind = type(getattr(tensor, "data", tensor)).__name__
        raise _unreadable(f"{path}.{name} must be a plain tensor, got {kind}")
    return tensor


def _unreadable(message: str) -> UnsupportedModelError:
    return UnsupportedModelError(message + REMEDY, "quantisation")
