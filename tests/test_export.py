"""Export of heads: every layout is read back with the same bits, every impossible case is refused by name."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle_triton import EaModel, export_head
from eagle_triton.cli import main
from eagle_triton.demo import demo_directory
from eagle_triton.export.comparison import compare_drafts
from eagle_triton.export.contents import EMBEDDING, ExportError, HeadContents, read_contents
from eagle_triton.export.export_head import ENGINES
from eagle_triton.models.heads import Eagle1Head, Eagle3Head
from eagle_triton.models.loading import read_target_embedding
from tests.checkpoints import config_of
from tests.failing import check_refused
from tests.tiny import tiny_model

NO_TREE: dict = dict(total_token=None, depth=None, top_k=None)
LINEAR = dict(type="linear", factor=4.0)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512
)


def tiny(eagle3: bool = True, family: str = "llama", seed: int = 0, tree: dict | None = None, **config) -> EaModel:
    """A tiny EaModel whose head differs as `config` says. Eight layers, so that the usual three can be named."""
    model = tiny_model(family, eagle3, layers=8, seed=seed, **(tree or dict(total_token=12, depth=3, top_k=3)))
    settled = model.ea_layer.config.replace(**{"feature_layers": None, "bias": False, **config})
    head = (Eagle3Head if eagle3 else Eagle1Head)(settled, **(tree or dict(total_token=12, depth=3, top_k=3)))
    torch.manual_seed(seed + 1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    head.d2t, head.t2d = model.ea_layer.d2t, model.ea_layer.t2d
    if eagle3:
        ids = head.d2t + torch.arange(len(head.d2t))
        head.t2d = torch.zeros(settled.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if settled.hidden_size == settled.target_hidden_size:
        head.embed_tokens.weight = model.base_model.get_input_embeddings().weight
    return EaModel(model.base_model, head).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of such models, one for each set of arguments."""
    made: dict[str, Path] = {}

    def save(**arguments) -> Path:
        key = repr(sorted(arguments.items(), key=str))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("pair")
            tiny(**arguments).save_pretrained(made[key])
        return made[key]

    return save


def contents(head, target=None) -> HeadContents:
    return read_contents(head, target, NO_TREE)


def assert_same(one: HeadContents, other: HeadContents) -> None:
    assert one.config == other.config and one.eagle3 == other.eagle3 and one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name]), name


# --- every layout, read back ---

EAGLE1 = ("vllm", "sglang", "safeailab")
PAIRS = [
    *((*pair, {}) for pair in product(ENGINES, ENGINES)),
    *(
        (*pair, dict(eagle3=False, num_hidden_layers=2, **bias))
        for *pair, bias in product(EAGLE1, EAGLE1, ({}, dict(qkv_bias=True), dict(bias=True)))
        if "bias" not in bias or "vllm" not in pair  # which is refused
    ),
]


@pytest.mark.parametrize(("first", "second", "head"), PAIRS, ids=str)
def test_all_pairs_of_layouts_keep_every_bit(first, second, head, saved, tmp_path):
    pair = saved(**head)
    target = str(pair / "target")
    want = contents(str(pair))
    assert (want.config.bias, want.config.qkv_bias) == (head.get("bias", False), head.get("qkv_bias", False))
    export_head(str(pair), first, tmp_path / "first")
    export_head(str(tmp_path / "first"), second, tmp_path / "second", target)
    for folder in ("first", "second"):
        assert_same(contents(str(tmp_path / folder), target), want)
    assert head or {"d2t", "t2d", "midlayer.hidden_norm.weight"} < want.tensors.keys()


