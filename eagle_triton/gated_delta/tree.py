"""A tree of tokens behind one state, answered at once: one triangular system for each head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.gated_delta.checks import check_heads_contiguous, check_rows_contiguous
from eagle_triton.gated_delta.dots import bf16_parts, model_dot, pair_dot, parts, substitute, wide_dot
from eagle_triton.gated_delta.recurrent import gating, inverse_length, launch_recurrent, state_offsets
from eagle_triton.reference.gated_delta import check_delta, check_tree
from eagle_triton.runtime.overlap import await_inputs, overlapped

BLOCK_V = 32  # columns of the state that a program answers from
WARPS = 4
FEW_NODES = 16
"""Beyond which fp32 models are answered without tensor cores: there the products of bf16 parts were wrong on an H200
with Triton 3.6, though not those of chunk.py. It is slow, and exact."""


@triton.jit
def load_rows(ptr, rows, row_ok, stride, first, size, BLOCK: tl.constexpr):
    """[N, BLOCK]: elements first .. first + size of rows [N], int64."""
    column = tl.arange(0, BLOCK)
    ok = row_ok[:, None] & (column < size)[None, :]
    return tl.load(ptr + rows[:, None] * stride + (first + column)[None, :], mask=ok, other=0.0)


@triton.jit
def load_gates(
    rows,
    row_ok,
    value_head,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    stride_an,
    stride_ah,
    stride_ar,
    stride_bn,
    stride_bh,
    stride_br,
    SHARED: tl.constexpr,
):
    """g and beta [N] of a head in rows [N], int64, of one sequence; 0 where there is no row.

    They are one line of a tile with an element for each of 256 threads: of a smaller one the compiler would make copies
    in each layout in which it is read, with all their exponentials.
    """
    lines: tl.constexpr = 256 // rows.shape[0]
    line = tl.arange(0, lines)[:, None]
    ok, rows = row_ok[None, :] & (line == 0), rows[None, :] + 0 * line
    a_ptr += value_head // SHARED * stride_ah + value_head % SHARED * stride_ar
    b_ptr += value_head // SHARED * stride_bh + value_head % SHARED * stride_br
    a = tl.load(a_ptr + rows * stride_an, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + rows * stride_bn, mask=ok, other=0.0).to(tl.float32)
    A_log = tl.load(A_log_ptr + value_head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + value_head).to(tl.float32)
    g, beta = gating(a, b, A_log, dt_bias, b_ptr.dtype.element_ty)
    return tl.sum(tl.where(ok, g, 0.0), 0), tl.sum(tl.where(ok, beta, 0.0), 0)


@triton.jit
def sums_between(seen, unseen, g, PARTS: tl.constexpr):
    """[N, N]: the sum of g over the nodes that node i sees and node j does not."""
    if PARTS:
        x = seen.to(tl.float32).to(tl.bfloat16)
        high, middle, low = parts(g)
        total = tl.dot(x, tl.where(unseen, low[:, None], 0.0))
        total = tl.dot(x, tl.where(unseen, middle[:, None], 0.0), total)
        return tl.dot(x, tl.where(unseen, high[:, None], 0.0), total)
    else:
        return tl.dot(seen.to(tl.float32), tl.where(unseen, g[:, None], 0.0), input_precision="ieee")


@triton.jit
def node_matrices(q, k, g, beta, seen, strict, unseen, scale, PARTS: tl.constexpr):
    """The matrix of the updates' system and the one from updates to answers, [N, N] each, and by node how much of the
    state is left, exp of g's sum, and the factors that make its query and its key unit vectors: [N] each.

    seen [N, N]: node j is i or an ancestor of i; strict: an ancestor; unseen: node i is neither j nor an ancestor of j.
    What decays between two nodes is summed over the nodes between them: as the difference of two sums from the root it
    would drown in their rounding. q and k are as the model gives them, so that their products are exact in 16 bits;
    lengths come in afterwards.
    """
    q_factor = inverse_length(q.to(tl.float32), 1) * scale
    k_factor = inverse_length(k.to(tl.float32), 1)
    left = tl.exp(tl.sum(tl.where(unseen, 0.0, g[:, None]), 0))
    between = tl.where(seen, tl.exp(sums_between(seen, unseen, g, PARTS)), 0.0)
    system = pair_dot(k, k, PARTS) * between * (beta * k_factor)[:, None] * k_factor[None, :]
    reading = pair_dot(q, k, PARTS) * between * q_factor[:, None] * k_factor[None, :]
    return tl.where(strict, system, 0.0), reading, left, q_factor, k_factor


@triton.jit(
    do_not_specialize_on_alignment=[
        "ancestors_ptr", "gates_ptr", "stride_tb", "stride_tn", "stride_gb", "stride_gn", "stride_gg", "count", "depth",
    ],
)  # fmt: skip
def _delta_tree_kernel(
    mixed_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    ancestors_ptr,
    gates_ptr,
    out_ptr,
    stride_mb,
    stride_mn,
    stride_ab,
    stride_an,
    stride_ah,
    stride_ar,
    stride_bb,
    stride_bn,
    stride_bh,
    stride_br,
    stride_sb,
    stride_tb,
    stride_tn,
    stride_gb,
    stride_gn,
    stride_gg,
    count,
    depth,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of V, HV, B): a program answers all nodes from BLOCK_V columns of a head's state."""
    await_inputs(PDL)
    block, value_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = block * BLOCK_V
    node, column = tl.arange(0, BLOCK_N), first + tl.arange(0, BLOCK_V)
    node_ok = node < count
    offsets, inside = state_offsets(value_head, first, K, V, BLOCK_K, BLOCK_V)
    state = tl.load(state_ptr + batch * stride_sb + offsets, mask=inside, other=0.0)
    word = tl.load(ancestors_ptr + batch * stride_tb + node * stride_tn, mask=node_ok, other=0)
    seen = ((word[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
    rows, head = node.to(tl.int64), value_head // (HV // H)
    mixed_ptr += batch * stride_mb
    q = load_rows(mixed_ptr, rows, node_ok, stride_mn, head * K, K, BLOCK_K)
    k = load_rows(mixed_ptr, rows, node_ok, stride_mn, (H + head) * K, K, BLOCK_K)
    v = load_rows(mixed_ptr, rows, node_ok, stride_mn, 2 * H * K + value_head * V + first, V - first, BLOCK_V)
    g, beta = load_gates(
        rows,
        node_ok,
        value_head,
        a_ptr + batch * stride_ab,
        b_ptr + batch * stride_bb,
        A_log_ptr,
        dt_bias_ptr,
        stride_an,
        stride_ah,
        stride_ar,
        stride_bn,
        stride_bh,
        stride_br,
        HV // H,
    )
    if gates_ptr is not None:
        gate = gates_ptr + batch * stride_gb + node * stride_gn + value_head
        tl.store(gate, g, mask=node_ok & (block == 0))
        tl.store(gate + stride_gg, beta, mask=node_ok & (block == 0))
    strict = seen & (node[:, None] != node[None, :])
    unseen = ((word[None, :] >> node[:, None].to(tl.int64)) & 1) == 0
    right, answers = model_dot(k, state, PARTS), model_dot(q, state, PARTS)
    system, reading, left, q_factor, k_factor = node_matrices(q, k, g, beta, seen, strict, unseen, scale, PARTS)
    right = beta[:, None] * (v.to(tl.float32) - (left * k_factor)[:, None] * right)
    update = substitute(system, right, depth, PARTS)
    answers = (left * q_factor)[:, None] * answers + wide_dot(reading, update, PARTS)
    out = out_ptr + ((batch * count + node)[:, None] * HV + value_head) * V + column[None, :]
    tl.store(out, answers.to(out_ptr.dtype.element_ty), mask=node_ok[:, None] & (column < V)[None, :])


def delta_tree(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ancestors: Tensor,
    depth: int,
    *,
    gates: Tensor | None = None,
) -> Tensor:
    """Outputs [B, n, HV, V] of a tree's nodes, each behind `state` and its own ancestors. The state stays as it is.

    n is at most 64; no node lies more than `depth` below the root; A_log, dt_bias [HV]; `gates` is filled if given.
    Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_delta("delta_tree", mixed, a, b, A_log, dt_bias, state)
    check_tree(mixed, state, ancestors, depth, gates)
    check_rows_contiguous("delta_tree", mixed=mixed, A_log=A_log, dt_bias=dt_bias, gates=gates)
    check_heads_contiguous("delta_tree", "state", state)
    batch, count, _ = mixed.shape
    if count == 1:
        return launch_recurrent(mixed, a, b, A_log, dt_bias, state, gates, keep=False)
    _, value_heads, key_dim, value_dim = state.shape
    out = mixed.new_empty(batch, count, value_heads, value_dim)
    if not out.numel():
        return out
    on_cores = mixed.dtype != torch.float32 or count <= FEW_NODES
    block_v = min(BLOCK_V if on_cores else 16, max(16, triton.next_power_of_2(value_dim)))
    overlapped(_delta_tree_kernel, (triton.cdiv(value_dim, block_v), value_heads, batch), mixed.device)(
        mixed,
        a,
        b,
        A_log,
        dt_bias,
        state,
        ancestors,
        gates,
        out,
        *mixed.stride()[:2],
        *a.stride(),
        *b.stride(),
        state.stride(0),
        *ancestors.stride()[:2],
        *((0, 0, 0) if gates is None else gates.stride()[:3]),
        count,
        min(depth, count - 1),
        key_dim**-0.5,
        H=a.shape[2],
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        PARTS=on_cores and bf16_parts(mixed),
        BLOCK_N=FEW_NODES if count <= FEW_NODES else 64,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_V=block_v,
        num_warps=WARPS if on_cores else 8,
        num_stages=1,
    )
    return out
