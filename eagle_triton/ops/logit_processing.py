"""A request's changes to the target's logits, before they become a distribution: the mask of a grammar, then
repetition, frequency and presence penalties, then logit bias, then no stop token before the minimal length.

**mask_tokens**, in place, for restricted sequences:

    x = x - inf at tokens whose bit in `allowed` is 0

| name       | shape, dtype       | meaning                                             |
|---|---|---|
| logits     | [B, N, V] any float | any strides; only forbidden tokens are written      |
| allowed    | [B, N, ceil(V / 32)] i32 | bit i of word w: token 32 w + i is allowed     |
| restricted | [B] bool           | False: neither mask nor logits are read             |

**process_logits**

    x' = (x < 0 ? x * penalty : x / penalty) where the token is in the sequence or on the node's path, else x
    - (frequency * n + (n > 0 ? presence : 0)) for a token that is n times in the answer and on the path;  + bias
    - inf at stop tokens where lengths + nodes of the path < least, the first place at which a stop token may be

| name      | shape, dtype       | meaning                                                        |
|---|---|---|
| logits    | [B, N, V] any float | of the target after each node, any strides                     |
| tokens    | [B, N] i64         | the tree's tokens                                              |
| ancestors | [B, N, W] i64      | bit j of row i: node j is i or an ancestor of i                |
| penalty   | [B] f32            | 1: off                                                         |
| bias      | [B, V] f32         | 0: off                                                         |
| seen      | [B, V] u8          | tokens of the prompt and committed ones                        |
| least     | [B] i32            | 0: off                                                         |
| presence, frequency | [B] f32  | 0: off                                                         |
| counts    | [B, V] i32         | how often a token was committed after the prompt               |
| answer    | [B] i32            | where the prompt ended: a root before it is not counted         |
| lengths   | [B] i32            | the root's place                                               |
| stop_ids  | [B, S] i64         | -1: none; ids beyond the vocabulary are ignored                |
| out       | [B, N, V] f32      |                                                                |

One pass over the logits. A program looks for the stop tokens, and for the few tokens of its node's path, in its chunk.
Numerics: fp32, division rounded to nearest, so the result equals the reference's bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.logit_processing import MASK_WORD, LogitRules, check_mask_tokens, check_process_logits
from eagle_triton.ops.views import BatchedRows, Cube, Matrix, view
from eagle_triton.runtime.launch import NO_FMA_FUSION, launch

_NOWHERE = tl.constexpr(2**31 - 1)
_CHUNK = 4096  # tokens per program


@triton.jit(do_not_specialize_on_alignment=["restricted_ptr", "nodes"])
def _mask_tokens_kernel(logits, allowed, restricted_ptr, nodes, vocabulary, WORD: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (B * N, chunks): one chunk of one node's logits."""
    row = tl.program_id(0).to(tl.int64)
    batch, node = row // nodes, row % nodes
    if tl.load(restricted_ptr + batch) != 0:
        index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = index < vocabulary
        word = allowed.ptr + batch * allowed.batch + node * allowed.row + index // WORD
        forbidden = ((tl.load(word, mask=inside, other=-1) >> (index % WORD)) & 1) == 0
        place = logits.ptr + batch * logits.batch + node * logits.row + index.to(tl.int64) * logits.item
        # all places, not the forbidden ones only: so several neighbours are one load and one store
        x = tl.load(place, mask=inside, other=0.0)
        tl.store(place, tl.where(forbidden, (x.to(tl.float32) - float("inf")).to(x.dtype), x), mask=inside)


