"""What holds for experts of every kind that stay as they are stored: MXFP4, four bits, FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle_triton import optimize_with_triton
from eagle_triton.engine.model.modules import feed_forward
from eagle_triton.engine.operations import make_operations
from eagle_triton.runtime.split_sums import total_of

PROMPT = torch.arange(2, 14)[None]
LONG = PROMPT.repeat(1, 7)  # more rows than one operation takes


def tokens_of(model: Any) -> Tensor:
    """Greedy tokens after LONG."""
    return model.generate(LONG, max_new_tokens=16, do_sample=False)


def check_tokens(model: Any, draft: str | None, expected: Tensor, note: str) -> None:
    """An optimised model gives the `expected` tokens by its experts' own tensors, and its report says so."""
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with optimize_with_triton(model, draft) as (optimised, originals):
        assert torch.equal(tokens_of(optimised), expected)
        assert note in str(originals) and "called as" not in str(originals)
        assert any(entry.path == "experts_swiglu" and entry.calls for entry in originals.report())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places


def check_groups(mixture: Any, by_module: Callable[[Tensor], Tensor]) -> None:
    """Up to 512 rows run in groups of 64 by the weights, more of them by the module."""
    ops = make_operations()
    for rows, groups in ((1, 1), (64, 1), (65, 2), (512, 8), (513, 0)):
        ops.calls.clear()
        x = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(total_of(feed_forward(ops, mixture, x)), by_module(x), rtol=1e-4, atol=1e-5)
        assert ops.calls["experts_down"] == ops.calls["route"] == groups


def check_replaced_is_found(model: Any, layer: int, name: str) -> None:
    """Another tensor in the place of one of a layer's experts is refused by the next generation."""
    experts = model.model.layers[layer].mlp.experts
    with optimize_with_triton(model, "ngram"):
        model.generate(PROMPT, max_new_tokens=2)
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach().clone(), requires_grad=False))
        with pytest.raises(RuntimeError, match=rf"layers\.{layer}\.mlp\.experts\.{name} was replaced"):
            model.generate(PROMPT, max_new_tokens=2)
