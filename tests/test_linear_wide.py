"""ops/linear/hopper_many_rows.py against fp32, whatever the rows, and who is given to it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eagle_triton.ops.linear import dispatch as kernels
from eagle_triton.ops.linear import settings as table
from eagle_triton.ops.linear.settings import MAX_WIDE, WIDE_TILE, Streaming, Wide
from eagle_triton.runtime.launch import recorded
from tests import rounding
from tests.gluon_by_python import run_launch
from tests.rounding import on_hopper

streamed, wide = kernels._streamed(), kernels._wide()
if wide is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)

ROWS = [129, 130, 240, 255, 256, 257, 384, 480, 511, 512]
DTYPES = [torch.bfloat16, torch.float16]
QKV, GATE_UP = (4096, 1024, 1024), (14336, 14336)


def matrices(rows: int, depth: int, *cols: int, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(rows + depth)
    x = torch.randn(rows, depth, device="cuda").to(dtype)
    weights = [(torch.randn(n, depth, device="cuda") / depth**0.5).to(dtype) for n in cols]
    return x, weights, [torch.randn(n, device="cuda").to(dtype) for n in cols]


def run(x, weights, biases):
    """Written over NaN."""
    cols = [len(weight) for weight in weights]
    out = x.new_full((len(x), sum(cols)), float("nan"))
    wide.linear_hopper_many_rows(x, weights, cols, biases, out, wide.STACK)
    return out


def by_torch(x, weights, biases):
    return torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=-1)


def assert_close(out, x, weights, biases) -> None:
    exact = by_torch(
        x.float(), *([None if each is None else each.float() for each in some] for some in (weights, biases))
    )
    rounding.assert_close(out, by_torch(x, weights, biases), exact)


@pytest.mark.parametrize(
    ("rows", "cols", "depth", "chosen"),
    [
        (128, QKV, 4096, None),
        (129, QKV, 4096, wide.STACK),  # 48 columns for 66 groups
        (256, QKV, 4096, wide.STACK),
        (257, QKV, 4096, None),  # for 44
        (385, QKV, 4096, wide.STACK),  # for 33: two rounds that are nearly full
        (512, QKV, 4096, wide.STACK),
        (513, QKV, 4096, None),
        (240, (8192, 1024, 1024), 5120, None),  # 80 columns for 66 groups
        (320, (8192, 1024, 1024), 5120, wide.STACK),
        (480, (8192, 1024, 1024), 5120, None),  # three rounds
        (129, (3072, 1024, 1024), 3072, wide.STACK),
        (480, (3072, 1024, 1024), 3072, None),
        (256, (2048, 512, 512), 2048, None),  # hopper.py splits K
        (320, (2048, 512, 512), 2048, wide.STACK),
        (480, (4096, 1024), 4096, None),
        (480, (4096,), 4096, None),
        (480, GATE_UP, 4096, None),
        (480, (4096, 1024, 1040), 4096, None),
        (480, QKV, 1024, None),
    ],
)
def test_what_is_wide(rows, cols, depth, chosen):
    assert wide.settings_for(rows, cols, depth) == chosen


def test_who_is_given_to_it(monkeypatch):
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "multiprocessors_of", lambda device: 132)
    x = torch.empty(480, 4096, dtype=torch.bfloat16)
    qkv, gate_up = ([torch.empty(n, 4096, dtype=torch.bfloat16) for n in cols] for cols in (QKV, GATE_UP))
    assert kernels._choose(x, qkv, None) == wide.STACK
    assert kernels._choose(x, gate_up, None, fused=True) is None
    assert kernels._choose(x.view(8, 60, 4096), qkv, None, True) == wide.STACK
    assert kernels._choose(x[:240], qkv, 480, True) == wide.STACK  # by the rows that there are
    for rows in (80, 20):
        few = kernels._choose(x[:rows], qkv, 480, True)
        assert isinstance(few, Streaming) and few == kernels._choose(x[:rows], qkv, None, True)
        assert kernels._choose(x[:rows], qkv, 480, False) == kernels._choose(x[:rows], qkv, None, False)
    assert kernels._choose(x, qkv[:1], None, True) is None
    assert kernels._choose(x.float(), [weight.float() for weight in qkv], None) is None
    assert kernels._choose(x[:, 4:], [weight[:, 4:] for weight in qkv], None) is None  # rows not aligned
    monkeypatch.setattr(kernels, "multiprocessors_of", lambda device: 78)
    assert kernels._choose(x, qkv, None, True) is None  # 48 columns for 19 groups
    monkeypatch.setattr(table, "compute_capability", lambda device: (10, 0))
    assert kernels._choose(x, qkv, None) is None


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "cols"), [(240, 256), (128, 256), (513, 256), (240, 200)])
def test_settings_that_do_not_fit_are_refused(monkeypatch, rows, cols, count):
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    x, weight = torch.zeros(rows, 256, dtype=torch.bfloat16), torch.zeros(cols, 256, dtype=torch.bfloat16)
    if (rows, cols, count) not in ((240, 256, 2), (240, 256, 3)):
        with pytest.raises(ValueError, match="linear_stack: Wide settings"):
            kernels.linear_stack(x, [weight] * count, [None] * count, settings=wide.STACK)
    with pytest.raises(ValueError, match="settings must not be Wide"):
        kernels.linear_swiglu(x, weight, weight, settings=wide.STACK)
    with pytest.raises(ValueError, match="linear: Wide settings"):
        kernels.linear(x, weight, settings=wide.STACK)


def test_settings_are_refused_elsewhere():
    x, weight = torch.zeros(240, 256, dtype=torch.bfloat16), torch.zeros(256, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Hopper"):
        kernels.linear_stack(x, [weight] * 3, [None] * 3, settings=Wide(4, 4))


@pytest.mark.parametrize("multiprocessors", [132, 78, 4])
@pytest.mark.parametrize("rows", [129, 256, 257, 480, 512])
def test_a_program_has_a_multiprocessor_and_work(monkeypatch, rows, multiprocessors):
    monkeypatch.setattr(wide, "multiprocessors_of", lambda device: multiprocessors)
    x, weight = torch.zeros(rows, 256, dtype=torch.bfloat16), torch.zeros(384, 256, dtype=torch.bfloat16)
    with recorded() as launches:
        wide.linear_hopper_many_rows(x, [weight] * 3, [384, 384, 0], [None] * 3, x.new_empty(rows, 768), wide.STACK)
    (launch,) = launches.values()
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=True))
    assert launch.grid == (given["groups"] * given["row_tiles"],)
    assert launch.grid[0] <= multiprocessors and 1 <= given["groups"] <= 6
    assert given["row_tiles"] * WIDE_TILE >= rows


@pytest.mark.parametrize("multiprocessors", [132, 12, 4])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("rows", "cols", "depth", "settings"),
    [
        (129, (384, 128, 128), 448, wide.STACK),  # more steps than slots
        (256, (256, 128, 0), 64, wide.STACK),  # fewer
        (300, (128, 256, 384), 200, Wide(2, 1)),  # the last step of K is cut off
        (512, (384, 128, 256), 320, Wide(4, 4)),
    ],
)
def test_indices_slots_and_barriers(monkeypatch, rows, cols, depth, settings, bias, multiprocessors):
    """The kernel's own Python, on whole numbers: all that is not layouts and fences."""
    monkeypatch.setattr(wide, "multiprocessors_of", lambda device: multiprocessors)
    torch.manual_seed(rows)
    x = torch.randint(-3, 4, (rows, depth)).to(torch.bfloat16)
    weights = [torch.randint(-2, 3, (max(n, 128), depth)).to(torch.bfloat16) for n in cols]
    biases = [torch.randint(-9, 10, (max(n, 128),)).to(torch.bfloat16) if bias else None for n in cols]
    out = x.new_full((rows, sum(cols)), float("nan"))
    run_launch(lambda: wide.linear_hopper_many_rows(x, weights, cols, biases, out, settings))
    given = [
        (weight[:n], one if one is None else one[:n]) for weight, one, n in zip(weights, biases, cols, strict=True)
    ]
    expected = [F.linear(x.double(), weight.double(), None if one is None else one.double()) for weight, one in given]
    assert torch.equal(out, torch.cat(expected, dim=-1).to(out.dtype))


