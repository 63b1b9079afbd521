"""Judging a draft tree: the walks of the verification strategies, and the update of the token sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.reference.sampling import (
    SamplingTensors,
    check_logits,
    check_params,
    gumbel,
    gumbel_sample,
    probabilities,
    sample,
    uniform,
)

VERIFY_STRATEGIES = ("target_match", "rejection", "greedy", "topp")
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all")
MAX_CANDIDATE_LEN = 5

GOES_ON, STOP, LENGTH, ERROR, FAULT = range(5)
"""Why a sequence has finished: at a stop token, at its limit, because its logits are NaN, because the megakernel's
programs lost each other; or it has not."""

REASON, REPORT_TOKENS = 2, 3
"""The columns of a report, see update_sequence, with the reason and where its tokens begin."""


@dataclass(frozen=True)
class Verification:
    """How drafts are judged, the same for all sequences of a batch; temperature 0 follows its argmax whatever it is.

    verify_strategy, for sampled sequences:
        target_match: every node's own sample, see verify_target_match; text depends on seed and target alone
        rejection: one coin for each visited node, see verify_sampling; text depends on the tree, its law does not
        greedy: the argmax
        topp: any draft that the filters keep, see verify_topp; lossy
    accept_policy: normal; accept_all: the first child in node order down to a leaf, whatever the target says;
    reject_all: the root alone, which is plain decoding. The next token is the strategy's own choice behind the last
    accepted node.
    verify_window (topp, normal): 0 is off. max_candidate_len (topp): keep at most so many best tokens, 0 for all.

    Raises ValueError for an unknown name, and for an option that the others leave without effect; TypeError for
    names that are no strings and counts that are no integers.
    """

    verify_strategy: str = "target_match"
    accept_policy: str = "normal"
    verify_window: int = 0
    max_candidate_len: int = MAX_CANDIDATE_LEN

    def __post_init__(self) -> None:
        for name, known in (("verify_strategy", VERIFY_STRATEGIES), ("accept_policy", ACCEPT_POLICIES)):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a string, one of {', '.join(known)}, got {value!r}")
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        for name in ("verify_window", "max_candidate_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        lossy = self.verify_strategy == "topp"
        if self.verify_window and not (lossy and self.accept_policy == "normal"):
            raise ValueError(
                f'verify_window={self.verify_window} needs verify_strategy="topp" and accept_policy="normal", got '
                f"{self.verify_strategy!r} and {self.accept_policy!r}"
            )
        if self.max_candidate_len != MAX_CANDIDATE_LEN and not lossy:
            raise ValueError(
                f'max_candidate_len={self.max_candidate_len} needs verify_strategy="topp", got {self.verify_strategy!r}'
            )

    @property
    def lossless(self) -> bool:
        """Whether the output is the target's own: its distribution, or with greedy its argmax."""
        return self.verify_strategy != "topp" and self.accept_policy != "accept_all"

    @property
    def summary(self) -> str:
        """What was chosen, in words, and whether it is lossless."""
        words = [self.verify_strategy, *([self.accept_policy] if self.accept_policy != "normal" else [])]
        words += [f"window {self.verify_window}"] if self.verify_window else []
        return f"{', '.join(words)}; lossless: {self.lossless}"

    def follows_tree(self, sampled: bool) -> bool:
        """Whether a sequence's tokens depend on the drafts, and not on the target, the options and the seed alone."""
        if self.accept_policy == "normal":
            return sampled and self.verify_strategy in ("rejection", "topp")
        return self.accept_policy == "accept_all"


TARGET_MATCH = Verification()


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


