"""The check of the operands of a draft head's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.shapes import check_tensors
from eagle_triton.runtime.split_sums import SplitSums


def check_draft_inputs(
    features: Tensor | SplitSums,
    parents: Tensor | None,
    tokens: Tensor,
    embedding: Tensor,
    token_norm: Tensor | None,
    feature_norm: Tensor | None,
) -> None:
    tensors = {
        "features": (features, "B P H", None),
        "embedding": (embedding, "V H", features.dtype),
        "tokens": (tokens, "B P" if parents is None else "B n", torch.int64),
        "parents": (parents, "B n", torch.int64),
        "token_norm": (token_norm, "H", features.dtype),
        "feature_norm": (feature_norm, "H", features.dtype),
    }
    check_tensors("draft_inputs", tensors)
