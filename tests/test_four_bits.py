"""Targets with weights of four bits, read where their words lie, and what is refused of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM

from eagle_triton import (
    EAGLEConfig,
    EAGLEInference,
    EaModel,
    UnsupportedModelError,
    optimize_eagle_with_triton,
    optimize_with_triton,
)
from eagle_triton.families.causal_lm import read_causal_lm
from eagle_triton.families.reading import quantised
from eagle_triton.families.reading.four_bits import read_four_bits
from eagle_triton.models.heads import DraftConfig, Eagle3Head
from eagle_triton.models.loading import load_target
from eagle_triton.runtime.four_bit_weight import FourBitWeight
from tests.checkpoints import in_compressed_tensors
from tests.float8_models import check_same_tokens, note_of, plain_tokens, with_fp8
from tests.four_bit_models import (
    LAYOUTS,
    Linear4bit,
    MacheteLinear,
    bitsandbytes,
    by_columns,
    compressed,
    marlin,
    tiny_target,
)
from tests.tiny import SIZES, random_matrices, random_prompt
from tests.tiny_families import tiny_family

UP = r"model\.model\.layers\.1\.mlp\.up_proj"


def with_head(base: Any) -> EaModel:
    torch.manual_seed(1)
    sizes = SIZES | dict(hidden_size=128, head_dim=16, vocab_size=32, draft_vocab_size=32)
    config = DraftConfig(**sizes, feature_layers=(1, 2, 2))
    every_token = [[rank] for rank in range(32)]  # so each step accepts a draft, whatever rounding makes of the text
    head = Eagle3Head(config, tree_choices=[*every_token, [0, 0], [0, 1], [0, 0, 0]])
    return EaModel(base, random_matrices(head, 0.1)).eval()


def addresses(model: nn.Module) -> dict[str, int]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def layer(layout: Callable[..., Any], rows: int = 64, depth: int = 128, **options: Any) -> Any:
    """One such module; its weight is refused or read as a part of a model in fp32."""
    wide = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1))
    return layout(wide, None, **options)[0]


def refused(module: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_four_bits(module, "there", torch.float32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_are_those_of_the_dequantised_model(name: str) -> None:
    target, prompt = tiny_target(), random_prompt(9)
    model, dequantised = with_fp8(target, LAYOUTS[name])
    with torch.no_grad():  # what rounding the weights has changed is seen
        assert (target(prompt).logits - dequantised(prompt).logits).abs().max() > 0.02
    before = addresses(model)
    originals = check_same_tokens(model, dequantised, prompt, 12)
    notes = {entry.path: entry.reason for entry in originals.report()}
    assert notes["four_bits"].startswith("21 projections of four bits are read by their weights, ")
    assert "projections" not in notes  # none is called
    assert addresses(model) == before and "generate" not in vars(model)
    if name not in ("compressed-tensors", "bitsandbytes, nested", "AWQ by Marlin"):
        return  # a pair reads its target as above, whatever its layers are
    drafting, alone = with_head(model), with_head(dequantised)
    expected = alone.eagenerate(prompt, max_new_tokens=12)[:, : 9 + 12]  # the last step may go beyond
    with optimize_eagle_with_triton(drafting):
        assert torch.equal(drafting.eagenerate(prompt, max_new_tokens=12)[:, : 9 + 12], expected)
        assert sum(drafting.accept_lengths) > 0
    assert addresses(model) == before


@pytest.mark.parametrize("name", ["bitsandbytes, nested", "AWQ by Marlin"])
def test_a_few_tokens_by_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    target = tiny_target(layers=1).to("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(quantised, "_has_fast_kernel", lambda weight, dtype: True)
    model, dequantised = with_fp8(target, LAYOUTS[name])
    check_same_tokens(model, dequantised, random_prompt(4).to(target.device), 2, kernels=True, cuda_graph=False)


@pytest.mark.parametrize("layout", [compressed, bitsandbytes])
def test_a_prompt_of_many_rows_does_not_call_a_shared_expert(layout: Callable) -> None:
    """A layer that is still compressed cannot be called, and bitsandbytes' changes its words on a CPU."""
    model, dequantised = with_fp8(_tiny_mixture(), layout)
    prompt = torch.arange(2, 22).repeat(1, 4)  # more rows than one operation takes
    originals = check_same_tokens(model, dequantised, prompt, 8)
    assert note_of(originals, "four_bits").startswith("28 projections of four bits are read by their weights")
    assert "experts" not in {entry.path for entry in originals.report()}


