"""Appends accepted tokens to their sequences, and finds the sequences that have finished."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.verification import ERROR, LENGTH, REPORT_TOKENS, STOP, Stops, check_update
from eagle_triton.ops.views import Rows
from eagle_triton.runtime.overlap import await_inputs, overlapped

_STOP, _LENGTH, _ERROR = tl.constexpr(STOP), tl.constexpr(LENGTH), tl.constexpr(ERROR)
_REPORT_TOKENS = tl.constexpr(REPORT_TOKENS)


class Sequences(NamedTuple):
    """The sequences' tokens, [B, columns], and their state."""

    tokens: Rows
    columns: int
    lengths: Tensor
    active: Tensor
    report: Rows
    counter: Tensor
    before: Tensor


class Accepted(NamedTuple):
    """The results of verification: the path [B, steps], the number of accepted drafts, the next token, and whether a
    logit was NaN."""

    path: Rows
    steps: int
    drafts: Tensor
    next_token: Tensor
    nan: Tensor


class StopRules(NamedTuple):
    """`Stops`, with the number of ids of each sequence."""

    ids: Rows
    stops: int
    limit: Tensor
    exact: Tensor


@triton.jit
def update_one(batch, sequences, tree_tokens, accepted, rules, STEPS: tl.constexpr, STOPS: tl.constexpr):
    """update_sequence for the sequence `batch` (int64). STEPS > D + 1, STOPS >= S."""
    sequence_ptr = sequences.tokens.ptr + batch * sequences.tokens.row
    tokens_ptr, path_ptr = tree_tokens.ptr + batch * tree_tokens.row, accepted.path.ptr + batch * accepted.path.row
    stop_ids_ptr = rules.ids.ptr + batch * rules.ids.row
    report_ptr = sequences.report.ptr + batch * sequences.report.row
    steps, columns, stops = accepted.steps, sequences.columns, rules.stops
    step = tl.arange(0, STEPS)
    length = tl.load(sequences.lengths + batch)
    active = tl.load(sequences.active + batch) != 0
    nan = tl.load(accepted.nan + batch) != 0
    limit = tl.load(rules.limit + batch)
    next_token = tl.load(accepted.next_token + batch)
    counter = tl.load(sequences.counter + batch)
    drafts = tl.where(active & (nan == 0), tl.load(accepted.drafts + batch), -1)
    given = (step <= drafts) & (step < steps)
    node = tl.load(path_ptr + step, mask=given, other=0)
    token = tl.load(tokens_ptr + node, mask=given, other=-1)

    stop = tl.arange(0, STOPS)
    stop_id = tl.load(stop_ids_ptr + stop, mask=stop < stops, other=-1)
    stopping = tl.max(((token[:, None] == stop_id[None, :]) & given[:, None]).to(tl.int32), 1) > 0
    first_stop = tl.min(tl.where(stopping, step, steps), 0)
    count = drafts + 1
    cut = tl.minimum(tl.minimum(count, first_stop + 1), tl.maximum(limit - length, 0))
    kept = tl.where(tl.load(rules.exact + batch) != 0, cut, count)
    after = length + kept
    reason = tl.where(first_stop < kept, _STOP, tl.where(after >= limit, _LENGTH, 0))
    reason = tl.where(active, tl.where(nan, _ERROR, reason), 0)

    place = sequence_ptr + length.to(tl.int64) + step
    tl.store(place, token, mask=given & (length + step < columns))
    new_root = length + count
    tl.store(sequence_ptr + new_root.to(tl.int64), next_token, mask=(count > 0) & (new_root < columns))
    told = tl.where((step == count) & (count > 0), next_token, token)
    tl.store(report_ptr + _REPORT_TOKENS + step, told, mask=step <= steps)
    tl.store(report_ptr, drafts.to(tl.int64))
    tl.store(report_ptr + 1, kept.to(tl.int64))
    tl.store(report_ptr + 2, reason.to(tl.int64))
    tl.store(sequences.before + batch, length)
    tl.debug_barrier()  # all warps have read before the stores below
    tl.store(sequences.counter + batch, counter + 1)
    tl.store(sequences.lengths + batch, after)
    tl.store(accepted.drafts + batch, drafts)
    tl.store(sequences.active + batch, active & (reason == 0))


@triton.jit
def _update_sequence_kernel(
    sequences, tree_tokens, accepted, rules, STEPS: tl.constexpr, STOPS: tl.constexpr, PDL: tl.constexpr
):
    """Grid (B,): a program updates one sequence."""
    await_inputs(PDL)
    update_one(tl.program_id(0).to(tl.int64), sequences, tree_tokens, accepted, rules, STEPS, STOPS)


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
    """Commit accepted tokens and find the sequences that have finished; see reference.verification.update_sequence.

    Changes sequence [B, C], lengths, active, accepted and counter [B] in place and fills report [B, R]. Returns the
    lengths before that, [B] int32. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_update(sequence, lengths, active, tokens, path, accepted, next_token, nan, stops, report, counter)
    before = torch.empty(lengths.shape, dtype=lengths.dtype, device=lengths.device)
    batch, steps = path.shape
    width, told = stops.ids.shape[1], Rows(report, report.stride(0))
    overlapped(_update_sequence_kernel, (batch,), path.device)(
        Sequences(Rows(sequence, sequence.stride(0)), sequence.shape[1], lengths, active, told, counter, before),
        Rows.of(tokens),
        Accepted(Rows(path, path.stride(0)), steps, accepted, next_token, nan),
        StopRules(Rows(stops.ids, stops.ids.stride(0)), width, stops.limit, stops.exact),
        STEPS=triton.next_power_of_2(steps + 1),
        STOPS=triton.next_power_of_2(width),
        num_warps=1,
    )
    return before
