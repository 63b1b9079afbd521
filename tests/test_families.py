"""Targets of every family: their original's tokens, each switch of FAMILIES, and fields that are not accounted for."""

import copy
import functools
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from eagle_triton import (
    EAGLEConfig,
    EAGLEInference,
    EaModel,
    TritonConfig,
    UnsupportedModelError,
    integration,
    optimize_eagle_with_triton,
    optimize_with_triton,
)
from eagle_triton.engine.megakernel_step import _Head, _UnsupportedError
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.latent_attention import LatentAttention
from eagle_triton.engine.model.mixers import NewRows
from eagle_triton.engine.model.model_view import prompt_forward
from eagle_triton.engine.model.model_watch import ModelWatch, modules_read
from eagle_triton.engine.model.modules import apply_norm, feed_forward
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families import own_ea_model
from eagle_triton.families.causal_lm import body_path, read_causal_lm
from eagle_triton.families.hf_generate.plan import read_prompts
from eagle_triton.families.reading import module_reader
from eagle_triton.inference.costs import StepCosts
from eagle_triton.models import families
from eagle_triton.models.families import FAMILIES, Family
from eagle_triton.models.loading import read_target_embedding
from eagle_triton.models.target import check_architecture
from eagle_triton.patching import Fallback
from eagle_triton.runtime.row_formats import RowFormat
from eagle_triton.speculative_decoding import autoregressive_generate
from tests.test_causal_lm import DEVICE
from tests.tiny import generate_row, random_prompt
from tests.tiny_families import (
    CASES,
    NOT_OVER_RANKS,
    SIMILAR,
    WITH_IMAGES,
    skipped_if_unknown,
    tiny_family,
    tiny_head,
    tiny_seeing_family,
)
from tests.tiny_hybrids import CLASSES as HYBRID_CLASSES
from tests.tiny_hybrids import tiny_hybrid

ROWS = torch.cat([2 + random_prompt(21, vocab=22, seed=seed) for seed in range(3)]).to(DEVICE)
LEFT = torch.ones_like(ROWS)
LEFT[1, :6] = LEFT[2, :17] = 0
PADDED = dict(input_ids=ROWS * LEFT, attention_mask=LEFT, pad_token_id=0)
DISTINCT = [case for case in CASES if case not in SIMILAR]
NEW = 13  # so that windows of 8 and frequencies of 16 tokens end in the prompt, and again later
WITH_LOGITS = dict(return_dict_in_generate=True, output_logits=True)


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(case):
        if case not in made:
            with skipped_if_unknown():
                made[case] = tiny_family(case).to(DEVICE)
        return made[case]

    return model


def generated(model, **options):
    return model.generate(**{**PADDED, "max_new_tokens": NEW, "do_sample": False, **options})


@pytest.mark.versions
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_originals(models, case):
    """In a padded batch, plain, and by trees of the model itself. Greedy tokens do not show how logits are scaled."""
    model, options = models(case), dict(WITH_LOGITS, max_new_tokens=5 if case in SIMILAR else NEW)
    want = generated(model, **options)
    trees = () if case in SIMILAR else ((model, TritonConfig(topk=2, num_steps=2)),)
    for draft, config in ((None, TritonConfig()), *trees):
        with optimize_with_triton(model, draft, config)[1] as originals:
            found = generated(model, **options)
            assert torch.equal(found.sequences, want.sequences)
            torch.testing.assert_close(found.logits[0], want.logits[0], atol=1e-4, rtol=1e-4)
            row = generate_row(originals)
            assert row.calls == 1 and not row.fallbacks, row
    assert len(set(want.sequences[:, 21:].flatten().tolist())) > 3  # else much could be wrong


@pytest.mark.parametrize("case", DISTINCT)
def test_the_kernels_give_the_originals_tokens(models, case):
    """On a CPU in Triton's interpreter; without former outputs, over whose places the search for suffixes goes."""
    model, prompt = models(case), ROWS[:1, :9]
    want = generated(model, input_ids=prompt, attention_mask=LEFT[:1, :9], max_new_tokens=2)
    config = EAGLEConfig(suffix_drafts=2, suffix_ring=0, fallback=False)
    tokens, _ = EAGLEInference(None, model, config, kernels=True).generate(prompt, 2)
    assert torch.equal(tokens, want)


def switches():
    """(case, field) of each value that differs from Llama's, by the first case that has it."""
    found = {}
    for case, (kind, _) in CASES.items():
        for field in fields(Family):
            plain = field.name in ("recurrent", "shown_by_modules", "scaled_embedding")
            if not plain and (value := getattr(FAMILIES[kind], field.name)) != field.default:
                one = pytest.param(case, field.name, field.default, id=f"{case}-{field.name}")
                found.setdefault((field.name, value), one)
    return list(found.values())


def first_logits(model):
    """Of what follows the prompts, by the engine."""
    with optimize_with_triton(model)[1]:
        return generated(model, **WITH_LOGITS, max_new_tokens=1).logits[0]


@pytest.fixture(scope="module")
def wanted_logits(models):
    return functools.cache(lambda case: first_logits(models(case)))


@pytest.mark.parametrize("case, name, default", switches())
def test_each_switch_is_heard(models, wanted_logits, case, name, default, monkeypatch):
    """Without it the layers compute something else, or cannot be read. Rotation in fp32 is about 16 bits alone."""
    kind, want = CASES[case][0], wanted_logits(case)
    monkeypatch.setitem(FAMILIES, kind, replace(FAMILIES[kind], **{name: default}))
    try:
        gap = (first_logits(models(case)) - want).abs().max().item()
    except UnsupportedModelError:
        return
    assert gap == 0 if name in ("rotary_in_fp32", "rotary_terms_in_fp32") else gap > 1e-3


HEADS = [*((case, True) for case in DISTINCT), ("granite", False), ("gemma3_text", False), ("gemma4_text", False)]
"""EAGLE-3 heads read layers' inputs, others the target's last states and its head: scaled, capped, or neither."""


