"""ops/linear/hopper_fp8_few_rows.py by its own Python, on whole numbers: all that is not layouts and fences.

tests/test_linear_float8.py has their numbers on a Hopper GPU.
"""

from __future__ import annotations

import pytest
import torch

from eagle_triton.ops.linear import fp8 as float8
from eagle_triton.reference.layers import float8_pair
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight
from eagle_triton.runtime.row_formats import GROUP, Float8Pair
from tests.gluon_by_python import run_launch

paired = float8._paired()
if paired is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)

KINDS = ("rows", "blocks", "one")


def powers_of_two(*shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-2, 3, shape)


def pair_of(rows: int, depth: int) -> Float8Pair:
    """Low parts that are multiples of 16 make whole numbers."""
    parts = torch.stack([torch.randint(-8, 9, (rows, depth)), 16 * torch.randint(-3, 4, (rows, depth))])
    scale = powers_of_two(-(-depth // GROUP), rows)
    return Float8Pair(parts.to(torch.float8_e4m3fn), scale, torch.Size((rows, depth)), torch.bfloat16)


def exact(x: Float8Pair) -> torch.Tensor:
    return x._replace(dtype=torch.float64).total()


def weight_of(kind: str, cols: int, depth: int) -> Float8Weight:
    scales = {"rows": (cols, 1), "blocks": (-(-cols // BLOCK), -(-depth // BLOCK)), "one": (1, 1)}
    return Float8Weight(torch.randint(-2, 3, (cols, depth)).to(torch.float8_e4m3fn), powers_of_two(*scales[kind]))


@pytest.mark.parametrize("multiprocessors", [132, 1], ids=["two at a time", "one at a time"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "cols", "depth", "splits", "kept"),
    [
        (1, (64,), 256, 1, 0),  # few rows ask for their scales
        (16, (128, 64, 64), 1104, 1, 0),  # more steps than slots, the last cut off
        (17, (128, 64, 64), 1104, 1, 16),  # a tile of x is one load, rows of it repeated
        (37, (200, 72, 72, 64), 640, 1, 8),  # tiles of two loads
        (60, (72,), 1664, 2, 8),  # splits of 7 and 6 steps: an odd one in the end
        (33, (64,), 3200, 4, 8),
        (17, (72, 64, 40), 1152, 2, 8),  # biases, which one of the splits adds
    ],
)
def test_products(monkeypatch, rows, cols, depth, splits, kept, kind, multiprocessors):
    monkeypatch.setattr(paired, "multiprocessors_of", lambda device: multiprocessors)
    torch.manual_seed(rows)
    x, weights = pair_of(rows, depth), [weight_of(kind, n, depth) for n in cols]
    biases = [torch.randint(-9, 10, (n,)).bfloat16() if len(cols) > 1 else None for n in cols]
    settings = paired.settings_for(rows, cols, depth, False)._replace(splits=splits)
    out = torch.full((splits, rows, sum(cols)), float("nan"))
    given = run_launch(lambda: paired.linear_hopper_fp8_few_rows(x, weights, cols, biases, out, settings))
    assert given["GROUPS"] == kept
    wanted = [exact(x) @ weight.dequantised(torch.float64).T for weight in weights]
    wanted = [one if bias is None else one + bias for one, bias in zip(wanted, biases, strict=True)]
    assert torch.equal(out.double().sum(0), torch.cat(wanted, -1).double())


def gate_and_up(x: Float8Pair, kind: str, cols: int, as_pair: bool) -> tuple[Float8Weight, Float8Weight, object]:
    """The weights, and what the kernel made of them over NaN."""
    up, gate = weight_of(kind, cols, x.shape[-1]), weight_of(kind, cols, x.shape[-1])
    gate = Float8Weight(gate.values, gate.scale / 256)  # where SiLU bends
    out = torch.full((x.rows, cols), float("nan"), dtype=torch.bfloat16)
    if as_pair:
        shaped = float8_pair(torch.zeros_like(out))
        nan = [torch.full(each.shape, float("nan")) for each in (shaped.parts, shaped.scale)]
        out = shaped._replace(parts=nan[0].to(shaped.parts.dtype), scale=nan[1])
    settings = paired.settings_for(x.rows, (cols, cols), x.shape[-1], True)
    run_launch(lambda: paired.linear_swiglu_hopper_fp8_few_rows(x, gate, up, out, settings))
    return gate, up, out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols", "depth"), [(1, 256, 1104), (17, 200, 640), (60, 256, 128)])
def test_gate_and_up(rows, cols, depth, kind):
    torch.manual_seed(rows)
    x = pair_of(rows, depth)
    gate, up, out = gate_and_up(x, kind, cols, False)
    wanted, gated = ((exact(x) @ weight.dequantised(torch.float64).T).bfloat16().float() for weight in (gate, up))
    wanted = (torch.nn.functional.silu(wanted).bfloat16().float() * gated).bfloat16()
    # an exponential may be rounded otherwise, and a number then be the next one
    torch.testing.assert_close(out.double(), wanted.double(), rtol=2**-7, atol=2**-20 * wanted.abs().max().item())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, as wanted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols", "depth"), [(1, 256, 1104), (60, 200, 256)])
def test_a_pair_has_the_bits_of_one_that_is_made_of_rows(rows, cols, depth, kind):
    x = pair_of(rows, depth)
    if rows > 1:  # rows of zeros, of numbers too small and too large for a scale, and of NaN
        x.parts[:, 3] = 0
        x.scale[:, 5], x.scale[:, 6], x.scale[:, 7], x.scale[0, 8] = 2.0**-70, 2.0**-75, 2.0**70, float("nan")
    made = []
    for as_pair in (False, True):
        torch.manual_seed(depth)  # the same weights
        made.append(gate_and_up(x, kind, cols, as_pair)[2])
    same, out = float8_pair(made[0]), made[1]
    assert torch.equal(out.scale.isnan(), same.scale.isnan())
    assert torch.equal(out.scale.nan_to_num(), same.scale.nan_to_num())
    known = ~same.scale.isnan().T.repeat_interleave(GROUP, 1)[:, :cols]
    parts = [each.parts.float()[:, known] for each in (out, same)]
    assert torch.equal(*parts) and known.any() and (rows == 1 or not known.all())
