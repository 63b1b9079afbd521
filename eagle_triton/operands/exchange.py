"""The check of the operands of exchanges between ranks."""

from __future__ import annotations

from torch import Tensor

from eagle_triton.operands.shapes import check_tensors
from eagle_triton.runtime.peer_memory import PeerMemory


def check_join_columns(part: Tensor, peers: PeerMemory) -> None:
    if part.element_size() not in (2, 4):
        raise ValueError(f"join_columns: part must be of 16 or 32 bits, got {part.dtype}")
    check_tensors("join_columns", {"part": (part, "... n", None)}, device=peers.uses.device)
