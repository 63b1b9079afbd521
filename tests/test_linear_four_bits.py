"""Products with weights of four bits: the kernels against the reference. Any words are numbers in any packing, so the
weights are random words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from eagle_triton.ops import linear as kernels
from eagle_triton.ops.linear import four_bits
from eagle_triton.ops.linear.settings import MAX_STREAMED, Portable, Settings, Streaming
from eagle_triton.ops.linear.side_by_side import empty_output
from eagle_triton.reference import linear as reference
from eagle_triton.runtime.float8_weight import quantised as in_eight_bits
from eagle_triton.runtime.four_bit_weight import FourBitWeight, NestedScale, Packing, quantised
from eagle_triton.runtime.row_formats import RowFormat, WordOrdered
from eagle_triton.runtime.split_sums import SplitSums, total_of
from tests import rounding
from tests.rounding import DTYPES


class Kind(NamedTuple):
    """A way to hold a weight [rows, depth]."""

    packing: Packing
    rows: int
    depth: int
    group: int
    zero: bool = False
    table: bool = False
    nested: bool = False
    scale: torch.dtype = torch.float16


KINDS = {
    "rows": Kind(Packing.ROWS, 133, 192, 64),
    "rows, zeros": Kind(Packing.ROWS, 133, 152, 8, zero=True, scale=torch.bfloat16),
    "rows, one scale": Kind(Packing.ROWS, 70, 152, 152),
    "high first, table": Kind(Packing.ROWS_HIGH_FIRST, 70, 192, 64, table=True, scale=torch.float32),
    "high first, table, nested": Kind(Packing.ROWS_HIGH_FIRST, 133, 320, 64, table=True, nested=True),
    "columns, zeros": Kind(Packing.COLUMNS, 133, 192, 32, zero=True),
    "columns, one scale, zeros": Kind(Packing.COLUMNS, 70, 152, 152, zero=True),
    "marlin": Kind(Packing.MARLIN, 192, 192, 64),
    "marlin, zeros": Kind(Packing.MARLIN, 128, 192, 32, zero=True),
    "marlin, narrow": Kind(Packing.MARLIN, 64, 208, 16),
}


def weight_of(kind: Kind, device: str) -> FourBitWeight:
    """Random words and zeros, and scales of 1 / 8 to 1 / 4."""
    rows, depth = kind.rows, kind.depth
    groups, shape = depth // kind.group, (rows, depth // 8)
    if kind.packing is Packing.COLUMNS:
        shape = (depth // 8, rows)
    elif kind.packing is Packing.MARLIN:
        shape = (depth // 16, 2 * rows)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, device=device).int()

    scale, nested = (torch.rand(groups, rows, device=device).T / 8 + 1 / 8).to(kind.scale), None
    if kind.nested:
        scale = torch.randint(0, 256, (rows, groups), dtype=torch.uint8, device=device)
        code, offset = torch.rand(256, device=device) / 8, torch.tensor(1 / 8, device=device)
        nested = NestedScale(code, torch.rand(-(-rows * groups // 256), device=device), offset)
    zero = words(groups, -(-rows // 8)).T if kind.zero else None
    table = torch.randn(16, device=device) if kind.table else None
    return FourBitWeight(words(*shape), kind.packing, scale, kind.group, zero, table, nested)


def assert_close(out: Tensor | SplitSums, x: Tensor, weight: FourBitWeight, extra: Tensor | None = None) -> None:
    """At most three times the error of torch's product of the same weight, against fp64; zeros would fail."""
    full = weight.dequantised(x.dtype)
    exact, same = x.double() @ full.double().T, torch.nn.functional.linear(x, full)
    if extra is not None:
        exact, same = exact + extra.double(), same + extra
    rounding.assert_close(total_of(out), same, exact, most=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_reads_every_number_as_the_package_rounds_it(device, kind, dtype):
    torch.manual_seed(1)
    weight = weight_of(KINDS[kind], device)
    wanted = weight.dequantised(dtype)
    out = kernels.linear(torch.eye(weight.shape[1], dtype=dtype, device=device), weight)
    assert torch.equal(out.T, wanted) and wanted.unique().numel() > 16
    copy = torch.full((35, weight.shape[1]), float("nan"), dtype=dtype, device=device)
    four_bits.dequantise(weight, copy, 7)
    assert torch.equal(copy, wanted[7:42])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 60, 65, 300])
def test_rows_and_biases(device, rows, dtype):
    torch.manual_seed(rows)
    weight = weight_of(KINDS["rows, zeros"], device)
    x = torch.randn(rows, 152, device=device).to(dtype)
    bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((133,), (rows, 133)))
    assert_close(kernels.linear(x, weight), x, weight)
    assert_close(kernels.linear(x, weight, bias, residual), x, weight, bias + residual)


