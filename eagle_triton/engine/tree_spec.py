"""The shape of a draft tree: how many nodes, how deep, how wide, and which nodes if they are fixed.

The candidates of a step have one flat order: K children of the root, then K children for each beam slot, level by
level. Candidate x is a child of the root if x < K, otherwise of beam slot x // K - 1. After them come grafts: drafts
from earlier text, which name their parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

MAX_NODES = 64  # of trees with no requested size


@dataclass(frozen=True)
class TreeSpec:
    """A draft tree's static shape.

    nodes: N, the root included. top_k: K candidates per expanded node; 0: there are only grafts. beam_widths: nodes
    expanded in each beam pass after the first pass. beam_candidates, selected: for a fixed tree, the flat candidate
    indices that fill the beam slots and the drafts; None for a dynamic tree (EAGLE-2/3), where scores decide. grafts: J
    candidates from earlier text (drafts/repeats.py); each may be a child of the one before. adaptive: EGAG may end the
    drafting early, which leaves places empty.
    """

    nodes: int
    top_k: int
    beam_widths: tuple[int, ...]
    beam_candidates: tuple[int, ...] | None = None
    selected: tuple[int, ...] | None = None
    grafts: int = 0
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"total_token must be at least 1 (the root counts), got {self.nodes}")
        if self.nodes > 1 and self.top_k < 1 and not self.grafts:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.grafts and self.selected is not None:
            raise ValueError(f"suffix_drafts must be 0 with tree_choices (a fixed tree), got {self.grafts}")
        if self.drafts > self.candidates + self.grafts:
            raise ValueError(
                f"a tree of {self.nodes} nodes needs {self.drafts} candidates, but top_k {self.top_k} and beam widths "
                f"{list(self.beam_widths)} give only {self.candidates + self.grafts}; lower total_token or raise depth "
                "or top_k"
            )

    @staticmethod
    def dynamic(total_token: int, depth: int, top_k: int) -> TreeSpec:
        """EAGLE-2/3: `depth` beam passes of `top_k` nodes after the first pass; the best total_token - 1 are kept."""
        if depth < 0:
            raise ValueError(f"depth must not be negative, got {depth}")
        return TreeSpec(total_token, top_k, (top_k,) * depth)

    @staticmethod
    def chain(drafts: int) -> TreeSpec:
        return TreeSpec.dynamic(drafts + 1, max(drafts - 1, 0), 1)

    @staticmethod
    def repeats(drafts: int) -> TreeSpec:
        """Drafts from earlier text only."""
        return TreeSpec(drafts + 1, 0, (), grafts=drafts)

    @staticmethod
    def fixed(choices: Sequence[Sequence[int]]) -> TreeSpec:
        """EAGLE-1 `tree_choices`: each node is a path of child ranks from the root, e.g. [0], [0, 2].

        Raises ValueError if a path is empty or repeated, has a negative rank, or lacks its parent.
        """
        paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
        if not paths or not paths[0] or len(set(paths)) < len(paths) or any(min(path) < 0 for path in paths):
            raise ValueError(f"tree_choices must be different, non-empty paths of ranks >= 0, got {paths!r:.60}")
        orphans = [path for path in paths if len(path) > 1 and path[:-1] not in paths]
        if orphans:
            raise ValueError(f"tree_choices: the parent of {list(orphans[0])} is missing")
        top_k = 1 + max(max(path) for path in paths)
        expanded = [path for path in paths if any(path == child[:-1] for child in paths)]
        slot = {path: index for index, path in enumerate(expanded)}

        def candidate(path: tuple[int, ...]) -> int:
            return path[-1] if len(path) == 1 else top_k * (1 + slot[path[:-1]]) + path[-1]

        depth = max(len(path) for path in paths)
        widths = tuple(sum(len(path) == level for path in expanded) for level in range(1, depth))
        return TreeSpec(len(paths) + 1, top_k, widths, tuple(map(candidate, expanded)), tuple(map(candidate, paths)))

    def with_grafts(self, grafts: int) -> TreeSpec:
        """This tree, where up to `grafts` drafts from earlier text may replace others."""
        return replace(self, grafts=grafts)

    @property
    def has_empty_places(self) -> bool:
        """Whether nodes may be empty, with token -1."""
        return self.grafts > 0 or self.adaptive

    @property
    def is_chain(self) -> bool:
        """Whether each node is always the child of the one before it."""
        return self.nodes == 1 or (self.top_k == 1 and not self.grafts)

    @property
    def drafts(self) -> int:
        """Nodes without the root: N - 1."""
        return self.nodes - 1

    @property
    def depth(self) -> int:
        """D: the depth of the deepest possible draft; the root has depth 0."""
        return max(self.beam_levels, self.grafts) if self.nodes > 1 else 0

    @property
    def beam_levels(self) -> int:
        """How many levels the draft's passes score."""
        return len(self.beam_widths) + 1 if self.nodes > 1 and self.top_k else 0

    @property
    def beam_slots(self) -> int:
        return sum(self.beam_widths)

    @property
    def level_starts(self) -> tuple[int, ...]:
        """The flat index of each level's first candidate: one entry more than beam passes."""
        expanded = accumulate((0, 1, *self.beam_widths))  # nodes, before each level
        return tuple(self.top_k * count for count in islice(expanded, self.beam_levels))

    @property
    def candidates(self) -> int:
        """How many candidates the passes of a step score: K for the root and K for every beam slot."""
        return self.top_k * (1 + self.beam_slots) if self.nodes > 1 else 0


PLAIN = TreeSpec(nodes=1, top_k=0, beam_widths=())
"""The empty tree: a decode step that drafts nothing."""

MIXTURE_DRAFTS = 3
"""Drafts of the default chain over a mixture of experts, where each row of a step reads its own experts."""
