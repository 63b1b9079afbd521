"""gpt-oss in MXFP4: loaded and read as it is stored, with the tokens of what transformers makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_triton import EAGLEInference, optimize_with_triton
from eagle_triton.benchmarks.quantised import round_target
from eagle_triton.families.reading.experts import read_experts
from eagle_triton.models.loading import load_target
from eagle_triton.models.shapes import random_model
from tests.checkpoints import edited
from tests.stored_experts import PROMPT, check_groups, check_replaced_is_found, check_tokens, tokens_of
from tests.tiny_families import tiny_family

transformers = pytest.importorskip("transformers", minversion="5.0", reason="experts are not stacked before")
mxfp4 = pytest.importorskip("eagle_triton.models.mxfp4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss as it is published: blocks and scales of the experts, and all else in bf16."""
    folder, source = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(1)
    model = tiny_family("gpt_oss").bfloat16()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, depth, rows = tensors.pop(name).shape
        shape = count, rows, depth // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=source, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, generator=source, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edited(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder


def by_transformers(checkpoint: Path) -> Any:
    wide = load_target(str(checkpoint), quantization_config=transformers.Mxfp4Config(dequantize=True))
    return wide.float()  # transformers 5.17 leaves the experts in bf16


def experts_of(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].mlp.experts


def test_experts_stay_as_they_are_stored(checkpoint: Path) -> None:
    model, wide = load_target(str(checkpoint)), by_transformers(checkpoint)
    stored, found = load_file(checkpoint / "model.safetensors"), model.state_dict()
    assert stored.keys() == found.keys()
    for name, tensor in stored.items():
        assert found[name].dtype == (torch.uint8 if tensor.dtype == torch.uint8 else torch.float32)
        assert torch.equal(found[name].float(), tensor.float()), name
    assert type(experts_of(wide)).__name__ == "GptOssExperts"
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(experts_of(model).dequantised(name), getattr(experts_of(wide), name))
    assert torch.equal(model(PROMPT).logits, wide(PROMPT).logits)
    assert model.generation_config.to_diff_dict() == wide.generation_config.to_diff_dict()


def test_tokens_are_those_of_the_dequantised_model(checkpoint: Path) -> None:
    model, expected = load_target(str(checkpoint)), tokens_of(by_transformers(checkpoint))
    check_tokens(model, "ngram", expected, "4 mixtures are read in MXFP4, 0.3 MiB")
    assert torch.equal(tokens_of(model), expected)


def test_rows_run_in_groups_by_the_weights_and_many_by_the_module(checkpoint: Path) -> None:
    block = load_target(str(checkpoint)).model.layers[0].mlp
    check_groups(read_experts(block, torch.float32, root="there"), lambda x: block(x)[0])


def test_eagle_inference_loads_it(checkpoint: Path) -> None:
    engine, model = EAGLEInference("suffix", str(checkpoint), device="cpu"), by_transformers(checkpoint)
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(engine.generate(PROMPT, max_new_tokens=8, return_stats=False), expected)
    assert "read in MXFP4" in str(engine.engine.notes)


def test_it_is_saved_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    load_target(str(checkpoint), dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_target(str(checkpoint), dtype="auto").dtype == torch.bfloat16
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert isinstance(experts_of(load_target(str(tmp_path))), mxfp4.Mxfp4Experts)


def test_tied_embeddings_need_no_vocabulary_projection(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edited(tmp_path, tie_word_embeddings=True)
    model = load_target(str(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(PROMPT).logits, by_transformers(tmp_path)(PROMPT).logits)


def test_replaced_blocks_are_found(checkpoint: Path) -> None:
    check_replaced_is_found(load_target(str(checkpoint)), 0, "down_proj_scales")


def test_the_layout_of_transformers_kernels_is_called(checkpoint: Path) -> None:
    """A stand-in of that name: the kernel itself comes from the hub, for a GPU."""

    class Mxfp4GptOssExperts(type(experts_of(tiny_family("gpt_oss")))):  # type: ignore[misc]
        pass

    model = by_transformers(checkpoint)
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Mxfp4GptOssExperts
    with optimize_with_triton(model, "ngram")[1] as originals:
        assert "give EAGLEInference or EaModel the" in str(originals)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attn_implementation": "eager"},
            r"attn_implementation: not supported with a gpt-oss in MXFP4, .*dequantize=True",
        ),
        ({"device_map": {"model": 0}}, "device_map must name one device for a gpt-oss in MXFP4, got {'model': 0}"),
        ({"dtype": "float99"}, "dtype must be a dtype of torch, its name or 'auto', got 'float99'"),
    ],
    ids=["option", "devices", "dtype"],
)
def test_options_that_cannot_be_honoured_are_refused(options: Any, message: str, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(str(checkpoint), **options)


def test_damaged_checkpoints_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"no model\*.safetensors"):
        load_target(str(tmp_path))
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    for change, message in (
        (lambda tensors: tensors.pop(name), f"lacks {name}"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "has unexpected more"),
        (lambda tensors: tensors.update({name: tensors[name][:1].clone()}), rf"{name} must be \[8, 64, 3, 16\], got"),
        (lambda tensors: tensors.update({name: tensors[name].float()}), f"{name} must be uint8, got torch.float32"),
    ):
        tensors = load_file(checkpoint / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load_target(str(tmp_path))


def test_a_model_to_time_is_rounded() -> None:
    """To the nearest of the numbers below it and above it, which are a third of it apart at most."""
    model = tiny_family("gpt_oss")
    before = experts_of(model).down_proj.detach().clone()
    round_target(model, "mxfp4")
    found = experts_of(model).dequantised("down_proj")
    largest = before.mT.unflatten(-1, (-1, 32)).abs().amax(-1)
    error = (found - before).mT.unflatten(-1, (-1, 32)).abs()
    assert (error <= largest[..., None] / 4).all() and 0.01 < float(error.mean() / largest.mean()) < 0.06
    expected = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    with optimize_with_triton(model, "ngram") as (optimised, originals):
        assert torch.equal(optimised.generate(PROMPT, max_new_tokens=6, do_sample=False), expected)
        assert "4 mixtures are read in MXFP4" in str(originals)
    with pytest.raises(ValueError, match="--target-weights mxfp4 needs the experts of gpt-oss"):
        round_target(random_model("tiny").base_model, "mxfp4")
