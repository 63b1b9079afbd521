"""Drafts with their own layers. Each pass scores the children of one level's nodes; the best are the next level."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import AcceptedPath, Mixer, NewRows
from eagle_triton.engine.model.model_view import Layer, decoder_layer
from eagle_triton.engine.model.modules import Norm, Projection, add_norm, add_norm_for, nbytes_of, project
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.adaptive_length import EGAGConfig, GuideTensors
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.operands.suffix_match import RepeatDrafts
from eagle_triton.operands.tree_decoding import Expansion
from eagle_triton.runtime.float8_weight import Float8Weight, rows_of
from eagle_triton.runtime.four_bit_weight import FourBitWeight
from eagle_triton.runtime.row_formats import ProductRows
from eagle_triton.runtime.split_sums import SplitSums

LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # depths of adaptive trees that are captured, besides the full depth


class BeamSlots(NamedTuple):
    """A beam draft's data for each sequence."""

    caches: LayerCaches  # of its layers
    hidden: Tensor  # [B, 1, H]: its output for the root, from which a tree of any shape grows
    normed: Tensor  # [B, 1, H]: the same, as its vocabulary projection reads it
    guide: GuideTensors | None = None  # EGAG's

    def keep(self, outputs: Iterable[Tensor], where: Tensor) -> None:
        """Keep a forward's outputs for the roots, two [B, 1, H], of the sequences in `where` [B] bool."""
        for kept, output in zip((self.hidden, self.normed), outputs, strict=True):
            kept.copy_(torch.where(where[:, None, None], output, kept))


class DraftNodes(NamedTuple):
    """The n nodes of each sequence that a pass runs over."""

    features: Tensor | SplitSums  # [B, P, H], of the nodes' parents
    parents: Tensor | None  # [B, n], rows of `features`; None: one for each node, in order
    tokens: Tensor  # [B, n]

    def normed(self, ops: Operations, embedding: Tensor, token_norm: Norm, feature_norm: Norm) -> tuple[Tensor, Tensor]:
        """cat(token_norm(embedding), feature_norm(features)) [B, n, 2H], and the features [B, n, H]. The norms may
        differ only in weight and eps."""
        return ops.draft_inputs(
            *self,
            embedding,
            token_norm=token_norm.weight,
            feature_norm=feature_norm.weight,
            token_eps=token_norm.eps,
            feature_eps=feature_norm.eps,
            **feature_norm.options,
        )


def check_norms_match(what: str, *norms: Norm) -> None:
    """Raise ValueError unless norms are computed in the same way; weights and eps may differ."""
    if len({norm.zero_centred for norm in norms}) > 1:
        raise ValueError(f"{what} must both be zero-centred, or neither")
    if len({norm.round_first for norm in norms}) > 1:
        raise ValueError(f"{what} must both round before their weight, or neither")


def checked_vocabulary(tokens: int | Collection[int]) -> int | tuple[int, ...]:
    """The option draft_vocabulary: a number of tokens, or sorted ids. Raises TypeError or ValueError for others."""
    if isinstance(tokens, Integral) and not isinstance(tokens, bool):
        if tokens < 1:
            raise ValueError(f"draft_vocabulary must be at least 1 token, got {tokens}")
        return int(tokens)
    if isinstance(tokens, (str, bytes, bool)) or not isinstance(tokens, (Collection, Tensor)):
        raise TypeError(f"draft_vocabulary must be a number of tokens or their ids, got {tokens!r:.60}")
    ids = tokens.flatten().tolist() if isinstance(tokens, Tensor) else list(tokens)
    if not ids or any(isinstance(token, bool) or not isinstance(token, Integral) or token < 0 for token in ids):
        raise ValueError(f"draft_vocabulary must hold token ids from 0 on, got {ids!r:.60}")
    return tuple(sorted({int(token) for token in ids}))


