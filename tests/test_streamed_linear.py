"""streamed_linear.py gives the bits of linear.py's kernels, and kernels that start early read nothing too early."""

from __future__ import annotations

import pytest
import torch

from eagle_triton import linear as kernels
from eagle_triton import overlap
from eagle_triton.layers import rms_norm
from eagle_triton.linear import Settings

streamed = pytest.importorskip("eagle_triton.streamed_linear")

HOPPER = torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def matrices(rows: int, depth: int, *cols: int, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(rows + depth)
    x = torch.randn(rows, depth, device="cuda").to(dtype)
    return x, [(torch.randn(n, depth, device="cuda") / depth**0.5).to(dtype) for n in cols]


@pytest.mark.parametrize("key", streamed._HOPPER, ids=str)
def test_measured_settings_fit_a_multiprocessor(key):
    rows, cols, depth = key
    swap, fused = rows == 16, len(cols) == 2
    use = streamed.settings_for(rows, cols, depth, 64, 128, 1, swap, fused)
    tile = use.block_k * 2
    shared = tile * (use.w_stages * use.block_n * (1 + fused) + use.x_stages * streamed._block_m(swap, rows))
    assert shared <= 225 * 1024
    for programs in (1, 10_000):
        assert 1 <= streamed._ahead(use, 1 + fused, programs) <= use.w_stages


@pytest.mark.parametrize(
    ("rows", "block_n", "block_k", "swap", "possible"),
    [
        (16, 64, 128, True, True),
        (17, 64, 128, True, False),
        (16, 32, 128, True, False),  # the tensor cores' tiles are 64 high
        (17, 32, 64, False, True),
        (64, 128, 64, False, True),
        (65, 64, 128, False, False),
        (20, 64, 32, False, False),  # half a swizzled row
    ],
)
def test_what_can_be_streamed(rows, block_n, block_k, swap, possible):
    use = streamed.settings_for(rows, (512,), 512, block_n, block_k, 2, swap)
    assert (use is not None) == possible
    if possible:
        assert use[:4] == (block_n, block_k, 2, swap)


def test_an_old_triton_streams_nothing(monkeypatch):
    monkeypatch.setattr(kernels.triton, "__version__", "3.5.1")
    assert kernels._streaming.__wrapped__() is None
    monkeypatch.setattr(kernels.triton, "__version__", "3.10.0.post27")
    assert kernels._streaming.__wrapped__() is streamed


def test_without_gluon_or_hopper_products_are_launched_as_ever(monkeypatch):
    x, weight = torch.zeros(4, 1024, dtype=torch.bfloat16), torch.zeros(64, 1024, dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "_compute_capability", lambda device: (9, 0))
    assert isinstance(kernels._choose(x, (weight,), None, deferred=True), streamed.Streaming)
    assert isinstance(kernels._choose(x, (weight,), None), Settings)  # its last program adds up the splits
    assert isinstance(kernels._choose(x, (weight,), None, True, x), Settings)  # a residual
    assert isinstance(kernels._choose(x[:, 4:], (weight[:, 4:],), None, True), Settings)  # rows not aligned
    assert kernels._choose(x[:1].expand(80, -1).contiguous(), (weight,), None, True) is None  # cuBLAS
    monkeypatch.setattr(kernels, "_streaming", lambda: None)
    assert isinstance(kernels._choose(x, (weight,), None, deferred=True), Settings)
    monkeypatch.undo()
    assert isinstance(kernels._choose(x, (weight,), None, deferred=True), Settings)  # a CPU


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 16, 17, 30, 40, 60, 64])
@pytest.mark.parametrize("depth", [64, 200, 1000, 4096])
def test_bits_of_linear(rows, depth, dtype):
    x, weights = matrices(rows, depth, 520, 200, 136, dtype=dtype)
    biases = [torch.randn(len(weight), device="cuda", dtype=dtype) for weight in weights]
    swap = rows <= 16
    for splits in (1, 2, 4):
        plain = Settings(64, 64, splits, 4, 3, swap)
        stream = streamed.settings_for(rows, (520, 200, 136), depth, 64, 64, splits, swap)
        for count in (1, 2, 3):
            for use_biases in (biases, [None] * 3):
                results = [
                    kernels.linear_stack(x, weights[:count], use_biases[:count], deferred=splits > 1, settings=use)
                    for use in (plain, stream)
                ]
                for expected, out in zip(*results, strict=True):
                    same = torch.equal(out.sums, expected.sums) if splits > 1 else torch.equal(out, expected)
                    assert same, f"{splits} splits of {count} weights"
                    assert (out.total() if splits > 1 else out).float().abs().max() > 0.5
    expected = kernels.linear_swiglu(x, weights[0], weights[0].flip(0), settings=Settings(64, 64, 1, 4, 3, swap))
    stream = streamed.settings_for(rows, (520, 520), depth, 64, 64, 1, swap, fused=True)
    assert torch.equal(kernels.linear_swiglu(x, weights[0], weights[0].flip(0), settings=stream), expected)


@on_hopper
@pytest.mark.parametrize("rows", [65, 80, 128])
@pytest.mark.parametrize("key", streamed._WIDE, ids=str)
def test_more_rows(key, rows):
    cols, depth = key
    x, weights = matrices(rows, depth, *cols)
    assert isinstance(kernels._choose(x, weights, rows, deferred=True), streamed.Streaming)
    outs = kernels.linear_stack(x, weights, [None] * len(weights), deferred=True, planned_rows=rows)
    for out, weight in zip(outs, weights, strict=True):
        exact = x.double() @ weight.double().T
        assert (out.sums.sum(0) - exact).abs().max() < 1e-3 < exact.abs().max()


@on_hopper
@pytest.mark.parametrize("rows", [10, 60])
def test_a_chain_of_early_starts_reads_nothing_too_early(rows):
    x, (down, o) = matrices(rows, 4096, 4096, 4096)
    _, (gate, up) = matrices(rows, 4096, 8192, 8192)
    _, (back,) = matrices(rows, 8192, 4096)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def chain(pause=lambda: None) -> torch.Tensor:
        state = residual = x
        for _ in range(3):
            for first in (o, down):
                update = kernels.linear(state, first, deferred=True)
                pause()
                state, residual = rms_norm(update, weight, 1e-5, residual)
                pause()
            inner = kernels.linear_swiglu(state, gate, up)
            pause()
            state, residual = rms_norm(kernels.linear(inner, back, deferred=True), weight, 1e-5, residual)
            pause()
        return state

    assert isinstance(kernels._choose(x, (o,), None, deferred=True), streamed.Streaming)
    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@on_hopper
def test_kernels_ask_for_the_largest_shared_memory():
    x, (weight,) = matrices(8, 512, 512)
    before = set(overlap._carved)
    overlap._carved.clear()
    rms_norm(x, weight[0], 1e-5)
    kernels.linear(x, weight, deferred=True)
    assert len(overlap._carved) == 2
    overlap._carved.update(before)
