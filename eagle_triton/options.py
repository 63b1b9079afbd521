"""Options that several entry points share. Each is declared, checked and documented once, here."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from eagle_triton.engine.drafts.beams import checked_vocabulary
from eagle_triton.engine.drafts.quantised import check_draft_dtype
from eagle_triton.engine.memory.pages import check_cache_tokens
from eagle_triton.engine.tree_spec import MAX_NODES
from eagle_triton.families.reading.quantised_modules import EXACT, check_activations
from eagle_triton.operands.verification import Verification
from eagle_triton.values import check_range, check_switch_or_auto, check_switches, checked_integer

Config = TypeVar("Config", bound="EngineOptions")
MAX_SLOTS = 256  # sequences decoded at a time
MAX_TREE = 1024  # nodes of a tree, and its levels


def candidates_of(topk: int, num_steps: int) -> int:
    """C: how many candidates one step of drafting scores, k + (D - 1) k^2."""
    return topk + (num_steps - 1) * topk**2


def check_nodes(nodes: int, topk: int, num_steps: int) -> None:
    """Raise ValueError unless a tree of the candidates can have this many nodes, and is of a size that fits memory."""
    candidates = candidates_of(topk, num_steps)
    if not 2 <= nodes <= 1 + candidates:
        raise ValueError(
            f"num_draft_tokens counts the root and must be in 2..{1 + candidates} for topk {topk} and num_steps "
            f"{num_steps}, which give {candidates} candidates; got {nodes}"
        )
    check_range("num_draft_tokens", nodes, 2, MAX_TREE)
    check_range("num_steps", num_steps, 1, MAX_TREE)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of every engine.

    verify_strategy: how sampled drafts are judged: target_match, rejection, greedy, or topp, which is lossy; see
    `Verification`.
    suffix_drafts: the most tokens to draft from text that occurred before in the prompt, the output or earlier outputs.
    These join the draft's tree, or are the whole draft if there is no other. 0: none.
    draft_vocabulary: the only tokens that a draft scores: their ids, or a number n for the first n, which are the most
    frequent ones in byte-pair vocabularies. Their rows of the vocabulary projection are copied. This makes a draft with
    a large projection faster, and its guesses slightly worse. None: all.
    cache_tokens: the tokens that the cache holds over all sequences, allocated at the first call. A request needs room
    for its prompt, its new tokens and about 130 more, and waits for it. None: the cache grows as needed.
    prefixes: keep the keys and values of prompts and answers, while there is room, for requests with the same
    beginning. In 16 bits what follows them may round differently than without them. "auto": only in fp32, so that a
    call's output does not depend on earlier calls.
    activations: for projections in FP8 or in four bits. "exact" reads the weights and does not round the inputs; "as
    published" calls the modules, which round the inputs too if their weights are FP8.
    draft_dtype: "fp8" drafts with copies of the draft's projections in eight bits, with a scale for each row; "int4"
    with copies in four bits, with a scale for each group of 128 columns of a row (64 or 32 where 128 do not divide
    them). The target still decides, so the output is the same. None: no copies.
    """

    verify_strategy: str = "target_match"
    suffix_drafts: int = 0
    draft_vocabulary: int | Collection[int] | None = None
    cache_tokens: int | None = None
    prefixes: bool | str = True
    activations: str = EXACT
    draft_dtype: str | None = None

    def __post_init__(self) -> None:
        Verification(self.verify_strategy)  # checks the name
        checked_integer("suffix_drafts", self.suffix_drafts, 0, MAX_NODES - 1)
        if self.draft_vocabulary is not None:
            object.__setattr__(self, "draft_vocabulary", checked_vocabulary(self.draft_vocabulary))
        check_cache_tokens(self.cache_tokens)
        check_switch_or_auto("prefixes", self.prefixes)
        check_activations(self.activations)
        check_draft_dtype(self.draft_dtype)

    @property
    def verification(self) -> Verification:
        """How drafts are judged."""
        return Verification(self.verify_strategy)

    @property
    def drafting_dtype(self) -> str | None:
        """`draft_dtype`, or the dtype that another option implies."""
        return self.draft_dtype

    def changed(self: Config, **options: Any) -> Config:
        """A copy with some options changed. Raises ValueError for an unknown one, and names those that exist."""
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
        return dataclasses.replace(self, **options)


@dataclass(frozen=True, kw_only=True)
class PatchOptions(EngineOptions):
    """Options of the calls that optimise a model in place, besides all of `EngineOptions`.

    prefixes: as in `EngineOptions`, by default "auto".
    strict: raise if a part of the model would stay unpatched or a call would run the original. Otherwise the report
    lists and counts these.
    kernels: True uses the Triton kernels, False the torch references, None the kernels on a GPU.
    cuda_graph: launch each decode step as one CUDA graph. None: on a GPU with the kernels.
    megakernel: whether one launch does everything between the target's logits and the next draft tree, and one launch
    runs all layers of one row, in plain decoding and in a draft model's chain. "auto" takes what was measured faster on
    this GPU. The report says what is used. Batches and trees too wide for it are decoded without it, even with
    `strict`.
    """

    prefixes: bool | str = "auto"
    strict: bool = False
    kernels: bool | None = None
    cuda_graph: bool | None = None
    megakernel: bool | str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switches(strict=self.strict)
        for name in ("kernels", "cuda_graph"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False or None, got {getattr(self, name)!r}")
        check_switch_or_auto("megakernel", self.megakernel)


class PatchOptionNames(TypedDict, total=False):
    """The fields of `PatchOptions`, as keyword arguments."""

    verify_strategy: str
    suffix_drafts: int
    draft_vocabulary: int | Collection[int] | None
    cache_tokens: int | None
    prefixes: bool | str
    activations: str
    draft_dtype: str | None
    strict: bool
    kernels: bool | None
    cuda_graph: bool | None
    megakernel: bool | str
