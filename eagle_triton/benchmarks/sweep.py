"""The configurations of a sweep over drafters, tree sizes and temperatures, and how each is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from eagle_triton.benchmarks.models import Target
from eagle_triton.benchmarks.modes import OF_A_BLOCK, WITH_NODES
from eagle_triton.comparison.answer import open_session
from eagle_triton.engine.drafts.repeats import FACTOR
from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.session import Session
from eagle_triton.inference.speculative_config import SpeculativeConfig

WARM_UP = 8  # tokens, on a CPU
SUFFIX_DRAFTS, NGRAM_DRAFTS = 15, 5
BLOCK_NODES, BLOCK_TOP_K = 60, 8  # of a block drafter's tree
METHODS: dict[str, tuple[str, int, dict[str, Any]]] = {  # of drafters without a tree: method, drafts a step, options
    "plain": ("naive", 0, {}),
    "ngram": ("ngram", NGRAM_DRAFTS, {}),
    "nasd": ("nasd", NGRAM_DRAFTS, {}),
    "suffix": ("suffix", SUFFIX_DRAFTS, {"suffix_decoding_max_spec_factor": FACTOR}),
}

Item = TypeVar("Item")
Found = TypeVar("Found")


class Configuration(NamedTuple):
    """One part of a sweep.

    nodes: of the verified tree, with the root and drafts from text. steps: levels that the head or the block drafter
    drafts; topk: children of an expanded node; both as in SGLang's options of these names.
    """

    drafter: str
    nodes: int
    steps: int
    topk: int
    temperature: float

    @property
    def variant(self) -> str:
        """Its drafter, in a word or two."""
        return f"{self.drafter} {self.nodes}" if self.drafter in WITH_NODES else self.drafter

    @property
    def name(self) -> str:
        return f"{self.variant}, temperature {self.temperature:g}"

    @property
    def most_accepted(self) -> int:
        """The most drafts that one step can accept, `num_speculative_tokens` of serving engines."""
        return min(max(self.steps, SUFFIX_DRAFTS), self.nodes - 1) if self.drafter == "both" else self.steps

    def engine_config(self) -> EAGLEConfig:
        """Its options for EAGLEInference. Raises ValueError for an impossible tree."""
        if self.drafter in METHODS:
            method, drafts, options = METHODS[self.drafter]
            return config_of(method, drafts, **options)
        suffixes = SUFFIX_DRAFTS if self.drafter == "both" else 0
        return replace(tree_config(self.nodes, self.steps, self.topk), suffix_drafts=suffixes)

    def inference(self, target: Target) -> EAGLEInference:
        """Its engine."""
        draft, model = (target.block, target.causal_lm) if self.drafter in OF_A_BLOCK else (None, target.model)
        return EAGLEInference(draft, model, self.engine_config(), tokenizer=target.tokenizer)


def config_of(method: str, drafts: int = 0, **options: Any) -> EAGLEConfig:
    """A method for one sequence. It always drafts, even where plain decoding is faster, and keeps no prefixes between
    answers.

    drafts: per step, 0 for "naive". options: of SpeculativeConfig.
    """
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=drafts, **options)
    return EAGLEConfig(speculative=speculative, fallback=False, prefixes=False, slots=1)


def tree_config(nodes: int, steps: int, topk: int) -> EAGLEConfig:
    """Trees of a head or a block drafter for one sequence, like `config_of`."""
    return EAGLEConfig(topk=topk, num_steps=steps, num_draft_tokens=nodes, fallback=False, prefixes=False, slots=1)


def configurations(
    drafters: Sequence[str], sizes: Sequence[int] | None, temperatures: Sequence[float], target: Target
) -> list[Configuration]:
    """The parts in the order in which they run: at each temperature plain decoding, the measure of the others, then the
    drafters.

    sizes: of trees; None: the head's own, `BLOCK_NODES` of a block drafter. A small tree is made less deep and wide.
    """
    found = []
    for temperature in temperatures:
        for drafter in dict.fromkeys(["plain", *drafters]):
            if drafter in METHODS:
                drafts = METHODS[drafter][1]
                shapes = [(drafts + 1, drafts, min(drafts, 1))]
            else:
                if drafter in OF_A_BLOCK:
                    assert target.block is not None
                    own, deepest, widest = BLOCK_NODES, target.block.config.drafts, BLOCK_TOP_K
                else:
                    assert target.head is not None
                    own, deepest, widest = target.head.total_tokens + 1, target.head.depth + 1, target.head.top_k
                several = dict.fromkeys(sizes or [own])
                shapes = [(nodes, min(deepest, nodes - 1), min(widest, nodes - 1)) for nodes in several]
                shapes = [(deepest + 1, deepest, 1)] if drafter == "block" else shapes
            found += [Configuration(drafter, *shape, temperature) for shape in shapes]
    return found


def decode(
    inference: EAGLEInference, rows: int, items: Sequence[Item], new: int,
    run: Callable[[Session, Sequence[Item], int], Iterable[Found]], warm: Sequence[Item],
) -> list[Found]:  # fmt: skip
    """The results of `run(session, items, new)` in a session of `rows` tokens, after a first session for warm-up.

    warm: the items of the first session on a GPU, which compiles and captures; on a CPU that session decodes a few
    tokens of the first item. Both forget the outputs of earlier runs.
    """
    on_gpu = inference.pair.view.device.type == "cuda"
    for some, tokens in ((warm, new) if on_gpu else (items[:1], min(new, WARM_UP)), (items, new)):
        inference.forget_outputs()
        with open_session(inference, rows) as session:
            found = list(run(session, some, tokens))
    return found
