"""eagle-llm 1.2.1, patched against original: same tokens, same accepted lengths, same calls and results."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families import eagle_llm as drop_in
from eagle_triton.integration import optimize_eagle_with_triton
from tests.upstream.building import build_eagle_llm, eagle_llm, prompts, run

pytestmark = pytest.mark.upstream
METHODS = ("eagenerate", "ea_generate", "naive_generate")
SMALL = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def use_tree(model: Any, tree: list[list[int]]) -> None:
    """Give the head another tree, as its own init_tree does."""
    model.ea_layer.tree = tree
    model.ea_layer.tree_buffer = eagle_llm("utils_c").generate_tree_buffers(tree, "cpu")


@pytest.mark.parametrize("tree", [None, SMALL], ids=["26 nodes", "8 nodes"])
def test_the_same_tokens_and_accepted_lengths(tree):
    model, options = build_eagle_llm(), dict(max_steps=26)
    if tree:
        use_tree(model, tree)
        options["tree_choices"] = tree

    def decode(prompt: torch.Tensor) -> tuple[list[int], list[int]]:
        return run(model.ea_generate(prompt, **options), prompt)

    expected = [decode(prompt) for prompt in prompts()]
    accepted = [count for _, steps in expected for count in steps]
    assert 1 + sum(accepted) / len(accepted) > 2
    with optimize_eagle_with_triton(model)[1] as originals:
        assert [decode(prompt) for prompt in prompts()] == expected
        report = {entry.path: entry for entry in originals.report()}
    assert report["ea_generate"].calls == 20
    assert report["ea_layer.topK_genrate"].status == "left" and report["ea_layer.topK_genrate"].reason


def test_mixtral_gives_the_same_tokens_and_accepted_lengths():
    """Also where its own loop calls the attention."""
    model = build_eagle_llm(target="mixtral")

    def decode(prompt: torch.Tensor) -> tuple[list[int], list[int]]:
        return run(model.ea_generate(prompt, max_steps=12), prompt)

    expected = [decode(prompt) for prompt in prompts()[:6]]
    assert sum(count for _, steps in expected for count in steps) > 30
    with optimize_eagle_with_triton(model)[1] as originals:
        assert [decode(prompt) for prompt in prompts()[:6]] == expected
        drop_in.drop_caches(model)
        driven = run(type(model).ea_generate(model, prompts()[3], max_steps=12), prompts()[3])
        assert driven == expected[3]
        layers = [entry for entry in originals.report() if entry.path.endswith("self_attn.forward")]
    assert all(entry.calls > 10 and entry.fallbacks == 0 for entry in layers)


def test_eagenerate_of_64_tokens():
    model, chosen = build_eagle_llm(), prompts()
    expected = [model.eagenerate(prompt, max_new_tokens=64).tolist() for prompt in chosen]
    with optimize_eagle_with_triton(model)[1]:
        assert [model.eagenerate(prompt, max_new_tokens=64).tolist() for prompt in chosen] == expected


def test_code_that_drives_the_model_gets_the_same_tokens():
    model = build_eagle_llm()
    original = type(model).eagenerate
    expected = [model.eagenerate(prompt, max_new_tokens=64).tolist() for prompt in prompts()[:6]]
    with optimize_eagle_with_triton(model)[1] as originals:
        drop_in.drop_caches(model)
        got = [original(model, prompt, max_new_tokens=64).tolist() for prompt in prompts()[:6]]
        layers = [entry for entry in originals.report() if entry.path.endswith("self_attn.forward")]
    assert got == expected
    assert layers and all(entry.calls > 20 and entry.fallbacks == 0 for entry in layers)


CALLS = {
    "plain": ("eagenerate", dict(max_new_tokens=10)),
    "end token": ("eagenerate", dict(max_new_tokens=60, eos=True)),
    "max_length": ("eagenerate", dict(max_length=80)),
    "max_length below the prompt": ("eagenerate", dict(max_length=20)),
    "max_length 0": ("eagenerate", dict(max_length=0)),
    "steps": ("ea_generate", dict(max_steps=5)),
    "no steps": ("ea_generate", dict(max_steps=0)),
    "steps to the end token": ("ea_generate", dict(eos=True)),
    "naive steps": ("naive_generate", dict(max_steps=5)),
    "naive steps are greedy": ("naive_generate", dict(max_steps=5, temperature=1.0)),
    "naive steps to the end token": ("naive_generate", dict(eos=True)),
}


@pytest.mark.parametrize("name, call", CALLS.values(), ids=CALLS)
def test_results_and_stops_are_the_original_ones(name, call):
    model, call = build_eagle_llm(), dict(call)
    prompt = prompts()[4][:, :30]
    if call.pop("eos", False):
        model.tokenizer.eos_token = f"t{model.eagenerate(prompt, max_new_tokens=30)[0, 50]}"

    def once() -> Any:
        result = getattr(model, name)(prompt, **call)
        if inspect.isgenerator(result):
            return [(tensor.dtype, tensor.tolist()) for tensor in result]
        return result if result is None else (result.dtype, result.tolist())

    expected = once()
    with optimize_eagle_with_triton(model)[1]:
        assert once() == expected


@pytest.mark.parametrize("name", ["ea_generate", "naive_generate"])
def test_step_by_step_methods_stop_where_the_sequence_passes_1960(name):
    model = build_eagle_llm(positions=2048)
    prompt = torch.randint(64, (1, 1950), generator=torch.Generator().manual_seed(4))
    expected = run(getattr(model, name)(prompt), prompt)
    assert len(expected[0]) > 1960
    with optimize_eagle_with_triton(model)[1]:
        assert run(getattr(model, name)(prompt), prompt) == expected


def test_another_tree_is_drafted_as_well_as_verified():
    model, prompt = build_eagle_llm(), prompts()[6]
    tokens = model.eagenerate(prompt, max_new_tokens=40)[0].tolist()
    use_tree(model, SMALL)
    expected = run(model.ea_generate(prompt, max_steps=20, tree_choices=SMALL), prompt)
    use_tree(model, drop_in._default_tree(model))
    with optimize_eagle_with_triton(model)[1]:
        got = run(model.ea_generate(prompt, max_steps=20, tree_choices=SMALL), prompt)
    assert got == expected and got[0][:40] == tokens[:40]


def test_signatures_are_the_original_ones():
    model = build_eagle_llm()
    before = {name: inspect.signature(getattr(model, name)).parameters for name in METHODS}
    with optimize_eagle_with_triton(model)[1]:
        for name, original in before.items():
            now = inspect.signature(getattr(model, name)).parameters
            assert [(p.name, p.default) for p in now.values()] == [(p.name, p.default) for p in original.values()]
            assert now["tree_choices"].default is original["tree_choices"].default


def test_sampling_follows_the_seed():
    model, prompt = build_eagle_llm(), prompts()[1]
    with optimize_eagle_with_triton(model)[1]:
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(model.eagenerate(prompt, temperature=1.0, top_p=0.9, max_new_tokens=20).tolist())
    assert runs[0] == runs[1] != runs[2]


def test_restore_gives_everything_back():
    model, other, prompt = build_eagle_llm(), build_eagle_llm(seed=1), prompts()[1]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = model.eagenerate(prompt, max_new_tokens=20).tolist()
    untouched = other.eagenerate(prompt, max_new_tokens=20).tolist()
    originals = optimize_eagle_with_triton(model)[1]
    assert not {"past_key_values", "tree_buffers"} & set(vars(model))
    assert other.eagenerate(prompt, max_new_tokens=20).tolist() == untouched
    model.eagenerate(prompt, max_new_tokens=20)
    originals.restore()
    layer = model.base_model.model.layers[0].self_attn
    for owner in (model, layer):
        assert not {*METHODS, "forward", "generate"} & set(vars(owner))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.eagenerate(prompt, max_new_tokens=20).tolist() == tokens


def test_an_exception_on_the_way_leaves_the_model_whole():
    model, prompt = build_eagle_llm(), prompts()[1]
    tokens = model.eagenerate(prompt, max_new_tokens=20).tolist()
    weight = model.base_model.lm_head.weight.data
    with optimize_eagle_with_triton(model)[1]:
        whole = weight.clone()
        weight.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="NaN"):
            model.eagenerate(prompt)
        weight.copy_(whole)
        assert model.eagenerate(prompt, max_new_tokens=20).tolist() == tokens
        steps = model.ea_generate(prompt)
        next(steps)
        with pytest.raises(RuntimeError, match="another generation"):
            model.eagenerate(prompt)
        steps.close()
        assert model.eagenerate(prompt, max_new_tokens=20).tolist() == tokens
    assert model.eagenerate(prompt, max_new_tokens=20).tolist() == tokens


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "prompt, message",
    [
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.zeros(2, 3, dtype=torch.long), "batch"),
        (torch.tensor([[1, 64]]), "out of range"),
        (torch.zeros(1, 1024, dtype=torch.long), "does not fit"),
    ],
)
def test_bad_prompts_raise_before_anything_runs(name, prompt, message):
    model = build_eagle_llm()
    with optimize_eagle_with_triton(model)[1] as originals:
        with pytest.raises(ValueError, match=message):
            getattr(model, name)(prompt)
        assert all(entry.calls == 0 for entry in originals.report())


def test_strict_names_what_would_be_left():
    model = build_eagle_llm()
    with pytest.raises(UnsupportedModelError, match="ea_layer.topK_genrate: drafts by sampling"):
        optimize_eagle_with_triton(model, strict=True)
    with optimize_eagle_with_triton(model, strict=True, patch_modules=False)[1] as originals:
        assert set(originals) == {*METHODS, "generate"}