@pytest.mark.parametrize(("case", "eagle3"), HEADS)
def test_heads_draft_for_every_family(models, case, eagle3):
    """In a batch the target's own tokens; in an EaModel also the drafts of the plain one, with modules patched too."""
    target, alone = models(case), ROWS[:1]
    head, rows = tiny_head(target, eagle3), [ROWS[0], ROWS[1, 6:]]
    want = generated(target, input_ids=(ROWS * LEFT)[:2], attention_mask=LEFT[:2], max_new_tokens=8)
    config = EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=8, fallback=False)
    tokens, stats = EAGLEInference(head, target, config).generate(rows, 8)
    assert [row[-8:].tolist() for row in tokens] == want[:, 21:].tolist()
    assert stats["total_tokens_generated"] == 2 * 8

    model, few, want = EaModel(target, head).eval(), 4, want[:1, :25]
    assert torch.equal(model.generate(alone, max_new_tokens=few), want)
    drafted = model.accept_lengths
    with optimize_eagle_with_triton(model, kernels=False)[1] as originals:
        assert torch.equal(model.generate(alone, max_new_tokens=few), want) and model.accept_lengths == drafted
        assert torch.equal(EaModel.generate(model, alone, max_new_tokens=few), want)
        assert model.accept_lengths == drafted
        calls = {row.path: row for row in originals.report()}
        assert calls["ea_layer.topK_genrate"].calls and not calls["ea_layer.topK_genrate"].fallbacks
        name = f"base_model.{body_path(target)}.layers.1.self_attn.forward"
        row = calls.get(name) or calls["self_attn.forward"]
        assert row.calls or "the originals run" in row.reason


@pytest.mark.versions
def test_capped_scores_are_those_of_the_attention_that_runs(monkeypatch):
    """transformers' "sdpa" leaves the cap out, or refuses it."""
    model = tiny_family("gemma2").to(DEVICE)
    model.config._attn_implementation = "eager"
    capped = generated(model)
    model.config._attn_implementation = "sdpa"
    if type(model)._supports_sdpa:
        want = generated(model)
        with optimize_with_triton(model)[1]:
            assert torch.equal(generated(model), want) and not torch.equal(want, capped)
    else:
        with pytest.raises(UnsupportedModelError, match="attn_implementation must be 'eager', got 'sdpa'"):
            optimize_with_triton(model)
        monkeypatch.setattr(type(model.model), "_supports_sdpa", True)
    for attention, cap in (("sdpa", None), ("eager", 5.0)):
        model.config._attn_implementation = attention
        assert {layer.mixer.softcap for layer in read_causal_lm(model).layers} == {cap}


@pytest.mark.parametrize(("case", "larger"), [("granite", 1), ("gemma2", 20)])
def test_an_ea_models_logits_are_scaled_and_capped_as_the_targets(models, case, larger):
    """Greedy tokens do not show it. Without, an EAGLE-1 head, which borrows them, would draft other trees."""
    models(case)  # skips where transformers has no such family
    target = tiny_family(case).to(DEVICE)
    target.lm_head.weight.data.mul_(larger)  # so that a cap is reached
    model, ids = EaModel(target, tiny_head(target, False)), torch.cat((ROWS[:1], ROWS[:1, :1]), 1)
    hidden = model(ROWS[:1])[1]
    got, plain = model(ROWS[:1], output_orig=True)[1], target.lm_head(hidden)
    torch.testing.assert_close(got, target(ROWS[:1]).logits)
    assert (got - plain).abs().max() > 0.1
    trees = []
    for head in (model.logit_head, target.lm_head):
        model.ea_layer.reset_kv()
        tokens, _, mask, _ = model.ea_layer.topK_genrate(hidden, ids, head)
        trees.append((tokens.tolist(), mask.tolist()))
    assert trees[0] != trees[1]
    with pytest.raises(_UnsupportedError, match="scaled or capped"):
        _Head.of(own_ea_model.read(model)[1])


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_heads_of_models_that_see_are_kept_and_draft(kind, tmp_path):
    """Loaded from disk; the embedding that is the target's is found there too."""
    with skipped_if_unknown():
        target = tiny_seeing_family(kind).to(DEVICE)
    alone = ROWS[:1]
    want = generated(target, input_ids=alone, attention_mask=LEFT[:1])
    EaModel(target, tiny_head(target, True)).save_pretrained(tmp_path)
    assert torch.equal(read_target_embedding(str(tmp_path / "target")), target.get_input_embeddings().weight.cpu())
    model = EaModel.from_pretrained(str(tmp_path)).to(DEVICE)
    assert torch.equal(model.generate(alone, max_new_tokens=NEW), want)
    drafted = model.accept_lengths
    with optimize_eagle_with_triton(model, kernels=False)[1]:
        assert torch.equal(model.generate(alone, max_new_tokens=NEW), want) and model.accept_lengths == drafted


def test_a_recurrent_target_has_no_ea_model():
    with pytest.raises(ValueError, match="'qwen3_next' has no EAGLE heads: use"):
        check_architecture(SimpleNamespace(model_type="qwen3_next"))


def test_the_norm_of_values_is_heard(models, wanted_logits, monkeypatch):
    want = wanted_logits("gemma4_text")
    monkeypatch.setattr(module_reader, "_read_value_norm", lambda *_: None)
    assert (first_logits(models("gemma4_text")) - want).abs().max() > 1e-3


def test_drafts_of_a_model_of_the_same_family_have_its_layers(models):
    """With keys of other layers and inputs of their own: all that the model itself drafts is accepted."""
    model = models("gemma4_text")
    engine = EAGLEInference(model, model, EAGLEConfig(topk=1, num_steps=3, num_draft_tokens=4))
    _, figures = engine.generate(ROWS[:1].tolist(), max_new_tokens=16)
    assert (figures.tau, figures.acceptance_rate) == (4.0, 1.0)


