"""Times every operation of a decode step against the best way in torch, in the same run.

A provider is timed only if its output agrees with the reference in fp32 on the same inputs: integers exactly, floating
point to a relative error (2-norm) of 1e-2 in 16 bits, 1e-4 in fp32. Providers take turns over buffers that together
exceed the last cache if the operation's data allow it; smaller data stay in the cache in a decode step, too.
Preparations that a torch user could make once (masks, concatenated weights, packed heads) are not timed. On a CPU the
references replace the kernels, at toy sizes: that checks this program and measures nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_triton.benchmarks.cases import LLAMA_8B, TOY, all_cases
from eagle_triton.benchmarks.cases.case import Case, Provider
from eagle_triton.benchmarks.timing import Quantiles, interleaved, progress
from eagle_triton.engine.operations import make_operations
from eagle_triton.text_table import table_of

CACHE_BYTES = 2**28  # all buffers of one operation together: several times the L2 of any GPU
MAX_SETS = 32  # layers of the 8b shape: as many distinct caches as a decode step goes through
ROUNDS = {"cuda": 40, "cpu": 3}
COLUMNS = (
    "=case, provider, p20 us=us_p20, median=us_median, p80=us_p80, GB/s=gb_per_second, x best torch=speedup, "
    "target us=target_us, met=target_met"
)
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float32: 1e-4}


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each case and provider, and notes. Raises ValueError if no case has --only in its name."""
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    operations = make_operations(kernels=cuda)
    if not cuda:
        notes.append("ON A CPU: REFERENCES ON SMALL TENSORS; THE TIMES SAY NOTHING ABOUT THE KERNELS")
    cases = list(all_cases(operations, LLAMA_8B if cuda else TOY, device, getattr(torch, args.dtype)))
    names = [case.name for case in cases]
    cases = [case for case in cases if args.only is None or args.only in case.name]
    if not cases:
        raise ValueError(f"--only must occur in one of {', '.join(names)}, got {args.only!r}")
    if not cuda:
        cases = [replace(case, target_us=None, least_speedup=None) for case in cases]
    with torch.no_grad(), progress(args, cases, "operations") as bar:
        for case in bar:
            bar.set_postfix_str(case.name)
            more, said = measure_case(case, device)
            rows += more
            notes += said
            torch.compiler.reset()
    if cuda and not operations.calls:
        notes.append("FAIL: no kernel was called")
    notes += _sums(rows)


def measure_case(case: Case, device: torch.device) -> tuple[list[dict[str, Any]], list[str]]:
    """Check every provider of a case, then time those that agree."""
    agreeing, notes = [], []
    for provider in case.providers:
        problem = _disagreement(case, provider, device)
        if problem:
            notes.append(f"{'FAIL: ' * provider.ours}{case.name}: {provider.name} was not timed: {problem}")
        else:
            agreeing.append(provider)
    if not agreeing:
        return [], notes
    count = min(max(CACHE_BYTES // max(case.moved, 1), 1) + 1, MAX_SETS) if device.type == "cuda" else 2
    sets = [case.make(torch.Generator(device).manual_seed(seed)) for seed in range(count)]
    calls = {provider.name: [partial(provider.call, *inputs) for inputs in sets] for provider in agreeing}
    times, eager = interleaved(calls, device, ROUNDS[device.type])
    notes += [f"{case.name}: {name} cannot be captured in a graph, so it was launched call by call" for name in eager]
    return [_row(case, provider, times, agreeing) for provider in agreeing], notes


def _row(case: Case, provider: Provider, times: dict[str, Quantiles], timed: list[Provider]) -> dict[str, Any]:
    time = times[provider.name]
    others = [times[other.name].median for other in timed if not other.ours]
    speedup = min(others) / time.median if provider.ours and others else None
    held = provider is next((p for p in reversed(timed) if p.ours), None)
    checks = [time.median <= case.target_us] if case.target_us is not None else []
    if case.least_speedup is not None and speedup is not None:
        checks.append(speedup >= case.least_speedup)
    return {
        **{"group": case.group, "case": case.name, "provider": provider.name, "ours": provider.ours},
        **{"us_p20": time.p20, "us_median": time.median, "us_p80": time.p80},
        **{"gb_per_second": case.moved / time.median / 1e3, "speedup": speedup},
        "target_us": case.target_us if held else None,
        "target_met": all(checks) if held and checks else None,
    }


def _sums(rows: list[dict[str, Any]]) -> list[str]:
    """The sum of all products for each number of rows: ours, as a decode step uses them, against the best of torch."""
    notes = []
    for group in dict.fromkeys(row["group"] for row in rows if row["group"].startswith("products")):
        ours: dict[str, float] = {}
        others: dict[str, float] = {}
        for row in (row for row in rows if row["group"] == group):
            if row["ours"]:
                ours[row["case"]] = row["us_median"]
            else:
                others[row["case"]] = min(row["us_median"], others.get(row["case"], float("inf")))
        mine, theirs = sum(ours.values()), sum(others.values())
        notes.append(f"{group}, sum: ours {mine:.1f} us, torch {theirs:.1f} us, {1 - mine / theirs:.1%} less")
    return notes


def _disagreement(case: Case, provider: Provider, device: torch.device) -> str | None:
    """Why a provider must not be timed; None if it agrees."""
    inputs = case.make(torch.Generator(device).manual_seed(12345))
    wide = [_wide(value) for value in case.make(torch.Generator(device).manual_seed(12345))]
    expected = case.expected(*wide)
    del wide
    try:
        out = provider.finish(provider.call(*inputs), *inputs)
    except Exception as error:  # a backend or a compiler may raise anything for an unsupported input
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    got, wanted = _tensors(out), _tensors(expected)
    if len(got) != len(wanted):
        return f"{len(got)} outputs, expected {len(wanted)}"
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a.shape != b.shape:
            return f"output {index} is {tuple(a.shape)}, expected {tuple(b.shape)}"
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return f"output {index} differs in {int((a != b).sum())} of {a.numel()} places"
            continue
        distance = float((a.float() - b).norm() / b.norm())
        if not distance <= TOLERANCE[a.dtype]:
            return f"output {index} is off by {distance:.1e}"
    return None


def _wide(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(*map(_wide, value)) if hasattr(value, "_fields") else type(value)(map(_wide, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table; each case is named once."""
    named = zip(rows, [None, *(row["case"] for row in rows)], strict=False)
    return table_of(COLUMNS, [row if row["case"] != before else {**row, "case": ""} for row, before in named])
