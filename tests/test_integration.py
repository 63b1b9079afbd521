"""optimize_eagle_with_triton and restore_eagle on our own EaModel: same output, everything given back, bad input."""

import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import get_type_hints

import pytest
import torch

from eagle_triton import (
    EAGLEInference,
    EagleTritonConfig,
    EaModel,
    PatchError,
    TritonConfig,
    UnsupportedModelError,
    optimize_eagle_with_triton,
    optimize_with_triton,
    restore_eagle,
)
from eagle_triton.families.attention_forward import FORWARDS, transformers_forward
from eagle_triton.integration import EagleTritonOptions, TritonOptions
from eagle_triton.models.target import TargetCache
from eagle_triton.models.tree import MC_SIM_7B_63
from tests.checkpoints import edited
from tests.tiny import FAMILIES, random_prompt, tiny_model

TREES = {
    "60-7-10": dict(total_token=60, depth=7, top_k=10),
    "fixed-26": {"tree_choices": MC_SIM_7B_63},
    "8-3-2": dict(total_token=8, depth=3, top_k=2),
    "2-1-1": dict(total_token=2, depth=1, top_k=1),
}
METHODS = ("eagenerate", "ea_generate", "naivegenerate", "naive_generate", "generate")


def decode_all_ways(model, prompt):
    """What every generating method gives, accepted lengths included."""
    out = [model.eagenerate(prompt, max_new_tokens=10, log=True), list(model.accept_lengths)]
    out += [list(model.ea_generate(prompt, max_new_tokens=5)), model.naivegenerate(prompt, max_new_tokens=5, log=True)]
    out += [list(model.accept_lengths)]
    out += [list(model.naive_generate(prompt, max_new_tokens=3)), model.generate(prompt, max_new_tokens=5)]
    return out


def assert_same(a, b):
    if isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b) and a.dtype == b.dtype
    else:
        assert a == b and type(a) is type(b)


# Each tree with a head, and each family with one: neither knows of what the others look like.
PAIRS = [("llama", index % 2 == 0, tree) for index, tree in enumerate(TREES)] + [("llama", False, "8-3-2")]
PAIRS += [(family, True, "8-3-2") for family in FAMILIES if family != "llama"]


@pytest.mark.parametrize(("family", "eagle3", "tree"), PAIRS)
def test_every_method_gives_the_same_and_restore_gives_everything_back(family, eagle3, tree):
    model = tiny_model(family, eagle3, **TREES[tree])
    other = tiny_model(family, eagle3, seed=1, **TREES[tree])
    prompt = random_prompt(23)
    before = decode_all_ways(model, prompt)
    modules = list(model.modules())
    variables = [dict(vars(module)) for module in modules]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    untouched = [dict(vars(module)) for module in other.modules()]

    same_model, originals = optimize_eagle_with_triton(model)
    assert same_model is model
    assert all(name in originals and getattr(model, name) is not originals[name] for name in METHODS)
    assert_same(before, decode_all_ways(model, prompt))
    calls = {row.path: row.calls for row in originals.report()}
    assert all(calls[name] > 0 for name in METHODS) and calls["tree_attention"] > 0 and calls["build_tree"] > 0
    assert [dict(vars(module)) for module in other.modules()] == untouched

    assert restore_eagle(model, originals) is model
    for module, saved in zip(modules, variables, strict=True):
        now = vars(module)
        assert now.keys() == saved.keys()
        assert all(now[name] is saved[name] for name in saved if name not in ("accept_lengths", "stable_kv"))
    assert all(getattr(model, name).__func__ is getattr(EaModel, name) for name in METHODS)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert_same(before, decode_all_ways(model, prompt))
    restore_eagle(model, originals)  # harmless