def test_features_and_last_rows_of_a_prompt_are_the_originals(models):
    """Of layers that read another layer's keys, and inputs of their own. The last one runs over the last row alone."""
    model = models("gemma4_text")
    view, ops = read_causal_lm(model, (1, 2, 4)), make_operations(kernels=False)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    caches = view.new_caches(SlotPages.whole(1, 64, torch.device(DEVICE)))
    assert [cache.data.shape[::5] for cache in caches.caches] == [(2, 16), (1, 32)]  # layers, and sizes of heads
    assert [layer.mixer.reads_layer for layer in view.layers] == [None, None, None, 1, 2]
    last = torch.tensor([20], device=DEVICE)
    with torch.no_grad():
        hidden, features = prompt_forward(ops, view, ROWS[:1], caches, NewRows(none, none, None, None), last)
        want = model.model(ROWS[:1], output_hidden_states=True)
    torch.testing.assert_close(hidden[:, 0], want.last_hidden_state[:, -1], rtol=1e-4, atol=1e-4)
    inputs = torch.cat([want.hidden_states[index] for index in (1, 2, 4)], -1)
    torch.testing.assert_close(features, inputs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_blocks_beside_attention_have_the_bits_of_the_originals_in_bf16():
    with skipped_if_unknown():
        model = tiny_family("gemma4_text").to(torch.bfloat16)
    view, ops, body, tokens = read_causal_lm(model), make_operations(kernels=False), model.model, ROWS[:1].cpu()
    embedded = body.embed_tokens(tokens)
    given = view.layer_inputs.of(ops, tokens, embedded)
    looked_up = body.embed_tokens_per_layer(tokens).unflatten(-1, (len(body.layers), -1))
    assert torch.equal(given, body.project_per_layer_inputs(embedded, looked_up))
    layer, theirs = view.layers[1], body.layers[1]
    gated = theirs.act_fn(theirs.per_layer_input_gate(embedded)) * given[:, :, 1]
    wanted = embedded + theirs.post_per_layer_input_norm(theirs.per_layer_projection(gated))
    assert torch.equal(layer.input_block.added(ops, embedded, given[:, :, 1]), wanted)
    update, flat = theirs.mlp(embedded), embedded.flatten(0, 1)
    _, weights, chosen = theirs.router(flat)
    found = theirs.experts(theirs.pre_feedforward_layernorm_2(flat), chosen, weights).view_as(embedded)
    wanted = theirs.post_feedforward_layernorm_1(update) + theirs.post_feedforward_layernorm_2(found)
    assert torch.equal(layer.beside.added(ops, embedded, update), wanted)
    for theirs in body.layers:
        theirs.layer_scalar = theirs.layer_scalar.float()  # as some loaders leave it
    none, caches = torch.zeros(1, dtype=torch.int32), view.new_caches(SlotPages.whole(1, 64, torch.device("cpu")))
    hidden, _ = prompt_forward(ops, read_causal_lm(model), tokens, caches, NewRows(none, none, None, None))
    assert hidden.dtype == body(tokens).last_hidden_state.dtype == torch.bfloat16


@pytest.mark.parametrize(("fields", "message"), [({"sliding_window": 4}, "differ in sliding_window"),
    ({"skip": ["mlp"]}, "differ in parts that are skipped")], ids=str)  # fmt: skip
def test_fields_that_differ_by_layer_are_refused(fields, message):
    with skipped_if_unknown():
        model = tiny_family("gemma4_text")
    model.config.per_layer_config = {1: {"head_dim": 32, **fields}}
    with pytest.raises(UnsupportedModelError, match=message):
        read_causal_lm(model)


@pytest.mark.versions
@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_a_model_that_sees_decodes_texts(kind):
    """Prompts with images run the original."""
    with skipped_if_unknown():
        model = tiny_seeing_family(kind).to(DEVICE)
    want = generated(model, **WITH_LOGITS, max_new_tokens=5)
    with optimize_with_triton(model, "suffix", TritonConfig(strict=True))[1] as originals:
        found = generated(model, **WITH_LOGITS, max_new_tokens=5)
        torch.testing.assert_close(found.logits[0], want.logits[0], atol=1e-4, rtol=1e-4)
        assert torch.equal(found.sequences, want.sequences)
        row = generate_row(originals)
        assert row.calls == 1 and not row.fallbacks, row
        image = {"pixel_values": torch.zeros(1, 3, 8, 8)}
        if kind.startswith("qwen"):
            image = {"image_grid_thw": torch.tensor([[1, 2, 2]])}
        with pytest.raises(ValueError, match=next(iter(image))):
            generated(model, **image)


@pytest.mark.versions
@pytest.mark.skipif(
    not hasattr(transformers.GenerationMixin, "_prepare_multimodal_encoder_kwargs_for_generation"),
    reason="this transformers encodes images within the forward",
)
def test_images_are_encoded_once():
    """By the original, and not before that, while the call is read."""
    with skipped_if_unknown():
        model = tiny_seeing_family("exaone4_5").to(DEVICE)
    model.config.image_token_id, vision, encoded = 23, model.config.vision_config, []
    prompt = torch.cat((ROWS[:1], torch.full((1, 4), 23, device=DEVICE), ROWS[:1, :5]), 1)
    pixels = torch.randn(16, 3 * vision.temporal_patch_size * vision.patch_size**2, device=DEVICE)
    image = dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]], device=DEVICE))
    call = dict(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5)
    model.model.visual.register_forward_hook(lambda *_: encoded.append(1))
    want, other = generated(model, **call, **image), generated(model, **call, **image | {"pixel_values": -pixels})
    assert len(encoded) == 2 and not torch.equal(want, other)
    with optimize_with_triton(model)[1] as originals:
        assert torch.equal(generated(model, **call, **image), want) and len(encoded) == 3
        row = generate_row(originals)
        assert (row.calls, row.fallbacks) == (0, 1) and "pixel_values" in str(originals)


def test_fields_that_no_forward_declares_change_nothing(models, monkeypatch):
    for case, field, value in (("smollm3", "mlp_scale", 2.0), ("llama yarn", "residual_multiplier", 0.5)):
        monkeypatch.setattr(models(case).config, field, value, raising=False)
        read_causal_lm(models(case))


@pytest.mark.parametrize(("field", "value", "message"), [
    ("is_causal", False, "is_causal must be True: False lets tokens see later ones"),
    ("attention_chunk_size", 4, "attention_chunk_size must be None: 4 drops keys"),
    ("kv_sharing_modes", ["reuse"] * 4, "kv_sharing_modes must be None"),
    ("layer_types", ["chunked_attention"] * 4, r"layer_types\[0\] must be one of .*, got 'chunked_attention'"),
])  # fmt: skip
def test_a_field_that_transformers_reads_of_every_family_is_refused(models, field, value, message, monkeypatch):
    model = models("llama yarn")
    with optimize_with_triton(model)[1]:
        generated(model, max_new_tokens=1)
        monkeypatch.setattr(model.config, field, value, raising=False)
        with pytest.raises(RuntimeError, match=f"{field} was changed"):
            generated(model)
    with pytest.raises(UnsupportedModelError, match=rf"model\.model\.config\.{message}"):
        optimize_with_triton(model)


@pytest.mark.parametrize("case", ["smollm3", "granite", "hyperclovax"])
def test_what_a_forward_reads_of_its_modules_is_read_there(case):
    """Not in the configuration, which may say something else after layers were removed."""
    with skipped_if_unknown():
        model = tiny_family(case).to(DEVICE)
    body, before = model.model, generated(model)
    body.layers = body.layers[1:]
    model.config.num_hidden_layers = len(body.layers)
    for index, layer in enumerate(body.layers):
        layer.self_attn.layer_idx = index
        if case != "smollm3":
            layer.residual_multiplier = 1
    if case != "smollm3":
        body.embedding_multiplier = 3
    want = generated(model)
    assert not torch.equal(want, before)
    if case != "smollm3":
        model.config.logits_scaling = 5.0
    logits = generated(model, **WITH_LOGITS, max_new_tokens=1).logits[0]
    torch.testing.assert_close(first_logits(model), logits, atol=1e-4, rtol=1e-4)
    with optimize_with_triton(model)[1]:
        assert torch.equal(generated(model), want)
        place, name = (body.layers[0].self_attn, "use_rope") if case == "smollm3" else (body, "embedding_multiplier")
        setattr(place, name, 0 if getattr(place, name) else 1)
        with pytest.raises(RuntimeError, match=f"{name} was changed"):
            generated(model)


