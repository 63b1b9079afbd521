"""Block drafters: one forward over the root and mask tokens scores all levels of a tree (DFlash, arXiv 2602.06036).

The layers' keys and values of committed tokens are made from the target's features, without a forward. After them lie
the block's own, which the next step overwrites.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from eagle_triton.engine.drafts.beams import BeamPlan, Candidates, ScoringDraft
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import AcceptedPath, NewRows
from eagle_triton.engine.model.model_view import decoder_layer
from eagle_triton.engine.model.modules import (
    Norm,
    NormedUpdate,
    Projection,
    add_norm,
    add_norm_for,
    apply_norm,
    embed_norm,
    feed_forward,
    nbytes_of,
    project,
    project_split,
)
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks
from eagle_triton.engine.state import DecodeState, Sequences, Tree
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.operands.suffix_match import RepeatDrafts
from eagle_triton.operands.tree_decoding import Expansion
from eagle_triton.runtime.row_formats import whole_of
from eagle_triton.runtime.split_sums import Product, total_of


class BlockPlan(BeamPlan):
    """The tensors of a BeamPlan and of the block."""

    by_slot = (*BeamPlan.by_slot, "tokens", "all_rows")

    def __init__(self, spec: TreeSpec, slots: int, device: torch.device, rows: int, mask_token: int):
        super().__init__(spec, slots, device)
        self.tokens = torch.full((slots, rows), mask_token, dtype=torch.int64, device=device)  # after the root
        # [B, R, W]: each row sees all R rows of the block. Row i has i further bits, for rows that `new_keys` hides.
        # With these it counts as if it were R - 1 positions further on, see `window_for`.
        seen = torch.ones(slots, rows, 2 * rows - 1, dtype=torch.bool, device=device)
        self.all_rows = pack_ancestors(seen.tril(rows - 1))


def window_for(window: int, rows: int) -> int:
    """The sliding window for attention over a whole block of `rows` that equals one of `window` positions, with masks
    like `BlockPlan.all_rows`, where row i counts as if it were R - 1 positions further on."""
    return window + rows - 1


@dataclass(frozen=True)
class BlockConv:
    """DFlash2's convolutions along the block, before and after a part of a layer; see models/block_drafter.py."""

    base: Tensor  # [2, taps, H]
    coefficients: Projection  # [2 * taps * H / group, H]
    group: int

    def before_and_after(self, ops: Operations, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients of both, [B, n, taps, H] each, from the part's normed input [B, n, H]."""
        by_group = project(ops, self.coefficients, normed, normed.shape[0] * normed.shape[1])
        by_group = by_group.unflatten(-1, (*self.base.shape[:2], -1))
        before, after = (by_group.repeat_interleave(self.group, dim=-1) + self.base).unbind(2)
        return before, after


def convolve(x: Tensor, coefficients: Tensor) -> Tensor:
    """A causal convolution of each element along the rows x [B, n, H], by each row's coefficients [B, n, taps, H].
    There are zeros before the first row."""
    found = coefficients[:, :, 0] * x
    for tap in range(1, coefficients.shape[2]):
        found = found + coefficients[:, :, tap] * torch.nn.functional.pad(x, (0, 0, tap, 0))[:, : x.shape[1]]
    return found


MOST_CANDIDATES = 64  # per row; only these are corrected


@dataclass(frozen=True, kw_only=True)
class Correction(ABC):
    """Corrects the logits of a row's best tokens by the path before them: to each it adds the product of the path's
    latent vector and the token's vector.

    The path's vector depends on the row and the token before it, and in a recurrent correction on a state [S], which
    each token of the path changes.
    """

    successors: Tensor  # [Vd, r]: of the corrected tokens
    candidates: int  # the best tokens of each row that are corrected
    first_level: int = 0  # levels above it are not corrected

    keeps_rest: ClassVar[bool] = True  # whether the other tokens of a row keep their probability
    matrices: ClassVar[tuple[str, ...]]  # the attributes that `latent` reads whole

    @abstractmethod
    def latent(self, ops: Operations, hidden: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [B, 1, H] of a row, tokens [B, P] before it and states [B, P, S] of the paths before these -> latent
        vectors [B, P, r] and the states after the tokens."""

    @property
    def state_size(self) -> int | None:
        """S; None: paths have no state."""
        return None

    def new_state(self, batch: int) -> Tensor:
        """The state [B, 1, S] before the root."""
        return self.successors.new_zeros(batch, 1, self.state_size or 0)

    def with_vocabulary(self, ids: Tensor) -> Self:
        return replace(self, successors=self.successors[ids].detach(), candidates=min(self.candidates, len(ids)))


@dataclass(frozen=True, kw_only=True)
class Selector(Correction):
    """DFlash2's correction, from the row and the token before it; see models.block_drafter.CandidateSelector."""

    predecessors: Tensor  # [V, r]
    hidden: Projection  # [r, H]

    keeps_rest: ClassVar[bool] = False
    matrices: ClassVar[tuple[str, ...]] = ("hidden",)

    def latent(self, ops: Operations, hidden: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return project(ops, self.hidden, hidden, len(hidden)) * self.predecessors[tokens], state


@dataclass(frozen=True, kw_only=True)
class MarkovHead(Correction):
    """DSpark's correction, from the token before a row; a gate also reads the row. See models.block_drafter."""

    w1: Tensor  # [V, r]
    gate: Projection | None = None  # [r, H + r]

    matrices: ClassVar[tuple[str, ...]] = ("gate",)

    def latent(self, ops: Operations, hidden: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.w1[tokens]
        if self.gate is not None:
            embedded = torch.sigmoid(project(ops, self.gate, _beside(hidden, embedded))) * embedded
        return embedded, state


@dataclass(frozen=True, kw_only=True)
class RecurrentMarkovHead(Correction):
    """DSpark's correction with a state ("rnn"); see models.block_drafter.MarkovHead."""

    w1: Tensor  # [V, r]
    joint: Projection  # [3 r, 2 r + H]

    matrices: ClassVar[tuple[str, ...]] = ("joint",)

    @property
    def state_size(self) -> int:
        return self.w1.shape[1]

    def latent(self, ops: Operations, hidden: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat((state, self.w1[tokens], hidden.expand(-1, tokens.shape[1], -1)), dim=-1)
        gate, candidate, output = project(ops, self.joint, inputs).chunk(3, dim=-1)
        return torch.tanh(output), torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))


@dataclass(frozen=True, kw_only=True)
class Domino(Correction):
    """Domino's correction, a GRU over the embeddings of a path; see models.block_drafter.BlockDrafter."""

    embedding: Tensor  # [V, H]
    embedding_scale: float
    inputs: Tensor  # [3 S, H]
    recurrent: Tensor  # [3 S, S]
    projection: Projection  # [r, H + S]

    matrices: ClassVar[tuple[str, ...]] = ("inputs", "recurrent", "projection")

    @property
    def state_size(self) -> int:
        return self.recurrent.shape[1]

    def latent(self, ops: Operations, hidden: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding[tokens] * self.embedding_scale
        state = torch.gru_cell(embedded.flatten(0, 1), state.flatten(0, 1), self.inputs, self.recurrent)
        state = state.unflatten(0, tokens.shape)
        return torch.nn.functional.silu(project(ops, self.projection, _beside(hidden, state))), state


def _beside(hidden: Tensor, paths: Tensor) -> Tensor:
    """[B, P, H + S] of a row [B, 1, H] and its paths [B, P, S]."""
    return torch.cat((hidden.expand(-1, paths.shape[1], -1), paths), dim=-1)


class Lattice(NamedTuple):
    """The K best tokens of each row of D levels; see `ops.best_first_tree`."""

    log_probs: Tensor  # [B, D, M, K] float32
    tokens: Tensor  # [B, D, M, K] int64
    rows: Tensor | None  # [B, D, M, K] int64: the next level's row with the children; None: its only row


@dataclass(frozen=True, kw_only=True)
class BlockDraft(ScoringDraft):
    """Reads the root and mask tokens in one pass. Each row scores a level of the tree.

    Row 0 is the root's. If `shifted`, row i scores the tokens after it, level i. Otherwise it scores the tokens in its
    own place, level i - 1, and row 0 scores none. `causal`: for each layer, whether a row of the block sees only those
    before it. All rows see all committed tokens. Without a correction, levels do not depend on the choices above them.
    """

    fc: Projection  # [H, F]
    hidden_norm: Norm  # of fc's output, from which all layers make keys and values
    block: int  # rows in training
    mask_token: int
    shifted: bool = False
    causal: tuple[bool, ...] = ()
    correction: Correction | None = None
    convs: tuple[tuple[BlockConv, BlockConv], ...] = ()  # for each layer: around its attention, around its MLP
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        if len(self.causal) != len(self.layers):
            raise ValueError(f"expected one `causal` for each of {len(self.layers)} layers, got {len(self.causal)}")

    @property
    def most_levels(self) -> int:
        """The number of levels that the block scores."""
        return self.block if self.shifted else self.block - 1

    def block_rows(self, levels: int) -> int:
        """Rows of a pass that scores `levels` levels. Fewer than `block` give the same if all layers are causal."""
        return levels + (not self.shifted) if all(self.causal) else self.block

    def rows_in_pass(self, spec: TreeSpec) -> int:
        return self.block_rows(spec.beam_levels) if spec.beam_levels else 0

    def passes(self, levels: int) -> int:
        return min(levels, 1)

    def check_tree(self, spec: TreeSpec) -> None:
        super().check_tree(spec)
        if spec.beam_levels > self.most_levels:
            raise ValueError(
                f"num_steps (num_speculative_tokens of a chain): a block of {self.block} scores at most "
                f"{self.most_levels} levels, got a tree of {spec.beam_levels}"
            )
        if self.correction is not None and spec.top_k > self.correction.candidates:
            raise ValueError(
                f"topk must be at most {self.correction.candidates}, the tokens of a row that the drafter corrects, "
                f"got {spec.top_k}"
            )

    def with_vocabulary(self, ids: Tensor) -> Self:
        draft, correction = super().with_vocabulary(ids), self.correction
        return replace(draft, correction=None if correction is None else correction.with_vocabulary(ids))

    def weight_bytes(self, spec: TreeSpec) -> int:
        if not spec.beam_levels:
            return 0
        once = nbytes_of(self.fc, self.head, self.layers, self.convs)
        if self.correction is None:
            return once
        matrices = nbytes_of(*(getattr(self.correction, name) for name in self.correction.matrices))
        return once + matrices * (spec.beam_levels if self.by_levels else 1)

    @property
    def by_levels(self) -> bool:
        """Whether each path has its own state, so its children are scored when it is chosen."""
        return self.correction is not None and self.correction.state_size is not None

    def new_slot_tensors(self, pages: SlotPages) -> LayerCaches:
        return LayerCaches(self.mixers, pages.slots, pages, self.embedding.dtype, pages.table.device)

    def new_tree_tensors(self, spec: TreeSpec, slots: int, device: torch.device) -> BeamPlan:
        if not spec.beam_levels:
            return super().new_tree_tensors(spec, slots, device)
        return BlockPlan(spec, slots, device, self.block_rows(spec.beam_levels), self.mask_token)

    # --- committed tokens ---

    def read_prompt(self, ops: Operations, sequences: Sequences, pieces: PromptChunks, features: Tensor) -> None:
        caches = sequences.draft_tensors.of_pieces(pieces, sequences.lengths)
        self._remember(ops, features, caches, NewRows(pieces.seen, pieces.starts, span=pieces.span))

    def extend(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, features: Tensor) -> None:
        rows = NewRows(accepted.before, accepted.before)
        self._remember(ops, ops.gather_rows(features, accepted.path), state.sequences.draft_tensors, rows)

    def catch_up(self, ops: Operations, sequences: Sequences, known: Tensor, features: Tensor) -> None:
        self._remember(ops, features, sequences.draft_tensors, NewRows(known, known))

    def _remember(self, ops: Operations, features: Tensor, caches: LayerCaches, rows: NewRows) -> None:
        """Write keys and values of tokens with these features [B, n, F] of the target. Rows past a sequence's committed
        ones are overwritten before they are read."""
        context = apply_norm(ops, self.hidden_norm, project_split(ops, self.fc, features))
        for index, layer in enumerate(self.layers):
            layer.mixer.remember(ops, context, caches.layer(index), rows)

    # --- the next tree ---

    def grow(self, ops: Operations, state: DecodeState) -> None:
        if self.by_levels or state.spec.selected is not None:
            super().grow(ops, state)
        else:
            self._best_first(ops, state, state.spec.nodes, state.tree)

    def chain(self, ops: Operations, state: DecodeState) -> Tensor:
        if self.by_levels:
            return super().chain(ops, state)
        return self._best_first(ops, state, 1 + state.spec.candidates)[0][:, 1:]

    def grow_with(self, ops: Operations, state: DecodeState, found: RepeatDrafts, estimates: Tensor) -> None:
        if self.by_levels:
            super().grow_with(ops, state, found, estimates)
            return
        spec = state.spec
        tokens, parents, _, _, scores = self._best_first(ops, state, 1 + min(spec.drafts, spec.candidates))
        drafted = Candidates(tokens[:, 1:], scores[:, 1:], tokens[:, :0])  # no beams: all name their parents
        self.build_grafted(ops, state, drafted, parents[:, 1:], found, estimates)

    def _best_first(
        self, ops: Operations, state: DecodeState, nodes: int, out: Tree | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A tree of `nodes` nodes and its scores, see `ops.best_first_tree`."""
        lattice = self.lattice(ops, state, *self._scoring_rows(ops, state))
        return ops.best_first_tree(
            state.tokens, lattice.log_probs, lattice.tokens, nodes, lattice.rows, lengths=state.lengths, out=out
        )

    def candidates(self, ops: Operations, state: DecodeState) -> Candidates:
        hidden, logits = self._scoring_rows(ops, state)
        if self.by_levels:
            return self._by_states(ops, state, hidden, logits)
        lattice, k = self.lattice(ops, state, hidden, logits), state.spec.top_k
        row = lattice.tokens.new_zeros(state.batch, 1)  # of each node: the one with its children

        def score(level: int, nodes: Expansion | None) -> tuple[Tensor, Tensor]:
            nonlocal row
            if nodes is not None:
                place = row.gather(1, nodes.parents) * k + nodes.chosen % k
                row = torch.zeros_like(place) if lattice.rows is None else _taken(lattice.rows[:, level - 1], place)
            places = (row[:, :, None] * k + torch.arange(k, device=row.device)).flatten(1)
            log_probs = _taken(lattice.log_probs[:, level], places).unflatten(1, (-1, k))
            return log_probs, _taken(lattice.tokens[:, level], places)

        return self.grow_levels(ops, state, score)

    def _scoring_rows(self, ops: Operations, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Outputs [B, D, H] and logits [B, D, Vd] of the rows that score the levels."""
        hidden = self.run_block(ops, state)[:, 0 if self.shifted else 1 :][:, : state.spec.beam_levels].contiguous()
        return hidden, project(ops, self.head, hidden, hidden.shape[0] * hidden.shape[1])

    def _by_states(self, ops: Operations, state: DecodeState, hidden: Tensor, logits: Tensor) -> Candidates:
        """The candidates if each chosen node has a state."""
        correction, k = self.correction, state.spec.top_k
        assert correction is not None
        unary, ids = self._best_of_rows(ops, logits)
        states = correction.new_state(state.batch)

        def score(level: int, nodes: Expansion | None) -> tuple[Tensor, Tensor]:
            nonlocal states
            if nodes is None:
                before = ops.sequence_rows(state.tokens, state.lengths, 1)
            else:
                before = nodes.tokens
                states = states.gather(1, nodes.parents[:, :, None].expand(-1, -1, states.shape[-1]))
            latent, states = correction.latent(ops, hidden[:, level : level + 1], before, states)
            if level < correction.first_level:
                latent = torch.zeros_like(latent)
            log_probs, places = self._corrected(ops, unary[:, level], ids[:, level], latent, k)
            return log_probs, self._tokens_of(ids[:, level].gather(1, places.flatten(1)))

        return self.grow_levels(ops, state, score)

    def lattice(self, ops: Operations, state: DecodeState, hidden: Tensor, logits: Tensor) -> Lattice:
        """The proposals of rows with these outputs [B, D, H] and logits [B, D, Vd], if no path has a state."""
        batch, levels, _ = hidden.shape
        correction, k = self.correction, state.spec.top_k
        if correction is None:
            log_probs, tokens = ops.topk(logits.flatten(0, 1), k, offsets=self.d2t)
            return Lattice(log_probs.view(batch, levels, 1, k), tokens.view(batch, levels, 1, k), None)
        unary, ids = self._best_of_rows(ops, logits)
        among, width = self._tokens_of(ids), correction.candidates
        root = ops.sequence_rows(state.tokens, state.lengths, 1)
        before = torch.cat((root[:, :, None].expand(-1, -1, width), among[:, :-1]), dim=1)
        rows = hidden.flatten(0, 1)[:, None]
        latent, _ = correction.latent(ops, rows, before.flatten(0, 1), correction.new_state(batch * levels))
        found = self._corrected(ops, unary.flatten(0, 1), ids.flatten(0, 1), latent, k)
        log_probs, places = (part.view(batch, levels, width, k) for part in found)
        return Lattice(log_probs, among.gather(2, places.flatten(2)).view_as(places), places)

    def _best_of_rows(self, ops: Operations, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B, D, M] of the rows' corrected tokens, and their draft ids, from logits [B, D, Vd]."""
        assert self.correction is not None
        log_probs, ids = ops.topk(logits.flatten(0, 1), self.correction.candidates)
        return log_probs.view(*logits.shape[:2], -1), ids.view(*logits.shape[:2], -1)

    def _tokens_of(self, ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return ids if self.d2t is None else ids + self.d2t[ids]

    def _corrected(self, ops: Operations, unary: Tensor, ids: Tensor, latent: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best children of P paths: log-probabilities float32 [R, P, K] and places among a row's M tokens int64.

        unary [R, M] log-probabilities of the tokens with draft ids [R, M], latent [R, P, r].
        """
        correction, paths = self.correction, latent.shape[:2]
        assert correction is not None
        scores = unary[:, None] + latent @ correction.successors[ids].transpose(1, 2)
        log_probs, places = (part.view(*paths, k) for part in ops.topk(scores.flatten(0, 1), k))
        if correction.keeps_rest:
            rest = (1 - unary.exp().sum(-1)).clamp(min=0).log()[:, None]  # of uncorrected tokens
            log_probs = log_probs - torch.nn.functional.softplus(rest - scores.logsumexp(-1))[:, :, None]
        return log_probs, places

    def run_block(self, ops: Operations, state: DecodeState) -> Tensor:
        """The pass over the roots and masks: its normed outputs [B, R, H]."""
        plan: BlockPlan = state.draft_tree_tensors
        caches, lengths = state.sequences.draft_tensors, state.lengths
        ops.sequence_rows(state.tokens, lengths, 1, out=plan.tokens[:, :1])
        count = plan.tokens.shape[1]
        seen = {
            True: NewRows(lengths, lengths, tune_for_nodes=count),
            False: NewRows(lengths, lengths, ancestors=plan.all_rows, new_keys=count, tune_for_nodes=count),
        }
        normed, x = embed_norm(
            ops,
            self.layers[0].input_norm,
            self.embedding,
            plan.tokens,
            in_draft_pass=True,
            row_format=self.layers[0].input_format,
            scale=self.embedding_scale,
        )
        update: Product | NormedUpdate | None = None
        for index, layer in enumerate(self.layers):
            if index:
                normed, x = add_norm_for(ops, layer.input_norm, x, update, True, row_format=layer.input_format)
            rows, cache = seen[self.causal[index]], caches.layer(index)
            if not self.convs:
                x, update = decoder_layer(ops, layer, normed, x, cache, rows)
                continue
            whole, (around_mixer, around_mlp) = whole_of(normed), self.convs[index]
            before, after = around_mixer.before_and_after(ops, whole)
            update = convolve(total_of(layer.mixer.forward(ops, convolve(whole, before), cache, rows)), after)
            whole, x = add_norm(ops, layer.post_norm, x, update, True)
            assert layer.mlp is not None
            before, after = around_mlp.before_and_after(ops, whole)
            update = feed_forward(ops, layer.mlp, convolve(whole, before), rows.tune_for_rows)
            update = convolve(total_of(update), after)
        return add_norm(ops, self.norm, x, update, True)[0]


def _taken(level: Tensor, places: Tensor) -> Tensor:
    """The entries of a lattice's level [B, M, K] at places [B, n]."""
    return level.flatten(1).gather(1, places)
