"""Targets by GPTQ and AWQ are loaded into the layout of compressed-tensors, with the same numbers."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_triton import EAGLEInference, optimize_with_triton
from eagle_triton.models import gptq
from eagle_triton.models.four_bit_experts import unpacked
from eagle_triton.models.gptq import for_gptq, in_rows, is_gptq, scheme_of
from eagle_triton.models.loading import load_target
from eagle_triton.runtime.four_bit_weight import packed as as_words
from tests.checkpoints import edited
from tests.float8_models import plain_tokens
from tests.four_bit_models import rounded
from tests.stored_experts import PROMPT
from tests.test_four_bit_experts import check_in_four_bits, plain_model, written
from tests.tiny_families import tiny_seeing_family

pytest.importorskip("transformers", minversion="5.24", reason="this loads words of experts as they are")

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of a word, from its lowest bits on
GPTQ_FIELDS = {"quant_method": "gptq", "bits": 4, "desc_act": False, "damp_percent": 0.01, "lm_head": False}


def tensors_of(layout: str, numbers: Tensor, scale: Tensor, zero: Tensor | None) -> dict[str, Tensor]:
    """A weight's tensors: numbers [N, K], scale and zero [N, K / group]; None: 8."""
    columns, points = numbers.T, (torch.full_like(scale, 8).int() if zero is None else zero.int()).T
    if layout == "gemm":
        columns, points = (part.unflatten(-1, (-1, 8))[..., AWQ].flatten(-2) for part in (columns, points))
        return {"qweight": as_words(columns), "qzeros": as_words(points), "scales": scale.T.contiguous()}
    return {
        "qweight": as_words(columns.T).T.contiguous(),
        "qzeros": as_words((points - int(layout == "gptq")) % 16).contiguous(),
        "scales": scale.T.contiguous(),
        "g_idx": torch.arange(len(columns), dtype=torch.int32) // (len(columns) // len(points)),
    }


def stored_as(layout: str, name: str, *parts: Any) -> dict[str, Tensor]:
    return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in tensors_of(layout, *parts).items()}


def checkpoint(
    folder: Path, family: str = "qwen3_moe", layout: str = "gptq", group: int | None = 32, zeros: bool = False
) -> Any:
    """A checkpoint, and a model with exact values. Zeros of the first format of GPTQ, which cannot tell 0, are 8."""
    exact = written(folder, family, group, zeros, partial(stored_as, layout))
    fields: dict[str, Any] = {**GPTQ_FIELDS, "checkpoint_format": layout, "sym": not zeros}
    if layout == "gemm":
        fields = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": zeros}
    edited(folder, quantization_config={**fields, "group_size": group or -1})
    return exact


