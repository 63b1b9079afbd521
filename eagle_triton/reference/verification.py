"""Verifies a draft tree: the walks of the verification strategies, and the update of the token sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle_triton.operands import verification as operands
from eagle_triton.operands.sampling import SamplingTensors, check_params
from eagle_triton.operands.verification import ERROR, GOES_ON, LENGTH, REPORT_TOKENS, STOP, Stops
from eagle_triton.reference.sampling import gumbel, gumbel_sample, probabilities, sample, uniform


def verify_greedy(
    logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, *, nan: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree along the target's argmax (ties to the lower token).

    logits [B, N, V] of the target after each node; tokens, parents [B, N]; depth D of the tree. Returns (path
    [B, D + 1] int32: node indices root..last accepted, then -1; accepted [B] int32: drafts accepted; next token [B]
    int64: the correction or bonus). `nan` [B] bool, if given, is set to whether a sequence's logits hold a NaN.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    operands.check_tree("verify_greedy", logits, tokens, parents, depth, nan)
    _note_nan(logits, nan)
    target = logits.argmax(-1)
    path, accepted, last = _walked(
        parents, depth, lambda node: _first(parents, node, tokens == target.gather(1, node[:, None]))
    )
    return path, accepted, target.gather(1, last[:, None])[:, 0]


def _note_nan(logits: Tensor, nan: Tensor | None) -> None:
    if nan is not None:
        nan.copy_(logits.isnan().flatten(1).any(1))


def _walked(
    parents: Tensor, depth: int, choose: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow `choose` from the root: returns the path, its number of drafts, and the last node [B].

    choose: takes the current nodes [B], returns the chosen children [B] and whether there is one.
    """
    current = torch.zeros(len(parents), dtype=torch.int64, device=parents.device)
    path, alive = [current], torch.ones_like(current, dtype=torch.bool)
    for _ in range(depth):
        child, found = choose(current)
        alive = alive & found
        current = torch.where(alive, child, current)
        path.append(torch.where(alive, current, -1))
    stacked = torch.stack(path, dim=1).int()
    return stacked, (stacked >= 0).sum(-1).int() - 1, current


