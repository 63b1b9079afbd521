"""Kinds of draft: one of somebody's own decodes losslessly, and what a draft need not have."""

from dataclasses import replace

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import StepGraph
from eagle_triton.engine.model.modules import Norm
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.scheduler.stop_rules import generate
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from tests.tiny import random_prompt, tiny_model


class RepeatDraft(Draft):
    """Drafts the last `count` tokens once more, the root among them."""

    def __init__(self, count: int):
        self.count = count

    def read_tree(self) -> TreeSpec:
        return TreeSpec.chain(self.count)

    def grow(self, ops, state) -> None:
        first = (state.lengths + 1 - self.count).clamp(min=0)
        last = ops.sequence_rows(state.tokens, first, self.count)
        root = ops.sequence_rows(state.tokens, state.lengths, 1)
        state.tree.write_chain(torch.cat((root, last), dim=1))


@pytest.fixture(scope="module")
def model():
    return tiny_model(
        vocab=8, seed=1, total_token=4, depth=1, top_k=2
    )  # so few tokens that greedy decoding soon repeats itself


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_zero_centred_norms_in_target_and_head(eagle3, device):
    """1 + (weight - 1): the same tokens and accepted lengths."""
    cuda, model = device == "cuda", tiny_model(eagle3=eagle3, vocab=8, seed=2, total_token=12, depth=3, top_k=3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(1, 0.3)
    view, draft = native.read(model.to(device))

    def centred(norm: Norm | None) -> Norm | None:
        return norm and Norm(norm.weight.detach() - 1, norm.eps, zero_centred=True)

    def with_centred_norms(part):
        layers = (
            replace(layer, input_norm=centred(layer.input_norm), post_norm=centred(layer.post_norm))
            for layer in part.layers
        )
        own = {name: centred(getattr(part, name)) for name in ("norm", "hidden_norm") if hasattr(part, name)}
        return replace(part, layers=tuple(layers), **own)

    runs = []
    for target, drafter in ((view, draft), (with_centred_norms(view), with_centred_norms(draft))):
        engine = Engine(target, drafter, make_operations(cuda), cuda_graph=cuda)
        prompts = [prompt.to(device) for prompt in PROMPTS]
        tokens = generate(
            engine, prompts, draft.read_tree(), SamplingParams(), max_new_tokens=[24] * 4, eos_token_ids=()
        )
        runs.append(([row.tolist() for row in tokens], list(engine.accept_lengths)))
    assert runs[0] == runs[1] and sum(runs[0][1]) > 0


def test_input_norms_of_a_head_are_of_one_kind():
    _, draft = native.read(tiny_model())
    with pytest.raises(ValueError, match="both be zero-centred, or neither"):
        replace(draft, hidden_norm=replace(draft.hidden_norm, zero_centred=True))
    with pytest.raises(ValueError, match="both round before their weight, or neither"):
        replace(draft, hidden_norm=replace(draft.hidden_norm, round_first=False))


PROMPTS = [random_prompt(length, vocab=8)[0] for length in (1, 9, 30, 9)]


@pytest.mark.parametrize("count", [2, 4, 11])
def test_a_draft_of_ones_own_decodes_losslessly(model, device, count):
    view, _ = native.read(model.to(device))
    cuda = device == "cuda"
    engine = Engine(view, RepeatDraft(count), make_operations(cuda), cuda_graph=cuda)
    prompts, limits = [prompt.to(device) for prompt in PROMPTS], [30, 25, 40, 25]

    def run(chosen, spec, new):
        return generate(engine, chosen, spec, SamplingParams(), max_new_tokens=new, eos_token_ids=())

    together = run(prompts, engine.draft.read_tree(), limits)
    accepted = list(engine.accept_lengths)
    assert sum(accepted) > 0, "nothing was accepted: the test shows nothing"
    for prompt, limit, row in zip(prompts, limits, together, strict=True):
        assert torch.equal(row, run([prompt], PLAIN, [limit])[0])
    run(prompts[-1:], engine.draft.read_tree(), limits[-1:])
    assert engine.accept_lengths == accepted, "the last prompt is drafted otherwise when it is alone"
    if cuda:
        assert engine.steps._kept and all(isinstance(step, StepGraph) for step in engine.steps._kept.values()), (
            engine.notes
        )


def test_it_needs_no_catching_up_when_drafting_resumes(model):
    engine = Engine(native.read(model.cpu())[0], RepeatDraft(4), make_operations())
    spec, want = engine.draft.read_tree(), []
    for pause in (0, 70):
        with Batch(engine, 1, spec, 200) as batch:
            batch.admit(Request(PROMPTS[1], 150))
            for _ in range(pause):
                batch.spec = PLAIN
                batch.step()
            batch.spec = spec
            while batch.running:
                batch.step()
            want.append(batch.tokens(0))
        assert batch.sequences.skipped is None and batch.sequences.draft_tensors is None
    assert torch.equal(*want)


def test_inference_takes_it(model):
    prompts = [prompt[None] for prompt in PROMPTS[1:2]]
    eagle = EAGLEInference(RepeatDraft(5), model.cpu(), EAGLEConfig(fallback=False))
    (row,), stats = eagle.generate([prompts[0][0]], max_new_tokens=40)
    alone = model.generate(prompts[0], max_new_tokens=40)[0]
    assert torch.equal(row, alone) and stats["acceptance_rate"] > 0
    assert stats.completions[0].statistics.proposed % 5 == 0
    assert eagle.memory_bytes(slots=2, rows=100)["draft_cache"] == 0
    with pytest.raises(ValueError, match="the draft must score candidates, which a RepeatDraft does not"):
        eagle.draft_step(prompts[0])
