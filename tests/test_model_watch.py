"""Whatever a model computes beside its weights is refused by name: when it is read, and when it came later."""

import copy
import functools
import gc
import importlib
import operator
import pickle
import re
from functools import partial

import accelerate
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from transformers.models.llama.modeling_llama import LlamaMLP

from eagle_triton import (
    EAGLEConfig,
    EAGLEInference,
    EaModel,
    optimize_eagle_with_triton,
    optimize_with_triton,
    restore_eagle,
)
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import PagePool
from eagle_triton.engine.model.model_watch import ModelWatch
from eagle_triton.engine.operations import make_operations
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.causal_lm import read_causal_lm
from eagle_triton.patching import PatchError
from tests.tiny import random_prompt, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = dict(total_token=8, depth=3, top_k=2)
PROMPT = random_prompt(9)
PLACES = [
    "base_model",
    "base_model.model",
    "base_model.model.embed_tokens",
    "base_model.model.layers.1",
    "base_model.model.layers.1.self_attn",
    "base_model.model.layers.1.mlp",
    "base_model.model.layers.1.mlp.up_proj",
    "base_model.model.layers.1.mlp.act_fn",
    "base_model.model.layers.1.input_layernorm",
    "base_model.model.norm",
    "base_model.model.rotary_emb",
    "base_model.lm_head",
    "ea_layer",
    "ea_layer.fc",
    "ea_layer.midlayer.mlp",
]


def model() -> nn.Module:
    return tiny_model(layers=5, **SMALL)


@pytest.fixture
def m() -> nn.Module:
    return model()


def zero(*arguments):
    return arguments[-1] * 0


HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda module, inputs, output: output),
    "forward with kwargs": lambda module: module.register_forward_hook(lambda *_: None, with_kwargs=True),
    "forward pre": lambda module: module.register_forward_pre_hook(lambda module, inputs: None),
    "always called": lambda module: module.register_forward_hook(lambda *_: None, always_call=True),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_is_refused_with_its_path_and_allowed_once_removed(m, kind):
    for place in PLACES:
        handle = HOOKS[kind](m.get_submodule(place))
        with pytest.raises(UnsupportedModelError, match=rf"^model\.{place} has a forward (pre-)?hook"):
            optimize_eagle_with_triton(m)
        handle.remove()
    optimize_eagle_with_triton(m).originals.restore()


def test_a_hook_that_comes_later_is_refused_by_the_next_generation(m):
    with optimize_eagle_with_triton(m):
        expected = m.eagenerate(PROMPT, max_new_tokens=5)
        for place in PLACES:
            handle = m.get_submodule(place).register_forward_hook(lambda module, inputs, output: output)
            with pytest.raises(RuntimeError, match=rf"^model\.{place} has got a forward hook"):
                m.eagenerate(PROMPT, max_new_tokens=5)
            handle.remove()
        assert torch.equal(m.eagenerate(PROMPT, max_new_tokens=5), expected)


@pytest.mark.parametrize("place", ["base_model.model.layers.1.mlp", "base_model.model.layers.1", "base_model.model"])
def test_a_forward_replaced_on_the_instance_is_refused(m, place):
    part = m.get_submodule(place)
    part.forward = lambda *_, **__: None
    with pytest.raises(UnsupportedModelError, match=rf"^model\.{place}\.forward was replaced on this instance"):
        optimize_eagle_with_triton(m)
    del part.forward
    with optimize_eagle_with_triton(m):
        part.forward = lambda *_, **__: None
        with pytest.raises(RuntimeError, match=rf"^model\.{place}\.forward was replaced"):
            m.eagenerate(PROMPT, max_new_tokens=5)


def test_global_hooks_are_refused(m):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedModelError, match="torch has global forward hooks"):
            optimize_eagle_with_triton(m)
    finally:
        handle.remove()
    with optimize_eagle_with_triton(m):
        handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
        try:
            with pytest.raises(RuntimeError, match="torch has got global forward hooks"):
                m.eagenerate(PROMPT, max_new_tokens=5)
        finally:
            handle.remove()


def test_the_hooks_with_which_transformers_records_outputs_are_harmless(m):
    m.base_model(PROMPT, output_hidden_states=True)  # installs them
    expected = m.naivegenerate(PROMPT, max_new_tokens=8)
    with optimize_eagle_with_triton(m):
        assert torch.equal(m.naivegenerate(PROMPT, max_new_tokens=8), expected)


