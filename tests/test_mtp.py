"""Multi-token prediction: checkpoints of three families, the pass against its formula, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_triton import EAGLEConfig, EAGLEInference, UnsupportedModelError, load_mtp, optimize_with_triton
from eagle_triton.engine.drafts.beams import with_vocabulary
from eagle_triton.engine.drafts.mtp import MTPDraft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.operations import make_operations
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.families.causal_lm import read_causal_lm
from eagle_triton.families.reading.mtp import read_mtp
from eagle_triton.inference import SpeculativeConfig
from eagle_triton.inference.stages import Prefix
from eagle_triton.models import checkpoint, mtp
from eagle_triton.models.loading import load_target
from eagle_triton.models.mtp import MTPHead, has_mtp
from eagle_triton.runtime.float8_weight import quantised
from tests.checkpoints import edited
from tests.float8_models import with_fp8
from tests.test_causal_lm import causal_lm
from tests.tiny import random_prompt
from tests.tiny_families import skipped_if_unknown, tiny_family
from tests.tiny_hybrids import DEEPSEEK, KINDS, MIMO, QWEN, mtp_tensors, save_with_mtp, tiny_hybrid

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 24
PROMPT = 1 + random_prompt(20, vocab=VOCAB - 1)


@pytest.fixture(scope="module")
def llama():
    return causal_lm("llama", vocab=VOCAB, layers=2).cpu()


def engine_of(model, head: MTPHead, spec: TreeSpec) -> Engine:
    view = read_causal_lm(model)
    return Engine(view, read_mtp(head, view, lambda: spec), make_operations(DEVICE == "cuda"))


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with experts apart, as they are published."""
    apart = {}
    for name, value in tensors.items():
        before, fused, part = name.partition(".mlp.experts.")
        if not fused:
            apart[name] = value
            continue
        for expert, weight in enumerate(value):
            parts = {"down": weight} if part == "down_proj" else dict(zip(("gate", "up"), weight.chunk(2), strict=True))
            apart |= {f"{before}{fused}{expert}.{each}_proj.weight": x.clone() for each, x in parts.items()}
    return apart


def written_out(model, head: MTPHead, tokens: Tensor, hidden: Tensor, unit: int = 0) -> Tensor:
    """y [B, n, H] of the formula: row p has the hidden state of token p and the embedding of token p + 1."""
    mtp, body = head.units[unit], model.model
    embeddings = body.embed_tokens(tokens[:, 1:])
    x = torch.cat((mtp.token_norm(embeddings), mtp.hidden_norm(hidden)), dim=-1) @ mtp.fc.weight.T
    positions = torch.arange(x.shape[1], device=x.device)
    positions = positions.expand(3, 1, -1) if "Qwen3_5" in type(model).__name__ else positions[None]
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)[None, None]
    out = mtp.layer(x, position_embeddings=body.rotary_emb(x, positions), attention_mask=mask)
    return mtp.norm(out[0] if isinstance(out, tuple) else out)


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["llama", *KINDS[:2], "glm4_moe_lite"])
@torch.no_grad()
def test_a_pass_is_the_formula(tmp_path, llama, kind):
    """The first drafts from the hidden states behind the final norm, the next from the layer's own normed output."""
    if kind == "glm4_moe_lite":
        with skipped_if_unknown():
            model = tiny_family(kind)
        tensors = one_by_one(mtp_tensors(model, DEEPSEEK, 4, mixture=True))
    else:
        model = llama if kind == "llama" else tiny_hybrid(kind, VOCAB)
        tensors = mtp_tensors(model, QWEN)
    head = load_mtp(model, save_with_mtp(model, tmp_path, tensors))
    model, head = model.to(DEVICE), head.to(DEVICE)
    spec, tokens = TreeSpec.chain(2), PROMPT.to(DEVICE)
    found = Prefix(engine_of(model, head, spec), spec, tokens).candidates()

    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]
    first = written_out(model, head, tokens, hidden)
    scores = [model.lm_head(first[:, -1]).log_softmax(-1)]
    drafted = torch.cat((tokens, scores[0].argmax(-1, keepdim=True)), dim=1)
    second = written_out(model, head, drafted, torch.cat((hidden, first[:, -1:]), dim=1))
    scores.append(scores[0].max() + model.lm_head(second[:, -1]).log_softmax(-1))
    expected = torch.stack([score.amax(-1) for score in scores], dim=1)
    torch.testing.assert_close(found.scores, expected, atol=1e-4, rtol=1e-4)
    assert found.tokens.tolist() == [[int(score.argmax()) for score in scores]]