SPECIAL = {  # what only some engines can do, and these
    "norm_before_residual": (dict(norm_before_residual=True), ("vllm", "speculators")),
    "norm_before_fc": (dict(norm_before_fc=True), ("vllm", "sglang", "speculators")),
    "fc_norm": (dict(fc_norm=True), ("vllm", "sglang", "speculators")),
    "norm_output": (dict(norm_output=True), ("vllm", "sglang", "speculators")),
    "all norms": (dict(norm_before_fc=True, fc_norm=True, norm_output=True), ("vllm", "sglang")),
    "biases": (dict(qkv_bias=True), ("vllm", "speculators")),
    "layers": (dict(feature_layers=(1, 3, 6)), ("vllm", "sglang", "speculators")),
    "the embedding": (dict(feature_layers=(0, 3, 6)), ("vllm", "speculators")),
    "llama3": (dict(rope_scaling=LLAMA3, rope_theta=5e5), ("vllm", "sglang", "speculators")),
    "linear": (dict(rope_scaling=LINEAR), ENGINES),
    "gelu": (dict(hidden_act="gelu_pytorch_tanh"), ("safeailab",)),
    "yarn": (
        dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)),
        ("vllm", "sglang", "speculators"),
    ),
    "sliding window": (dict(sliding_window=128), ("vllm", "speculators")),
    "full vocabulary": (dict(draft_vocab_size=32), ENGINES),
    "other width": (
        dict(hidden_size=32, target_hidden_size=64, head_dim=8),
        ("vllm", "sglang", "safeailab"),
    ),
    "far positions": (dict(max_position_embeddings=4096), ENGINES),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("to", ENGINES)