def test_many_rows_are_multiplied_by_copies_of_parts(device, monkeypatch):
    torch.manual_seed(2)
    monkeypatch.setattr(four_bits, "COPIED", 48)
    weight = weight_of(KINDS["columns, zeros"], device)
    x = torch.randn(MAX_STREAMED + 1, 192, device=device).half()
    bias = torch.nn.Parameter(torch.randn(133, device=device).half())
    for given in (None, bias):
        assert_close(kernels.linear(x, weight, given), x, weight, given)
    with torch.no_grad():
        assert torch.equal(kernels.linear(x[None], weight)[0], x @ weight.dequantised(torch.float16).T)


@pytest.mark.parametrize("kind", ["rows, zeros", "high first, table, nested", "marlin"])
def test_splits_add_up_and_nothing_else_is_written(device, kind):
    torch.manual_seed(3)
    weight = weight_of(KINDS[kind], device)
    cols, depth = weight.shape
    x, bias = torch.randn(5, depth, device=device), torch.randn(cols, device=device)
    room = torch.full((2, 5, cols + 9), float("nan"), device=device)
    use = Portable(16, 64, 64, 2, 4, 3)
    four_bits._launch_portable(x, weight, bias, room[..., :cols], use)
    assert_close(SplitSums(room[..., :cols], x.dtype), x, weight, bias)
    assert room[..., cols:].isnan().all()


def test_long_products_are_split(device):
    torch.manual_seed(4)
    weight = quantised(torch.randn(64, 2048, device=device))
    x = torch.randn(2, 3, 2048, device=device)
    out = kernels.linear(x, weight, keep_splits=True)
    assert isinstance(out, SplitSums) and out.sums.shape == (4, 2, 3, 64)
    assert_close(out, x, weight)
    assert isinstance(kernels.linear(x, weight), Tensor)