@pytest.mark.versions
@pytest.mark.parametrize(("names", "first"), [(QWEN, 0), (DEEPSEEK, 2), (MIMO, 0)], ids=["qwen", "deepseek", "mimo"])
@torch.no_grad()
def test_each_family_of_names_is_the_same_layer(tmp_path, llama, names, first):
    tensors = mtp_tensors(llama, names, first)
    folder = save_with_mtp(llama, tmp_path, tensors)
    assert has_mtp(folder)
    (unit,) = load_mtp(llama, folder).cpu().units
    fc = tensors[f"{names['fc'].format(first)}.weight"]
    halves = fc.chunk(2, dim=1)
    assert torch.equal(unit.fc.weight, torch.cat(halves[::-1], dim=1) if names is MIMO else fc)
    assert torch.equal(unit.token_norm.weight, tensors[f"{names['token_norm'].format(first)}.weight"])
    assert torch.equal(unit.layer.mlp.up_proj.weight, tensors[f"{names['layer'].format(first)}.mlp.up_proj.weight"])


@pytest.mark.parametrize(("names", "first"), [(QWEN, 0), (DEEPSEEK, 2)], ids=["qwen", "deepseek"])
def test_several_layers_take_turns(tmp_path, llama, names, first):
    """Pass i runs unit i mod n; each keeps rows of its own. The output is the target's."""
    folder = save_with_mtp(llama, tmp_path, mtp_tensors(llama, names, first, layers=2))
    model, head = llama.to(DEVICE), load_mtp(llama, folder).to(DEVICE)
    assert len(head.units) == 2 and (head.units[0].fc is head.units[1].fc) == (names is QWEN)
    assert not torch.equal(*(unit.layer.mlp.up_proj.weight for unit in head.units))
    expected = model.generate(PROMPT.to(DEVICE), max_new_tokens=24, do_sample=False, eos_token_id=None)
    for tree in (dict(topk=3, num_steps=3, num_draft_tokens=10), dict(topk=1, num_steps=4, num_draft_tokens=5)):
        eagle = EAGLEInference(head, model, EAGLEConfig(fallback=False, **tree))
        assert torch.equal(eagle.generate(PROMPT, 24, stop_token_ids=())[0], expected)
    spec = TreeSpec.chain(3)
    draft = read_mtp(head, read_causal_lm(model), lambda: spec)
    prefix = Prefix(Engine(eagle.engine.view, draft, make_operations()), spec, PROMPT.to(DEVICE))
    both = prefix.candidates()
    for (
        cache
    ) in prefix.state.sequences.draft_tensors.caches.caches:  # what stood behind the committed rows does not count
        cache.data[..., PROMPT.shape[1] - 1 :, :] = 7.0
    assert torch.equal(prefix.candidates().scores, both.scores)
    alone = replace(draft, units=draft.units[:1], layers=draft.layers[:1])
    one = Prefix(Engine(eagle.engine.view, alone, make_operations()), spec, PROMPT.to(DEVICE)).candidates()
    assert torch.equal(both.scores[:, 0], one.scores[:, 0]) and not torch.equal(both.scores[:, 1], one.scores[:, 1])


