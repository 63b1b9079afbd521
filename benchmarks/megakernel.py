"""What follows the target's logits in a step, as one launch and as separate kernels, in CUDA graphs, side by side."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

import torch

from benchmarks import models
from benchmarks.record import table
from benchmarks.timing import Quantiles, copy_bandwidth
from eagle_triton.adapters import native
from eagle_triton.engine.batch import Batch
from eagle_triton.engine.generation import Engine
from eagle_triton.engine.graph import StepGraph
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.sampling import Sampling
from eagle_triton.engine.step import Mode, project, target_forward, verify_and_draft

ROUNDS = 60


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each batch size and context. Raises ValueError without a GPU or for an unsupported model."""
    if args.device == "cpu":
        raise ValueError("megakernel mode needs a GPU")
    from eagle_triton.engine.fused import FusedStep

    model = models.load(args)
    view, draft = native.read(model)
    spec, ops = draft.read_tree(), Operations(kernels=True)
    engine = Engine(view, draft, ops)
    bandwidth = copy_bandwidth(view.device)
    floor_ms = (models.weight_bytes(view, draft, spec) - models.target_bytes(view)) / bandwidth * 1e3
    notes.append(f"copy bandwidth (read + write): {bandwidth / 1e9:.0f} GB/s; the floor is the head's weights read")
    for batch, context in itertools.product(args.batch, args.context or [512]):
        prompts = [prompt[0].to(view.device) for prompt in models.random_prompts(model, batch, context)]
        with torch.no_grad(), Batch.start(engine, prompts, spec, Sampling(), context + 64) as running:
            state = running.state
            fused = FusedStep(view, draft, state)
            tree, positions = state.tree, state.lengths[:, None] + state.tree.depths
            hidden, features = target_forward(
                ops, view, tree.tokens, state.target_cache, state.lengths, positions, tree.ancestors
            )
            logits = project(ops, view.head, hidden)
            _same(ops, draft, state, logits, features, fused)
            with state.held():
                pool = torch.cuda.graph_pool_handle()
                steps = {
                    name: StepGraph(
                        partial(verify_and_draft, ops, draft, state, logits, features, Mode(), used), state, ops, pool
                    )
                    for name, used in (("separate", None), ("megakernel", fused))
                }
                times = _times(steps)
        for name, milliseconds in times.items():
            rows.append(
                {
                    "variant": name,
                    "model": args.shape or args.model,
                    "batch": batch,
                    "context": context,
                    "ms": milliseconds.median,
                    "ms_p20": milliseconds.p20,
                    "ms_p80": milliseconds.p80,
                    "floor_ms": floor_ms,
                    "floor_share": floor_ms / milliseconds.median,
                    "speedup": times["separate"].median / milliseconds.median,
                }
            )
        engine.release()


def _same(ops: Operations, draft, state, logits, features, fused) -> None:
    """Take one step both ways. Raises ValueError unless the trees are equal to the bit."""
    saved = [tensor.clone() for tensor in (*state.tree, state.lengths, state.tokens, state.active)]
    trees = []
    for used in (None, fused):
        verify_and_draft(ops, draft, state, logits, features, Mode(), used)
        trees.append([tensor.clone() for tensor in (*state.tree, state.lengths, state.tokens)])
        for place, before in zip((*state.tree, state.lengths, state.tokens, state.active), saved, strict=True):
            place.copy_(before)
    if not all(map(torch.equal, *trees)):
        raise ValueError("the megakernel's tree is not that of the separate kernels: nothing is timed")


def _times(steps: dict[str, StepGraph]) -> dict[str, Quantiles]:
    """Milliseconds of each, the two taking turns."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: Quantiles.of([a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def text(rows: list[dict[str, Any]]) -> str:
    headers = ("verify to next tree", "batch", "context", "ms", "p20", "p80", "share of floor", "speedup")
    names = ("variant", "batch", "context", "ms", "ms_p20", "ms_p80", "floor_share", "speedup")
    return table(headers, [[row[name] for name in names] for row in rows])
