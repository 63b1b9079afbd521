"""Chains of a draft model against plain decoding: of a fixed length, and of lengths by its entropy (EGAG).

One sequence at a time, greedy. "easy" is text that repeats what came before, "hard" a description in words, "mix" both.
With random weights only the time of a step means anything. Two rules, one always sure and one never, show the cost of
choosing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.drafters import COLUMNS, SEED, Works, compare, different, figures, random_works
from eagle_triton.benchmarks.drafting_work import work
from eagle_triton.benchmarks.sweep import config_of
from eagle_triton.benchmarks.timing import noise
from eagle_triton.demo import DRAFT, PAIR, path_of
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.models.loading import load_target
from eagle_triton.models.shapes import random_model
from eagle_triton.operands.adaptive_length import EGAGConfig

__all__ = ["COLUMNS", "measure"]

MAX_DRAFTS = 6  # drafts
FIXED = (1, 2, 3, 4, MAX_DRAFTS)
RULES = {
    "egag, average 0.9": EGAGConfig(1, MAX_DRAFTS, 0.9),
    "egag, 3 nats": EGAGConfig(1, MAX_DRAFTS, scale=3.0),
    "egag, 3 nats, average 0.5": EGAGConfig(1, MAX_DRAFTS, 0.5, scale=3.0),
    "egag, 3 nats, exact": EGAGConfig(1, MAX_DRAFTS, scale=3.0, exact=True),
    "egag, stop": EGAGConfig(1, MAX_DRAFTS, mode="stop"),
    "egag, always sure": EGAGConfig(1, MAX_DRAFTS, scale=1e15),
    "egag, never sure": EGAGConfig(1, MAX_DRAFTS, scale=1e-15),
}
COMPARED = {"egag, always sure": MAX_DRAFTS, "egag, never sure": 1}  # with chains of this length


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each kind of work and length, and notes with comparisons."""
    target, drafter, works = _shape(args) if args.shape else _demo(args)
    configs = {f"{count} drafts": config_of("draft_model", count) for count in FIXED}
    configs |= {name: replace(config_of("draft_model", MAX_DRAFTS), egag=rule) for name, rule in RULES.items()}
    variants = {"plain": partial(EAGLEInference, None, target, config_of("naive"))}
    variants |= {name: partial(EAGLEInference, drafter, target, config) for name, config in configs.items()}
    for found in compare(variants, works, args, notes):
        if len(found) > 1:
            names = next(iter(found.values()))
            found["mix"] = {name: [answer for answers in found.values() for answer in answers[name]] for name in names}
        rows[:] = [row for kind, answers in found.items() for row in figures(kind, answers)]
    notes += different({kind: found[kind] for kind in works}, getattr(torch, args.dtype))
    notes += _judge(rows)
    notes += noise(min(row["steps"] for row in rows), "raise --num-runs or --max-length")


def _demo(args: argparse.Namespace) -> tuple[Any, Any, Works]:
    dtype = getattr(torch, args.dtype)
    model = models.load_pair(PAIR, None, False, dtype, args.device)
    drafter = load_target(path_of(DRAFT), dtype=dtype).to(args.device)
    kinds = {"easy": "edit", "hard": "prose"}
    works = {name: work(kind, model.tokenizer, args.num_runs, SEED) for name, kind in kinds.items()}
    return model.base_model, drafter, works


def _shape(args: argparse.Namespace) -> tuple[Any, Any, Works]:
    """A target with random weights, a draft model of the smallest shape with its vocabulary, and random prompts."""
    model = random_model(args.shape, device=args.device, dtype=getattr(torch, args.dtype))
    context = 512 if args.device != "cpu" else 32
    return model.base_model, models.draft_model(args), random_works(model, args.num_runs, [context])


def _judge(rows: list[dict[str, Any]]) -> list[str]:
    """Notes on the cost of choosing, and on its gain over the best fixed length."""
    notes = []
    for kind in dict.fromkeys(row["work"] for row in rows):
        variants = {row["variant"]: row for row in rows if row["work"] == kind}
        for name, count in COMPARED.items():
            if not {name, f"{count} drafts"} <= variants.keys():  # left out
                continue
            ratio = variants[name]["ms_per_step"] / variants[f"{count} drafts"]["ms_per_step"]
            notes.append(f"{kind}: a step of {name!r} takes {ratio:.3f} x the time of one with {count} drafts")
        rates = {name: row["tokens_per_second"] for name, row in variants.items()}
        lengths = [name for count in FIXED if (name := f"{count} drafts") in rates]
        rules = [name for name in RULES if name in rates and name not in COMPARED]
        if not lengths or not rules:
            continue
        fixed, chosen = max(lengths, key=rates.__getitem__), max(rules, key=rates.__getitem__)
        ratio = rates[chosen] / rates[fixed]
        notes.append(f"{kind}: {chosen!r} gives {ratio:.3f} x the tokens per second of {fixed}, the best fixed length")
    return notes
