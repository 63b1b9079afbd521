"""ops/linear/fp8.py and hopper_fp8.py against their reference: every number, every kind of scale, many rows."""

from __future__ import annotations

import pytest
import torch

from eagle_triton.ops.linear import dispatch as kernels
from eagle_triton.ops.linear import fp8 as float8
from eagle_triton.ops.linear.settings import Settings, Streaming, portable_settings
from eagle_triton.reference import linear as reference
from eagle_triton.runtime import fallback
from eagle_triton.runtime.float8_weight import Float8Weight, quantised
from eagle_triton.runtime.split_sums import SplitSums, total_of
from tests import rounding
from tests.rounding import CUDA, DTYPES, HOPPER

KINDS = ("rows", "blocks", "one")


def weight_of(kind: str, rows: int, depth: int, device: str) -> Float8Weight:
    wide = torch.randn(rows, depth, device=device) / depth**0.5
    if kind == "one":
        scale = wide.abs().amax().view(1, 1) / 448
        return Float8Weight((wide / scale).to(torch.float8_e4m3fn), scale)
    return quantised(wide, block=kind == "blocks")


def assert_close(out, x: torch.Tensor, weight: Float8Weight, extra=None) -> None:
    """At most twice the error of torch's product of the dequantised weight, against fp64; zeros would fail."""
    exact = torch.nn.functional.linear(x.double(), weight.dequantised().double())
    same = torch.nn.functional.linear(x, weight.dequantised(x.dtype))
    if extra is not None:
        exact, same = exact + extra.double(), same + extra
    rounding.assert_close(total_of(out), same, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_finite_number_is_converted_exactly(device, kind, dtype):
    every = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    finite = every[every.float().isfinite()]
    values = torch.cat([finite, finite[:2]]).repeat(2, 1)  # [2, 256]
    scale = torch.tensor({"rows": [[1.0], [2.0]], "blocks": [[2.0, 0.5]], "one": [[0.25]]}[kind], device=device)
    weight = Float8Weight(values, scale)
    out = kernels.linear(torch.eye(256, device=device, dtype=dtype), weight)
    assert torch.equal(out.float().T, weight.dequantised())
    assert out.abs().max() > 400 * scale.min()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 60, 65] + ([16, 17, 64, 128, 129, 300] if CUDA else []))
def test_rows(device, rows, kind, dtype):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 272, device=device).to(dtype), weight_of(kind, 200, 272, device)
    bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((200,), (rows, 200)))
    assert_close(kernels.linear(x, weight), x, weight)
    assert_close(kernels.linear(x, weight, bias), x, weight, bias)
    assert_close(kernels.linear(x, weight, bias, residual), x, weight, bias + residual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [16, 128, 200] + ([1003, 4096] if CUDA else []))
def test_splits_add_up(device, depth, kind):
    torch.manual_seed(depth)
    dtype = torch.bfloat16 if CUDA else torch.float32
    x, weight = torch.randn(2, 5, depth, device=device).to(dtype), weight_of(kind, 130, depth, device)
    bias = torch.randn(130, device=device).to(dtype)
    assert_close(kernels.linear(x, weight, bias, keep_splits=True), x, weight, bias)


def test_long_products_are_split(device):
    x = torch.randn(3, 2048, device=device)
    weight = weight_of("rows", 64, 2048, device)
    out = kernels.linear(x, weight, keep_splits=True)
    assert isinstance(out, SplitSums) and out.sums.shape == (4, 3, 64)
    assert_close(out, x, weight)
    assert isinstance(kernels.linear(x, weight), torch.Tensor)


@pytest.mark.parametrize("kinds", [("rows",) * 5, ("blocks", "rows", "one"), ("rows", None, "one"), (None, "blocks")])
def test_stacks_of_any_kinds(device, kinds):
    torch.manual_seed(len(kinds))
    x = torch.randn(4, 160, device=device)
    weights = [
        torch.randn(40 + 8 * i, 160, device=device) if kind is None else weight_of(kind, 40 + 8 * i, 160, device)
        for i, kind in enumerate(kinds)
    ]
    biases = [torch.randn(len(weight), device=device) for weight in weights]
    biases[0] = None
    outs = kernels.linear_stack(x, weights, biases, keep_splits=True)
    for out, exact in zip(outs, reference.linear_stack(x, weights, biases), strict=True):
        out = out.total() if isinstance(out, SplitSums) else out
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_dequantised_to_the_nearest_number(device, kind, dtype):
    large = weight_of(kind, 100, 288, device)
    for weight in (large, Float8Weight(large.values[:, :272], large.scale)):
        assert torch.equal(float8.dequantise(weight, dtype), weight.dequantised(dtype))
    x = torch.randn(260, 288, device=device).to(dtype)
    assert_close(kernels.linear(x, large, keep_splits=True), x, large)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kinds", [("rows", "rows"), ("blocks", "blocks"), ("one", "rows"), ("blocks", None)])
