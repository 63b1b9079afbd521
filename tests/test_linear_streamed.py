"""ops/linear/hopper.py gives the bits of few_rows.py's kernels, and kernels that start early read nothing too early."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch
import triton

from eagle_triton import EaModel, optimize_eagle_with_triton
from eagle_triton.engine import prefill
from eagle_triton.engine.prompt_queue import SIZES
from eagle_triton.operands.layers import ACTIVATIONS
from eagle_triton.ops.layers import add_rms_norm, rms_norm
from eagle_triton.ops.linear import dispatch as kernels
from eagle_triton.ops.linear import settings as table
from eagle_triton.ops.linear.settings import Settings
from eagle_triton.runtime import fallback, gpu, overlap
from tests.rounding import on_hopper

streamed = kernels._streamed()
if streamed is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)


def matrices(rows: int, depth: int, *cols: int, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(rows + depth)
    x = torch.randn(rows, depth, device="cuda").to(dtype)
    return x, [(torch.randn(n, depth, device="cuda") / depth**0.5).to(dtype) for n in cols]


@pytest.mark.parametrize("key", streamed._HOPPER, ids=str)
def test_measured_settings_fit_a_multiprocessor(key):
    rows, cols, depth = key
    fused = len(cols) == 2
    use = streamed.settings_for(rows, cols, depth, 64, 128, 1, fused)
    tile = use.block_k * 2
    shared = tile * (use.w_stages * use.block_n * (1 + fused) + use.x_stages * streamed._block_m(use.swap, rows))
    assert shared <= 225 * 1024
    assert 1 <= streamed._prefetch_stages(use, 1 + fused, rows, 1, 132) <= use.w_stages
    assert streamed._prefetch_stages(use, 1 + fused, rows, 10_000, 132) == use.w_stages  # they start when others end


@pytest.mark.parametrize("key", streamed._HOPPER, ids=str)
def test_splits_of_k_begin_where_those_of_linear_do(monkeypatch, key):
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    rows, cols, depth = key
    plain = table.launch_settings(torch.device("cuda"), torch.bfloat16, rows, cols, depth, len(cols) == 2)
    use = streamed.settings_for(rows, cols, depth, *plain[:3], len(cols) == 2)
    assert (use.splits, use.swap) == (plain.splits, rows <= 32)

    def length(block_k: int) -> int:
        return triton.cdiv(triton.cdiv(depth, block_k), plain.splits) * block_k

    assert length(use.block_k) == length(plain.block_k)


@pytest.mark.parametrize(
    ("rows", "block_n", "block_k", "swap"),
    [
        (16, 64, 128, True),
        (32, 64, 128, True),
        (16, 32, 128, None),  # the tensor cores' tiles are 64 high
        (33, 32, 64, False),
        (64, 128, 64, False),
        (65, 64, 128, None),
        (20, 64, 32, None),  # half a swizzled row
    ],
)
def test_what_can_be_streamed(rows, block_n, block_k, swap):
    use = streamed.settings_for(rows, (512,), 512, block_n, block_k, 2)
    assert (None if use is None else use[:4]) == (None if swap is None else (block_n, block_k, 2, swap))


@pytest.mark.parametrize(
    "cols", [(4096, 1024, 1024), (14336, 14336), (4096,), (2048, 512, 512), (8192, 1024, 1024), (8192, 8192)], ids=str
)
def test_prompts_of_every_length_launch_products_that_were_rehearsed(monkeypatch, cols):
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    for module in (kernels, streamed):
        monkeypatch.setattr(module, "multiprocessors_of", lambda device: 132)
    weights = [torch.empty(n, 4096, dtype=torch.bfloat16) for n in cols]

    def launched(rows: int):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16)
        use = kernels._choose(x, weights, None, True, fused=len(cols) == 2)
        return use, isinstance(use, streamed.Streaming) and streamed._block_m(use.swap, rows)

    rehearsed = {launched(forward.rows * forward.size) for forward in prefill._REHEARSED}
    read = {launched(rows * size) for rows, sizes in SIZES.items() for size in sizes}
    assert read <= rehearsed and len(read) > 1


@pytest.mark.parametrize(
    ("rows", "cols", "depth", "splits", "block_k"),
    [
        (1, (4096,), 12288, 2, 256),
        (16, (4096,), 12288, 2, 256),
        (17, (4096,), 12288, 2, 128),
        (16, (4096,), 3072, 2, 128),  # 1536 columns of each split
        (16, (4096,), 12416, 2, 128),  # splits of 256 would begin elsewhere
        (16, (16384,), 12288, 1, 128),  # two programs to a multiprocessor
    ],
)
def test_few_rows_read_more_of_long_rows_at_a_time(rows, cols, depth, splits, block_k):
    assert streamed.settings_for(rows, cols, depth, 64, 128, splits).block_k == block_k
    assert streamed.settings_for(rows, cols, depth, 128, 128, splits).w_stages > 2  # 64 KiB each if they were 256 wide


def test_no_more_stages_than_steps():
    use = streamed.settings_for(8, (2048, 512, 512), 2048, 64, 128, 4)
    assert (use.w_stages, use.x_stages) == (4, 4)
    assert streamed.settings_for(8, (8192, 8192), 2048, 64, 128, 1, fused=True).w_stages == 4  # room for one program


@pytest.mark.parametrize(
    ("rows", "cols", "depth", "expected"),
    [
        (64, (4096, 1024, 1024), 4096, None),
        (65, (4096, 1024, 1024), 4096, (64, 64, 2)),
        (129, (4096, 1024, 1024), 4096, (64, 64, 1)),
        (256, (4096, 1024, 1024), 4096, (64, 64, 1)),
        (257, (4096, 1024, 1024), 4096, None),
        (256, (2048, 512, 512), 2048, (64, 64, 2)),
        (128, (8192, 1024, 1024), 5120, (64, 64, 1)),
        (256, (8192, 1024, 1024), 5120, None),  # too many
        (128, (8192, 8192), 2048, (64, 64, 1)),
        (129, (8192, 8192), 2048, None),
        (80, (2048,), 2048, None),
        (80, (4096,), 4096, (128, 64, 4)),
        (120, (16384, 16384), 4096, (128, 64, 1)),
    ],
)
def test_what_is_streamed_of_many_rows(rows, cols, depth, expected):
    use = streamed.many_rows_settings(rows, cols, depth, len(cols) == 2)
    assert (None if use is None else use[:3]) == expected
    if use is not None:
        assert use.swap == (rows > 128)


@pytest.mark.parametrize(
    ("device", "capability", "version", "expected"),
    [
        ("cuda", (9, 0), "3.5.1", True),
        ("cuda", (10, 3), "3.7.1", True),
        ("cuda", (9, 0), "3.4.0", False),  # whose own waits do not compile
        ("cuda", (8, 0), "3.7.1", False),
        ("cuda", (12, 0), "3.7.1", False),  # never tried
        ("cpu", (9, 0), "3.7.1", False),
    ],
)
def test_who_starts_early(monkeypatch, device, capability, version, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(overlap, "compute_capability", gpu.compute_capability.__wrapped__)
    monkeypatch.setattr(overlap.triton, "__version__", version)
    monkeypatch.setattr(overlap.triton, "JITFunction", type(overlap.await_inputs))  # the interpreter's own, on a CPU
    can = overlap.can_overlap.__wrapped__
    assert can(torch.device(device)) == expected
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not can(torch.device(device))


def test_an_old_triton_streams_nothing_and_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(fallback.log, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(fallback, "_gluon_modules", {})
    monkeypatch.setattr("triton.__version__", "3.5.1")
    assert kernels._streamed() is None
    assert "this is 3.5.1" in said[0]
    monkeypatch.setattr(fallback, "_gluon_modules", {})
    monkeypatch.setattr("triton.__version__", "3.10.0.post27")
    assert kernels._streamed() is streamed


def test_without_gluon_or_hopper_products_are_launched_as_ever(monkeypatch):
    x, weight = torch.zeros(4, 1024, dtype=torch.bfloat16), torch.zeros(64, 1024, dtype=torch.bfloat16)
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    for module in (kernels, streamed):
        monkeypatch.setattr(module, "multiprocessors_of", lambda device: 132)
    assert isinstance(kernels._choose(x, (weight,), None, keep_splits=True), streamed.Streaming)
    assert isinstance(kernels._choose(x, (weight,), None), Settings)  # its last program adds up the splits
    assert isinstance(kernels._choose(x, (weight,), None, True, x), Settings)  # a residual
    assert isinstance(kernels._choose(x[:, 4:], (weight[:, 4:],), None, True), Settings)  # rows not aligned
    assert kernels._choose(x[:1].expand(80, -1).contiguous(), (weight,), None, True) is None  # cuBLAS
    assert isinstance(kernels._choose(x[:1].expand(4, -1), (weight,), None, True), Settings)  # rows in one place
    stack = torch.zeros(80, 1024, dtype=torch.bfloat16), (weight, weight, weight)
    assert kernels._choose(*stack, None, True).splits == 4
    assert kernels._choose(*stack, None) is None  # nobody adds up the splits
    assert kernels._choose(x, stack[1], 80, True) == kernels._choose(x, stack[1], len(x), True)  # no matter of how many
    assert isinstance(kernels._choose(x[0], (weight,), None, keep_splits=True), streamed.Streaming)  # one row
    copied = torch.zeros(2, 3, 104, dtype=torch.bfloat16)[:, :2, :100]  # as rows of 100: not aligned
    assert isinstance(kernels._choose(copied, (weight[:, :100],), None, keep_splits=True), Settings)
    many = torch.zeros(40, 1024, dtype=torch.bfloat16)
    assert not kernels._choose(many, (weight,), 10, keep_splits=True).swap  # more rows than tune_for_rows
    monkeypatch.setattr(kernels, "_streamed", lambda: None)
    assert isinstance(kernels._choose(x, (weight,), None, keep_splits=True), Settings)
    monkeypatch.undo()
    assert isinstance(kernels._choose(x, (weight,), None, keep_splits=True), Settings)  # a CPU


@pytest.mark.parametrize(
    ("rows", "settings", "options"),
    [
        (8, streamed.Streaming(64, 64, 4, True, 2, 2), {}),  # who adds up the splits?
        (8, streamed.Streaming(64, 64, 1, True, 2, 2), {"residual": torch.zeros(8, 64, dtype=torch.bfloat16)}),
        (257, streamed.Streaming(64, 64, 1, False, 2, 2), {}),
    ],
)
def test_streamed_settings_that_do_not_fit_are_refused(monkeypatch, rows, settings, options):
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    x, weight = torch.zeros(rows, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Streaming settings"):
        kernels.linear(x, weight, settings=settings, **options)


def test_streamed_settings_are_refused_elsewhere():
    x, weight = torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    settings = streamed.Streaming(64, 64, 1, True, 2, 2)
    with pytest.raises(ValueError, match="Hopper"):
        kernels.linear(x, weight, settings=settings)
    with pytest.raises(ValueError, match="Hopper"):
        kernels.linear_swiglu(x, weight, weight, settings=settings)


@on_hopper
@pytest.mark.parametrize("key", streamed._HOPPER, ids=str)
def test_production_settings_give_the_bits_of_linear(key):
    most, cols, depth = key
    for rows, tune_for_rows in [
        (1, most),
        (most - 1, most),
        (most, most),
        (1, 16),
        (16, 16),
        (17, 33),
        (24, 60),
        (33, 60),
    ]:
        if max(rows, tune_for_rows) > most:
            continue
        x, weights = matrices(rows, depth, *cols)
        fused, keep_splits = len(cols) == 2, max(cols) <= 14336
        plain = table.launch_settings(x.device, x.dtype, tune_for_rows, cols, depth, fused)
        plain = plain if keep_splits else plain._replace(splits=1)
        if fused:
            pair = [
                kernels.linear_swiglu(x, *weights, tune_for_rows=tune_for_rows, settings=use) for use in (plain, None)
            ]
        else:
            biases, options = [None] * len(weights), {"keep_splits": keep_splits, "tune_for_rows": tune_for_rows}
            both = [kernels.linear_stack(x, weights, biases, settings=use, **options) for use in (plain, None)]
            pair = [torch.cat([out.sums if keep_splits else out for out in outs], -1) for outs in both]
        assert isinstance(kernels._choose(x, weights, tune_for_rows, keep_splits, fused=fused), streamed.Streaming)
        assert torch.equal(*pair)
        assert pair[0].float().abs().max() > 0.1


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 16, 17, 30, 40, 60, 64])
@pytest.mark.parametrize("depth", [64, 200, 1000, 4096])
def test_bits_of_linear(rows, depth, dtype):
    x, weights = matrices(rows, depth, 520, 200, 136, 32, dtype=dtype)
    biases = [torch.randn(len(weight), device="cuda", dtype=dtype) for weight in weights]
    swap = rows <= 16
    for splits in (1, 2, 4):
        plain = Settings(64, 64, splits, 4, 3, swap)
        stream = streamed.settings_for(rows, (520, 200, 136), depth, 64, 64, splits)
        for count in (1, 2, 3, 4):
            for use_biases in (biases, [None] * 4):
                results = [
                    kernels.linear_stack(x, weights[:count], use_biases[:count], keep_splits=splits > 1, settings=use)
                    for use in (plain, stream)
                ]
                for expected, out in zip(*results, strict=True):
                    same = torch.equal(out.sums, expected.sums) if splits > 1 else torch.equal(out, expected)
                    assert same, f"{splits} splits of {count} weights"
                    assert (out.total() if splits > 1 else out).float().abs().max() > 0.5
    both = Settings(64, 64, 1, 4, 3, swap), streamed.settings_for(rows, (520, 520), depth, 64, 64, 1, fused=True)
    for activation in ACTIVATIONS:
        gate, up = weights[0], weights[0].flip(0)
        same = [kernels.linear_swiglu(x, gate, up, activation=activation, settings=use) for use in both]
        assert torch.equal(*same)


@on_hopper
@pytest.mark.parametrize("rows", [65, 80, 128, 129, 200, 256])
@pytest.mark.parametrize(
    ("cols", "depth"),
    [*{key[1:] for key in streamed._MANY_ROWS}, ((2048, 512, 520), 2048), ((1000, 1000), 1000)],
    ids=str,
)
def test_more_rows(monkeypatch, cols, depth, rows):
    """Every product of more than one weight that is streamed; for a few of its rows others are chosen."""
    monkeypatch.setattr(kernels._wide(), "settings_for", lambda *_: None)
    fused = len(cols) == 2
    x, weights = matrices(rows, depth, *cols)
    if streamed.many_rows_settings(rows, cols, depth, fused) is None:
        assert kernels._choose(x, weights, rows, True, fused=fused) is None
        return
    assert isinstance(kernels._choose(x, weights, rows, True, fused=fused), streamed.Streaming)
    few = kernels._choose(x[:20], weights, rows, True, fused=fused)
    assert few == kernels._choose(x[:20], weights, 20, True, fused=fused)
    exact = [x.double() @ weight.double().T for weight in weights]
    for _ in range(5):
        if fused:
            outs = [kernels.linear_swiglu(x, *weights)]
            gate, up = (each.to(x.dtype).double() for each in exact)
            exact_outs, bound = [torch.nn.functional.silu(gate).to(x.dtype).double() * up], 2**-7
        else:
            kept = {"keep_splits": True, "tune_for_rows": rows}
            outs = [out.sums for out in kernels.linear_stack(x, weights, [None] * len(weights), **kept)]
            exact_outs, bound = exact, 2**-14
        for out, expected in zip(outs, exact_outs, strict=True):
            total = out.double() if fused else out.double().sum(0)
            assert (total - expected).abs().max() <= bound * expected.abs().max()


@on_hopper
@pytest.mark.parametrize("rows", [10, 60])
def test_a_chain_of_early_starts_reads_nothing_too_early(rows):
    x, (down, o) = matrices(rows, 4096, 4096, 4096)
    _, (gate, up) = matrices(rows, 4096, 8192, 8192)
    _, (back,) = matrices(rows, 8192, 4096)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def chain(pause=lambda: None) -> torch.Tensor:
        state = residual = x.clone()
        for _ in range(3):
            for first in (o, down):
                update = kernels.linear(state, first, keep_splits=True)
                pause()
                state, residual = add_rms_norm(update, residual, weight, 1e-5)
                pause()
            inner = kernels.linear_swiglu(state, gate, up)
            pause()
            state, residual = add_rms_norm(kernels.linear(inner, back, keep_splits=True), residual, weight, 1e-5)
            pause()
        return state

    assert isinstance(kernels._choose(x, (o,), None, keep_splits=True), streamed.Streaming)
    inputs = [x.clone(), x.flip(0) * 0.5, torch.full_like(x, float("nan"))]  # what lies there from the replay before
    expected = []
    for values in inputs:
        x.copy_(values)
        expected.append(chain(torch.cuda.synchronize).clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for count in range(60):
        x.copy_(inputs[count % 3])
        graph.replay()
        assert torch.equal(out.nan_to_num(9.0), expected[count % 3].nan_to_num(9.0))
    assert not torch.equal(*expected[:2])


@on_hopper
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=str)
def test_generation_is_the_same_without_early_starts(monkeypatch, options):
    model = EaModel.from_pretrained("demo", dtype=torch.bfloat16).to("cuda")
    prompt = torch.arange(5, 45, device="cuda")[None]

    def generate() -> torch.Tensor:
        _, originals = optimize_eagle_with_triton(model)
        with originals:
            return model.generate(prompt, max_new_tokens=64, **options)

    early = generate()
    for name, module in list(sys.modules.items()):
        if name.startswith("eagle_triton") and hasattr(module, "can_overlap"):
            monkeypatch.setattr(module, "can_overlap", lambda device: False)
    assert torch.equal(generate(), early)


@on_hopper
def test_kernels_ask_for_the_largest_carveout(monkeypatch):
    x, (weight,) = matrices(8, 512, 512)
    answers = {}
    monkeypatch.setattr(overlap, "_carveouts", answers)
    rms_norm(x, weight[0], 1e-5)
    kernels.linear(x, weight, keep_splits=True)
    assert list(answers.values()) == [0, 0]
    preferred = ctypes.c_int()
    for function in answers:
        driver, place = overlap._driver(), ctypes.byref(preferred)
        assert driver.cuFuncGetAttribute(place, overlap._SHARED_MEMORY_CARVEOUT, ctypes.c_void_p(function)) == 0
        assert preferred.value == 100
