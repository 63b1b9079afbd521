"""The outputs of all nodes of a tree after one state: for the delta rule, one triangular system for each head."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import check_delta, check_tree
from eagle_triton.ops.gated_delta.checks import check_heads_contiguous
from eagle_triton.ops.gated_delta.dots import bf16_parts, model_dot, on_top, pair_dot, parts, substitute, wide_dot
from eagle_triton.ops.gated_delta.recurrent import (
    GateInputs,
    HeadShape,
    States,
    gating,
    inverse_length,
    launch_recurrent,
    parts_of_token,
    skipped,
    state_offsets,
    value_row,
)
from eagle_triton.ops.views import BatchedRows, Matrix, view
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch

BLOCK_V = 32  # columns of the state per program
WARPS = 8
FEW_NODES = 16  # the fewest that the tensor cores take; more nodes are padded to 64


class Nodes(NamedTuple):
    """All N nodes of a tree or a chunk, for one head."""

    q: tl.tensor  # [N, K] in the model's dtype, like k
    k: tl.tensor
    g: tl.tensor  # [N], like all others but `sees`
    beta: tl.tensor
    q_factor: tl.tensor  # scales queries to unit vectors, times the scale of scores
    k_factor: tl.tensor
    sees: tl.tensor  # [N, N], 1.0 if the row's node is the column's or its ancestor, else 0.0


@triton.jit
def load_rows(x, rows, row_ok, first, size, BLOCK: tl.constexpr):
    """[N, BLOCK]: the `size` elements from `first` on in rows [N], int64, of a matrix; then 0."""
    column = tl.arange(0, BLOCK)
    ok = row_ok[:, None] & (column < size)[None, :]
    return tl.load(x.ptr + rows[:, None] * x.row + (first + column)[None, :], mask=ok, other=0.0)


@triton.jit
def load_gates(gate_inputs, batch, rows, row_ok, value_head, SHARED: tl.constexpr):
    """g and beta [N] of a head in rows [N], int64, of one sequence; 0 where there is no row.

    They are one line of a tile with an element for each of 256 threads. With a smaller tile the compiler would repeat
    the exponentials in every layout that reads it.
    """
    lines: tl.constexpr = 256 // rows.shape[0]
    line = tl.arange(0, lines)[:, None]
    ok, rows = row_ok[None, :] & (line == 0), rows[None, :] + 0 * line
    a_row = value_row(gate_inputs.a, batch, value_head, SHARED)
    b = None
    if gate_inputs.b is not None:
        b_row = value_row(gate_inputs.b, batch, value_head, SHARED)
        b = tl.load(b_row.ptr + rows * b_row.item, mask=ok, other=0.0)
    g, beta = gating(
        gate_inputs,
        batch,
        rows,
        tl.load(a_row.ptr + rows * a_row.item, mask=ok, other=0.0),
        b,
        tl.load(gate_inputs.A_log + value_head).to(tl.float32),
        tl.load(gate_inputs.dt_bias + value_head).to(tl.float32),
    )
    return tl.sum(tl.where(ok, g, 0.0), 0), tl.sum(tl.where(ok, beta, 0.0), 0)


@triton.jit
def bits(words, places):
    """Bits of int64 `words` at `places`, as 0.0 and 1.0.

    Operands of products are multiplied by them. After a tl.where or a comparison, Triton would lay the operands out in
    shared memory as if they had 8 bits, and read them number by number.
    """
    return ((words >> places.to(tl.int64)) & 1).to(tl.int32).to(tl.float32)


@triton.jit
def sums_between(unseen, sees, g, PARTS: tl.constexpr):
    """[R, N]: the sum of g over the nodes that column i's node sees and row j's node does not."""
    missed = unseen * g[None, :]
    if PARTS is not None:
        y = sees.to(tl.bfloat16)
        high, middle, low = parts(missed, PARTS)
        return tl.dot(high, y) + (tl.dot(middle, y) + tl.dot(low, y))
    else:
        return tl.dot(missed, sees, input_precision="ieee")


@triton.jit
def node_rows(k_rows, nodes, seen, strict, unseen, SHAPE: tl.constexpr, PARTS: tl.constexpr):
    """Rows j of R nodes, for columns i of all N nodes, of two transposed matrices, [R, N] each: one of the updates'
    system, which only the delta rule has, and one from updates to outputs.

    k_rows [R, K] has the model's dtype, so products of keys and queries are exact in 16 bits. The masks are 0.0 or 1.0,
    [R, N]. seen: node j is i or an ancestor of i; strict: an ancestor; unseen: the column's node is neither j nor an
    ancestor of j. The decay between two nodes is summed over the nodes between them: the difference of two sums from
    the root would drown in rounding.
    """
    between = sums_between(unseen, nodes.sees, nodes.g, PARTS)
    between = tl.exp(between) * inverse_length(k_rows.to(tl.float32), 1, SHAPE)[:, None]
    reading = pair_dot(k_rows, tl.trans(nodes.q), PARTS) * between * nodes.q_factor[None, :] * seen
    system = reading
    if SHAPE.DELTA:
        system = pair_dot(k_rows, tl.trans(nodes.k), PARTS) * between * (nodes.beta * nodes.k_factor)[None, :] * strict
    return system, reading


@triton.jit
def rows_of_tree(mine, word, first, k_rows, nodes, SHAPE: tl.constexpr, PARTS: tl.constexpr):
    """node_rows of R nodes of a tree from `first` on. Their ancestors are `mine` [R]; all nodes' are `word` [N]."""
    row, node = first + tl.arange(0, mine.shape[0]), tl.arange(0, word.shape[0])
    itself = tl.full((1,), 1, tl.int64) << node.to(tl.int64)
    seen, strict = bits(word[None, :], row[:, None]), bits((word & ~itself)[None, :], row[:, None])
    unseen = bits(~mine[:, None], node[None, :])
    return node_rows(k_rows, nodes, seen, strict, unseen, SHAPE, PARTS)


