"""Models with short convolutions or Mamba-2. tests/test_gated_delta.py tests the operations."""

import pytest
import torch
from torch import nn

from eagle_triton import EAGLEConfig, EAGLEInference, TritonConfig, UnsupportedModelError, optimize_with_triton
from eagle_triton.families.causal_lm import read_causal_lm
from tests.test_causal_lm import DEVICE
from tests.tiny import generate_row
from tests.tiny_families import skipped_if_unknown, tiny_family

FAMILIES = (
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "granitemoehybrid",
    "granitemoehybrid that rotates",
    "bamba",
    "nemotron_h",
    "nemotron_h with experts",
    "lara_mini",
    "olmo_hybrid",
    "olmo_hybrid as released",
)
NEW = 14
LENGTHS = (1, 2, 5, 21, 64, 65, 130)  # shorter than a window, and about as long as a page


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    with skipped_if_unknown():
        return tiny_family(request.param).to(DEVICE)


@pytest.mark.versions
def test_tokens_are_the_originals(model):
    """Of prompts of many lengths together, by trees of earlier text; padded; and all mixtures are read."""
    source = torch.Generator().manual_seed(2)
    rows = [torch.randint(1, 24, (length,), generator=source).to(DEVICE) for length in LENGTHS]
    want = [model.generate(row[None], max_new_tokens=NEW, do_sample=False)[0].tolist() for row in rows]
    engine = EAGLEInference(None, model, EAGLEConfig(fallback=False, suffix_drafts=5))
    tokens, stats = engine.generate(rows, NEW)
    assert [row.tolist() for row in tokens] == want and stats["total_tokens_generated"] == len(rows) * NEW
    mask = torch.ones(2, 21, dtype=torch.int64, device=DEVICE)
    mask[1, :9] = 0
    padded = dict(input_ids=rows[3].repeat(2, 1) * mask, attention_mask=mask, pad_token_id=0)
    wanted = model.generate(**padded, max_new_tokens=NEW, do_sample=False)
    for draft in (None, "ngram"):
        with optimize_with_triton(model, draft)[1] as originals:
            assert torch.equal(model.generate(**padded, max_new_tokens=NEW, do_sample=False), wanted)
            row = generate_row(originals)
            assert row.calls == 1 and not row.fallbacks, row
            assert "experts" not in str(originals).replace("experts_", "")


def test_the_kernels_give_the_originals_tokens(model):
    prompt = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]], device=DEVICE)
    want = model.generate(prompt, max_new_tokens=3, do_sample=False)
    config = EAGLEConfig(suffix_drafts=2, suffix_ring=0, fallback=False)
    tokens, _ = EAGLEInference(None, model, config, kernels=True).generate(prompt, 3)
    assert torch.equal(tokens, want)


def test_the_router_is_read_whatever_its_weights_are():
    """Of equal logits every rule makes equal weights, and in large scores no epsilon shows."""
    with skipped_if_unknown():
        model = tiny_family("lfm2_moe", use_expert_bias=False).to(DEVICE)
    prompt, options = torch.arange(2, 20, device=DEVICE)[None], dict(max_new_tokens=NEW, do_sample=False)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want = model.generate(prompt, **options)
    gates = [layer.feed_forward.gate.weight for layer in model.model.layers[1:]]
    with torch.no_grad():
        for gate in gates:
            gate.zero_()
    with optimize_with_triton(model)[1] as originals:
        model.generate(prompt, **options)
        model.load_state_dict(stored)
        assert torch.equal(model.generate(prompt, **options), want) and "mixtures" not in str(originals)
    small = dict(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.3)[:, 0] = 3.0
        for gate in gates:
            gate.mul_(0.3)[:, 0] -= 8
    (logits,) = model.generate(prompt, **small).logits
    with optimize_with_triton(model)[1]:
        torch.testing.assert_close(model.generate(prompt, **small).logits[0], logits, atol=1e-4, rtol=1e-4)


