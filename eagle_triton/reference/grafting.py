"""Drafts from earlier text in one tree with a draft model's: drafts that both propose share a node, and all scores have
one scale.

A model's scores are its log-probabilities. For a draft from earlier text, its share of occurrences says little about
how often it is right. So that rate is learnt from verification, for each bucket: the properties of the match.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle_triton.operands import grafting as operands
from eagle_triton.operands.grafting import Grafted
from eagle_triton.operands.suffix_match import RepeatDrafts


def graft(
    candidates: Tensor,
    scores: Tensor,
    beam_candidates: Tensor,
    top_k: int,
    drafts: RepeatDrafts,
    estimates: Tensor,
    *,
    parents: Tensor | None = None,
) -> Grafted:
    """Add drafts from earlier text to a model's candidates.

    candidates [B, C] int64, scores [B, C] float32, beam_candidates [B, S] int64 and top_k: see `build_tree`. drafts
    have J places. estimates [B, J] float32: their scores, on the same scale, falling along a path. If the model
    proposes the same token after the same tokens, the draft is merged into that candidate, with the larger score; the
    draft's own place becomes empty (token -1, score -inf). Other drafts keep their parents.

    parents [B, C] int32: the candidates are nodes 1 .. C of a tree, with these nodes as their parents. Then
    beam_candidates and top_k are not read, and the result names the parents of all C + J.

    Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_graft(candidates, scores, beam_candidates, top_k, drafts, estimates, parents)
    count = candidates.shape[1]
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    places = torch.empty_like(drafts.parents, dtype=torch.int64)  # the flat index of each draft
    tokens, named = drafts.tokens.clone(), torch.full_like(drafts.parents, -1)
    own = estimates.clone()
    beams = torch.nn.functional.pad(beam_candidates, (0, 1), value=-2)  # so that there is at least one
    for place in range(drafts.tokens.shape[1]):
        token, parent = drafts.tokens[:, place], drafts.parents[:, place].long()
        above = torch.where(parent < 0, -1, places.gather(1, parent.clamp(min=0)[:, None])[:, 0])
        if parents is None:
            expanded = (beams == above[:, None]) & (above >= 0)[:, None]
            first = torch.where(above < 0, 0, top_k * (1 + expanded.int().argmax(1)))
            children = first[:, None] + torch.arange(top_k, device=token.device)
            same = candidates.gather(1, children.clamp(max=count - 1)) == token[:, None]
            same &= ((above < 0) | expanded.any(1))[:, None] & (token >= 0)[:, None]
        else:
            children = torch.arange(count, device=token.device).expand_as(parents)
            same = (parents - 1 == above[:, None]) & (candidates == token[:, None]) & (token >= 0)[:, None]
        shared = same.any(1)
        twin = children.gather(1, same.int().argmax(1, keepdim=True))[:, 0]
        places[:, place] = torch.where(shared, twin, count + place)
        raised = torch.where(shared, own[:, place], float("-inf"))
        scores = scores.scatter_reduce(1, twin.clamp(max=count - 1)[:, None], raised[:, None], "amax")
        nothing = shared | (token < 0)
        tokens[:, place] = torch.where(nothing, -1, token)
        own[:, place] = torch.where(nothing, float("-inf"), own[:, place])
        named[:, place] = torch.where(nothing, -1, above).int()
    if parents is not None:
        named = torch.cat((parents - 1, named), 1)
    return Grafted(torch.cat((candidates, tokens), 1), torch.cat((scores, own), 1), named)


def draft_buckets(drafts: RepeatDrafts) -> Tensor:
    """The bucket of each draft, a number below BUCKETS: int64 [B]."""
    length = (drafts.match >= 4).long() + (drafts.match >= 8) + (drafts.match >= 16)
    agree = (drafts.occurrences >= 2).long() + (drafts.occurrences >= 4)
    seen = torch.where(drafts.probs[:, 0] >= operands.UNANIMOUS, agree, 3)
    return drafts.from_ring.long() * 16 + length * 4 + seen


def estimate_scores(drafts: RepeatDrafts, counts: Tensor, *, buckets: Tensor) -> Tensor:
    """Logarithms of the estimated probability that a chain of drafts is right up to each of its J tokens.

    counts [BUCKETS, J, 2] int32: for each bucket and place, how often the draft was right, and how often all drafts
    before it were. The estimate for a place is its rate, smoothed to a prior with PRIOR_WEIGHT; from the second place
    on it is multiplied by the draft's share of the occurrences. Returns float32 [B, J], -inf in empty places, and
    writes each draft's bucket to `buckets` [B] int32. Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_estimate(drafts, counts, buckets)
    bucket = draft_buckets(drafts)
    buckets.copy_(bucket)
    first = torch.tensor(operands.FIRST, dtype=torch.float32, device=counts.device).flatten()[bucket % 16]
    prior = torch.full(drafts.probs.shape, operands.NEXT, dtype=torch.float32, device=counts.device)
    prior[:, 0] = first
    right, reached = counts[bucket].float().unbind(-1)
    rates = (right + operands.PRIOR_WEIGHT * prior) / (reached + operands.PRIOR_WEIGHT)
    shares = drafts.probs / drafts.probs[:, :1].clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(drafts.tokens >= 0, rates.log().cumsum(1) + shares.log(), -math.inf)


def count_right(
    counts: Tensor, buckets: Tensor, drafted: Tensor, tokens: Tensor, before: Tensor, accepted: Tensor
) -> None:
    """Count, in place, how far chains of drafts were right, after verification.

    buckets [B] int32 and drafted [B, J] int64 (-1: nothing) of the drafts. tokens [B, C] int64: the sequences, with
    their roots at columns before [B] int32 when the drafts were made. accepted [B] int32: drafts accepted, of any kind,
    so the accepted + 1 tokens after the root are known; later places are not counted; -1: nothing was committed.
    counts: see `estimate_scores`; both numbers are halved at MAX_COUNTED observations. Raises ValueError if shapes or
    dtypes do not fit.
    """
    operands.check_count_right(counts, buckets, drafted, tokens, before, accepted)
    places = torch.arange(drafted.shape[1], device=tokens.device)
    columns = (before.long()[:, None] + 1 + places).clamp(max=tokens.shape[1] - 1)
    right = (tokens.gather(1, columns) == drafted) & (drafted >= 0)
    right = right.int().cumprod(1).bool()
    reached = torch.nn.functional.pad(right[:, :-1], (1, 0), value=True)
    reached &= (places <= accepted[:, None]) & (drafted >= 0)
    seen = torch.stack((right & reached, reached), -1).int()
    counts.index_add_(0, buckets, seen)
    counts.copy_(torch.where(counts[..., 1:] >= operands.MAX_COUNTED, counts // 2, counts))