def read_each_time(case, place, name, value):
    return pytest.param(case, place, name, value, id=f"{case}-{name}")


@pytest.mark.parametrize(("case", "place", "name", "value"), [
    read_each_time("granite_swa", "config", "layer_rope_theta", [0, 0, 1e3, 1e4]),
    read_each_time("muse_glimmer_text", "config", "layer_rope_theta", [1e4] * 4),
    read_each_time("muse_glimmer_text", "config", "output_multiplier", 2.0),
    read_each_time("muse_glimmer_text", "layers.0.self_attn", "qk_scale_factor", 2.0),
    read_each_time("afmoe", "config", "mup_enabled", False),
    read_each_time("stablelm", "layers.1", "use_parallel_residual", False),
    read_each_time("cohere2", "layers.1.self_attn", "sliding_window", 8),
    read_each_time("afmoe", "layers.0.self_attn", "is_local_attention", False),
    read_each_time("afmoe", "layers.1.mlp.router", "route_scale", 3.0),
    read_each_time("laguna", "layers.0.self_attn", "gate_per_head", False),
    read_each_time("laguna", "layers.1.mlp", "routed_scaling_factor", 3.0),
    read_each_time("hy_v3", "layers.1.mlp.gate", "router_scaling_factor", 3.0),
])  # fmt: skip
def test_what_a_forward_reads_each_time_may_not_change(models, case, place, name, value, monkeypatch):
    """In a configuration, an attention, a router and a mixture. Undone, the model decodes again."""
    model = models(case)
    body = model.get_submodule(body_path(model))
    owner = body.config if place == "config" else body.get_submodule(place)
    with optimize_with_triton(model)[1]:
        want = generated(model, max_new_tokens=1)
        assert getattr(owner, name) != value
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            path = "config" if place == "config" else place.replace(".", r"\.")
            with pytest.raises(RuntimeError, match=rf"{path}\.{name} was changed from .* to "):
                generated(model, max_new_tokens=1)
        assert torch.equal(generated(model, max_new_tokens=1), want)


def test_gates_may_be_by_element_where_others_are_by_head():
    """Laguna's, by its field `gating`."""
    with skipped_if_unknown():
        model = tiny_family("laguna", gating="per-element").to(DEVICE)
    assert len(model.model.layers[0].self_attn.g_proj.weight) == 4 * 16
    want = generated(model)
    with optimize_with_triton(model)[1]:
        assert torch.equal(generated(model), want)


def test_a_correction_of_softmax_scores_is_heard():
    """ERNIE's."""
    with skipped_if_unknown():
        model = tiny_family("ernie4_5_moe").to(DEVICE)
    corrections = [tensor for name, tensor in model.named_parameters() if "moe_statics" in name]
    with torch.no_grad():
        for tensor in corrections:
            tensor.zero_()
    before = generated(model)
    with optimize_with_triton(model)[1] as originals:
        assert torch.equal(generated(model), before) and "mixtures are called" not in str(originals)
        with torch.no_grad():
            for tensor in corrections:
                tensor.copy_(torch.linspace(0, 0.4, tensor.numel()).view_as(tensor))
        got = generated(model)
    assert corrections and not torch.equal(got, before) and torch.equal(got, generated(model))


@pytest.mark.parametrize("case", ["gemma", "gemma3_text"])
def test_the_scale_of_embeddings_may_not_change_in_place(case):
    with skipped_if_unknown():
        model = tiny_family(case).to(DEVICE)
    with optimize_with_triton(model)[1]:
        generated(model)
        with torch.no_grad():
            model.model.embed_tokens.embed_scale.mul_(0.3)
        with pytest.raises(RuntimeError, match=r"embed_tokens\.embed_scale was changed in place, but the engine reads"):
            generated(model)


def test_a_field_that_is_not_accounted_for_is_refused_by_name(models, monkeypatch):
    """Such as one of a newer transformers: a forward may read it."""
    model, kind = models("granite"), "granite"
    row = replace(FAMILIES[kind], update_scale=None)
    monkeypatch.setitem(FAMILIES, kind, row)
    with pytest.raises(UnsupportedModelError, match=r"model\.config\.residual_multiplier is 0\.22, which may change"):
        read_causal_lm(model)


def test_every_field_of_every_family_is_classified():
    """Each field that a class of configurations declares is named by the family's row, is neutral, or is every
    configuration's: a new one must be read, and then listed. Phi-3's and StableLM's
    dropouts, OLMoE's clip_qkv, and norms of queries and keys of Cohere and StableLM are refused."""
    for kind, family in FAMILIES.items():
        try:
            config = transformers.AutoConfig.for_model(kind)
        except (ValueError, KeyError):
            continue
        known = {*families.NEUTRAL_FIELDS, *families.fields_of_all(), *family.config_fields}
        assert (
            not {*families.declared_fields(type(config))}
            - known
            - {"resid_pdrop", "embd_pdrop", "clip_qkv", "use_qk_norm", "qk_layernorm", "hidden_dropout"}
        ), kind


def test_latent_attention_reads_its_weights_where_they_lie():
    """And says what it does not read."""
    model = tiny_family("glm4_moe_lite")
    for layer, read in zip(model.model.layers, read_causal_lm(model).layers, strict=True):
        stored, mixer = layer.self_attn.kv_b_proj.weight, read.mixer
        assert isinstance(mixer, LatentAttention)
        keys, values = mixer.matrices
        assert keys.shape == (4, 16, 32) and values.shape == (4, 20, 32) and keys.data_ptr() == stored.data_ptr()
        assert values.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    caches = read_causal_lm(model).new_caches(SlotPages.whole(1, 64, torch.device(DEVICE)))
    assert [cache.data.shape[::5] for cache in caches.caches] == [(4, 32 + 8)]  # layers, and a token's numbers in each
    model.model.layers[2].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[2].self_attn.kv_b_proj)
    with pytest.raises(UnsupportedModelError, match=r"layers.2.self_attn.kv_b_proj must be a matrix without a bias"):
        read_causal_lm(model)


