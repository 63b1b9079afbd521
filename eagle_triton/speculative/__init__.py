"""The engine for people who have a draft, a target and no EaModel: EAGLEInference, its configuration and helpers.

The names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_triton.engine.sampling_params import SamplingParams as SamplingParams
    from eagle_triton.reference.adaptive_length import EGAGConfig as EGAGConfig
    from eagle_triton.speculative.config import EAGLEConfig as EAGLEConfig
    from eagle_triton.speculative.costs import CostTable as CostTable
    from eagle_triton.speculative.inference import EAGLEInference as EAGLEInference
    from eagle_triton.speculative.proposers import create_proposer as create_proposer
    from eagle_triton.speculative.session import Completion as Completion
    from eagle_triton.speculative.session import Piece as Piece
    from eagle_triton.speculative.session import Results as Results
    from eagle_triton.speculative.session import Session as Session
    from eagle_triton.speculative.session import StepInfo as StepInfo
    from eagle_triton.speculative.shared_session import SharedSession as SharedSession
    from eagle_triton.speculative.speculative_config import AcceptPolicy as AcceptPolicy
    from eagle_triton.speculative.speculative_config import MTPStrategy as MTPStrategy
    from eagle_triton.speculative.speculative_config import SpecMethod as SpecMethod
    from eagle_triton.speculative.speculative_config import SpeculativeConfig as SpeculativeConfig
    from eagle_triton.speculative.speculative_config import VerifyStrategy as VerifyStrategy
    from eagle_triton.speculative.statistics import RequestMetrics as RequestMetrics
    from eagle_triton.speculative.statistics import Statistics as Statistics
    from eagle_triton.speculative.statistics import calculate_acceptance_rate as calculate_acceptance_rate
    from eagle_triton.speculative.statistics import compute_tree_statistics as compute_tree_statistics
    from eagle_triton.speculative.statistics import estimated_speedup as estimated_speedup
    from eagle_triton.speculative.statistics import expected_emitted as expected_emitted
    from eagle_triton.speculative.suffix import SuffixDecodingCache as SuffixDecodingCache
    from eagle_triton.speculative.suffix import SuffixDecodingDraft as SuffixDecodingDraft
    from eagle_triton.speculative.text import TextStream as TextStream
    from eagle_triton.speculative.tokens import expand_beam as expand_beam
    from eagle_triton.speculative.tokens import fast_topk_torch as fast_topk_torch
    from eagle_triton.speculative.tokens import generate_token_bitmask as generate_token_bitmask
    from eagle_triton.speculative.tokens import next_power_of_2 as next_power_of_2
    from eagle_triton.speculative.tokens import pad_to_alignment as pad_to_alignment
    from eagle_triton.speculative.tokens import sample_from_logits as sample_from_logits
    from eagle_triton.speculative.tokens import select_top_k_tokens as select_top_k_tokens
    from eagle_triton.speculative.tree import TreeMaskMode as TreeMaskMode
    from eagle_triton.speculative.tree import build_tree_structure as build_tree_structure
    from eagle_triton.speculative.tree import organize_draft_results as organize_draft_results
    from eagle_triton.speculative.tree import verify_tree_greedy as verify_tree_greedy

_HOMES = {
    "AcceptPolicy": "eagle_triton.speculative.speculative_config",
    "Completion": "eagle_triton.speculative.session",
    "CostTable": "eagle_triton.speculative.costs",
    "EAGLEConfig": "eagle_triton.speculative.config",
    "EAGLEInference": "eagle_triton.speculative.inference",
    "EGAGConfig": "eagle_triton.reference.adaptive_length",
    "MTPStrategy": "eagle_triton.speculative.speculative_config",
    "Piece": "eagle_triton.speculative.session",
    "RequestMetrics": "eagle_triton.speculative.statistics",
    "Results": "eagle_triton.speculative.session",
    "SamplingParams": "eagle_triton.engine.sampling_params",
    "Session": "eagle_triton.speculative.session",
    "SharedSession": "eagle_triton.speculative.shared_session",
    "SpecMethod": "eagle_triton.speculative.speculative_config",
    "SpeculativeConfig": "eagle_triton.speculative.speculative_config",
    "Statistics": "eagle_triton.speculative.statistics",
    "StepInfo": "eagle_triton.speculative.session",
    "SuffixDecodingCache": "eagle_triton.speculative.suffix",
    "SuffixDecodingDraft": "eagle_triton.speculative.suffix",
    "TextStream": "eagle_triton.speculative.text",
    "TreeMaskMode": "eagle_triton.speculative.tree",
    "VerifyStrategy": "eagle_triton.speculative.speculative_config",
    "build_tree_structure": "eagle_triton.speculative.tree",
    "calculate_acceptance_rate": "eagle_triton.speculative.statistics",
    "create_proposer": "eagle_triton.speculative.proposers",
    "compute_tree_statistics": "eagle_triton.speculative.statistics",
    "estimated_speedup": "eagle_triton.speculative.statistics",
    "expand_beam": "eagle_triton.speculative.tokens",
    "expected_emitted": "eagle_triton.speculative.statistics",
    "fast_topk_torch": "eagle_triton.speculative.tokens",
    "generate_token_bitmask": "eagle_triton.speculative.tokens",
    "next_power_of_2": "eagle_triton.speculative.tokens",
    "organize_draft_results": "eagle_triton.speculative.tree",
    "pad_to_alignment": "eagle_triton.speculative.tokens",
    "sample_from_logits": "eagle_triton.speculative.tokens",
    "select_top_k_tokens": "eagle_triton.speculative.tokens",
    "verify_tree_greedy": "eagle_triton.speculative.tree",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