def test_a_ring_fits_a_multiprocessor():
    tile = WIDE_TILE * wide._DEPTH.value * 2
    assert wide.STACK.stages * 2 * tile + WIDE_TILE * WIDE_TILE * 2 <= 226 * 1024
    assert 1 <= wide.STACK.prefetch <= wide.STACK.stages
    assert MAX_WIDE // WIDE_TILE <= 4


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("cols", "depth"), [(QKV, 4096), ((3072, 1024, 1024), 3072), ((640, 128, 256), 2056)], ids=str)
def test_rows(cols, depth, rows, dtype):
    """Of 2056 the last step of K is cut off."""
    x, weights, biases = matrices(rows, depth, *cols, dtype=dtype)
    for some in ([None] * 3, biases):
        out = run(x, weights, some)
        assert_close(out, x, weights, some)
        assert torch.equal(run(x, weights, some), out)


@on_hopper
@pytest.mark.parametrize("rows", [129, 255, 300, 480])
def test_the_bits_of_a_row_do_not_depend_on_its_tile(rows):
    """So two programs may store rows that the last tile shares with the one before it."""
    x, weights, _ = matrices(rows, 4096, *QKV)
    index = torch.arange(rows, device="cuda") % 7
    out = run(x[index], weights, [None] * 3)
    assert torch.equal(out, out[index])


@on_hopper
def test_launchers_take_it_by_themselves():
    x, weights, biases = matrices(480, 4096, *QKV)
    out = torch.cat(kernels.linear_stack(x.view(8, 60, -1), weights, [biases[0], None, biases[2]]), dim=-1)
    expected = run(x, weights, [biases[0], torch.zeros_like(biases[1]), biases[2]])
    assert torch.equal(out.view(480, -1), expected)
    pair = torch.cat(kernels.linear_stack(x, weights[:2], [None] * 2, settings=wide.STACK), dim=-1)
    assert_close(pair[:, : len(weights[0])], x, weights[:1], [None])
    assert_close(pair[:, len(weights[0]) :], x, weights[1:2], [None])


@on_hopper
def test_replays_in_a_graph_are_the_same():
    x, weights, _ = matrices(480, 4096, *QKV)
    inputs = [x.clone(), x.flip(0) * 0.5]
    expected = [run(values, weights, [None] * 3) for values in inputs]
    assert not torch.equal(*expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(x.clone(), weights, [None] * 3) for _ in range(3)]
    for count in range(100):
        x.copy_(inputs[count % 2])
        graph.replay()
        assert all(torch.equal(out, expected[count % 2]) for out in outs)
