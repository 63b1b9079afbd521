"""layers/ against its reference: shapes, strides, capacity edges, and what must be refused."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.operands.layers import ACTIVATIONS, HEAD_GATES, UNGATED_ACTIVATIONS
from eagle_triton.ops import layers as kernels
from eagle_triton.ops.draft_inputs import draft_inputs
from eagle_triton.ops.layers import norms
from eagle_triton.reference import layers as reference
from eagle_triton.runtime.row_formats import Float8Pair, RowFormat, WordOrdered
from eagle_triton.runtime.split_sums import SplitSums
from tests.failing import check_refused
from tests.paging import in_pages, out_of_pages
from tests.rounding import CUDA, DTYPES, assert_close

LARGE = [(60, 4096), (65, 3584)] if CUDA else []
BOTH = pytest.mark.parametrize("module", [kernels, reference], ids=["kernel", "reference"])


def randn(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 200), (26, 256), (0, 64), *LARGE])
def test_rms_norm(device, shape, dtype):
    x, residual, weight = randn(device, dtype, *shape), randn(device, dtype, *shape), randn(device, dtype, shape[-1])
    out = kernels.rms_norm(x, weight, 1e-5)
    assert out.shape == x.shape
    if not out.numel():
        return
    assert_close(out, reference.rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight.float(), 1e-5))
    out, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    same, same_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    exact, _ = reference.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-5)
    assert_close(out, same, exact)
    assert torch.equal(total, same_total)


@pytest.mark.parametrize("options", [{}, {"round_first": False}, {"zero_centred": True}], ids=str)
@BOTH
@pytest.mark.parametrize("splits", [0, 3])
def test_a_sum_may_be_of_a_norm(device, module, splits, options):
    """To the bits of a norm of its own before."""
    x = randn(device, torch.float16, 5, 200)
    if splits:
        x = SplitSums(randn(device, torch.float32, splits, 5, 200), torch.float16)
    residual, weight, own = (randn(device, torch.float16, *shape) for shape in ((5, 200), (200,), (200,)))
    expected = module.add_rms_norm(module.rms_norm(x, own, 1e-5, **options), residual, weight, 1e-5, **options)
    found = module.add_rms_norm(x, residual, weight, 1e-5, own_weight=own, **options)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[1], module.add_rms_norm(x, residual, weight, 1e-5, **options)[1])
    with pytest.raises(ValueError, match="own_weight"):
        module.add_rms_norm(x, residual, weight, 1e-5, own_weight=own[:-1])


@pytest.mark.parametrize("zero_centred", [False, True], ids=["plain", "zero-centred"])
@BOTH
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 3, 200), (4, 1, 64), (0, 3, 64)])
def test_rows_may_have_weights_in_turn(device, module, shape, zero_centred):
    """To the bits of norms of their own; rows that stand within wider ones, too."""
    wide = randn(device, torch.float16, *shape[:-1], shape[-1] + 8)
    x, weights = wide[..., 8:], tuple(randn(device, torch.float16, shape[-1]) for _ in range(shape[-2]))
    out = module.rms_norm(x, weights, 1e-5, zero_centred=zero_centred)
    alone = [module.rms_norm(x[..., i, :], weight, 1e-5, zero_centred=zero_centred) for i, weight in enumerate(weights)]
    assert torch.equal(out, torch.stack(alone, dim=-2))
    for wrong in (weights[1:], (*weights[1:], weights[0].float()), (*weights[1:], weights[0][:7])):
        with pytest.raises(ValueError, match="rms_norm"):
            module.rms_norm(x, wrong, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 200), *LARGE])
@pytest.mark.parametrize("options", [{"zero_centred": True}, {"round_first": False}], ids=str)
def test_norms_that_round_once(device, options, shape, dtype):
    """(1 + weight): Gemma's and Qwen3.5's. weight: gpt-oss's and OLMo 2's, which in fp32 is Llama's."""
    x, residual, weight = randn(device, dtype, *shape), randn(device, dtype, *shape), randn(device, dtype, shape[-1])
    factor = weight.float() + ("zero_centred" in options)

    def by_hand(x: Tensor) -> Tensor:
        wide = x.float()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factor

    for module in (kernels, reference):
        out = module.rms_norm(x, weight, 1e-5, **options)
        assert_close(out, by_hand(x).to(dtype), by_hand(x))
        added, total = module.add_rms_norm(x, residual, weight, 1e-5, **options)
        assert_close(added, by_hand(x + residual).to(dtype), by_hand(x + residual))
        assert torch.equal(total, x + residual)
        first = module.rms_norm(x, weight, 1e-5), module.add_rms_norm(x, residual, weight, 1e-5)[0]
        for once, before in zip((out, added), first, strict=True):
            if "zero_centred" in options:
                assert (once - before).abs().max() > 0.1
            else:
                assert (once == before).float().mean() < 0.9 if dtype != torch.float32 else torch.equal(once, before)


def test_zero_centred_norms_round_once_in_either_case(device):
    x, weight = randn(device, torch.float16, 3, 64), randn(device, torch.float16, 64)
    for module in (kernels, reference):
        both = (module.rms_norm(x, weight, 1e-5, zero_centred=True, round_first=first) for first in (False, True))
        assert torch.equal(*both)


@pytest.fixture
def poisoned(monkeypatch):
    """Outputs are NaN before they are written."""
    new, empty = Tensor.new_empty, torch.empty

    def filled(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(Tensor, "new_empty", lambda *shape, **options: filled(new(*shape, **options)))
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: filled(empty(*shape, **options)))


LAYER_NORMS = {"plain": {}, "with a bias": {"bias": True}, "zero-centred": {"zero_centred": True, "bias": True}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 200), (3, 7), (0, 64), *LARGE])
@pytest.mark.parametrize("options", LAYER_NORMS.values(), ids=LAYER_NORMS)
def test_layer_norm(device, poisoned, options, shape, dtype):
    """Of rows with a mean. The weight of the zero-centred norm is rounded when 1 is added."""
    x, residual, weight, bias = (randn(device, dtype, *s) + 1 for s in (shape, shape, shape[-1:], shape[-1:]))
    kind = dict(subtract_mean=True, zero_centred="zero_centred" in options, bias=bias if "bias" in options else None)
    factor, term = (1 + weight).float() if kind["zero_centred"] else weight.float(), bias.float()

    def by_hand(x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), shape[-1:], factor, term if "bias" in options else None, 1e-5)

    tokens, table = torch.arange(len(x), device=device), x.flatten(0, -2)
    for module in (kernels, reference):
        added, total = module.add_rms_norm(x, residual, weight, 1e-5, **kind)
        looked_up, rows = module.embed_rms_norm(tokens, table, weight, 1e-5, **kind)
        out = module.rms_norm(x, weight, 1e-5, **kind)
        assert torch.equal(total, x + residual) and torch.equal(rows, table[: len(x)])
        if len(x):
            assert_close(out, by_hand(x).to(dtype), by_hand(x))
            assert_close(added, by_hand(x + residual).to(dtype), by_hand(x + residual))
            assert torch.equal(looked_up, out.flatten(0, -2)[: len(x)])
            other = module.rms_norm(x, weight, 1e-5, **kind | {"subtract_mean": False})
            assert not (other - out).abs().max() < 0.1


