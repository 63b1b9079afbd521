"""The exchange of ranks in a norm, on this machine: whether its bits are right, and what it takes.

    torchrun --nproc-per-node 2 tools/check_ranks.py --output results/ranks-h200.json

Two GPUs or more: compares the norm that exchanges the ranks' parts by symmetric memory with the one after a gather
(NCCL), bit for bit, counts wrong sums and columns in thousands of replays of graphs, checks that others do not wait for
ever for a rank that stays away, and times both norms for --rows. Where ranks share a GPU, it checks all but the times:

    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 torchrun --nproc-per-node 2 tools/check_ranks.py
    torchrun --nproc-per-node 2 tools/check_ranks.py --device cpu

(on a CPU by the references, or with TRITON_INTERPRET=1 by the kernel). The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.benchmarks.modes import add_options
from eagle_triton.command_line import Parser, run_program, sizes, whole

LAYERS = 160  # sums in a graph that is timed: those of 80 layers
IN_A_GRAPH = 3  # sums in a graph that is checked: an odd number, so that places alternate over replays


def main(argv: list[str] | None = None) -> int:
    parser = Parser("check_ranks.py", __doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where ranks run (default: cuda)")
    add("--rows", type=sizes(512), default=[1, 10, 60, 480], metavar="N[,N]", help="of a sum (default: 1,10,60,480)")
    add("--width", type=whole(16, 131_072), default=8192, metavar="N", help="of a row (default: 8192)")
    add("--replays", type=whole(), default=5000, metavar="N", help="of a graph for each of --rows (default: 5000)")
    runs = {"default": 20, "help": "replays that are timed (default: 20)"}
    add_options(parser, "--num-runs --output --commit", num_runs=runs)
    args = parser.parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.stop("is started by torchrun, one process for each of two ranks or more")
    with parser.explains():
        import torch
        import torch.distributed as dist

        from eagle_triton.benchmarks.record import Record, publish

    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if args.device == "cuda" and not count:
        parser.stop("--device cuda: there is no GPU")
    own_gpu = args.device == "cuda" and count >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local % count) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo")
    check = Check(device, own_gpu, args.width)
    rows: list[dict[str, Any]] = []
    check.bits(args.rows)
    for count in args.rows:
        check.replays(count, args.replays)
    check.lost_rank()
    if own_gpu:
        rows = [check.times(count, args.num_runs) for count in args.rows]
    wrong = [sentence for sentences in check.ranks.all_gather_object(check.wrong) for sentence in sentences]
    notes = [
        f"{dist.get_world_size()} ranks, {'each on a GPU of its own' if own_gpu else f'all on one {device.type}'}",
        *(f"FAIL: {sentence}" for sentence in wrong),
    ]
    if check.ranks.rank == 0:
        record = Record.of("ranks", device, args, rows, notes)
        publish(record, record.json(), parser.prog, output=args.output)
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(wrong))


class Check:
    """The checks of this rank with the others; `wrong` are sentences about what failed."""

    def __init__(self, device: Any, own_gpu: bool, width: int):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from eagle_triton.engine.operations import make_operations
        from eagle_triton.engine.ranks import Ranks

        self.device, self.own_gpu, self.width = device, own_gpu, width
        self.wrong: list[str] = []
        size = dist.get_world_size()
        if own_gpu:
            self.ranks = Ranks.of(init_device_mesh("cuda", (size,)))
        else:
            group = dist.new_group(backend="gloo")
            self.ranks = Ranks(dist.get_rank(), size, group, group, group)
        self.ops = make_operations(device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
        self.peers = self._memory(self.ranks)
        if self.peers is None:
            raise SystemExit(f"there is nothing to check: {self.ranks.note}")
        torch.manual_seed(0)

    def _memory(self, ranks: Any) -> Any:
        """New memory that all ranks see; on a CPU a file."""
        import torch

        from eagle_triton.runtime.peer_memory import PeerMemory

        if self.device.type == "cuda":
            ranks.open_memory(self.width, self.device)
            return ranks.peers
        row_bytes = -(-4 * self.width // 16) * 16
        count = PeerMemory.bytes_for(ranks.size, 512, row_bytes)
        with tempfile.TemporaryDirectory() as folder:  # rank 0's is used
            path = ranks.broadcast_from_rank0(str(Path(folder) / "memory"))
            if ranks.rank == 0:
                Path(path).write_bytes(bytes(ranks.size * count))
            ranks.meet()
            whole = torch.from_file(path, shared=True, size=ranks.size * count, dtype=torch.uint8)
            ranks.meet()
        return PeerMemory.of(ranks.rank, whole.split(count), 512, row_bytes)

    def gathered(self, part: Any) -> Any:
        """Every rank's part [...], in fp32: as the engine gathers it, on one GPU through the host."""
        together = self.ranks.together
        return (together(part) if self.own_gpu else together(part.cpu()).to(self.device)).float()

    def bits(self, rows: list[int]) -> None:
        """The norm that exchanges against the one after a gather, with parts that are whole and split."""
        import torch

        from eagle_triton.runtime.split_sums import SharedSums, SplitSums

        ranks = self.ranks
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for count in (*rows, 7):
                for splits in (0, 1, 3):
                    what = f"{count} rows of {dtype}, {splits} splits"
                    common, own = (torch.Generator().manual_seed(97 * count + seed) for seed in (0, 1 + ranks.rank))
                    shape = (splits or 1, count, self.width)
                    sums = torch.randn(*shape, generator=own).to(self.device)
                    part = SplitSums(sums, dtype) if splits else sums[0].to(dtype)
                    residual = torch.randn(*shape[1:], generator=common).to(self.device, dtype)
                    weight = torch.randn(self.width, generator=common).to(self.device, dtype)
                    whole = part.total_in_fp32() if isinstance(part, SplitSums) else part
                    results = [
                        self.ops.add_rms_norm(product, residual, weight, 1e-5)
                        for product in (
                            SplitSums(self.gathered(whole), dtype),
                            SharedSums(part, dtype, self.peers),
                        )
                    ]
                    if not all(torch.equal(*pair) for pair in zip(*results, strict=True)):
                        self.wrong.append(f"rank {ranks.rank}, {what}: other bits than after a gather")
                    found = b"".join(out.float().cpu().numpy().tobytes() for out in results[1])
                    if len(set(ranks.all_gather_object(hashlib.sha256(found).hexdigest()))) > 1:
                        self.wrong.append(f"rank {ranks.rank}, {what}: other bits than on other ranks")
        if self.peers.gave_up():
            self.wrong.append(f"rank {ranks.rank}: a wait has given up")

    def replays(self, rows: int, replays: int) -> None:
        """A graph of a few sums and joins. Their numbers change each time, so that a part that is overwritten or read
        too early shows."""
        import torch

        from eagle_triton.runtime.split_sums import SharedSums

        ranks, device = self.ranks, self.device
        pattern = (torch.arange(rows * self.width, device=device) % 1001).float().view(rows, self.width)
        count, wrong = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)

        def sums() -> None:
            for _ in range(IN_A_GRAPH):
                found = self.ops.add(SharedSums(pattern + count + ranks.rank, torch.float32, self.peers))
                expected = ranks.size * (pattern + count) + sum(range(ranks.size))
                wrong.add_((found != expected).sum())
                parts = [(pattern + count + 5000 * rank)[:, : self.width // 2] for rank in range(ranks.size)]
                joined = self.ops.join_columns(parts[ranks.rank], self.peers)
                wrong.add_((joined != torch.cat(parts, 1)).sum())
                count.add_(1)
                count.remainder_(4099)

        sums()
        if device.type == "cuda":
            torch.cuda.synchronize()
            ranks.meet()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                sums()
            for _ in range(replays):
                graph.replay()
            torch.cuda.synchronize()
        else:
            for _ in range(replays):
                sums()
        if wrong.item():
            self.wrong.append(f"rank {ranks.rank}, {rows} rows: {wrong.item()} wrong numbers in {replays} replays")

    def lost_rank(self) -> None:
        """Rank 0 waits for others, which stay away."""
        import torch

        from eagle_triton.runtime.split_sums import SharedSums

        on_gpu = self.device.type == "cuda"
        ranks = replace(self.ranks, peers=None, why_no_peers=None)
        peers = replace(self._memory(ranks), polls=200_000 if on_gpu else 1000)

        def seconds(sums: int) -> float:
            start = time.perf_counter()
            for _ in range(sums):
                self.ops.add(SharedSums(torch.ones(4, self.width, device=self.device), torch.float32, peers))
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - start

        if ranks.rank == 0:
            first, others = seconds(1), seconds(50)
            if not peers.gave_up():
                self.wrong.append("rank 0 has not noticed that others did not come")
            if others > 25 * first:
                self.wrong.append("rank 0 has waited for every sum, not only for the first")
        ranks.meet()

    def times(self, count: int, runs: int) -> dict[str, Any]:
        """Microseconds of a sum of bf16 with its norm, by NCCL and by the norm; and of the norm alone."""
        import torch

        from eagle_triton.runtime.split_sums import SplitSums

        ranks, device = self.ranks, self.device
        part = torch.randn(count, self.width, device=device).bfloat16()
        residual, weight = torch.zeros_like(part), torch.ones(self.width, device=device).bfloat16()
        apart = SplitSums(torch.zeros(ranks.size, count, self.width, device=device), torch.bfloat16)

        def norm(product: Callable[[], Any]) -> float:
            return self._graph_microseconds(
                lambda: [self.ops.add_rms_norm(product(), residual, weight, 1e-5) for _ in range(LAYERS)], runs
            )

        alone = norm(lambda: apart)
        by_nccl = norm(lambda: ranks.summed(part, torch.bfloat16))
        by_norm = norm(lambda: ranks.summed(part, torch.bfloat16, True))
        return {
            "variant": f"{count} rows of {self.width}",
            "norm_us": alone,
            "gathered_us": by_nccl,
            "exchanged_us": by_norm,
            "added_us": by_norm - alone,
        }

    def _graph_microseconds(self, launches: Callable[[], Any], runs: int) -> float:
        """The median time of each of LAYERS launches in a graph."""
        import torch

        from eagle_triton.benchmarks.timing import event_times

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launches()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.ranks.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launches()
        graph.replay()
        torch.cuda.synchronize()
        self.ranks.meet()
        return statistics.median(event_times({"graph": graph.replay}, runs)["graph"]) * 1000 / LAYERS


if __name__ == "__main__":
    sys.exit(run_program(main))
