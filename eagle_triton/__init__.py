"""EAGLE speculative decoding, made fast: `optimize_eagle_with_triton(model)` and `originals.restore()`.

The names are imported when they are first used, so that `import eagle_triton` needs neither a GPU, nor Triton, nor
the time to load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eagle_triton import moved  # noqa: F401  former names of modules are found

if TYPE_CHECKING:
    from eagle_triton.errors import UnsupportedModelError as UnsupportedModelError
    from eagle_triton.export.export_head import export_head as export_head
    from eagle_triton.export.quantize import quantize_checkpoint as quantize_checkpoint
    from eagle_triton.inference.config import EAGLEConfig as EAGLEConfig
    from eagle_triton.inference.eagle_inference import EAGLEInference as EAGLEInference
    from eagle_triton.integration import EagleTritonConfig as EagleTritonConfig
    from eagle_triton.integration import TritonConfig as TritonConfig
    from eagle_triton.integration import optimize_eagle_with_triton as optimize_eagle_with_triton
    from eagle_triton.integration import optimize_with_triton as optimize_with_triton
    from eagle_triton.integration import restore as restore
    from eagle_triton.integration import restore_eagle as restore_eagle
    from eagle_triton.models.ea_model import EaModel as EaModel
    from eagle_triton.models.mtp import load_mtp as load_mtp
    from eagle_triton.patching import PatchError as PatchError

__version__ = "0.3.0"

_HOMES = {
    "EAGLEConfig": "eagle_triton.inference.config",
    "EAGLEInference": "eagle_triton.inference.eagle_inference",
    "EaModel": "eagle_triton.models.ea_model",
    "EagleTritonConfig": "eagle_triton.integration",
    "PatchError": "eagle_triton.patching",
    "TritonConfig": "eagle_triton.integration",
    "UnsupportedModelError": "eagle_triton.errors",
    "export_head": "eagle_triton.export.export_head",
    "load_mtp": "eagle_triton.models.mtp",
    "optimize_eagle_with_triton": "eagle_triton.integration",
    "optimize_with_triton": "eagle_triton.integration",
    "quantize_checkpoint": "eagle_triton.export.quantize",
    "restore": "eagle_triton.integration",
    "restore_eagle": "eagle_triton.integration",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