@pytest.mark.parametrize("splits", [2, 3])
def test_layer_norm_of_partial_sums(device, poisoned, splits):
    sums = torch.randn(splits, 2, 3, 300, device=device) + 1
    residual, weight, bias = (randn(device, torch.float16, *s) for s in ((2, 3, 200), (200,), (200,)))
    partials, kind = SplitSums(sums[..., 50:250], torch.float16), dict(subtract_mean=True, bias=bias)
    exact = reference.add_rms_norm(
        partials.sums.sum(0), residual.float(), weight.float(), 1e-5, subtract_mean=True, bias=bias.float()
    )
    same = reference.add_rms_norm(partials.total(), residual, weight, 1e-5, **kind)
    found = kernels.add_rms_norm(partials, residual, weight, 1e-5, **kind)
    for out, a, b in zip(found, same, exact, strict=True):
        assert_close(out, a, b)


@BOTH
def test_what_a_layer_norm_refuses(device, module):
    x, weight = torch.randn(2, 3, 8, device=device), torch.randn(8, device=device)
    for options, message in (
        (dict(bias=weight[:7]), "bias must"),
        (dict(bias=weight.half()), "bias must"),
        (dict(own_weight=weight, subtract_mean=True), "own_weight must be None"),
        (dict(own_weight=weight, bias=weight), "own_weight must be None"),
    ):
        with pytest.raises(ValueError, match=f"add_rms_norm: {message}"):
            module.add_rms_norm(x, x, weight, 1e-5, **options)
    with pytest.raises(ValueError, match="bias must be None with several weights"):
        module.rms_norm(x, (weight,) * 3, 1e-5, bias=weight)
    with pytest.raises(ValueError, match="embed_rms_norm: bias must"):
        module.embed_rms_norm(torch.zeros(1, dtype=torch.int64, device=device), x[0], weight, 1e-5, bias=weight[:7])