@pytest.mark.versions
def test_the_serving_methods_and_both_doors(tmp_path, llama):
    from transformers import AutoModelForCausalLM

    folder = save_with_mtp(llama.cpu(), tmp_path, mtp_tensors(llama, QWEN))
    model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE).eval()  # which remembers where it came from
    expected = model.generate(PROMPT.to(DEVICE), max_new_tokens=24, do_sample=False)
    chain = SpeculativeConfig(method="mtp", num_model_steps=3, num_speculative_tokens=3)
    hybrid = SpeculativeConfig(method="hybrid", num_model_steps=2, num_speculative_tokens=5)
    elsewhere = SpeculativeConfig(method="mtp", model=str(folder))
    for config, drafts in ((chain, 3), (hybrid, 5), (elsewhere, 1)):
        eagle = EAGLEInference(None, model, config)
        assert torch.equal(eagle.generate(PROMPT, 24)[0], expected)
        assert eagle.config.tree().drafts == drafts
    assert torch.equal(EAGLEInference(None, str(folder), hybrid, DEVICE).generate(PROMPT, 24)[0], expected)
    tree = EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=10)
    assert torch.equal(EAGLEInference("mtp", model, tree).generate(PROMPT, 24)[0], expected)
    for config in (tree, chain, hybrid, SpeculativeConfig(method="ngram"), elsewhere):
        eagle = EAGLEInference.from_pretrained(folder, config=config, device=DEVICE)
        assert torch.equal(eagle.generate(PROMPT, 24)[0], expected)
    assert isinstance(EAGLEInference(None, str(folder), tree, DEVICE).pair.draft, MTPDraft)
    with optimize_with_triton(model, "mtp", topk=3, num_steps=3) as (patched, _):
        assert torch.equal(patched.generate(PROMPT.to(DEVICE), max_new_tokens=24, do_sample=False), expected)


