"""Target and draft in memory: as they were handed in, or from where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_triton.inference.config import EAGLEConfig
from eagle_triton.inference.draft_choice import DraftChoice, HeadAt, InMemory, LayersAt, ModelAt, OwnHead
from eagle_triton.models.ea_model import EaModel
from eagle_triton.models.loading import load_target, load_tokenizer, locate, read_target_config, saved_target
from eagle_triton.models.mtp import load_mtp
from eagle_triton.models.target import text_config

NAMES = "target", "draft"  # of paths, in what is said of them


def target_in_memory(
    target_model: Any, choice: DraftChoice, config: EAGLEConfig, device: torch.device | None, tp_plan: str | None
) -> tuple[Any, Any | None]:
    """The target, an EaModel where its path or a draft's has a head, and its tokenizer if one is known.

    Arguments as of `read_pair`. Raises TypeError for what is no target, ValueError and FileNotFoundError for a path.
    """
    if isinstance(target_model, (str, Path)):
        return _load(str(target_model), choice, config, device, tp_plan)
    if tp_plan is not None:
        raise ValueError("tp_plan goes with a target_model that is given by its path; another is spread as it is")
    if isinstance(choice, HeadAt):
        raise TypeError("draft_model: a path goes with a target_model that is given by its path too")
    if not isinstance(target_model, nn.Module):
        raise TypeError(
            f"target_model must be an EaModel, a causal language model or a path, got {type(target_model).__name__}"
        )
    return target_model, getattr(target_model, "tokenizer", None)


def _load(
    path: str, choice: DraftChoice, config: EAGLEConfig, device: torch.device | None, tp_plan: str | None
) -> tuple[Any, Any | None]:
    """Weights are read to where they stay: the device, or where ranks that share the target settle."""
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with_head, head = isinstance(choice, (HeadAt, OwnHead)), choice.path if isinstance(choice, HeadAt) else None
    if with_head:
        locate(path, head, None, NAMES)  # which says what is wrong by these names
    place = saved_target(path)
    dtype = config.dtype or (torch.float32 if where.type == "cpu" else _stored_dtype(place))
    placed: dict[str, Any] = {"device_map": {"": where}} if tp_plan is None else {"tp_plan": tp_plan}
    if with_head:
        model = EaModel.from_pretrained(path, head, None, dtype=dtype, **placed)
        return model, model.tokenizer
    read_target_config(place, hybrids=True)
    return load_target(place, hybrids=True, dtype=dtype, **placed), load_tokenizer(place)


def _stored_dtype(path: str) -> torch.dtype:
    """The dtype that a checkpoint's configuration names, float32 if it names none."""
    config = read_target_config(path, hybrids=True)
    parts = (config, text_config(config))
    named = [getattr(part, name, None) for part in parts for name in ("dtype", "torch_dtype")]
    return next((dtype for dtype in named if isinstance(dtype, torch.dtype)), torch.float32)


def draft_in_memory(choice: DraftChoice, target: Any, causal_lm: nn.Module) -> Any | None:
    """What drafts, where its target lies and of its dtype if it is loaded; None: no model does.

    causal_lm: the target itself, without a head. Raises ValueError and FileNotFoundError for a path.
    """
    if isinstance(choice, InMemory):
        return choice.model
    if isinstance(choice, (HeadAt, OwnHead)):
        return target.ea_layer
    if isinstance(choice, LayersAt):
        return load_mtp(causal_lm, choice.path)
    if isinstance(choice, ModelAt):
        beside = next(causal_lm.parameters())
        read_target_config(choice.path, whose=NAMES[1])
        return load_target(choice.path, whose=NAMES[1], dtype=beside.dtype, device_map={"": beside.device})
    return None
