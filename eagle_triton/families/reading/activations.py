"""Activations: the names of those that kernels compute, and whether another one may be called as a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.engine.model.model_view import Layer
from eagle_triton.engine.model.modules import MLP
from eagle_triton.engine.operations import Operations

LABELS = {"silu": "SiLU", "gelu_tanh": "GELU with tanh", "gelu": "GELU", "relu2": "squared ReLU"}


@torch.no_grad()
def name_of_activation(activation: Any, known: tuple[str, ...]) -> str | None:
    """The name, of these, of an activation; None: it is another one."""
    if isinstance(activation, nn.Module) and _tensors(activation):
        return None
    probe = _probe(activation)
    if (found := _applied(activation, probe)) is None:
        return None
    alike = (name for name in known if torch.allclose(found, Operations.activate(probe, name), atol=1e-6))
    return next(alike, None)


@torch.no_grad()
def is_elementwise(activation: Any) -> bool:
    """Whether an activation is a module that computes each element alone, and the same each time."""
    if not isinstance(activation, nn.Module):
        return False
    probe = _probe(activation)
    rows = torch.stack((probe, probe.flip(0)))[None]
    found, alone = (_applied(activation, x) for x in (rows, rows.reshape(-1, 1, 1)))
    return found is not None and alone is not None and torch.allclose(found.flatten(), alone.flatten(), rtol=0.02)


def note_on_activations(layers: Iterable[Layer]) -> str | None:
    """The report's note on activations that are called as modules; None if there are none."""
    found = list(layers)
    shared = [mixture.weights.shared for layer in found for mixture in layer.mixtures if mixture.weights is not None]
    blocks = [block for block in (*(layer.mlp for layer in found), *shared) if isinstance(block, MLP)]
    called = [block.activation for block in blocks if isinstance(block.activation, nn.Module)]
    if not called:
        return None
    return f"{len(called)} activations are called as modules, at their own speed; the first: {called[0]}"


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _probe(activation: Any) -> Tensor:
    """Numbers near and far from zero, [66], in the dtype and on the device of the activation's own tensors."""
    near, far = (torch.linspace(-4, 4, 33, dtype=torch.float32, device="cpu") * step for step in (1, 50))
    own = _tensors(activation) if isinstance(activation, nn.Module) else []
    return torch.cat((near, far)).to(own[0]) if own else torch.cat((near, far))


def _applied(activation: Any, x: Tensor) -> Tensor | None:
    """The activation of x; None if it does not take x, or changes its shape or dtype."""
    try:
        found = activation(x)
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    return found if isinstance(found, Tensor) and (found.shape, found.dtype) == (x.shape, x.dtype) else None
