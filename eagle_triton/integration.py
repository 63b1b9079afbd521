"""One call makes a loaded model decode with this package's engine. Another call restores the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from typing_extensions import NamedTuple, Unpack  # Python 3.10 has no Unpack and no generic NamedTuple

from eagle_triton import patching
from eagle_triton.assembly import Assembled, assemble, ea_package_of, read_draft
from eagle_triton.draft_choice import NGRAM, SUFFIX, choose_given, load_draft
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.repeats import NgramSource, RepeatDraft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.model_watch import ModelWatch
from eagle_triton.engine.model.module_kinds import is_mixture
from eagle_triton.engine.tree_spec import MIXTURE_DRAFTS, PLAIN, TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.generate import generate_patch_point
from eagle_triton.families.hf_generate import preparation as hf_generate
from eagle_triton.families.hf_generate.preparation import Assistance, Drafting
from eagle_triton.families.reading.experts import blocks_read
from eagle_triton.families.reading.quantised import with_quantised
from eagle_triton.options import PatchOptionNames, PatchOptions, candidates_of, check_nodes
from eagle_triton.patching import Originals, PatchError
from eagle_triton.values import check_switches, checked_integer

log = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)
_RESTORED: WeakSet[nn.Module] = WeakSet()
"""Models that were optimised once and restored: restoring one again does nothing."""


@dataclass(frozen=True, kw_only=True)
class EagleTritonConfig(PatchOptions):
    """Options of `optimize_eagle_with_triton`: all of `PatchOptions` and `EngineOptions`, and `patch_modules`.

    Some methods keep all tokens of the step that reaches a limit. With suffix_drafts, the tokens past it may differ.

    patch_modules: also replace `ea_layer.topK_genrate` (unless draft_vocabulary is set: it drafts with the head's own
    weights) and every `self_attn.forward`, for code that runs these itself. The generating methods need neither.
    """

    patch_modules: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switches(patch_modules=self.patch_modules)


@dataclass(frozen=True, kw_only=True)
class TritonConfig(PatchOptions):
    """Options of `optimize_with_triton`: all of `PatchOptions` and `EngineOptions`, and the draft tree's shape.

    draft="suffix" sets suffix_drafts to 15. More would make a head slower: 15 drafts and the root fill one tile of a
    matrix product.

    topk: children of each expanded node of a draft tree. num_steps: drafted levels, at most 1024. num_draft_tokens:
    nodes of a tree, root included, at most 1024. If all three are None, a head or a `Draft` drafts its own tree. Any
    other draft is then a chain of 3 if the target is a mixture of experts, where each row costs more, and suffix_drafts
    is 0. Otherwise None means 4, 3 and 8 (at most all nodes).
    """

    topk: int | None = None
    num_steps: int | None = None
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("topk", 1), ("num_steps", 1), ("num_draft_tokens", 2)):
            if (value := getattr(self, name)) is not None:
                checked_integer(name, value, least, kind="an integer or None")
        check_nodes(self.num_draft_tokens or 2, self.topk or 4, self.num_steps or 3)

    @property
    def has_tree(self) -> bool:
        """Whether the options give a tree."""
        return any(value is not None for value in (self.topk, self.num_steps, self.num_draft_tokens))

    @property
    def tree(self) -> TreeSpec:
        """The tree for drafts without a tree of their own."""
        topk, steps = self.topk or 4, self.num_steps or 3
        return TreeSpec.dynamic(self.num_draft_tokens or min(8, 1 + candidates_of(topk, steps)), steps - 1, topk)


class EagleTritonOptions(PatchOptionNames, total=False):
    """The fields of `EagleTritonConfig`, as keyword arguments."""

    patch_modules: bool


class TritonOptions(PatchOptionNames, total=False):
    """The fields of `TritonConfig`, as keyword arguments."""

    topk: int | None
    num_steps: int | None
    num_draft_tokens: int | None


class Optimized(NamedTuple, Generic[ModelT]):
    """The result of optimising. Unpack it, print its report, or use it as a context manager, which restores the model
    when it exits."""

    model: ModelT
    originals: Originals

    def __str__(self) -> str:
        return str(self.originals)

    def __enter__(self) -> Optimized[ModelT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.originals.restore()


def optimize_eagle_with_triton(
    model: ModelT, config: EagleTritonConfig | None = None, **options: Unpack[EagleTritonOptions]
) -> Optimized[ModelT]:
    """Replace the decoding methods of a loaded EaModel; the output stays the same, unless `verify_strategy` is lossy
    ("topp", or for samples "greedy").

    model: an EaModel of this package, of SafeAILab/EAGLE, or of eagle-llm 1.x, on one device. config: see
    `EagleTritonConfig`; its fields can also be given as keyword arguments. Returns the same model and its originals.
    `originals.restore()`, `restore(model)`, or the end of a `with` block around the result restores every replaced
    attribute. `originals.report()` says what was replaced and how often it ran. If a part of the model is replaced,
    cast, moved or hooked meanwhile, the next generation raises; weights may change in place.

    Raises UnsupportedModelError for a model, or a part of one, that is unknown, or that has hooks or replaced forwards;
    PatchError if the model is optimised already; ValueError for an unknown option. The model is then unchanged.
    """
    config = _configuration(EagleTritonConfig, config, options)
    _check_original(model)
    if (package := ea_package_of(model)) is None:
        raise UnsupportedModelError(
            f"expected an EaModel (eagle_triton, SafeAILab/EAGLE or eagle-llm 1.x) with base_model and ea_layer, got "
            f"{type(model).__module__}.{type(model).__qualname__}; optimize_with_triton takes any causal language model"
        )
    assembled = assemble(model, model, config, {"model": model}, lambda: PLAIN)
    engine = assembled.engine
    if config.suffix_drafts and engine.draft is not None:
        engine.draft.read_tree()  # raises if the tree has no room for them
    patch_points, skipped = (*package.patch_points(model, engine), generate_patch_point(model, engine)), {}
    if config.patch_modules and engine.view.ranks is not None:
        skipped = {"ea_layer.topK_genrate, self_attn.forward": "the originals run: ranks share the target (tp_plan)"}
    elif config.patch_modules:
        more, skipped = package.module_patch_points(model, engine)
        if config.draft_vocabulary is not None:  # the engine's draft scores fewer tokens than the head's own method
            more = tuple(patch_point for patch_point in more if patch_point.attribute != "topK_genrate")
            skipped["ea_layer.topK_genrate"] = "the original runs: it scores the head's whole vocabulary"
        patch_points += more
    if engine.view.has_mixtures and engine.draft is not None:
        engine.notes.update(_note_on_tree(engine.view, engine.draft.read_tree()))
    skipped |= _no_megakernel(config, assembled.drafting, engine.view)
    if skipped and config.strict:
        raise UnsupportedModelError("; ".join(f"{path}: {reason}" for path, reason in skipped.items()))
    engine.notes.update(skipped)
    return _patched(model, patch_points, lambda: package.drop_caches(model), assembled)


def optimize_with_triton(
    model: ModelT,
    draft: nn.Module | Draft | str | Path | None = None,
    config: TritonConfig | None = None,
    **options: Unpack[TritonOptions],
) -> Optimized[ModelT]:
    """Replace `generate` of a plain Hugging Face causal language model; the output stays the same, unless
    `verify_strategy` is lossy ("topp", or for samples "greedy").

    model: a causal language model of a family that is supported (docs/support.md#families), on one device. draft: None
    decodes plainly; an EAGLE head or a block drafter such as DFlash, its directory or hub id, or an EaModel for its
    head; a causal language model with the target's vocabulary; "mtp" for the multi-token-prediction layers stored with
    the target's weights, or the result of `load_mtp`; "suffix" or "ngram" for drafts from earlier text, without a
    model; or your own `Draft`. config: see `TritonConfig`; its fields can also be given as keyword arguments. Returns
    the same model and its originals, as `optimize_eagle_with_triton` does: `originals.restore()`, `restore(model)` or
    the end of a `with` block restores `generate`.

    `generate` keeps its arguments, defaults, warnings and errors. A call with an argument that the engine does not
    support (beams, attention weights) runs the original, and the report names it. Raises UnsupportedModelError for a
    model or a draft that is unknown, or that has hooks or replaced forwards; PatchError if the model is optimised
    already; ValueError for an unknown option, and for a tree that the draft cannot grow. The model is then unchanged.
    """
    config = _configuration(TritonConfig, config, options)
    _check_original(model)
    if ea_package_of(model) is not None:
        raise UnsupportedModelError(f"{type(model).__name__} is an EaModel: call optimize_eagle_with_triton")
    if config.has_tree and draft in (None, SUFFIX, NGRAM):
        raise ValueError(f"topk, num_steps and num_draft_tokens need a draft model, got draft={draft!r}")
    choice, config = choose_given(draft, config)
    drafts = load_draft(choice, model)
    if config.has_tree and isinstance(drafts, Draft) and not drafts.any_tree:
        raise ValueError(f"topk, num_steps and num_draft_tokens: {type(drafts).__name__} drafts its own tree only")
    roots: dict[str, nn.Module] = {"model": model}
    if isinstance(drafts, nn.Module) and drafts is not model:
        roots["draft"] = drafts
    mixture = isinstance(model, nn.Module) and any(map(is_mixture, model.modules()))
    chain = mixture and not config.has_tree and not config.suffix_drafts
    assembled = assemble(model, drafts, config, roots, lambda: TreeSpec.chain(MIXTURE_DRAFTS) if chain else config.tree)
    engine, drafted = assembled.engine, assembled.engine.draft
    if config.strict and (skipped := _no_megakernel(config, assembled.drafting, engine.view)):
        raise UnsupportedModelError(f"megakernel: {skipped['megakernel']}")

    def read_tree() -> TreeSpec:
        if drafted is None:
            return PLAIN
        tree = config.tree.with_grafts(config.suffix_drafts) if config.has_tree else drafted.read_tree()
        engine.view.check_tree(tree, "num_draft_tokens")
        drafted.check_tree(tree)
        return tree

    engine.notes.update(_note_on_tree(engine.view, read_tree()))
    assistants = _Assistants(assembled, roots)
    patch_points = hf_generate.patch_points(model, Drafting(engine, read_tree), assistants)
    return _patched(model, patch_points, assistants.clear, assembled)


class _Assistants:
    """Decodes calls of an optimised model that give a draft of their own. Keeps the last one."""

    def __init__(self, assembled: Assembled, roots: Mapping[str, nn.Module]):
        self._engine, self._read_modules, self._roots = assembled.engine, assembled.read_modules, roots
        self._copied = assembled.copied
        self._last: tuple[Assistance, ModelWatch, Drafting] | None = None

    def __call__(self, wanted: Assistance) -> Drafting:
        """Raises UnsupportedModelError for an assistant that does not fit, or if ranks share the target, and
        RuntimeError if the target has changed. A changed assistant is read again."""
        last = self._last
        if last is None or last[0] != wanted or last[1].change():
            self._engine.check_model()  # from now on changes of the assistant are watched
            self.clear()
            last = self._last = wanted, *self._read(wanted)
        return last[2]

    def _read(self, wanted: Assistance) -> tuple[ModelWatch, Drafting]:
        """A watch over the assistant, and the drafting."""
        own = {} if wanted.model is None else {"assistant_model": wanted.model}
        view, read, copied = self._engine.view, frozenset[nn.Module](), dict[str, Tensor]()
        if view.ranks is not None:
            raise UnsupportedModelError("ranks share the target (tp_plan)", "devices")
        draft: Draft
        if wanted.model is None:
            draft = RepeatDraft(NgramSource(wanted.tokens, wanted.ngram))
        else:
            chain, target = TreeSpec.chain(wanted.tokens), self._roots["model"]
            view, draft = read_draft(wanted.model, view, target, lambda: chain, root="assistant_model")
            reading = with_quantised(view, draft, own)
            assert reading.draft is not None
            draft, read, copied = reading.draft, reading.modules, reading.copied
        try:
            view.check_tree(draft.read_tree())
            draft.check_tree(draft.read_tree())
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error
        read |= blocks_read(getattr(draft, "layers", ()))
        watch = ModelWatch({**self._roots, **own}, self._read_modules | read, {**self._copied, **copied})
        return ModelWatch(own, read, copied), Drafting(self._engine.beside(draft, watch, view), draft.read_tree)

    def clear(self) -> None:
        """Forget the last draft."""
        if self._last is not None:
            _, watch, drafting = self._last
            for ended in (watch, drafting.engine.watch):
                if ended is not None:
                    ended.close()
        self._last = None


def restore(model: ModelT, originals: Originals | None = None) -> ModelT:
    """Restore every original of `model` and return the model. originals: None takes the model's own.

    A second call does nothing. Raises PatchError if `originals` belong to another model, if the model was never
    optimised, or if an attribute was replaced since; the model is then unchanged.
    """
    own: Originals | None = getattr(model, "__dict__", {}).get(patching.MARKER)
    if originals is None:
        if own is not None:
            own.restore()
        elif model not in _RESTORED:
            raise PatchError(f"this {type(model).__name__} was never optimised: there is nothing to restore")
        return model
    if not isinstance(originals, Originals):
        raise TypeError(f"originals must be what optimising returned, got {type(originals).__name__}")
    if not originals.restored and own is not originals:
        raise PatchError(f"these originals do not belong to this {type(model).__name__}")
    originals.restore()
    return model


def restore_eagle(model: ModelT, originals: Originals | None = None) -> ModelT:
    """The older name of `restore`."""
    return restore(model, originals)


def _configuration(kind: type[Any], config: Any, options: Mapping[str, Any]) -> Any:
    if not isinstance(config, (kind, type(None))):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"config must be {article} {kind.__name__}, got {type(config).__name__}; pass options as keyword arguments"
        )
    return (config or kind()).changed(**options)


def _check_original(model: Any) -> None:
    if patching.MARKER in getattr(model, "__dict__", {}):
        raise PatchError(f"this {type(model).__name__} is optimised already; restore it first")


def _no_megakernel(config: EagleTritonConfig | TritonConfig, draft: Draft | None, view: ModelView) -> dict[str, str]:
    """An entry of the report, with megakernel=True and `strict`: why the megakernel cannot be used, or without a draft
    one launch of all layers."""
    if not (config.megakernel is True and config.strict):
        return {}
    if draft is None:
        reason = view.reason_against_one_launch
    else:
        from eagle_triton.engine.megakernel_step import unsupported_draft  # needs Triton

        reason = unsupported_draft(draft)
    return {} if reason is None else {"megakernel": reason}


def _note_on_tree(view: ModelView, tree: TreeSpec) -> dict[str, str]:
    """An entry of the report, if the tree cannot pay for one sequence."""
    most, cost = tree.depth + 1, view.bytes_read(tree.nodes) / view.bytes_read(1)
    if cost <= most:
        return {}
    return {
        "tree": f"cannot be faster for one sequence: each node chooses experts, so {tree.nodes} nodes read {cost:.1f} "
        f"times the weights of a plain step, for at most {most} tokens; draft fewer, such as a chain of 3"
    }


def _facts(engine: Engine) -> patching.Facts:
    """An engine's facts for a report. The note on a draft in eight or four bits includes the tau so far."""
    calls, notes = engine.ops.calls, dict(engine.notes)
    tau = _tau(calls)
    if tau and "draft_dtype" in notes:
        notes["draft_dtype"] += f"; {tau}"
    return patching.Facts(tau, notes, calls)


def _tau(calls: Mapping[str, int]) -> str:
    """The tau of the drafts in words, empty if there were none."""
    steps, accepted = calls["trees_verified"], calls["drafts_accepted"]
    if not steps:
        return ""
    hardly = steps >= 64 and accepted < 0.05 * steps
    wrong = ": hardly any draft is right (docs/is-it-working.md#with-my-own-head)" if hardly else ""
    return f"tau {1 + accepted / steps:.2f} over {steps} steps{wrong}"


def _patched(
    model: ModelT, patch_points: tuple[patching.PatchPoint, ...], clear: Callable[[], None], assembled: Assembled
) -> Optimized[ModelT]:
    """Patch the model. clear: drops caches besides the engine's."""
    engine = assembled.engine
    # While the model is patched, the engine drafts with `drafting`, which may be a quantised copy. Afterwards it holds
    # the draft as it was read again, so that the copy is freed.
    loaded, engine.draft = engine.draft, assembled.drafting

    def change() -> None:
        clear()
        engine.clear()
        if patching.MARKER not in vars(model):
            engine.draft = loaded
            if engine.watch is not None:
                engine.watch.close()
            _RESTORED.add(model)
        if engine.draft is not None:
            engine.draft.forget()

    originals = patching.apply(patch_points, model, change, lambda: _facts(engine), engine.strict)
    log.info("optimised %s: %d attributes replaced", type(model).__name__, len(originals))
    return Optimized(model, originals)
