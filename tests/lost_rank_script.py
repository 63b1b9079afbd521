"""One of two ranks that decode together until rank 1 is lost: `lost_rank_script.py FOLDER RANK killed|stopped DEVICE`.

Run by tests/test_tensor_parallel.py without torchrun, which would end rank 0 itself. Prints seconds since the loss.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from eagle_triton import EaModel, optimize_eagle_with_triton
from eagle_triton.engine import ranks
from tests.tensor_parallel_script import TREE, save
from tests.tiny import random_prompt

STOPPED_SECONDS = 4.0
STEPS = 5


def main(argv: list[str]) -> int:
    """Decode; rank 0 returns 0 if it was ended by a RanksError."""
    folder, rank, how, device = argv[0], int(argv[1]), argv[2], argv[3]
    ranks.STEP_SECONDS = STOPPED_SECONDS
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    if rank == 0:
        save(Path(folder), "pair")
    dist.barrier()
    model = EaModel.from_pretrained(f"{folder}/pair", tp_plan="auto", **TREE)
    optimize_eagle_with_triton(model)
    last = time.monotonic()
    try:
        for step, _ in enumerate(model.ea_generate(random_prompt(9).to(device), max_new_tokens=400)):
            if rank == 1 and step == STEPS:
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            last = time.monotonic()
    except ranks.RanksError as error:
        print(f"{time.monotonic() - last:.1f} {error}", flush=True)
        os._exit(0)  # without a word to the groups, whose other end is gone
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
