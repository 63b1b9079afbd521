"""Copy from the host to the device without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on `device`. The copy is queued after earlier launches; the host does not wait."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on `device`."""
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)
