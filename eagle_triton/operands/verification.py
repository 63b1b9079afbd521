"""Verification strategies, the rules by which sequences finish, and the checks of verification's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.sampling import SamplingTensors, check_logits, check_params
from eagle_triton.operands.shapes import check_tensors
from eagle_triton.values import check_choice, checked_integer

VERIFY_STRATEGIES = ("target_match", "rejection", "greedy", "topp")

ACCEPT_POLICIES = ("normal", "accept_all", "reject_all")

MAX_CANDIDATE_LEN = 5

GOES_ON, STOP, LENGTH, ERROR, FAULT = range(5)
"""Why a sequence has finished: it has not, a stop token, its limit, NaN logits, or a barrier of the megakernel that
waited too long."""

REASON, REPORT_TOKENS = 2, 3
"""The columns of a report (see update_sequence) that hold the reason and the first token."""

TREE_DEPTH, PROPOSED = -2, -1
"""A report's last columns: the depth of the verified tree, and its number of drafts."""


@dataclass(frozen=True)
class Verification:
    """How the drafts of all sequences of a batch are verified. At temperature 0 every strategy follows the argmax.

    verify_strategy, for sampled sequences:
        target_match: every node's own sample, see verify_target_match; text depends only on seed and target
        rejection: one coin for each visited node, see verify_sampling; text depends on the tree, but its distribution
        does not
        greedy: the argmax
        topp: any draft that the filters keep, see verify_topp; lossy
    accept_policy: normal; accept_all: the first child in node order down to a leaf, without the target; reject_all:
    only the root, which is plain decoding. The strategy chooses the next token after the last accepted node.
    verify_window (topp, normal): 0 is off. max_candidate_len (topp): keep only this many best tokens, 0 for all.

    Raises ValueError for an unknown name or an option without effect; TypeError for names that are no strings and
    counts that are no integers.
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
            check_choice(name, value, known)
        for name in ("verify_window", "max_candidate_len"):
            if (value := checked_integer(name, getattr(self, name))) < 0:
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
        """Whether sampled output follows the target's distribution."""
        return self.verify_strategy not in ("topp", "greedy") and self.accept_policy != "accept_all"

    @property
    def summary(self) -> str:
        """The choice in words, with whether it is lossless."""
        words = [self.verify_strategy, *([self.accept_policy] if self.accept_policy != "normal" else [])]
        words += [f"window {self.verify_window}"] if self.verify_window else []
        return f"{', '.join(words)}; lossless: {self.lossless}"

    def keeps_output(self, sampled: bool) -> bool:
        """Whether a sequence's output is that of the target alone, or follows its distribution if it is sampled."""
        return self.lossless if sampled else self.accept_policy != "accept_all"

    def follows_tree(self, sampled: bool) -> bool:
        """Whether a sequence's tokens depend on the drafts, and not only on target, options and seed."""
        if self.accept_policy == "normal":
            return sampled and self.verify_strategy in ("rejection", "topp")
        return self.accept_policy == "accept_all"


TARGET_MATCH = Verification()


class Stops(NamedTuple):
    """When sequences finish, at fixed addresses so that a graph can replay.

    ids [B, S] int64: tokens that finish a sequence, the rest of the row -1. limit [B] int32: the length that finishes
    it. exact [B] bool: drop the tokens after the stop token or past the limit; otherwise the step that reaches either
    is kept whole.
    """

    ids: Tensor
    limit: Tensor
    exact: Tensor


def check_tree(name: str, logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, nan: Tensor | None) -> None:
    check_logits(name, logits)
    tensors = {
        "tokens": (tokens, logits.shape[:2], torch.int64),
        "parents": (parents, logits.shape[:2], torch.int32),
        "nan": (nan, logits.shape[:1], torch.bool),
    }
    check_tensors(name, tensors, device=logits.device)
    if depth < 0:
        raise ValueError(f"{name}: depth must not be negative, got {depth}")


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
    places = {"lengths": (lengths, "B, contiguous", torch.int32), "depths": (depths, tokens.shape, torch.int32)}
    check_tensors(name, places, device=logits.device, B=len(logits))


def check_limits(name: str, window: int, max_candidates: int) -> None:
    if window < 0 or max_candidates < 0:
        raise ValueError(f"{name}: window and max_candidates must not be negative, got {window} and {max_candidates}")


def check_first_path(parents: Tensor, depth: int) -> None:
    check_tensors("first_path", {"parents": (parents, "B>0 N>0", torch.int32)})
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
    tensors = {
        "sequence": (sequence, "B C, contiguous rows", torch.int64),
        "lengths": (lengths, "B, contiguous rows", torch.int32),
        "active": (active, "B, contiguous rows", torch.bool),
        "tokens": (tokens, "B N, contiguous rows", torch.int64),
        "path": (path, "B P, contiguous rows", torch.int32),
        "accepted": (accepted, "B, contiguous rows", torch.int32),
        "next_token": (next_token, "B, contiguous rows", torch.int64),
        "nan": (nan, "B, contiguous rows", torch.bool),
        "stops.ids": (stops.ids, "B S, contiguous rows", torch.int64),
        "stops.limit": (stops.limit, "B, contiguous rows", torch.int32),
        "stops.exact": (stops.exact, "B, contiguous rows", torch.bool),
        "report": (report, "B R, contiguous rows", torch.int64),
        "counter": (counter, "B, contiguous rows", torch.int64),
    }
    check_tensors("update_sequence", tensors)
    columns = REPORT_TOKENS + path.shape[1] + 1
    if report.shape[1] < columns:
        raise ValueError(
            f"update_sequence: report must have {columns} columns for paths of {path.shape[1]} nodes, got "
            f"{report.shape[1]}"
        )
