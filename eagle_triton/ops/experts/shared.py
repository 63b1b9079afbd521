"""Adds a shared expert, which every row takes, to the experts that rows choose."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.experts import check_add_shared_expert
from eagle_triton.ops.layers.values import SplitRows, contiguous_rows, load_sum, rounded
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.overlap import await_inputs, overlapped
from eagle_triton.runtime.split_sums import Product

_BLOCK = 1024


@triton.jit
def _add_shared_expert_kernel(
    routed,
    shared,
    x,
    gate_ptr,
    out_ptr,
    size,
    ROUTED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of a row, rows). Each program computes its row's gate. ROUTED, SHARED: their splits."""
    await_inputs(PDL)
    row = tl.program_id(1).to(tl.int64)
    kind = out_ptr.dtype.element_ty
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        value = tl.load(x.ptr + row * x.row + offs, mask=offs < size, other=0.0).to(tl.float32)
        products += value * tl.load(gate_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
    share = rounded(tl.sigmoid(rounded(tl.sum(products, axis=0), kind)), kind)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    own = rounded(load_sum(routed.ptr + row * routed.row + offs, routed.split, mask, ROUTED), kind)
    other = rounded(load_sum(shared.ptr + row * shared.row + offs, shared.split, mask, SHARED), kind)
    tl.store(out_ptr + row * size + offs, (own + rounded(share * other, kind)).to(kind), mask=mask)


def add_shared_expert(routed: Product, shared: Product, x: Tensor, gate: Tensor) -> Tensor:
    """routed + sigmoid(x @ gate.T) * shared, [..., H] each, gate [1, H]; each operation rounds to x's dtype."""
    check_add_shared_expert(routed, shared, x, gate)
    out, size = x.new_empty(x.shape), x.shape[-1]
    (own, own_splits), (other, other_splits) = (SplitRows.of(each) for each in (routed, shared))
    rows = contiguous_rows(x)
    if out.numel():
        overlapped(_add_shared_expert_kernel, (triton.cdiv(size, _BLOCK), len(rows)), x.device)(
            own, other, Rows.of(rows), gate, out, size, own_splits, other_splits, _BLOCK, num_warps=4
        )
    return out
