"""linear.py against its reference: shapes, settings, strides, and what must be refused."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from eagle_triton.operands.layers import ACTIVATIONS
from eagle_triton.ops.linear import dispatch as kernels
from eagle_triton.ops.linear import few_rows as small
from eagle_triton.ops.linear import settings as table
from eagle_triton.ops.linear.settings import Settings
from eagle_triton.reference import linear as reference
from eagle_triton.runtime.split_sums import SplitSums
from tests.rounding import CUDA, DTYPES, assert_close

ROWS = [1, 7, 26, 60, 64, 65] + ([128, 200] if CUDA else [])
SETTINGS = {
    "plain": Settings(32, 32, stages=3, tma=False),
    "splits": Settings(64, 64, splits=3, tma=False),
    "swapped": Settings(64, 64, splits=2, swap=True),
    "descriptors": Settings(32, 64, splits=4),
}


def operands(device: str, dtype: torch.dtype, rows: tuple[int, ...], depth: int, cols: tuple[int, ...]):
    torch.manual_seed(depth)
    x = torch.randn(*rows, depth, device=device).to(dtype)
    weights = [(torch.randn(n, depth, device=device) / depth**0.5).to(dtype) for n in cols]
    biases = [torch.randn(n, device=device).to(dtype) for n in cols]
    return x, weights, biases, torch.randn(*rows, cols[0], device=device).to(dtype)


def wide(value):
    """fp32 copies of tensors, also within lists; None stays."""
    if isinstance(value, (list, tuple)):
        return [wide(item) for item in value]
    return None if value is None else value.float()


def check(name: str, *given, settings: Settings | None = None, **options) -> None:
    """A function of the kernels against that of the reference, which has the same operands, and fp32 ones."""
    found = getattr(kernels, name)(*given, settings=settings, **options)
    same, exact = (getattr(reference, name)(*each, **options) for each in (given, wide(given)))
    for each in [(found, same, exact)] if isinstance(found, Tensor) else zip(found, same, exact, strict=True):
        assert_close(*each)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_rows(device, rows, dtype):
    x, (weight,), (bias,), residual = operands(device, dtype, (rows,), 136, (72,))
    check("linear", x, weight, bias, residual, settings=SETTINGS["splits"])


@pytest.mark.parametrize("depth", [16, 64, 200] + ([1003, 4096] if CUDA else []))
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(device, settings, depth):
    dtype = torch.bfloat16 if CUDA else torch.float16
    x, weights, biases, residual = operands(device, dtype, (2, 5), depth, (130, 64, 33))
    check("linear", x, weights[0], biases[0], residual, settings=settings)
    check("linear_stack", x, weights, biases, settings=settings)
    for activation in ACTIVATIONS:
        check("linear_swiglu", x, weights[0], weights[0].flip(0), activation=activation, settings=settings)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_stack_of_any_size_with_some_biases(device, count):
    x, weights, biases, _ = operands(device, torch.float32, (3,), 48, (40, 24, 8, 16, 72)[:count])
    biases[0] = None
    check("linear_stack", x, weights, biases, settings=SETTINGS["plain"])


def test_default_settings(device):
    x, weights, biases, residual = operands(device, torch.float16, (4,), 1024, (64, 32, 32))
    assert table.launch_settings(x.device, x.dtype, 4, (64,), 1024).splits > 1
    check("linear", x, weights[0], biases[0], residual)
    check("linear_stack", x, weights, biases)
    check("linear_swiglu", x, *weights[1:])


H200 = (9, 0)


@pytest.mark.parametrize(
    ("cols", "depth"),
    [
        *[((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096), ((4096,), 14336), ((128256,), 4096)],
        *[((2048, 512, 512), 2048), ((2048,), 8192), ((8192, 8192), 2048), ((3072,), 3072), ((3072,), 8192)],
        *[((8192, 1024, 1024), 5120), ((5120,), 25600), ((25600, 25600), 5120), ((896,), 4864), ((17408, 17408), 5120)],
    ],
    ids=str,
)
def test_sums_of_up_to_64_rows_have_one_order(cols, depth):
    """docs/questions.md says so. K is summed sixteen at a time, so splits of it are all that could differ."""
    settings = [table.settings_on((9, 0), torch.bfloat16, rows, cols, depth, len(cols) == 2) for rows in range(1, 65)]

    def split(use: Settings) -> int:
        return triton.cdiv(triton.cdiv(depth, use.block_k), use.splits) * use.block_k

    assert len({split(use) if use.splits > 1 else depth for use in settings}) == 1


LLAMA_1B = [(2048, 512, 512), 2048], [(2048,), 2048], [(2048,), 8192], [(128256,), 2048], [(8192, 8192), 2048]


@pytest.mark.parametrize("capability", [(8, 0), H200, (10, 0), (12, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_settings_fit_the_device(monkeypatch, capability, rows):
    monkeypatch.setattr(table, "compute_capability", lambda device: capability)
    shapes = [*LLAMA_1B, *([list(key[1]), key[2]] for key in table._HOPPER)]
    for cols, depth in shapes:
        fused = len(cols) == 2
        settings = table.launch_settings(torch.device("cuda"), torch.bfloat16, rows, tuple(cols), depth, fused)
        block_m = table.block_m_of(rows)
        shared = (settings.block_n * (1 + fused) + block_m) * settings.block_k * 2 * settings.stages
        assert shared <= (225 if capability in (H200, (10, 0)) else 64) * 1024
        assert settings.splits == 1 or not fused
        assert settings.splits * table.tiles_of(cols, settings.block_n, fused) >= 64


def test_deferred(device):
    dtype = torch.float16
    x, weights, biases, residual = operands(device, dtype, (2, 5), 200, (72, 40))
    settings = SETTINGS["splits"]
    out = kernels.linear(x, weights[0], biases[0], keep_splits=True, settings=settings)
    assert isinstance(out, SplitSums) and out.shape == (2, 5, 72) and out.sums.shape[0] == 3 and out.dtype == dtype
    assert out.dim() == 3 and out.device == x.device
    assert_close(
        out.total(), reference.linear(x, weights[0], biases[0]), reference.linear(*wide((x, weights[0], biases[0])))
    )
    outs = kernels.linear_stack(x, weights, biases, keep_splits=True, settings=settings)
    sames, exacts = (reference.linear_stack(*each) for each in ((x, weights, biases), wide((x, weights, biases))))
    for part, same, exact in zip(outs, sames, exacts, strict=True):
        assert_close(part.unflatten(-1, (-1, 8)).total().flatten(-2), same, exact)
    whole = kernels.linear(x, weights[0], biases[0], keep_splits=True, settings=SETTINGS["plain"])
    assert isinstance(whole, Tensor) and whole.dtype == dtype
    for module in (kernels, reference):
        with pytest.raises(ValueError, match="residual"):
            module.linear(x, weights[0], None, residual, keep_splits=True)


def test_many_rows_go_to_cublas(device):
    x, weights, biases, residual = operands(device, torch.float32, (300,), 32, (16, 16))
    assert table.launch_settings(x.device, torch.float16, 300, (16,), 32) is None
    assert table.launch_settings(x.device, torch.float32, 1, (16,), 32) is None
    assert torch.equal(
        kernels.linear(x, weights[0], biases[0], residual), reference.linear(x, weights[0], biases[0], residual)
    )
    outs, expected = kernels.linear_stack(x, weights, biases), reference.linear_stack(x, weights, biases)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    gated, expected = kernels.linear_swiglu(x, *weights), reference.linear_swiglu(x, *weights)
    torch.testing.assert_close(gated, expected, atol=1e-6, rtol=1e-5)  # the same products, our activation


@pytest.mark.parametrize("settings", ["splits", "descriptors"])
def test_strided_operands_and_poisoned_surroundings(device, settings):
    dtype = torch.bfloat16 if CUDA else torch.float16
    x, (weight,), _, residual = operands(device, dtype, (6,), 96, (48,))
    big_x = torch.full((6, 160), torch.nan, device=device, dtype=dtype)
    big_w = torch.full((50, 128), torch.nan, device=device, dtype=dtype)
    big_r = torch.full((6, 99), torch.nan, device=device, dtype=dtype)
    big_x[:, 32:128], big_w[1:49, 16:112], big_r[:, 3:51] = x, weight, residual
    out = kernels.linear(big_x[:, 32:128], big_w[1:49, 16:112], None, big_r[:, 3:51], settings=SETTINGS[settings])
    assert torch.equal(out, kernels.linear(x, weight, None, residual, settings=SETTINGS[settings]))
    turned = x.t().contiguous().t()
    assert torch.equal(kernels.linear(turned, weight, None, residual, settings=SETTINGS[settings]), out)


def test_same_bits_and_counters_left_clean(device):
    x, (weight,), _, _ = operands(device, torch.float16, (17,), 512, (96,))
    outs = [kernels.linear(x, weight, settings=SETTINGS["descriptors"]) for _ in range(3)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not any(counters.any() for counters in small._ARRIVALS.values())


def test_no_rows(device):
    x, weights, biases, residual = operands(device, torch.float32, (0,), 16, (8, 8))
    assert kernels.linear(x, weights[0], biases[0], residual).shape == (0, 8)
    assert [out.shape for out in kernels.linear_stack(x, weights, biases)] == [(0, 8), (0, 8)]
    assert kernels.linear_swiglu(x, *weights).shape == (0, 8)


@pytest.mark.skipif(not CUDA, reason="needs CUDA graphs")
@pytest.mark.parametrize("settings", ["splits", "swapped"])
def test_graph_replays(device, settings):
    x, (weight,), _, residual = operands(device, torch.bfloat16, (10,), 4096, (512,))
    expected = kernels.linear(x, weight, None, residual, settings=SETTINGS[settings])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.linear(x, weight, None, residual, settings=SETTINGS[settings])
        again = kernels.linear(x, weight, None, residual, settings=SETTINGS[settings])
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected) and torch.equal(again, expected)


@pytest.mark.parametrize("module", [kernels, reference], ids=["kernel", "reference"])
def test_bad_operands_are_refused(device, module):
    x, weights, biases, residual = operands(device, torch.float32, (4,), 32, (16, 24))
    half, other = weights[0].half(), weights[0].to("meta")
    bad = [
        (module.linear, (x, weights[0][:, :31])),
        (module.linear, (x, weights[0][0])),
        (module.linear, (x, weights[0], biases[1])),
        (module.linear, (x, weights[0], None, residual[:3])),
        (module.linear, (x, half)),
        (module.linear, (x, weights[0], biases[0].half())),
        (module.linear, (x, other)),
        (module.linear, (x.long(), weights[0].long())),
        (module.linear_stack, (x, weights, biases[:1])),
        (module.linear_stack, (x, [], [])),
        (module.linear_swiglu, (x, *weights)),
    ]
    for function, args in bad:
        with pytest.raises(ValueError, match=function.__name__):
            function(*args)


def test_columnwise_weights_are_refused(device):
    x, (weight,), _, _ = operands(device, torch.float32, (4,), 32, (16,))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.linear(x, weight.t().contiguous().t(), settings=SETTINGS["plain"])
