"""EAGLE speculative decoding, made fast: `optimize_eagle_with_triton(model)` and `originals.restore()`.

The names are imported when they are first used, so that `import eagle_triton` needs neither a GPU, nor Triton, nor
the time to load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_triton.adapters.reading import UnsupportedModelError
    from eagle_triton.integration import EagleTritonConfig, optimize_eagle_with_triton, restore_eagle
    from eagle_triton.models.ea_model import EaModel
    from eagle_triton.patching import PatchError
    from eagle_triton.speculative.config import EAGLEConfig
    from eagle_triton.speculative.inference import EAGLEInference

__version__ = "0.1.0"

_HOMES = {
    "EAGLEConfig": "eagle_triton.speculative.config",
    "EAGLEInference": "eagle_triton.speculative.inference",
    "EaModel": "eagle_triton.models.ea_model",
    "EagleTritonConfig": "eagle_triton.integration",
    "PatchError": "eagle_triton.patching",
    "UnsupportedModelError": "eagle_triton.adapters.reading",
    "optimize_eagle_with_triton": "eagle_triton.integration",
    "restore_eagle": "eagle_triton.integration",
}

__all__ = [
    "EAGLEConfig",
    "EAGLEInference",
    "EaModel",
    "EagleTritonConfig",
    "PatchError",
    "UnsupportedModelError",
    "optimize_eagle_with_triton",
    "restore_eagle",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
