"""Weights in four bits: packings, scales and zeros against numbers packed one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_triton.reference.linear import linear
from eagle_triton.runtime.four_bit_weight import FourBitWeight, NestedScale, Packing, packed, quantised

ROWS, DEPTH, GROUP = 128, 192, 64


def repacked(numbers: Tensor, packing: Packing) -> Tensor:
    """Words for numbers [N, K], as the description of the packing says, word by word."""
    rows, depth = numbers.shape
    if packing is Packing.ROWS:
        places = [[[(n, 8 * c + t) for t in range(8)] for c in range(depth // 8)] for n in range(rows)]
    elif packing is Packing.ROWS_HIGH_FIRST:
        places = [[[(n, 8 * c + (t ^ 1)) for t in range(8)] for c in range(depth // 8)] for n in range(rows)]
    elif packing is Packing.COLUMNS:
        places = [[[(n, 8 * c + t) for t in range(8)] for n in range(rows)] for c in range(depth // 8)]
    else:
        places = []
        for c in range(depth // 16):
            line = []
            for word in range(2 * rows):
                lane, warp = word % 128 // 4, word % 4
                n, k = 64 * (word // 128) + 16 * warp + lane // 4, 16 * c + 2 * (lane % 4)
                line.append(
                    [(n + 8 * below, k + 8 * right + next_) for next_ in (0, 1) for below in (0, 1) for right in (0, 1)]
                )
            places.append(line)
    at = torch.tensor(places)
    return packed(numbers[at[..., 0], at[..., 1]].flatten(1))


@pytest.mark.parametrize("packing", list(Packing))
def test_numbers_are_found_in_every_packing(packing: Packing) -> None:
    numbers = torch.randint(0, 16, (ROWS, DEPTH), dtype=torch.uint8)
    weight = FourBitWeight(repacked(numbers, packing), packing, torch.rand(ROWS, DEPTH // GROUP), GROUP)
    assert weight.shape == (ROWS, DEPTH)
    assert torch.equal(weight.numbers(), numbers)
    scale = weight.scale
    if packing is Packing.MARLIN:
        order = [64 * (n // 64) + 8 * (n % 8) + n % 64 // 8 for n in range(ROWS)]
        scale = scale[order]
    expected = (numbers.float() - 8) * scale.repeat_interleave(GROUP, 1)
    assert torch.equal(weight.dequantised(torch.float32), expected)
    assert torch.equal(weight.dequantised(torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("packing", [Packing.ROWS, Packing.MARLIN])
def test_zeros_are_subtracted_from_the_numbers_of_their_group(packing: Packing) -> None:
    numbers = torch.randint(0, 16, (ROWS, DEPTH), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (ROWS, DEPTH // GROUP), dtype=torch.uint8)
    words, of_zeros, scale = repacked(numbers, packing), zeros, torch.ones(ROWS, DEPTH // GROUP)
    if packing is Packing.MARLIN:
        rows = [64 * (w // 8) + 8 * j + w % 8 for w in range(ROWS // 8) for j in (0, 2, 4, 6, 1, 3, 5, 7)]
        of_zeros = zeros[rows]
    weight = FourBitWeight(words, packing, scale, GROUP, packed(of_zeros.T.contiguous()).T)
    found = weight.zeros()
    assert found is not None and torch.equal(found, zeros)
    expected = numbers.float() - zeros.float().repeat_interleave(GROUP, 1)
    assert torch.equal(weight.dequantised(torch.float32), expected)


def test_a_table_and_nested_scales_stand_for_numbers() -> None:
    numbers = torch.randint(0, 16, (ROWS, DEPTH), dtype=torch.uint8)
    of_scales = torch.randint(0, 256, (ROWS, DEPTH // GROUP), dtype=torch.uint8)
    table, nested = torch.randn(16), NestedScale(torch.rand(256), torch.rand(2), torch.tensor(0.25))
    weight = FourBitWeight(packed(numbers), Packing.ROWS, of_scales, GROUP, table=table, nested=nested)
    flat = nested.code[of_scales.flatten().long()]
    flat = flat * nested.scale.repeat_interleave(256)[: flat.numel()] + nested.offset
    expected = table[numbers.long()] * flat.view(of_scales.shape).repeat_interleave(GROUP, 1)
    assert torch.equal(weight.dequantised(torch.float32), expected)
    with pytest.raises(ValueError, match="nested must be None in Marlin's packing"):
        words = repacked(numbers, Packing.MARLIN)
        FourBitWeight(words, Packing.MARLIN, of_scales, GROUP, table=table, nested=nested)


def test_a_matrix_is_rounded_to_half_a_step_of_its_group() -> None:
    matrix = torch.randn(ROWS, DEPTH)
    matrix[3, GROUP : 2 * GROUP] = 0
    weight = quantised(matrix, GROUP)
    step = weight.scale.repeat_interleave(GROUP, 1)
    off = (weight.dequantised(torch.float32) - matrix).abs() / step
    positive_end = matrix / step > 7  # 7.5 steps away from zero, where seven are the most
    assert off[~positive_end].max() <= 0.5 + 1e-4
    assert (weight.dequantised(torch.float32)[3, GROUP : 2 * GROUP] == 0).all()
    with pytest.raises(ValueError, match="infinities"):
        quantised(torch.full((8, 64), float("inf")), 64)


def test_products_round_the_weight_to_the_dtype_of_x_first() -> None:
    weight = quantised(torch.randn(ROWS, DEPTH), GROUP)
    x = torch.randn(3, DEPTH, dtype=torch.bfloat16)
    expected = (x.double() @ weight.dequantised(torch.bfloat16).double().T).to(torch.bfloat16)
    assert (linear(x, weight).double() - expected.double()).abs().max() <= expected.abs().max() * 2**-8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 100}, "group must be a multiple of 8 that divides K = 192, got 100"),
        ({"scale": torch.ones(ROWS, 2)}, r"scale must be .* \[128, 3\], got torch.float32 \[128, 2\]"),
        ({"zero": torch.ones(ROWS, 3)}, r"zero must be torch.int32 \[16, 3\]"),
        ({"table": torch.ones(8)}, r"table must be torch.float32 \[16\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    fitting: dict = dict(
        packed=packed(torch.zeros(ROWS, DEPTH)), packing=Packing.ROWS, scale=torch.ones(ROWS, 3), group=GROUP
    )
    with pytest.raises(ValueError, match=message):
        FourBitWeight(**{**fitting, **change})