def in_eight_bits(
    tensors: dict[str, Tensor], only: tuple[str, ...] = ("_proj.weight",)
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of MTP layers whose names end so as fine-grained FP8 has them, and what these numbers stand for."""
    eight, wide = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if name.endswith(only) and value.dim() > 1:
            found = [quantised(part, block=True) for part in value.reshape(-1, *value.shape[-2:])]
            values = torch.stack([part.values.view(torch.uint8) for part in found]).view(torch.float8_e4m3fn)
            scale = torch.stack([part.scale for part in found])
            eight |= {name: values.view_as(value), f"{name}_scale_inv": scale if value.dim() > 2 else scale[0]}
            wide[name] = torch.stack([part.dequantised(value.dtype) for part in found]).view_as(value)
    return eight, wide


@pytest.mark.versions
def test_layers_in_eight_bits_are_read_as_the_targets_are(tmp_path, llama):
    target, plain = (model.to(DEVICE) for model in with_fp8(llama.cpu()))
    eight, wide = in_eight_bits(mtp_tensors(llama, QWEN))
    head = load_mtp(target, save_with_mtp(llama, tmp_path / "eight", eight))
    same = load_mtp(plain, save_with_mtp(llama, tmp_path / "wide", wide))
    taken, own = head.units[0].layer.mlp.up_proj, target.model.layers[0].mlp.up_proj
    assert type(taken) is type(own) and taken.block_size == own.block_size and taken.weight is not own.weight
    assert torch.equal(taken.weight.cpu().view(torch.uint8), eight["mtp.layers.0.mlp.up_proj.weight"].view(torch.uint8))
    tree = dict(topk=3, num_steps=3, num_draft_tokens=10)
    found = {}
    for name, mtp_head, model in (("eight", head, target), ("wide", same, plain)):
        eagle = EAGLEInference(mtp_head, model, EAGLEConfig(fallback=False, **tree))
        prefix = Prefix(eagle.engine, TreeSpec.chain(3), PROMPT.to(DEVICE))
        found[name] = prefix.candidates(), eagle.generate(PROMPT, 24, stop_token_ids=())[0], eagle.report()
    torch.testing.assert_close(found["eight"][0].scores, found["wide"][0].scores, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["eight"][1], found["wide"][1])
    assert "21 FP8 projections are read by their weights" in found["eight"][2]  # seven of each layer
    with pytest.raises(
        UnsupportedModelError, match=r"_proj.weight must be float8_e4m3fn .*, got torch.float32"
    ) as cast:
        EAGLEInference(copy.deepcopy(head).float(), target, EAGLEConfig(**tree))
    assert "as published" not in str(cast.value)  # which would leave out the scales
    expected = found["wide"][1].to(DEVICE)
    with optimize_with_triton(target, head, topk=3, num_steps=3) as (patched, _):
        ids = PROMPT.to(DEVICE)
        assert torch.equal(patched.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None), expected)


@pytest.mark.versions
def test_layers_in_eight_bits_are_widened_where_the_target_is_not_in_them(tmp_path, llama, caplog):
    """All of a plain target's, the input projection, which no layer of a target has, and a scale for all."""
    tensors = mtp_tensors(llama, MIMO)
    eight, wide = in_eight_bits(tensors, ("_proj.weight", "input_proj.weight"))
    name = "model.mtp_layers.0.mlp.up_proj.weight"
    eight[f"{name}_scale_inv"] = eight[f"{name}_scale_inv"].reshape(())
    eight["model.mtp_layers.0.mlp.up_proj.activation_scale"] = torch.ones(())
    found = load_mtp(llama.cpu(), save_with_mtp(llama, tmp_path / "eight", eight)).state_dict()
    assert "8 weights in FP8 are converted to torch.float32" in caplog.text  # seven projections, and fc
    expected = load_mtp(llama, save_with_mtp(llama, tmp_path / "wide", wide)).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    target, _ = with_fp8(llama)
    unit = load_mtp(target, tmp_path / "wide").units[0]
    assert type(unit.layer.mlp.up_proj) is torch.nn.Linear and unit.fc.weight.dtype == torch.float32


def test_blocks_of_large_weights_have_their_own_scales():
    weight = torch.randn(3, 200, 300) * torch.arange(1, 301)
    found = [quantised(part, block=True) for part in weight]
    values = torch.stack([part.values.view(torch.uint8) for part in found]).view(torch.float8_e4m3fn)
    wide = mtp._dequantised(values, torch.stack([part.scale for part in found]), "scale")
    assert torch.equal(wide, torch.stack([part.dequantised() for part in found]))


@pytest.mark.versions
def test_what_a_targets_module_has_around_it_is_not_copied(tmp_path, llama):
    target, _ = with_fp8(llama.cpu())
    module = target.model.layers[0].mlp.up_proj
    module.register_forward_hook(lambda *_: None)
    module.forward, module.owner = lambda x: x, [target]
    eight, _ = in_eight_bits(mtp_tensors(llama, QWEN))
    taken = load_mtp(target, save_with_mtp(llama, tmp_path, eight)).units[0].layer.mlp.up_proj
    assert not taken._forward_hooks and "forward" not in vars(taken) and taken.owner is module.owner
    assert module._forward_hooks and module.weight.device.type == "cpu"


@pytest.mark.versions
@pytest.mark.skipif("qwen3_5_moe" not in KINDS, reason="transformers has no such model")
def test_experts_in_eight_bits_are_widened(tmp_path):
    model = tiny_hybrid("qwen3_5_moe", VOCAB)
    eight, wide = in_eight_bits(mtp_tensors(model, QWEN), ("gate_up_proj", "down_proj", "up_proj.weight"))
    assert any("experts" in name and name.endswith("_scale_inv") for name in eight)
    found = load_mtp(model, save_with_mtp(model, tmp_path / "eight", eight)).state_dict()
    expected = load_mtp(model, save_with_mtp(model, tmp_path / "wide", wide)).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_layers_in_eight_bits_that_are_not_whole_are_refused(tmp_path, llama):
    target, _ = with_fp8(llama.cpu())
    eight, _ = in_eight_bits(mtp_tensors(llama, QWEN))
    name = "mtp.layers.0.mlp.up_proj.weight"
    scale = f"{name}_scale_inv"
    for number, (model, given, message) in enumerate(
        (
            (target, {k: v for k, v in eight.items() if k != scale}, r"with a weight_scale_inv, got torch.float8"),
            (
                llama,
                {k: v for k, v in eight.items() if k != name},
                "must be float8_e4m3fn, because there is a .*, got nothing",
            ),
            (
                target,
                eight | {name: torch.ones(128, 64)},
                "must be float8_e4m3fn, because there is a .*, got torch.float32",
            ),
            (target, eight | {scale: torch.ones(2, 1)}, r"weight_scale_inv must be \[1, 1\], got \[2, 1\]"),
            (
                llama,
                eight | {scale: torch.ones(2, 1)},
                r"weight_scale_inv must be \[1, 1\] .one for each block .*\[2, 1\]",
            ),
            (
                llama,
                eight | {scale: torch.ones(1, 1).int()},
                "weight_scale_inv must be floating point, got torch.int",
            ),
        )
    ):
        with pytest.raises(ValueError, match=message):
            load_mtp(model, save_with_mtp(llama, tmp_path / str(number), given))


@pytest.mark.versions
def test_a_trimmed_projection_scores_its_tokens_alone(tmp_path, llama):
    model = llama.to(DEVICE)
    head = load_mtp(model, save_with_mtp(llama, tmp_path, mtp_tensors(llama, QWEN)))
    spec = TreeSpec.dynamic(6, 1, 3)
    whole = engine_of(model, head, spec)

    def candidates(tokens):
        engine = replace(whole, draft=with_vocabulary(whole.draft, tokens))
        return Prefix(engine, spec, PROMPT.to(DEVICE)).candidates(), engine.draft

    full = Prefix(whole, spec, PROMPT.to(DEVICE)).candidates()
    same, _ = candidates(range(VOCAB))
    assert torch.equal(same.tokens, full.tokens)
    torch.testing.assert_close(same.scores, full.scores)
    some, draft = candidates([20, 3, 3, 7, 11])
    assert set(some.tokens.flatten().tolist()) <= {3, 7, 11, 20} and draft.vocabulary == 4
    assert set(candidates(5)[0].tokens.flatten().tolist()) <= set(range(5))
    with optimize_with_triton(model, head, draft_vocabulary=8, suffix_drafts=4) as (_, originals):
        notes = {row.path: row.reason for row in originals.report()}
        assert notes["draft_vocabulary"].startswith(f"8 of {VOCAB} tokens are drafted; their rows are copies, 0.0 MiB")
    eagle = EAGLEInference(head, model, EAGLEConfig(draft_vocabulary=[3, 5, 8, 9]))
    assert f"draft_vocabulary: 4 of {VOCAB} tokens" in eagle.report()
    for tokens, error, message in (
        (0, ValueError, "at least 1 token, got 0"),
        (VOCAB + 1, ValueError, f"must lie in 0..{VOCAB - 1}, got {VOCAB}"),
        ([1, VOCAB], ValueError, f"must lie in 0..{VOCAB - 1}, got {VOCAB}"),
        ([-1], ValueError, "from 0 on"),
        ([], ValueError, "must hold token ids"),
        ("abc", TypeError, "a number of tokens or their ids"),
        (True, TypeError, "a number of tokens or their ids"),
    ):
        with pytest.raises(error, match=message):
            with_vocabulary(whole.draft, tokens)
    with pytest.raises(ValueError, match="has its own vocabulary of 4 tokens"):
        with_vocabulary(draft, 3)
    with pytest.raises(ValueError, match="draft_vocabulary needs a draft that scores candidates"):
        EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4, draft_vocabulary=8))