def expand_kv(self, kv_nope, k_rot):
    return kv_nope, k_rot


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.config, "rope_interleave", False), "config.rope_interleave"),
        (lambda model: setattr(model.model.layers[1].self_attn, "expand_kv", expand_kv), "expand_kv was replaced"),
        (lambda model: setattr(model.model.layers[2].self_attn, "scaling", 0.5), "scaling was changed"),
    ],
    ids=["rotation", "method", "scale"],
)
def test_a_change_of_latent_attention_is_noticed(change, message):
    model = tiny_family("youtu").to(DEVICE)
    with optimize_with_triton(model)[1]:
        generated(model, max_new_tokens=1)
        change(model)
        with pytest.raises(RuntimeError, match=message):
            generated(model, max_new_tokens=1)
    if message == "expand_kv was replaced":
        with pytest.raises(UnsupportedModelError, match="layers.1.self_attn.expand_kv was replaced on this instance"):
            optimize_with_triton(model)


def test_each_layer_says_how_its_latent_attention_rotates():
    model = tiny_family("youtu").to(DEVICE)
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config.rope_interleave = False
    want = generated(model)
    with optimize_with_triton(model)[1]:
        assert torch.equal(generated(model), want)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_heads", 2, "kv_b_proj must have 72 outputs, by 2 heads"),
        ("kv_b_proj", torch.nn.Linear(32, 130, bias=False), "kv_b_proj must have 144 outputs, .* got 130"),
        ("kv_lora_rank", 33, "kv_lora_rank must be even and at most 512, got 33"),
    ],
)
def test_latent_attention_of_other_sizes_is_refused(name, value, message):
    model = tiny_family("youtu")
    setattr(model.model.layers[1].self_attn, name, value)
    with pytest.raises(UnsupportedModelError, match=f"layers.1.self_attn.{message}"):
        read_causal_lm(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "is_causal must be True"),
        ({"num_kv_shared_layers": 5}, "layers.0.self_attn reads the keys and values of an earlier layer"),
        ({"vocab_size_per_layer_input": 23}, "embed_tokens_per_layer must have a row for each of 24 tokens"),
    ],
    ids=str,
)
def test_what_is_refused_of_gemma_4(fields, message):
    with skipped_if_unknown():
        model = tiny_family("gemma4_text", **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        read_causal_lm(model)


@pytest.mark.parametrize(("case", "paths"), [
    ("llama yarn", ("lm_head.weight", "model.norm.weight", "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.self_attn.o_proj.weight")),
    ("phi3", ("model.layers.1.self_attn.qkv_proj.weight",)),
    ("seed_oss", ("model.layers.1.self_attn.k_proj.bias",)),
    ("starcoder2", ("model.norm.bias", "model.layers.1.input_layernorm.bias", "model.layers.1.mlp.c_fc.bias")),
    ("gemma4_text", ("model.embed_tokens_per_layer.weight", "model.per_layer_projection_norm.weight",
        "model.layers.1.per_layer_input_gate.weight")),
    ("qwen3_next", tuple(f"model.layers.1.linear_attn.{name}.weight" for name in ("out_proj", "conv1d", "norm"))),
])  # fmt: skip
def test_a_weight_of_another_dtype_is_refused_by_its_path(case, paths):
    with skipped_if_unknown():
        model = tiny_hybrid(case) if case in HYBRID_CLASSES else tiny_family(case)
    for path in paths:
        owner, _, name = path.rpartition(".")
        own = getattr(module := model.get_submodule(owner), name)
        setattr(module, name, torch.nn.Parameter(own.detach().half(), requires_grad=False))
        message = rf"^model\.{re.escape(path)} must be torch\.float32, .* got torch\.float16"
        with pytest.raises(UnsupportedModelError, match=message):
            read_causal_lm(model)
        setattr(module, name, own)


def test_routers_and_experts_beside_an_mlp_are_called_as_they_are(models):
    layer = models("gemma4_text").model.layers[0]
    called = [path for path, _, as_it_is in modules_read(layer, "layer") if as_it_is]
    assert called == ["layer.router", "layer.experts"]
    watch = ModelWatch({"layer": layer})
    assert watch.change() is None and not watch.called_projections()
    handle = layer.experts.register_forward_hook(lambda *_: None)
    assert watch.change() == "layer.experts has got a forward hook, which would not run"
    handle.remove()
    (mixture,) = read_causal_lm(models("gemma4_text")).layers[0].mixtures
    assert (mixture.chosen, mixture.count) == (3, 8) and mixture.bytes_unread(1) > mixture.bytes_unread(8)


SWITCH, PROMPT = 64, 60
"""The longest text that `longrope_model` rotates by its short factors, and the width of prompts near it."""
NEAR = torch.cat([2 + random_prompt(PROMPT, vocab=22, seed=seed) for seed in range(3)]).to(DEVICE)
SHORTER = (torch.arange(PROMPT, device=DEVICE) >= torch.tensor([[9], [3], [40]], device=DEVICE)).long()
NEAR_CALLS = {
    "alone": dict(input_ids=NEAR[:1], attention_mask=torch.ones_like(NEAR[:1])),
    "padded": dict(input_ids=NEAR * SHORTER, attention_mask=SHORTER),  # the batch is wider than its longest row
    "sampled": dict(input_ids=NEAR, attention_mask=torch.ones_like(NEAR), do_sample=True, top_k=1),
}


@pytest.fixture
def longrope_model():
    return tiny_family("phi3", sliding_window=None, original_max_position_embeddings=SWITCH, rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": SWITCH,
        "short_factor": [1.0, 1.2, 1.5, 2.0, 2.2, 3.0], "long_factor": [9.0, 7.0, 5.0, 0.2, 20.0, 40.0],
    }).to(DEVICE)  # fmt: skip


