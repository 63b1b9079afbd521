"""What the sweeps share: their options, settings that are compiled in parallel, times of graphs, and a table of all."""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eagle_triton.command_line import Parser, check_device, output_file, whole

REPLAYS = 9  # of a graph that is timed

Task = TypeVar("Task")


def read_sweep(parser: Parser, argv: Sequence[str] | None, what: str, of_what: str) -> argparse.Namespace:
    """Add what every sweep takes and read the arguments. Stops without a GPU. what: is timed, with its verb, such as
    "products are"; of_what: settings are printed for each."""
    workers = max(1, (os.cpu_count() or 2) - 1)
    add = parser.add_argument
    add("--workers", type=whole(most=256), default=workers, metavar="N", help=f"compilers (default: {workers})")
    add("--csv", type=output_file(), metavar="FILE.csv", help="write every measurement here")
    add("--top", type=whole(), default=4, metavar="N", help=f"settings to print per {of_what} (default: 4)")
    args = parser.parse_args(argv)
    check_device(parser, None, only_gpu=True)
    with parser.explains():
        import torch
    if not torch.cuda.is_available():
        parser.stop(f"{what} timed on a GPU, and torch sees none")
    return args


def compile_all(compile_settings: Callable[[Task], None], tasks: Iterable[Task], workers: int) -> dict[Task, str]:
    """Run each different task in a worker, so that its kernels lie in Triton's cache. Returns the errors, or ''."""
    started, several = time.monotonic(), list(dict.fromkeys(tasks))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        errors = pool.starmap(_error_of, [(compile_settings, task) for task in several], chunksize=1)
    print(f"{len(several)} settings compiled after {time.monotonic() - started:.0f} s", flush=True)
    return dict(zip(several, errors, strict=True))


def _error_of(compile_settings: Callable[[Task], None], task: Task) -> str:
    try:
        compile_settings(task)
    except Exception as error:  # the caller reports it beside the settings
        return f"{type(error).__name__}: {error}"[:120]
    return ""


def time_graph(calls: Sequence[Callable[[], object]]) -> float:
    """Median µs of one of `calls`, replayed together in one CUDA graph."""
    import torch

    from eagle_triton.benchmarks.timing import capture, event_times

    if not torch.cuda.is_available():
        calls[0]()
        return 1.0
    replay, in_graph = capture(calls)
    assert in_graph, "these calls cannot be captured"
    return statistics.median(event_times({"graph": replay}, REPLAYS)["graph"]) * 1e3 / len(calls)


def write_table(path: Path | None, columns: Sequence[str], records: Iterable[Sequence[Any]]) -> None:
    """All measurements, where --csv says so."""
    if path is not None:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *records])
