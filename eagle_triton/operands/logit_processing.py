"""A request's rules for the target's logits, and a grammar's masks; see reference.logit_processing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.sampling import check_logits
from eagle_triton.operands.shapes import check_tensors

MASK_WORD = 32
"""Tokens in one word of a mask: bit i of word w is for token 32 w + i."""


class LogitRules(NamedTuple):
    """Per-sequence rules, at fixed addresses so that a graph can replay.

    penalty [B] float32 (1: off); bias [B, V] float32; seen [B, V] uint8: tokens of the prompt and committed ones; least
    [B] int32: the first position in the sequence where a stop token may be (0: off); presence, frequency [B] float32
    (0: off); counts [B, V] int32: how often a token was committed after the prompt; answer [B] int32: the position at
    which the prompt ended.
    """

    penalty: Tensor
    bias: Tensor
    seen: Tensor
    least: Tensor
    presence: Tensor
    frequency: Tensor
    counts: Tensor
    answer: Tensor


def check_mask_tokens(logits: Tensor, allowed: Tensor, restricted: Tensor) -> None:
    tensors = {
        "allowed": (allowed, "B N words, contiguous rows", torch.int32),
        "restricted": (restricted, "B, contiguous rows", torch.bool),
    }
    sizes = check_logits("mask_tokens", logits)
    check_tensors("mask_tokens", tensors, device=logits.device, words=-(-sizes["V"] // MASK_WORD), **sizes)


def check_process_logits(
    logits: Tensor, tokens: Tensor, ancestors: Tensor, rules: LogitRules, lengths: Tensor, stop_ids: Tensor
) -> None:
    tensors = {
        "tokens": (tokens, "B N, contiguous rows", torch.int64),
        "ancestors": (ancestors, "B N words, contiguous rows", torch.int64),
        "rules.penalty": (rules.penalty, "B, contiguous rows", torch.float32),
        "rules.bias": (rules.bias, "B V, contiguous rows", torch.float32),
        "rules.seen": (rules.seen, "B V, contiguous rows", torch.uint8),
        "rules.least": (rules.least, "B, contiguous rows", torch.int32),
        "rules.presence": (rules.presence, "B, contiguous rows", torch.float32),
        "rules.frequency": (rules.frequency, "B, contiguous rows", torch.float32),
        "rules.counts": (rules.counts, "B V, contiguous rows", torch.int32),
        "rules.answer": (rules.answer, "B, contiguous rows", torch.int32),
        "lengths": (lengths, "B, contiguous rows", torch.int32),
        "stop_ids": (stop_ids, "B S, contiguous rows", torch.int64),
    }
    sizes = check_logits("process_logits", logits)
    check_tensors("process_logits", tensors, device=logits.device, words=-(-sizes["N"] // 64), **sizes)
