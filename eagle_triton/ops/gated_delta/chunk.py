"""The gated delta rule, or Mamba-2's, by chunks of 64 tokens: a chunk is a tree, then the state moves on."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import PromptPieces, check_delta
from eagle_triton.ops.gated_delta.checks import check_heads_contiguous
from eagle_triton.ops.gated_delta.dots import bf16_parts, model_dot, on_top, square_dot, wide_dot
from eagle_triton.ops.gated_delta.pieces import sequence_of
from eagle_triton.ops.gated_delta.recurrent import (
    GateInputs,
    HeadShape,
    States,
    inverse_length,
    parts_of_token,
    skipped,
    state_offsets,
)
from eagle_triton.ops.gated_delta.tree import Nodes, load_gates, load_rows, node_rows
from eagle_triton.ops.views import BatchedRows, Matrix, view
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.gpu import compute_capability
from eagle_triton.runtime.overlap import await_inputs, overlapped

BLOCK_V = 16  # columns of the state that a program moves on
WARPS = 4
MATRICES_WARPS = 8
CHUNK = 64
_CHUNK = tl.constexpr(CHUNK)
_PART = tl.constexpr(16)  # rows of a chunk that are solved one after another


@triton.jit
def part_inverses(system):
    """The inverse of I + system [64, 64] within each part of 16 rows, 0 between parts: substitution from the last row
    up, in all four parts at once."""
    count: tl.constexpr = _CHUNK // _PART
    part, row, column = tl.arange(0, count), tl.arange(0, _PART), tl.arange(0, _PART)
    same = part[:, None, None, None] == part[None, None, :, None]
    blocks = tl.reshape(system, (count, _PART, count, _PART))
    blocks = tl.sum(tl.where(same, blocks, 0.0), 2)
    row, column = row[None, :, None], column[None, None, :]
    inverse = tl.where((row == column) & (part >= 0)[:, None, None], 1.0, 0.0)
    for step in range(_PART - 1, 0, -1):
        above = tl.sum(tl.where(column == step, blocks, 0.0), 2)
        solved = tl.sum(tl.where(row == step, inverse, 0.0), 1)
        inverse = tl.fma(-above[:, :, None], solved[:, None, :], inverse)
    return tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (_CHUNK, _CHUNK))


@triton.jit
def one_if_positive(x):
    """1.0 for each int32 above 0, else 0.0; see `bits`."""
    return tl.minimum(tl.maximum(x, 0), 1).to(tl.float32)


@triton.jit
def rows_of_chunk(first, nodes, tokens, chunk, k_first, count, SHAPE: tl.constexpr, PARTS: tl.constexpr):
    """node_rows of the 32 tokens of a chunk from `first` on."""
    row, place = first + tl.arange(0, 32), tl.arange(0, _CHUNK)
    token = chunk * _CHUNK + row
    k_rows = load_rows(tokens, token.to(tl.int64), token < count, k_first, SHAPE.K, SHAPE.BLOCK_K)
    distance = place[None, :] - row[:, None]
    seen, later = one_if_positive(distance + 1), one_if_positive(distance)
    return node_rows(k_rows, nodes, seen, later, later, SHAPE, PARTS)


@triton.jit(do_not_specialize_on_alignment=["count", "counts_ptr"])
def _chunk_matrices_kernel(
    mixed,
    gate_inputs,
    counts_ptr,
    matrices_ptr,
    factors_ptr,
    count,
    scale,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, HV, B): a program makes those matrices of one head of one chunk that do not depend on the state.
    With `counts_ptr` a row of the batch is a piece of a prompt, and one chunk.

    matrices [B, HV, chunks, 2, 64, 64], transposed: the inverse of the updates' system, and from updates to answers;
    factors [B, HV, chunks, 5, 64]: of values, of the keys' reads, of the queries' reads, of updates, and of the old
    state.
    """
    await_inputs(PDL)
    chunk, value_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if counts_ptr is not None:
        count = tl.load(counts_ptr + batch)
    place = tl.arange(0, _CHUNK)
    row = chunk * _CHUNK + place
    row_ok, rows = row < count, row.to(tl.int64)
    tokens = Matrix(mixed.ptr + batch * mixed.batch, mixed.row, 1)
    q_first, k_first, _ = parts_of_token(value_head, SHAPE)
    q = load_rows(tokens, rows, row_ok, q_first, SHAPE.K, SHAPE.BLOCK_K)
    k = load_rows(tokens, rows, row_ok, k_first, SHAPE.K, SHAPE.BLOCK_K)
    g, beta = load_gates(gate_inputs, batch, rows, row_ok, value_head, SHAPE.HV // SHAPE.H)
    sees = one_if_positive(place[None, :] - place[:, None] + 1)
    decay = tl.exp(tl.sum(sees * g[:, None], 0))
    q_factor = inverse_length(q.to(tl.float32), 1, SHAPE) * scale
    k_factor = inverse_length(k.to(tl.float32), 1, SHAPE)
    nodes = Nodes(q, k, g, beta, q_factor, k_factor, sees)
    upper_system, upper_reading = rows_of_chunk(0, nodes, tokens, chunk, k_first, count, SHAPE, PARTS)
    lower_system, lower_reading = rows_of_chunk(32, nodes, tokens, chunk, k_first, count, SHAPE, PARTS)
    reading = on_top(upper_reading, lower_reading, PARTS)
    item = (batch * SHAPE.HV + value_head) * tl.num_programs(0) + chunk
    tile = matrices_ptr + item * (2 * _CHUNK * _CHUNK) + place[:, None] * _CHUNK + place[None, :]
    tl.store(tile + _CHUNK * _CHUNK, reading)
    factor = factors_ptr + item * (5 * _CHUNK) + place
    tl.store(factor, beta)
    tl.store(factor + _CHUNK, beta * decay * k_factor)
    tl.store(factor + 2 * _CHUNK, decay * q_factor)
    later = place[:, None] > place[None, :]
    tl.store(factor + 3 * _CHUNK, k_factor * tl.exp(tl.sum(tl.where(later, g[:, None], 0.0), 0)))
    tl.store(factor + 4 * _CHUNK, decay)
    if SHAPE.DELTA:
        system = on_top(upper_system, lower_system, PARTS)
        inverse = part_inverses(system)
        within = (place // _PART)[:, None] == (place // _PART)[None, :]
        between = square_dot(inverse, tl.where(within, 0.0, system), PARTS)
        solved = inverse
        for _ in range(_CHUNK // _PART - 1):  # as substitute, from the left
            solved = inverse - square_dot(between, solved, PARTS)
        tl.store(tile, solved)


@triton.jit(do_not_specialize_on_alignment=["count", "slots_ptr", "starts_ptr", "counts_ptr", "pieces"])
def _delta_chunk_kernel(
    mixed,
    skip_ptr,
    matrices_ptr,
    factors_ptr,
    states,
    out_ptr,
    slots_ptr,
    starts_ptr,
    counts_ptr,
    count,
    pieces,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of V, HV, B): a program takes all chunks into BLOCK_V columns of a head's state. A piece of a prompt
    is a chunk; the program of a sequence's first piece takes all its pieces.
    """
    await_inputs(PDL)
    block, value_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = block * SHAPE.BLOCK_V
    mixed_ptr = mixed.ptr + batch * mixed.batch
    offsets, inside = state_offsets(value_head, first, SHAPE)
    offsets, inside = tl.trans(offsets), tl.trans(inside)
    if slots_ptr is None:
        end, sequence, known, moved = count, batch, inside, inside
        item, items = (batch * SHAPE.HV + value_head) * tl.cdiv(count, _CHUNK), 1
    else:
        sequence, chunks, held, _ = sequence_of(batch, slots_ptr, starts_ptr, counts_ptr, pieces)
        end, known, moved = chunks * _CHUNK, inside & held, inside & (chunks > 0)
        item, items = batch * SHAPE.HV + value_head, SHAPE.HV
    state_ptr = states.ptr + sequence * states.batch
    state = tl.load(state_ptr + offsets, mask=known, other=0.0)
    place, column = tl.arange(0, _CHUNK), first + tl.arange(0, SHAPE.BLOCK_V)
    tile = matrices_ptr + item * (2 * _CHUNK * _CHUNK) + place[:, None] * _CHUNK + place[None, :]
    factor = factors_ptr + item * (5 * _CHUNK)
    out_ptr += (batch * count * SHAPE.HV + value_head) * SHAPE.V
    q_first, k_first, v_first = parts_of_token(value_head, SHAPE)
    for start in range(0, end, _CHUNK):
        if slots_ptr is None:
            row = start + place
            row_ok, rows = row < count, row.to(tl.int64)
            written, out_rows = row_ok, rows
        else:
            piece = start // _CHUNK
            row_ok, written = place < tl.load(counts_ptr + batch + piece), place < count
            rows, out_rows = place.to(tl.int64), (piece * count + place).to(tl.int64)
        tokens = Matrix(mixed_ptr, mixed.row, 1)
        q = load_rows(tokens, rows, row_ok, q_first, SHAPE.K, SHAPE.BLOCK_K)
        k = load_rows(tokens, rows, row_ok, k_first, SHAPE.K, SHAPE.BLOCK_K)
        v = tl.trans(load_rows(tokens, rows, row_ok, v_first + first, SHAPE.V - first, SHAPE.BLOCK_V))
        of_values, of_keys = tl.load(factor + place), tl.load(factor + _CHUNK + place)
        of_queries, of_updates = tl.load(factor + 2 * _CHUNK + place), tl.load(factor + 3 * _CHUNK + place)
        update = of_values[None, :] * v.to(tl.float32)
        if SHAPE.DELTA:
            update -= of_keys[None, :] * model_dot(state, tl.trans(k), PARTS)
        answers = of_queries[None, :] * model_dot(state, tl.trans(q), PARTS)
        if SHAPE.DELTA:
            update = wide_dot(update, tl.load(tile), PARTS)
        answers += wide_dot(update, tl.load(tile + _CHUNK * _CHUNK), PARTS)
        if skip_ptr is not None:
            answers += skipped(skip_ptr, value_head, v)
        out = out_ptr + out_rows[None, :] * (SHAPE.HV * SHAPE.V) + column[:, None]
        tl.store(out, answers.to(out_ptr.dtype.element_ty), mask=written[None, :] & (column < SHAPE.V)[:, None])
        decay = tl.load(factor + 5 * _CHUNK - 1)
        state = state * decay + model_dot(of_updates[None, :] * update, k, PARTS)
        tile += items * (2 * _CHUNK * _CHUNK)
        factor += items * (5 * _CHUNK)
        if slots_ptr is not None:
            mixed_ptr += mixed.batch
    tl.store(state_ptr + offsets, state, mask=moved)


def stages(device: torch.device) -> int:
    """Chunks that are loaded at the same time: two take 77 KiB of shared memory at K = 128."""
    return 2 if compute_capability(device)[0] in (9, 10) else 1


def delta_chunk(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    pieces: PromptPieces | None = None,
    *,
    skip: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    limited: Tensor | None = None,
    max_beta: float = 1.0,
) -> Tensor:
    """`delta_recurrent` by chunks of 64 tokens; see reference.gated_delta.delta_chunk.

    Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_delta("delta_chunk", mixed, a, b, A_log, dt_bias, state, pieces, skip, limited=limited, max_beta=max_beta)
    check_rows_contiguous("delta_chunk", mixed=mixed, A_log=A_log, dt_bias=dt_bias, skip=skip)
    check_heads_contiguous("delta_chunk", "state", state)
    batch, count, _ = mixed.shape
    _, value_heads, _, value_dim = state.shape
    # rows of unused pieces are not written
    out = (mixed.new_empty if pieces is None else mixed.new_zeros)(batch, count, value_heads, value_dim)
    if not out.numel():
        return out
    chunks = triton.cdiv(count, CHUNK)
    matrices = state.new_empty(batch, value_heads, chunks, 2, CHUNK, CHUNK)
    factors = state.new_empty(batch, value_heads, chunks, 5, CHUNK)
    block_v = min(BLOCK_V, max(16, triton.next_power_of_2(value_dim)))
    shape = HeadShape.of(state, a.shape[2], block_v, b is not None, least_block_k=16)
    rows, parts = view(BatchedRows, mixed), bf16_parts(mixed)
    overlapped(_chunk_matrices_kernel, (chunks, value_heads, batch), mixed.device)(
        rows,
        GateInputs.of(a, b, A_log, dt_bias, None, dt_limit, limited, max_beta),
        None if pieces is None else pieces.counts,
        matrices,
        factors,
        count,
        shape.scale,
        SHAPE=shape,
        PARTS=parts,
        num_warps=MATRICES_WARPS,
        num_stages=1,
    )
    overlapped(_delta_chunk_kernel, (triton.cdiv(value_dim, shape.BLOCK_V), value_heads, batch), mixed.device)(
        rows,
        skip,
        matrices,
        factors,
        view(States, state),
        out,
        *((None,) * 3 if pieces is None else pieces),
        count,
        batch,
        SHAPE=shape,
        PARTS=parts,
        num_warps=WARPS,
        num_stages=stages(mixed.device),
    )
    return out
