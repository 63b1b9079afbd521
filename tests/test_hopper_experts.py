"""The kernels of ops/experts/hopper_experts.py by their own Python: all that is not PTX, layouts and fences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_triton.operands.experts import ExpertWeight, Routes
from eagle_triton.ops import experts
from eagle_triton.ops.experts import products
from eagle_triton.reference import experts as reference
from eagle_triton.runtime.fallback import gluon_module
from eagle_triton.runtime.mxfp4_weight import Mxfp4Weight
from tests.gluon_by_python import Array, run_launch
from tests.test_experts import in_four_bits, packed

hopper: Any = gluon_module("eagle_triton.ops.experts.hopper_experts")
if hopper is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)
conversions: Any = gluon_module("eagle_triton.ops.experts.hopper_conversion")

BF16 = torch.bfloat16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
COUNT, CHOSEN = 12, 3  # experts, and those of a row
LATE = ("x", "inner_ptr", "weights_ptr", "routes")
KINDS = {"halves": {}, "interleaved": {"interleaved": True, "clamp": (0.8, 1.7)}}


def numbers_of(pairs: Any) -> Any:
    """The two bf16 numbers of each int32, along a new last axis."""
    halves = np.ascontiguousarray(pairs, np.int32).view(np.uint16).reshape(*pairs.shape, 2)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(float)


def converted(words: Any, factors: tuple[Any, ...], conversion: str) -> list[Any]:
    """What `converted` gives, with the numbers of a pair along a new last axis."""
    scales, *zeros = map(numbers_of, factors)
    assert len(zeros) == (conversion == conversions.WITH_ZEROS.value)
    found = []
    for pair in range(4):
        bits = np.asarray(words)[..., None] >> np.array([4 * pair, 16 + 4 * pair]) & 15
        if conversion == conversions.MXFP4.value:
            numbers = E2M1[bits] * 2.0**-126
        else:
            numbers = bits - (zeros[0] - 128 if zeros else 8)
        found.append((numbers * scales).view(Array).to("bfloat16"))
    return found


def multiply_add(first: list[Any], second: list[Any], x: tuple[Any, ...], sums: Any, _: str) -> Any:
    """What `multiply_add` gives: a thread has two sums of the first row of weights, then two of the second."""

    def in_rows(pairs: list[Any]) -> Any:
        return np.stack(pairs, -1).reshape(2, 2, 8, -1)

    columns = in_rows([numbers_of(pairs) for pairs in x]).swapaxes(2, 3)
    products = [(in_rows(row) @ columns).reshape(2, 2, 8, 4, 2) for row in (first, second)]
    return sums + np.concatenate(products, -1)


def ones_in(words: Any) -> Any:
    """How many bits of each int64 are set."""
    return np.vectorize(lambda word: (int(word) % 2**64).bit_count(), otypes=[np.int64])(words)


ASSEMBLY = {
    "popc.b64 $0, $1;": ones_in,
    "prefetch.global.L2 [$1]; mov.u32 $0, 0;": lambda place: place,
    "converted": converted,
    "multiply_add": multiply_add,
}


@pytest.fixture
def on_hopper(monkeypatch) -> Callable[..., Any]:
    """Called with a product and its arguments: what its kernel on Hopper gives."""
    for module in (products, hopper):
        monkeypatch.setattr(module, "compute_capability", lambda _: (9, 0))

    def run(product: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        found: list[Any] = []
        run_launch(lambda: found.append(product(*operands, **options)), LATE, ASSEMBLY)
        return found[0]

    return run


def routes_of(rows: int, source: torch.Generator) -> Routes:
    """All rows choose the expert 5, and each two others, in any order."""
    scores = torch.rand(rows, COUNT, generator=source)
    scores[:, 5] = 1
    order = torch.rand(rows, CHOSEN, generator=source).argsort(1)
    chosen = scores.topk(CHOSEN).indices.gather(1, order)
    weights = torch.rand(rows, CHOSEN, generator=source).to(BF16)
    return Routes(chosen.int(), weights, *reference._by_experts(chosen, COUNT))


@pytest.mark.parametrize(
    "rows, depth, group, zeros, kind, height",
    [
        (1, 1056, None, False, "interleaved", 64),
        (9, 1056, None, False, "halves", 64),
        (64, 1280, None, False, "interleaved", 64),
        (1, 1088, 64, True, "halves", 64),
        (1, 1088, 64, True, "halves", 32),
        (9, 1056, 1056, True, "interleaved", 64),
        (20, 1056, None, False, "interleaved", 64),
        (60, 1536, 64, False, "halves", 64),
    ],
)
def test_products(on_hopper, monkeypatch, rows, depth, group, zeros, kind, height):
    """group: None for MXFP4. height: of a program's rows of weights. Expert 5 has tiles of 8 of 20 rows, and of 16 of
    60. They have an odd number of steps each, so they begin in different slots. Other sizes are those of tiles that
    are filled in part."""
    source = torch.Generator().manual_seed(rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(BF16)

    def weight(*shape: int) -> ExpertWeight:
        if group is None:
            return packed("cpu", *shape)
        return in_four_bits("cpu", *shape, group=group, zeros=zeros, dtype=BF16)

    monkeypatch.setattr(hopper, "_height_of", lambda *_: height)
    routes, biased = routes_of(rows, source), kind == "interleaved"
    first = randn(rows, depth), weight(COUNT, 76, depth), randn(COUNT, 76) if biased else None, routes
    second = randn(rows, CHOSEN, depth), weight(COUNT, 70, depth), randn(COUNT, 70) if biased else None, routes
    options = KINDS[kind]
    for found, wanted in (
        (on_hopper(experts.experts_swiglu, *first, **options), reference.experts_swiglu(*first, **options)),
        (on_hopper(experts.experts_down, *second).sums, reference.experts_down(*second).sums),
    ):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=1e-3)
        assert (found == wanted).float().mean() > 0.97  # a sum between two numbers may be rounded to either
        assert wanted.abs().max() > 0.1


def test_programs_of_one_row_are_half_as_high_if_the_fullest_multiprocessor_has_less(monkeypatch):
    monkeypatch.setattr(hopper, "multiprocessors_of", lambda _: 132)
    for count, rows, chosen, heights in (
        (32, 5760, 4, (64, 64)),  # gate and up of gpt-oss-20b
        (32, 2880, 4, (32, 64)),  # its down: 180 programs, or 360 of half the height
        (128, 1536, 8, (32, 64)),  # gate and up of Qwen3-30B-A3B
        (128, 2048, 8, (64, 64)),
    ):
        blocks = torch.empty(count, rows, 90, 16, dtype=torch.uint8, device="meta")
        weight = Mxfp4Weight(blocks, blocks[..., 0].contiguous())
        assert tuple(hopper._height_of(n, chosen, weight) for n in (1, 2)) == heights


def test_tiles_have_sixteen_rows_of_x_where_experts_have_eight_on_average():
    for rows, chosen, count, expected in ((1, 2, 8, 1), (31, 2, 8, 8), (32, 2, 8, 16), (60, 4, 32, 8), (64, 4, 32, 16)):
        assert hopper._x_rows_of(rows, chosen, count) == expected
