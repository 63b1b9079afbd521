"""What a draft head's layer reads: token embeddings beside the features of the positions before them."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.reference.layers import rms_norm
from eagle_triton.runtime.float8_pair import whole_of
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
) -> tuple[Tensor, Tensor]:
    """cat(embedding[tokens], features[parents]), each half RMS-normed where its norm is given (EAGLE-3, figure 6).

    features [B, P, H]; parents [B, n] int64 picks a row of features for each token, None takes them in order (n = P);
    tokens [B, n] int64; embedding [V, H]; token_norm, feature_norm [H], see layers.rms_norm for `zero_centred`. Returns
    (inputs [B, n, 2H], the picked features [B, n, H]). Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_draft_inputs(features, parents, tokens, embedding, token_norm, feature_norm)
    features = total_of(features)
    if parents is not None:
        features = features.gather(1, parents[:, :, None].expand(-1, -1, features.shape[-1]))
    left, right = embedding[tokens], features
    if token_norm is not None:
        left = whole_of(rms_norm(left, token_norm, token_eps, zero_centred=zero_centred))
    if feature_norm is not None:
        right = whole_of(rms_norm(right, feature_norm, feature_eps, zero_centred=zero_centred))
    return torch.cat((left, right), dim=-1), features


def check_draft_inputs(
    features: Tensor | SplitSums,
    parents: Tensor | None,
    tokens: Tensor,
    embedding: Tensor,
    token_norm: Tensor | None,
    feature_norm: Tensor | None,
) -> None:
    if features.dim() != 3 or embedding.ndim != 2 or features.shape[-1] != embedding.shape[1]:
        raise ValueError(
            "draft_inputs: features [B, P, H] and embedding [V, H] expected, got "
            f"{tuple(features.shape)} and {tuple(embedding.shape)}"
        )
    batch, count, hidden = features.shape
    width = tokens.shape[-1] if parents is not None else count
    for name, value in (("tokens", tokens), ("parents", parents)):
        if value is not None and (
            tuple(value.shape) != (batch, width) or value.dtype != torch.int64 or value.device != features.device
        ):
            raise ValueError(
                f"draft_inputs: {name} must be int64 {[batch, width]} on {features.device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
    for name, value, shape in (
        ("embedding", embedding, tuple(embedding.shape)),
        ("token_norm", token_norm, (hidden,)),
        ("feature_norm", feature_norm, (hidden,)),
    ):
        if value is not None and (
            tuple(value.shape) != shape or value.dtype != features.dtype or value.device != features.device
        ):
            raise ValueError(
                f"draft_inputs: {name} must be {features.dtype} {list(shape)} on {features.device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
