"""tree_attention: the kernel against its reference, the reference against plain softmax, and what both refuse."""

import inspect

import pytest
import torch

from eagle_triton import attention as kernels
from eagle_triton.operands.ancestors import ancestor_matrix, pack_ancestors
from eagle_triton.reference import attention as reference
from eagle_triton.reference.layers import float8_pair
from eagle_triton.runtime.fallback import triton_version
from eagle_triton.runtime.row_formats import RowFormat, WordOrdered
from tests.paging import in_pages

CUDA = torch.cuda.is_available()
# The interpreter multiplies the bits of bf16 tiles as integers.
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if CUDA else [])]
HALF = torch.float16
KINDS = ["sinks", "softcap", "both"]
BOTH = pytest.mark.parametrize(
    "attend", [kernels.tree_attention, reference.tree_attention], ids=["kernel", "reference"]
)


def random_trees(batch: int, nodes: int, words: int) -> torch.Tensor:
    """Ancestor matrices [B, N, 64 W] of random trees, each node below a random earlier one."""
    matrix = torch.zeros(batch, nodes, 64 * words, dtype=torch.bool)
    for tree in matrix:
        for node in range(nodes):
            if node:
                tree[node] = tree[int(torch.randint(0, node, ()))]
            tree[node, node] = True
    return matrix


def make_case(batch, nodes, kv_heads, group, width, capacity, lengths, words, dtype, device, seed=0):
    """Random q, cache, lengths, ancestors (None for 0 words); cache rows behind the new keys are NaN."""
    torch.manual_seed(seed)
    q = torch.randn(batch, nodes, kv_heads * group, width).to(device, dtype)
    cache = torch.randn(2, batch, kv_heads, capacity, width).to(device, dtype)
    for sequence, length in enumerate(lengths):
        cache[:, sequence, :, length + nodes :] = float("nan")
    ancestors = pack_ancestors(random_trees(batch, nodes, words)).to(device) if words else None
    return q, cache, torch.tensor(lengths, dtype=torch.int32, device=device), ancestors


def make_options(kind, heads, dtype, device):
    """What the softmax has besides keys: sinks of every size (fp32 where scores are capped), a cap, or both."""
    sinks = (3 * torch.randn(heads, generator=torch.Generator().manual_seed(7))).to(device)
    return {
        "sinks": {"sinks": sinks.to(dtype)},
        "softcap": {"softcap": 1.5},
        "both": {"sinks": sinks, "softcap": 1.5},
    }[kind]


