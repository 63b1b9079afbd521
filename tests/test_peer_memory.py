"""Norms that add up the parts of several ranks. Here all ranks' memory lies in one process, and their signals are set
already; two processes exchange parts in tests/peer_memory_script.py."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric

from eagle_triton.engine import ranks as ranks_module
from eagle_triton.engine.model.modules import (
    Norm,
    Projection,
    SharedEmbedding,
    add_norm,
    embed_norm,
    project,
    project_split,
)
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.rank_processes import processes_beside
from eagle_triton.engine.ranks import Ranks, RanksError
from eagle_triton.ops import layers as kernels
from eagle_triton.reference import layers as reference
from eagle_triton.reference.exchange import join_columns
from eagle_triton.runtime.launch import recorded
from eagle_triton.runtime.peer_exchange import MIN_SENT
from eagle_triton.runtime.peer_memory import PeerMemory
from eagle_triton.runtime.split_sums import SharedRows, SharedSums, SplitSums, own_rows, total_of
from tests import peer_memory_script
from tests.forked import start_program
from tests.peer_memory_script import memory_in

ROOT = Path(__file__).resolve().parents[1]
ROWS, WIDTH = 6, 200
DONE, WAITING = SimpleNamespace(query=lambda: True), SimpleNamespace(query=lambda: False)  # events of a device
# plain torch cannot wait for what lies on a device
MODULES = [kernels] if torch.cuda.is_available() else [kernels, reference]
both = pytest.mark.parametrize("module", MODULES, ids=lambda module: "kernel" if module is kernels else "reference")


def ranks_memory(device, size, polls=1000, rows=ROWS, sent_rows=ROWS):
    """Each rank's view of the same memory."""
    count = PeerMemory.bytes_for(size, rows, 4 * WIDTH, sent_rows)
    blocks = [torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(size)]
    return [PeerMemory.of(rank, blocks, rows, 4 * WIDTH, polls, sent_rows) for rank in range(size)]


def leave(peers, part):
    """A rank's part [rows, width], and its signal, as it leaves them; and the same as it is sent."""
    count, width = part.shape
    peers.uses[:count] += 1
    for row in range(count):
        use = int(peers.uses[row])
        peers.places[peers.rank].view(part.dtype)[use & 1, row, :width] = part[row]
        for signals in peers.signals:
            signals[row, peers.rank] = use
        if row < peers.sent_rows:
            send(peers, row, use, part[row].float())


def send(peers, row, use, values):
    """Values of 32 bits to all ranks."""
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    for words in peers.words:
        words[use & 1, peers.rank, row, : len(values)] = bits | (use << 32)


def parts_of(device, size, rows, width, dtype, splits):
    """What ranks give to a sum, and that as it is gathered."""
    torch.manual_seed(rows * width + splits)
    if not splits:
        parts = [torch.randn(rows, width, device=device).to(dtype) for _ in range(size)]
        return parts, torch.stack(parts).float()
    parts = [SplitSums(torch.randn(splits, rows, width, device=device), dtype) for _ in range(size)]
    return parts, torch.stack([part.total_in_fp32() for part in parts])


def fp32_of(part):
    return part.total_in_fp32() if isinstance(part, SplitSums) else part


PAIRS = [  # each pair of values occurs
    (size, rank, sent_rows, (0, 1, 3)[(i + 2 * j) % 3], (torch.float32, torch.float16, torch.bfloat16)[(i + j) % 3])
    for i, sent_rows in enumerate((0, 3, ROWS))
    for j, (size, rank) in enumerate(((1, 0), (2, 0), (3, 1), (5, 4)))
]