def check_refused_until_undone(m, *changes):
    """An optimised model refuses to generate after a change, and goes on after it is undone. Of each: how to do and to
    undo it, and the message."""
    with optimize_eagle_with_triton(m):
        expected = m.eagenerate(PROMPT, max_new_tokens=5)
        for change, undo, message in changes:
            change()
            with pytest.raises(RuntimeError, match=message):
                m.eagenerate(PROMPT, max_new_tokens=5)
            undo()
        assert torch.equal(m.eagenerate(PROMPT, max_new_tokens=5), expected)


FIELDS = {
    "num_hidden_layers": ("base_model.model.config", 2, r"config\.num_hidden_layers"),
    "negative num_hidden_layers": ("base_model.model.config", -1, r"config\.num_hidden_layers"),
    "sliding_window": ("base_model.model.config", 3, r"config\.sliding_window"),
    "_attn_implementation": ("base_model.model.config", "flex_attention", "attn_implementation"),
    "is_causal": ("base_model.model.layers.1.self_attn", False, r"layers\.1\.self_attn\.is_causal"),
}


def test_fields_that_the_forward_reads_are_refused_before_and_after_optimising(m):
    changes = []
    for field, (path, value, named) in FIELDS.items():
        owner, name = operator.attrgetter(path)(m), field.split()[-1]
        change, undo = (partial(setattr, owner, name, some) for some in (value, getattr(owner, name, None)))
        changes.append((change, undo, named))
    check_refused_until_undone(m, *changes)
    for change, undo, named in changes:
        change()
        with pytest.raises(UnsupportedModelError, match=named):
            optimize_eagle_with_triton(m)
        with pytest.raises(UnsupportedModelError, match=named):
            optimize_with_triton(m.base_model)
        undo()


OWN_FIELDS = {  # of modules of SafeAILab's, which have copies of what a configuration says
    "num_heads": ("base_model.model.layers.0.self_attn", 4, 2),
    "num_key_value_heads": ("base_model.model.layers.0.self_attn", 2, 1),
    "hidden_size": ("base_model.model.layers.0.self_attn", 64, 32),
    "pretraining_tp": ("base_model.model.layers.0.mlp", 1, 2),
    "attention_type": ("base_model.model.layers.0", "full_attention", "sliding_attention"),
}


def test_fields_that_only_some_families_read_are_watched(m):
    changes = []
    for name, (path, before, after) in OWN_FIELDS.items():
        owner = operator.attrgetter(path)(m)
        change, undo = (partial(setattr, owner, name, value) for value in (after, before))
        undo()
        changes.append((change, undo, rf"{path}\.{name} was changed from"))
    check_refused_until_undone(m, *changes)


def test_dropout_of_a_model_in_training_mode_is_refused(m):
    for layer in m.base_model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    message = r"layers\.0\.self_attn is in training mode with attention_dropout"
    check_refused_until_undone(m, (m.train, m.eval, message))


def test_layer_types_that_mistral_masks_otherwise_are_refused():
    m = tiny_model("mistral", **SMALL)
    m.base_model.config.layer_types = ["full_attention"] * 6
    with pytest.raises(UnsupportedModelError, match=r"config\.sliding_window is 20 and layer 0 is full_attention"):
        optimize_with_triton(m.base_model)


def test_layers_that_share_keys_and_values_in_the_originals_cache_are_refused():
    base = tiny_model().base_model
    base.model.layers[2] = copy.deepcopy(base.model.layers[1])
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.self_attn\.layer_idx must be 2, got 1"):
        optimize_with_triton(base)
    base.model.layers[2].self_attn.layer_idx = 2
    optimize_with_triton(base).originals.restore()


def test_a_window_of_one_token_which_transformers_caches_wrongly_is_refused():
    base = tiny_model("mistral", **SMALL).base_model
    base.config.sliding_window = 1
    with pytest.raises(UnsupportedModelError, match=r"config\.sliding_window must be at least 2, got 1"):
        optimize_with_triton(base)


