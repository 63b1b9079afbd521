"""engine/model: what modules of a model hand over to the operations."""

import importlib
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from eagle_triton.engine.model.mixers import KeyValues, NewRows
from eagle_triton.engine.model.modules import (
    MLP,
    Norm,
    NormedUpdate,
    Projection,
    Rotary,
    add_norm,
    apply_norm,
    embed_norm,
    feed_forward,
)
from eagle_triton.engine.operations import make_operations
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.module_reader import ModuleReader

KERNELS = pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])


@KERNELS
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_block_with_gelu_is_gemmas(device, kernels, bias):
    config = modeling_gemma2.Gemma2Config(hidden_size=64, intermediate_size=96)
    theirs = modeling_gemma2.Gemma2MLP(config).to(device)
    if bias:
        theirs.gate_proj.bias = torch.nn.Parameter(torch.randn(96, device=device))
    gate, up, down = (
        Projection(layer.weight, layer.bias) for layer in (theirs.gate_proj, theirs.up_proj, theirs.down_proj)
    )
    x, ops = torch.randn(2, 3, 64, device=device), make_operations(kernels)
    with torch.no_grad():
        ours = MLP(gate, up, down, "gelu_tanh")
        torch.testing.assert_close(ops.add(feed_forward(ops, ours, x)), theirs(x), rtol=1e-4, atol=1e-5)
        other = ops.add(feed_forward(ops, MLP(gate, up, down), x))
        assert (other - theirs(x)).abs().max() > 1e-3
    assert ops.calls["swiglu"] == 2 * bias and ops.calls["linear_swiglu"] == 2 - 2 * bias


@KERNELS
def test_a_norm_says_where_it_rounds(device, kernels):
    x, update, table = (torch.randn(*shape, device=device).half() for shape in ((2, 3, 64), (2, 3, 64), (9, 64)))
    theirs = modeling_gpt_oss.GptOssRMSNorm(64, 1e-5).half().to(device)
    theirs.weight.data = torch.randn(64, device=device).half()
    tokens = torch.randint(9, (2, 3), device=device)
    ops, norm = make_operations(kernels), Norm(theirs.weight.detach(), 1e-5, round_first=False)
    with torch.no_grad():
        for out, expected in (
            (add_norm(ops, norm, x), theirs(x)),
            (add_norm(ops, norm, x, update), theirs(x + update)),
            (embed_norm(ops, norm, table, tokens), theirs(table[tokens])),
        ):
            assert (out[0] != expected).float().mean() < 0.01


ATTENTIONS = {  # options of the config, and of its rotary embedding
    "olmo2": ("Olmo2", {}, {"round_tables": False}),
    "glm4": ("Glm4", {"head_dim": 16}, {"pairs": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [0], "layer_types": ["full_attention"]}, {}),
    "ministral3": ("Ministral3", {"head_dim": 16}, {"temperature": (0.5, 4)}),
}


def attention_of(family: str, device: str, kv_heads: int = 2) -> tuple[nn.Module, nn.Module, Rotary]:
    """A layer with an attention of four heads, its rotary embedding, and ours."""
    name, options, changes = ATTENTIONS[family]
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=kv_heads, num_hidden_layers=1)
    config = getattr(home, f"{name}Config")(**sizes, attn_implementation="eager", **options)
    if family == "ministral3":
        config.rope_parameters |= {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}
    layer = nn.Module()
    torch.manual_seed(5)
    layer.self_attn = getattr(home, f"{name}Attention")(config, 0).to(device)
    for parameter in layer.self_attn.parameters():
        parameter.data = torch.randn_like(parameter) / (8 if parameter.dim() == 2 else 1)
    rotary = getattr(home, f"{name}RotaryEmbedding")(config).to(device)
    inv_freq = rotary.inv_freq[:0] if family == "smollm3" else rotary.inv_freq
    return layer, rotary, Rotary(inv_freq, rotary.attention_scaling, **changes)


@KERNELS
@pytest.mark.parametrize("family", ATTENTIONS)
def test_attention_is_that_of_hugging_face(device, family, kernels):
    layer, rotary, ours = attention_of(family, device)
    x, positions = torch.randn(2, 7, 64, device=device), torch.arange(7, device=device).expand(2, -1)
    mask = torch.full((7, 7), -torch.inf, device=device).triu(1)[None, None]
    mixer = ModuleReader(layer, "layer").attention(ours, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    assert mixer.norms_rows == (family == "olmo2")
    with torch.no_grad():
        expected, _ = layer.self_attn(x, rotary(x, positions), mask, position_ids=positions)
        for changed in (mixer, replace(mixer, rotary=Rotary(rotary.inv_freq * 2))):
            cache = KeyValues(torch.zeros(2, 2, 2, 16, 16, device=device))
            none = torch.zeros(2, dtype=torch.int32, device=device)
            ops = make_operations(kernels)
            out = ops.add(changed.forward(ops, x, cache, NewRows(none, none, None, None)))
            same = bool((out - expected).abs().max() < 1e-3)
            assert same == (changed is mixer)
    assert ops.calls["rms_norm"] == (2 if family == "olmo2" else 0)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_norms_of_whole_rows_are_told_by_their_widths(kv_heads):
    layer, _, rotary = attention_of("olmo2", "cpu", kv_heads)
    heads = dict(num_heads=4, num_kv_heads=kv_heads, head_dim=16, scale=0.25)
    mixer = ModuleReader(layer, "layer").attention(rotary, **heads)
    assert mixer.norms_rows and len(mixer.k_norm.weight) == 16 * kv_heads
    layer.self_attn.k_norm.weight.data = torch.ones(48)
    with pytest.raises(UnsupportedModelError, match=r"layer\.self_attn\.q_norm and k_norm must have weights for"):
        ModuleReader(layer, "layer").attention(rotary, **heads)
    layer.self_attn.k_norm.weight.data = torch.ones(16 * kv_heads)
    layer.self_attn.q_proj = nn.Linear(64, 128, bias=False)
    with pytest.raises(UnsupportedModelError, match="norms of whole rows and a gate"):
        ModuleReader(layer, "layer").attention(rotary, **heads)


@KERNELS
def test_an_update_that_a_layer_norm_norms_is_added(device, kernels):
    """Its norm is not left to the next one, which takes over the norms of RMSNorms alone."""
    ops = make_operations(kernels)
    x, product, weight, bias = (torch.randn(*shape, device=device) for shape in ((2, 3, 64), (2, 3, 64), (64,), (64,)))
    norms = Norm(weight, 1e-5), Norm(weight, 1e-5, subtract_mean=True, bias=bias)
    for own, norm in itertools.product(norms, norms):
        normed, total = add_norm(ops, norm, x, NormedUpdate(product, own))
        torch.testing.assert_close(total, x + apply_norm(ops, own, product))
        torch.testing.assert_close(normed, apply_norm(ops, norm, total))
