"""The pieces of prompts that one forward reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PromptSpan(NamedTuple):
    """Tokens start .. end - 1 of one prompt, on the host."""

    start: int
    end: int


class PromptChunks(NamedTuple):
    """P pieces of n tokens, each of one sequence; a sequence may have several.

    A prompt's last piece may read past the prompt's end. Nothing attends to those rows, and they are overwritten. An
    empty piece starts where the cache ends, so its rows are not written.
    """

    slots: Tensor | None  # [P] int32; None: one piece for each slot
    starts: Tensor  # [P] int32: the pieces' first positions in their sequences
    seen: Tensor  # [P] int32: rows before the pieces: `starts`, or 0 for an empty piece
    rows: int  # n
    span: PromptSpan | None = None  # the pieces are this part of one prompt, in order, then empty; None: any pieces

    def counts(self, lengths: Tensor) -> Tensor:
        """How many prompt tokens are in each piece, [P] int32, for prompts of all slots of lengths [B] int32."""
        lengths = lengths if self.slots is None else lengths[self.slots.long()]
        return (lengths - self.starts).clamp(0, self.rows)

    def columns(self, lengths: Tensor, shift: int = 0) -> Tensor:
        """The positions of the pieces' tokens in their sequences plus `shift`, [P, n] int64; see `tokens`."""
        lengths = lengths if self.slots is None else lengths[self.slots.long()]
        places = torch.arange(shift, shift + self.rows, dtype=torch.int32, device=self.starts.device)
        return (self.starts[:, None] + places).minimum(lengths[:, None] - 1).clamp(min=0).long()

    def tokens(self, tokens: Tensor, lengths: Tensor, shift: int = 0) -> Tensor:
        """The pieces' tokens, or those `shift` positions later, [P, n] int64, from all slots' tokens [B, C] int64.

        lengths [B] int32: of the prompts. Past a prompt's end its last token is repeated.
        """
        columns = self.columns(lengths, shift)
        return tokens.gather(1, columns) if self.slots is None else tokens[self.slots[:, None].long(), columns]