@pytest.mark.versions
@pytest.mark.parametrize("found", [True, False])
def test_whether_a_hub_id_has_layers_is_asked_without_its_weights(monkeypatch, found):
    names = ["model.norm.weight", *(["mtp.fc.weight"] if found else [])]

    def metadata(repo_id):
        assert repo_id == "some/model"
        return SimpleNamespace(weight_map=dict.fromkeys(names, "model.safetensors"))

    monkeypatch.setattr(checkpoint, "get_safetensors_metadata", metadata)
    monkeypatch.setattr(checkpoint, "snapshot_download", None)
    assert has_mtp("some/model") is found


@pytest.mark.versions
def test_a_hub_that_cannot_be_reached_leaves_it_to_the_cache(monkeypatch, tmp_path, llama):
    folder = save_with_mtp(llama, tmp_path, mtp_tensors(llama, QWEN))

    def unreachable(repo_id):
        raise ConnectionError("no network")

    monkeypatch.setattr(checkpoint, "get_safetensors_metadata", unreachable)
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda repo_id, allow_patterns: str(folder))
    assert has_mtp("some/model")


@pytest.mark.versions
def test_checkpoints_that_are_not_whole_are_refused_by_name(tmp_path, llama):
    model, tensors = llama.cpu(), mtp_tensors(llama, QWEN)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no multi-token-prediction layers: neither mtp\.\*"):
        load_mtp(model, tmp_path)
    assert not has_mtp(tmp_path) and not has_mtp(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="made in memory, .* give their path"):
        load_mtp(model)
    with pytest.raises(FileNotFoundError, match="is not a directory and cannot be fetched from the hub"):
        load_mtp(model, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a local directory, so revision cannot be given"):
        load_mtp(model, tmp_path, revision="main")
    broken = {
        "lacks layer.mlp.up_proj.weight": {k: v for k, v in tensors.items() if "up_proj" not in k},
        "lacks norm.weight": {k: v for k, v in tensors.items() if k != "mtp.norm.weight"},
        "lacks fc.weight": {k: v for k, v in tensors.items() if k != "mtp.fc.weight"},
        "has norm.old.weight": {**tensors, "mtp.norm.old.weight": torch.ones(64)},
        "mtp.lm_head.weight differs from the target's": {**tensors, "mtp.lm_head.weight": torch.ones(VOCAB, 64)},
        "has mtp.other.weight": {**tensors, "mtp.other.weight": torch.ones(3)},
        r"fc.weight must be \[64, 128\], got \[64, 64\]": {**tensors, "mtp.fc.weight": torch.ones(64, 64)},
        r"must be float32, .* with a weight_scale_inv, got torch.float8_e4m3fn \(quantised": {
            k: v.to(torch.float8_e4m3fn) for k, v in tensors.items()
        },
        "has layer.self_attn.kv_b_proj.weight, which": {
            **tensors,
            "mtp.layers.0.self_attn.kv_b_proj.weight": torch.ones(3),
        },
        r"numbered from 0 on, got \[1\]": {k.replace("layers.0", "layers.1"): v for k, v in tensors.items()},
    }
    for message, given in broken.items():
        save_file({name: value.contiguous() for name, value in given.items()}, tmp_path / "mtp.safetensors")
        with pytest.raises(ValueError, match=message):
            load_mtp(model, tmp_path)
    own = {"mtp.embed_tokens.weight": model.model.embed_tokens.weight, "mtp.lm_head.weight": model.lm_head.weight}
    save_file(
        {**tensors, **{name: value.detach().clone() for name, value in own.items()}}, tmp_path / "mtp.safetensors"
    )
    assert len(load_mtp(model, tmp_path).units) == 1
    with pytest.raises(ValueError, match="expected a directory or a hub id, .* is a file"):
        load_mtp(model, tmp_path / "mtp.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json' is not an index of weights: KeyError\('weight_map'\)"):
        load_mtp(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "mtp.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="cannot be read, truncated or not weights"):
        load_mtp(model, tmp_path)


def test_a_target_that_lost_layers_is_refused(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    edited(tmp_path, num_hidden_layers=1)
    with pytest.raises(ValueError, match="the checkpoint has unexpected model.layers.1"):
        load_target(str(tmp_path))


def test_a_head_that_does_not_fit_is_refused(tmp_path, llama):
    model = llama.to(DEVICE)
    head = load_mtp(model, save_with_mtp(llama, tmp_path, mtp_tensors(llama, QWEN)))
    with pytest.raises(UnsupportedModelError, match="do not fit: dtype torch.float64"):
        read_mtp(head.double(), read_causal_lm(model), lambda: TreeSpec.chain(1))
    with pytest.raises(UnsupportedModelError, match="only the target.s last hidden states"):
        read_mtp(head.float(), read_causal_lm(model, (0, 1)), lambda: TreeSpec.chain(1))
    head.units[0].layer.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="has a forward hook, which would not run"):
        read_mtp(head, read_causal_lm(model), lambda: TreeSpec.chain(1))