@pytest.mark.versions
def test_longrope_decodes_up_to_its_switch(longrope_model):
    """What may become longer runs the original, which leaves the long factors' frequencies in its module."""
    model, rotary = longrope_model, longrope_model.model.rotary_emb
    calls = [(call, new) for call in NEAR_CALLS.values() for new in (SWITCH - PROMPT, 9)]
    want = [generated(model, **call, max_new_tokens=new) for call, new in calls]
    assert len(set(want[0][0, PROMPT:].tolist())) > 1
    for draft, tree in ((None, {}), (model, dict(topk=2, num_steps=3)), ("suffix", {})):
        with optimize_with_triton(model, draft, TritonConfig(**tree))[1] as originals:
            for done, ((call, new), expected) in enumerate(zip(calls, want, strict=True), start=1):
                assert torch.equal(generated(model, **call, max_new_tokens=new), expected)
                row = generate_row(originals)
                assert (row.calls, row.fallbacks) == ((done + 1) // 2, done // 2)
                model(torch.cat((NEAR, NEAR), 1))
                assert not torch.allclose(rotary.inv_freq, rotary.original_inv_freq)
            assert row.reason == "a text that may have more than 64 tokens, where longrope rotates in another way"


@pytest.mark.versions
def test_longrope_samples_from_the_originals_logits(longrope_model):
    model, few = longrope_model, NEAR[:, :20]
    embedded = model.get_input_embeddings()(NEAR)
    with optimize_with_triton(model)[1] as originals:
        options = dict(attention_mask=None, do_sample=True, temperature=1.5, top_k=0)
        got = generated(model, input_ids=few, **options, max_new_tokens=SWITCH - 20, return_dict_in_generate=True,
            output_logits=True)  # fmt: skip
        with pytest.raises(Fallback, match="more than 64 tokens"):  # the same door, when prompts are read ahead
            read_prompts(read_causal_lm(model), NEAR, None, SWITCH - PROMPT + 1)
        for new in (SWITCH - PROMPT, SWITCH - PROMPT + 1):
            model.generate(inputs_embeds=embedded, max_new_tokens=new, do_sample=False)
        row = generate_row(originals)
        assert (row.calls, row.fallbacks) == (2, 1)
    want = model(got.sequences[:, :-1]).logits[:, 19:]
    torch.testing.assert_close(torch.stack(got.logits, 1), want, rtol=1e-4, atol=1e-3)


def test_sequences_of_longrope_end_at_its_switch(longrope_model):
    """Also while trees reach past it."""
    model, rows = longrope_model, [NEAR[0], NEAR[1, 13:]]
    want = [
        generated(model, input_ids=row[None], attention_mask=None, max_new_tokens=SWITCH - len(row)) for row in rows
    ]
    for draft in (model, tiny_head(model, True)):
        inference = EAGLEInference(draft, model, EAGLEConfig(topk=3, num_steps=4, num_draft_tokens=9, fallback=False))
        found, stats = inference.generate([*rows, torch.cat((NEAR[2], NEAR[2, :5]))], 40)
        assert [row.tolist() for row in found[:2]] == [row[0].tolist() for row in want]
        assert [one.finished for one in stats.completions] == ["length", "length", "error"]
        assert "65 tokens exceed the target's 64 positions" in stats.completions[2].error
    chain = EAGLEInference(model, model, EAGLEConfig(topk=1, num_steps=3, num_draft_tokens=4))
    assert chain.generate(NEAR[:1, :20], 40)[1].acceptance_rate == 1.0
    for engine in (True, False):
        text = autoregressive_generate(NEAR[0].tolist(), model, 40, eos_tokens_id=[], use_cache=True, engine=engine)
        assert text == want[0][0, PROMPT:].tolist()


def test_frequencies_of_longrope_that_are_replaced_are_noticed(longrope_model):
    rotary = longrope_model.model.rotary_emb
    with optimize_with_triton(longrope_model)[1]:
        rotary.original_inv_freq = rotary.original_inv_freq * 2
        with pytest.raises(RuntimeError, match="rotary_emb.original_inv_freq was replaced"):
            generated(longrope_model)


def test_longrope_that_cannot_be_right_is_refused(longrope_model, models, monkeypatch):
    with pytest.raises(ValueError, match="longrope .* so this target cannot be in an EaModel: use"):
        EaModel(longrope_model, tiny_head(longrope_model, True))
    other = models("phi3")
    monkeypatch.setattr(other.model.rotary_emb, "rope_type", "longrope")  # its configuration does not say so
    with pytest.raises(UnsupportedModelError, match="got rope_type 'longrope'"):
        optimize_with_triton(other)


def test_a_mixture_reads_the_experts_that_its_rows_choose(models):
    """8 experts of which each row takes 3: 3 for a row, all but (5 / 8) ** n of them for n rows."""
    view = read_causal_lm(models("qwen3_moe"))
    mixture = view.layers[0].mlp
    assert (mixture.chosen, mixture.count) == (3, 8) and not hasattr(view.layers[1].mlp, "chosen")
    experts = sum(weight.nbytes for weight in mixture.module.experts.parameters())
    mixtures = sum(hasattr(layer.mlp, "chosen") for layer in view.layers)
    for rows in (2, 8):
        more = view.bytes_read(rows) - view.bytes_read(1)
        assert more == pytest.approx(mixtures * experts * (5 / 8 - (5 / 8) ** rows))
    assert view.bytes_read(1) == view.weight_bytes
    assert read_causal_lm(models("phi3")).bytes_read(60) == read_causal_lm(models("phi3")).weight_bytes


def test_trees_over_a_mixture_are_expected_to_cost_their_experts():
    def bytes_read(rows):
        return 1.0 + 8 * (1 - 0.9375**rows)

    dense, sparse = StepCosts(1, 0.05), StepCosts(1, 0.05, bytes_read=bytes_read)
    for nodes, more in ((4, 1.2), (60, 3.0)):
        tree = TreeSpec.dynamic(nodes, 4, 4)
        assert sparse.ms(tree) / sparse.ms(PLAIN) > more * dense.ms(tree) / dense.ms(PLAIN)


def test_a_chain_is_the_default_over_a_mixture(models):
    """By the policy's estimate of its cost. A tree that is asked for stays the only one, and drafts from text stay."""
    dense = models("phi3")
    mixture = tiny_family("qwen3_moe", num_experts=48, num_experts_per_tok=2).to(DEVICE)
    tree = EAGLEConfig().tree()
    small = tiny_family("llama yarn", num_hidden_layers=1, intermediate_size=32).to(DEVICE)
    found = EAGLEInference(small, mixture).policy(1)
    assert found.trees == (TreeSpec.chain(3), tree) and found.spec == TreeSpec.chain(3)
    assert EAGLEInference(small, dense).policy(1).trees == (tree,)
    assert EAGLEInference(small, mixture, EAGLEConfig(num_draft_tokens=7)).policy(1).trees[0].nodes == 7
    assert EAGLEInference("suffix", mixture).policy(1).trees == EAGLEInference("suffix", dense).policy(1).trees


@pytest.mark.parametrize("options, nodes", [({}, 4), (dict(num_draft_tokens=8), 8), (dict(suffix_drafts=5), 8)])
def test_a_chain_is_the_default_of_generate_over_a_mixture(models, options, nodes, monkeypatch):
    seen, model = [], models("mixtral")
    monkeypatch.setattr(integration, "_note_on_tree", lambda view, tree: seen.append(tree.nodes) or {})
    with optimize_with_triton(model, model, TritonConfig(**options))[1]:
        assert seen == [nodes]


def test_a_tree_that_cannot_pay_is_named_in_the_report(models):
    """Here 23 leaves read 2.3 times the weights of a plain step for 2 tokens at most, or 1.7 times, which may pay."""
    for case, named in (("gpt_oss", True), ("qwen3_moe", False)):
        model, config = models(case), TritonConfig(topk=23, num_steps=1, num_draft_tokens=24)
        with optimize_with_triton(model, model, config)[1] as originals:
            assert ("so 24 nodes read 2.3 times the weights" in str(originals)) == named, str(originals)
            assert ("for at most 2 tokens; draft fewer" in str(originals)) == named


@pytest.mark.parametrize(("case", "asked"), [("gpt_oss", True), ("olmo2", False)])
def test_the_report_of_an_ea_model_says_so_of_its_tree(models, case, asked, monkeypatch):
    monkeypatch.setattr(integration, "_note_on_tree", lambda view, tree: {"tree": f"{tree.nodes} nodes"})
    model = EaModel(models(case), tiny_head(models(case), False)).eval()
    with optimize_eagle_with_triton(model)[1] as originals:
        assert ("12 nodes" in str(originals)) == asked


def described(kind: str) -> str:
    """A family's row of the table in docs/support.md."""
    family = FAMILIES[kind]
    before, after = (any(family.norms[place::2]) for place in (0, 1))
    more = {
        "mixture of experts": "num_experts_per_tok" in family.shown_by_modules and not family.experts_beside,
        "mixture of experts beside the MLP": family.experts_beside,
        "latent attention": "kv_lora_rank" in family.shown_by_modules,
        "gated delta nets": "linear_key_head_dim" in family.shown_by_modules,
        "Mamba-2": "mamba_d_state" in family.shown_by_modules,
        "short convolutions": "conv_L_cache" in family.shown_by_modules,
        "LayerNorms": family.layer_norm,
        "MLPs without a gate": family.mlp_projections[0] is None,
        "attention and MLP side by side": family.parallel or family.parallel_switch,
        "one projection for q, k and v": family.qkv,
        "one projection for gate and up": family.gate_up,
        "layers without rotation": (
            family.rotary_switch or family.rotary_in_windows or family.rotary_by_layer or not family.rotary
        ),
        "rotates neighbours": family.rotary_pairs or family.rotary_interleave,
        "rotates in fp32": family.rotary_in_fp32 or family.rotary_terms_in_fp32,
        "heads normed after the rotation": family.norm_last,
        "queries grow with positions": family.query_temperature,
        "scaled queries": family.query_scale,
        "gates after attention": family.gate,
        "capped scores": family.score_cap,
        "capped logits": family.logit_cap,
        "scaled embeddings": family.embedding_scale or family.scaled_embedding or family.root_scaled_embedding,
        "normed embeddings": family.normed_embedding,
        "scaled updates": family.update_scale,
        "layers that read the keys of others": family.shared_caches,
        "embeddings for each layer": family.layer_inputs,
        "scaled layers": family.layer_scale,
        "scaled logits": family.logit_divisor or family.logit_factor,
    }
    norms = " and ".join(where for where, some in (("before", before), ("after", after)) if some)
    window = {"none": "-", "by_layer": "by layer", "all": "all layers"}[family.window]
    further = ", ".join(name for name, some in more.items() if some) or "-"
    heads, ranks = ("no" if family.recurrent else "yes"), ("no" if kind in NOT_OVER_RANKS else "yes")
    return f"| `{kind}` | {heads} | {ranks} | {norms} blocks | {window} | {further} |"


def test_the_table_in_the_documentation_is_that_of_the_rows():
    text = (Path(__file__).parents[1] / "docs" / "support.md").read_text(encoding="utf-8")
    shown = [line for line in text.splitlines() if line.startswith("| `") and "blocks |" in line]
    assert shown == [described(kind) for kind in FAMILIES]


WITH_LAYER_NORMS = [kind for kind, family in FAMILIES.items() if family.layer_norm]


@pytest.mark.parametrize("case", WITH_LAYER_NORMS)
@torch.no_grad()
def test_norms_and_blocks_have_the_bits_of_the_originals_in_bf16(case):
    """Nearly all of those of LayerNorms, which torch adds up in another order. Phi's own activation, gelu_new, rounds
    each of its operations."""
    with skipped_if_unknown():
        model = tiny_family(case, **dict(hidden_act="gelu_pytorch_tanh") if case == "phi" else {}).to(torch.bfloat16)
    view, ops, theirs = read_causal_lm(model), make_operations(kernels=False), model.model.layers[1]
    x, layer = torch.randn(3, 21, 64).bfloat16() + 1, view.layers[1]
    norms = [(layer.input_norm, theirs.input_layernorm), (view.norm, getattr(model.model, FAMILIES[case].last_norm))]
    norms += [(layer.post_norm, theirs.post_attention_layernorm)] if layer.post_norm else []
    for norm, module in norms:
        assert (apply_norm(ops, norm, x) == module(x)).float().mean() > 0.995
        assert norm.subtract_mean and norm.zero_centred == (case == "nemotron")
    assert torch.equal(feed_forward(ops, layer.mlp, x), theirs.mlp(x))
    states = model.model(ROWS[:1].cpu(), output_hidden_states=True)
    none, caches = torch.zeros(1, dtype=torch.int32), view.new_caches(SlotPages.whole(1, 64, torch.device("cpu")))
    found, _ = prompt_forward(ops, view, ROWS[:1].cpu(), caches, NewRows(none, none, None, None))
    torch.testing.assert_close(found, states.last_hidden_state, atol=0.15, rtol=0.05)


@pytest.mark.parametrize("case", WITH_LAYER_NORMS)
def test_families_with_layer_norms_decode_with_suffixes_and_by_other_models(models, case):
    """Of a batch. A draft model of the family gets all its tokens accepted."""
    model, options = models(case), dict(max_new_tokens=16)
    want = generated(model, **options)
    with optimize_with_triton(model, "suffix", TritonConfig(strict=True))[1]:
        assert torch.equal(generated(model, **options), want)
        assert torch.equal(generated(model, **options), want)  # with the former outputs
    engine = EAGLEInference(model, model, EAGLEConfig(topk=1, num_steps=3, num_draft_tokens=4))
    assert engine.generate(ROWS[:1].tolist(), max_new_tokens=16)[1].tau == 4.0


CALLED = ("quick_gelu", "relu", "leaky_relu")  # activations that no kernel computes


@pytest.mark.parametrize(
    ("case", "activation"),
    [
        *(("starcoder2", activation) for activation in ("silu", "gelu", "relu2", "gelu_pytorch_tanh", *CALLED)),
        *(("llama yarn", activation) for activation in ("gelu", "gelu_pytorch_tanh", *CALLED)),
    ],
)
def test_activations_with_and_without_a_gate(case, activation):
    with skipped_if_unknown():
        model = tiny_family(case, hidden_act=activation).to(DEVICE)
    want = generated(model)
    logits = generated(model, **WITH_LOGITS, max_new_tokens=1).logits[0]
    torch.testing.assert_close(first_logits(model), logits, atol=1e-4, rtol=1e-4)
    with optimize_with_triton(model, model, TritonConfig(topk=2, num_steps=2))[1] as originals:
        assert torch.equal(generated(model), want)
    called = activation in CALLED or (activation == "gelu" and case != "starcoder2")
    assert ("activations are called as modules" in str(originals)) == called


def test_an_activation_that_is_called_may_change_in_place_only():
    with skipped_if_unknown():
        model = tiny_family("apertus").to(DEVICE)
    activation = model.model.layers[0].mlp.act_fn
    before = generated(model)
    with optimize_with_triton(model)[1]:
        assert torch.equal(generated(model), before)
        with torch.no_grad():
            activation.alpha_p.add_(9)
        got = generated(model)
        model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
        with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.act_fn was (replaced|changed)"):
            generated(model)
    model.model.layers[0].mlp.act_fn = activation
    assert torch.equal(got, generated(model)) and not torch.equal(got, before)


def test_a_mixture_without_experts_is_refused():
    """As those of Granite are under transformers 4."""
    with skipped_if_unknown():
        model = tiny_family("granitemoeshared").to(DEVICE)
    block = model.model.layers[1].block_sparse_moe
    if hasattr(block, "experts"):
        del block.experts
    with pytest.raises(UnsupportedModelError, match=r"block_sparse_moe must have experts and a router, got Granite"):
        optimize_with_triton(model)


@pytest.mark.parametrize(
    "activation",
    [
        *(torch.nn.Softmax(dim) for dim in range(3)),
        torch.nn.GLU(),
        torch.nn.BatchNorm1d(96),
        torch.nn.Dropout(0.5),
        torch.relu,
    ],
)
def test_other_activations_are_refused(activation):
    model = tiny_family("llama yarn").to(DEVICE)
    del model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = activation
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0\.mlp\.act_fn must be SiLU or GELU with tanh or a module that computes"
    ):
        optimize_with_triton(model)


