"""Short convolutions along the paths of a tree or a chain: of gated delta nets, Mamba-2 and LFM2."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import PromptPieces, check_causal_conv, check_gated_conv
from eagle_triton.ops.gated_delta.pieces import sequence_of
from eagle_triton.ops.layers.values import rounded
from eagle_triton.ops.views import BatchedRows, Heads, Matrix, Vector, view
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.overlap import await_inputs, overlapped

BLOCK_N = 8  # nodes of a program
BLOCK_C = 256  # channels of a program


class ConvShape(NamedTuple):
    """A constexpr of the kernel: q and k each have KEYS channels in heads of K, v has VALUES in heads of RV, and each
    channel has TAPS weights; then the tile of a program. GATES: v is multiplied by the VALUES columns 2 * GATES before
    it, and the sum by those GATES before it, instead of SiLU; 0: neither."""

    KEYS: int
    VALUES: int
    K: int
    RV: int
    TAPS: int
    BLOCK_T: int
    BLOCK_N: int
    BLOCK_C: int
    GATES: int = 0


class Convolution(NamedTuple):
    """The operands that q, k and v of one sequence share, over the model's channels."""

    weight: Matrix
    bias: Tensor | None
    window: Matrix
    ancestors: Vector | None
    raw: Matrix | None
    out: Matrix


class Chain(NamedTuple):
    """Where the tokens before a row's are, and which tokens its window takes in."""

    tokens: int  # of each row of the batch
    new: int  # tokens for the window, some of them in `last` further pieces
    last: int
    known: bool  # False: the window counts as zeros
    follows: bool  # the tokens before are those of the previous piece


@triton.jit
def highest_bit(word):
    """The place of the highest set bit of each non-negative int64; 0 if no bit is set."""
    place = tl.zeros(word.shape, tl.int32)
    for power in tl.static_range(6):
        above = word >> (32 >> power)
        place += tl.where(above != 0, 32 >> power, 0)
        word = tl.where(above != 0, above, word)
    return place


@triton.jit
def load_inputs(ptrs, mask, GATES: tl.constexpr):
    """The inputs of the convolution at these places of x."""
    row = tl.load(ptrs, mask=mask, other=0.0)
    if GATES > 0:
        gate = tl.load(ptrs - 2 * GATES, mask=mask, other=0.0)
        row = (row.to(tl.float32) * gate.to(tl.float32)).to(row.dtype)
    return row


