"""ops/linear/hopper_four_bits.py by its own Python and its PTX: all that is not layouts and fences.

tests/test_linear_four_bits.py has the same on a Hopper GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_triton.ops.linear import four_bits
from eagle_triton.ops.linear.settings import Streaming
from eagle_triton.reference import linear as reference
from eagle_triton.runtime.four_bit_weight import FourBitWeight, NestedScale, Packing
from eagle_triton.runtime.launch import recorded
from eagle_triton.runtime.row_formats import WordOrdered
from tests.gluon_by_python import run as run_by_python

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


TEXTS = [text for name, text in vars(hopper).items() if name.endswith(("_TO_BF16", "_TO_FP16"))]
ASSEMBLY = {text.value: elementwise(text.value) for text in TEXTS}
LANE_OF = "mov.u32 $0, %laneid;"
ASSEMBLY[LANE_OF] = lambda like: np.arange(64)[:, None] % 8 * 4 + np.arange(8) % 4


def weight_of(kind: str, rows: int, depth: int, group: int, dtype: torch.dtype) -> FourBitWeight:
    words = torch.randint(-(2**31), 2**31, (rows, depth // 8)).int()
    scale, nested = torch.rand(rows, depth // group) / 8 + 1 / 64, None
    if kind == "symmetric":
        return FourBitWeight(words, Packing.ROWS, scale.to(dtype), group)
    if kind == "zeros":
        zero = torch.randint(-(2**31), 2**31, (depth // group, -(-rows // 8))).int().T  # strides matter
        return FourBitWeight(words, Packing.ROWS, scale.to(dtype), group, zero)
    if kind == "nested":
        scale = torch.randint(0, 256, scale.shape, dtype=torch.uint8)
        outer = 2.0 ** torch.randint(-2, 1, (-(-scale.numel() // 256),))  # fp32 holds these scales
        nested = NestedScale(torch.randint(0, 128, (256,)) / 1024, outer, torch.tensor(1 / 64))
    return FourBitWeight(words, Packing.ROWS_HIGH_FIRST, scale, group, table=torch.randn(16) * 4, nested=nested)


def run(launch: Callable[[], None]) -> dict[str, Any]:
    """What a kernel was launched with, by name, which it has run on."""
    with recorded() as launches:
        launch()
    (found,) = launches.values()
    given = dict(zip(found.kernel.arg_names, found.args, strict=True))
    run_by_python(found.kernel, found.grid, given, assembly=ASSEMBLY)
    return given


KINDS = ("symmetric", "zeros", "table", "nested")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [64, 128, 192, 384])
def test_every_number_is_what_the_reference_rounds_it_to(dtype, kind, group):
    """Rows of the unit matrix take one column of the weight each, so sums are of one number."""
    torch.manual_seed(group)
    weight = weight_of(kind, 75, 384, group, dtype)
    out = torch.full((1, 384, 75), float("nan"), dtype=dtype)
    settings = hopper.settings_for(384, (75,), 384, False)._replace(splits=1)
    x = WordOrdered.of(torch.eye(384, dtype=dtype))
    run(lambda: hopper.linear_hopper_four_bits(x, [weight], [75], [None], out, settings))
    assert torch.equal(out[0].T, weight.dequantised(dtype)) and out.unique().numel() > 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "cols", "depth", "group", "splits"),
    [
        (1, (136,), 1024, 128, 1),  # steps of 256 columns
        (8, (64, 200, 8), 1152, 64, 1),  # more steps than slots, and biases
        (32, (128, 72, 64, 40), 640, 640, 1),  # one scale for a row
        (61, (200,), 2048, 128, 4),
        (64, (64, 72, 8), 1280, 64, 2),  # splits of 5 steps each, whose first groups are not the row's
        (65, (136,), 512, 128, 1),  # the last tile of x overlaps the one before it
        (200, (72, 40, 8), 384, 64, 1),
        (512, (8,), 128, 64, 1),
    ],
)
def test_products(rows, cols, depth, group, splits, kind):
    torch.manual_seed(rows)
    dtype = torch.float16
    x = torch.randint(-4, 5, (rows, depth)).to(dtype)
    weights = [weight_of(kind, n, depth, group, dtype) for n in cols]
    biases = [torch.randn(n).to(dtype) if len(cols) > 1 else None for n in cols]
    settings = hopper.settings_for(rows, cols, depth, False)._replace(splits=splits)
    out = torch.full((splits, rows, sum(cols)), float("nan"))
    run(lambda: hopper.linear_hopper_four_bits(WordOrdered.of(x), weights, cols, biases, out, settings))
    wanted = [x.double() @ weight.dequantised(dtype).double().T for weight in weights]
    wanted = [one if bias is None else one + bias for one, bias in zip(wanted, biases, strict=True)]
    torch.testing.assert_close(out.double().sum(0), torch.cat(wanted, -1), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "cols", "depth", "group"),
    [(1, 256, 1024, 64), (17, 200, 640, 640), (64, 128, 512, 128), (130, 96, 384, 64)],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_gate_and_up(rows, cols, depth, group, kind, dtype, ordered):
    if ordered and cols % 32:
        pytest.skip("the order of words is one of 32 columns")
    torch.manual_seed(rows)
    x = (torch.randint(-4, 5, (rows, depth)) / 64).to(dtype)
    gate, up = (weight_of(kind, cols, depth, group, dtype) for _ in range(2))
    values = torch.full((rows, cols), float("nan"), dtype=dtype)
    out = WordOrdered(values, torch.Size((rows, cols))) if ordered else values
    settings = hopper.settings_for(rows, (cols, cols), depth, True)
    run(lambda: hopper.linear_swiglu_hopper_four_bits(WordOrdered.of(x), gate, up, out, settings))
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
