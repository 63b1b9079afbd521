"""The engine's operations for tensors of a device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from eagle_triton.engine.operations import Operations, choose_operations


def operations_for(tensor: Tensor) -> Operations:
    """Triton kernels for tensors on a GPU, torch references for others. Raises ImportError if Triton is missing."""
    return _operations_on(tensor.device.type)


@functools.cache
def _operations_on(device_type: str) -> Operations:
    return choose_operations(torch.device(device_type), None, False)[0]
