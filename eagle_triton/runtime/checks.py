"""Checks of tensors for kernels that the references do not need."""

from __future__ import annotations

from torch import Tensor


def check_rows_contiguous(name: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless each tensor's last dimension is contiguous. name: the operation's."""
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: {argument} must have stride 1 in its last dimension, got strides {tensor.stride()}"
            )
