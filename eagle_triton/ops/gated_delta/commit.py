"""Takes the accepted path into the states and windows of all layers."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.gated_delta import check_commit_states, check_commit_windows
from eagle_triton.ops.gated_delta.checks import check_heads_contiguous
from eagle_triton.ops.gated_delta.recurrent import (
    WARPS,
    HeadShape,
    column_block,
    parts_of_token,
    state_offsets,
    take_in,
)
from eagle_triton.ops.views import Matrix, view
from eagle_triton.runtime.checks import check_rows_contiguous
from eagle_triton.runtime.overlap import await_inputs, overlapped

BLOCK_C = 1024  # channels of a window that a program moves on


class LayerStates(NamedTuple):
    """States [L, B, HV, K, V], contiguous for each sequence."""

    ptr: Tensor
    layer: int
    batch: int


class LayerRows(NamedTuple):
    """A tensor [L, B, rows, C], its last dimension contiguous."""

    ptr: Tensor
    layer: int
    batch: int
    row: int


class LayerGates(NamedTuple):
    """g and beta of nodes, [L, B, N, 2, HV], the last dimension contiguous."""

    ptr: Tensor
    layer: int
    batch: int
    row: int
    beta: int


@triton.jit
def rows_of(x, layer, batch):
    return Matrix(x.ptr + (layer * x.layer + batch * x.batch), x.row, 1)


@triton.jit
def move_window(
    window, raw, path_ptr, taken, first, channels, KEPT: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Keep the KEPT newest rows of a window and of the `taken` nodes of a path after it. Reads all before it writes."""
    slot, channel = tl.arange(0, BLOCK_W), first + tl.arange(0, BLOCK_C)
    source = slot + taken
    old, new = source < KEPT, (slot < KEPT) & (source >= KEPT)
    node = tl.load(path_ptr + source - KEPT, mask=new, other=0).to(tl.int64)
    ok = (channel < channels)[None, :]
    kept = tl.load(window.ptr + source[:, None] * window.row + channel[None, :], mask=old[:, None] & ok, other=0.0)
    row = tl.load(raw.ptr + node[:, None] * raw.row + channel[None, :], mask=new[:, None] & ok, other=0.0)
    tl.debug_barrier()
    row = tl.where(old[:, None], kept, row)
    tl.store(window.ptr + slot[:, None] * window.row + channel[None, :], row, mask=(slot < KEPT)[:, None] & ok)


