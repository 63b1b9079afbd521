"""append, gather and commit: the kernels equal their references bit for bit, and both refuse what does not fit."""

import pytest
import torch

from eagle_triton import kv_cache as kernels
from eagle_triton.reference import kv_cache as reference
from tests.paging import in_pages, out_of_pages

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [
    pytest.param((1, 2, 1, 1, 16, 64), id="smallest"),
    pytest.param((2, 2, 3, 2, 40, 128), id="batch3-d128"),
    pytest.param((3, 2, 2, 1, 33, 80), id="d80-odd-capacity"),
]
BOTH = pytest.mark.parametrize("module", [kernels, reference], ids=["kernel", "reference"])


def make_cache(shape, dtype, device, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape, dtype=torch.float32).to(device, dtype)


def accepted_path(steps: int, accepted: list[int], nodes: int, device: str):
    """Random ascending paths from the root, -1 behind the accepted ones, as verification leaves them."""
    path = torch.full((len(accepted), steps), -1, dtype=torch.int32)
    for row, count in enumerate(accepted):
        if count >= 0:
            drafts = 1 + torch.randperm(nodes - 1)[:count].sort().values
            path[row, : count + 1] = torch.cat((torch.zeros(1, dtype=torch.int64), drafts))
    return path.to(device), torch.tensor(accepted, dtype=torch.int32, device=device)


def lengths_of(*values: int, device: str):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_commit_equals_the_reference(shape, dtype, device):
    batch, capacity = shape[2], shape[4]
    cache = make_cache(shape, dtype, device)
    path, accepted = accepted_path(6, [(3, -1, 5)[i % 3] for i in range(batch)], 10, device)
    lengths = lengths_of(*[(0, 7, capacity - 10)[i % 3] for i in range(batch)], device=device)
    expected, kept = cache.clone(), cache.clone()
    reference.commit(expected, lengths, path, accepted)
    kernels.commit(kept, lengths, path, accepted)
    assert torch.equal(kept, expected)
    assert not torch.equal(kept, cache)


@BOTH
def test_commit_keeps_the_accepted_rows(module, device):
    cache = torch.arange(20.0, device=device).view(1, 1, 1, 1, 20, 1).expand(2, 2, 2, 2, 20, 64).contiguous()
    path = torch.tensor([[0, 1, 2, 4, 7], [0, 2, 9, -1, -1]], dtype=torch.int32, device=device)
    module.commit(cache, lengths_of(5, 10, device=device), path, lengths_of(4, 1, device=device))
    rows = cache[0, 0, :, 0, :, 0]
    assert rows[0].tolist() == [*range(5), 5, 6, 7, 9, 12, *range(10, 20)]
    assert rows[1].tolist() == [*range(11), 12, *range(12, 20)]
    assert (cache == cache[:1, :1, :, :1, :, :1]).all()


@BOTH
def test_commit_leaves_a_frozen_sequence_alone(module, device):
    cache = make_cache((2, 2, 2, 1, 16, 64), torch.float32, device)
    before = cache.clone()
    path = torch.tensor([[0, 2, 3], [-1, -1, -1]], dtype=torch.int32, device=device)
    module.commit(cache, lengths_of(3, 3, device=device), path, lengths_of(-1, -1, device=device))
    assert torch.equal(cache, before)


@BOTH
@pytest.mark.parametrize("length", [11, 12, 15])
def test_commit_at_the_end_of_the_cache(module, length, device):
    """Path slots past the capacity exist at the end of a cache; they must not disturb the rows that are kept."""
    cache = torch.arange(16.0, device=device).view(1, 1, 1, 1, 16, 1).expand(1, 2, 1, 1, 16, 64).contiguous()
    path = torch.tensor([[0, 2, 4, -1, -1, -1, -1]], dtype=torch.int32, device=device)
    module.commit(cache, lengths_of(length, device=device), path, lengths_of(2, device=device))
    expected = list(range(16))
    for step, node in enumerate((0, 2, 4)):
        if length + node < 16:
            expected[length + step] = length + node
    assert cache[0, 0, 0, 0, :, 0].tolist() == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_equals_the_reference(shape, dtype, device):
    cache = make_cache(shape, dtype, device)
    rows = torch.randint(-1, shape[4], (shape[2], 19), dtype=torch.int32).to(device)
    rows[:, 3] = -1
    out = kernels.gather(cache, rows)
    assert out.dtype == dtype
    assert torch.equal(out, reference.gather(cache, rows))


