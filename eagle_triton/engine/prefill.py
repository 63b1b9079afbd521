"""From prompts to the first draft tree: fill the caches, choose the roots, grow the trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.model import ModelView, target_forward
from eagle_triton.engine.modules import project
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import DecodeState, Sequences, Tree
from eagle_triton.engine.step import Mode, token_logprobs, verify

CHUNK = 512  # prompt tokens in one forward: bounds the activations of a long prompt


class NaNLogitsError(RuntimeError):
    """The target's logits are NaN: no token can be chosen."""


def prefill(
    ops: Operations,
    view: ModelView,
    draft: Draft | None,
    state: DecodeState,
    prompts: Sequence[Tensor],
    mode: Mode,
) -> None:
    """Bring `state`, the part of one that holds these sequences, to where decode_step takes over.

    prompts int64 [L], one for each sequence, whose way of sampling is set. They go through the target one by one, so
    that a sequence does not depend on its neighbours; equal prompts are computed once and copied. `draft` None: the
    sequences will be decoded plainly. Raises RuntimeError if the target's logits are NaN.
    """
    sequences = state.sequences
    sequences.clear()
    done: dict[tuple[int, ...], int] = {}
    hidden: list[Tensor] = []
    features: list[Tensor] = []
    for index, prompt in enumerate(prompts):
        twin = done.setdefault(tuple(prompt.tolist()), index)
        if twin == index:
            one = sequences.part(slice(index, index + 1))
            last_hidden, last_features = read_prompts(ops, view, draft, one, prompt[None])
        else:
            sequences.copy(twin, index)
            last_hidden, last_features = hidden[twin], features[twin]
        hidden.append(last_hidden)
        features.append(last_features)

    sequences.prompt_lengths.copy_(sequences.lengths)
    logits = project(ops, view.head, torch.cat(hidden))
    broken = logits.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        sequences.wipe()
        raise NaNLogitsError(f"the target's logits are NaN after the prompts of sequences {broken}")
    root = _choose(ops, state, logits, mode)
    if mode.logprobs:
        sequences.root_logprob.copy_(token_logprobs(logits, root)[:, 0])
    sequences.tokens.scatter_(1, sequences.lengths[:, None].long(), root)
    sequences.sampling.step.fill_(1)
    if draft is not None:
        draft.begin(ops, sequences, torch.cat(features))
    grow_first_tree(ops, draft, state)


def shortest_prompt_with_same_launches(prompt: Tensor) -> Tensor:
    """The beginning of a prompt [L] that launches the same kernels: as much as its first and last chunk take."""
    return prompt[: CHUNK + (len(prompt) - 1) % CHUNK + 1]


def grow_first_tree(ops: Operations, draft: Draft | None, state: DecodeState) -> None:
    """The next tree from each sequence's root, in a state whose own tree has not been grown step by step."""
    if draft is not None and state.spec.drafts:
        draft.grow(ops, state)
    else:
        state.tree.tokens.copy_(ops.sequence_rows(state.tokens, state.lengths, 1))


def read_prompts(
    ops: Operations, view: ModelView, draft: Draft | None, sequences: Sequences, prompts: Tensor
) -> tuple[Tensor, Tensor]:
    """Run prompts of one length, int64 [B, L], through target and draft, chunk by chunk; all of them are committed.

    Returns the target's normed hidden states [B, 1, H] and features [B, 1, F] at their last tokens.
    """
    length = prompts.shape[1]
    sequences.tokens[:, :length] = prompts
    sequences.lengths.fill_(length)
    for first in range(0, length, CHUNK):
        last = min(first + CHUNK, length)
        lengths = torch.full_like(sequences.lengths, first)
        positions = torch.arange(first, last, dtype=torch.int32, device=prompts.device).expand(len(prompts), -1)
        tokens = sequences.tokens[:, first:last]
        hidden, features, _ = target_forward(ops, view, tokens, sequences.caches, lengths, positions, None)
        if draft is not None:
            draft.read_prompt(ops, sequences, sequences.tokens[:, :length], first, features)
    return hidden[:, -1:], features[:, -1:]


def _choose(ops: Operations, state: DecodeState, logits: Tensor, mode: Mode) -> Tensor:
    """The roots [B, 1] from logits [B, 1, V], as every later step chooses: a walk of a tree that is only a root."""
    tokens = ops.sequence_rows(state.tokens, state.lengths - 1, 1)
    parents = torch.full_like(tokens, -1, dtype=torch.int32)
    tree = Tree(tokens, parents, torch.zeros_like(parents), torch.ones_like(tokens)[..., None])
    if mode.processed and state.sequences.rules is not None:
        logits = ops.process_logits(logits, tokens, tree.ancestors, state.sequences.rules)
    return verify(ops, logits, tree, 0, state.lengths - 1, state.sampling, mode)[2][:, None]
