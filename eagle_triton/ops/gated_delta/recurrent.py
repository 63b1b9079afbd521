"""The gated delta rule token by token, with one order of fp32 sums: the state depends only on the tokens."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import check_delta
from eagle_triton.ops.gated_delta.checks import check_heads_contiguous
from eagle_triton.ops.layers.values import rounded
from eagle_triton.ops.views import BatchedRows, view
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.overlap import await_inputs, overlapped

# All kernels that take tokens into a state use this tile: another would change the order of sums.
BLOCK_V = 32
WARPS = 4


class HeadShape(NamedTuple):
    """A constexpr of kernels: H key heads of K, HV value heads of V, and a program's tile of a head's state."""

    H: int
    HV: int
    K: int
    V: int
    BLOCK_K: int
    BLOCK_V: int

    @staticmethod
    def of(state: Tensor, key_heads: int, block_v: int, least_block_k: int = 1) -> HeadShape:
        value_heads, key_dim, value_dim = state.shape[-3:]
        block_k = max(least_block_k, triton.next_power_of_2(key_dim))
        return HeadShape(key_heads, value_heads, key_dim, value_dim, block_k, block_v)


class HeadValues(NamedTuple):
    """One value for each value head, [B, n, H, R]."""

    ptr: Tensor
    batch: int
    row: int
    head: int
    shared: int


class GateInputs(NamedTuple):
    """The operands of g and beta."""

    a: HeadValues
    b: HeadValues
    A_log: Tensor
    dt_bias: Tensor

    @staticmethod
    def of(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> GateInputs:
        return GateInputs(view(HeadValues, a), view(HeadValues, b), A_log, dt_bias)


class States(NamedTuple):
    """States of sequences [B, HV, K, V], contiguous for each sequence."""

    ptr: Tensor
    batch: int


@triton.jit
def gating(a, b, A_log, dt_bias, DTYPE: tl.constexpr):
    """g = -exp(A_log) softplus(a + dt_bias), and beta = sigmoid(b) rounded to DTYPE, of fp32 values."""
    x = a + dt_bias
    grown = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + grown
    small = tl.where(one == 1.0, grown, tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0)))  # log1p
    g = -tl.exp(A_log) * tl.where(x > 20.0, x, small)
    return g, rounded(1.0 / (1.0 + tl.exp(-b)), DTYPE)


@triton.jit
def inverse_length(x, AXIS: tl.constexpr):
    """The factor that gives a query or key length 1."""
    return tl.rsqrt(tl.sum(x * x, AXIS) + 1e-6)


@triton.jit
def parts_of_token(value_head, SHAPE: tl.constexpr):
    """Where q, k and v of a value head begin in a row of `mixed`."""
    head = value_head // (SHAPE.HV // SHAPE.H)
    return head * SHAPE.K, (SHAPE.H + head) * SHAPE.K, 2 * SHAPE.H * SHAPE.K + value_head * SHAPE.V


@triton.jit
def state_offsets(head, first, SHAPE: tl.constexpr):
    """Offsets [BLOCK_K, BLOCK_V] in a sequence's state from column `first` of a head on, and a mask of existing
    ones."""
    row, column = tl.arange(0, SHAPE.BLOCK_K), first + tl.arange(0, SHAPE.BLOCK_V)
    offsets = head * (SHAPE.K * SHAPE.V) + row[:, None] * SHAPE.V + column[None, :]
    return offsets, (row < SHAPE.K)[:, None] & (column < SHAPE.V)[None, :]


@triton.jit
def take_in(state, k_ptr, v_ptr, g, beta, first, SHAPE: tl.constexpr):
    """The columns [BLOCK_K, BLOCK_V] of a head's state after one more token, with its k and v at the pointers."""
    row, column = tl.arange(0, SHAPE.BLOCK_K), first + tl.arange(0, SHAPE.BLOCK_V)
    k = tl.load(k_ptr + row, mask=row < SHAPE.K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + column, mask=column < SHAPE.V, other=0.0).to(tl.float32)
    k = (k * inverse_length(k, 0))[:, None]
    state = state * tl.exp(g)
    update = beta * (v - tl.sum(state * k, 0))
    return tl.fma(k, update[None, :], state)