CHANGES = {
    "parameter": (
        lambda m: setattr(m.base_model.lm_head, "weight", nn.Parameter(m.base_model.lm_head.weight.detach().clone())),
        r"model\.base_model\.lm_head\.weight was replaced, moved or cast",
    ),
    "assigned state": (
        lambda m: m.base_model.model.layers[0].mlp.load_state_dict(
            {name: value.clone() for name, value in m.base_model.model.layers[0].mlp.state_dict().items()}, assign=True
        ),
        r"model\.base_model\.model\.layers\.0\.mlp\.\w+_proj\.weight was replaced",
    ),
    "module": (
        lambda m: setattr(m.base_model.model.layers[2], "mlp", copy.deepcopy(m.base_model.model.layers[2].mlp)),
        r"model\.base_model\.model\.layers\.2\.mlp was replaced",
    ),
    "head's norm": (
        lambda m: setattr(m.ea_layer.norm, "weight", nn.Parameter(torch.ones(64))),
        r"model\.ea_layer\.norm\.weight was replaced",
    ),
    "cast": (lambda m: m.to(torch.bfloat16), "was replaced, moved or cast"),
    "transposed": (
        lambda m: setattr(m.base_model.model.layers[0].self_attn.q_proj.weight, "data", torch.rand(64, 64).t()),
        r"q_proj\.weight was replaced",
    ),
    "eps": (lambda m: setattr(m.base_model.model.norm, "variance_epsilon", 0.5), r"norm\.variance_epsilon was changed"),
    "scaling": (lambda m: setattr(m.base_model.model.layers[1].self_attn, "scaling", 0.5), r"scaling was changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_later_is_refused_and_the_model_can_be_restored(m, change):
    apply, message = CHANGES[change]
    with optimize_eagle_with_triton(m) as (_, originals):
        m.eagenerate(PROMPT, max_new_tokens=5)
        apply(m)
        for method in (m.eagenerate, m.naivegenerate, m.generate):
            with pytest.raises(RuntimeError, match=message):
                method(PROMPT, max_new_tokens=5)
        with pytest.raises(RuntimeError, match="restore the model and optimise it again"):
            m.generate(PROMPT, max_new_tokens=5)
    assert originals.restored
    with optimize_eagle_with_triton(m):
        after = m.naivegenerate(PROMPT, max_new_tokens=5)
    assert torch.equal(after, m.naivegenerate(PROMPT, max_new_tokens=5))


def test_code_that_drives_the_model_itself_gets_the_original_then(m):
    with optimize_eagle_with_triton(m) as (_, originals), torch.no_grad():
        m.base_model.model.layers[3].self_attn.q_proj.weight = nn.Parameter(torch.randn(64, 64))
        logits = m.base_model(PROMPT, use_cache=False).logits
        fallbacks = [row for row in originals.report() if row.fallbacks]
    assert len(fallbacks) == 5 and "q_proj.weight was replaced" in fallbacks[0].reason
    with torch.no_grad():
        assert torch.equal(logits, m.base_model(PROMPT, use_cache=False).logits)


def test_weights_may_change_in_place(m):
    with optimize_eagle_with_triton(m):
        before = m.naivegenerate(PROMPT, max_new_tokens=8)
        m.base_model.lm_head.weight.data.copy_(torch.roll(m.base_model.lm_head.weight.data, 7, 0))
        after = m.naivegenerate(PROMPT, max_new_tokens=8)
    assert not torch.equal(before, after)
    assert torch.equal(after, m.naivegenerate(PROMPT, max_new_tokens=8))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimizer_drops_kept_prompts(m, fused):
    """Fused steps do not raise the versions of the tensors that they change."""
    model, prompt = m.base_model, random_prompt(150)
    gc.collect()
    before = len(_global_optimizer_post_hooks)
    _, originals = optimize_with_triton(model)
    model.generate(prompt, max_new_tokens=4, prompt_lookup_num_tokens=2)
    model.generate(prompt, max_new_tokens=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = model.generate(prompt, max_new_tokens=8)
    assert not originals.report()[0].fallbacks
    originals.restore()
    assert torch.equal(found, model.generate(prompt, max_new_tokens=8))
    assert len(_global_optimizer_post_hooks) == before  # while the originals are kept


class Scaled(nn.Module):
    """A layer that is called, with a factor where nothing sees it."""

    strength = 1.0

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.base_layer = layer

    def forward(self, x):
        return self.base_layer(x) * self.strength


@pytest.mark.parametrize("how", ["a hook", "a class of one's own", "dropout"])
def test_keys_of_earlier_prompts_are_not_reused_if_a_called_module_may_have_changed(m, how, monkeypatch):
    model, prompt, forgets = m.base_model, random_prompt(150), []
    attention, forget = model.model.layers[0].self_attn, PagePool.forget
    monkeypatch.setattr(PagePool, "forget", lambda self: (forgets.append(self), forget(self)))
    linear, dropout = attention.v_proj, nn.Dropout(0.5).eval()
    attention.v_proj = Scaled(linear) if how == "a class of one's own" else nn.Sequential(linear, dropout)
    if how == "a hook":
        linear.register_forward_hook(lambda module, inputs, output: output * Scaled.strength)
    with optimize_with_triton(model)[1] as originals:
        first = model.generate(prompt, max_new_tokens=8)
        dropout.train(how == "dropout")
        monkeypatch.setattr(Scaled, "strength", -1.5)
        forgets.clear()
        second = model.generate(prompt, max_new_tokens=8)
        assert forgets and not originals.report()[0].fallbacks
        reasons = {"a hook": "has a forward hook inside", "dropout": "has active dropout inside"}
        said = f"self_attn.v_proj is called, and {reasons.get(how, 'Scaled inside is not')}"
        assert said in str(originals)
    assert not torch.equal(first, second)
    if how != "dropout":
        assert torch.equal(second, model.generate(prompt, max_new_tokens=8))


@pytest.mark.parametrize(
    "registry", ["modeling_utils.ALL_ATTENTION_FUNCTIONS", "masking_utils.ALL_MASK_ATTENTION_FUNCTIONS"]
)
def test_attention_that_is_replaced_in_transformers_registry_is_refused(m, registry):
    home, name = registry.split(".")
    functions = getattr(importlib.import_module(f"transformers.{home}"), name)
    model, own = m.base_model, functions["sdpa"]
    message = rf'{name}\["sdpa"\] of transformers was replaced by '
    try:
        with optimize_with_triton(model)[1]:
            functions["sdpa"] = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
            with pytest.raises(RuntimeError, match=message):
                model.generate(PROMPT, max_new_tokens=2)
        with pytest.raises(UnsupportedModelError, match=message):
            optimize_with_triton(model)
    finally:
        functions["sdpa"] = own


def test_an_activation_that_is_a_function_is_compared_far_from_zero_and_may_not_change(m):
    mlp = m.base_model.model.layers[1].mlp
    own = mlp.act_fn
    del mlp.act_fn
    mlp.act_fn = lambda x: own(x).clamp(max=4.2)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.act_fn must be SiLU or GELU with tanh"):
        optimize_with_triton(m.base_model)
    mlp.act_fn = torch.nn.functional.silu
    with optimize_with_triton(m.base_model)[1]:
        m.base_model.generate(PROMPT, max_new_tokens=2)
        mlp.act_fn = torch.nn.functional.gelu
        with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.act_fn was changed"):
            m.base_model.generate(PROMPT, max_new_tokens=2)


def test_a_hook_inside_a_called_module_is_run_without_graphs(m):
    """A graph would run it only when it is captured."""
    model = m.base_model
    linear = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = nn.Sequential(linear)
    watch = ModelWatch({"model": model})
    engine = Engine(read_causal_lm(model), None, make_operations(), watch=watch)
    engine.cuda_graph = True
    engine.check_model()
    assert engine.steps._captures and not engine.notes
    handle = linear.register_forward_hook(lambda module, inputs, output: output)
    engine.check_model()
    assert not engine.steps._captures
    expected = "model.model.layers.1.mlp.up_proj is called, and has a forward hook inside"
    assert engine.notes["cuda_graph"] == f"not used, which is several times slower: {expected}"
    assert engine.notes["prefixes"].endswith(f"because a module may have changed: {expected}")
    handle.remove()
    engine.check_model()
    assert engine.steps._captures and not engine.notes
    engine.strict = True
    linear.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(RuntimeError, match=r"up_proj is called, and has a forward hook inside, which .* strict=True"):
        engine.check_model()


def test_a_session_goes_on_once_a_hook_is_removed(m):
    prompt = random_prompt(70)
    eagle = EAGLEInference(None, m, EAGLEConfig(fallback=False))
    expected = eagle.generate(prompt, 6, return_stats=False)[0].tolist()
    with eagle.session(rows=100, slots=2) as session:
        session.submit(prompt[0], 6)
        handle = m.base_model.model.layers[1].register_forward_hook(zero)
        with pytest.raises(RuntimeError, match=r"layers\.1 has got a forward hook"):
            session.step()
        handle.remove()
        pieces = [piece for _ in range(20) for piece in session.step()]
    assert pieces[-1].completion.output_ids.tolist() == expected


class Wrapped(torch.Tensor):
    """A tensor subclass, as quantised and sharded weights are."""


class DTensor(torch.Tensor):
    """By the name of a sharded one."""


@pytest.mark.parametrize(
    ("place", "kind", "message"),
    [
        ("norm", Wrapped, "must be a plain tensor, got Wrapped"),
        ("embed_tokens", Wrapped, "must be a plain tensor, got Wrapped"),
        ("layers.1.mlp.up_proj", DTensor, "is sharded .* vLLM or SGLang"),
    ],
)
def test_a_weight_of_another_class_is_refused(m, place, kind, message):
    part = m.base_model.model.get_submodule(place)
    part.weight = nn.Parameter(part.weight.detach().as_subclass(kind), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=rf"model\.base_model\.model\.{place}\.weight {message}"):
        optimize_eagle_with_triton(m)


def test_a_linear_layer_with_a_wrapped_weight_is_called_as_the_module_it_is(m):
    layer = m.base_model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Wrapped), requires_grad=False)
    expected = m.eagenerate(PROMPT, max_new_tokens=8)
    calls = []
    with optimize_eagle_with_triton(m):
        layer.forward = lambda x: calls.append(len(x)) or nn.functional.linear(x, layer.weight)
        got = m.eagenerate(PROMPT, max_new_tokens=8)
    assert calls and torch.equal(got, expected)


@pytest.mark.parametrize("how", ["an EaModel", "a plain model", "the engine"])
def test_a_model_that_device_map_spreads_is_refused_with_the_remedy(m, how, tmp_path):
    m.save_pretrained(tmp_path)
    layers = {f"model.layers.{index}": "cpu" if index else "disk" for index in range(5)}
    places = {**layers, **{f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb")}, "lm_head": "cpu"}
    spread = EaModel.from_pretrained(str(tmp_path), device_map=places, offload_folder=str(tmp_path / "offload"))
    calls = {
        "an EaModel": lambda: optimize_eagle_with_triton(spread),
        "a plain model": lambda: optimize_with_triton(spread.base_model, spread.ea_layer),
        "the engine": lambda: EAGLEInference(spread.ea_layer, spread.base_model),
    }
    message = "must lie on one device, got cpu, meta.* without device_map.* vLLM"
    with pytest.raises(UnsupportedModelError, match=message):
        calls[how]()


@pytest.mark.parametrize("place", ["auto", DEVICE, {"": DEVICE}, {"": torch.device(DEVICE)}], ids=str)
def test_a_device_map_of_one_device_works_in_every_door(place, tmp_path):
    if place == "auto" and torch.cuda.device_count() > 1:
        pytest.skip("which spreads a model over these devices")
    model().save_pretrained(tmp_path)
    loaded = EaModel.from_pretrained(str(tmp_path), device_map=place, dtype=torch.float32)
    assert {str(tensor.device) for tensor in loaded.state_dict().values()} <= {DEVICE, f"{DEVICE}:0"}
    target, prompt = loaded.base_model, PROMPT.to(DEVICE)
    want = target.generate(prompt, max_new_tokens=12, do_sample=False)
    with optimize_eagle_with_triton(loaded)[1]:
        assert torch.equal(loaded.generate(prompt, max_new_tokens=12), want)
    if isinstance(place, dict):
        return  # all doors get the same model
    with optimize_with_triton(target, loaded.ea_layer, strict=True)[1]:
        assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False), want)
    for engine in (EAGLEInference(loaded.ea_layer, target), EAGLEInference.from_pretrained(tmp_path, device=DEVICE)):
        assert torch.equal(engine.generate(prompt, max_new_tokens=12)[0], want)


def test_hooks_of_accelerate_on_one_device_are_refused_with_what_takes_them_off(m):
    want = m.eagenerate(random_prompt(7), max_new_tokens=9)
    accelerate.dispatch_model(m.base_model, {"": "cpu"}, force_hooks=True)
    with pytest.raises(UnsupportedModelError, match=r"accelerate\.hooks\.remove_hook_from_module\(model, recurse=True"):
        optimize_eagle_with_triton(m)
    accelerate.hooks.remove_hook_from_module(m.base_model, recurse=True)
    with optimize_eagle_with_triton(m)[1]:
        assert torch.equal(m.eagenerate(random_prompt(7), max_new_tokens=9), want)


class Adapted(nn.Linear):
    """A projection with an adapter, as PEFT's are."""

    def forward(self, x):
        return super().forward(x) + x.mean(-1, keepdim=True)


def test_projections_that_are_called_as_modules_are_reported_by_count_and_class_and_refused_if_strict(m):
    for index in range(2):
        attention = m.base_model.model.layers[index].self_attn
        for name in ("q_proj", "v_proj"):
            old = attention._modules[name]
            attention._modules[name] = Adapted(old.in_features, old.out_features, bias=False)
    m.base_model.model.layers[3].mlp.up_proj.forward = lambda x: x.new_zeros(*x.shape[:-1], 96)
    said = (
        r"5 are called as modules, at their own speed: 4 tests.Adapted, 1 torch.Linear with its "
        r"own forward; the first is (model\.base_model|model|target_model)\.model\.layers\.0\.self_attn\.q_proj"
    )
    prompt, target = random_prompt(7), m.base_model
    want = target.generate(prompt, max_new_tokens=9)
    for optimise, subject in ((optimize_eagle_with_triton, m), (optimize_with_triton, target)):
        with optimise(subject)[1] as originals:
            assert torch.equal(subject.generate(prompt, max_new_tokens=9), want)
            assert re.search(said, str(originals.report()))
        with pytest.raises(UnsupportedModelError, match=f"projections: {said}"):
            optimise(subject, strict=True)
    engine = EAGLEInference(m.ea_layer, target)
    assert torch.equal(engine.generate(prompt, max_new_tokens=9)[0], want) and re.search(said, str(engine.report()))


def test_a_model_that_peft_has_wrapped_is_refused_with_what_to_give_instead():
    class PeftModelForCausalLM(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_model = base

        def __getattr__(self, name):
            return super().__getattr__(name) if name == "base_model" else getattr(self.base_model, name)

    PeftModelForCausalLM.__module__ = "peft.peft_model"
    wrapped, m = PeftModelForCausalLM(model().base_model), model()
    remedy = r"model is a PeftModelForCausalLM of PEFT .*model\.merge_and_unload\(\).*model\.get_base_model\(\)"
    for call in (lambda: optimize_with_triton(wrapped), lambda: EAGLEInference("suffix", wrapped)):
        with pytest.raises(UnsupportedModelError, match=remedy.replace("model is", r"(target_)?model is")):
            call()
    m.base_model = wrapped
    with pytest.raises(UnsupportedModelError, match=r"model\.base_model is a PeftModelForCausalLM of PEFT"):
        optimize_eagle_with_triton(m)


@pytest.mark.parametrize(
    ("place", "replacement", "message"),
    [
        ("base_model.model.norm", lambda: nn.LayerNorm(64), "does not compute an RMSNorm with its weight"),
        ("base_model.model.embed_tokens", lambda: nn.Embedding(32, 64, max_norm=1.0), "must be a plain nn.Embedding"),
    ],
)
def test_a_module_of_another_kind_is_refused(m, place, replacement, message):
    parent, _, name = place.rpartition(".")
    setattr(m.get_submodule(parent), name, replacement())
    with pytest.raises(UnsupportedModelError, match=message):
        optimize_eagle_with_triton(m)


def test_an_optimised_model_is_neither_copied_nor_pickled(m):
    with optimize_eagle_with_triton(m):
        expected = m.eagenerate(PROMPT, max_new_tokens=5)
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(PatchError, match="is optimised and cannot be copied or pickled.*restore it first"):
                copied(m)
        assert torch.equal(m.eagenerate(PROMPT, max_new_tokens=5), expected)
    twin = copy.deepcopy(m)
    twin.base_model.lm_head.weight.data.zero_()
    assert not torch.equal(twin.naivegenerate(PROMPT, max_new_tokens=5), m.naivegenerate(PROMPT, max_new_tokens=5))


def test_the_call_is_a_context_manager_and_originals_need_not_be_kept(m):
    original = type(m).eagenerate
    with optimize_eagle_with_triton(m) as optimized:
        assert optimized.model is m and "eagenerate" in vars(m)
    assert "eagenerate" not in vars(m) and m.eagenerate.__func__ is original
    optimize_eagle_with_triton(m)
    for _ in range(2):  # the second time is harmless, as in `finally`
        assert restore_eagle(m) is m and "eagenerate" not in vars(m)
    with pytest.raises(PatchError, match="was never optimised: there is nothing to restore"):
        restore_eagle(model())
    with pytest.raises(TypeError, match="originals must be what optimising returned, got int"):
        restore_eagle(m, 3)


def test_the_same_holds_for_a_pair_of_models(m):
    handle = m.base_model.model.layers[1].mlp.register_forward_hook(zero)
    config = EAGLEConfig(fallback=False)
    message = r"target_model\.base_model\.model\.layers\.1\.mlp has a forward hook"
    with pytest.raises(UnsupportedModelError, match=message):
        EAGLEInference(None, m, config)
    handle.remove()
    eagle = EAGLEInference(None, m, config)
    before = eagle.generate(PROMPT, 5, return_stats=False)
    m.base_model.lm_head.weight = nn.Parameter(torch.zeros(32, 64))
    with pytest.raises(RuntimeError, match=r"target_model\.base_model\.lm_head\.weight was replaced.*make a new one"):
        eagle.generate(PROMPT, 5)
    assert not torch.equal(EAGLEInference(None, m, config).generate(PROMPT, 5, return_stats=False), before)


def steered(module: nn.Module, method: str) -> None:
    """Make a module one of a class of somebody's own, whose method halves what comes out."""

    def halved(self, *arguments, **options):
        out = getattr(super(kind, self), method)(*arguments, **options)
        return out * 0.5 if isinstance(out, torch.Tensor) else (out[0] * 0.5, *out[1:])

    kind = type("Steered", (type(module),), {method: halved})
    module.__class__ = kind


@pytest.mark.parametrize("method", ["forward", "__call__"])
@pytest.mark.parametrize("place", ["layers.1.mlp", "layers.1.self_attn", "layers.1", "layers.1.mlp.act_fn", "norm"])
def test_a_class_with_a_forward_of_its_own_is_refused(m, place, method):
    steered(m.get_submodule(f"base_model.model.{place}"), method)
    message = rf"model\.{place} is a Steered with a {method} of tests\.test_model"
    with pytest.raises(UnsupportedModelError, match=message):
        optimize_eagle_with_triton(m)


@pytest.mark.parametrize("method", ["forward", "__call__"])
def test_a_class_whose_forward_is_replaced_later_is_refused(m, monkeypatch, method):
    with optimize_eagle_with_triton(m):
        kind = type(m.base_model.model.layers[0].mlp)
        monkeypatch.setattr(kind, method, lambda self, x: x)
        with pytest.raises(RuntimeError, match=rf"layers\.0\.mlp\.{method} was replaced"):
            m.eagenerate(PROMPT, max_new_tokens=5)


def test_a_projection_that_becomes_one_of_another_class_is_refused(m):
    with optimize_eagle_with_triton(m):
        steered(m.base_model.model.layers[0].mlp.down_proj, "__call__")
        with pytest.raises(RuntimeError, match=r"down_proj\.__call__ was replaced"):
            m.eagenerate(PROMPT, max_new_tokens=5)


def test_what_is_no_change_is_accepted(m):
    expected = m.naivegenerate(PROMPT, max_new_tokens=8)
    layer = m.base_model.model.layers[0]
    layer.forward = layer.forward  # as some versions of transformers leave it
    m.base_model.gradient_checkpointing_enable()
    m.base_model.gradient_checkpointing_disable()
    m.base_model.enable_input_require_grads()
    with optimize_eagle_with_triton(m):
        layer.forward = layer.forward
        assert torch.equal(m.naivegenerate(PROMPT, max_new_tokens=8), expected)


def test_the_width_and_the_size_of_trees_may_change(m):
    expected = m.naivegenerate(PROMPT, max_new_tokens=9)
    with optimize_eagle_with_triton(m):
        m.eagenerate(PROMPT, max_new_tokens=2)
        m.ea_layer.total_tokens, m.ea_layer.depth, m.ea_layer.top_k = 5, 2, 3
        assert torch.equal(m.eagenerate(PROMPT, max_new_tokens=4)[:, :14], expected[:, :14])


def test_a_running_session_notices_when_a_request_enters(m):
    with EAGLEInference(None, m, EAGLEConfig(fallback=False, max_length=64)).session() as session:
        session.submit(PROMPT, 20)
        session.step()
        m.base_model.lm_head.weight = nn.Parameter(torch.zeros(32, 64))
        session.submit(random_prompt(5), 20)
        with pytest.raises(RuntimeError, match=r"lm_head\.weight was replaced"):
            session.step()


def test_inference_mode_and_autocast_are_the_callers_own(m):
    expected = m.eagenerate(PROMPT, max_new_tokens=8)
    eagle = EAGLEInference(None, m, EAGLEConfig(fallback=False))
    with optimize_eagle_with_triton(m) as (_, originals):
        with torch.inference_mode():
            assert torch.equal(m.eagenerate(PROMPT.clone(), max_new_tokens=8), expected)
            eagle.generate(PROMPT, 5)
        assert torch.equal(m.eagenerate(PROMPT, max_new_tokens=8), expected)
        eagle.generate([PROMPT[0]] * 2, 5, temperature=1.0)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            with pytest.raises(RuntimeError, match=r"torch\.autocast is on, and the engine ignores it"):
                m.eagenerate(PROMPT, max_new_tokens=8)
            got = m.base_model(PROMPT, use_cache=False).logits
            assert any("autocast" in row.reason for row in originals.report())
        assert torch.equal(m.eagenerate(PROMPT, max_new_tokens=8), expected)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(got, m.base_model(PROMPT, use_cache=False).logits)


def test_a_compiled_wrapper_and_double_precision_are_named(m):
    with pytest.raises(UnsupportedModelError, match="was made by torch.compile.*pass its _orig_mod"):
        EAGLEInference(m.ea_layer, torch.compile(m.base_model))
    with pytest.raises(UnsupportedModelError, match=r"must be float32, bfloat16, float16, got torch\.float64"):
        optimize_eagle_with_triton(m.double())


class Louder(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_change_is_named_by_the_path_that_users_know():
    base = tiny_model().base_model
    watch, up = ModelWatch({"model": base}), base.model.layers[1].mlp.up_proj
    base.config.sliding_window = 4
    assert watch.change() == "model.config.sliding_window was changed from None to 4"
    base.config.sliding_window = None
    base.model.embed_tokens.max_norm = 0.5
    assert watch.change() == "model.model.embed_tokens.max_norm was changed from None to 0.5"
    base.model.embed_tokens.max_norm = None
    assert watch.change() is None
    up.weight = None
    assert watch.change() == "model.model.layers.1.mlp.up_proj.weight was replaced, moved or cast"


def test_a_change_is_found_behind_one_that_is_harmless():
    """Hooks beside hooks, a class, a dictionary of parameters, and a forward in the place of one that was the same."""
    changes = {
        "has got a forward hook": lambda layer: layer.mlp.register_forward_hook(lambda module, x, y: 0 * y),
        "mlp.forward was replaced": lambda layer: setattr(layer.mlp, "__class__", Louder),
        "weight was replaced": lambda layer: setattr(
            layer.input_layernorm, "_parameters", {"weight": nn.Parameter(5 * layer.input_layernorm.weight)}
        ),
        "up_proj.forward was replaced": lambda layer: setattr(layer.mlp.up_proj, "forward", lambda x: x),
    }
    for message, change in changes.items():
        base = tiny_model().base_model
        layer = base.model.layers[1]
        base.enable_input_require_grads()
        watch = ModelWatch({"model": base})
        assert watch.change() is None
        layer.mlp.up_proj.forward = layer.mlp.up_proj.forward
        assert watch.change() is None, "the class's own forward was called a change"
        change(layer)
        assert message in watch.change() and watch.change() == watch._first_change()
