"""The gated delta rule, or Mamba-2's, token by token, with one order of fp32 sums: the state depends only on tokens.

Without b all kernels here compute Mamba-2's layer; see reference.gated_delta.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import check_delta
from eagle_triton.ops.gated_delta.checks import check_heads_contiguous
from eagle_triton.ops.layers.values import rounded
from eagle_triton.ops.views import BatchedRows, Vector, view
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.overlap import await_inputs, overlapped

# All kernels that take tokens into a state use this tile: another would change the order of sums.
BLOCK_V = 32
WARPS = 4


class HeadShape(NamedTuple):
    """A constexpr of kernels: H key heads of K, HV value heads of V, and a program's tile of a head's state. DELTA: the
    gated delta rule, otherwise Mamba-2's."""

    H: int
    HV: int
    K: int
    V: int
    BLOCK_K: int
    BLOCK_V: int
    DELTA: bool

    @staticmethod
    def of(state: Tensor, key_heads: int, block_v: int, delta: bool, least_block_k: int = 1) -> HeadShape:
        value_heads, key_dim, value_dim = state.shape[-3:]
        block_k = max(least_block_k, triton.next_power_of_2(key_dim))
        return HeadShape(key_heads, value_heads, key_dim, value_dim, block_k, block_v, delta)

    @property
    def scale(self) -> float:
        """Of scores."""
        return self.K**-0.5 if self.DELTA else 1.0


class HeadValues(NamedTuple):
    """One value for each value head, [B, n, H, R]."""

    ptr: Tensor
    batch: int
    row: int
    head: int
    shared: int


class GateInputs(NamedTuple):
    """The operands of g and beta. Without b: steps from `least_dt` to `most_dt` in the first `limited` [B] rows, or in
    all, and perhaps a factor `skip` [HV] for values in the output. max_beta: None for 1."""

    a: HeadValues
    b: HeadValues | None
    A_log: Tensor
    dt_bias: Tensor
    skip: Tensor | None
    least_dt: float | None
    most_dt: float | None
    limited: Tensor | None
    max_beta: float | None

    @staticmethod
    def of(
        a: Tensor,
        b: Tensor | None,
        A_log: Tensor,
        dt_bias: Tensor,
        skip: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        limited: Tensor | None = None,
        max_beta: float = 1.0,
    ) -> GateInputs:
        least, most = (None, None) if b is not None else dt_limit
        largest = None if max_beta == 1.0 else max_beta
        return GateInputs(view(HeadValues, a), view(HeadValues, b), A_log, dt_bias, skip, least, most, limited, largest)


class States(NamedTuple):
    """States of sequences [B, HV, K, V], contiguous for each sequence."""

    ptr: Tensor
    batch: int


@triton.jit
def value_row(values, batch, value_head, SHARED: tl.constexpr):
    """One value head of a sequence, as (pointer, distance of rows)."""
    place = value_head // SHARED * values.head + value_head % SHARED * values.shared
    return Vector(values.ptr + (batch * values.batch + place), values.row)


@triton.jit
def gating(gate_inputs, batch, rows, a, b, A_log, dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias) and beta = max_beta sigmoid(b), rounded to b's dtype; without b beta is dt,
    the softplus within its limits, and g = -exp(A_log) dt."""
    x = a.to(tl.float32) + dt_bias
    grown = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + grown
    small = tl.where(one == 1.0, grown, tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0)))  # log1p
    dt = tl.where(x > 20.0, x, small)
    if b is None:
        within = tl.minimum(tl.maximum(dt, gate_inputs.least_dt), gate_inputs.most_dt)
        if gate_inputs.limited is not None:
            within = tl.where(rows < tl.load(gate_inputs.limited + batch), within, dt)
        dt = within
        beta = dt
    else:
        beta = rounded(1.0 / (1.0 + tl.exp(-b.to(tl.float32))), b.dtype)
        if gate_inputs.max_beta is not None:
            beta = rounded(beta * gate_inputs.max_beta, b.dtype)
    return -tl.exp(A_log) * dt, beta


@triton.jit
def inverse_length(x, AXIS: tl.constexpr, SHAPE: tl.constexpr):
    """The factor that gives a query or key length 1; 1.0 where they keep their length."""
    if SHAPE.DELTA:
        return tl.rsqrt(tl.sum(x * x, AXIS) + 1e-6)
    elif len(x.shape) == 1:
        return 1.0
    else:
        return tl.full((x.shape[0],), 1.0, tl.float32)


@triton.jit
def parts_of_token(value_head, SHAPE: tl.constexpr):
    """Where q, k and v of a value head begin in a row of `mixed`."""
    head = value_head // (SHAPE.HV // SHAPE.H)
    if SHAPE.DELTA:
        return head * SHAPE.K, (SHAPE.H + head) * SHAPE.K, 2 * SHAPE.H * SHAPE.K + value_head * SHAPE.V
    else:
        k_first = SHAPE.HV * SHAPE.V + head * SHAPE.K
        return k_first + SHAPE.H * SHAPE.K, k_first, value_head * SHAPE.V


@triton.jit
def skipped(skip_ptr, value_head, v):
    """What a head's outputs get from the values v of their own tokens."""
    return tl.load(skip_ptr + value_head).to(tl.float32) * v.to(tl.float32)


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
    k = (k * inverse_length(k, 0, SHAPE))[:, None]
    state = state * tl.exp(g)
    if SHAPE.DELTA:
        v -= tl.sum(state * k, 0)
    return tl.fma(k, (beta * v)[None, :], state)