def test_code_that_drives_the_model_itself_gets_the_operations_too():
    model, prompt = tiny_model(), random_prompt(40)
    want = model.eagenerate(prompt, max_new_tokens=20)
    with optimize_eagle_with_triton(model)[1] as originals:
        steps = EaModel._speculate(model, prompt, None)  # the unpatched loop over patched modules
        got = next(ids for ids, _ in steps if ids.shape[1] == want.shape[1])
        report = {row.path: row for row in originals.report()}
    assert torch.equal(got, want)
    for path in ("ea_layer.topK_genrate", "base_model.model.layers.3.self_attn.forward"):
        assert report[path].calls > 5 and report[path].fallbacks == 0
    with optimize_eagle_with_triton(model, patch_modules=False)[1] as originals:
        assert "ea_layer.topK_genrate" not in originals
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=20), want)


def test_fractions_of_tokens_are_those_of_the_original():
    model, prompt = tiny_model(), random_prompt(40)
    want = [model.eagenerate(prompt, max_new_tokens=2.5), model.naivegenerate(prompt, max_new_tokens=2.5)]
    with optimize_eagle_with_triton(model):
        got = [model.eagenerate(prompt, max_new_tokens=2.5), model.naivegenerate(prompt, max_new_tokens=2.5)]
        with pytest.raises(TypeError, match="max_new_tokens must be a number, got '5'"):
            model.eagenerate(prompt, max_new_tokens="5")
    assert all(map(torch.equal, got, want))


PATCH_POINTS = (*METHODS, "ea_layer.topK_genrate", "base_model.model.layers.1.self_attn.forward")


@pytest.mark.parametrize("path", PATCH_POINTS)
def test_an_unknown_argument_is_refused_by_name_or_sends_the_call_to_the_original(path):
    model, ids = tiny_model(**TREES["8-3-2"]), random_prompt(6)
    body, positions, x = model.base_model.model, torch.arange(6)[None], torch.randn(1, 6, 64)
    with torch.no_grad(), optimize_eagle_with_triton(model)[1] as originals:
        if path.endswith("self_attn.forward"):  # whose original takes any argument
            attention, given = body.layers[1].self_attn, {"position_ids": positions, "attention_mask": None}
            given["position_embeddings"] = body.rotary_emb(x, positions)
            want = originals[path](x, **given)[0]
            assert torch.equal(attention(x, **given, surprise=1)[0], want)
            for harmless in ({"use_cache": None}, {"use_cache": True, "output_attentions": False, "is_causal": True}):
                torch.testing.assert_close(attention(x, **given, **harmless)[0], want)
            attention(x, **given, is_causal=False, output_attentions=True)
            row = next(row for row in originals.report() if row.path == path)
            reasons = {"unknown argument surprise", "is_causal=False", "attention weights are asked for"}
            assert (row.calls, row.fallbacks, row.reasons.keys()) == (2, 2, reasons)
        elif path == "ea_layer.topK_genrate":
            with pytest.raises(TypeError, match="ea_layer.topK_genrate: unknown argument surprise"):
                model.ea_layer.topK_genrate(torch.zeros(1, 5, 192), ids, model.base_model.lm_head, surprise=1)
        else:
            with pytest.raises(TypeError, match=f"{path}: unknown argument surprise; its arguments are input_ids"):
                getattr(model, path)(ids, surprise=1)