def test_nothing_is_copied_and_the_report_says_what_is_read() -> None:
    model, _ = with_fp8(tiny_target(), bitsandbytes, ("mlp.up_proj", "q_proj"))
    for module in model.modules():
        if type(module) is Linear4bit:
            module.forward = module.forward  # as accelerate leaves it when its hooks are taken off
    engine = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)).engine
    up, module = engine.view.layers[1].mlp.up, model.model.layers[1].mlp.up_proj
    assert isinstance(up.weight, FourBitWeight) and up.weight.shape == (192, 128)
    assert up.weight.packed.data_ptr() == module.weight.data_ptr()
    assert up.weight.scale.data_ptr() == module.weight.quant_state.absmax.data_ptr()
    assert engine.notes["four_bits"] == (
        "6 projections of four bits are read by their weights, 0.1 MiB, and their inputs are not rounded: "
        "6 of bitsandbytes (nf4) in groups of 64"
    )


def _clone(module: Any, name: str) -> None:
    setattr(module, name, copy.deepcopy(getattr(module, name)))


@pytest.mark.parametrize(
    ("layout", "name", "change"),
    [
        (bitsandbytes, "weight", lambda module: setattr(module.weight.quant_state, "absmax", torch.ones(192 * 2))),
        (by_columns, "scales", lambda module: _clone(module, "scales")),
        (compressed, "weight_scale", lambda module: _clone(module, "weight_scale")),
    ],
    ids=["bitsandbytes", "GPTQ", "compressed-tensors"],
)
def test_replaced_words_and_scales_are_found(layout: Callable, name: str, change: Callable) -> None:
    model, _ = with_fp8(tiny_target(), layout)
    optimize_with_triton(model)
    change(model.model.layers[1].mlp.up_proj)
    with pytest.raises(RuntimeError, match=rf"{UP}\.{name} was replaced"):
        model.generate(random_prompt(5), max_new_tokens=3)


def test_a_change_in_place_of_a_bias_that_is_copied_is_found() -> None:
    model, _ = with_fp8(tiny_target(layers=1), marlin)
    with optimize_with_triton(model) as (optimised, _):
        optimised.generate(random_prompt(5), max_new_tokens=3)
        model.model.layers[0].self_attn.q_proj.bias.mul_(2)
        with pytest.raises(RuntimeError, match=r"q_proj\.bias was changed in place, but the engine reads a copy"):
            optimised.generate(random_prompt(5), max_new_tokens=3, prompt_lookup_num_tokens=2)


def test_a_change_of_a_state_s_scales_in_place_takes_effect() -> None:
    model, dequantised = with_fp8(tiny_target(), bitsandbytes, ("o_proj",))
    prompt = random_prompt(9)
    with optimize_with_triton(model):
        before = model.generate(prompt, max_new_tokens=24, do_sample=False)
        for own in model.model.layers:
            own.self_attn.o_proj.weight.quant_state.absmax.mul_(-3)
        for own in dequantised.model.layers:
            own.self_attn.o_proj.weight.data.mul_(-3)
        expected = plain_tokens(dequantised, prompt)
        assert not torch.equal(before, expected)
        assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), expected)


def test_what_was_decompressed_is_called() -> None:
    model, dequantised = with_fp8(tiny_target(), compressed)
    for module, plain in zip(model.modules(), dequantised.modules(), strict=True):
        if hasattr(module, "quantization_status"):
            module.weight, module.quantization_status = plain.weight, "decompressed"
            del module.weight_packed
    originals = check_same_tokens(model, dequantised, random_prompt(9))
    notes = {entry.path: entry.reason for entry in originals.report()}
    assert "four_bits" not in notes and notes["projections"].startswith("21 are called")


def test_a_draft_of_four_bits_is_read_too() -> None:
    (model, dequantised), (draft, _) = with_fp8(tiny_target(), by_columns), with_fp8(tiny_target(seed=1), marlin)
    engine = EAGLEInference(draft, model, EAGLEConfig(num_draft_tokens=6))
    ids, _ = engine.generate(random_prompt(10), max_new_tokens=20, stop_token_ids=())
    assert torch.equal(ids, plain_tokens(dequantised, random_prompt(10), 20))
    assert "42 projections of four bits" in engine.report()
    assert "21 of GPTQ in groups of 64, 21 of MarlinLinear in groups of 64" in engine.report()


