"""The operations that a step calls: the table of their Triton kernels. See operations.py."""

from __future__ import annotations

from typing import ClassVar

from eagle_triton import attention as _attention
from eagle_triton import kv_cache as _kv_cache
from eagle_triton import tree_decoding as _tree_decoding
from eagle_triton.engine.operations import Operations
from eagle_triton.ops import adaptive_length as _adaptive_length
from eagle_triton.ops import draft_inputs as _draft_inputs
from eagle_triton.ops import exchange as _exchange
from eagle_triton.ops import experts as _experts
from eagle_triton.ops import gated_delta as _gated_delta
from eagle_triton.ops import gather as _gather
from eagle_triton.ops import grafting as _grafting
from eagle_triton.ops import layers as _layers
from eagle_triton.ops import linear as _linear
from eagle_triton.ops import logit_processing as _logit_processing
from eagle_triton.ops import ngram_table as _ngram_table
from eagle_triton.ops import prompt_attention as _prompt_attention
from eagle_triton.ops import suffix_match as _suffix_match
from eagle_triton.ops import verification as _verification


class KernelOperations(Operations):
    """Every operation by its launcher. CUDA tensors; CPU tensors in Triton's interpreter."""

    kernels: ClassVar[bool] = True

    embed_rms_norm = staticmethod(_layers.embed_rms_norm)
    rms_norm = staticmethod(_layers.rms_norm)
    add_rms_norm = staticmethod(_layers.add_rms_norm)
    add = staticmethod(_layers.add)
    linear = staticmethod(_linear.linear)
    linear_stack = staticmethod(_linear.linear_stack)
    linear_swiglu = staticmethod(_linear.linear_swiglu)
    join_columns = staticmethod(_exchange.join_columns)
    swiglu = staticmethod(_layers.swiglu)
    route = staticmethod(_experts.route)
    experts_swiglu = staticmethod(_experts.experts_swiglu)
    experts_down = staticmethod(_experts.experts_down)
    add_shared_expert = staticmethod(_experts.add_shared_expert)
    rotary_append = staticmethod(_layers.rotary_append)
    tree_attention = staticmethod(_attention.tree_attention)
    prompt_attention = staticmethod(_prompt_attention.prompt_attention)
    gate_heads = staticmethod(_layers.gate_heads)
    causal_conv = staticmethod(_gated_delta.causal_conv)
    delta_tree = staticmethod(_gated_delta.delta_tree)
    delta_chunk = staticmethod(_gated_delta.delta_chunk)
    delta_recurrent = staticmethod(_gated_delta.delta_recurrent)
    gated_norm = staticmethod(_gated_delta.gated_norm)
    mask_tokens = staticmethod(_logit_processing.mask_tokens)
    process_logits = staticmethod(_logit_processing.process_logits)
    verify_greedy = staticmethod(_verification.verify_greedy)
    verify_sampling = staticmethod(_verification.verify_sampling)
    verify_target_match = staticmethod(_verification.verify_target_match)
    verify_topp = staticmethod(_verification.verify_topp)
    first_path = staticmethod(_verification.first_path)
    update_sequence = staticmethod(_verification.update_sequence)
    commit = staticmethod(_kv_cache.commit)
    commit_states = staticmethod(_gated_delta.commit_states)
    gather_rows = staticmethod(_gather.gather_rows)
    sequence_rows = staticmethod(_gather.sequence_rows)
    draft_inputs = staticmethod(_draft_inputs.draft_inputs)
    suffix_drafts = staticmethod(_suffix_match.suffix_drafts)
    ngram_drafts = staticmethod(_suffix_match.ngram_drafts)
    count_ngrams = staticmethod(_ngram_table.count_ngrams)
    counted_drafts = staticmethod(_ngram_table.counted_drafts)
    row_entropy = staticmethod(_adaptive_length.row_entropy)
    choose_gamma = staticmethod(_adaptive_length.choose_gamma)
    topk = staticmethod(_tree_decoding.topk)
    expand_beam = staticmethod(_tree_decoding.expand_beam)
    best_first_tree = staticmethod(_tree_decoding.best_first_tree)
    clip_depth = staticmethod(_adaptive_length.clip_depth)
    estimate_scores = staticmethod(_grafting.estimate_scores)
    graft = staticmethod(_grafting.graft)
    build_tree = staticmethod(_tree_decoding.build_tree)
    count_right = staticmethod(_grafting.count_right)