def test_the_scale_of_coheres_logits_is_the_models_own(models):
    """Not its configuration's, which only its constructor reads."""
    models("cohere")
    model = tiny_family("cohere").to(DEVICE)
    model.logit_scale = 0.2
    logits = generated(model, **WITH_LOGITS, max_new_tokens=1).logits[0]
    torch.testing.assert_close(first_logits(model), logits, atol=1e-4, rtol=1e-4)
    wrapped = EaModel(model, tiny_head(model, False))
    torch.testing.assert_close(wrapped(ROWS[:1], output_orig=True)[1], model(ROWS[:1]).logits)
    with optimize_with_triton(model)[1]:
        generated(model, max_new_tokens=1)
        model.logit_scale = 2
        with pytest.raises(RuntimeError, match=r"model\.logit_scale was changed from 0\.2 to 2"):
            generated(model, max_new_tokens=1)


def test_what_is_refused_of_families_with_layer_norms():
    with skipped_if_unknown():
        model = tiny_family("cohere", use_qk_norm=True)
    with pytest.raises(UnsupportedModelError, match=r"config\.use_qk_norm is True"):
        read_causal_lm(model)
    for norm, message in (
        (torch.nn.RMSNorm(64, eps=1e-5), "does not compute a LayerNorm"),
        (torch.nn.LayerNorm(64, elementwise_affine=False), r"norm\.weight must be a plain tensor"),
    ):
        model = tiny_family("starcoder2")
        model.model.layers[1].input_layernorm = norm
        with pytest.raises(UnsupportedModelError, match=message):
            read_causal_lm(model)
    model.model.layers[1].input_layernorm = None
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.input_layernorm must be Module, got NoneType"):
        read_causal_lm(model)
    model = tiny_family("starcoder2", residual_dropout=0.1).to(DEVICE)
    with optimize_with_triton(model)[1]:
        generated(model, max_new_tokens=1)
        model.train()
        with pytest.raises(RuntimeError, match="in training mode with residual_dropout"):
            generated(model, max_new_tokens=1)


