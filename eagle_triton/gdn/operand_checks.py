"""What the rules ask of their operands."""

from __future__ import annotations

from torch import Tensor


def check_heads(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k are [B, T, H, K] and v [B, T, HV, V] floats of one dtype, HV a multiple of H."""
    if q.dim() != 4 or v.dim() != 4 or k.shape != q.shape or v.shape[:2] != q.shape[:2] or not q.shape[1]:
        raise ValueError(
            f"{name}: q and k must be [B, T, H, K] and v [B, T, HV, V], T at least 1, got {list(q.shape)}, "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    if not q.shape[2] or v.shape[2] % q.shape[2]:
        raise ValueError(f"{name}: v must have a multiple of q's {q.shape[2]} heads, got {v.shape[2]}")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name}: q, k and v must be floats of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"{name}: q, k and v must lie on one device, got {q.device}, {k.device} and {v.device}")


def check_gates(name: str, v: Tensor, **gates: Tensor) -> None:
    """Raise ValueError unless each gate is [B, T, HV] floats on v's device."""
    for label, gate in gates.items():
        if gate.shape != v.shape[:3] or not gate.is_floating_point() or gate.device != v.device:
            raise ValueError(
                f"{name}: {label} must be floats {list(v.shape[:3])} on {v.device}, got {gate.dtype} "
                f"{list(gate.shape)} on {gate.device}"
            )


def check_operands(name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raise ValueError unless these are operands of a rule that takes g and beta."""
    check_heads(name, q, k, v)
    check_gates(name, v, g=g, beta=beta)
