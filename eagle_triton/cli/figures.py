"""The figures of one answer in a line, and of all answers of each method in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eagle_triton.text_table import table_of

if TYPE_CHECKING:  # it imports torch
    from eagle_triton.cli.settings import Settings
    from eagle_triton.comparison.answer import Answer


def figures(answer: Answer, target: Answer | None, settings: Settings) -> str:
    """Tokens, time, tokens per verification and acceptance; compared with the target's answer if given."""
    parts = [
        f"{len(answer.tokens)} tokens in {answer.seconds:.2f} s",
        f"first after {answer.first_token_seconds * 1e3:.0f} ms",
        f"{answer.tokens_per_second:.1f} tokens/s",
        f"tau {answer.tau:.2f}",
    ]
    if answer.proposed:
        parts.append(f"{answer.accepted} of {answer.proposed} drafts accepted, {answer.acceptance_rate:.1%}")
    if answer.finished == "length" and len(answer.tokens) < settings.length:
        parts.append(f"no position is left for {settings.length}")
    if answer.finished == "interrupted":
        parts.append("interrupted")
    elif target is not None and target is not answer:
        parts += _beside(answer, target, settings)
    return ", ".join(parts)


def _beside(answer: Answer, target: Answer, settings: Settings) -> list[str]:
    """The speed relative to the target's, and with greedy tokens whether they are the same."""
    from eagle_triton.comparison.figures import first_difference  # here: it imports torch

    parts = []
    if target.tokens_per_second:
        parts.append(f"{answer.tokens_per_second / target.tokens_per_second:.2f} x target")
    if settings.greedy and answer.method != "drafter":
        place = first_difference(answer.tokens, target.tokens)
        if place is None and len(answer.tokens) != len(target.tokens):
            place = min(len(answer.tokens), len(target.tokens))
        parts.append("same tokens" if place is None else f"differs from target at token {place + 1}")
    return parts


def totals_table(answered: Mapping[str, Sequence[Answer]]) -> str:
    """A line for each method, over all its answers."""
    from eagle_triton.comparison.figures import Totals  # here: it imports torch

    columns = "=method, answers, tokens, seconds, tokens/s=tokens_per_second, tau, accepted, of=proposed"
    rows = []
    for method, answers in answered.items():
        totals = Totals.of(answers)
        rates = {"tokens_per_second": totals.tokens_per_second, "tau": totals.tau}
        rows.append({"method": method, **vars(totals), **rates})
    return table_of(columns, rows)
