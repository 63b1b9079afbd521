"""RMSNorm and LayerNorm, alone or after a sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.layers import check_add, check_embed_rms_norm, check_rms_norm
from eagle_triton.ops.layers.fp8_pair_rows import empty_pair, store_pair
from eagle_triton.ops.layers.values import SplitRows, contiguous_rows, in_word_order, load_sum, rounded
from eagle_triton.ops.views import PairParts, Rows
from eagle_triton.runtime.launch import DRAFT_WARPS
from eagle_triton.runtime.overlap import await_others, let_next_start, overlapped
from eagle_triton.runtime.peer_exchange import MIN_SENT, Peers, receive, row_at, send, signal_and_wait
from eagle_triton.runtime.peer_memory import PeerMemory
from eagle_triton.runtime.row_formats import Float8Pair, FormattedRows, ProductRows, RowFormat, WordOrdered, has_format
from eagle_triton.runtime.split_sums import Product, SharedRows, SharedSums


@triton.jit
def normalise(x, eps, size: tl.constexpr):
    """x / sqrt(mean(x^2) + eps) over the last of two axes. Its padding beyond `size` is 0."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None]


@triton.jit
def before_weight(normed, DTYPE: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROUND_FIRST: tl.constexpr = True):
    """Normalised fp32 values before a norm's weight: rounded to DTYPE if ROUND_FIRST and not ZERO_CENTRED."""
    if ROUND_FIRST and not ZERO_CENTRED:
        normed = rounded(normed, DTYPE)
    return normed


@triton.jit
def load_weight(ptrs, mask, ZERO_CENTRED: tl.constexpr):
    """A norm's weight in fp32; 1 + weight with ZERO_CENTRED."""
    return weight_of(tl.load(ptrs, mask=mask, other=0.0), ZERO_CENTRED)


@triton.jit
def weight_of(parameter, ZERO_CENTRED: tl.constexpr):
    """`load_weight` of a loaded parameter."""
    weight = parameter.to(tl.float32)
    if ZERO_CENTRED:
        weight = 1.0 + weight
    return weight


@triton.jit
def load_row_weight(
    weight_ptr, size: tl.constexpr, BLOCK: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROUND: tl.constexpr = False
):
    """`load_weight` of a whole row, [1, BLOCK]. It may be loaded early: see runtime/overlap.py. ROUND: 1 + weight is
    rounded to the weight's dtype."""
    offs = tl.arange(0, BLOCK)[None, :]
    weight = weight_of(tl.load(weight_ptr + offs, mask=offs < size, other=0.0, cache_modifier=".cg"), ZERO_CENTRED)
    if ROUND and ZERO_CENTRED:
        weight = rounded(weight, weight_ptr.dtype.element_ty)
    return weight


@triton.jit
def weight_in_turn(weights, row, WEIGHTS: tl.constexpr):
    """The pointer to a row's weight, of several that rows take in turn."""
    weight_ptr = weights[0]
    for turn in tl.static_range(1, WEIGHTS):
        weight_ptr = tl.where(row % WEIGHTS == turn, weights[turn], weight_ptr)
    return weight_ptr


@triton.jit
def norm_row(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    total_ptr,
    stride_split,
    eps,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr = True,
):
    """RMSNorm of one row at the given pointers. Without `weight_ptr` the row is only summed and rounded. Returns the
    stored values, [1, BLOCK]."""
    weight = None
    if weight_ptr is not None:
        weight = load_row_weight(weight_ptr, size, BLOCK, ZERO_CENTRED)
    return norm_row_by(
        x_ptr,
        weight,
        residual_ptr,
        out_ptr,
        total_ptr,
        stride_split,
        eps,
        size,
        BLOCK,
        SPLITS,
        ZERO_CENTRED,
        ROUND_FIRST,
    )