def test_swiglu(device, kinds, dtype):
    torch.manual_seed(3)
    x = torch.randn(2, 9, 144, device=device).to(dtype)
    gate, up = (
        (torch.randn(96, 144, device=device) / 12).to(dtype) if kind is None else weight_of(kind, 96, 144, device)
        for kind in kinds
    )
    out = kernels.linear_swiglu(x, gate, up)
    wide = [
        weight.double() if isinstance(weight, torch.Tensor) else weight.dequantised().double() for weight in (gate, up)
    ]
    exact = reference.linear_swiglu(x.double(), *wide)
    same = reference.linear_swiglu(x, *(weight.to(dtype) for weight in wide))
    bound = 2 * (same.double() - exact).abs().max() + 1e-5
    assert out.dtype == dtype and (out.double() - exact).abs().max() <= bound < exact.abs().max()


def test_scales_of_zero_and_of_the_largest_numbers(device):
    values = torch.full((256, 128), 448.0, device=device).to(torch.float8_e4m3fn)
    for scale in ([[0.0], [2.0**100]], torch.cat([torch.zeros(128, 1), torch.full((128, 1), 2.0**100)])):
        weight = Float8Weight(values, torch.as_tensor(scale, device=device))
        out = kernels.linear(torch.ones(2, 128, device=device), weight)
        assert not out[:, :128].any() and (out[:, 128:] == 448.0 * 128 * 2.0**100).all()


def test_rows_apart_and_weights_inside_of_others(device):
    torch.manual_seed(5)
    x = torch.randn(160, 6, device=device).T  # columns apart
    large = weight_of("rows", 96, 192, device)
    weight = Float8Weight(large.values[:, 32:], large.scale)
    assert_close(kernels.linear(x, weight), x, weight)
    assert kernels.linear(x[:0], weight).shape == (0, 96)
    assert_close(kernels.linear(x[None, :, :], weight, keep_splits=True), x[None], weight)


def test_one_row_without_a_dimension_of_its_own(device):
    torch.manual_seed(6)
    x, weight = torch.randn(2048, device=device), weight_of("rows", 64, 2048, device)
    for keep_splits in (False, True):
        assert_close(kernels.linear(x, weight, keep_splits=keep_splits), x, weight)
    fused = kernels.linear_swiglu(x, weight, weight)
    torch.testing.assert_close(fused, reference.linear_swiglu(x, weight, weight), rtol=1e-4, atol=1e-4)


def test_a_bias_whose_elements_lie_apart(device):
    torch.manual_seed(7)
    x, weight = torch.randn(3, 144, device=device), weight_of("blocks", 40, 144, device)
    bias = torch.randn(40, 3, device=device)[:, 1]
    assert_close(kernels.linear(x, weight, bias), x, weight, bias)


def test_weights_share_a_launch_if_their_scales_are_alike(monkeypatch):
    for name in ("has_descriptors", "_streamed"):
        monkeypatch.setattr(float8, name, lambda *_: True)
    monkeypatch.setattr(float8, "compute_capability", lambda _: (9, 0))
    x, blocks, rows = torch.randn(2, 256), weight_of("blocks", 256, 256, "cpu"), weight_of("rows", 256, 256, "cpu")
    half = Float8Weight(blocks.values, blocks.scale.bfloat16())
    turned = Float8Weight(blocks.values, blocks.scale.T.contiguous().T)
    assert float8._streamed_for(x, (blocks, blocks)) and float8._streamed_for(x, (rows, rows))
    for other in (half, turned, rows):
        assert float8._streamed_for(x, (other,)) and not float8._streamed_for(x, (blocks, other))
        assert [len(some) for some, _ in float8._launches(x, (blocks, other), (None, None))] == [1, 1]
    odd = Float8Weight(rows.values[:, :255], rows.scale)
    assert not float8._streamed_for(x[:, :255], (odd,))


def test_settings_that_cannot_be_kept_to(device):
    use = Streaming(64, 128, 1, True, 2, 2)
    x, weight = torch.randn(2, 144, device=device), weight_of("rows", 40, 144, device)  # not of 16 bits
    for call in (
        lambda: kernels.linear(x, weight, settings=use),
        lambda: kernels.linear_stack(x, (weight, weight), (None, None), settings=use),
        lambda: kernels.linear_swiglu(x, weight, weight, settings=use),
    ):
        with pytest.raises(ValueError, match="settings for weights of eight bits need block_k 128"):
            call()
    with pytest.raises(ValueError, match="settings with splits need keep_splits"):
        kernels.linear(x, weight, settings=use._replace(splits=2))
    with pytest.raises(ValueError, match="settings must give every split a step, got 4 splits of 2 steps"):
        kernels.linear(x, weight, keep_splits=True, settings=use._replace(splits=4))
    for call in (
        lambda: kernels.linear_stack(x, (weight, weight.dequantised()), (None, None), settings=use),
        lambda: kernels.linear_swiglu(x, weight, weight.dequantised(), settings=use),
    ):
        with pytest.raises(ValueError, match="settings must be None for weights of several kinds"):
            call()


