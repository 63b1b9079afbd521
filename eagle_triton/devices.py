"""Where a program computes: on which device, beside which other processes, with how many threads."""

from __future__ import annotations

import os
import sys

import torch

from eagle_triton.demo import path_of

THREADS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}  # by which a user sets how many


def processes() -> int:
    """How many torchrun has started for this command, one without it."""
    launched = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    return int(os.environ["WORLD_SIZE"]) if launched else 1


def find_device(name: str | None) -> str:
    """The device of that name, this process's GPU if there is one and no name. Raises ValueError if it is not here."""
    if name is None and processes() > 1 and torch.cuda.is_available():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device must be one that torch sees here, got {name}, and it sees {torch.cuda.device_count()} GPUs"
        )
    return name


def choose_threads(device: str, *models: str | None) -> None:
    """One thread, said on stderr, where models of this package run on a CPU, unless the user has set a number.

    Their products are too small to share. OpenMP's threads wait for each other by spinning, so where other programs
    take a core each product lasts until the last thread gets one again, and decoding is 5 to 30 times slower.
    """
    small = all(path_of(model) != model for model in models if model)
    if device != "cpu" or not small or torch.get_num_threads() == 1 or THREADS & os.environ.keys():
        return
    torch.set_num_threads(1)
    print("One thread: these models are too small for more. OMP_NUM_THREADS sets another number.", file=sys.stderr)
