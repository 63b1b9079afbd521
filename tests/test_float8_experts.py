"""Mixtures of experts in FP8, as transformers holds them: read where they lie, with the tokens of the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle_triton import EAGLEConfig, EAGLEInference, UnsupportedModelError, optimize_with_triton
from eagle_triton.benchmarks.quantised import FP8Experts, round_target
from eagle_triton.engine.model.modules import feed_forward
from eagle_triton.engine.operations import make_operations
from eagle_triton.families.reading.experts import read_experts
from eagle_triton.runtime import float8_expert_weight
from eagle_triton.runtime.float8_weight import Float8Weight, quantised
from eagle_triton.runtime.split_sums import total_of
from tests.float8_models import check_same_tokens, note_of, plain_tokens, replacing
from tests.stored_experts import PROMPT, check_groups, check_replaced_is_found, check_tokens, tokens_of
from tests.tiny_families import tiny_family
from tests.tiny_hybrids import KINDS, tiny_hybrid

float8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
if not hasattr(getattr(float8, "FP8Experts", None), "_apply_gate"):
    pytest.skip("this transformers has no experts in FP8 that say how they lie", allow_module_level=True)

FAMILIES = ("qwen3_moe", "glm4_moe", "qwen3_next")
WIDE = {"moe_intermediate_size": 128, "intermediate_size": 128}  # gate and up have blocks of their own
KEPT = ("lm_head", "shared_expert_gate")  # as published models keep them
EXPERTS = ("gate_up_proj", "down_proj")


def plain_model(family: str) -> Any:
    return tiny_hybrid(family, moe_intermediate_size=128) if family in KINDS else tiny_family(family, **WIDE)


def in_float8(model: Any) -> tuple[Any, Any]:
    """A copy of a model with the modules that transformers loads for a model in FP8, and one with their exact values in
    plain modules."""
    from transformers import FineGrainedFP8Config

    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    float8.replace_with_fp8_linear(ours, list(KEPT), FineGrainedFP8Config())
    for name, module in ours.named_modules():
        parts = ("weight",) if isinstance(module, float8.FP8Linear) else EXPERTS
        for part in parts if isinstance(module, (float8.FP8Linear, float8.FP8Experts)) else ():
            wide = getattr(plain.get_submodule(name), part)
            found: Any = quantised(wide, block=True) if part == "weight" else float8_expert_weight.quantised(wide)
            values, scales = found.tensors
            setattr(module, part, nn.Parameter(values, requires_grad=False))
            setattr(module, f"{part}_scale_inv", nn.Parameter(scales, requires_grad=False))
            with torch.no_grad():
                wide.copy_(found.dequantised(torch.float32))
        if isinstance(module, float8.FP8Linear) and module.bias is not None:
            module.bias = nn.Parameter(plain.get_submodule(name).bias.detach().clone(), requires_grad=False)
    return ours.eval(), plain.eval()


def mixture_of(model: Any, layer: int = -1) -> Any:
    return model.model.layers[layer].mlp


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_dequantised_model(family: str) -> None:
    """Alone and in trees, with prompts of more rows than one operation takes; the modules cannot run here."""
    model, dequantised = in_float8(plain_model(family))
    mixtures = sum(isinstance(module, float8.FP8Experts) for module in model.modules())
    note = f"FP8 projections and {mixtures} mixtures of experts in FP8 are read by their weights"
    with optimize_with_triton(dequantised):
        expected = tokens_of(dequantised)
    for draft in (None, "ngram"):
        check_tokens(model, draft, expected, note)
    assert type(mixture_of(model).experts) is float8.FP8Experts


def test_rows_run_in_groups_by_the_weights_and_many_by_weights_made_wide() -> None:
    """Also a shared expert in FP8."""
    model, dequantised = in_float8(plain_model("qwen3_5_moe"))
    engine = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)).engine
    check_groups(engine.view.layers[-1].mlp, mixture_of(dequantised))


def test_eagle_inference_drafts_with_it_and_nothing_is_copied() -> None:
    model, dequantised = in_float8(plain_model("qwen3_moe"))
    engine, prompt = EAGLEInference("suffix", model, EAGLEConfig(fallback=False)), torch.cat([PROMPT, PROMPT], 1)
    got, stats = engine.generate(prompt, max_new_tokens=24, stop_token_ids=())
    assert torch.equal(got, plain_tokens(dequantised, prompt)) and stats["acceptance_rate"] > 0
    experts, read = mixture_of(model).experts, engine.engine.view.layers[-1].mlp.weights
    for part, name in ((read.gate_up, "gate_up_proj"), (read.down, "down_proj")):
        assert part.values.data_ptr() == getattr(experts, name).data_ptr()
        assert part.scales.data_ptr() == getattr(experts, f"{name}_scale_inv").data_ptr()
    total = sum(tensor.nbytes for name, tensor in model.named_parameters() if "embed" not in name)
    assert round(engine.engine.view.bytes_read(1000)) == total


def test_in_fp16_trees_give_what_plain_decoding_gives() -> None:
    model, _ = in_float8(plain_model("mixtral"))
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.dtype == torch.float32 and not name.endswith("scale_inv"):
                module._parameters[name] = nn.Parameter(tensor.half(), requires_grad=False)
    plain = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4)).generate(PROMPT, 16, return_stats=False)
    trees = EAGLEInference("suffix", model).generate(PROMPT, 16, return_stats=False)
    assert torch.equal(plain, trees)


@pytest.mark.parametrize("part", ["down_proj", "gate_up_proj_scale_inv"])
def test_replaced_weights_and_scales_are_found(part: str) -> None:
    model, _ = in_float8(plain_model("mixtral"))
    check_replaced_is_found(model, 1, part)


def test_as_published_calls_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products are stand-ins, because transformers downloads its own; they round what they are given too."""

    def product(x: Tensor, weight: Tensor, scale: Tensor, *_: Any, **__: Any) -> Tensor:
        wide = Float8Weight(weight, scale).dequantised(x.dtype)
        return nn.functional.linear(x.to(torch.float8_e4m3fn).to(x.dtype), wide)

    monkeypatch.setattr(float8, "fp8_linear", product)
    model, dequantised = in_float8(plain_model("mixtral"))
    model.config._experts_implementation = "eager"
    expected = plain_tokens(model, PROMPT)
    assert not torch.equal(expected, plain_tokens(dequantised, PROMPT))
    originals = check_same_tokens(model, model, PROMPT, activations="as published")
    note = "4 mixtures of experts with FP8 weights are called as modules, and round their inputs"
    assert note_of(originals).endswith(note)
    assert 'and activations="as published" calls them' in note_of(originals, "experts")


