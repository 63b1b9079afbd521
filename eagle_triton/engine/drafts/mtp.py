"""Multi-token prediction: layers that are published with a model and draft for it (arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eagle_triton.engine.drafts.beams import BeamDraft, DraftNodes, check_norms_match
from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import NewRows
from eagle_triton.engine.model.model_view import Layer, decoder_layer
from eagle_triton.engine.model.modules import Norm, Projection, add_norm, add_norm_for, nbytes_of, project_split
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.tree_spec import TreeSpec


@dataclass(frozen=True)
class MTPUnit:
    """y = norm(layer(fc(cat(token_norm(embedding), hidden_norm(features)))))."""

    token_norm: Norm
    hidden_norm: Norm
    fc: Projection  # [H, 2H]
    layer: Layer
    norm: Norm

    def __post_init__(self) -> None:
        check_norms_match("the input norms of an MTP layer", self.token_norm, self.hidden_norm)


@dataclass(frozen=True, kw_only=True)
class MTPDraft(BeamDraft):
    """Drafts with n units: pass i uses unit i mod n. The vocabulary projection reads a unit's normed output, which is
    also the feature of the nodes below. The first pass reads the target's hidden states after its final norm.

    Each unit keeps keys and values of all rows, so all units run in every pass.
    """

    units: tuple[MTPUnit, ...]

    first_token: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not self.units or self.layers != tuple(unit.layer for unit in self.units):
            raise ValueError(f"expected one unit of layers, got {self.units}")

    def weight_bytes(self, spec: TreeSpec) -> int:
        return spec.beam_levels * nbytes_of(self.head, self.units)

    def forward(
        self, ops: Operations, nodes: DraftNodes, caches: LayerCaches, rows: NewRows, level: int = 0
    ) -> tuple[Tensor, Tensor]:
        chosen = level % len(self.units)
        for other in range(len(self.units)):  # only for their keys and values
            if other != chosen:
                self._run_unit(ops, other, nodes, caches, rows)
        return self._run_unit(ops, chosen, nodes, caches, rows)

    def _run_unit(
        self, ops: Operations, index: int, nodes: DraftNodes, caches: LayerCaches, rows: NewRows
    ) -> tuple[Tensor, Tensor]:
        unit = self.units[index]
        inputs, _ = nodes.normed(ops, self.embedding, unit.token_norm, unit.hidden_norm)
        x = ops.add(project_split(ops, unit.fc, inputs, rows.tune_for_rows))
        normed, x = add_norm_for(
            ops, unit.layer.input_norm, x, None, rows.in_draft_pass, row_format=unit.layer.input_format
        )
        x, update = decoder_layer(ops, unit.layer, normed, x, caches.layer(index), rows)
        normed, _ = add_norm(ops, unit.norm, x, update, rows.in_draft_pass)
        return normed, normed
