"""What a request asks of the target's logits before they become a distribution: repetition penalty, then logit bias,
and no stop token too early."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.reference.attention import ancestor_matrix
from eagle_triton.reference.sampling import check_logits


class LogitRules(NamedTuple):
    """Per-sequence rules; a static place on the device, so that a graph can replay.

    penalty [B] float32 (1: off); bias [B, V] float32; seen [B, V] uint8: tokens of the prompt and of what is committed;
    least [B] int32: the place in the sequence before which no stop token may stand (0: off).
    """

    penalty: Tensor
    bias: Tensor
    seen: Tensor
    least: Tensor


def process_logits(
    logits: Tensor, tokens: Tensor, ancestors: Tensor, rules: LogitRules, lengths: Tensor, stop_ids: Tensor
) -> Tensor:
    """The logits that a tree's nodes are judged by, float32 [B, N, V]: at each node those of plain decoding there.

    logits [B, N, V] of the target after each node; tokens [B, N] int64; ancestors [B, N, W] int64, bit j of row i: node
    j is i or an ancestor of i; lengths [B] int32, the root's place; stop_ids [B, S] int64, of which those outside the
    vocabulary (-1: none) are not looked at. A token that the sequence holds, or the path from the root to the node, has
    its logit x divided by the penalty if x >= 0 and multiplied by it otherwise (Keskar et al. 2019, as Hugging Face has
    it); then the bias is added, and -inf to stop tokens where the token behind the node would stand before
    `rules.least`. All in fp32. Raises ValueError if shapes, dtypes or devices do not fit.
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
    penalty = rules.penalty[:, None, None]
    x = torch.where(held, torch.where(x < 0, x * penalty, x / penalty), x) + rules.bias[:, None]
    return torch.where(forbidden, x + float("-inf"), x)


def check_process_logits(
    logits: Tensor, tokens: Tensor, ancestors: Tensor, rules: LogitRules, lengths: Tensor, stop_ids: Tensor
) -> None:
    check_logits("process_logits", logits)
    batch, nodes, vocabulary = logits.shape
    expected = (
        ("tokens", tokens, (batch, nodes), torch.int64),
        ("ancestors", ancestors, (batch, nodes, -(-nodes // 64)), torch.int64),
        ("rules.penalty", rules.penalty, (batch,), torch.float32),
        ("rules.bias", rules.bias, (batch, vocabulary), torch.float32),
        ("rules.seen", rules.seen, (batch, vocabulary), torch.uint8),
        ("rules.least", rules.least, (batch,), torch.int32),
        ("lengths", lengths, (batch,), torch.int32),
        ("stop_ids", stop_ids, (batch, *stop_ids.shape[-1:]), torch.int64),
    )
    for name, value, shape, dtype in expected:
        if value.shape != shape or value.dtype != dtype or value.device != logits.device:
            raise ValueError(
                f"process_logits: {name} must be {dtype} {list(shape)} on {logits.device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
        if value.numel() and value.stride(-1) != 1:
            raise ValueError(f"process_logits: {name} must have stride 1 in its last dimension, got {value.stride()}")