def _nan(values: Tensor) -> Tensor:
    values.view(torch.uint8)[1, 3, 5] = 0xFF
    return values


WHERE = r"model\.model\.layers\.1\.mlp\.experts"
REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "no scales": (replacing("down_proj_scale_inv", lambda _: None), rf"{WHERE}.down_proj_scale_inv is missing"),
    "shape": (
        replacing("down_proj_scale_inv", lambda scales: scales[:, :, :0]),
        rf"{WHERE}.down_proj: scales must be float32 or bfloat16 \[4, 1, 1\], got .* \[4, 1, 0\]; activations=",
    ),
    "powers of two": (
        replacing("gate_up_proj_scale_inv", lambda scales: scales.half()),
        rf"{WHERE}.gate_up_proj: scales must be float32 or bfloat16 .* got torch.float16",
    ),
    "infinite": (
        replacing("gate_up_proj_scale_inv", lambda s: s.fill_(torch.inf)),
        rf"{WHERE}.gate_up_proj_scale_inv must be",
    ),
    "nan": (replacing("gate_up_proj", _nan), rf"{WHERE}.gate_up_proj must be finite, got NaN"),
    "e5m2": (
        replacing("down_proj", lambda values: values.float().to(torch.float8_e5m2)),
        rf"{WHERE}.down_proj: values must be float8_e4m3fn .* got torch.float8_e5m2",
    ),
    "blocks": (
        lambda e: setattr(e, "block_size", (64, 64)),
        rf"{WHERE} must have scales for blocks of 128 by 128, got",
    ),
    "one scale": (
        lambda e: setattr(e, "block_size", None),
        rf"{WHERE} must have scales for blocks of 128 by 128, got None",
    ),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_its_path(change: Callable[[Any], None], message: str) -> None:
    model, _ = in_float8(plain_model("mixtral"))
    change(mixture_of(model, 1).experts)
    with pytest.raises(UnsupportedModelError, match=message):
        optimize_with_triton(model)


def test_a_block_of_scales_over_gate_and_up_is_refused() -> None:
    model, _ = in_float8(tiny_family("mixtral", intermediate_size=192))
    with pytest.raises(UnsupportedModelError, match="gate_up_proj must have a multiple of 256 rows, .* got 384"):
        optimize_with_triton(model)


CALLED: dict[str, Callable[[Any], Any]] = {
    "has a forward hook": lambda block: block.experts.register_forward_hook(lambda module, args, out: None),
    "experts_implementation 'deepgemm'": lambda block: setattr(
        block.experts, "config", type("Config", (), {"_experts_implementation": "deepgemm"})
    ),
    "another activation than SwiGLU": lambda block: setattr(block.experts, "limit", 10.0),
}


@pytest.mark.parametrize("reason", CALLED)
def test_what_is_not_understood_is_called(reason: str) -> None:
    block = mixture_of(in_float8(plain_model("mixtral"))[0])
    assert read_experts(block, torch.float32, root="there", float8=True).weights is not None
    CALLED[reason](block)
    found = read_experts(block, torch.float32, root="there", float8=True)
    assert found.weights is None and reason in str(found.reason)


def test_scales_of_inputs_are_not_read() -> None:
    """A module with a static scheme has them; inputs are not rounded here."""
    block = mixture_of(in_float8(plain_model("mixtral"))[0])
    for name in EXPERTS:
        setattr(block.experts, f"{name}_activation_scale", nn.Parameter(torch.ones(4)))
    assert read_experts(block, torch.float32, root="there", float8=True).weights is not None


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_model_to_time_has_such_experts(family: str) -> None:
    model = plain_model(family)
    round_target(model, "fp8")
    mixtures = sum(isinstance(module, FP8Experts) for module in model.modules())
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    with optimize_with_triton(model, "ngram") as (optimised, originals):
        assert torch.equal(optimised.generate(PROMPT, max_new_tokens=8, do_sample=False), expected)
        assert mixtures >= 3 and f"{mixtures} mixtures of experts in FP8 are read" in note_of(originals)
    x = torch.randn(1, 600, 64)
    found = read_experts(mixture_of(model), torch.float32, root="there", float8=True)
    torch.testing.assert_close(total_of(feed_forward(make_operations(), found, x)), mixture_of(model)(x))
