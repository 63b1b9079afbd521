"""Writing targets in eight or four bits: what is rounded, what keeps its bits, what loads it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle_triton import EaModel, optimize_eagle_with_triton, optimize_with_triton, quantize_checkpoint
from eagle_triton.cli import main
from eagle_triton.demo import demo_directory
from eagle_triton.export import quantize, text_loss
from eagle_triton.export.contents import ExportError
from eagle_triton.export.quantize import QuantizedCheckpoint
from eagle_triton.models import checkpoint
from eagle_triton.models.loading import load_target, load_tokenizer
from eagle_triton.runtime.float8_weight import Float8Weight, quantised
from eagle_triton.runtime.four_bit_weight import FourBitWeight, Packing
from tests.checkpoints import config_of, edited
from tests.tiny import random_prompt, tiny_model
from tests.tiny_families import tiny_family


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_checkpoint("demo", tmp_path_factory.mktemp("fp8") / "demo").folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_projections_are_rounded_and_all_else_keeps_its_bits(demo: Path) -> None:
    before, after = tensors_of(demo_directory("target")), tensors_of(demo)
    rounded = {name.removesuffix("_scale_inv") for name in after if name.endswith("_scale_inv")}
    assert len(rounded) == 8 * 7 and all(".layers." in name and "_proj." in name for name in rounded)
    assert set(after) == set(before) | {f"{name}_scale_inv" for name in rounded}
    for name, tensor in before.items():
        if name not in rounded:
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
            continue
        expected = quantised(tensor, block=True)
        assert after[name].dtype == torch.float8_e4m3fn and after[f"{name}_scale_inv"].dtype == torch.float32
        assert torch.equal(after[name].view(torch.uint8), expected.values.view(torch.uint8)), name
        assert torch.equal(after[f"{name}_scale_inv"], expected.scale), name


def test_each_file_of_weights_becomes_one_and_the_others_are_copied(demo: Path) -> None:
    source = demo_directory("target")
    assert {file.name for file in demo.iterdir()} == {file.name for file in source.iterdir() if file.is_file()}
    index = json.loads((demo / "model.safetensors.index.json").read_text())
    tensors = tensors_of(demo)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(demo / file, "pt") as stored:
            assert stored.get_tensor(name).shape == tensors[name].shape
    assert (demo / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    config = config_of(demo)
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    assert config == config_of(source)


def in_eight_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A checkpoint as transformers loads it on a GPU, on a CPU, where it would make the weights wide."""
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8").FineGrainedFP8HfQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
    return load_target(str(folder))


def exact(model: Any) -> Any:
    """The demo's target with the values of FP8 modules in plain ones, fp32."""
    plain = EaModel.from_pretrained("demo").base_model
    for name, module in model.named_modules():
        if type(module).__name__ == "FP8Linear":
            weight = Float8Weight(module.weight.detach(), module.weight_scale_inv.detach())
            plain.get_submodule(name).weight.data.copy_(weight.dequantised())
    return plain


