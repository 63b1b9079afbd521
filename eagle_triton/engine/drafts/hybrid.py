"""Joins two drafts: a model's and those from earlier text in one tree, or a model's chain, continued by n-grams."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from eagle_triton.engine.drafts.beams import BeamPlan, ScoringDraft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.repeats import (
    RING_TOKENS,
    NgramSource,
    OutputRing,
    RepeatDraft,
    RepeatSource,
    SuffixSource,
    write_repeats,
)
from eagle_triton.engine.model.mixers import AcceptedPath
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.grafting import BUCKETS


@dataclass(frozen=True)
class WrappedDraft(Draft):
    """A draft with layers (`model_draft`) and a second source, which has no data by slot. Only its trees differ from
    those of `model_draft`."""

    model_draft: ScoringDraft

    must_catch_up: ClassVar[bool] = True


for _name in (
    *("learns", "by_token", "mixers", "vocabulary", "feature_layers", "check_tree", "rows_in_pass", "passes"),
    *("weight_bytes", "new_slot_tensors", "guide", "levels_for", "new_tree_tensors", "read_prompt", "begin", "learn"),
    *("extend", "catch_up"),
):
    setattr(WrappedDraft, _name, property(attrgetter(f"model_draft.{_name}")))


@dataclass(frozen=True)
class HybridDraft(WrappedDraft):
    """Drafts of a model and from earlier text in one tree. Common prefixes share nodes; the best N - 1 nodes are
    verified.

    A tree without grafts has only the model's drafts. A tree with top_k 0 has only drafts from earlier text; then the
    model runs only to take in the accepted tokens.
    """

    source: RepeatSource

    any_tree: ClassVar[bool] = True

    @cached_property
    def counts(self) -> Tensor:
        """How often drafts from earlier text were right, summed over all sequences, see `count_right`."""
        return torch.zeros(BUCKETS, self.source.places, 2, dtype=torch.int32, device=self.model_draft.embedding.device)

    def read_tree(self) -> TreeSpec:
        return self.model_draft.read_tree().with_grafts(self.source.places)

    def new_tree_tensors(self, spec: TreeSpec, slots: int, device: torch.device) -> BeamPlan:
        plan = super().new_tree_tensors(spec, slots, device)
        if spec.grafts:
            plan.add_grafts(spec, slots, device)
        return plan

    def extend(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, features: Tensor) -> None:
        if state.spec.grafts:
            plan: BeamPlan = state.draft_tree_tensors
            ops.count_right(
                self._counts(state.spec), plan.buckets, plan.drafted, state.tokens, accepted.before, accepted.accepted
            )
        super().extend(ops, state, accepted, features)

    def grow(self, ops: Operations, state: DecodeState) -> None:
        spec = state.spec
        if not spec.grafts:
            self.model_draft.grow(ops, state)
            return
        plan: BeamPlan = state.draft_tree_tensors
        found = self.source.find(ops, state.sequences, spec.grafts)
        plan.drafted.copy_(found.tokens)
        estimates = ops.estimate_scores(found, self._counts(spec), buckets=plan.buckets)
        if not spec.top_k:
            write_repeats(ops, state, found)
            return
        self.model_draft.grow_with(ops, state, found, estimates)

    def _counts(self, spec: TreeSpec) -> Tensor:
        return self.counts[:, : spec.grafts]

    def end(self, sequences: Sequences, slot: int, prompt: int, length: int) -> None:
        self.source.remember(sequences.tokens[slot, prompt:length])

    def forget(self) -> None:
        self.source.forget()


def with_suffix_drafts(model: Draft | None, places: int, device: torch.device, ring_tokens: int = RING_TOKENS) -> Draft:
    """Drafts of at most `places` tokens from earlier text, in one tree with a model's drafts, or alone.

    ring_tokens: how many tokens of earlier outputs are kept; 0: none. Raises ValueError for a model that scores no
    candidates.
    """
    source = SuffixSource(places, ring=OutputRing(ring_tokens, device) if ring_tokens else None)
    return RepeatDraft(source) if model is None else HybridDraft(scoring(model, "suffix_drafts"), source)


def model_of(draft: Draft | None) -> Draft | None:
    """The draft itself, or the draft with layers that it wraps."""
    return draft.model_draft if isinstance(draft, WrappedDraft) else draft


def scoring_draft_of(draft: Draft) -> ScoringDraft:
    """The draft with layers: the draft itself, or the one that it wraps. Raises ValueError if there is none."""
    return scoring(model_of(draft), "this")


def scoring(model: Draft | None, option: str) -> ScoringDraft:
    """The draft itself. Raises ValueError with the option's name unless it scores candidates."""
    if not isinstance(model, ScoringDraft):
        raise ValueError(
            f"{option} needs a draft that scores candidates, a head or a language model, got {type(model).__name__}"
        )
    return model


@dataclass(frozen=True)
class ContinuedDraft(WrappedDraft):
    """A model's chain, continued by the tokens that n-grams find after the committed tokens and the chain."""

    source: NgramSource
    chain: int  # tokens of the model

    def read_tree(self) -> TreeSpec:
        drafts = self.chain + self.source.places
        return TreeSpec(drafts + 1, 1, (1,) * (self.chain - 1), grafts=drafts)

    def grow(self, ops: Operations, state: DecodeState) -> None:
        sequences = state.sequences
        model = self.model_draft.chain(ops, state)
        places = torch.arange(1, self.chain + 1, device=model.device)
        sequences.tokens.scatter_(1, sequences.lengths[:, None] + places, model)  # these columns are free
        found = self.source.continue_from(ops, sequences, sequences.lengths + self.chain, self.source.places)
        root = ops.sequence_rows(state.tokens, state.lengths, 1)
        state.tree.write_chain(torch.cat((root, model, found.tokens), dim=1))
