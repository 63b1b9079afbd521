"""linear/wide.py against fp32, whatever the rows and however programs share the work, and who is given to it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eagle_triton.layers import swiglu
from eagle_triton.linear import products as kernels
from eagle_triton.linear import settings as table
from eagle_triton.linear.settings import MOST_WIDE, WIDE_TILE, Wide
from eagle_triton.runtime.launch import recorded

streamed, wide = kernels._streamed(), kernels._wide()
if wide is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)

HOPPER = torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
ROWS = [129, 130, 240, 255, 256, 257, 384, 480, 511, 512]
DTYPES = [torch.bfloat16, torch.float16]
QKV, GATE_UP = (4096, 1024, 1024), (14336, 14336)


def matrices(rows: int, depth: int, *cols: int, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(rows + depth)
    x = torch.randn(rows, depth, device="cuda").to(dtype)
    weights = [(torch.randn(n, depth, device="cuda") / depth**0.5).to(dtype) for n in cols]
    return x, weights, [torch.randn(n, device="cuda").to(dtype) for n in cols]


def run(x, weights, biases):
    """Two weights are gate and up. Written over NaN."""
    cols = [len(weight) for weight in weights]
    if len(cols) == 2:
        out = x.new_full((len(x), cols[0]), float("nan"))
        wide.linear_swiglu(x, *weights, out, wide.SWIGLU)
    else:
        out = x.new_full((len(x), sum(cols)), float("nan"))
        wide.linear(x, weights, cols, biases, out, wide.STACK)
    return out


def by_torch(x, weights, biases, silu_and_multiply):
    outs = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return silu_and_multiply(*outs) if len(outs) == 2 else torch.cat(outs, dim=-1)


def assert_close(out, x, weights, biases) -> None:
    """The error against fp32 is at most twice that of torch in the same dtype; zeros would fail."""
    wider = [[None if each is None else each.float() for each in some] for some in (weights, biases)]
    exact = by_torch(x.float(), *wider, lambda gate, up: F.silu(gate) * up)
    bound = 2 * (by_torch(x, weights, biases, swiglu).float() - exact).abs().max() + 1e-5
    assert (out.float() - exact).abs().max() <= bound
    assert exact.abs().max() > bound


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
        (256, (2048, 512, 512), 2048, None),  # streamed.py splits K
        (320, (2048, 512, 512), 2048, wide.STACK),
        (480, (4096, 1024), 4096, None),
        (480, (4096,), 4096, None),
        (480, (4096, 1024, 1040), 4096, None),
        (480, QKV, 1024, None),
        (240, GATE_UP, 4096, None),
        (384, GATE_UP, 4096, None),
        (480, GATE_UP, 4096, wide.SWIGLU),
        (420, GATE_UP, 4096, None),  # a fourth tile with few rows
        (129, (25600, 25600), 5120, None),
        (240, (25600, 25600), 5120, wide.SWIGLU),
        (480, (8192, 8192), 2048, None),
        (480, (14300, 14300), 4096, None),
    ],
)
def test_what_is_wide(rows, cols, depth, chosen):
    assert wide.settings_for(rows, cols, depth, len(cols) == 2) == chosen


def test_who_is_given_to_it(monkeypatch):
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(streamed, "_multiprocessors", lambda device: 132)
    x = torch.empty(480, 4096, dtype=torch.bfloat16)
    qkv, gate_up = ([torch.empty(n, 4096, dtype=torch.bfloat16) for n in cols] for cols in (QKV, GATE_UP))
    assert kernels._choose(x, qkv, None) == wide.STACK
    assert kernels._choose(x, gate_up, None, fused=True) == wide.SWIGLU
    assert kernels._choose(x.view(8, 60, 4096), qkv, None, True) == wide.STACK
    assert kernels._choose(x[:240], qkv, 480, True) == wide.STACK  # by the rows that there are
    assert kernels._choose(x[:80], qkv, 480, True) is None
    assert kernels._choose(x[:20], qkv, 240, True).splits == 1
    assert kernels._choose(x, qkv[:1], None, True) is None
    assert kernels._choose(x.float(), [weight.float() for weight in qkv], None) is None
    assert kernels._choose(x[:, 4:], [weight[:, 4:] for weight in qkv], None) is None  # rows not aligned
    monkeypatch.setattr(streamed, "_multiprocessors", lambda device: 78)
    assert kernels._choose(x, qkv, None, True) is None  # 48 columns for 19 groups
    monkeypatch.setattr(table, "compute_capability", lambda device: (10, 0))
    assert kernels._choose(x, qkv, None) is None


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "cols"), [(240, 256), (128, 256), (513, 256), (240, 200)])
def test_settings_that_do_not_fit_are_refused(monkeypatch, rows, cols, count):
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    x, weight = torch.zeros(rows, 256, dtype=torch.bfloat16), torch.zeros(cols, 256, dtype=torch.bfloat16)
    if (rows, cols, count) not in ((240, 256, 2), (240, 256, 3)):
        with pytest.raises(ValueError, match="linear_stack: wide products"):
            kernels.linear_stack(x, [weight] * count, [None] * count, settings=wide.STACK)
    if (rows, cols) != (240, 256):
        with pytest.raises(ValueError, match="linear_swiglu: wide products"):
            kernels.linear_swiglu(x, weight, weight, settings=wide.SWIGLU)
    with pytest.raises(ValueError, match="linear: wide products"):
        kernels.linear(x, weight, settings=wide.STACK)


def test_settings_are_refused_elsewhere():
    x, weight = torch.zeros(240, 256, dtype=torch.bfloat16), torch.zeros(256, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Hopper"):
        kernels.linear_swiglu(x, weight, weight, settings=Wide(4, 4))


@pytest.mark.parametrize("multiprocessors", [132, 78, 4])
@pytest.mark.parametrize("rows", [129, 256, 257, 480, 512])
def test_a_program_has_a_multiprocessor_and_work(monkeypatch, rows, multiprocessors):
    """Those that wait for each other must all run."""
    monkeypatch.setattr(wide, "_multiprocessors", lambda device: multiprocessors)
    x, weight = torch.zeros(rows, 256, dtype=torch.bfloat16), torch.zeros(384, 256, dtype=torch.bfloat16)
    with recorded() as launches:
        wide.linear_swiglu(x, weight, weight, x.new_empty(rows, 384), wide.SWIGLU)
        wide.linear(x, [weight] * 3, [384, 384, 0], [None] * 3, x.new_empty(rows, 768), wide.STACK)
    for launch, work in zip(launches.values(), (3 * 4, 6), strict=True):  # steps of K of all columns, or columns
        given = dict(zip(launch.kernel.arg_names, launch.args, strict=True))
        assert launch.grid == (given["groups"] * given["row_tiles"],)
        assert launch.grid[0] <= multiprocessors and 1 <= given["groups"] <= work
        assert given["row_tiles"] * WIDE_TILE >= rows


def test_rings_fit_a_multiprocessor():
    tile = WIDE_TILE * wide._DEPTH.value * 2
    for settings, tiles in ((wide.STACK, 2), (wide.SWIGLU, 3)):
        assert settings.stages * tiles * tile + WIDE_TILE * WIDE_TILE * 2 <= 226 * 1024
        assert 1 <= settings.prefetch <= settings.stages
    assert MOST_WIDE // WIDE_TILE <= 4


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("cols", "depth"),
    [(QKV, 4096), (GATE_UP, 4096), ((8192, 8192), 2048), ((384, 384), 2056), ((640, 128, 256), 2056)],
    ids=str,
)
def test_rows(cols, depth, rows, dtype):
    """(384, 384) has three columns, in each of which many programs have steps; its last step of K is cut off."""
    x, weights, biases = matrices(rows, depth, *cols, dtype=dtype)
    for some in ([None] * len(cols), biases) if len(cols) == 3 else ([None] * 2,):
        out = run(x, weights, some)
        assert_close(out, x, weights, some)
        assert torch.equal(run(x, weights, some), out)


@on_hopper
@pytest.mark.parametrize("rows", [129, 255, 300, 480])
@pytest.mark.parametrize("cols", [QKV, GATE_UP, (384, 384)], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_its_tile(cols, rows):
    """So two programs may store rows that the last tile shares with the one before it."""
    x, weights, _ = matrices(rows, 4096, *cols)
    index = torch.arange(rows, device="cuda") % 7
    out = run(x[index], weights, [None] * len(cols))
    assert torch.equal(out, out[index])


@on_hopper
@pytest.mark.parametrize("cols", [QKV, GATE_UP], ids=str)
def test_launchers_take_it_by_themselves(cols):
    x, weights, biases = matrices(480, 4096, *cols)
    if len(cols) == 2:
        out = kernels.linear_swiglu(x.view(8, 60, -1), *weights)
        expected = run(x, weights, biases)
    else:
        out = torch.cat(kernels.linear_stack(x.view(8, 60, -1), weights, [biases[0], None, biases[2]]), dim=-1)
        expected = run(x, weights, [biases[0], torch.zeros_like(biases[1]), biases[2]])
    assert torch.equal(out.view(480, -1), expected)
    pair = torch.cat(kernels.linear_stack(x, weights[:2], [None] * 2, settings=wide.STACK), dim=-1)
    assert_close(pair[:, : len(weights[0])], x, weights[:1], [None])
    assert_close(pair[:, len(weights[0]) :], x, weights[1:2], [None])


@on_hopper
@pytest.mark.parametrize("cols", [QKV, GATE_UP, (384, 384)], ids=str)
def test_replays_in_a_graph_are_the_same(cols):
    """Also where sums and flags of one launch lie in memory that another one has written."""
    x, weights, _ = matrices(480, 4096, *cols)
    biases = [None] * len(cols)
    inputs = [x.clone(), x.flip(0) * 0.5]
    expected = [run(values, weights, biases) for values in inputs]
    assert not torch.equal(*expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = []
        for _ in range(3):
            outs.append(run(x.clone(), weights, biases))
            torch.full((1 << 22,), float("nan"), device="cuda")
    for count in range(100):
        x.copy_(inputs[count % 2])
        graph.replay()
        assert all(torch.equal(out, expected[count % 2]) for out in outs)


@on_hopper
def test_streams_do_not_disturb_each_other():
    x, weights, _ = matrices(480, 4096, *GATE_UP)
    expected = run(x, weights, [None] * 2)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(run(x, weights, [None] * 2))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
