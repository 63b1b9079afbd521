"""SafeAILab/EAGLE HEAD, patched against original: same tokens, same accepted lengths, same calls and results."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

from eagle_triton import EaModel, patching
from eagle_triton.demo import demo_directory
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.operations import make_operations
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families import safeailab as adapter
from eagle_triton.families import safeailab as drop_in
from eagle_triton.integration import optimize_eagle_with_triton
from tests.test_demo import prompts as demo_prompts_of
from tests.upstream.building import build_safeailab, prompts, run, safeailab

pytestmark = pytest.mark.upstream
METHODS = ("eagenerate", "ea_generate", "naivegenerate", "naive_generate")


def patch_modules_only(model: Any) -> patching.Originals:
    """Only topK_genrate and the attention: what code that drives the model itself calls."""
    engine = Engine(*adapter.read(model), make_operations())
    patch_points, left = drop_in.module_patch_points(model, engine)
    assert not left
    facts = patching.Facts("", left, engine.ops.calls)
    return patching.apply(patch_points, model, lambda: drop_in.drop_caches(model), lambda: facts)


def compare(model: Any, chosen: list[torch.Tensor], new: int = 64, modules_too: int = 4) -> list[int]:
    """Assert that all three ways of decoding agree on every prompt; returns the accepted lengths."""

    def decode(prompt: torch.Tensor) -> tuple[list[int], list[int]]:
        return run(model.ea_generate(prompt, max_new_tokens=new, max_length=1024), prompt)

    expected = [decode(prompt) for prompt in chosen]
    with optimize_eagle_with_triton(model)[1] as originals:
        assert [decode(prompt) for prompt in chosen] == expected
        patched = {entry.path: entry for entry in originals.report()}
        assert patched["ea_generate"].calls == len(chosen)
        assert patched["tree_attention"].calls > 0
    with patch_modules_only(model) as originals:
        assert [decode(prompt) for prompt in chosen[:modules_too]] == expected[:modules_too]
        patch_points = [entry for entry in originals.report() if entry.path in originals]
        assert all(entry.calls > 0 and entry.fallbacks == 0 for entry in patch_points), patch_points
    return [accepted for _, steps in expected for accepted in steps]


@pytest.mark.parametrize("tree", [(60, 7, 10), (8, 3, 2), (2, 1, 1)], ids="{0[0]}-{0[1]}-{0[2]}".format)
@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_llama_gives_the_same_tokens_and_accepted_lengths(eagle3, tree):
    accepted = compare(build_safeailab("llama", eagle3, tree), prompts(), modules_too=6 if tree[0] == 60 else 1)
    assert 1 + sum(accepted) / len(accepted) > {60: 1.5, 8: 1.3, 2: 1.1}[tree[0]]


@pytest.mark.parametrize("target, eagle3", [("qwen2", False), ("qwen3", True), ("qwen3", False), ("mixtral", False)])
def test_other_targets_give_the_same_tokens_and_accepted_lengths(target, eagle3):
    accepted = compare(build_safeailab(target, eagle3), prompts()[:8])
    assert 1 + sum(accepted) / len(accepted) > 1.5


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_rotary_embeddings(scaling):
    compare(build_safeailab("llama", rope_scaling=scaling), prompts()[2:6], new=24)


@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_rotary_frequencies_stay_exact_in_half_precision(eagle3):
    exact, rounded = (adapter.read(build_safeailab("llama", eagle3, dtype=d)) for d in (torch.float32, torch.bfloat16))
    for fine, coarse in zip(exact, rounded, strict=True):
        a, b = fine.layers[0].mixer.rotary.inv_freq, coarse.layers[0].mixer.rotary.inv_freq
        assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("eagle3", [True, False], ids=["eagle3", "eagle1"])
def test_demo_checkpoint(eagle3):
    """SafeAILab's EaModel loads it as it is; optimised it decodes the same, and so does our own, unpatched."""
    theirs = safeailab("ea_model").EaModel.from_pretrained(
        use_eagle3=eagle3,
        base_model_path=str(demo_directory("target")),
        ea_model_path=str(demo_directory("eagle3" if eagle3 else "eagle1")),
        torch_dtype=torch.float32,
    )
    chosen = demo_prompts_of(theirs.eval(), 20)
    accepted = compare(theirs, chosen, modules_too=2)
    assert 1 + sum(accepted) / len(accepted) > (3.0 if eagle3 else 2.2)
    ours = EaModel.from_pretrained("demo", use_eagle3=eagle3)
    for prompt in chosen:
        a, b = (run(model.ea_generate(prompt, max_new_tokens=64, max_length=1024), prompt) for model in (theirs, ours))
        assert a == b, "tokens or accepted lengths of the unpatched models differ"


