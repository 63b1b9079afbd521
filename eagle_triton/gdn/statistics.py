"""The figures of speculation, also by the formulas that first described these workers."""

from __future__ import annotations

from typing import Any


class GDNStatistics:
    """Counts of steps over trees of at most `nodes` nodes, root included."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.steps = self.verified = self.accepted = self.proposed = 0
        self.rates: list[float] = []  # accepted / proposed of each step

    def count(self, accept_length: list[int], nodes: int) -> None:
        """Count a step over trees of `nodes` nodes. accept_length includes the target's own token, as in `verify`."""
        accepted, proposed = sum(accept_length) - len(accept_length), (nodes - 1) * len(accept_length)
        self.steps += 1
        self.verified += len(accept_length)
        self.accepted += accepted
        self.proposed += proposed
        self.rates.append(accepted / proposed if proposed else 0.0)

    def report(self) -> dict[str, Any]:
        """total_steps, total_accepted_tokens and total_draft_tokens (drafts), mean_acceptance_rate (their ratio),
        acceptance_rates (of each step), mean_accept_length and speedup_ratio (tokens per forward of the target: the
        speed-up if drafting cost nothing; not measured; 1.0 if no draft is ever right).

        legacy_acceptance_rate counts the target's own token as accepted; legacy_speedup_ratio is that times the nodes
        of a tree, at least 1: trees of 8 nodes give 14.29 % and 1.14 if no draft is ever right.
        """
        emitted = self.accepted + self.verified
        tau = emitted / self.verified if self.verified else 1.0
        legacy_rate = emitted / self.proposed if self.proposed else 0.0
        return {
            "total_steps": self.steps,
            "total_accepted_tokens": self.accepted,
            "total_draft_tokens": self.proposed,
            "mean_acceptance_rate": self.accepted / self.proposed if self.proposed else 0.0,
            "acceptance_rates": list(self.rates),
            "mean_accept_length": tau,
            "speedup_ratio": tau,
            "legacy_acceptance_rate": legacy_rate,
            "legacy_speedup_ratio": max(legacy_rate * self.nodes, 1.0),
        }
