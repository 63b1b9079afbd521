"""Checks of arguments, before any state changes. Each error says what was expected and what was given."""

from __future__ import annotations

import torch
from torch import Tensor


def check_prompt(input_ids: Tensor, vocab_size: int, max_batch: int | None = None) -> None:
    """Check token ids [B, L]: integer, 0 <= id < vocab_size, L >= 1, and B <= max_batch if that is given.

    Raises TypeError if `input_ids` is not a tensor, otherwise ValueError.
    """
    _check_is_tensor("input_ids", input_ids, "[B, L]")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids: expected shape [B, L], got {list(input_ids.shape)}")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids: the prompt is empty, got shape {list(input_ids.shape)}")
    if max_batch is not None and input_ids.shape[0] > max_batch:
        raise ValueError(f"input_ids: expected a batch of at most {max_batch}, got {input_ids.shape[0]}")
    _check_ids("input_ids", input_ids, vocab_size)


def check_token_ids(name: str, ids: Tensor, shape: tuple[int | str, ...], vocab_size: int) -> None:
    """Check token ids: their shape, integer, 0 <= id < vocab_size. A string in `shape` is any size but 0.

    Raises TypeError if `ids` is not a tensor, otherwise ValueError, both with `name`.
    """
    expected = f"[{', '.join(map(str, shape))}]"
    _check_is_tensor(name, ids, expected)
    pairs = zip(ids.shape, shape, strict=False)
    if ids.dim() != len(shape) or not all(size if isinstance(want, str) else size == want for size, want in pairs):
        raise ValueError(f"{name}: expected shape {expected}, got {list(ids.shape)}")
    _check_ids(name, ids, vocab_size)


def _check_is_tensor(name: str, ids: Tensor, shape: str) -> None:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name}: expected a tensor {shape}, got {type(ids).__name__}")
    if ids.is_meta:
        raise ValueError(f'{name}: the tensor must hold tokens, got one on the device "meta"')


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: expected an integer dtype (int64 or int32), got {ids.dtype}")
    low, high = ids.min().item(), ids.max().item()
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name}: token ids out of range, expected 0..{vocab_size - 1}, got {low}..{high}")


def check_max_length(prompt_length: int, max_length: int) -> None:
    """Raise ValueError if `max_length`, which includes the prompt, is below the prompt's length."""
    if max_length < prompt_length:
        raise ValueError(f"max_length: {max_length} is below the prompt's {prompt_length} tokens")


def check_fits(prompt_length: int, rows: int, max_length: int) -> None:
    """Raise ValueError if the prompt and `rows` more (a draft tree, or one token) exceed `max_length`."""
    check_max_length(prompt_length, max_length)
    if prompt_length + rows > max_length:
        raise ValueError(
            f"input_ids: the prompt does not fit, its {prompt_length} tokens and {rows} for the next step "
            f"exceed max_length={max_length}"
        )


def check_positions(prompt_length: int, positions: int | None) -> None:
    """Raise ValueError if a prompt is longer than the target's positions; None: no limit."""
    if positions is not None and prompt_length > positions:
        raise ValueError(
            f"input_ids: the prompt's {prompt_length} tokens exceed the target's {positions} positions "
            f"(max_position_embeddings, or original_max_position_embeddings with longrope)"
        )


def check_attention_mask(attention_mask: Tensor, input_ids: Tensor) -> None:
    """Check a padding mask [B, L] of 0 and 1: each row has at least one 1, and its ones are contiguous.

    Raises TypeError if it is not a tensor, otherwise ValueError.
    """
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor [B, L], got {type(attention_mask).__name__}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: expected the shape of input_ids {list(input_ids.shape)}, got {list(attention_mask.shape)}"
        )
    kept = attention_mask.bool()
    if not kept.any(dim=1).all():
        raise ValueError("attention_mask: a row masks its whole prompt, the prompt is empty")
    starts = kept[:, 0].int() + (kept[:, 1:] & ~kept[:, :-1]).sum(dim=1)
    if (starts != 1).any():
        raise ValueError("attention_mask: expected padding on the left or right only, got a row with holes")


def check_logits(logits: Tensor) -> None:
    """Raise RuntimeError if any logit is NaN."""
    if torch.isnan(logits).any():
        raise RuntimeError("the target's logits contain NaN: no token can be chosen from them")
