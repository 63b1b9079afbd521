"""Times of CUDA-graph replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def time_graph(calls: Sequence[Callable[[], object]], replays: int = 9) -> float:
    """Median µs of one of `calls`, replayed together in one CUDA graph."""
    if not torch.cuda.is_available():
        calls[0]()
        return 1.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)