@pytest.mark.parametrize("kinds", ["44444", "48-", "-4", "84"])
def test_stacks_of_weights_of_any_kinds(device, kinds):
    torch.manual_seed(5)
    x = torch.randn(4, 128, device=device)
    weights = [torch.randn(40 + 8 * i, 128, device=device) for i in range(len(kinds))]
    made = {"4": quantised, "8": in_eight_bits, "-": lambda weight: weight}
    stack = [made[kind](weight) for kind, weight in zip(kinds, weights, strict=True)]
    biases = [None, *(torch.randn(len(weight), device=device) for weight in weights[1:])]
    outs = kernels.linear_stack(x, stack, biases, keep_splits=True)
    for out, exact in zip(outs, reference.linear_stack(x, stack, biases), strict=True):
        torch.testing.assert_close(total_of(out), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kinds", ["44", "4-", "84"])
def test_swiglu(device, kinds, activation):
    torch.manual_seed(6)
    x = torch.randn(2, 9, 128, device=device)
    made = {"4": quantised, "8": in_eight_bits, "-": lambda weight: weight}
    gate, up = (made[kind](torch.randn(72, 128, device=device) / 12) for kind in kinds)
    out = kernels.linear_swiglu(x, gate, up, activation=activation)
    exact = reference.linear_swiglu(x, gate, up, activation=activation)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
    assert exact.abs().max() > 0.1


def test_one_row_no_rows_and_rows_apart(device):
    torch.manual_seed(7)
    weight = quantised(torch.randn(40, 128, device=device))
    x = torch.randn(128, 6, device=device).T
    assert_close(kernels.linear(x, weight), x, weight)
    assert_close(kernels.linear(x[0], weight), x[0], weight)
    assert kernels.linear(x[:0], weight).shape == kernels.linear_swiglu(x[:0], weight, weight).shape == (0, 40)


@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_the_product_in_fp32_is_rounding_once(scale):
    """A difference has 4 bits and a sign, a scale 8 or 11 bits: fp32 holds their product, so that it is rounded as
    multiplication in the scale's dtype rounds."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(scale)
    every = every[every.isfinite()]
    for number in range(-15, 16):
        assert torch.equal((every.float() * number).to(scale), every * number)


def in_order(x: Tensor, weight: FourBitWeight) -> Tensor:
    """x [rows, K] with its columns in order, from that in which a product with this weight reads them."""
    assert x.is_contiguous()
    return WordOrdered(x, x.shape).total() if weight.reads_word_order else x


class Stub:
    """Stands for hopper_four_bits: notes what is launched."""

    def __init__(self, alike: bool):
        self.alike, self.launched = alike, []

    def takes(self, x: Tensor | WordOrdered, weights: Sequence[FourBitWeight]) -> bool:
        return x.shape[:-1].numel() <= 64 and (self.alike or len(weights) == 1)

    def settings_for(self, rows: int, cols: tuple[int, ...], depth: int, fused: bool) -> Streaming:
        return Streaming(64, 128, 1 if fused else 2, True, 2, 2)

    def linear_hopper_four_bits(self, x, weights, cols, biases, out, settings) -> None:
        self.launched.append((list(cols), [bias is not None for bias in biases], settings.splits))
        count = len(cols) - cols.count(0)  # the last of two is there twice
        outs = map(reference.linear, [in_order(x, weights[0])] * count, weights, biases)
        whole = torch.cat(list(outs), -1)
        out.copy_(torch.stack([whole, whole * 0]) if settings.splits == 2 else whole)

    def linear_swiglu_hopper_four_bits(self, x, gate, up, out, settings, activation) -> None:
        self.launched.append(activation)
        found = reference.linear_swiglu(in_order(x, gate), gate, up, activation=activation)
        values, found = (out.values, WordOrdered.of(found).values) if isinstance(out, WordOrdered) else (out, found)
        values.copy_(found)


@pytest.mark.parametrize("alike", [True, False])
def test_the_hopper_module_gets_what_it_takes(device, monkeypatch, alike):
    stub = Stub(alike)
    monkeypatch.setattr(four_bits, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(four_bits, "_hopper", lambda: stub)
    x = torch.randn(3, 128, device=device)
    weights = [quantised(torch.randn(32 * i, 128, device=device) / 12) for i in range(1, 7)]
    biases = [torch.randn(32 * i, device=device) if i == 2 else None for i in range(1, 7)]
    for keep_splits in (True, False):
        outs = kernels.linear_stack(x, weights, biases, keep_splits=keep_splits)
        for out, exact in zip(outs, reference.linear_stack(x, weights, biases), strict=True):
            assert isinstance(out, SplitSums) == keep_splits
            torch.testing.assert_close(total_of(out), exact)
    splits = [2] * (2 if alike else 6) + [1] * (2 if alike else 6)
    assert [launch[2] for launch in stub.launched] == splits
    if alike:
        assert stub.launched[:2] == [([32, 64, 96, 128], [True] * 4, 2), ([160, 192, 0], [False] * 3, 2)]
    swiglu = kernels.linear_swiglu(x, weights[0], weights[0], activation="gelu_tanh")
    torch.testing.assert_close(swiglu, reference.linear_swiglu(x, weights[0], weights[0], activation="gelu_tanh"))
    assert (stub.launched[-1] == "gelu_tanh") == alike
    monkeypatch.setattr(four_bits, "has_format", lambda x, row_format: row_format is not None)
    ordered = kernels.linear_swiglu(WordOrdered.of(x), weights[0], weights[0], row_format=RowFormat.WORD_ORDER)
    exact = reference.linear_swiglu(x, weights[0], weights[0])
    torch.testing.assert_close(ordered.total() if alike else ordered, exact)
    with pytest.raises(ValueError, match="settings with splits need keep_splits"):
        kernels.linear(x, weights[0], settings=Streaming(64, 128, 2, True, 2, 2))
    before = len(stub.launched)
    kernels.linear(torch.randn(65, 128, device=device), weights[0])
    assert len(stub.launched) == before


@pytest.mark.parametrize("ordered", [False, True])
def test_products_with_marlins_words_read_columns_in_order(device, monkeypatch, ordered):
    """And rows that TMA cannot load, because they are not aligned, are copied."""
    monkeypatch.setattr(four_bits, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(four_bits, "_hopper", lambda: Stub(True))
    weight = weight_of(KINDS["marlin"], device)
    x = torch.randn(3, 197, device=device)[:, 1:193]
    given = WordOrdered.of(x) if ordered else x
    torch.testing.assert_close(kernels.linear(given, weight), reference.linear(x, weight), rtol=1e-5, atol=1e-4)
    pair = kernels.linear_swiglu(given, weight, weight), reference.linear_swiglu(x, weight, weight)
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-4)


def test_without_the_hopper_module_the_portable_kernel_multiplies(device, monkeypatch):
    monkeypatch.setattr(four_bits, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(four_bits, "_hopper", lambda: None)
    x, weight = torch.randn(3, 128, device=device), quantised(torch.randn(40, 128, device=device))
    assert_close(kernels.linear(x, weight), x, weight)


def test_what_cannot_be(device, monkeypatch):
    monkeypatch.setattr(four_bits, "compute_capability", lambda _: (0, 0))
    x, weight = torch.randn(2, 128, device=device), quantised(torch.randn(40, 128, device=device))
    use = Streaming(64, 128, 1, True, 2, 2)
    with pytest.raises(ValueError, match="settings for weights of four bits need a Hopper GPU"):
        kernels.linear(x, weight, settings=use)
    with pytest.raises(ValueError, match="settings for quantised weights must be Streaming or None"):
        kernels.linear(x, weight, settings=Settings(32, 32))
    with pytest.raises(ValueError, match="settings must be None for weights of several kinds"):
        kernels.linear_stack(x, (weight, weight.dequantised(x.dtype)), (None, None), settings=use)
    with pytest.raises(ValueError, match=r"weight 0 must be \[40, 120\]"):
        kernels.linear(x[:, :120], weight)
    with pytest.raises(ValueError, match="must be float32"):
        kernels.linear(x, weight, torch.zeros(40, device=device, dtype=torch.float16))


def test_the_output_is_one_tensor_for_all_products():
    x = torch.randn(2, 3, 8).half()
    for splits, apart, shape in ((1, None, (6, 9)), (2, None, (2, 6, 9)), (1, True, (1, 6, 9)), (2, False, (6, 9))):
        out = empty_output(x, [4, 5], splits, apart)
        assert out.shape == shape and out.dtype == (torch.float32 if len(shape) == 3 else torch.float16)
