"""Exchange of columns between ranks, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.exchange import check_join_columns
from eagle_triton.runtime.peer_memory import PeerMemory


def join_columns(part: Tensor, peers: PeerMemory) -> Tensor:
    """All columns of a product, n from each rank in rank order: [..., n] -> [..., size * n].

    All ranks call this, with parts of the same shape and dtype. Raises ValueError for a part on another device than the
    memory, or of 8 or 64 bits.
    """
    check_join_columns(part, peers)
    columns = part.split(peers.row_bytes // part.element_size(), dim=-1)
    by_ranks = torch.cat([peers.exchanged(each) for each in columns], dim=-1)
    return torch.cat(by_ranks.unbind(0), dim=-1)
