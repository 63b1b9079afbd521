"""Checkpoints on disk: their configuration, and what compressed-tensors writes into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def config_of(folder: Path) -> dict[str, Any]:
    """The content of config.json."""
    return dict(json.loads((folder / "config.json").read_text()))


def edited(folder: Path, **changes: Any) -> Path:
    """The folder, with other fields in its config.json."""
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))
    return folder


def in_compressed_tensors(folder: Path, form: str, ignore: tuple[str, ...] = ("lm_head",), **group: Any) -> None:
    """Say in config.json that compressed-tensors has quantised it, in this format. group: what it says of weights and
    inputs."""
    edited(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "ignore": ignore,
            "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        },
    )
