"""Block drafters: one forward over the root and mask tokens scores all levels of a tree (DFlash, arXiv 2602.06036).

The layers' keys and values of committed tokens are made of the target's features, without a forward over them. After
them lie those of the block, which the next step overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.drafts.beams import BeamPlan, ScoringDraft
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import AcceptedPath, NewRows
from eagle_triton.engine.model.model_view import decoder_layer
from eagle_triton.engine.model.modules import (
    Norm,
    Projection,
    add_norm,
    add_norm_for,
    apply_norm,
    embed_norm,
    project,
    project_split,
)
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.operands.ancestors import pack_ancestors
from eagle_triton.operands.tree_decoding import Expansion


class BlockSlots(NamedTuple):
    """What a block draft keeps for each sequence."""

    caches: LayerCaches  # of its layers


class BlockPlan(BeamPlan):
    """The tensors of a BeamPlan, and those of the block."""

    by_slot = (*BeamPlan.by_slot, "masks", "all_rows")

    def __init__(self, spec: TreeSpec, slots: int, device: torch.device, rows: int, mask_token: int):
        super().__init__(spec, slots, device)
        self.masks = torch.full((slots, rows - 1), mask_token, dtype=torch.int64, device=device)
        self.all_rows = pack_ancestors(torch.ones(slots, rows, rows, dtype=torch.bool, device=device))  # [B, R, W]


@dataclass(frozen=True)
class MarkovHead:
    """Adds to the logits of a row what the token before it says: w2(w1[token]), arXiv 2607.05147.

    gate: w2(sigmoid(gate(cat(the row's hidden state, w1[token]))) * w1[token]) instead.
    """

    w1: Tensor  # [V, r]
    w2: Projection  # [Vd, r]
    gate: Projection | None = None  # [r, H + r]

    def __call__(self, ops: Operations, hidden: Tensor, tokens: Tensor, tune_for_rows: int) -> Tensor:
        """hidden [B, 1, H] of the row, tokens [B, P] -> [B, P, Vd]."""
        latent = self.w1[tokens]
        if self.gate is not None:
            inputs = torch.cat((hidden.expand(-1, tokens.shape[1], -1), latent), dim=-1)
            latent = torch.sigmoid(project(ops, self.gate, inputs, tune_for_rows)) * latent
        return project(ops, self.w2, latent, tune_for_rows)


@dataclass(frozen=True, kw_only=True)
class BlockDraft(ScoringDraft):
    """Reads the root and mask tokens in one pass, and scores a level of the tree by each row.

    Row 0 is the root's. `shifted`: row i scores the tokens after it, level i; otherwise the tokens at its own position,
    level i - 1, and row 0 none. `causal`: for each layer, whether a row of the block sees only those before it; all see
    all committed tokens. Levels do not depend on what was chosen above them, unless there is a Markov head.
    """

    fc: Projection  # [H, F]
    hidden_norm: Norm  # of fc's output, which all layers make keys and values of
    block: int  # rows that it was trained with
    mask_token: int
    shifted: bool = False
    causal: tuple[bool, ...] = ()
    markov: MarkovHead | None = None
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        if len(self.causal) != len(self.layers):
            raise ValueError(f"expected one `causal` for each of {len(self.layers)} layers, got {len(self.causal)}")

    @property
    def most_levels(self) -> int:
        """How many levels the block scores."""
        return self.block if self.shifted else self.block - 1

    def block_rows(self, levels: int) -> int:
        """Rows of a pass that scores so many levels. Fewer than `block` give the same if all layers are causal."""
        return levels + (not self.shifted) if all(self.causal) else self.block

    def rows_in_pass(self, spec: TreeSpec) -> int:
        return self.block_rows(spec.beam_levels) if spec.beam_levels else 0

    def check_tree(self, spec: TreeSpec) -> None:
        super().check_tree(spec)
        if spec.beam_levels > self.most_levels:
            raise ValueError(
                f"num_steps: a block of {self.block} scores at most {self.most_levels} levels, got a tree of "
                f"{spec.beam_levels}"
            )

    def weight_bytes(self, spec: TreeSpec) -> int:
        if not spec.beam_levels:
            return 0
        once = [*self.fc.tensors, *self.head.tensors, *(tensor for layer in self.layers for tensor in layer.tensors)]
        each = [] if self.markov is None else [*self.markov.w2.tensors]
        return sum(tensor.nbytes for tensor in once) + spec.beam_levels * sum(tensor.nbytes for tensor in each)

    def new_slot_tensors(self, pages: SlotPages) -> BlockSlots:
        device = pages.table.device
        return BlockSlots(LayerCaches(self.mixers, pages.slots, pages, self.embedding.dtype, device))

    def new_tree_tensors(self, spec: TreeSpec, slots: int, device: torch.device) -> BeamPlan:
        if not spec.beam_levels:
            return super().new_tree_tensors(spec, slots, device)
        return BlockPlan(spec, slots, device, self.block_rows(spec.beam_levels), self.mask_token)

    # --- committed tokens ---

    def read_prompt(self, ops: Operations, sequences: Sequences, pieces: PromptChunks, features: Tensor) -> None:
        caches = sequences.draft_tensors.caches.of_pieces(pieces, sequences.lengths)
        self._remember(ops, features, caches, NewRows(pieces.seen, pieces.starts, None, None, span=pieces.span))

    def extend(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, features: Tensor) -> None:
        rows = NewRows(accepted.before, accepted.before, None, None)
        self._remember(ops, ops.gather_rows(features, accepted.path), state.sequences.draft_tensors.caches, rows)

    def catch_up(self, ops: Operations, sequences: Sequences, steps: int) -> None:
        skipped = sequences.skipped
        assert skipped is not None, "plain steps have kept nothing"
        known = skipped.draft_lengths
        features = skipped.since(known, steps, sequences.lengths)
        self._remember(ops, features, sequences.draft_tensors.caches, NewRows(known, known, None, None))

    def _remember(self, ops: Operations, features: Tensor, caches: LayerCaches, rows: NewRows) -> None:
        """Write keys and values of tokens with these features [B, n, F] of the target. Rows past a sequence's committed
        ones are overwritten before they are read."""
        context = apply_norm(ops, self.hidden_norm, project_split(ops, self.fc, features))
        for index, layer in enumerate(self.layers):
            layer.mixer.remember(ops, context, caches.layer(index), rows)

    # --- the next tree ---

    def candidates(self, ops: Operations, state: DecodeState) -> Any:
        spec, batch = state.spec, state.batch
        hidden = self.run_block(ops, state)[:, 0 if self.shifted else 1 :][:, : spec.beam_levels].contiguous()
        logits = project(ops, self.head, hidden, hidden.shape[0] * hidden.shape[1])
        markov, once = self.markov, None
        if markov is None:
            once = ops.topk(logits.flatten(0, 1), spec.top_k, offsets=self.d2t)
        root = ops.sequence_rows(state.tokens, state.lengths, 1)

        def score(level: int, nodes: Expansion | None) -> tuple[Tensor, Tensor]:
            tokens = root if nodes is None else nodes.tokens
            parents = tokens.shape[1]
            if once is not None:  # the same for all parents
                log_probs, children = (part.view(batch, -1, 1, spec.top_k)[:, level] for part in once)
            else:
                assert markov is not None
                most = batch * max(1, *spec.beam_widths)
                added = markov(ops, hidden[:, level : level + 1], tokens, most)
                both = logits[:, level : level + 1] + added
                log_probs, children = (
                    part.view(batch, parents, spec.top_k)
                    for part in ops.topk(both.flatten(0, 1), spec.top_k, offsets=self.d2t)
                )
            return log_probs.expand(-1, parents, -1), children.expand(-1, parents, -1).flatten(1)

        return self.grow_levels(ops, state, score)

    def run_block(self, ops: Operations, state: DecodeState) -> Tensor:
        """The pass over the roots and masks: its normed outputs [B, R, H]."""
        plan: BlockPlan = state.draft_tree_tensors
        caches, lengths = state.sequences.draft_tensors.caches, state.lengths
        tokens = torch.cat((ops.sequence_rows(state.tokens, lengths, 1), plan.masks), dim=1)
        seen = {
            causal: NewRows(lengths, lengths, None, None if causal else plan.all_rows, tune_for_nodes=tokens.shape[1])
            for causal in (False, True)
        }
        normed, x = embed_norm(
            ops,
            self.layers[0].input_norm,
            self.embedding,
            tokens,
            in_draft_pass=True,
            for_float8=self.layers[0].mixer.reads_float8,
            scale=self.embedding_scale,
        )
        update = None
        for index, layer in enumerate(self.layers):
            if index:
                normed, x = add_norm_for(ops, layer.input_norm, x, update, True, for_float8=layer.mixer.reads_float8)
            x, update = decoder_layer(ops, layer, normed, x, caches.layer(index), seen[self.causal[index]])
        return add_norm(ops, self.norm, x, update, True)[0]