@both
@pytest.mark.parametrize(("size", "rank", "sent_rows", "splits", "dtype"), PAIRS, ids=str)
def test_the_bits_are_those_of_parts_that_were_gathered(device, module, size, rank, sent_rows, splits, dtype):
    """In the order of the ranks, use after use, of other rows and widths each time; some sent, some read."""
    everybody = ranks_memory(device, size, sent_rows=sent_rows)
    mine = everybody[rank]
    for rows, width in ((6, 200), (1, 64), (3, 200), (6, 130)):
        parts, gathered = parts_of(device, size, rows, width, dtype, splits)
        for other in everybody:
            if other is not mine:
                leave(other, fp32_of(parts[other.rank]))
        residual, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, width), (width,)))
        shared, apart = SharedSums(parts[rank], dtype, mine), SplitSums(gathered, dtype)
        assert shared.shape == apart.shape and shared.dim() == 2 and shared.device == apart.device
        expected = module.add_rms_norm(apart, residual, weight, 1e-5)
        assert all(map(torch.equal, module.add_rms_norm(shared, residual, weight, 1e-5), expected))
    assert mine.uses.tolist() == [4, 3, 3, 2, 2, 2] and not mine.gave_up()


@both
def test_norms_and_sums_of_all_kinds(device, module):
    everybody = ranks_memory(device, 2)
    parts, gathered = parts_of(device, 2, 4, WIDTH, torch.float32, 0)
    weight, residual = torch.randn(WIDTH, device=device), torch.randn(4, WIDTH, device=device)
    total = torch.zeros(4, 3, WIDTH, device=device)[:, 1]
    apart, shared = SplitSums(gathered, torch.float32), SharedSums(parts[0], torch.float32, everybody[0])
    for run in (
        lambda x: module.rms_norm(x, weight, 1e-5),
        lambda x: module.rms_norm(x, weight, 1e-5, zero_centred=True, in_draft_pass=True),
        lambda x: module.rms_norm(x, weight, 1e-5, subtract_mean=True, bias=residual[0]),
        lambda x: module.add_rms_norm(x, residual, weight, 1e-5, total=total)[1].clone(),
        lambda x: module.add_rms_norm(x, residual, weight, 1e-5, own_weight=weight.flip(0))[0],
        lambda x: module.add(x),
        lambda x: module.add(x, residual),
    ):
        leave(everybody[1], parts[1])
        assert torch.equal(run(shared), run(apart))
    assert torch.equal(total, gathered.sum(0) + residual)
    with pytest.raises(ValueError, match="residual must be"):
        module.add_rms_norm(shared, residual[:2], weight, 1e-5)


@both
@pytest.mark.parametrize("sent_rows", [0, ROWS])
def test_norms_that_round_once(device, module, sent_rows):
    everybody = ranks_memory(device, 2, sent_rows=sent_rows)
    parts, gathered = parts_of(device, 2, 4, WIDTH, torch.float16, 0)
    weight = torch.randn(WIDTH, device=device).half()
    apart, shared = SplitSums(gathered, torch.float16), SharedSums(parts[0], torch.float16, everybody[0])
    found = []
    for first in (False, True):
        leave(everybody[1], fp32_of(parts[1]))
        found.append(module.rms_norm(shared, weight, 1e-5, round_first=first))
        assert torch.equal(found[-1], module.rms_norm(apart, weight, 1e-5, round_first=first))
    assert (found[0] != found[1]).any()


@both
@pytest.mark.parametrize("sent_rows", [0, ROWS])
def test_a_use_leaves_alone_what_others_may_still_read_of_the_one_before(device, module, sent_rows):
    everybody = ranks_memory(device, 2, sent_rows=sent_rows)
    left = []
    for use in range(1, 5):
        parts = [torch.full((3, 64), 10.0 * use + rank, device=device) for rank in range(2)]
        leave(everybody[1], parts[1])
        module.add(SharedSums(parts[0], torch.float32, everybody[0]))
        places = everybody[0].places[0].view(torch.float32)[:, :3, :64]
        if sent_rows and module is kernels:
            places = everybody[1].words[1][:, 0, :3, :64].to(torch.int32).view(torch.float32)
        left.append(sorted(places[:, 0, 0].tolist()))
        assert torch.equal(places, places[:, :1, :1].expand(places.shape))
    assert left == [[0, 10], [10, 20], [20, 30], [30, 40]]