@pytest.mark.parametrize("case", WITH_LAYER_NORMS)
def test_fp8_weights_of_families_with_layer_norms_are_read(case):
    """Their products read pairs, where attention and MLP read the same rows, too."""
    pytest.importorskip("transformers.integrations.finegrained_fp8")
    from tests.test_float8_experts import in_float8

    with skipped_if_unknown():
        model, plain = in_float8(tiny_family(case, hidden_size=128, intermediate_size=128, head_dim=32))
    want = generated(plain.to(DEVICE))
    with optimize_with_triton(model.to(DEVICE))[1] as originals:
        assert torch.equal(generated(model), want) and "FP8 projections" in str(originals)
    layer = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)).engine.view.layers[0]
    assert layer.input_format == layer.mlp.input_format == RowFormat.FLOAT8_PAIR
    other = replace(layer, mlp=read_causal_lm(plain).layers[0].mlp)
    assert other.input_format == (None if layer.parallel else RowFormat.FLOAT8_PAIR)


def test_a_correction_that_is_a_parameter_may_change_in_place():
    """Laguna's. ERNIE's, which must be zero, may not."""
    with skipped_if_unknown():
        model = tiny_family("laguna").to(DEVICE)
    with optimize_with_triton(model)[1]:
        generated(model)
        with torch.no_grad():
            for layer in model.model.layers[1:]:
                layer.mlp.gate.e_score_correction_bias.mul_(-3)
        found = generated(model)
    assert torch.equal(found, generated(model))


def test_logits_are_scaled_by_what_the_forward_reads():
    """Granite's mixtures have an attribute of the same name, which their forward does not read."""
    with skipped_if_unknown():
        model = tiny_family("granitemoe").to(DEVICE)
    model.config.logits_scaling, model.logits_scaling = 2.0, 5.0
    want = generated(model, **WITH_LOGITS, max_new_tokens=1).logits[0]
    torch.testing.assert_close(first_logits(model), want, atol=1e-4, rtol=1e-4)


def test_dropout_modules_in_training_mode_are_refused():
    with skipped_if_unknown():
        model = tiny_family("stablelm").to(DEVICE)
    for layer in model.model.layers:
        layer.dropout.p = 0.5
    with optimize_with_triton(model)[1]:
        model.train()
        with pytest.raises(RuntimeError, match=r"layers\.0\.dropout is in training mode with p"):
            generated(model)
