"""The engine for people who have a draft, a target and no EaModel: EAGLEInference, its configuration and helpers.

The names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "config": ("EAGLEConfig",),
    "inference": ("EAGLEInference",),
    "costs": ("CostTable",),
    "session": ("Completion", "Session", "StepInfo"),
    "statistics": (
        "Statistics",
        "calculate_acceptance_rate",
        "compute_tree_statistics",
        "estimated_speedup",
        "expected_emitted",
    ),
    "text": ("TextStream",),
    "tokens": (
        "expand_beam",
        "fast_topk_torch",
        "generate_token_bitmask",
        "next_power_of_2",
        "pad_to_alignment",
        "sample_from_logits",
        "select_top_k_tokens",
    ),
    "tree": ("TreeMaskMode", "build_tree_structure", "organize_draft_results", "verify_tree_greedy"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
