"""FP8 weights: targets as they are published, and what is refused of them."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

from eagle_triton import (
    EAGLEConfig,
    EAGLEInference,
    UnsupportedModelError,
    optimize_eagle_with_triton,
    optimize_with_triton,
)
from eagle_triton.benchmarks.models import encoded
from eagle_triton.benchmarks.original_and_patched import decode, top2_margin
from eagle_triton.benchmarks.parity import MARGIN_BOUND
from eagle_triton.benchmarks.quantised import round_target
from eagle_triton.demo import demo_prompts
from eagle_triton.engine.drafts import quantised as quantised_drafts
from eagle_triton.engine.drafts.hybrid import scoring_draft_of
from eagle_triton.engine.drafts.quantised import quantised_draft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.modules import Projection, with_projections
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families import own_ea_model as native
from eagle_triton.families.reading.quantised_modules import SCALES
from eagle_triton.models import loading
from eagle_triton.models.ea_model import EaModel
from eagle_triton.reference import linear
from eagle_triton.runtime import float8_weight
from eagle_triton.runtime.float8_weight import Float8Weight, quantised, rows_of
from eagle_triton.serve import main as serve
from eagle_triton.speculative_decoding import autoregressive_generate, release_engine
from tests.failing import check_refused
from tests.float8_models import (
    LAYOUTS,
    FP8Linear,
    as_weight,
    check_same_tokens,
    in_blocks,
    in_rows,
    note_of,
    plain_tokens,
    replacing,
    stored,
    tiny_target,
    with_bits,
    with_fp8,
)
from tests.tiny import random_prompt, tiny_model
from tests.tiny_families import tiny_family
from tests.tiny_hybrids import KINDS, tiny_hybrid

SMALL = dict(total_token=16, depth=3, top_k=4)  # the tree of a head


@pytest.mark.parametrize(
    ("family", "layout"), [*(("llama", name) for name in LAYOUTS), ("qwen2", "rows"), ("qwen3", "blocks")]
)
def test_greedy_tokens_are_those_of_the_same_weights_in_fp32(layout: str, family: str) -> None:
    target = tiny_target(family)
    model, dequantised = with_fp8(target, LAYOUTS[layout])
    prompt = random_prompt(9)
    with torch.no_grad():  # what rounding the weights has changed is seen
        assert (target(prompt).logits - dequantised(prompt).logits).abs().max() > 0.02
    before = {name: tensor.clone() for name, tensor in stored(model).items()}
    originals = check_same_tokens(model, dequantised, prompt)  # the modules raise if they are called
    assert note_of(originals) == (
        "exact: 21 FP8 projections are read by their weights, and their inputs are not rounded"
    )
    after = stored(model)
    assert after.keys() == before.keys()
    for name, old in before.items():
        assert torch.equal(after[name].reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8)), name


def test_an_ea_model_with_some_fp8_projections_drafts_and_gives_the_same() -> None:
    whole = tiny_model(layers=6)
    base, dequantised = with_fp8(whole.base_model, in_blocks, ("q_proj", "up_proj", "down_proj"))
    model = EaModel(base, whole.ea_layer).eval()
    prompt = random_prompt(12)
    expected = EaModel(dequantised, copy.deepcopy(whole.ea_layer)).eval().eagenerate(prompt, max_new_tokens=24)
    optimize_eagle_with_triton(model)
    assert torch.equal(model.eagenerate(prompt, max_new_tokens=24), expected)


def test_eagle_inference_reads_fp8_targets_and_says_so() -> None:
    base, dequantised = with_fp8(tiny_target(), in_rows)
    draft = tiny_target(seed=1)
    engine = EAGLEInference(draft, base, EAGLEConfig(num_draft_tokens=6))
    prompt = random_prompt(10)
    ids, _ = engine.generate(prompt, max_new_tokens=20, stop_token_ids=())
    assert torch.equal(ids, plain_tokens(dequantised, prompt, 20))
    assert "activations: exact: 42 FP8 projections" not in engine.report()  # the draft's are plain
    assert "activations: exact: 21 FP8 projections are read by their weights" in engine.report()


def test_nothing_is_copied() -> None:
    model, _ = with_fp8(tiny_target())
    engine = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)).engine
    for name in ("gate", "up", "down"):
        projection = getattr(engine.view.layers[1].mlp, name)
        module = model.get_submodule(f"model.layers.1.mlp.{name}_proj")
        assert projection.weight.values.data_ptr() == module.weight.data_ptr()
        assert projection.weight.scale.data_ptr() == module.weight_scale_inv.data_ptr()
    plain = sum(p.nbytes for name, p in model.named_parameters() if "embed" not in name)
    assert engine.view.weight_bytes == plain


# --- what happens to such a module afterwards ---


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_a_replaced_weight_or_scale_is_found(part: str) -> None:
    model, _ = with_fp8(tiny_target())
    optimize_with_triton(model)
    module = model.model.layers[1].mlp.up_proj
    setattr(module, part, nn.Parameter(getattr(module, part).detach().clone(), requires_grad=False))
    with pytest.raises(RuntimeError, match=rf"model\.model\.layers\.1\.mlp\.up_proj\.{part} was replaced"):
        model.generate(random_prompt(5), max_new_tokens=3)


def test_a_replaced_module_and_a_hook_are_found() -> None:
    model, _ = with_fp8(tiny_target())
    optimize_with_triton(model)
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.q_proj has got a forward hook"):
        model.generate(random_prompt(5), max_new_tokens=3)
    handle.remove()
    model.model.layers[2].mlp.down_proj = copy.deepcopy(model.model.layers[2].mlp.down_proj)
    with pytest.raises(RuntimeError, match=r"model\.model\.layers\.2\.mlp\.down_proj was replaced"):
        model.generate(random_prompt(5), max_new_tokens=3)


@pytest.mark.parametrize(
    ("layout", "scale"), [(in_blocks, "weight_scale_inv"), (as_weight, "weight.scale")], ids=["module", "tensor"]
)
def test_a_scale_that_changes_in_place_is_seen(layout: Callable, scale: str) -> None:
    model, _ = with_fp8(tiny_target(), layout)
    engine, prompt = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)), random_prompt(70)
    options = dict(max_new_tokens=4, stop_token_ids=(), return_stats=False)
    first = engine.generate(prompt, **options)
    with torch.no_grad():
        attrgetter(scale)(model.model.layers[0].mlp.down_proj).mul_(-3)
    second = engine.generate(prompt, **options)
    anew = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)).generate(prompt, **options)
    assert torch.equal(second, anew) and not torch.equal(first, second)


def _bf16_scales(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[nn.Module, Float8Weight]:
    _, found = in_blocks(weight, bias)
    rounded = Float8Weight(found.values, found.scale.bfloat16())
    return FP8Linear(rounded.values, rounded.scale, bias), rounded


def _transformers_linear(kind: str) -> Callable:
    """A layout of transformers' own modules. Skips where its version has none."""
    home = {
        "FP8Linear": "finegrained_fp8",
        "CompressedTensorsFP8Linear": "compressed_tensors",
        "FbgemmFp8Linear": "fbgemm_fp8",
    }[kind]
    made = getattr(pytest.importorskip(f"transformers.integrations.{home}"), kind, None)
    if made is None:
        pytest.skip(f"this transformers has no {kind}")

    def layout(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[nn.Module, Float8Weight]:
        rows, depth = weight.shape
        options = {"FP8Linear": {"block_size": (128, 128)}, "FbgemmFp8Linear": {"bias": False}}.get(kind, {})
        module, found = made(depth, rows, **options), quantised(weight, block=kind == "FP8Linear")
        name = SCALES[kind]
        scale = found.scale.view(getattr(module, name).shape)
        module.weight = nn.Parameter(found.values, requires_grad=False)
        setattr(module, name, nn.Parameter(scale, requires_grad=False))
        module.bias = None
        return module, found

    return layout


@pytest.mark.parametrize("kind", ["bf16 scales", *SCALES])
def test_modules_of_transformers_are_read(kind: str) -> None:
    layout = _bf16_scales if kind == "bf16 scales" else _transformers_linear(kind)
    model, dequantised = with_fp8(tiny_target(), layout)
    check_same_tokens(model, dequantised, random_prompt(9))


def test_matrices_of_latent_attention_are_dequantised():
    model, dequantised = with_fp8(tiny_family("glm4_moe_lite"))
    originals = check_same_tokens(model, dequantised, torch.arange(2, 22)[None], 8)
    size = 4 * 4 * (16 + 20) * 32 * 4 / 2**20
    assert note_of(originals, "latent_attention").startswith(f"4 kv_b_proj are dequantised, {size:,.1f} MiB")
    message = 'kv_b_proj is called as a module.*leave activations="as published"'
    with pytest.raises(UnsupportedModelError, match=message):
        optimize_with_triton(model, activations="as published")


# --- as published ---


class Rounding(FP8Linear):
    """An FP8 module with a forward that rounds its inputs, as the published ones do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(torch.float8_e4m3fn).to(x.dtype), self.weight.to(x.dtype)) * float(
            self.weight_scale_inv.max()
        )


def _rounding(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[nn.Module, Any]:
    module, found = LAYOUTS["one scale"](weight, bias)
    return Rounding(module.weight.detach(), module.weight_scale_inv.detach(), bias, False), found


def test_as_published_calls_the_modules() -> None:
    model, dequantised = with_fp8(tiny_target(), _rounding)
    prompt = random_prompt(9)
    expected = plain_tokens(model, prompt)
    assert not torch.equal(expected, plain_tokens(dequantised, prompt))
    with optimize_with_triton(model, activations="as published") as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        assert any("21 FP8 projections are called as modules" in entry.reason for entry in originals.report())
    whole = EaModel(model, tiny_model(eagle3=False).ea_layer).eval()
    ours = whole.eagenerate(prompt, max_new_tokens=24)
    with optimize_eagle_with_triton(whole, activations="as published"):
        assert torch.equal(whole.eagenerate(prompt, max_new_tokens=24), ours)
    config = EAGLEConfig(suffix_drafts=4, activations="as published", fallback=False)
    ids, _ = EAGLEInference(None, model, config).generate(prompt, max_new_tokens=24, stop_token_ids=())
    assert torch.equal(ids, expected)


def test_a_forward_that_was_set_is_called() -> None:
    model, dequantised = with_fp8(tiny_target())
    module, twin = model.model.layers[1].mlp.up_proj, dequantised.model.layers[1].mlp.up_proj
    module.forward = twin.forward
    check_same_tokens(model, dequantised, random_prompt(9))


def test_a_class_with_a_forward_of_its_own_is_called_and_the_report_counts_it() -> None:
    class Doubled(FP8Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = Float8Weight(self.weight, self.weight_scale_inv).dequantised(x.dtype)
            return 2 * nn.functional.linear(x, wide)

    model, dequantised = with_fp8(tiny_target())
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Doubled(old.weight.detach(), old.weight_scale_inv.detach())
    with torch.no_grad():
        dequantised.model.layers[1].mlp.up_proj.weight.mul_(2)
    originals = check_same_tokens(model, dequantised, random_prompt(9))
    note = note_of(originals)
    assert "exact: 20 FP8 projections" in note and "as published: 1 FP8 projections" in note


@pytest.mark.parametrize("activations", ["fp8", None, True])
def test_activations_must_be_known(activations: Any) -> None:
    for make in (EAGLEConfig, partial(optimize_with_triton, None), partial(optimize_eagle_with_triton, None)):
        with pytest.raises(ValueError, match="activations must be 'exact' or 'as published'"):
            make(activations=activations)


def test_as_published_of_a_model_without_fp8_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match='activations="as published": no projection of the model has FP8 weights'):
        optimize_eagle_with_triton(model, activations="as published")
    optimize_eagle_with_triton(model, activations="exact").originals.restore()


# --- what is refused ---

UP = "model.model.layers.1.mlp.up_proj"


def _nan(scale: torch.Tensor) -> torch.Tensor:
    return scale.fill_(float("nan"))


def _as_attribute(module: Any) -> None:
    scale = module.weight_scale_inv.detach().clone()
    del module.weight_scale_inv
    module.weight_scale_inv = scale  # nobody sees it replaced, and it stays behind when the model moves


def _blocks_of_64(module: Any) -> None:
    module.block_size = (64, 64)


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "no scale": (replacing("weight_scale_inv", lambda _: None), rf"{UP}.weight_scale_inv is missing"),
    "shape": (
        replacing("weight_scale_inv", lambda s: s.new_ones(2, 3)),
        rf"{UP}.weight_scale_inv: the scale of \[96, 64\] must be .* got \[2, 3\]",
    ),
    "scale dtype": (
        replacing("weight_scale_inv", lambda s: s.half()),
        rf"{UP}.weight_scale_inv: the scale must be float32 or bfloat16, got torch.float16",
    ),
    "attribute": (_as_attribute, rf"{UP}.weight_scale_inv must be a parameter or a buffer"),
    "scale nan": (replacing("weight_scale_inv", _nan), rf"{UP}.weight_scale_inv must be finite"),
    "e5m2": (
        replacing("weight", lambda w: w.float().to(torch.float8_e5m2)),
        rf"{UP}.weight must be float8_e4m3fn \[out, in\], .* got torch.float8_e5m2",
    ),
    "int8": (
        replacing("weight", lambda w: w.view(torch.int8)),
        rf"{UP}.weight must be float8_e4m3fn .* got torch.int8",
    ),
    "nan 0x7f": (replacing("weight", with_bits(0x7F)), rf"{UP}.weight must be finite, got NaN"),
    "nan 0xff": (replacing("weight", with_bits(0xFF)), rf"{UP}.weight must be finite, got NaN"),
    "blocks": (_blocks_of_64, rf"{UP} must have scales for blocks of 128 by 128, got \[64, 64\]"),
    "rows": (replacing("weight", lambda w: w[:48].clone()), rf"{UP}.weight must be \[96, 64\], got \[48, 64\]"),
    "depth": (replacing("weight", lambda w: w[:, :48].clone()), rf"{UP}.weight must be \[96, 64\], got \[96, 48\]"),
    "columns": (
        replacing("weight", lambda w: w.t().contiguous().t()),
        rf"{UP}.weight must be float8_e4m3fn \[out, in\], rows contiguous",
    ),
    "device": (replacing("weight_scale_inv", lambda s: s.to("meta")), "must lie on one device, got cpu, meta"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_its_path(change: Callable[[Any], None], message: str) -> None:
    model, _ = with_fp8(tiny_target())
    change(model.model.layers[1].mlp.up_proj)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModelError, match=message):
        optimize_with_triton(model)
    assert "generate" not in vars(model) and before == {name: id(module) for name, module in model.named_modules()}


def test_a_bias_of_another_dtype_is_refused() -> None:
    model, _ = with_fp8(tiny_target("qwen2"))
    replacing("bias", lambda b: b.bfloat16())(model.model.layers[1].self_attn.k_proj)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.k_proj\.bias must be torch.float32 \[32\]"):
        optimize_with_triton(model)


def test_an_embedding_that_is_the_vocabulary_projection_too_is_read_as_it_is() -> None:
    """transformers puts its module for FP8 there if the configuration's modules_to_not_convert leave lm_head out."""
    model, dequantised = with_fp8(tiny_target())
    dequantised.lm_head.weight = dequantised.model.embed_tokens.weight
    model.lm_head = FP8Linear(model.model.embed_tokens.weight.detach(), torch.ones(1, 1))
    model.lm_head.weight, prompt = model.model.embed_tokens.weight, random_prompt(9)
    with optimize_with_triton(model) as (optimised, originals):  # the modules raise if they are called
        found = optimised.generate(prompt, max_new_tokens=24, do_sample=False)
        assert torch.equal(found, plain_tokens(dequantised, prompt))
        assert note_of(originals).startswith("exact: 21 FP8 projections are read by their weights")
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        with pytest.raises(RuntimeError, match="lm_head.weight was replaced"):
            optimised.generate(prompt, max_new_tokens=2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_needs_no_scale_for_tied_embeddings(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_family("llama yarn", tie_word_embeddings=tied)
    info = dict(missing_keys={"lm_head.weight_scale_inv"}, unexpected_keys=set(), mismatched_keys=set())
    monkeypatch.setattr(loading, "_read_target", lambda *_: (model, info))
    with nullcontext() if tied else pytest.raises(ValueError, match="the checkpoint lacks lm_head.weight_scale_inv"):
        assert loading.load_target("here") is model


def test_values_without_scales_in_a_plain_linear_are_refused() -> None:
    model = tiny_target()
    replacing("weight", lambda w: w.to(torch.float8_e4m3fn))(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModelError, match=rf"{UP}.weight is torch.float8_e4m3fn in a plain nn.Linear"):
        optimize_with_triton(model)


def test_zeros_and_the_largest_values_are_not_nan() -> None:
    model, _ = with_fp8(tiny_target())
    for bits in (0x00, 0x80, 0x7E, 0xFE):
        replacing("weight", with_bits(bits))(model.model.layers[1].mlp.up_proj)
    optimize_with_triton(model).originals.restore()


# --- parts ---


def test_with_projections_changes_each_and_keeps_what_is_the_same() -> None:
    engine = EAGLEInference(None, tiny_target(), EAGLEConfig(suffix_drafts=4)).engine
    view = engine.view
    assert with_projections(view, lambda projection: projection) is view
    seen: list[Projection] = []

    def change(projection: Projection) -> Projection:
        seen.append(projection)
        return Projection(projection.weight)

    changed = with_projections(view, change)
    assert len(seen) == 3 * 7 + 1 and changed.embedding is view.embedding
    assert changed.layers[0].mlp.down is not view.layers[0].mlp.down


# --- a draft in eight bits ---


@pytest.mark.parametrize(("eagle3", "suffix_drafts"), [(True, 5), (False, 0)], ids=["eagle3-5", "eagle1-0"])
def test_a_head_in_fp8_gives_the_same_tokens(eagle3: bool, suffix_drafts: int, engines: list[Engine]) -> None:
    model, prompt = tiny_model(eagle3=eagle3, **SMALL), random_prompt(11)
    with optimize_eagle_with_triton(model, suffix_drafts=suffix_drafts):
        expected = model.eagenerate(prompt, max_new_tokens=20)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, originals = optimize_eagle_with_triton(model, draft_dtype="fp8", suffix_drafts=suffix_drafts)
    engine = engines[-1]
    head = scoring_draft_of(engine.draft)
    projections = _all_projections(head)
    assert len(projections) == 9 and all(isinstance(p.weight, Float8Weight) for p in projections)
    ours = [tensor for projection in projections for tensor in projection.weight.tensors]
    loaded = {parameter.data_ptr() for parameter in model.parameters()}
    assert not loaded & {tensor.data_ptr() for tensor in ours}
    size = f"{sum(tensor.nbytes for tensor in ours) / 2**20:.1f} MiB"
    said = f"fp8: 9 projections of the draft are copies in eight bits, {size}"
    assert note_of(originals, "draft_dtype") == said
    assert torch.equal(model.eagenerate(prompt, max_new_tokens=20), expected)
    lengths = engine.accept_lengths
    tau = f"; tau {1 + sum(lengths) / len(lengths):.2f} over {len(lengths)} steps"
    assert note_of(originals, "draft_dtype") == said + tau

    kept = [weakref.ref(tensor) for tensor in ours]
    del head, projections, ours
    originals.restore()
    gc.collect()
    assert not any(reference() is not None for reference in kept)
    assert all(isinstance(p.weight, torch.Tensor) for p in _all_projections(scoring_draft_of(engine.draft)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def _all_projections(draft: Any) -> list[Projection]:
    found: list[Projection] = []

    def see(projection: Projection) -> Projection:
        found.append(projection)
        return projection

    with_projections(draft, see)
    return found


def test_what_a_head_in_fp8_drafts_is_that_of_its_rounded_weights(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are those of a head with the rounded weights, to the accepted length of each step; wrong weights
    change these, and no token."""
    model, rounded, prompt = tiny_model(**SMALL), tiny_model(**SMALL), random_prompt(11)
    for module in rounded.ea_layer.modules():
        if type(module) is nn.Linear:
            with torch.no_grad():
                module.weight.copy_(quantised(module.weight).dequantised())

    def run(subject: Any, **options: Any) -> tuple[list[int], list[int]]:
        with optimize_eagle_with_triton(subject, **options):
            tokens = subject.eagenerate(prompt, max_new_tokens=30)[0, :41].tolist()
            return tokens, engines[-1].accept_lengths

    fp8, expected = run(model, draft_dtype="fp8"), run(rounded)
    assert fp8 == expected
    monkeypatch.setattr(float8_weight, "quantised", lambda weight: quantised(weight.flip(0)))
    wrong = run(model, draft_dtype="fp8")
    assert wrong[0] == fp8[0] and wrong[1] != fp8[1]


def test_drop_ins_draft_by_the_head_as_it_is() -> None:
    model, prompt = tiny_model(), random_prompt(11)
    model.ea_layer.reset_kv()
    hidden = torch.randn(1, 11, 3 * 64, generator=torch.Generator().manual_seed(1))
    ids, head = torch.cat((prompt, prompt[:, :1]), 1), model.base_model.lm_head
    with torch.no_grad():
        expected = model.ea_layer.topK_genrate(hidden, ids, head, None)
        with optimize_eagle_with_triton(model, draft_dtype="fp8"):
            model.ea_layer.reset_kv()
            found = model.ea_layer.topK_genrate(hidden, ids, head, None)
    assert all(map(torch.equal, found, expected))


def test_a_vocabulary_of_the_drafts_of_an_ea_model_is_said_and_changes_no_token() -> None:
    with pytest.raises(ValueError, match="the draft has its own vocabulary"):
        optimize_eagle_with_triton(tiny_model(), draft_vocabulary=12)
    model, prompt = tiny_model(eagle3=False, **SMALL), random_prompt(11)
    original = vars(model.ea_layer).get("topK_genrate")
    expected = model.generate(prompt, max_new_tokens=24)
    with optimize_eagle_with_triton(model, draft_vocabulary=12)[1] as originals:
        assert torch.equal(model.generate(prompt, max_new_tokens=24), expected)
        said = {entry.path: entry.reason for entry in originals.report()}
        assert "12 of 32 tokens are drafted" in said["draft_vocabulary"]
        assert "whole vocabulary" in said["ea_layer.topK_genrate"]
        assert vars(model.ea_layer).get("topK_genrate") is original
    with pytest.raises(UnsupportedModelError, match="ea_layer.topK_genrate: the original runs"):
        optimize_eagle_with_triton(model, draft_vocabulary=12, strict=True)
    with optimize_eagle_with_triton(model, draft_vocabulary=12, strict=True, patch_modules=False):
        assert torch.equal(model.generate(prompt, max_new_tokens=24), expected)


@pytest.mark.parametrize("vocabulary", [None, 12])
def test_a_plain_model_with_a_draft_in_fp8(vocabulary: int | None) -> None:
    target, draft, prompt = tiny_target(), tiny_target(seed=1), random_prompt(10)
    expected = plain_tokens(target, prompt)
    options = dict(draft_dtype="fp8", draft_vocabulary=vocabulary)
    with optimize_with_triton(target, draft, **options) as (model, originals):
        assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        paths = {entry.path for entry in originals.report()}
        assert {"draft_dtype"} | ({"draft_vocabulary"} if vocabulary else set()) <= paths
    inference = EAGLEInference(draft, target, EAGLEConfig(num_draft_tokens=6, fallback=False, **options))
    ids, _ = inference.generate(prompt, max_new_tokens=24, stop_token_ids=())
    assert torch.equal(ids, expected)
    assert "draft_dtype: fp8: 22 projections of the draft are copies" in inference.report()
    head = inference.engine.draft.head.weight
    assert len(head) == (vocabulary or 32) and head.scale.shape == (len(head), 1)


def test_an_fp8_target_lends_its_head_to_a_draft_in_fp8(engines: list[Engine]) -> None:
    whole = tiny_model(eagle3=False)
    base, _ = with_fp8(whole.base_model, in_rows, ("_proj", "lm_head"))
    model, prompt = EaModel(base, whole.ea_layer).eval(), random_prompt(10)
    _, originals = optimize_eagle_with_triton(model, draft_dtype="fp8")
    engine = engines[-1]
    assert engine.draft.head.weight.values.data_ptr() == base.lm_head.weight.data_ptr()
    fp8 = model.eagenerate(prompt, max_new_tokens=24)
    originals.restore()
    with optimize_eagle_with_triton(model):
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=24), fp8)


def test_weights_of_a_draft_in_fp8_are_counted_in_their_bytes(engines: list[Engine]) -> None:
    whole = tiny_model()
    with optimize_eagle_with_triton(whole, draft_dtype="fp8"):
        engine = engines[-1]
        spec = TreeSpec.chain(3)
        layer, loaded = engine.draft.layers[0], whole.ea_layer
        norms = 4 * 64  # bytes of one in fp32
        weights = [module.weight for module in loaded.midlayer.modules() if type(module) is nn.Linear]
        each = sum(w.numel() + 4 * len(w) for w in (*weights, loaded.lm_head.weight))
        once = loaded.fc.weight.numel() + 4 * len(loaded.fc.weight)
        assert sum(1 for n in (layer.input_norm, layer.post_norm) if n is not None) == 2
        assert engine.draft.weight_bytes(spec) == spec.beam_levels * (each + 2 * norms) + once


@pytest.mark.parametrize("draft", [None, "suffix", "ngram"])
def test_drafts_without_weights_are_not_in_fp8(draft: str | None) -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match='draft_dtype="fp8" needs a draft with weights, a head or a language model'):
        optimize_with_triton(target, draft, draft_dtype="fp8")
    assert "generate" not in vars(target)


def test_a_draft_that_cannot_be_rounded_is_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.ea_layer.fc.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match='draft_dtype="fp8": a weight with infinities or NaN cannot be quantised'):
        optimize_eagle_with_triton(model, draft_dtype="fp8")
    model = tiny_model()
    model.ea_layer.midlayer.mlp.up_proj = nn.Sequential(model.ea_layer.midlayer.mlp.up_proj)
    with pytest.raises(ValueError, match="a projection of the draft is not a plain matrix but a Sequential"):
        optimize_eagle_with_triton(model, draft_dtype="fp8")
    assert "eagenerate" not in vars(model)


@pytest.mark.parametrize("draft_dtype", ["int8", "float8", torch.float8_e4m3fn])
def test_the_dtype_of_a_draft_must_be_known(draft_dtype: Any) -> None:
    with pytest.raises(ValueError, match=r'draft_dtype must be None \(the dtype of the model\), "fp8" or "int4"'):
        EAGLEConfig(draft_dtype=draft_dtype)
    with pytest.raises(ValueError, match="draft_dtype must be None"):
        optimize_with_triton(None, draft_dtype=draft_dtype)


def test_a_long_weight_is_rounded_in_parts_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100, 32)
    monkeypatch.setattr(quantised_drafts, "ROWS", 33)
    parts, whole = quantised_drafts._in_eight_bits(weight), quantised(weight)
    assert torch.equal(parts.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(parts.scale, whole.scale)


def test_a_strict_megakernel_does_not_go_with_a_head_in_fp8() -> None:
    pytest.importorskip("triton")
    model = tiny_model()
    options = dict(megakernel=True, kernels=True, strict=True, patch_modules=False, draft_dtype="fp8")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels need a GPU or the interpreter")
    with pytest.raises(UnsupportedModelError, match="megakernel: the weight of the draft head's fc is FP8"):
        optimize_eagle_with_triton(model, **options)


def test_the_megakernel_refuses_a_head_in_fp8() -> None:
    pytest.importorskip("triton")
    from eagle_triton.engine.megakernel_step import unsupported_draft

    _, draft = native.read(tiny_model())
    assert unsupported_draft(draft) is None
    assert unsupported_draft(quantised_draft(draft, "fp8")[0]) == "the weight of the draft head's fc is FP8"


def test_serve_takes_both_options() -> None:
    parser = serve._parser("serve")
    args = serve._parse(parser, ["--device", "cpu", "--dtype", "float32", "--draft-dtype", "fp8"])
    assert "draft_dtype: fp8: 9 projections of the draft" in serve._load(args).report()
    args = serve._parse(parser, ["--device", "cpu", "--dtype", "float32", "--activations", "as-published"])
    with pytest.raises(ValueError, match='activations="as published": no projection of the model has FP8 weights'):
        serve._load(args)


def test_functions_over_the_model_s_own_forward_round_as_it_does() -> None:
    model, _ = with_fp8(tiny_target(), _rounding)
    prompt = random_prompt(9)[0].tolist()
    outputs = [autoregressive_generate(prompt, model, 20, use_cache=True, engine=engine) for engine in (True, False)]
    release_engine()
    assert outputs[0] == outputs[1]


# --- layers of other kinds ---


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "moe" not in kind and kind != "qwen3_next"])
def test_gated_delta_nets_with_fp8_projections(kind: str) -> None:
    target = tiny_hybrid(kind)
    model, dequantised = with_fp8(target, in_blocks, ("_proj", "in_proj_qkv", "in_proj_z"))
    prompt = random_prompt(9, 24)
    with optimize_with_triton(dequantised):
        expected = dequantised.generate(prompt, max_new_tokens=20, do_sample=False)
    with optimize_with_triton(model) as (_, originals):
        assert torch.equal(model.generate(prompt, max_new_tokens=20, do_sample=False), expected)
        note = note_of(originals)
    linear = sum(type(module) is FP8Linear for module in model.modules())
    assert linear > 20 and f"{linear} FP8 projections" in note


@pytest.mark.parametrize("activations", ["exact", "as published"])
def test_experts_in_fp8_are_said_to_be_called(activations: str) -> None:
    """They stay the modules that they are, and round what they are given, also beside projections that are read."""
    model, _ = with_fp8(tiny_hybrid("qwen3_5_moe"), in_blocks, ("q_proj",))
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with optimize_with_triton(model, activations=activations) as (_, originals):
        note = note_of(originals)
    assert note.startswith(f"{activations}: 1 FP8 projections")
    assert note.endswith("; 1 mixtures of experts with FP8 weights are called as modules, and round their inputs")


# --- the products ---


def _weights(rows: int, depth: int) -> dict[str, Float8Weight]:
    wide = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)) * 3
    wide[: rows // 2] *= 100
    wide[rows // 3] = 0
    one = Float8Weight(wide.clamp(-448, 448).to(torch.float8_e4m3fn), torch.full((1, 1), 0.37))
    return {"blocks": quantised(wide, block=True), "rows": quantised(wide), "one": one}


@pytest.mark.parametrize("kind", ["blocks", "rows", "one"])
@pytest.mark.parametrize("shape", [(7, 200, 300), (1, 128, 128), (60, 130, 64), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_the_weights_themselves(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    count, rows, depth = shape
    weight = _weights(rows, depth)[kind]
    x = torch.randn(count, depth, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = x.double() @ _exactly(weight).T + bias.double()
    out = linear.linear(x, weight, bias)
    assert out.dtype == dtype
    plain = torch.nn.functional.linear(x, _exactly(weight).to(dtype), bias).double()
    scale = expected.abs().max().clamp(min=1)
    error = (out.double() - expected).abs().max() / scale
    assert error <= 2 * (plain - expected).abs().max() / scale + 1e-5
    (stacked, raw) = linear.linear_stack(x, (weight, _exactly(weight).to(dtype)), (bias, None))
    assert torch.equal(stacked, out) and raw.shape == out.shape
    swiglu = linear.linear_swiglu(x, weight, weight).double()
    product = x.double() @ _exactly(weight).T
    wide = torch.nn.functional.silu(product) * product
    assert (swiglu - wide).abs().max() <= 0.03 * wide.abs().max().clamp(min=1e-3)


def _exactly(weight: Float8Weight) -> torch.Tensor:
    """The weight in fp64, element by element, by no code of the package."""
    rows, depth = weight.shape
    values, scale = weight.values.double(), weight.scale.double()
    if tuple(scale.shape) in ((rows, 1), (1, 1)):
        return values * scale
    row, column = torch.arange(rows) // 128, torch.arange(depth) // 128
    return values * scale[row][:, column]


def test_a_weight_is_rounded_to_the_nearest_of_its_scale() -> None:
    wide = torch.randn(300, 200, generator=torch.Generator().manual_seed(3))
    wide[128:256, 128:] = 0
    for block in (False, True):
        weight = quantised(wide, block)
        assert weight.scale.shape == ((3, 2) if block else (300, 1))
        step = (wide.abs() / 16).clamp(min=2.0**-10 * float(weight.scale.max()))  # half a unit in the last place
        assert ((_exactly(weight) - wide).abs() <= step).all()
        assert weight.values.float().abs().max() == 448
    assert weight.scale[1, 1] == 1 and not weight.values[128:256, 128:].float().any()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a weight with infinities or NaN cannot be quantised"):
            quantised(torch.tensor([[1.0, bad]]))


def test_rows_of_a_weight_are_copies() -> None:
    wide = torch.randn(40, 16)
    for weight in (quantised(wide), Float8Weight(wide.to(torch.float8_e4m3fn), torch.ones(1, 1))):
        some = rows_of(weight, torch.tensor([3, 39, 3]))
        assert isinstance(some, Float8Weight)
        assert torch.equal(some.dequantised(), weight.dequantised()[[3, 39, 3]])
        assert some.values.data_ptr() != weight.values.data_ptr() and some.scale.data_ptr() != weight.scale.data_ptr()
    with pytest.raises(ValueError, match="with a scale for each block cannot be copied"):
        rows_of(quantised(torch.randn(200, 300), block=True), torch.tensor([1]))


VALUES, ONES = torch.zeros(200, 300, dtype=torch.float8_e4m3fn), torch.ones


@pytest.mark.parametrize(
    ("values", "scale", "message"),
    [
        (VALUES.float(), ONES(1, 1), r"values must be float8_e4m3fn \[N, K\], got torch.float32 \(200, 300\)"),
        (VALUES.to(torch.float8_e5m2), ONES(1, 1), "values must be float8_e4m3fn .* got torch.float8_e5m2"),
        (VALUES[0], ONES(1, 1), r"values must be float8_e4m3fn \[N, K\]"),
        (
            torch.zeros(300, 200).to(torch.float8_e4m3fn).T,
            ONES(1, 1),
            r"rows of values must be contiguous, .* \(1, 200\)",
        ),
        (VALUES, ONES(1), r"the scale of \[200, 300\] must be \[200, 1\], \[1, 1\] or, .* \[2, 3\], got \[1\]"),
        (VALUES, ONES(3, 2), r"got \[3, 2\]"),
        (VALUES, ONES(1, 1).half(), "the scale must be float32 or bfloat16, got torch.float16"),
        (VALUES, ONES(1, 1, device="meta"), "the scale must be on the device of the values .cpu., got meta"),
    ],
    ids=["fp32", "e5m2", "one row", "columns", "dims", "blocks", "fp16", "device"],
)
def test_what_is_no_weight_of_eight_bits_is_refused(values: Any, scale: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Float8Weight(values, scale)


def test_products_refuse_what_does_not_fit() -> None:
    weight, other, x = quantised(torch.randn(20, 30)), quantised(torch.randn(21, 30)), torch.randn(2, 31)
    check_refused(
        (r"linear: weight 0 must be \[20, 31\] on .*, got .*_e4m3fn \[20, 30\]", lambda: linear.linear(x, weight)),
        (r"linear: bias 0 must be float32 \[20\]", lambda: linear.linear(x[:, 1:], weight, torch.randn(21))),
        (r"linear_swiglu: weight 1 must be \[20, 30\]", lambda: linear.linear_swiglu(x[:, 1:], weight, other)),
        (r"weight 0 must be .* on meta, got .* on cpu", lambda: linear.linear(x[:, 1:].to("meta"), weight)),
    )


@pytest.mark.parametrize("only", [("_proj",), ("q_proj", "up_proj", "down_proj")], ids=["all", "some"])
def test_a_few_tokens_by_the_kernels(only: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    target = tiny_model(eagle3=False, layers=1).base_model.to("cuda" if torch.cuda.is_available() else "cpu")
    model, dequantised = with_fp8(target, in_blocks, only)
    check_same_tokens(model, dequantised, random_prompt(4).to(target.device), 3, kernels=True, cuda_graph=False)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trees_give_plain_decodings_tokens_on_the_gpu(dtype):
    """100 outputs of 128 tokens: in bf16 they differ where the margin of two logits is rounding's, and few do."""
    model = EaModel.from_pretrained("demo", dtype=dtype).cuda()
    round_target(model.base_model, "fp8")
    prompts = encoded(model, demo_prompts(100), 128)
    with optimize_eagle_with_triton(model)[1] as originals:
        reasons = {entry.path: entry.reason for entry in originals.report()}
        assert reasons["activations"].startswith("exact")
        trees = [decode(model, prompt, 128).tokens for prompt in prompts]
        plain = [decode(model, prompt, 128, plain=True).tokens for prompt in prompts]
    places = {}
    for number, (one, other) in enumerate(zip(trees, plain, strict=True)):
        pairs = enumerate(zip(one, other, strict=False))
        column = next((column for column, (a, b) in pairs if a != b), None)
        if column is not None:
            places[number] = top2_margin(model.base_model, other[:column], column)
    print(f"{dtype}: {100 - len(places)} of 100 outputs are the same, margins of the others {sorted(places.values())}")
    assert all(len(tokens) > len(prompt[0]) for tokens, prompt in zip(trees, prompts, strict=True))
    assert len(places) <= (0 if dtype == torch.float32 else 10)
    assert max(places.values(), default=0) <= MARGIN_BOUND[dtype]
