"""What a sweep over drafters, tree sizes and temperatures consists of, and how each part of it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from eagle_triton.benchmarks.modes import OF_THE_HEAD
from eagle_triton.engine.drafts.repeats import FACTOR
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.speculative_config import SpeculativeConfig
from eagle_triton.models.heads import DraftHead

SUFFIX_DRAFTS, NGRAM_DRAFTS = 15, 5
METHODS = {  # of drafters without a tree of the head: method and drafts a step
    "plain": ("naive", 0),
    "ngram": ("ngram", NGRAM_DRAFTS),
    "nasd": ("nasd", NGRAM_DRAFTS),
    "suffix": ("suffix", SUFFIX_DRAFTS),
}


class Configuration(NamedTuple):
    """One part of a sweep.

    nodes: of the verified tree, root and what is found in text included. steps: levels that the head drafts; topk:
    children of an expanded node: as SGLang's options of these names.
    """

    drafter: str
    nodes: int
    steps: int
    topk: int
    temperature: float

    @property
    def variant(self) -> str:
        """How it drafts, in a word or two."""
        return f"{self.drafter} {self.nodes}" if self.drafter in OF_THE_HEAD else self.drafter

    @property
    def name(self) -> str:
        return f"{self.variant}, temperature {self.temperature:g}"

    @property
    def most_accepted(self) -> int:
        """The most drafts that one step can accept, `num_speculative_tokens` of serving engines."""
        return min(max(self.steps, SUFFIX_DRAFTS), self.nodes - 1) if self.drafter == "both" else self.steps

    def engine_config(self) -> EAGLEConfig:
        """How EAGLEInference is asked for it: never plainly where drafts do not pay, and nothing kept between answers
        but what drafters themselves keep. Raises ValueError for a tree that cannot be."""
        shared: dict[str, Any] = dict(fallback=False, prefixes=False, slots=1)
        if self.drafter in METHODS:
            method, drafts = METHODS[self.drafter]
            options = SpeculativeConfig(method=method, num_speculative_tokens=drafts)
            if method == "suffix":
                options = replace(options, suffix_decoding_max_spec_factor=FACTOR)
            return EAGLEConfig(speculative=options, **shared)
        suffixes = SUFFIX_DRAFTS if self.drafter == "both" else 0
        return EAGLEConfig(
            topk=self.topk, num_steps=self.steps, num_draft_tokens=self.nodes, suffix_drafts=suffixes, **shared
        )


def configurations(
    drafters: Sequence[str], sizes: Sequence[int] | None, temperatures: Sequence[float], head: DraftHead | None
) -> list[Configuration]:
    """The parts in the order in which they run: at each temperature plain decoding, which the others are compared with,
    then the drafters.

    sizes: of the head's tree, None: its own; a small tree is no deeper nor wider than it can be. head: None where no
    drafter needs it.
    """
    found = []
    for temperature in temperatures:
        for drafter in dict.fromkeys(["plain", *drafters]):
            if drafter in METHODS:
                drafts = METHODS[drafter][1]
                found.append(Configuration(drafter, drafts + 1, drafts, min(drafts, 1), temperature))
                continue
            assert head is not None
            for nodes in dict.fromkeys(sizes or [head.total_tokens + 1]):
                steps, topk = min(head.depth + 1, nodes - 1), min(head.top_k, nodes - 1)
                found.append(Configuration(drafter, nodes, steps, topk, temperature))
    return found
