"""Growing a draft tree (top-k, beam expansion, re-rank and build) and judging it (verify, sequence update).

Flat candidate order (see TreeSpec): candidate x is a child of the root if x < K, else of beam slot x // K - 1. Tree
arrays: tokens [B, N] int64, parents [B, N] int32 (-1 for the root), depths [B, N] int32, ancestors [B, N, W] int64;
a parent's index is always below its child's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.reference.attention import WORD, pack_ancestors
from eagle_triton.reference.sampling import SamplingParams, probabilities, sample, uniform


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row with their log-softmax, best first; ties go to the lower index.

    logits [R, V]; returns log-probabilities float32 [R, k] and indices int64 [R, k]. NaN counts as -inf.
    Raises ValueError unless 1 <= k <= V.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"topk: k must be in 1..{logits.shape[-1]}, got {k}")
    wide = logits.float()
    wide = wide.masked_fill(wide.isnan(), float("-inf"))
    values, indices = wide.sort(dim=-1, descending=True, stable=True)
    values, indices = values[:, :k].contiguous(), indices[:, :k].contiguous()
    return (values - wide.logsumexp(-1, keepdim=True)).nan_to_num(nan=float("-inf"), neginf=float("-inf")), indices


def expand_beam(
    parent_scores: Tensor,
    log_probs: Tensor,
    parent_ancestors: Tensor,
    first_slot: int,
    width: int,
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score the children of a level's nodes and choose the next beam.

    parent_scores [B, P] float32 (cumulative log-probabilities; P = 1 and 0.0 for the root), log_probs [B, P, K];
    parent_ancestors [B, P, W] int64 over beam slots (zeros for the root). The `width` best of the P * K children, ties
    to the lower index, fill the beam slots first_slot .. first_slot + width; for a fixed tree `selected` [width] int64
    names them. Returns (scores of all children [B, P * K] float32, chosen children [B, width] int64 among the P * K,
    ancestors of the new slots [B, width, W] int64, own bit included). width may be 0.
    """
    scores = (parent_scores[:, :, None] + log_probs).flatten(1)
    if selected is not None:
        chosen = selected.expand(len(scores), width)
    else:
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    words = parent_ancestors.shape[-1]
    parent = (chosen // log_probs.shape[-1])[:, :, None].expand(-1, -1, words)
    slot = torch.arange(first_slot, first_slot + width, device=scores.device)
    own = torch.zeros(width, words, dtype=torch.int64, device=scores.device)
    own.scatter_(1, (slot // WORD)[:, None], (torch.ones_like(slot) << (slot % WORD))[:, None])
    return scores, chosen, parent_ancestors.gather(1, parent) | own


def build_tree(
    root: Tensor,
    candidates: Tensor,
    scores: Tensor,
    beam_candidates: Tensor,
    nodes: int,
    top_k: int,
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep the best N - 1 candidates as the next draft tree (EAGLE-2, section 4.2).

    root [B] int64; candidates [B, C] int64 tokens and scores [B, C] float32 in flat order; beam_candidates [B, S]
    int64: the flat candidate that fills each beam slot; for a fixed tree `selected` [N - 1] int64, ascending, names the
    candidates. Order: score descending, then flat index ascending; because a parent's index is lower and its score not
    smaller, the choice is closed under parents. Returns (tokens, parents, depths, ancestors), see the module.
    Raises ValueError if there are fewer than N - 1 candidates.
    """
    batch, drafts = len(root), nodes - 1
    if drafts > candidates.shape[1]:
        raise ValueError(f"build_tree: {drafts} drafts asked of {candidates.shape[1]} candidates")
    if selected is not None:
        chosen = selected.expand(batch, drafts)
    else:
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :drafts]
        chosen = best.sort(dim=-1).values
    tokens = torch.cat((root[:, None], candidates.gather(1, chosen)), dim=1)

    slot = chosen // top_k - 1  # the beam slot that was expanded, -1: the root
    parent_candidate = beam_candidates.gather(1, slot.clamp(min=0)) if beam_candidates.shape[1] else chosen
    place = torch.searchsorted(chosen.contiguous(), parent_candidate)  # where the parent stands among the chosen
    parents = torch.where(slot < 0, 0, place + 1)
    parents = torch.cat((parents.new_full((batch, 1), -1), parents), dim=1).int()
    matrix = _ancestor_closure(parents)
    return tokens, parents, (matrix.sum(-1) - 1).int(), pack_ancestors(matrix)


def _ancestor_closure(parents: Tensor) -> Tensor:
    """Bool [B, N, N]: j is i or an ancestor of i. Squares the parent relation log2(N) times."""
    nodes = parents.shape[1]
    reach = torch.nn.functional.one_hot(parents.clamp(min=0).long(), nodes).float()
    reach = (reach + torch.eye(nodes, device=parents.device)).clamp(max=1)
    for _ in range((nodes - 1).bit_length()):
        reach = (reach @ reach).clamp(max=1)
    return reach > 0


def verify_greedy(logits: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree along the target's argmax (ties to the lower token).

    logits [B, N, V] of the target after each node; tokens, parents [B, N]; depth D of the tree. Returns (path
    [B, D + 1] int32: node indices root..last accepted, then -1; accepted [B] int32: drafts accepted; next token [B]
    int64: the correction or bonus).
    """
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
    params: SamplingParams,
    top_p_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree by sampling each node's continuation from the target (lossless; one coin for each visited node).

    At a node with target law p, the children's masses are laid side by side in node order and one coin in [0, 1)
    chooses a child or, past their sum, the rest: then the next token is drawn from p without the children's tokens.
    That is inverse-CDF sampling of p in another order, so the emitted tokens follow p exactly. A token that two
    siblings share counts once. Arguments and results as verify_greedy; coins come from `params` (seed, step): node i
    uses number i, the final token number N. Sequences with temperature 0 follow their argmax.
    """
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

    law = probs[rows, current]
    child = parents == current[:, None]  # of the last accepted node: all its children were refused
    refused = torch.zeros_like(law).scatter_add_(1, tokens, child.float()) > 0
    rest = law.masked_fill(refused, 0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, law)  # all mass refused by rounding
    return stacked, (stacked >= 0).sum(-1).int() - 1, sample(rest, coins[:, nodes])


def update_sequence(
    sequence: Tensor, lengths: Tensor, tokens: Tensor, path: Tensor, accepted: Tensor, next_token: Tensor
) -> None:
    """Write the accepted drafts and the next token behind the root, and advance the lengths, in place.

    sequence [B, S] int64 with the root at column lengths; lengths [B] int32, increased by accepted + 1; tokens [B, N];
    path [B, D + 1]; accepted [B] int32, -1 to leave a sequence as it is; next_token [B] int64.
    """
    steps = torch.arange(path.shape[1], device=sequence.device)
    node = path.roll(-1, dims=1).clamp(min=0).long()  # step j emits node path[j + 1], the last step next_token
    emitted = torch.where(steps < accepted[:, None], tokens.gather(1, node), next_token[:, None])
    column = (lengths[:, None].long() + 1 + steps).clamp(max=sequence.shape[1] - 1)
    kept = sequence.gather(1, column)
    sequence.scatter_(1, column, torch.where(steps <= accepted[:, None], emitted, kept))
    lengths += accepted + 1
