"""Whole generations: the original against the optimised model, on the same prompts."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

from eagle_triton import EaModel, optimize_eagle_with_triton
from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.acceptance import WARNING, fixed_acceptance
from eagle_triton.benchmarks.original_and_patched import Run, accepted_histogram, decode_all
from eagle_triton.benchmarks.record import histogram_table
from eagle_triton.benchmarks.timing import copy_bandwidth, noise, synchronise
from eagle_triton.families import own_ea_model as native
from eagle_triton.text_table import table_of


@dataclass(frozen=True)
class Variant:
    """Generations of one model: medians over the prompts, and the accepted lengths of all their steps."""

    name: str
    runs: list[Run]
    memory_gib: float | None  # peak, None on a CPU

    def row(self, floor_ms: float) -> dict[str, Any]:
        def median(values: Any) -> float:
            return statistics.median(values)

        ms = median(run.ms_per_step for run in self.runs)
        return {
            "variant": self.name,
            "tokens_per_second": median(run.tokens_per_second for run in self.runs),
            "ms_per_step": ms,
            "first_token_ms": median(run.times[0] for run in self.runs) * 1e3,
            "tau": sum(run.new_tokens for run in self.runs) / sum(len(run.lengths) for run in self.runs),
            "accepted": accepted_histogram(self.runs),
            "memory_gib": self.memory_gib,
            "floor_ms": floor_ms,
            "floor_share": floor_ms / ms,
        }


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for the original, the optimised, and with --upstream SafeAILab's model; and notes."""
    module = models.import_safeailab(args.upstream) if args.upstream else None
    model = models.load(args)
    view, draft = native.read(model)
    floor_ms = models.weight_bytes(view, draft, draft.read_tree(), 1) / copy_bandwidth(view.device) * 1e3
    variants = []
    with fixed_acceptance(args.accept_length, module):
        for variant in _variants(args, model, module):
            variants.append(variant)
            rows.append(variant.row(floor_ms))
    notes += _notes(args, variants)


def _variants(args: argparse.Namespace, model: EaModel, module: ModuleType | None) -> Iterator[Variant]:
    """Measure the variants one after another, and yield each."""
    prompts = models.prompts(model, args)
    total = len(prompts) * (2 + bool(module))
    with tqdm(total=total, desc="generations", disable=args.json or None, leave=False) as bar:

        def run(name: str, subject: Any) -> Variant:
            _reset_peak(model.device)
            runs = decode_all(subject, prompts, args.max_length, args.temperature, bar.update)
            return Variant(name, runs, _peak(model.device))

        yield run("original", model)
        megakernel = "auto" if args.accept_length is None else False  # its verification does not know the schedule
        options: dict[str, Any] = {"megakernel": megakernel, "prefixes": False, "draft_dtype": args.draft_weights}
        with optimize_eagle_with_triton(model, **options)[1]:
            optimised = run("optimised", model)
        yield optimised
        if module is not None:
            yield run("SafeAILab", models.safeailab_model(module, model))


def _notes(args: argparse.Namespace, variants: list[Variant]) -> list[str]:
    original, optimised, *others = variants
    notes = []
    if args.accept_length is not None:
        notes.append(WARNING.format(args.accept_length))
    elif args.temperature == 0:
        for other in (optimised, *others):
            same = sum(_same(a.tokens, b.tokens) for a, b in zip(original.runs, other.runs, strict=True))
            notes.append(f"same tokens, original and {other.name}: {same} of {len(original.runs)} prompts")
    for other in (original, *others):
        ratio = statistics.median(r.ms_per_step for r in other.runs) / statistics.median(
            r.ms_per_step for r in optimised.runs
        )
        notes.append(f"a step of the optimised model is {ratio:.2f} x as fast as one of {other.name}")
    steps = min(sum(len(run.lengths) for run in variant.runs) for variant in variants)
    return notes + noise(steps, "take more of --num-runs or --max-length")


def _same(one: list[int], other: list[int]) -> bool:
    """Whether two runs gave the same tokens; other drafts may have taken the last step further."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, and the histograms of accepted lengths below it."""
    columns = {"": "variant", "tokens/s": "tokens_per_second", "ms/step": "ms_per_step"}
    columns |= {"first token ms": "first_token_ms", "tau": "tau", "peak GiB": "memory_gib"}
    columns |= {"floor ms": "floor_ms", "of floor": "floor_share:.1%"}
    return f"{table_of(columns, rows)}\n\n{histogram_table({row['variant']: row['accepted'] for row in rows})}"


def _reset_peak(device: torch.device) -> None:
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
