"""Speculative decoding with gated delta nets: layers, their operations under the names of serving engines, and workers.

The paper: Gated Delta Networks (Yang et al., arXiv 2412.06464). The engine's operations compute everything: on a GPU
its Triton kernels, elsewhere its torch references. If a documented signature needs more than they support, its
docstring says so, and plain torch computes it. docs/gdn.md shows how to use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_triton.lazy import public_names

if TYPE_CHECKING:
    from eagle_triton.gdn.backend import GDNAttnBackend as GDNAttnBackend
    from eagle_triton.gdn.convolution import causal_conv1d_fn as causal_conv1d_fn
    from eagle_triton.gdn.convolution import causal_conv1d_update as causal_conv1d_update
    from eagle_triton.gdn.draft import GDNDraftWorker as GDNDraftWorker
    from eagle_triton.gdn.gating import compute_gating_params as compute_gating_params
    from eagle_triton.gdn.gating import fused_gdn_gating as fused_gdn_gating
    from eagle_triton.gdn.layer import Qwen3GatedDeltaNet as Qwen3GatedDeltaNet
    from eagle_triton.gdn.layer import select_mode as select_mode
    from eagle_triton.gdn.model import SimpleLMWithGDN as SimpleLMWithGDN
    from eagle_triton.gdn.norm import RMSNormGated as RMSNormGated
    from eagle_triton.gdn.rules import GatedDeltaRuleOp as GatedDeltaRuleOp
    from eagle_triton.gdn.rules import chunk_gated_delta_rule as chunk_gated_delta_rule
    from eagle_triton.gdn.rules import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
    from eagle_triton.gdn.slot_rules import (
        fused_recurrent_gated_delta_rule_update as fused_recurrent_gated_delta_rule_update,
    )
    from eagle_triton.gdn.slot_rules import (
        fused_sigmoid_gating_delta_rule_update as fused_sigmoid_gating_delta_rule_update,
    )
    from eagle_triton.gdn.tree import build_tree_mask_from_parents as build_tree_mask_from_parents
    from eagle_triton.gdn.verify import GDNVerifyWorker as GDNVerifyWorker
    from eagle_triton.gdn.worker import GDNSpeculativeWorker as GDNSpeculativeWorker

__all__, __getattr__, __dir__ = public_names(__name__)
