"""Times the part of a step after the target's logits: one launch and separate kernels side by side, in CUDA graphs."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.timing import Quantiles, copy_bandwidth, event_times
from eagle_triton.engine.drafts.eagle import EagleDraft
from eagle_triton.engine.graph import StepGraph
from eagle_triton.engine.model.model_view import target_forward
from eagle_triton.engine.model.modules import project
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.step import Mode, verify_and_draft

if TYPE_CHECKING:  # needs Triton
    from eagle_triton.engine.megakernel_step import MegakernelStep

ROUNDS = 60
COLUMNS = "verify to next tree=variant, batch, context, ms, p20=ms_p20, p80=ms_p80, share of floor=floor_share, speedup"


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each batch size and context. Raises ValueError for an unsupported model."""
    from eagle_triton.engine.megakernel_step import MegakernelStep

    model = models.load(args)
    engine = models.engine_of(model, model.ea_layer, cuda_graph=False, prefixes=False)
    view, draft = engine.view, engine.draft
    assert isinstance(draft, EagleDraft), "an EaModel's head"
    spec, ops = draft.read_tree(), engine.ops
    bandwidth = copy_bandwidth(view.device)
    floor_ms = draft.weight_bytes(spec) / bandwidth * 1e3
    notes.append(f"copy bandwidth (read + write): {bandwidth / 1e9:.0f} GB/s; the floor is reading the head's weights")
    for batch, context in itertools.product(args.batch, args.context or [512]):
        prompts = [prompt.to(view.device) for prompt in models.random_tokens(model.vocab_size, batch, context)]
        with torch.no_grad(), Batch.start(engine, prompts, spec, SamplingParams(), context + 64) as running:
            state = running.state
            megakernel = MegakernelStep(view, draft, state)
            tree = state.tree
            caches, depth = state.sequences.caches, state.spec.depth
            hidden, features, pending = target_forward(
                ops, view, tree.tokens, caches, state.lengths, tree.depths, tree.ancestors, depth
            )
            logits = project(ops, view.head, hidden)
            step: Callable[..., Any] = partial(verify_and_draft, ops, draft, state, logits, features, pending, Mode())
            _same(step, state, megakernel)
            with state.unchanged():
                pool = torch.cuda.graph_pool_handle()
                steps = {
                    name: StepGraph(partial(step, used), state, ops, pool)
                    for name, used in (("separate", None), ("megakernel", megakernel))
                }
                times = {name: Quantiles.of(taken) for name, taken in event_times(steps, ROUNDS).items()}
        for name, milliseconds in times.items():
            ms = milliseconds.median
            case = {"variant": name, "model": args.shape or args.model, "batch": batch, "context": context}
            figures = {"ms": ms, "ms_p20": milliseconds.p20, "ms_p80": milliseconds.p80, "floor_ms": floor_ms}
            speedup = times["separate"].median / ms
            rows.append(case | figures | {"floor_share": floor_ms / ms, "speedup": speedup})
        engine.clear()


def _same(step: Callable[[MegakernelStep | None], Tensor], state: DecodeState, megakernel: MegakernelStep) -> None:
    """Take one step both ways. Raises ValueError unless the trees are equal to the bit."""
    saved = [tensor.clone() for tensor in (*state.tree, state.lengths, state.tokens, state.active)]
    trees = []
    for used in (None, megakernel):
        step(used)
        trees.append([tensor.clone() for tensor in (*state.tree, state.lengths, state.tokens)])
        for place, before in zip((*state.tree, state.lengths, state.tokens, state.active), saved, strict=True):
            place.copy_(before)
    if not all(map(torch.equal, *trees)):
        raise ValueError("the megakernel's tree differs from the separate kernels' tree: nothing is timed")