def test_transformers_loads_it_in_eight_bits_and_the_engine_reads_that(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_eight_bits(demo, monkeypatch)
    stored, loaded = tensors_of(demo), dict(model.named_parameters())
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("FP8Linear") == 56
    for name, tensor in stored.items():
        if name.endswith(("_proj.weight", "scale_inv")):
            assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name
    plain, prompt = exact(model), torch.arange(5, 25)[None]
    expected = plain.generate(prompt, max_new_tokens=24, do_sample=False)
    with optimize_with_triton(model) as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        assert any("56 FP8 projections are read" in entry.reason for entry in originals.report())


def test_an_ea_model_takes_it_with_the_demo_head(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EaModel.from_pretrained("demo")
    model = EaModel(in_eight_bits(demo, monkeypatch), whole.ea_layer).eval()
    prompt = torch.arange(5, 25)[None]
    expected = EaModel(exact(model.base_model), whole.ea_layer).eval().eagenerate(prompt, max_new_tokens=24)
    with optimize_eagle_with_triton(model, draft_dtype="fp8"):
        assert torch.equal(model.eagenerate(prompt, max_new_tokens=24), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="FP8 weights stay narrow on a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_a_cpu_makes_wide_has_one_dtype(demo: Path, dtype: torch.dtype) -> None:
    """Embedding, norms and head are stored in bf16."""
    model = load_target(str(demo), dtype=dtype)
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}, "rotary frequencies are not rounded"
    prompt = torch.arange(5, 25)[None]
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    with optimize_with_triton(model):
        assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)


def saved(folder: Path, shards: str = "5GB", family: str = "llama") -> Path:
    small = family in ("llama", "mistral", "qwen2", "qwen3")
    model = tiny_model(family, eagle3=False, layers=2).base_model if small else tiny_family(family)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


def families(to: str) -> list[str]:
    """All but Ministral, whose modules are Ministral 3's."""
    return [family for family in quantize.WRITABLE[to] if family != "ministral"]


@pytest.mark.parametrize("family", families("fp8"))
def test_every_dense_family_is_written(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = quantize_checkpoint(saved(tmp_path / "in", "60KB", family), tmp_path / "out")
    layers = config_of(written.folder)["num_hidden_layers"]
    assert written.projections == layers * 7 and written.bytes_after < written.bytes_before
    assert "[64, 96]: not multiples of 128 by 128" in written.notes[0]
    assert len(list(written.folder.glob("*.safetensors"))) > 2
    model = in_eight_bits(written.folder, monkeypatch)
    with optimize_with_triton(model, "ngram") as (optimised, _):
        assert optimised.generate(random_prompt(6), max_new_tokens=6, do_sample=False).shape == (1, 12)


def test_the_target_of_a_saved_pair_is_meant(tmp_path: Path) -> None:
    tiny_model(layers=6).save_pretrained(tmp_path / "pair")
    written = quantize_checkpoint(tmp_path / "pair", tmp_path / "out")
    assert written.projections == 42 and (written.folder / "config.json").is_file()


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was fetched of the hub id "someone/model", in turn."""
    source, kept, calls = saved(tmp_path / "there"), tmp_path / "kept", []
    (source / "consolidated.safetensors").write_bytes(b"the same again")

    def fetch(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        if name != "someone/model":
            raise OSError(f"no repository {name}")
        files = [str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()]
        calls.append(sorted(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)))
        kept.mkdir(exist_ok=True)
        for file in calls[-1]:
            (kept / file).parent.mkdir(exist_ok=True)
            (kept / file).write_bytes((source / file).read_bytes())
        return str(kept)

    monkeypatch.setattr(checkpoint, "snapshot_download", fetch)
    return calls


def test_a_hub_id_is_fetched_and_quantised(
    fetched: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    templates, elsewhere = tmp_path / "there" / "additional_chat_templates", tmp_path / "there" / "onnx"
    for folder, name in ((templates, "tool_use.jinja"), (elsewhere, "config.json")):
        folder.mkdir()
        (folder / name).write_text("{{ messages }}")
    assert main.main(["quantize", "someone/model", "--to", "fp8", "-o", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "kept" / "onnx").exists()
    assert "14 projections are FP8" in capsys.readouterr().err
    assert "model.safetensors" in fetched[-1] and "consolidated.safetensors" not in fetched[-1]
    by_path = quantize_checkpoint(tmp_path / "there", tmp_path / "again").folder
    for written in (tmp_path / "out", by_path):
        assert (written / templates.name / "tool_use.jinja").read_text() == "{{ messages }}"
        assert (written / templates.name).stat().st_mode & 0o700 == 0o700
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(by_path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours)


def test_what_is_refused_of_a_hub_id_is_not_fetched(fetched: list[list[str]], tmp_path: Path) -> None:
    edited(tmp_path / "there", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ExportError, match="'someone/model' is quantised already, by 'gptq'"):
        quantize_checkpoint("someone/model", tmp_path / "out")
    assert len(fetched) == 1 and not any(name.endswith(".safetensors") for name in fetched[0])


@pytest.mark.parametrize("target", ["someone/else", "./nowhere"])
def test_what_is_no_directory_and_no_hub_id_is_named(target: str, fetched: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"target: '{target}' (is not a directory and cannot be|does not exist)"
    ):
        quantize_checkpoint(target, tmp_path / "out")
    with pytest.raises(ValueError, match="target: expected a directory or a hub id, .* is a file"):
        quantize_checkpoint(tmp_path / "there" / "config.json", tmp_path / "out")
    assert not fetched


# --- what is refused ---


def test_a_quantised_checkpoint_is_refused(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is quantised already, by 'fp8'"):
        quantize_checkpoint(demo, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _bad(folder: Path, change: Any) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[NAME].fill_(float("nan")), f"{NAME}: a weight with infinities or NaN cannot be quantised"),
        (lambda t: t.pop(NAME), f"{NAME} is not among the tensors"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int8)}), f"{NAME} must be float32, bfloat16 or float16, got"),
        (
            lambda t: t.update({NAME: t[NAME][:48].clone()}),
            rf"{NAME} must be \[96, 64\] by config.json, got \[48, 64\]",
        ),
        (lambda t: t.update({NAME: t[NAME][0].clone()}), rf"{NAME} must be \[96, 64\] by config.json, got \[64\]"),
    ],
    ids=["nan", "missing", "int8", "rows", "one row"],
)
def test_weights_that_cannot_be_rounded_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        quantize_checkpoint(_bad(saved(tmp_path / "in"), change), tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_other_formats_and_places_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "in")
    with pytest.raises(ValueError, match="to must be fp8 or int4, got 'int8'"):
        quantize_checkpoint(source, tmp_path / "out", "int8")
    with pytest.raises(FileExistsError, match="is not empty"):
        quantize_checkpoint(source, source)
    with pytest.raises(ValueError, match="gpt2"):
        quantize_checkpoint(edited(saved(tmp_path / "gpt"), model_type="gpt2"), tmp_path / "out")
    with pytest.raises(ExportError, match="can be written in fp8, got model_type 'phi3'"):
        quantize_checkpoint(saved(tmp_path / "fused", family="phi3"), tmp_path / "out")
    with pytest.raises(ValueError, match="qwen3_moe"):
        quantize_checkpoint(edited(saved(tmp_path / "moe"), model_type="qwen3_moe"), tmp_path / "out")
    with pytest.raises(ValueError, match="qwen3_5"):
        quantize_checkpoint("demo-gdn", tmp_path / "out")
    with pytest.raises(FileNotFoundError):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(ExportError, match=r"only safetensors are read, and .* has pytorch_model.bin"):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", "60KB")
    lost = sorted(source.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=rf"names {lost.name}, which is not in"):
        quantize_checkpoint(source, tmp_path / "out")


def test_one_whole_file_goes_before_an_index(tmp_path: Path) -> None:
    """transformers leaves the index when it writes a model of several files again, as one."""
    saved(tmp_path / "in", "60KB")
    written = quantize_checkpoint(saved(tmp_path / "in"), tmp_path / "out").folder
    assert sorted(file.name for file in written.glob("model*")) == ["model.safetensors"]
    assert (tmp_path / "in" / "model.safetensors.index.json").is_file()


OUTSIDE = '{"weight_map": {"a": "../outside.safetensors"}}'


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', OUTSIDE])
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", "60KB")
    (source / "model.safetensors.index.json").write_text(text)
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    with pytest.raises(ExportError, match=r"model.safetensors.index.json' is not an index of weights"):
        quantize_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("kind", ["an empty directory", "a link to one", "a link to nothing yet"])
def test_an_empty_place_is_filled(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if kind != "a link to nothing yet":
        place.mkdir()
    inode = place.stat().st_ino if place.exists() else None
    out = place if kind == "an empty directory" else tmp_path / "link"
    if out != place:
        out.symlink_to(place)
    assert quantize_checkpoint(saved(tmp_path / "in"), out).folder == place
    assert inode in (None, place.stat().st_ino)  # a mount point cannot be replaced
    assert {file.name for file in out.iterdir()} >= {"config.json", "model.safetensors"}
    assert {entry.name for entry in tmp_path.iterdir()} <= {"in", "place", "link"}
    assert not [entry for entry in place.iterdir() if entry.is_dir()]


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "_fetched", lambda *_: pytest.fail("the target is read"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"path: .*out' cannot be written: .*file': Not a directory"):
        quantize_checkpoint("demo", tmp_path / "file" / "out")


# --- the command ---


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "in")
    assert main.main(["quantize", str(source), "--to", "fp8", "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(tmp_path / "out") and "14 projections are FP8" in printed.err
    assert "not multiples of 128" in printed.err
    assert main.main(["quantize", str(source), "--to", "fp8", "-o", str(tmp_path / "more"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["projections"] == 14


def test_the_command_refuses_in_one_line(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(["quantize", str(demo), "--to", "fp8", "-o", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "is quantised already, by 'fp8'" in capsys.readouterr().err


# --- four bits ---


@pytest.fixture(scope="module")
def demo_int4(tmp_path_factory: pytest.TempPathFactory) -> QuantizedCheckpoint:
    folder = tmp_path_factory.mktemp("int4")
    (folder / "text.py").write_text("def first(values):\n    return values[0]\n" * 8)
    return quantize_checkpoint("demo", folder / "demo", "int4", text=folder / "text.py")


def dequantised(tensors: dict[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
    """A projection of a written checkpoint."""
    packed, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
    group = 8 * packed.shape[1] // scale.shape[1]
    return FourBitWeight(packed, Packing.ROWS, scale, group).dequantised(dtype)


def test_projections_are_written_in_four_bits_and_all_else_keeps_its_bits(demo_int4: QuantizedCheckpoint) -> None:
    before, after = tensors_of(demo_directory("target")), tensors_of(demo_int4.folder)
    rounded = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    assert len(rounded) == demo_int4.projections == 8 * 7 and all("_proj." in name for name in rounded)
    parts = {f"{name}_{part}" for name in rounded for part in ("packed", "scale", "shape")}
    assert set(after) == (set(before) - rounded) | parts
    for name in rounded:
        (rows, columns), weight = before[name].shape, before[name].float()
        assert after[f"{name}_shape"].tolist() == [rows, columns] and after[f"{name}_shape"].dtype == torch.int64
        assert after[f"{name}_scale"].shape == (rows, columns // 128)
        assert after[f"{name}_scale"].dtype == torch.bfloat16 == before[name].dtype
        error = (dequantised(after, name, torch.float32) - weight).view(rows, -1, 128).abs().amax(-1)
        assert (error <= 0.53 * after[f"{name}_scale"].float()).all(), "not the nearest"
    assert all(torch.equal(after[name], before[name]) for name in set(before) - rounded)
    config = config_of(demo_int4.folder)["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 128 and config["ignore"] == ["lm_head"]


@torch.no_grad()
def test_the_loss_on_a_text_is_that_of_the_written_weights(demo_int4: QuantizedCheckpoint) -> None:
    loss, tensors = demo_int4.loss, tensors_of(demo_int4.folder)
    model, tokenizer = (
        load_target(demo_directory("target"), dtype=torch.bfloat16),
        load_tokenizer(demo_directory("target")),
    )
    tokens = tokenizer((demo_int4.folder.parent / "text.py").read_text(), return_tensors="pt")["input_ids"]
    assert loss is not None and loss.tokens == tokens.shape[1]
    assert loss.before == pytest.approx(float(model(tokens, labels=tokens).loss), abs=1e-4)
    for name, parameter in model.named_parameters():
        if f"{name}_packed" in tensors:
            parameter.data = dequantised(tensors, name, torch.bfloat16)
    assert loss.after == pytest.approx(float(model(tokens, labels=tokens).loss), abs=1e-4)
    assert loss.after != loss.before and demo_int4.to_dict()["loss"]["after"] == loss.after


def decompressed(folder: Path, dtype: torch.dtype) -> int:
    """How many projections compressed-tensors decompresses, at the first forward, to the weights that we read."""
    model, tensors = load_target(str(folder), dtype=dtype), tensors_of(folder)
    model(torch.arange(1, 6)[None])
    names = [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]
    for name in names:
        assert torch.equal(model.get_parameter(name), dequantised(tensors, name, dtype)), name
    return len(names)


@pytest.mark.packages
@pytest.mark.parametrize("family", [family for family in families("int4") if not family.endswith("_moe")])
def test_transformers_loads_four_bits(family: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    written = quantize_checkpoint(saved(tmp_path / "in", family=family), tmp_path / "out", "int4")
    assert "groups of 32" in written.notes[0] and "[64, 96]: not multiples of 64 by 128" in written.notes[1]
    assert ("not read by this package" in written.notes[-1]) == (family in ("phi3", "glm4"))
    assert decompressed(written.folder, torch.float32) == written.projections


def test_a_mixture_is_written_in_four_bits(tmp_path: Path) -> None:
    written = quantize_checkpoint(saved(tmp_path / "in", family="qwen3_moe"), tmp_path / "out", "int4")
    before, after = tensors_of(tmp_path / "in"), tensors_of(written.folder)
    rounded = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    assert len(rounded) == written.projections == 4 * 4 + 3 + 3 * 8 * 3  # attention, a dense block, mixtures
    assert {name for name in before if ".experts." in name} < rounded
    assert torch.equal(after["model.layers.0.mlp.gate.weight"], before["model.layers.0.mlp.gate.weight"])
    assert config_of(written.folder)["quantization_config"]["ignore"] == [
        "lm_head",
        r"re:.*\.gate$",
    ]
    model = load_target(str(tmp_path / "in"))  # of which a text's loss replaces these
    assert all(torch.equal(text_loss._weight(model, name), tensor) for name, tensor in before.items())


@pytest.mark.packages
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_engine_decodes_the_weights_that_were_written(family: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder = str(quantize_checkpoint(saved(tmp_path / "in", family=family), tmp_path / "out", "int4").folder)
    prompt = random_prompt(6)
    expected = load_target(folder).generate(prompt, max_new_tokens=12, do_sample=False)
    with optimize_with_triton(load_target(folder), "ngram") as (optimised, originals):
        assert torch.equal(optimised.generate(prompt, max_new_tokens=12, do_sample=False), expected)
        assert f"{14 if family == 'llama' else 19} projections of four bits are read" in str(originals)
        assert ("3 mixtures are read in four bits" in str(originals)) == (family == "qwen3_moe")


@pytest.mark.packages
def test_transformers_loads_four_bits_in_bf16(demo_int4: QuantizedCheckpoint) -> None:
    pytest.importorskip("compressed_tensors")
    assert decompressed(demo_int4.folder, torch.bfloat16) == 56


def test_columns_decide_the_group() -> None:
    def group(columns: int) -> int:
        return quantize._group({"q": torch.Size((8, 256)), "down": torch.Size((8, columns))})

    assert [group(384), group(192), group(96)] == [128, 64, 32]
    with pytest.raises(ExportError, match="down must have a multiple of 32 columns, got 112"):
        group(112)


def test_a_text_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("a")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, message in (
        ("short", "at least two tokens, got 1"),
        ("bytes", "must be UTF-8"),
        ("none", "No such file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            quantize_checkpoint("demo", tmp_path / "out", "int4", text=tmp_path / name)
    with pytest.raises(ValueError, match="has no tokenizer"):
        quantize_checkpoint(saved(tmp_path / "in"), tmp_path / "out", "int4", text=tmp_path / "short")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.py"
    text.write_text("import os\n" * 4)
    assert main.main(["quantize", "demo", "--to", "int4", "-o", str(tmp_path / "out"), "--text", str(text)]) == 0
    printed = capsys.readouterr().err
    assert "56 projections are int4" in printed
    assert re.search(rf"loss on \d+ tokens of {re.escape(str(text))}: \d\.\d{{3}} -> \d\.\d{{3}} nats a token", printed)