def mask_tokens(logits: Tensor, allowed: Tensor, restricted: Tensor) -> None:
    """Set the logits of tokens that a mask forbids to -inf, in place; see reference.logit_processing.mask_tokens.

    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_mask_tokens(logits, allowed, restricted)
    batch, nodes, vocabulary = logits.shape
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(vocabulary)))
    launch(_mask_tokens_kernel, (batch * nodes, triton.cdiv(vocabulary, chunk)))(
        view(Cube, logits),
        view(BatchedRows, allowed),
        restricted,
        nodes,
        vocabulary,
        WORD=MASK_WORD,
        CHUNK=chunk,
        num_warps=8,
    )


_UNALIGNED = ["tokens_ptr", "ancestors_ptr", "penalty_ptr", "least_ptr", "lengths_ptr", "stops_ptr", "nodes", "stops"]
_UNALIGNED += ["presence_ptr", "frequency_ptr", "answer_ptr"]


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _process_logits_kernel(
    logits,
    tokens_ptr,
    ancestors_ptr,
    penalty_ptr,
    bias,
    seen,
    least_ptr,
    presence_ptr,
    frequency_ptr,
    counts,
    answer_ptr,
    lengths_ptr,
    stops_ptr,
    out_ptr,
    nodes,
    vocabulary,
    stops,
    stride_tb,
    stride_ab,
    stride_an,
    stride_pb,
    NODES: tl.constexpr,
    STOPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * N, chunks): one chunk of one node's logits."""
    row = tl.program_id(0).to(tl.int64)
    low = tl.program_id(1) * CHUNK
    batch, node = row // nodes, row % nodes
    index = low + tl.arange(0, CHUNK)
    inside = index < vocabulary
    place = logits.ptr + batch * logits.batch + node * logits.row + index.to(tl.int64) * logits.item
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    held = tl.load(seen.ptr + batch * seen.row + index, mask=inside, other=0) != 0
    count = tl.load(counts.ptr + batch * counts.row + index, mask=inside, other=0)
    length = tl.load(lengths_ptr + batch)
    root_counts = (length >= tl.load(answer_ptr + batch)).to(tl.int32)

    other = tl.arange(0, NODES)
    token = tl.load(tokens_ptr + batch * stride_tb + other, mask=other < nodes, other=-1)
    word = ancestors_ptr + batch * stride_ab + node * stride_an + other // 64
    on_path = (tl.load(word, mask=other < nodes, other=0) >> (other % 64).to(tl.int64)) & 1
    here = (on_path != 0) & (token >= low) & (token < low + CHUNK)
    left = tl.where(here, token.to(tl.int32), _NOWHERE)
    first = tl.min(left, 0)
    while first < _NOWHERE:
        held = held | (index == first)
        times = tl.sum(tl.where(left == first, tl.where(other > 0, 1, root_counts), 0), 0)
        count += tl.where(index == first, times, 0)
        left = tl.where(left == first, _NOWHERE, left)
        first = tl.min(left, 0)

    penalty = tl.load(penalty_ptr + batch) + tl.zeros((CHUNK,), tl.float32)
    x = tl.where(held, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)), x)
    frequency = tl.load(frequency_ptr + batch) * count.to(tl.float32)
    x -= frequency + tl.where(count > 0, tl.load(presence_ptr + batch), 0.0)
    x += tl.load(bias.ptr + batch * bias.row + index, mask=inside, other=0.0)

    early = length + tl.sum(on_path, 0) < tl.load(least_ptr + batch)
    stop = tl.arange(0, STOPS)
    stop_id = tl.load(stops_ptr + batch * stride_pb + stop, mask=(stop < stops) & early, other=-1)
    left = tl.where((stop_id >= low) & (stop_id < low + CHUNK), stop_id.to(tl.int32), _NOWHERE)
    first = tl.min(left, 0)
    while first < _NOWHERE:
        x = tl.where(index == first, x - float("inf"), x)
        left = tl.where(left == first, _NOWHERE, left)
        first = tl.min(left, 0)
    tl.store(out_ptr + row * vocabulary + index, x, mask=inside)


def process_logits(
    logits: Tensor, tokens: Tensor, ancestors: Tensor, rules: LogitRules, lengths: Tensor, stop_ids: Tensor
) -> Tensor:
    """The logits by which a tree is verified, float32 [B, N, V]; see reference.logit_processing.process_logits.

    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_process_logits(logits, tokens, ancestors, rules, lengths, stop_ids)
    batch, nodes, vocabulary = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(vocabulary)))
    launch(_process_logits_kernel, (batch * nodes, triton.cdiv(vocabulary, chunk)))(
        view(Cube, logits),
        tokens,
        ancestors,
        rules.penalty,
        view(Matrix, rules.bias),
        view(Matrix, rules.seen),
        rules.least,
        rules.presence,
        rules.frequency,
        view(Matrix, rules.counts),
        rules.answer,
        lengths,
        stop_ids,
        out,
        nodes,
        vocabulary,
        stop_ids.shape[1],
        tokens.stride(0),
        *ancestors.stride()[:2],
        stop_ids.stride(0),
        NODES=triton.next_power_of_2(nodes),
        STOPS=triton.next_power_of_2(stop_ids.shape[1]),
        CHUNK=chunk,
        num_warps=8,
        **NO_FMA_FUSION,
    )
    return out
