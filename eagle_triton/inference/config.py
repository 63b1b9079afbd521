"""How EAGLEInference drafts and samples: one frozen dataclass, checked before any model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import PROMPT_TOKENS
from eagle_triton.engine.tree_spec import MAX_NODES, TreeSpec
from eagle_triton.inference.speculative_config import SpeculativeConfig
from eagle_triton.operands.adaptive_length import EGAGConfig
from eagle_triton.operands.integrators import TreeMaskMode
from eagle_triton.operands.suffix_match import MAX_TIMES
from eagle_triton.operands.verification import MAX_CANDIDATE_LEN, Verification
from eagle_triton.options import MAX_SLOTS, MAX_TREE, EngineOptions, candidates_of, check_nodes
from eagle_triton.values import check_choice, check_switches, checked_integer

WHOLE: dict[str, tuple[Any, ...]] = {  # options that are integers from 1, and their other values
    **dict.fromkeys(("topk", "num_steps", "slots", "prompt_tokens"), ()),
    "max_length": (None,),
    "num_draft_tokens": (None, "auto"),
}
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "grammar",
)  # fmt: skip
TREE = ("topk", "num_steps", "num_draft_tokens")
GUIDED = ("eagle", "draft_model", "mtp")  # methods with a model for all drafts
VERIFICATION = ("verify_strategy", "accept_policy", "verify_window", "max_candidate_len")


def checked_device(value: Any) -> torch.device | None:
    """The device of that name; None stays None. Raises ValueError if torch knows none."""
    try:
        return None if value is None else torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch.device or the name of one, got {value!r}") from error


@dataclass(frozen=True)
class EAGLEConfig(EngineOptions):
    """Options of `EAGLEInference`, which include all of `EngineOptions`. Each call and request may override the
    sampling options.

    topk: children of each expanded node (k). num_steps: drafted levels (D), one pass of the draft each; at most 1024
    levels and 1024 nodes.
    num_draft_tokens: nodes of a tree, root included (N): 2 <= N <= 1 + k + (D - 1) k^2; None: all candidates, at most
    64; "auto": the tree, or no draft, with the most tokens per second, by measured cost and acceptance. Over a mixture
    of experts, where each row costs more, a chain of 3 is another choice, if these three options have their defaults
    and fallback is set.
    temperature 0 is greedy. top_p, top_k, min_p filter sampled tokens; None: off (topk, not top_k, is the tree's
    width). Each keeps the best token, so greedy decoding stays the same. repetition_penalty divides positive and
    multiplies negative logits of tokens in prompt or output (1: off). logit_bias: numbers to add to logits, by token.
    fallback: decode plainly while drafting does not pay, and try again from time to time.
    slots: sequences decoded at a time; others wait. max_length: the most tokens of a sequence, prompt included; None:
    as many as a call needs. prompt_tokens: about how many tokens of new prompts are read before each step while others
    decode. With fewer, the others wait less for their next tokens; with more, first tokens come sooner.
    tree_mask_mode: the mask in `verify_drafts` and in the trees that it returns.
    device: where loaded models must be, and where a model given by path is put; None: on a GPU if there is one.
    dtype: for models given by path; None: float32 on a CPU, else the checkpoint's. A loaded target must have this
    dtype. verbose: log each step.
    accept_policy, verify_window, max_candidate_len: with verify_strategy, how drafts are judged; see `Verification`.
    suffix_ring: how many tokens of earlier outputs to keep for suffix_drafts, 4 bytes each; 0: none.
    egag: end drafts early, by their entropy, see `EGAGConfig`; None: draft the whole tree.
    speculative: a method and its own options, instead of the tree's shape, suffix_drafts and how drafts are judged.
    """

    topk: int = 4
    num_steps: int = 3
    num_draft_tokens: int | str | None = 8
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    fallback: bool = True
    slots: int = 16
    max_length: int | None = None
    prompt_tokens: int = PROMPT_TOKENS
    tree_mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    verbose: bool = False
    accept_policy: str = "normal"
    verify_window: int = 0
    max_candidate_len: int = MAX_CANDIDATE_LEN
    suffix_ring: int = 1 << 20
    egag: EGAGConfig | None = None
    speculative: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = self.num_draft_tokens
        if isinstance(nodes, str) and nodes != "auto":
            raise ValueError(f'num_draft_tokens must be an integer, None or "auto", got {nodes!r}')
        for name, instead in WHOLE.items():
            if (value := getattr(self, name)) not in instead:
                most = {"slots": MAX_SLOTS, "num_steps": MAX_TREE}.get(name)
                object.__setattr__(self, name, checked_integer(name, value, 1, most))
        if isinstance(nodes := self.num_draft_tokens, int):
            check_nodes(nodes, self.topk, self.num_steps)
        check_switches(fallback=self.fallback, verbose=self.verbose)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {self.dtype!r}")
        check_choice("tree_mask_mode", self.tree_mask_mode, [*map(int, TreeMaskMode)])
        object.__setattr__(self, "tree_mask_mode", TreeMaskMode(self.tree_mask_mode))
        object.__setattr__(self, "device", checked_device(self.device))
        self.sampling()  # checks its options
        self._check_speculative()
        _ = self.verification  # checks its options
        checked_integer("suffix_ring", self.suffix_ring)
        if self.suffix_ring and not 2 <= self.suffix_ring <= MAX_TIMES:
            raise ValueError(f"suffix_ring must be 0, or 2 to {MAX_TIMES} tokens, got {self.suffix_ring}")
        self._check_egag()
        reads_ring = self.suffix_drafts or (self.speculative is not None and self.speculative.method == "suffix")
        if self.suffix_ring != type(self).suffix_ring and not reads_ring:
            raise ValueError(f"suffix_ring={self.suffix_ring} is only read with suffix_drafts or method suffix")

    @property
    def verification(self) -> Verification:
        """How drafts are judged."""
        return Verification(*(getattr(self.speculative or self, name) for name in VERIFICATION))

    @property
    def drafting_dtype(self) -> str | None:
        """`draft_dtype`, or the one that speculative implies."""
        return self.draft_dtype or (None if self.speculative is None else self.speculative.quantization)

    @property
    def has_tree(self) -> bool:
        """Whether the options give a tree's shape, or a method with options of its own."""
        return self.speculative is not None or any(getattr(self, name) != getattr(EAGLEConfig, name) for name in TREE)

    @property
    def candidates(self) -> int:
        """C: how many candidates one step of drafting scores, k + (D - 1) k^2."""
        return candidates_of(self.topk, self.num_steps)

    @property
    def nodes(self) -> int:
        """N of the configured tree; with "auto", of the largest choice."""
        if isinstance(self.num_draft_tokens, int):
            return self.num_draft_tokens
        return min(1 + self.candidates, MAX_NODES)

    def tree(self, nodes: int | None = None) -> TreeSpec:
        """The tree with `nodes` nodes (default: the configured number), at most as deep and wide as that allows."""
        if (options := self.speculative) is not None:
            drafts = options.num_model_steps if options.method == "mtp" else options.num_speculative_tokens
            tree = TreeSpec.chain(max(drafts, 1))
        else:
            nodes, levels, width = self.nodes if nodes is None else nodes, self.num_steps, self.topk
            if nodes != self.nodes or self.num_draft_tokens == "auto":
                levels, width = min(levels, nodes - 1), min(width, nodes - 1)
            tree = TreeSpec.dynamic(nodes, levels - 1, width)
        return dataclasses.replace(tree, adaptive=self.egag is not None)

    def _check_speculative(self) -> None:
        if self.speculative is None:
            return
        if not isinstance(self.speculative, SpeculativeConfig):
            raise TypeError(f"speculative must be a SpeculativeConfig or None, got {self.speculative!r:.60}")
        for name in (*TREE, *VERIFICATION, "suffix_drafts"):
            if getattr(self, name) != getattr(EAGLEConfig, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be left out: speculative, also given, has its own options"
                )

    def _check_egag(self) -> None:
        if self.egag is None:
            return
        if not isinstance(self.egag, EGAGConfig):
            raise TypeError(f"egag must be an EGAGConfig or None, got {self.egag!r:.60}")
        options = self.speculative
        if options is not None and (options.method not in GUIDED):
            raise ValueError(f"egag needs a model for all drafts, and method {options.method} has none: leave egag out")
        drafts = self.tree().beam_levels
        for name in ("gamma_min", "gamma_max"):
            if (getattr(self.egag, name) or 0) > drafts:
                raise ValueError(f"egag: {name} must be at most {drafts} (levels), got {getattr(self.egag, name)}")

    def sampling(self, **changes: Any) -> SamplingParams:
        """The sampling options, with some changed (None: as configured).

        Raises ValueError for a bad value, TypeError for a wrong type.
        """
        unknown = sorted(set(changes) - set(SAMPLING))
        if unknown:
            raise ValueError(f"unknown sampling option {', '.join(unknown)}; the options are {', '.join(SAMPLING)}")
        options = {name: getattr(self, name, None) for name in SAMPLING}
        options |= {name: value for name, value in changes.items() if value is not None}
        return SamplingParams(**{name: value for name, value in options.items() if value is not None})