@pytest.mark.parametrize("make", [transformers_forward, *FORWARDS.values()], ids=["transformers", *FORWARDS])
def test_no_forward_of_attention_takes_arguments_that_it_does_not_name(make):
    kinds = [parameter.kind for parameter in inspect.signature(make(None, 0, None)).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds


@pytest.mark.parametrize("name", ["cache", "past_key_values", "past_key_value"])
def test_attention_knows_its_cache_by_the_name_of_every_version(name):
    model = tiny_model(**TREES["8-3-2"])
    body, x = model.base_model.model, torch.randn(1, 5, 64)
    with torch.no_grad(), optimize_eagle_with_triton(model)[1]:
        cache = TargetCache()
        for first, rows in ((0, 4), (4, 1)):
            positions, new = torch.arange(first, first + rows)[None], x[:, first : first + rows]
            place = {"position_ids": positions, "position_embeddings": body.rotary_emb(x, positions)}
            out, _ = body.layers[0].self_attn(new, attention_mask=None, **place, **{name: cache})
        positions = torch.arange(5)[None]
        place = {"position_ids": positions, "position_embeddings": body.rotary_emb(x, positions)}
        whole, _ = body.layers[0].self_attn(x, attention_mask=None, **place)
    assert cache.get_seq_length() == 5
    torch.testing.assert_close(out, whole[:, 4:])


def test_masks_that_are_no_tree_run_the_original_and_are_counted():
    model = tiny_model()
    ids, padding = random_prompt(12), torch.ones(1, 12, dtype=torch.long)
    padding[0, :4] = 0
    with torch.no_grad():
        want = model.base_model(ids, attention_mask=padding).logits
        with optimize_eagle_with_triton(model)[1] as originals:
            got = model.base_model(ids, attention_mask=padding).logits
            rows = [row for row in originals.report() if row.path.endswith("self_attn.forward")]
        with optimize_eagle_with_triton(model, strict=True)[1], pytest.raises(ValueError, match="strict=True forbids"):
            model.base_model(ids, attention_mask=padding)
    assert torch.equal(got, want)
    assert all(row.fallbacks == 1 and row.calls == 0 and row.reason for row in rows)


def test_restored_in_the_middle_of_a_generation_and_after_an_exception_in_one():
    model, prompt = tiny_model(**TREES["8-3-2"]), random_prompt(9)
    want = model.eagenerate(prompt, max_new_tokens=12)
    weight = model.base_model.lm_head.weight
    saved = weight.detach().clone()
    with optimize_eagle_with_triton(model)[1]:
        steps = model.ea_generate(prompt, max_new_tokens=12)
        next(steps)
    with pytest.raises(RuntimeError, match="the model was restored while this generation ran"):
        next(steps)
    with pytest.raises(RuntimeError, match="NaN"), optimize_eagle_with_triton(model)[1]:
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=12), want)
        weight.data[3] = float("nan")
        model.eagenerate(prompt, max_new_tokens=12)
    assert "eagenerate" not in vars(model)
    weight.data.copy_(saved)
    assert torch.equal(model.eagenerate(prompt, max_new_tokens=12), want)


def test_nothing_changes_when_optimising_fails():
    model = tiny_model()
    model.base_model.model.layers[2].mlp.act_fn = torch.nn.Softmax(-1)
    state = dict(vars(model))
    with pytest.raises(UnsupportedModelError, match="layers.2.mlp.act_fn must be SiLU"):
        optimize_eagle_with_triton(model)
    assert vars(model) == state


def test_optimising_twice_and_foreign_patches_are_refused():
    model, other = tiny_model(), tiny_model(seed=1)
    _, originals = optimize_eagle_with_triton(model)
    with pytest.raises(PatchError, match="optimised already"):
        optimize_eagle_with_triton(model)
    with pytest.raises(PatchError, match="do not belong"):
        restore_eagle(other, originals)
    ours = model.eagenerate
    model.eagenerate = print
    with pytest.raises(PatchError, match="eagenerate was replaced by other code"):
        restore_eagle(model, originals)
    assert model.eagenerate is print and "ea_generate" in vars(model)
    model.eagenerate = ours
    restore_eagle(model, originals)


@pytest.mark.parametrize(
    "not_a_model", [None, 3, torch.nn.Linear(2, 2), object()], ids=["none", "int", "module", "object"]
)
def test_not_an_eamodel(not_a_model):
    with pytest.raises(UnsupportedModelError, match="expected an EaModel"):
        optimize_eagle_with_triton(not_a_model)


def test_unknown_and_bad_options():
    model = tiny_model()
    with pytest.raises(ValueError, match="unknown option fast; the options are verify_strategy, suffix_drafts"):
        optimize_eagle_with_triton(model, fast=True)
    with pytest.raises(TypeError, match="strict must be True or False"):
        optimize_eagle_with_triton(model, EagleTritonConfig(), strict="yes")
    assert "eagenerate" not in vars(model)


