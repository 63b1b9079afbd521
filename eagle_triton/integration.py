"""One call makes a loaded model decode with this package's engine, one call gives everything back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypedDict, TypeVar
from weakref import WeakSet

from torch import nn
from typing_extensions import NamedTuple, Unpack  # which may be generic, and be there, in Python 3.10

from eagle_triton import patching
from eagle_triton.demo import path_of
from eagle_triton.engine.drafts.beams import checked_vocabulary, vocabulary_note, with_vocabulary
from eagle_triton.engine.drafts.draft import Draft
from eagle_triton.engine.drafts.float8 import check_draft_dtype, float8_draft
from eagle_triton.engine.drafts.hybrid import beams_of, scoring, with_suffix_drafts
from eagle_triton.engine.drafts.repeats import NgramSource, RepeatDraft
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import check_cache_tokens
from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.model.model_watch import ModelWatch
from eagle_triton.engine.operations import choose_operations
from eagle_triton.engine.tree_spec import MOST_NODES, PLAIN, TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families import eagle_llm, hf_generate, own_ea_model, safeailab
from eagle_triton.families.causal_lm import draft_from_causal_lm, read_causal_lm
from eagle_triton.families.generate import generate_seam
from eagle_triton.families.hf_generate import Assistance, Drafting
from eagle_triton.families.methods import check_tree
from eagle_triton.families.reading.float8 import EXACT, Float8Reading, check_activations, note_on_called, with_float8
from eagle_triton.families.reading.module_reader import check_readable
from eagle_triton.families.reading.mtp import read_mtp
from eagle_triton.models.head_loading import fit_head, load_head
from eagle_triton.models.heads import DraftHead
from eagle_triton.models.loading import HEAD_FOLDERS, directory_or_hub_id
from eagle_triton.models.mtp import MTP, MTPHead, load_mtp
from eagle_triton.models.target import text_config
from eagle_triton.options import with_options
from eagle_triton.patching import Originals, PatchError
from eagle_triton.reference.verification import Verification

log = logging.getLogger(__name__)

FAMILIES: tuple[ModuleType, ...] = (own_ea_model, safeailab, eagle_llm)

SUFFIX, NGRAM = "suffix", "ngram"  # drafts by their names
SUFFIX_DRAFTS, NGRAM_DRAFTS = 15, 5  # of drafts that are asked for by name; 16 rows are one tile of a product

ModelT = TypeVar("ModelT", bound=nn.Module)
_RESTORED: WeakSet[nn.Module] = WeakSet()
"""Models that were optimised and are not any more: to restore one again is harmless."""


class _Options:
    """What configurations share: dataclasses some of whose fields are switches."""

    verify_strategy: str
    suffix_drafts: int

    def changed(self, **options: Any) -> Any:
        """A copy with some options changed. Raises ValueError for an unknown one, naming those that exist."""
        return with_options(self, options)

    def _check_switches(self, *others: str) -> None:
        """TypeError for a field, but for `others`, that is neither a truth value nor what else it may be."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name in others or (field.name == "megakernel" and value == "auto"):
                continue
            if not isinstance(value, bool) and not (value is None and field.default is None):
                other = {"megakernel": ' or "auto"'}.get(field.name, " or None" if field.default is None else "")
                raise TypeError(f"{field.name} must be True or False{other}, got {value!r}")

    def _check_drafts(self) -> None:
        """Of the options by which drafts are judged, and come from repetition."""
        Verification(self.verify_strategy)  # checks it
        drafts = self.suffix_drafts
        if isinstance(drafts, bool) or not isinstance(drafts, int):
            raise TypeError(f"suffix_drafts must be an integer, got {drafts!r}")
        if not 0 <= drafts < MOST_NODES:
            raise ValueError(f"suffix_drafts must lie in 0..{MOST_NODES - 1}, got {drafts}")