@triton.jit
def norm_row_by(
    x_ptr,
    weight,
    residual_ptr,
    out_ptr,
    total_ptr,
    stride_split,
    eps,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr = True,
    WORD_ORDER: tl.constexpr = False,
    own_weight=None,
    bias=None,
    SUBTRACT_MEAN: tl.constexpr = False,
):
    """`norm_row` with a loaded weight, [1, BLOCK] fp32 or None. WORD_ORDER: store columns in the order of WordOrdered.
    own_weight: the weight of x's own norm, before the residual is added. bias [1, BLOCK] fp32, SUBTRACT_MEAN:
    LayerNorm's."""
    offs = tl.arange(0, BLOCK)[None, :]
    mask = offs < size
    kind: tl.constexpr = out_ptr.dtype.element_ty
    x = rounded(load_sum(x_ptr + offs, stride_split, mask, SPLITS), kind)
    if own_weight is not None:
        x = rounded(before_weight(normalise(x, eps, size), kind, ZERO_CENTRED, ROUND_FIRST) * own_weight, kind)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return _norm_and_store(
        x,
        weight,
        bias,
        out_ptr,
        total_ptr,
        offs,
        mask,
        eps,
        size,
        ZERO_CENTRED,
        ROUND_FIRST,
        SUBTRACT_MEAN,
        WORD_ORDER,
    )