@both
@pytest.mark.parametrize("sent_rows", [0, ROWS])
def test_a_wait_for_a_rank_that_has_gone_ends(device, module, sent_rows):
    everybody = ranks_memory(device, 2, polls=3, sent_rows=sent_rows)
    part, weight = torch.randn(4, WIDTH, device=device), torch.ones(WIDTH, device=device)
    leave(everybody[1], part[:2])  # its other rows are late
    assert not everybody[0].gave_up()
    out = module.add(SharedSums(part, torch.float32, everybody[0]))
    assert everybody[0].failed.tolist() == [1] and everybody[0].gave_up()  # the former waits for the kernel
    assert torch.equal(out[:2], part[:2] + part[:2])
    module.rms_norm(SharedSums(part, torch.float32, everybody[0]), weight, 1e-5)  # does not wait
    assert everybody[0].uses.tolist() == [2, 2, 2, 2, 0, 0]


@both
@pytest.mark.parametrize("sent_rows", [0, ROWS])
def test_after_a_failure_nothing_waits(device, module, sent_rows):
    """Else a step of hundreds of sums would wait a minute for each."""
    everybody = ranks_memory(device, 2, polls=2**31 - 1, sent_rows=sent_rows)
    everybody[0].failed[0] = 1
    module.add(SharedSums(torch.ones(1, 8, device=device), torch.float32, everybody[0]))
    assert everybody[0].uses[0] == 1


@both
@pytest.mark.parametrize("sent_rows", [0, ROWS])
def test_counts_pass_the_largest_number(device, module, sent_rows):
    everybody = ranks_memory(device, 2, sent_rows=sent_rows)
    for peers in everybody:
        peers.uses.fill_(2**31 - 2)
        for signals in peers.signals:
            signals.fill_(2**31 - 2)
    for step in range(4):
        parts, gathered = parts_of(device, 2, 3, 64 + step, torch.float32, 0)
        leave(everybody[1], parts[1])
        assert torch.equal(module.add(SharedSums(parts[0], torch.float32, everybody[0])), gathered.sum(0))
    assert everybody[0].uses[:3].tolist() == [2 - 2**31] * 3 and not everybody[0].gave_up()


@pytest.mark.parametrize(
    ("rows", "width", "draft", "sent"),
    [(1, 64, False, True), (1, 64, True, False), (1, 256, True, True), (7, 64, False, False), (6, 33, False, True)],
)
def test_each_thread_of_a_norm_that_is_sent_has_values_of_its_own(device, rows, width, draft, sent):
    """In a draft pass four warps share a row, whatever its width."""
    count = PeerMemory.bytes_for(1, 8, 1024, ROWS)
    block = torch.zeros(count, dtype=torch.uint8, device=device)
    peers = PeerMemory.of(0, [block], 8, 1024, sent_rows=ROWS)
    part, weight = torch.zeros(rows, width, device=device), torch.ones(width, device=device)
    with recorded() as launches:
        kernels.rms_norm(SharedSums(part, torch.float32, peers), weight, 1e-5, in_draft_pass=draft)
    (launch,) = launches.values()
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    assert given["SENT"] == sent
    assert not sent or launch.options["num_warps"] * MIN_SENT <= given["BLOCK"]


def test_what_does_not_fit_is_not_exchanged(device):
    (peers,) = ranks_memory(device, 1)
    empty = torch.empty
    assert peers.fits(empty(2, 3, WIDTH, device=device)) and peers.fits(SplitSums(empty(9, 6, 8, device=device), 0))
    assert not peers.fits(empty(6, WIDTH + 1, device=device))
    assert not peers.fits(empty(4, 0, device=device)) and not peers.fits(empty(2, 8, device="meta"))
    with pytest.raises(ValueError, match="rows of 201 do not fit into the ranks' memory for 800 bytes of each"):
        kernels.add(SharedSums(empty(2, WIDTH + 1, device=device), torch.float32, peers))


@both
@pytest.mark.parametrize("splits", [0, 3])
def test_more_rows_than_there_is_room_for_are_exchanged_in_pieces(device, module, splits):
    """The other's parts lie in both places of a row at once, so three pieces would be more than this test can leave."""
    mine, other = ranks_memory(device, 2)
    rows = 2 * ROWS - 1
    parts, gathered = parts_of(device, 2, rows, 24, torch.float32, splits)
    theirs = fp32_of(parts[1])
    leave(other, theirs[:ROWS])
    leave(other, theirs[ROWS:])
    residual, weight = torch.randn(rows, 24, device=device), torch.randn(24, device=device)
    total = torch.zeros(rows, 2, 24, device=device)[:, 1]
    shared, apart = SharedSums(parts[0], torch.float32, mine), SplitSums(gathered, torch.float32)
    expected = module.add_rms_norm(apart, residual, weight, 1e-5)
    assert all(map(torch.equal, module.add_rms_norm(shared, residual, weight, 1e-5, total=total), expected))
    assert mine.uses.tolist() == [2] * (ROWS - 1) + [1] and not mine.gave_up()


