"""The accepted path becomes part of what all layers remember."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import check_commit_states
from eagle_triton.ops.gated_delta.checks import check_heads_contiguous
from eagle_triton.ops.gated_delta.recurrent import WARPS, column_block, state_offsets, take_in
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.overlap import await_inputs, overlapped

BLOCK_C = 1024  # channels of a window that a program moves on


@triton.jit
def move_window(
    window_ptr,
    raw_ptr,
    path_ptr,
    stride_wr,
    stride_rn,
    taken,
    first,
    channels,
    KEPT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The KEPT newest rows of a window and of the `taken` nodes of a path behind it; all are read before any is
    written."""
    slot, channel = tl.arange(0, BLOCK_W), first + tl.arange(0, BLOCK_C)
    source = slot + taken
    old, new = source < KEPT, (slot < KEPT) & (source >= KEPT)
    node = tl.load(path_ptr + source - KEPT, mask=new, other=0).to(tl.int64)
    ok = (channel < channels)[None, :]
    kept = tl.load(window_ptr + source[:, None] * stride_wr + channel[None, :], mask=old[:, None] & ok, other=0.0)
    row = tl.load(raw_ptr + node[:, None] * stride_rn + channel[None, :], mask=new[:, None] & ok, other=0.0)
    tl.debug_barrier()
    row = tl.where(old[:, None], kept, row)
    tl.store(window_ptr + slot[:, None] * stride_wr + channel[None, :], row, mask=(slot < KEPT)[:, None] & ok)


@triton.jit(do_not_specialize_on_alignment=["path_ptr", "accepted_ptr", "stride_pb", "sequences", "steps"])
def _commit_states_kernel(
    states_ptr,
    windows_ptr,
    raw_ptr,
    mixed_ptr,
    gates_ptr,
    path_ptr,
    accepted_ptr,
    stride_sl,
    stride_sb,
    stride_wl,
    stride_wb,
    stride_wr,
    stride_rl,
    stride_rb,
    stride_rn,
    stride_ml,
    stride_mb,
    stride_mn,
    stride_gl,
    stride_gb,
    stride_gn,
    stride_gg,
    stride_pb,
    stride_cb,
    sequences,
    steps,
    channels,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (L * B, HV * blocks of V + blocks of C): a program takes the path into BLOCK_V columns of a head's state,
    or moves BLOCK_C channels of a window."""
    await_inputs(PDL)
    layer = tl.program_id(0).to(tl.int64) // sequences
    batch, place = tl.program_id(0).to(tl.int64) % sequences, tl.program_id(1)
    path_ptr += batch * stride_pb
    taken = tl.minimum(tl.load(accepted_ptr + batch * stride_cb) + 1, steps)
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    if taken > 0:
        if place < HV * blocks:
            value_head, first = place // blocks, place % blocks * BLOCK_V
            head = value_head // (HV // H)
            offsets, inside = state_offsets(value_head, first, K, V, BLOCK_K, BLOCK_V)
            states_ptr += layer * stride_sl + batch * stride_sb
            mixed_ptr += layer * stride_ml + batch * stride_mb
            gates_ptr += layer * stride_gl + batch * stride_gb + value_head
            state = tl.load(states_ptr + offsets, mask=inside, other=0.0)
            for step in range(taken):
                node = tl.load(path_ptr + step).to(tl.int64)
                g = tl.load(gates_ptr + node * stride_gn)
                beta = tl.load(gates_ptr + node * stride_gn + stride_gg)
                tokens = mixed_ptr + node * stride_mn
                k_ptr, v_ptr = tokens + (H + head) * K, tokens + 2 * H * K + value_head * V
                state = take_in(state, k_ptr, v_ptr, g, beta, first, K, V, BLOCK_K, BLOCK_V)
            tl.store(states_ptr + offsets, state, mask=inside)
        else:
            move_window(
                windows_ptr + layer * stride_wl + batch * stride_wb,
                raw_ptr + layer * stride_rl + batch * stride_rb,
                path_ptr,
                stride_wr,
                stride_rn,
                taken,
                (place - HV * blocks) * BLOCK_C,
                channels,
                KEPT,
                BLOCK_W,
                BLOCK_C,
            )


def commit_states(
    states: Tensor,
    windows: Tensor,
    raw: Tensor,
    mixed: Tensor,
    gates: Tensor,
    path: Tensor,
    accepted: Tensor,
) -> None:
    """Take the accepted path into the states and windows of L layers, in place: token by token, in fp32.

    states [L, B, HV, K, V]; windows [L, B, W - 1, C]; raw, mixed [L, B, N, C] and gates [L, B, N, 2, HV] are those of
    the trees; path [B, P] int32 node indices, of which the first accepted + 1 count; accepted [B] int32, -1 leaves a
    sequence as it is. Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_commit_states(states, windows, raw, mixed, gates, path, accepted)
    check_rows_contiguous("commit_states", windows=windows, raw=raw, mixed=mixed, gates=gates, path=path)
    check_heads_contiguous("commit_states", "states", states)
    layers, batch, value_heads, key_dim, value_dim = states.shape
    kept, channels = windows.shape[2:]
    if not states.numel() or not path.numel():
        return
    block_v, block_c = column_block(value_dim), min(BLOCK_C, triton.next_power_of_2(channels))
    programs = value_heads * triton.cdiv(value_dim, block_v) + (triton.cdiv(channels, block_c) if kept else 0)
    overlapped(_commit_states_kernel, (layers * batch, programs), states.device)(
        states,
        windows,
        raw,
        mixed,
        gates,
        path,
        accepted,
        *states.stride()[:2],
        *windows.stride()[:3],
        *raw.stride()[:3],
        *mixed.stride()[:3],
        *gates.stride()[:4],
        path.stride(0),
        accepted.stride(0),
        batch,
        path.shape[1],
        channels,
        H=(channels - value_heads * value_dim) // (2 * key_dim),
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        KEPT=kept,
        BLOCK_W=triton.next_power_of_2(max(kept, 1)),
        BLOCK_C=block_c,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=WARPS,
    )
