"""The stages of a decode step on their own, for experiments: draft, draft a tree, verify. No loop, no stop rules.

They are the engine's own functions over a state of their own, eager and without a graph.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.adapters.view import DraftView
from eagle_triton.engine.generation import Engine
from eagle_triton.engine.prefill import CHUNK
from eagle_triton.engine.state import DecodeState, Sequences, capacity_bucket, rows_beyond
from eagle_triton.engine.step import draft_extend, grow_tree, project, target_forward
from eagle_triton.reference.attention import pack_ancestors
from eagle_triton.speculative.config import EAGLEConfig
from eagle_triton.speculative.statistics import compute_tree_statistics
from eagle_triton.speculative.tree import (
    TreeMaskMode,
    build_tree_structure,
    organize_draft_results,
    verify_tree_greedy,
)
from eagle_triton.tree_spec import PLAIN, TreeSpec


class Prefix:
    """Sequences of one length in the caches of target and draft; the last token of each, the root, only as a token."""

    def __init__(self, engine: Engine, spec: TreeSpec, tokens: Tensor) -> None:
        """tokens [bs, T] int64, T >= 2. `spec` PLAIN leaves the draft out."""
        self.engine, self.spec = engine, spec
        self.draft: DraftView | None = engine.draft if spec.drafts else None
        self.state = self._state(len(tokens), tokens.shape[1])
        self.length = 1  # tokens, the root included
        self.state.tokens[:, 0] = tokens[:, 0]
        if self.draft is not None and self.draft.kind == "model":  # its first row is the first token's, a head has none
            blank = self.state.lengths.new_zeros(len(tokens), 1, 1, dtype=engine.view.dtype)
            draft_extend(engine.ops, self.draft, blank, tokens[:, :1], self.state.draft_cache, self.state.lengths)
        self.append(tokens[:, 1:])

    def append(self, tokens: Tensor) -> None:
        """Put tokens [bs, n] behind the sequences; the draft's output at the last is kept as `hidden`."""
        engine, total = self.engine, self.length + tokens.shape[1]
        if total + rows_beyond(self.spec) > self.state.capacity:
            self._grow(total)
        self.state.tokens[:, self.length : total] = tokens
        for first in range(0, tokens.shape[1], CHUNK):
            following = tokens[:, first : first + CHUNK].contiguous()
            _, features = self._target(self.state.tokens[:, self.length - 1 :][:, : following.shape[1]].contiguous())
            if self.draft is not None:
                rows = self.draft.rows(self.state.lengths)
                self.hidden = draft_extend(engine.ops, self.draft, features, following, self.state.draft_cache, rows)
            self.state.lengths += following.shape[1]
            self.length += following.shape[1]

    def _target(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.state.lengths[:, None] + torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        return self.forward(tokens, positions, None)

    def forward(self, tokens: Tensor, positions: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor]:
        """The target over new tokens [bs, n] behind the committed ones, as `target_forward`."""
        state, engine = self.state, self.engine
        return target_forward(engine.ops, engine.view, tokens, state.target_cache, state.lengths, positions, ancestors)

    def _state(self, batch: int, rows: int) -> DecodeState:
        capacity = capacity_bucket(rows + rows_beyond(self.spec))
        return DecodeState(Sequences(self.engine.view, self.draft, batch, capacity), self.spec)

    def _grow(self, rows: int) -> None:
        old, self.state = self.state, self._state(self.state.batch, 2 * rows)
        self.state.lengths.copy_(old.lengths)
        self.state.tokens[:, : self.length] = old.tokens[:, : self.length]
        for cache, source in ((self.state.target_cache, old.target_cache), (self.state.draft_cache, old.draft_cache)):
            if source is not None:
                cache[..., : old.capacity, :] = source


class DraftStep(NamedTuple):
    """scores [bs, k] float32, token_ids [bs, k] int64, and the prefix for the next call."""

    scores: Tensor
    token_ids: Tensor
    past_key_values: Prefix


@torch.no_grad()
def draft_step(engine: Engine, config: EAGLEConfig, input_ids: Tensor, past: Prefix | None) -> DraftStep:
    """See `EAGLEInference.draft_step`."""
    tokens = input_ids.to(engine.device).long()
    if past is not None:
        past.append(tokens)
    elif tokens.shape[1] < 2:
        raise ValueError(
            "draft_step: two tokens at least are needed, because a head drafts from what precedes the last"
        )
    else:
        past = Prefix(engine, TreeSpec.dynamic(1 + config.topk, 0, config.topk), tokens)
    candidates = _candidates(past)
    return DraftStep(candidates.scores.exp(), candidates.tokens, past)


@torch.no_grad()
def generate_draft_tree(
    engine: Engine, config: EAGLEConfig, input_ids: Tensor, verified_id: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `EAGLEInference.generate_draft_tree`."""
    k, depth, nodes = config.topk, config.num_steps, config.nodes
    spec = TreeSpec.dynamic(nodes, depth - 1, k)
    found = _candidates(Prefix(engine, spec, _with_root(engine, input_ids, verified_id)))
    levels = [k, *[k * k] * (depth - 1)]
    scores = [part.view(len(part), -1, k) for part in found.scores.exp().split(levels, dim=1)]
    root_children = torch.arange(-1, k, device=engine.device).expand(len(input_ids), -1)
    parents = [root_children, *found.expanded[:, k:].split(k, dim=1), root_children][:depth]
    parent_list, chosen, tokens = organize_draft_results(scores, found.tokens.split(levels, dim=1), parents, nodes)
    return tokens, parent_list, chosen


@torch.no_grad()
def verify_drafts(
    engine: Engine,
    config: EAGLEConfig,
    input_ids: Tensor,
    draft_tokens: Tensor,
    verified_id: Tensor,
    parent_list: Tensor,
    top_scores_index: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """See `EAGLEInference.verify_drafts`."""
    nodes, (batch, length) = 1 + draft_tokens.shape[1], input_ids.shape
    prefix = Prefix(engine, PLAIN, _with_root(engine, input_ids, verified_id))
    lengths = torch.full((batch,), length, device=engine.device)
    arguments = (
        verified_id.to(engine.device).long(), parent_list, top_scores_index, draft_tokens, lengths, config.topk,
        config.num_steps, nodes,
    )  # fmt: skip
    mask, positions, *links, tokens = build_tree_structure(*arguments, TreeMaskMode.QLEN_ONLY)
    tokens, positions = tokens.view(batch, nodes), positions.view(batch, nodes).int()
    hidden, _ = prefix.forward(tokens, positions, pack_ancestors(mask.view(batch, nodes, nodes)))
    target = project(engine.ops, engine.view.head, hidden).argmax(-1)
    predicts, accept_index, accept_length = verify_tree_greedy(tokens, target, *links)
    path = accept_index[:, : config.num_steps + 1]
    accepted = torch.where(path >= 0, predicts[path.clamp(min=0).long()], -1).long()
    statistics: dict[str, Any] = compute_tree_statistics(accept_length, nodes, config.num_steps)
    statistics["tree"] = build_tree_structure(*arguments, config.tree_mask_mode)
    return accepted, accept_length, statistics


def memory_bytes(engine: Engine, spec: TreeSpec, slots: int, rows: int) -> dict[str, int]:
    """See `EAGLEInference.memory_bytes`."""
    view, draft = engine.view, engine.draft
    capacity, size = capacity_bucket(rows + rows_beyond(spec)), torch.empty((), dtype=view.dtype).element_size()

    def cache(layers: tuple) -> int:
        attention = layers[0].attention
        return len(layers) * 2 * slots * attention.num_kv_heads * capacity * attention.head_dim * size

    logits = slots * spec.nodes * view.vocab_size * size
    return {"target_cache": cache(view.layers), "draft_cache": cache(draft.layers), "logits": logits}


class _Candidates(NamedTuple):
    """All that one step of drafting scored, in flat order: tokens and log scores [bs, C], and the expanded ones."""

    tokens: Tensor
    scores: Tensor
    expanded: Tensor


def _candidates(prefix: Prefix) -> _Candidates:
    """Draft as the engine does, and keep the candidates that it makes its tree of."""
    kept: list[_Candidates] = []
    ops = copy.copy(prefix.engine.ops)
    build_tree = ops.build_tree

    def keep(root: Tensor, tokens: Tensor, scores: Tensor, expanded: Tensor, *rest: Any, **named: Any) -> Any:
        kept.append(_Candidates(tokens, scores, expanded))
        return build_tree(root, tokens, scores, expanded, *rest, **named)

    ops.build_tree = keep
    last = (rows[:, -1:].contiguous() for rows in prefix.hidden)
    grow_tree(ops, prefix.draft, prefix.state, *last)
    return kept[0]


def _with_root(engine: Engine, input_ids: Tensor, verified_id: Tensor) -> Tensor:
    return torch.cat((input_ids.to(engine.device), verified_id.to(engine.device)[:, None]), dim=1).long()
