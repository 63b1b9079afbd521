"""compressed-tensors FP8 as transformers loads it: read while it is compressed, refused where it would be called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eagle_triton import EaModel, UnsupportedModelError, optimize_eagle_with_triton, optimize_with_triton
from eagle_triton.families.reading.float8 import read_float8
from eagle_triton.runtime.float8_weight import Float8Weight, quantised
from tests.checkpoints import in_compressed_tensors
from tests.float8_models import (
    check_same_tokens,
    compressed,
    decompress_at_first,
    note_of,
    plain_tokens,
    tiny_target,
    with_fp8,
)
from tests.tiny import random_prompt, tiny_model
from tests.tiny_families import tiny_family

UP = r"model\.model\.layers\.1\.mlp\.up_proj"


def loaded(family: str = "llama", per: str = "row") -> tuple[Any, Any]:
    """A model as it is after loading, and one with its exact values."""
    model, dequantised = with_fp8(tiny_target(family), partial(compressed, per=per))
    decompress_at_first(model)
    return model, dequantised


@pytest.mark.parametrize("per", ["row", "tensor"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_it_is_read_while_it_is_compressed(family: str, per: str) -> None:
    (model, dequantised), prompt = loaded(family, per), random_prompt(9)
    expected = plain_tokens(dequantised, prompt)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with optimize_with_triton(model) as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        assert any("exact: 21 FP8 projections are read" in entry.reason for entry in originals.report())
    after = model.state_dict()
    assert all(torch.equal(after[name].view(torch.uint8), old.view(torch.uint8)) for name, old in before.items())
    assert torch.equal(plain_tokens(model, prompt), expected)  # its own forward, which decompresses it


def test_a_shared_expert_beside_experts_in_16_bits_is_read() -> None:
    """transformers dequantises the experts of such a checkpoint, but not the shared one."""
    model, dequantised = with_fp8(tiny_family("glm4_moe"), compressed)
    prompt = torch.arange(2, 22).repeat(1, 4)  # more rows than one operation takes
    originals = check_same_tokens(model, dequantised, prompt, 8)
    note = "exact: 28 FP8 projections are read by their weights, and their inputs are not rounded"
    assert note_of(originals) == note


def test_an_ea_model_takes_it() -> None:
    (base, dequantised), prompt = loaded(), random_prompt(9)
    head = tiny_model(eagle3=False).ea_layer
    expected = EaModel(dequantised, head).eval().eagenerate(prompt, max_new_tokens=24)
    with optimize_eagle_with_triton(EaModel(base, head).eval()) as (model, _):
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=24), expected)


def test_blocks_are_read_and_those_of_another_size_refused() -> None:
    wide = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    module, found = compressed(wide, None, "block")
    assert torch.equal(read_float8(module, "there", torch.float32).weight.dequantised(), found.dequantised())
    module.quantization_scheme.weights.block_structure = [64, 128]
    with pytest.raises(UnsupportedModelError, match=r"blocks of 128 by 128, got \[64, 128\]; load .*dequantize=True"):
        read_float8(module, "there", torch.float32)


def test_outputs_that_are_rounded_are_refused() -> None:
    module, _ = compressed(torch.ones(256, 384), None)
    module.quantization_scheme.output_activations = "static"
    with pytest.raises(UnsupportedModelError, match=r"there must not round its outputs .*dequantize=True"):
        read_float8(module, "there", torch.float32)


def test_what_its_first_forward_decompresses_is_found() -> None:
    model, _ = loaded()
    optimize_with_triton(model)
    model(random_prompt(5))
    with pytest.raises(RuntimeError, match=r"model\.model\.layers\.0\.self_attn\.q_proj\.weight was replaced"):
        model.generate(random_prompt(5), max_new_tokens=3, do_sample=False)


def _integers(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.view(torch.int8), requires_grad=False)


def _packed(module: Any) -> None:
    module.weight_packed = module.weight
    del module.weight


def _own_forward(module: Any) -> None:
    module.forward = partial(nn.Linear.forward, module)


@pytest.mark.parametrize("change", [_integers, _packed, _own_forward])
def test_what_would_be_called_while_it_is_compressed_is_refused(change: Any) -> None:
    model, _ = loaded()
    change(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModelError, match=rf"{UP} is compressed until .*dequantize=True"):
        optimize_with_triton(model)
    assert "generate" not in vars(model)


def test_as_published_is_refused() -> None:
    model, _ = loaded()
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.q_proj is compressed until"):
        optimize_with_triton(model, activations="as published")


def test_zero_points_and_missing_scales_are_refused() -> None:
    model, _ = loaded()
    up = model.model.layers[1].mlp.up_proj
    up.weight_zero_point = nn.Parameter(torch.zeros(96, 1), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=rf"{UP}\.weight_zero_point must be None"):
        optimize_with_triton(model)
    del up.weight_zero_point, up.weight_scale
    with pytest.raises(UnsupportedModelError, match=rf"{UP}\.weight_scale is missing"):
        optimize_with_triton(model)


# --- the package's own, through transformers ---


def written(folder: Path, per: str, rounds: bool) -> Any:
    """A checkpoint in its layout, and a model with the exact values."""
    tiny_target("qwen2").save_pretrained(folder)
    tensors, exact = load_file(folder / "model.safetensors"), tiny_target("qwen2")
    for name, module in exact.named_modules():
        if not name.endswith("_proj"):
            continue
        found = quantised(module.weight)
        if per == "tensor":
            scale = (module.weight.detach().abs().max() / 448).view(1, 1)
            found = Float8Weight((module.weight.detach() / scale).to(torch.float8_e4m3fn), scale)
        tensors[f"{name}.weight"] = found.values
        tensors[f"{name}.weight_scale"] = found.scale.view(1) if per == "tensor" else found.scale
        module.weight.data.copy_(found.dequantised())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**eight, "strategy": "channel" if per == "row" else "tensor", "dynamic": False}
    inputs = {**eight, "strategy": "token", "dynamic": True} if rounds else None
    in_compressed_tensors(folder, "float-quantized", weights=weights, input_activations=inputs)
    return exact


@pytest.mark.packages
@pytest.mark.parametrize("how", ["as it is", "optimized", "dequantize"])
@pytest.mark.parametrize("per", ["row", "tensor"])
@pytest.mark.parametrize("rounds", [True, False], ids=["w8a8", "w8a16"])
def test_checkpoints_of_the_package_are_read(
    how: str, per: str, rounds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    home = pytest.importorskip("transformers.quantizers.quantizer_compressed_tensors")
    transformers = pytest.importorskip("transformers", minversion="5.20")
    exact, options = written(tmp_path, per, rounds), {}
    if how == "optimized":  # as on a GPU with FP8 products

        def allow(self: Any, *_: Any, **__: Any) -> None:
            self.use_fp8_kernel = True

        monkeypatch.setattr(home.CompressedTensorsHfQuantizer, "validate_environment", allow)
    if how != "as it is":
        key = "use_optimized_inference" if how == "optimized" else "dequantize"
        options["quantization_config"] = transformers.CompressedTensorsConfig(**{key: True})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
    eight = model.model.layers[1].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    assert eight == (how != "dequantize")
    prompt = random_prompt(9)
    with optimize_with_triton(model) as (optimised, originals):
        tokens = optimised.generate(prompt, max_new_tokens=24, do_sample=False)
        assert any("exact: 21 FP8 projections" in entry.reason for entry in originals.report()) == eight
    assert torch.equal(tokens, plain_tokens(exact, prompt))
