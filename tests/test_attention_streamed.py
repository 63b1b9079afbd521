"""ops/attention_hopper.py by its own Python: tiles, slots, splits, masks and early reads, all but layouts.

tests/test_attention.py has its bits on a Hopper GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_triton import attention as launchers
from eagle_triton.attention import Settings, settings_for
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.reference import attention as reference
from eagle_triton.runtime.launch import recorded
from tests.gluon_by_python import run as run_by_python
from tests.test_attention import in_pages, random_trees

streamed = launchers._streamed()
if streamed is None:
    pytest.skip("needs Triton 3.6", allow_module_level=True)

SCALE = 0.2
ASSEMBLY = {
    **dict.fromkeys((streamed._ROUND_BF16.value, streamed._ROUND_FP16.value), lambda x: (x, x)),
    **dict.fromkeys((streamed._SCALE_32.value, streamed._SCALE_64.value), lambda sums, factors: sums * factors),
}


def settings(nodes: int, group: int, width: int, **change: Any) -> Settings:
    use = settings_for(nodes * group, width, 1, 1, torch.bfloat16, (9, 0))
    return use._replace(streamed=True, pdl=0, **change)


def attend(
    case: tuple,
    use: Settings,
    table: torch.Tensor | None,
    new: torch.Tensor,
    window: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """What the kernel makes of it, its splits added up. new: which rows of the cache's memory hold new keys."""
    q, cache, lengths, ancestors = case
    with recorded() as launches:
        out = launchers._launch(q, cache, lengths, ancestors, SCALE, window, use, table, **options)
    found, *merge = launches.values()
    assert found.kernel is streamed.tree_attention_kernel and len(merge) == (use.programs > 1)
    given = dict(zip(found.kernel.arg_names, found.args, strict=False))
    given |= {name: value for name, value in found.options.items() if name in found.kernel.arg_names}
    out.fill_(float("nan"))
    if merge:  # splits without keys write nothing
        given["parts"].sums.zero_()
        given["parts"].softmax.zero_()[:, :, :, 0] = float("-inf")
    late = {"q": True, "ancestors": True, "cache_desc": new}
    if not options["prefetch_before_wait"]:
        late = dict.fromkeys((*late, "lengths_ptr", "table_ptr"), True)
    run_by_python(found.kernel, found.grid, given, late, ASSEMBLY)
    if not merge:
        return out
    assert out.isnan().all(), "who attends one split stored the sum of all"
    partial, softmax = (part.double() for part in given["parts"])
    top, total = softmax.unbind(3)  # [B, Hkv, splits, rows]
    beside = (top - top.amax(2, keepdim=True)).exp2()
    sums = (partial * beside[..., None]).sum(2) / (total * beside).sum(2)[..., None]
    return sums.unflatten(2, (q.shape[1], -1)).transpose(1, 2).reshape(q.shape)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of splits are of fp32, what is stored as q is rounded to fp16."""
    tolerance = 2.0**-10 if out.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def memory_rows(cache: torch.Tensor, table: torch.Tensor | None, lengths: list[int]) -> torch.Tensor:
    """Of the memory's rows: which hold keys and values behind the committed ones."""
    marks = torch.zeros(cache.shape[:4], dtype=torch.bool)
    for sequence, length in enumerate(lengths):
        if table is None:
            marks[:, sequence, :, length:] = True
        else:
            for row in range(length, cache.shape[3] * table.shape[1]):
                marks[:, table[sequence, row // cache.shape[3]], :, row % cache.shape[3]] = True
    rows = launchers._rows_of_memory(cache)
    assert rows is not None
    flat = torch.zeros(len(rows), dtype=torch.bool)
    strides = [stride // cache.shape[4] for stride in cache.stride()[:4]]
    flat.as_strided(cache.shape[:4], strides).copy_(marks)
    return flat


LATE, EARLY, PAGES_OF_64, PAGES_OF_128 = (None, False), (None, True), (64, True), (128, False)


@pytest.mark.parametrize(
    ("nodes", "group", "width", "words", "new_keys", "page_rows", "prefetch_before_wait"),
    [
        *((1, 4, 64, 1, 1, *way) for way in (LATE, PAGES_OF_64)),
        *((1, 4, 64, 1, None, *way) for way in (EARLY, PAGES_OF_128)),
        *((10, 2, 128, 1, None, *way) for way in (LATE, EARLY, PAGES_OF_64, PAGES_OF_128)),
        (60, 1, 64, 1, 60, *EARLY),
        *((70, 1, 80, 2, 70, *way) for way in (LATE, PAGES_OF_64)),
    ],
)
def test_every_row_of_any_length(nodes, group, width, words, new_keys, page_rows, prefetch_before_wait):
    """By one program for each split and by one for all; behind the new keys lies NaN."""
    torch.manual_seed(nodes)
    lengths, kv_heads, capacity = [0, 64, 250, 383], 2, 512
    q = torch.randn(len(lengths), nodes, kv_heads * group, width).half()
    cache = torch.randn(2, len(lengths), kv_heads, capacity, width).half()
    for sequence, length in enumerate(lengths):
        cache[:, sequence, :, length + nodes :] = float("nan")
    ancestors = pack_ancestors(random_trees(len(lengths), nodes, words))
    given = torch.tensor(lengths, dtype=torch.int32)
    expected = reference.tree_attention(q.double(), cache.double(), given, ancestors, scale=SCALE)
    cache, table = (cache, None) if page_rows is None else in_pages(cache, page_rows)
    new = memory_rows(cache, table, lengths)
    for change in ({}, {"splits": 5, "min_tiles": 1}):
        use = settings(nodes, group, width, **change)
        for programs in (1, use.splits):
            case = (q, cache, given, ancestors)
            options = {"new_keys": new_keys, "prefetch_before_wait": prefetch_before_wait}
            out = attend(case, use._replace(programs=programs), table, new, **options)
            assert_close(out, expected)


@pytest.mark.parametrize(("nodes", "group", "width"), [(1, 8, 64), (9, 2, 128)])
def test_the_first_split_carries_the_sinks(nodes, group, width):
    torch.manual_seed(nodes)
    lengths, heads = [0, 64, 383], 2 * group
    q, cache = torch.randn(3, nodes, heads, width).half(), torch.randn(2, 3, 2, 512, width).half()
    given, ancestors = torch.tensor(lengths, dtype=torch.int32), pack_ancestors(random_trees(3, nodes, 1))
    ancestors[:, nodes // 2] = 0  # and sees committed rows alone
    sinks, new = 3 * torch.randn(heads), memory_rows(cache, None, lengths)
    expected = reference.tree_attention(q.double(), cache.double(), given, ancestors, scale=SCALE, sinks=sinks)
    for programs, splits in ((1, 1), (1, 3), (3, 3)):
        use = settings(nodes, group, width, splits=splits, programs=programs, min_tiles=1)
        options = {"new_keys": nodes, "prefetch_before_wait": True}
        out = attend((q, cache, given, ancestors), use, None, new, **options, sinks=sinks)
        assert_close(out, expected)


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, 5.0), (63, None)], ids=["a cap", "a window that may hide ancestors"]
)
def test_what_the_other_kernel_attends(window, softcap):
    q, cache, lengths = torch.zeros(1, 3, 2, 64).half(), torch.zeros(2, 1, 1, 128, 64).half(), torch.ones(1).int()
    ancestors = pack_ancestors(random_trees(1, 3, 1))
    with recorded() as launches:
        use = settings(3, 2, 64, programs=1)
        launchers._launch(q, cache, lengths, ancestors, SCALE, window, use, softcap=softcap)
    (found,) = launches.values()
    assert found.kernel is launchers._tree_attention_kernel


@pytest.mark.parametrize(
    ("nodes", "group", "width", "words", "page_rows"),
    [(1, 8, 64, 1, None), (60, 1, 128, 1, 64), (70, 2, 64, 2, None), (70, 2, 64, 2, 64)],
)
def test_windows_that_hold_all_ancestors(nodes, group, width, words, page_rows):
    """Before every node's window lies NaN. Windows end on a tile's edge and elsewhere, or hold all keys."""
    torch.manual_seed(nodes)
    lengths = [1, 90, 191, 192, 383]
    for window in (64 * words, 64 * words + 37, 1000):
        q = torch.randn(len(lengths), nodes, 2 * group, width).half()
        cache = torch.randn(2, len(lengths), 2, 512, width).half()
        given, ancestors = torch.tensor(lengths, dtype=torch.int32), pack_ancestors(random_trees(5, nodes, words))
        ancestors[:, nodes // 2] = 0  # and its window is the first
        options = {"scale": SCALE, "sliding_window": window}
        expected = reference.tree_attention(q.double(), cache.double(), given, ancestors, **options)
        for sequence, length in enumerate(lengths):
            cache[:, sequence, :, length + nodes :] = float("nan")
            cache[:, sequence, :, : max(0, length - window)] = float("nan")
        table, keys = None, cache
        if page_rows is not None:
            keys, table = in_pages(cache, page_rows)
        new = memory_rows(keys, table, lengths)
        for programs, splits in ((1, 1), (1, 3), (3, 3)):
            use = settings(nodes, group, width, splits=splits, programs=programs, min_tiles=1)
            case = (q, keys, given, ancestors)
            out = attend(case, use, table, new, window, new_keys=None, prefetch_before_wait=True)
            assert_close(out, expected)


def test_sums_are_scaled_where_a_maximum_grows():
    """Scores of tiles that grow and fall, over one split and over several."""
    torch.manual_seed(1)
    length, width = 400, 64
    q, cache = torch.randn(1, 3, 2, width).half(), torch.randn(2, 1, 1, 512, width).half()
    for tile in range(8):
        cache[0, :, :, 64 * tile : 64 * tile + 64] *= (1, 9, 3, 30, 2, 60, 1, 90)[tile]
    given, ancestors = torch.tensor([length], dtype=torch.int32), pack_ancestors(random_trees(1, 3, 1))
    expected = reference.tree_attention(q.double(), cache.double(), given, ancestors, scale=SCALE)
    new = memory_rows(cache, None, [length])
    for programs, splits in ((1, 1), (1, 3), (3, 3)):
        use = settings(3, 2, width, splits=splits, programs=programs, min_tiles=1)
        out = attend((q, cache, given, ancestors), use, None, new, new_keys=3, prefetch_before_wait=True)
        assert_close(out, expected)
