"""Former names of modules: importing one gives the module under its new name, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FORMER = {
    **{name: f"ops.{name}" for name in ("layers", "linear", "gated_delta", "sampling", "suffix_match", "verification")},
    **{name: f"ops.{name}" for name in ("adaptive_length", "draft_inputs", "exchange", "gather", "grafting")},
    **{name: f"ops.{name}" for name in ("logit_processing", "ngram_table", "prompt_attention")},
    "linear.products": "ops.linear.dispatch",
    "speculative": "inference",
    "speculative.inference": "inference.eagle_inference",
    "speculative.suffix": "inference.arctic_suffix_cache",
    "speculative.tree": "inference.sglang_trees",
    "speculative.proposers": "inference.load",  # where create_proposer is
    **{
        f"speculative.{name}": f"inference.{name}"
        for name in ("config", "costs", "policy", "session", "shared_session", "speculative_config")
    },
    **{f"speculative.{name}": f"inference.{name}" for name in ("stages", "statistics", "text", "tokens")},
    "drop_in": "families",
    "drop_in.patching": "patching",
    "adapters": "families.reading",
    "adapters.refusal": "errors",
    "benchmarks.arguments": "command_line",
    "speculative_decoding.codec_base_decoding": "speculative_decoding.base_decoding",
    "speculative_decoding.codec_speculative_decoding": "speculative_decoding.speculative_decoding",
}
MOVED = {f"eagle_triton.{old}": f"eagle_triton.{new}" for old, new in _FORMER.items()}


class FormerNames(MetaPathFinder, Loader):
    """Finds the modules of MOVED."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is called {new} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # the import system will replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, FormerNames())
