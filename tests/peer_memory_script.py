"""One of two processes that exchange parts through memory: `main([FOLDER, "kernel" or "reference", RANK])`.

Run by tests/test_peer_memory.py. The kernel runs in Triton's interpreter; the memory is a file that both map.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from eagle_triton.runtime.peer_memory import PeerMemory
from eagle_triton.runtime.split_sums import SharedSums, SplitSums

RANKS, ROWS, WIDTH = 2, 4, 80  # a join sends blocks of 64 elements at least
USES = 20  # all rows with all widths
SENT_ROWS = 2  # of ROWS


def memory_in(folder: Path, rank: int, create: bool = False, rows: int = ROWS, width: int = WIDTH) -> PeerMemory:
    """A rank's view of memory in a file, which is made with zeros first."""
    count = PeerMemory.bytes_for(RANKS, rows, 4 * width, SENT_ROWS)
    path = folder / "memory"
    if create:
        path.write_bytes(bytes(RANKS * count))
    whole = torch.from_file(str(path), shared=True, size=RANKS * count, dtype=torch.uint8)
    return PeerMemory.of(rank, whole.split(count), rows, 4 * width, sent_rows=SENT_ROWS)


def main(argv: list[str]) -> int:
    folder, what, rank = Path(argv[0]), argv[1], int(argv[2])
    if what == "kernel":
        from eagle_triton.ops.exchange import join_columns
        from eagle_triton.ops.layers import add_rms_norm
        from tests import faster_interpreter

        faster_interpreter.install()
    else:
        from eagle_triton.reference.exchange import join_columns
        from eagle_triton.reference.layers import add_rms_norm
    peers = memory_in(folder, rank)
    pace = random.Random(rank)
    for use in range(USES):
        torch.manual_seed(use)
        rows, width = 1 + use % ROWS, WIDTH - use % 5
        parts = [torch.randn(rows, width) for _ in range(RANKS)]
        residual, weight = torch.randn(rows, width), torch.randn(width)
        time.sleep(pace.choice([0, 0, 0.003]))
        kind = dict(subtract_mean=True, bias=residual[0]) if use % 3 else {}
        found = add_rms_norm(SharedSums(parts[rank], torch.float32, peers), residual, weight, 1e-5, **kind)
        expected = add_rms_norm(SplitSums(torch.stack(parts), torch.float32), residual, weight, 1e-5, **kind)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), (use, one - other)
        time.sleep(pace.choice([0, 0, 0.003]))
        columns = [part[:, : 1 + use] for part in parts]  # of up to two rows sent, of more left and read
        assert torch.equal(join_columns(columns[rank], peers), torch.cat(columns, 1)), use
    assert not peers.gave_up()
    print("the same bits")
    return 0