def with_vocabulary(draft: ScoringDraft, tokens: int | Collection[int]) -> ScoringDraft:
    """The draft with a vocabulary projection of these tokens only, or of the first `tokens`. Their rows are copied.

    Raises ValueError for tokens outside its vocabulary, and for a draft that has its own vocabulary already.
    """
    known, tokens = draft.embedding.shape[0], checked_vocabulary(tokens)
    if draft.d2t is not None:
        raise ValueError(f"draft_vocabulary must be None: the draft has its own vocabulary of {len(draft.d2t)} tokens")
    if draft.head.joined_over is not None:
        raise ValueError("draft_vocabulary must be None: ranks share the draft's vocabulary projection (tp_plan)")
    if draft.head.weight is None:
        raise ValueError("draft_vocabulary must be None: the draft's vocabulary projection is not a plain matrix")
    most = tokens - 1 if isinstance(tokens, int) else max(tokens)
    if most >= known:
        raise ValueError(f"draft_vocabulary: tokens must lie in 0..{known - 1}, got {most}")
    if isinstance(draft.head.weight, Float8Weight) and draft.head.weight.in_blocks:
        raise ValueError("draft_vocabulary must be None: the draft's vocabulary projection has FP8 scales for blocks")
    device = draft.head.weight.device
    ids = torch.arange(tokens, device=device) if isinstance(tokens, int) else torch.tensor(tokens, device=device)
    return draft.with_vocabulary(ids)


def with_rows(projection: Projection, ids: Tensor) -> Projection:
    """The same projection with only these outputs [n]. Their rows are copied."""
    assert projection.weight is not None
    if isinstance(projection.weight, FourBitWeight):
        raise ValueError("draft_vocabulary must be None: the draft's vocabulary projection is in four bits")
    rows = rows_of(projection.weight, ids)
    return replace(
        projection,
        weight=rows.detach() if isinstance(rows, Tensor) else rows,
        bias=None if projection.bias is None else projection.bias[ids],
    )


def vocabulary_note(draft: ScoringDraft) -> str:
    """The report's note on a draft `with_vocabulary`."""
    size = nbytes_of(draft.head) / 2**20
    return f"{draft.vocabulary} of {draft.embedding.shape[0]} tokens are drafted; their rows are copies, {size:.1f} MiB"


