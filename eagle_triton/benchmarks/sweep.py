"""The parts of a sweep over drafters, tree sizes and temperatures, and the configuration of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from eagle_triton.benchmarks.modes import OF_A_BLOCK, WITH_NODES
from eagle_triton.engine.drafts.repeats import FACTOR
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.speculative_config import SpeculativeConfig
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.heads import DraftHead

SUFFIX_DRAFTS, NGRAM_DRAFTS = 15, 5
BLOCK_NODES, BLOCK_TOP_K = 60, 8  # of a block drafter's tree
METHODS = {  # of drafters without a tree of the head: method and drafts a step
    "plain": ("naive", 0),
    "ngram": ("ngram", NGRAM_DRAFTS),
    "nasd": ("nasd", NGRAM_DRAFTS),
    "suffix": ("suffix", SUFFIX_DRAFTS),
}


class Configuration(NamedTuple):
    """One part of a sweep.

    nodes: of the verified tree, root and what is found in text included. steps: levels that the head or the block
    drafter drafts; topk: children of an expanded node: as SGLang's options of these names.
    """

    drafter: str
    nodes: int
    steps: int
    topk: int
    temperature: float

    @property
    def variant(self) -> str:
        """How it drafts, in a word or two."""
        return f"{self.drafter} {self.nodes}" if self.drafter in WITH_NODES else self.drafter

    @property
    def name(self) -> str:
        return f"{self.variant}, temperature {self.temperature:g}"

    @property
    def most_accepted(self) -> int:
        """The most drafts that one step can accept, `num_speculative_tokens` of serving engines."""
        return min(max(self.steps, SUFFIX_DRAFTS), self.nodes - 1) if self.drafter == "both" else self.steps

    def engine_config(self) -> EAGLEConfig:
        """How EAGLEInference is asked for it. Raises ValueError for a tree that cannot be."""
        if self.drafter in METHODS:
            method, drafts = METHODS[self.drafter]
            return config_of(
                method, drafts, **(dict(suffix_decoding_max_spec_factor=FACTOR) if method == "suffix" else {})
            )
        suffixes = SUFFIX_DRAFTS if self.drafter == "both" else 0
        return replace(tree_config(self.nodes, self.steps, self.topk), suffix_drafts=suffixes)


def config_of(method: str, drafts: int = 0, **options: Any) -> EAGLEConfig:
    """A method for one sequence, which also drafts where that does not pay, and keeps no prefixes between answers.

    drafts: a step, 0 for "naive". options: of SpeculativeConfig.
    """
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=drafts, **options)
    return EAGLEConfig(speculative=speculative, fallback=False, prefixes=False, slots=1)


def tree_config(nodes: int, steps: int, topk: int) -> EAGLEConfig:
    """Trees of a head or a block drafter for one sequence, as `config_of`."""
    return EAGLEConfig(topk=topk, num_steps=steps, num_draft_tokens=nodes, fallback=False, prefixes=False, slots=1)


def configurations(
    drafters: Sequence[str],
    sizes: Sequence[int] | None,
    temperatures: Sequence[float],
    head: DraftHead | None,
    block: BlockDrafter | None,
) -> list[Configuration]:
    """The parts in the order in which they run: at each temperature plain decoding, which the others are compared with,
    then the drafters.

    sizes: of trees, None: the head's own, `BLOCK_NODES` of a block drafter; a small tree is no deeper nor wider than it
    can be. head, block: None where no drafter needs them.
    """
    found = []
    for temperature in temperatures:
        for drafter in dict.fromkeys(["plain", *drafters]):
            if drafter in METHODS:
                drafts = METHODS[drafter][1]
                found.append(Configuration(drafter, drafts + 1, drafts, min(drafts, 1), temperature))
                continue
            if drafter in OF_A_BLOCK:
                assert block is not None
                own, deepest, widest = BLOCK_NODES, block.config.drafts, BLOCK_TOP_K
            else:
                assert head is not None
                own, deepest, widest = head.total_tokens + 1, head.depth + 1, head.top_k
            if drafter == "block":
                found.append(Configuration(drafter, deepest + 1, deepest, 1, temperature))
                continue
            for nodes in dict.fromkeys(sizes or [own]):
                steps, topk = min(deepest, nodes - 1), min(widest, nodes - 1)
                found.append(Configuration(drafter, nodes, steps, topk, temperature))
    return found
