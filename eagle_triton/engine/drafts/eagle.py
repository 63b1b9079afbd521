"""EAGLE's draft heads, small networks on the target's features: Li et al., arXiv 2401.15077, 2406.16858, 2503.01840."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eagle_triton.engine.drafts.beams import BeamDraft, DraftNodes, check_norms_match
from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import NewRows
from eagle_triton.engine.model.model_view import decoder_layer
from eagle_triton.engine.model.modules import Norm, Projection, add_norm, apply_norm, nbytes_of, project_split
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.runtime.row_formats import whole_of
from eagle_triton.runtime.split_sums import SharedSums, SplitSums


@dataclass(frozen=True, kw_only=True)
class EagleDraft(BeamDraft):
    """A draft head of EAGLE-1, 2 or 3."""

    fc: Projection

    first_token: ClassVar[int] = 1

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1] if self.fc.weight is None else self.fc.weight.shape[0]


@dataclass(frozen=True, kw_only=True)
class Eagle3Draft(EagleDraft):
    """EAGLE-3: x = fc(features) for the target's features, or x is the head's own hidden state. The single layer reads
    cat(input_norm(embedding), hidden_norm(x)), and logits = head(norm(hidden)).

    EAGLE 3.1 may norm features before fc: all together, then each layer's by itself.
    """

    hidden_norm: Norm
    norm_before_residual: bool = False  # the residual is hidden_norm(x) instead of x
    norm_before_fc: Norm | None = None  # of the features [F] of all layers
    fc_norms: tuple[Norm, ...] = ()  # of each layer's features
    norm_output: bool = False  # its own hidden state is norm(hidden)

    def __post_init__(self) -> None:
        if len(self.layers) != 1 or self.layers[0].input_norm is None:
            raise ValueError(f"an EAGLE-3 head has one layer with an input norm, got {len(self.layers)} layers")
        check_norms_match("an EAGLE-3 head's input norms", self.token_norm, self.hidden_norm)
        if len({(norm.eps, *norm.options.values()) for norm in self.fc_norms}) > 1:
            raise ValueError("an EAGLE-3 head's norms of features must have one kind and one eps")

    @property
    def token_norm(self) -> Norm:
        """The norm of the token embeddings: the layer's input norm."""
        norm = self.layers[0].input_norm
        assert norm is not None
        return norm

    def weight_bytes(self, spec: TreeSpec) -> int:
        return super().weight_bytes(spec) + (nbytes_of(self.fc) if spec.drafts else 0)

    def inputs_of(self, ops: Operations, features: Tensor, rows: NewRows) -> Tensor | SplitSums:
        if self.norm_before_fc is not None:
            features = apply_norm(ops, self.norm_before_fc, features)
        if self.fc_norms:
            weights, norm = tuple(norm.weight for norm in self.fc_norms), self.fc_norms[0]
            apart = features.unflatten(-1, (len(weights), -1))
            features = whole_of(ops.rms_norm(apart, weights, norm.eps, **norm.options)).flatten(-2)
        found = project_split(ops, self.fc, features, rows.tune_for_rows)
        assert not isinstance(found, SharedSums), "fc is whole on each rank"
        return found

    def forward(
        self, ops: Operations, nodes: DraftNodes, caches: LayerCaches, rows: NewRows, level: int = 0
    ) -> tuple[Tensor, Tensor]:
        (layer,) = self.layers
        inputs, residual = self._layer_inputs(ops, nodes)
        x, update = decoder_layer(ops, layer, inputs, residual, caches.layer(0), rows)
        normed, hidden = add_norm(ops, self.norm, x, update, rows.in_draft_pass)
        return normed if self.norm_output else hidden, normed

    def remember(self, ops: Operations, nodes: DraftNodes, caches: LayerCaches, rows: NewRows) -> None:
        (layer,) = self.layers
        inputs, _ = self._layer_inputs(ops, nodes)
        layer.mixer.remember(ops, inputs, caches.layer(0), rows)

    def _layer_inputs(self, ops: Operations, nodes: DraftNodes) -> tuple[Tensor, Tensor]:
        """The layer's input [B, n, 2H] and residual stream [B, n, H]."""
        inputs, residual = nodes.normed(ops, self.embedding, self.token_norm, self.hidden_norm)
        return inputs, inputs[..., self.hidden_size :] if self.norm_before_residual else residual


@dataclass(frozen=True, kw_only=True)
class Eagle1Draft(EagleDraft):
    """EAGLE-1 and 2: x = fc(cat(embedding, features)); plain layers; logits = the target's head on the hidden state."""

    def weight_bytes(self, spec: TreeSpec) -> int:
        return super().weight_bytes(spec) + spec.beam_levels * nbytes_of(self.fc)

    def forward(
        self, ops: Operations, nodes: DraftNodes, caches: LayerCaches, rows: NewRows, level: int = 0
    ) -> tuple[Tensor, Tensor]:
        inputs, _ = ops.draft_inputs(*nodes, self.embedding)
        x = ops.add(project_split(ops, self.fc, inputs, rows.tune_for_rows))
        normed, x = add_norm(ops, self.layers[0].input_norm, x, None, rows.in_draft_pass)
        return self.run_layers(ops, normed, x, caches, rows)