@BOTH
def test_gather_of_row_minus_one_is_zero_whatever_the_cache_holds(module, device):
    cache = torch.full((1, 2, 1, 2, 8, 64), float("nan"), device=device)
    cache[:, :, :, :, 5] = 2.0
    out = module.gather(cache, torch.tensor([[-1, 5]], dtype=torch.int32, device=device))
    assert (out[..., 0, :] == 0).all()
    assert (out[..., 1, :] == 2).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_equals_the_reference(shape, dtype, device):
    layers, two, batch, heads, capacity, width = shape
    cache = make_cache(shape, dtype, device)
    new = make_cache((layers, two, batch, 5, heads, width), dtype, device, seed=1)
    lengths = lengths_of(*[(0, 3, capacity - 5)[i % 3] for i in range(batch)], device=device)
    expected, out = cache.clone(), cache.clone()
    reference.append(expected, new, lengths)
    kernels.append(out, new, lengths)
    assert torch.equal(out, expected)


def test_append_converts_to_the_caches_dtype(device):
    cache = torch.zeros(1, 2, 1, 1, 8, 64, dtype=torch.float16, device=device)
    new = torch.randn(1, 2, 1, 2, 1, 64, device=device)
    kernels.append(cache, new, lengths_of(1, device=device))
    assert torch.equal(cache[:, :, :, 0, 1:3], new[:, :, :, :, 0].half())


def test_append_drops_rows_past_the_capacity(device):
    storage = torch.zeros(1, 2, 1, 1, 10, 64, device=device)
    kernels.append(storage[..., :8, :], torch.ones(1, 2, 1, 4, 1, 64, device=device), lengths_of(6, device=device))
    assert storage[0, 0, 0, 0, :, 0].tolist() == [0] * 6 + [1, 1, 0, 0]


def test_strided_caches(device):
    """A cache that is a view of a larger one, rows before heads in memory."""
    storage = make_cache((2, 2, 2, 24, 3, 96), torch.float32, device)
    cache = storage.permute(0, 1, 2, 4, 3, 5)[:, :, :, 1:, 2:22, :64]
    dense = cache.contiguous()
    path, accepted = accepted_path(4, [3, 1], 9, device)
    lengths = lengths_of(2, 10, device=device)
    reference.commit(dense, lengths, path, accepted)
    kernels.commit(cache, lengths, path, accepted)
    assert torch.equal(cache, dense)
    rows = torch.tensor([[0, 19, -1], [4, 4, 1]], dtype=torch.int32, device=device)
    assert torch.equal(kernels.gather(cache, rows), reference.gather(dense, rows))
    new = make_cache((2, 2, 2, 4, 5, 64), torch.float32, device, seed=2)[:, :, :, :, 1:3]
    reference.append(dense, new, lengths)
    kernels.append(cache, new, lengths)
    assert torch.equal(cache, dense)


def test_rows_that_are_not_contiguous_are_refused(device):
    cache = make_cache((1, 2, 1, 1, 64, 16), torch.float32, device).transpose(4, 5)
    with pytest.raises(ValueError, match="stride 1"):
        kernels.gather(cache, torch.zeros(1, 1, dtype=torch.int32, device=device))


def test_nothing_to_move(device):
    cache = make_cache((1, 2, 2, 1, 8, 64), torch.float32, device)
    none = torch.zeros(2, 0, dtype=torch.int32, device=device)
    assert kernels.gather(cache, none).shape == (1, 2, 2, 1, 0, 64)
    before = cache.clone()
    kernels.append(cache, cache.new_zeros(1, 2, 2, 0, 1, 64), lengths_of(0, 0, device=device))
    assert torch.equal(cache, before)


