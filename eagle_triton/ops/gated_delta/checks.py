"""Checks of a recurrent state that only kernels need."""

from __future__ import annotations

from torch import Tensor

MAX_KEY_DIM = 256  # a program holds all of a head's K


def check_heads_contiguous(name: str, argument: str, state: Tensor) -> None:
    """Raise ValueError unless a sequence's state [.., HV, K, V] is contiguous and K is at most 256."""
    if state.numel() and not state[(0,) * (state.dim() - 3)].is_contiguous():
        raise ValueError(
            f"{name}: {argument} must be contiguous in its last three dimensions, got {list(state.shape)} with strides "
            f"{state.stride()}"
        )
    if state.shape[-2] > MAX_KEY_DIM:
        raise ValueError(f"{name}: K must be at most {MAX_KEY_DIM}, got {state.shape[-2]}")
