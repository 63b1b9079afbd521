"""FP8 weights in tensors of torchao's, which plain linear layers have for weights: read, called or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle_triton import EAGLEConfig, EAGLEInference, UnsupportedModelError, optimize_with_triton
from eagle_triton.families.reading.float8 import read_float8
from eagle_triton.speculative_decoding import autoregressive_generate, release_engine
from tests.float8_models import (
    Float8Tensor,
    WrappedWeight,
    as_weight,
    check_same_tokens,
    note_of,
    plain_tokens,
    stored,
    tiny_target,
    with_bits,
    with_fp8,
)
from tests.tiny import random_prompt

UP = r"model\.model\.layers\.1\.mlp\.up_proj"


@pytest.mark.parametrize("activations", ["exact", "as published"])
def test_nothing_is_copied_and_bytes_are_those_of_what_is_stored(activations: str) -> None:
    model, _ = with_fp8(tiny_target(), as_weight)
    config = EAGLEConfig(suffix_drafts=4, activations=activations)
    view = EAGLEInference(None, model, config).engine.view
    kept = [tensor for name, tensor in stored(model).items() if "embed" not in name]
    assert view.weight_bytes == sum(tensor.nbytes for tensor in kept)
    if activations == "exact":
        weight, found = model.model.layers[1].mlp.up_proj.weight, view.layers[1].mlp.up.weight
        assert found.values.data_ptr() == weight.qdata.data_ptr() and found.scale.data_ptr() == weight.scale.data_ptr()


@pytest.mark.parametrize("shape", [(256, 384), (128, 256), (256, 128), (128, 128), (1, 64)], ids=str)
@pytest.mark.parametrize("per", ["row", "block", "tensor"])
def test_scales_are_read_for_what_they_are(shape: tuple[int, int], per: str) -> None:
    if per == "block" and shape[0] == 1:
        pytest.skip("no whole block")
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wide[: shape[0] // 2] *= 50
    module, found = as_weight(wide, None, per)
    weight = read_float8(module, "there", torch.float32).weight
    assert torch.equal(weight.dequantised(), found.dequantised())
    assert weight.in_blocks == (per == "block" and shape != (128, 128))


class Rounding(Float8Tensor):
    rounds = True


def test_as_published_calls_the_layers() -> None:
    model, dequantised = with_fp8(tiny_target(), partial(as_weight, kind=Rounding))
    prompt = random_prompt(9)
    assert not torch.equal(plain_tokens(model, prompt), plain_tokens(dequantised, prompt))
    originals = check_same_tokens(model, model, prompt, activations="as published")
    assert note_of(originals) == "as published: 21 FP8 projections are called as modules, which may round their inputs"
    outputs = [
        autoregressive_generate(prompt[0].tolist(), model, 20, use_cache=True, engine=engine)
        for engine in (True, False)
    ]
    release_engine()
    assert outputs[0] == outputs[1]


def test_a_draft_and_its_vocabulary_are_read_too() -> None:
    target, prompt = tiny_target(), random_prompt(10)
    draft, _ = with_fp8(tiny_target(seed=1), as_weight, ("_proj", "lm_head"))
    config = EAGLEConfig(num_draft_tokens=6, draft_vocabulary=12, draft_dtype="fp8", fallback=False)
    engine = EAGLEInference(draft, target, config)
    tokens, _ = engine.generate(prompt, max_new_tokens=20, stop_token_ids=())
    assert torch.equal(tokens, plain_tokens(target, prompt, 20))
    assert (
        "22 FP8 projections are read" in engine.report() and "0 projections of the draft are copies" in engine.report()
    )


# --- what happens to such a layer afterwards ---


def _another(weight: Any) -> None:
    weight.qdata = weight.qdata.clone()


def _another_scale(weight: Any) -> None:
    weight.scale = weight.scale.clone()


@pytest.mark.parametrize("change", [_another, _another_scale])
@pytest.mark.parametrize("activations", ["exact", "as published"])
def test_what_a_weight_is_made_of_is_watched(change: Callable[[Any], None], activations: str) -> None:
    """Also where the layer is called: a captured graph would read what is no more."""
    model, _ = with_fp8(tiny_target(), partial(as_weight, kind=Rounding))
    engine = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4, activations=activations)).engine
    before = engine.watch.called_state()
    change(model.model.layers[1].mlp.up_proj.weight)
    if activations == "exact":
        assert engine.watch.change() == "target_model.model.layers.1.mlp.up_proj.weight was replaced, moved or cast"
    else:
        assert engine.watch.change() is None and engine.watch.called_state() != before


def test_a_replaced_weight_and_a_hook_are_found() -> None:
    model, _ = with_fp8(tiny_target(), as_weight)
    optimize_with_triton(model)
    up, prompt = model.model.layers[1].mlp.up_proj, random_prompt(5)
    handle = up.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=rf"{UP} has got a forward hook"):
        model.generate(prompt, max_new_tokens=3)
    handle.remove()
    up.weight = as_weight(up.weight.qdata.float(), None)[0].weight
    with pytest.raises(RuntimeError, match=rf"{UP}\.weight was replaced"):
        model.generate(prompt, max_new_tokens=3)


# --- what is called, and what is refused ---


class Scaled(Rounding):
    """With a part that a reader of the others would miss."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale", "before"], None

    before = torch.ones(1)


class MXTensor(WrappedWeight):
    """Of parts with the same names that mean something else."""

    rounds = True


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _as(kind: type) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        old = module.weight
        module.weight = nn.Parameter(kind(old.qdata, old.scale, old.block_size, old.dtype), requires_grad=False)

    return change


def _own_forward(module: Any) -> None:
    module.__class__ = OwnForward


def _set_forward(module: Any) -> None:
    module.forward = partial(nn.Linear.forward, module)


