"""A rank that exchanges something and ends: `ending_rank_script.py`.

Prints how many of gloo's threads there were before that, and behind what the package does at the end. A child that was
forked meanwhile ends too, though it has none of them.

Run by tests/test_tensor_parallel.py under torchrun.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path


def count_threads() -> int:
    """Of gloo's, those that run collectives."""
    return sum("gloo_run" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


counts: list[int] = []
parent = os.getpid()


@atexit.register  # first, so that it runs last
def end() -> None:
    if os.getpid() != parent:
        os._exit(7)
    line = " ".join(map(str, [*counts, count_threads()]))
    os.write(sys.stdout.fileno(), f"{line}\n".encode())  # at once: the ranks share a pipe, and print writes in pieces


import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from eagle_triton.engine.ranks import Ranks  # noqa: E402


def main() -> Ranks:
    """Exchange something. The ranks are held until the end, as by a model."""
    dist.init_process_group("gloo")
    ranks = Ranks.of(init_device_mesh("cpu", (dist.get_world_size(),)))
    assert ranks.broadcast_from_rank0(7) == 7
    counts.append(count_threads())
    child = os.fork()
    if not child:
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.destroy_process_group()
    return ranks


if __name__ == "__main__":
    held = main()
    sys.exit(0)