@triton.jit
def _norm_and_store(
    x,
    weight,
    bias,
    out_ptr,
    total_ptr,
    offs,
    mask,
    eps,
    size: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WORD_ORDER: tl.constexpr,
):
    """Store a row's sum x [1, BLOCK], if `total_ptr` is given, and its norm, which is returned."""
    kind = out_ptr.dtype.element_ty
    if total_ptr is not None:
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offs, total, mask=mask)
        x = total.to(tl.float32)
    if weight is not None:
        if SUBTRACT_MEAN:
            x = tl.where(mask, x - (tl.sum(x, axis=1) / size)[:, None], 0.0)
        first: tl.constexpr = ROUND_FIRST and not SUBTRACT_MEAN
        x = before_weight(normalise(x, eps, size), kind, ZERO_CENTRED, first) * weight
        if bias is not None:
            x += bias
    x = x.to(kind)
    tl.store(out_ptr + offs, in_word_order(x) if WORD_ORDER else x, mask=mask)
    return x


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["tokens_ptr"])
def _rms_norm_kernel(
    x,
    tokens_ptr,
    weight_ptr,
    own_weight_ptr,
    bias_ptr,
    residual,
    out_ptr,
    total,
    pair,
    rows,
    eps,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WORD_ORDER: tl.constexpr,
    WEIGHTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,): a program norms one row of x, or with tokens the row of its token, and stores its pair if `pair` is
    given.

    WORD_ORDER: store columns in the order of WordOrdered. If WEIGHTS is above 1, `weight_ptr` is a tuple of WEIGHTS
    weights, which rows take in turn."""
    let_next_start(PDL)
    weight = None
    if WEIGHTS > 1:
        own_ptr = weight_in_turn(weight_ptr, tl.program_id(0), WEIGHTS)
        weight = load_row_weight(own_ptr, size, BLOCK, ZERO_CENTRED, SUBTRACT_MEAN)
    elif weight_ptr is not None:
        weight = load_row_weight(weight_ptr, size, BLOCK, ZERO_CENTRED, SUBTRACT_MEAN)
    own_weight = None
    if own_weight_ptr is not None:
        own_weight = load_row_weight(own_weight_ptr, size, BLOCK, ZERO_CENTRED)
    bias = None
    if bias_ptr is not None:
        bias = load_row_weight(bias_ptr, size, BLOCK, False)
    await_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = row
    if tokens_ptr is not None:
        source = tl.maximum(tl.load(tokens_ptr + row), 0)
    residual_ptr = residual.ptr + row * residual.row if residual is not None else None
    total_ptr = total.ptr + row * total.row if total is not None else None
    out = norm_row_by(
        x.ptr + source * x.row,
        weight,
        residual_ptr,
        out_ptr + row * size,
        total_ptr,
        x.split,
        eps,
        size,
        BLOCK,
        SPLITS,
        ZERO_CENTRED,
        ROUND_FIRST,
        WORD_ORDER,
        own_weight,
        bias,
        SUBTRACT_MEAN,
    )
    if pair is not None:
        WIDTH: tl.constexpr = min(BLOCK, 128)
        wide = tl.where(tl.arange(0, BLOCK)[None, :] < size, out.to(tl.float32), 0.0)
        store_pair(tl.reshape(wide, (BLOCK // WIDTH, WIDTH)), 0, pair, row, rows, size)


@triton.jit(do_not_specialize=["table_rows", "polls"], do_not_specialize_on_alignment=["tokens_ptr"])
def _shared_rms_norm_kernel(
    x,
    tokens_ptr,
    table_rows,
    weight_ptr,
    bias_ptr,
    residual,
    out_ptr,
    total,
    peers,
    polls,
    eps,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    SENT: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WORD_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,): one program per row; x is this rank's part of it. A program adds up the part's splits and stores
    the sum where the other ranks read it, or with SENT sends it to them. It waits for their parts, and adds them like
    splits in `norm_row`, in the order of the ranks. With tokens, x is this rank's part of a table with `table_rows`
    rows.
    """
    let_next_start(PDL)
    weight = None
    if weight_ptr is not None:
        weight = load_row_weight(weight_ptr, size, BLOCK, ZERO_CENTRED, SUBTRACT_MEAN)
    bias = None
    if bias_ptr is not None:
        bias = load_row_weight(bias_ptr, size, BLOCK, False)
    await_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = offs < size
    part_kind: tl.constexpr = x.ptr.dtype.element_ty
    use = tl.load(peers.uses + row) + 1
    source, mine = row, mask
    if tokens_ptr is not None:
        source = tl.maximum(tl.load(tokens_ptr + row), 0) - peers.rank * table_rows
        mine = mask & (source >= 0) & (source < table_rows)
    part = load_sum(x.ptr + source * x.row + offs, x.split, mine, SPLITS)
    if SENT:
        part = rounded(part, part_kind)
        place = (use & 1) * RANKS * peers.sent_rows + row
        mine_at = (place + peers.rank * peers.sent_rows) * peers.word_width
        send(peers.words, part, mine_at, offs, mask, use, peers.rank, RANKS)
    else:
        place = ((use & 1) * peers.place_rows + row) * peers.place_width
        tl.store(row_at(peers.places, peers.rank, place, offs, part_kind), part.to(part_kind), mask=mask)
    if residual is not None:  # it loads while this program waits
        added = tl.load(residual.ptr + row * residual.row + offs, mask=mask, other=0.0).to(tl.float32)
    if SENT:
        whole = part
        for other in range(RANKS):
            theirs = part
            if other != peers.rank:
                start = (place + other * peers.sent_rows) * peers.word_width
                theirs = receive(
                    peers.words,
                    start,
                    offs,
                    mask,
                    use,
                    peers.rank,
                    peers.failed,
                    peers.failed_on_host,
                    polls,
                    tl.float32,
                )
            whole = tl.where(other == 0, theirs, whole + theirs)
        tl.debug_barrier()
    else:
        signal_and_wait(peers.signals, peers.failed, peers.failed_on_host, row, use, peers.rank, polls, RANKS)
        whole = tl.load(row_at(peers.places, 0, place, offs, part_kind), mask=mask, other=0.0).to(tl.float32)
        for other in tl.static_range(1, RANKS):
            theirs = tl.load(row_at(peers.places, other, place, offs, part_kind), mask=mask, other=0.0)
            whole += theirs.to(tl.float32)
    tl.store(peers.uses + row, use)  # after a barrier: every thread has read it
    whole = rounded(whole, out_ptr.dtype.element_ty)
    if residual is not None:
        whole += added
    total_ptr = total.ptr + row * total.row if total is not None else None
    out_ptr += row * size
    _norm_and_store(
        whole,
        weight,
        bias,
        out_ptr,
        total_ptr,
        offs,
        mask,
        eps,
        size,
        ZERO_CENTRED,
        ROUND_FIRST,
        SUBTRACT_MEAN,
        WORD_ORDER,
    )


class NormKind(NamedTuple):
    """What norms differ in: see `rms_norm`."""

    zero_centred: bool = False
    round_first: bool = True
    subtract_mean: bool = False
    in_draft_pass: bool = False


def check_contiguous(name: str, *weights: Tensor | None) -> None:
    """Raise ValueError for a norm's weight or bias that would have to be copied: kernels may read it before the copy
    exists."""
    for weight in weights:
        if weight is not None and not weight.is_contiguous():
            raise ValueError(f"{name}: a norm's weight must be contiguous, got stride {weight.stride()}")


