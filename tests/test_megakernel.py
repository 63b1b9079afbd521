"""The megakernel against the separate kernels: the same step, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from eagle_triton.adapters import native
from eagle_triton.engine.batch import Batch
from eagle_triton.engine.fused import FusedStep, unsupported
from eagle_triton.engine.generation import Engine
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.sampling import Sampling
from eagle_triton.engine.step import Mode, project, target_forward, verify_and_draft
from eagle_triton.tree_spec import TreeSpec
from tests.tiny import random_prompt, tiny_model


def tensors(state) -> dict[str, Tensor]:
    """Everything a step may change."""
    return {
        "tokens": state.tokens,
        "lengths": state.lengths,
        "active": state.active,
        "nan": state.nan,
        "report": state.report,
        "target cache": state.target_cache,
        "draft cache": state.draft_cache,
        **{f"tree {name}": value for name, value in state.tree._asdict().items()},
    }


def snapshot(state) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors(state).items()}


def restore(state, saved: dict[str, Tensor]) -> None:
    for name, value in tensors(state).items():
        value.copy_(saved[name])


def random_spec(source: random.Random) -> TreeSpec:
    top_k, depth = source.randint(1, 5), source.randint(0, 3)
    if source.random() < 0.3:
        paths = {(source.randrange(top_k),)}
        for _ in range(source.randint(0, 6)):
            parent = source.choice([(), *sorted(paths)])
            if len(parent) < 4:
                paths.add((*parent, source.randrange(top_k)))
        return TreeSpec.fixed(sorted(paths))
    candidates = top_k + depth * top_k * top_k
    return TreeSpec.dynamic(source.randint(2, min(candidates + 1, 70)), depth, top_k)


def compare_steps(model, spec, prompts, device, steps=2, sampling=None, dtype=torch.float32, programs=None):
    """Run `steps` steps both ways from the same state; returns the accepted counts seen."""
    sampling = sampling or Sampling()
    model = model.to(device=device, dtype=dtype)
    view, draft = native.read(model)
    kernels, engine = Operations(kernels=True), Engine(view, draft, Operations())
    seen = []
    with torch.no_grad(), Batch.start(engine, prompts, spec, sampling, max(map(len, prompts)) + 40) as generation:
        state = generation.state
        assert unsupported(view, draft, state) is None
        fused = FusedStep(view, draft, state, programs)
        for _ in range(steps):
            tree = state.tree
            positions = state.lengths[:, None] + tree.depths
            hidden, features = target_forward(
                engine.ops, view, tree.tokens, state.target_cache, state.lengths, positions, tree.ancestors
            )
            logits = project(engine.ops, view.head, hidden)
            mode = Mode(not sampling.greedy, sampling.top_p_first)
            before = snapshot(state)
            verify_and_draft(kernels, draft, state, logits, features, mode)
            expected = snapshot(state)
            restore(state, before)
            fused(logits, features)
            fused.check()
            for name, value in tensors(state).items():
                assert torch.equal(value, expected[name]), name
            assert not torch.equal(expected["tree tokens"], before["tree tokens"])
            seen += state.report[:, 0].tolist()
    return seen


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_one_step(device, eagle3):
    model = tiny_model(eagle3=eagle3)
    compare_steps(model, TreeSpec.dynamic(8, 2, 3), [random_prompt(9)[0]], device)
