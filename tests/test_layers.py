"""layers.py against its reference: shapes, strides, capacity edges, and what must be refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_triton import layers as kernels
from eagle_triton.reference import layers as reference
from eagle_triton.runtime.split_sums import SplitSums

CUDA = torch.cuda.is_available()
# The interpreter truncates where a GPU rounds to bfloat16.
LARGE = [(60, 4096), (65, 3584)] if CUDA else []
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])


def assert_close(out: Tensor, same: Tensor, exact: Tensor) -> None:
    """The error against fp32 is at most twice that of torch in the same dtype; zeros would fail."""
    assert out.shape == exact.shape and out.dtype == same.dtype
    bound = 2 * (same.float() - exact).abs().max() + 1e-5
    assert (out.float() - exact).abs().max() <= bound
    assert exact.abs().max() > bound


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
def test_swiglu(device, shape, dtype):
    both = randn(device, dtype, *shape[:-1], 2 * shape[-1])
    gate, up = both.chunk(2, dim=-1)
    out = kernels.swiglu(gate, up)
    assert out.shape == gate.shape
    if out.numel():
        assert_close(out, reference.swiglu(gate, up), reference.swiglu(gate.float(), up.float()))


def rotary_operands(device, dtype, batch, count, heads, kv_heads, dim, capacity=None, cache_dtype=None):
    """q, k and v as views of one product's output, a poisoned cache, ragged first rows and far positions."""
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    qkv = randn(device, dtype, batch, count, sum(sizes))
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in qkv.split(sizes, dim=-1))
    capacity = capacity or count + 130
    cache = torch.full((2, batch, kv_heads, capacity, dim), torch.nan, device=device, dtype=cache_dtype or dtype)
    first_row = torch.tensor([(0, 1, 127, 128)[i % 4] for i in range(batch)], device=device, dtype=torch.int32)
    first_row = first_row.clamp(max=capacity - count)
    positions = torch.randint(0, 131072, (batch, count), device=device, dtype=torch.int32)
    positions[:, 0] = torch.tensor([(0, 127, 2049, 131071)[i % 4] for i in range(batch)], device=device)
    inv_freq = 1.0 / 500000.0 ** (torch.arange(0, dim, 2, device=device) / dim)
    return q, k, v, cache, first_row, positions, inv_freq


def check_rotary(operands: tuple, **options) -> None:
    q, k, v, cache, *rest = operands
    caches = [cache.clone(), cache.clone(), cache.float()]
    exact_options = {name: x.float() if isinstance(x, Tensor) else x for name, x in options.items()}
    out = kernels.rotary_append(q, k, v, caches[0], *rest, **options)
    same = reference.rotary_append(q, k, v, caches[1], *rest, **options)
    exact = reference.rotary_append(q.float(), k.float(), v.float(), caches[2], *rest, **exact_options)
    assert_close(out, same, exact)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert_close(*(x[0].nan_to_num() for x in caches))
    assert torch.equal(caches[0][1].nan_to_num(), caches[1][1].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_16_bits_are_rounded_where_the_models_round(device, dtype):
    """Only the order of fp32 sums is left to differ: in less than one element of a hundred."""
    x, other, weight = randn(device, dtype, 40, 256), randn(device, dtype, 40, 256), randn(device, dtype, 256)
    q, k, v, cache, *rest = rotary_operands(device, dtype, 2, 9, 4, 2, 64)
    norms = dict(q_norm=randn(device, dtype, 64), k_norm=randn(device, dtype, 64), eps=1e-6)
    results = [
        (
            module.rms_norm(x, weight, 1e-5),
            module.add_rms_norm(x, other, weight, 1e-5)[0],
            module.swiglu(x, other),
            module.rotary_append(q, k, v, cache.clone(), *rest),
            module.rotary_append(q, k, v, cache.clone(), *rest, **norms),
        )
        for module in (kernels, reference)
    ]
    for ours, theirs in zip(*results, strict=True):
        assert (ours != theirs).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims(device, dim, dtype):
    check_rotary(rotary_operands(device, dtype, 2, 3, 4, 2, dim))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (7, 1), (14, 2)])
def test_groups(device, heads, kv_heads):
    check_rotary(rotary_operands(device, torch.float32, 1, 3, heads, kv_heads, 64))


