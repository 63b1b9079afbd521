"""The single stages of a decode step, for experiments: draft, draft a tree, verify. No loop, no stop rules.

The engine's functions run eagerly, without a graph, over a state of their own.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.drafts.beams import Candidates, ScoringDraft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.hybrid import model_of
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.by_slot import bytes_of, tensors_of
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.model_view import target_forward
from eagle_triton.engine.model.modules import project
from eagle_triton.engine.prefill import read_prompts
from eagle_triton.engine.scheduler.step_planner import spare_rows
from eagle_triton.engine.skipped_features import ROWS, catch_up, start_skipping
from eagle_triton.engine.state import DecodeState, Sequences, capacity_bucket, scratch_rows
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.sglang_trees import (
    TreeMaskMode,
    build_tree_structure,
    organize_draft_results,
    verify_tree_greedy,
)
from eagle_triton.inference.statistics import compute_tree_statistics
from eagle_triton.operands.ancestors import pack_ancestors


class Prefix:
    """Sequences of one length that target and draft have read, except the last token of each, the root."""

    def __init__(self, engine: Engine, spec: TreeSpec, tokens: Tensor) -> None:
        """tokens [bs, T] int64, T >= 2. With `spec` PLAIN the draft reads nothing."""
        self.engine, self.spec = engine, spec
        self.draft: Draft | None = engine.draft if spec.drafts else None
        self._read(tokens, tokens.shape[1])

    def followed_by(self, tokens: Tensor) -> Prefix:
        """A new Prefix: these sequences, then tokens [bs, n]."""
        longer, total = copy.copy(self), self.length + tokens.shape[1]
        if total + scratch_rows(self.spec, self.draft) > self.state.capacity:
            longer._read(torch.cat((self.state.tokens[:, : self.length], tokens), dim=1), 2 * total)
            return longer
        longer.state = self._copied_state()
        longer.state.tokens[:, self.length : total] = tokens
        while longer.length < total:
            longer._take_in(min(total - longer.length, ROWS))
        return longer

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.state.tokens)

    def candidates(self) -> Candidates:
        """Draft level by level. Returns all candidates, not only the tree of the best.

        The engine does the same, except that it takes a block drafter's best paths at once, unless each has a state."""
        draft = model_of(self.draft)
        if not isinstance(draft, ScoringDraft):
            raise ValueError(f"the draft must score candidates, which a {type(draft).__name__} does not")
        return draft.candidates(self.engine.ops, self.state)

    def forward(
        self, tokens: Tensor, depths: Tensor | None, ancestors: Tensor | None, depth: int = 0
    ) -> tuple[Tensor, Tensor, Any]:
        """`target_forward` over new tokens [bs, n] after the committed ones."""
        state, engine = self.state, self.engine
        caches, lengths = state.sequences.caches, state.lengths
        return target_forward(engine.ops, engine.view, tokens, caches, lengths, depths, ancestors, depth)

    def _read(self, tokens: Tensor, rows: int) -> None:
        """Read all tokens [bs, T] into a new state with room for `rows`."""
        engine, capacity = self.engine, capacity_bucket(rows + scratch_rows(self.spec, self.draft))
        sequences = Sequences(engine.view, self.draft, len(tokens), capacity)
        self.state = DecodeState(sequences, self.draft, self.spec)
        self.length = tokens.shape[1]  # tokens, the root included
        sequences.tokens[:, : self.length] = tokens
        sequences.lengths.fill_(self.length - 1)
        _, features = read_prompts(engine.ops, engine.view, self.draft, sequences, self.length - 1)
        if self.draft is not None:
            self.draft.begin(engine.ops, sequences, features, torch.ones_like(sequences.active))

    def _copied_state(self) -> DecodeState:
        """A copy of the state, without skipped features: the draft has taken these in."""
        old = self.state.sequences
        new = Sequences(self.engine.view, self.draft, old.slots, old.capacity)
        for name in ("tokens", "lengths", "caches", "draft_tensors"):
            pairs = zip(tensors_of(getattr(new, name)), tensors_of(getattr(old, name)), strict=True)
            for mine, theirs in pairs:
                mine.copy_(theirs)
        return DecodeState(new, self.draft, self.spec)

    def _take_in(self, count: int) -> None:
        """Commit the root and the next count - 1 tokens. The token after these is the new root."""
        sequences, lengths, ops = self.state.sequences, self.state.lengths, self.engine.ops
        start_skipping(self.engine.view, sequences)
        tokens = self.state.tokens[:, self.length - 1 : self.length - 1 + count].contiguous()
        _, features, _ = self.forward(tokens, None, None)
        assert sequences.skipped is not None
        sequences.skipped.keep(lengths, features)
        lengths += count
        self.length += count
        if self.draft is not None:
            catch_up(ops, self.draft, sequences, count)


