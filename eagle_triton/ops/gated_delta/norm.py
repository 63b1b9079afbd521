"""The norm of each head's output, gated by z."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import check_gated_norm
from eagle_triton.ops.layers.norms import normalise
from eagle_triton.ops.layers.values import rounded
from eagle_triton.ops.views import Heads, view
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.overlap import await_inputs, overlapped

TILE = 1024  # values of a program, which takes whole heads of a row
WARPS = 2


@triton.jit(do_not_specialize_on_alignment=["count"])
def _gated_norm_kernel(
    x,
    z,
    weight_ptr,
    out_ptr,
    count,
    eps,
    R: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of heads, B * n): a program norms HEADS heads of one row. GATE_FIRST: the weight has all heads."""
    await_inputs(PDL)
    row = tl.program_id(1).to(tl.int64)
    batch, node = row // count, row % count
    head, column = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_V)
    ok = (head < HV)[:, None] & (column < V)[None, :]
    x_ptr = x.ptr + (batch * x.batch + node * x.row)
    z_ptr = z.ptr + (batch * z.batch + node * z.row)
    z_offset = head // R * z.head + head % R * V
    x = tl.load(x_ptr + head[:, None] * x.head + column[None, :], mask=ok, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + z_offset[:, None] + column[None, :], mask=ok, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    z = z / (1.0 + tl.exp(-z))
    if GATE_FIRST:
        weight = tl.load(weight_ptr + head[:, None] * V + column[None, :], mask=ok, other=0.0).to(tl.float32)
        x = rounded(normalise(x * z, eps, V), kind) * weight
    else:
        weight = tl.load(weight_ptr + column, mask=column < V, other=0.0).to(tl.float32)[None, :]
        x = rounded(rounded(normalise(x, eps, V), kind) * weight, kind) * z
    out = out_ptr + row * (HV * V) + head[:, None] * V + column[None, :]
    tl.store(out, x.to(kind), mask=ok)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) * silu(z) over each head; see reference.gated_delta.gated_norm.

    Raises ValueError before the launch if shapes, dtypes, devices or strides do not fit.
    """
    check_gated_norm(x, z, weight, gate_first)
    check_rows_contiguous("gated_norm", x=x, z=z, weight=weight)
    batch, count, value_heads, value_dim = x.shape
    out = x.new_empty(batch, count, value_heads * value_dim)
    if not out.numel():
        return out
    block_v = triton.next_power_of_2(value_dim)
    heads = min(max(TILE // block_v, 1), triton.next_power_of_2(value_heads))
    overlapped(_gated_norm_kernel, (triton.cdiv(value_heads, heads), batch * count), x.device)(
        view(Heads, x),
        view(Heads, z),
        weight,
        out,
        count,
        eps,
        R=value_heads // z.shape[2],
        HV=value_heads,
        V=value_dim,
        HEADS=heads,
        BLOCK_V=block_v,
        GATE_FIRST=gate_first,
        num_warps=WARPS if heads * block_v <= TILE else 8,
    )
    return out
