"""Times whole generations: the original against the optimised model, on the same prompts."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from tqdm import tqdm

from eagle_triton import optimize_eagle_with_triton
from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.acceptance import WARNING, fixed_acceptance
from eagle_triton.benchmarks.original_and_patched import Run, accepted_histogram, decode_all, tau_of
from eagle_triton.benchmarks.record import histogram_table
from eagle_triton.benchmarks.timing import copy_bandwidth, noise, synchronise
from eagle_triton.comparison.figures import first_difference
from eagle_triton.families import own_ea_model as native
from eagle_triton.text_table import table_of

COLUMNS = (
    "=variant, tokens/s=tokens_per_second, ms/step=ms_per_step, first token ms=first_token_ms, tau, "
    "peak GiB=memory_gib, floor ms=floor_ms, of floor=floor_share:.1%"
)


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for the original, the optimised, and with --upstream SafeAILab's model; and notes."""
    module = models.import_safeailab(args.upstream) if args.upstream else None
    model = models.load(args)
    prompts, device = models.prompts(model, args), model.device
    view, draft = native.read(model)
    floor_ms = models.weight_bytes(view, draft, draft.read_tree(), 1) / copy_bandwidth(view.device) * 1e3
    found: dict[str, list[Run]] = {}
    with (
        fixed_acceptance(args.accept_length, module),
        tqdm(
            total=len(prompts) * (2 + bool(module)), desc="generations", disable=args.json or None, leave=False
        ) as bar,
    ):

        def run(name: str, subject: Any) -> None:
            synchronise(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            found[name] = decode_all(subject, prompts, args.max_length, args.temperature, bar.update)
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
            rows.append(_row(name, found[name], floor_ms) | {"memory_gib": peak})

        run("original", model)
        megakernel = "auto" if args.accept_length is None else False  # its verification has no schedule
        options: dict[str, Any] = {"megakernel": megakernel, "prefixes": False, "draft_dtype": args.draft_weights}
        with optimize_eagle_with_triton(model, **options)[1]:
            run("optimised", model)
        if module is not None:
            run("SafeAILab", models.safeailab_model(module, model))
    notes += _notes(args, found)


def _row(name: str, runs: list[Run], floor_ms: float) -> dict[str, Any]:
    """Medians over the prompts, and the accepted lengths of all their steps."""
    ms = statistics.median(run.ms_per_step for run in runs)
    return {
        "variant": name,
        "tokens_per_second": statistics.median(run.tokens_per_second for run in runs),
        "ms_per_step": ms,
        "first_token_ms": statistics.median(run.times[0] for run in runs) * 1e3,
        "tau": tau_of(runs),
        "accepted": accepted_histogram(runs),
        "floor_ms": floor_ms,
        "floor_share": floor_ms / ms,
    }


def _notes(args: argparse.Namespace, found: dict[str, list[Run]]) -> list[str]:
    notes, original, optimised = [], found["original"], found["optimised"]
    if args.accept_length is not None:
        notes.append(WARNING.format(args.accept_length))
    for name, runs in found.items():
        if args.accept_length is None and args.temperature == 0 and runs is not original:
            pairs = zip(original, runs, strict=True)  # with other drafts, the last step of one may go further
            same = sum(first_difference(a.tokens, b.tokens) is None for a, b in pairs)
            notes.append(f"same tokens, original and {name}: {same} of {len(original)} prompts")
    times = {name: statistics.median(run.ms_per_step for run in runs) for name, runs in found.items()}
    for name, runs in found.items():
        if runs is not optimised:
            ratio = times[name] / times["optimised"]
            notes.append(f"a step of the optimised model is {ratio:.2f} x as fast as one of {name}")
    steps = min(sum(len(run.lengths) for run in runs) for runs in found.values())
    return notes + noise(steps, "raise --num-runs or --max-length")


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, and histograms of accepted lengths."""
    return f"{table_of(COLUMNS, rows)}\n\n{histogram_table({row['variant']: row['accepted'] for row in rows})}"
