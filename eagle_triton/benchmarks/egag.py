"""Chains of a draft model: of a fixed length, and as long as its entropy lets them be (EGAG), against plain decoding.

One sequence at a time, greedy. "easy" is text that repeats what was before, "hard" a description in words, "mix" both.
With random weights only the time of a step means anything; two rules that are always sure and never sure show what
choosing costs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.drafters import Run, decode, differences, figures
from eagle_triton.benchmarks.drafting_work import work
from eagle_triton.benchmarks.timing import noise
from eagle_triton.demo import DRAFT, PAIR, path_of
from eagle_triton.engine.drafts.causal_lm import CausalLMDraft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.operations import choose_operations
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.models.loading import load_target
from eagle_triton.models.shapes import SHAPES, random_model
from eagle_triton.reference.adaptive_length import EGAGConfig
from eagle_triton.text_table import table

MOST = 6  # drafts
FIXED = (1, 2, 3, 4, MOST)
RULES = {
    "egag, average 0.9": EGAGConfig(1, MOST, 0.9),
    "egag, 3 nats": EGAGConfig(1, MOST, scale=3.0),
    "egag, 3 nats, average 0.5": EGAGConfig(1, MOST, 0.5, scale=3.0),
    "egag, 3 nats, exact": EGAGConfig(1, MOST, scale=3.0, exact=True),
    "egag, stop": EGAGConfig(1, MOST, mode="stop"),
    "egag, always sure": EGAGConfig(1, MOST, scale=1e15),
    "egag, never sure": EGAGConfig(1, MOST, scale=1e-15),
}
COMPARED = {"egag, always sure": MOST, "egag, never sure": 1}  # with chains of so many
SEED = 7


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each kind of work and length, and notes that compare."""
    target, drafter, works = _shape(args) if args.shape else _demo(args)
    view = read_causal_lm(target)
    variants: dict[str, Any] = {"plain": None, **{f"{count} drafts": count for count in FIXED}, **RULES}
    found: dict[str, dict[str, list[Run]]] = {kind: {} for kind in works}
    with torch.no_grad(), tqdm(variants, desc="lengths", disable=args.json or None, leave=False) as bar:
        for name in bar:
            for kind, runs in _decode_all(view, drafter, variants[name], works, args.max_length).items():
                found[kind][name] = runs
            rows[:] = _all_figures(found)  # of what has been measured, should it end here
    for kind, of in found.items():
        for name, runs in of.items():
            notes += differences(kind, name, runs, of["plain"], view.dtype)
    notes += _judge(rows)
    notes += noise(min(row["steps"] for row in rows), "take more of --num-runs or --max-length")


def _demo(args: argparse.Namespace) -> tuple[Any, Any, dict[str, list[Tensor]]]:
    dtype = getattr(torch, args.dtype)
    model = models.load_pair(PAIR, None, False, dtype, args.device)
    drafter = load_target(path_of(DRAFT), dtype=dtype).to(args.device)
    kinds = {"easy": "edit", "hard": "prose"}
    works = {name: work(kind, model.tokenizer, args.num_runs, SEED) for name, kind in kinds.items()}
    return model.base_model, drafter, works


def _shape(args: argparse.Namespace) -> tuple[Any, Any, dict[str, list[Tensor]]]:
    """A target of random weights, a draft model of the smallest shape of its vocabulary, and random prompts."""
    dtype = getattr(torch, args.dtype)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    small = min((name for name, sizes in SHAPES.items() if sizes["vocab_size"] == vocabulary), key=_width)
    model, drafter = (random_model(shape, device=args.device, dtype=dtype) for shape in (args.shape, small))
    context = 512 if args.device != "cpu" else 32
    prompts = [prompt[0] for prompt in models.random_prompts(model, args.num_runs, context)]
    return model.base_model, drafter.base_model, {f"{context} random tokens": prompts}


def _width(shape: str) -> int:
    return SHAPES[shape]["hidden_size"]


def _decode_all(
    view: ModelView, drafter: Any, how: int | EGAGConfig | None, works: dict[str, list[Tensor]], new: int
) -> dict[str, list[Run]]:
    """All prompts one after another, behind as much again, in which every length that occurs is captured."""
    rule = how if isinstance(how, EGAGConfig) else None
    length = how if isinstance(how, int) else MOST
    tree = replace(TreeSpec.chain(length), adaptive=rule is not None)
    draft: CausalLMDraft | None = None
    if how is not None:
        draft = replace(draft_from_causal_lm(drafter, view, lambda: tree), egag=rule)
    engine = Engine(view, draft, *choose_operations(view.device, None, None), prefixes=False)
    prompts = [prompt for kind in works.values() for prompt in kind]
    rows = max(map(len, prompts)) + new
    for prompt in prompts:
        decode(engine, draft, prompt, new, rows)
    return {kind: [decode(engine, draft, prompt, new, rows) for prompt in prompts] for kind, prompts in works.items()}


def _all_figures(found: dict[str, dict[str, list[Run]]]) -> list[dict[str, Any]]:
    rows = [row for kind, of in found.items() for row in _figures(kind, of)]
    if len(found) == 1:
        return rows
    names = next(iter(found.values()))
    return rows + _figures("mix", {name: [run for of in found.values() for run in of[name]] for name in names})


def _figures(kind: str, found: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """The rows of `drafters.figures`, with passes of the draft for each step."""
    passes = {name: sum(run.passes for run in runs) for name, runs in found.items()}
    return [{**row, "passes": passes[row["variant"]] / row["steps"]} for row in figures(kind, found)]


def _judge(rows: list[dict[str, Any]]) -> list[str]:
    """What choosing costs, and what it gains over the best fixed length."""
    notes = []
    for kind in dict.fromkeys(row["work"] for row in rows):
        of = {row["variant"]: row for row in rows if row["work"] == kind}
        for name, count in COMPARED.items():
            ratio = of[name]["ms_per_step"] / of[f"{count} drafts"]["ms_per_step"]
            notes.append(f"{kind}: a step of {name!r} takes {ratio:.3f} x that of {count} drafts")
        fixed = max((f"{count} drafts" for count in FIXED), key=lambda name: of[name]["tokens_per_second"])
        chosen = max((name for name in RULES if name not in COMPARED), key=lambda name: of[name]["tokens_per_second"])
        ratio = of[chosen]["tokens_per_second"] / of[fixed]["tokens_per_second"]
        notes.append(f"{kind}: {chosen!r} gives {ratio:.3f} x the tokens per second of {fixed}, the best fixed length")
    return notes


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    columns = {
        "": "variant",
        "work": "work",
        "tau": "tau",
        "passes": "passes",
        "ms/step": "ms_per_step",
        "tokens/s": "tokens_per_second",
        "x plain": "speedup",
        "steps": "steps",
    }
    return table(list(columns), [[row.get(key) for key in columns.values()] for row in rows])