@both
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_look_ups_are_those_of_the_whole_table(device, module, rank):
    """Of 13 tokens, more than there is room for at once; a token below 0 is the first."""
    everybody = ranks_memory(device, 3)
    table, weight = torch.randn(12, 40, device=device), torch.randn(40, device=device)
    tokens = torch.tensor([[0, 4, 11, 8, 3], [-1, 7, 5, 6, 1]], device=device)
    own = table.split(4)
    for other in everybody:
        if other.rank != rank:
            part = own_rows(own[other.rank], tokens.clamp(min=0), other.rank).flatten(0, 1)
            leave(other, part[:ROWS])
            leave(other, part[ROWS:])
    shared = SharedRows(own[rank], everybody[rank])
    assert shared.shape == table.shape and shared.dtype == table.dtype and shared.device == table.device
    expected = module.embed_rms_norm(tokens, table, weight, 1e-5)
    assert all(map(torch.equal, module.embed_rms_norm(tokens, shared, weight, 1e-5), expected))
    assert not everybody[rank].gave_up()


def test_a_table_that_ranks_share_is_read_by_the_norm(device):
    """Through the modules of the engine."""
    mine, other = ranks_memory(device, 2)
    ranks = Gathering(0, 2, None, None, None, peers=mine)
    table = torch.randn(6, 16, device=device)
    embedding, norm = SharedEmbedding(table[:3], ranks), Norm(torch.ones(16, device=device), 1e-5)
    tokens = torch.tensor([[2, 0]], device=device)
    leave(other, torch.zeros(2, 16, device=device))
    ops = make_operations(MODULES[0] is kernels and len(MODULES) == 1)
    normed, found = embed_norm(ops, norm, embedding, tokens)
    assert torch.equal(found, table[tokens]) and torch.equal(normed, ops.rms_norm(found, norm.weight, 1e-5))
    assert int(mine.uses[0]) == 1
    ranks.peers = None
    assert torch.equal(embed_norm(ops, norm, embedding, tokens)[1], found)


def test_the_host_ends_a_wait(device):
    """As it does where a rank's process has ended; here before the wait."""
    mine, _ = ranks_memory(device, 2, polls=2**31 - 1)
    mine.give_up()
    assert mine.gave_up()
    kernels.add(SharedSums(torch.ones(2, 8, device=device), torch.float32, mine))
    assert mine.failed.tolist() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(row_bytes=40), "row_bytes must be a multiple of 16, got 40"),
        (dict(rows=5), "blocks must be uint8"),
        (dict(blocks=[torch.zeros(2048, dtype=torch.int8)]), "blocks must be uint8"),
    ],
)
def test_bad_memory_is_refused(change, message):
    blocks = [torch.zeros(PeerMemory.bytes_for(1, 4, 64), dtype=torch.uint8)]
    with pytest.raises(ValueError, match=message):
        PeerMemory.of(**{**dict(rank=0, blocks=blocks, rows=4, row_bytes=64), **change})