class DraftStep(NamedTuple):
    """scores [bs, k] float32, token_ids [bs, k] int64, and the Prefix for the next call."""

    scores: Tensor
    token_ids: Tensor
    past_key_values: Prefix


def draft_step(engine: Engine, config: EAGLEConfig, input_ids: Tensor, past: Prefix | None) -> DraftStep:
    """See `EAGLEInference.draft_step`."""
    tokens = input_ids.to(engine.device).long()
    if past is not None:
        past = past.followed_by(tokens)
    elif tokens.shape[1] < 2:
        raise ValueError(
            "draft_step: two tokens at least are needed, because a head drafts from what precedes the last"
        )
    else:
        past = Prefix(engine, TreeSpec.dynamic(1 + config.topk, 0, config.topk), tokens)
    candidates = past.candidates()
    return DraftStep(candidates.scores.exp(), candidates.tokens, past)


def generate_draft_tree(
    engine: Engine, config: EAGLEConfig, input_ids: Tensor, verified_id: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `EAGLEInference.generate_draft_tree`."""
    k, depth, nodes = config.topk, config.num_steps, config.nodes
    spec = TreeSpec.dynamic(nodes, depth - 1, k)
    found = Prefix(engine, spec, _with_root(engine, input_ids, verified_id)).candidates()
    levels = [k, *[k * k] * (depth - 1)]
    scores = [part.view(len(part), -1, k) for part in found.scores.exp().split(levels, dim=1)]
    root_children = torch.arange(-1, k, device=engine.device).expand(len(input_ids), -1)
    parents = [root_children, *found.expanded[:, k:].split(k, dim=1), root_children][:depth]
    parent_list, chosen, tokens = organize_draft_results(scores, found.tokens.split(levels, dim=1), parents, nodes)
    return tokens, parent_list, chosen


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
    tokens, depths = tokens.view(batch, nodes), positions.view(batch, nodes).int() - length
    hidden, *_ = prefix.forward(tokens, depths, pack_ancestors(mask.view(batch, nodes, nodes)), nodes - 1)
    target = project(engine.ops, engine.view.head, hidden).argmax(-1)
    predicts, accept_index, accept_length = verify_tree_greedy(tokens, target, *links)
    path = accept_index[:, : config.num_steps + 1]
    accepted = torch.where(path >= 0, predicts[path.clamp(min=0).long()], -1).long()
    statistics: dict[str, Any] = compute_tree_statistics(accept_length, nodes, config.num_steps)
    statistics["tree"] = build_tree_structure(*arguments, config.tree_mask_mode)
    return accepted, accept_length, statistics


def memory_bytes(engine: Engine, spec: TreeSpec, slots: int, rows: int) -> dict[str, int]:
    """See `EAGLEInference.memory_bytes`."""
    view, nowhere = engine.view, torch.device("meta")
    size = torch.empty((), dtype=view.dtype).element_size()
    pages = SlotPages.whole(slots, rows + spare_rows(spec, engine.draft), nowhere)
    caches = view.new_caches(pages)
    return {
        "target_cache": bytes_of(caches),
        "target_pending": sum(bytes_of(pending) for pending in caches.new_pending(spec.nodes)),
        "draft_cache": 0 if engine.draft is None else bytes_of(engine.draft.new_slot_tensors(pages)),
        "logits": slots * spec.nodes * view.vocab_size * size,
    }


def _with_root(engine: Engine, input_ids: Tensor, verified_id: Tensor) -> Tensor:
    return torch.cat((input_ids.to(engine.device), verified_id.to(engine.device)[:, None]), dim=1).long()
