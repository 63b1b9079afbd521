"""Times calls: quantiles, interleaved providers in CUDA graphs, and the copy bandwidth that floors use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from eagle_triton.inference.timing import Stopwatch

COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}  # of the source: several times the last cache
COPIES = {"cuda": 10, "cpu": 1}  # in one go: a launch and a wait are short beside 10 ms
MIN_CALLS = 16  # in one graph, so that its launch takes a small part
MIN_STEPS = 50  # of a repeatable figure

Result = TypeVar("Result")


def noise(steps: int, mend: str) -> list[str]:
    """A note if a figure has too few steps to be repeatable. mend: how to get more."""
    if steps >= MIN_STEPS:
        return []
    return [f"NOISE: figures from {steps} steps; with fewer than {MIN_STEPS}, another run gives other figures; {mend}"]


def progress(args: Any, cases: Sequence[Any], what: str) -> Any:
    """The cases with a bar on stderr, if that is a terminal and the figures are not printed as JSON."""
    return tqdm(cases, desc=what, disable=args.json or None, leave=False)


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of repeated measurements, in their unit."""

    p20: float
    median: float
    p80: float

    @staticmethod
    def of(values: Sequence[float]) -> Quantiles:
        shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        return Quantiles(*torch.tensor(values, dtype=torch.float64).quantile(shares).tolist())


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_times(
    call: Callable[[int], Result], device: torch.device, runs: int, warm_ups: int = 1, rest: float = 0.0
) -> tuple[list[float], Result]:
    """Milliseconds of each of `runs` calls after some for warm-up, and the result of the last one. call: takes the
    number of the run, warm-ups counted. rest: seconds for which the device is idle before each call."""
    times = []
    for run in range(warm_ups + runs):
        synchronise(device)
        time.sleep(rest)
        watch = Stopwatch(device)
        result = call(run)
        times.append(watch.seconds() * 1e3)
    return times[warm_ups:], result


def copy_bandwidth(device: torch.device, rounds: int = 10) -> float:
    """Bytes per second of a large copy on the device, bytes read plus bytes written. It uses no graph, in which a copy
    engine would make the copy, at two thirds of the speed."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(rounds):
        watch = Stopwatch(device)
        for _ in range(COPIES[device.type]):
            target.copy_(source)
        times.append(watch.seconds() / COPIES[device.type])
    return 2 * source.numel() / statistics.median(times)


def interleaved(
    calls: Mapping[str, Sequence[Callable[[], object]]], device: torch.device, rounds: int
) -> tuple[dict[str, Quantiles], list[str]]:
    """Microseconds per call of each provider, the providers taking turns.

    calls: one call per set of buffers, run one after the other. On a GPU they are replayed as one CUDA graph. Also
    returns the names of those that could not be captured.
    """
    if device.type != "cuda":
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, variants in calls.items():
                start = time.perf_counter()
                for variant in variants:
                    variant()
                times[name].append((time.perf_counter() - start) * 1e6 / len(variants))
        return {name: Quantiles.of(values) for name, values in times.items()}, []
    enough = {name: list(variants) * -(-MIN_CALLS // len(variants)) for name, variants in calls.items()}
    captured = {name: capture(variants) for name, variants in enough.items()}
    taken = event_times({name: launch for name, (launch, _) in captured.items()}, rounds, device)
    quantiles = {name: Quantiles.of([ms * 1e3 / len(enough[name]) for ms in of]) for name, of in taken.items()}
    return quantiles, [name for name, (_, in_graph) in captured.items() if not in_graph]


def event_times(
    launches: Mapping[str, Callable[[], object]], rounds: int, device: torch.device | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each launch on a GPU, the launches taking turns."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in launches}
    for _ in range(rounds):  # queued, so that the device never waits for a launch
        for name, launch in launches.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            launch()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def capture(variants: Sequence[Callable[[], object]]) -> tuple[Callable[[], None], bool]:
    """A launch of all variants, and whether it is a graph."""

    def run() -> None:
        for variant in variants:
            variant()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:  # raised by torch if something cannot be captured
        torch.cuda.synchronize()
        return run, False
    graph.replay()
    return graph.replay, True
