"""The operations that a step calls: one table, filled with the Triton kernels or with their torch references."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable

_STEMS: dict[str, tuple[str, ...]] = {
    "attention": ("tree_attention",),
    "kv_cache": ("commit",),
    "layers": ("rms_norm", "add", "rotary_append", "swiglu"),
    "linear": ("linear", "linear_stack", "linear_swiglu"),
    "draft_inputs": ("draft_inputs",),
    "gather": ("gather_rows", "sequence_rows"),
    "tree_decoding": ("topk", "expand_beam", "build_tree"),
    "logit_processing": ("process_logits",),
    "verification": ("verify_greedy", "verify_sampling", "update_sequence"),
}


class Operations:
    """Every operation as an attribute of its own name, each call counted in `calls`.

    kernels: the Triton kernels (CUDA tensors, or CPU tensors in Triton's interpreter) instead of the torch references.
    Raises ImportError that says what to install if Triton is missing.
    """

    def __init__(self, kernels: bool = False) -> None:
        self.kernels = kernels
        self.calls: Counter[str] = Counter()
        for stem, names in _STEMS.items():
            module = kernel_module(stem) if kernels else importlib.import_module(f"eagle_triton.reference.{stem}")
            for name in names:
                setattr(self, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call


def kernel_module(stem: str):
    """The module that holds the kernels of a stem. Raises ImportError that says what to install without Triton."""
    try:
        return importlib.import_module(f"eagle_triton.{stem}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(
            "the kernels need Triton: pip install triton (on Windows: triton-windows); "
            "kernels=False decodes with the torch references"
        ) from error
