"""Drafts from one earlier occurrence of the last tokens: the longest match, the first or the last of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.suffix_match import DEEPEST, Match, RepeatDrafts, check_ngram_drafts
from eagle_triton.ops.suffix_match.matches import BY_SLOT, CHUNK, NO_TOKEN
from eagle_triton.ops.suffix_match.suffixes import new_drafts
from eagle_triton.runtime.overlap import await_inputs, overlapped

_TIME = tl.constexpr(2**23 - 1)


@triton.jit(do_not_specialize_on_alignment=[*BY_SLOT, "prompts_ptr"])
def _ngram_match_kernel(
    tokens_ptr,
    lengths_ptr,
    prompts_ptr,
    best_ptr,
    max_ngram,
    min_ngram,
    stride_tb,
    stride_l,
    stride_p,
    LATEST: tl.constexpr,
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, chunks of a row): a program finds the best match that ends in its chunk.

    best: length << 24 | in the prompt << 23 | time, the time counted backwards for the leftmost one; -1 for none.
    """
    await_inputs(PDL)
    slot, chunk = tl.program_id(0), tl.program_id(1)
    row = tokens_ptr + slot.to(tl.int64) * stride_tb
    length = tl.load(lengths_ptr + slot * stride_l)
    prompt = tl.minimum(tl.load(prompts_ptr + slot * stride_p), length + 1)
    best = -1
    if chunk * CHUNK <= length:
        time = chunk * CHUNK + tl.arange(0, CHUNK)
        if JOINED:
            alive = time <= length
            begin = tl.zeros((CHUNK,), tl.int32)
            in_prompt = time < 0
        else:
            in_prompt = time < prompt
            alive = in_prompt | (time < length)
            begin = tl.where(in_prompt, 0, prompt)
        most = tl.minimum(max_ngram, length + 1 - prompt)
        match = tl.zeros((CHUNK,), tl.int32)
        count = 0
        going = most > 0
        while going:
            count += 1
            alive &= time - count >= begin
            token = tl.load(row + time - count, mask=alive, other=NO_TOKEN)
            alive &= (token == tl.load(row + length + 1 - count)) & (token >= 0)
            match += alive.to(tl.int32)
            going = (count < most) & (tl.max(alive.to(tl.int32), 0) > 0)
        order = time if LATEST else _TIME - time
        key = (match << 24) | (in_prompt.to(tl.int32) << 23) | order
        best = tl.max(tl.where(match >= min_ngram, key, -1), 0)
    tl.store(best_ptr + slot * tl.num_programs(1) + chunk, best)


@triton.jit(do_not_specialize_on_alignment=[*BY_SLOT, "prompts_ptr"])
def _ngram_draft_kernel(
    tokens_ptr,
    lengths_ptr,
    prompts_ptr,
    best_ptr,
    drafts,
    chunks,
    places,
    stride_tb,
    stride_l,
    stride_p,
    LATEST: tl.constexpr,
    JOINED: tl.constexpr,
    CHUNKS: tl.constexpr,
    J: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): copy the tokens after the best match."""
    await_inputs(PDL)
    slot = tl.program_id(0)
    row = tokens_ptr + slot.to(tl.int64) * stride_tb
    length = tl.load(lengths_ptr + slot * stride_l)
    prompt = tl.minimum(tl.load(prompts_ptr + slot * stride_p), length + 1)
    chunk = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + slot * chunks + chunk, mask=chunk < chunks, other=-1), 0)
    order = best & _TIME
    time = order if LATEST else _TIME - order
    end = length + 1 if JOINED else tl.where(((best >> 23) & 1) > 0, prompt, length)
    step = tl.arange(0, J)
    real = (best >= 0) & (step < places) & (time + step < end)
    token = tl.load(row + time + step, mask=real, other=-1)
    out = slot * places + step
    tl.store(drafts.tokens + out, token, mask=step < places)
    tl.store(drafts.parents + out, tl.where(real, step - 1, -1), mask=step < places)
    tl.store(drafts.probs + out, real.to(tl.float32), mask=step < places)
    tl.store(drafts.match + slot, tl.where(best >= 0, best >> 24, 0))
    tl.store(drafts.occurrences + slot, (best >= 0).to(tl.int32))
    tl.store(drafts.from_ring + slot, best < -1)


def ngram_drafts(
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    places: int,
    *,
    max_ngram: int = 5,
    min_ngram: int = 1,
    match: Match = "leftmost",
    joined: bool = False,
) -> RepeatDrafts:
    """The tokens after an earlier occurrence of B sequences' last ones; see reference.suffix_match.ngram_drafts.

    tokens and lengths as `suffix_drafts`; prompt_lengths [B] int32; max_ngram at most 64. Returns chains of at most
    `places` tokens with probability 1. Raises ValueError if shapes or dtypes do not fit, for an unknown `match`, and
    unless 1 <= min_ngram <= max_ngram <= 64.
    """
    check_ngram_drafts(tokens, lengths, prompt_lengths, places, max_ngram, min_ngram, match)
    for name, value, most in (
        ("max_ngram", max_ngram, DEEPEST),
        ("the capacity of tokens", tokens.shape[1], _TIME.value + 1),
    ):
        if value > most:
            raise ValueError(f"ngram_drafts: {name} must be at most {most}, got {value}")
    (batch, columns), device = tokens.shape, tokens.device
    drafts = new_drafts(batch, places, device)
    if not batch:
        return drafts
    chunks = triton.cdiv(columns, CHUNK.value)
    best = torch.empty(batch, chunks, dtype=torch.int32, device=device)
    strides = tokens.stride(0), lengths.stride(0), prompt_lengths.stride(0)
    overlapped(_ngram_match_kernel, (batch, chunks), device)(
        tokens,
        lengths,
        prompt_lengths,
        best,
        max_ngram,
        min_ngram,
        *strides,
        LATEST=match == "latest",
        JOINED=joined,
        num_warps=4,
    )
    overlapped(_ngram_draft_kernel, (batch,), device)(
        tokens,
        lengths,
        prompt_lengths,
        best,
        drafts,
        chunks,
        places,
        *strides,
        LATEST=match == "latest",
        JOINED=joined,
        CHUNKS=triton.next_power_of_2(chunks),
        J=triton.next_power_of_2(places),
        num_warps=1,
    )
    return drafts