@pytest.mark.parametrize("layout", [compressed, bitsandbytes])
def test_the_vocabulary_projection_of_an_ea_model(layout: Callable) -> None:
    model, dequantised = with_fp8(tiny_target(), layout, ("lm_head", "o_proj"))
    drafting, alone, prompt = with_head(model), with_head(dequantised), random_prompt(9)
    with optimize_eagle_with_triton(drafting):
        for method in ("eagenerate", "generate"):
            tokens = getattr(drafting, method)(prompt, max_new_tokens=12)[:, : 9 + 12]
            assert torch.equal(tokens, getattr(alone, method)(prompt, max_new_tokens=12)[:, : 9 + 12])


def test_an_assistant_of_four_bits_is_read_too() -> None:
    target, (assistant, _) = tiny_target(), with_fp8(tiny_target(seed=1), bitsandbytes)
    assistant.generation_config.num_assistant_tokens = 3
    prompt = random_prompt(9)
    expected = plain_tokens(target, prompt, 12)
    with optimize_with_triton(target) as (optimised, originals):
        for _ in range(2):  # its modules cannot be called; replaced scales are read anew
            tokens = optimised.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=assistant)
            assert torch.equal(tokens, expected)
            state = assistant.model.layers[1].mlp.up_proj.weight.quant_state
            state.absmax = state.absmax.clone()
        assert "calls 2, fallbacks 0" in str(originals)


def test_a_vocabulary_projection_keeps_what_its_logits_are_divided_by() -> None:
    own = dict(vocab_size=32, num_hidden_layers=1, logits_scaling=4.0, tie_word_embeddings=False)
    config = GraniteConfig(**SIZES | dict(intermediate_size=64) | own)
    model, _ = with_fp8(GraniteForCausalLM(config).eval(), by_columns, ("lm_head",))
    head = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)).engine.view.head
    assert isinstance(head.weight, FourBitWeight) and head.divisor == 4.0


# --- called instead ---


class Multiplies(nn.Module):
    """What a module of gptqmodel computes."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def unread(weight: Tensor, bias: Tensor | None) -> Any:
    """A layer in an order that is not read, which can be called."""
    stands_for = by_columns(weight, None)[1]
    other: Any = MacheteLinear(tuple(weight.shape), 64, None)
    other.inner = Multiplies(stands_for.dequantised(torch.float32), None if bias is None else bias.detach())
    return other, stands_for


@pytest.fixture
def callable_machete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MacheteLinear multiplies, by a forward of its package's."""
    monkeypatch.setattr(MacheteLinear, "forward", lambda self, x: self.inner(x))
    MacheteLinear.forward.__module__ = "gptqmodel.nn_modules.qlinear"


@pytest.mark.usefixtures("callable_machete")
def test_other_layouts_are_refused_and_called_as_published() -> None:
    model, dequantised = with_fp8(tiny_target(), unread)
    with pytest.raises(UnsupportedModelError, match=r'a MacheteLinear, and its layout is not read; .*"gptq_marlin"'):
        optimize_with_triton(model)
    assert "generate" not in vars(model)
    originals = check_same_tokens(model, dequantised, random_prompt(9), activations="as published")
    assert note_of(originals, "projections").startswith("21 are called as modules")


def test_as_published_cannot_call_what_is_compressed() -> None:
    model, _ = with_fp8(tiny_target(), compressed)
    with pytest.raises(UnsupportedModelError, match=r"q_proj is compressed until .*dequantize=True"):
        optimize_with_triton(model, activations="as published")