@dataclass(frozen=True)
class EagleTritonConfig(_Options):
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
    suffix_drafts: tokens that may be drafted from text that occurred before, in the prompt, in this output or in former
    ones, in one tree with the head's; 0: none. Methods that keep the step which reaches a limit then end elsewhere
    behind it.
    cache_tokens: room for the keys and values of so many tokens, of all sequences together, taken at the first call;
    None: it grows with what calls ask for. A request takes its prompt, its new tokens and some 130 behind them.
    prefixes: keep the keys and values of prompts and answers, while there is room, for requests that begin alike.
    activations: of projections that were published with FP8 weights. "exact" reads the weights, and what they are
    multiplied with stays as it is; "as published" calls the modules, which round that to eight bits too.
    draft_dtype: "fp8" drafts by copies of the draft's projections in eight bits, with a scale for each row, until it
    is restored. The target decides as before, so the output is the same. `ea_layer.topK_genrate` drafts by the head's
    own. None: as they are.
    """

    strict: bool = False
    patch_modules: bool = True
    kernels: bool | None = None
    cuda_graph: bool | None = None
    megakernel: bool | str = "auto"
    verify_strategy: str = "target_match"
    suffix_drafts: int = 0
    cache_tokens: int | None = None
    prefixes: bool = True
    activations: str = EXACT
    draft_dtype: str | None = None

    def __post_init__(self) -> None:
        self._check_switches("verify_strategy", "suffix_drafts", "cache_tokens", "activations", "draft_dtype")
        self._check_drafts()
        check_activations(self.activations)
        check_draft_dtype(self.draft_dtype)
        check_cache_tokens(self.cache_tokens)


@dataclass(frozen=True)
class TritonConfig(_Options):
    """Options of `optimize_with_triton`.

    strict: raise where a call of `generate` would run the original, instead of counting it in the report.
    kernels, cuda_graph, megakernel, verify_strategy, cache_tokens, prefixes, activations, draft_dtype: as in
    `EagleTritonConfig`; so is suffix_drafts, and draft="suffix" makes it 15. More than 15 make a head slower: with the
    root they are 16 rows, one tile of a product.
    topk: children of each expanded node of a draft tree. num_steps: drafted levels. num_draft_tokens: nodes of a tree,
    root included. With all three None a head or a `Draft` drafts its own tree; else what is None is 4, 3 and 8 (or as
    many as there are).
    draft_vocabulary: the only tokens that a draft with layers scores, by ids or the first so many; see `EAGLEConfig`.
    """

    strict: bool = False
    kernels: bool | None = None
    cuda_graph: bool | None = None
    megakernel: bool | str = "auto"
    topk: int | None = None
    num_steps: int | None = None
    num_draft_tokens: int | None = None
    verify_strategy: str = "target_match"
    suffix_drafts: int = 0
    draft_vocabulary: int | Collection[int] | None = None
    cache_tokens: int | None = None
    prefixes: bool = True
    activations: str = EXACT
    draft_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.draft_vocabulary is not None:
            object.__setattr__(self, "draft_vocabulary", checked_vocabulary(self.draft_vocabulary))
        tree = {"topk": self.topk, "num_steps": self.num_steps, "num_draft_tokens": self.num_draft_tokens}
        others = ("verify_strategy", "suffix_drafts", "draft_vocabulary", "cache_tokens", "activations", "draft_dtype")
        self._check_switches(*tree, *others)
        self._check_drafts()
        check_activations(self.activations)
        check_draft_dtype(self.draft_dtype)
        check_cache_tokens(self.cache_tokens)
        for name, value in tree.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an integer or None, got {value!r}")
            if value is not None and value < (least := 2 if name == "num_draft_tokens" else 1):
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if (self.num_draft_tokens or 2) > 1 + self._candidates:
            raise ValueError(
                f"num_draft_tokens counts the root and must be in 2..{1 + self._candidates} for topk {self.topk or 4} "
                f"and num_steps {self.num_steps or 3}, got {self.num_draft_tokens}"
            )

    @property
    def has_tree(self) -> bool:
        """Whether a tree is asked for."""
        return any(value is not None for value in (self.topk, self.num_steps, self.num_draft_tokens))

    @property
    def tree(self) -> TreeSpec:
        """The tree to draft, where the draft has none of its own."""
        nodes = self.num_draft_tokens or min(8, 1 + self._candidates)
        return TreeSpec.dynamic(nodes, (self.num_steps or 3) - 1, self.topk or 4)

    @property
    def _candidates(self) -> int:
        topk = self.topk or 4
        return topk + ((self.num_steps or 3) - 1) * topk**2


class EagleTritonOptions(TypedDict, total=False):
    """The fields of `EagleTritonConfig`, as keyword arguments."""

    strict: bool
    patch_modules: bool
    kernels: bool | None
    cuda_graph: bool | None
    megakernel: bool | str
    verify_strategy: str
    suffix_drafts: int
    cache_tokens: int | None
    prefixes: bool
    activations: str
    draft_dtype: str | None


class TritonOptions(TypedDict, total=False):
    """The fields of `TritonConfig`, as keyword arguments."""

    strict: bool
    kernels: bool | None
    cuda_graph: bool | None
    megakernel: bool | str
    topk: int | None
    num_steps: int | None
    num_draft_tokens: int | None
    verify_strategy: str
    suffix_drafts: int
    draft_vocabulary: int | Collection[int] | None
    cache_tokens: int | None
    prefixes: bool
    activations: str
    draft_dtype: str | None


class Optimized(NamedTuple, Generic[ModelT]):
    """What optimising returns: unpack it, or use it as a context manager that restores at its end."""

    model: ModelT
    originals: Originals

    def __enter__(self) -> Optimized[ModelT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.originals.restore()


def optimize_eagle_with_triton(
    model: ModelT, config: EagleTritonConfig | None = None, **options: Unpack[EagleTritonOptions]
) -> Optimized[ModelT]:
    """Replace the decoding methods of a loaded EaModel; the output stays the same (but for `verify_strategy="topp"`).

    model: an EaModel of this package, of SafeAILab/EAGLE, or of eagle-llm 1.x, on one device. config: see
    `EagleTritonConfig`; its fields can also be given as keyword arguments. Returns the same model and its originals:
    `originals.restore()`, `restore(model)`, or the end of a `with` block around either, gives every replaced
    attribute back, and `originals.report()` says what was replaced and how often it ran. A part of the model that is
    replaced, cast, moved or hooked meanwhile is refused by the next generation; weights may change in place.

    Raises UnsupportedModelError for a model, or a part of one, that is not known, or that has hooks or replaced
    forwards; PatchError if the model is optimised already; ValueError for an unknown option. Nothing is changed then.
    """
    config = _configuration(EagleTritonConfig, config, options)
    _check_original(model)
    family = _family(model)
    check_readable(model)
    roots: dict[str, nn.Module] = {"model": model}
    view, draft = family.read(model)
    read = with_float8(view, draft, roots, config.activations)
    if config.suffix_drafts:
        draft = with_suffix_drafts(read.draft, config.suffix_drafts, view.device)
        draft.read_tree()  # refuses one that has no place for them
        read = read._replace(draft=draft)
    engine = _engine(read, config, roots)
    seams, skipped = (*family.seams(model, engine), generate_seam(model, engine)), {}
    if config.patch_modules and view.ranks is not None:
        skipped = {"ea_layer.topK_genrate, self_attn.forward": "the originals run: ranks share the target (tp_plan)"}
    elif config.patch_modules:
        more, skipped = family.module_seams(model, engine)
        seams += more
    draft_in_use = _draft_in_use(config, engine)
    skipped |= _no_megakernel(config, draft_in_use)
    if skipped and config.strict:
        raise UnsupportedModelError("; ".join(f"{path}: {reason}" for path, reason in skipped.items()))

    def drop_caches() -> None:
        family.drop_caches(model)
        engine.clear()

    engine.notes.update(skipped)
    return _patched(model, seams, drop_caches, engine, draft_in_use)


def optimize_with_triton(
    model: ModelT,
    draft: nn.Module | Draft | str | Path | None = None,
    config: TritonConfig | None = None,
    **options: Unpack[TritonOptions],
) -> Optimized[ModelT]:
    """Replace `generate` of a plain Hugging Face causal language model; the output stays the same (but for
    `verify_strategy="topp"`).

    model: a Llama, Mistral, Qwen2, Qwen3, Qwen3-Next or Qwen3.5 on one device. draft: None decodes plainly; an EAGLE
    head, its directory or hub id, or an EaModel for its head; a causal language model with the target's vocabulary;
    "mtp" for the multi-token-prediction layers beside its weights, or what `load_mtp` makes of them; "suffix" or
    "ngram" for drafts from text that occurred before, without a model; or a `Draft` of one's own. config: see
    `TritonConfig`; its fields can also be given as keyword arguments. Returns the same model and its originals, as
    `optimize_eagle_with_triton` does: `originals.restore()`, `restore(model)` or the end of a `with` block give
    `generate` back.

    `generate` keeps its arguments, defaults, warnings and errors. A call with an argument that the engine does not
    decode by (beams, attention weights) runs the original, and the report names it. Raises
    UnsupportedModelError for a model or a draft that is not known, or that has hooks or replaced forwards; PatchError
    if the model is optimised already; ValueError for an unknown option, and for a tree that the draft cannot grow.
    Nothing is changed then.
    """
    config = _configuration(TritonConfig, config, options)
    _check_original(model)
    if _recognised(model):
        raise UnsupportedModelError(f"{type(model).__name__} is optimised by optimize_eagle_with_triton")
    drafts: Any = draft
    if _recognised(draft):
        drafts = drafts.ea_layer
    elif draft == MTP:
        drafts = load_mtp(model)
    elif isinstance(draft, (str, Path)) and draft not in (SUFFIX, NGRAM):
        drafts = _head_at(draft, model)
    roots: dict[str, nn.Module] = {"model": model}
    if isinstance(drafts, nn.Module) and drafts is not model:
        roots["draft"] = drafts
    read = _read(model, drafts, config, roots)
    view, drafted = read.view, read.draft
    engine = _engine(read, config, roots)
    if config.draft_vocabulary is not None and drafted is not None:
        engine.notes["draft_vocabulary"] = vocabulary_note(beams_of(drafted))
    draft_in_use = _draft_in_use(config, engine)
    if config.strict and (skipped := _no_megakernel(config, draft_in_use)):
        raise UnsupportedModelError(f"megakernel: {skipped['megakernel']}")

    def read_tree() -> TreeSpec:
        if drafted is None:
            return PLAIN
        tree = config.tree.with_grafts(config.suffix_drafts) if config.has_tree else drafted.read_tree()
        view.check_tree(tree, "num_draft_tokens")
        return check_tree(tree, drafted)

    read_tree()
    assistants = _Assistants(engine, read, roots)

    def clear() -> None:
        engine.clear()
        assistants.clear()

    seams = hf_generate.seams(model, Drafting(engine, read_tree), assistants, config.strict)
    return _patched(model, seams, clear, engine, draft_in_use)


def make_draft(draft: Any, view: ModelView, config: TritonConfig) -> Draft | None:
    """The draft for a target that has been read as `view`; heads are read with their target instead.

    Raises TypeError or ValueError for what is none, and UnsupportedModelError for a model that does not fit.
    """
    if isinstance(draft, MTPHead):
        return read_mtp(draft, view, lambda: config.tree, root="draft")
    if config.has_tree and (draft is None or isinstance(draft, str)):
        raise ValueError(f"topk, num_steps and num_draft_tokens shape a model's trees, and draft is {draft!r}")
    if draft is None:
        return None
    if draft == SUFFIX:
        return with_suffix_drafts(None, config.suffix_drafts or SUFFIX_DRAFTS, view.device)
    if draft == NGRAM:
        if config.suffix_drafts:
            raise ValueError(f'suffix_drafts={config.suffix_drafts}: draft="ngram" drafts by n-grams alone')
        return RepeatDraft(NgramSource(NGRAM_DRAFTS))
    if isinstance(draft, Draft):
        if config.has_tree and not draft.any_tree:
            raise ValueError(f"topk, num_steps and num_draft_tokens: {type(draft).__name__} drafts its own tree only")
        return draft
    if not isinstance(draft, nn.Module):
        raise TypeError(f"draft must be None, a head, a model, a Draft or a name, got {type(draft).__name__}")
    return draft_from_causal_lm(draft, view, lambda: config.tree, root="draft")


class _Assistants:
    """What decodes calls of an optimised model that bring a draft of their own; keeps the last one."""

    def __init__(self, engine: Engine, read: Float8Reading, roots: Mapping[str, nn.Module]):
        self._engine, self._read, self._roots = engine, read, roots
        self._last: tuple[Assistance, ModelWatch, Drafting] | None = None

    def __call__(self, wanted: Assistance) -> Drafting:
        """Raises UnsupportedModelError for an assistant that does not fit, or over several ranks, and RuntimeError if
        the target has changed. An assistant that has changed is read again."""
        last = self._last
        if last is None or last[0] != wanted or last[1].change():
            self._engine.check_model()  # what is watched from now on is how it was read
            watch = ModelWatch({} if wanted.model is None else {"assistant_model": wanted.model})
            last = self._last = wanted, watch, self._drafting(wanted)
        return last[2]

    def _drafting(self, wanted: Assistance) -> Drafting:
        view, roots = self._engine.view, dict(self._roots)
        if view.ranks is not None:
            raise UnsupportedModelError("ranks share the target (tp_plan)", "devices")
        draft: Draft
        if wanted.model is None:
            draft = RepeatDraft(NgramSource(wanted.tokens, wanted.ngram))
        else:
            chain = TreeSpec.chain(wanted.tokens)
            draft = draft_from_causal_lm(wanted.model, view, lambda: chain, root="assistant_model")
            roots["assistant_model"] = wanted.model
        try:
            view.check_tree(check_tree(draft.read_tree(), draft))
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error
        return Drafting(self._engine.beside(draft, ModelWatch(roots, self._read.modules)), draft.read_tree)

    def clear(self) -> None:
        """Forget it."""
        self._last = None


def restore(model: ModelT, originals: Originals | None = None) -> ModelT:
    """Give every original of `model` back and return it. `originals`: None takes the model's own.

    Harmless when done already. Raises PatchError if `originals` belong to another model, if there are none and the
    model was never optimised, or if somebody has replaced one of the attributes since; nothing is changed then.
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
    """`restore` by its older name."""
    return restore(model, originals)