HF_LAYER_NORMS = {  # module, class, options of ours
    "torch": ("torch.nn", "LayerNorm", {}),
    "cohere": ("transformers.models.cohere.modeling_cohere", "CohereLayerNorm", {}),
    "nemotron": ("transformers.models.nemotron.modeling_nemotron", "NemotronLayerNorm1P", {"zero_centred": True}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", HF_LAYER_NORMS)
def test_the_reference_has_nearly_all_bits_of_layer_norms(family, dtype):
    """torch adds up in another order."""
    home, name, options = HF_LAYER_NORMS[family]
    x, norm = randn("cpu", dtype, 7, 200) + 1, getattr(importlib.import_module(home), name)(200, eps=1e-5).to(dtype)
    for parameter in norm.parameters():
        parameter.data = randn("cpu", dtype, 200)
    with torch.no_grad():
        want = norm(x)
        options = dict(subtract_mean=True, bias=getattr(norm, "bias", None), **options)
        same = (reference.rms_norm(x, norm.weight, 1e-5, **options) == want).float().mean()
    assert same == 1 if family == "cohere" else same > 0.995


HF_NORMS = {  # family: class, options of ours
    "llama": ("LlamaRMSNorm", {}),
    "gpt_oss": ("GptOssRMSNorm", {"round_first": False}),
    "olmo2": ("Olmo2RMSNorm", {"round_first": False}),
    "gemma4": ("Gemma4RMSNorm", {"round_first": False}),
    "gemma3": ("Gemma3RMSNorm", {"zero_centred": True}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", HF_NORMS)
def test_the_reference_has_the_bits_of_hugging_face_norms(family, dtype):
    name, options = HF_NORMS[family]
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    x, residual = randn("cpu", dtype, 7, 200), randn("cpu", dtype, 7, 200)
    norm = getattr(home, name)(200, eps=1e-5).to(dtype)
    norm.weight.data = randn("cpu", dtype, 200)
    with torch.no_grad():
        assert torch.equal(reference.rms_norm(x, norm.weight, 1e-5, **options), norm(x))
        added, _ = reference.add_rms_norm(x, residual, norm.weight, 1e-5, **options)
        assert torch.equal(added, norm(x + residual))
    others = [option for option in ({}, {"round_first": False}, {"zero_centred": True}) if option != options]
    assert not any(torch.equal(reference.rms_norm(x, norm.weight, 1e-5, **other), norm(x)) for other in others)


def test_rms_norm_reads_rows_where_they_lie(device):
    x, residual, weight = (randn(device, torch.float16, *s) for s in ((5, 64), (5, 64), (64,)))
    big = torch.full((5, 200), torch.nan, device=device, dtype=torch.float16)
    big[:, 3:67], big[:, 100:164] = x, residual
    for out, expected in zip(
        kernels.add_rms_norm(big[:, 3:67], big[:, 100:164], weight, 1e-6),
        kernels.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        assert torch.equal(out, expected)


KINDS = {"plain": {}, "zero-centred": {"zero_centred": True}, "once": {"round_first": False}}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (0, 4)])
def test_embed_rms_norm_is_the_norm_of_looked_up_rows(device, shape, dtype, options):
    embedding, weight = randn(device, dtype, 50, 200)[:, :150], randn(device, dtype, 150)
    tokens = torch.randint(50, shape, device=device)
    for module in (kernels, reference):
        out, x = module.embed_rms_norm(tokens, embedding, weight, 1e-5, **options)
        assert torch.equal(x, embedding[tokens])
        assert torch.equal(out, module.rms_norm(embedding[tokens], weight, 1e-5, **options))
        turned = module.embed_rms_norm(tokens.t(), embedding, weight, 1e-5, **options)
        assert torch.equal(turned[0], out.transpose(0, 1)) and torch.equal(turned[1], x.transpose(0, 1))
        assert torch.equal(module.embed_rms_norm(tokens - 100, embedding, weight, 1e-5)[1], embedding[tokens * 0])


@BOTH
def test_a_sum_is_written_where_it_is_wanted(device, module):
    """A part of each row of a wider tensor, which stays as it is elsewhere."""
    x, residual, weight, embedding = (
        randn(device, torch.float16, *s) for s in ((2, 3, 64), (2, 3, 64), (64,), (9, 64))
    )
    tokens = torch.randint(9, (2, 3), device=device)
    for norm, operands in ((module.add_rms_norm, (x, residual)), (module.embed_rms_norm, (tokens, embedding))):
        wide = torch.full((2, 3, 200), 7.0, device=device, dtype=torch.float16)
        expected, part = norm(*operands, weight, 1e-5), wide[..., 70:134]
        out, total = norm(*operands, weight, 1e-5, total=part)
        assert total is part and torch.equal(part, expected[1]) and torch.equal(out, expected[0])
        assert (wide[..., :70] == 7).all() and (wide[..., 134:] == 7).all()
        uneven = torch.zeros(3, 2, 64, device=device).half().transpose(0, 1)
        for wrong in (part[:, :2], part.float(), wide[..., :128:2], uneven):
            with pytest.raises(ValueError, match="rms_norm"):
                norm(*operands, weight, 1e-5, total=wrong)


@pytest.mark.parametrize("splits", [2, 3])
def test_rms_norm_of_partial_sums(device, splits):
    sums = torch.randn(splits, 2, 3, 300, device=device)
    residual, weight = randn(device, torch.float16, 2, 3, 200), randn(device, torch.float16, 200)
    partials = SplitSums(sums[..., 50:250], torch.float16)
    total, exact_total = partials.total(), partials.sums.sum(0)
    exact = reference.add_rms_norm(exact_total, residual.float(), weight.float(), 1e-5)
    same = reference.add_rms_norm(total, residual, weight, 1e-5)
    for out, a, b in zip(kernels.add_rms_norm(partials, residual, weight, 1e-5), same, exact, strict=True):
        assert_close(out, a, b)
    assert_close(
        kernels.rms_norm(partials, weight, 1e-5),
        reference.rms_norm(total, weight, 1e-5),
        reference.rms_norm(exact_total, weight.float(), 1e-5),
    )
    with pytest.raises(ValueError, match="rms_norm"):
        kernels.rms_norm(partials, weight.float(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_add(device, dtype):
    sums = torch.randn(3, 2, 5, 40, device=device)
    residual = torch.randn(2, 5, 80, device=device).to(dtype)[..., ::2][..., :40]
    for x in (sums[0].to(dtype), SplitSums(sums, dtype)):
        assert torch.equal(kernels.add(x, residual), reference.add(x, residual))
    assert torch.equal(kernels.add(SplitSums(sums, dtype)), reference.add(SplitSums(sums, dtype)))
    for module in (kernels, reference):
        with pytest.raises(ValueError, match="add: residual must"):
            module.add(sums[0], sums[0, :1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 1500), (0, 8)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_swiglu(device, shape, dtype, activation):
    both = 2 * randn(device, dtype, *shape[:-1], 2 * shape[-1])
    gate, up = both.chunk(2, dim=-1)
    out = kernels.swiglu(gate, up, activation)
    assert out.shape == gate.shape
    if out.numel():
        exact = reference.swiglu(gate.float(), up.float(), activation)
        assert_close(out, reference.swiglu(gate, up, activation), exact)
        other = reference.swiglu(gate.float(), up.float(), *(name for name in ACTIVATIONS if name != activation))
        assert (other - exact).abs().max() > 0.05


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_swiglu_far_from_zero(device, activation):
    gate = torch.tensor([-3e4, -100.0, -30.0, 0.0, 30.0, 100.0, 3e4], device=device)
    for module in (kernels, reference):
        out = module.swiglu(gate, torch.full_like(gate, 3), activation)
        assert (out - 3 * gate.clamp(min=0)).abs().max() < 1e-9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 1500), (0, 8)])
@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("activation", UNGATED_ACTIVATIONS)
def test_activate(device, poisoned, activation, splits, shape, dtype):
    x = 2 * randn(device, dtype, *shape[:-1], 2 * shape[-1])[..., shape[-1] :]
    if splits:
        x = SplitSums(randn(device, torch.float32, splits, *shape), dtype)
    total = x.total() if splits else x
    out = kernels.activate(x, activation)
    assert out.shape == total.shape and out.dtype == dtype
    if out.numel():
        exact = reference.activate(total.float(), activation)
        assert_close(out, reference.activate(x, activation), exact)
        for other in UNGATED_ACTIVATIONS:  # two kinds of gelu differ little
            if other != activation and out.numel() > 100:
                assert (reference.activate(total.float(), other) - exact).abs().max() > 1e-4


@pytest.mark.parametrize("activation", UNGATED_ACTIVATIONS)
def test_activations_far_from_zero(device, activation):
    x = torch.tensor([[-3e4, -100.0, -30.0, 0.0, 30.0, 100.0, 3e4, torch.nan]], device=device)
    for module in (kernels, reference):
        out, positive = module.activate(x, activation)[0], x[0, :-1].clamp(min=0)
        want = positive**2 if activation == "relu2" else positive
        assert (out[:-1] - want).abs().max() < 1e-9 and out[-1].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("activation", "name"), [
    ("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu"), ("relu2", "relu2")])  # fmt: skip
def test_the_reference_has_the_bits_of_hugging_face_activations_alone(activation, name, dtype):
    from transformers.activations import ACT2FN

    x = randn("cpu", dtype, 7, 200)
    assert torch.equal(reference.activate(x, activation), ACT2FN[name](x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("activation", "name"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_the_reference_has_the_bits_of_hugging_face_activations(activation, name, dtype):
    from transformers.activations import ACT2FN

    gate, up = randn("cpu", dtype, 7, 200), randn("cpu", dtype, 7, 200)
    assert torch.equal(reference.swiglu(gate, up, activation), ACT2FN[name](gate) * up)


def rotary_operands(device, dtype, batch, count, heads, kv_heads, dim, capacity=None, cache_dtype=None):
    """q, k and v as views of one product's output, a poisoned cache, ragged first rows and far depths."""
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    qkv = randn(device, dtype, batch, count, sum(sizes))
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in qkv.split(sizes, dim=-1))
    capacity = capacity or count + 130
    cache = torch.full((2, batch, kv_heads, capacity, dim), torch.nan, device=device, dtype=cache_dtype or dtype)
    first_row = torch.tensor([(0, 1, 127, 128)[i % 4] for i in range(batch)], device=device, dtype=torch.int32)
    first_row = first_row.clamp(max=capacity - count)
    depths = torch.randint(0, 131072, (batch, count), device=device, dtype=torch.int32)
    depths[:, 0] = torch.tensor([(0, 127, 2049, 131071)[i % 4] for i in range(batch)], device=device)
    inv_freq = 1.0 / 500000.0 ** (torch.arange(0, dim, 2, device=device) / dim)
    return q, k, v, cache, first_row, depths, inv_freq


def appended(cache: Tensor, first_row: Tensor, count: int = 3) -> tuple[Tensor, Tensor]:
    """Keys and values [B, count, Hkv, d] from each sequence's first row on."""
    rows = [cache[:, batch, :, first : first + count] for batch, first in enumerate(first_row.tolist())]
    keys, values = torch.stack(rows, 1).transpose(2, 3)
    return keys, values


def check_rotary(operands: tuple, **options) -> None:
    q, k, v, cache, *rest = operands
    caches = [cache.clone(), cache.clone(), cache.float()]
    exact_options = {name: x.float() if isinstance(x, Tensor) else x for name, x in options.items()}
    out = kernels.rotary_append(q, k, v, caches[0], *rest, **options)
    same = reference.rotary_append(q, k, v, caches[1], *rest, **options)
    exact = reference.rotary_append(q.float(), k.float(), v.float(), caches[2], *rest, **exact_options)
    assert_close(out, same, exact)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    keys, values = zip(*(x.nan_to_num() for x in caches), strict=True)
    assert_close(*keys)
    if options.get("v_norm") is None:
        assert torch.equal(*values[:2])
    else:
        assert_close(*values)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_16_bits_are_rounded_where_the_models_round(device, dtype):
    """Only the order of fp32 sums is left to differ: in less than one element of a hundred."""
    x, other, weight = randn(device, dtype, 40, 256), randn(device, dtype, 40, 256), randn(device, dtype, 256)
    q, k, v, cache, *rest = rotary_operands(device, dtype, 2, 9, 4, 2, 64)
    norms = dict(q_norm=randn(device, dtype, 64), k_norm=randn(device, dtype, 64), eps=1e-6)
    partial = (*rest[:-1], rest[-1][:10])
    caches = [cache.clone() for _ in range(2)]
    results = [
        (
            module.rms_norm(x, weight, 1e-5),
            module.add_rms_norm(x, other, weight, 1e-5)[0],
            module.swiglu(x, other),
            module.swiglu(x, other, "gelu_tanh"),
            module.rms_norm(x, weight, 1e-5, round_first=False),
            module.add_rms_norm(x, other, weight, 1e-5, round_first=False)[0],
            module.rotary_append(q, k, v, cache.clone(), *partial, **norms, round_first=False),
            *(module.rotary_append(q, k, v, cache.clone(), *rest, **variant) for variant in VARIANTS.values()),
            module.rotary_append(q, k, v, cache.clone(), *rest),
            module.rotary_append(q, k, v, cache.clone(), *rest, **norms),
            module.rms_norm(x, weight, 1e-5, zero_centred=True),
            module.add_rms_norm(x, other, weight, 1e-5, zero_centred=True)[0],
            module.rotary_append(q, k, v, cache.clone(), *partial, **norms),
            module.rotary_append(q, k, v, own, *partial, **norms, zero_centred=True),
            own.nan_to_num(),
            module.rotary_append(q, k, v, cache.clone(), *partial, **norms, norm_last=True),
            *(module.gate_heads(q, q.flip(1), activation) for activation in HEAD_GATES),
        )
        for module, own in zip((kernels, reference), caches, strict=True)
    ]
    for ours, theirs in zip(*results, strict=True):
        assert (ours != theirs).float().mean() < 0.01


HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "batch", "count", "heads", "kv_heads", "dim"),
    [
        *((dtype, 2, 3, 4, 2, dim) for dtype in DTYPES for dim in (64, 80, 96, 128, 256)),
        *((FLOAT, 1, 3, heads, kv_heads, 64) for heads, kv_heads in ((2, 2), (4, 1), (7, 1), (14, 2))),
        *((HALF, 4 if count < 26 else 1, count, 4, 2, 64) for count in [1, 7, 26] + ([60, 64, 65] if CUDA else [])),
    ],
    ids=str,
)
def test_sizes(device, dtype, batch, count, heads, kv_heads, dim):
    """Head dims, groups, and nodes of ragged batches."""
    check_rotary(rotary_operands(device, dtype, batch, count, heads, kv_heads, dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_scaling(device, dtype):
    q_norm, k_norm = randn(device, dtype, 80), randn(device, dtype, 80)
    operands = rotary_operands(device, dtype, 2, 3, 4, 2, 80)
    check_rotary(operands, q_norm=q_norm, k_norm=k_norm, eps=1e-6, attention_scaling=1.25)
    check_rotary(operands, k_norm=k_norm, eps=1e-6)


@pytest.mark.parametrize("dtype", DTYPES if CUDA else DTYPES[-1:], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("dim", "turned"), [(64, 16), (80, 2), (80, 46), (96, 94), (256, 64)])
def test_a_part_of_each_head_rotates(device, dim, turned, kind, dtype):
    *operands, inv_freq = rotary_operands(device, dtype, 2, 3, 6, 2, dim)
    operands = (*operands, inv_freq[: turned // 2])
    norms = dict(q_norm=randn(device, dtype, dim), k_norm=randn(device, dtype, dim), eps=1e-6)
    check_rotary(operands, **norms, **kind, attention_scaling=1.25)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(512, 512), (80, 46)])
def test_values_may_be_normed(device, dim, turned, dtype):
    """And be the keys as they were before."""
    q, k, _, *rest, inv_freq = rotary_operands(device, dtype, 2, 3, 6, 2, dim)
    norms = {name: randn(device, dtype, dim) for name in ("q_norm", "k_norm", "v_norm")}
    check_rotary((q, k, k, *rest, inv_freq[: turned // 2]), **norms, eps=1e-6, round_first=False)


@BOTH
def test_without_keys_only_queries_turn(device, module):
    q, k, v, cache, *rest = rotary_operands(device, torch.float16, 2, 3, 4, 2, 80)
    norm = dict(q_norm=randn(device, q.dtype, 80), eps=1e-6)
    out = module.rotary_append(q, None, None, cache, *rest, **norm)
    assert cache.isnan().all()
    assert torch.equal(out, module.rotary_append(q, k, v, cache, *rest, **norm))
    with pytest.raises(ValueError, match="k and v must be given together, got k alone"):
        module.rotary_append(q, k, None, cache, *rest)


VARIANTS = {
    "nothing turns": {},
    "pairs": {"pairs": True},
    "unrounded tables": {"round_tables": False},
    "unrounded terms": {"round_terms": False},
    "temperature": {"temperature": (0.1, 100)},
    "norms last": {"norm_last": True},
    "all": {"pairs": True, "round_tables": False, "temperature": (0.3, 16), "norm_last": True},
}


@pytest.mark.parametrize("dtype", DTYPES if CUDA else DTYPES[-1:], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dim", "turned"), [(64, 64), (80, 46)])
def test_variants_of_rotary_embedding(device, dim, turned, variant, dtype):
    *operands, inv_freq = rotary_operands(device, dtype, 2, 3, 6, 2, dim)
    operands = (*operands, inv_freq[: 0 if variant == "nothing turns" else turned // 2])
    norms = dict(q_norm=randn(device, dtype, dim), k_norm=randn(device, dtype, dim), eps=1e-6)
    for options in ({}, {**norms, "round_first": False, "attention_scaling": 1.25}):
        check_rotary(operands, **options, **VARIANTS[variant])


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_partial_sums_of_a_part_that_rotates(device, variant, normed):
    sums = torch.randn(2, 2, 5, 4 * 64, device=device)
    q, k, v = (SplitSums(x, torch.float32).unflatten(-1, (-1, 64)) for x in sums.split([128, 64, 64], dim=-1))
    cache, *rest, inv_freq = rotary_operands(device, torch.float32, 2, 5, 2, 1, 64)[3:]
    caches, rest = [cache.clone(), cache], (*rest, inv_freq[: 0 if variant == "nothing turns" else 12])
    options = dict(VARIANTS[variant])
    if normed:
        options |= {name: randn(device, torch.float32, 64) for name in ("q_norm", "k_norm")} | {"zero_centred": True}
    out = kernels.rotary_append(q, k, v, caches[0], *rest, **options)
    torch.testing.assert_close(out, reference.rotary_append(q, k, v, caches[1], *rest, **options))
    torch.testing.assert_close(*caches, equal_nan=True)


@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
@BOTH
def test_each_variant_changes_something(device, module, variant):
    q, k, v, cache, *rest = rotary_operands(device, torch.float16, 2, 3, 4, 2, 64)
    norms = dict(q_norm=randn(device, q.dtype, 64), k_norm=randn(device, q.dtype, 64), eps=1e-6)
    first, second = (
        module.rotary_append(q, k, v, cache.clone(), *rest, **norms, **options) for options in ({}, VARIANTS[variant])
    )
    assert (first != second).float().mean() > 0.05


def turned_by_hand(x: Tensor, angle: Tensor, pairs: bool) -> Tensor:
    """The first elements of heads [B, n, heads, d], as complex numbers, times exp(i * angle); angle [B, n, r / 2]."""
    part, rest = x.split([2 * angle.shape[2], x.shape[3] - 2 * angle.shape[2]], dim=-1)
    first, second = (part[..., ::2], part[..., 1::2]) if pairs else part.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    parts = turned.real, turned.imag
    return torch.cat((torch.stack(parts, -1).flatten(-2) if pairs else torch.cat(parts, -1), rest), dim=-1)


@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("turned", [80, 46, 0])
@BOTH
def test_norms_may_come_after_the_rotation(device, module, turned, splits, pairs):
    """In fp64, by complex numbers. Values stay as they are, and no other row of the cache is written."""
    *_, cache, first_row, depths, inv_freq = rotary_operands(device, torch.float32, 2, 3, 4, 2, 80)
    inv_freq = inv_freq[: turned // 2]
    sums = torch.randn(splits, 2, 3, 8 * 80, device=device)
    q, k, v = (SplitSums(x, torch.float32).unflatten(-1, (-1, 80)) for x in sums.split([320, 160, 160], dim=-1))
    if splits == 1:
        q, k, v = (x.total() for x in (q, k, v))
    weights = dict(q_norm=randn(device, torch.float32, 80), k_norm=randn(device, torch.float32, 80))
    options = dict(eps=1e-2, pairs=pairs, norm_last=True)
    out = module.rotary_append(q, k, v, cache, first_row, depths, inv_freq, **weights, **options)
    angle = ((first_row[:, None] + depths).float()[..., None] * inv_freq).double()
    expected = []
    for heads, weight in zip(sums.double().sum(0)[..., :480].split([320, 160], dim=-1), weights.values(), strict=True):
        x = turned_by_hand(heads.unflatten(-1, (-1, 80)), angle, pairs)
        expected.append((x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight).float())
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-4)
    keys, values = appended(cache, first_row)
    torch.testing.assert_close(keys, expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, sums[..., 480:].sum(0).unflatten(-1, (-1, 80)))
    assert int(cache.isnan().any(-1).sum()) == cache[..., 0].numel() - 2 * 2 * 2 * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_reference_has_the_bits_of_hunyuans_heads(dtype):
    home = pytest.importorskip("transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense")
    q, k, v, cache, first_row, depths, inv_freq = rotary_operands("cpu", dtype, 2, 3, 4, 2, 64)
    norms = [home.HunYuanDenseV1RMSNorm(64, eps=1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data = randn("cpu", dtype, 64)
    weights = dict(q_norm=norms[0].weight.data, k_norm=norms[1].weight.data)
    angle = torch.cat([(first_row[:, None] + depths)[..., None].float() * inv_freq] * 2, dim=-1)
    tables = angle.cos().to(dtype), angle.sin().to(dtype)
    with torch.no_grad():
        turned = home.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *tables)
        want_q, want_k = (norm(x) for norm, x in zip(norms, turned, strict=True))
    rest = (first_row, depths, inv_freq)
    out = reference.rotary_append(q, k, v, cache, *rest, **weights, eps=1e-6, norm_last=True)
    assert torch.equal(out, want_q.transpose(1, 2))
    assert torch.equal(appended(cache, first_row)[0], want_k.transpose(1, 2))


@BOTH
def test_without_frequencies_nothing_turns_and_all_is_appended(device, module):
    q, k, v, cache, first_row, depths, inv_freq = rotary_operands(device, torch.float16, 2, 3, 4, 2, 64)
    norms = dict(q_norm=randn(device, q.dtype, 64), k_norm=randn(device, q.dtype, 64), eps=1e-6)
    for options in ({}, norms):
        out = module.rotary_append(q, k, v, cache, first_row, depths, inv_freq[:0], **options)
        keys, values = appended(cache, first_row)
        for found, x, name in ((out, q, "q_norm"), (keys, k, "k_norm")):
            want = module.rms_norm(x, options[name], 1e-6) if options else x
            torch.testing.assert_close(found, want, rtol=2e-3, atol=0)
        assert torch.equal(values, v)
    assert int(cache.isnan().any(-1).sum()) == cache[..., 0].numel() - 2 * 2 * 2 * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_reference_has_the_bits_of_gemma_4s_heads(dtype):
    """Values are the keys as they were, normed without a weight; three quarters of the frequencies are zeros."""
    home = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    q, k, _, cache, first_row, depths, inv_freq = rotary_operands("cpu", dtype, 2, 3, 4, 2, 64)
    inv_freq[8:] = 0.0
    norms = [home.Gemma4RMSNorm(64, with_scale=name != "v").to(dtype) for name in "qkv"]
    for norm in norms[:2]:
        norm.weight.data = randn("cpu", dtype, 64)
    weights = dict(q_norm=norms[0].weight.data, k_norm=norms[1].weight.data, v_norm=torch.ones(64, dtype=dtype))
    own = (q, k, k, cache, first_row, depths, inv_freq)
    out = reference.rotary_append(*own, **weights, eps=1e-6, round_first=False)
    angle = torch.cat([(first_row[:, None] + depths)[..., None].float() * inv_freq] * 2, dim=-1)
    tables = angle.cos().to(dtype), angle.sin().to(dtype)
    with torch.no_grad():
        want_q, want_k = (
            home.apply_rotary_pos_emb(norm(x), *tables, 2) for norm, x in zip(norms, (q, k), strict=False)
        )
        want_v = norms[2](k)
    keys, values = appended(cache, first_row)
    assert torch.equal(out, want_q) and torch.equal(keys, want_k) and torch.equal(values, want_v)


HF_ROTARY = {
    "llama": ("Llama", {}),
    "olmo2": ("Olmo2", {"round_tables": False}),
    "glm4": ("Glm4", {"pairs": True}),
    "cohere": ("Cohere", {"pairs": True, "round_terms": False}),
    "ministral3": ("Ministral3", {"temperature": (0.1, 16)}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", HF_ROTARY)
def test_the_reference_turns_with_the_bits_of_hugging_face_models(family, dtype):
    name, options = HF_ROTARY[family]
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    q, k, v, cache, first_row, depths, inv_freq = rotary_operands("cpu", dtype, 2, 3, 4, 2, 64)
    inv_freq = inv_freq[:16] if family == "glm4" else inv_freq
    rotary = getattr(home, f"{name}RotaryEmbedding")(getattr(home, f"{name}Config")())
    rotary.inv_freq, rotary.attention_scaling = inv_freq, 1.25
    positions = (first_row[:, None] + depths).long()
    turned_q, turned_k = home.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rotary(q, positions))
    if "temperature" in options:
        turned_q = turned_q * home.get_llama_4_attn_scale(positions, *options["temperature"]).to(dtype)
    rest = (first_row, depths, inv_freq)
    out = reference.rotary_append(q, k, v, cache, *rest, attention_scaling=1.25, **options)
    assert torch.equal(out, turned_q.transpose(1, 2))
    assert torch.equal(appended(cache, first_row)[0], turned_k.transpose(1, 2))


@BOTH
def test_the_rest_of_a_head_passes_and_its_part_rotates_as_a_head_of_that_size(device, module):
    q, k, v, cache, first_row, depths, inv_freq = rotary_operands(device, torch.float16, 2, 3, 4, 2, 80)
    inv_freq, small = inv_freq[:12], cache[..., :24].contiguous()
    out = module.rotary_append(q, k, v, cache, first_row, depths, inv_freq)
    part = module.rotary_append(q[..., :24], k[..., :24], v[..., :24], small, first_row, depths, inv_freq)
    assert torch.equal(out[..., :24], part) and torch.equal(out[..., 24:], q[..., 24:])
    assert torch.equal(cache[..., :24].nan_to_num(), small.nan_to_num())
    keys, values = appended(cache, first_row)
    assert torch.equal(keys[..., 24:], k[..., 24:]) and torch.equal(values, v)


def test_other_strides(device):
    q, k, v, cache, first_row, depths, inv_freq = rotary_operands(device, torch.float32, 2, 3, 4, 2, 64)
    wide_cache = torch.full((2, *cache.shape), torch.nan, device=device).movedim(0, 3)[..., 0, :, :]
    depths = depths[:, :1].expand(-1, 3)
    check_rotary((q.transpose(0, 1).contiguous().transpose(0, 1), k, v, wide_cache, first_row, depths, inv_freq))
    check_rotary((q.mT.contiguous().mT, k, v, cache, first_row, depths, inv_freq))


def test_partial_sums(device):
    sums = torch.randn(3, 2, 5, 6 * 64, device=device)
    parts = sums.split([4 * 64, 64, 64], dim=-1)
    q, k, v = (SplitSums(part, torch.float16).unflatten(-1, (-1, 64)) for part in parts)
    cache, *rest = rotary_operands(device, torch.float16, 2, 5, 4, 1, 64)[3:]
    caches = [cache.clone(), cache.clone(), cache.float()]
    out = kernels.rotary_append(q, k, v, caches[0], *rest)
    assert_close(
        out,
        reference.rotary_append(q.total(), k.total(), v.total(), caches[1], *rest),
        reference.rotary_append(q.sums.sum(0), k.sums.sum(0), v.sums.sum(0), caches[2], *rest),
    )
    assert_close(*(x.nan_to_num() for x in caches))
    mixed = kernels.rotary_append(q, k.total(), v.total(), caches[1], *rest)
    assert (mixed - out).abs().max() < 1e-2


def test_cache_of_another_dtype(device):
    check_rotary(rotary_operands(device, torch.float16, 1, 3, 4, 2, 64, cache_dtype=torch.float32))


@pytest.mark.parametrize("turned", [64, 16])
def test_rows_beyond_the_capacity_are_not_written(device, turned):
    q, k, v, _, first_row, depths, inv_freq = rotary_operands(device, torch.float32, 1, 5, 2, 1, 64, capacity=8)
    inv_freq = inv_freq[: turned // 2]
    around = torch.full((2, 1, 1, 16, 64), 7.0, device=device)
    inside = around[:, :, :, :8]
    first_row.fill_(6)
    for module in (kernels, reference):
        around.fill_(7)
        out = module.rotary_append(q, k, v, inside, first_row, depths, inv_freq)
        assert (around[..., :6, :] == 7).all() and (around[..., 8:, :] == 7).all()
        assert torch.equal(inside[1, 0, 0, 6:], v[0, :2, 0])
        assert not out.isnan().any()


@pytest.mark.parametrize("page_rows", [8, 32], ids="{} rows a page".format)
@BOTH
def test_rows_are_appended_by_a_table_of_pages(device, page_rows, module):
    """32 rows: a page for each sequence; the last rows of the second do not fit."""
    q, k, v, cache, first_row, depths, inv_freq = rotary_operands(device, torch.float32, 3, 5, 4, 2, 64, capacity=32)
    first_row.copy_(torch.tensor([0, 30, 6]))
    pages, table = in_pages(cache.fill_(7), page_rows)
    out = module.rotary_append(q, k, v, pages, first_row, depths, inv_freq, table=table)
    expected = module.rotary_append(q, k, v, cache, first_row, depths, inv_freq)
    assert torch.equal(out, expected) and (cache != 7).any()
    assert torch.equal(out_of_pages(pages, table), cache)
    assert int(pages.isnan().any(-1).sum()) == 3 * 2 * 2 * page_rows  # nobody's pages are as they were


@BOTH
def test_positions_count_from_the_first_row_and_rows_may_be_skipped(device, module):
    q, k, v, cache, first_row, _, inv_freq = rotary_operands(device, torch.float32, 3, 4, 4, 2, 64, capacity=150)
    caches = [cache.clone() for _ in range(4)]
    places = torch.arange(4, dtype=torch.int32, device=device).expand(3, -1)
    in_order = module.rotary_append(q, k, v, caches[0], first_row, None, inv_freq)
    assert torch.equal(in_order, module.rotary_append(q, k, v, caches[1], first_row, places, inv_freq))
    assert torch.equal(caches[0].nan_to_num(), caches[1].nan_to_num())
    further = module.rotary_append(q, k, v, caches[2], first_row + 5, None, inv_freq)
    assert torch.equal(further, module.rotary_append(q, k, v, caches[3], first_row, None, inv_freq, skip=5))
    assert torch.equal(caches[2].nan_to_num(), caches[3].nan_to_num())
    level = module.rotary_append(q, k, v, caches[1], first_row, places, inv_freq, skip=5)  # as a level of a tree
    keys, values = appended(caches[1], first_row + 5, 4)
    assert torch.equal(keys, appended(caches[0], first_row, 4)[0]) and torch.equal(values, v)
    assert torch.equal(level, in_order)


def test_no_rows(device):
    q, k, v, cache, first_row, depths, inv_freq = rotary_operands(device, torch.float32, 1, 1, 2, 1, 64)
    out = kernels.rotary_append(q[:, :0], k[:, :0], v[:, :0], cache, first_row, depths[:, :0], inv_freq)
    assert out.shape == (1, 0, 2, 64) and cache.isnan().all()


def latent_operands(device, dtype, batch, count, heads, rank, rotated, splits=1, capacity=160):
    """Queries as a part of each head, latents as columns of a wider product, a weight, a poisoned cache, and the places
    of new rows."""
    q = randn(device, dtype, batch, count, heads, rotated + 8)[..., 8:]
    sums = torch.randn(splits, batch, count, rank + rotated + 16, device=device)[..., 16:]
    latents = SplitSums(sums, dtype) if splits > 1 else sums[0].to(dtype)
    cache = torch.full((1, batch, 1, capacity, rank + rotated), torch.nan, device=device, dtype=dtype)
    _, _, _, _, first_row, depths, inv_freq = rotary_operands(device, dtype, batch, count, 1, 1, rotated, capacity)
    return q, latents, randn(device, dtype, rank), 1e-2, cache, first_row, depths, inv_freq


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("splits", "heads", "rank", "rotated"), [(1, 20, 512, 64), (3, 3, 48, 10)])
@pytest.mark.parametrize(
    "options", [{}, {"pairs": True}, {"pairs": True, "round_tables": False}, {"temperature": (0.5, 7)}], ids=str
)
def test_latents_are_normed_and_appended_with_their_key(device, dtype, splits, heads, rank, rotated, options):
    q, latents, norm, eps, cache, *rest = latent_operands(device, dtype, 2, 5, heads, rank, rotated, splits)
    latents_32 = latents.total_in_fp32() if splits > 1 else latents.float()
    results, unrotated = [], randn(device, dtype, 2, 5, heads, 24)
    for module, values in (
        (kernels, (q, latents, norm)),
        (reference, (q, latents, norm)),
        (reference, (q.float(), latents_32, norm.float())),
    ):
        kept, out = cache.to(values[0].dtype, copy=True), torch.full_like(values[0], torch.nan)
        more = dict(unrotated=unrotated.to(values[0].dtype, copy=True)) if "temperature" in options else {}
        again = module.latent_append(*values, eps, kept, *rest, out=out, **options, **more)
        assert again is out and int(kept.isnan().any(-1).sum()) == 2 * (160 - 5)
        results.append((out, kept.nan_to_num(), *more.values()))
    for part in zip(*results, strict=True):
        assert_close(*part)
    turned = reference.rotary_append(q, None, None, cache.expand(2, -1, -1, -1, -1)[..., :rotated], *rest, **options)
    assert torch.equal(results[1][0], turned)


@BOTH
def test_latents_are_appended_where_their_table_says(device, module):
    """In pages, from a row on, as far as they fit, at positions of their own or of a tree."""
    q, latents, norm, eps, cache, first_row, depths, inv_freq = latent_operands(
        device, torch.float32, 3, 5, 4, 32, 16, capacity=32
    )
    first_row.copy_(torch.tensor([0, 28, 6]))
    pages, table = in_pages(cache.fill_(7), 8)
    for places, skip in ((depths, 0), (None, 1)):
        outs = [torch.empty_like(q) for _ in range(3)]
        module.latent_append(q, latents, norm, eps, cache, first_row, places, inv_freq, out=outs[0], skip=skip)
        module.latent_append(
            q, latents, norm, eps, pages, first_row, places, inv_freq, out=outs[1], skip=skip, table=table
        )
        assert torch.equal(outs[0], outs[1]) and torch.equal(out_of_pages(pages, table), cache)
    own = torch.arange(1, 6, dtype=torch.int32, device=device).expand(3, -1)
    module.latent_append(q, latents, norm, eps, cache.clone(), first_row, own, inv_freq, out=outs[2])
    assert torch.equal(outs[2], outs[0])
    assert (cache[0, 1, 0, :28] == 7).all() and (cache[0, 1, 0, 28:] != 7).all()


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(latents=torch.zeros(1, 2, 47)), r"latents must be float32 \[1, 2, 48\]"),
        (dict(cache=torch.zeros(2, 1, 1, 8, 48)), r"cache must be \[1, 1, 1, T, 48\]"),
        (dict(out=torch.zeros(1, 2, 4, 32)[..., ::2]), "out must be .*contiguous rows"),
        (dict(inv_freq=torch.zeros(0)), "inv_freq must be"),
    ],
)
def test_bad_latents_are_refused(module, change, message):
    names = ("q", "latents", "norm", "eps", "cache", "first_row", "depths", "inv_freq")
    operands = dict(zip(names, latent_operands("cpu", torch.float32, 1, 2, 4, 32, 16, capacity=8), strict=True))
    operands |= {"out": torch.zeros(1, 2, 4, 16), **change}
    with pytest.raises(ValueError, match=f"latent_append: {message}"):
        module.latent_append(**operands)


GATES = {"sigmoid": torch.sigmoid, "softplus": F.softplus}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_head", [False, True], ids=["by element", "by head"])
@pytest.mark.parametrize("activation", HEAD_GATES)
@pytest.mark.parametrize("shape", [(1, 1, 2, 8), (2, 3, 4, 32), (1, 5, 3, 80), (2, 2, 16, 256), (1, 0, 2, 8)])
def test_gate_heads(device, shape, activation, by_head, dtype):
    """As it is called: x by itself, the gates between a product's queries, or behind other columns."""
    x, product = randn(device, dtype, *shape), randn(device, dtype, *shape[:3], 2, shape[3])
    gate = product.select(-2, 1)
    if by_head:
        gate = randn(device, dtype, *shape[:2], shape[2] + 5)[..., 5:].unflatten(-1, (shape[2], -1))
    out = kernels.gate_heads(x, gate, activation)
    assert out.shape == x.shape and out.is_contiguous()
    if not out.numel():
        return
    exact = x.float() * GATES[activation](gate.float())
    same = reference.gate_heads(x, gate, activation)
    assert_close(out, same, exact)
    assert_close(same, x * GATES[activation](gate.float()).to(dtype), exact)
    for strided in (x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT):
        for gates in (gate.clone(), gate.transpose(0, 1).contiguous().transpose(0, 1), gate.mT.contiguous().mT):
            assert torch.equal(kernels.gate_heads(strided, gates, activation), out)


@pytest.mark.parametrize("by_head", [False, True], ids=["by element", "by head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_reference_has_the_bits_of_gated_models(dtype, by_head):
    """Laguna's softplus, computed in fp32; AFMoE's sigmoid is of the gates as they are."""
    x, gate = randn("cpu", dtype, 2, 3, 4, 32), randn("cpu", dtype, 2, 3, 4, 1 if by_head else 32)
    assert torch.equal(reference.gate_heads(x, gate, "softplus"), x * F.softplus(gate.float()).to(dtype))
    assert torch.equal(reference.gate_heads(x, gate), x * torch.sigmoid(gate))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's exp
def test_gates_far_from_zero(device):
    gate = torch.tensor([-3e4, -100.0, 0.0, 100.0, 3e4], device=device).view(1, 1, 5, 1)
    for module, dim in itertools.product((kernels, reference), (1, 4)):
        x = torch.full((1, 1, 5, dim), 3.0, device=device)
        for gates in (gate, gate.expand(-1, -1, -1, dim)):
            assert module.gate_heads(x, gates)[..., 0].flatten().tolist() == [0, 0, 1.5, 3, 3]
            soft = module.gate_heads(x, gates, "softplus")[..., -1].flatten()
            torch.testing.assert_close(soft, torch.tensor([0, 0, 3 * 0.693147, 300, 9e4], device=device))


@BOTH
def test_bad_operands_are_refused(device, module):
    x, weight = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    heads = x[None, None]
    for function, args, message in (
        (module.rms_norm, (x, weight[:7], 1e-5), ""),
        (module.rms_norm, (x, weight.half(), 1e-5), ""),
        (module.rms_norm, (x, weight.to("meta"), 1e-5), ""),
        (module.add_rms_norm, (x, x[:1], weight, 1e-5), ""),
        (module.rms_norm, (x.long(), weight.long(), 1e-5), ""),
        (module.embed_rms_norm, (x, x, weight, 1e-5), ""),
        (module.embed_rms_norm, (x.long(), x[0], weight, 1e-5), ""),
        (module.embed_rms_norm, (x.long(), x, weight[:7], 1e-5), ""),
        (module.embed_rms_norm, (x.long(), x.half(), weight, 1e-5), ""),
        (module.swiglu, (x, x[:1]), ""),
        (module.swiglu, (x, x.half()), ""),
        (module.swiglu, (x, x, "gelu"), ""),
        (module.activate, (x.long(), "silu"), ""),
        (module.activate, (x, "relu"), ": activation must be silu or gelu_tanh or gelu or relu2, got 'relu'"),
        (module.gate_heads, (x, x), ""),
        (module.gate_heads, (heads, heads[:, :, :1]), ""),
        (module.gate_heads, (heads, heads.half()), ""),
        (module.gate_heads, (heads, heads[..., :1, :1], "sigmoid"), r": gate must be float32 \[1, 1, 2, 1\]"),
        (module.gate_heads, (heads, heads[..., :2], "softplus"), r": gate must be float32 \[1, 1, 2, 8\]"),
        (module.gate_heads, (heads, heads, "silu"), ": activation must be sigmoid or softplus, got 'silu'"),
    ):
        with pytest.raises(ValueError, match=function.__name__ + message):
            function(*args)


BAD_ROTARY = {
    "odd head dim": {0: lambda x: x[..., :63], 1: lambda x: x[..., :63]},
    "heads no multiple": {0: lambda x: x[:, :, :3]},
    "k of another length": {1: lambda x: x[:, :2]},
    "v unlike k": {2: lambda x: x[..., :32]},
    "cache of another batch": {3: lambda x: x[:, :1]},
    "cache without keys": {3: lambda x: x[0]},
    "first_row int64": {4: Tensor.long},
    "first_row too short": {4: lambda x: x[:1]},
    "depths int64": {5: Tensor.long},
    "depths of another shape": {5: lambda x: x[:, :2]},
    "inv_freq too long": {6: lambda x: torch.cat((x, x[:1]))},
    "inv_freq for each head": {6: lambda x: x[None]},
    "mixed dtypes": {1: Tensor.half},
    "another device": {3: lambda x: x.to("meta")},
}


@pytest.mark.parametrize("change", BAD_ROTARY.values(), ids=BAD_ROTARY)
@BOTH
def test_bad_rotary_operands_are_refused(device, module, change):
    operands = list(rotary_operands(device, torch.float32, 2, 3, 4, 2, 64))
    for index, function in change.items():
        operands[index] = function(operands[index])
    with pytest.raises(ValueError, match="rotary_append"):
        module.rotary_append(*operands)
    if operands[3].device.type != "meta":
        assert operands[3].isnan().all()


@BOTH
def test_a_temperature_needs_a_length(device, module):
    operands = rotary_operands(device, torch.float32, 1, 2, 2, 1, 64)
    with pytest.raises(ValueError, match="rotary_append: temperature must be"):
        module.rotary_append(*operands, temperature=(0.1, 0))
    assert operands[3].isnan().all()


def test_strided_cache_columns_are_refused(device):
    q, k, v, cache, *rest = rotary_operands(device, torch.float32, 1, 2, 2, 1, 64)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.rotary_append(q, k, v, cache.mT.contiguous().mT, *rest)


def test_a_norm_weight_that_would_have_to_be_copied_is_refused(device):
    x, weight = torch.ones(2, 64, device=device), torch.ones(128, device=device)[::2]
    tokens, embedding = torch.zeros(1, 2, dtype=torch.int64, device=device), torch.ones(3, 64, device=device)
    calls = (
        lambda: kernels.rms_norm(x, weight, 1e-5),
        lambda: kernels.rms_norm(x, x[0], 1e-5, bias=weight),
        lambda: kernels.add_rms_norm(x, x, weight, 1e-5),
        lambda: kernels.embed_rms_norm(tokens, embedding, weight, 1e-5),
        lambda: draft_inputs(x[None], None, tokens, embedding, token_norm=weight),
        lambda: draft_inputs(x[None], None, tokens, embedding, feature_norm=weight),
    )
    check_refused(*((r"a norm's weight must be contiguous, got stride \(2,\)", call) for call in calls))


PAIR_SIZES = [16, 128, 272, 4096]


@pytest.mark.parametrize("size", PAIR_SIZES)
def test_a_pair_keeps_what_bf16_does(device, size):
    torch.manual_seed(size)
    x = torch.randn(2, 3, size, device=device) * torch.exp(2 * torch.randn(2, 3, size, device=device))
    x[0, 0], x[0, 1] = 0.0, x[0, 1] * 2.0**100
    x = x.bfloat16()
    pair, expected = kernels.float8_pair(x), reference.float8_pair(x)
    assert pair.parts.shape == (2, 6, size) and pair.scale.shape == (-(-size // 128), 6)
    assert torch.equal(pair.scale, expected.scale) and pair.shape == x.shape and pair.dtype == x.dtype
    parts, exact = pair.parts.float(), expected.parts.float()
    # Triton's interpreter truncates the smallest numbers of e4m3, which lie 2 ** -9 apart
    assert torch.equal(parts, exact) if CUDA else (parts - exact).abs().max() <= 2.0**-7
    groups = torch.nn.functional.pad(x.float(), (0, -size % 128)).unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(-2)[..., :size]
    error = (pair.total().float() - x.float()).abs()
    assert (error <= 2.0 ** (-21 if CUDA else -16) * largest).all()
    assert not error[x.float().abs() > largest * 2.0**-12].any() and error.max() < x.float().abs().max()
    high = parts[0].view_as(x.float())
    assert (high != 0).float().mean() > 0.5 and (parts[1] != 0).any()


def test_a_pair_of_what_is_not_finite(device):
    x = torch.ones(2, 256, device=device).bfloat16()
    x[0, 3], x[1, 200] = torch.inf, torch.nan
    for pair in (kernels.float8_pair(x), reference.float8_pair(x)):
        lost = pair.total().float().isnan()
        assert lost[0, :128].all() and not lost[0, 128:].any() and lost[1, 128:].all() and not lost[1, :128].any()


@pytest.mark.parametrize("splits", [1, 3])
def test_norms_make_pairs_where_products_read_them(device, monkeypatch, splits):
    torch.manual_seed(splits)
    x = torch.randn(splits, 2, 5, 272, device=device)
    x = SplitSums(x, torch.bfloat16) if splits > 1 else x[0].bfloat16()
    weight, residual = (torch.randn(*shape, device=device).bfloat16() for shape in ((272,), (2, 5, 272)))
    plain, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    monkeypatch.setattr(norms, "has_format", lambda out, row_format: row_format is not None)
    options = {"row_format": RowFormat.FLOAT8_PAIR}
    pair, same = kernels.add_rms_norm(x, residual, weight, 1e-5, **options)
    assert isinstance(pair, Float8Pair) and torch.equal(same, total) and pair.shape == plain.shape
    assert torch.equal(pair.scale, reference.float8_pair(plain).scale)
    assert (pair.total().float() - plain.float()).abs().max() <= plain.float().abs().max() * 2.0**-16
    assert isinstance(kernels.add_rms_norm(x, residual, weight, 1e-5)[0], torch.Tensor)
    monkeypatch.undo()
    if not CUDA:
        assert isinstance(kernels.add_rms_norm(x, residual, weight, 1e-5, **options)[0], torch.Tensor)


def test_norms_write_the_order_of_words_where_products_read_it(device, monkeypatch):
    dtype = torch.bfloat16 if CUDA else torch.float32
    x, residual = (torch.randn(2, 5, 384, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(384, device=device, dtype=dtype)
    table, tokens = torch.randn(9, 384, device=device, dtype=dtype), torch.randint(9, (2, 5), device=device)
    calls = (
        lambda **options: (kernels.rms_norm(x, weight, 1e-5, **options), None),
        lambda **options: kernels.add_rms_norm(x, residual, weight, 1e-5, **options),
        lambda **options: kernels.embed_rms_norm(tokens, table, weight, 1e-5, **options),
    )
    monkeypatch.setattr(norms, "has_format", lambda out, row_format: row_format is not None)
    for call in calls:
        (plain, total), (ordered, same) = call(), call(row_format=RowFormat.WORD_ORDER)
        assert isinstance(ordered, WordOrdered) and ordered.shape == plain.shape
        assert torch.equal(ordered.values, WordOrdered.of(plain).values) and torch.equal(ordered.total(), plain)
        assert not torch.equal(ordered.values.view_as(plain), plain)
        assert total is None or torch.equal(total, same)


def test_columns_in_the_order_of_words():
    x = torch.arange(64.0).half().repeat(2, 3, 1)
    ordered = WordOrdered.of(x)
    for word, i, pair in itertools.product(range(4), range(4), range(2)):
        assert (ordered.values[:, 8 * i + 2 * word + pair] == 8 * word + i + 4 * pair).all()
    assert torch.equal(ordered.total(), x) and ordered.shape == x.shape and ordered.dtype == x.dtype


def test_a_pair_is_of_bf16(device):
    for function in (kernels.float8_pair, reference.float8_pair):
        with pytest.raises(ValueError, match="x must be bfloat16"):
            function(torch.zeros(2, 128, device=device))
