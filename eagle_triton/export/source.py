"""Finds a head and its target: in memory, in one directory, or in two."""

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

    head: DraftHead | BlockDrafter | str  # a module, or its path
    path: str  # of the target
    model: Any | None = None  # the target, if it is in memory

    @property
    def path_for_commands(self) -> str:
        """The target's path, for a command that is typed in any directory."""
        folder = Path(self.path).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.path


def find_source(head: Any, target: Any) -> Source:
    """From arguments of `export_head`. Raises the same errors."""
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
            raise ValueError("target: needed, because a head alone does not name its target")
        return Source(head, saved_target(str(target)))
    if not isinstance(head, (str, Path)):
        raise TypeError(
            "head must be an EaModel, a draft head, a block drafter, a directory or a hub id, got "
            f"{type(head).__name__}"
        )
    path = str(head)
    saved = is_saved_pair(path)
    if target is None and not saved:
        raise ValueError(f"target: needed, because {path!r} does not have the head's target")
    if isinstance(target, nn.Module):
        raise TypeError("target: must be a path for a head that is given by its path")
    head_path = locate(path, None, True)[1] if saved else path
    _check_is_head(head_path)
    return Source(head_path, saved_target(path if target is None else str(target)))


def _check_is_head(path: str) -> None:
    """Raise ValueError for the weights of something else, which needs no export."""
    folder = Path(path_of(path)).expanduser()
    names = [name for file in sorted(folder.glob("*.safetensors")) for name in names_in(file)]
    if names and not any(name.removeprefix("model.") == "fc.weight" for name in names):
        raise ValueError(
            f"head: {path!r} is not a draft head: it has no fc.weight. Draft models and multi-token-prediction layers "
            "need no export: SpeculativeConfig(...).to_vllm() and .to_sglang() say how to serve them"
        )


def _named(path: Any) -> str:
    if not path:
        raise ValueError("target: must be given, as a directory or hub id, because the model has no path")
    return str(path)
