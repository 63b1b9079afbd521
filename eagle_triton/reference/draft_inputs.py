"""The inputs of a draft head's layer: token embeddings, and the features of the positions before them."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands.draft_inputs import check_draft_inputs
from eagle_triton.reference.layers import rms_norm
from eagle_triton.runtime.row_formats import whole_of
from eagle_triton.runtime.split_sums import SplitSums, total_of


def draft_inputs(
    features: Tensor | SplitSums,
    parents: Tensor | None,
    tokens: Tensor,
    embedding: Tensor,
    *,
    token_norm: Tensor | None = None,
    feature_norm: Tensor | None = None,
    token_eps: float = 0.0,
    feature_eps: float = 0.0,
    zero_centred: bool = False,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """cat(embedding[tokens], features[parents]), each half RMS-normed if its norm is given (EAGLE-3, figure 6).

    features [B, P, H]; parents [B, n] int64 picks a row of features for each token, None takes them in order (n = P);
    tokens [B, n] int64; embedding [V, H]; token_norm, feature_norm [H], see layers.rms_norm for `zero_centred` and
    `round_first`. Returns (inputs [B, n, 2H], the picked features [B, n, H]). Raises ValueError if shapes, dtypes or
    devices do not fit.
    """
    check_draft_inputs(features, parents, tokens, embedding, token_norm, feature_norm)
    features = total_of(features)
    if parents is not None:
        features = features.gather(1, parents[:, :, None].expand(-1, -1, features.shape[-1]))
    left, right = embedding[tokens], features
    if token_norm is not None:
        left = whole_of(rms_norm(left, token_norm, token_eps, zero_centred=zero_centred, round_first=round_first))
    if feature_norm is not None:
        right = whole_of(rms_norm(right, feature_norm, feature_eps, zero_centred=zero_centred, round_first=round_first))
    return torch.cat((left, right), dim=-1), features