def verify_target_match(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    lengths: Tensor,
    depths: Tensor,
    top_p_first: bool = False,
    filtered: bool = True,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree along samples of the target that do not see the tree (lossless).

    Each node has a sample of its filtered distribution: the kept token with the largest logit / T + Gumbel noise, where
    noise is a function of (seed, absolute position of the sampled token, token). So the text is one of seed and target
    alone, the same for every tree, batch and for plain decoding. Arguments and results as verify_greedy; params as
    verify_sampling. lengths [B] int32: where the root stands, depths [B, N] int32: below it; a node's sample stands at
    lengths + depths + 1. filtered: False if all filters are off, they are not read then.
    """
    check_positioned("verify_target_match", logits, tokens, parents, depth, params, lengths, depths, nan)
    if nan is not None:
        nan.copy_(logits.isnan().flatten(1).any(1))
    rows = torch.arange(len(logits), device=logits.device)
    noise = _noise_by_depth(params, lengths, depth, logits.shape[2])

    def target(node: Tensor) -> Tensor:
        return gumbel_sample(logits[rows, node], noise[rows, depths[rows, node].long()], params, top_p_first, filtered)

    current = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    following, alive = target(current), torch.ones_like(current, dtype=torch.bool)
    path = [current]
    for _ in range(depth):
        match = (parents == current[:, None]) & (tokens == following[:, None])
        alive = alive & match.any(-1)
        current = torch.where(alive, match.int().argmax(-1), current)
        following = torch.where(alive, target(current), following)
        path.append(torch.where(alive, current, -1))
    stacked = torch.stack(path, dim=1).int()
    return stacked, (stacked >= 0).sum(-1).int() - 1, following


def verify_topp(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    lengths: Tensor,
    depths: Tensor,
    top_p_first: bool = False,
    window: int = 0,
    max_candidates: int = 0,
    *,
    nan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree by any draft that the target's filters keep, of several children the likeliest (lossy).

    A node's candidates are the tokens that its filters keep, at most the `max_candidates` best (0: all; ties of the
    last are kept). Where no child is one, and window > 0: the first child that holds the second-best token is accepted
    if each of the next `window` drafts below it (the first child that does) is the best token of its parent; these are
    candidates then. The next token is sampled from the candidates of the last node, as verify_target_match does it.
    Arguments and results as there; temperature 0 follows its argmax.
    """
    check_positioned("verify_topp", logits, tokens, parents, depth, params, lengths, depths, nan)
    check_limits("verify_topp", window, max_candidates)
    if nan is not None:
        nan.copy_(logits.isnan().flatten(1).any(1))
    hot = params.temperature > 0
    capped = params._replace(
        top_k=torch.full_like(params.top_k, max_candidates),
        top_p=torch.ones_like(params.top_p),
        min_p=torch.zeros_like(params.min_p),
    )
    candidates = (probabilities(logits, params, top_p_first) > 0) & (probabilities(logits, capped) > 0)
    best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]) > 0
    candidates = torch.where(hot[:, None, None], candidates, best)
    rows = torch.arange(len(logits), device=logits.device)
    above = parents.clamp(min=0).long()  # the node by whose row a node is judged
    x = logits[rows[:, None], above, tokens].float()
    kept = candidates[rows[:, None], above, tokens]
    rank = _ranks(logits, tokens, above) if window else None

    def follow(node: Tensor, rule: Tensor) -> tuple[Tensor, Tensor]:
        """The first child of a node that a rule [B, N] allows, and whether there is one."""
        allowed = (parents == node[:, None]) & rule
        return allowed.int().argmax(-1), allowed.any(-1)

    current = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    path, alive = [current], torch.ones_like(current, dtype=torch.bool)
    for _ in range(depth):
        allowed = (parents == current[:, None]) & kept
        child, found = x.masked_fill(~allowed, float("-inf")).argmax(-1), allowed.any(-1)
        if rank is not None:
            second, opens = follow(current, rank == 1)
            look = second
            for _ in range(window):
                look, more = follow(look, rank == 0)
                opens = opens & more
            child, found = torch.where(found, child, second), found | (opens & hot)
        alive = alive & found
        current = torch.where(alive, child, current)
        path.append(torch.where(alive, current, -1))
    stacked = torch.stack(path, dim=1).int()

    row = logits[rows, current].float().masked_fill(~candidates[rows, current], float("-inf"))
    noise = _noise_by_depth(params, lengths, depth, logits.shape[2])[rows, depths[rows, current].long()]
    return stacked, (stacked >= 0).sum(-1).int() - 1, gumbel_sample(row, noise, params, filtered=False)


def _ranks(logits: Tensor, tokens: Tensor, above: Tensor) -> Tensor:
    """How many tokens the row of node above[b, n] has that are better than tokens[b, n]: [B, N]."""
    token = torch.arange(logits.shape[-1], device=logits.device)
    rank = torch.zeros_like(tokens)
    for node in range(tokens.shape[1]):
        row = logits.gather(1, above[:, node, None, None].expand(-1, -1, logits.shape[-1]))[:, 0]
        own = tokens[:, node, None]
        x = row.gather(1, own)
        rank[:, node] = ((row > x) | ((row == x) & (token < own))).sum(-1)
    return rank


