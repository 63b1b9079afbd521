"""The small operations between the products: RMSNorm, rotary embedding with the cache append, SwiGLU, gated heads.

    rms_norm:       out = weight * x / sqrt(mean(x^2) + eps);  zero-centred: (1 + weight) * ...
    add_rms_norm:   total = x + residual;  out = rms_norm(total)
    add:            out = x (+ residual)
    rotary_append:  q, k = rotate(norm(q), angle), rotate(norm(k), angle);  cache rows first_row.. = k, v
                    rotate((a, b, c), angle) = (a cos - b sin, b cos + a sin, c), a and b the halves of a head's first
                    r elements, c the rest of it, which is empty where r = d
    swiglu:         out = silu(gate) * up
    gate_heads:     out = x * sigmoid(gate)

| name                 | shape               | dtype, layout                                                    |
|----------------------|---------------------|------------------------------------------------------------------|
| x, residual, out     | [..., H]            | fp16, bf16 or fp32; rows may be strided                          |
| q; k, v              | [B, N, Hq | Hkv, d] | as x; any strides but a contiguous d                             |
| x, gate of heads     | [B, n, Hq, d]       | as x; any strides but a contiguous d                             |
| cache                | [2, B, Hkv, T, d]   | fp16, bf16 or fp32; any strides but a contiguous d               |
| first_row, positions | [B], [B, N]         | int32                                                            |
| inv_freq             | [r / 2]             | fp32; angle = position * inv_freq                                |

x, or q, k and v together, may be `SplitSums`: products whose partial sums are added here, in their order.

Numerics: computed in fp32 and rounded to the output's dtype wherever Hugging Face's models round: a product before a
residual is added to it or before it is rotated, a normalised value before its weight (but not before a zero-centred
one), sine and cosine, both terms of a rotation, silu(gate) and sigmoid(gate). That costs nothing and keeps 16-bit
outputs closest to the original's. An angle is the fp32 product, as in the models; it is reduced to a quarter turn in
fp64, so sine and cosine are good to fp32 at any position and need no local memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.reference.layers import (
    check_add,
    check_gate_heads,
    check_rms_norm,
    check_rotary_append,
    check_swiglu,
)
from eagle_triton.runtime.launch import DRAFT_WARPS, EXACT, launch
from eagle_triton.runtime.overlap import await_inputs, overlapped
from eagle_triton.runtime.split_sums import SplitSums, total_of


@triton.jit
def load_sum(ptrs, stride_split, mask, SPLITS: tl.constexpr):
    """fp32 values, or the sum of SPLITS partial values in their order."""
    total = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(ptrs + split * stride_split, mask=mask, other=0.0)
    return total


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """fp32 values as they are after rounding to KIND."""
    return x.to(KIND).to(tl.float32)


@triton.jit
def normalise(x, eps, size: tl.constexpr):
    """x / sqrt(mean(x^2) + eps) over the last of two axes, whose padding beyond `size` is 0."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None]


@triton.jit
def before_weight(normed, KIND: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    """Normalised fp32 values as a norm's weight finds them: rounded to KIND, unless it is zero-centred."""
    if not ZERO_CENTRED:
        normed = rounded(normed, KIND)
    return normed


@triton.jit
def load_weight(ptrs, mask, ZERO_CENTRED: tl.constexpr):
    """A norm's weight in fp32, or 1 + weight."""
    weight = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        weight = 1.0 + weight
    return weight


@triton.jit
def norm_row(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    total_ptr,
    stride_split,
    eps,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):
    """RMSNorm of one row, whose pointers are given. Without `weight_ptr` the row is only summed and rounded."""
    offs = tl.arange(0, BLOCK)[None, :]
    mask = offs < size
    kind = out_ptr.dtype.element_ty
    x = rounded(load_sum(x_ptr + offs, stride_split, mask, SPLITS), kind)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if total_ptr is not None:
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offs, total, mask=mask)
        x = total.to(tl.float32)
    if weight_ptr is not None:
        normed = before_weight(normalise(x, eps, size), kind, ZERO_CENTRED)
        x = normed * load_weight(weight_ptr + offs, mask, ZERO_CENTRED)
    tl.store(out_ptr + offs, x.to(kind), mask=mask)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    total_ptr,
    stride_xs,
    stride_xm,
    stride_rm,
    eps,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,): one program per row."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    if residual_ptr is not None:
        residual_ptr += row * stride_rm
    if total_ptr is not None:
        total_ptr += row * size
    norm_row(
        x_ptr + row * stride_xm,
        weight_ptr,
        residual_ptr,
        out_ptr + row * size,
        total_ptr,
        stride_xs,
        eps,
        size,
        BLOCK,
        SPLITS,
        ZERO_CENTRED,
    )


