"""prompt_attention: cuDNN's parts and ours, added up, against attention of all at once."""

from types import SimpleNamespace

import pytest
import torch

from eagle_triton import attention
from eagle_triton.ops import prompt_attention as kernels
from eagle_triton.reference import prompt_attention as reference
from tests.paging import in_pages

CUDA = torch.cuda.is_available()
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if CUDA else [])]
BOTH = pytest.mark.parametrize("module", [kernels, reference], ids=["kernel", "reference"])


def torch_instead_of_cudnn(q, keys, values, causal, scale):
    """As kernels._cudnn, for any dtype and device; a q in another layout would give an out in that."""
    assert q.dim() == keys.dim() == 4 and q.dtype == keys.dtype == values.dtype and q.shape[1] % keys.shape[1] == 0
    assert not causal or q.shape[2] == keys.shape[2]
    group = q.shape[1] // keys.shape[1]
    scores = q.float() @ keys.float().repeat_interleave(group, 1).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out = (scores.softmax(-1) @ values.float().repeat_interleave(group, 1)).to(q.dtype)
    return torch.empty_like(q).copy_(out), scores.logsumexp(-1, keepdim=True)


@pytest.fixture
def small(monkeypatch):
    """Short stretches, and no cuDNN."""
    monkeypatch.setattr(kernels, "SEGMENTS", (256, 128))
    monkeypatch.setattr(kernels, "_cudnn", torch_instead_of_cudnn)


def make_case(rows, kv_heads, group, width, start, count, dtype, device, page=64, seed=0):
    """q, a cache in pages whose rows behind start + count are NaN, start, end, and the table."""
    torch.manual_seed(seed)
    q = torch.randn(rows, kv_heads * group, width).to(device, dtype)
    capacity = -(-(start + rows) // page) * page
    cache = torch.randn(2, 1, kv_heads, capacity, width).to(device, dtype)
    cache[:, :, :, start + count :] = float("nan")
    pages, table = in_pages(cache, page)
    return SimpleNamespace(q=q, cache=pages, start=start, end=start + count, table=table[0], dense=cache[:, 0])


def attended(module, case, scale, **options):
    return module.prompt_attention(case.q, case.cache, case.start, case.end, scale=scale, table=case.table, **options)


def same_dtype(case, scale, dtype, sinks=None, softcap=None):
    """What plain torch gives in a dtype, of the rows that count."""
    q, (keys, values) = case.q[: case.end - case.start].to(dtype), case.dense[:, :, : case.end].to(dtype)
    group = q.shape[1] // len(keys)
    scores = q.transpose(0, 1) @ keys.repeat_interleave(group, 0).mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + case.start)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([sinks.to(dtype)[:, None, None].expand(*scores.shape[:2], 1), scores], -1)
    weights = scores.softmax(-1)[..., -case.end :]
    return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)


def assert_close(out, case, scale, **options):
    """max|kernel - ref32| <= 2 * max|torch_same_dtype - ref32| + 1e-5"""
    count = case.end - case.start
    exact = same_dtype(case, scale, torch.float32, **options)
    bound = 2 * (same_dtype(case, scale, case.q.dtype, **options).float() - exact).abs().max() + 1e-5
    assert out.shape == case.q.shape and out.dtype == case.q.dtype
    error = (out[:count].float() - exact).abs().max()
    assert error <= bound, f"error {error:.2e} above {bound:.2e}"


STARTS = {
    "nothing": 0,
    "a-rest": 64,
    "a-segment": 128,
    "two": 384,
    "two-and-a-rest": 448,
    "four": 896,
    "five-and-a-rest": 1216,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_parts_are_added_up(start, dtype, device, small):
    case = make_case(128, 2, 2, 32, start, 128, dtype, device)
    assert_close(attended(kernels, case, 0.2), case, 0.2)
    assert_close(attended(reference, case, 0.2), case, 0.2)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 1216])