def norm_warps(size: int, in_draft_pass: bool = False) -> int:
    """Warps for a row of `size` elements; in a draft pass the megakernel's, so that the order of sums is the same."""
    elements = 128 if 1024 <= size < 4096 else 512  # of a warp, measured on an H200
    return DRAFT_WARPS if in_draft_pass else min(max(triton.next_power_of_2(size) // elements, 1), 16)


def rms_norm(
    x: Product,
    weight: Tensor | tuple[Tensor, ...],
    eps: float,
    *,
    zero_centred: bool = False,
    round_first: bool = True,
    subtract_mean: bool = False,
    bias: Tensor | None = None,
    in_draft_pass: bool = False,
    row_format: RowFormat | None = None,
) -> ProductRows:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension. x [..., H], weight [H].

    With several weights, x [..., G, H] has a row for each. `zero_centred`: the factor is 1 + weight. `round_first`: see
    reference.rms_norm. LayerNorm with `subtract_mean`: the row's mean is subtracted first, and bias [H] added to the
    product. With `in_draft_pass` the bits are the megakernel's. Returns [..., H] in the weight's dtype, or in
    `row_format` where products take it: few rows of 16 bits on a Hopper GPU. Raises ValueError for shapes, dtypes or
    devices that do not fit, and for a weight or bias that is not contiguous.
    """
    check_rms_norm("rms_norm", x, weight, bias=bias, subtract_mean=subtract_mean)
    weights = weight if isinstance(weight, tuple) else (weight,)
    check_contiguous("rms_norm", *weights, bias)
    out = weights[0].new_empty(x.shape)
    formatted = _formatted(x, out, row_format)
    weight = weights if len(weights) > 1 else weights[0]
    kind = NormKind(zero_centred, round_first, subtract_mean, in_draft_pass)
    _launch_norm(x, weight, eps, None, out, None, kind, formatted=formatted, bias=bias)
    return out if formatted is None else formatted


def _formatted(x: Product | SharedRows, out: Tensor, row_format: RowFormat | None) -> FormattedRows | None:
    """Room for `out` in this format, if products read it and the kernel that adds up x can make it."""
    if not has_format(out, row_format):
        return None
    if row_format is RowFormat.WORD_ORDER:
        return WordOrdered(out.view(-1, out.shape[-1]), out.shape)
    return None if isinstance(x, SharedSums | SharedRows) else empty_pair(out.shape, out)


def embed_rms_norm(
    tokens: Tensor,
    embedding: Tensor | SharedRows,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    round_first: bool = True,
    subtract_mean: bool = False,
    bias: Tensor | None = None,
    in_draft_pass: bool = False,
    total: Tensor | None = None,
    row_format: RowFormat | None = None,
) -> tuple[ProductRows, Tensor]:
    """(rms_norm(x), x) of x = embedding[max(tokens, 0)], [..., H] each, in one pass.

    tokens [...] int64, below V (not checked); embedding [V, H], weight [H]. `total` [..., H], perhaps with strided
    rows: x is written there. `zero_centred` to `row_format`: see rms_norm.
    """
    check_embed_rms_norm(tokens, embedding, weight, total, bias)
    check_contiguous("embed_rms_norm", weight, bias)
    table = embedding.rows if isinstance(embedding, SharedRows) else embedding
    if table.stride(1) != 1:
        raise ValueError(f"embed_rms_norm: the embedding's rows must be contiguous, got strides {table.stride()}")
    shape = (*tokens.shape, embedding.shape[1])
    out, total = weight.new_empty(shape), weight.new_empty(shape) if total is None else total
    formatted = _formatted(embedding, out, row_format)
    kind = NormKind(zero_centred, round_first, subtract_mean, in_draft_pass)
    _launch_norm(embedding, weight, eps, None, out, total, kind, tokens, formatted, bias=bias)
    return (out if formatted is None else formatted), total


def add_rms_norm(
    x: Product,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    round_first: bool = True,
    subtract_mean: bool = False,
    bias: Tensor | None = None,
    in_draft_pass: bool = False,
    total: Tensor | None = None,
    row_format: RowFormat | None = None,
    own_weight: Tensor | None = None,
) -> tuple[ProductRows, Tensor]:
    """(rms_norm(x + residual), x + residual), [..., H] each, in one pass. x, residual [..., H], weight [H].

    own_weight [H]: x is its RMSNorm with this weight first. `total` [..., H], perhaps with strided rows: the sum is
    written there. `zero_centred` to `row_format`: see rms_norm.
    """
    check_rms_norm("add_rms_norm", x, weight, residual, total, own_weight, bias, subtract_mean)
    check_contiguous("add_rms_norm", weight, own_weight, bias)
    kind = NormKind(zero_centred, round_first, subtract_mean, in_draft_pass)
    if own_weight is not None and isinstance(x, SharedSums):  # ranks exchange their parts in the norm of x
        kept = weight.new_empty(x.shape)
        _launch_norm(x, own_weight, eps, None, kept, None, kind)
        x, own_weight = kept, None
    out, total = weight.new_empty(x.shape), weight.new_empty(x.shape) if total is None else total
    formatted = _formatted(x, out, row_format)
    _launch_norm(x, weight, eps, residual, out, total, kind, formatted=formatted, own_weight=own_weight, bias=bias)
    return (out if formatted is None else formatted), total


def add(x: Product, residual: Tensor | None = None) -> Tensor:
    """x + residual, or the sum of SplitSums alone, rounded once: [..., H]."""
    check_add(x, residual)
    if residual is None and isinstance(x, Tensor):
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, 0.0, residual, out, None, NormKind())
    return out


def _launch_norm(
    x: Product | SharedRows,
    weight: Tensor | tuple[Tensor, ...] | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    kind: NormKind,
    tokens: Tensor | None = None,
    formatted: FormattedRows | None = None,
    own_weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Launch one program for each row of `out`, which is contiguous. `formatted`: a pair to store as well, or `out` in
    another order."""
    if not out.numel():
        return
    size, count = out.shape[-1], out.shape[:-1].numel()
    residual = None if residual is None else contiguous_rows(residual)
    part = x.part if isinstance(x, SharedSums) else x.rows if isinstance(x, SharedRows) else x
    source, splits = SplitRows.of(part)
    block = triton.next_power_of_2(size)
    tokens = None if tokens is None else tokens.contiguous().view(-1)
    total = None if total is None else total.view(count, size)
    if isinstance(x, SharedSums | SharedRows):
        assert not isinstance(weight, tuple), "ranks exchange parts of rows with one weight"
        _launch_shared_norm(
            x.peers, source, tokens, weight, bias, residual, out.view(count, size), total, splits, eps, kind,
            isinstance(formatted, WordOrdered),
        )  # fmt: skip
        return
    overlapped(_rms_norm_kernel, (count,), out.device)(
        source,
        tokens,
        weight,
        own_weight,
        bias,
        Rows.of(residual),
        out,
        Rows.of(total),
        PairParts.of(formatted if isinstance(formatted, Float8Pair) else None),
        count,
        eps,
        size,
        block,
        splits,
        *kind[:3],
        isinstance(formatted, WordOrdered),
        len(weight) if isinstance(weight, tuple) else 1,
        num_warps=norm_warps(size, kind.in_draft_pass),
    )


def _launch_shared_norm(
    peers: PeerMemory,
    source: SplitRows,
    tokens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    splits: int,
    eps: float,
    kind: NormKind,
    word_order: bool,
) -> None:
    """`_launch_norm` where ranks exchange parts, in several launches if their memory is too small for one. source:
    parts of the rows of `out` [n, H], or with tokens [n] of a table."""
    (count, size), rows = out.shape, source.ptr
    warps = norm_warps(size, kind.in_draft_pass)
    block = triton.next_power_of_2(size)
    if not peers.fits(rows):
        raise ValueError(f"rows of {size} do not fit into the ranks' memory for {peers.row_bytes} bytes of each")
    for first, last in peers.pieces(count):

        def piece(tensor: Tensor | None, first: int = first, last: int = last) -> Tensor | None:
            return None if tensor is None else tensor[first:last]

        overlapped(_shared_rms_norm_kernel, (last - first,), out.device)(
            source._replace(ptr=rows[..., first:last, :]) if tokens is None else source,
            piece(tokens),
            rows.shape[-2],
            weight,
            bias,
            Rows.of(piece(residual)),
            piece(out),
            Rows.of(piece(total)),
            Peers.of(peers, rows.element_size()),
            peers.polls,
            eps,
            size,
            block,
            splits,
            peers.size,
            peers.sends(last - first, size) and block >= MIN_SENT * warps,
            *kind[:3],
            word_order,
            num_warps=warps,
        )
