"""Checkpoints in a directory or on the hub: the names of their tensors, and tensors one by one."""

import json
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"


class Checkpoint:
    """A checkpoint's tensors by name, read on demand. files: the file of each. whose: its name in errors."""

    def __init__(self, path: str, hub: Mapping[str, Any], whose: str):
        self.path, self.hub, self.whose = path, hub, whose
        self.folder = Path(path).expanduser()
        self.local = self.folder.is_dir()
        if self.folder.is_file():
            raise ValueError(f"{whose}: expected a directory or a hub id, {path!r} is a file")
        if self.local and hub:
            raise ValueError(f"{whose}: {path!r} is a local directory, so {', '.join(hub)} cannot be given")
        if not self.local:
            self.folder = self._fetch([INDEX, "config.json"])
        self.files: dict[str, str] = read_index(self.folder / INDEX) if (self.folder / INDEX).is_file() else {}
        if not self.local and not self.files:
            self.folder = self._fetch(["*.safetensors"])
        if self.local or not self.files:  # a directory may have files that are not in the index
            beside = [file for file in self.folder.glob("*.safetensors") if file.name not in self.files.values()]
            self.files |= {name: file.name for file in beside for name in names_in(file)}
        if not self.files:
            raise FileNotFoundError(f"{whose}: no weights (*.safetensors) in {path!r}")

    def _fetch(self, patterns: list[str]) -> Path:
        return fetch_from_hub(self.whose, self.path, patterns, self.hub)

    def read(self, prefix: str) -> dict[str, Tensor]:
        """All tensors with this prefix, by their names without the prefix."""
        wanted = [name for name in self.files if name.startswith(prefix)]
        if missing := {self.files[name] for name in wanted if not (self.folder / self.files[name]).is_file()}:
            if self.local:
                raise FileNotFoundError(f"{self.path!r} lacks {', '.join(sorted(missing))}")
            self.folder = self._fetch(sorted(missing))
        tensors = {}
        for name in wanted:
            try:
                with safe_open(self.folder / self.files[name], "pt") as file:
                    tensors[name.removeprefix(prefix)] = file.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(f"{self.files[name]!r} in {self.path!r} cannot be read: {error}") from error
        return tensors


def read_index(file: Path) -> dict[str, str]:
    """The file of each tensor, from an index of weights. Raises ValueError if the file is not such an index."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(file)!r} is not an index of weights: {error!r}") from error


def tensor_names(path: str | Path) -> set[str]:
    """The names of the tensors in a directory or hub id; none if it is neither, or has no *.safetensors."""
    folder = Path(path).expanduser()
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        return set()
    try:
        names = None if folder.exists() else _names_on_hub(str(path))
        return set(Checkpoint(str(path), {}, "checkpoint").files) if names is None else names
    except FileNotFoundError:
        return set()


def _names_on_hub(path: str) -> set[str] | None:
    """The tensor names of a hub id, from the files' headers; None if the hub does not answer."""
    try:
        return set(get_safetensors_metadata(path).weight_map)
    except Exception as error:  # no hub, no such id or no weights: the caller then reads the cache, which raises
        log.info("the hub does not list the tensors of %s: %s", path, error)
        return None


def names_in(file: Path) -> list[str]:
    """The names of the tensors in a safetensors or torch file. Raises ValueError if it cannot be read."""
    try:
        if file.suffix != ".safetensors":
            return list(torch.load(file, "cpu", weights_only=True, mmap=True))
        with safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{str(file)!r} cannot be read, truncated or not weights: {error}") from error


def fetch_from_hub(whose: str, path: str, patterns: list[str], hub: Mapping[str, Any]) -> Path:
    """The local folder of a hub id's files that match the patterns. Raises FileNotFoundError."""
    try:
        return Path(snapshot_download(path, allow_patterns=patterns, **hub))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{whose}: {path!r} is not a directory and cannot be fetched from the hub: {error}"
        ) from error
