"""The growing text and the record of its steps, for speculative decoding and n-gram drafts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from eagle_triton.speculative_decoding import printing


class StepRecord(NamedTuple):
    """A step: some drafts, and one forward of the target.

    h_norm, h_ema: EGAG's normalised entropy and its moving average, None without EGAG or if there was no room for a
    draft. gamma: how many drafts were wanted, None with EGAG if there was no room. proposed: how many there were.
    accepted: how many the target accepted. emitted: how many tokens the text grew by.
    """

    h_norm: float | None
    h_ema: float | None
    gamma: int | None
    proposed: int
    accepted: int
    emitted: int


class Text:
    """Prompt and output of one generation. It ends with a token of `end_tokens`, or with `total` tokens.

    debug: print appended tokens, decoded by `tokenizer`. trace: a list to add each step's record to.
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
        """Whether the text has ended."""
        return self.ended or len(self.tokens) >= self.total

    @property
    def room(self) -> int:
        """How many drafts a step may propose: one token less than there is room for, as the target adds its own."""
        return self.total - len(self.tokens) - 1

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self._prompt_length :]

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed drafts, 0.0 if none were proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def add(self, token: int) -> None:
        """Append a token that the target gave without drafts."""
        if self.debug:
            printing.initial_step(token, self.tokenizer)
        self._extend([token])

    def _extend(self, tokens: Iterable[int]) -> int:
        """Append tokens up to one that ends the text, which is kept. Returns how many."""
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
        """Append the accepted drafts and the target's own token (None if a draft ends the text). Returns the record."""
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
        """Whether the last of these drafts ends the text; False if there are none."""
        return bool(drafts) and drafts[-1] in self.end_tokens