@triton.jit
def cos_sin(angle):
    """Cosine and sine of fp32 angles of any size: fp64 reduction to [-pi/4, pi/4], then Taylor series to fp32."""
    turns = angle.to(tl.float64) * 0.15915494309189535
    quarters = (turns - tl.floor(turns)) * 4.0
    quarter = tl.floor(quarters + 0.5)
    x = ((quarters - quarter) * 1.5707963267948966).to(tl.float32)
    quarter = quarter.to(tl.int32)
    y = x * x
    sin = x * (1.0 + y * (-1.0 / 6 + y * (1.0 / 120 + y * (-1.0 / 5040 + y * (1.0 / 362880)))))
    cos = 1.0 + y * (-0.5 + y * (1.0 / 24 + y * (-1.0 / 720 + y * (1.0 / 40320 + y * (-1.0 / 3628800)))))
    odd = quarter % 2 == 1
    sin, cos = tl.where(odd, cos, sin), tl.where(odd, sin, cos)
    return tl.where((quarter == 1) | (quarter == 2), -cos, cos), tl.where((quarter == 2) | (quarter == 3), -sin, sin)


@triton.jit
def rotate_heads(
    x_ptr,
    norm_ptr,
    heads,
    head_limit,
    stride_s,
    stride_h,
    cos,
    sin,
    eps,
    half: tl.constexpr,
    HALF: tl.constexpr,
    rest: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Heads heads .. heads + HEADS of one row, normed where `norm_ptr` is given, their first 2 half elements rotated.

    Returns both halves, [HEADS, HALF] each, and the rest [HEADS, REST], for which the first half stands if rest is 0.
    """
    offs_h = heads + tl.arange(0, HEADS)
    offs_d = tl.arange(0, HALF)
    mask = (offs_h < head_limit)[:, None] & (offs_d < half)[None, :]
    ptrs = x_ptr + offs_h[:, None] * stride_h + offs_d[None, :]
    first = rounded(load_sum(ptrs, stride_s, mask, SPLITS), KIND)
    second = rounded(load_sum(ptrs + half, stride_s, mask, SPLITS), KIND)
    third = first
    if rest > 0:
        offs_r = tl.arange(0, REST)
        mask = (offs_h < head_limit)[:, None] & (offs_r < rest)[None, :]
        ptrs = x_ptr + offs_h[:, None] * stride_h + 2 * half + offs_r[None, :]
        third = rounded(load_sum(ptrs, stride_s, mask, SPLITS), KIND)
    if norm_ptr is not None:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if rest > 0:
            square += tl.sum(third * third, axis=1)
        scale = tl.rsqrt(square / (2 * half + rest) + eps)[:, None]
        weight = load_weight(norm_ptr + offs_d, offs_d < half, ZERO_CENTRED)[None, :]
        first = rounded(before_weight(first * scale, KIND, ZERO_CENTRED) * weight, KIND)
        weight = load_weight(norm_ptr + half + offs_d, offs_d < half, ZERO_CENTRED)[None, :]
        second = rounded(before_weight(second * scale, KIND, ZERO_CENTRED) * weight, KIND)
        if rest > 0:
            weight = load_weight(norm_ptr + 2 * half + offs_r, offs_r < rest, ZERO_CENTRED)[None, :]
            third = rounded(before_weight(third * scale, KIND, ZERO_CENTRED) * weight, KIND)
    left = rounded(first * cos, KIND) - rounded(second * sin, KIND)
    return left, rounded(second * cos, KIND) + rounded(first * sin, KIND), third


@triton.jit
def rotary_append_head(
    node,
    head,
    batch,
    position,
    row,
    q_ptr,
    k_ptr,
    v_ptr,
    cache_ptr,
    inv_freq_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    stride_s,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_cs,
    stride_cb,
    stride_ch,
    stride_ct,
    num_nodes,
    capacity,
    scaling,
    eps,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    half: tl.constexpr,
    HALF: tl.constexpr,
    rest: tl.constexpr,
    REST: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):
    """Rotate the query heads of one group and its key, and append key and value at `row` of the cache.

    `head` and `batch` are int64; q, k and v are those of node `node` of sequence `batch`. Of a head's 2 half + rest
    elements the last `rest` do not turn.
    """
    dim: tl.constexpr = 2 * half + rest
    offs_d = tl.arange(0, HALF)
    in_half = offs_d < half
    inv_freq = tl.load(inv_freq_ptr + offs_d, mask=in_half, other=0.0).to(tl.float32)
    cos, sin = cos_sin(position.to(tl.float32) * inv_freq)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    cos, sin = rounded(cos * scaling, kind)[None, :], rounded(sin * scaling, kind)[None, :]

    first, second, third = rotate_heads(
        q_ptr + batch * stride_qb + node * stride_qn + head * group * stride_qh,
        q_norm_ptr,
        0,
        group,
        stride_s,
        stride_qh,
        cos,
        sin,
        eps,
        half,
        HALF,
        rest,
        REST,
        GROUP,
        SPLITS,
        ZERO_CENTRED,
        kind,
    )
    offs_g = tl.arange(0, GROUP)
    mask = (offs_g < group)[:, None] & in_half[None, :]
    out = out_ptr + ((batch * num_nodes + node) * num_kv_heads + head) * (group * dim)
    if rest > 0:
        offs_r = tl.arange(0, REST)
        in_rest = offs_r < rest
        out_rest = out + offs_g[:, None] * dim + 2 * half + offs_r[None, :]
        tl.store(out_rest, third.to(out_ptr.dtype.element_ty), mask=(offs_g < group)[:, None] & in_rest[None, :])
    out += offs_g[:, None] * dim + offs_d[None, :]
    tl.store(out, first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + half, second.to(out_ptr.dtype.element_ty), mask=mask)

    fits = (row >= 0) & (row < capacity)
    key_first, key_second, key_third = rotate_heads(
        k_ptr + batch * stride_kb + node * stride_kn,
        k_norm_ptr,
        head,
        num_kv_heads,
        stride_s,
        stride_kh,
        cos,
        sin,
        eps,
        half,
        HALF,
        rest,
        REST,
        1,
        SPLITS,
        ZERO_CENTRED,
        kind,
    )
    mask = in_half[None, :] & fits
    stored = cache_ptr.dtype.element_ty
    key = cache_ptr + batch * stride_cb + head * stride_ch + row * stride_ct + offs_d[None, :]
    tl.store(key, key_first.to(stored), mask=mask)
    tl.store(key + half, key_second.to(stored), mask=mask)
    value = v_ptr + batch * stride_vb + node * stride_vn + head * stride_vh + offs_d[None, :]
    tl.store(key + stride_cs, load_sum(value, stride_s, mask, SPLITS).to(stored), mask=mask)
    tl.store(key + stride_cs + half, load_sum(value + half, stride_s, mask, SPLITS).to(stored), mask=mask)
    if rest > 0:
        mask = in_rest[None, :] & fits
        key = cache_ptr + batch * stride_cb + head * stride_ch + row * stride_ct + 2 * half + offs_r[None, :]
        tl.store(key, key_third.to(stored), mask=mask)
        value = v_ptr + batch * stride_vb + node * stride_vn + head * stride_vh + 2 * half + offs_r[None, :]
        tl.store(key + stride_cs, load_sum(value, stride_s, mask, SPLITS).to(stored), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["first_row_ptr", "positions_ptr", "stride_fb", "stride_pb", "num_nodes"])
def _rotary_append_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cache_ptr,
    first_row_ptr,
    positions_ptr,
    inv_freq_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    stride_s,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_cs,
    stride_cb,
    stride_ch,
    stride_ct,
    stride_fb,
    stride_pb,
    stride_pn,
    num_nodes,
    capacity,
    scaling,
    eps,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    half: tl.constexpr,
    HALF: tl.constexpr,
    rest: tl.constexpr,
    REST: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, Hkv, B): one program makes one head of one node."""
    await_inputs(PDL)
    node, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rotary_append_head(
        node,
        head,
        batch,
        tl.load(positions_ptr + batch * stride_pb + node * stride_pn),
        tl.load(first_row_ptr + batch * stride_fb).to(tl.int64) + node,
        q_ptr,
        k_ptr,
        v_ptr,
        cache_ptr,
        inv_freq_ptr,
        q_norm_ptr,
        k_norm_ptr,
        out_ptr,
        stride_s,
        stride_qb,
        stride_qn,
        stride_qh,
        stride_kb,
        stride_kn,
        stride_kh,
        stride_vb,
        stride_vn,
        stride_vh,
        stride_cs,
        stride_cb,
        stride_ch,
        stride_ct,
        num_nodes,
        capacity,
        scaling,
        eps,
        num_kv_heads,
        group,
        half,
        HALF,
        rest,
        REST,
        GROUP,
        SPLITS,
        ZERO_CENTRED,
    )


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, out_ptr, stride_gm, stride_um, size, BLOCK: tl.constexpr):
    """Grid (blocks of a row, rows)."""
    row = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    gate = tl.load(gate_ptr + row * stride_gm + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_um + offs, mask=mask, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * size + offs, (rounded(gate * tl.sigmoid(gate), kind) * up).to(kind), mask=mask)


