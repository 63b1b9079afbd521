"""The megakernel against the separate kernels: the same step, bit for bit."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle_triton import EaModel, UnsupportedModelError, optimize_eagle_with_triton
from eagle_triton.demo import demo_prompts
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.megakernel_step import MegakernelStep, unsupported, unsupported_draft
from eagle_triton.engine.model.model_view import target_forward
from eagle_triton.engine.model.modules import Rotary, project
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.step import Mode, verify_and_draft
from eagle_triton.engine.step_cache import MegakernelError, StepCache
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.operands.verification import TARGET_MATCH, Verification
from tests.tiny import random_prompt, tiny_model

CUDA = torch.cuda.is_available()
CASES = int(os.environ.get("MEGAKERNEL_CASES", "8"))  # 200 were seen; each takes some seconds in the interpreter


def tensors(state) -> dict[str, Tensor]:
    """Everything a step may change, but rows of the caches behind what is committed."""
    pages = slice(1, 1 + state.sequences.pages.pool.pages)  # page 0 is nobody's, and others have no memory
    return {
        "tokens": state.tokens,
        "lengths": state.lengths,
        "active": state.active,
        "nan": state.nan,
        "report": state.report,
        "counter": state.sampling.step,
        "target cache": state.sequences.caches.caches[0].data[:, :, pages],
        "draft cache": state.sequences.draft_tensors.caches.caches[0].data[:, :, pages],
        "hidden": state.sequences.draft_tensors.hidden,
        "normed": state.sequences.draft_tensors.normed,
        **{f"tree {name}": value for name, value in state.tree._asdict().items()},
    }


def snapshot(state) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors(state).items()}


def restore(state, saved: dict[str, Tensor]) -> None:
    for name, value in tensors(state).items():
        value.copy_(saved[name])


def random_spec(source: random.Random) -> TreeSpec:
    """A dynamic or a fixed tree, of up to five children and four levels, and few nodes: each is walked alone."""
    top_k, depth = source.randint(1, 5), source.randint(0, 3)
    if source.random() < 0.3:
        paths = {(source.randrange(top_k),)}
        for _ in range(source.randint(0, 6)):
            parent = source.choice([(), *sorted(paths)])
            if len(parent) < 4:
                paths.add((*parent, source.randrange(top_k)))
        return TreeSpec.fixed(sorted(paths))
    candidates = top_k + depth * top_k * top_k
    return TreeSpec.dynamic(source.randint(2, min(candidates + 1, 12)), depth, top_k)


def compare_steps(model, spec, prompts, device, steps=2, sampling=None, verification=TARGET_MATCH):
    """Take `steps` steps both ways, each time from the same state; how many drafts each step accepted."""
    sampling = sampling or SamplingParams()
    view, draft = native.read(model.to(device))
    kernels, engine = make_operations(kernels=True), Engine(view, draft, make_operations())
    mode, accepted = Mode(not sampling.greedy, sampling.top_p_first, verification=verification), []
    with torch.no_grad(), Batch.start(engine, prompts, spec, sampling, max(map(len, prompts)) + 40) as batch:
        state = batch.state
        megakernel = MegakernelStep(view, draft, state)
        for _ in range(steps):
            tree = state.tree
            hidden, features, pending = target_forward(
                engine.ops,
                view,
                tree.tokens,
                state.sequences.caches,
                state.lengths,
                tree.depths,
                tree.ancestors,
                state.spec.depth,
            )
            logits = project(engine.ops, view.head, hidden)
            before = snapshot(state)
            verify_and_draft(kernels, draft, state, logits, features, pending, mode)
            expected = snapshot(state)
            restore(state, before)
            verify_and_draft(kernels, draft, state, logits, features, pending, mode, megakernel)
            for name, value in tensors(state).items():
                assert torch.equal(value, expected[name]), name
            assert not torch.equal(expected["draft cache"], before["draft cache"])
            accepted += state.report[:, 0].tolist()
    assert kernels.calls["draft_verify_update"] == steps
    return accepted


@pytest.mark.slow
@pytest.mark.parametrize("case", range(CASES))
def test_random_cases(device, case):
    """Trees, lengths, batches of one to three, greedy and sampled, both kinds of head, in fp32."""
    source = random.Random(case)
    model = tiny_model(eagle3=case % 2 == 0, seed=case)
    prompts = [random_prompt(source.randint(1, 40), seed=i)[0] for i in range(source.randint(1, 3))]
    sampling = source.choice([SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=case)])
    compare_steps(model, random_spec(source), prompts, device, steps=1, sampling=sampling)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_walk_by_a_policy_is_taken_from_outside(device, temperature):
    sampling, how = SamplingParams(temperature=temperature, seed=1), Verification(accept_policy="accept_all")
    prompts, spec = [random_prompt(3)[0], random_prompt(7)[0]], TreeSpec.dynamic(5, 1, 2)
    accepted = compare_steps(tiny_model(), spec, prompts, device, steps=1, sampling=sampling, verification=how)
    assert min(accepted) > 0


@pytest.mark.skipif(not CUDA, reason="hours in the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_demo(device, eagle3, dtype):
    """Steps that accept drafts, in batches of one and four."""
    model = EaModel.from_pretrained("demo", use_eagle3=eagle3, dtype=dtype)
    prompts = [torch.tensor(model.tokenizer(text).input_ids)[:30] for text in demo_prompts(4)]
    for batch in (prompts[:1], prompts):
        accepted = compare_steps(model, TreeSpec.dynamic(60, 7, 10), batch, device, steps=5)
        assert max(accepted) > 0, "nothing was ever accepted: the test shows nothing"


@pytest.mark.slow
def test_optimised_model_decodes_alike(device):
    model = tiny_model(total_token=5, depth=1, top_k=2).to(device)
    prompt = random_prompt(3).to(device)
    expected = model.eagenerate(prompt, max_new_tokens=2)
    model, originals = optimize_eagle_with_triton(model, kernels=True, megakernel=True)
    with originals:
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=2), expected)
        assert "draft_verify_update" in str(originals.report())


@pytest.mark.skipif(CUDA, reason="the kernels run there")
def test_auto_leaves_it_out_without_a_gpu():
    engine = Engine(*native.read(tiny_model()), make_operations(kernels=True), megakernel=None)
    with Batch.start(engine, [random_prompt(3)[0]], TreeSpec.dynamic(4, 1, 2), SamplingParams(), 20) as batch:
        assert engine.steps._megakernel_step(batch.state) is None


def test_auto_goes_on_without_it_where_it_does_not_run(monkeypatch):
    model = tiny_model()
    engine = Engine(*native.read(model), make_operations(), megakernel=None)
    prompt, spec = random_prompt(5)[0], TreeSpec.dynamic(8, 2, 3)

    def broken(*_):
        raise RuntimeError("too many resources requested for launch")

    monkeypatch.setattr(StepCache, "_megakernel_step", lambda self, state: broken)
    monkeypatch.setattr("eagle_triton.engine.step_cache.median_milliseconds", lambda step: step())
    monkeypatch.setattr("eagle_triton.engine.step.verify_and_draft", _refusing(verify_and_draft, broken))
    with Batch.start(engine, [prompt], spec, SamplingParams(), 20) as batch:
        assert batch.step()[0].tokens and batch.step()[0].tokens
    assert "too many resources" in engine.notes["megakernel"]


def _refusing(function, refused):
    """`function`, which calls `refused` instead if that is its last argument."""

    def call(*arguments):
        return refused() if arguments[-1] is refused else function(*arguments)

    return call


@pytest.mark.parametrize(
    ("spec", "batch", "reason"),
    [
        (TreeSpec.dynamic(60, 7, 10), 7, "70 rows"),
        (TreeSpec.dynamic(3, 0, 65), 1, "65 children"),
        (TreeSpec.dynamic(3, 0, 2), 1, None),
    ],
    ids=["rows", "children", "fits"],
)
def test_what_is_unsupported_is_named(spec, batch, reason):
    engine = Engine(*native.read(tiny_model(vocab=120)), make_operations())
    with Batch.start(engine, [random_prompt(3)[0]] * batch, spec, SamplingParams(), 20) as running:
        found = unsupported(engine.draft, running.state)
    assert found is None if reason is None else reason in found


def _centred(norm):
    return replace(norm, zero_centred=True)


def _layers(draft, **changes):
    return {"layers": (replace(draft.layers[0], **changes),)}


def _mixer(draft, **changes):
    return _layers(draft, mixer=replace(draft.layers[0].mixer, **changes))


CENTRED, EAGLE31 = "zero-centred norms", "norms the target's features or its own output (EAGLE 3.1)"
PARTS = "gates its attention or rotates only a part"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (lambda d: dict(hidden_norm=_centred(d.hidden_norm), **_layers(d, input_norm=_centred(d.token_norm))), CENTRED),
        (lambda d: _layers(d, post_norm=_centred(d.layers[0].post_norm)), CENTRED),
        (lambda d: dict(norm=_centred(d.norm)), CENTRED),
        (lambda d: dict(norm=replace(d.norm, round_first=False)), "round once, after their weight"),
        (lambda d: _layers(d, mlp=replace(d.layers[0].mlp, activation="gelu_tanh")), "activation gelu"),
        (lambda d: _mixer(d, rotary=replace(d.layers[0].mixer.rotary, pairs=True)), "rotates in pairs"),
        (lambda d: dict(norm_before_fc=d.hidden_norm), EAGLE31),
        (lambda d: dict(fc_norms=(d.hidden_norm,) * 3), EAGLE31),
        (lambda d: dict(norm_output=True), EAGLE31),
        (lambda d: _mixer(d, gated=True), PARTS),
        (lambda d: _mixer(d, rotary=Rotary(torch.ones(4))), PARTS),
    ],
)
def test_heads_that_it_does_not_know_are_named(changes, reason):
    _, draft = native.read(tiny_model())
    assert unsupported_draft(draft) is None
    assert reason in unsupported_draft(replace(draft, **changes(draft)))


def test_strict_refuses_a_head_that_it_cannot_take(device):
    model = tiny_model().to(device)
    weight = model.ea_layer.midlayer.self_attn.o_proj.weight
    weight.data = weight.data.T.contiguous().T
    before = dict(vars(model))
    with pytest.raises(UnsupportedModelError, match="megakernel: the weight of the draft head's o is not contiguous"):
        optimize_eagle_with_triton(model, kernels=True, megakernel=True, strict=True)
    assert dict(vars(model)) == before
    _, originals = optimize_eagle_with_triton(model, kernels=True, megakernel="auto", strict=True)
    originals.restore()


def test_options_are_checked():
    with pytest.raises(ValueError, match="megakernel=True needs a GPU and kernels"):
        optimize_eagle_with_triton(tiny_model(), kernels=False, megakernel=True)
    with pytest.raises(TypeError, match="megakernel must be"):
        optimize_eagle_with_triton(tiny_model(), megakernel="always")


@pytest.mark.skipif(not CUDA, reason="one program has nobody to wait for")
def test_a_program_that_never_arrives(monkeypatch):
    """An exception within a second of the launch, and the model generates correctly afterwards."""
    from time import perf_counter

    from eagle_triton.engine import megakernel_step

    model = tiny_model().cuda()
    prompt = random_prompt(9).cuda()
    expected = model.eagenerate(prompt, max_new_tokens=20)
    original = megakernel_step.MegakernelStep.__init__

    def with_absent(self, *arguments, **options):
        original(self, *arguments, **options)
        self.absent = 3

    monkeypatch.setattr(megakernel_step.MegakernelStep, "__init__", with_absent)
    model, originals = optimize_eagle_with_triton(model, megakernel=True, cuda_graph=False)
    with originals:
        with pytest.raises(MegakernelError, match="did not arrive"):
            model.eagenerate(prompt, max_new_tokens=20)  # compiles
        originals.restore()
    model, originals = optimize_eagle_with_triton(model, megakernel=True, cuda_graph=False)
    with originals:
        start = perf_counter()
        with pytest.raises(MegakernelError, match="did not arrive"):
            model.eagenerate(prompt, max_new_tokens=20)
        assert perf_counter() - start < 2.5  # the prefill, and two steps launched before the first is read
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=20), expected)
        assert "given up" in str(originals.report())
