"""Which draft is meant by a name, a directory, a hub id or an object, and loading it for its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from eagle_triton.assembly import ea_package_of
from eagle_triton.demo import path_of
from eagle_triton.engine.drafts.repeats import NgramSource, RepeatDraft
from eagle_triton.families.causal_lm import read_causal_lm
from eagle_triton.models.block_loading import fit_block_drafter, is_block_drafter, load_block_drafter
from eagle_triton.models.families import text_config
from eagle_triton.models.head_loading import fit_head, load_head
from eagle_triton.models.loading import (
    HEAD_FOLDERS,
    TARGET_FOLDER,
    directory_or_hub_id,
    is_assistant,
    is_saved_pair,
    load_assistant,
    load_target,
    read_target_config,
)
from eagle_triton.models.mtp import MTP, load_mtp, tensor_names
from eagle_triton.options import EngineOptions

SUFFIX, NGRAM = "suffix", "ngram"  # names of drafts
SUFFIX_DRAFTS, NGRAM_DRAFTS = 15, 5  # tokens of drafts given by name; 15 and the root fill a tile of a product

Options = TypeVar("Options", bound=EngineOptions)


class DraftChoice(NamedTuple):
    """Where a draft comes from.

    kind: "nothing": no model drafts, but the options may draft from repetition. "in memory": `place` is a model, MTP
    layers or a `Draft`. "own head": the target is an EaModel, or a directory with a target and heads. "head", "block
    drafter", "assistant" (see load_assistant), "layers" (of multi-token prediction) and "model" (a causal language
    model) are in the directory or hub id `place`; without one, layers are stored with the target's weights.
    """

    kind: Literal["nothing", "in memory", "own head", "head", "block drafter", "assistant", "layers", "model"]
    place: Any = None


NOTHING, OWN_HEAD, OWN_LAYERS = DraftChoice("nothing"), DraftChoice("own head"), DraftChoice("layers")


def choose_given(draft: Any, options: Options, argument: str = "draft") -> tuple[DraftChoice, Options]:
    """The draft that an argument means, and the options, with those that its name implies: suffix drafts are an option.

    argument: its name in messages. Raises ValueError for a name that is unknown, or that contradicts the options, and
    FileNotFoundError for a path that does not exist.
    """
    if draft is None:
        return NOTHING, options
    if not isinstance(draft, (str, Path)):
        return DraftChoice("in memory", draft), options
    if draft == SUFFIX:
        return NOTHING, options.changed(suffix_drafts=options.suffix_drafts or SUFFIX_DRAFTS)
    if draft == NGRAM:
        if options.suffix_drafts:
            given = f'{argument}="{NGRAM}" cannot be combined with suffix_drafts={options.suffix_drafts}'
            raise ValueError(f"{given}: leave one of them out")
        return DraftChoice("in memory", RepeatDraft(NgramSource(NGRAM_DRAFTS))), options
    if draft == MTP:
        return OWN_LAYERS, options
    path = path_of(draft, HEAD_FOLDERS[True])
    if not path or not (Path(path).is_dir() or "/" in path):
        raise ValueError(
            f"{argument} must be suffix, ngram, mtp, the directory or hub id (owner/name) of a head, a block drafter "
            f"or an assistant, a Draft or a model, got {draft!r}"
        )
    if is_saved_pair(directory_or_hub_id(argument, path)):
        raise ValueError(
            f"{argument} is a directory with a target and its heads: give one of the heads' directories in it "
            f"({' or '.join(HEAD_FOLDERS.values())}), got {draft!r}"
        )
    return choose_at(path), options


def choose_at(place: str | Path, expected: Literal["head", "model"] = "head") -> DraftChoice:
    """The draft in a directory or hub id, by the names of its tensors: an assistant, or what is expected. Where that is
    a head, it may be a block drafter. Raises FileNotFoundError or ValueError if `place` is neither."""
    folder = HEAD_FOLDERS[True] if expected == "head" else TARGET_FOLDER  # of a model of this package
    path = directory_or_hub_id("draft", path_of(place, folder))
    try:
        names = tensor_names(path)
    except ValueError:  # unreadable files; loading them raises an error that names the draft
        names = set()
    if is_assistant(names):
        return DraftChoice("assistant", path)
    return DraftChoice("block drafter" if expected == "head" and is_block_drafter(names) else expected, path)


def load_draft(choice: DraftChoice, target: Any, name: str = "model") -> Any:
    """The draft, None if there is none. One that is loaded here gets its target's device and dtype.

    target: an EaModel, or a causal language model. name: of the target in messages. Raises UnsupportedModelError for a
    target that cannot have such a draft, ValueError for a draft that does not fit or is something else, and
    FileNotFoundError for missing files.
    """
    kind, place = choice
    if kind in ("nothing", "in memory"):
        return place
    if kind == "own head":
        return target.ea_layer
    base = target if ea_package_of(target) is None else target.base_model
    if kind == "layers":
        return load_mtp(base, place)
    if kind == "model":
        beside = next(base.parameters())
        read_target_config(place, whose="draft")
        return load_target(place, whose="draft", dtype=beside.dtype, device_map={"": beside.device})
    read_causal_lm(base, root=name)  # raises, before anything is loaded, unless it can be a target
    if kind == "assistant":
        return load_assistant(place, base)
    if kind == "block drafter":
        return fit_block_drafter(load_block_drafter(place, text_config(base.config)), base)
    return fit_head(load_head(place, None, base.config, {}), base)
