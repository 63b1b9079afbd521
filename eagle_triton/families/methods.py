"""Shared by the replaced generating methods of all families."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.drafts.eagle import EagleDraft
from eagle_triton.engine.drafts.hybrid import model_of
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.models.checks import check_prompt
from eagle_triton.patching import PatchPoint

Steps = Generator[tuple[Tensor, int, int], None, None]  # (sequence so far [1, L + new], new tokens, index of the step)


def method_patch_point(model: Any, name: str, replacement: Callable) -> PatchPoint:
    """A patch point that replaces `model.name`. Raises UnsupportedModelError for other arguments or defaults."""
    original = getattr(model, name, None)
    if original is None:
        raise UnsupportedModelError(f"model.{name} is missing on {type(model).__name__}")
    expected, got = _arguments(replacement), _arguments(original)
    if expected != got:
        raise UnsupportedModelError(f"model.{name} must take {expected}, got {got}: this version is not known")
    return PatchPoint(model, name, replacement, name, "engine")


def _arguments(function: Callable) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, "required" if p.default is p.empty else p.default) for p in parameters]


def draft_of(engine: Engine) -> EagleDraft:
    """The head of an EaModel's engine."""
    draft = model_of(engine.draft)
    assert isinstance(draft, EagleDraft), "every EaModel has a draft head"
    return draft


def tree_of(engine: Engine) -> TreeSpec:
    """The tree of an EaModel's next generation, with everything that drafts for it. Raises as `Draft.check_tree`."""
    assert engine.draft is not None, "every EaModel has a draft"
    tree = engine.draft.read_tree()
    engine.draft.check_tree(tree)
    return tree


def prompt(engine: Engine, input_ids: Tensor) -> Tensor:
    """A checked prompt [1, L] int64 on the model's device. Raises TypeError or ValueError."""
    check_prompt(input_ids, engine.view.vocab_size, max_batch=1)
    return input_ids.to(engine.view.device, torch.int64)


def observed(steps: Steps, after_step: Callable[[], None]) -> Steps:
    """The same steps, with a call of `after_step` after each."""
    with closing(steps):
        for step in steps:
            after_step()
            yield step


def sequences(steps: Steps) -> Generator[Tensor, None, None]:
    """The sequence after each step, [1, L + new] int64."""
    with closing(steps):
        for sequence, _, _ in steps:
            yield sequence


def last(steps: Steps) -> tuple[Tensor, int, int] | None:
    """The last step, None if there was none."""
    end = None
    with closing(steps):
        for end in steps:  # noqa: B007
            pass
    return end


def drop(owner: Any, *names: str) -> None:
    """Remove instance attributes, if they are set."""
    for name in names:
        vars(owner).pop(name, None)
