"""The short convolution in front of the gated delta rule, along the paths of a tree or a chain."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import PromptPieces, check_causal_conv
from eagle_triton.ops.gated_delta.pieces import sequence_of
from eagle_triton.ops.layers.values import rounded
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.overlap import await_inputs, overlapped

BLOCK_N = 8  # nodes of a program
BLOCK_C = 256  # channels of a program


@triton.jit
def highest_bit(word):
    """The place of the highest bit of each int64, none of which is negative; 0 where there is none."""
    place = tl.zeros(word.shape, tl.int32)
    for power in tl.static_range(6):
        above = word >> (32 >> power)
        place += tl.where(above != 0, 32 >> power, 0)
        word = tl.where(above != 0, above, word)
    return place


@triton.jit
def move_window(
    columns, window, stride_xn, stride_xb, stride_ir, count, full, last, mine, known,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Keep the last TAPS - 1 rows of the window and of new ones, in columns [1, BLOCK_C] that are `mine`.

    There are `count` new ones, `full` in each of the `last` pieces before the last one. A window that is not `known` is
    zeros.
    """
    slot = tl.arange(0, BLOCK_T)[:, None]
    source = count - (TAPS - 1) + slot
    ok = (slot < TAPS - 1) & mine
    piece = tl.minimum(source // full, last)
    new = columns + (source - piece * full).to(tl.int64) * stride_xn + piece.to(tl.int64) * stride_xb
    new = tl.load(new, mask=ok & (source >= 0), other=0.0)
    kept = tl.load(window + (TAPS - 1 + source) * stride_ir, mask=ok & (source < 0) & known, other=0.0)
    tl.debug_barrier()  # all of the window is read before any of it is written
    tl.store(window + slot * stride_ir, tl.where(source >= 0, new, kept), mask=ok)


@triton.jit
def conv_block(
    block,
    x_ptr,
    stride_xb,
    stride_xn,
    stride_xh,
    weight_ptr,
    window_ptr,
    ancestors_ptr,
    raw_ptr,
    out_ptr,
    stride_wc,
    stride_wt,
    stride_ir,
    stride_an,
    stride_rn,
    stride_on,
    count,
    new,
    last,
    known,
    follows,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """BLOCK_N nodes and BLOCK_C of the SIZE channels of q, k or v, which begin at channel FIRST of the model's.

    Pointers are a sequence's. Heads are WIDTH wide. Without `ancestors_ptr` tokens follow each other, and the program
    with the first ones, the only one that reads these channels of the window, moves the window on, by `new` tokens, of
    which some stand in `last` further pieces. `known`: whether the window is, and not zeros; `follows`: what stands
    before is in the piece before.
    """
    node = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_part = block * BLOCK_C + tl.arange(0, BLOCK_C)
    wide = node.to(tl.int64)[:, None]
    ok = (node < count)[:, None] & (in_part < SIZE)[None, :]
    channel = (FIRST + in_part)[None, :]
    columns = x_ptr + (in_part // WIDTH * stride_xh + in_part % WIDTH)[None, :]
    tap = tl.arange(0, BLOCK_T)
    weights = tl.load(
        weight_ptr + (FIRST + in_part)[:, None] * stride_wc + tap[None, :] * stride_wt,
        mask=(in_part < SIZE)[:, None] & (tap < TAPS)[None, :],
        other=0.0,
    ).to(tl.float32)
    if ancestors_ptr is not None:
        before = tl.load(ancestors_ptr + node * stride_an, mask=node < count, other=0)
        before &= ~(tl.full((), 1, tl.int64) << node.to(tl.int64))
    place = node  # below 0: from the end of the window
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for back in tl.static_range(TAPS):
        row = tl.load(columns + place.to(tl.int64)[:, None] * stride_xn, mask=ok & (place >= 0)[:, None], other=0.0)
        if back == 0:
            if raw_ptr is not None:
                tl.store(raw_ptr + wide * stride_rn + channel, row, mask=ok)
        else:
            kept = window_ptr + (TAPS - 1 + place)[:, None] * stride_ir + channel
            row = tl.where((place >= 0)[:, None], row, tl.load(kept, mask=ok & (place < 0)[:, None] & known, other=0.0))
            if PIECES:
                above = columns + (count + place).to(tl.int64)[:, None] * stride_xn - stride_xb
                row = tl.where(
                    ((place < 0) & follows)[:, None],
                    tl.load(above, mask=ok & ((place < 0) & follows)[:, None], other=0.0),
                    row,
                )
        weight = tl.sum(tl.where((tap == TAPS - 1 - back)[None, :], weights, 0.0), 1)
        total += weight[None, :] * row.to(tl.float32)
        if ancestors_ptr is not None:
            parent = highest_bit(before)
            place = tl.where(before != 0, parent, tl.minimum(place, 0) - 1)
            before &= ~(tl.full((), 1, tl.int64) << parent.to(tl.int64))
        else:
            place -= 1
    kind = out_ptr.dtype.element_ty
    total = rounded(total, kind)
    total = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + wide * stride_on + channel, total.to(kind), mask=ok)
    if TAPS > 1 and ancestors_ptr is None:
        mine = (in_part < SIZE)[None, :] & (tl.program_id(0) == 0) & (new > 0)
        move_window(
            columns,
            window_ptr + channel,
            stride_xn,
            stride_xb,
            stride_ir,
            new,
            count,
            last,
            mine,
            known,
            TAPS,
            BLOCK_T,
        )


@triton.jit(
    do_not_specialize_on_alignment=[
        *("ancestors_ptr", "stride_ab", "stride_an", "count"),
        *("slots_ptr", "starts_ptr", "counts_ptr", "pieces"),
    ]
)
def _causal_conv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    weight_ptr,
    window_ptr,
    ancestors_ptr,
    raw_ptr,
    out_ptr,
    slots_ptr,
    starts_ptr,
    counts_ptr,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_wc,
    stride_wt,
    stride_ib,
    stride_ir,
    stride_ab,
    stride_an,
    stride_rb,
    stride_rn,
    stride_ob,
    stride_on,
    count,
    pieces,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    RV: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of nodes, blocks of q's, k's and v's channels, B)."""
    await_inputs(PDL)
    block, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_blocks: tl.constexpr = (KEYS + BLOCK_C - 1) // BLOCK_C
    if slots_ptr is None:
        sequence, new, last, known, follows = batch, count, 0, True, False
    else:
        sequence, held, known, follows = sequence_of(batch, slots_ptr, starts_ptr, counts_ptr, pieces)
        last = tl.maximum(held - 1, 0)
        new = tl.where(held > 0, last * count + tl.load(counts_ptr + batch + last), 0)
    window_ptr += sequence * stride_ib
    out_ptr += batch * stride_ob
    if ancestors_ptr is not None:
        ancestors_ptr += batch * stride_ab
    if raw_ptr is not None:
        raw_ptr += batch * stride_rb
    if block < key_blocks:
        conv_block(
            block,
            q_ptr + batch * stride_qb,
            stride_qb,
            stride_qn,
            stride_qh,
            weight_ptr,
            window_ptr,
            ancestors_ptr,
            raw_ptr,
            out_ptr,
            stride_wc,
            stride_wt,
            stride_ir,
            stride_an,
            stride_rn,
            stride_on,
            count,
            new,
            last,
            known,
            follows,
            0,
            KEYS,
            K,
            TAPS,
            slots_ptr is not None,
            BLOCK_T,
            BLOCK_N,
            BLOCK_C,
        )
    elif block < 2 * key_blocks:
        conv_block(
            block - key_blocks,
            k_ptr + batch * stride_kb,
            stride_kb,
            stride_kn,
            stride_kh,
            weight_ptr,
            window_ptr,
            ancestors_ptr,
            raw_ptr,
            out_ptr,
            stride_wc,
            stride_wt,
            stride_ir,
            stride_an,
            stride_rn,
            stride_on,
            count,
            new,
            last,
            known,
            follows,
            KEYS,
            KEYS,
            K,
            TAPS,
            slots_ptr is not None,
            BLOCK_T,
            BLOCK_N,
            BLOCK_C,
        )
    else:
        conv_block(
            block - 2 * key_blocks,
            v_ptr + batch * stride_vb,
            stride_vb,
            stride_vn,
            stride_vh,
            weight_ptr,
            window_ptr,
            ancestors_ptr,
            raw_ptr,
            out_ptr,
            stride_wc,
            stride_wt,
            stride_ir,
            stride_an,
            stride_rn,
            stride_on,
            count,
            new,
            last,
            known,
            follows,
            2 * KEYS,
            VALUES,
            RV,
            TAPS,
            slots_ptr is not None,
            BLOCK_T,
            BLOCK_N,
            BLOCK_C,
        )


def warps(block_n: int, block_c: int) -> int:
    """Of a program with that tile: 16 values for each thread."""
    return max(1, min(4, block_n * block_c // 512))


def causal_conv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    window: Tensor,
    ancestors: Tensor | None = None,
    *,
    raw: Tensor | None = None,
    out: Tensor | None = None,
    pieces: PromptPieces | None = None,
) -> Tensor:
    """silu(sum over taps of weight [C, W] times the token and its W - 1 predecessors), channel by channel.

    A predecessor is an ancestor; those of the root stand in `window`, the newest last. Without `ancestors` tokens
    follow each other, and the window moves on in place. raw [B, n, C] takes q, k and v as they were. Returns mixed
    [B, n, C], in `out` if given. `pieces`: the B rows are pieces of prompts of some slots, all of whose windows
    are given [slots, W - 1, C]; without ancestors, raw and out. Raises ValueError before
    anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_causal_conv(q, k, v, weight, window, ancestors, raw, out, pieces)
    check_rows_contiguous("causal_conv", q=q, k=k, v=v, window=window, raw=raw, out=out)
    batch, count, heads, width = q.shape
    keys, values, taps = heads * width, heads * v.shape[3], weight.shape[1]
    mixed = q.new_empty(batch, count, 2 * keys + values) if out is None else out
    if not mixed.numel():
        return mixed
    # The first block of a chain is alone with the window.
    block_n = triton.next_power_of_2(max(min(count, BLOCK_N), 1 if ancestors is not None else taps - 1))
    block_c = min(BLOCK_C, triton.next_power_of_2(max(keys, values)))
    blocks = 2 * triton.cdiv(keys, block_c) + triton.cdiv(values, block_c)
    overlapped(_causal_conv_kernel, (triton.cdiv(count, block_n), blocks, batch), q.device)(
        q,
        k,
        v,
        weight,
        window,
        ancestors,
        raw,
        mixed,
        *((None,) * 3 if pieces is None else pieces),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *weight.stride(),
        *window.stride()[:2],
        *((0, 0) if ancestors is None else ancestors.stride()[:2]),
        *((0, 0) if raw is None else raw.stride()[:2]),
        *mixed.stride()[:2],
        count,
        batch,
        KEYS=keys,
        VALUES=values,
        K=width,
        RV=v.shape[3],
        TAPS=taps,
        BLOCK_T=triton.next_power_of_2(taps),
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        num_warps=warps(block_n, block_c),
    )
    return mixed
