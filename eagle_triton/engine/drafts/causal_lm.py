"""A causal language model with the target's vocabulary as the draft. Leviathan et al., arXiv 2211.17192."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from eagle_triton.engine.drafts.beams import BeamDraft, DraftNodes
from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import AcceptedPath, NewRows
from eagle_triton.engine.model.modules import LayerInputs, Norm, embed_norm
from eagle_triton.engine.model.one_launch import OneLaunch, reason_against
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import DecodeState


@dataclass(frozen=True, kw_only=True)
class CausalLMDraft(BeamDraft):
    """A language model. It reads only tokens, and its cache has a row for every token."""

    first_token: ClassVar[int] = 0

    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    layer_inputs: LayerInputs | None = None
    """See ModelView."""

    padding: int = 0
    """How many tokens at the end of the target's vocabulary it lacks. It reads them as its last token, and never drafts
    them."""

    @cached_property
    def one_launch(self) -> OneLaunch | None:
        """Its layers over one row in one launch; None if that is not faster or not possible."""
        return None if reason_against(self) else OneLaunch(self)

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=len(self.embedding) - 1) if self.padding else tokens

    @property
    def _extends_by_one_launch(self) -> bool:
        """Whether `_extend_by_one_launch` beats one pass over all rows of its chain. At Qwen3-0.6B's shape six rows
        take 1.7 times as long as one row in one launch. At larger shapes they take hardly longer, and one launch may
        not be enough: the last draft needs a second one.
        """
        return self.hidden_size <= 1024

    def extend(self, ops: Operations, state: DecodeState, accepted: AcceptedPath, features: Tensor) -> None:
        if not (accepted.of_chain and self._extend_by_one_launch(ops, state, accepted)):
            super().extend(ops, state, accepted, features)

    def _extend_by_one_launch(self, ops: Operations, state: DecodeState, accepted: AcceptedPath) -> bool:
        """Take in the tokens that its cache lacks: the root, and the last draft if all were accepted. The passes of the
        draft have left the rows of the others in the cache. Returns whether it did."""
        own_chain = state.masks is None and self.egag is None  # grammars force tokens, EGAG ends chains
        if not (own_chain and self._extends_by_one_launch and ops.one_launch) or state.batch > 1:
            return False
        if (launched := self.one_launch) is None:
            return False
        mine, depth = state.sequences.draft_tensors, state.spec.depth
        last = self._known(ops.sequence_rows(state.tokens, accepted.before, 1, depth))
        root = self._known(ops.sequence_rows(state.tokens, state.lengths, 1))
        all_accepted = accepted.accepted, depth
        if launched(ops, last, mine.caches, accepted.before, depth, at_least=all_accepted) is None:
            return False
        outputs = launched(ops, root, mine.caches, state.lengths)
        if outputs is None:
            return False
        for kept, output in zip((mine.hidden, mine.normed), outputs, strict=True):
            kept.copy_(output)
        return True

    def forward(
        self, ops: Operations, nodes: DraftNodes, caches: LayerCaches, rows: NewRows, level: int = 0
    ) -> tuple[Tensor, Tensor]:
        tokens = self._known(nodes.tokens)
        in_chain = rows.in_draft_pass and tokens.shape == (1, 1) and rows.skip == level - 1
        if in_chain and ops.one_launch and (launched := self.one_launch) is not None:
            outputs = launched(ops, tokens, caches, rows.lengths, rows.skip)
            if outputs is not None:
                return outputs
        norm = self.layers[0].input_norm
        own: dict[str, Any] = dict(scale=self.embedding_scale, own_norm=self.embedding_norm)
        normed, x = embed_norm(ops, norm, self.embedding, tokens, rows.in_draft_pass, **own)
        layer_inputs = None if self.layer_inputs is None else self.layer_inputs.of(ops, tokens, x)
        return self.run_layers(ops, normed, x, caches, rows, layer_inputs)
