"""The names of the drafters, for answers."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_triton.engine.drafts.hybrid import ContinuedDraft, model_of
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.inference.proposers import WITH_MODEL


@dataclass(frozen=True)
class Drafters:
    """Drafters, named as in `SpecMethod`. model: scores candidates; None: there is none. text: finds text that occurred
    before. chain: the model drafts the first drafts, this many, and the text drafter the rest. 0: both draft into one
    tree; then the engine does not know who proposed a draft, because a prefix that both propose is one node.
    """

    model: str | None
    text: str | None
    chain: int = 0

    @staticmethod
    def read(inference: EAGLEInference) -> Drafters:
        """Read them from an engine."""
        draft, options = inference.pair.draft, inference.config.speculative
        inner = model_of(draft)
        model = next((str(method) for method, kinds in WITH_MODEL.items() if isinstance(inner, kinds)), None)
        if draft is None or (inner is draft and model is not None):
            return Drafters(model, None)
        if options is None:
            return Drafters(model, "suffix")
        if isinstance(draft, ContinuedDraft):
            return Drafters(model, "ngram", draft.chain)
        return Drafters(None, str(options.method))

    @property
    def any(self) -> bool:
        """Whether anything may draft."""
        return bool(self.model or self.text)

    def of(self, tree: TreeSpec, depth: int | None = None) -> str | None:
        """The drafter of a tree, "a+b" for both; None if nothing was drafted. depth: ask for one draft, from 1."""
        if not tree.drafts:
            return None
        if self.chain and depth is not None:
            return self.model if depth <= self.chain else self.text
        model = self.model if tree.top_k else None
        text = self.text if tree.grafts or model is None else None
        return "+".join(filter(None, (model, text))) or None
