"""Judging a draft tree: greedy walk, sampled walk, and the update of the token sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.reference.sampling import SamplingTensors, check_logits, check_params, probabilities, sample, uniform

GOES_ON, STOP, LENGTH, ERROR, FAULT = range(5)
"""Why a sequence has finished: at a stop token, at its limit, because its logits are NaN, because the megakernel's
programs lost each other; or it has not."""

REASON, REPORT_TOKENS = 2, 3
"""The columns of a report, see update_sequence, with the reason and where its tokens begin."""


class Stops(NamedTuple):
    """When sequences finish; a static place on the device, so that a graph can replay.

    ids [B, S] int64: tokens that finish a sequence, the rest of the row -1. limit [B] int32: the length at which it
    finishes. exact [B] bool: the tokens behind the stop token or past the limit are dropped; otherwise the step that
    reaches either is kept whole.
    """

    ids: Tensor
    limit: Tensor
    exact: Tensor


def verify_greedy(
    logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, *, nan: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree along the target's argmax (ties to the lower token).

    logits [B, N, V] of the target after each node; tokens, parents [B, N]; depth D of the tree. Returns (path
    [B, D + 1] int32: node indices root..last accepted, then -1; accepted [B] int32: drafts accepted; next token [B]
    int64: the correction or bonus). `nan` [B] bool, if given, is filled with whether a sequence's logits hold a NaN.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_tree("verify_greedy", logits, tokens, parents, depth, nan)
    if nan is not None:
        nan.copy_(logits.isnan().flatten(1).any(1))
    target = logits.argmax(-1)
    current = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    path, alive = [current], torch.ones_like(current, dtype=torch.bool)
    for _ in range(depth):
        match = (parents == current[:, None]) & (tokens == target.gather(1, current[:, None]))
        alive = alive & match.any(-1)
        current = torch.where(alive, match.int().argmax(-1), current)
        path.append(torch.where(alive, current, -1))
    stacked = torch.stack(path, dim=1).int()
    return stacked, (stacked >= 0).sum(-1).int() - 1, target.gather(1, current[:, None])[:, 0]


def verify_sampling(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    top_p_first: bool = False,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree by sampling each node's continuation from the target (lossless; one coin for each visited node).

    At a node with target distribution p, the children's masses are laid side by side in node order and one coin in [0,
    1) chooses a child or, past their sum, the rest: then the next token is drawn from p without the children's tokens.
    That is inverse-CDF sampling of p in another order, so the emitted tokens follow p exactly. A token that two
    siblings share counts once. Arguments and results as verify_greedy; coins come from `params` (seed, step): node i
    uses number i, the final token number N. Sequences with temperature 0 follow their argmax.
    """
    check_tree("verify_sampling", logits, tokens, parents, depth, nan)
    check_params("verify_sampling", params, len(logits), logits.device)
    if nan is not None:
        nan.copy_(logits.isnan().flatten(1).any(1))
    batch, nodes, vocabulary = logits.shape
    probs = probabilities(logits, params, top_p_first)
    argmax = torch.nn.functional.one_hot(logits.argmax(-1), vocabulary).float()
    probs = torch.where((params.temperature > 0)[:, None, None], probs, argmax)
    coins = uniform(params, nodes + 1)
    rows = torch.arange(batch, device=logits.device)
    same = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    repeated = same.tril(-1).any(-1)

    current = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    path, alive = [current], torch.ones_like(current, dtype=torch.bool)
    for _ in range(depth):
        child = (parents == current[:, None]) & ~repeated
        mass = torch.where(child, probs[rows, current].gather(1, tokens), 0.0)
        hit = child & (coins[rows, current][:, None] < mass.cumsum(-1)) & (mass > 0)
        alive = alive & hit.any(-1)
        current = torch.where(alive, hit.int().argmax(-1), current)
        path.append(torch.where(alive, current, -1))
    stacked = torch.stack(path, dim=1).int()

    distribution = probs[rows, current]
    child = parents == current[:, None]  # of the last accepted node: all its children were refused
    refused = torch.zeros_like(distribution).scatter_add_(1, tokens, child.float()) > 0
    rest = distribution.masked_fill(refused, 0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, distribution)  # all mass refused by rounding
    return stacked, (stacked >= 0).sum(-1).int() - 1, sample(rest, coins[:, nodes])


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
) -> None:
    """Commit what verification accepted and see who has finished, in place.

    sequence [B, C] int64 with the root at column lengths; lengths [B] int32; active [B] bool; tokens [B, N] int64;
    path [B, D + 1] and accepted [B] int32, next_token [B] int64 and nan [B] bool as verification gives them. An active
    sequence without NaN commits its root and accepted drafts (fewer where `stops` is exact and it finishes): lengths
    grows by them, and the next token stands behind them as the new root. Columns past C are not written. Who finishes
    is no longer active; for who was not, or has NaN, accepted becomes -1 and nothing else changes.

    report [B, R] int64, R >= D + 4: accepted, the number of tokens committed, why it has finished (GOES_ON, STOP,
    LENGTH or ERROR), and from REPORT_TOKENS on the root and the accepted drafts, then -1. Raises ValueError if shapes,
    dtypes or devices do not fit.
    """
    check_update(sequence, lengths, active, tokens, path, accepted, next_token, nan, stops, report)
    columns, steps = sequence.shape[1], path.shape[1]
    advances = active & ~nan
    accepted.copy_(torch.where(advances, accepted, -1))
    step = torch.arange(steps + 1, device=sequence.device)
    nodes = torch.cat((path, path[:, -1:]), dim=1).clamp(min=0).long()
    given = torch.where(step <= accepted[:, None], tokens.gather(1, nodes), -1)
    for index in range(steps + 1):
        column = (lengths.long() + index)[:, None]
        written = advances[:, None] & (index <= accepted + 1)[:, None] & (column < columns)
        column = column.clamp(max=columns - 1)
        token = torch.where(index <= accepted, given[:, index], next_token)[:, None]
        sequence.scatter_(1, column, torch.where(written, token, sequence.gather(1, column)))

    stopping = (given[:, :, None] == stops.ids[:, None]).any(-1) & (given >= 0)
    first_stop = torch.where(stopping, step, steps + 1).amin(-1)
    count = (accepted + 1).long()
    room = (stops.limit - lengths).clamp(min=0).long()
    kept = torch.where(stops.exact, torch.minimum(torch.minimum(count, first_stop + 1), room), count)
    lengths += kept.int()
    reason = torch.where(first_stop < kept, STOP, torch.where(lengths >= stops.limit, LENGTH, GOES_ON))
    reason = torch.where(nan, ERROR, reason) * active
    active &= reason == GOES_ON
    report[:, 0], report[:, 1], report[:, 2] = accepted, kept, reason
    report[:, REPORT_TOKENS : REPORT_TOKENS + steps] = given[:, :steps]


