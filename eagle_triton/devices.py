"""Where a program computes: the device, the other processes, the number of threads."""

from __future__ import annotations

import os
import sys

import torch

from eagle_triton.demo import path_of

THREADS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}  # a user sets the number of threads with these


def processes() -> int:
    """The number of processes that torchrun has started for this command, 1 without it."""
    launched = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    return int(os.environ["WORLD_SIZE"]) if launched else 1


def find_device(name: str | None) -> str:
    """The named device; without a name this process's GPU, or the CPU. Raises ValueError if there is no such device."""
    if name is None and processes() > 1 and torch.cuda.is_available():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device must be cpu or one of the {torch.cuda.device_count()} GPUs that torch sees here, got {name}"
        )
    return name


def choose_threads(device: str, *models: str | None) -> None:
    """Use one thread, and say so on stderr, where models of this package run on a CPU, unless the user has set a
    number.

    Their products are too small to share. OpenMP's threads spin while they wait for each other. If another program
    takes a core, each product waits until the last thread gets a core again, and decoding is 5 to 30 times slower.
    """
    small = all(path_of(model) != model for model in models if model)
    if device != "cpu" or not small or torch.get_num_threads() == 1 or THREADS & os.environ.keys():
        return
    torch.set_num_threads(1)
    print("One thread: these models are too small for more. OMP_NUM_THREADS sets another number.", file=sys.stderr)
