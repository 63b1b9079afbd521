"""Where a head and its target are: in memory, in one directory, or in two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from eagle_triton.demo import path_of
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.checkpoint import names_in
from eagle_triton.models.heads import DraftHead
from eagle_triton.models.loading import is_saved_pair, locate, saved_target


@dataclass(frozen=True)
class Source:
    """A head or a block drafter, and the model that it drafts for."""

    head: DraftHead | BlockDrafter | str  # as a module, or where one lies
    path: str  # of the target
    model: Any | None = None  # the target, where it is in memory

    @property
    def path_for_commands(self) -> str:
        """The target's path, from wherever a command is typed."""
        folder = Path(self.path).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.path


def find_source(head: Any, target: Any) -> Source:
    """From what `export_head` takes. Raises as it does."""
    if hasattr(head, "ea_layer") and hasattr(head, "base_model"):
        if not isinstance(head.ea_layer, DraftHead):
            raise TypeError(
                f"head: {type(head).__module__}.{type(head).__name__} is not this package's EaModel; give the "
                "directory of its head"
            )
        path = head.base_model_name_or_path if target is None else str(target)
        return Source(head.ea_layer, saved_target(_named(path)), head.base_model)
    if isinstance(head, (DraftHead, BlockDrafter)):
        if isinstance(target, nn.Module):
            return Source(head, _named(getattr(target.config, "_name_or_path", "")), target)
        if target is None:
            raise ValueError("target: needed, because a head alone does not say what it drafts for")
        return Source(head, saved_target(str(target)))
    if not isinstance(head, (str, Path)):
        raise TypeError(
            "head must be an EaModel, a draft head, a block drafter, a directory or a hub id, got "
            f"{type(head).__name__}"
        )
    path = str(head)
    saved = is_saved_pair(path)
    if target is None and not saved:
        raise ValueError(f"target: needed, because {path!r} does not hold the model that the head drafts for")
    if isinstance(target, nn.Module):
        raise TypeError("target: a head that is given by its path needs the target's path too")
    head_path = locate(path, None, True)[1] if saved else path
    _check_is_head(head_path)
    return Source(head_path, saved_target(path if target is None else str(target)))


def _check_is_head(path: str) -> None:
    """ValueError for the weights of something else, which need no export."""
    folder = Path(path_of(path)).expanduser()
    names = [name for file in sorted(folder.glob("*.safetensors")) for name in names_in(file)]
    if names and not any(name.removeprefix("model.") == "fc.weight" for name in names):
        raise ValueError(
            f"head: {path!r} is no draft head: it has no fc.weight. Draft models and multi-token-prediction layers are "
            "served as they lie: SpeculativeConfig(...).to_vllm() and .to_sglang() say how"
        )


def _named(path: Any) -> str:
    if not path:
        raise ValueError("target: needed, because the model does not say where it came from: a directory or hub id")
    return str(path)
