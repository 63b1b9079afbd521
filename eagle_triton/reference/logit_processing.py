"""What a request asks of the target's logits before they become a distribution: repetition penalty, then logit bias."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.reference.attention import ancestor_matrix
from eagle_triton.reference.sampling import check_logits


class LogitRules(NamedTuple):
    """Per-sequence rules; a static place on the device, so that a graph can replay.

    penalty [B] float32 (1: off); bias [B, V] float32; seen [B, V] uint8: tokens of the prompt and of what is committed.
    """

    penalty: Tensor
    bias: Tensor
    seen: Tensor


def process_logits(logits: Tensor, tokens: Tensor, ancestors: Tensor, rules: LogitRules) -> Tensor:
    """The logits that a tree's nodes are judged by, float32 [B, N, V]: at each node those of plain decoding there.

    logits [B, N, V] of the target after each node; tokens [B, N] int64; ancestors [B, N, W] int64, bit j of row i: node
    j is i or an ancestor of i. A token that the sequence holds, or the path from the root to the node, has its logit x
    divided by the penalty if x >= 0 and multiplied by it otherwise (Keskar et al. 2019, as Hugging Face has it); then
    the bias is added. All in fp32. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_process_logits(logits, tokens, ancestors, rules)
    nodes, x = logits.shape[1], logits.float()
    on_path = ancestor_matrix(ancestors, nodes).float()
    held = torch.zeros_like(x).scatter_add_(2, tokens[:, None].expand(-1, nodes, -1), on_path) > 0
    held |= rules.seen[:, None] > 0
    penalty = rules.penalty[:, None, None]
    return torch.where(held, torch.where(x < 0, x * penalty, x / penalty), x) + rules.bias[:, None]


def check_process_logits(logits: Tensor, tokens: Tensor, ancestors: Tensor, rules: LogitRules) -> None:
    check_logits("process_logits", logits)
    batch, nodes, vocabulary = logits.shape
    expected = (
        ("tokens", tokens, (batch, nodes), torch.int64),
        ("ancestors", ancestors, (batch, nodes, -(-nodes // 64)), torch.int64),
        ("rules.penalty", rules.penalty, (batch,), torch.float32),
        ("rules.bias", rules.bias, (batch, vocabulary), torch.float32),
        ("rules.seen", rules.seen, (batch, vocabulary), torch.uint8),
    )
    for name, value, shape, dtype in expected:
        if value.shape != shape or value.dtype != dtype or value.device != logits.device:
            raise ValueError(
                f"process_logits: {name} must be {dtype} {list(shape)} on {logits.device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
        if value.numel() and value.stride(-1) != 1:
            raise ValueError(f"process_logits: {name} must have stride 1 in its last dimension, got {value.stride()}")