def _head_at(draft: str | Path, model: Any) -> DraftHead:
    """A head by its directory or hub id, where its target lies and of its dtype."""
    path = path_of(draft, HEAD_FOLDERS[True])
    if not (Path(path).is_dir() or "/" in path):
        raise ValueError(
            f"draft must be suffix, ngram, mtp, the directory or hub id (owner/name) of a head, a Draft or a model, "
            f"got {draft!r}"
        )
    read_causal_lm(model)  # refuses what is no target
    path = directory_or_hub_id("draft", path)
    try:
        return fit_head(load_head(path, None, text_config(model.config), {}), model)
    except ValueError as error:
        load = f"AutoModelForCausalLM.from_pretrained({path!r})"
        raise ValueError(f"{error}. A draft that is a language model is handed in loaded: draft={load}") from error


def _read(model: Any, draft: Any, config: TritonConfig, roots: dict[str, nn.Module]) -> Float8Reading:
    """A plain model and its draft. A head decides which of the target's layers it sees, so both are read at once."""
    drafted: Draft | None
    if isinstance(draft, DraftHead):
        view, drafted = own_ea_model.read_pair(model, draft)
    else:
        view = read_causal_lm(model)
        drafted = make_draft(draft, view, config)
    read = with_float8(view, drafted, roots, config.activations)
    drafted = read.draft
    if config.draft_vocabulary is not None:
        drafted = with_vocabulary(scoring(drafted, "draft_vocabulary"), config.draft_vocabulary)
    if config.suffix_drafts and draft != SUFFIX:
        drafted = with_suffix_drafts(drafted, config.suffix_drafts, view.device)
    return read._replace(draft=drafted)