@triton.jit(do_not_specialize_on_alignment=["gates_ptr", "stride_gb", "stride_gn", "stride_gg", "count"])
def _delta_recurrent_kernel(
    mixed,
    gate_inputs,
    states,
    gates_ptr,
    active_ptr,
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
    state, of an active sequence."""
    await_inputs(PDL)
    block, value_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = block * SHAPE.BLOCK_V
    row, column = tl.arange(0, SHAPE.BLOCK_K), first + tl.arange(0, SHAPE.BLOCK_V)
    mixed_ptr = mixed.ptr + batch * mixed.batch
    a_row = value_row(gate_inputs.a, batch, value_head, SHAPE.HV // SHAPE.H)
    if SHAPE.DELTA:
        b_row = value_row(gate_inputs.b, batch, value_head, SHAPE.HV // SHAPE.H)
    A_log = tl.load(gate_inputs.A_log + value_head).to(tl.float32)
    dt_bias = tl.load(gate_inputs.dt_bias + value_head).to(tl.float32)
    offsets, inside = state_offsets(value_head, first, SHAPE)
    state_ptr = states.ptr + batch * states.batch
    state = tl.load(state_ptr + offsets, mask=inside, other=0.0)
    q_first, k_first, v_first = parts_of_token(value_head, SHAPE)
    for step in range(count):
        token = tl.full((), 0, tl.int64) + step
        tokens = mixed_ptr + token * mixed.row
        b = None
        if SHAPE.DELTA:
            b = tl.load(b_row.ptr + token * b_row.item)
        g, beta = gating(gate_inputs, batch, step, tl.load(a_row.ptr + token * a_row.item), b, A_log, dt_bias)
        state = take_in(state, tokens + k_first, tokens + v_first, g, beta, first, SHAPE)
        q = tl.load(tokens + q_first + row, mask=row < SHAPE.K, other=0.0).to(tl.float32)
        q = (q * inverse_length(q, 0, SHAPE) * scale)[:, None]
        answer = tl.sum(state * q, 0)
        if gate_inputs.skip is not None:
            v = tl.load(tokens + v_first + column, mask=column < SHAPE.V, other=0.0)
            answer += skipped(gate_inputs.skip, value_head, v)
        answer = answer.to(out_ptr.dtype.element_ty)
        out = out_ptr + ((batch * count + token) * SHAPE.HV + value_head) * SHAPE.V
        tl.store(out + column, answer, mask=column < SHAPE.V)
        if gates_ptr is not None:
            gate = gates_ptr + batch * stride_gb + token * stride_gn + value_head
            tl.store(gate, g, mask=block == 0)
            tl.store(gate + stride_gg, beta, mask=block == 0)
    if KEEP:
        if active_ptr is not None:
            inside &= tl.load(active_ptr + batch) != 0
        tl.store(state_ptr + offsets, state, mask=inside)


def delta_recurrent(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    skip: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    limited: Tensor | None = None,
    max_beta: float = 1.0,
) -> Tensor:
    """Outputs of tokens that `state` takes in one by one, in place; see reference.gated_delta.delta_recurrent.

    Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_delta("delta_recurrent", mixed, a, b, A_log, dt_bias, state, None, skip, active, limited, max_beta)
    check_rows_contiguous("delta_recurrent", mixed=mixed, A_log=A_log, dt_bias=dt_bias, skip=skip)
    check_heads_contiguous("delta_recurrent", "state", state)
    gate_inputs = GateInputs.of(a, b, A_log, dt_bias, skip, dt_limit, limited, max_beta)
    return launch_recurrent(mixed, gate_inputs, a.shape[2], state, None, keep=True, active=active)


def launch_recurrent(
    mixed: Tensor,
    gate_inputs: GateInputs,
    key_heads: int,
    state: Tensor,
    gates: Tensor | None,
    *,
    keep: bool,
    active: Tensor | None = None,
) -> Tensor:
    """delta_recurrent of checked operands; without `keep` the state does not change. Fills `gates` [B, n, 2, HV]."""
    batch, count, _ = mixed.shape
    _, value_heads, _, value_dim = state.shape
    out = mixed.new_empty(batch, count, value_heads, value_dim)
    if not out.numel():
        return out
    shape = HeadShape.of(state, key_heads, column_block(value_dim), gate_inputs.b is not None)
    overlapped(_delta_recurrent_kernel, (triton.cdiv(value_dim, shape.BLOCK_V), value_heads, batch), mixed.device)(
        view(BatchedRows, mixed),
        gate_inputs,
        view(States, state),
        gates,
        active,
        out,
        *((0, 0, 0) if gates is None else gates.stride()[:3]),
        count,
        shape.scale,
        SHAPE=shape,
        KEEP=keep,
        num_warps=WARPS,
    )
    return out


def column_block(value_dim: int) -> int:
    """The number of columns of a state that a program takes tokens into."""
    return min(BLOCK_V, triton.next_power_of_2(value_dim))