@triton.jit(
    do_not_specialize_on_alignment=[
        "ancestors_ptr", "gates_ptr", "stride_tb", "stride_tn", "stride_gb", "stride_gn", "stride_gg", "count", "depth",
    ],
)  # fmt: skip
def _delta_tree_kernel(
    mixed,
    gate_inputs,
    states,
    ancestors_ptr,
    gates_ptr,
    out_ptr,
    stride_tb,
    stride_tn,
    stride_gb,
    stride_gn,
    stride_gg,
    count,
    depth,
    scale,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (blocks of V, HV, B): a program makes BLOCK_V columns of a head's outputs for all nodes.

    It does not start early: with Triton 3.6 a program takes all registers of a multiprocessor, so none would be free.
    """
    block, value_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = block * SHAPE.BLOCK_V
    node, column = tl.arange(0, BLOCK_N), first + tl.arange(0, SHAPE.BLOCK_V)
    node_ok = node < count
    rows = node.to(tl.int64)
    ancestors_ptr += batch * stride_tb
    tokens = Matrix(mixed.ptr + batch * mixed.batch, mixed.row, 1)
    # All loads come first, so that one wait covers them. Loads that are repeated below hit the cache.
    HALF: tl.constexpr = min(BLOCK_N, 32)
    upper, lower = tl.arange(0, HALF), BLOCK_N - HALF + tl.arange(0, HALF)
    word = tl.load(ancestors_ptr + node * stride_tn, mask=node_ok, other=0)
    upper_word = tl.load(ancestors_ptr + upper * stride_tn, mask=upper < count, other=0)
    lower_word = tl.load(ancestors_ptr + lower * stride_tn, mask=lower < count, other=0)
    q_first, k_first, v_first = parts_of_token(value_head, SHAPE)
    q = load_rows(tokens, rows, node_ok, q_first, SHAPE.K, SHAPE.BLOCK_K)
    k = load_rows(tokens, rows, node_ok, k_first, SHAPE.K, SHAPE.BLOCK_K)
    offsets, inside = state_offsets(value_head, first, SHAPE)
    state = tl.load(states.ptr + batch * states.batch + tl.trans(offsets), mask=tl.trans(inside), other=0.0)
    v = tl.trans(load_rows(tokens, rows, node_ok, v_first + first, SHAPE.V - first, SHAPE.BLOCK_V))
    g, beta = load_gates(gate_inputs, batch, rows, node_ok, value_head, SHAPE.HV // SHAPE.H)
    if gates_ptr is not None:
        gate = gates_ptr + batch * stride_gb + node * stride_gn + value_head
        tl.store(gate, g, mask=node_ok & (block == 0))
        tl.store(gate + stride_gg, beta, mask=node_ok & (block == 0))
    sees = bits(word[None, :], node[:, None])
    decay = tl.exp(tl.sum(sees * g[:, None], 0))

    q_factor = inverse_length(q.to(tl.float32), 1, SHAPE) * scale
    k_factor = inverse_length(k.to(tl.float32), 1, SHAPE)
    nodes = Nodes(q, k, g, beta, q_factor, k_factor, sees)
    upper_k = load_rows(tokens, upper.to(tl.int64), upper < count, k_first, SHAPE.K, SHAPE.BLOCK_K)
    system, reading = rows_of_tree(upper_word, word, 0, upper_k, nodes, SHAPE, PARTS)
    if BLOCK_N > HALF:
        lower_k = load_rows(tokens, lower.to(tl.int64), lower < count, k_first, SHAPE.K, SHAPE.BLOCK_K)
        lower_system, lower_reading = rows_of_tree(lower_word, word, HALF, lower_k, nodes, SHAPE, PARTS)
        if SHAPE.DELTA:
            system = on_top(system, lower_system, PARTS)
        reading = on_top(reading, lower_reading, PARTS)
    if SHAPE.DELTA:
        right, answers = model_dot(state, tl.trans(k), PARTS), model_dot(state, tl.trans(q), PARTS)
        right = beta[None, :] * (v.to(tl.float32) - (decay * k_factor)[None, :] * right)
        update = substitute(system, right, depth, PARTS)
    else:
        answers = model_dot(state, tl.trans(q), PARTS)
        update = beta[None, :] * v.to(tl.float32)
    answers = (decay * q_factor)[None, :] * answers + wide_dot(update, reading, PARTS)
    if gate_inputs.skip is not None:
        answers += skipped(gate_inputs.skip, value_head, v)
    out = out_ptr + ((batch * count + node)[None, :] * SHAPE.HV + value_head) * SHAPE.V + column[:, None]
    tl.store(out, answers.to(out_ptr.dtype.element_ty), mask=node_ok[None, :] & (column < SHAPE.V)[:, None])


def delta_tree(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ancestors: Tensor,
    depth: int,
    *,
    gates: Tensor | None = None,
    skip: Tensor | None = None,
    max_beta: float = 1.0,
) -> Tensor:
    """Outputs of a tree's nodes; see reference.gated_delta.delta_tree.

    Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_delta("delta_tree", mixed, a, b, A_log, dt_bias, state, skip=skip, max_beta=max_beta)
    check_tree(mixed, state, ancestors, depth, gates)
    check_rows_contiguous("delta_tree", mixed=mixed, A_log=A_log, dt_bias=dt_bias, gates=gates, skip=skip)
    check_heads_contiguous("delta_tree", "state", state)
    batch, count, _ = mixed.shape
    gate_inputs = GateInputs.of(a, b, A_log, dt_bias, skip, max_beta=max_beta)
    if count == 1:
        return launch_recurrent(mixed, gate_inputs, a.shape[2], state, gates, keep=False)
    _, value_heads, _, value_dim = state.shape
    out = mixed.new_empty(batch, count, value_heads, value_dim)
    if not out.numel():
        return out
    block_v = min(BLOCK_V, max(16, triton.next_power_of_2(value_dim)))
    shape = HeadShape.of(state, a.shape[2], block_v, b is not None, least_block_k=16)
    launch(_delta_tree_kernel, (triton.cdiv(value_dim, shape.BLOCK_V), value_heads, batch))(
        view(BatchedRows, mixed),
        gate_inputs,
        view(States, state),
        ancestors,
        gates,
        out,
        *ancestors.stride()[:2],
        *((0, 0, 0) if gates is None else gates.stride()[:3]),
        count,
        min(depth, count - 1),
        shape.scale,
        SHAPE=shape,
        PARTS=bf16_parts(mixed, in_turn=True),
        BLOCK_N=FEW_NODES if count <= FEW_NODES else 64,
        num_warps=WARPS,
        num_stages=1,
        **NO_FMA_FUSION,
    )
    return out
