"""The exchange of a product's columns between ranks that share a model. Sums are exchanged by ops/layers/norms.py.

    join_columns:    out[..., r * n : (r + 1) * n] = rank r's part

| name | shape            | dtype, layout                              |
|------|------------------|--------------------------------------------|
| part | [..., n]         | 16 or 32 bits; this rank's, rows contiguous |
| out  | [..., ranks * n] | the same                                   |

Numerics: copies. Rows are cut into blocks, and each block takes one row of PeerMemory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.exchange import check_join_columns
from eagle_triton.runtime.overlap import await_inputs, overlapped
from eagle_triton.runtime.peer_exchange import MIN_SENT, receive, row_at, send, signal_and_wait
from eagle_triton.runtime.peer_memory import PeerMemory

_MIN_BLOCK = 1024  # elements of a program: smaller blocks would make more programs wait


@triton.jit(do_not_specialize=["polls", "first", "place_rows", "sent_rows", "blocks"])
def _join_columns_kernel(
    part_ptr,
    out_ptr,
    place_addresses_ptr,
    signal_addresses_ptr,
    word_addresses_ptr,
    uses_ptr,
    failed_ptr,
    failed_on_host_ptr,
    rank,
    polls,
    place_rows,
    place_width,
    sent_rows,
    word_width,
    first,
    columns,
    blocks,
    stride_pm,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    SENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of rows in this launch,): a program stores its block where other ranks read it, or with SENT sends
    it to them, waits for theirs, and writes all of them. first: the first block. A part's row has `columns` columns in
    `blocks` blocks. place_rows, place_width: rows of a place in PeerMemory, and elements of a row. sent_rows,
    word_width: the same for sent data.
    """
    await_inputs(PDL)
    here = tl.program_id(0).to(tl.int64)
    row, block = (first + here) // blocks, (first + here) % blocks
    offs = tl.arange(0, BLOCK)[None, :]
    mask = offs < columns - block * BLOCK
    kind: tl.constexpr = part_ptr.dtype.element_ty
    use = tl.load(uses_ptr + here) + 1
    part = tl.load(part_ptr + row * stride_pm + block * BLOCK + offs, mask=mask)
    if SENT:
        place = (use & 1) * RANKS * sent_rows + here
        send(word_addresses_ptr, part, (place + rank * sent_rows) * word_width, offs, mask, use, rank, RANKS)
    else:
        place = ((use & 1) * place_rows + here) * place_width
        tl.store(row_at(place_addresses_ptr, rank, place, offs, kind), part, mask=mask)
    out_ptr += row * RANKS * columns + block * BLOCK
    if SENT:
        for other in range(RANKS):
            theirs = part
            if other != rank:
                start = (place + other * sent_rows) * word_width
                theirs = receive(
                    word_addresses_ptr, start, offs, mask, use, rank, failed_ptr, failed_on_host_ptr, polls, kind
                )
            tl.store(out_ptr + other * columns + offs, theirs, mask=mask)
        tl.debug_barrier()
    else:
        signal_and_wait(signal_addresses_ptr, failed_ptr, failed_on_host_ptr, here, use, rank, polls, RANKS)
        for other in tl.static_range(RANKS):
            theirs = tl.load(row_at(place_addresses_ptr, other, place, offs, kind), mask=mask)
            tl.store(out_ptr + other * columns + offs, theirs, mask=mask)
    tl.store(uses_ptr + here, use)  # after a barrier: every thread has read it


def join_columns(part: Tensor, peers: PeerMemory) -> Tensor:
    """All columns of a product: each rank's part [..., n] -> [..., ranks * n], in the order of the ranks.

    All ranks call this with parts of the same shape and dtype. Raises ValueError for a part that is not on the memory's
    device, or that has 8 or 64 bits.
    """
    check_join_columns(part, peers)
    out = part.new_empty(*part.shape[:-1], peers.size * part.shape[-1])
    if not out.numel():
        return out
    rows, joined = part.reshape(-1, part.shape[-1]), out.view(-1, out.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    in_pairs = (rows.shape[1] | rows.stride(0) | rows.data_ptr() // 2) % 2 == 0
    if part.element_size() == 2 and in_pairs:
        rows, joined = rows.view(torch.int32), joined.view(torch.int32)
    columns = rows.shape[1]
    largest = 1 << ((peers.row_bytes // rows.element_size()).bit_length() - 1)  # that fits a row of the memory
    sent = (
        rows.element_size() == 4
        and largest >= MIN_SENT
        and _blocks(rows, largest) <= peers.sent_rows
        and peers.sends(1, rows.numel())
    )
    block = min(_MIN_BLOCK, largest)
    while block < largest and _blocks(rows, block) > (peers.sent_rows if sent else peers.rows):
        block *= 2
    warps = min(max(block // 512, 4), 16)
    blocks = triton.cdiv(columns, block)
    for first, last in peers.pieces(len(rows) * blocks):
        overlapped(_join_columns_kernel, (last - first,), part.device)(
            rows,
            joined,
            *peers.arguments(rows.element_size()),
            first,
            columns,
            blocks,
            rows.stride(0),
            block,
            peers.size,
            sent,
            num_warps=min(warps, block // MIN_SENT) if sent else warps,
        )
    return out


def _blocks(rows: Tensor, block: int) -> int:
    return len(rows) * triton.cdiv(rows.shape[1], block)
