"""What was accepted becomes part of the sequence, and who has finished is seen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.verification import ERROR, LENGTH, REPORT_TOKENS, STOP, Stops, check_update
from eagle_triton.runtime.overlap import await_inputs, overlapped

_STOP, _LENGTH, _ERROR = tl.constexpr(STOP), tl.constexpr(LENGTH), tl.constexpr(ERROR)
_REPORT_TOKENS = tl.constexpr(REPORT_TOKENS)


@triton.jit
def update_one(
    sequence_ptr,
    length_ptr,
    active_ptr,
    tokens_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    stop_ids_ptr,
    limit_ptr,
    exact_ptr,
    report_ptr,
    counter_ptr,
    before_ptr,
    steps,
    columns,
    stops,
    STEPS: tl.constexpr,
    STOPS: tl.constexpr,
):
    """update_sequence for the one sequence whose rows and values the pointers name. STEPS > D + 1, STOPS >= S."""
    step = tl.arange(0, STEPS)
    length = tl.load(length_ptr)
    active = tl.load(active_ptr) != 0
    nan = tl.load(nan_ptr) != 0
    limit = tl.load(limit_ptr)
    next_token = tl.load(next_ptr)
    counter = tl.load(counter_ptr)
    accepted = tl.where(active & (nan == 0), tl.load(accepted_ptr), -1)
    given = (step <= accepted) & (step < steps)
    node = tl.load(path_ptr + step, mask=given, other=0)
    token = tl.load(tokens_ptr + node, mask=given, other=-1)

    stop = tl.arange(0, STOPS)
    stop_id = tl.load(stop_ids_ptr + stop, mask=stop < stops, other=-1)
    stopping = tl.max(((token[:, None] == stop_id[None, :]) & given[:, None]).to(tl.int32), 1) > 0
    first_stop = tl.min(tl.where(stopping, step, steps), 0)
    count = accepted + 1
    cut = tl.minimum(tl.minimum(count, first_stop + 1), tl.maximum(limit - length, 0))
    kept = tl.where(tl.load(exact_ptr) != 0, cut, count)
    after = length + kept
    reason = tl.where(first_stop < kept, _STOP, tl.where(after >= limit, _LENGTH, 0))
    reason = tl.where(active, tl.where(nan, _ERROR, reason), 0)

    place = sequence_ptr + length.to(tl.int64) + step
    tl.store(place, token, mask=given & (length + step < columns))
    behind = length + count
    tl.store(sequence_ptr + behind.to(tl.int64), next_token, mask=(count > 0) & (behind < columns))
    told = tl.where((step == count) & (count > 0), next_token, token)
    tl.store(report_ptr + _REPORT_TOKENS + step, told, mask=step <= steps)
    tl.store(report_ptr, accepted.to(tl.int64))
    tl.store(report_ptr + 1, kept.to(tl.int64))
    tl.store(report_ptr + 2, reason.to(tl.int64))
    tl.store(before_ptr, length)
    tl.debug_barrier()  # no warp may still be about to read what follows
    tl.store(counter_ptr, counter + 1)
    tl.store(length_ptr, after)
    tl.store(accepted_ptr, accepted)
    tl.store(active_ptr, active & (reason == 0))


@triton.jit
def _update_sequence_kernel(
    sequence_ptr,
    lengths_ptr,
    active_ptr,
    tokens_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    nan_ptr,
    stop_ids_ptr,
    limit_ptr,
    exact_ptr,
    report_ptr,
    counter_ptr,
    before_ptr,
    steps,
    columns,
    stops,
    stride_sb,
    stride_tb,
    stride_pb,
    stride_ib,
    stride_rb,
    STEPS: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    await_inputs(PDL)
    batch = tl.program_id(0).to(tl.int64)
    update_one(
        sequence_ptr + batch * stride_sb,
        lengths_ptr + batch,
        active_ptr + batch,
        tokens_ptr + batch * stride_tb,
        path_ptr + batch * stride_pb,
        accepted_ptr + batch,
        next_ptr + batch,
        nan_ptr + batch,
        stop_ids_ptr + batch * stride_ib,
        limit_ptr + batch,
        exact_ptr + batch,
        report_ptr + batch * stride_rb,
        counter_ptr + batch,
        before_ptr + batch,
        steps,
        columns,
        stops,
        STEPS,
        STOPS,
    )


def update_sequence(
    sequence: Tensor,
    lengths: Tensor,
    active: Tensor,
    tokens: Tensor,
    path: Tensor,
    accepted: Tensor,
    next_token: Tensor,
    nan: Tensor,
    stops: Stops,
    report: Tensor,
    counter: Tensor,
) -> Tensor:
    """Commit what verification accepted and see who has finished; see reference.verification.update_sequence.

    Changes sequence [B, C], lengths, active, accepted and counter [B] in place and fills report [B, R]. Returns the
    lengths before that, [B] int32. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_update(sequence, lengths, active, tokens, path, accepted, next_token, nan, stops, report, counter)
    before = torch.empty(lengths.shape, dtype=lengths.dtype, device=lengths.device)
    batch, steps = path.shape
    width = stops.ids.shape[1]
    overlapped(_update_sequence_kernel, (batch,), path.device)(
        sequence,
        lengths,
        active,
        tokens,
        path,
        accepted,
        next_token,
        nan,
        *stops,
        report,
        counter,
        before,
        steps,
        sequence.shape[1],
        width,
        *(value.stride(0) for value in (sequence, tokens, path, stops.ids, report)),
        STEPS=triton.next_power_of_2(steps + 1),
        STOPS=triton.next_power_of_2(width),
        num_warps=1,
    )
    return before
