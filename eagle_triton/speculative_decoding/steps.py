"""What speculative decoding and n-gram drafts have in common: the growing text, and the record of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from eagle_triton.speculative_decoding import printing


class StepRecord(NamedTuple):
    """A step: drafts, and one forward of the target.

    h_norm, h_ema: EGAG's normalised entropy and its moving average, None without EGAG and where there was no room for
    a draft. gamma: how many drafts were asked for, None with EGAG where there was no room. proposed: how many there
    were. accepted: how many of them the target agreed with. emitted: how many tokens the text grew by.
    """

    h_norm: float | None
    h_ema: float | None
    gamma: int | None
    proposed: int
    accepted: int
    emitted: int


class Text:
    """Prompt and output of one generation, which ends with a token of `end_tokens` or when it is `total` long.

    debug: print what is appended, as `tokenizer`'s tokens. trace: gets the record of each step.
    """

    def __init__(
        self,
        prompt: list[int],
        total: int,
        end_tokens: frozenset[int],
        *,
        debug: bool = False,
        tokenizer: Any = None,
        trace: list[StepRecord] | None = None,
    ) -> None:
        self.tokens = list(prompt)
        self.total, self.end_tokens = total, end_tokens
        self.debug, self.tokenizer, self.trace = debug, tokenizer, trace
        self.ended = False
        self.proposed = self.accepted = 0
        self._prompt_length = len(prompt)

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return self.ended or len(self.tokens) >= self.total

    @property
    def room(self) -> int:
        """How many drafts a step may propose: one token fewer than may follow, as the target adds its own."""
        return self.total - len(self.tokens) - 1

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self._prompt_length :]

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts by proposed ones, 0.0 if there were none."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def add(self, token: int) -> None:
        """Append a token that the target gave without drafts."""
        if self.debug:
            printing.initial_step(token, self.tokenizer)
        self._extend([token])

    def _extend(self, tokens: Iterable[int]) -> int:
        """Append tokens up to one that ends the text, which is kept; returns how many."""
        count = 0
        for token in tokens:
            self.tokens.append(token)
            count += 1
            if token in self.end_tokens:
                self.ended = True
                if self.debug:
                    printing.end_token_found(len(self.tokens) - 1)
                break
        return count

    def take_step(
        self,
        drafts: list[int],
        accepted: int,
        own: int | None,
        gamma: int | None,
        entropies: tuple[float | None, float | None] = (None, None),
    ) -> StepRecord:
        """Append the accepted drafts and the target's own token, None if a draft ends the text; the record of it."""
        if self.debug:
            printing.speculative_step(drafts, accepted, own, self.tokenizer)
        kept = drafts[:accepted]
        grown = self._extend(kept if own is None else [*kept, own])
        self.proposed += len(drafts)
        self.accepted += accepted
        record = StepRecord(*entropies, gamma, len(drafts), accepted, grown)
        if self.trace is not None:
            self.trace.append(record)
        return record

    def ends_with(self, drafts: list[int]) -> bool:
        """Whether the last of these drafts, if there are any, ends the text."""
        return bool(drafts) and drafts[-1] in self.end_tokens