@pytest.mark.parametrize("module", [compressed, bitsandbytes], ids=["compressed", "nf4"])
def test_matrices_of_latent_attention_are_dequantised(module: Any) -> None:
    """Queries are multiplied by parts of them. A change in place would not reach the copies."""
    latent = dict(q_lora_rank=64, kv_lora_rank=64, v_head_dim=16, moe_intermediate_size=64, intermediate_size=64)
    model, dequantised = with_fp8(tiny_family("glm4_moe_lite", **latent), module)
    prompt = torch.arange(2, 22)[None]
    originals = check_same_tokens(model, dequantised, prompt, 8)
    size = 4 * (16 + 16) * 64 * 4 * 4 / 2**20
    assert f"4 kv_b_proj are dequantised, {size:,.1f} MiB, because queries" in str(originals)
    changed = model.model.layers[1].self_attn.kv_b_proj
    with optimize_with_triton(model), torch.no_grad():
        for stored in changed.parameters():
            stored.copy_(stored.clone())
        message = r"layers.1.self_attn.kv_b_proj.\w+ was changed in place, but the engine"
        with pytest.raises(RuntimeError, match=message):
            model.generate(prompt, max_new_tokens=2)


@pytest.mark.usefixtures("callable_machete")
def test_joined_projections_are_called() -> None:
    model, dequantised = with_fp8(tiny_family("phi3"), unread, ("qkv_proj", "gate_up_proj"))
    originals = check_same_tokens(model, dequantised, torch.arange(2, 11)[None], 6)
    assert " are called as modules" in str(originals)