@pytest.mark.packages
@pytest.mark.parametrize(
    ("family", "layout", "group", "zeros"),
    [
        ("qwen3_moe", "gptq", 32, False),
        ("mixtral", "gptq_v2", 64, True),
        ("glm4_moe", "gemm", 32, True),
        ("qwen3_next", "gemm", 32, False),
        ("mixtral", "gptq", None, False),
        ("olmo2", "gptq", 32, False),
        ("olmo2", "gemm", 64, True),
    ],
)
def test_tokens_are_those_of_the_dequantised_model(
    family: str, layout: str, group: int | None, zeros: bool, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    exact = checkpoint(tmp_path, family, layout, group, zeros)
    model = load_target(str(tmp_path), engine=True)
    check_in_four_bits(model, exact, family)
    with pytest.raises(ValueError, match="are not written again: use the checkpoint"):
        model.save_pretrained(tmp_path / "saved")


@pytest.mark.packages
def test_eagle_inference_loads_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    exact = checkpoint(tmp_path)
    engine = EAGLEInference("suffix", str(tmp_path), device="cpu")
    tokens = engine.generate(PROMPT, max_new_tokens=8, stop_token_ids=(), return_stats=False)
    assert torch.equal(tokens, plain_tokens(exact, PROMPT, 8))


@pytest.mark.packages
def test_biases_that_the_model_has_not_must_be_zeros(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    exact, file = checkpoint(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = [name.replace("qweight", "bias") for name in tensors if re.search(r"(o|down)_proj\.qweight$", name)]
    tensors |= {name: torch.zeros(64) for name in names}
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(plain_tokens(load_target(str(tmp_path)), PROMPT, 4), plain_tokens(exact, PROMPT, 4))
    save_file({**tensors, names[0]: torch.ones(64)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="bias, which is not zero, and the model has no such bias"):
        load_target(str(tmp_path))


@pytest.mark.packages
def test_layers_may_keep_their_weights(tmp_path: Path) -> None:
    """The experts of a layer, or all of one."""
    pytest.importorskip("compressed_tensors")
    exact, file = checkpoint(tmp_path), tmp_path / "model.safetensors"
    tensors, plain = load_file(file), exact.state_dict()
    words = [name for name in tensors if re.search(r"layers\.(0|2\.mlp\.experts)\..*\.qweight$", name)]
    assert len(words) > 24
    for name in words:
        start = name.removesuffix("qweight")
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(start + part)
        layer, _, expert = start.partition("experts.")
        number, _, projection = expert.partition(".")
        if projection == "down_proj.":
            tensors[f"{start}weight"] = plain[f"{layer}experts.down_proj"][int(number)].clone()
        elif expert:
            half = plain[f"{layer}experts.gate_up_proj"][int(number)].chunk(2)[projection == "up_proj."]
            tensors[f"{start}weight"] = half.clone()
        else:
            tensors[f"{start}weight"] = plain[f"{start}weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    model, expected = load_target(str(tmp_path)), plain_tokens(exact, PROMPT, 12)
    with optimize_with_triton(model, "ngram") as (optimised, _):
        assert torch.equal(optimised.generate(PROMPT, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.packages
def test_damaged_matrices_are_named(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    checkpoint(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.2.mlp.experts.3.down_proj"
    tensors = load_file(file)
    for changed, message in (
        ({f"{name}.g_idx": tensors[f"{name}.g_idx"].flip(0)}, "g_idx must be in the order of its groups"),
        ({f"{name}.g_idx": tensors[f"{name}.g_idx"][:8]}, "g_idx must be in the order of its groups"),
        ({f"{name}.qzeros": tensors[f"{name}.qzeros"] + 1}, "symmetric, so all qzeros must mean 8"),
        (
            {f"{name}.qweight": tensors[f"{name}.qweight"].long()},
            r"must be int32 matrices, got torch.int64 \[8, 64\] and",
        ),
        ({f"{name}.qzeros": None}, "one tensor of each kind for a matrix, got .*'qweight': 8, 'qzeros': 7"),
        ({f"{name}.qweight": tensors[f"{name}.qweight"][:4]}, ""),
        ({f"{name}.scales": tensors[f"{name}.scales"][:1]}, ""),
    ):
        kept = {key: tensor for key, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"layers\.2\.mlp\.experts\.down_proj_(packed|scale): .*{message}"):
            load_target(str(tmp_path))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "gemm"])
def test_words_and_zeros_are_put_in_rows(layout: str) -> None:
    numbers, zero = torch.randint(16, (24, 64)), torch.randint(1, 16, (24, 2))
    stored = tensors_of(layout, numbers, torch.ones(24, 2), zero)
    words, zeros = in_rows(layout, False, *(stored.get(name) for name in ("qweight", "qzeros", "g_idx")))
    assert torch.equal(unpacked(words), numbers.to(torch.int8))
    assert torch.equal(unpacked(zeros.T), zero.T.to(torch.int8))
    stored = tensors_of(layout, numbers, torch.ones(24, 2), None)
    (words,) = in_rows(layout, True, *(stored.get(name) for name in ("qweight", "qzeros", "g_idx")))
    assert torch.equal(unpacked(words), numbers.to(torch.int8))


def test_zeros_that_may_be_0_or_16_are_refused() -> None:
    stored = tensors_of("gptq", torch.zeros(16, 32).int(), torch.ones(16, 2), torch.zeros(16, 2))
    with pytest.raises(ValueError, match="15 may mean 0 or 16: save it in format gptq_v2"):
        in_rows("gptq", False, stored["qweight"], stored["qzeros"], None)


def test_a_scheme_is_read_or_refused_by_its_field() -> None:
    assert scheme_of({**GPTQ_FIELDS, "group_size": 128}) == {
        **{"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False},
        **{"strategy": "group", "group_size": 128},
    }
    awq = scheme_of({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"})
    assert (awq["symmetric"], awq["group_size"]) == (False, 64)
    assert scheme_of({**GPTQ_FIELDS, "group_size": -1})["strategy"] == "channel"
    assert scheme_of({**GPTQ_FIELDS, "dynamic": {"-:.*attn.*": {}, "lm_head": {}}}) == scheme_of(GPTQ_FIELDS)
    by_gptqmodel = {"method": "gptq", "pack_dtype": "int32", "format": "gptq", "meta": {"quantizer": "gptqmodel:7.7.0"}}
    by_auto_round = {"data_type": "int", "act_bits": 16, "act_dynamic": True, "iters": 1000, "provider": "auto-round"}
    for fields in (by_gptqmodel, {**by_auto_round, "autoround_version": "0.5.1"}):
        assert scheme_of({**GPTQ_FIELDS, **fields}) == scheme_of(GPTQ_FIELDS)
    for method, name, value in (
        ("gptq", "bits", 8),
        ("gptq", "method", "qqq"),
        ("gptq", "data_type", "mx_fp"),
        ("awq", "act_bits", 8),
        ("gptq", "rotation", "hadamard"),
        ("gptq", "desc_act", True),
        ("gptq", "checkpoint_format", "marlin"),
        ("awq", "version", "gemv"),
        ("awq", "backend", "llm-awq"),
        ("gptq", "dynamic", {".*": {"bits": 8}}),
        ("gptq", "dynamic", ["-:.*attn.*"]),
        ("gptq", "lm_head", True),
        ("gptq", "group_size", None),
        ("gptq", "group_size", 0),
    ):
        shown = "version or format" if name in ("checkpoint_format", "version") else name
        with pytest.raises(ValueError, match=rf"weights by {method} with {shown} = {re.escape(repr(value))} in"):
            scheme_of({**GPTQ_FIELDS, "quant_method": method, name: value})


@pytest.mark.packages
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_checkpoints_have_names_of_their_own(kind: str, tmp_path: Path) -> None:
    """Models that read images: transformers renames their tensors, and biases of q, k and v are real."""
    pytest.importorskip("compressed_tensors")
    tiny_seeing_family(kind, intermediate_size=64).save_pretrained(tmp_path)
    file, numbers = tmp_path / "model.safetensors", dict[str, Tensor]()
    tensors = load_file(file)
    for name in [name for name in tensors if re.search(r"^(language_model\.)?model\.layers.*_proj\.weight$", name)]:
        numbers[name], scale, zero, _ = rounded(tensors.pop(name), 32, True)
        tensors |= stored_as("gemm", name, numbers[name], scale, zero)
    save_file(tensors, file, metadata={"format": "pt"})
    edited(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"})
    model = load_target(str(tmp_path), engine=True)
    found = {name: part for name, part in model.named_parameters() if name.endswith("weight_packed")}
    assert len(found) == len(numbers) > 7
    for name, words in found.items():
        (expected,) = (part for key, part in numbers.items() if key.split("layers.")[1] in name.replace("_packed", ""))
        assert torch.equal(unpacked(words), expected.to(torch.int8))


def test_only_mixtures_are_loaded_so_beside_gptqmodel(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, mixture in (("qwen3_moe", True), ("mixtral", True), ("olmo2", False)):
        config = plain_model(family).config
        for method, ours in (("gptq", True), ("awq", True), ("fp8", False), (None, False)):
            config.quantization_config = None if method is None else {"quant_method": method}
            for beside, expected in ((None, ours), ("installed", ours and mixture)):
                monkeypatch.setattr(gptq, "find_spec", lambda name, beside=beside: beside)
                assert is_gptq(config) == expected


def test_without_compressed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    config = plain_model("mixtral").config
    config.quantization_config = GPTQ_FIELDS
    monkeypatch.setattr(gptq, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="weights by gptq need the package compressed-tensors: install it"):
        for_gptq(config)