def same_dtype(q, cache, lengths, ancestors, scale, window=None, sinks=None, softcap=None):
    """What plain torch gives in q's own dtype: the measure of how much rounding is to be expected."""
    _, nodes, heads, _ = q.shape
    cache = torch.nan_to_num(cache)
    matrix = None if ancestors is None else ancestor_matrix(ancestors, 64 * ancestors.shape[2])
    visible = reference._visible(lengths, matrix, nodes, cache.shape[3], window)
    keys, values = cache.repeat_interleave(heads // cache.shape[2], dim=2)
    scores = (q.transpose(1, 2) @ keys.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([sinks.to(q.dtype)[None, :, None, None].expand(*scores.shape[:3], 1), scores], -1)
    weights = scores.softmax(-1).nan_to_num()[..., -visible.shape[-1] :]
    return (weights @ values).transpose(1, 2)


def assert_close(out, case, scale, window=None, sinks=None, softcap=None):
    """max|kernel - ref32| <= 2 * max|torch_same_dtype - ref32| + 1e-5, or two units in the last place of the largest"""
    q, cache, lengths, ancestors = case
    exact = reference.tree_attention(
        q.float(), torch.nan_to_num(cache.float()), lengths, ancestors, scale=scale, sliding_window=window,
        sinks=None if sinks is None else sinks.float(), softcap=softcap,
    )  # fmt: skip
    plain = same_dtype(q, cache, lengths, ancestors, scale, window, sinks, softcap).float()
    bound = 2 * (plain - exact).abs().max() + max(1e-5, 2**-22 * float(exact.abs().max()))
    assert out.shape == q.shape and out.dtype == q.dtype
    error = (out.float() - exact).abs().max()
    assert error <= bound, f"error {error:.2e} above {bound:.2e}"


def check(case, window=None):
    scale = case[0].shape[-1] ** -0.5
    assert_close(kernels.tree_attention(*case, scale=scale, sliding_window=window), case, scale, window)


@pytest.mark.parametrize(
    ("batch", "nodes", "kv_heads", "group"),
    [
        (1, 60 if CUDA else 6, 2, 4),
        (3, 5 if CUDA else 2, 2, 3),
        (4, 1, 1, 1),
        (1, 1, 2, 4),
        (1, 12 if CUDA else 3, 1, 8),
    ],
)
def test_the_merge_makes_pairs_where_products_read_them(device, monkeypatch, batch, nodes, kv_heads, group):
    """The pair of what it would have stored in bf16. In Triton's interpreter from fp32, which it cuts off to bf16."""
    dtype = torch.bfloat16 if CUDA else torch.float32
    lengths = [(900 if CUDA else 230) - 60 * sequence for sequence in range(batch)]
    case = make_case(batch, nodes, kv_heads, group, 128, 1024, lengths, 1, dtype, device)
    options = {"scale": 128**-0.5, "row_format": RowFormat.FLOAT8_PAIR}
    plain = kernels.tree_attention(*case, scale=128**-0.5)
    if not CUDA:
        assert isinstance(kernels.tree_attention(*case, **options), torch.Tensor)
        shape = batch, nodes, kv_heads * group * 128
        monkeypatch.setattr(kernels, "has_format", lambda x, row_format: row_format and x.shape == shape)
        plain = (plain.view(torch.int32) & -(2**16)).view(torch.float32)
    found, expected = kernels.tree_attention(*case, **options), float8_pair(plain.bfloat16().flatten(-2))
    assert found.shape == expected.shape == (batch, nodes, kv_heads * group * 128) and found.dtype == dtype
    assert torch.equal(found.scale, expected.scale) and (found.scale > 0).all()
    parts, exact = found.parts.float(), expected.parts.float()
    # Triton's interpreter truncates the smallest numbers of e4m3, which lie 2 ** -9 apart
    assert torch.equal(parts, exact) if CUDA else (parts - exact).abs().max() <= 2.0**-7
    assert (parts != 0).float().mean() > 0.5
    for width in (64, 128):
        case = make_case(batch, nodes, kv_heads, group, width, 1024, lengths, 1, dtype, device)
        plain = kernels.tree_attention(*case, scale=0.1).flatten(-2)
        monkeypatch.setattr(kernels, "has_format", lambda x, row_format: row_format is not None)
        ordered = kernels.tree_attention(*case, scale=0.1, row_format=RowFormat.WORD_ORDER)
        assert torch.equal(ordered.values, WordOrdered.of(plain).values) and ordered.shape == plain.shape


def test_one_program_writes_the_order_of_words(device, monkeypatch):
    monkeypatch.setattr(kernels, "has_format", lambda x, row_format: row_format is not None)
    dtype, chosen = torch.bfloat16 if CUDA else torch.float32, kernels.settings_for
    assert chosen(4, 128, 8, 16, dtype, kernels._capability(torch.device(device))).programs == 1
    monkeypatch.setattr(kernels, "settings_for", lambda *args: chosen(*args)._replace(programs=1))
    for batch, kv_heads, width in ((2, 2, 128), (3, 2, 64), (4, 1, 256)):
        case = make_case(batch, 2, kv_heads, 2, width, 256, [70] * batch, 1, dtype, device)
        plain = kernels.tree_attention(*case, scale=0.1).flatten(-2)
        ordered = kernels.tree_attention(*case, scale=0.1, row_format=RowFormat.WORD_ORDER)
        assert torch.equal(ordered.total(), plain) and not torch.equal(ordered.values.view_as(plain), plain)


def test_what_is_no_pair_stays_a_tensor(device, monkeypatch):
    monkeypatch.setattr(kernels, "has_format", lambda x, row_format: row_format is not None)
    dtype = torch.bfloat16 if CUDA else torch.float32
    for batch, nodes, kv_heads, width in ((1, 8, 1, 64), (16, 1, 8, 128), (1, 0, 1, 128)):  # width, one program, none
        case = make_case(batch, nodes, kv_heads, 1, width, 128, [9] * batch, 1 if nodes else 0, dtype, device)
        out = kernels.tree_attention(*case, scale=1.0, row_format=RowFormat.FLOAT8_PAIR)
        assert isinstance(out, torch.Tensor) and out.shape == case[0].shape


@pytest.mark.parametrize(
    "sizes",
    [
        # Numbers of nodes; the interpreter takes its time for every row block.
        *(
            (2, nodes, 1, 4 if CUDA else 1, 64, 256, [0, 127], -(-nodes // 64), dtype)
            for nodes in (1, 7, 26, 60, 64, 65)
            for dtype in DTYPES
        ),
        *((1, 10, 2, 4, 64, 512, [length], w, HALF) for length in (0, 1, 63, 64, 127, 128, 300) for w in range(3)),
        *((1, 10, 2, 4, 64, 4096, [2049], words, HALF) for words in range(3) if CUDA),
        *((1, 7, 2, 4, width, 192, [100], 1, dtype) for width in (64, 80, 96, 128, 256, 512) for dtype in DTYPES),
        *((2, nodes, 2, group, 64, 192, [3, 150], 1, HALF) for group in (1, 4, 7) for nodes in (1, 26 if CUDA else 11)),
        *((3, 26, 1, 4, 64, 256, lengths, 1, HALF) for lengths in ([0, 1, 127], [128, 5, 190], [64, 0, 63])),
        (2, 700 if CUDA else 260, 1, 4, 64, 1024, [0, 77], 0, HALF),  # a chunk of a prompt, of more than 1024 rows
    ],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_sizes(sizes, device):
    """B, N, Hkv, heads a group, d, T, lengths, words (0: causal) and dtype."""
    check(make_case(*sizes, device))


@pytest.mark.parametrize("new_keys", [1, 7, 70])
def test_no_node_sees_what_is_behind_the_new_keys(new_keys, device):
    """Neither in a tile of its own nor in one with others; by one program and by several, whose merge must agree."""
    nodes, lengths = 7, [0, 60, 62, 64, 200]
    case = make_case(len(lengths), nodes, 2, 2, 64, 320, lengths, 2, torch.float32, device)
    q, cache, lengths_tensor, ancestors = case
    seen = ancestor_matrix(ancestors, 128)
    behind = seen.clone()
    behind[..., new_keys:] = False
    cleared = (q, cache, lengths_tensor, pack_ancestors(behind))
    for sequence, length in enumerate(lengths):
        cache[:, sequence, :, length + min(new_keys, nodes) :] = float("nan")
    options = {"scale": 64**-0.5, "new_keys": new_keys}
    expected = reference.tree_attention(*cleared, scale=64**-0.5)
    torch.testing.assert_close(reference.tree_attention(*case, **options), expected, rtol=1e-5, atol=1e-6)
    assert_close(kernels.tree_attention(*case, **options), cleared, 64**-0.5)
    capability = torch.cuda.get_device_capability() if CUDA else None
    use = kernels.settings_for(14, 64, 2, 1, torch.float32, capability)._replace(splits=3, min_tiles=1)
    for programs in (1, 3):
        out = kernels._launch(*case, 64**-0.5, None, use._replace(programs=programs), new_keys=new_keys)
        assert_close(out, cleared, 64**-0.5)
    pages, table = in_pages(cache, 64)
    out = kernels.tree_attention(q, pages, lengths_tensor, ancestors, **options, table=table)
    assert_close(out, cleared, 64**-0.5)
    if new_keys >= nodes:
        for attend in (kernels, reference):
            out = attend.tree_attention(*case, **options, sliding_window=70)
            assert_close(out, cleared, 64**-0.5, 70)


@pytest.mark.parametrize("window", [1, 3, 40, 64, 1000] if CUDA else [1, 40, 1000])
@pytest.mark.parametrize("words", [0, 1, 2], ids=["causal", "one-word", "two-words"])
def test_sliding_window(window, words, device):
    case = make_case(2, 65 if words == 2 else 20, 1, 1, 64, 256, [9, 150], words, torch.float32, device)
    case[1][:, 1, :, : max(0, 150 - window)] = float("nan")  # out of every node's window
    check(case, window)


def test_new_keys_that_nobody_sees_may_be_anything(device):
    """A beam step: the words reach over cache rows that earlier passes wrote and over rows that nobody wrote yet."""
    q, cache, lengths, _ = make_case(1, 5, 2, 4, 64, 128, [20], 1, torch.float16, device)
    matrix = torch.zeros(1, 5, 64, dtype=torch.bool)
    matrix[0, :, 2] = True
    matrix[0, :, 10:15] = torch.eye(5, dtype=torch.bool)
    cache[:] = torch.randn(cache.shape).to(cache)
    seen = [*range(20), 22, *range(30, 35)]
    hidden = [row for row in range(128) if row not in seen]
    case = (q, cache, lengths, pack_ancestors(matrix).to(device))
    scale = 0.125
    expected = kernels.tree_attention(*case, scale=scale)
    assert_close(expected, case, scale)
    cache[:, :, :, hidden] = float("nan")
    assert torch.equal(kernels.tree_attention(*case, scale=scale), expected)


@BOTH
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_row_without_keys_gives_zero(attend, kind, device):
    q, cache, lengths, _ = make_case(1, 3, 1, 2, 64, 128, [0], 1, torch.float32, device)
    cache.nan_to_num_()
    ancestors = torch.tensor([[[1], [0], [5]]], dtype=torch.int64, device=device)
    options = {} if kind is None else make_options(kind, 2, torch.float32, device)
    out = attend(q, cache, lengths, ancestors, scale=0.125, **options)
    assert (out[:, 1] == 0).all()
    assert torch.allclose(out[:, 0], cache[1, :, :, 0].expand(1, 2, 64)) == ("sinks" not in options)
    assert (out[:, 2] != 0).all()


@BOTH
def test_capacity_ends_among_the_new_keys(attend, device):
    """Rows that the cache does not have are not read: the sequence that fills it sees what is there."""
    q, cache, _, ancestors = make_case(1, 8, 1, 2, 64, 64, [48], 1, torch.float32, device)
    cache.nan_to_num_()
    lengths = torch.tensor([60], dtype=torch.int32, device=device)
    exact = same_dtype(q, cache, lengths, ancestors, 0.125)
    assert torch.allclose(attend(q, cache, lengths, ancestors, scale=0.125), exact, atol=1e-5)


@BOTH
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_equals_plain_softmax(attend, kind, device):
    q, cache, lengths, ancestors = make_case(2, 6, 2, 3, 64, 64, [0, 33], 1, torch.float32, device)
    cache.nan_to_num_()
    options = {} if kind is None else make_options(kind, 6, torch.float32, device)
    exact = same_dtype(q, cache, lengths, ancestors, 0.3, **options)
    assert torch.allclose(attend(q, cache, lengths, ancestors, scale=0.3, **options), exact, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "group", "width", "words", "window", "kind", "dtype"),
    [
        *((12, 4, 64, 1, 50, kind, dtype) for kind in ("sinks", "both") for dtype in DTYPES),
        *((1, 8, 64, 1, None, kind, DTYPES[0]) for kind in ("sinks", "both")),
        (20, 1, 128, 0, None, "both", DTYPES[-1]),
    ],
    ids=str,
)
def test_sinks_and_softcap(nodes, group, width, words, window, kind, dtype, device, monkeypatch):
    """In one piece, in pages, and by several splits, of which one program may take all; new memory is NaN."""
    for make in (torch.empty, torch.empty_like):
        monkeypatch.setattr(torch, make.__name__, lambda *x, make=make, **how: make(*x, **how).fill_(float("nan")))
    lengths, scale = [3, 250], width**-0.5
    case = make_case(2, nodes, 1, group, width, 320, lengths, words, dtype, device)
    q, cache, *rest = case
    options = make_options(kind, group, dtype, device)
    out = kernels.tree_attention(*case, scale=scale, sliding_window=window, **options)
    assert_close(out, case, scale, window, **options)
    pages, table = in_pages(cache, 64)
    paged = kernels.tree_attention(q, pages, *rest, scale=scale, sliding_window=window, table=table, **options)
    assert_close(paged, case, scale, window, **options)
    capability = torch.cuda.get_device_capability() if CUDA else None
    use = kernels.settings_for(nodes * group, width, 1, 1, dtype, capability)._replace(min_tiles=1)
    one, several = (
        kernels._launch(*case, scale, window, use._replace(splits=3, programs=programs), **options)
        for programs in (1, 3)
    )
    assert_close(one, case, scale, window, **options)
    assert torch.equal(one, several)


@BOTH
@pytest.mark.parametrize("kind", ["sinks", "softcap"])
def test_sinks_and_softcap_matter(attend, kind, device):
    """A sink counts once and is not scaled; without a logit there is none."""
    case = make_case(2, 7, 2, 4, 64, 256, [100, 0], 1, torch.float32, device)
    case[1].nan_to_num_()
    options = make_options(kind, 8, torch.float32, device)
    plain = attend(*case, scale=0.125)
    none = {"sinks": {"sinks": torch.full((8,), float("-inf"), device=device)}, "softcap": {"softcap": 1e6}}[kind]
    torch.testing.assert_close(attend(*case, scale=0.125, **none), plain, rtol=1e-5, atol=1e-5)
    for wrong in ({}, {name: 0.8 * value for name, value in options.items()}):
        with pytest.raises(AssertionError):
            assert_close(attend(*case, scale=0.125, **wrong), case, 0.125, **options)


def test_large_sinks_do_not_overflow(device):
    case = make_case(1, 7, 1, 4, 64, 256, [190], 1, torch.float32, device)
    case = (30 * case[0], 30 * case[1], *case[2:])
    for size in (1e4, 1.0, -1e4):
        sinks = size * torch.tensor([0.5, 1.0, 2.0, -1.0], device=device)
        assert_close(kernels.tree_attention(*case, scale=0.125, sinks=sinks), case, 0.125, sinks=sinks)


def test_the_kernels_tanh_is_exact_near_zero(device):
    """Of one key and a sink of 0 the key's weight is 1 / (1 + exp(-score))."""
    lengths, ancestors = torch.ones(1, dtype=torch.int32, device=device), torch.zeros(1, 40, 1, dtype=torch.int64)
    for softcap, largest in ((1.0, 40.0), (1000.0, 3.0)):
        scores = largest * torch.cat([torch.logspace(-6, 0, 20), -torch.logspace(-6, 0, 20)]).to(device)
        q, cache = torch.zeros(1, 40, 1, 64, device=device), torch.zeros(2, 1, 1, 64, 64, device=device)
        q[0, :, 0, 0], cache[0, ..., 0, 0], cache[1, ..., 0, :] = scores, 1.0, 1.0
        options = {"scale": 1.0, "softcap": softcap, "sinks": torch.zeros(1, device=device)}
        out = kernels.tree_attention(q, cache, lengths, ancestors.to(device), **options)[0, :, 0, 0].double()
        expected = softcap * torch.tanh(scores.double() / softcap)
        torch.testing.assert_close(torch.logit(out), expected, rtol=0, atol=5e-6)


def test_zeros_would_fail(device):
    case = make_case(1, 7, 2, 4, 64, 128, [100], 1, torch.float16, device)
    with pytest.raises(AssertionError):
        assert_close(torch.zeros_like(case[0]), case, 0.125)


@pytest.mark.parametrize(
    "change",
    [
        {"splits": 1},
        {"splits": 5, "min_tiles": 1, "block_n": 128},
        {"block_n": 32, "block_t": 16},
        {"block_m": 128},
        {"tma": True},
        {"pdl": 1, "maxnreg": 168},
        {"pdl": 2},
        {"tma": True, "block_n": 128, "block_t": 32, "splits": 2},
    ],
    ids=str,
)
def test_other_settings_give_the_same(change, device):
    """Every path of the kernel, whatever the table picks for this device."""
    capability = torch.cuda.get_device_capability() if CUDA else None
    if change.keys() & {"pdl", "maxnreg"} and (capability is None or capability[0] < 9):
        pytest.skip("needs compute capability 9")
    case = make_case(2, 26, 1, 4, 64, 512, [70, 300], 1, torch.float16, device)
    use = kernels.settings_for(104, 64, 1, 2, torch.float16, capability)._replace(splits=4)
    use = use._replace(**change, streamed=False)
    for programs in {use.splits, 1}:
        assert_close(kernels._launch(*case, 0.125, None, use._replace(programs=programs)), case, 0.125)


@pytest.mark.cuda
@pytest.mark.parametrize("prefetch_before_wait", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("page_rows", [None, 64], ids=["dense", "pages"])
@pytest.mark.parametrize(
    ("nodes", "kv_heads", "group", "width", "words"),
    [
        (1, 8, 4, 128, 1),
        (10, 2, 4, 128, 1),
        (60, 8, 4, 128, 1),
        (60, 4, 7, 64, 1),
        (26, 2, 3, 80, 1),
        (26, 2, 1, 96, 2),
        (130, 2, 8, 128, 3),
        (300, 1, 2, 64, 5),
    ],
)
def test_streamed_keys_give_the_same_bits(
    nodes, kv_heads, group, width, words, page_rows, prefetch_before_wait, device
):
    """By one program for each split and by one for all: rows of any lengths, none committed or many."""
    if not CUDA or torch.cuda.get_device_capability() != (9, 0) or kernels._streamed() is None:
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    lengths = [0, 5, 64, 640, 1000, 2047]
    for dtype in (torch.float16, torch.bfloat16):
        case = make_case(len(lengths), nodes, kv_heads, group, width, 2560, lengths, words, dtype, device)
        q, cache, *rest = case
        cache, table = (cache, None) if page_rows is None else in_pages(cache, page_rows)
        use = kernels.settings_for(nodes * group, width, kv_heads, 1, dtype, (9, 0))
        assert use.streamed
        some = {"splits": 5, "min_tiles": 2}
        for change, new_keys, kind, window in (
            ({}, None, None, None),
            ({"min_tiles": 1}, nodes, "sinks", None),
            (some, nodes, None, None),
            ({}, None, "sinks", 64 * words),
            (some, nodes, None, 64 * words + 77),
        ):
            sinks = make_options(kind, kv_heads * group, dtype, device)["sinks"] if kind else None
            for programs in (1, use._replace(**change).splits):
                launch = use._replace(**change)._replace(programs=programs)
                options = {"prefetch_before_wait": prefetch_before_wait, "new_keys": new_keys, "sinks": sinks}
                out, expected = (
                    kernels._launch(q, cache, *rest, 0.1, window, one, table, **options)
                    for one in (launch, launch._replace(streamed=False))
                )
                assert torch.equal(out, expected)
                assert_close(out, case, 0.1, window, sinks=sinks)


@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6, whose Gluon compiles these kernels")
def test_products_let_the_next_kernel_start_behind_their_own_wait():
    """What is committed before a product is complete when attention reads it early (runtime/overlap.py)."""
    from eagle_triton.ops.linear import hopper as streamed
    from eagle_triton.ops.linear import hopper_fp8 as streamed_float8
    from eagle_triton.ops.linear import hopper_fp8_few_rows as paired_float8
    from eagle_triton.ops.linear import hopper_many_rows as wide

    for kernel, waits in (
        (streamed.linear_kernel, "gdc_wait()"),
        (paired_float8.linear_kernel, "gl.warp_specialize("),  # both ways of it end before what comes next
        (streamed_float8._compute_tile, "_multiply(ring"),
        (wide._multiply_columns, "_multiply(ring"),
    ):
        source = inspect.getsource(kernel.fn)
        assert source.count("gdc_launch_dependents()") == 1
        assert source.index("gdc_launch_dependents()") > source.index(waits)
    for loads in (paired_float8._load, streamed_float8._load, wide._load):
        assert inspect.getsource(loads.fn).count("gdc_wait()") == 1


def test_settings_stream_trees_on_hopper():
    bf16, hopper = torch.bfloat16, (9, 0)
    others = [(bf16, 128, capability) for capability in ((8, 0), (10, 0), None)]
    for dtype, width, capability in (*others, (torch.float32, 128, hopper), (bf16, 256, hopper), (bf16, 32, hopper)):
        assert not kernels.settings_for(240, width, 8, 1, dtype, capability).streamed
    for rows in (4, 40, 240):
        use = kernels.settings_for(rows, 128, 8, 1, torch.bfloat16, (9, 0))
        assert use.streamed == (triton_version() >= (3, 6)) and use.block_n == 64


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0), (10, 0)], ids=str)
def test_settings_split_where_the_rows_leave_the_device_empty(capability):
    """By the rows of one sequence alone; in a large batch one program takes them all."""
    few = 16 if capability else 8
    for batch, expected in ((1, [few, few, few, 8, 1]), (8, [few, few, few, 1, 1]), (16, [1, 1, 1, 1, 1])):
        uses = [kernels.settings_for(rows, 128, 8, batch, torch.bfloat16, capability) for rows in (1, 4, 40, 240, 4096)]
        assert [use.splits for use in uses] == [few, few, few, 8, 1]
        assert [use.programs for use in uses] == expected
        assert all(use.block_t <= min(use.block_n, 64) for use in uses)


@pytest.mark.parametrize(
    ("nodes", "group", "words", "window"),
    [(10, 4, 1, None), (70, 1, 2, 300), (70, 1, 0, 3)],
)
def test_a_program_that_takes_all_splits_gives_the_same_bits(nodes, group, words, window, device):
    case = make_case(3, nodes, 1, group, 64, 640, [70, 550, 0], words, torch.float16, device)
    use = kernels.settings_for(group * nodes, 64, 1, 3, torch.float16, None)
    for change in ({"splits": 8, "min_tiles": 1}, {"splits": 5, "min_tiles": 2, "block_n": 32, "block_t": 16}):
        split = use._replace(**change)
        expected = kernels._launch(*case, 0.125, window, split._replace(programs=split.splits))
        assert_close(expected, case, 0.125, window)
        assert torch.equal(kernels._launch(*case, 0.125, window, split._replace(programs=1)), expected)


@pytest.mark.parametrize("nodes", [1, 10])
def test_a_sequence_gets_the_same_whatever_the_capacity_and_the_batch_are(nodes, device):
    """Bit for bit: the splits follow from its length alone."""
    q, cache, lengths, ancestors = make_case(3, nodes, 2, 4, 64, 5056, [70, 4900, 0], 1, torch.float16, device)
    whole = kernels.tree_attention(q, cache, lengths, ancestors, scale=0.125)
    for slot, capacity in enumerate((192, 5056, 64)):
        one = slice(slot, slot + 1)
        alone = cache[:, one, :, :capacity].contiguous()
        out = kernels.tree_attention(q[one], alone, lengths[one], ancestors[one], scale=0.125)
        assert torch.equal(out, whole[one])


def test_large_scores_do_not_overflow(device):
    q, cache, lengths, ancestors = make_case(1, 7, 1, 4, 64, 128, [90], 1, torch.float32, device)
    case = (30 * q, 30 * cache, lengths, ancestors)
    check(case)


def test_strided_inputs(device):
    torch.manual_seed(0)
    q = torch.randn(2, 9, 3, 4 * 64).to(device, torch.float16)[:, :, 1].view(2, 9, 4, 64)
    cache = torch.randn(2, 2, 100, 2, 3, 64).to(device, torch.float16)[..., 1, :].transpose(2, 3)
    lengths = torch.tensor([90, 4], dtype=torch.int32, device=device)
    ancestors = torch.zeros(2, 9, 3, dtype=torch.int64, device=device)[:, :, 1:2]
    ancestors.copy_(pack_ancestors(random_trees(2, 9, 1)))
    assert not q.is_contiguous() and not cache.is_contiguous()
    check((q, cache, lengths, ancestors))


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_captured_graph_follows_the_lengths(device):
    q, cache, lengths, ancestors = make_case(1, 60, 8, 4, 128, 4096, [2000], 1, torch.bfloat16, device)
    cache.nan_to_num_()
    kernels.tree_attention(q, cache, lengths, ancestors, scale=0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.tree_attention(q, cache, lengths, ancestors, scale=0.1)
    for length in (0, 1, 700, 4000):
        lengths.fill_(length)
        graph.replay()
        assert torch.equal(out, kernels.tree_attention(q, cache, lengths, ancestors, scale=0.1))
        assert_close(out, (q, cache, lengths, ancestors), 0.1)


@pytest.mark.parametrize(
    ("page_rows", "words", "window"),
    [*((64, words, window) for words in (0, 1) for window in (None, 50)), (128, 1, 50), (256, 0, 50)],
)
def test_rows_in_pages_give_the_same_bits(device, page_rows, words, window):
    """256 rows: a page for each sequence."""
    lengths = [0, 130, 191, 250]
    case = make_case(4, 5, 2, 2, 64, 256, lengths, words, torch.float16, device)
    q, cache, *rest = case
    pages, table = in_pages(cache, page_rows)
    for module in (kernels, reference):
        expected = module.tree_attention(*case, scale=0.125, sliding_window=window)
        out = module.tree_attention(q, pages, *rest, scale=0.125, sliding_window=window, table=table)
        assert torch.equal(out, expected) and not out.isnan().any()


def test_sequences_may_share_pages(device):
    q, cache, _, _ = make_case(1, 3, 2, 2, 64, 256, [250], 0, torch.float32, device)
    pages, table = in_pages(cache, 64)
    q, lengths = q.expand(3, -1, -1, -1), torch.tensor([250, 100, 0], dtype=torch.int32, device=device)
    out = kernels.tree_attention(q, pages, lengths, scale=0.1, table=table.expand(3, -1))
    for one, length in enumerate(lengths):
        alone = kernels.tree_attention(q[:1], cache, length[None], scale=0.1)
        assert torch.equal(out[one], alone[0])


def good_arguments(device):
    q, cache, lengths, ancestors = make_case(2, 5, 2, 2, 64, 64, [3, 4], 1, torch.float32, device)
    return {"q": q, "cache": cache, "lengths": lengths, "ancestors": ancestors, "scale": 1.0}


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q": a["q"][0]}, "q must be"),
        (lambda a: {"q": a["q"][..., :32]}, "cache must be float32 .* 32\\]"),
        (lambda a: {"q": a["q"][:1]}, "cache must be float32 \\[2, 1, Hkv"),
        (lambda a: {"q": a["q"][:, :, :3]}, "multiple of the cache's 2 heads"),
        (lambda a: {"q": a["q"].half()}, "cache must be float16"),
        (lambda a: {"cache": a["cache"][:1]}, "cache"),
        (lambda a: {"lengths": a["lengths"].long()}, "lengths must be int32"),
        (lambda a: {"lengths": a["lengths"][:1]}, "lengths must be int32"),
        (lambda a: {"ancestors": a["ancestors"].int()}, "ancestors must be int64"),
        (lambda a: {"ancestors": a["ancestors"][:, :4]}, "ancestors must be int64"),
        (lambda a: {"ancestors": a["ancestors"][:, :, :0]}, "ancestors must be int64"),
        (lambda a: {"lengths": a["lengths"].to("meta")}, "got int32 .* on meta"),
        (lambda a: {"scale": 0.0}, "scale must be positive"),
        (lambda a: {"sinks": torch.zeros(3)}, "sinks must be .* \\[4\\]"),
        (lambda a: {"sinks": torch.zeros(4, 1)}, "sinks must be .* \\[4\\]"),
        (lambda a: {"sinks": torch.zeros(4).half().to(a["q"].device)}, "sinks must be float32 .* got float16"),
        (lambda a: {"sinks": torch.zeros(4, device="meta")}, "got float32 .* on meta"),
        (lambda a: {"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
        (lambda a: {"softcap": -5.0}, "softcap must be positive and finite"),
        (lambda a: {"softcap": float("inf")}, "softcap must be positive and finite"),
        (lambda a: {"softcap": float("nan")}, "softcap must be positive and finite"),
        (lambda a: {"sliding_window": 0}, "sliding_window must be at least 1"),
        (lambda a: {"new_keys": 0}, "new_keys must lie in 1..64"),
        (lambda a: {"new_keys": True}, "new_keys must lie in 1..64"),
        (lambda a: {"new_keys": 2.5}, "got 2.5 and"),
        (lambda a: {"new_keys": 65}, "new_keys must lie in 1..64 \\* W, got 65 and ancestors with W = 1"),
        (lambda a: {"new_keys": 5, "ancestors": None}, "new_keys .* got 5 and no ancestors"),
        (lambda a: {"table": torch.zeros(2, 1, dtype=torch.int64)}, "table must be int32"),
        (lambda a: {"table": torch.zeros(3, 1, dtype=torch.int32)}, "table must be int32 \\[2, M>0\\]"),
        (lambda a: {"table": torch.zeros(2, 0, dtype=torch.int32)}, "table must be int32"),
        (lambda a: {"table": torch.zeros(2, 1, dtype=torch.int32, device="meta")}, "got int32 .* on meta"),
    ],
)
def test_bad_arguments_raise(attend, change, message, device):
    arguments = good_arguments(device)
    with pytest.raises(ValueError, match=message):
        attend(**{**arguments, **change(arguments)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q": a["q"].double(), "cache": a["cache"].double()}, "fp16, bf16 or fp32"),
        (lambda a: {name: a[name].repeat_interleave(9, -1) for name in ("q", "cache")}, "d <= 512, .* got .* d = 576"),
        (lambda a: {"q": a["q"].mT.contiguous().mT}, "q must have stride 1"),
        (lambda a: {"cache": a["cache"].mT.contiguous().mT}, "cache must have stride 1"),
        (lambda a: {"sinks": torch.zeros(4, 2, device=a["q"].device)[:, 0]}, "sinks must have stride 1"),
        (lambda a: {"cache": a["cache"][:, :, :, :32], "table": a["lengths"].new_zeros(2, 2)}, "multiple of 64 rows"),
    ],
)
def test_what_only_the_kernel_refuses(change, message, device):
    arguments = good_arguments(device)
    with pytest.raises(ValueError, match=message):
        kernels.tree_attention(**{**arguments, **change(arguments)})


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 130])
def test_pack_and_unpack_ancestors(columns):
    matrix = torch.rand(2, 5, columns) < 0.5
    words = pack_ancestors(matrix)
    assert words.shape == (2, 5, -(-columns // 64))
    assert torch.equal(ancestor_matrix(words, columns), matrix)


def test_a_node_gives_the_same_in_a_tree_as_alone(device):
    """Other tiles, other splits, other rows: the sums have another order, but weights are rounded alike."""
    nodes, committed, capacity = 60, 1000, 2048
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 1, 1, capacity, 64, generator=generator).half().to(device)
    q = (4 * torch.randn(1, nodes, 2, 64, generator=generator)).half().to(device)
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(node, (), generator=generator))]
    lengths = torch.tensor([committed], dtype=torch.int32, device=device)
    together = kernels.tree_attention(q, cache, lengths, pack_ancestors(seen[None]).to(device), scale=0.125)
    different = total = 0
    for node in (7, 30, 59):
        path = seen[node].nonzero().flatten().to(device)
        alone = cache.clone()
        alone[:, :, :, committed : committed + len(path)] = cache[:, :, :, committed + path]
        itself = torch.ones(1, 1, 1, dtype=torch.int64, device=device)
        row = kernels.tree_attention(q[:, node : node + 1], alone, lengths + len(path) - 1, itself, scale=0.125)
        different += int((row[:, 0] != together[:, node]).sum())
        total += row.numel()
    assert different <= 0.02 * total, f"{different} of {total} elements differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("nodes", "group", "width", "rest", "words"),
    [(1, 20, 512, 64, 1), (7, 20, 512, 64, 1), (9, 5, 32, 8, 2), (12, 4, 256, 64, 0), (3, 16, 48, 20, 1)],
)
@pytest.mark.parametrize("page_rows", [None, 64], ids=["dense", "pages"])
def test_values_may_be_the_first_columns_of_keys(nodes, group, width, rest, words, page_rows, dtype, device):
    """Multi-head latent attention: one row for a token, which all heads read."""
    both = make_case(2, nodes, 1, group, width + rest, 256, [0, 150], words, dtype, device)
    q, cache, lengths, ancestors = both[0], both[1][:1].clone(), *both[2:]
    options = dict(scale=(width + rest) ** -0.5, value_width=width)
    values = torch.zeros_like(cache)
    values[..., :width] = cache[..., :width]
    plain = q, torch.cat([cache, values]), lengths, ancestors
    exact = reference.tree_attention(*both[:1], cache, lengths, ancestors, **options)
    whole = reference.tree_attention(*plain, scale=options["scale"])
    torch.testing.assert_close(exact, whole[..., :width])
    cache, table = (cache, None) if page_rows is None else in_pages(cache, page_rows)
    out = kernels.tree_attention(q, cache, lengths, ancestors, **options, table=table)
    assert out.shape == (*q.shape[:3], width)
    padded = torch.cat([out, torch.zeros_like(q[..., width:])], -1)
    assert_close(padded, plain, options["scale"])


@BOTH
def test_a_wrong_value_width_is_refused(attend, device):
    q, cache, lengths, ancestors = make_case(1, 3, 1, 4, 40, 64, [5], 1, torch.float32, device)
    for width in (0, 40, -1):
        with pytest.raises(ValueError, match=f"value_width must lie in 1..39, got {width}"):
            attend(q, cache[:1], lengths, ancestors, scale=1.0, value_width=width)
    with pytest.raises(ValueError, match=r"cache must be float32 \[1, 1, Hkv, T, 40\]"):
        attend(q, cache, lengths, ancestors, scale=1.0, value_width=32)
