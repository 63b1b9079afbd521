"""One call makes a loaded EAGLE model decode with this package's engine, one call gives everything back."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from eagle_triton.adapters import eagle_llm, native, upstream
from eagle_triton.adapters.module_reader import UnsupportedModelError, check_one_device
from eagle_triton.drop_in import eagle_llm as eagle_llm_methods
from eagle_triton.drop_in import native as native_methods
from eagle_triton.drop_in import patching
from eagle_triton.drop_in import upstream as upstream_methods
from eagle_triton.drop_in.generate import generate_seam
from eagle_triton.drop_in.patching import Originals, PatchError
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.operations import make_operations

log = logging.getLogger(__name__)

FAMILIES: tuple[tuple[ModuleType, ModuleType], ...] = (
    (native, native_methods),
    (upstream, upstream_methods),
    (eagle_llm, eagle_llm_methods),
)


@dataclass(frozen=True)
class EagleTritonConfig:
    """Options of `optimize_eagle_with_triton`.

    strict: raise instead of leaving a part alone and listing it in the report.
    patch_modules: also replace `ea_layer.topK_genrate` and every `self_attn.forward`, for code that drives the model
    itself; the generating methods do not need them.
    kernels: the Triton kernels, or the torch references; None takes the kernels on a GPU.
    cuda_graph: launch each decode step as one CUDA graph; None does on a GPU with the kernels.
    megakernel: whether everything between the target's logits and the next draft tree is one launch; "auto" takes
    what was measured faster on this GPU. The report says what became of it: batches and trees that are too wide for it
    are decoded without it, also with `strict`.
    """

    strict: bool = False
    patch_modules: bool = True
    kernels: bool | None = None
    cuda_graph: bool | None = None
    megakernel: bool | str = "auto"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "megakernel" and value == "auto":
                continue
            if not isinstance(value, bool) and not (value is None and field.default is None):
                raise TypeError(f"{field.name} must be True or False, got {value!r}")

    def changed(self, **options: Any) -> EagleTritonConfig:
        """A copy with some options changed. Raises ValueError for an unknown one, naming those that exist."""
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
        return dataclasses.replace(self, **options)


def optimize_eagle_with_triton(
    model: Any, config: EagleTritonConfig | None = None, **options: Any
) -> tuple[Any, Originals]:
    """Replace the decoding methods of a loaded EaModel; the output stays the same.

    model: an EaModel of this package, of SafeAILab/EAGLE, or of eagle-llm 1.x, on one device. config: see
    `EagleTritonConfig`; its fields can also be given as keyword arguments. Returns the same model and its originals:
    `originals.restore()`, or the end of a `with originals:` block, gives every replaced attribute back, and
    `originals.report()` says what was replaced and how often it ran.

    Raises UnsupportedModelError for a model, or a part of one, that is not known; PatchError if the model is optimised
    already; ValueError for an unknown option. Nothing is changed then.
    """
    config = (config or EagleTritonConfig()).changed(**options)
    if patching.MARKER in getattr(model, "__dict__", {}):
        raise PatchError(f"this {type(model).__name__} is optimised already; restore it first")
    adapter, methods = _family(model)
    check_one_device(model, "the model")
    view, draft = adapter.read(model)
    on_gpu = view.device.type == "cuda"
    kernels = on_gpu if config.kernels is None else config.kernels
    cuda_graph = on_gpu and kernels if config.cuda_graph is None else config.cuda_graph
    if cuda_graph and not (on_gpu and kernels):
        raise ValueError("cuda_graph=True needs a model on a GPU and the kernels")
    if config.megakernel is True and not kernels:
        raise ValueError("megakernel=True needs the kernels")
    operations = make_operations(kernels)
    megakernel = None if config.megakernel == "auto" else bool(config.megakernel)
    engine = Engine(view, draft, operations, cuda_graph, megakernel)
    seams, skipped = (*methods.seams(model, engine), generate_seam(model, engine)), {}
    if config.patch_modules:
        more, skipped = methods.module_seams(model, engine)
        seams += more
    if config.megakernel is True and config.strict:
        from eagle_triton.engine.megakernel_step import unsupported_draft  # needs Triton

        reason = unsupported_draft(draft)
        skipped |= {} if reason is None else {"megakernel": reason}
    if skipped and config.strict:
        raise UnsupportedModelError("; ".join(f"{path}: {reason}" for path, reason in skipped.items()))

    def drop_caches() -> None:
        methods.drop_caches(model)
        engine.clear()

    engine.notes.update(skipped)
    originals = patching.apply(seams, model, drop_caches, engine.notes, operations.calls)
    log.info("optimised %s: %d attributes replaced", type(model).__name__, len(originals))
    return model, originals


def restore_eagle(model: Any, originals: Originals) -> Any:
    """Give every original of `model` back and return it. Harmless when done already.

    Raises PatchError if `originals` belong to another model, or if somebody has replaced one of the attributes since;
    nothing is changed then.
    """
    if not originals.restored and vars(model).get(patching.MARKER) is not originals:
        raise PatchError(f"these originals do not belong to this {type(model).__name__}")
    originals.restore()
    return model


def _family(model: Any) -> tuple[ModuleType, ModuleType]:
    for adapter, methods in FAMILIES:
        if adapter.recognise(model):
            return adapter, methods
    raise UnsupportedModelError(
        f"expected an EaModel (eagle_triton, SafeAILab/EAGLE or eagle-llm 1.x) with base_model and ea_layer, got "
        f"{type(model).__module__}.{type(model).__qualname__}"
    )
