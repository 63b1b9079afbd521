"""Checks of the rules' operands."""

from __future__ import annotations

from torch import Tensor

from eagle_triton.operands.shapes import FLOATS, check_tensors


def check_heads(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k are [B, T, H, K] and v [B, T, HV, V] floats of one dtype, HV a multiple of H."""
    tensors = {"q": (q, "B T>0 H>0 K", FLOATS), "k": (k, "B T H K", q.dtype), "v": (v, "B T HV V", q.dtype)}
    sizes = check_tensors(name, tensors)
    if sizes["HV"] % sizes["H"]:
        raise ValueError(f"{name}: v must have a multiple of q's {sizes['H']} heads, got {sizes['HV']}")


def check_gates(name: str, v: Tensor, **gates: Tensor) -> None:
    """Raise ValueError unless each gate is [B, T, HV] floats on v's device."""
    check_tensors(name, {label: (gate, v.shape[:3], FLOATS) for label, gate in gates.items()}, device=v.device)


def check_operands(name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raise ValueError unless these are operands of a rule that takes g and beta."""
    check_heads(name, q, k, v)
    check_gates(name, v, g=g, beta=beta)
