"""Statistics of speculative decoding.

accepted: drafts, without root and bonus token. proposed: N - 1 for a tree of N nodes. emitted = accepted + 1. Tokens
that a stop rule cuts off count as accepted, but not as generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


def compute_tree_statistics(
    accept_lengths: Tensor | Sequence[int], num_draft_tokens: int, num_steps: int
) -> dict[str, float | int]:
    """Figures of one verification of a batch.

    accept_lengths [bs]: drafts accepted, at most num_steps: D; num_draft_tokens: N, root included. Keys:
    mean_accept_length, max_accept_length, min_accept_length (drafts), acceptance_rate, total_proposed, total_accepted,
    batch_size; zeros for an empty batch. Raises ValueError for lengths outside 0..min(D, N - 1).
    """
    lengths = [int(length) for length in accept_lengths]
    most = min(num_steps, num_draft_tokens - 1)
    if any(not 0 <= length <= most for length in lengths):
        raise ValueError(f"compute_tree_statistics: accepted lengths in 0..{most} expected, got {lengths}")
    accepted, proposed = sum(lengths), (num_draft_tokens - 1) * len(lengths)
    return {
        "mean_accept_length": accepted / len(lengths) if lengths else 0.0,
        "max_accept_length": max(lengths, default=0),
        "min_accept_length": min(lengths, default=0),
        "acceptance_rate": calculate_acceptance_rate(lengths, num_draft_tokens - 1),
        "total_proposed": proposed,
        "total_accepted": accepted,
        "batch_size": len(lengths),
    }


def calculate_acceptance_rate(accept_lengths: Tensor | Sequence[int], num_draft_tokens: int) -> float:
    """Accepted / proposed drafts, 0.0 if none were proposed. num_draft_tokens: the drafts of one request, N - 1."""
    proposed = num_draft_tokens * len(accept_lengths)
    return float(sum(int(length) for length in accept_lengths)) / proposed if proposed else 0.0


def expected_emitted(alpha: float, drafts: int) -> float:
    """Tokens per step of a chain that accepts each draft with probability alpha: (1 - a^(n+1)) / (1 - a)."""
    return drafts + 1.0 if alpha == 1 else (1 - alpha ** (drafts + 1)) / (1 - alpha)


def estimated_speedup(tau: float, steps: int, cost: float) -> float:
    """The speed-up that acceptance allows: tau / (1 + cost * steps), cost = time of a draft pass / a target forward."""
    return tau / (1 + cost * steps)


class NotMeasured(float):
    """A figure that was not measured: NaN in arithmetic, false, equal to None. Any number format gives "n/a ", so a
    unit may follow."""

    def __new__(cls) -> NotMeasured:
        return super().__new__(cls, "nan")

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NotMeasured)

    def __hash__(self) -> int:
        return hash(None)

    def __format__(self, spec: str) -> str:
        return "n/a " if spec else "n/a"

    def __repr__(self) -> str:
        return "n/a"

    __str__ = __repr__


@dataclass(frozen=True)
class RequestMetrics:
    """The draft counts of a request, with the names of serving engines.

    avg_accept_len: tokens per verification, with the target's own, as `tau`. The lists have an entry for each position
    in a draft. accepted_tokens_per_head: how many steps accepted a token there (never more than before it).
    accept_ratio_per_head: the same, as a share of the steps that accepted all tokens before and verified one there; 0.0
    if there were none.
    """

    accepted_tokens: int
    rejected_tokens: int
    accept_ratio: float
    avg_accept_len: float
    accepted_tokens_per_head: list[int]
    accept_ratio_per_head: list[float]


class Statistics(Mapping[str, Any]):
    """Counts of one or several requests, by attribute or by documented key.

    A forward over a batch counts once for each of its sequences. Keys: acceptance_rate = mean_acceptance_rate
    (accepted / proposed, 0.0 if nothing was proposed), speedup = speedup_ratio, mean_accept_length (tau, emitted per
    verification), total_tokens_generated, total_draft_tokens, total_accepted_tokens, total_target_forward,
    total_draft_forward. `speedup` is target-only time / time with drafting, for the same requests. If not measured, the
    attribute is None, and the key gives a `NotMeasured`, which prints as "n/a". Further attributes: steps, plain_steps
    (without drafts), prefills, prompt_tokens, found_tokens (of the prompts, in kept pages), seconds, histogram {drafts
    accepted: steps that drafted}, positions, lossless (False if the verification of a request changed the target's
    output or its distribution).
    """

    def __init__(self) -> None:
        self.steps = self.plain_steps = self.prefills = self.tokens = 0
        self.prompt_tokens = self.found_tokens = 0
        self.accepted = self.proposed = self.draft_forwards = 0
        self.histogram: Counter[int] = Counter()
        self.reached: Counter[int] = Counter()  # by depth: steps that verified a draft there, all before accepted
        self.seconds: float | None = None  # wall time with drafting
        self.plain_seconds: float | None = None  # target-only, for the same requests
        self.lossless = True

    def add_prefill(self, tokens: int = 0, found: int = 0) -> None:
        """Count the prompt of one request. found: how many of its tokens were in kept pages of earlier requests."""
        self.prefills += 1
        self.prompt_tokens += tokens
        self.found_tokens += found

    def add_step(self, accepted: int, proposed: int, depth: int, tokens: int, passes: int | None = None) -> None:
        """Count a verification. accepted, proposed: drafts; depth: the tree's; tokens: how many were kept; passes: the
        draft's, None: one for each level."""
        self.steps += 1
        self.tokens += tokens
        if not proposed:
            self.plain_steps += 1
            self.draft_forwards += passes or 0  # the draft found nothing, or had no room
            return
        self.accepted += accepted
        self.proposed += proposed
        self.draft_forwards += depth if passes is None else passes
        self.histogram[accepted] += 1
        for position in range(1, min(accepted + 1, depth) + 1):
            self.reached[position] += 1

    def __iadd__(self, other: Statistics) -> Self:
        names = ("steps", "plain_steps", "prefills", "tokens", "accepted", "proposed", "draft_forwards")
        for name in (*names, "prompt_tokens", "found_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.histogram += other.histogram
        self.reached += other.reached
        self.lossless = self.lossless and other.lossless
        return self

    @property
    def emitted(self) -> int:
        """Tokens that verification gave, including those after a stop."""
        return self.accepted + self.steps

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tau(self) -> float:
        """Emitted tokens per verification, at least 1; 0.0 before the first."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def tokens_per_target_forward(self) -> float:
        """Emitted tokens per target forward, prefills included."""
        forwards = self.steps + self.prefills
        return self.emitted / forwards if forwards else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    @property
    def speedup(self) -> float | None:
        """Target-only time / time with drafting, None unless both were measured."""
        return self.plain_seconds / self.seconds if self.plain_seconds and self.seconds else None

    @property
    def legacy_acceptance_rate(self) -> float:
        """The acceptance rate of older documents, which count the target's own token of a step as an accepted draft."""
        return (self.accepted + self.steps - self.plain_steps) / self.proposed if self.proposed else 0.0

    @property
    def legacy_speedup_ratio(self) -> float:
        """`legacy_acceptance_rate` times the nodes of a tree, at least 1. It is not measured."""
        drafting = self.steps - self.plain_steps
        return max(self.legacy_acceptance_rate * (self.proposed / drafting + 1), 1.0) if drafting else 1.0

    @property
    def positions(self) -> list[dict[str, float | int]]:
        """For each depth from 1: how many steps verified a draft there, how many accepted it, and the share."""
        table = []
        for position in range(1, max(self.reached, default=0) + 1):
            tried, accepted = self.reached[position], self._accepted_at(position)
            table.append(dict(position=position, tried=tried, accepted=accepted, rate=accepted / tried))
        return table

    def request_metrics(self, num_speculative_tokens: int) -> RequestMetrics:
        """The counts in the form for chains of at most `num_speculative_tokens` drafts.

        Raises ValueError if drafts went deeper than that.
        """
        deepest = max(self.reached, default=0)
        if not deepest <= num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens must be at least {deepest}, the depth of the drafts, got "
                f"{num_speculative_tokens}"
            )
        heads = range(1, num_speculative_tokens + 1)
        accepted, tried = [self._accepted_at(head) for head in heads], [self.reached[head] for head in heads]
        return RequestMetrics(
            accepted_tokens=self.accepted,
            rejected_tokens=self.proposed - self.accepted,
            accept_ratio=self.acceptance_rate,
            avg_accept_len=self.tau,
            accepted_tokens_per_head=accepted,
            accept_ratio_per_head=[a / t if t else 0.0 for a, t in zip(accepted, tried, strict=True)],
        )

    def _accepted_at(self, position: int) -> int:
        """Steps that accepted a draft of this depth."""
        return sum(count for length, count in self.histogram.items() if length >= position)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; figures that were not measured are None."""
        values = {key: None if isinstance(value, NotMeasured) else value for key, value in self.items()}
        names = ["steps", "plain_steps", "prefills", "tau", "tokens_per_target_forward", "seconds", "plain_seconds"]
        names += ["legacy_acceptance_rate", "legacy_speedup_ratio", "lossless"]
        values |= {name: getattr(self, name) for name in (*names, "tokens_per_second", "positions")}
        return values | {"histogram": {str(length): count for length, count in sorted(self.histogram.items())}}

    def plot(self, path: str | Path) -> None:
        """Plot the histogram of accepted lengths and the acceptance by position to an image file."""
        from matplotlib.figure import Figure  # only needed for a picture

        figure = Figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        lengths = range(max(self.histogram, default=0) + 1)
        left.bar(lengths, [self.histogram[length] for length in lengths])
        left.set(xlabel="drafts accepted", ylabel="steps", title=f"tau {self.tau:.2f}, {self.steps} steps")
        table = self.positions
        right.bar([row["position"] for row in table], [row["rate"] for row in table])
        right.set(
            xlabel="position", ylabel="accepted", ylim=(0, 1), title=f"acceptance rate {self.acceptance_rate:.1%}"
        )
        figure.savefig(path, dpi=150)

    def __getitem__(self, key: str) -> Any:
        value = getattr(self, _KEYS[key])
        return NotMeasured() if value is None else value

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)

    def __str__(self) -> str:
        parts = [
            f"{self.tokens} tokens in {self.steps} steps",
            f"tau {self.tau:.2f}",
            f"acceptance {self.acceptance_rate:.1%}",
        ]
        if self.plain_steps:
            parts.append(f"{self.plain_steps} steps without drafts")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.speedup:
            parts.append(f"speedup {self.speedup:.2f} x")
        return ", ".join(parts)


_KEYS = {
    "acceptance_rate": "acceptance_rate",
    "mean_acceptance_rate": "acceptance_rate",
    "speedup": "speedup",
    "speedup_ratio": "speedup",
    "mean_accept_length": "tau",
    "total_tokens_generated": "tokens",
    "total_draft_tokens": "proposed",
    "total_accepted_tokens": "accepted",
    "total_target_forward": "steps",
    "total_draft_forward": "draft_forwards",
}