class BeamPlan:
    """Constant tensors for the passes of one tree shape."""

    by_slot: tuple[str, ...] = ("chain", "root_score", "root_ancestors", "slot_levels")
    of_tree: tuple[str, ...] = ()  # attributes that depend on the drafted tree
    drafted: Tensor  # [B, J] int64: the drafts from earlier text in the tree, -1 for none; see add_grafts
    buckets: Tensor  # [B] int32, of `estimate_scores`

    def part(self, slots: slice) -> Self:
        """The same for some of the slots: views."""
        part = copy.copy(self)
        for name in self.by_slot:
            setattr(part, name, getattr(self, name)[slots])
        return part

    def move(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the tree of slot `source`."""
        for name in self.of_tree:
            getattr(self, name)[target] = getattr(self, name)[source]

    def add_grafts(self, spec: TreeSpec, slots: int, device: torch.device) -> None:
        """Allocate the further tensors of a tree with drafts from earlier text."""
        self.drafted = torch.full((slots, spec.grafts), -1, dtype=torch.int64, device=device)
        self.buckets = torch.zeros(slots, dtype=torch.int32, device=device)
        self.of_tree = ("drafted", "buckets")
        self.by_slot += self.of_tree

    def __init__(self, spec: TreeSpec, slots: int, device: torch.device):
        def constant(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # the emitted tokens as a chain, which the draft takes in; as wide as the beams' ancestor bits
        columns = max(spec.depth + 1, spec.beam_slots)
        chain = torch.ones(slots, spec.depth + 1, columns, dtype=torch.bool, device=device).tril()
        self.chain = pack_ancestors(chain)  # [B, D + 1, W]
        # a root has score 0, and no beam slots above it
        self.root_score = torch.zeros(slots, 1, dtype=torch.float32, device=device)
        self.root_ancestors = torch.zeros(slots, 1, self.chain.shape[-1], dtype=torch.int64, device=device)
        self.tune_for_nodes = max(spec.depth + 1, *spec.beam_widths, 1)  # all passes' launches are chosen for this
        per_level = [spec.top_k * width for width in (1, *spec.beam_widths)] if spec.top_k else []
        depths = [level + 1 for level, count in enumerate(per_level) for _ in range(count)]
        self.candidate_depths = constant(depths, torch.int32)  # [C], 1 for the root's children
        # for each beam slot: its level, and the flat index of its level's first candidate
        starts = [
            start for start, width in zip(spec.level_starts, spec.beam_widths, strict=False) for _ in range(width)
        ]
        levels = [level for level, width in enumerate(spec.beam_widths) for _ in range(width)]
        self.slot_starts = constant(starts)
        self.slot_levels = constant(levels, torch.int32).expand(slots, -1)  # [B, beam slots]
        self.selected = self.beam_children = None  # a fixed tree's drafts (flat) and slots (within their level)
        if spec.selected is not None and spec.beam_candidates is not None:
            self.selected = constant(spec.selected)
            self.beam_children = constant([c - s for c, s in zip(spec.beam_candidates, starts, strict=True)])


class Candidates(NamedTuple):
    """The candidates of one step, in flat order (see TreeSpec)."""

    tokens: Tensor  # [B, C] int64
    scores: Tensor  # [B, C] float32, cumulative log-probabilities
    expanded: Tensor  # [B, beam slots] int64: the candidate that fills each beam slot

    @staticmethod
    def new(spec: TreeSpec, batch: int, device: torch.device) -> Candidates:
        """Uninitialised; each level fills its part."""
        return Candidates(
            torch.empty(batch, spec.candidates, dtype=torch.int64, device=device),
            torch.empty(batch, spec.candidates, dtype=torch.float32, device=device),
            torch.empty(batch, spec.beam_slots, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class ScoringDraft(Draft):
    """A draft with its own layers and cache. It scores the candidates of a tree, and the best are verified.

    H: its hidden size. Vd: its vocabulary; target id = id + d2t[id].
    """

    embedding: Tensor  # [V, H]
    layers: tuple[Layer, ...]
    head: Projection  # [Vd, H]
    tree_reader: Callable[[], TreeSpec]  # the model's tree parameters may change between generations
    norm: Norm | None = None
    d2t: Tensor | None = None  # [Vd] int64
    feature_layers: tuple[int, ...] = ()

    must_catch_up: ClassVar[bool] = True
    any_tree: ClassVar[bool] = True

    @abstractmethod
    def candidates(self, ops: Operations, state: DecodeState) -> Candidates:
        """Score the children of the root and of the best nodes below it, level by level.

        Below `state.levels` levels candidates have tokens of -1 and scores of -inf.
        """

    def grow_levels(
        self,
        ops: Operations,
        state: DecodeState,
        score: Callable[[int, Expansion | None], tuple[Tensor, Tensor]],
    ) -> Candidates:
        """The candidates. `score` is called for each level with the chosen nodes of the level above, None for the root.
        It returns the log-probabilities [B, P, K] and the tokens [B, P * K] of their children."""
        spec, plan = state.spec, state.draft_tree_tensors
        scores, ancestors, first_slot, nodes = plan.root_score, plan.root_ancestors, 0, None
        found = Candidates.new(spec, state.batch, state.lengths.device)
        for level, start in enumerate(spec.level_starts):
            beam = 0 if level + 1 == state.levels else spec.beam_widths[level]
            log_probs, children = score(level, nodes)
            slots, end = slice(first_slot, first_slot + beam), start + children.shape[1]
            nodes = ops.expand_beam(
                scores,
                log_probs,
                children,
                ancestors,
                first_slot,
                beam,
                None if plan.beam_children is None else plan.beam_children[slots],
                first_candidate=start,
                out=(found.tokens[:, start:end], found.scores[:, start:end], found.expanded[:, slots]),
            )
            if not beam:
                break
            scores, ancestors = nodes.scores, nodes.ancestors
            first_slot += beam
        if end < spec.candidates:  # for levels that were not run
            found.tokens[:, end:].fill_(-1)
            found.scores[:, end:].fill_(float("-inf"))
            found.expanded[:, first_slot:].copy_(plan.slot_starts[first_slot:])
        return found

    @property
    def by_token(self) -> bool:
        return all(layer.mixer.by_token for layer in self.layers)

    @property
    def mixers(self) -> Sequence[Mixer]:
        return [layer.mixer for layer in self.layers]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocabulary(self) -> int | None:
        return self.embedding.shape[0] if self.d2t is None else len(self.d2t)

    def with_vocabulary(self, ids: Tensor) -> Self:
        """The draft with a vocabulary projection of these tokens [Vd] only; see the function of this name."""
        return replace(self, head=with_rows(self.head, ids), d2t=ids - torch.arange(len(ids), device=ids.device))

    def read_tree(self) -> TreeSpec:
        return self.tree_reader()

    def new_tree_tensors(self, spec: TreeSpec, slots: int, device: torch.device) -> BeamPlan:
        return BeamPlan(spec, slots, device)

    def grow(self, ops: Operations, state: DecodeState) -> None:
        spec = state.spec
        ops.build_tree(
            state.tokens,
            *self.candidates(ops, state),
            spec.nodes,
            spec.top_k,
            state.draft_tree_tensors.selected,
            lengths=state.lengths,
            out=state.tree,
        )

    def chain(self, ops: Operations, state: DecodeState) -> Tensor:
        """The tokens [B, D] of a tree that is a chain, without the root."""
        return self.candidates(ops, state).tokens

    def grow_with(self, ops: Operations, state: DecodeState, found: RepeatDrafts, estimates: Tensor) -> None:
        """`grow` with drafts from earlier text, and their scores [B, J], in the same tree."""
        self.build_grafted(ops, state, self.candidates(ops, state), None, found, estimates)

    def build_grafted(
        self,
        ops: Operations,
        state: DecodeState,
        candidates: Candidates,
        parents: Tensor | None,
        found: RepeatDrafts,
        estimates: Tensor,
    ) -> None:
        """Build the tree of these candidates and of drafts from earlier text. parents: see `ops.graft`."""
        spec = state.spec
        both = ops.graft(*candidates, spec.top_k, found, estimates, parents=parents)
        ops.build_tree(
            state.tokens,
            both.candidates,
            both.scores,
            candidates.expanded,
            spec.nodes,
            spec.top_k,
            grafted=both.parents,
            lengths=state.lengths,
            out=state.tree,
        )


@dataclass(frozen=True, kw_only=True)
class BeamDraft(ScoringDraft):
    """Runs its layers once for each level of a tree."""

    egag: EGAGConfig | None = None  # of adaptive trees

    first_token: ClassVar[int]
    """The first token of a sequence with a row in the draft's cache. A head's row p pairs the features of p with token
    p + 1, so it has none for token 0. A model has a row for every token."""

    @abstractmethod
    def forward(
        self, ops: Operations, nodes: DraftNodes, caches: LayerCaches, rows: NewRows, level: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run the layers over n nodes. level: the nodes' depth in the tree, 0 for committed tokens.

        Returns two [B, n, H]: the hidden states, which are the features of the nodes' children, and what the vocabulary
        projection reads (the same, or normed).
        """

    def remember(self, ops: Operations, nodes: DraftNodes, caches: LayerCaches, rows: NewRows) -> None:
        """Put committed tokens into the layers' caches: `forward` without its outputs."""
        self.forward(ops, nodes, caches, rows)

    def inputs_of(self, ops: Operations, features: Tensor, rows: NewRows) -> Tensor | SplitSums:
        """The target's features [B, n, F] in the form of the draft's own, [B, n, H]."""
        return features

    def weight_bytes(self, spec: TreeSpec) -> int:
        return spec.beam_levels * nbytes_of(self.head, self.layers)

    def new_slot_tensors(self, pages: SlotPages) -> BeamSlots:
        slots, device, dtype = pages.slots, pages.table.device, self.embedding.dtype
        caches = LayerCaches(self.mixers, slots, pages, dtype, device)
        hidden, normed = (torch.zeros(slots, 1, self.hidden_size, dtype=dtype, device=device) for _ in range(2))
        return BeamSlots(caches, hidden, normed, None if self.egag is None else GuideTensors.new(slots, device))

    def guide(self, sequences: Sequences) -> GuideTensors | None:
        slots: BeamSlots = sequences.draft_tensors
        return slots.guide

    def levels_for(self, spec: TreeSpec, gamma: float) -> int | None:
        if self.egag is None or self.egag.exact or not spec.adaptive:
            return None
        levels = next((levels for levels in LEVELS if levels >= gamma), spec.beam_levels)
        return levels if levels < spec.beam_levels else None

    def caches_of(self, sequences: Sequences) -> LayerCaches:
        """The caches that `forward` reads and writes."""
        return sequences.draft_tensors.caches

    def rows(self, lengths: Tensor) -> Tensor:
        """How many rows [B] int32 the draft's cache has, with the root's, where the target's has `lengths`."""
        return lengths if self.first_token == 1 else lengths + (1 - self.first_token)

    def read_prompt(self, ops: Operations, sequences: Sequences, pieces: PromptChunks, features: Tensor) -> None:
        # `begin` takes in the prompt's last token, with the root after it
        known = pieces.tokens(sequences.tokens, sequences.lengths, self.first_token)
        caches = sequences.draft_tensors.caches.of_pieces(pieces, sequences.lengths)
        rows = NewRows(pieces.seen, pieces.starts, span=pieces.span)
        self.remember(ops, DraftNodes(self.inputs_of(ops, features, rows), None, known), caches, rows)

    def begin(self, ops: Operations, sequences: Sequences, features: Tensor, entering: Tensor) -> None:
        mine: BeamSlots = sequences.draft_tensors
        if mine.guide is not None:
            mine.guide.begin(entering)
        root = ops.sequence_rows(sequences.tokens, sequences.lengths, 1)
        before = self.rows(sequences.lengths - 1).clamp(min=0)
        first = torch.where(entering, before, sequences.capacity)  # rows of the others are not written
        mine.keep(self.take_in(ops, features, root, mine.caches, NewRows(before, first)), entering)

    def extend(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, features: Tensor) -> None:
        mine, plan = state.sequences.draft_tensors, state.draft_tree_tensors
        emitted = ops.sequence_rows(state.tokens, accepted.before, state.spec.depth + 1, 1)
        features, lengths = ops.gather_rows(features, accepted.path), self.rows(accepted.before)
        rows = NewRows(lengths, lengths, ancestors=plan.chain, tune_for_nodes=plan.tune_for_nodes)
        outputs = self.take_in(ops, features, emitted, mine.caches, rows)
        for kept, output in zip((mine.hidden, mine.normed), outputs, strict=True):
            ops.gather_rows(output, accepted.accepted[:, None], out=kept)

    def catch_up(self, ops: Operations, sequences: Sequences, known: Tensor, features: Tensor) -> None:
        mine: BeamSlots = sequences.draft_tensors
        tokens = ops.sequence_rows(sequences.tokens, known + 1, features.shape[1])
        lengths = self.rows(known)
        outputs = self.take_in(ops, features, tokens, mine.caches, NewRows(lengths, lengths))
        last = sequences.lengths - known - 1  # -1: nothing was new
        mine.keep((ops.gather_rows(output, last[:, None]) for output in outputs), last >= 0)

    def take_in(
        self, ops: Operations, features: Tensor, tokens: Tensor, caches: LayerCaches, rows: NewRows
    ) -> tuple[Tensor, Tensor]:
        """Run the layers over the target's features for n new rows, of which each sees those before it.

        tokens [B, n] of these rows; features [B, n, F] of the positions before them. Returns like `forward`.
        """
        return self.forward(ops, DraftNodes(self.inputs_of(ops, features, rows), None, tokens), caches, rows)

    def run_layers(
        self,
        ops: Operations,
        normed: ProductRows,
        x: Tensor,
        caches: LayerCaches,
        rows: NewRows,
        layer_inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run all layers over x [B, n, H], then the final norm. normed: the first layer's input. layer_inputs
        [B, n, L, P]: what LayerInputs gives. Returns like `forward`."""
        update = None
        for index, layer in enumerate(self.layers):
            if index:
                normed, x = add_norm_for(
                    ops, layer.input_norm, x, update, rows.in_draft_pass, row_format=layer.input_format
                )
            part = None if layer_inputs is None else layer_inputs[:, :, index]
            x, update = decoder_layer(ops, layer, normed, x, caches.layer(index), rows, part)
        normed, hidden = add_norm(ops, self.norm, x, update, rows.in_draft_pass)
        return hidden, normed

    def candidates(self, ops: Operations, state: DecodeState) -> Candidates:
        """Score the children of the root and of the best nodes below it, level by level.

        The root's children come from its kept output. Each beam pass runs the layers over the chosen nodes of one level
        and scores their children. Below `state.levels` levels, or where EGAG ends a draft, candidates have token -1 and
        score -inf.
        """
        mine: BeamSlots = state.sequences.draft_tensors
        plan: BeamPlan = state.draft_tree_tensors
        spec, lengths, hidden, normed = state.spec, self.rows(state.lengths), mine.hidden, mine.normed
        guide, egag = (mine.guide, self.egag) if spec.adaptive else (None, None)
        rule = None if egag is None else egag.within(spec.beam_levels)
        first_slot = levels = 0

        def score(level: int, chosen: Expansion | None) -> tuple[Tensor, Tensor]:
            nonlocal hidden, normed, first_slot, levels
            if chosen is not None:
                depths = plan.slot_levels[:, first_slot : first_slot + chosen.tokens.shape[1]]
                rows = NewRows(
                    lengths, lengths, depths, chosen.ancestors, tune_for_nodes=plan.tune_for_nodes, skip=first_slot
                )
                nodes = DraftNodes(hidden, chosen.parents, chosen.tokens)
                hidden, normed = self.forward(ops, nodes, self.caches_of(state.sequences), rows, level)
                first_slot += chosen.tokens.shape[1]
            levels = level + 1
            logits, log_probs, tokens = self.best_children(ops, normed, spec.top_k, state.batch * plan.tune_for_nodes)
            if guide is not None and rule is not None and not level:
                ops.choose_gamma(ops.row_entropy(logits), state.lengths, guide, rule, logits.shape[1])
            if rule is not None and rule.mode == "stop" and level >= rule.gamma_min:
                sure = 1 - (rule.stop_lambda * ops.row_entropy(logits)).sqrt() >= rule.stop_threshold
                log_probs.masked_fill_(~sure[:, None], float("-inf"))
            return log_probs.view(state.batch, -1, spec.top_k), tokens.view(state.batch, -1)

        found = self.grow_levels(ops, state, score)
        if guide is not None and rule is not None:
            depths, limits = plan.candidate_depths, state.stops.limit
            scored = levels if rule.mode == "stop" else None
            ops.clip_depth(found.tokens, found.scores, depths, guide, state.lengths, limits, rule, scored)
        return found

    def best_children(
        self, ops: Operations, normed: Tensor, top_k: int, tune_for_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The scored logits [n, *] of nodes, and the log-probabilities and target ids [n, K] of their best children,
        from what the vocabulary projection reads, [B, n / B, *]. tune_for_rows: see project."""
        logits = project(ops, self.head, normed, tune_for_rows).flatten(0, 1)
        return logits, *ops.topk(logits, top_k, offsets=self.d2t)