def test_sinks_and_softcap(module, start, dtype, device, small, monkeypatch):
    """Sinks are one part more; of a cap cuDNN knows nothing."""
    case = make_case(64, 2, 2, 32, start, 50, dtype, device)
    sinks = torch.tensor([2.0, -1.0, 5.0, 0.0], device=device)
    for options in ({"sinks": sinks}, {"sinks": sinks.to(dtype)}, {"softcap": 1.5}, {"sinks": sinks, "softcap": 1.5}):
        if "softcap" in options:
            monkeypatch.setattr(kernels, "_cudnn", None)
        out = attended(module, case, 0.2, **options)
        assert_close(out, case, 0.2, **options)
        for name in options:
            with pytest.raises(AssertionError):
                assert_close(out, case, 0.2, **{**options, name: None})


@pytest.mark.parametrize(("kv_heads", "group", "width"), [(1, 7, 64), (3, 1, 80), (2, 4, 128)], ids=str)
@pytest.mark.parametrize("page", [64, 128])
def test_heads_and_pages(kv_heads, group, width, page, device, small):
    case = make_case(64, kv_heads, group, width, 384, 64, torch.float16, device, page)
    assert_close(attended(kernels, case, width**-0.5), case, width**-0.5)


@BOTH
@pytest.mark.parametrize("count", [1, 63, 64, 100])
def test_rows_behind_the_prompt_touch_nothing(module, count, device, small):
    """Their keys are NaN, and theirs are no rows that count."""
    case = make_case(128, 2, 2, 32, 320, count, torch.float32, device)
    out = attended(module, case, 0.2)
    assert_close(out, case, 0.2)
    assert not out.isnan().any()


@BOTH
def test_large_scores_do_not_overflow(module, device, small):
    case = make_case(64, 1, 2, 32, 448, 64, torch.float32, device)
    case.q, case.cache, case.dense = 30 * case.q, 30 * case.cache, 30 * case.dense
    assert_close(attended(module, case, 0.2), case, 0.2)


def test_a_part_that_is_lost_would_be_noticed(device, small, monkeypatch):
    case = make_case(64, 1, 2, 32, 448, 64, torch.float16, device)
    for first in (0, 256, 384):
        with monkeypatch.context() as patch:
            rest = [(start, length) for start, length in kernels.segments(448) if start != first]
            patch.setattr(kernels, "segments", lambda start, rest=rest: iter(rest))
            with pytest.raises(AssertionError):
                assert_close(attended(kernels, case, 0.2), case, 0.2)


def test_strided_inputs(device, small):
    case = make_case(128, 2, 2, 32, 320, 128, torch.float16, device)
    q = torch.zeros(128, 4, 64, dtype=torch.float16, device=device)
    q[..., 32:] = case.q
    cache = torch.zeros(*case.cache.shape[:4], 48, dtype=torch.float16, device=device)
    cache[..., :32] = case.cache
    expected = attended(kernels, case, 0.2)
    case.q, case.cache = q[..., 32:], cache.transpose(0, 1).contiguous().transpose(0, 1)[..., :32]
    assert torch.equal(attended(kernels, case, 0.2), expected)


def test_what_is_seen_of_committed_rows_alone(device):
    case = make_case(20, 2, 2, 32, 192, 20, torch.float32, device)
    out, lse = attention.attend_committed(case.q[None], case.cache, 128, scale=0.2, table=case.table[None, 1:3])
    with pytest.raises(ValueError, match="length must be 128, all rows of the table's pages, got 127"):
        attention.attend_committed(case.q[None], case.cache, 127, scale=0.2, table=case.table[None, 1:3])
    keys, values = case.dense[:, None, :, 64:192]
    expected = torch_instead_of_cudnn(case.q[None].transpose(1, 2), keys, values, False, 0.2)
    torch.testing.assert_close(out, expected[0].transpose(1, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1][..., 0], atol=1e-5, rtol=1e-5)


def test_stretches_are_of_few_lengths():
    for start in range(0, 100_000, 64):
        parts = list(kernels.segments(start))
        assert sum(length for _, length in parts) == start
        assert [first for first, _ in parts] == [sum(length for _, length in parts[:i]) for i in range(len(parts))]
        assert all(length in kernels.SEGMENTS for _, length in parts[:-1])
        assert not parts or parts[-1][1] in kernels.SEGMENTS or parts[-1][1] < kernels.SEGMENTS[-1]


