"""The engine on tiny random models: its cache, what it samples, its stop rules, and what happens when things break."""

import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, optimize_eagle_with_triton
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.graph import LaunchGraph
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.stop_rules import generate, original_steps
from eagle_triton.engine.state import capacity_bucket
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.models.tree import MC_SIM_7B_63
from tests.tiny import random_prompt, target_cache, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TREES = {
    "60-7-10": dict(total_token=60, depth=7, top_k=10),
    "fixed-26": {"tree_choices": MC_SIM_7B_63},
    "8-3-2": dict(total_token=8, depth=3, top_k=2),
}


def engine_for(model) -> Engine:
    return Engine(*native.read(model), make_operations())


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_cache_after_steps_equals_that_of_plain_decoding(eagle3, tree):
    engine = engine_for(tiny_model(eagle3=eagle3, **TREES[tree]))
    prompt, spec = random_prompt(37)[0], engine.draft.read_tree()
    with Batch.start(engine, [prompt], spec, SamplingParams(), 120) as generation:
        assert [(row.tree, len(row.tokens)) for row in generation.step()] == [(None, 1)]  # behind the prompt
        for _ in range(12):
            generation.step()
        tokens, rows = generation.tokens(0), generation.lengths[0]
        tree_cache = target_cache(generation.sequences)[..., :rows, :].clone()
        root = generation.state.tree.tokens[0, 0]
        assert len(tokens) == rows + 1 and tokens[-1] == root  # told, and not committed
        assert rows > 37 + 12, "nothing was ever accepted: the test shows nothing"
    with Batch.start(engine, [prompt], PLAIN, SamplingParams(), rows + 2) as generation:  # goes on
        while generation.lengths[0] < rows:
            generation.step()
        assert torch.equal(generation.tokens(0), tokens)
        assert generation.state.tree.tokens[0, 0] == root
        plain_cache = target_cache(generation.sequences)[..., :rows, :]
        torch.testing.assert_close(tree_cache, plain_cache, atol=2e-5, rtol=1e-4)


def test_the_same_torch_seed_gives_the_same_tokens_whatever_the_batch():
    engine = engine_for(tiny_model(**TREES["8-3-2"]))
    prompts = [random_prompt(n)[0] for n in (5, 9, 20)]
    sampling, spec = SamplingParams(temperature=1.0, top_p=0.9), engine.draft.read_tree()

    def run(chosen, **kwargs):
        return generate(engine, chosen, spec, sampling, max_new_tokens=[15] * len(chosen), eos_token_ids=(), **kwargs)

    torch.manual_seed(5)
    first = run(prompts)
    torch.manual_seed(5)
    again = run(prompts)
    torch.manual_seed(6)
    other = run(prompts)
    assert all(map(torch.equal, first, again)) and not all(map(torch.equal, first, other))
    torch.manual_seed(5)
    assert torch.equal(run(prompts[:1])[0], first[0])
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(*(run(prompts[:1], generator=generator)[0] for generator in generators))


def test_original_stop_rules_overshoot_and_exact_ones_do_not():
    engine = engine_for(tiny_model(vocab=8, seed=1, total_token=20, depth=3, top_k=4))
    prompt, spec = random_prompt(5, vocab=8), engine.draft.read_tree()
    steps = list(original_steps(engine, prompt, spec, SamplingParams(), max_new_tokens=20, limit=1000, stop_ids=()))
    news = [new for _, new, _ in steps]
    assert news[-1] > 20 and all(new <= 20 for new in news[:-1])
    assert [index for _, _, index in steps] == list(range(len(steps)))
    assert [ids.shape[1] - 5 for ids, _, _ in steps] == news
    exact = generate(engine, [prompt[0]], spec, SamplingParams(), max_new_tokens=[20], eos_token_ids=())[0]
    assert torch.equal(exact, steps[-1][0][0, :25])
    short = list(original_steps(engine, prompt, spec, SamplingParams(), max_new_tokens=500, limit=12, stop_ids=()))
    assert short[-1][0].shape[1] > 12 and all(ids.shape[1] <= 12 for ids, _, _ in short[:-1])
    stop = int(exact[9])
    stopped = list(
        original_steps(engine, prompt, spec, SamplingParams(), max_new_tokens=500, limit=1000, stop_ids=[stop])
    )
    assert stop in stopped[-1][0][0, 5:] and all(stop not in ids[0, 5:] for ids, _, _ in stopped[:-1])


