"""The engine for people who have a draft, a target and no EaModel: EAGLEInference, its configuration and helpers.

The names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_triton.engine.sampling_params import SamplingParams as SamplingParams
    from eagle_triton.inference.arctic_suffix_cache import SuffixDecodingCache as SuffixDecodingCache
    from eagle_triton.inference.arctic_suffix_cache import SuffixDecodingDraft as SuffixDecodingDraft
    from eagle_triton.inference.config import EAGLEConfig as EAGLEConfig
    from eagle_triton.inference.costs import CostTable as CostTable
    from eagle_triton.inference.eagle_inference import EAGLEInference as EAGLEInference
    from eagle_triton.inference.load import create_proposer as create_proposer
    from eagle_triton.inference.session import Completion as Completion
    from eagle_triton.inference.session import Piece as Piece
    from eagle_triton.inference.session import Results as Results
    from eagle_triton.inference.session import Session as Session
    from eagle_triton.inference.session import StepInfo as StepInfo
    from eagle_triton.inference.sglang_trees import TreeMaskMode as TreeMaskMode
    from eagle_triton.inference.sglang_trees import build_tree_structure as build_tree_structure
    from eagle_triton.inference.sglang_trees import organize_draft_results as organize_draft_results
    from eagle_triton.inference.sglang_trees import verify_tree_greedy as verify_tree_greedy
    from eagle_triton.inference.shared_session import SharedSession as SharedSession
    from eagle_triton.inference.speculative_config import AcceptPolicy as AcceptPolicy
    from eagle_triton.inference.speculative_config import MTPStrategy as MTPStrategy
    from eagle_triton.inference.speculative_config import SpecMethod as SpecMethod
    from eagle_triton.inference.speculative_config import SpeculativeConfig as SpeculativeConfig
    from eagle_triton.inference.speculative_config import VerifyStrategy as VerifyStrategy
    from eagle_triton.inference.statistics import RequestMetrics as RequestMetrics
    from eagle_triton.inference.statistics import Statistics as Statistics
    from eagle_triton.inference.statistics import calculate_acceptance_rate as calculate_acceptance_rate
    from eagle_triton.inference.statistics import compute_tree_statistics as compute_tree_statistics
    from eagle_triton.inference.statistics import estimated_speedup as estimated_speedup
    from eagle_triton.inference.statistics import expected_emitted as expected_emitted
    from eagle_triton.inference.text import TextStream as TextStream
    from eagle_triton.inference.tokens import expand_beam as expand_beam
    from eagle_triton.inference.tokens import fast_topk_torch as fast_topk_torch
    from eagle_triton.inference.tokens import generate_token_bitmask as generate_token_bitmask
    from eagle_triton.inference.tokens import next_power_of_2 as next_power_of_2
    from eagle_triton.inference.tokens import pad_to_alignment as pad_to_alignment
    from eagle_triton.inference.tokens import sample_from_logits as sample_from_logits
    from eagle_triton.inference.tokens import select_top_k_tokens as select_top_k_tokens
    from eagle_triton.operands.adaptive_length import EGAGConfig as EGAGConfig

_HOMES = {
    "AcceptPolicy": "eagle_triton.inference.speculative_config",
    "Completion": "eagle_triton.inference.session",
    "CostTable": "eagle_triton.inference.costs",
    "EAGLEConfig": "eagle_triton.inference.config",
    "EAGLEInference": "eagle_triton.inference.eagle_inference",
    "EGAGConfig": "eagle_triton.operands.adaptive_length",
    "MTPStrategy": "eagle_triton.inference.speculative_config",
    "Piece": "eagle_triton.inference.session",
    "RequestMetrics": "eagle_triton.inference.statistics",
    "Results": "eagle_triton.inference.session",
    "SamplingParams": "eagle_triton.engine.sampling_params",
    "Session": "eagle_triton.inference.session",
    "SharedSession": "eagle_triton.inference.shared_session",
    "SpecMethod": "eagle_triton.inference.speculative_config",
    "SpeculativeConfig": "eagle_triton.inference.speculative_config",
    "Statistics": "eagle_triton.inference.statistics",
    "StepInfo": "eagle_triton.inference.session",
    "SuffixDecodingCache": "eagle_triton.inference.arctic_suffix_cache",
    "SuffixDecodingDraft": "eagle_triton.inference.arctic_suffix_cache",
    "TextStream": "eagle_triton.inference.text",
    "TreeMaskMode": "eagle_triton.inference.sglang_trees",
    "VerifyStrategy": "eagle_triton.inference.speculative_config",
    "build_tree_structure": "eagle_triton.inference.sglang_trees",
    "calculate_acceptance_rate": "eagle_triton.inference.statistics",
    "create_proposer": "eagle_triton.inference.load",
    "compute_tree_statistics": "eagle_triton.inference.statistics",
    "estimated_speedup": "eagle_triton.inference.statistics",
    "expand_beam": "eagle_triton.inference.tokens",
    "expected_emitted": "eagle_triton.inference.statistics",
    "fast_topk_torch": "eagle_triton.inference.tokens",
    "generate_token_bitmask": "eagle_triton.inference.tokens",
    "next_power_of_2": "eagle_triton.inference.tokens",
    "organize_draft_results": "eagle_triton.inference.sglang_trees",
    "pad_to_alignment": "eagle_triton.inference.tokens",
    "sample_from_logits": "eagle_triton.inference.tokens",
    "select_top_k_tokens": "eagle_triton.inference.tokens",
    "verify_tree_greedy": "eagle_triton.inference.sglang_trees",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
