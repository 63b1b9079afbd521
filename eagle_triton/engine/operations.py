"""The operations that a step calls: one table, filled with the torch references or with the Triton kernels."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import ModuleType

from eagle_triton.reference import attention, kv_cache, layers, linear, sampling, tree_decoding

_STEMS: dict[ModuleType, tuple[str, ...]] = {
    attention: ("tree_attention",),
    kv_cache: ("commit",),
    layers: ("rms_norm", "rotary_append", "swiglu"),
    linear: ("linear", "linear_stack", "linear_swiglu"),
    sampling: ("probabilities", "sample", "uniform"),
    tree_decoding: (
        "topk",
        "expand_beam",
        "build_tree",
        "verify_greedy",
        "verify_sampling",
        "update_sequence",
    ),
}


class Operations:
    """Every operation as an attribute of its own name, each call counted in `calls`."""

    calls: Counter[str]

    def __init__(self) -> None:
        self.calls = Counter()
        for module, names in _STEMS.items():
            for name in names:
                setattr(self, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call