def test_an_old_triton_streams_none_and_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(fallback.log, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(fallback, "_gluon_modules", {})
    monkeypatch.setattr("triton.__version__", "3.5.1")
    assert float8._streamed() is None
    assert "this is 3.5.1" in said[0]


def test_what_cannot_be(device):
    x, weight = torch.randn(2, 144, device=device), weight_of("rows", 40, 144, device)
    with pytest.raises(ValueError, match=r"weight 0 must be \[40, 100\]"):
        kernels.linear(x[:, :100], weight)
    with pytest.raises(ValueError, match="settings for quantised weights must be Streaming or None"):
        kernels.linear(x, weight, settings=Settings(32, 32))
    with pytest.raises(ValueError, match="must be float32"):
        kernels.linear(x, weight, torch.zeros(40, device=device, dtype=torch.float16))
    with pytest.raises(ValueError, match="weight 1 must be"):
        kernels.linear_swiglu(x, weight, weight_of("rows", 48, 144, device))


def test_settings_do_not_depend_on_the_rows():
    def splits(rows: int) -> int:
        return portable_settings(rows, 4096, 4096, True).splits

    assert {splits(rows) for rows in (1, 16, 64, 300)} == {2}


@pytest.mark.parametrize("cols", [(4096, 1024, 1024), (4096,), (2048,)], ids=str)
def test_few_rows_read_higher_tiles_by_the_same_splits(cols):
    from eagle_triton.ops.linear import hopper_fp8_few_rows as paired_float8

    found = [paired_float8.settings_for(rows, cols, 4096, False) for rows in (1, 16, 17, 64)]
    assert len({use.splits for use in found}) == 1
    few = 128 if len(cols) == 3 else 64  # tiles of 128 rows of one weight are too few
    assert [use.block_n for use in found] == [few, few, 64, 64]


if HOPPER:
    from eagle_triton.ops.layers import float8_pair
    from eagle_triton.ops.linear import hopper_fp8_few_rows as paired

    SHAPES = [(4096, 1024, 1024), (4096,), (1536, 1536), (32000,)]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("cols", SHAPES, ids=str)
    def test_a_row_has_the_same_bits_beside_any_others(cols, kind):
        torch.manual_seed(len(cols))
        x = torch.randn(5000, 4096, device="cuda").bfloat16()
        weights = [weight_of(kind, n, 4096, "cuda") for n in cols]

        def product(rows: int) -> torch.Tensor:
            if len(cols) == 2:
                return kernels.linear_swiglu(x[:rows], *weights)
            outs = kernels.linear_stack(x[:rows], weights, [None] * len(weights), keep_splits=True)
            return torch.cat([out.total() if isinstance(out, SplitSums) else out for out in outs], -1)

        whole = product(64)  # more rows are multiplied with weights of 16 bits
        for rows in (1, 2, 16, 17, 33, 60):
            assert torch.equal(product(rows), whole[:rows]), rows
        exact = [x.double() @ weight.dequantised().double().T for weight in weights]
        wanted = torch.nn.functional.silu(exact[0]) * exact[1] if len(cols) == 2 else torch.cat(exact, -1)
        for rows in (64, 65, 127, 128, 129, 256, 257, 480, 513, 1000, 5000):  # 5000: by cuBLAS
            error = product(rows).double() - wanted[:rows]
            assert error.norm() / wanted[:rows].norm() < 5e-3 and error.abs().max() < 0.02 * wanted.abs().max(), rows

    @pytest.mark.parametrize("rows", [65, 130, 300, 700])
    @pytest.mark.parametrize("kind", KINDS)
    def test_many_rows_in_splits_with_biases_and_odd_sizes(kind, rows):
        torch.manual_seed(rows)
        x = torch.randn(rows, 2064, device="cuda").bfloat16()
        weights = [weight_of(kind, n, 2064, "cuda") for n in (200, 72, 72)]
        biases = [torch.randn(n, device="cuda").bfloat16() for n in (200, 72, 72)]
        for keep_splits in (False, True):
            outs = kernels.linear_stack(x, weights, biases, keep_splits=keep_splits)
            assert keep_splits == isinstance(outs[0], SplitSums)
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                assert_close(out, x, weight, bias)

    @pytest.mark.parametrize("depth", [144, 1040, 4112, 16528])  # the last: too deep to keep all scales of x
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rows", [5, 37])
    def test_streamed_depths_and_poisoned_outputs(rows, kind, depth):
        torch.manual_seed(depth)
        x, weight = torch.randn(rows, depth, device="cuda").bfloat16(), weight_of(kind, 200, depth, "cuda")
        use = paired.settings_for(rows, (200,), depth, False)
        out = torch.full((use.splits, rows, 200), float("nan"), device="cuda")
        paired.linear_hopper_fp8_few_rows(
            float8_pair(x), [weight], [200], [None], out if use.splits > 1 else out[0].to(x.dtype), use
        )
        assert_close(kernels.linear(x, weight, keep_splits=True), x, weight)
        assert use.splits == 1 or out.isfinite().all()
        assert_close(kernels.linear(x, weight), x, weight)
        assert (paired.groups_of(depth, 1, 32) == 0) == (depth == 16528)
