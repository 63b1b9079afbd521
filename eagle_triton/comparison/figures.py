"""Figures over several answers, and the places where answers differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle_triton.comparison.answer import Answer


@dataclass
class Totals:
    """Sums over answers. decode_seconds: without the time to their first tokens. steps: verifications."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    drafter_forwards: int = 0

    @staticmethod
    def of(answers: Iterable[Answer]) -> Totals:
        found = Totals()
        for answer in answers:
            found.answers += 1
            found.tokens += len(answer.tokens)
            found.seconds += answer.seconds
            found.decode_seconds += answer.seconds - answer.first_token_seconds
            found.steps += answer.verifications
            found.proposed += answer.proposed
            found.accepted += answer.accepted
            found.drafter_forwards += answer.drafter_forwards
        return found

    @property
    def tau(self) -> float | None:
        """Tokens per verification, None if there was none."""
        return (self.accepted + self.steps) / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second, prompts counted; None if there were none."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def ms_per_step(self) -> float | None:
        """Milliseconds of a verification and its drafts, None if there was none."""
        return self.decode_seconds / self.steps * 1e3 if self.steps else None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first token that differs; None if the shorter sequence has none."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), None)


def differing(answers: Sequence[Answer], plain: Sequence[Answer]) -> list[int]:
    """The places of answers with other tokens than plain decoding's."""
    pairs = zip(answers, plain, strict=True)
    return [place for place, (mine, other) in enumerate(pairs) if mine.tokens != other.tokens]