CALLS = {
    "plain": dict(max_new_tokens=10),
    "logged": dict(max_new_tokens=10, log=True),
    "end token": dict(max_new_tokens=40, log=True, eos=True),
    "max_length": dict(max_new_tokens=400, max_length=130, log=True),
    "one step": dict(max_new_tokens=0, log=True),
    "max_length below the prompt": dict(max_length=95),
    "no step": dict(max_length=65 + 5),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", METHODS)
def test_results_types_and_stops_are_the_original_ones(name, call):
    call = dict(call)
    model = build_safeailab(tree=(60, 7, 10) if call.get("max_length") != 70 else (61, 7, 10))
    prompt = prompts()[4][:, :3] if call.get("max_length") == 70 else prompts()[4][:, :30]
    if call.pop("eos", False):
        model.tokenizer.eos_token = f"t{model.eagenerate(prompt, max_new_tokens=20)[0, 45]}"

    def once() -> Any:
        result = getattr(model, name)(prompt, **call)
        return [tensor.tolist() for tensor in result] if inspect.isgenerator(result) else result

    def described(value: Any) -> Any:
        if isinstance(value, tuple):
            return [described(part) for part in value]
        return (type(value), value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else (type(value), value)

    expected = described(once())
    drop_in.drop_caches(model)
    with optimize_eagle_with_triton(model)[1]:
        assert described(once()) == expected


def test_is_llama3_stops_at_its_end_token():
    model = build_safeailab()
    prompt = prompts()[1]
    token = model.eagenerate(prompt, max_new_tokens=30)[0, 20].item()
    model.tokenizer.convert_tokens_to_ids = {"<|eot_id|>": token}.get
    expected = model.eagenerate(prompt, is_llama3=True, log=True)
    with optimize_eagle_with_triton(model)[1]:
        got = model.eagenerate(prompt, is_llama3=True, log=True)
    assert got[0].tolist() == expected[0].tolist() and got[1:] == expected[1:] and got[0].shape[1] < 60


def test_signatures_are_the_original_ones():
    model = build_safeailab()
    before = {name: inspect.signature(getattr(model, name)).parameters for name in METHODS}
    with optimize_eagle_with_triton(model)[1]:
        for name, original in before.items():
            now = inspect.signature(getattr(model, name)).parameters
            assert [(p.name, p.default) for p in now.values()] == [(p.name, p.default) for p in original.values()]


def test_sampling_counts_in_an_int_and_follows_the_seed():
    model, prompt = build_safeailab(), prompts()[1]
    with optimize_eagle_with_triton(model)[1]:
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            sequence, new, _ = model.eagenerate(
                prompt, temperature=0.9, top_p=0.9, top_k=20, max_new_tokens=20, log=True
            )
            assert type(new) is int and sequence.shape[1] == prompt.shape[1] + new
            runs.append(sequence.tolist())
    assert runs[0] == runs[1] != runs[2]


def test_restore_gives_everything_back():
    model, other, prompt = build_safeailab(), build_safeailab(seed=1), prompts()[1]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = model.eagenerate(prompt, max_new_tokens=20).tolist()
    untouched = other.eagenerate(prompt, max_new_tokens=20).tolist()
    assert hasattr(model, "past_key_values")
    originals = optimize_eagle_with_triton(model)[1]
    assert not hasattr(model, "past_key_values")
    layer = model.base_model.model.layers[0].self_attn
    assert "forward" in vars(layer) and "eagenerate" in vars(model) and "topK_genrate" in vars(model.ea_layer)
    kept = dict(originals)
    assert other.eagenerate(prompt, max_new_tokens=20).tolist() == untouched
    model.eagenerate(prompt, max_new_tokens=20)
    originals.restore()
    assert kept["eagenerate"] == type(model).eagenerate.__get__(model) == model.eagenerate
    for owner in (model, model.ea_layer, layer):
        assert not {"eagenerate", "topK_genrate", "forward", "stable_kv", "generate"} & set(vars(owner))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.eagenerate(prompt, max_new_tokens=20).tolist() == tokens


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "prompt, options, message",
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, "empty"),
        (torch.zeros(2, 3, dtype=torch.long), {}, "batch"),
        (torch.tensor([[1, 64]]), {}, "out of range"),
        (torch.tensor([[-1, 1]]), {}, "out of range"),
        (torch.zeros(1, 100, dtype=torch.long), {"max_length": 100}, "does not fit"),
        (torch.zeros(1, 100, dtype=torch.long), {"max_length": 50}, "max_length"),
    ],
)
def test_bad_prompts_raise_before_anything_runs(name, prompt, options, message):
    model = build_safeailab()
    with optimize_eagle_with_triton(model)[1] as originals:
        with pytest.raises(ValueError, match=message):
            getattr(model, name)(prompt, **options)
        assert all(entry.calls == 0 for entry in originals.report())