def _configuration(kind: type[Any], config: Any, options: Mapping[str, Any]) -> Any:
    if not isinstance(config, (kind, type(None))):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"config must be {article} {kind.__name__}, got {type(config).__name__}; options go by their names"
        )
    return (config or kind()).changed(**options)


def _check_original(model: Any) -> None:
    if patching.MARKER in getattr(model, "__dict__", {}):
        raise PatchError(f"this {type(model).__name__} is optimised already; restore it first")


def _engine(read: Float8Reading, config: EagleTritonConfig | TritonConfig, roots: dict[str, nn.Module]) -> Engine:
    """roots: the models that were read, by the names that messages call them."""
    operations, cuda_graph = choose_operations(read.view.device, config.kernels, config.cuda_graph)
    if config.megakernel is True and read.view.ranks is not None:
        raise UnsupportedModelError(
            "megakernel=True: not supported yet where ranks share the target (tp_plan); leave it out", "devices"
        )
    if config.megakernel is True and not operations.kernels:
        raise ValueError("megakernel=True needs the kernels")
    megakernel = None if config.megakernel == "auto" else bool(config.megakernel)
    verification = Verification(config.verify_strategy)
    watch = ModelWatch(roots, read.modules)
    called = note_on_called(watch.called_projections())
    if called is not None and config.strict:
        raise UnsupportedModelError(f"projections: {called}", "projections")
    engine = Engine(
        read.view,
        read.draft,
        operations,
        cuda_graph,
        megakernel,
        config.strict,
        watch,
        verification,
        cache_tokens=config.cache_tokens,
        prefixes=config.prefixes,
    )
    if not verification.lossless:
        engine.notes["verification"] = verification.summary
    if read.note is not None:
        engine.notes["activations"] = read.note
    if called is not None:
        engine.notes["projections"] = called
    return engine


