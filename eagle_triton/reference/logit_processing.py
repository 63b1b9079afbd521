"""Changes to the target's logits before sampling: a grammar's mask, penalties, then logit bias, and no stop token
before the minimal length."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.ancestors import ancestor_matrix
from eagle_triton.operands.logit_processing import MASK_WORD, LogitRules, check_mask_tokens, check_process_logits


def mask_tokens(logits: Tensor, allowed: Tensor, restricted: Tensor) -> None:
    """Set the logits of tokens that a mask forbids to -inf, in place. A NaN stays a NaN.

    logits [B, N, V] of the target after each node; allowed [B, N, ceil(V / 32)] int32: bit i of word w is 1 if token
    32 w + i is allowed; restricted [B] bool: the other sequences keep their logits, and their masks are not read.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_mask_tokens(logits, allowed, restricted)
    token = torch.arange(logits.shape[-1], device=logits.device)
    forbidden = (allowed[:, :, token // MASK_WORD] >> (token % MASK_WORD)) & 1 == 0
    logits.copy_(torch.where(forbidden & restricted[:, None, None], logits + float("-inf"), logits))


def process_logits(
    logits: Tensor, tokens: Tensor, ancestors: Tensor, rules: LogitRules, lengths: Tensor, stop_ids: Tensor
) -> Tensor:
    """The logits by which a tree's nodes are verified, float32 [B, N, V]: for each node as in plain decoding.

    logits [B, N, V] of the target after each node; tokens [B, N] int64; ancestors [B, N, W] int64, bit j of row i: node
    j is i or an ancestor of i; lengths [B] int32: the root's position; stop_ids [B, S] int64, ignored outside the
    vocabulary (-1: none). If a token is in the sequence, or on the path from the root to the node, its logit x is
    divided by the penalty if x >= 0, and multiplied by it otherwise (Keskar et al. 2019, as in Hugging Face). A token
    that is n times in the answer, the path included, loses n times the frequency penalty, and the presence penalty once
    if n > 0 (OpenAI's). The root is part of the answer unless it is before position `rules.answer`. Then the bias is
    added. Stop tokens get -inf if the token after the node would be before position `rules.least`. All in fp32. Raises
    ValueError if shapes, dtypes or devices do not fit.
    """
    check_process_logits(logits, tokens, ancestors, rules, lengths, stop_ids)
    nodes, x = logits.shape[1], logits.float()
    on_path = ancestor_matrix(ancestors, nodes).float()
    early = lengths[:, None] + on_path.sum(-1) < rules.least[:, None]
    known = (stop_ids >= 0) & (stop_ids < logits.shape[-1])
    stops = torch.zeros_like(rules.seen, dtype=torch.float32).scatter_add_(
        1, torch.where(known, stop_ids, 0), known.float()
    )
    forbidden = early[:, :, None] & (stops > 0)[:, None]
    held = torch.zeros_like(x).scatter_add_(2, tokens[:, None].expand(-1, nodes, -1), on_path) > 0
    held |= rules.seen[:, None] > 0
    penalty, presence, frequency = (
        values[:, None, None] for values in (rules.penalty, rules.presence, rules.frequency)
    )
    x = torch.where(held, torch.where(x < 0, x * penalty, x / penalty), x)
    answered = on_path.clone()
    answered[:, :, 0] *= lengths[:, None] >= rules.answer[:, None]
    counts = torch.zeros_like(x).scatter_add_(2, tokens[:, None].expand(-1, nodes, -1), answered)
    counts += rules.counts[:, None]
    x = x - (frequency * counts + torch.where(counts > 0, presence, 0.0)) + rules.bias[:, None]
    return torch.where(forbidden, x + float("-inf"), x)
