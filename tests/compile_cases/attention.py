"""Production settings of the attention kernels: heads as of the 8b (32/8 heads, d 128) and 1b (32/8 heads, d 64)
shapes, of gpt-oss (sinks), Gemma 2 (softcap) and Gemma 4 (d 512)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from eagle_triton.attention import attend_committed, tree_attention
from eagle_triton.runtime.row_formats import RowFormat
from tests.compile_cases._launches import HOPPER, bf16, fp16, i32, i64, launches
from tests.compile_cases._products import EVERYWHERE

_HEADS, _KV_HEADS, _ROWS = 32, 8, 4096


def _operands(
    nodes: int, width: int, x: Callable[..., Tensor], page: int | None, batch: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, a cache, and a table of pages of so many rows. 0: a page for each sequence; None: no table."""
    rows = page or _ROWS
    table = None if page is None else i32(batch, _ROWS // rows)
    cache = x(2, batch * (_ROWS // rows), _KV_HEADS, rows, width)
    return x(batch, nodes, _HEADS, width), cache, table


def _tree(
    nodes: int,
    words: int,
    width: int = 128,
    x: Callable[..., Tensor] = bf16,
    page: int | None = None,
    batch: int = 1,
    target: str = HOPPER[0],
    gluon: bool = True,
    local: int = 0,
    form: RowFormat | None = None,
    **options: Any,
) -> list[tuple]:
    """words: of ancestors; 0: each node sees those before. local: bytes of local memory, but in a merge."""
    q, cache, table = _operands(nodes, width, x, page, batch)
    kernel = "tree_attention_kernel" if gluon else "_tree_attention_kernel"
    more = [*options, *([form.name] if form else [])]
    name = " ".join([f"N {nodes} of {batch} {words} words d {width} pages of {page} {q.dtype}", *more])
    return launches(
        name, tree_attention, q, cache, i32(batch), i64(batch, nodes, words) if words else None,
        scale=0.1, table=table, prefetch_before_wait=page is not None, row_format=form, **options,
        targets=(target,), gluon=gluon, options={"local": {kernel: local}},
    )  # fmt: skip


def _latent(nodes: int, words: int, heads: int, width: int = 512, local: int = 0, **options: Any) -> list[tuple]:
    """Latent attention: one row of `width` + 64 elements for all heads."""
    q, cache, table = bf16(1, nodes, heads, width + 64), bf16(1, 64, 1, 64, width + 64), i32(1, 64)
    return launches(
        f"N {nodes} {words} words {heads} heads of latents {width}", tree_attention, q, cache, i32(1),
        i64(1, nodes, words) if words else None, scale=0.1, table=table, value_width=width,
        options={"local": {"_tree_attention_kernel": local}}, **options,
    )  # fmt: skip


def _committed(target: str) -> list[tuple]:
    q, cache, table = _operands(2048, 128, bf16, 64, 1)
    return launches("committed", attend_committed, q, cache, _ROWS, scale=0.1, table=table, targets=(target,))


_WINDOW, _SINKS, _CAP = {"sliding_window": 1024}, {"sinks": bf16(_HEADS)}, {"softcap": 50.0}
# Local memory: a word of a mask, once a program, with a window; the sums of the splits before, once a split, where a
# program takes all; addresses where heads are wide. With d 256 and a tree, tiles with new keys have 64 keys, which is
# faster than tiles of 32 all the same.
_PORTABLE = (
    partial(_tree, 60, 1),
    partial(_tree, 10, 2),
    partial(_tree, 8, 0),
    partial(_tree, 1, 1),
    partial(_tree, 512, 0),
    partial(_tree, 60, 1, **_WINDOW, local=8),
    partial(_tree, 60, 1, 64),
    partial(_tree, 60, 1, x=fp16),
    partial(_tree, 60, 1, 256, local=400),
    partial(_tree, 60, 1, page=0),
    partial(_tree, 60, 1, page=64),
    partial(_tree, 64, 0, page=64),
    partial(_tree, 60, 1, page=64, batch=64, local=64),
    partial(_tree, 1, 1, page=64, batch=64, local=64),
    partial(_tree, 60, 1, 256, page=64, batch=64, **_WINDOW, local=700),
    partial(_tree, 60, 1, 64, page=64, **_WINDOW, **_SINKS, local=8),
    partial(_tree, 60, 1, 256, page=64, **_WINDOW, **_CAP, local=400),
    partial(_tree, 512, 0, 64, page=64, **_WINDOW, **_SINKS, local=8),
    partial(_tree, 512, 0, 256, page=64, **_WINDOW, **_CAP, local=8),
    partial(_tree, 60, 1, 512, page=64, batch=64, local=64),
    partial(_tree, 1, 1, 512, page=64, batch=64, local=64),
    partial(_tree, 512, 0, 512, page=64, local=16),
    partial(_tree, 60, 1, 512, local=16),
)
CASES = [
    case
    for target in EVERYWHERE
    for cases in (*(attend(target=target, gluon=False) for attend in _PORTABLE), _committed(target))
    for case in cases
]
CASES += [
    case
    for target in EVERYWHERE
    for cases in (
        _latent(60, 1, 20, targets=(target,), local=560),
        _latent(1, 1, 20, targets=(target,), local=240),
        _latent(512, 0, 20, targets=(target,), local=544),
        _latent(60, 1, 128, targets=(target,), local=456),
        _latent(60, 1, 40, 256, targets=(target,), local=104),
    )
    for case in cases
]
CASES += [
    case
    for cases in (
        *(_tree(nodes, 1, page=64, form=form) for nodes in (1, 60) for form in (None, *RowFormat)),
        _tree(60, 1, page=64, batch=8, form=RowFormat.WORD_ORDER, local=64),
        _tree(60, 1, x=fp16),
        _tree(256, 4, page=0, batch=2, local=64),
        _tree(8, 1, 80, page=64, batch=32, local=64),
        _tree(60, 1, 64, page=64, **_SINKS),
        _tree(60, 1, page=64, batch=8, **_SINKS, local=64),
        _tree(1, 1, 64, page=64, **_WINDOW, **_SINKS),
        _tree(60, 1, page=64, batch=8, **_WINDOW, local=104),
    )
    for case in cases
]
