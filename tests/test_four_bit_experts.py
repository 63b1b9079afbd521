"""Mixtures of compressed-tensors: experts stay in four bits, with the tokens of the dequantised model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel, optimize_with_triton
from eagle_triton.benchmarks.quantised import experts_in_four_bits, round_target
from eagle_triton.families.reading.experts import read_experts
from eagle_triton.models import four_bit_experts, loading
from eagle_triton.models.four_bit_experts import FourBitExperts
from eagle_triton.models.loading import load_target
from eagle_triton.models.mxfp4 import NAMES
from eagle_triton.runtime.four_bit_weight import packed as as_words
from tests.checkpoints import config_of, edited, in_compressed_tensors
from tests.float8_models import check_same_tokens, note_of, plain_tokens
from tests.four_bit_models import rounded
from tests.stored_experts import PROMPT, check_groups, check_replaced_is_found, check_tokens, tokens_of
from tests.tiny_families import tiny_family, tiny_head
from tests.tiny_hybrids import KINDS, tiny_hybrid

transformers = pytest.importorskip("transformers", minversion="5.24", reason="this loads words of experts as they are")

FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "qwen3_next")


def plain_model(family: str, inner: int = 64) -> Any:
    if family in KINDS:
        return tiny_hybrid(family, moe_intermediate_size=inner)
    return tiny_family(family, moe_intermediate_size=inner, intermediate_size=inner)


def in_four_bits(model: Any, group: int = 64) -> tuple[Any, Any]:
    """A copy of a model with experts in four bits, and one with their exact values."""
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    for path, module in model.named_modules():
        if path.endswith(".experts"):
            stored = experts_in_four_bits(ours.get_submodule(path), group)
            ours.set_submodule(path, stored)
            for name in NAMES:
                wide = stored.dequantised(name, torch.arange(stored.num_experts), torch.float32)
                assert not torch.equal(wide, getattr(module, name))
                getattr(plain.get_submodule(path), name).data.copy_(wide)
    return ours, plain


@pytest.mark.parametrize(("family", "draft"), list(zip(FAMILIES, ("ngram", None, "ngram", None), strict=True)))
def test_tokens_are_those_of_the_dequantised_model(family: str, draft: str | None) -> None:
    """Alone or in trees, with prompts of more rows than one operation takes, and after that by the modules."""
    model, dequantised = in_four_bits(plain_model(family))
    mixtures = sum(isinstance(module, FourBitExperts) for module in model.modules())
    expected = tokens_of(dequantised)
    check_tokens(model, draft, expected, f"experts_in_four_bits: {mixtures} mixtures are read in four bits, ")
    assert torch.equal(tokens_of(model), expected)


def test_rows_run_in_groups_by_the_weights_and_many_by_the_module() -> None:
    block = in_four_bits(plain_model("qwen3_moe"))[0].model.layers[-1].mlp
    check_groups(read_experts(block, torch.float32, root="there"), block)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_module_dequantises_only_the_experts_that_are_chosen(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four; all if there are as many choices, so that nothing waits for the device."""
    ours, exact = in_four_bits(plain_model("mixtral"))
    stored, plain = (one.model.layers[0].mlp.experts for one in (ours, exact))
    stored.config._experts_implementation = plain.config._experts_implementation = implementation
    made, own = [], FourBitExperts.dequantised

    def dequantise(self: Any, name: str, experts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made.append((name, experts.tolist()))
        return own(self, name, experts, dtype)

    monkeypatch.setattr(FourBitExperts, "dequantised", dequantise)
    for chosen, dequantised in (([[3, 1]], [1, 3]), ([[3, 1], [1, 3]], [0, 1, 2, 3])):
        made.clear()
        x, places, weights = torch.randn(len(chosen), 64), torch.tensor(chosen), torch.rand(len(chosen), 2)
        torch.testing.assert_close(stored(x, places, weights), plain(x, places, weights))
        assert made == [(name, dequantised) for name in NAMES]


def test_an_eagle_head_drafts_for_it() -> None:
    model, dequantised = in_four_bits(plain_model("qwen3_moe"))
    head = tiny_head(model, eagle3=True)
    expected = EaModel(dequantised, head).eval().eagenerate(PROMPT, max_new_tokens=16)
    assert torch.equal(EaModel(model, head).eval().eagenerate(PROMPT, max_new_tokens=16), expected)
    engine = EAGLEInference(head, model, EAGLEConfig(fallback=False))
    tokens, _ = engine.generate(PROMPT, max_new_tokens=16, stop_token_ids=())
    assert torch.equal(tokens, expected[:, : tokens.shape[1]])
    experts, read = model.model.layers[-1].mlp.experts, engine.engine.view.layers[-1].mlp.weights
    assert read.down.packed.data_ptr() == experts.down_proj_packed.data_ptr()


def test_replaced_words_and_scales_are_found() -> None:
    model, _ = in_four_bits(plain_model("mixtral"))
    check_replaced_is_found(model, 1, "gate_up_proj_scale")


def test_groups_that_no_kernel_reads_are_called_as_modules() -> None:
    model, dequantised = in_four_bits(plain_model("mixtral"), group=16)
    originals = check_same_tokens(model, dequantised, PROMPT, 8)
    assert note_of(originals, "experts").endswith(
        "layers.0.mlp has experts.gate_up_proj that does not fit: a group must be 32 or 64 columns, a multiple of "
        "128, or all 64, got 4 groups of a row"
    )


def test_a_model_to_time_is_rounded() -> None:
    model = plain_model("glm4_moe", inner=128)
    round_target(model, "int4")
    assert isinstance(model.model.layers[-1].mlp.experts, FourBitExperts)
    expected = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    with optimize_with_triton(model, "ngram") as (optimised, originals):
        assert torch.equal(optimised.generate(PROMPT, max_new_tokens=6, do_sample=False), expected)
        assert "3 mixtures are read in four bits" in str(originals)


def test_only_integers_of_four_bits_stay_packed() -> None:
    model = plain_model("mixtral")
    for kind, bits, stay in (("int", 8, False), ("float", 4, False), ("int", 4, True)):
        weights = SimpleNamespace(num_bits=bits, type=kind, group_size=64, symmetric=True)
        four_bit_experts._replace_experts(
            model,
            SimpleNamespace(config_groups={"all": SimpleNamespace(targets=["Linear"], weights=weights)}),
            ["model.layers.0.mlp.experts"],
        )
        assert isinstance(model.model.layers[0].mlp.experts, FourBitExperts) == stay
    for method, form, packed in (
        ("compressed-tensors", "pack-quantized", True),
        ("compressed-tensors", "float-quantized", False),
        ("gptq", "pack-quantized", False),
    ):
        config = SimpleNamespace(quantization_config={"quant_method": method, "format": form})
        assert four_bit_experts.is_packed(config) == packed
        config.quantization_config = {"quant_method": method, "config_groups": {"all": {"format": form}}}
        assert four_bit_experts.is_packed(config) == packed


def test_a_given_configuration_is_left_to_transformers(tmp_path: Path) -> None:
    config = plain_model("mixtral").config
    config.quantization_config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config.save_pretrained(tmp_path)
    assert loading._reader_of(str(tmp_path), {}) is loading._read_packed
    for option in ("config", "quantization_config", "tp_plan"):
        assert loading._reader_of(str(tmp_path), {option: config}) is loading._read_target


# --- loaded by the package ---


def by_compressed_tensors(name: str, numbers: Tensor, scale: Tensor, zero: Tensor | None) -> dict[str, Tensor]:
    """The tensors of a weight [N, K] in a checkpoint. zero [N, K / group]: None for 8."""
    parts = {"packed": as_words(numbers), "scale": scale, "shape": torch.tensor(numbers.shape)}
    if zero is not None:
        parts["zero_point"] = as_words(zero.T.contiguous()).T.contiguous()
    return {f"{name}_{part}": tensor for part, tensor in parts.items()}


def written(
    folder: Path,
    family: str,
    group: int | None = 32,
    zeros: bool = False,
    stored_as: Callable[..., dict[str, Tensor]] = by_compressed_tensors,
) -> Any:
    """A checkpoint with all projections packed, as its repository's names are, and a model with exact values. group
    None: one scale for a row. stored_as: by compressed-tensors unless given, without its quantization_config."""
    plain_model(family).save_pretrained(folder)
    file = folder / "model.safetensors"
    stored, plain = load_file(file), load_file(file)
    for name in [name for name in stored if re.search(r"(_proj|\.w[123])\.weight$", name)]:
        weight = stored.pop(name)
        numbers, scale, zero, stands_for = rounded(weight, group or weight.shape[1], zeros)
        plain[name] = stands_for.dequantised(torch.float32)
        stored |= stored_as(name, numbers, scale, zero if zeros else None)
    save_file(plain, file, metadata={"format": "pt"})
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_file(stored, file, metadata={"format": "pt"})
    if stored_as is not by_compressed_tensors:
        return exact
    weights = {"num_bits": 4, "type": "int", "symmetric": not zeros, "dynamic": False}
    weights |= {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    in_compressed_tensors(folder, "pack-quantized", ("lm_head", "re:.*mlp.gate$"), weights=weights)
    return exact


def experts_of(model: Any) -> list[Any]:
    return [module for path, module in model.named_modules() if path.endswith(".experts")]


def check_in_four_bits(model: Any, exact: Any, family: str) -> None:
    """Its experts are those of the exact model, and so are its tokens, by the engine and by its own forward."""
    expected = plain_tokens(exact, PROMPT, 12)
    for stored, plain in zip(experts_of(model), experts_of(exact), strict=True):
        for name in NAMES:
            assert getattr(stored, f"{name}_packed").dtype == torch.int32
            wide = stored.dequantised(name, torch.arange(plain.num_experts), torch.float32)
            assert torch.equal(wide, getattr(plain, name))
    with optimize_with_triton(model, "ngram") as (optimised, originals):
        assert torch.equal(optimised.generate(PROMPT, max_new_tokens=12, do_sample=False), expected)
        notes = {entry.path for entry in originals.report()}
        assert "four_bits" in notes and ("experts_in_four_bits" in notes) == (family != "olmo2")
        assert "called as" not in str(originals)
    assert torch.equal(plain_tokens(model, PROMPT, 12), expected)  # its own forward decompresses what is dense


@pytest.mark.packages
@pytest.mark.parametrize(
    ("family", "group", "zeros"),
    [("qwen3_moe", 32, False), ("mixtral", 64, True), ("glm4_moe", None, True), ("olmo2", 32, True)],
)
def test_checkpoints_stay_in_four_bits(family: str, group: int | None, zeros: bool, tmp_path: Path) -> None:
    """Also with zeros, which transformers itself does not load, and in dense layers."""
    pytest.importorskip("compressed_tensors")
    exact = written(tmp_path, family, group, zeros)
    model = load_target(str(tmp_path))
    check_in_four_bits(model, exact, family)
    assert all(isinstance(stored, FourBitExperts) for stored in experts_of(model))


@pytest.mark.packages
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_they_are_rounded_as_compressed_tensors_rounds_them(zeros: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base").PackedQuantizationCompressor
    quantization = pytest.importorskip("compressed_tensors.quantization")
    written(tmp_path, "qwen3_moe", 32, zeros)
    stored = experts_of(load_target(str(tmp_path), dtype=dtype))[0]
    args = quantization.QuantizationArgs(num_bits=4, symmetric=not zeros, strategy="group", group_size=32)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    for expert in (0, 5):
        parts = {
            f"weight_{part}": getattr(stored, f"down_proj_{part}")[expert].detach()
            for part in ("packed", "scale", "shape", *(["zero_point"] if zeros else []))
        }
        found = base.decompress(parts, scheme)["weight"]
        assert torch.equal(stored.dequantised("down_proj", torch.tensor([expert]), dtype)[0], found)


@pytest.mark.packages
def test_a_loaded_model_is_saved_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    written(tmp_path / "first", "mixtral")
    model = load_target(str(tmp_path / "first"))
    model.save_pretrained(tmp_path / "second")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert config_of(tmp_path / "second")["quantization_config"]["quant_method"] == "compressed-tensors"
    again = load_target(str(tmp_path / "second"))
    assert torch.equal(plain_tokens(again, PROMPT, 8), plain_tokens(model, PROMPT, 8))


@pytest.mark.packages
def test_eagle_inference_loads_it_and_arguments_are_honoured(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    exact = written(tmp_path, "qwen3_moe")
    engine = EAGLEInference("suffix", str(tmp_path), device="cpu")
    tokens = engine.generate(PROMPT, max_new_tokens=8, stop_token_ids=(), return_stats=False)
    assert torch.equal(tokens, plain_tokens(exact, PROMPT, 8))
    assert engine.engine.notes["experts_in_four_bits"].startswith("3 mixtures are read in four bits")
    given = dict(attn_implementation="eager", experts_implementation="batched_mm", max_position_embeddings=77)
    config = load_target(str(tmp_path), **given).config
    assert (config._attn_implementation, config._experts_implementation) == ("eager", "batched_mm")
    assert config.max_position_embeddings == 77
    wide = transformers.CompressedTensorsConfig(dequantize=True)
    for model in (
        load_target(str(tmp_path), quantization_config=wide),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),  # as before, in 16 bits
    ):
        assert all(module.down_proj.dtype == torch.float32 for module in experts_of(model))


@pytest.mark.packages
def test_what_transformers_cannot_convert_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    written(tmp_path, "qwen3_moe", zeros=True)
    message = r"^target .*: transformers cannot convert its weights.*docs/limits.md#experts-in-four-bits$"
    with pytest.raises(ValueError, match=message):
        load_target(str(tmp_path), quantization_config=transformers.CompressedTensorsConfig(dequantize=True))


@pytest.mark.packages
def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    written(tmp_path, "qwen3_moe")
    scales = [f"model.layers.2.mlp.experts.{number}.down_proj.weight_scale" for number in range(8)]
    stored = load_file(tmp_path / "model.safetensors")
    for change, message in (
        (lambda tensors: [tensors.pop(name) for name in scales], "lacks model.layers.2.mlp.experts.down_proj_scale"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "has unexpected more"),
    ):
        tensors = dict(stored)
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load_target(str(tmp_path))
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edited(tmp_path, moe_intermediate_size=48)
    with pytest.raises(ValueError, match=r"experts.down_proj, \[64, 48\] for an expert, must have whole groups of 32"):
        load_target(str(tmp_path))