def test_nan_logits_raise_and_the_engine_works_afterwards():
    model = tiny_model()
    engine, prompt = engine_for(model), random_prompt(8)[0]
    spec = engine.draft.read_tree()

    def run():
        return generate(engine, [prompt], spec, SamplingParams(), max_new_tokens=[12], eos_token_ids=())[0]

    before = run()
    weight = model.base_model.lm_head.weight
    saved = weight.detach().clone()
    with Batch.start(engine, [prompt], spec, SamplingParams(), 100) as generation:
        weight.data[4] = float("nan")
        (first,) = generation.step()  # chosen before
        assert first.tree is None and first.error is None and first.tokens == before[8:9].tolist()
        (progress,) = generation.step()
        assert progress.tree == spec and progress.committed == 0
        assert progress.finished == "error" and "NaN" in progress.error and progress.tokens == []
    with pytest.raises(RuntimeError, match="NaN after the prompts of sequences \\[0\\]"):
        Batch.start(engine, [prompt], spec, SamplingParams(), 100)
    with pytest.raises(RuntimeError, match="NaN for sequences \\[0\\]"):
        run()
    weight.data.copy_(saved)
    assert torch.equal(run(), before)


def test_a_second_generation_is_refused_while_one_runs():
    engine, prompt = engine_for(tiny_model()), random_prompt(8)
    spec = engine.draft.read_tree()
    steps = original_steps(engine, prompt, spec, SamplingParams(), max_new_tokens=9, limit=100, stop_ids=())
    next(steps)
    with pytest.raises(RuntimeError, match="another generation is running"):
        Batch.start(engine, [prompt[0]], spec, SamplingParams(), 100)
    steps.close()
    with Batch.start(engine, [prompt[0]], spec, SamplingParams(), 100) as generation:
        generation.step()


