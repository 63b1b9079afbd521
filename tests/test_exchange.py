"""What ranks exchange beside sums. Here all ranks' memory lies in one process, and their signals are set already; two
processes exchange parts in tests/peer_memory_script.py."""

import pytest
import torch

from eagle_triton import exchange as kernels
from eagle_triton.reference import exchange as reference
from tests.test_peer_memory import ranks_memory, send

# plain torch cannot wait for what lies on a device
MODULES = [kernels] if torch.cuda.is_available() else [kernels, reference]
both = pytest.mark.parametrize("module", MODULES, ids=lambda module: "kernel" if module is kernels else "reference")


class Neighbours:
    """Ranks whose parts are there, and signalled, before the one that is asked needs them."""

    def __init__(self, everybody, rank):
        self.mine, self.others = everybody[rank], [peers for peers in everybody if peers.rank != rank]

    def leave(self, parts, block):
        """In blocks of so many elements of each row."""
        for peers in self.others:
            part = parts[peers.rank].reshape(-1, parts[0].shape[-1])
            for place, piece in enumerate(piece for row in part for piece in row.split(block)):
                unit = place % peers.rows
                peers.uses[unit] += 1
                use = int(peers.uses[unit])
                peers.places[peers.rank].view(part.dtype)[use & 1, unit, : len(piece)] = piece
                for signals in peers.signals:
                    signals[unit, peers.rank] = use
                if unit < peers.sent_rows and part.element_size() * len(piece) % 4 == 0:
                    send(peers, unit, use, piece.contiguous().view(torch.int32))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sent_rows", [0, 6])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_columns_are_those_of_all_ranks(device, module, size, rank, sent_rows, dtype):
    """Use after use, of other shapes each time; some sent, some read; an odd number of 16 bits is read."""
    everybody = ranks_memory(device, size, sent_rows=sent_rows)
    neighbours = Neighbours(everybody, rank)
    for shape in ((2, 3, 40), (1, 120), (6, 13)):
        parts = [torch.randn(*shape, device=device).to(dtype) for _ in range(size)]
        neighbours.leave(parts, 4096)
        assert torch.equal(module.join_columns(parts[rank], neighbours.mine), torch.cat(parts, -1))
    assert not neighbours.mine.gave_up()


@pytest.mark.parametrize(("rows", "columns"), [(2, 300), (5, 200)])
def test_rows_are_exchanged_in_blocks(device, rows, columns, monkeypatch):
    """Wider than a row of the memory, which has room for 128 elements of a block; at most two launches here, since the
    other's parts lie in both places at once."""
    monkeypatch.setattr(kernels, "_LEAST_BLOCK", 64)
    everybody = ranks_memory(device, 2)
    neighbours = Neighbours(everybody, 1)
    parts = [torch.randn(rows, columns, device=device) for _ in range(2)]
    strided = torch.empty(rows, 2 * columns, device=device)[:, ::2]
    parts[1] = strided.copy_(parts[1])
    neighbours.leave(parts, 128)
    assert torch.equal(kernels.join_columns(parts[1], neighbours.mine), torch.cat(parts, -1))
    assert torch.equal(neighbours.mine.uses, neighbours.others[0].uses) and not neighbours.mine.gave_up()


@both
def test_nothing_is_joined_to_nothing(device, module):
    (peers,) = ranks_memory(device, 1)
    if module is kernels:
        assert module.join_columns(torch.empty(0, 8, device=device), peers).shape == (0, 8)
    for part in (torch.zeros(2, 8, dtype=torch.int64, device=device), torch.zeros(2, 8, device="meta")):
        with pytest.raises(ValueError, match="join_columns: part must be"):
            module.join_columns(part, peers)