@pytest.mark.parametrize("count", [1, 7, 26] + ([60, 64, 65] if CUDA else []))
def test_nodes_and_ragged_batches(device, count):
    check_rotary(rotary_operands(device, torch.float16, 4 if count < 26 else 1, count, 4, 2, 64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_scaling(device, dtype):
    q_norm, k_norm = randn(device, dtype, 80), randn(device, dtype, 80)
    operands = rotary_operands(device, dtype, 2, 3, 4, 2, 80)
    check_rotary(operands, q_norm=q_norm, k_norm=k_norm, eps=1e-6, attention_scaling=1.25)
    check_rotary(operands, k_norm=k_norm, eps=1e-6)


def test_other_strides(device):
    q, k, v, cache, first_row, positions, inv_freq = rotary_operands(device, torch.float32, 2, 3, 4, 2, 64)
    wide_cache = torch.full((2, *cache.shape), torch.nan, device=device).movedim(0, 3)[..., 0, :, :]
    positions = positions[:, :1].expand(-1, 3)
    check_rotary((q.transpose(0, 1).contiguous().transpose(0, 1), k, v, wide_cache, first_row, positions, inv_freq))
    check_rotary((q.mT.contiguous().mT, k, v, cache, first_row, positions, inv_freq))


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


def test_rows_beyond_the_capacity_are_not_written(device):
    q, k, v, _, first_row, positions, inv_freq = rotary_operands(device, torch.float32, 1, 5, 2, 1, 64, capacity=8)
    around = torch.full((2, 1, 1, 16, 64), 7.0, device=device)
    inside = around[:, :, :, :8]
    first_row.fill_(6)
    out = kernels.rotary_append(q, k, v, inside, first_row, positions, inv_freq)
    assert (around[..., :6, :] == 7).all() and (around[..., 8:, :] == 7).all()
    assert torch.equal(inside[1, 0, 0, 6:], v[0, :2, 0])
    assert not out.isnan().any()
    if not CUDA:
        with pytest.raises(ValueError, match="capacity"):
            reference.rotary_append(q, k, v, inside, first_row, positions, inv_freq)


def test_no_rows(device):
    q, k, v, cache, first_row, positions, inv_freq = rotary_operands(device, torch.float32, 1, 1, 2, 1, 64)
    out = kernels.rotary_append(q[:, :0], k[:, :0], v[:, :0], cache, first_row, positions[:, :0], inv_freq)
    assert out.shape == (1, 0, 2, 64) and cache.isnan().all()


@pytest.mark.parametrize("module", [kernels, reference], ids=["kernel", "reference"])
def test_bad_operands_are_refused(device, module):
    x, weight = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    bad = [
        (module.rms_norm, (x, weight[:7], 1e-5)),
        (module.rms_norm, (x, weight.half(), 1e-5)),
        (module.rms_norm, (x, weight.to("meta"), 1e-5)),
        (module.add_rms_norm, (x, x[:1], weight, 1e-5)),
        (module.rms_norm, (x.long(), weight.long(), 1e-5)),
        (module.swiglu, (x, x[:1])),
        (module.swiglu, (x, x.half())),
    ]
    for function, args in bad:
        with pytest.raises(ValueError, match=function.__name__):
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
    "positions int64": {5: Tensor.long},
    "positions of another shape": {5: lambda x: x[:, :2]},
    "inv_freq of another size": {6: lambda x: x[:-1]},
    "mixed dtypes": {1: Tensor.half},
    "another device": {3: lambda x: x.to("meta")},
}


@pytest.mark.parametrize("change", BAD_ROTARY.values(), ids=BAD_ROTARY)
@pytest.mark.parametrize("module", [kernels, reference], ids=["kernel", "reference"])
def test_bad_rotary_operands_are_refused(device, module, change):
    operands = list(rotary_operands(device, torch.float32, 2, 3, 4, 2, 64))
    for index, function in change.items():
        operands[index] = function(operands[index])
    with pytest.raises(ValueError, match="rotary_append"):
        module.rotary_append(*operands)
    if operands[3].device.type != "meta":
        assert operands[3].isnan().all()


def test_strided_cache_columns_are_refused(device):
    q, k, v, cache, *rest = rotary_operands(device, torch.float32, 1, 2, 2, 1, 64)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.rotary_append(q, k, v, cache.mT.contiguous().mT, *rest)