@pytest.mark.parametrize(
    ("config", "options"), [(EagleTritonConfig, EagleTritonOptions), (TritonConfig, TritonOptions)]
)
def test_options_are_typed_as_the_fields_of_their_configurations(config, options):
    assert get_type_hints(options) == get_type_hints(config)


@pytest.mark.slow
def test_type_checkers_find_misspelt_options_and_know_what_is_returned(tmp_path):
    pytest.importorskip("mypy")
    lines = {
        "m = EaModel.from_pretrained('demo')": "",
        "reveal_type(optimize_eagle_with_triton(m).model)": "EaModel",
        "optimize_eagle_with_triton(m, stict=True)": "stict",
        "optimize_with_triton(m.base_model, draft='suffix', numsteps=3)": "numsteps",
        "e = EAGLEInference(None, m, kernel=True)": "kernel",
        "reveal_type(e.generate('x', min_p=0.1))": "tuple[list[torch._tensor.Tensor], eagle_triton",
        "reveal_type(e.generate(torch.zeros(1, 2), return_stats=False))": '"torch._tensor.Tensor"',
        "e.stream('x', max_tokens=5)": "max_tokens",
    }
    names = "EaModel, EAGLEInference, optimize_eagle_with_triton, optimize_with_triton"
    file = tmp_path / "typed.py"
    file.write_text("\n".join([f"import torch\nfrom eagle_triton import {names}", *lines]))
    config = tmp_path / "mypy.ini"  # of what torch imports nothing is seen here
    read = "[mypy-eagle_triton.*,torch,torch._tensor]\nfollow_imports = normal\n"
    config.write_text(f"[mypy]\nfollow_imports = skip\n{read}")
    # A process of its own: what mypy leaves in memory would slow each later search for garbage.
    options = ["--config-file", str(config), "--cache-dir", os.devnull]
    said = subprocess.run([sys.executable, "-m", "mypy", *options, str(file)], capture_output=True, text=True).stdout
    for number, expected in enumerate(lines.values(), 3):
        found = "\n".join(line for line in said.splitlines() if f"typed.py:{number}: " in line)
        assert bool(found) == bool(expected) and expected in found, (number, said)


def test_a_head_is_loaded_by_its_path_as_the_draft_of_a_plain_model(tmp_path):
    model, prompt = tiny_model(**TREES["8-3-2"]), random_prompt(9)
    model.save_pretrained(tmp_path)
    base = model.base_model
    want = base.generate(prompt, max_new_tokens=12, do_sample=False)
    found = []
    for draft in (model.ea_layer, tmp_path / "eagle3", str(tmp_path / "eagle3")):
        with optimize_with_triton(base, draft) as (_, originals):
            assert torch.equal(base.generate(prompt, max_new_tokens=12, do_sample=False), want)
            found.append(originals.report().title)
    assert found[0] == found[1] == found[2] and ", patched: tau " in found[0]
    language_model = r"is a causal language model, not a head.* draft=AutoModelForCausalLM.from_pretrain"
    with pytest.raises(ValueError, match=language_model):
        optimize_with_triton(base, tmp_path / "target")
    with pytest.raises(ValueError, match=language_model):
        EaModel.from_pretrained(tmp_path / "target", tmp_path / "target")
    edited(tmp_path / "target", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match=r"not a head.* draft=eagle_triton.models.loading.load_target\("):
        optimize_with_triton(base, tmp_path / "target")
    with pytest.raises(ValueError, match="draft must be suffix, ngram, mtp, .* got ''"):
        optimize_with_triton(base, "")


def test_a_model_over_several_devices_is_refused():
    model = tiny_model()
    model.base_model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModelError, match="must lie on one device, got cpu, meta; load it on one"):
        optimize_eagle_with_triton(model)


