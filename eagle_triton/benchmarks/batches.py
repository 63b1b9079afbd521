"""Tokens per second over batch sizes: trees that the policy chooses against plain decoding, in the same run.

Acceptance is fixed (3 drafts a step unless --accept-length says otherwise), so random weights are enough.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.acceptance import WARNING, fix_acceptance
from eagle_triton.benchmarks.parity import CHECKED, check_parity
from eagle_triton.benchmarks.timing import noise, progress
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.inference.policy import TreePolicy
from eagle_triton.inference.session import Session
from eagle_triton.inference.timing import Stopwatch

STEPS = {"cuda": 20, "cpu": 3}  # timed for each tree
COLUMNS = (
    "=variant, batch, context, nodes, ms/step=ms_per_step, tau, tokens/s=tokens_per_second, lowest, highest, "
    "x plain=speedup"
)


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add rows for each batch size and context: steps of every tree, plain decoding, and chosen trees; and notes."""
    model = models.load(args)
    notes.append(WARNING.format(args.accept_length))
    contexts = args.context or [512 if args.device != "cpu" else 64]
    cases = [(batch, context) for batch in args.batch for context in contexts]
    with progress(args, cases, "batches") as bar:
        for batch, context in bar:
            eagle, trees, (plain, auto) = _case(model, args, batch, context)
            auto["speedup"] = auto["tokens_per_second"] / plain["tokens_per_second"]
            rows += [*trees, plain, auto]
            if auto["speedup"] < 1:
                notes.append(f"batch {batch}, context {context}: speculation is {1 - auto['speedup']:.1%} slower")
            notes += [f"batch {batch}, context {context}: {line.strip()}" for line in eagle.report().splitlines()[2:]]
    steps = min((sum(row["steps_by_nodes"].values()) for row in rows if row["variant"] != "tree"), default=0)
    notes += noise(steps, "raise --num-runs or --max-length")


def _case(
    model: EaModel, args: argparse.Namespace, batch: int, context: int
) -> tuple[EAGLEInference, list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of one batch size: of every tree's steps, and of plain decoding and chosen trees.

    A first generation makes room for the others, and timing every tree captures its graph. Then both ways of decoding
    are warmed up and run in turns. Before acceptance is fixed, some tokens are compared with the target's.
    """
    head = model.ea_layer
    tree: dict[str, Any] = dict(topk=head.top_k, num_steps=head.depth + 1, num_draft_tokens="auto")
    config = EAGLEConfig(**tree, slots=batch, prefixes=False, draft_dtype=args.draft_weights)
    eagle = EAGLEInference(head, model, config)
    policy = eagle.policy(batch)
    assert policy is not None, "a checkpoint of this benchmark has a draft"
    prompts = [prompt.to(model.device) for prompt in models.random_tokens(model.vocab_size, batch, context)]
    for spec in (max(policy.trees, key=lambda tree: tree.nodes), PLAIN):
        _check(eagle, model, spec, prompts)
    fix_acceptance(eagle.engine.ops, args.accept_length)
    _decode(eagle, None, prompts, args.max_length)
    timings = eagle.measure_costs((batch,), context, STEPS[model.device.type]).timings
    case = {"batch": batch, "context": context}
    trees = [
        {"variant": "tree", **case, "ms_per_step": row.ms, "nodes": row.nodes, "depth": row.depth} for row in timings
    ]
    policy = eagle.policy(batch)  # by these costs
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "auto": []}
    for repeat in range(args.num_runs + 1):
        for name, chosen in (("plain", None), ("auto", policy)):
            run = _decode(eagle, chosen, prompts, args.max_length)
            if repeat:
                runs[name].append(run)
    return eagle, trees, [{"variant": name, **case, **_figures(found)} for name, found in runs.items()]


def _check(eagle: EAGLEInference, model: EaModel, spec: TreeSpec, prompts: list[Tensor]) -> None:
    """Raise ValueError unless a batch gives the target's own tokens."""
    rows = len(prompts[0]) + CHECKED
    with Batch(eagle.engine, len(prompts), spec, rows) as running, torch.no_grad():
        running.admit_all(Request(prompt, CHECKED) for prompt in prompts)
        while running.running:
            running.step()
        for slot, prompt in enumerate(prompts):
            check_parity(model.base_model, running.tokens(slot), len(prompt), SamplingParams())


def _decode(eagle: EAGLEInference, policy: TreePolicy | None, prompts: list[Tensor], new: int) -> dict[str, Any]:
    """One generation of `new` tokens for each prompt, timed after the step that holds the prefills."""
    rows, nodes = len(prompts[0]) + new, Counter[int]()
    with Session(eagle.engine, policy, len(prompts), rows) as session, torch.no_grad():
        for prompt in prompts:
            session.submit(prompt, new, SamplingParams(), stop_token_ids=())
        session.advance()
        watch, first, steps = Stopwatch(prompts[0].device), session.tokens, session.steps
        while not session.idle:
            nodes[session.advance().nodes] += 1
        figures = {"seconds": watch.seconds(), "tokens": session.tokens - first, "steps": session.steps - steps}
        return {**figures, "tau": session.statistics.tau, "nodes": nodes}


def _figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    nodes: Counter[int] = sum((run["nodes"] for run in runs), Counter())
    rates = [run["tokens"] / run["seconds"] for run in runs]
    return {
        "tokens_per_second": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "ms_per_step": statistics.median(run["seconds"] / run["steps"] * 1e3 for run in runs),
        "tau": statistics.median(run["tau"] for run in runs),
        "nodes": nodes.most_common(1)[0][0],
        "steps_by_nodes": dict(sorted(nodes.items())),
        "speedup": 1.0,
    }
