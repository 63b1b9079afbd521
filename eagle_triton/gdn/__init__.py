"""Speculative decoding with gated delta nets: layers, their operations by the names of serving engines, and workers.

The paper: Gated Delta Networks (Yang et al., arXiv 2412.06464). Everything that is computed here is computed by the
engine's operations: on a GPU by its Triton kernels, elsewhere by its torch references. Where a documented signature
asks for more than they take, its docstring says so, and plain torch does it. docs/gdn.md shows how to use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "GDNAttnBackend": "eagle_triton.gdn.backend",
    "GDNDraftWorker": "eagle_triton.gdn.draft",
    "GDNSpeculativeWorker": "eagle_triton.gdn.worker",
    "GDNVerifyWorker": "eagle_triton.gdn.verify",
    "GatedDeltaRuleOp": "eagle_triton.gdn.rules",
    "Qwen3GatedDeltaNet": "eagle_triton.gdn.layer",
    "RMSNormGated": "eagle_triton.gdn.norm",
    "SimpleLMWithGDN": "eagle_triton.gdn.model",
    "build_tree_mask_from_parents": "eagle_triton.gdn.tree",
    "causal_conv1d_fn": "eagle_triton.gdn.convolution",
    "causal_conv1d_update": "eagle_triton.gdn.convolution",
    "chunk_gated_delta_rule": "eagle_triton.gdn.rules",
    "compute_gating_params": "eagle_triton.gdn.gating",
    "fused_gdn_gating": "eagle_triton.gdn.gating",
    "fused_recurrent_gated_delta_rule": "eagle_triton.gdn.rules",
    "fused_recurrent_gated_delta_rule_update": "eagle_triton.gdn.slot_rules",
    "fused_sigmoid_gating_delta_rule_update": "eagle_triton.gdn.slot_rules",
    "select_mode": "eagle_triton.gdn.layer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
