"""Drafts of the head, of repetition, and of both in one tree, over three kinds of work, against plain decoding.

One sequence at a time, greedy: tokens per step say what a drafter is worth, tokens per second what is left of that on
this device. A drafter is made anew for each kind of work, so that former outputs are those of that work alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_triton import EaModel
from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.drafting_work import KINDS, work
from eagle_triton.benchmarks.timing import noise
from eagle_triton.engine.drafts.beams import BeamDraft
from eagle_triton.engine.drafts.counted import CountedDraft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.hybrid import with_suffix_drafts
from eagle_triton.engine.drafts.repeats import NgramSource, RepeatDraft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.operations import choose_operations
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.inference.timing import Stopwatch
from eagle_triton.text_table import table

SUFFIX_DRAFTS, NGRAM_DRAFTS = 15, 5
SLACK = 0.05  # tokens per step by which both together may be behind the better of the two
SEED = 7


class Run(NamedTuple):
    """One prompt decoded: its tokens, steps, and seconds behind the prefill."""

    tokens: Tensor
    steps: int
    emitted: int
    seconds: float
    passes: int  # of the draft


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each kind of work and drafter; notes of figures that are not as they should be."""
    model = models.load(args)
    view, head = native.read(model)
    drafters = _drafters(head, view.device)
    prompts_of = _random(model, args) if args.shape or args.context else _text(model, args)
    with tqdm(total=len(prompts_of) * len(drafters), desc="drafters", disable=args.json or None, leave=False) as bar:
        for kind, prompts in prompts_of.items():
            found: dict[str, list[Run]] = {}
            for name, make in drafters.items():
                found[name] = _decode_all(view, make(), prompts, args.max_length)
                if name != "plain":
                    notes += differences(kind, name, found[name], found["plain"], view.dtype)
                bar.update()
            second = args.num_runs if kind == "warm" else 0  # the first half of "warm" is "prose" once more
            rows += figures(kind, {name: runs[second:] for name, runs in found.items()})
    if "prose" in prompts_of:
        notes += _judge(rows)
    notes += noise(min(row["steps"] for row in rows), "take more of --num-runs or --max-length")


def _text(model: EaModel, args: argparse.Namespace) -> dict[str, list[Tensor]]:
    if model.tokenizer is None:
        raise ValueError("--model must hold a tokenizer, and none lies beside the target")
    counts = {kind: args.num_runs * (2 if kind == "warm" else 1) for kind in KINDS}
    return {kind: work(kind, model.tokenizer, count, SEED) for kind, count in counts.items()}


def _random(model: EaModel, args: argparse.Namespace) -> dict[str, list[Tensor]]:
    """Prompts that say what a step costs, and nothing of what drafts are worth."""
    contexts = args.context or [512 if args.device != "cpu" else 64]
    return {
        f"{context} random tokens": [prompt[0] for prompt in models.random_prompts(model, args.num_runs, context)]
        for context in contexts
    }


def _drafters(head: BeamDraft, device: torch.device) -> dict[str, Callable[[], Draft | None]]:
    return {
        "plain": lambda: None,
        "head": lambda: head,
        "ngram": lambda: RepeatDraft(NgramSource(NGRAM_DRAFTS)),
        "nasd": lambda: CountedDraft(NGRAM_DRAFTS),
        "suffix": partial(with_suffix_drafts, None, SUFFIX_DRAFTS, device),
        "both": partial(with_suffix_drafts, head, SUFFIX_DRAFTS, device),
    }


def _decode_all(view: ModelView, draft: Draft | None, prompts: list[Tensor], new: int) -> list[Run]:
    """The prompts one after another, behind a run of the first that compiles and captures and is forgotten again."""
    operations, graph = choose_operations(view.device, None, None)
    engine = Engine(view, draft, operations, graph, prefixes=False)
    rows = max(len(prompt) for prompt in prompts) + new
    decode(engine, draft, prompts[0], min(new, 8), rows)
    if draft is not None:
        draft.forget()
    return [decode(engine, draft, prompt, new, rows) for prompt in prompts]


def decode(
    engine: Engine, draft: Draft | None, prompt: Tensor, new: int, rows: int, spec: TreeSpec | None = None
) -> Run:
    """One prompt [L] and `new` tokens behind it, in a batch of `rows` rows; spec None: with the draft's own tree."""
    if spec is None:
        spec = PLAIN if draft is None else draft.read_tree()
    prompt = prompt.to(engine.device)
    with Batch(engine, 1, spec, rows) as batch:
        batch.admit(Request(prompt, new))
        watch, steps, emitted, passes = Stopwatch(engine.device), 0, 0, 0
        while batch.running:
            (progress,) = batch.step()
            steps += progress.tree is not None  # else the prompt was read
            emitted, passes = emitted + progress.accepted + 1, passes + progress.passes
        return Run(batch.tokens(0).cpu(), steps, emitted, watch.seconds(), passes)


def differences(kind: str, name: str, runs: list[Run], plain: list[Run], dtype: torch.dtype) -> list[str]:
    """A note if outputs are not plain decoding's: an error in fp32, rounding in 16 bits."""
    differ = sum(not torch.equal(run.tokens, other.tokens) for run, other in zip(runs, plain, strict=True))
    verdict = "FAIL: " if dtype == torch.float32 else ""
    return [f"{verdict}{kind}, {name}: {differ} of {len(runs)} outputs are not plain decoding's"] if differ else []


def figures(work_name: str, found: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """A row for each variant, of all its prompts together.

    So its tokens per second are tau over the time of a step, and its speedup is the ratio of its tokens per second to
    those of "plain".
    """
    plain = _tokens_per_second(found["plain"])
    return [
        {
            "work": work_name,
            "variant": name,
            "tau": sum(run.emitted for run in runs) / sum(run.steps for run in runs),
            "ms_per_step": sum(run.seconds for run in runs) / sum(run.steps for run in runs) * 1e3,
            "tokens_per_second": _tokens_per_second(runs),
            "speedup": _tokens_per_second(runs) / plain,
            "steps": sum(run.steps for run in runs),
        }
        for name, runs in found.items()
    ]


def _tokens_per_second(runs: list[Run]) -> float:
    return sum(run.emitted for run in runs) / sum(run.seconds for run in runs)


def _judge(rows: list[dict[str, Any]]) -> list[str]:
    """What both together gain, and where they are behind one alone."""
    tau = {(row["work"], row["variant"]): row["tau"] for row in rows}
    notes = []
    for name in dict.fromkeys(row["work"] for row in rows):
        best = max(tau[name, "head"], tau[name, "suffix"])
        behind = ", BEHIND ONE ALONE" if tau[name, "both"] < best - SLACK else ""
        notes.append(f"{name}: both {tau[name, 'both'] / tau[name, 'head']:.2f} x the head's tokens per step{behind}")
    notes.append(
        f"warm: suffix {tau['warm', 'suffix'] / tau['prose', 'suffix']:.2f} x its tokens per step the first time"
    )
    return notes


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    columns = {
        "": "variant",
        "work": "work",
        "tau": "tau",
        "ms/step": "ms_per_step",
        "tokens/s": "tokens_per_second",
        "x plain": "speedup",
        "steps": "steps",
    }
    return table(list(columns), [[row.get(key) for key in columns.values()] for row in rows])
