"""The classes of modules that hold FP8 weights, and what they call the scales. Looked at by name, never imported."""

from __future__ import annotations

from torch import nn

SCALES = {
    "FP8Linear": "weight_scale_inv",  # transformers, fine-grained: blocks, or one for all
    "CompressedTensorsFP8Linear": "weight_scale",  # transformers, compressed-tensors: one for each row, or for all
    "FbgemmFp8Linear": "weight_scale",  # transformers, fbgemm: one for each row
}


def name_of_scale(module: nn.Module) -> str | None:
    """What a module of one of these classes calls the scale of its weight; None for other modules."""
    return next((SCALES[base.__name__] for base in type(module).__mro__ if base.__name__ in SCALES), None)