def first_path(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The way from each root down the first child in node order to a leaf, whatever the target says.

    parents [B, N] int32; depth D of the tree. Returns (path [B, D + 1] int32, nodes on the way: [B] int32, root not
    counted) as verify_greedy does. Raises ValueError if shapes or dtypes do not fit.
    """
    check_first_path(parents, depth)
    current = torch.zeros(len(parents), dtype=torch.int64, device=parents.device)
    path, alive = [current], torch.ones_like(current, dtype=torch.bool)
    for _ in range(depth):
        child = parents == current[:, None]
        alive = alive & child.any(-1)
        current = torch.where(alive, child.int().argmax(-1), current)
        path.append(torch.where(alive, current, -1))
    stacked = torch.stack(path, dim=1).int()
    return stacked, (stacked >= 0).sum(-1).int() - 1


def _noise_by_depth(params: SamplingTensors, lengths: Tensor, depth: int, vocabulary: int) -> Tensor:
    """The noise of the tokens behind nodes 0 .. D below the root: [B, D + 1, V]."""
    below = torch.arange(1, depth + 2, dtype=torch.int32, device=lengths.device)
    return gumbel(params, lengths[:, None] + below, vocabulary)


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
    """Commit what verification accepted and see who has finished, in place.

    sequence [B, C] int64 with the root at column lengths; lengths [B] int32; active [B] bool; tokens [B, N] int64;
    path [B, D + 1] and accepted [B] int32, next_token [B] int64 and nan [B] bool as verification gives them. An active
    sequence without NaN commits its root and accepted drafts (fewer where `stops` is exact and it finishes): lengths
    grows by them, and the next token stands behind them as the new root. Columns past C are not written. Who finishes
    is no longer active; for who was not, or has NaN, accepted becomes -1 and nothing else changes.

    report [B, R] int64, R >= D + 5: accepted, the number of tokens committed, why it has finished (GOES_ON, STOP,
    LENGTH or ERROR), and from REPORT_TOKENS on the root, the accepted drafts and the next token, then -1. counter [B]
    int64: one more for every sequence. Returns the lengths as they were before, [B] int32. Raises ValueError if shapes,
    dtypes or devices do not fit.
    """
    check_update(sequence, lengths, active, tokens, path, accepted, next_token, nan, stops, report, counter)
    before = lengths.clone()
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
    following = advances[:, None] & (step == accepted[:, None] + 1)
    report[:, REPORT_TOKENS : REPORT_TOKENS + steps + 1] = torch.where(following, next_token[:, None], given)
    counter += 1
    return before


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


def check_positioned(
    name: str,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: int,
    params: SamplingTensors,
    lengths: Tensor,
    depths: Tensor,
    nan: Tensor | None,
) -> None:
    check_tree(name, logits, tokens, parents, depth, nan)
    check_params(name, params, len(logits), logits.device)
    shape, device = logits.shape[:2], logits.device
    for field, value, size in (("lengths", lengths, shape[:1]), ("depths", depths, shape)):
        if value.shape != size or value.dtype != torch.int32 or value.device != device:
            raise ValueError(
                f"{name}: {field} must be torch.int32 {list(size)} on {device}, got {value.dtype} {list(value.shape)} "
                f"on {value.device}"
            )
    if not lengths.is_contiguous():
        raise ValueError(f"{name}: lengths must be contiguous, got strides {lengths.stride()}")


def check_limits(name: str, window: int, max_candidates: int) -> None:
    if window < 0 or max_candidates < 0:
        raise ValueError(f"{name}: window and max_candidates must not be negative, got {window} and {max_candidates}")


def check_first_path(parents: Tensor, depth: int) -> None:
    if parents.ndim != 2 or parents.dtype != torch.int32 or not parents.numel():
        raise ValueError(f"first_path: parents must be int32 [B, N], got {parents.dtype} {list(parents.shape)}")
    if depth < 0:
        raise ValueError(f"first_path: depth must not be negative, got {depth}")


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
    counter: Tensor,
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
        ("counter", counter, 1, torch.int64),
    )
    for name, value, rank, dtype in arguments:
        if value.ndim != rank or len(value) != batch or value.dtype != dtype or value.device != device:
            raise ValueError(
                f"update_sequence: {name} must be {dtype} with {rank} dimensions, the first {batch}, on {device}, got "
                f"{value.dtype} {list(value.shape)} on {value.device}"
            )
        if value.numel() and value.stride(-1) != 1:
            raise ValueError(f"update_sequence: {name} must have stride 1 in its last dimension, got {value.stride()}")
    columns = REPORT_TOKENS + path.shape[1] + 1
    if report.shape[1] < columns:
        raise ValueError(
            f"update_sequence: report must have {columns} columns for paths of {path.shape[1]} nodes, got "
            f"{report.shape[1]}"
        )