def test_the_callers_default_device_and_dtype_do_not_matter():
    """Everything is made on the model's device: on another ("meta" has no values) it would fail, or be wrong."""
    prompt = random_prompt(9).to(DEVICE)

    features = torch.randn(1, 9, 3 * 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)

    def run(*wanted) -> list[torch.Tensor]:
        model = tiny_model(layers=3, **TREES["8-3-2"]).to(DEVICE)
        sampling = dict(temperature=1.0, top_p=0.8, seed=4)
        with defaults(*wanted):
            with optimize_eagle_with_triton(model):
                outputs = [model.generate(prompt, max_new_tokens=12, do_sample=True, **sampling)]
                outputs += [model.eagenerate(prompt, max_new_tokens=12)]
                ids = torch.cat((prompt, prompt[:, :1]), dim=1)
                outputs += model.ea_layer.topK_genrate(features, ids, model.base_model.lm_head)
            pair = EAGLEInference(None, model, EAGLEConfig(fallback=False))
            pair.measure_costs(batches=(1,), context=8, steps=2)
            sampling |= dict(logit_bias={3: 0.7}, repetition_penalty=1.3)
            return outputs + pair.generate([prompt[0], prompt[0, :4]], 9, return_stats=False, **sampling)

    @contextmanager
    def defaults(device=None, dtype=torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(before)

    expected = run()
    for wanted in itertools.product([*(["cuda"] if DEVICE == "cuda" else []), "meta"], [torch.float64, torch.float16]):
        assert all(torch.equal(one, other) for one, other in zip(run(*wanted), expected, strict=True))


def test_another_thread_and_another_stream_give_the_same():
    model, prompt = tiny_model(**TREES["8-3-2"]).to(DEVICE), random_prompt(9).to(DEVICE)
    with optimize_eagle_with_triton(model)[1] as originals, ThreadPoolExecutor(1) as other_thread:
        expected = model.generate(prompt, max_new_tokens=30)
        assert torch.equal(other_thread.submit(model.generate, prompt, max_new_tokens=30).result(), expected)
        captures = {row.path: row.reason for row in originals.report() if row.path in ("cuda_graph", "prompt_graph")}
        assert not captures
        if DEVICE == "cuda":
            for _ in range(5):  # tensors of one generation are those of the next, on a stream that knows nothing of it
                with torch.cuda.stream(torch.cuda.Stream()):
                    outputs = model.generate(prompt, max_new_tokens=30)
                    assert torch.equal(outputs, expected)


def test_no_memory_for_a_graph_is_said_and_raises_if_strict(monkeypatch):
    engine = engine_for(tiny_model(**TREES["8-3-2"]))
    engine.cuda_graph = True

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("eagle_triton.engine.step_cache.StepGraph", no_memory)
    monkeypatch.setattr("eagle_triton.engine.engine.torch.cuda.graph_pool_handle", lambda: None)
    state = Mock(tokens=SimpleNamespace(is_cuda=True))
    for attempt in range(1, 4):
        assert callable(engine.steps._launchable(state, None, None))
        assert "several times slower" in engine.notes["cuda_graph"] and "no memory" in engine.notes["cuda_graph"]
        assert engine.steps._is_final((state, None)) == (attempt == 3)
    engine.steps._failures[state, None] = 1
    monkeypatch.setattr("eagle_triton.engine.step_cache.StepGraph", lambda *_, **__: "a graph")
    assert engine.steps._launchable(state, None, None) == "a graph"  # there was memory again
    assert engine.steps._is_final((state, None)) and not engine.notes
    monkeypatch.setattr("eagle_triton.engine.step_cache.StepGraph", no_memory)
    engine.strict = True
    with pytest.raises(torch.OutOfMemoryError):
        engine.steps._launchable(state, None, None)


def test_a_graph_keeps_what_its_launches_use_and_shares_no_workspace(monkeypatch):
    """Which CUDA reads again at every replay: a graph itself holds no tensor."""
    order = []

    @contextmanager
    def capture(*_, **__):
        order.append("capture")
        yield

    monkeypatch.setattr("eagle_triton.engine.graph._Graph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for name in ("current_blas_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: order.append("clear"), raising=False)
    workspace = torch.zeros(3)
    kept = weakref.ref(workspace)
    graph = LaunchGraph(partial(workspace.add_, 1), make_operations(), None)
    del workspace
    assert kept() is not None and kept().tolist() == [1, 1, 1]
    assert order == ["clear", "capture", "clear"]
    del graph
    assert kept() is None


def test_long_prompts_are_prefilled_in_chunks_and_capacity_grows_in_buckets():
    model = tiny_model()
    engine = engine_for(model)
    prompt = random_prompt(1100)
    want = model.eagenerate(prompt, max_new_tokens=10)
    steps = original_steps(
        engine, prompt, engine.draft.read_tree(), SamplingParams(), max_new_tokens=10, limit=1979, stop_ids=()
    )
    assert torch.equal([ids for ids, _, _ in steps][-1], want)
    assert [capacity_bucket(n) for n in (1, 512, 513, 4096, 4097, 9000)] == [512, 512, 1024, 4096, 8192, 12288]


def test_tree_specs():
    fixed = TreeSpec.fixed(MC_SIM_7B_63)
    assert (fixed.nodes, fixed.depth, fixed.top_k, fixed.beam_widths) == (26, 5, 4, (4, 4, 1, 1))
    assert list(fixed.selected) == sorted(fixed.selected) and len(fixed.selected) == 25
    dynamic = TreeSpec.dynamic(60, 7, 10)
    assert (dynamic.depth, dynamic.candidates, dynamic.beam_slots) == (8, 710, 70)
    for bad in ([[]], [[0], [0]], [[-1]], [[0, 1]], []):
        with pytest.raises(ValueError, match="tree_choices"):
            TreeSpec.fixed(bad)
    with pytest.raises(ValueError, match="needs 59 candidates"):
        TreeSpec.dynamic(60, 1, 2)
    with pytest.raises(ValueError, match="top_k"):
        TreeSpec.dynamic(60, 7, 0)
