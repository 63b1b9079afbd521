"""ops/linear/hopper_fp8.py by its own Python, on whole numbers: all that is not layouts, fences and the PTX.

tests/test_linear_float8.py has its numbers on a Hopper GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle_triton.ops.linear import fp8 as float8
from eagle_triton.runtime.float8_weight import BLOCK, Float8Weight
from tests.gluon_by_python import run_launch

converted = float8._streamed()
if converted is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)

KINDS = ("rows", "blocks", "one")


def two_rows(pairs: np.ndarray, *scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the PTX makes of pairs of e4m3 [rows, width]. A pair of it has a number of one row and of the row eight
    below, which are the two numbers of the upper row in the first output, and those of the lower row in the second."""
    values = torch.from_numpy(pairs.astype(np.int16)).view(torch.float8_e4m3fn).double().numpy()
    by_rows = values.reshape(-1, 2, 8, pairs.shape[1], 2)  # 16 rows: the upper eight, the lower eight
    outs = []
    for half in range(2):
        out = by_rows[:, half].transpose(0, 3, 1, 2).reshape(pairs.shape)
        outs.append((out * scales[half] if scales else out).view(type(pairs)))
    return outs[0], outs[1]


ASSEMBLY = {text.value: two_rows for text in (converted._TO_BF16, converted._TO_SCALED_BF16)}


def weight_of(kind: str, cols: int, depth: int) -> Float8Weight:
    scales = {"rows": (cols, 1), "blocks": (-(-cols // BLOCK), -(-depth // BLOCK)), "one": (1, 1)}
    scale = 2.0 ** torch.randint(-2, 3, scales[kind])
    return Float8Weight(torch.randint(-2, 3, (cols, depth)).to(torch.float8_e4m3fn), scale)


def rows_of(rows: int, depth: int) -> torch.Tensor:
    return torch.randint(-8, 9, (rows, depth)).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "cols", "depth", "splits", "multiprocessors", "whole"),
    [
        (5, (72,), 272, 1, 132, 1),  # fp16 of few rows; the last step cut off
        (80, (200, 72, 72), 400, 1, 132, 4),  # tiles of x whose last loads repeat the first rows
        (128, (128,) * 4, 640, 2, 3, 4),  # programs with several tiles, of three steps and of two
        (130, (128, 64), 2064, 1, 2, 2),  # tiles of rows that overlap; more steps than slots
        (130, (128, 64), 272, 1, 132, 0),  # halves for more programs
        (300, (640,), 272, 1, 132, 0),  # three halves, for more programs
        (300, (200, 72), 272, 1, 3, 3),  # a rest of 44 rows below each whole tile
        (384, (128,) * 3, 640, 2, 3, 3),  # a rest that fills a half, with splits
        (300, (640,), 384, 2, 8, 4),  # a round of whole tiles, three halves of the last columns in splits, then rests
        (488, (640,), 272, 1, 4, 4),  # whole tiles in two rounds, then halves
        (488, (640,), 384, 2, 8, 4),  # likewise with splits
        (600, (64, 136, 40), 144, 1, 12, 4),
    ],
)
def test_products(monkeypatch, rows, cols, depth, splits, multiprocessors, whole, kind):
    monkeypatch.setattr(converted, "multiprocessors_of", lambda device: multiprocessors)
    torch.manual_seed(rows)
    x, weights = rows_of(rows, depth), [weight_of(kind, n, depth) for n in cols]
    biases = [torch.randint(-9, 10, (n,)).bfloat16() if len(cols) > 1 else None for n in cols]
    settings = converted.settings_for(rows, cols, depth, kind == "blocks", False)._replace(splits=splits)
    out = torch.full((splits, rows, sum(cols)), float("nan"))
    taken = float8.as_kernels_take(weights, list(cols), biases)
    given = run_launch(lambda: converted.linear_hopper_fp8(x, *taken, out, settings), assembly=ASSEMBLY)
    assert given["whole"] == whole
    wanted = [x.double() @ weight.dequantised(torch.float64).T for weight in weights]
    wanted = [one if bias is None else one + bias for one, bias in zip(wanted, biases, strict=True)]
    assert torch.equal(out.double().sum(0), torch.cat(wanted, -1).double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "cols", "depth", "multiprocessors", "whole"),
    [
        (80, 200, 272, 3, 4),
        (130, 128, 640, 2, 2),
        (488, 320, 272, 4, 4),
        (257, 64, 144, 132, 0),
        (257, 320, 272, 4, 4),
        (384, 200, 272, 4, 4),
    ],
)
def test_gate_and_up(monkeypatch, rows, cols, depth, multiprocessors, whole, kind):
    monkeypatch.setattr(converted, "multiprocessors_of", lambda device: multiprocessors)
    torch.manual_seed(rows)
    x, gate, up = rows_of(rows, depth), weight_of(kind, cols, depth), weight_of(kind, cols, depth)
    gate = Float8Weight(gate.values, gate.scale / 256)  # where SiLU bends
    settings = converted.settings_for(rows, (cols, cols), depth, kind == "blocks", True)
    out = torch.full((rows, cols), float("nan"), dtype=torch.float64)
    given = run_launch(lambda: converted.linear_swiglu_hopper_fp8(x, gate, up, out, settings), assembly=ASSEMBLY)
    assert given["whole"] == whole
    gated, raised = ((x.double() @ weight.dequantised(torch.float64).T).bfloat16().double() for weight in (gate, up))
    wanted = (torch.nn.functional.silu(gated).bfloat16().double() * raised).bfloat16().double()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


@pytest.mark.parametrize(
    ("rows", "tiles", "splits", "whole"),
    [
        (128, 224, 1, 224),
        (240, 224, 1, 224),
        (129, 224, 1, 224),  # a round of whole tiles takes less than two of halves
        (257, 224, 1, 224),  # 1.7 rounds of whole tiles, then halves: 5.1 rounds of halves alone take longer
        (384, 224, 1, 224),
        (384, 48, 1, 48),
        (384, 32, 2, 32),
        (385, 224, 1, 198),
        (488, 224, 1, 198),  # gate and up of Llama-3.1-8B: three rounds, and 104 halves
        (488, 48, 1, 48),
        (488, 32, 2, 32),
        (2048, 224, 1, 224),
    ],
)
def test_the_last_tiles_are_halves_where_that_ends_sooner(rows, tiles, splits, whole):
    assert converted.whole_tiles(rows, tiles, splits, 132) == whole
