"""Which tree to draft next: the one with the most expected tokens per second. Plain decoding is one of the choices.

Costs are measured while steps run (costs.py), acceptance for the tree in use. For a tree that was not tried acceptance
is guessed: a level of w nodes has no accepted draft with probability (1 - r)^(w^0.3), so 0.6 for a chain becomes about
0.81 for seven or eight nodes a level. Trying the tree corrects the guess. The acceptance of one source of drafts (a
model, earlier text, both) says little about another, so each is tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.inference.costs import StepCosts

PRIOR = 0.6  # acceptance of a chain's drafts before anything was observed
REPEAT_PRIOR = 0.3  # the same for drafts from repetition alone: often there are none
WIDTH = 0.3
LOOK = 16  # steps between decisions, and before a new tree's first one
PROBE = 8  # steps of drafting after a pause
PAUSE, LONGEST_PAUSE = 32, 2048  # plain steps before the next probe: doubled when a probe fails
GAIN = 1.03  # another tree must promise this many times the current rate
CHECK = 8  # plain steps to measure their cost, if drafting promises less than CLEAR times their rate
CLEAR = 2.0
ENOUGH = 4  # steps of a tree after which its figures replace a guess
MEMORY = 64  # steps over which acceptance is remembered
FORGET = 512  # steps after which unused trees are guessed anew
RETRY = 8 * FORGET  # steps after which other sources of drafts are tried anew


@dataclass
class Acceptance:
    """Decaying counts of one tree: steps, tokens emitted, and steps that reached and accepted each depth."""

    steps: float = 0.0
    emitted: float = 0.0
    reached: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    accepted: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, lengths: Sequence[int], depth: int) -> None:
        """Count one step; lengths: the drafts that each sequence accepted."""
        self.fade(1 - 1 / MEMORY)
        share = 1 / len(lengths)
        for length in lengths:
            self.steps += share
            self.emitted += share * (length + 1)
            for level in range(depth):
                self.reached[level] += share * (length >= level)
                self.accepted[level] += share * (length > level)

    def rate(self, level: int) -> float | None:
        """Accepted / reached at a depth from 0, None if too little was seen."""
        return None if self.reached[level] < 0.5 else self.accepted[level] / self.reached[level]

    def fade(self, factor: float) -> None:
        """Give earlier observations less weight."""
        self.steps, self.emitted = self.steps * factor, self.emitted * factor
        for counts in (self.reached, self.accepted):
            for level in counts:
                counts[level] *= factor


class TreePolicy:
    """Chooses among `trees`, and with `fallback` plain decoding. Call `observe` after every step, then `choose`."""

    def __init__(
        self, trees: Sequence[TreeSpec], costs: StepCosts, fallback: bool = True, fixed_tree: TreeSpec | None = None
    ) -> None:
        """fixed_tree: for requests that need the same tokens again, if these depend on the tree; None: the first
        choice."""
        self.trees, self.costs, self.fallback = tuple(trees), costs, fallback
        self.events: list[str] = []  # the last decisions and their reasons
        self.stops = self.probes = self.plain_steps = 0
        self._seen: dict[TreeSpec, Acceptance] = {}
        self._steps = self._since = 0  # in total; since the last change
        self._pause = PAUSE
        self._probing = self._checking = False  # drafting after a pause; plain steps to learn their time
        both = [tree for tree in self.trees if _sources(tree) == (True, True)]
        self.spec = max(both or self.trees, key=self.rate)
        self.fixed_tree = fixed_tree or self.spec

    def observe(self, accepted: Sequence[int], ms: float | None, slots: int | None = None) -> None:
        """Take in a step with the chosen tree. accepted: drafts, by running sequence. ms: its time, None if it did more
        than decode. slots: how many sequences it covered; None: as given to `resize` last."""
        if not accepted:
            return
        self._steps += 1
        self._since += 1
        if ms is not None:
            self.costs.add(self.spec, ms, slots)
        if self.spec.drafts:
            self._seen.setdefault(self.spec, Acceptance()).add(accepted, self.spec.depth)
        else:
            self.plain_steps += 1

    @property
    def choices(self) -> tuple[TreeSpec, ...]:
        """The trees, and with `fallback` plain decoding."""
        return (*self.trees, PLAIN) if self.fallback else self.trees

    def resize(self, slots: int) -> None:
        """Choose again for steps over `slots` sequences, because another tree may be faster now."""
        if slots == self.costs.slots:
            return
        self.costs.slots = slots
        best = max(self.choices, key=self.rate)
        if best != self.spec and self.rate(best) > GAIN * self.rate(self.spec):
            self._pause, self._probing, self._checking = PAUSE, bool(best.drafts and not self.spec.drafts), False
            self._change(best)

    def choose(self) -> TreeSpec:
        """The tree for the next step."""
        if len(self.choices) == 1:
            return self.spec
        if not self.spec.drafts:
            if self._since >= self._pause:
                self._probe()
        elif self._since and self._since % (PROBE if self._probing else LOOK) == 0:
            self._decide()
        return self.spec

    def rate(self, spec: TreeSpec) -> float:
        """Expected tokens per millisecond of one sequence."""
        return self.emitted(spec) / self.costs.ms(spec)

    def emitted(self, spec: TreeSpec) -> float:
        """Expected tokens per step: observed, or guessed from the most observed tree."""
        if not spec.drafts:
            return 1.0
        own = self._seen.get(spec)
        if own is not None and own.steps >= ENOUGH:
            return own.emitted / own.steps
        total, reach = 1.0, 1.0
        for level in range(spec.depth):
            reach *= self._guess(spec, level)
            total += reach
        return total

    def report(self) -> list[str]:
        """The decisions, in sentences."""
        now = (
            "plain decoding"
            if not self.spec.drafts
            else f"trees of {self.spec.nodes} nodes, up to {self.spec.depth} deep"
        )
        lines = [f"now: {now}; step time {self.costs.origin(self.spec)}"]
        if self.spec.drafts:
            gain = self.rate(self.spec) / self.rate(PLAIN)
            lines.append(f"estimated speedup {gain:.2f} x; time of a plain step {self.costs.origin(PLAIN)}")
        if self.fallback:
            lines.append(
                f"drafting was stopped {self.stops} times because it did not pay, tried again {self.probes} times; "
                f"{self.plain_steps} of {self._steps} steps were plain"
            )
        return lines + self.events[-5:]

    def _guess(self, spec: TreeSpec, level: int) -> float:
        """Of the steps that reach `level`, the share that accept a draft there."""
        known = [
            (seen.steps, rate, tree) for tree, seen in self._seen.items() if (rate := seen.rate(level)) is not None
        ]
        if known:
            _, rate, tree = max(known, key=lambda row: row[0])
            return _widened(rate, _width(spec) / _width(tree))
        prior = _widened(PRIOR if spec.top_k else REPEAT_PRIOR, _width(spec))
        if level == 0 or not self._seen:
            return prior
        return (self._guess(spec, level - 1) + prior) / 2  # no tree went so deep

    def _decide(self) -> None:
        if self._since >= FORGET:
            retry, own = self._since >= RETRY, _sources(self.spec)
            self._seen = {
                spec: seen
                for spec, seen in self._seen.items()
                if spec == self.spec or not (retry or _sources(spec) == own)
            }
        tried = {_sources(spec) for spec in self._seen}
        if untried := [tree for tree in self.trees if _sources(tree) not in tried]:
            self._change(max(untried, key=self.rate))  # one source says little about another
            return
        if self.fallback and self.costs.measured(PLAIN) is None and self.rate(self.spec) < CLEAR * self.rate(PLAIN):
            self._pause, self._checking = CHECK, True
            self._change(PLAIN)
            return
        best = max(self.choices, key=self.rate)
        gain = GAIN if best.drafts else 1.0  # between trees a small gain is not worth a change
        if self.rate(best) <= self.rate(self.spec) * gain:
            if self._probing or self._since >= 4 * LOOK:
                self._pause = PAUSE
            self._probing = False
            return
        if not best.drafts:
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if self._probing else PAUSE
            self.stops += 1
        self._change(best)
        self._probing = False

    def _probe(self) -> None:
        if not self._checking:
            self.probes += 1
            for seen in self._seen.values():
                seen.fade(0.05)  # figures from before the pause hardly count
        self._checking = False
        self._change(max(self.trees, key=self.rate))
        self._probing = True

    def _change(self, spec: TreeSpec) -> None:
        def name(tree: TreeSpec) -> str:
            sources = {(True, True): " of both", (False, True): " of repetition"}.get(_sources(tree), "")
            return f"{tree.nodes} nodes{sources}" if tree.drafts else "plain"

        def facts(tree: TreeSpec) -> str:
            return f"{name(tree)}: {self.emitted(tree):.2f} tokens, {self.costs.ms(tree):.3g} ms"

        self.events.append(f"step {self._steps}: {facts(self.spec)} -> {facts(spec)}")
        del self.events[:-20]
        self.spec, self._since = spec, 0


def tree_sizes(most: int) -> list[int]:
    """The tree sizes that "auto" considers: powers of two from 2, and the largest."""
    return sorted({size for size in (2, 4, 8, 16, 32, 64) if size < most} | {most})


def _widened(rate: float, factor: float) -> float:
    """A level's acceptance with `factor` times as many nodes."""
    return 1 - (1 - rate) ** (factor**WIDTH)


def _width(spec: TreeSpec) -> float:
    return spec.drafts / (spec.beam_levels or spec.depth)


def _sources(spec: TreeSpec) -> tuple[bool, bool]:
    """Whether a model drafts, and whether earlier text does."""
    return spec.top_k > 0, spec.grafts > 0
