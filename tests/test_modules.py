"""engine/model: what modules of a model hand over to the operations."""

import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from eagle_triton.engine.model.modules import MLP, Norm, Projection, add_norm, embed_norm, feed_forward
from eagle_triton.engine.operations import make_operations

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
    assert ops.calls["swiglu"] == 1 + bias and ops.calls["linear_swiglu"] == 1 - bias


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
