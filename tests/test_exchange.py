"""What ranks exchange beside sums. Here all ranks' memory lies in one process, and their signals are set already; two
processes exchange parts in tests/peer_memory_script.py."""

import pytest
import torch

from eagle_triton.ops import exchange as kernels
from eagle_triton.reference import exchange as reference
from eagle_triton.runtime.launch import recorded
from eagle_triton.runtime.peer_exchange import MIN_SENT
from eagle_triton.runtime.peer_memory import SENT_ROWS, PeerMemory
from tests.test_peer_memory import ranks_memory, send

# plain torch cannot wait for what lies on a device
MODULES = [kernels] if torch.cuda.is_available() else [kernels, reference]
both = pytest.mark.parametrize("module", MODULES, ids=lambda module: "kernel" if module is kernels else "reference")


class Neighbours:
    """Ranks whose parts are there, and signalled, before the one that is asked needs them."""

    def __init__(self, everybody, rank):
        self.mine, self.others = everybody[rank], [peers for peers in everybody if peers.rank != rank]

    def leave(self, parts, block, sent=False):
        """In blocks of so many elements of each row: sent, or where they are read."""
        for peers in self.others:
            part = parts[peers.rank].reshape(-1, parts[0].shape[-1])
            for place, piece in enumerate(piece for row in part for piece in row.split(block)):
                unit = place % peers.rows
                peers.uses[unit] += 1
                use = int(peers.uses[unit])
                if sent:
                    send(peers, unit, use, piece.contiguous().view(torch.int32))
                    continue
                peers.places[peers.rank].view(part.dtype)[use & 1, unit, : len(piece)] = piece
                for signals in peers.signals:
                    signals[unit, peers.rank] = use


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sent_rows", [0, 4])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_columns_are_those_of_all_ranks(device, module, size, rank, sent_rows, dtype):
    """Use after use, of other shapes each time; some sent, some read: an odd number of 16 bits, and too many rows."""
    everybody = ranks_memory(device, size, sent_rows=sent_rows)
    neighbours = Neighbours(everybody, rank)
    sent = module is kernels and sent_rows > 0
    for shape, is_sent in (
        ((2, 2, 40), sent),
        ((1, 120), sent),
        ((6, 14), False),
        ((3, 13), sent and dtype.itemsize > 2),
    ):
        parts = [torch.randn(*shape, device=device).to(dtype) for _ in range(size)]
        for peers in everybody:
            peers.words[peers.rank].zero_()
            peers.signals[peers.rank].fill_(-9)  # of long ago
        neighbours.leave(parts, 4096, is_sent)
        assert torch.equal(module.join_columns(parts[rank], neighbours.mine), torch.cat(parts, -1))
        assert not neighbours.mine.gave_up()
        for peers in neighbours.others:
            assert peers.words[peers.rank][:, rank].any() == is_sent
            assert (peers.signals[peers.rank][0, rank] != -9) != is_sent


@both
@pytest.mark.parametrize("sent_rows", [0, 4])
def test_a_join_waits_for_others(device, module, sent_rows):
    """In vain."""
    mine, other = ranks_memory(device, 2, polls=3, sent_rows=sent_rows)
    module.join_columns(torch.ones(2, 80, device=device), mine)
    assert mine.uses.tolist()[:3] == [1, 1, 0]  # which waits for the kernel
    assert mine.gave_up() and not other.gave_up()


@pytest.mark.parametrize(
    ("rows", "columns", "row_bytes", "sent"),
    [
        (64, 1536, 16384, True),
        (64, 1537, 16384, False),  # more values than are sent
        (65, 16, 16384, False),  # more rows
        (16, 4000, 4096, True),  # in blocks of 1024
        (17, 4000, 4096, False),
        (2, 40, 256, True),
        (2, 40, 240, False),  # a warp would have less than two values for each thread
    ],
)
def test_what_is_sent_has_room_where_it_is_read(device, rows, columns, row_bytes, sent):
    count = PeerMemory.bytes_for(2, 128, row_bytes)
    peers = PeerMemory.of(0, [torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2)], 128, row_bytes)
    with recorded() as launches:
        kernels.join_columns(torch.zeros(rows, columns, device=device), peers)
    (launch,) = launches.values()
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    assert given["SENT"] == sent and given["BLOCK"] * 4 <= row_bytes
    assert not sent or (launch.grid[0] <= SENT_ROWS and launch.options["num_warps"] * MIN_SENT <= given["BLOCK"])


@pytest.mark.parametrize(("rows", "columns"), [(2, 300), (5, 200)])
def test_rows_are_exchanged_in_blocks(device, rows, columns, monkeypatch):
    """Wider than a row of the memory, which has room for 128 elements of a block; at most two launches here, since the
    other's parts lie in both places at once."""
    monkeypatch.setattr(kernels, "_MIN_BLOCK", 64)
    everybody = ranks_memory(device, 2)
    neighbours = Neighbours(everybody, 1)
    parts = [torch.randn(rows, columns, device=device) for _ in range(2)]
    strided = torch.empty(rows, 2 * columns, device=device)[:, ::2]
    parts[1] = strided.copy_(parts[1])
    neighbours.leave(parts, 128, sent=rows == 2)  # six blocks, or ten
    assert torch.equal(kernels.join_columns(parts[1], neighbours.mine), torch.cat(parts, -1))
    assert torch.equal(neighbours.mine.uses, neighbours.others[0].uses) and not neighbours.mine.gave_up()


@both
def test_nothing_is_joined_to_nothing(device, module):
    (peers,) = ranks_memory(device, 1)
    for shape in ((0, 8), (2, 0)):
        assert module.join_columns(torch.empty(*shape, device=device), peers).shape == shape
    for part in (torch.zeros(2, 8, dtype=torch.int64, device=device), torch.zeros(2, 8, device="meta")):
        with pytest.raises(ValueError, match="join_columns: part must be"):
            module.join_columns(part, peers)