CALLED = {"part": _as(Scaled), "name": _as(MXTensor), "class": _own_forward, "set": _set_forward}


@pytest.mark.parametrize("change", CALLED.values(), ids=CALLED)
def test_what_is_not_known_is_called_and_counted(change: Callable[[Any], None]) -> None:
    model, _ = with_fp8(tiny_target(), partial(as_weight, kind=Rounding))
    change(model.model.layers[1].mlp.up_proj)
    with optimize_with_triton(model) as (_, originals):
        model.generate(random_prompt(5), max_new_tokens=3, do_sample=False)
        note = note_of(originals)
    assert "exact: 20 FP8 projections" in note and "as published: 1 FP8 projections are called" in note


class Int8Tensor(WrappedWeight):
    rounds = True


def test_tensors_that_are_not_read_are_named() -> None:
    model = tiny_target()
    module = model.model.layers[1].mlp.up_proj
    rows, depth = module.weight.shape
    whole = Int8Tensor(torch.ones(rows, depth, dtype=torch.int8), torch.ones(rows, 1), None, torch.float32)
    module.weight = nn.Parameter(whole, requires_grad=False)
    with optimize_with_triton(model) as (_, originals):
        assert "1 torch.Linear (Int8Tensor); the first is model.model.layers.1.mlp.up_proj" in str(originals)


def _inside(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(module: Any) -> None:
        setattr(module.weight, name, change(getattr(module.weight, name)))

    return apply


def _groups_of_rows(module: Any) -> None:
    module.weight.scale, module.weight.block_size = torch.ones(2, 1), [48, 64]


def _blocks_of_a_row(module: Any) -> None:
    module.weight.scale, module.weight.block_size = torch.ones(96, 2), [1, 32]


def _attribute(module: Any) -> None:
    weight = module.weight
    del module.weight
    module.weight = weight.detach()


def _bf16_bias(module: Any) -> None:
    module.bias = nn.Parameter(torch.zeros(96, dtype=torch.bfloat16))


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "no scale": (_inside("scale", lambda _: None), r"weight\.scale is missing"),
    "shape": (_inside("scale", lambda s: s[:5]), r"weight\.scale must divide .* \[96, 64\] evenly, got \[5, 1\]"),
    "no rows": (_inside("scale", lambda s: s[:0]), r"weight\.scale must divide .* \[96, 64\] evenly, got \[0, 1\]"),
    "dims": (_inside("scale", lambda s: s.view(-1)), r"weight\.scale must divide .* evenly, got \[96\]"),
    "size": (_inside("block_size", lambda _: [96, 64]), r"weight\.block_size must be \[1, 64\] .* got \[96, 64\]"),
    "rows": (_groups_of_rows, r" must have scales for blocks of 128 by 128, got \[48, 64\]"),
    "parts": (_blocks_of_a_row, r" must have scales for blocks of 128 by 128, got \[1, 32\]"),
    "scale dtype": (_inside("scale", lambda s: s.half()), r"weight\.scale: the scale must be float32 or bfloat16"),
    "device": (
        _inside("scale", lambda s: s.to("meta")),
        r"weight\.scale: the scale must be on .*cpu.*, got meta",
    ),
    "scale nan": (_inside("scale", lambda s: s.fill_(float("nan"))), r"weight\.scale must be finite"),
    "nan": (_inside("qdata", with_bits(0x7F)), r"weight\.qdata must be finite, got NaN"),
    "e5m2": (
        _inside("qdata", lambda w: w.float().to(torch.float8_e5m2)),
        r"weight\.qdata must be .* torch.float8_e5m2",
    ),
    "columns": (_inside("qdata", lambda w: w.t().contiguous().t()), r"weight\.qdata must be .* rows contiguous"),
    "turned": (_inside("qdata", lambda w: w.view(64, 96)), r"weight\.qdata must be \[96, 64\] as the weight, got"),
    "wrapped": (
        _inside("qdata", lambda w: as_weight(w.float(), None)[0].weight),
        r"weight\.qdata must be a plain tensor",
    ),
    "attribute": (_attribute, r"weight must be a parameter, so that changes"),
    "bias": (_bf16_bias, r"bias must be torch.float32 \[96\], got torch.bfloat16"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_its_path(change: Callable[[Any], None], message: str) -> None:
    model, _ = with_fp8(tiny_target(), as_weight)
    change(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModelError, match=rf"{UP}\.?{message}"):
        optimize_with_triton(model)
    assert "generate" not in vars(model)


# --- torchao's own ---


@pytest.mark.parametrize("activations", ["exact", "as published"])
def test_what_torchao_quantises_is_read(activations: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, prompt = tiny_target("qwen2"), random_prompt(9)
    quantization.quantize_(
        model, quantization.Float8WeightOnlyConfig(), filter_fn=lambda part, path: path.endswith("_proj")
    )
    expected = plain_tokens(model, prompt)
    with optimize_with_triton(model, activations=activations) as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        assert note_of(originals).startswith(f"{activations}: 21 FP8 projections")


@pytest.mark.parametrize("per", ["PerRow", "PerTensor", "PerBlock"])
def test_the_scales_of_torchao_are_read(per: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    granularity = getattr(pytest.importorskip("torchao.quantization.granularity"), per)
    wide = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    wide[:128] *= 50
    module = nn.Linear(384, 256, bias=False)
    made = quantization.Float8Tensor.from_hp(
        wide, granularity=granularity([128, 128]) if per == "PerBlock" else granularity()
    )
    module.weight = nn.Parameter(made, requires_grad=False)
    weight = read_float8(module, "there", torch.float32).weight
    assert torch.equal(weight.dequantised(), made.dequantize())
    assert weight.values.data_ptr() == module.weight.qdata.data_ptr()
