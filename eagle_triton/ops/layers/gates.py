"""Activations: of products with a gate (SwiGLU, and heads of attention), and of products alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.layers import check_activate, check_gate_heads, check_swiglu
from eagle_triton.ops.layers.values import SplitRows, activated, contiguous_rows, load_sum, rounded
from eagle_triton.ops.views import Heads, Rows, view
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch
from eagle_triton.runtime.overlap import await_inputs, overlapped
from eagle_triton.runtime.split_sums import Product


@triton.jit
def _swiglu_kernel(gate, up, out_ptr, size, BLOCK: tl.constexpr, GELU_TANH: tl.constexpr):
    """Grid (blocks of a row, rows): a program computes one block."""
    row = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    gated = tl.load(gate.ptr + row * gate.row + offs, mask=mask, other=0.0).to(tl.float32)
    raised = tl.load(up.ptr + row * up.row + offs, mask=mask, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    value = rounded(activated(gated, GELU_TANH), kind) * raised
    tl.store(out_ptr + row * size + offs, value.to(kind), mask=mask)


@triton.jit
def _activate_kernel(
    x, out_ptr, size, BLOCK: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    """Grid (blocks of a row, rows): a program computes one block."""
    await_inputs(PDL)
    row = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    kind = out_ptr.dtype.element_ty
    value = rounded(load_sum(x.ptr + row * x.row + offs, x.split, mask, SPLITS), kind)
    if ACTIVATION == "relu2":
        value = tl.where(value < 0, 0.0, value)
        value *= value
    elif ACTIVATION == "gelu":
        value *= 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        value = activated(value, ACTIVATION == "gelu_tanh")
    tl.store(out_ptr + row * size + offs, value.to(kind), mask=mask)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _gate_heads_kernel(
    x,
    gate,
    out_ptr,
    row_size,
    dim: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_HEAD: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of a node's heads, n, B): a program gates one block. row_size: elements of all heads of a node."""
    await_inputs(PDL)
    node, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, head, column = offs < row_size, offs // dim, offs % dim
    value = tl.load(x.ptr + batch * x.batch + node * x.row + head * x.head + column, mask=mask, other=0.0)
    gate_ptr = gate.ptr + batch * gate.batch + node * gate.row + head * gate.head + (0 if BY_HEAD else column)
    share = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    share = _softplus(share) if SOFTPLUS else tl.sigmoid(share)
    kind = out_ptr.dtype.element_ty
    out = out_ptr + (batch * tl.num_programs(1) + node) * row_size + offs
    tl.store(out, (value.to(tl.float32) * rounded(share, kind)).to(kind), mask=mask)


def swiglu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """silu(gate) * up, elementwise; [..., I] each. activation "gelu_tanh": gelu(gate) * up, gelu by its tanh form."""
    check_swiglu(gate, up, activation)
    out, size = gate.new_empty(gate.shape), gate.shape[-1]
    gate, up = contiguous_rows(gate), contiguous_rows(up)
    if out.numel():
        launch(_swiglu_kernel, (triton.cdiv(size, 1024), gate.shape[0]))(
            Rows.of(gate), Rows.of(up), out, size, 1024, activation == "gelu_tanh", num_warps=4, **NO_FMA_FUSION
        )
    return out


def activate(x: Product, activation: str) -> Tensor:
    """activation(x), elementwise, of an MLP without a gate: "silu", "gelu_tanh", "gelu" or "relu2", max(x, 0)^2.

    x [..., I], perhaps in splits, which are added up here. Returns [..., I]. Raises ValueError for another dtype or
    activation.
    """
    check_activate(x, activation)
    out, size = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    if out.numel():
        source, splits = SplitRows.of(x)
        overlapped(_activate_kernel, (triton.cdiv(size, 1024), out.shape[:-1].numel()), out.device)(
            source, out, size, 1024, splits, activation, num_warps=4
        )
    return out


def gate_heads(x: Tensor, gate: Tensor, activation: str = "sigmoid") -> Tensor:
    """x * sigmoid(gate), or with the activation "softplus" x * log(1 + exp(gate)).

    x [B, n, Hq, d]; gate of the same shape, or [B, n, Hq, 1], one number for each head. Returns [B, n, Hq, d].
    Raises ValueError if shapes, dtypes or the activation do not fit.
    """
    check_gate_heads(x, gate, activation)
    batch, count, heads, dim = x.shape
    x, gate = (part if part.stride(3) == 1 else part.contiguous() for part in (x, gate))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size, block = heads * dim, 1024
    if out.numel():
        overlapped(_gate_heads_kernel, (triton.cdiv(size, block), count, batch), out.device)(
            view(Heads, x),
            view(Heads, gate),
            out,
            size,
            dim,
            block,
            gate.shape[3] < dim,
            activation == "softplus",
            num_warps=4,
        )
    return out
