"""Drafting methods against plain decoding, over three kinds of work.

One sequence at a time, greedy, where drafting gains most. Rates are without the prompt. With random weights the tokens
mean nothing; only the time of a step does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from eagle_triton import EaModel
from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.drafting_work import KINDS, work
from eagle_triton.benchmarks.models import Target
from eagle_triton.benchmarks.modes import block_drafter_of, drafters_of
from eagle_triton.benchmarks.sweep import configurations, decode
from eagle_triton.benchmarks.timing import noise, progress
from eagle_triton.command_line import sentence
from eagle_triton.comparison.answer import Answer, ask
from eagle_triton.comparison.figures import Totals, differing
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.session import Session

SLACK = 0.05  # tokens per step by which `both` may fall short of the better of the two
SEED = 7

Works = dict[str, list[list[int]]]  # prompts by kind of work
Found = dict[str, dict[str, list[Answer]]]  # answers by kind of work and variant
COLUMNS = "=variant, work, tau, passes, ms/step=ms_per_step, tokens/s=tokens_per_second, x plain=speedup, steps"


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each kind of work and drafter, and notes on unexpected figures."""
    model = models.load(args)
    if args.shape or args.context:
        works = random_works(model, args.num_runs, args.context or [512 if args.device != "cpu" else 64])
    else:
        works = _texts(model, args.num_runs)
    block = models.load_block(block_drafter_of(args), model.base_model)
    target = Target(model, model.base_model, model.ea_layer, model.tokenizer, block)
    parts = configurations(drafters_of(args), None, [0.0], target)
    variants = {part.drafter: partial(part.inference, target) for part in parts}
    for found in compare(variants, works, args, notes):
        if "warm" in found:  # its first half repeats "prose"
            found["warm"] = {name: answers[args.num_runs :] for name, answers in found["warm"].items()}
        rows[:] = [row for kind, answers in found.items() for row in figures(kind, answers)]
    notes += different(found, getattr(torch, args.dtype))
    if "prose" in works:
        notes += _judge(rows)
    notes += noise(min(row["steps"] for row in rows), "raise --num-runs or --max-length")


def random_works(model: EaModel, count: int, contexts: Sequence[int]) -> Works:
    """Prompts of random tokens: they show the cost of a step, not the worth of drafts."""
    tokens = {context: models.random_tokens(model.vocab_size, count, context) for context in contexts}
    return {f"{context} random tokens": [prompt.tolist() for prompt in found] for context, found in tokens.items()}


def _texts(model: EaModel, count: int) -> Works:
    tokenizer = models.tokenizer_of(model)
    return {kind: work(kind, tokenizer, count * (2 if kind == "warm" else 1), SEED) for kind in KINDS}


def compare(
    variants: Mapping[str, Callable[[], EAGLEInference]], works: Works, args: argparse.Namespace, notes: list[str]
) -> Iterator[Found]:
    """Decode all works with each variant. Yields all results so far after each variant.

    On a GPU everything is decoded once before it is timed. A variant forgets earlier text before each kind of work. One
    that cannot run gets a note instead of answers; the first, which the others are compared with, raises.
    """
    found: Found = {kind: {} for kind in works}
    rows = max(len(prompt) for prompts in works.values() for prompt in prompts) + args.max_length
    for name, make in progress(args, list(variants.items()), args.mode):
        try:
            answers = _decoded(name, make, works, args.max_length, rows)
        except (ValueError, RuntimeError) as error:  # no memory is a RuntimeError too
            if not any(found.values()):
                raise
            notes.append(f"FAIL: {name} is left out: {sentence(error)}")
            continue
        for kind in works:
            found[kind][name] = answers[kind]
        yield {kind: dict(answers) for kind, answers in found.items()}


def _decoded(
    name: str, make: Callable[[], EAGLEInference], works: Works, new: int, rows: int
) -> dict[str, list[Answer]]:
    """The answers of a variant by kind of work. Raises ValueError if it took no step there, which leaves no time."""
    inference = make()
    run = partial(_greedy, name, inference.pair.view.device)
    answers = {}
    for kind, prompts in works.items():
        answers[kind] = decode(inference, rows, prompts, new, run, prompts)
        if not Totals.of(answers[kind]).steps:
            raise ValueError(f"{kind}: no answer took a step, each ended with its first token")
    return answers


def _greedy(
    method: str, device: torch.device, session: Session, prompts: Sequence[list[int]], new: int
) -> Iterator[Answer]:
    options = {"temperature": 0.0, "stop_token_ids": ()}
    return (ask(session, device, method, prompt, new, options) for prompt in prompts)


def different(found: Found, dtype: torch.dtype) -> list[str]:
    """Notes on outputs that differ from plain decoding's: an error in float32, rounding in 16 bits."""
    notes = []
    for kind, variants in found.items():
        for name, answers in variants.items():
            if count := len(differing(answers, variants["plain"])):
                verdict = "FAIL: " if dtype == torch.float32 else ""
                notes.append(f"{verdict}{kind}, {name}: {count} of {len(answers)} outputs differ from plain decoding's")
    return notes


def figures(kind: str, found: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """A row for each variant, over all its prompts: tokens per second are tau over the time of a step."""
    rows: list[dict[str, Any]] = []
    for name, answers in found.items():
        totals = Totals.of(answers)
        assert totals.tau is not None and totals.ms_per_step is not None, "compare() keeps only what took a step"
        rate = totals.tau / totals.ms_per_step * 1e3
        row = {"work": kind, "variant": name, "tau": totals.tau, "ms_per_step": totals.ms_per_step}
        row |= {"tokens_per_second": rate, "speedup": rate / (rows[0]["tokens_per_second"] if rows else rate)}
        rows.append({**row, "steps": totals.steps, "passes": totals.drafter_forwards / totals.steps})
    return rows


def _judge(rows: list[dict[str, Any]]) -> list[str]:
    """Notes on the gain of head and suffixes together, and on where they fall short of one alone."""
    tau = {(row["work"], row["variant"]): row["tau"] for row in rows}
    found = {row["variant"] for row in rows}
    notes = []
    for kind in dict.fromkeys(row["work"] for row in rows) if {"head", "suffix", "both"} <= found else ():
        best = max(tau[kind, "head"], tau[kind, "suffix"])
        short = ", FEWER THAN ONE OF THEM ALONE" if tau[kind, "both"] < best - SLACK else ""
        notes.append(f"{kind}: both {tau[kind, 'both'] / tau[kind, 'head']:.2f} x the head's tokens per step{short}")
    if "suffix" in found:
        ratio = tau["warm", "suffix"] / tau["prose", "suffix"]
        notes.append(f"warm: suffix {ratio:.2f} x its tokens per step on prose")
    return notes
