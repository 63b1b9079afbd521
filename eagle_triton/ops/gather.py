"""Picks rows: the accepted nodes' features, the tokens after a position.

    gather_rows:    out[b, i] = x[b, max(index[b, i], 0)]
    sequence_rows:  out[b, i] = tokens[b, min(first[b] + offset + i, C - 1)]

| name          | shape                | dtype, layout                                            |
|---------------|----------------------|----------------------------------------------------------|
| x, out        | [B, P | n, H]        | any; rows are contiguous                                 |
| index         | [B, n]               | int32 or int64                                           |
| tokens, first | [B, C], [B]          | int64, int32                                             |

Numerics: copies. One launch each, where indexing in torch takes three to six.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gather import check_gather_rows, check_sequence_rows
from eagle_triton.ops.views import BatchedRows, Matrix, view
from eagle_triton.runtime.overlap import await_inputs, overlapped

_BLOCK = 1024


@triton.jit
def _gather_rows_kernel(x, index, out, count, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (B * n, blocks of a row): a program copies one block."""
    await_inputs(PDL)
    batch, place = (tl.program_id(0) // count).to(tl.int64), (tl.program_id(0) % count).to(tl.int64)
    row = tl.maximum(tl.load(index.ptr + batch * index.row + place * index.item), 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x.ptr + batch * x.batch + row * x.row + column, mask=column < size)
    tl.store(out.ptr + batch * out.batch + place * out.row + column, value, mask=column < size)


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "first_ptr", "out_ptr", "count"])
def _sequence_rows_kernel(
    tokens_ptr,
    first_ptr,
    out_ptr,
    columns,
    offset,
    count,
    stride_tb,
    stride_tc,
    stride_f,
    stride_ob,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): a program copies one sequence's tokens."""
    await_inputs(PDL)
    batch, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    column = tl.minimum(tl.load(first_ptr + batch * stride_f) + offset + place, columns - 1).to(tl.int64)
    token = tl.load(tokens_ptr + batch * stride_tb + column * stride_tc, mask=place < count)
    tl.store(out_ptr + batch * stride_ob + place, token, mask=place < count)


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out[b, i] = x[b, max(index[b, i], 0)]. x [B, P, H], index [B, n] integers below P; returns [B, n, H].

    Raises ValueError if shapes, dtypes or strides do not fit. Whether an index is below P is not checked.
    """
    check_gather_rows(x, index, out)
    out = x.new_empty(*index.shape, x.shape[2]) if out is None else out
    for name, tensor in (("x", x), ("out", out)):
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            raise ValueError(f"gather_rows: the rows of {name} must be contiguous, got strides {tensor.stride()}")
    if out.numel():
        size = x.shape[2]
        block = min(_BLOCK, triton.next_power_of_2(size))
        overlapped(_gather_rows_kernel, (index.numel(), triton.cdiv(size, block)), x.device)(
            view(BatchedRows, x), view(Matrix, index), view(BatchedRows, out), index.shape[1], size, block, num_warps=4
        )
    return out


def sequence_rows(tokens: Tensor, first: Tensor, count: int, offset: int = 0, *, out: Tensor | None = None) -> Tensor:
    """`count` columns of each sequence from first + offset on. Past the end the last column is repeated.

    tokens [B, C] int64, first [B] int32, first + offset not negative; returns [B, count] int64, in `out` if given.
    Raises ValueError if shapes, dtypes or strides do not fit.
    """
    check_sequence_rows(tokens, first, count, out)
    out = tokens.new_empty(len(tokens), count) if out is None else out
    if out.stride(1) != 1 and count > 1:
        raise ValueError(f"sequence_rows: the rows of out must be contiguous, got strides {out.stride()}")
    overlapped(_sequence_rows_kernel, (len(tokens),), tokens.device)(
        tokens,
        first,
        out,
        tokens.shape[1],
        offset,
        count,
        *tokens.stride(),
        first.stride(0),
        out.stride(0),
        triton.next_power_of_2(count),
        num_warps=1,
    )
    return out