@triton.jit
def _gate_heads_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    stride_xb,
    stride_xn,
    stride_xh,
    stride_gb,
    stride_gn,
    stride_gh,
    row_size,
    dim: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of a node's heads, n, B); `row_size` elements are all heads of a node."""
    await_inputs(PDL)
    node, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, head, column = offs < row_size, offs // dim, offs % dim
    x = tl.load(x_ptr + batch * stride_xb + node * stride_xn + head * stride_xh + column, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + batch * stride_gb + node * stride_gn + head * stride_gh + column, mask=mask, other=0.0)
    kind = out_ptr.dtype.element_ty
    share = rounded(tl.sigmoid(gate.to(tl.float32)), kind)
    out = out_ptr + (batch * tl.num_programs(1) + node) * row_size + offs
    tl.store(out, (x.to(tl.float32) * share).to(kind), mask=mask)


def norm_warps(block: int, in_draft_pass: bool = False) -> int:
    """Warps for a row of `block` elements; in a draft pass the megakernel's, whose sums have the same order then."""
    return DRAFT_WARPS if in_draft_pass else min(max(block // 512, 1), 16)


def rms_norm(
    x: Tensor | SplitSums, weight: Tensor, eps: float, *, zero_centred: bool = False, in_draft_pass: bool = False
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension. x [..., H], weight [H].

    `zero_centred`: 1 + weight stands for the weight. With `in_draft_pass` the bits are the megakernel's.
    """
    check_rms_norm("rms_norm", x, weight)
    out = weight.new_empty(x.shape)
    _launch_norm(x, weight.contiguous(), eps, None, out, None, zero_centred, in_draft_pass)
    return out


def add_rms_norm(
    x: Tensor | SplitSums,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    in_draft_pass: bool = False,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), [..., H] each, in one pass. x, residual [..., H], weight [H].

    `zero_centred`: 1 + weight stands for the weight. With `in_draft_pass` the bits are the megakernel's.
    """
    check_rms_norm("add_rms_norm", x, weight, residual)
    out, total = weight.new_empty(x.shape), weight.new_empty(x.shape)
    _launch_norm(x, weight.contiguous(), eps, residual, out, total, zero_centred, in_draft_pass)
    return out, total


def add(x: Tensor | SplitSums, residual: Tensor | None = None) -> Tensor:
    """x + residual, or the sum of SplitSums alone, rounded once: [..., H]."""
    check_add(x, residual)
    if residual is None and isinstance(x, Tensor):
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, 0.0, residual, out, None)
    return out


def _launch_norm(
    x: Tensor | SplitSums,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    zero_centred: bool = False,
    in_draft_pass: bool = False,
) -> None:
    """One program for each row of `out`, which is contiguous."""
    if not out.numel():
        return
    size, count = x.shape[-1], x.shape[:-1].numel()
    residual = None if residual is None else _contiguous_rows(residual)
    if isinstance(x, SplitSums):
        rows = x.sums.reshape(-1, count, size)
        rows = rows if rows.stride(2) == 1 else rows.contiguous()
        splits, stride_split = rows.shape[0], rows.stride(0)
    else:
        rows, splits, stride_split = _contiguous_rows(x), 1, 0
    block = triton.next_power_of_2(size)
    overlapped(_rms_norm_kernel, (count,), out.device)(
        rows,
        weight,
        residual,
        out,
        total,
        stride_split,
        rows.stride(-2),
        0 if residual is None else residual.stride(0),
        eps,
        size,
        block,
        splits,
        zero_centred,
        num_warps=norm_warps(block, in_draft_pass),
    )


def rotary_append(
    q: Tensor | SplitSums,
    k: Tensor | SplitSums,
    v: Tensor | SplitSums,
    cache: Tensor,
    first_row: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    attention_scaling: float = 1.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    zero_centred: bool = False,
) -> Tensor:
    """Norm (optional), rotate q and k by their positions, and write k and v to the cache. Returns the rotated q.

    q [B, N, Hq, d]; k, v [B, N, Hkv, d]; cache [2, B, Hkv, T, d], rows first_row .. first_row + N of it are written in
    place, first_row [B] int32; positions [B, N] int32; inv_freq [r / 2] fp32 turns a head's first r elements; cos and
    sin times attention_scaling; q_norm, k_norm [d], see rms_norm for `zero_centred`. Rows beyond the capacity T are not
    written.
    """
    check_rotary_append(q, k, v, cache, first_row, positions, inv_freq, q_norm, k_norm)
    batch, count, heads, dim = q.shape
    num_kv_heads = k.shape[2]
    group = heads // num_kv_heads
    if cache.stride(4) != 1:
        raise ValueError(f"rotary_append: the cache's last dimension must be contiguous, got {cache.stride()}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = [x.sums for x in (q, k, v) if isinstance(x, SplitSums)]
    splits, stride_split = 1, 0
    if len(sums) == 3 and len({(len(x), x.stride(0)) for x in sums}) == 1:
        splits, stride_split = len(sums[0]), sums[0].stride(0)
        heads_of = [x[0] for x in sums]
    else:
        heads_of = [total_of(x) for x in (q, k, v)]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in heads_of)
    half = len(inv_freq)
    rest = dim - 2 * half
    if out.numel():
        overlapped(_rotary_append_kernel, (count, num_kv_heads, batch), out.device)(
            q,
            k,
            v,
            cache,
            first_row,
            positions,
            inv_freq.contiguous(),
            None if q_norm is None else q_norm.contiguous(),
            None if k_norm is None else k_norm.contiguous(),
            out,
            stride_split,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *cache.stride()[:4],
            first_row.stride(0),
            *positions.stride(),
            count,
            cache.shape[3],
            attention_scaling,
            eps,
            num_kv_heads,
            group,
            half,
            triton.next_power_of_2(half),
            rest,
            triton.next_power_of_2(rest),
            triton.next_power_of_2(group),
            splits,
            zero_centred,
            num_warps=1,
        )
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; [..., I] each."""
    check_swiglu(gate, up)
    out, size = gate.new_empty(gate.shape), gate.shape[-1]
    gate, up = _contiguous_rows(gate), _contiguous_rows(up)
    if out.numel():
        launch(_swiglu_kernel, (triton.cdiv(size, 1024), gate.shape[0]))(
            gate, up, out, gate.stride(0), up.stride(0), size, 1024, num_warps=4, **EXACT
        )
    return out


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), elementwise; [B, n, Hq, d] each."""
    check_gate_heads(x, gate)
    batch, count, heads, dim = x.shape
    x, gate = (part if part.stride(3) == 1 else part.contiguous() for part in (x, gate))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size, block = heads * dim, 1024
    if out.numel():
        overlapped(_gate_heads_kernel, (triton.cdiv(size, block), count, batch), out.device)(
            x, gate, out, *x.stride()[:3], *gate.stride()[:3], size, dim, block, num_warps=4
        )
    return out


def _contiguous_rows(x: Tensor) -> Tensor:
    """x as [rows, H], each row contiguous."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