@triton.jit
def move_window(columns, x, kept, window, chain, mine, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, GATES: tl.constexpr):
    """Keep the last TAPS - 1 of the window's rows and the new ones, in the channels [1, BLOCK_C] that are `mine`.

    columns: pointers to them in the first token of x; kept: the same in the first row of the window.
    """
    slot = tl.arange(0, BLOCK_T)[:, None]
    source = chain.new - (TAPS - 1) + slot
    ok = (slot < TAPS - 1) & mine
    piece = tl.minimum(source // chain.tokens, chain.last)
    new = columns + (source - piece * chain.tokens).to(tl.int64) * x.row + piece.to(tl.int64) * x.batch
    new = load_inputs(new, ok & (source >= 0), GATES)
    old = tl.load(kept + (TAPS - 1 + source) * window.row, mask=ok & (source < 0) & chain.known, other=0.0)
    tl.debug_barrier()  # all of the window is read before any of it is written
    tl.store(kept + slot * window.row, tl.where(source >= 0, new, old), mask=ok)


@triton.jit
def conv_block(
    x,
    batch,
    block,
    conv,
    chain,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Compute BLOCK_N nodes and BLOCK_C of the SIZE channels of x. x is q, k or v, begins at the model's channel FIRST,
    and has heads of WIDTH channels.

    Without ancestors, tokens follow each other. Then only the program of the first tokens reads these channels of the
    window, and moves the window on.
    """
    weight, window, ancestors = conv.weight, conv.window, conv.ancestors
    TAPS: tl.constexpr = SHAPE.TAPS
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    BLOCK_C: tl.constexpr = SHAPE.BLOCK_C
    GATES: tl.constexpr = SHAPE.GATES
    x_ptr = x.ptr + batch * x.batch
    node = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_part = block * BLOCK_C + tl.arange(0, BLOCK_C)
    wide = node.to(tl.int64)[:, None]
    ok = (node < chain.tokens)[:, None] & (in_part < SIZE)[None, :]
    channel = (FIRST + in_part)[None, :]
    columns = x_ptr + (in_part // WIDTH * x.head + in_part % WIDTH)[None, :]
    tap = tl.arange(0, SHAPE.BLOCK_T)
    weights = tl.load(
        weight.ptr + (FIRST + in_part)[:, None] * weight.row + tap[None, :] * weight.item,
        mask=(in_part < SIZE)[:, None] & (tap < TAPS)[None, :],
        other=0.0,
    ).to(tl.float32)
    if ancestors is not None:
        before = tl.load(ancestors.ptr + node * ancestors.item, mask=node < chain.tokens, other=0)
        before &= ~(tl.full((), 1, tl.int64) << node.to(tl.int64))
    place = node  # below 0: from the end of the window
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for back in tl.static_range(TAPS):
        row = load_inputs(columns + place.to(tl.int64)[:, None] * x.row, ok & (place >= 0)[:, None], GATES)
        if back == 0:
            if conv.raw is not None:
                tl.store(conv.raw.ptr + wide * conv.raw.row + channel, row, mask=ok)
        else:
            kept = tl.load(
                window.ptr + (TAPS - 1 + place)[:, None] * window.row + channel,
                mask=ok & (place < 0)[:, None] & chain.known,
                other=0.0,
            )
            row = tl.where((place >= 0)[:, None], row, kept)
            if PIECES:
                above = columns + (chain.tokens + place).to(tl.int64)[:, None] * x.row - x.batch
                followed = ((place < 0) & chain.follows)[:, None]
                row = tl.where(followed, load_inputs(above, ok & followed, GATES), row)
        of_tap = tl.sum(tl.where((tap == TAPS - 1 - back)[None, :], weights, 0.0), 1)
        total += of_tap[None, :] * row.to(tl.float32)
        if ancestors is not None:
            parent = highest_bit(before)
            place = tl.where(before != 0, parent, tl.minimum(place, 0) - 1)
            before &= ~(tl.full((), 1, tl.int64) << parent.to(tl.int64))
        else:
            place -= 1
    if conv.bias is not None:
        total += tl.load(conv.bias + channel, mask=(in_part < SIZE)[None, :], other=0.0).to(tl.float32)
    kind = conv.out.ptr.dtype.element_ty
    total = rounded(total, kind)
    if GATES > 0:
        total *= tl.load(columns + wide * x.row - GATES, mask=ok, other=0.0).to(tl.float32)
    else:
        total = total / (1.0 + tl.exp(-total))
    tl.store(conv.out.ptr + wide * conv.out.row + channel, total.to(kind), mask=ok)
    if TAPS > 1 and ancestors is None:
        mine = (in_part < SIZE)[None, :] & (tl.program_id(0) == 0) & (chain.new > 0)
        move_window(columns, x, window.ptr + channel, window, chain, mine, TAPS, SHAPE.BLOCK_T, GATES)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("ancestors_ptr", "stride_ab", "stride_an", "count"),
        *("slots_ptr", "starts_ptr", "counts_ptr", "pieces"),
    ]
)
def _causal_conv_kernel(
    q,
    k,
    v,
    weight,
    bias_ptr,
    window,
    ancestors_ptr,
    active_ptr,
    raw,
    out,
    slots_ptr,
    starts_ptr,
    counts_ptr,
    stride_ab,
    stride_an,
    count,
    pieces,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of nodes, blocks of q's, k's and v's channels, B): a program is a `conv_block`."""
    await_inputs(PDL)
    block, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    KEYS: tl.constexpr = SHAPE.KEYS
    PIECES: tl.constexpr = slots_ptr is not None
    key_blocks: tl.constexpr = (KEYS + SHAPE.BLOCK_C - 1) // SHAPE.BLOCK_C
    if slots_ptr is None:
        sequence, new = batch, count
        if active_ptr is not None:
            new = tl.where(tl.load(active_ptr + batch) != 0, count, 0)
        chain = Chain(count, new, 0, True, False)
    else:
        sequence, held, known, follows = sequence_of(batch, slots_ptr, starts_ptr, counts_ptr, pieces)
        last = tl.maximum(held - 1, 0)
        new = tl.where(held > 0, last * count + tl.load(counts_ptr + batch + last), 0)
        chain = Chain(count, new, last, known, follows)
    window = Matrix(window.ptr + sequence * window.batch, window.row, 1)
    out = Matrix(out.ptr + batch * out.batch, out.row, 1)
    ancestors = None
    if ancestors_ptr is not None:
        ancestors = Vector(ancestors_ptr + batch * stride_ab, stride_an)
    if raw is not None:
        raw = Matrix(raw.ptr + batch * raw.batch, raw.row, 1)
    conv = Convolution(weight, bias_ptr, window, ancestors, raw, out)
    if block < key_blocks:
        conv_block(q, batch, block, conv, chain, 0, KEYS, SHAPE.K, PIECES, SHAPE)
    elif block < 2 * key_blocks:
        conv_block(k, batch, block - key_blocks, conv, chain, KEYS, KEYS, SHAPE.K, PIECES, SHAPE)
    else:
        conv_block(v, batch, block - 2 * key_blocks, conv, chain, 2 * KEYS, SHAPE.VALUES, SHAPE.RV, PIECES, SHAPE)


def warps(block_n: int, block_c: int) -> int:
    """Warps of a program with this tile: 16 values per thread."""
    return max(1, min(4, block_n * block_c // 512))


def causal_conv(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    weight: Tensor,
    window: Tensor,
    ancestors: Tensor | None = None,
    *,
    active: Tensor | None = None,
    bias: Tensor | None = None,
    raw: Tensor | None = None,
    out: Tensor | None = None,
    pieces: PromptPieces | None = None,
) -> Tensor:
    """Convolve each channel over a token and its predecessors; see reference.gated_delta.causal_conv.

    Raises ValueError before anything is written if arguments do not fit.
    """
    check_causal_conv(q, k, v, weight, window, ancestors, active, bias, raw, out, pieces)
    check_rows_contiguous("causal_conv", q=q, k=k, v=v, window=window, bias=bias, raw=raw, out=out)
    batch, count, heads, width = q.shape
    if k is None or v is None:
        parts, sizes = (q, q, q), (0, heads * width, 1, width)
    else:
        parts, sizes = (q, k, v), (heads * width, heads * v.shape[3], width, v.shape[3])
    mixed = q.new_empty(batch, count, len(weight)) if out is None else out
    if mixed.numel():
        _launch(parts, sizes, weight, bias, window, ancestors, active, raw, pieces, mixed)
    return mixed


def gated_conv(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    ancestors: Tensor | None = None,
    *,
    active: Tensor | None = None,
    raw: Tensor | None = None,
    pieces: PromptPieces | None = None,
) -> Tensor:
    """c * convolution of (b * x), with rows x [B, n, 3 C] of b, c and x; see reference.gated_delta.gated_conv.

    Raises ValueError before anything is written if arguments do not fit.
    """
    check_gated_conv(x, weight, window, ancestors, active, raw, pieces)
    check_rows_contiguous("gated_conv", x=x, window=window, raw=raw)
    channels = len(weight)
    out = x.new_empty(*x.shape[:2], channels)
    if out.numel():
        values = x[:, :, None, 2 * channels :]
        sizes = 0, channels, 1, channels
        _launch(
            (values, values, values), sizes, weight, None, window, ancestors, active, raw, pieces, out, gates=channels
        )
    return out


def _launch(
    parts: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, int, int, int],
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    ancestors: Tensor | None,
    active: Tensor | None,
    raw: Tensor | None,
    pieces: PromptPieces | None,
    out: Tensor,
    gates: int = 0,
) -> None:
    """Launch the kernel. parts: q, k and v. sizes: KEYS, VALUES, K and RV of ConvShape. gates: its GATES."""
    keys, values, *_ = sizes
    (batch, count, _), taps = out.shape, weight.shape[1]
    shape = ConvShape(
        *(*sizes, taps),
        BLOCK_T=triton.next_power_of_2(taps),
        # Only the first block of a chain uses the window.
        BLOCK_N=triton.next_power_of_2(max(min(count, BLOCK_N), 1 if ancestors is not None else taps - 1)),
        BLOCK_C=min(BLOCK_C, triton.next_power_of_2(max(keys, values))),
        GATES=gates,
    )
    blocks = 2 * triton.cdiv(keys, shape.BLOCK_C) + triton.cdiv(values, shape.BLOCK_C)
    overlapped(_causal_conv_kernel, (triton.cdiv(count, shape.BLOCK_N), blocks, batch), out.device)(
        *(view(Heads, part) for part in parts),
        view(Matrix, weight),
        bias,
        view(BatchedRows, window),
        ancestors,
        active,
        view(BatchedRows, raw),
        view(BatchedRows, out),
        *((None,) * 3 if pieces is None else pieces),
        *((0, 0) if ancestors is None else ancestors.stride()[:2]),
        count,
        batch,
        SHAPE=shape,
        num_warps=warps(shape.BLOCK_N, shape.BLOCK_C),
    )
