"""A tree of tokens behind one state, answered at once: one triangular system for each head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import check_delta, check_tree
from eagle_triton.ops.gated_delta.checks import check_heads_contiguous
from eagle_triton.ops.gated_delta.dots import bf16_parts, model_dot, on_top, pair_dot, parts, substitute, wide_dot
from eagle_triton.ops.gated_delta.recurrent import gating, inverse_length, launch_recurrent, state_offsets
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.launch import EXACT, launch

BLOCK_V = 32  # columns of the state that a program answers from
WARPS = 8
FEW_NODES = 16  # the least that the tensor cores take; more are 64


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
def bits(words, places):
    """Bits of int64 `words` at `places`, as 0.0 and 1.0.

    What goes into a product is multiplied with them: behind a tl.where or a comparison, Triton would keep the product's
    sides in shared memory as if they had 8 bits, and read them number by number.
    """
    return ((words >> places.to(tl.int64)) & 1).to(tl.int32).to(tl.float32)


@triton.jit
def sums_between(unseen, sees, g, PARTS: tl.constexpr):
    """[R, N]: the sum of g over the nodes that node i (a column) sees and node j (a row) does not."""
    missed = unseen * g[None, :]
    if PARTS is not None:
        y = sees.to(tl.bfloat16)
        high, middle, low = parts(missed, PARTS)
        return tl.dot(high, y) + (tl.dot(middle, y) + tl.dot(low, y))
    else:
        return tl.dot(missed, sees, input_precision="ieee")


@triton.jit
def node_rows(k_rows, q, k, g, beta, q_factor, k_factor, sees, seen, strict, unseen, PARTS: tl.constexpr):
    """What R nodes, rows j, are to all N, columns i: rows of the transposed matrices of the updates' system and from
    updates to answers, [R, N] each.

    k_rows [R, K], q and k [N, K] are as the model gives them, so that their products are exact in 16 bits; the factors
    [N] make unit vectors of keys, and of queries with their scale. The rest is 0.0 or 1.0. sees [N, N]: node i is or
    has as an ancestor the node of the row; seen [R, N]: the same of these rows; strict: as an ancestor; unseen [R, N]:
    node j neither is nor has the node of the column. What decays between two nodes is summed over the nodes between
    them: as the difference of two sums from the root it would drown in their rounding.
    """
    between = tl.exp(sums_between(unseen, sees, g, PARTS)) * inverse_length(k_rows.to(tl.float32), 1)[:, None]
    system = pair_dot(k_rows, tl.trans(k), PARTS) * between * (beta * k_factor)[None, :] * strict
    reading = pair_dot(k_rows, tl.trans(q), PARTS) * between * q_factor[None, :] * seen
    return system, reading


@triton.jit
def rows_of_tree(mine, word, first, k_rows, q, k, g, beta, q_factor, k_factor, sees, PARTS: tl.constexpr):
    """node_rows of the R nodes from `first` on of a tree, with ancestors `mine` [R]; those of all are `word` [N]."""
    row, node = first + tl.arange(0, mine.shape[0]), tl.arange(0, word.shape[0])
    itself = tl.full((1,), 1, tl.int64) << node.to(tl.int64)
    seen, strict = bits(word[None, :], row[:, None]), bits((word & ~itself)[None, :], row[:, None])
    unseen = bits(~mine[:, None], node[None, :])
    return node_rows(k_rows, q, k, g, beta, q_factor, k_factor, sees, seen, strict, unseen, PARTS)


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
):
    """Grid (blocks of V, HV, B): a program answers all nodes from BLOCK_V columns of a head's state.

    Not started early: with Triton 3.6 a program takes all registers of a multiprocessor, and would find none empty.
    """
    block, value_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = block * BLOCK_V
    node, column = tl.arange(0, BLOCK_N), first + tl.arange(0, BLOCK_V)
    node_ok = node < count
    rows, head = node.to(tl.int64), value_head // (HV // H)
    ancestors_ptr += batch * stride_tb
    mixed_ptr += batch * stride_mb
    # Loads come first, so that they are waited for together; what is loaded again below is near by then.
    HALF: tl.constexpr = min(BLOCK_N, 32)
    upper, lower = tl.arange(0, HALF), BLOCK_N - HALF + tl.arange(0, HALF)
    word = tl.load(ancestors_ptr + node * stride_tn, mask=node_ok, other=0)
    upper_word = tl.load(ancestors_ptr + upper * stride_tn, mask=upper < count, other=0)
    lower_word = tl.load(ancestors_ptr + lower * stride_tn, mask=lower < count, other=0)
    q_first, k_first, v_first = head * K, (H + head) * K, 2 * H * K + value_head * V + first
    q = load_rows(mixed_ptr, rows, node_ok, stride_mn, q_first, K, BLOCK_K)
    k = load_rows(mixed_ptr, rows, node_ok, stride_mn, k_first, K, BLOCK_K)
    offsets, inside = state_offsets(value_head, first, K, V, BLOCK_K, BLOCK_V)
    state = tl.load(state_ptr + batch * stride_sb + tl.trans(offsets), mask=tl.trans(inside), other=0.0)
    v = tl.trans(load_rows(mixed_ptr, rows, node_ok, stride_mn, v_first, V - first, BLOCK_V))
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
    sees = bits(word[None, :], node[:, None])
    left = tl.exp(tl.sum(sees * g[:, None], 0))

    q_factor, k_factor = inverse_length(q.to(tl.float32), 1) * scale, inverse_length(k.to(tl.float32), 1)
    upper_k = load_rows(mixed_ptr, upper.to(tl.int64), upper < count, stride_mn, k_first, K, BLOCK_K)
    system, reading = rows_of_tree(upper_word, word, 0, upper_k, q, k, g, beta, q_factor, k_factor, sees, PARTS)
    if BLOCK_N > HALF:
        lower_k = load_rows(mixed_ptr, lower.to(tl.int64), lower < count, stride_mn, k_first, K, BLOCK_K)
        lower_system, lower_reading = rows_of_tree(
            lower_word, word, HALF, lower_k, q, k, g, beta, q_factor, k_factor, sees, PARTS
        )
        system, reading = on_top(system, lower_system, PARTS), on_top(reading, lower_reading, PARTS)
    right, answers = model_dot(state, tl.trans(k), PARTS), model_dot(state, tl.trans(q), PARTS)
    right = beta[None, :] * (v.to(tl.float32) - (left * k_factor)[None, :] * right)
    update = substitute(system, right, depth, PARTS)
    answers = (left * q_factor)[None, :] * answers + wide_dot(update, reading, PARTS)
    out = out_ptr + ((batch * count + node)[None, :] * HV + value_head) * V + column[:, None]
    tl.store(out, answers.to(out_ptr.dtype.element_ty), mask=node_ok[None, :] & (column < V)[:, None])


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
    block_v = min(BLOCK_V, max(16, triton.next_power_of_2(value_dim)))
    launch(_delta_tree_kernel, (triton.cdiv(value_dim, block_v), value_heads, batch))(
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
        PARTS=bf16_parts(mixed, in_turn=True),
        BLOCK_N=FEW_NODES if count <= FEW_NODES else 64,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_V=block_v,
        num_warps=WARPS,
        num_stages=1,
        **EXACT,
    )
    return out
