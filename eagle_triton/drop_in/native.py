"""The generating methods of our own EaModel on the engine: those of SafeAILab's, and its record of accepted lengths."""

from __future__ import annotations

from typing import Any

from eagle_triton.drop_in import upstream
from eagle_triton.drop_in.patching import Seam
from eagle_triton.engine.engine import Engine

module_seams = upstream.module_seams


def seams(model: Any, engine: Engine) -> tuple[Seam, ...]:
    """The four generating methods of the original interface."""

    def remember() -> None:
        model.accept_lengths = engine.accept_lengths

    return upstream.seams(model, engine, after_step=remember, greedy_count_is_tensor=False)


def drop_caches(model: Any) -> None:
    """Drop what one regime has cached and the other must not find."""
    model.ea_layer.reset_kv()
    model.accept_lengths = []
