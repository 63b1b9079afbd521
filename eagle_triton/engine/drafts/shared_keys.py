"""A draft that attends to the target's keys and values, and has none of its own (Gemma 4's assistants)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from eagle_triton.engine.drafts.beams import BeamDraft, BeamSlots, DraftNodes
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import AcceptedPath, Mixer, NewRows
from eagle_triton.engine.model.model_view import decoder_layer
from eagle_triton.engine.model.modules import Projection, add_norm, add_norm_for, nbytes_of, project
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prompt_chunks import PromptChunks
from eagle_triton.engine.state import DecodeState, Sequences
from eagle_triton.engine.tree_spec import TreeSpec


@dataclass(frozen=True)
class Clusters:
    """A vocabulary in `count` equal clusters. For a node only the tokens of its `chosen` best clusters are scored."""

    centroids: Projection  # [count, h]
    tokens: Tensor  # [V], cluster by cluster
    weight: Tensor  # [V, h]: the vocabulary projection
    count: int
    chosen: int

    def score(self, ops: Operations, normed: Tensor) -> tuple[Tensor, Tensor]:
        """normed [n, h] of nodes -> logits of the tokens of their best clusters, and these tokens, [n, M] each."""
        best = project(ops, self.centroids, normed[None])[0].topk(self.chosen, dim=-1).indices
        tokens = self.tokens.long().view(self.count, -1)[best].flatten(1)
        return (self.weight[tokens] @ normed[:, :, None])[:, :, 0], tokens


@dataclass(frozen=True, kw_only=True)
class SharedKeysDraft(BeamDraft):
    """Each pass reads a node's token and the features of its parent. All nodes of a tree attend from the root's
    position to the committed tokens, not to each other. H: the target's hidden size, h: the draft's own.

    y = norm(layers(input(cat(embedding, features)))). The vocabulary projection reads y, and output(y) is the feature
    of the node's children. The first features are the target's hidden states after its final norm.
    """

    input: Projection  # [h, 2H]
    output: Projection  # [H, h]
    sources: tuple[int, ...]  # for each layer, the target's layer with the keys and values that it reads
    embedding_scale: float = 1.0
    clusters: Clusters | None = None

    first_token: ClassVar[int] = 1

    @property
    def mixers(self) -> Sequence[Mixer]:
        return ()  # none has a cache

    def rows_in_pass(self, spec: TreeSpec) -> int:
        return 0

    def weight_bytes(self, spec: TreeSpec) -> int:
        head = self.head if self.clusters is None else None
        return spec.beam_levels * nbytes_of(self.input, self.output, self.layers, head)

    def with_vocabulary(self, ids: Tensor) -> Self:
        if self.clusters is not None:
            raise ValueError("draft_vocabulary: this draft chooses among clusters of tokens itself: leave it out")
        return super().with_vocabulary(ids)

    def new_slot_tensors(self, pages: SlotPages) -> BeamSlots:
        slots, norm = super().new_slot_tensors(pages), self.norm
        assert norm is not None
        return slots._replace(normed=slots.normed.new_zeros(len(slots.normed), 1, len(norm.weight)))

    def caches_of(self, sequences: Sequences) -> LayerCaches:
        return sequences.caches

    def read_prompt(self, ops: Operations, sequences: Sequences, pieces: PromptChunks, features: Tensor) -> None:
        """Nothing: the target's keys and values are all that it knows of a prompt."""

    def begin(self, ops: Operations, sequences: Sequences, features: Tensor, entering: Tensor) -> None:
        mine: BeamSlots = sequences.draft_tensors
        if mine.guide is not None:
            mine.guide.begin(entering)
        self._keep_roots(ops, sequences, features, entering)

    def extend(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, features: Tensor) -> None:
        last = ops.gather_rows(ops.gather_rows(features, accepted.path), accepted.accepted[:, None])
        self._keep_roots(ops, state.sequences, last, accepted.accepted >= 0)

    def catch_up(self, ops: Operations, sequences: Sequences, known: Tensor, features: Tensor) -> None:
        last = sequences.lengths - known - 1  # -1: nothing was new
        self._keep_roots(ops, sequences, ops.gather_rows(features, last[:, None]), last >= 0)

    def _keep_roots(self, ops: Operations, sequences: Sequences, features: Tensor, where: Tensor) -> None:
        """Keep the outputs of `forward` for the roots of the sequences in `where` [B] bool. features [B, 1, H]: the
        target's at the tokens before them."""
        lengths = sequences.lengths
        nodes = DraftNodes(features, None, ops.sequence_rows(sequences.tokens, lengths, 1))
        outputs = self.forward(ops, nodes, sequences.caches, NewRows(lengths, lengths))
        sequences.draft_tensors.keep(outputs, where)

    def forward(
        self, ops: Operations, nodes: DraftNodes, caches: LayerCaches, rows: NewRows, level: int = 0
    ) -> tuple[Tensor, Tensor]:
        features, parents, tokens = nodes
        assert isinstance(features, Tensor)
        if parents is not None:
            features = features.gather(1, parents[:, :, None].expand(-1, -1, features.shape[-1]))
        x = project(ops, self.input, torch.cat((self.embedding[tokens] * self.embedding_scale, features), -1))
        nothing = torch.zeros_like(tokens)
        seen = NewRows(
            rows.lengths,
            rows.lengths,
            nothing.int(),
            nothing[:, :, None],
            new_keys=1,
            tune_for_nodes=rows.tune_for_nodes,
        )
        update = None
        for layer, source in zip(self.layers, self.sources, strict=True):
            normed, x = add_norm_for(
                ops, layer.input_norm, x, update, seen.in_draft_pass, row_format=layer.input_format
            )
            x, update = decoder_layer(ops, layer, normed, x, caches.layer(source), seen)
        normed, _ = add_norm(ops, self.norm, x, update, seen.in_draft_pass)
        return project(ops, self.output, normed), normed

    def best_children(
        self, ops: Operations, normed: Tensor, top_k: int, tune_for_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.clusters is None:
            return super().best_children(ops, normed, top_k, tune_for_rows)
        logits, tokens = self.clusters.score(ops, normed.flatten(0, 1))
        log_probs, places = ops.topk(logits, top_k)
        return logits, log_probs, tokens.gather(1, places)
