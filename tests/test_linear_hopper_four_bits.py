"""ops/linear/hopper_four_bits.py by its own Python and its PTX: all that is not layouts and fences.

The last tests are on a Hopper GPU.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_triton.ops import linear as kernels
from eagle_triton.ops.linear import four_bits
from eagle_triton.ops.linear.settings import Streaming
from eagle_triton.reference import linear as reference
from eagle_triton.runtime.fallback import gluon_module
from eagle_triton.runtime.four_bit_weight import FourBitWeight, NestedScale, Packing
from eagle_triton.runtime.row_formats import WordOrdered
from eagle_triton.runtime.split_sums import total_of
from tests.gluon_by_python import run_launch
from tests.rounding import on_hopper

hopper = four_bits._hopper()
if hopper is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
LANES = 32


def in_halves(operate: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, one: Any, other: Any) -> Any:
    """What an instruction on pairs of 16 bits gives for uint32 registers."""
    pairs = (torch.from_numpy(np.ascontiguousarray(each).view(np.int16)).view(dtype) for each in (one, other))
    return operate(*pairs).view(torch.int16).numpy().view(np.uint32)


def permuted_bytes(one: Any, other: Any, selector: Any) -> Any:
    """prmt without signs."""
    both, found = one.astype(np.uint64) | other.astype(np.uint64) << np.uint64(32), np.zeros_like(one)
    for place in range(4):
        byte = both >> np.uint64(8 * (int(selector) >> 4 * place & 7)) & np.uint64(0xFF)
        found |= byte.astype(np.uint32) << np.uint32(8 * place)
    return found


def run_ptx(text: str, registers: dict[str, Any]) -> dict[str, Any]:
    """The registers after the text: uint32 arrays, of which the last dimension is the lanes of a warp."""
    registers = dict(registers)
    for line in text.strip("{}").splitlines():
        operation, *names = re.split(r"[\s,]+", line.rstrip(";"))
        if operation == ".reg":
            continue
        given = [registers[name] if name in registers else np.uint32(int(name, 0)) for name in names[1:]]
        name, *_, kind = operation.split(".")
        if name == "mov":
            found = given[0]
        elif name == "shr":
            found = given[0] >> given[1]
        elif name == "lop3":
            assert given[3] == 0xEA
            found = given[0] & given[1] | given[2]
        elif name == "prmt":
            found = permuted_bytes(*given)
        elif name == "shfl":
            assert given[2] == 0x100F, "sources are lanes of the same half warp"
            source = np.arange(LANES) & 16 | given[1] & 15
            found = np.take_along_axis(given[0], source.astype(np.int64), -1)
        elif name == "cvt":  # two of fp32 to a pair, whose high half is the first
            high, low = (torch.from_numpy(each.view(np.float32)) for each in given)
            pair = torch.stack([low, high], -1).to(DTYPES[operation.split(".")[2].removesuffix("x2")])
            found = pair.view(torch.int16).numpy().view(np.uint32)[..., 0]
        elif kind == "f32":
            found = (given[0].view(np.float32) * given[1].view(np.float32)).view(np.uint32)
        else:
            operate = {"sub": torch.sub, "mul": torch.mul}[name]
            one, other = np.broadcast_arrays(*given)
            found = in_halves(operate, DTYPES[kind.removesuffix("x2")], one, other)
        registers[names[0]] = found
    return registers


def elementwise(text: str) -> Callable[..., Any]:
    """What _converted asks of such a text: for words [64, 8] with a scale each, eight tensors [64, 8], of which a
    register holds the numbers of two rows, one eight below the other."""
    dtype = torch.bfloat16 if "bf16x2" in text else torch.float16

    def by_lanes(given: Any, floats: bool = False) -> list[Any]:
        """The registers of the upper rows and of the lower ones: [warps, halves of the columns, lanes]."""
        bits = given.astype(np.float32).view(np.uint32) if floats else given.astype(np.int64).astype(np.uint32)
        parts = bits.reshape(4, 2, 8, 2, 4).transpose(1, 0, 3, 2, 4).reshape(2, 4, 2, LANES)
        return list(np.ascontiguousarray(parts))

    def convert(words: Any, scale: Any, table: Any = None) -> list[Any]:
        by_table = table is not None
        given = by_lanes(words) + by_lanes(scale, by_table) + (by_lanes(table, True) if by_table else [])
        after = run_ptx(text, {f"${8 + place}": register for place, register in enumerate(given)})
        found = []
        for place in range(8):
            pair = np.ascontiguousarray(after[f"${place}"]).view(np.int16).reshape(4, 2, 8, 4, 2)
            numbers = torch.from_numpy(pair).view(dtype).double().numpy()
            found.append(numbers.transpose(0, 4, 2, 1, 3).reshape(64, 8))
        return found

    return convert


conversion = gluon_module("eagle_triton.ops.linear.hopper_four_bit_conversion")
ASSEMBLY = {text: elementwise(text) for text in (*conversion.TO_BF16.value, *conversion.TO_FP16.value)}
LANE_OF = "mov.u32 $0, %laneid;"
ASSEMBLY[LANE_OF] = lambda like: np.arange(64)[:, None] % 8 * 4 + np.arange(8) % 4


def weight_of(kind: str, rows: int, depth: int, group: int, dtype: torch.dtype, device: str = "cpu") -> FourBitWeight:
    """Random words and zeros, with scales that fp32 holds if they are nested. Marlin's rows are rounded up."""

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, device=device).int()

    if "marlin" in kind:
        rows += -rows % 64
        scale = torch.rand(depth // group, rows, device=device) / 8 + 1 / 64
        zero = words(depth // group, rows // 8).T if "zeros" in kind else None
        return FourBitWeight(words(depth // 16, 2 * rows), Packing.MARLIN, scale.to(dtype).T, group, zero)
    scale, nested = torch.rand(rows, depth // group, device=device) / 8 + 1 / 64, None
    if kind in ("symmetric", "zeros"):
        zero = words(depth // group, -(-rows // 8)).T if kind == "zeros" else None
        return FourBitWeight(words(rows, depth // 8), Packing.ROWS, scale.to(dtype), group, zero)
    if kind == "nested":
        scale = torch.randint(0, 256, scale.shape, dtype=torch.uint8, device=device)
        outer = 2.0 ** torch.randint(-2, 1, (-(-scale.numel() // 256),), device=device)
        nested = NestedScale(
            torch.randint(0, 128, (256,), device=device) / 1024, outer, torch.tensor(1 / 64, device=device)
        )
    table = torch.randn(16, device=device) * 4
    return FourBitWeight(words(rows, depth // 8), Packing.ROWS_HIGH_FIRST, scale, group, table=table, nested=nested)


def read_by(weight: FourBitWeight, x: Tensor) -> Tensor:
    """x [rows, K] as products with this weight read it."""
    return WordOrdered.of(x).values if weight.reads_word_order else x


KINDS = ("symmetric", "zeros", "table", "nested", "marlin", "marlin zeros")
WITH_MORE = ("zeros", "nested", "marlin zeros")  # each does what one of the others does, and more


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [32, 96, 128, 384])
def test_every_number_is_what_the_reference_rounds_it_to(dtype, kind, group):
    """Rows of the unit matrix take one column of the weight each, so sums are of one number."""
    torch.manual_seed(group)
    weight = weight_of(kind, 75, 384, group, dtype)
    rows = len(weight)
    out = torch.full((1, 384, rows), float("nan"), dtype=dtype)
    settings = hopper.settings_for(384, (rows,), 384, False)._replace(splits=1)
    x = read_by(weight, torch.eye(384, dtype=dtype))
    run_launch(lambda: hopper.linear_hopper_four_bits(x, [weight], [rows], [None], out, settings), assembly=ASSEMBLY)
    assert torch.equal(out[0].T, weight.dequantised(dtype)) and out.unique().numel() > 16


SIZES = {
    (1, (136,), 1024, 128, 1): KINDS,  # steps of 256 columns
    (8, (64, 200, 8), 1152, 64, 1): WITH_MORE,  # more steps than slots, and biases
    (32, (128, 72, 64, 40), 640, 640, 1): WITH_MORE,  # one scale for a row
    (61, (200,), 2048, 128, 4): WITH_MORE,
    (64, (64, 72, 8), 1280, 64, 2): KINDS,  # splits of 5 steps each, whose first groups are not the row's
    (16, (136,), 1024, 32, 2): WITH_MORE,
    (65, (136,), 512, 128, 1): KINDS,  # the last tile of x overlaps the one before it
    (200, (72, 40, 8), 384, 64, 1): WITH_MORE,
    (512, (8,), 128, 64, 1): WITH_MORE,
}


@pytest.mark.parametrize(
    ("rows", "cols", "depth", "group", "splits", "kind"),
    [(*sizes, kind) for sizes, kinds in SIZES.items() for kind in kinds],
)
def test_products(rows, cols, depth, group, splits, kind):
    torch.manual_seed(rows)
    dtype = torch.float16
    x = torch.randint(-4, 5, (rows, depth)).to(dtype)
    weights = [weight_of(kind, n, depth, group, dtype) for n in cols]
    cols = tuple(map(len, weights))
    biases = [torch.randn(n).to(dtype) if len(cols) > 1 else None for n in cols]
    settings = hopper.settings_for(rows, cols, depth, False)._replace(splits=splits)
    out = torch.full((splits, rows, sum(cols)), float("nan"))
    run_launch(
        lambda: hopper.linear_hopper_four_bits(read_by(weights[0], x), weights, cols, biases, out, settings),
        assembly=ASSEMBLY,
    )
    wanted = [x.double() @ weight.dequantised(dtype).double().T for weight in weights]
    wanted = [one if bias is None else one + bias for one, bias in zip(wanted, biases, strict=True)]
    torch.testing.assert_close(out.double().sum(0), torch.cat(wanted, -1), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "cols", "depth", "group", "ordered", "dtype"),
    [
        (1, 256, 1024, 64, True, torch.float16),
        (17, 224, 640, 640, False, torch.bfloat16),
        (64, 128, 512, 128, True, torch.bfloat16),
        (130, 96, 384, 32, False, torch.float16),
    ],
)
def test_gate_and_up(rows, cols, depth, group, kind, dtype, ordered):
    torch.manual_seed(rows)
    x = (torch.randint(-4, 5, (rows, depth)) / 16).to(dtype)
    gate, up = (weight_of(kind, cols, depth, group, dtype) for _ in range(2))
    cols = len(gate)
    values = torch.full((rows, cols), float("nan"), dtype=dtype)
    out = WordOrdered(values, torch.Size((rows, cols))) if ordered else values
    settings = hopper.settings_for(rows, (cols, cols), depth, True)
    run_launch(
        lambda: hopper.linear_swiglu_hopper_four_bits(read_by(gate, x), gate, up, out, settings), assembly=ASSEMBLY
    )
    wanted = reference.linear_swiglu(x, gate, up)
    # sums that lie between two numbers may be rounded to either
    torch.testing.assert_close(out.total() if ordered else out, wanted, rtol=4 * torch.finfo(dtype).eps, atol=2e-4)
    assert wanted.abs().max() > 0.1


def test_a_weight_with_zeros_keeps_twice_the_bytes(monkeypatch):
    """Beyond what shared memory keeps the portable kernel multiplies."""
    monkeypatch.setattr(hopper, "compute_capability", lambda _: (9, 0))
    few, many = (torch.empty(rows, 28672, dtype=torch.float16, device="meta") for rows in (64, 65))
    for kind, of_many in (("symmetric", True), ("zeros", False)):
        weight = weight_of(kind, 8, 28672, 128, torch.float16)
        assert hopper.takes(few, [weight]) and hopper.takes(many, [weight]) == of_many
        settings = Streaming(128, 128, 1, True, 6, 6)
        assert hopper.fitted(settings, 64, 28672, 1, 128, hopper._item_of(weight)).w_stages >= 2
    mixed = [weight_of(kind, 8, 512, 128, torch.float16) for kind in ("symmetric", "zeros")]
    assert not hopper.takes(few[:, :512], mixed) and hopper.takes(few[:, :512], mixed[:1])


@pytest.mark.parametrize("depth", [1280, 3712, 4096, 14336, 28672])
@pytest.mark.parametrize("cols", [(4096,), (4096, 1024, 1024), (256,)])
def test_splits_on_hopper_are_those_of_all_rows_and_each_fits(cols, depth):
    found = set()
    for rows in (1, 16, 17, 33, 64):
        use = hopper.settings_for(rows, cols, depth, False)
        columns, splits = hopper.columns_of(depth, use), use.splits
        assert (splits - 1) * columns < depth, "every split has a step"
        found.add((splits, columns if splits > 1 else depth))
    assert len(found) == 1
    for rows, group, item, pair in itertools.product((1, 64, 65, 240, 512), (32, 64, 128), (2, 4), (False, True)):
        scales = hopper.BLOCK_N * (1 + pair) * hopper.groups_of(depth, group) * item
        if scales <= (hopper._MAX_SCALES if rows <= hopper.FEW_ROWS else hopper._MAX_SCALES_OF_MANY):
            use = hopper.settings_for(rows, cols, depth, pair)._replace(splits=1)
            fitting = hopper.fitted(use, rows, depth, 1 + pair, group, item)
            assert fitting.w_stages >= 2 and fitting.block_k in (128, 256)
    use = hopper.settings_for(rows, cols, depth, False)
    for change in ({"block_n": 64}, {"block_k": 512}, {"block_k": depth}, {"splits": depth // 64}):
        with pytest.raises(ValueError, match="settings for weights of four bits need block_n 128"):
            hopper.fitted(use._replace(**change), rows, depth, 1, 128, 2)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [32, 64, 96, 128, 192, 384])
def test_every_number_on_hopper(group, kind, dtype):
    weight = weight_of(kind, 203, 384, group, dtype, "cuda")
    one = torch.eye(384, dtype=dtype, device="cuda")
    for rows in (384, 64):
        assert torch.equal(kernels.linear(one[:rows], weight).T, weight.dequantised(dtype)[:, :rows])


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "depth", "group"),
    [
        (1, 1024, 128),
        (16, 3712, 64),
        (33, 2048, 2048),
        (48, 1024, 32),
        (64, 640, 64),
        (65, 1024, 128),
        (200, 640, 64),
        (150, 14336, 64),
    ],
)
def test_hopper_kernels_equal_the_reference(dtype, rows, depth, group, kind):
    """All columns of x matter: each row of x has other numbers, and so has each group of a weight."""
    x = torch.randn(rows, depth, device="cuda", dtype=dtype)
    weights = [weight_of(kind, n, depth, group, dtype, "cuda") for n in (200, 64, 328)]
    biases = [torch.randn(len(weight), device="cuda", dtype=dtype) if len(weight) != 64 else None for weight in weights]
    assert hopper.takes(x, weights) or (rows, kind != "symmetric") == (150, True), "too many scales for many rows"
    for keep_splits in (True, False):
        for _ in range(5):  # a race shows now and then
            outs = kernels.linear_stack(x, weights, biases, keep_splits=keep_splits)
            for out, exact in zip(outs, reference.linear_stack(x, weights, biases), strict=True):
                error = (total_of(out).float() - exact.float()).norm() / exact.float().norm()
                assert error < (3e-3 if dtype == torch.bfloat16 else 4e-4)
    pair = [weight_of(kind, 200, depth, group, dtype, "cuda") for _ in range(2)]
    small = x / 64  # sums that silu does not make zero or the number itself
    for activation in ("silu", "gelu_tanh"):
        out = kernels.linear_swiglu(small, *pair, activation=activation)
        exact = reference.linear_swiglu(small, *pair, activation=activation)
        error = (out.float() - exact.float()).norm() / exact.float().norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1.5e-3)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("kind", ["symmetric", "zeros"])
def test_bits_on_hopper_do_not_depend_on_the_number_of_rows(kind):
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    weight = weight_of(kind, 512, 4096, 128, torch.bfloat16, "cuda")
    whole = total_of(kernels.linear(x, weight, keep_splits=True))
    for rows in (1, 7, 20, 40):
        assert torch.equal(total_of(kernels.linear(x[:rows], weight, keep_splits=True)), whole[:rows])
