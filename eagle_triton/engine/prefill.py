"""From prompts to the first draft tree: fill both caches, choose the roots, grow the trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_triton.adapters.view import DraftView, ModelView
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.step import (
    Mode,
    draft_extend,
    grow_tree,
    project,
    target_forward,
    token_logprobs,
)

CHUNK = 512  # prompt tokens in one forward: bounds the activations of a long prompt


def prefill(
    ops: Operations,
    view: ModelView,
    draft: DraftView | None,
    state: DecodeState,
    prompts: Sequence[Tensor],
    mode: Mode,
) -> None:
    """Bring `state`, the part of one that holds these sequences, to where decode_step takes over.

    prompts int64 [L], one for each sequence, whose way of sampling is set. They go through the target one by one, so
    that a sequence does not depend on its neighbours; equal prompts are computed once and copied. `draft` None: the
    sequences will be decoded plainly. Raises RuntimeError if the target's logits are NaN.
    """
    done: dict[tuple[int, ...], int] = {}
    hidden, features = [], []
    for index, prompt in enumerate(prompts):
        twin = done.setdefault(tuple(prompt.tolist()), index)
        if twin == index:
            last_hidden, last_features = _fill_caches(ops, view, draft, state, index, prompt)
        else:
            _copy(state, twin, index)
            last_hidden, last_features = hidden[twin], features[twin]
        hidden.append(last_hidden)
        features.append(last_features)

    logits = project(ops, view.head, torch.cat(hidden))
    broken = logits.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise RuntimeError(f"the target's logits are NaN after the prompts of sequences {broken}")
    root = _choose(ops, state, logits, mode)
    if mode.logprobs:
        state.sequences.root_logprob.copy_(token_logprobs(logits, root)[:, 0])
    state.tokens.scatter_(1, state.lengths[:, None].long(), root)
    state.sampling.step.fill_(1)
    if draft is not None:
        rows = draft.rows(state.lengths - 1)
        outputs = draft_extend(ops, draft, torch.cat(features), root, state.draft_cache, rows)
        for kept, output in zip((state.sequences.hidden, state.sequences.normed), outputs, strict=True):
            kept.copy_(output)
    plant(ops, draft, state)


def alike(prompt: Tensor) -> Tensor:
    """The beginning of a prompt [L] that launches the same kernels: as much as its first and last chunk take."""
    return prompt[: CHUNK + (len(prompt) - 1) % CHUNK + 1]


def plant(ops: Operations, draft: DraftView | None, state: DecodeState) -> None:
    """The next tree from each sequence's root, in a state whose own tree has not been grown step by step."""
    if state.spec.drafts:
        grow_tree(ops, draft, state, state.sequences.hidden, state.sequences.normed)
    else:
        state.tree.tokens.copy_(ops.sequence_rows(state.tokens, state.lengths, 1))


def _fill_caches(
    ops: Operations, view: ModelView, draft: DraftView | None, state: DecodeState, index: int, prompt: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one prompt; returns the target's last normed hidden state [1, 1, H] and features [1, 1, F].

    The root's row of the draft's cache waits for the root. A head's rows begin with token 1, a model's with token 0.
    """
    row, length = slice(index, index + 1), len(prompt)
    skipped = 0 if draft is not None and draft.kind == "model" else 1
    state.tokens[index, :length] = prompt
    state.lengths[index] = length
    for first in range(0, length, CHUNK):
        last = min(first + CHUNK, length)
        lengths = torch.full_like(state.lengths[row], first)
        positions = torch.arange(first, last, dtype=torch.int32, device=state.tokens.device)[None]
        tokens = state.tokens[row, first:last]
        drafted = state.tokens[row, first + skipped : min(last + skipped, length)]
        hidden, features = target_forward(ops, view, tokens, state.target_cache[:, :, row], lengths, positions, None)
        if draft is not None and drafted.shape[1]:
            draft_extend(ops, draft, features[:, : drafted.shape[1]], drafted, state.draft_cache[:, :, row], lengths)
    return hidden[:, -1:], features[:, -1:]


def _copy(state: DecodeState, source: int, target: int) -> None:
    """Give sequence `target` the filled rows of sequence `source`."""
    length = int(state.lengths[source])
    state.lengths[target] = length
    state.tokens[target, :length] = state.tokens[source, :length]
    for cache in (state.target_cache, state.draft_cache):
        if cache is not None:
            cache[:, :, target, :, :length] = cache[:, :, source, :, :length]


def _choose(ops: Operations, state: DecodeState, logits: Tensor, mode: Mode) -> Tensor:
    """The roots [B, 1] from logits [B, 1, V], by the law of every later step: a walk of a tree that is only a root."""
    tokens = ops.sequence_rows(state.tokens, state.lengths - 1, 1)
    parents = torch.full_like(tokens, -1, dtype=torch.int32)
    if mode.processed:
        logits = ops.process_logits(logits, tokens, torch.ones_like(tokens)[..., None], state.sequences.rules)
    if mode.sampled:
        return ops.verify_sampling(logits, tokens, parents, 0, state.sampling, mode.top_p_first)[2][:, None]
    return ops.verify_greedy(logits, tokens, parents, 0)[2][:, None]