def test_bad_prompts_raise_before_anything_runs():
    """As the original's methods do, in tests/test_models.py."""
    model = tiny_model(total_token=8, depth=3, top_k=2)
    optimize_eagle_with_triton(model)
    good = random_prompt(20)
    want = model.eagenerate(good, max_new_tokens=8)
    cases = [
        (lambda: model.eagenerate(torch.zeros(1, 0, dtype=torch.long)), "empty"),
        (lambda: model.eagenerate(torch.tensor([[1, 32]])), "out of range"),
        (lambda: model.naivegenerate(torch.tensor([[-1, 2]])), "out of range"),
        (lambda: model.eagenerate(torch.rand(1, 4)), "integer"),
        (lambda: model.eagenerate(good.expand(2, -1)), "batch"),
        (lambda: model.eagenerate(good, max_length=27), "does not fit"),
        (lambda: model.eagenerate(good, max_length=19), "below the prompt"),
        (lambda: model.eagenerate(good, temperature=float("nan")), "temperature"),
        (lambda: model.eagenerate(good, 1.0, top_k=2.7), "top_k must be an integer >= 0 .* got 2.7"),
        (lambda: model.generate(good, max_length=19), "below the prompt"),
        (lambda: model.generate(good, max_new_tokens=-1), "max_new_tokens"),
        (lambda: model.generate(good, do_sample=True, temperature=-1.0), "temperature"),
        (lambda: model.generate(good, temperature=0.0, top_p=0.0), "top_p"),
        (lambda: model.generate(good, do_sample=True, top_p=0.0), "top_p"),
        (lambda: model.generate(good, seed=1, generator=torch.Generator()), "not both"),
        (lambda: model.generate(good, attention_mask=torch.zeros_like(good)), "empty"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(model.eagenerate(good, max_new_tokens=8), want)
    with pytest.raises(TypeError, match=r"max_new_tokens: must be an integer, got 2\.5"):
        model.generate(good, max_new_tokens=2.5)
    short, new, index = model.eagenerate(good[:, :3], max_length=17, log=True)  # no room for a step
    assert torch.equal(short, good[:, :3]) and (new, index) == (0, -1)


def test_generate_stops_exactly_in_a_padded_batch():
    model = tiny_model(total_token=16, depth=3, top_k=4)
    long, short = random_prompt(9)[0], random_prompt(4)[0]
    ids = torch.stack((long, torch.cat((torch.zeros(5, dtype=torch.long), short))))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    want = model.generate(ids, attention_mask=mask, max_new_tokens=14, eos_token_id=6, pad_token_id=31)
    accepted = model.accept_lengths
    with optimize_eagle_with_triton(model)[1]:
        got = model.generate(ids, attention_mask=mask, max_new_tokens=14, eos_token_id=6, pad_token_id=31)
        assert model.accept_lengths == accepted and accepted  # of the last sequence
        small = model.generate(
            ids.int(), attention_mask=mask, max_new_tokens=14, eos_token_id=torch.tensor([-1, 6]), pad_token_id=31
        )
        sampled = [model.generate(ids, max_new_tokens=20, do_sample=True, top_p=0.9, seed=s) for s in (1, 1, 2)]
        exact = model.generate(long[None], max_length=30)
    assert torch.equal(got, want) and torch.equal(small, want)
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])
    assert exact.shape == (1, 30) and torch.equal(exact, model.generate(long[None], max_length=30))


def test_importing_needs_neither_torch_nor_triton():
    code = "import sys, eagle_triton; print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    with pytest.raises(ImportError):
        exec("from eagle_triton import nothing")