def test_a_device_is_not_waited_for_by_torch():
    on_device = SimpleNamespace(uses=SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(RuntimeError, match="exchanged by the kernel"):
        PeerMemory.exchanged(on_device, torch.zeros(1, 8))


class Gathering(Ranks):
    """Two ranks of which the other's parts are zeros, and which agree."""

    met, said = 0, None

    def together(self, part):
        return torch.stack([part, torch.zeros_like(part)])

    def meet(self):
        self.met += 1

    def all_gather_object(self, value):
        return [value, self.said]


def test_a_product_whose_reader_adds_up_is_not_gathered():
    """Through the modules of the engine: a product behind which no norm stands is."""
    mine, other = ranks_memory("cpu", 2)
    ranks = Gathering(0, 2, None, None, None, peers=mine)
    ops, x, residual = make_operations(), torch.randn(1, 3, 16), torch.randn(1, 3, 8)
    projection = Projection(torch.randn(8, 16), summed_over=ranks)
    found = project_split(ops, projection, x)
    assert isinstance(found, SharedSums) and found.shape == (1, 3, 8)
    leave(other, torch.zeros(3, 8))
    whole = x @ projection.weight.T
    _, total = add_norm(ops, Norm(torch.ones(8), 1e-5), residual, found)
    assert torch.allclose(total, whole + residual, atol=1e-5) and torch.equal(mine.uses[:4], torch.tensor([1, 1, 1, 0]))
    leave(other, torch.zeros(3, 8))
    assert torch.equal(add_norm(ops, None, residual, project_split(ops, projection, x))[0], total)
    assert torch.allclose(project(ops, projection, x), whole, atol=1e-5)
    wide = Projection(torch.randn(WIDTH + 8, 16), summed_over=ranks)
    assert isinstance(project_split(ops, wide, x), SplitSums)
    ranks.peers = None
    assert isinstance(project_split(ops, projection, x), SplitSums)
    assert torch.allclose(total_of(project_split(ops, projection, x)), whole, atol=1e-5)


@pytest.fixture
def symmetric_memory(monkeypatch):
    """torch's, by tensors of this process."""
    seen = SimpleNamespace(multicast=None, blocks=None)

    def rendezvous(block, group):
        seen.multicast, seen.group = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"), group
        seen.blocks = [block, torch.zeros_like(block)]
        return SimpleNamespace(get_buffer=lambda rank, shape, dtype: seen.blocks[rank])

    monkeypatch.setattr(symmetric, "empty", lambda count, dtype, device: torch.ones(count, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(ranks_module, "MAX_EXCHANGED_ROWS", 8)
    return seen


def test_memory_is_opened_once_without_multicast(symmetric_memory, monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    ranks = Gathering(0, 2, SimpleNamespace(group_name="both"), None, None)
    ranks.open_memory(30, torch.device("cpu"))
    assert (ranks.peers.rows, ranks.peers.row_bytes, ranks.peers.size) == (8, 128, 2)
    assert (symmetric_memory.multicast, symmetric_memory.group) == ("1", "both")
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ
    assert not any(block.any() for block in symmetric_memory.blocks), "signals must be zeros"
    assert ranks.note == "kernels exchange the ranks' parts through symmetric memory"
    peers = ranks.peers
    ranks.open_memory(30, torch.device("cpu"))
    assert ranks.peers is peers and ranks.met == 1
    ranks.open_memory(40, torch.device("cpu"))  # of a wider model; graphs of the other go on
    assert ranks.peers.row_bytes == 160 and ranks.met == 2
    ranks.wait_for(DONE)
    peers.failed_on_host[0] = 1  # a graph of the narrower model gave up waiting
    with pytest.raises(RanksError, match="another rank's part did not arrive in a kernel"):
        ranks.wait_for(DONE)
    with pytest.raises(RanksError, match="gone or hangs"):
        ranks.wait_for(WAITING, 0.01)
    assert peers.failed[0] == ranks.peers.failed[0] == 1, "no graph waits any more"


def test_what_a_wider_model_needs_and_does_not_get_is_said(symmetric_memory, monkeypatch):
    ranks = Gathering(0, 2, SimpleNamespace(group_name="both"), None, None)
    ranks.open_memory(30, torch.device("cpu"))
    monkeypatch.setattr(symmetric, "empty", lambda *_, **__: torch.empty(-1))
    ranks.open_memory(40, torch.device("cpu"))
    assert (
        ranks.peers.row_bytes == 128 and "for rows wider than 32 elements NCCL gathers the ranks' parts" in ranks.note
    )


def test_memory_that_was_opened_in_inference_mode_is_given_up(symmetric_memory):
    ranks = Gathering(0, 2, SimpleNamespace(group_name="both"), None, None)
    with torch.inference_mode():
        ranks.open_memory(30, torch.device("cpu"))
        ranks.peers.signals[1][0, 0] = 1
    with pytest.raises(RanksError, match="gone or hangs"):
        ranks.wait_for(WAITING, 0.01)
    assert ranks.peers.failed.tolist() == [1]
    ranks.peers.exchanged(torch.ones(2, 8))  # writes in place


def test_a_rank_says_that_others_are_lost_whatever_else_fails(monkeypatch):
    (peers,) = ranks_memory("cpu", 1)
    monkeypatch.setattr(PeerMemory, "give_up", lambda _: 1 / 0)
    with pytest.raises(RanksError, match="gone or hangs"):
        Gathering(0, 2, None, None, None, peers=peers).wait_for(WAITING, 0.01)


def test_behind_a_failure_nothing_is_exchanged(monkeypatch):
    """Others wait for something else, or for nobody: half an hour between calls."""
    ranks, asked = Ranks(0, 2, None, None, None), []

    def breaks(*args, **kwargs):
        asked.append(args)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(ranks_module.dist, "monitored_barrier", breaks)
    monkeypatch.setattr(ranks_module.dist, "all_gather_object", breaks)
    for exchange in (
        ranks.meet,
        lambda: ranks.all_gather_object(1),
        ranks.meet,
        lambda: ranks.check_same_on_all_ranks("what", 1),
    ):
        with pytest.raises(RanksError, match="gone or hangs; end all ranks and start again .Connection closed by peer"):
            exchange()
    with pytest.raises(RanksError, match="Connection closed"):
        ranks.wait_for(DONE)
    assert len(asked) == 1 and asked[0][1].total_seconds() == ranks_module.BETWEEN_SECONDS


def test_what_differs_is_said_and_goes_on():
    ranks = Gathering(0, 2, None, None, None)
    ranks.said = 2
    with pytest.raises(RanksError, match=r"numbers must be the same on all ranks: ranks \[1\] and rank 0 differ"):
        ranks.check_same_on_all_ranks("numbers", 1)
    ranks.check_same_on_all_ranks("numbers", 2)


def test_one_thread_decodes_on_ranks():
    from eagle_triton.engine.engine import Engine

    ranks = Gathering(0, 2, None, None, None)
    engine = SimpleNamespace(view=SimpleNamespace(ranks=ranks))
    with Engine._claim_ranks(engine), Engine._claim_ranks(engine):  # another engine of the same thread
        failed = []

        def decode():
            try:
                with Engine._claim_ranks(engine):
                    pass
            except RuntimeError as error:
                failed.append(str(error))

        thread = threading.Thread(target=decode)
        thread.start()
        thread.join()
    assert failed == ["another thread decodes with a model of these ranks: use one thread for all of them"]


def test_only_processes_beside_this_one_are_watched():
    for other, watched in ((0, {1: os.getpid()}), (1, {}), (2, {}), (3, {})):

        def all_gather_object(value, other=other):
            place, process = value
            theirs = list(place)
            if other:
                theirs[other - 1] = "another host, boot or container"
            return [value, (tuple(theirs), process)]

        found = processes_beside(0, all_gather_object)
        assert {rank: process.pid for rank, process in found.items()} == watched
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert processes_beside(0, lambda value: [value, (value[0], gone.pid)]) == {}


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("step", ["empty", "rendezvous"])
def test_where_there_is_no_such_memory_on_any_rank_the_report_says_so(symmetric_memory, monkeypatch, step, whose):
    def fails(*_, **__):
        raise RuntimeError("no peer access\nand a long trace")

    ranks = Gathering(0, 2, SimpleNamespace(group_name="both"), None, None)
    if whose == 0:
        monkeypatch.setattr(symmetric, step, fails)
    else:
        ranks.said = "no peer access"
    ranks.open_memory(30, torch.device("cpu"))
    assert ranks.peers is None
    assert ranks.note == f"NCCL gathers the ranks' parts, because symmetric memory failed: rank {whose}: no peer access"
    ranks.open_memory(30, torch.device("cpu"))
    assert ranks.met == 1


@pytest.mark.parametrize("broken", [None, "sums", "columns", "a wait"])
def test_memory_that_gives_other_numbers_than_a_gather_is_given_up(broken):
    class Together(Gathering):
        def together(self, part):
            return part[None].clone()

    (peers,) = ranks_memory("cpu", 1)

    class Broken:
        @staticmethod
        def add(x):
            out = reference.add(x)
            return out + 1 if broken == "sums" and isinstance(x, SharedSums) and len(out) == 3 else out

        @staticmethod
        def join_columns(part, memory):
            if broken == "a wait" and len(part) == 3:
                memory.failed_on_host[0] = 1
            out = join_columns(part, memory)
            return out + 1 if broken == "columns" and len(out) == 3 else out

    ranks = Together(0, 1, None, None, None, peers=peers)
    ranks.prove_memory(Broken, torch.zeros(8, dtype=torch.bfloat16))
    assert (ranks.peers is None) == (broken is not None) and (peers.uses[0] > 0)
    if broken:
        expected = {
            "sums": "sums of 3 rows through the ranks' memory differ from gathered ones",
            "columns": "columns of 3 rows through the ranks' memory differ",
            "a wait": "3 rows did not arrive in the ranks' memory in time",
        }
        assert expected[broken] in ranks.note
        return
    uses = peers.uses.clone()
    ranks.prove_memory(Broken, torch.zeros(8, dtype=torch.bfloat16))
    assert torch.equal(peers.uses, uses), "once is enough"
    ranks._proved, ranks.peers = False, peers  # as open_memory leaves it
    ranks.prove_memory(Broken, torch.zeros(8, dtype=torch.bfloat16))
    assert (peers.uses[0] > uses[0]).item()


def test_wider_memory_is_proved_again(symmetric_memory):
    ranks = Gathering(0, 2, SimpleNamespace(group_name="both"), None, None)
    ranks.open_memory(30, torch.device("cpu"))
    ranks._proved = True
    ranks.open_memory(30, torch.device("cpu"))
    assert ranks._proved
    ranks.open_memory(40, torch.device("cpu"))
    assert not ranks._proved


def test_a_wait_ends_where_the_process_of_a_rank_has(monkeypatch):
    """Long before the wait itself would."""
    monkeypatch.setattr(ranks_module, "LIVING_SECONDS", 0.05)
    (peers,) = ranks_memory("cpu", 1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ranks = Gathering(0, 2, None, None, None, peers=peers, processes={1: psutil.Process(child.pid)})
        polls = iter([False] * 5000)
        ranks.wait_for(SimpleNamespace(query=lambda: next(polls, True)))
        assert not peers.gave_up()
        child.kill()
        with pytest.raises(RanksError, match=r"the processes of ranks \[1\] have ended; end all ranks"):
            ranks.wait_for(WAITING, 30)  # nobody has asked how it ended: a zombie
        child.wait()
        with pytest.raises(RanksError, match=r"the processes of ranks \[1\] have ended"):
            ranks.wait_for(WAITING, 30)
    assert peers.gave_up() and peers.failed.tolist() == [1]


def test_what_a_norm_has_waited_for_in_vain_is_an_error():
    (peers,) = ranks_memory("cpu", 1)
    ranks = Gathering(0, 2, None, None, None, peers=peers)
    ranks.wait_for(DONE)
    peers.failed_on_host[0] = 1
    with pytest.raises(RanksError, match="another rank's part did not arrive in a kernel"):
        ranks.wait_for(DONE)


@pytest.mark.parametrize("what", ["kernel", "reference"])
def test_two_processes_exchange_parts(what, tmp_path):
    """At their own pace, for as many uses as show who overwrites what another still reads."""
    memory_in(tmp_path, 0, create=True)
    both = [
        start_program(
            peer_memory_script.main, str(tmp_path), what, str(rank), TRITON_INTERPRET="1", OMP_NUM_THREADS="1"
        )
        for rank in range(2)
    ]
    try:
        assert [process.stdout.read().strip() for process in both] == ["the same bits"] * 2
        assert [process.wait() for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()


@pytest.mark.slow
def test_sums_of_squares_have_one_layout():
    """So a norm gives the same bits, whoever has added up the ranks' parts: see tests/norm_layouts_script.py."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/norm_layouts_script.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
