"""One call makes a loaded EAGLE model decode with this package's engine, one call gives everything back."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from eagle_triton.adapters import eagle_llm, native, upstream
from eagle_triton.adapters.module_reader import UnsupportedModelError, check_readable
from eagle_triton.drop_in import eagle_llm as eagle_llm_methods
from eagle_triton.drop_in import native as native_methods
from eagle_triton.drop_in import patching
from eagle_triton.drop_in import upstream as upstream_methods
from eagle_triton.drop_in.generate import generate_seam
from eagle_triton.drop_in.patching import Originals, PatchError
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model_watch import ModelWatch
from eagle_triton.engine.operations import choose_operations
from eagle_triton.reference.verification import Verification

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
    verify_strategy: how sampled drafts are judged: target_match, rejection, greedy, or topp, which is lossy; see
    `Verification`.
    """

    strict: bool = False
    patch_modules: bool = True
    kernels: bool | None = None
    cuda_graph: bool | None = None
    megakernel: bool | str = "auto"
    verify_strategy: str = "target_match"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "verify_strategy" or (field.name == "megakernel" and value == "auto"):
                continue
            if not isinstance(value, bool) and not (value is None and field.default is None):
                other = {"megakernel": ' or "auto"'}.get(field.name, " or None" if field.default is None else "")
                raise TypeError(f"{field.name} must be True or False{other}, got {value!r}")
        Verification(self.verify_strategy)  # checks it

    def changed(self, **options: Any) -> EagleTritonConfig:
        """A copy with some options changed. Raises ValueError for an unknown one, naming those that exist."""
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
        return dataclasses.replace(self, **options)


class Optimized(NamedTuple):
    """What `optimize_eagle_with_triton` returns: unpack it, or use it as a context manager that restores at its end."""

    model: Any
    originals: Originals

    def __enter__(self) -> Optimized:
        return self

    def __exit__(self, *_: object) -> None:
        self.originals.restore()


def optimize_eagle_with_triton(model: Any, config: EagleTritonConfig | None = None, **options: Any) -> Optimized:
    """Replace the decoding methods of a loaded EaModel; the output stays the same (but for `verify_strategy="topp"`).

    model: an EaModel of this package, of SafeAILab/EAGLE, or of eagle-llm 1.x, on one device. config: see
    `EagleTritonConfig`; its fields can also be given as keyword arguments. Returns the same model and its originals:
    `originals.restore()`, `restore_eagle(model)`, or the end of a `with` block around either, gives every replaced
    attribute back, and `originals.report()` says what was replaced and how often it ran. A part of the model that is
    replaced, cast, moved or hooked meanwhile is refused by the next generation; weights may change in place.

    Raises UnsupportedModelError for a model, or a part of one, that is not known, or that has hooks or replaced
    forwards; PatchError if the model is optimised already; ValueError for an unknown option. Nothing is changed then.
    """
    if not isinstance(config, (EagleTritonConfig, type(None))):
        raise TypeError(f"config must be an EagleTritonConfig, got {type(config).__name__}; options go by their names")
    config = (config or EagleTritonConfig()).changed(**options)
    if patching.MARKER in getattr(model, "__dict__", {}):
        raise PatchError(f"this {type(model).__name__} is optimised already; restore it first")
    adapter, methods = _family(model)
    check_readable(model)
    view, draft = adapter.read(model)
    operations, cuda_graph = choose_operations(view.device, config.kernels, config.cuda_graph)
    if config.megakernel is True and not operations.kernels:
        raise ValueError("megakernel=True needs the kernels")
    megakernel = None if config.megakernel == "auto" else bool(config.megakernel)
    watch = ModelWatch({"model": model})
    verification = Verification(config.verify_strategy)
    engine = Engine(view, draft, operations, cuda_graph, megakernel, config.strict, watch, verification)
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
    if not verification.lossless:
        engine.notes["verification"] = verification.summary
    originals = patching.apply(seams, model, drop_caches, engine.notes, operations.calls)
    log.info("optimised %s: %d attributes replaced", type(model).__name__, len(originals))
    return Optimized(model, originals)


def restore_eagle(model: Any, originals: Originals | None = None) -> Any:
    """Give every original of `model` back and return it. `originals`: None takes the model's own.

    Harmless when done already. Raises PatchError if `originals` belong to another model, if there are none and the
    model is not optimised, or if somebody has replaced one of the attributes since; nothing is changed then.
    """
    own: Originals | None = getattr(model, "__dict__", {}).get(patching.MARKER)
    if originals is None:
        if own is None:
            raise PatchError(f"this {type(model).__name__} is not optimised: there is nothing to restore")
        own.restore()
        return model
    if not isinstance(originals, Originals):
        raise TypeError(f"originals must be what optimize_eagle_with_triton returned, got {type(originals).__name__}")
    if not originals.restored and own is not originals:
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