def check_tree(name: str, logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, nan: Tensor | None) -> None:
    check_logits(name, logits)
    shape, device = logits.shape[:2], logits.device
    for field, value, dtype in (("tokens", tokens, torch.int64), ("parents", parents, torch.int32)):
        if value.shape != shape or value.dtype != dtype or value.device != device:
            raise ValueError(
                f"{name}: {field} must be {dtype} {list(shape)} on {device}, got {value.dtype} {list(value.shape)} on "
                f"{value.device}"
            )
    if depth < 0:
        raise ValueError(f"{name}: depth must not be negative, got {depth}")
    if nan is not None and (nan.shape != shape[:1] or nan.dtype != torch.bool or nan.device != device):
        raise ValueError(f"{name}: nan must be bool [{shape[0]}] on {device}, got {nan.dtype} {list(nan.shape)}")


def check_update(
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
) -> None:
    batch, device = len(sequence), sequence.device
    arguments = (
        ("sequence", sequence, 2, torch.int64),
        ("lengths", lengths, 1, torch.int32),
        ("active", active, 1, torch.bool),
        ("tokens", tokens, 2, torch.int64),
        ("path", path, 2, torch.int32),
        ("accepted", accepted, 1, torch.int32),
        ("next_token", next_token, 1, torch.int64),
        ("nan", nan, 1, torch.bool),
        ("stops.ids", stops.ids, 2, torch.int64),
        ("stops.limit", stops.limit, 1, torch.int32),
        ("stops.exact", stops.exact, 1, torch.bool),
        ("report", report, 2, torch.int64),
    )
    for name, value, rank, dtype in arguments:
        if value.ndim != rank or len(value) != batch or value.dtype != dtype or value.device != device:
            raise ValueError(
                f"update_sequence: {name} must be {dtype} with {rank} dimensions, the first {batch}, on {device}, got "
                f"{value.dtype} {list(value.shape)} on {value.device}"
            )
        if value.numel() and value.stride(-1) != 1:
            raise ValueError(f"update_sequence: {name} must have stride 1 in its last dimension, got {value.stride()}")
    if report.shape[1] < REPORT_TOKENS + path.shape[1]:
        raise ValueError(
            f"update_sequence: report must have {REPORT_TOKENS + path.shape[1]} columns for paths of {path.shape[1]} "
            f"nodes, got {report.shape[1]}"
        )