def test_without_triton_the_references_work_and_the_kernels_say_what_to_install():
    code = """
import sys
from contextlib import nullcontext
from typing import get_type_hints
sys.modules["triton"] = None  # as if it were not installed
from eagle_triton.engine.operations import make_operations
make_operations()
try:
    make_operations(kernels=True)
except ImportError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install triton" in out.stdout and "kernels=False" in out.stdout


def test_kernels_on_a_cpu_are_refused_before_anything_is_patched(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    model = tiny_model()
    for call in (optimize_eagle_with_triton, lambda model, kernels: EAGLEInference(None, model, kernels=kernels)):
        with pytest.raises(ValueError, match="kernels=True: the model lies on cpu, where Triton's kernels do not run"):
            call(model, kernels=True)
    assert "generate" not in vars(model)


def test_two_layers_that_share_their_attention_are_refused():
    model = tiny_model(**TREES["8-3-2"])
    layers = model.base_model.model.layers
    layers[2].self_attn = layers[1].self_attn
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.self_attn\.layer_idx must be 2, got 1"):
        optimize_eagle_with_triton(model)
    assert "forward" not in vars(layers[1].self_attn) and "eagenerate" not in vars(model)


def draft(model, ids: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
    """The tree after `ids` [1, L], from the features of all its tokens but the root's that are not kept yet."""
    known = 0 if model.ea_layer.stable_kv is None else model.ea_layer.stable_kv[0][0].shape[2]
    return model.ea_layer.topK_genrate(features[:, known : ids.shape[1] - 1], ids, model.base_model.lm_head)


def test_a_head_whose_logits_are_nan_drafts_nothing():
    model, features = tiny_model(**TREES["8-3-2"]), torch.full((1, 9, 192), torch.nan)
    ids = random_prompt(10)
    for optimised in (False, True):
        with optimize_eagle_with_triton(model) if optimised else nullcontext():
            model.ea_layer.reset_kv()
            with pytest.raises(RuntimeError, match="the draft head's logits contain NaN"):
                draft(model, ids, features)


@pytest.mark.parametrize("first", [10, 62, 130, 480], ids=lambda rows: f"{rows}-rows")
def test_rows_that_were_kept_stay_as_they_were_when_another_branch_is_drafted(first):
    """Kept at 10 and at 15 rows, back to the first, another branch, then the second again: as the original's tree."""
    model = tiny_model(**TREES["8-3-2"])
    features = [torch.randn(1, first + 10, 192, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    ids = [random_prompt(first + 11, seed=seed) for seed in range(2)]
    ids[1][:, : first + 1], features[1][:, :first] = ids[0][:, : first + 1], features[0][:, :first]

    def trees() -> list[list[torch.Tensor]]:
        model.ea_layer.reset_kv()
        drafted = [draft(model, ids[0][:, : first + 1], features[0])]
        ten = model.ea_layer.stable_kv
        drafted.append(draft(model, ids[0][:, : first + 6], features[0]))
        fifteen = model.ea_layer.stable_kv
        model.ea_layer.stable_kv = ten
        drafted.append(draft(model, ids[1][:, : first + 6], features[1]))
        model.ea_layer.stable_kv = fifteen
        return [*drafted, draft(model, ids[0], features[0])]

    expected = trees()
    with optimize_eagle_with_triton(model):
        assert_same(trees(), expected)


def test_the_strategy_of_verification_is_an_option():
    model, ids = tiny_model(vocab=12, seed=2, total_token=8, depth=2, top_k=2), random_prompt(5, 12)
    options = dict(max_new_tokens=20, do_sample=True, seed=1)
    texts = {}
    for strategy in ("target_match", "rejection", "greedy", "topp"):
        with optimize_eagle_with_triton(model, verify_strategy=strategy) as (_, originals):
            texts[strategy] = model.generate(ids, **options)
            notes = [row.reason for row in originals.report() if row.path == "verification"]
        assert notes == ([f"{strategy}; lossless: False"] if strategy in ("topp", "greedy") else [])
    assert torch.equal(texts["greedy"], model.generate(ids, max_new_tokens=20))
    assert not torch.equal(texts["target_match"], texts["rejection"])
    with pytest.raises(ValueError, match="verify_strategy must be one of target_match, rejection, greedy, topp"):
        optimize_eagle_with_triton(model, verify_strategy="typical")
    with pytest.raises(TypeError, match="verify_strategy must be a string"):
        optimize_eagle_with_triton(model, verify_strategy=None)
