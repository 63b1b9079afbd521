"""What the choice of a kernel asks of a GPU."""

from __future__ import annotations

import functools

import torch


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA device, (0, 0) for others."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else (0, 0)


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
