"""linear/streamed_rotary.py against the product and the rotary embedding apart, and who is given to it."""

from __future__ import annotations

import pytest
import torch

from eagle_triton.attention import tree_attention
from eagle_triton.layers import rms_norm
from eagle_triton.linear import products as kernels
from eagle_triton.linear import settings as table
from eagle_triton.linear.products import linear_rotary_append
from eagle_triton.reference import linear as reference
from eagle_triton.runtime.launch import recorded
from tests.gluon_by_python import run as run_by_python

streamed = kernels._streamed_rotary()
if streamed is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)

HOPPER = torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
USE = streamed.RotaryStreaming(128, 4, 3)
PAGE = 64


def operands(batch, nodes, heads, kv_heads, dim, depth, *, paged, bias=False, dtype=torch.bfloat16, device="cpu"):
    """Of linear_rotary_append, from x to table: whole numbers whose sums are exact, three pages for each sequence, or
    one whole of 192 rows, found by a table (paged: 0) or in turn (None)."""
    torch.manual_seed(batch * 100 + nodes)

    def numbers(*shape):
        return torch.randint(-2, 3, shape, device=device).to(dtype)

    x = numbers(batch, nodes, depth)
    rows = [n * dim for n in (heads, kv_heads, kv_heads)]
    weights = [numbers(n, depth + 8)[:, :depth] for n in rows]
    biases = [numbers(2 * n)[::2] if bias else None for n in rows]
    each = 3 if paged else 1
    pages = batch if paged is None else each * batch + 1
    cache = torch.full((2, pages, kv_heads, 3 * PAGE // each, dim), 9.0, device=device).to(dtype)
    first_row = torch.randint(0, 2 * PAGE, (batch,), dtype=torch.int32, device=device)
    depths = torch.randint(0, 9, (batch, nodes), dtype=torch.int32, device=device)
    inv_freq = 10_000.0 ** -(torch.arange(0, dim, 2, device=device) / dim)
    tables = torch.randperm(each * batch, device=device).view(batch, each).int() + 1 if paged is not None else None
    return (x, weights, biases, cache, first_row, depths, inv_freq), tables


def both(given, **options):
    """(q, cache) by torch in double, and the operands with a cache of their own."""
    x, weights, biases, cache, *rest = given
    wide = cache.double()
    wider = [None if bias is None else bias.double() for bias in biases]
    q = reference.linear_rotary_append(
        x.double(), [weight.double() for weight in weights], wider, wide, *rest, **options
    )
    return (q, wide), (x, weights, biases, cache.clone(), *rest)


@pytest.mark.parametrize("settings", [USE, streamed.RotaryStreaming(64, 2, 2), streamed.RotaryStreaming(256, 3, 5)])
@pytest.mark.parametrize(
    ("batch", "nodes", "heads", "kv_heads", "dim", "depth", "options"),
    [
        (1, 1, 4, 2, 128, 512, dict(paged=True)),  # plain decoding
        (1, 60, 4, 1, 64, 640, dict(paged=True, bias=True)),  # a tree
        (3, 7, 2, 1, 128, 200, dict(paged=True, bias=True)),  # the last step of K is cut off
        (2, 16, 2, 2, 64, 256, dict(paged=None)),
        (3, 7, 2, 1, 64, 256, dict(paged=0, bias=True)),  # fewer rows than the tile has
        (17, 1, 1, 1, 64, 128, dict(paged=0)),
        (4, 16, 1, 1, 256, 128, dict(paged=True)),
    ],
)
def test_indices_slots_and_barriers(batch, nodes, heads, kv_heads, dim, depth, options, settings):
    """The kernel's own Python: all that is not layouts, fences and rounding."""
    given, tables = operands(batch, nodes, heads, kv_heads, dim, depth, **options)
    for more in (dict(skip=0), dict(skip=5, attention_scaling=1.5)):
        given = (*given[:5], None if more["skip"] else given[5], given[6])
        (expected, cache), mine = both(given, table=tables, **more)
        x, weights, biases, written, first_row, depths, inv_freq = mine
        out = torch.full((batch, nodes, heads, dim), float("nan")).to(x.dtype)
        arguments = (x.flatten(0, 1), weights, biases, written, first_row, depths, inv_freq, out)
        with recorded() as launches:
            streamed.linear_rotary(*arguments, more["skip"], more.get("attention_scaling", 1.0), tables, settings)
        (launch,) = launches.values()
        run_by_python(launch.kernel, launch.grid, dict(zip(launch.kernel.arg_names, launch.args, strict=True)))
        for found, wanted in ((out, expected), (written, cache)):
            assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=0.05)
        assert expected.abs().max() > 10 and (written != 9).sum() > 0.9 * 2 * kv_heads * dim * batch * nodes


def test_rows_behind_the_capacity_are_not_written():
    given, tables = operands(1, 8, 2, 1, 64, 128, paged=True)
    given[4].fill_(3 * PAGE - 3)
    (_, cache), mine = both(given, table=tables)
    out = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with recorded() as launches:
        streamed.linear_rotary(mine[0].flatten(0, 1), *mine[1:], out, 0, 1.0, tables, USE)
    (launch,) = launches.values()
    run_by_python(launch.kernel, launch.grid, dict(zip(launch.kernel.arg_names, launch.args, strict=True)))
    assert torch.allclose(mine[3].double(), cache, rtol=2**-8, atol=0.05)
    assert (mine[3] != 9).any(-1).any(2).flatten().sum() == 2 * 3


@pytest.fixture
def hopper(monkeypatch):
    """Choices are made as on one; nothing is launched."""
    monkeypatch.setattr(table, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels._streamed(), "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(streamed, "MEASURED", {(64, (256, 128, 128), 128, 64): USE})


def launched(given, **options):
    """Names of the kernels that are launched."""
    with recorded() as launches:
        linear_rotary_append(*given, **options)
    return {launch.kernel.fn.__name__ for launch in launches.values()}


def test_measured_shapes_take_one_launch(hopper):
    given, tables = operands(2, 30, 4, 2, 64, 128, paged=True)
    alone = {"linear_rotary_kernel"}
    assert launched(given, table=tables) == alone
    biased, _ = operands(2, 30, 4, 2, 64, 128, paged=True, bias=True)
    assert launched(biased, table=tables) == alone
    some = (*biased[:2], [biased[2][0], None, None], *biased[3:])
    norm = torch.ones(64, dtype=torch.bfloat16)
    for other, options in (
        (some, {}),
        (given, {"q_norm": norm, "k_norm": norm}),
        (given, {"launch_rows": 60}),
        ((*given[:6], given[6][:16]), {}),  # of a head half is rotated
        ((*given[:3], given[3].float(), *given[4:]), {}),
        (operands(2, 33, 4, 2, 64, 128, paged=True)[0], {}),  # more than 64 rows
        (operands(2, 8, 4, 2, 64, 128, paged=True)[0], {}),  # not measured
        (operands(2, 30, 2, 2, 64, 128, paged=True)[0], {}),
    ):
        found = launched(other, table=tables, **options)
        assert "_rotary_append_kernel" in found and not found & alone


def test_settings_that_cannot_be_are_refused(hopper, monkeypatch):
    given, tables = operands(2, 30, 4, 2, 64, 128, paged=True)
    for settings in (streamed.RotaryStreaming(96, 4, 3), streamed.RotaryStreaming(256, 9, 3), USE._replace(w_stages=1)):
        with pytest.raises(ValueError, match="one launch takes a Hopper GPU.*rings that fit"):
            linear_rotary_append(*given, table=tables, settings=settings)
    with pytest.raises(ValueError, match="norms no heads and has no launch_rows"):
        linear_rotary_append(*given, table=tables, settings=USE, launch_rows=60)
    with pytest.raises(ValueError, match="first_row must be int32"):
        linear_rotary_append(*given[:4], given[4].long(), *given[5:], table=tables, settings=USE)
    with pytest.raises(ValueError, match="weight must be"):
        linear_rotary_append(given[0][..., :64], *given[1:], table=tables, settings=USE)
    strided = torch.cat((given[3], given[3]), -1)[..., ::2]
    with pytest.raises(ValueError, match="the cache's last dimension must be contiguous"):
        linear_rotary_append(*given[:3], strided, *given[4:], table=tables, settings=USE)
    columns = [torch.cat((weight, weight), 1)[:, ::2] for weight in given[1]]
    with pytest.raises(ValueError, match="the rows of a weight must be contiguous"):
        linear_rotary_append(given[0], columns, *given[2:], table=tables, settings=USE)
    monkeypatch.setattr(table, "compute_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="one launch takes a Hopper GPU"):
        linear_rotary_append(*given, table=tables, settings=USE)


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64])
def test_candidates_fit_shared_memory(rows):
    found = list(streamed.candidates(rows))
    assert len(found) > 3 and all(streamed.fits_memory(rows, settings) for settings in found)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (7, 1), (1, 16), (4, 5), (2, 16), (1, 60), (8, 8)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "depth"), [(32, 8, 128, 4096), (32, 8, 64, 2048), (4, 2, 256, 200)]
)
def test_the_bits_are_those_of_two_launches(heads, kv_heads, dim, depth, batch, nodes, dtype):
    """Of a product whose K is not split; by some settings, twice, and of a tree by all that are timed."""
    from eagle_triton.layers import rotary_append
    from eagle_triton.linear.streamed import Streaming

    found = list(streamed.candidates(batch * nodes))
    some = found if (depth, nodes, dtype) == (4096, 60, torch.bfloat16) else [found[0], found[-1]]
    for bias in (False, True):
        given, tables = operands(
            batch, nodes, heads, kv_heads, dim, depth, paged=True, bias=bias, dtype=dtype, device="cuda"
        )
        x, biases, rest = torch.randn_like(given[0]), given[2], given[3:]
        weights = [torch.randn_like(weight) * depth**-0.5 for weight in given[1]]
        options = {"table": tables, "attention_scaling": 1.25}
        use = Streaming(64, 128, 1, batch * nodes <= 32, 3, 3)
        products = kernels.linear_stack(x, weights, biases, settings=use)
        expected_cache = rest[0].clone()
        heads_of = [product.unflatten(-1, (-1, dim)) for product in products]
        expected = rotary_append(*heads_of, expected_cache, *rest[1:], **options)
        assert expected.isfinite().all() and expected.std() > 0.1
        for settings in [*some, *some]:
            cache = rest[0].clone()
            q = linear_rotary_append(x, weights, biases, cache, *rest[1:], **options, settings=settings)
            assert torch.equal(q, expected) and torch.equal(cache, expected_cache), settings


@on_hopper
def test_replays_in_a_graph_are_the_same():
    """Behind a kernel that makes x, before one that reads what is written."""
    given, tables = operands(1, 60, 32, 8, 128, 4096, paged=True, device="cuda")
    inputs = [torch.randn_like(given[0]), torch.randn_like(given[0])]
    x = inputs[0].clone()

    def run():
        q = linear_rotary_append(rms_norm(x, torch.ones_like(x[0, 0]), 1e-5), *given[1:], table=tables, settings=USE)
        return tree_attention(q, given[3], given[4], scale=1.0, table=tables, read_early=True)

    expected = []
    for values in inputs:
        x.copy_(values)
        expected.append(run())
    assert not torch.equal(*expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run() for _ in range(3)]
    for count in range(100):
        x.copy_(inputs[count % 2])
        graph.replay()
        assert all(torch.equal(out, expected[count % 2]) for out in outs)