def test_what_has_no_fast_kernel_on_a_gpu_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for layers that cannot be called, because they are still compressed."""
    monkeypatch.setattr(quantised, "_has_fast_kernel", lambda weight, dtype: False)
    model, dequantised = with_fp8(tiny_target(), bitsandbytes)
    for module in model.modules():
        if type(module) is Linear4bit:  # a stand-in, whose own forward is not there
            called = dequantised.get_submodule(next(name for name, other in model.named_modules() if other is module))
            monkeypatch.setattr(module, "forward", called.forward)
    prompt = random_prompt(4)
    with optimize_with_triton(model, None) as (optimised, originals):
        assert torch.equal(plain_tokens(optimised, prompt), plain_tokens(dequantised, prompt))
        assert "are called as modules" in str(originals) and "read by their weights" not in str(originals)
    with optimize_with_triton(with_fp8(tiny_target(), compressed)[0], None) as (_, originals):
        assert "read by their weights" in str(originals) and "21 run the portable kernel" in str(originals)


def test_a_forward_of_its_own_is_called() -> None:
    model, dequantised = with_fp8(tiny_target(), by_columns, ("up_proj",))
    for own, plain in zip(model.model.layers, dequantised.model.layers, strict=True):
        own.mlp.up_proj.forward = plain.mlp.up_proj.forward
    originals = check_same_tokens(model, dequantised, random_prompt(9))
    assert any("3 are called" in entry.reason for entry in originals.report())


# --- refused ---


def test_ranks_do_not_share_them() -> None:
    model, _ = with_fp8(tiny_target(), marlin)
    view = copy.copy(read_causal_lm(model))
    object.__setattr__(view, "ranks", object())
    with pytest.raises(UnsupportedModelError, match=r"q_proj has weights of four bits, which ranks cannot share"):
        quantised.with_quantised(view, None, {"model": model})


def test_states_of_compressed_tensors_that_are_refused() -> None:
    module = layer(compressed)
    module.weight_shape.data = torch.tensor([64, 124])
    refused(module, r"there\.weight_shape must be \[64, 128\] .* padded columns .*dequantize=True")
    module = layer(compressed)
    module.weight_g_idx = nn.Parameter(torch.zeros(128, dtype=torch.int32), requires_grad=False)
    refused(module, r"there\.weight_g_idx must be None: .*activation order .*dequantize=True")
    module = layer(compressed, zeros=True)
    module.weight_zero_point.data = module.weight_zero_point.data.view(torch.uint8)
    refused(module, r"there: zero must be torch\.int32 \[8, 2\], got torch\.uint8 .*dequantize=True")
    module = layer(compressed, zeros=True)
    module.quantization_scheme.weights.symmetric = True
    refused(module, r"there\.weight_zero_point must be None in a symmetric scheme")
    del module.weight_zero_point
    module.quantization_scheme.weights.symmetric = False
    refused(module, r"there\.weight_zero_point is missing")
    module = layer(compressed)
    module.quantization_scheme.output_activations = object()
    refused(module, r"there must not round its outputs \(output_activations\).*dequantize=True")
    module = layer(compressed)
    module.weight_scale.data = module.weight_scale.data.half()
    refused(module, r"there must have scales in torch\.float32, the model's dtype, got torch\.float16")
    module = layer(compressed)
    module.weight_scale.data[3, 1] = float("nan")
    refused(module, r"there must have finite scales")


def test_states_of_bitsandbytes_that_are_refused() -> None:
    def changed(**fields: Any) -> Any:
        module = layer(bitsandbytes)
        module.weight.quant_state = SimpleNamespace(**{**vars(module.weight.quant_state), **fields})
        return module

    refused(changed(packing_format_for_cpu=True), r"there\.weight was packed for this CPU .*load the model again")
    refused(changed(quant_type="af4"), r"there\.weight must be nf4 or fp4, got 'af4'")
    refused(changed(shape=torch.Size([128, 64])), r"there\.weight must be quantised as \[64, 128\], got \[128, 64\]")
    refused(changed(blocksize=256), r"blocks of 256, got 128")
    refused(changed(absmax=torch.ones(100)), r"absmax must hold a number for each block, got \[100\]")
    refused(changed(code=torch.ones(8)), r"there: table must be torch\.float32 \[16\]")
    module = layer(bitsandbytes)
    del module.weight.quant_state
    refused(module, r"there\.weight has no quant_state: move the model to its device")
    module = layer(bitsandbytes)
    state = module.weight.quant_state
    module.weight = nn.Parameter(module.weight.data[:100], requires_grad=False)
    module.weight.quant_state = state
    refused(module, r"there\.weight must hold 4096 bytes, contiguous from a multiple of 4, got \[100, 1\]")


def test_a_layer_that_is_packed_for_a_cpu_is_found() -> None:
    """By a call of the original. To optimise it again would not help."""
    model, _ = with_fp8(tiny_target(), bitsandbytes)
    with optimize_with_triton(model):
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data, weight.quant_state.packing_format_for_cpu = weight.data.view(192, 64).clone(), True
        with pytest.raises(RuntimeError, match=r"up_proj\.weight was packed for this CPU .*load the model again"):
            model.generate(random_prompt(9), max_new_tokens=3)


def test_longer_blocks_of_bitsandbytes_are_read() -> None:
    module = layer(bitsandbytes)
    state = module.weight.quant_state
    state.absmax, state.blocksize = state.absmax[::2].contiguous(), 128
    projection, kind = read_four_bits(module, "there", torch.float32)
    assert kind.endswith("in groups of 128") and isinstance(projection.weight, FourBitWeight)
    assert projection.weight.group == 128 and projection.weight.scale.shape == (64, 1)


def test_states_of_gptqmodel_that_are_refused() -> None:
    module = layer(by_columns)
    module.g_idx = module.g_idx.flip(0)
    refused(module, r"there\.g_idx must be k // 64: columns in another order \(desc_act\)")
    module = layer(by_columns)
    module.format, module.qzero_format = SimpleNamespace(value="gptq"), lambda: 1
    refused(module, r"there\.qzeros must be the zeros, got zeros less 1")
    module.qzero_format = lambda: 2
    read_four_bits(module, "there", torch.float32)
    module.adapter = object()
    refused(module, r"there\.adapter must be None, got a object; activations=\"as published\"")
    module = layer(by_columns)
    module.scales = module.scales.half()
    refused(module, r"there must have scales in torch\.float32, .*: load the model with dtype=torch\.float16; activ")
    module = layer(marlin)
    module.scales = module.scales.half()
    refused(module, r"load the model with dtype=torch\.float16, or call it once, which casts them; activations=")
    module = layer(by_columns)
    module.online_full_had = True
    refused(module, r"there must not rotate its input")
    module = layer(marlin)
    module.g_idx = torch.arange(128)
    refused(module, r"there\.g_idx must be empty")
    module = layer(marlin)
    module._marlin_tile_padding = (64, 256)
    refused(module, r"there is padded to \[64, 256\]")
    refused(layer(marlin, group=128), r"one group's order of scales is not read")
    module = layer(marlin)
    module.qweight = module.qweight.view(16, 64)  # as long as its post_init has not run
    refused(module, r"there: .*")


# --- the packages' own ---


def _checkpoint_of_compressed_tensors(folder: Path, model: Any) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(f"{name}.weight")
        rows, depth = weight.shape
        scale = weight.view(rows, -1, 64).abs().amax(-1) / 7.5
        numbers = (weight.view(rows, -1, 64) / scale[..., None]).round().clamp(-8, 7)
        tensors[f"{name}.weight_packed"] = pack_to_int32(numbers.view(rows, depth).to(torch.int8), 4)
        tensors[f"{name}.weight_scale"], tensors[f"{name}.weight_shape"] = scale, torch.tensor([rows, depth])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    in_compressed_tensors(folder, "pack-quantized", weights={**kind, "dynamic": False})


def _tiny_mixture() -> Any:
    """With a shared expert, and whole groups of 64."""
    return tiny_family("glm4_moe", moe_intermediate_size=64, intermediate_size=64)


@pytest.mark.packages
def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers", minversion="5.20")
    _checkpoint_of_compressed_tensors(tmp_path, tiny_target())
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path, dtype=torch.float32)
    model, dequantised, prompt = load(), load(), random_prompt(9)
    expected = plain_tokens(dequantised, prompt)  # its first forward decompresses it
    assert type(dequantised.model.layers[1].mlp.up_proj.weight) is nn.Parameter
    before = addresses(model)
    with optimize_with_triton(model) as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        assert note_of(originals, "four_bits").endswith("21 of compressed-tensors in groups of 64")
    assert addresses(model) == before
    assert torch.equal(plain_tokens(model, prompt), expected)
    remedy = r"was decompressed: .* before its first call; .*dequantize=True"
    with pytest.raises(UnsupportedModelError, match=remedy):
        optimize_with_triton(model)  # the package has put its offloading around every layer
    model = load()
    with optimize_with_triton(model):
        model(prompt)
        with pytest.raises(RuntimeError, match=remedy):
            model.generate(prompt, max_new_tokens=3)
    drafting = with_head(load())  # the plain EaModel runs the layers by themselves
    assert torch.equal(drafting.eagenerate(prompt, max_new_tokens=24)[:, : 9 + 24], expected)
    dequantised = load(quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    with optimize_with_triton(dequantised):
        assert torch.equal(plain_tokens(dequantised, prompt), expected)


@pytest.mark.packages
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_are_what_compressed_tensors_decompresses(group: int | None, symmetric: bool, dtype: Any) -> None:
    package = pytest.importorskip("compressed_tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base").PackedQuantizationCompressor
    del package
    rows, depth = 96, 128
    wide = torch.randn(rows, depth, generator=torch.Generator().manual_seed(3)).to(dtype)
    strategy = "channel" if group is None else "group"
    args = quantization.QuantizationArgs(num_bits=4, symmetric=symmetric, strategy=strategy, group_size=group)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    groups = wide.float().view(rows, depth // (group or depth), -1)
    scale = ((groups.amax(-1) - groups.amin(-1)) / 15).to(dtype)
    zero = (-8 - groups.amin(-1) / scale.float()).round().clamp(-8, 7).to(torch.int8)
    state = {"weight": wide, "weight_scale": scale} | ({} if symmetric else {"weight_zero_point": zero})
    kept = base.compress(state, scheme)
    module: Any = nn.Linear(depth, rows, bias=False, device="meta")
    del module.weight
    for name, tensor in kept.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    module.quantization_scheme, module.quantization_status = scheme, "compressed"
    projection, _ = read_four_bits(module, "there", dtype)
    assert isinstance(projection.weight, FourBitWeight)
    assert projection.weight.packed.data_ptr() == kept["weight_packed"].data_ptr()
    assert torch.equal(projection.weight.dequantised(dtype), base.decompress(kept, scheme)["weight"])


@pytest.mark.packages
@pytest.mark.parametrize("nested", [False, True], ids=["single", "nested"])
@pytest.mark.parametrize(("kind", "storage"), [("nf4", torch.uint8), ("fp4", torch.bfloat16)], ids=["nf4", "fp4"])
def test_a_checkpoint_of_bitsandbytes(kind: str, storage: Any, nested: bool, tmp_path: Path) -> None:
    package = pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers", minversion="5.20")
    tiny_target().save_pretrained(tmp_path / "wide")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=torch.float32,
    )
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    load(tmp_path / "wide", quantization_config=config).save_pretrained(tmp_path / "narrow")
    model, dequantised, prompt = load(tmp_path / "narrow"), tiny_target(), random_prompt(9)
    for name, module in model.named_modules():
        if isinstance(module, package.nn.Linear4bit):
            assert module.weight.dtype == storage
            wide = package.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            dequantised.get_submodule(name).weight.data.copy_(wide)
            projection, _ = read_four_bits(module, name, torch.float32)
            assert isinstance(projection.weight, FourBitWeight)
            assert torch.equal(projection.weight.dequantised(torch.float32), wide)
            module.weight.quant_state.dtype = torch.bfloat16
            wide = package.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(projection.weight.dequantised(torch.bfloat16), wide)
    before = addresses(model)
    with optimize_with_triton(model) as (optimised, originals):
        tokens = optimised.generate(prompt, max_new_tokens=24, do_sample=False)
        notes = {entry.path: entry.reason for entry in originals.report()}
        assert f"21 of bitsandbytes ({kind}" in notes["four_bits"] and ("nested" in notes["four_bits"]) == nested
    assert torch.equal(tokens, plain_tokens(dequantised, prompt))
    assert addresses(model) == before


@pytest.mark.packages
@pytest.mark.parametrize("package", ["compressed_tensors", "bitsandbytes"])
def test_experts_are_in_16_bits_after_loading(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    transformers = pytest.importorskip("transformers", minversion="5.20")
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path, dtype=torch.float32)
    if package == "compressed_tensors":
        _checkpoint_of_compressed_tensors(tmp_path, _tiny_mixture())
    else:
        _tiny_mixture().save_pretrained(tmp_path)
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        load.keywords["quantization_config"] = config
    model, prompt = load(), torch.arange(2, 22).repeat(1, 4)
    expected = plain_tokens(load(), prompt, 8)
    assert model.model.layers[-1].mlp.experts.down_proj.dtype == torch.float32
    with optimize_with_triton(model) as (optimised, originals):
        for _ in range(2):  # reading a prompt of many rows changes nothing
            assert torch.equal(optimised.generate(prompt, max_new_tokens=8, do_sample=False), expected)
        assert note_of(originals, "four_bits").startswith("28 projections of four bits are read by their weights")
        assert "experts" not in {entry.path for entry in originals.report()}


@pytest.mark.packages
def test_experts_that_transformers_does_not_load_are_refused(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    transformers = pytest.importorskip("transformers", minversion="5.20")
    remedy = r".*docs/limits.md#experts-in-four-bits$"
    folder, config = tmp_path / "lists", transformers.BitsAndBytesConfig(load_in_4bit=True)
    _tiny_mixture().save_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:  # as transformers 4 quantised them
        tensors[name], state = functional.quantize_4bit(tensors[name])
        tensors |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts.down_proj must be \[8, 64, 64\], got \[8, 2048, 1\]" + remedy):
        load_target(str(folder))


@pytest.mark.packages
@pytest.mark.parametrize("published", ["gptq", "gptq_v2"])
def test_a_checkpoint_of_gptqmodel(published: str, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    transformers = pytest.importorskip("transformers", minversion="5.20")
    target, dequantised, prompt = tiny_target().half(), tiny_target().half(), random_prompt(9)
    state = target.state_dict()
    for name, module in target.named_modules():
        if name.endswith("_proj"):
            ours, stands_for = by_columns(module.weight, None)
            dequantised.get_submodule(name).weight.data.copy_(stands_for.dequantised(torch.float16))
            state |= {f"{name}.{own}": tensor for own, tensor in ours.named_buffers()}
            if published == "gptq":  # zeros of 1 and more are stored one less
                state[f"{name}.qzeros"] = ours.qzeros - 0x11111111
            del state[f"{name}.weight"]
    kind = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
    target.config.quantization_config = {**kind, "format": published, "checkpoint_format": published}
    target.save_pretrained(tmp_path, state_dict=state)
    config = transformers.GPTQConfig(bits=4, backend="gptq_torch")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, dtype=torch.float16, quantization_config=config)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            projection, _ = read_four_bits(module, name, torch.float16)
            wide = super(type(module), module).dequantize_weight().T
            assert isinstance(projection.weight, FourBitWeight)
            assert torch.equal(projection.weight.dequantised(torch.float16), wide)
            assert torch.equal(dequantised.get_submodule(name).weight, wide)
    with optimize_with_triton(dequantised) as (optimised, _):
        expected = optimised.generate(prompt, max_new_tokens=24, do_sample=False)
    with optimize_with_triton(model) as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        assert any("21 of GPTQ in groups of 64" in entry.reason for entry in originals.report())
