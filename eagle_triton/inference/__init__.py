"""The engine for a draft and a target without an EaModel: EAGLEInference, its configuration and helpers.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_triton.lazy import public_names

if TYPE_CHECKING:
    from eagle_triton.engine.grammar import Grammar as Grammar
    from eagle_triton.engine.sampling_params import SamplingParams as SamplingParams
    from eagle_triton.engine.scheduler.requests import Piece as Piece
    from eagle_triton.inference.arctic_suffix_cache import SuffixDecodingCache as SuffixDecodingCache
    from eagle_triton.inference.arctic_suffix_cache import SuffixDecodingDraft as SuffixDecodingDraft
    from eagle_triton.inference.config import EAGLEConfig as EAGLEConfig
    from eagle_triton.inference.costs import CostTable as CostTable
    from eagle_triton.inference.eagle_inference import EAGLEInference as EAGLEInference
    from eagle_triton.inference.load import create_proposer as create_proposer
    from eagle_triton.inference.session import Completion as Completion
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

__all__, __getattr__, __dir__ = public_names(__name__)
