"""Fast EAGLE speculative decoding: `optimize_eagle_with_triton(model)` and `originals.restore()`.

Names are imported when they are first used, so `import eagle_triton` needs no GPU and no Triton, and loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_triton import moved  # noqa: F401  finds modules by former names
from eagle_triton.lazy import public_names

if TYPE_CHECKING:
    from eagle_triton.engine.grammar import Grammar as Grammar
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

__all__, __getattr__, __dir__ = public_names(__name__)