@triton.jit(do_not_specialize_on_alignment=["path_ptr", "accepted_ptr", "stride_pb", "sequences", "steps"])
def _commit_states_kernel(
    states,
    windows,
    raw,
    mixed,
    gates,
    path_ptr,
    accepted_ptr,
    stride_pb,
    stride_cb,
    sequences,
    steps,
    channels,
    SHAPE: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (L * B, HV * blocks of V + blocks of C): a program takes the path into BLOCK_V columns of a head's state,
    or moves BLOCK_C channels of a window."""
    await_inputs(PDL)
    layer = tl.program_id(0).to(tl.int64) // sequences
    batch, place = tl.program_id(0).to(tl.int64) % sequences, tl.program_id(1)
    path_ptr += batch * stride_pb
    taken = tl.minimum(tl.load(accepted_ptr + batch * stride_cb) + 1, steps)
    blocks: tl.constexpr = (SHAPE.V + SHAPE.BLOCK_V - 1) // SHAPE.BLOCK_V
    if taken > 0:
        if place < SHAPE.HV * blocks:
            value_head, first = place // blocks, place % blocks * SHAPE.BLOCK_V
            offsets, inside = state_offsets(value_head, first, SHAPE)
            state_ptr = states.ptr + (layer * states.layer + batch * states.batch)
            gates_ptr = gates.ptr + (layer * gates.layer + batch * gates.batch + value_head)
            tokens = rows_of(mixed, layer, batch)
            _, k_first, v_first = parts_of_token(value_head, SHAPE)
            state = tl.load(state_ptr + offsets, mask=inside, other=0.0)
            for step in range(taken):
                node = tl.load(path_ptr + step).to(tl.int64)
                g = tl.load(gates_ptr + node * gates.row)
                beta = tl.load(gates_ptr + node * gates.row + gates.beta)
                token_ptr = tokens.ptr + node * tokens.row
                state = take_in(state, token_ptr + k_first, token_ptr + v_first, g, beta, first, SHAPE)
            tl.store(state_ptr + offsets, state, mask=inside)
        else:
            window, first = rows_of(windows, layer, batch), (place - SHAPE.HV * blocks) * BLOCK_C
            move_window(window, rows_of(raw, layer, batch), path_ptr, taken, first, channels, KEPT, BLOCK_W, BLOCK_C)


def commit_states(
    states: Tensor,
    windows: Tensor,
    raw: Tensor,
    mixed: Tensor,
    gates: Tensor,
    path: Tensor,
    accepted: Tensor,
    *,
    delta_rule: bool = True,
) -> None:
    """Take the accepted path into states and windows, in place; see reference.gated_delta.commit_states.

    Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_commit_states(states, windows, raw, mixed, gates, path, accepted)
    check_rows_contiguous("commit_states", windows=windows, raw=raw, mixed=mixed, gates=gates, path=path)
    check_heads_contiguous("commit_states", "states", states)
    layers, batch, value_heads, key_dim, value_dim = states.shape
    kept, channels = windows.shape[2:]
    if not states.numel() or not path.numel():
        return
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    shape = HeadShape.of(states, key_heads, column_block(value_dim), delta_rule)
    block_c = min(BLOCK_C, triton.next_power_of_2(channels))
    programs = value_heads * triton.cdiv(value_dim, shape.BLOCK_V) + (triton.cdiv(channels, block_c) if kept else 0)
    overlapped(_commit_states_kernel, (layers * batch, programs), states.device)(
        view(LayerStates, states),
        view(LayerRows, windows),
        view(LayerRows, raw),
        view(LayerRows, mixed),
        view(LayerGates, gates),
        path,
        accepted,
        path.stride(0),
        accepted.stride(0),
        batch,
        path.shape[1],
        channels,
        SHAPE=shape,
        KEPT=kept,
        BLOCK_W=triton.next_power_of_2(max(kept, 1)),
        BLOCK_C=block_c,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize_on_alignment=["path_ptr", "accepted_ptr", "stride_pb", "sequences", "steps"])
def _commit_windows_kernel(
    windows,
    raw,
    path_ptr,
    accepted_ptr,
    stride_pb,
    stride_cb,
    sequences,
    steps,
    channels,
    KEPT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (L * B, blocks of C): a program moves BLOCK_C channels of a window."""
    await_inputs(PDL)
    layer = tl.program_id(0).to(tl.int64) // sequences
    batch, first = tl.program_id(0).to(tl.int64) % sequences, tl.program_id(1) * BLOCK_C
    taken = tl.minimum(tl.load(accepted_ptr + batch * stride_cb) + 1, steps)
    if taken > 0:
        window, rows = rows_of(windows, layer, batch), rows_of(raw, layer, batch)
        path = path_ptr + batch * stride_pb
        move_window(window, rows, path, taken, first, channels, KEPT, BLOCK_W, BLOCK_C)


def commit_windows(windows: Tensor, raw: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Take the accepted path into windows, in place; see reference.gated_delta.commit_windows.

    Raises ValueError before anything is written if shapes, dtypes, devices or strides do not fit.
    """
    check_commit_windows(windows, raw, path, accepted)
    check_rows_contiguous("commit_windows", windows=windows, raw=raw, path=path)
    layers, batch, kept, channels = windows.shape
    if not windows.numel() or not path.numel():
        return
    block_c = min(BLOCK_C, triton.next_power_of_2(channels))
    overlapped(_commit_windows_kernel, (layers * batch, triton.cdiv(channels, block_c)), windows.device)(
        view(LayerRows, windows),
        view(LayerRows, raw),
        path,
        accepted,
        path.stride(0),
        accepted.stride(0),
        batch,
        path.shape[1],
        channels,
        KEPT=kept,
        BLOCK_W=triton.next_power_of_2(kept),
        BLOCK_C=block_c,
        num_warps=WARPS,
    )
