"""The gated delta rule token by token, in fp32 sums of one order: what is remembered depends on the tokens alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import check_delta
from eagle_triton.ops.gated_delta.checks import check_heads_contiguous
from eagle_triton.ops.layers.values import rounded
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.overlap import await_inputs, overlapped

# Of whatever takes tokens into a state: with another tile the sums have another order.
BLOCK_V = 32
WARPS = 4


@triton.jit
def gating(a, b, A_log, dt_bias, KIND: tl.constexpr):
    """g = -exp(A_log) softplus(a + dt_bias), and beta = sigmoid(b) rounded to KIND, of fp32 values."""
    x = a + dt_bias
    grown = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + grown
    small = tl.where(one == 1.0, grown, tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0)))  # log1p
    g = -tl.exp(A_log) * tl.where(x > 20.0, x, small)
    return g, rounded(1.0 / (1.0 + tl.exp(-b)), KIND)


@triton.jit
def inverse_length(x, AXIS: tl.constexpr):
    """What a query or key is multiplied with to have length 1."""
    return tl.rsqrt(tl.sum(x * x, AXIS) + 1e-6)


@triton.jit
def state_offsets(head, first, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Offsets [BLOCK_K, BLOCK_V] in a sequence's state, from column `first` of a head, and which of them exist."""
    row, column = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_V)
    return head * (K * V) + row[:, None] * V + column[None, :], (row < K)[:, None] & (column < V)[None, :]


@triton.jit
def take_in(
    state,
    k_ptr,
    v_ptr,
    g,
    beta,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The columns [BLOCK_K, BLOCK_V] of a head's state behind one more token, whose k and v begin at the pointers."""
    row, column = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_V)
    k = tl.load(k_ptr + row, mask=row < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + column, mask=column < V, other=0.0).to(tl.float32)
    k = (k * inverse_length(k, 0))[:, None]
    state = state * tl.exp(g)
    update = beta * (v - tl.sum(state * k, 0))
    return tl.fma(k, update[None, :], state)


@triton.jit(do_not_specialize_on_alignment=["gates_ptr", "stride_gb", "stride_gn", "stride_gg", "count"])
def _delta_recurrent_kernel(
    mixed_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
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
    stride_gb,
    stride_gn,
    stride_gg,
    count,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of V, HV, B): a program takes all tokens into BLOCK_V columns of a head's state.

    With KEEP the state is written back.
    """
    await_inputs(PDL)
    block, value_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    shared: tl.constexpr = HV // H
    first, head = block * BLOCK_V, value_head // shared
    row, column = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_V)
    mixed_ptr += batch * stride_mb
    a_ptr += batch * stride_ab + head * stride_ah + value_head % shared * stride_ar
    b_ptr += batch * stride_bb + head * stride_bh + value_head % shared * stride_br
    A_log = tl.load(A_log_ptr + value_head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + value_head).to(tl.float32)
    offsets, inside = state_offsets(value_head, first, K, V, BLOCK_K, BLOCK_V)
    state_ptr += batch * stride_sb
    state = tl.load(state_ptr + offsets, mask=inside, other=0.0)
    for step in range(count):
        token = tl.full((), 0, tl.int64) + step
        tokens = mixed_ptr + token * stride_mn
        a = tl.load(a_ptr + token * stride_an).to(tl.float32)
        b = tl.load(b_ptr + token * stride_bn).to(tl.float32)
        g, beta = gating(a, b, A_log, dt_bias, b_ptr.dtype.element_ty)
        k_ptr, v_ptr = tokens + (H + head) * K, tokens + 2 * H * K + value_head * V
        state = take_in(state, k_ptr, v_ptr, g, beta, first, K, V, BLOCK_K, BLOCK_V)
        q = tl.load(tokens + head * K + row, mask=row < K, other=0.0).to(tl.float32)
        q = (q * inverse_length(q, 0) * scale)[:, None]
        answer = tl.sum(state * q, 0).to(out_ptr.dtype.element_ty)
        out = out_ptr + ((batch * count + token) * HV + value_head) * V
        tl.store(out + column, answer, mask=column < V)
        if gates_ptr is not None:
            gate = gates_ptr + batch * stride_gb + token * stride_gn + value_head
            tl.store(gate, g, mask=block == 0)
            tl.store(gate + stride_gg, beta, mask=block == 0)
    if KEEP:
        tl.store(state_ptr + offsets, state, mask=inside)


def delta_recurrent(mixed: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor) -> Tensor:
    """Outputs [B, n, HV, V] of tokens that follow each other; `state` takes them in, one after another, in place.

    A_log, dt_bias [HV]. Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_delta("delta_recurrent", mixed, a, b, A_log, dt_bias, state)
    check_rows_contiguous("delta_recurrent", mixed=mixed, A_log=A_log, dt_bias=dt_bias)
    check_heads_contiguous("delta_recurrent", "state", state)
    return launch_recurrent(mixed, a, b, A_log, dt_bias, state, None, keep=True)


def launch_recurrent(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    gates: Tensor | None,
    *,
    keep: bool,
) -> Tensor:
    """delta_recurrent of operands that fit; without `keep` the state stays as it is. Fills `gates` [B, n, 2, HV]."""
    batch, count, _ = mixed.shape
    _, value_heads, key_dim, value_dim = state.shape
    out = mixed.new_empty(batch, count, value_heads, value_dim)
    if not out.numel():
        return out
    block_v = column_block(value_dim)
    overlapped(_delta_recurrent_kernel, (triton.cdiv(value_dim, block_v), value_heads, batch), mixed.device)(
        mixed,
        a,
        b,
        A_log,
        dt_bias,
        state,
        gates,
        out,
        *mixed.stride()[:2],
        *a.stride(),
        *b.stride(),
        state.stride(0),
        *((0, 0, 0) if gates is None else gates.stride()[:3]),
        count,
        key_dim**-0.5,
        H=a.shape[2],
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        KEEP=keep,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=WARPS,
    )
    return out


def column_block(value_dim: int) -> int:
    """Columns of a state that a program takes tokens into."""
    return min(BLOCK_V, triton.next_power_of_2(value_dim))
