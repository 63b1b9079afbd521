"""Prior rates at which drafts from text are right, and the operands of grafting them into a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.shapes import check_tensors
from eagle_triton.operands.suffix_match import RepeatDrafts

FIRST = (  # the rate of the first token, by the length of the match (up to 3, 7, 15, more) and its occurrences:
    (0.63, 0.76, 0.93, 0.33),  # one; 2 or 3 that agree; 4 or more that agree; some that differ
    (0.52, 0.79, 0.85, 0.25),
    (0.77, 0.86, 0.80, 0.36),
    (0.93, 0.98, 0.98, 0.86),
)
"""Measured over the sources of Python's standard library, without learning."""

NEXT = 0.93  # the same for each further token, times its share among the occurrences

PRIOR_WEIGHT = 8.0  # these figures count as this many observations

BUCKETS = 32  # 2 sources, 4 lengths, 4 kinds of occurrences

MAX_COUNTED = 1024  # both counts are halved at this many observations, so old ones count less

UNANIMOUS = 0.999  # with this share all occurrences agree, up to rounding


class Grafted(NamedTuple):
    """Candidates of both kinds for `build_tree`, those of the model first."""

    candidates: Tensor  # [B, C + J] int64
    scores: Tensor  # [B, C + J] float32
    parents: Tensor  # int32: flat indices of parents, -1 for the root; [B, J] for the last J, or [B, C + J] for all


def check_graft(
    candidates: Tensor,
    scores: Tensor,
    beam_candidates: Tensor,
    top_k: int,
    drafts: RepeatDrafts,
    estimates: Tensor,
    parents: Tensor | None,
) -> None:
    if top_k < 1:
        raise ValueError(f"graft: top_k must be at least 1, got {top_k}")
    tensors = {
        "candidates": (candidates, "B>0 C>0", torch.int64),
        "scores": (scores, "B C", torch.float32),
        "beam_candidates": (beam_candidates, "B S", torch.int64),
        "drafts.tokens": (drafts.tokens, "B J", torch.int64),
        "drafts.parents": (drafts.parents, "B J", torch.int32),
        "estimates": (estimates, "B J", torch.float32),
        "parents": (parents, "B C", torch.int32),
    }
    check_tensors("graft", tensors)


def check_estimate(drafts: RepeatDrafts, counts: Tensor, buckets: Tensor) -> None:
    tensors = {
        "drafts.tokens": (drafts.tokens, "B J, contiguous", torch.int64),
        "drafts.parents": (drafts.parents, "B J, contiguous", torch.int32),
        "drafts.probs": (drafts.probs, "B J, contiguous", torch.float32),
        "drafts.match": (drafts.match, "B, contiguous", torch.int32),
        "drafts.occurrences": (drafts.occurrences, "B, contiguous", torch.int32),
        "drafts.from_ring": (drafts.from_ring, "B, contiguous", torch.bool),
        "counts": (counts, f"{BUCKETS} J 2", torch.int32),
        "buckets": (buckets, "B", torch.int32),
    }
    check_tensors("estimate_scores", tensors)
    _check_buckets_contiguous("estimate_scores", counts)


def check_count_right(
    counts: Tensor, buckets: Tensor, drafted: Tensor, tokens: Tensor, before: Tensor, accepted: Tensor
) -> None:
    tensors = {
        "drafted": (drafted, "B J", torch.int64),
        "tokens": (tokens, "B C", torch.int64),
        "counts": (counts, f"{BUCKETS} J 2", torch.int32),
        "buckets": (buckets, "B", torch.int32),
        "before": (before, "B", torch.int32),
        "accepted": (accepted, "B", torch.int32),
    }
    check_tensors("count_right", tensors)
    _check_buckets_contiguous("count_right", counts)


def _check_buckets_contiguous(function: str, counts: Tensor) -> None:
    if counts.stride()[1:] != (2, 1):
        raise ValueError(f"{function}: counts must be contiguous in each bucket, got strides {counts.stride()}")