def _no_megakernel(config: EagleTritonConfig | TritonConfig, draft: Draft | None) -> dict[str, str]:
    """Why the megakernel that was asked for strictly cannot be, as an entry of the report."""
    if not (config.megakernel is True and config.strict):
        return {}
    if draft is None:
        return {"megakernel": "nothing is drafted"}
    from eagle_triton.engine.megakernel_step import unsupported_draft  # needs Triton

    reason = unsupported_draft(draft)
    return {} if reason is None else {"megakernel": reason}


def _draft_in_use(config: EagleTritonConfig | TritonConfig, engine: Engine) -> Draft | None:
    """The engine's draft as it is to draft, while the model is optimised."""
    if config.draft_dtype is None:
        return engine.draft
    draft, engine.notes["draft_dtype"] = float8_draft(engine.draft)
    return draft


class _Notes(Mapping[str, str]):
    """The notes of an engine; that on a draft in eight bits says, too, what its drafts have been worth so far."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __getitem__(self, path: str) -> str:
        note, calls = self._engine.notes[path], self._engine.ops.calls
        if path != "draft_dtype" or not calls["trees_verified"]:
            return note
        return f"{note}; {_tau(calls)}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._engine.notes)

    def __len__(self) -> int:
        return len(self._engine.notes)


def _tau(calls: Mapping[str, int]) -> str:
    """What the drafts have been worth, empty if there were none."""
    steps = calls["trees_verified"]
    return f"tau {1 + calls['drafts_accepted'] / steps:.2f} over {steps} steps" if steps else ""


def _patched(
    model: ModelT,
    seams: tuple[patching.Seam, ...],
    on_change: Callable[[], None],
    engine: Engine,
    draft_in_use: Draft | None,
) -> Optimized[ModelT]:
    """draft_in_use: what the engine drafts with until the model is restored, then again with what it has now."""
    loaded, engine.draft = engine.draft, draft_in_use

    def change() -> None:
        on_change()
        if patching.MARKER not in vars(model):
            engine.draft = loaded
            _RESTORED.add(model)
        if engine.draft is not None:
            engine.draft.forget()

    calls = engine.ops.calls
    originals = patching.apply(seams, model, change, _Notes(engine), calls, lambda: _tau(calls))
    log.info("optimised %s: %d attributes replaced", type(model).__name__, len(originals))
    return Optimized(model, originals)


def _recognised(model: Any) -> bool:
    """Whether it is an EaModel of any family."""
    return any(family.recognise(model) for family in FAMILIES)


def _family(model: Any) -> ModuleType:
    for family in FAMILIES:
        if family.recognise(model):
            return family
    raise UnsupportedModelError(
        f"expected an EaModel (eagle_triton, SafeAILab/EAGLE or eagle-llm 1.x) with base_model and ea_layer, got "
        f"{type(model).__module__}.{type(model).__qualname__}"
    )
