"""Reference implementation of what ranks exchange beside sums, in plain PyTorch, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.exchange import check_join_columns
from eagle_triton.runtime.peer_memory import PeerMemory


def join_columns(part: Tensor, peers: PeerMemory) -> Tensor:
    """All columns of a product of which each rank has some: [..., n] -> [..., size * n], by the ranks in their order.

    All ranks call this, with parts of the same shape and dtype. Raises ValueError for a part that does not lie where
    the memory does, or is of 8 or 64 bits.
    """
    check_join_columns(part, peers)
    columns = part.split(peers.row_bytes // part.element_size(), dim=-1)
    by_ranks = torch.cat([peers.exchanged(each) for each in columns], dim=-1)
    return torch.cat(by_ranks.unbind(0), dim=-1)
