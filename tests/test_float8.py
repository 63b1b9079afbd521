"""FP8 weights: targets as they are published, and what is refused of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from eagle_triton.engine.modules import Projection, with_projections
from eagle_triton.models.ea_model import EaModel
from tests.float8_models import LAYOUTS, FP8Linear, in_blocks, in_rows, with_fp8
from tests.tiny import random_prompt, tiny_model


def tiny_target(family: str = "llama", seed: int = 0) -> Any:
    return tiny_model(family, eagle3=False, layers=3, seed=seed).base_model


def plain_tokens(model: Any, prompt: torch.Tensor, new: int = 24) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=new, do_sample=False, use_cache=False)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_the_same_weights_in_fp32(layout: Callable, family: str) -> None:
    target = tiny_target(family)
    model, dequantised = with_fp8(target, layout)
    prompt = random_prompt(9)
    expected = plain_tokens(dequantised, prompt)
    with torch.no_grad():  # what rounding the weights has changed is seen
        assert (target(prompt).logits - dequantised(prompt).logits).abs().max() > 0.02
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with optimize_with_triton(model) as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        reasons = {entry.path: entry.reason for entry in originals.report()}
        assert reasons["activations"] == (
            "exact: 21 FP8 projections are read by their weights, and their inputs are not rounded"
        )
    for name, tensor in model.state_dict().items():
        old = before[name]
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8)), name


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
    for projection, path in _projections(engine.view.layers[1].mlp, ("gate", "up", "down")):
        module = model.get_submodule(f"model.layers.1.mlp.{path}_proj")
        assert projection.weight.values.data_ptr() == module.weight.data_ptr()
        assert projection.weight.scale.data_ptr() == module.weight_scale_inv.data_ptr()
    plain = sum(p.nbytes for name, p in model.named_parameters() if "embed" not in name)
    assert engine.view.weight_bytes == plain


def _projections(mlp: Any, names: tuple[str, ...]) -> list[tuple[Projection, str]]:
    return [(getattr(mlp, name), name) for name in names]


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
    with pytest.raises(RuntimeError, match=r"a module in model\.model\.layers\.2\.mlp was replaced"):
        model.generate(random_prompt(5), max_new_tokens=3)


def test_a_scale_that_changes_in_place_is_seen() -> None:
    model, _ = with_fp8(tiny_target())
    other, _ = with_fp8(tiny_target())
    engine, prompt = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)), random_prompt(70)
    first = engine.generate(prompt, max_new_tokens=12, stop_token_ids=(), return_stats=False)
    for changed in (model, other):
        with torch.no_grad():
            changed.model.layers[0].mlp.down_proj.weight_scale_inv.mul_(-3)
    second = engine.generate(prompt, max_new_tokens=12, stop_token_ids=(), return_stats=False)
    anew = EAGLEInference(None, other, EAGLEConfig(suffix_drafts=4))
    assert torch.equal(second, anew.generate(prompt, max_new_tokens=12, stop_token_ids=(), return_stats=False))
    assert not torch.equal(first, second)


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
        assert any("21 FP8 projections are called as they are" in entry.reason for entry in originals.report())
    config = EAGLEConfig(suffix_drafts=4, activations="as published", fallback=False)
    ids, _ = EAGLEInference(None, model, config).generate(prompt, max_new_tokens=24, stop_token_ids=())
    assert torch.equal(ids, expected)


def test_a_forward_that_was_set_is_called() -> None:
    model, dequantised = with_fp8(tiny_target())
    module, twin = model.model.layers[1].mlp.up_proj, dequantised.model.layers[1].mlp.up_proj
    module.forward = twin.forward
    prompt = random_prompt(9)
    with optimize_with_triton(model) as (optimised, _):
        tokens = optimised.generate(prompt, max_new_tokens=24, do_sample=False)
    assert torch.equal(tokens, plain_tokens(dequantised, prompt))


@pytest.mark.parametrize("activations", ["fp8", None, True])
def test_activations_must_be_known(activations: Any) -> None:
    message = "activations must be 'exact' or 'as published'"
    for call in (
        lambda: EAGLEConfig(activations=activations),
        lambda: optimize_with_triton(None, activations=activations),
        lambda: optimize_eagle_with_triton(None, activations=activations),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_as_published_of_a_model_without_fp8_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match='activations="as published": no projection of the model has FP8 weights'):
        optimize_eagle_with_triton(model, activations="as published")
    optimize_eagle_with_triton(model, activations="exact").originals.restore()


# --- what is refused ---

UP = "model.model.layers.1.mlp.up_proj"


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Any], None]:
    def apply(module: Any) -> None:
        changed = change(getattr(module, name).detach().clone())
        setattr(module, name, None if changed is None else nn.Parameter(changed, requires_grad=False))

    return apply


def _bits(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(values: torch.Tensor) -> torch.Tensor:
        values.view(torch.uint8)[3, 5] = value
        return values

    return change


def _nan(scale: torch.Tensor) -> torch.Tensor:
    return scale.fill_(float("nan"))


def _blocks_of_64(module: Any) -> None:
    module.block_size = (64, 64)


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "no scale": (_set("weight_scale_inv", lambda _: None), rf"{UP}.weight_scale_inv is missing"),
    "shape": (
        _set("weight_scale_inv", lambda s: s.new_ones(2, 3)),
        rf"{UP}.weight_scale_inv: the scale of \[96, 64\] must be .* got \[2, 3\]",
    ),
    "scale dtype": (
        _set("weight_scale_inv", lambda s: s.half()),
        rf"{UP}.weight_scale_inv: the scale must be float32 or bfloat16, got torch.float16",
    ),
    "scale nan": (_set("weight_scale_inv", _nan), rf"{UP}.weight_scale_inv must be finite"),
    "e5m2": (
        _set("weight", lambda w: w.float().to(torch.float8_e5m2)),
        rf"{UP}.weight must be float8_e4m3fn \[out, in\], .* got torch.float8_e5m2",
    ),
    "int8": (_set("weight", lambda w: w.view(torch.int8)), rf"{UP}.weight must be float8_e4m3fn .* got torch.int8"),
    "nan 0x7f": (_set("weight", _bits(0x7F)), rf"{UP}.weight must be finite, and holds NaN"),
    "nan 0xff": (_set("weight", _bits(0xFF)), rf"{UP}.weight must be finite, and holds NaN"),
    "blocks": (_blocks_of_64, rf"{UP} must have scales for blocks of 128 by 128, got \[64, 64\]"),
    "columns": (
        _set("weight", lambda w: w.t().contiguous().t()),
        rf"{UP}.weight must be float8_e4m3fn \[out, in\], rows contiguous",
    ),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_its_path(change: Callable[[Any], None], message: str) -> None:
    model, _ = with_fp8(tiny_target())
    change(model.model.layers[1].mlp.up_proj)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModelError, match=message):
        optimize_with_triton(model)
    assert "generate" not in vars(model) and before == {name: id(module) for name, module in model.named_modules()}


def test_a_scale_on_another_device_is_refused() -> None:
    model, _ = with_fp8(tiny_target())
    _set("weight_scale_inv", lambda s: s.to("meta"))(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModelError, match="must lie on one device, got cpu, meta"):
        optimize_with_triton(model)


def test_a_bias_of_another_dtype_is_refused() -> None:
    model, _ = with_fp8(tiny_target("qwen2"))
    _set("bias", lambda b: b.bfloat16())(model.model.layers[1].self_attn.k_proj)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.k_proj\.bias must be torch.float32 \[32\]"):
        optimize_with_triton(model)


def test_values_without_scales_in_a_plain_linear_are_refused() -> None:
    model = tiny_target()
    _set("weight", lambda w: w.to(torch.float8_e4m3fn))(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModelError, match=rf"{UP}.weight is torch.float8_e4m3fn in a plain nn.Linear"):
        optimize_with_triton(model)


def test_zeros_and_the_largest_values_are_not_nan() -> None:
    model, _ = with_fp8(tiny_target())
    for bits in (0x00, 0x80, 0x7E, 0xFE):
        _set("weight", _bits(bits))(model.model.layers[1].mlp.up_proj)
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