@BOTH
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, c, i: m.append(c, c.new_zeros(1, 2, 2, 1, 2, 64), i(2)), "new must be"),
        (lambda m, c, i: m.append(c, c.new_zeros(1, 2, 2, 1, 64), i(2)), "new must be"),
        (lambda m, c, i: m.append(c, c.new_zeros(1, 2, 2, 1, 1, 64), i(3)), "lengths must be"),
        (lambda m, c, i: m.append(c, c.new_zeros(1, 2, 2, 1, 1, 64), i(2).long()), "lengths must be int32"),
        (lambda m, c, i: m.append(c, c.new_zeros(1, 2, 2, 1, 1, 64).to("meta"), i(2)), "new must be .* on meta"),
        (lambda m, c, i: m.gather(c[0], i(2, 1)), "cache must be"),
        (lambda m, c, i: m.gather(c, i(2)), "rows must be"),
        (lambda m, c, i: m.gather(c, i(2, 1).long()), "rows must be int32"),
        (lambda m, c, i: m.gather(c, i(2, 1).to("meta")), "rows must be .* on meta"),
        (lambda m, c, i: m.commit(c, i(2), i(2), i(2)), "path must be"),
        (lambda m, c, i: m.commit(c, i(2), i(3, 1), i(2)), "path must be"),
        (lambda m, c, i: m.commit(c, i(2), i(2, 1), i(2, 1)), "accepted must be"),
        (lambda m, c, i: m.commit(c, i(2).float(), i(2, 1), i(2)), "lengths must be int32"),
    ],
)
def test_bad_arguments_raise_before_anything_is_written(module, call, message, device):
    cache = make_cache((1, 2, 2, 1, 8, 64), torch.float32, device)
    before = cache.clone()
    with pytest.raises(ValueError, match=message):
        call(module, cache, lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device))
    assert torch.equal(cache, before)


def test_the_reference_on_a_cpu_raises_where_rows_lie_outside():
    cache = torch.zeros(1, 2, 1, 1, 8, 64)
    with pytest.raises(ValueError, match="exceed the capacity of 8"):
        reference.append(cache, torch.ones(1, 2, 1, 3, 1, 64), lengths_of(6, device="cpu"))
    assert (cache == 0).all()
    for row in (-2, 8):
        with pytest.raises(ValueError, match="rows must lie in"):
            reference.gather(cache, torch.tensor([[row]], dtype=torch.int32))


# ------------------------------------------------------------------------------------------------------- in pages


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("page_rows", [64, 192], ids=["pages", "one-page-each"])
def test_a_cache_in_pages_holds_what_a_dense_one_does(page_rows, dtype, device):
    """Appended, gathered and committed over the borders of pages; those that are nobody's stay as they are."""
    dense = make_cache((2, 2, 3, 2, 192, 64), dtype, device)
    pages, table = in_pages(dense, page_rows)
    wild = torch.isnan(pages)
    new = make_cache((2, 2, 3, 9, 2, 64), dtype, device, seed=1)
    lengths = lengths_of(60, 0, 183, device=device)
    path, accepted = accepted_path(6, [5, 2, -1], 9, device)
    for module in (kernels, reference):
        expected, kept = dense.clone(), pages.clone()
        reference.append(expected, new, lengths)
        reference.commit(expected, lengths, path, accepted)
        module.append(kept, new, lengths, table)
        module.commit(kept, lengths, path, accepted, table=table)
        assert torch.equal(out_of_pages(kept, table), expected)
        assert torch.equal(torch.isnan(kept), wild)
        rows = torch.tensor([[0, 63, 64, -1], [191, 127, 128, 5], [60, 61, 66, 69]], dtype=torch.int32, device=device)
        assert torch.equal(module.gather(kept, rows, table), reference.gather(expected, rows))


@BOTH
def test_tables_that_do_not_fit_are_refused(module, device):
    cache = make_cache((1, 2, 5, 1, 64, 16), torch.float32, device)
    lengths = lengths_of(0, 0, device=device)
    for table in (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(2, 0, dtype=torch.int32)):
        table = table.to(device)
        with pytest.raises(ValueError, match="table must be int32 \\[2, M>0\\]"):
            module.gather(cache, lengths[:, None], table)
        with pytest.raises(ValueError, match="table must be"):
            module.append(cache, cache[:, :, :2, :, :1].transpose(3, 4), lengths, table)
        with pytest.raises(ValueError, match="table must be"):
            module.commit(cache, lengths, lengths[:, None], lengths, table=table)