def test_a_draft_sequence_may_change_hands():
    """What topK_genrate keeps is in the original's format: original and replacement go on from each other's rows."""
    model = build_safeailab()
    head, lm_head = model.ea_layer, model.base_model.lm_head
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, 12, head.fc.in_features, generator=generator)
    sequence = torch.randint(64, (1, 13), generator=generator)

    def draft(first: int, last: int, function: Any = None) -> list[Any]:
        function = function or head.topK_genrate
        result = function(features[:, first:last], sequence[:, : last + 1], lm_head, None)
        return [tensor.tolist() for tensor in result]

    with torch.no_grad():
        head.reset_kv()
        expected = [draft(0, 5), draft(5, 7), draft(7, 12)]
        with patch_modules_only(model) as originals:
            original = originals["ea_layer.topK_genrate"]
            assert draft(0, 5, original) == expected[0]
            assert draft(5, 7) == expected[1]
            kept = head.stable_kv
            assert draft(7, 12) == expected[2]
            head.reset_kv()
            draft(0, 9)  # another sequence meanwhile
            head.stable_kv = kept
            assert draft(7, 12, original) == expected[2]
            head.stable_kv = kept
            assert draft(7, 12) == expected[2]
            entry = next(entry for entry in originals.report() if entry.path == "ea_layer.topK_genrate")
            assert (entry.calls, entry.fallbacks) == (4, 0)


def test_paths_are_ordered_as_in_the_original():
    model = build_safeailab()
    head, lm_head = model.ea_layer, model.base_model.lm_head
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, 9, head.fc.in_features, generator=generator)
    sequence = torch.randint(64, (1, 10), generator=generator)

    def draft() -> list[list[Any]]:
        results = []
        for processor in (None, object()):
            head.reset_kv()
            results.append(head.topK_genrate(features, sequence, lm_head, logits_processor=processor))
        return [[(t.dtype, t.device.type, t.tolist()) for t in result] for result in results]

    with torch.no_grad():
        expected = draft()
        with patch_modules_only(model):
            assert draft() == expected


@pytest.mark.parametrize("target", ["llama", "qwen2", "qwen3"])
def test_masks_that_are_no_tree_run_the_original(target):
    model = build_safeailab(target, eagle3=False)
    ids = prompts()[3]
    padding = torch.ones_like(ids)
    padding[:, :7] = 0
    if target == "qwen2":  # it takes masks of several dimensions only
        padding = torch.full((1, 1, 64, 64), torch.finfo(torch.float32).min).triu(1)
        padding[..., :7] = torch.finfo(torch.float32).min

    def last_hidden(mask: torch.Tensor | None) -> torch.Tensor:
        return model.base_model.model(ids, attention_mask=mask, past_key_values=cache())[0]

    def cache() -> Any:
        return safeailab("kv_cache").initialize_past_key_values(model.base_model, max_length=200)[0]

    with torch.no_grad():
        expected = last_hidden(padding), last_hidden(None)
        with patch_modules_only(model) as originals:
            path = "base_model.model.layers.3.self_attn.forward"
            got = last_hidden(padding), last_hidden(None)
            entry = next(entry for entry in originals.report() if entry.path == path)
    assert torch.equal(got[0][:, 7:], expected[0][:, 7:])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-5)
    assert (entry.calls, entry.fallbacks) == (1, 1) and "padding" in entry.reason


def test_gradients_and_attention_weights_run_the_original():
    model, ids = build_safeailab(eagle3=False), prompts()[3]
    path = "base_model.model.layers.0.self_attn.forward"
    with patch_modules_only(model) as originals:
        assert model.base_model(ids).logits.requires_grad
        with torch.no_grad():
            assert model.base_model(ids, output_attentions=True).attentions[0] is not None
        entry = next(entry for entry in originals.report() if entry.path == path)
    assert (entry.calls, entry.fallbacks) == (0, 2)


def test_what_cannot_be_decoded_is_refused():
    def refused(model: Any, message: str) -> None:
        before = dict(vars(model))
        with pytest.raises(UnsupportedModelError, match=message):
            optimize_eagle_with_triton(model)
        assert vars(model) == before

    refused(build_safeailab("qwen2", eagle3=True), "no features")
    refused(build_safeailab(rope_scaling={"type": "dynamic", "factor": 2.0}), r"layers\.0\.self_attn\.rotary_emb")
    model = build_safeailab()
    model.base_model.config.pretraining_tp = 2
    refused(model, "pretraining_tp must be 1, got 2")
    model = build_safeailab()
    model.base_model.model.layers[1].mlp.pretraining_tp = 2  # which has a copy of the field
    refused(model, r"layers\.1\.mlp\.pretraining_tp must be 1, got 2")
    model = build_safeailab()
    type(model.base_model).__module__, name = "modeling_bloom_kv", type(model.base_model).__module__
    try:
        refused(model, "modeling_llama_kv or .* got LlamaForCausalLM of modeling_bloom_kv")
    finally:
        type(model.base_model).__module__ = name
    model = build_safeailab()
    model.ea_layer.fc = torch.nn.Linear(128, 64, bias=False)
    refused(model, "fc columns must be 192")
    model = build_safeailab()
    model.eagenerate = lambda input_ids, temperature=0.0: None
    refused(model, "eagenerate must take")


def test_report_names_every_patch_point():
    model = build_safeailab()
    with optimize_eagle_with_triton(model, strict=True)[1] as originals:
        paths = set(originals)
    assert {*METHODS, "ea_layer.topK_genrate", "base_model.model.layers.7.self_attn.forward"} <= paths
    assert json.dumps(sorted(paths))