def test_special_heads_are_handed_over_whole_or_refused(to, name, tmp_path):
    config, engines = SPECIAL[name]
    model = tiny(**{"draft_vocab_size": 20, **config}) if name != "full vocabulary" else full_vocabulary()
    model.save_pretrained(tmp_path / "pair")
    if to not in engines:
        with pytest.raises(ExportError):
            export_head(str(tmp_path / "pair"), to, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    export_head(str(tmp_path / "pair"), to, tmp_path / "out")
    assert_same(contents(str(tmp_path / "out"), tmp_path / "pair" / "target"), contents(str(tmp_path / "pair")))


def full_vocabulary() -> EaModel:
    model = tiny()
    config = model.ea_layer.config.replace(draft_vocab_size=model.config.vocab_size)
    head = Eagle3Head(config, total_token=12, depth=3, top_k=3)
    head.embed_tokens.weight = model.base_model.get_input_embeddings().weight
    return EaModel(model.base_model, head)


@pytest.mark.parametrize("to", ["vllm", "sglang", "safeailab"])
def test_models_in_memory_give_what_their_files_do(to, saved, tmp_path):
    pair = saved()
    model = EaModel.from_pretrained(str(pair))
    export_head(str(pair), to, tmp_path / "files")
    export_head(model, to, tmp_path / "model")
    export_head(model.ea_layer, to, tmp_path / "head", model.base_model)
    want = (tmp_path / "files" / "model.safetensors").read_bytes()
    for folder in ("model", "head"):
        assert (tmp_path / folder / "model.safetensors").read_bytes() == want
        assert (tmp_path / folder / "config.json").read_text() == (tmp_path / "files" / "config.json").read_text()


# --- what stands in the files ---


def read(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    return config_of(folder), load_file(folder / "model.safetensors")


def test_one_folder_serves_vllm_and_sglang(saved, tmp_path):
    for to in ("vllm", "sglang"):
        export_head(str(saved()), to, tmp_path / to)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "vllm" / name).read_bytes() == (tmp_path / "sglang" / name).read_bytes()
    config, tensors = read(tmp_path / "vllm")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["bias"] is config["attention_bias"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert "target_hidden_size" not in config, "vLLM multiplies it, whatever it is"
    assert set(tensors) == {
        "d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight", "layers.0.hidden_norm.weight",
        "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip


def test_the_fields_of_eagle_3_1_stand_where_engines_read_them(saved, tmp_path):
    fields = dict(fc_norm=True, norm_output=True)
    for to in ("vllm", "sglang", "speculators"):
        plan = export_head(str(saved(**fields)), to, tmp_path / to)
        config, tensors = read(tmp_path / to)
        assert fields.items() <= config.items() and not config.get("norm_before_fc")
        assert {f"fc_norm.{index}.weight" for index in range(3)} < tensors.keys()
        old = [note for note in plan.notes if "ignores" in note]
        assert old == ([] if to == "sglang" else [old[0]])
        assert to == "sglang" or "vLLM 0.20.2 ignores fc_norm and norm_output" in old[0]
    plan = export_head(str(saved(norm_before_fc=True)), "sglang", tmp_path / "other")
    assert any("SGLang 0.5.13 ignores norm_before_fc" in note for note in plan.notes)
    config, tensors = read(tmp_path / "other")
    assert config["norm_before_fc"] is True and "input_norm.weight" in tensors
    export_head(str(saved()), "vllm", tmp_path / "plain")
    assert not {"norm_before_fc", "fc_norm", "norm_output"} & read(tmp_path / "plain")[0].keys()


def test_biases_that_engines_make_are_there(saved, tmp_path):
    """An engine makes a bias wherever its config says so, and what no file brings is left as memory was."""
    pair = saved(qkv_bias=True)
    export_head(str(pair), "vllm", tmp_path / "eagle3")
    config, tensors = read(tmp_path / "eagle3")
    assert config["attention_bias"] and not tensors["layers.0.self_attn.o_proj.bias"].any()
    assert tensors["layers.0.self_attn.q_proj.bias"].any()
    eagle1 = saved(eagle3=False)
    export_head(str(eagle1), "sglang", tmp_path / "sglang")
    config, tensors = read(tmp_path / "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and config["bias"] is False
    assert not tensors["fc.bias"].any() and tensors["fc.bias"].shape == (64,)
    export_head(str(eagle1), "vllm", tmp_path / "vllm")
    config, tensors = read(tmp_path / "vllm")
    assert config["architectures"] == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors
    assert config["attention_bias"] is config["bias"] is config["qkv_bias"] is False


def test_a_speculators_head_names_its_target(saved, tmp_path):
    pair = saved()
    plan = export_head(str(pair), "speculators", tmp_path / "out", num_speculative_tokens=5)
    config, _ = read(tmp_path / "out")
    assert config["norm_before_residual"] is False and config["transformer_layer_config"]["model_type"] == "llama"
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(pair / "target")
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert plan.command == ("vllm", "serve", str(tmp_path / "out"))


def test_scaled_rotary_embeddings_by_both_names(tmp_path):
    model = tiny(rope_scaling=LINEAR)
    model.save_pretrained(tmp_path / "pair")
    export_head(str(tmp_path / "pair"), "sglang", tmp_path / "flat")
    config, _ = read(tmp_path / "flat")
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0} and config["rope_theta"] == 10000.0
    export_head(str(tmp_path / "pair"), "safeailab", tmp_path / "safeailab")
    assert read(tmp_path / "safeailab")[0]["rope_scaling"] == LINEAR


def test_positions_reach_as_far_as_the_targets(tmp_path):
    tiny(max_position_embeddings=512).save_pretrained(tmp_path / "pair")
    plan = export_head(str(tmp_path / "pair"), "vllm", tmp_path / "out")
    assert read(tmp_path / "out")[0]["max_position_embeddings"] == 2048
    assert any("from 512 to the target's 2048" in note for note in plan.notes)


def test_an_embedding_that_is_the_targets_is_left_out(saved, tmp_path):
    pair, out = saved(), tmp_path / "head"
    shutil.copytree(pair / "eagle3", out)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors[EMBEDDING], read_target_embedding(str(pair / "target")))
    assert EMBEDDING not in contents(str(out), pair / "target").tensors
    save_file({**tensors, EMBEDDING: tensors[EMBEDDING] + 1}, out / "model.safetensors")
    export_head(str(out), "vllm", tmp_path / "vllm", pair / "target")
    assert torch.equal(read(tmp_path / "vllm")[1][EMBEDDING], tensors[EMBEDDING] + 1)
    with pytest.raises(ExportError, match=r"SGLang: embed_tokens.weight differs from the target's"):
        export_head(str(out), "sglang", tmp_path / "sglang", pair / "target")


# --- what is refused ---

REFUSED = [
    ("sglang", dict(norm_before_residual=True), "SGLang: norm_before_residual=True"),
    ("safeailab", dict(norm_before_residual=True), "SafeAILab: norm_before_residual=True"),
    ("safeailab", dict(norm_before_fc=True), "SafeAILab: norm_before_fc=True"),
    ("safeailab", dict(fc_norm=True), "SafeAILab: fc_norm=True"),
    ("safeailab", dict(norm_output=True), "SafeAILab: norm_output=True"),
    ("speculators", dict(norm_before_fc=True, fc_norm=True), "speculators: norm_before_fc=True and fc_norm=True"),
    ("sglang", dict(qkv_bias=True), "SGLang: midlayer.self_attn.q_proj.bias"),
    ("safeailab", dict(qkv_bias=True), "SafeAILab: midlayer.self_attn.q_proj.bias"),
    ("vllm", dict(eagle3=False, bias=True), "vLLM: fc.bias"),
    ("speculators", dict(eagle3=False), "speculators: an EAGLE-1/2 head"),
    ("vllm", dict(feature_layers=(1, 4)), "vLLM: eagle_aux_hidden_state_layer_ids must name 3 layers"),
    ("speculators", dict(feature_layers=(1, 2, 3, 4)), "vLLM: eagle_aux_hidden_state_layer_ids must name 3"),
    ("vllm", dict(feature_layers=(4, 2, 6)), "vLLM: eagle_aux_hidden_state_layer_ids must be ascending"),
    ("sglang", dict(feature_layers=(4, 2, 6)), "SGLang: eagle_aux_hidden_state_layer_ids must be ascending"),
    ("sglang", dict(feature_layers=(0, 3, 6)), r"SGLang: eagle_aux_hidden_state_layer_ids=\[0, 3, 6\] begin with the"),
    ("safeailab", dict(feature_layers=(1, 2, 4)), r"SafeAILab: eagle_aux_hidden_state_layer_ids must be \[2, 4, 5\]"),
    ("safeailab", dict(rope_scaling=LLAMA3), "SafeAILab: rope_scaling"),
    ("safeailab", dict(rope_scaling=LINEAR, rope_theta=5e5), "SafeAILab: rope_theta"),
    ("safeailab", dict(head_dim=32), "SafeAILab: head_dim=32"),
    ("speculators", dict(hidden_size=32, target_hidden_size=64), "speculators: target_hidden_size=64"),
    ("vllm", dict(family="mistral"), "vLLM: EAGLE-3 heads for a target of model_type 'mistral'"),
    ("safeailab", dict(family="mistral"), "SafeAILab: EAGLE-3 heads for a target of model_type 'mistral'"),
    ("safeailab", dict(family="qwen2"), "SafeAILab: EAGLE-3 heads for a target of model_type 'qwen2'"),
    ("safeailab", dict(family="mistral", eagle3=False), "SafeAILab: EAGLE-1/2 heads for a target of model_type 'mist"),
    ("vllm", dict(tree=dict(tree_choices=((0,), (0, 0)))), "tree_choices"),
    ("sglang", dict(tree=dict(tree_choices=((0,), (0, 0)))), "tree_choices"),
]  # fmt: skip


@pytest.mark.parametrize(("to", "head", "message"), REFUSED, ids=[f"{to} {head}" for to, head, _ in REFUSED])
def test_what_an_engine_cannot_do_is_refused_by_name(to, head, message, saved, tmp_path):
    with pytest.raises(ExportError, match=message):
        export_head(str(saved(**head)), to, tmp_path / "out")
    assert not any(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    ("to", "options", "error", "message"),
    [
        ("tensorrt", {}, ValueError, "to must be one of vllm, sglang, speculators, safeailab, got 'tensorrt'"),
        ("sglang", dict(num_speculative_tokens=4), ValueError, "num_speculative_tokens=4 is not read by sglang"),
        ("safeailab", dict(tensor_parallel_size=2), ValueError, "tensor_parallel_size=2 is not read by safeailab"),
        ("vllm", dict(num_speculative_tokens=0), ValueError, "num_speculative_tokens must be at least 1"),
        ("vllm", dict(tensor_parallel_size=True), TypeError, "tensor_parallel_size must be an integer, got True"),
        ("vllm", dict(tensor_parallel_size=1.0), TypeError, "tensor_parallel_size must be an integer, got 1.0"),
        ("safeailab", dict(tensor_parallel_size=None), TypeError, "tensor_parallel_size must be an integer, got None"),
        ("vllm", dict(depth=2.0), TypeError, "depth must be an integer, got 2.0"),
        ("vllm", dict(total_token=-1), ValueError, "total_token=-1 is not read by vllm"),
        (
            "sglang",
            dict(tensor_parallel_size=8),
            ValueError,
            "tensor_parallel_size=8 must divide the head's num_attention",
        ),
        (
            "vllm",
            dict(tensor_parallel_size=3),
            ValueError,
            "tensor_parallel_size=3 must divide the head's num_attention",
        ),
        ("sglang", dict(total_token=1), ValueError, "total_token must be at least 2"),
        ("sglang", dict(total_token=50, depth=1, top_k=2), ValueError, "too few for total_token=50"),
        ("vllm", dict(total_token=9), ValueError, "total_token=9 is not read by vllm, but by sglang, safeailab"),
        ("speculators", dict(top_k=3), ValueError, "top_k=3 is not read by speculators"),
        ("vllm", dict(depth=3, num_speculative_tokens=4), ValueError, "each sets the length of a chain"),
        ("vllm", dict(target="./nowhere"), FileNotFoundError, "'./nowhere' does not exist"),
    ],
)
def test_arguments_are_refused_before_anything_is_written(to, options, error, message, saved, tmp_path):
    with pytest.raises(error, match=message):
        export_head(str(saved()), to, tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


def test_what_is_no_head_or_has_no_target_is_refused(saved, tmp_path):
    pair, out = saved(), tmp_path / "out"
    with pytest.raises(TypeError, match="head must be an EaModel"):
        export_head(3, "vllm", out)
    check_refused(
        ("target: needed", lambda: export_head(str(pair / "eagle3"), "vllm", out)),
        ("target: needed", lambda: export_head(tiny().ea_layer, "vllm", out)),
        ("target: must be given, as a directory or hub id", lambda: export_head(tiny(), "vllm", out)),
        (
            "is not a draft head: it has no fc.weight",
            lambda: export_head(str(demo_directory("draft")), "vllm", out, "demo"),
        ),
        ("'demo-draft' is not a draft head", lambda: export_head("demo-draft", "vllm", out, "demo")),
        ("'demo-gdn' is not a draft head", lambda: export_head("demo-gdn", "vllm", out, "demo")),
        ("vocabulary", lambda: export_head(str(pair / "eagle3"), "vllm", out, "demo")),
    )
    assert not out.exists()


def test_a_full_directory_is_left_alone(saved, tmp_path):
    (tmp_path / "out").mkdir()
    export_head(str(saved()), "vllm", tmp_path / "out")
    before = sorted((path.name, path.read_bytes()) for path in (tmp_path / "out").iterdir())
    with pytest.raises(FileExistsError, match="is not empty"):
        export_head(str(saved()), "sglang", tmp_path / "out")
    with pytest.raises(FileExistsError, match="is a file"):
        export_head(str(saved()), "sglang", tmp_path / "out" / "config.json")
    assert sorted((path.name, path.read_bytes()) for path in (tmp_path / "out").iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_others_may_read_what_was_written(saved, tmp_path):
    export_head(str(saved()), "vllm", tmp_path / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


def test_what_fails_on_the_way_leaves_nothing(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle_triton.export.export_head.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError))
    with pytest.raises(OSError):
        export_head(str(saved()), "vllm", tmp_path / "out")
    assert not any(tmp_path.iterdir())


# --- how it is served ---


def test_the_tree_becomes_what_an_engine_drafts(saved, tmp_path):
    pair = saved()
    plan = export_head(str(pair), "sglang", tmp_path / "tree", tensor_parallel_size=2)
    shape = [plan.arguments[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    assert shape == [4, 3, 12], "as many passes as the tree is deep, the first one counted"
    assert plan.arguments["tp_size"] == 2 and "--tp-size" in plan.command
    plan = export_head(str(pair), "sglang", tmp_path / "chain", top_k=1, total_token=5, depth=6)
    shape = [plan.arguments[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    assert shape == [4, 1, 5], "SGLang makes a chain of steps + 1 nodes"
    plan = export_head(str(pair), "vllm", tmp_path / "vllm", tensor_parallel_size=2)
    assert plan.arguments["speculative_config"] == dict(
        method="eagle3", model=str(tmp_path / "vllm"), num_speculative_tokens=4, draft_tensor_parallel_size=2
    )
    assert "a tree of 12 nodes" in plan.notes[0] and any("SGLang serves the same folder" in note for note in plan.notes)


def test_a_fixed_tree_gives_way_to_a_dynamic_one(saved, tmp_path):
    pair = saved(tree=dict(tree_choices=((0,), (0, 0))))
    plan = export_head(str(pair), "sglang", tmp_path / "out", total_token=6, depth=2, top_k=2)
    assert plan.arguments["speculative_num_draft_tokens"] == 6


@pytest.mark.parametrize("to", ENGINES)
def test_the_call_in_python_is_the_command(to, saved, tmp_path, monkeypatch):
    plan = export_head(str(saved()), to, tmp_path / "out")
    called = {}

    class Engine:
        def __init__(self, **arguments):
            called.update(arguments)

        from_pretrained = classmethod(lambda cls, **arguments: called.update(arguments))

    module, _, name = plan.call.rpartition(".")
    for depth in range(1, module.count(".") + 2):
        stand_in = ModuleType(".".join(module.split(".")[:depth]))
        setattr(stand_in, name.partition(":")[0], Engine)
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    exec(plan.python, {})
    assert called == dict(plan.arguments)
    words = list(plan.command)
    for option, value in plan.arguments.items():
        flag = f"--{option.replace('_', '-')}"
        if flag in words:
            text = words[words.index(flag) + 1]
            assert (json.loads(text) if isinstance(value, dict) else text) == (
                value if isinstance(value, dict) else str(value)
            )
        elif to != "safeailab":
            assert option == "model" and value in words
    assert json.loads(json.dumps(plan.to_dict()))["folder"] == str(tmp_path / "out")


# --- read back ---


@pytest.mark.parametrize(("to", "eagle3"), [("vllm", True), ("sglang", False)], ids=["eagle3", "eagle1"])
def test_drafts_are_the_same(to, eagle3, saved, tmp_path):
    pair = saved(eagle3=eagle3)
    export_head(str(pair), to, tmp_path / "out")
    found = compare_drafts(str(pair), tmp_path / "out", prompts=3)
    assert (found.prompts, found.equal, found.same) == (3, 3, True)


def export_changed(pair, out, name, change):
    """Export a head, and change one of its tensors there."""
    export_head(str(pair), "vllm", out)
    tensors = load_file(out / "model.safetensors")
    change(tensors[name])
    save_file(tensors, out / "model.safetensors")


def test_a_changed_bit_is_found(saved, tmp_path):
    export_changed(saved(), tmp_path / "out", "norm.weight", lambda weight: weight[3].add_(1e-3))
    with pytest.raises(ValueError, match="export: norm.weight has changed"):
        compare_drafts(str(saved()), tmp_path / "out", prompts=1)


def test_other_drafts_are_counted(saved, tmp_path, monkeypatch):
    export_changed(saved(), tmp_path / "out", "lm_head.weight", lambda weight: weight.copy_(weight.flip(0)))
    monkeypatch.setattr("eagle_triton.export.comparison._check_bits", lambda *heads: None)
    assert not compare_drafts(str(saved()), tmp_path / "out", prompts=2).same


# --- the program ---


def test_the_program_prints_what_can_be_pasted(tmp_path, capsys):
    assert (
        main.main(["export", "demo", "--to", "vllm", "-o", str(tmp_path / "out"), "--tensor-parallel-size", "2"]) == 0
    )
    printed = capsys.readouterr()
    command, _, python = printed.out.partition("\n\n")
    assert shlex.split(command)[:2] == ["vllm", "serve"] and "--tensor-parallel-size 2" in command
    assert python.startswith("from vllm import LLM\n") and compile(python, "printed", "exec")
    assert printed.err.splitlines()[0] == f"wrote {tmp_path / 'out'}" and "a tree of 60 nodes" in printed.err


def test_the_program_checks_and_prints_json(saved, tmp_path, capsys, monkeypatch):
    pair = saved()
    words = ["export", str(pair / "eagle3"), "--target", str(pair / "target"), "--to", "speculators", "--check"]
    assert main.main([*words, "--json", "-o", str(tmp_path / "one")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"] == dict(prompts=32, equal=32) and found["command"] == ["vllm", "serve", found["folder"]]
    monkeypatch.setattr("eagle_triton.export.comparison._draft", lambda *given: (torch.rand(3),))
    assert main.main([*words, "-o", str(tmp_path / "two")]) == 1
    assert "0 of 32 drafts are equal" in capsys.readouterr().err
    monkeypatch.setattr("eagle_triton.export.comparison.load_target", lambda *given, **options: int("no model"))
    with pytest.raises(SystemExit, match="2"):
        main.main([*words, "-o", str(tmp_path / "three")])
    assert f"wrote {tmp_path / 'three'}, and --check failed: invalid literal" in capsys.readouterr().err


def test_the_program_says_in_one_line_what_an_engine_cannot_do(saved, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["export", str(saved(norm_before_residual=True)), "--to", "sglang", "-o", str(tmp_path / "out")])
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert stopped.value.code == 2 and line.startswith("eagle-triton export: SGLang: norm_before_residual=True")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_ends_it_with_one_line_and_no_folder(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("eagle_triton.export.export_head.save_file", full)
    assert main.main(["export", "demo", "--to", "vllm", "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "eagle-triton export: [Errno 28] No space left on device\n"
    assert not list(tmp_path.iterdir())