def test_a_shape_that_is_refused_is_asked_for_once(device, small, monkeypatch):
    calls, shape = [], (4, 2, 32, torch.float16, torch.device(device), 128)
    monkeypatch.setattr(kernels, "_plans", {})

    def refuse(q, keys, values, causal, scale):
        calls.append((keys.shape[2], causal))
        if keys.shape[2] == 256:
            raise RuntimeError("No valid engine configs\nand a trace")
        return torch_instead_of_cudnn(q, keys, values, causal, scale)

    monkeypatch.setattr(kernels, "_cudnn", refuse)
    assert kernels.refused(*shape, 128 + 64) is None and calls == [(128, False), (128, True)]
    assert kernels.refused(*shape, 128) is None and len(calls) == 2
    for _ in range(2):
        assert kernels.refused(*shape, 256) == "No valid engine configs" and len(calls) == 3

    def no_memory(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(kernels, "_plans", {})
    monkeypatch.setattr(kernels, "_cudnn", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        kernels.refused(*shape, 0)
    assert not kernels._plans  # asked again when there is some


def test_where_cudnn_cannot_be():
    assert "needs an NVIDIA GPU" in kernels.unsupported(torch.bfloat16, torch.device("cpu"))
    if CUDA:
        assert "bf16 and fp16" in kernels.unsupported(torch.float32, torch.device("cuda"))


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q": a.q[0]}, "q must be"),
        (lambda a: {"q": a.q[..., :16]}, "cache must be .* 16\\]"),
        (lambda a: {"q": a.q[:, :3]}, "multiple of the cache's 2 heads"),
        (lambda a: {"q": a.q.double()}, "cache must be float64"),
        (lambda a: {"table": a.table.long()}, "table must be int32"),
        (lambda a: {"table": a.table[None]}, "table must be int32"),
        (lambda a: {"start": 60}, "multiple of a page's 64 rows"),
        (lambda a: {"end": a.start}, "multiple of a page's 64 rows"),
        (lambda a: {"end": a.start + 65}, r"start \+ N \(64\)"),
        (lambda a: {"start": 512, "end": 540}, "the table.s 384 rows"),
        (lambda a: {"scale": 0.0}, "scale must be positive"),
        (lambda a: {"sinks": torch.zeros(3)}, "sinks must be .* \\[4\\]"),
        (lambda a: {"sinks": torch.zeros(4).double().to(a.q.device)}, "got float64"),
        (lambda a: {"softcap": 0.0}, "softcap must be positive"),
    ],
)
def test_bad_arguments(module, change, message, device, small):
    case = make_case(64, 2, 2, 32, 320, 64, torch.float16, device)
    case.scale, case.sinks, case.softcap = 0.2, None, None
    for name, value in change(case).items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=message):
        attended(module, case, case.scale, sinks=case.sinks, softcap=case.softcap)


def test_the_kernels_limits(device, small):
    case = make_case(64, 2, 2, 32, 0, 64, torch.float16, device, page=192)
    with pytest.raises(ValueError, match="divides 128"):
        attended(kernels, case, 0.2)
    case = make_case(64, 2, 2, 32, 320, 64, torch.float16, device)
    with pytest.raises(ValueError, match="sinks must be contiguous"):
        attended(kernels, case, 0.2, sinks=torch.zeros(4, 2, device=device)[:, 0])
    case.cache = case.cache.transpose(3, 4).contiguous().transpose(3, 4)
    with pytest.raises(ValueError, match="must be contiguous"):
        attended(kernels, case, 0.2)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("start", [0, 2048, 4096 + 64, 8192, 14336 + 1984], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_cudnn_itself(start, width, dtype, device):
    if (reason := kernels.unsupported(dtype, torch.device(device))) is not None:
        pytest.skip(reason)
    case = make_case(2048, 2, 4, width, start, 2000, dtype, device)
    assert kernels.refused(8, 2, width, dtype, case.q.device, 2048, start) is None
    out = attended(kernels, case, width**-0.5)
    assert_close(out, case, width**-0.5)
    assert torch.equal(out, attended(kernels, case, width**-0.5))