CHANGES = {
    "A_log": lambda mamba: setattr(mamba, "A_log", nn.Parameter(mamba.A_log + 1)),
    "D": lambda mamba: setattr(mamba, "D", nn.Parameter(mamba.D + 1)),
    "conv1d": lambda mamba: setattr(mamba.conv1d, "bias", nn.Parameter(mamba.conv1d.bias + 1)),
    "norm": lambda mamba: setattr(mamba.norm, "weight", nn.Parameter(mamba.norm.weight + 1)),
    "time_step_limit": lambda mamba: setattr(mamba, "time_step_limit", (0.5, 2.0)),
    "group_size": lambda mamba: setattr(mamba.norm, "group_size", 128),
    "activation": lambda mamba: setattr(mamba, "activation", "gelu"),
    "norm.forward": lambda mamba: setattr(mamba.norm, "forward", lambda x, gate: x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_mamba_after_optimising_is_named(name):
    with skipped_if_unknown():
        model = tiny_family("granitemoehybrid").to(DEVICE)
    mamba = model.model.layers[2].mamba
    if name == "group_size" and not hasattr(mamba.norm, name):
        pytest.skip("norms whole rows here")
    prompt = torch.arange(2, 20, device=DEVICE)[None]
    with optimize_with_triton(model)[1]:
        model.generate(prompt, max_new_tokens=2, do_sample=False)
        CHANGES[name](mamba)
        with pytest.raises(RuntimeError, match=rf"layers\.2\.mamba.*{name.split('.')[-1]}"):
            model.generate(prompt, max_new_tokens=2, do_sample=False)


@torch.no_grad()
def test_weights_of_mamba_that_change_in_place_are_heard():
    with skipped_if_unknown():
        model = tiny_family("nemotron_h").to(DEVICE)
    prompt, options = torch.arange(2, 20, device=DEVICE)[None], dict(max_new_tokens=NEW, do_sample=False)
    with optimize_with_triton(model)[1]:
        before = model.generate(prompt, **options)
        for tensor in (model.model.layers[0].mixer.D, model.model.layers[2].mixer.conv1d.weight):
            tensor.mul_(-2)
        found = model.generate(prompt, **options)
    assert torch.equal(found, model.generate(prompt, **options)) and not torch.equal(found, before)


MAMBA_REFUSED = {
    "in_proj must not have a bias": ("granitemoehybrid", lambda model: setattr(
        model.model.layers[0].mamba.in_proj, "bias", nn.Parameter(torch.zeros(328)))),
    "num_heads must be a multiple of n_groups": ("granitemoehybrid", lambda model: setattr(
        model.model.layers[0].mamba, "n_groups", 3)),
    r"activation must be silu, got 'gelu'": ("bamba", lambda model: setattr(
        model.model.layers[0].mamba, "activation", "gelu")),
    r"A_log must be \[8\], got \[4\]": ("bamba", lambda model: setattr(
        model.model.layers[0].mamba, "A_log", nn.Parameter(torch.zeros(4)))),
    r"mamba\.layer_idx must be 0, got 1": ("bamba", lambda model: setattr(
        model.model.layers[0].mamba, "layer_idx", 1)),
    r"layers\.0\.has_experts must be True": ("granitemoehybrid", lambda model: setattr(
        model.model.layers[0], "has_experts", False)),
    r"rotary_emb must be Module, got NoneType": ("bamba", lambda model: setattr(model.model, "rotary_emb", None)),
    "layers.0 has an MLP, and must follow a block with attention or Mamba-2": ("nemotron_h", lambda model: (
        setattr(model.config, "layer_types", ["mlp", *model.config.layer_types[1:]]),
        model.model.layers.__setitem__(0, model.model.layers[1]))),
}  # fmt: skip


@pytest.mark.parametrize("message", MAMBA_REFUSED)
def test_what_is_not_mamba_2_is_refused(message):
    case, change = MAMBA_REFUSED[message]
    with skipped_if_unknown():
        model = tiny_family(case)
    change(model)
    with pytest.raises(UnsupportedModelError, match=message):
        read_causal_lm(model)


def test_what_they_cannot_do_is_refused():
    with skipped_if_unknown():
        biased, model = tiny_family("lfm2", conv_bias=True), tiny_family("lfm2").to(DEVICE)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.conv\.in_proj and out_proj must not have a bias"):
        read_causal_lm(biased)
    with pytest.raises(UnsupportedModelError, match=r"layers \[0, 2, 3\] are recurrent"):
        optimize_with_triton(model, model, TritonConfig(topk=2, num_steps=2))


@torch.no_grad()
def test_a_norm_with_weights_of_zero_is_read():
    """In whole rows, though its module has groups: its weights are filled later."""
    with skipped_if_unknown():
        model = tiny_family("nemotron_h").to(DEVICE)
    norms = [layer.mixer.norm for layer in model.model.layers if hasattr(layer.mixer, "A_log")]
    stored = [norm.weight.clone() for norm in norms]
    for norm in norms:
        norm.group_size = norm.weight.numel()
        norm.weight.zero_()
    prompt, options = torch.arange(2, 20, device=DEVICE)[None], dict(max_new_tokens=NEW, do_sample=False)
    with optimize_with_triton(model)[1]:
        model.generate(prompt, **options)
        for norm, weight in zip(norms, stored, strict=True):
            norm.weight.copy_(weight)
        found = model.generate(prompt, **options)
    assert torch.equal(found, model.generate(prompt, **options))


def test_a_projection_of_another_class_is_called():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 1.5 * super().forward(x)

    with skipped_if_unknown():
        model = tiny_family("granitemoehybrid").to(DEVICE)
    mlp = model.model.layers[0].shared_mlp
    for name in ("input_linear", "output_linear"):
        old = getattr(mlp, name)
        new = Scaled(old.in_features, old.out_features, bias=False, device=DEVICE)
        new.weight = old.weight
        setattr(mlp, name, new)
    prompt, options = torch.arange(2, 20, device=DEVICE)[None], dict(max_new_tokens=NEW, do_sample=False)
    want = model.generate(prompt, **options)
    with optimize_with_triton(model)[1] as originals:
        assert torch.equal(model.generate(prompt, **options), want) and "projections" in str(originals)


def test_output_that_is_read_again_after_a_pause_is_no_prompt():
    """Mamba-2's limits count in prompts only."""
    with skipped_if_unknown():
        model = tiny_family("bamba", max_position_embeddings=2048, vocab_size=64, time_step_limit=(0.4, 0.7)).to(DEVICE)
    source = torch.Generator().manual_seed(5)
    rows = [torch.randint(1, 64, (length,), generator=source).to(DEVICE) for length in (300, 200, 120, 60, 90)]
    options = dict(max_new_tokens=90, do_sample=False)
    want = [model.generate(row[None], attention_mask=torch.ones_like(row)[None], **options)[0] for row in rows]
    engine = EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4, fallback=False, cache_tokens=896))
    tokens, stats = engine.generate(rows, 90)
    assert sum(one.pauses for one in stats.completions) and all(map(torch.equal, tokens, want))
