"""The cost of rounding a target's weights: its loss on a text, before and after."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_triton.models.four_bit_experts import is_stacked
from eagle_triton.models.loading import load_target, load_tokenizer, read_target_config
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.four_bit_weight import FourBitWeight

MOST_TOKENS = 1024
_OF_AN_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class TextLoss:
    """Mean loss of a text's tokens without the first, in nats, before and after rounding."""

    tokens: int
    before: float
    after: float


class LossOnText:
    """A target with weights that are replaced as they are rounded.

    Raises FileNotFoundError for a missing text, ValueError for one that is not UTF-8 or has less than two tokens, and
    for a target without a tokenizer.
    """

    def __init__(self, source: Path, text: Path, device: str) -> None:
        config = read_target_config(str(source), engine=True)
        self.tokens = _tokens(source, text)[: min(MOST_TOKENS, config.max_position_embeddings)]
        if len(self.tokens) < 2:
            raise ValueError(f"text: {str(text)!r} must have at least two tokens, got {len(self.tokens)}")
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)  # before transformers 4.56
        self.model = load_target(str(source), engine=True, dtype=dtype).to(device)
        self.before = self._loss()

    @torch.no_grad()
    def replace(self, name: str, weight: Float8Weight | FourBitWeight) -> None:
        """Give the model a rounded weight, in its own dtype."""
        parameter = _weight(self.model, name)
        parameter.copy_(weight.dequantised(parameter.dtype))

    def result(self) -> TextLoss:
        """The loss before, and with the replaced weights."""
        return TextLoss(len(self.tokens), self.before, self._loss())

    @torch.no_grad()
    def _loss(self) -> float:
        tokens = torch.tensor(self.tokens, device=next(self.model.parameters()).device)
        logits = self.model(tokens[None], use_cache=False).logits[0]
        return float(F.cross_entropy(logits[:-1].float(), tokens[1:]))


def _weight(model: Any, name: str) -> Tensor:
    """A weight of a model by its name in a checkpoint, in which experts are not stacked."""
    found = _OF_AN_EXPERT.fullmatch(name)
    if found is None or not is_stacked(experts := model.get_submodule(found[1])):
        return model.get_parameter(name)
    gate, up = experts.gate_up_proj[int(found[2])].chunk(2)
    return {"gate": gate, "up": up, "down": experts.down_proj[int(found[2])]}[found[3]]


def _tokens(source: Path, text: Path) -> list[int]:
    try:
        words = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {str(text)!r} must be UTF-8: {error}") from error
    tokenizer = load_tokenizer(str(source))
    if tokenizer is None:
        raise ValueError(f"text: {str(source)!r} has no tokenizer, which a text needs")
    return list(tokenizer(words, verbose=False)["input_ids"])
