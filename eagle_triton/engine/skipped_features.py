"""Plain decoding with a draft that catches up later.

While nothing is drafted, the draft does not run: a plain step only keeps its features. Before these are overwritten, or
when drafting resumes, the draft takes all of them in at once. Its state is then as if it had always run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.operations import Operations

if TYPE_CHECKING:
    from eagle_triton.engine.drafts.draft import Draft
    from eagle_triton.engine.state import Sequences

ROWS = 64  # features of this many plain steps are kept


class SkippedFeatures(NamedTuple):
    """Features of committed tokens that the draft has not taken in yet."""

    features: Tensor  # [B, R, F]; row p % R holds position p
    draft_lengths: Tensor  # [B] int32: committed tokens that the draft knows

    def keep(self, lengths: Tensor, features: Tensor) -> None:
        """Keep features [B, n, F], n <= R, of the n positions from `lengths` on."""
        self.features.scatter_(1, self._places(lengths, features.shape[1]), features)

    def since(self, first: Tensor, count: int, end: Tensor) -> Tensor:
        """The features of `count` positions from `first` on, [B, count, F]. They are zero from position `end` [B] on,
        where rows may be another request's, or NaN."""
        known = first[:, None] + torch.arange(count, device=first.device) < end[:, None]
        return torch.where(known[:, :, None], self.features.gather(1, self._places(first, count)), 0)

    def _places(self, first: Tensor, count: int) -> Tensor:
        """An index [B, count, F] into dimension 1 of `features`, for `count` positions from `first` on."""
        positions = first[:, None] + torch.arange(count, device=first.device)
        rows = positions.long() % self.features.shape[1]
        return rows[:, :, None].expand(-1, -1, self.features.shape[2])


def start_skipping(view: ModelView, sequences: Sequences) -> None:
    """Let plain steps keep their features from now on. The draft knows all committed tokens now."""
    if sequences.skipped is None:
        whole = sequences.whole
        features = torch.zeros(whole.slots, ROWS, view.feature_size, dtype=view.dtype, device=view.device)
        sequences.give(skipped=SkippedFeatures(features, torch.zeros_like(whole.lengths)))
    assert sequences.skipped is not None
    sequences.skipped.draft_lengths.copy_(sequences.lengths)


def catch_up(ops: Operations, draft: Draft, sequences: Sequences, steps: int) -> None:
    """Let the draft take in the positions that it does not know: at most `steps` <= ROWS of each sequence. The draft
    writes this many rows for every sequence, also past the committed tokens."""
    assert sequences.skipped is not None, "plain steps have kept nothing"
    known = sequences.skipped.draft_lengths
    draft.catch_up(ops, sequences, known, sequences.skipped.since(known, steps, sequences.lengths))
    known.copy_(sequences.lengths)
