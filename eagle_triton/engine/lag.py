"""Plain decoding with a draft that follows later.

While nothing is drafted, the draft need not run: a plain step only keeps its features. Before they are overwritten,
or when drafting resumes, the draft takes them all in at once, and stands where it would have stood.
"""

from __future__ import annotations

import torch

from eagle_triton.adapters.view import DraftView, ModelView
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.state import Lag, Sequences
from eagle_triton.engine.step import draft_extend

ROWS = 64  # plain steps whose features are kept


def begin(view: ModelView, sequences: Sequences) -> None:
    """The draft knows all committed tokens now; from here on plain steps keep their features."""
    if sequences.lag is None:
        shape = (sequences.slots, ROWS, view.feature_size)
        features = torch.zeros(shape, dtype=view.dtype, device=view.device)
        sequences.lag = Lag(features, torch.zeros_like(sequences.lengths))
    sequences.lag.known.copy_(sequences.lengths)


def catch_up(ops: Operations, draft: DraftView, sequences: Sequences, steps: int) -> None:
    """Let the draft take in what it does not know, at most `steps` <= ROWS positions of each sequence."""
    lag, known = sequences.lag, sequences.lag.known
    features = lag.features.gather(1, lag.places(known[:, None] + torch.arange(steps, device=known.device)))
    tokens = ops.sequence_rows(sequences.tokens, known + 1, steps)
    outputs = draft_extend(ops, draft, features, tokens, sequences.draft_cache, draft.rows(known))
    last = (sequences.lengths - known - 1)[:, None, None].long()  # -1: it knew all
    for kept, new in zip((sequences.hidden, sequences.normed), outputs, strict=True):
        root = new.gather(1, last.clamp(min=0).expand_as(kept))
        kept.copy_(torch.where(last >= 0, root, kept))
    known.copy_(sequences.lengths)
