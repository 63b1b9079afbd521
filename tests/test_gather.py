"""gather_rows and sequence_rows: the kernels against their references."""

import pytest
import torch

from eagle_triton.ops import gather
from eagle_triton.reference import gather as reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 48, 1024, 1500])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_gather_rows(device, dtype, size, index_dtype):
    source = torch.Generator().manual_seed(size)
    x = torch.randn(3, 7, 2 * size, generator=source).to(dtype).to(device)[:, :, size:]  # strided
    index = torch.tensor([[0, 6, 2, -1], [5, -1, -1, -1], [1, 1, 3, 6]], device=device, dtype=index_dtype)
    out = gather.gather_rows(x, index)
    assert torch.equal(out, reference.gather_rows(x, index))
    assert torch.equal(out[0, 3], x[0, 0]) and torch.equal(out[2, 0], x[2, 1])
    wide = torch.full((3, 4, 2 * size), float("nan"), dtype=dtype, device=device)
    gather.gather_rows(x, index[:, ::2], out=wide[:, ::2, size:])
    assert torch.equal(wide[:, ::2, size:], out[:, ::2])
    assert wide[:, ::2, :size].isnan().all() and wide[:, 1::2].isnan().all()
    assert gather.gather_rows(x, index[:, :0]).shape == (3, 0, size)


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_sequence_rows(device, count):
    tokens = torch.arange(40, device=device).view(2, 20)
    first = torch.tensor([0, 17], dtype=torch.int32, device=device)
    out = gather.sequence_rows(tokens, first, count)
    assert torch.equal(out, reference.sequence_rows(tokens, first, count))
    assert out[1].tolist() == [min(37 + i, 39) for i in range(count)]
    turned = gather.sequence_rows(tokens.t().contiguous().t(), first, count)
    assert torch.equal(turned, out)
    for module in (gather, reference):
        wide = torch.full((2, count + 3), -7, device=device)
        place = wide[:, 1 : count + 1]
        assert module.sequence_rows(tokens, first, count, 2, out=place) is place
        assert torch.equal(place, reference.sequence_rows(tokens, first + 2, count))
        assert (wide[:, 0] == -7).all() and (wide[:, count + 1 :] == -7).all()


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(2, 3)},
        {"x": torch.zeros(2, 0, 4)},
        {"index": torch.zeros(3, 2, dtype=torch.int32)},
        {"index": torch.zeros(2, 2)},
        {"out": torch.zeros(2, 2, 5)},
        {"out": torch.zeros(2, 2, 4, dtype=torch.float16)},
    ],
    ids=str,
)
def test_gather_rows_refuses(change):
    arguments = {"x": torch.zeros(2, 3, 4), "index": torch.zeros(2, 2, dtype=torch.int32), "out": None, **change}
    for module in (gather, reference):
        with pytest.raises(ValueError, match="gather_rows"):
            module.gather_rows(arguments["x"], arguments["index"], out=arguments["out"])


def test_gather_rows_refuses_strided_rows():
    with pytest.raises(ValueError, match="contiguous"):
        gather.gather_rows(torch.zeros(2, 4, 3).mT, torch.zeros(2, 2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("tokens", "first", "count", "out"),
    [
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32), 1, None),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2), 1, None),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int32), 1, None),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), 0, None),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), 1, torch.zeros(2, 1)),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), 1, torch.zeros(2, 2).long()),
    ],
)
def test_sequence_rows_refuses(tokens, first, count, out):
    for module in (gather, reference):
        with pytest.raises(ValueError, match="sequence_rows"):
            module.sequence_rows(tokens, first, count, out=out)
