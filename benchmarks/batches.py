"""Tokens per second over batch sizes: trees as the policy chooses them against plain decoding, in the same run.

Acceptance is fixed (3 drafts a step unless --accept-length says otherwise), so that random weights will do.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import models
from benchmarks.acceptance import WARNING, FixedAcceptance
from benchmarks.record import table
from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.engine.sampling import Sampling
from eagle_triton.speculative.policy import TreePolicy
from eagle_triton.speculative.session import Session
from eagle_triton.speculative.timing import Stopwatch

BATCHES = [1, 2, 4, 8, 16, 32]
ACCEPTED = 3.0


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for plain decoding and one for chosen trees at each batch size and context; and notes."""
    model = models.load(args)
    notes.append(WARNING.format(args.accept_length))
    contexts = args.context or [512 if args.device != "cpu" else 64]
    cases = [(batch, context) for batch in args.batch for context in contexts]
    for batch, context in tqdm(cases, desc="batches", disable=args.json, leave=False):
        plain, auto, eagle = _case(model, args, batch, context)
        auto["speedup"] = auto["tokens_per_second"] / plain["tokens_per_second"]
        rows += [plain, auto]
        if auto["speedup"] < 1:
            notes.append(f"batch {batch}, context {context}: speculation cost {1 - auto['speedup']:.1%}")
        notes += [f"batch {batch}: {line}" for line in eagle.report().splitlines()[1:]]


def _case(
    model: EaModel, args: argparse.Namespace, batch: int, context: int
) -> tuple[dict[str, Any], dict[str, Any], EAGLEInference]:
    """Rows of one batch size. Both ways of decoding are warmed up, then run in turns."""
    head = model.ea_layer
    config = EAGLEConfig(topk=head.top_k, num_steps=head.depth + 1, num_draft_tokens="auto", slots=batch)
    eagle = EAGLEInference(head, model, config)
    eagle.engine.ops = FixedAcceptance(eagle.engine.ops.kernels, args.accept_length)
    prompts = [prompt[0].to(model.device) for prompt in models.random_prompts(model, batch, context)]
    policy = eagle.policy(batch)
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "auto": []}
    for repeat in range(args.num_runs + 1):
        for name, chosen in (("plain", None), ("auto", policy)):
            run = _decode(eagle, chosen, prompts, args.max_length)
            if repeat:
                runs[name].append(run)
    rows = [_row(name, batch, context, found) for name, found in runs.items()]
    return rows[0], rows[1], eagle


def _decode(eagle: EAGLEInference, policy: TreePolicy | None, prompts: list[Tensor], new: int) -> dict[str, Any]:
    """One generation of `new` tokens for each prompt, timed behind the step that holds the prefills."""
    rows, nodes = len(prompts[0]) + new, Counter()
    with Session(eagle.engine, policy, len(prompts), rows) as session, torch.no_grad():
        for prompt in prompts:
            session.submit(prompt, new, Sampling(), stop_ids=())
        session.advance()
        watch, first, steps = Stopwatch(prompts[0].device), session.tokens, session.steps
        while not session.idle:
            nodes[session.advance().nodes] += 1
        seconds = watch.seconds()
        return {
            "seconds": seconds,
            "tokens": session.tokens - first,
            "steps": session.steps - steps,
            "tau": session.statistics.tau,
            "nodes": nodes,
        }


def _row(name: str, batch: int, context: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    nodes: Counter[int] = sum((run["nodes"] for run in runs), Counter())
    rates = [run["tokens"] / run["seconds"] for run in runs]
    return {
        "variant": name,
        "batch": batch,
        "context": context,
        "tokens_per_second": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "ms_per_step": statistics.median(run["seconds"] / run["steps"] * 1e3 for run in runs),
        "tau": statistics.median(run["tau"] for run in runs),
        "nodes": nodes.most_common(1)[0][0],
        "steps_by_nodes": dict(sorted(nodes.items())),
        "speedup": 1.0,
    }


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    keys = ("variant", "batch", "context", "tokens_per_second", "lowest", "highest", "ms_per_step", "tau", "nodes")
    headers = ("", "batch", "context", "tokens/s", "lowest", "highest", "ms/step", "tau", "nodes", "x plain")
    return table(headers, [[*(row[key] for key in keys), row["speedup"]] for row in rows])