def _first(parents: Tensor, node: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """A node's first child among the `allowed` [B, N], and whether there is one."""
    children = (parents == node[:, None]) & allowed
    return children.int().argmax(-1), children.any(-1)


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

    At a node with target distribution p, the children's masses are cumulated in node order. One coin in [0, 1) chooses
    a child; if it is above their sum, the next token is drawn from p without the children's tokens. This is inverse-CDF
    sampling of p in another order, so the emitted tokens follow p exactly. A token that two siblings share counts once.
    Arguments and results as in verify_greedy. Coins come from `params` (seed, step): node i uses number i, the final
    token number N. Sequences with temperature 0 follow their argmax.
    """
    operands.check_tree("verify_sampling", logits, tokens, parents, depth, nan)
    check_params("verify_sampling", params, len(logits), logits.device)
    _note_nan(logits, nan)
    batch, nodes, vocabulary = logits.shape
    probs = probabilities(logits, params, top_p_first)
    argmax = torch.nn.functional.one_hot(logits.argmax(-1), vocabulary).float()
    probs = torch.where((params.temperature > 0)[:, None, None], probs, argmax)
    coins = uniform(params, nodes + 1)
    rows = torch.arange(batch, device=logits.device)
    same = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    repeated = same.tril(-1).any(-1)

    def choose(node: Tensor) -> tuple[Tensor, Tensor]:
        child = (parents == node[:, None]) & ~repeated
        mass = torch.where(child, probs[rows, node].gather(1, tokens), 0.0)
        return _first(parents, node, child & (coins[rows, node][:, None] < mass.cumsum(-1)) & (mass > 0))

    path, accepted, current = _walked(parents, depth, choose)
    distribution = probs[rows, current]
    child = parents == current[:, None]  # all children of the last accepted node were refused
    refused = torch.zeros_like(distribution).scatter_add_(1, tokens, child.float()) > 0
    rest = distribution.masked_fill(refused, 0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, distribution)  # rounding may have refused all mass
    return path, accepted, sample(rest, coins[:, nodes])


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
    """Walk the tree along samples of the target that do not depend on the tree (lossless).

    Each node has a sample of its filtered distribution: the kept token with the largest logit / T + Gumbel noise. The
    noise is a function of (seed, absolute position of the sampled token, token). So the text depends on seed and target
    only: it is the same for every tree and batch, and in plain decoding. Arguments and results as in verify_greedy;
    params as in verify_sampling. lengths [B] int32: the root's position; depths [B, N] int32; a node's sample is at
    position lengths + depths + 1. filtered: False skips the filters, which must all be off.
    """
    operands.check_positioned("verify_target_match", logits, tokens, parents, depth, params, lengths, depths, nan)
    _note_nan(logits, nan)
    rows = torch.arange(len(logits), device=logits.device)
    noise = _noise_by_depth(params, lengths, depth, logits.shape[2])

    def target(node: Tensor) -> Tensor:
        return gumbel_sample(logits[rows, node], noise[rows, depths[rows, node].long()], params, top_p_first, filtered)

    path, accepted, last = _walked(parents, depth, lambda node: _first(parents, node, tokens == target(node)[:, None]))
    return path, accepted, target(last)


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
    """Walk the tree along drafts that the target's filters keep; of several children, the most likely (lossy).

    A node's candidates are the tokens that its filters keep, at most the `max_candidates` best (0: all; ties of the
    last are kept). If no child is a candidate and window > 0, the first child with the second-best token is accepted if
    each of the next `window` drafts below it is the best token of its parent (taking the first such child each time).
    The next token is sampled from the candidates of the last node, like in verify_target_match. Arguments and results
    as there; temperature 0 follows its argmax.
    """
    operands.check_positioned("verify_topp", logits, tokens, parents, depth, params, lengths, depths, nan)
    operands.check_limits("verify_topp", window, max_candidates)
    _note_nan(logits, nan)
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
    above = parents.clamp(min=0).long()  # a node is verified by the logits of its parent
    x = logits[rows[:, None], above, tokens].float()
    kept = candidates[rows[:, None], above, tokens]
    rank = _ranks(logits, tokens, above) if window else None

    def choose(node: Tensor) -> tuple[Tensor, Tensor]:
        allowed = (parents == node[:, None]) & kept
        child, found = x.masked_fill(~allowed, float("-inf")).argmax(-1), allowed.any(-1)
        if rank is None:
            return child, found
        second, opens = _first(parents, node, rank == 1)
        look = second
        for _ in range(window):
            look, more = _first(parents, look, rank == 0)
            opens = opens & more
        return torch.where(found, child, second), found | (opens & hot)

    path, accepted, current = _walked(parents, depth, choose)
    row = logits[rows, current].float().masked_fill(~candidates[rows, current], float("-inf"))
    noise = _noise_by_depth(params, lengths, depth, logits.shape[2])[rows, depths[rows, current].long()]
    return path, accepted, gumbel_sample(row, noise, params, filtered=False)


def _ranks(logits: Tensor, tokens: Tensor, above: Tensor) -> Tensor:
    """The number of tokens that are better than tokens[b, n] by the logits of node above[b, n]: [B, N]."""
    token = torch.arange(logits.shape[-1], device=logits.device)
    rank = torch.zeros_like(tokens)
    for node in range(tokens.shape[1]):
        row = logits.gather(1, above[:, node, None, None].expand(-1, -1, logits.shape[-1]))[:, 0]
        own = tokens[:, node, None]
        x = row.gather(1, own)
        rank[:, node] = ((row > x) | ((row == x) & (token < own))).sum(-1)
    return rank


def first_path(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The path from each root to a leaf along the first child in node order, without the target's logits.

    parents [B, N] int32; depth D of the tree. Returns (path [B, D + 1] int32, its number of nodes without the root: [B]
    int32) like verify_greedy. Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_first_path(parents, depth)
    every = torch.ones_like(parents, dtype=torch.bool)
    path, accepted, _ = _walked(parents, depth, lambda node: _first(parents, node, every))
    return path, accepted


def _noise_by_depth(params: SamplingTensors, lengths: Tensor, depth: int, vocabulary: int) -> Tensor:
    """The noise of the tokens after nodes of depth 0 .. D: [B, D + 1, V]."""
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
    """Commit the accepted path, and find the sequences that have finished, in place.

    sequence [B, C] int64 with the root at column lengths; lengths [B] int32; active [B] bool; tokens [B, N] int64;
    path [B, D + 1] and accepted [B] int32, next_token [B] int64 and nan [B] bool from verification. An active sequence
    without NaN commits its root and accepted drafts (fewer if `stops` is exact and it finishes): they are added to
    lengths, and the next token is written after them as the new root. Columns past C are not written. Finished
    sequences become inactive. For inactive sequences, and those with NaN, accepted becomes -1 and the sequence does not
    change.

    report [B, R] int64, R >= D + 5: accepted, the number of committed tokens, the reason for finishing (GOES_ON, STOP,
    LENGTH or ERROR), and from REPORT_TOKENS on the root, the accepted drafts and the next token, then -1. counter [B]
    int64 is incremented for every sequence. Returns the lengths before, [B] int32. Raises ValueError if shapes, dtypes
    or devices do not fit.
    """
    operands.check_update(sequence, lengths, active, tokens, path, accepted, next_token, nan, stops, report, counter)
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
