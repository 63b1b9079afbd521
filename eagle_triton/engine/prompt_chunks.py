"""Pieces of prompts, as a forward reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PromptSpan(NamedTuple):
    """Tokens start .. end of one prompt, known to the host."""

    start: int
    end: int


class PromptChunks(NamedTuple):
    """P pieces of n tokens, each of one sequence, several perhaps of the same.

    With its last piece rows behind the end of a prompt are read, that nobody sees and others overwrite. A piece that is
    nobody's starts where the cache ends, where nothing is kept.
    """

    slots: Tensor | None  # [P] int32; None: one piece for each slot
    starts: Tensor  # [P] int32: where they stand in their sequences
    seen: Tensor  # [P] int32: rows before them, as many; 0 where a piece is nobody's
    rows: int  # n
    stretch: PromptSpan | None = None  # they are of one prompt, in turn, and these; behind it nobody's; None: any

    def counts(self, lengths: Tensor) -> Tensor:
        """How many tokens of prompts of lengths [B] int32, of all slots, are in each: [P] int32."""
        lengths = lengths if self.slots is None else lengths[self.slots.long()]
        return (lengths - self.starts).clamp(0, self.rows)

    def columns(self, lengths: Tensor, behind: int = 0) -> Tensor:
        """The places in their sequences of their tokens, or so many behind them: [P, n] int64; see `tokens`."""
        lengths = lengths if self.slots is None else lengths[self.slots.long()]
        places = torch.arange(behind, behind + self.rows, dtype=torch.int32, device=self.starts.device)
        return (self.starts[:, None] + places).minimum(lengths[:, None] - 1).clamp(min=0).long()

    def tokens(self, tokens: Tensor, lengths: Tensor, behind: int = 0) -> Tensor:
        """Those of the pieces, or so many places behind them, [P, n] int64, of all slots' tokens [B, C] int64.

        lengths [B] int32: of the prompts, whose last tokens stand behind their ends too.
        """
        columns = self.columns(lengths, behind)
        return tokens.gather(1, columns) if self.slots is None else tokens[self.slots[:, None].long(), columns]