@triton.jit(do_not_specialize_on_alignment=["gates_ptr", "stride_gb", "stride_gn", "stride_gg", "count"])
def _delta_recurrent_kernel(
    mixed,
    gate_inputs,
    states,
    gates_ptr,
    out_ptr,
    stride_gb,
    stride_gn,
    stride_gg,
    count,
    scale,
    SHAPE: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of V, HV, B): a program takes all tokens into BLOCK_V columns of a head's state. KEEP: write the
    state."""
    await_inputs(PDL)
    block, value_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    a, b = gate_inputs.a, gate_inputs.b
    shared: tl.constexpr = SHAPE.HV // SHAPE.H
    first, head = block * SHAPE.BLOCK_V, value_head // shared
    row, column = tl.arange(0, SHAPE.BLOCK_K), first + tl.arange(0, SHAPE.BLOCK_V)
    mixed_ptr = mixed.ptr + batch * mixed.batch
    a_ptr = a.ptr + (batch * a.batch + head * a.head + value_head % shared * a.shared)
    b_ptr = b.ptr + (batch * b.batch + head * b.head + value_head % shared * b.shared)
    A_log = tl.load(gate_inputs.A_log + value_head).to(tl.float32)
    dt_bias = tl.load(gate_inputs.dt_bias + value_head).to(tl.float32)
    offsets, inside = state_offsets(value_head, first, SHAPE)
    state_ptr = states.ptr + batch * states.batch
    state = tl.load(state_ptr + offsets, mask=inside, other=0.0)
    q_first, k_first, v_first = parts_of_token(value_head, SHAPE)
    for step in range(count):
        token = tl.full((), 0, tl.int64) + step
        tokens = mixed_ptr + token * mixed.row
        g, beta = gating(
            tl.load(a_ptr + token * a.row).to(tl.float32),
            tl.load(b_ptr + token * b.row).to(tl.float32),
            A_log,
            dt_bias,
            b_ptr.dtype.element_ty,
        )
        state = take_in(state, tokens + k_first, tokens + v_first, g, beta, first, SHAPE)
        q = tl.load(tokens + q_first + row, mask=row < SHAPE.K, other=0.0).to(tl.float32)
        q = (q * inverse_length(q, 0) * scale)[:, None]
        answer = tl.sum(state * q, 0).to(out_ptr.dtype.element_ty)
        out = out_ptr + ((batch * count + token) * SHAPE.HV + value_head) * SHAPE.V
        tl.store(out + column, answer, mask=column < SHAPE.V)
        if gates_ptr is not None:
            gate = gates_ptr + batch * stride_gb + token * stride_gn + value_head
            tl.store(gate, g, mask=block == 0)
            tl.store(gate + stride_gg, beta, mask=block == 0)
    if KEEP:
        tl.store(state_ptr + offsets, state, mask=inside)


def delta_recurrent(mixed: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor) -> Tensor:
    """Outputs of tokens that `state` takes in one by one, in place; see reference.gated_delta.delta_recurrent.

    Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
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
    """delta_recurrent of checked operands; without `keep` the state does not change. Fills `gates` [B, n, 2, HV]."""
    batch, count, _ = mixed.shape
    _, value_heads, _, value_dim = state.shape
    out = mixed.new_empty(batch, count, value_heads, value_dim)
    if not out.numel():
        return out
    shape = HeadShape.of(state, a.shape[2], column_block(value_dim))
    overlapped(_delta_recurrent_kernel, (triton.cdiv(value_dim, shape.BLOCK_V), value_heads, batch), mixed.device)(
        view(BatchedRows, mixed),
        GateInputs.of(a, b, A_log, dt_bias),
        view(States, state),
        gates,
        out,
        *((0, 0, 0) if gates is None else gates.stride()[:3]),
        count,
        shape.K**-0.5,
        SHAPE=shape,
        KEEP=keep,
        num_warps=WARPS,
    )
    return out


def column_block(value_dim: int) -> int:
    """The number of columns of a state that a program takes tokens into."""
    return min(BLOCK_V, triton.next_power_of_2(value_dim))
