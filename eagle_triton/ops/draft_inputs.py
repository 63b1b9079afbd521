"""The inputs of a draft head's layer: token embeddings beside the features of the positions before them.

    inputs[b, i] = cat(norm_t(embedding[tokens[b, i]]), norm_f(features[b, parents[b, i]]))

| name           | shape        | dtype, layout                                               |
|----------------|--------------|-------------------------------------------------------------|
| features       | [B, P, H]    | fp16, bf16 or fp32, or SplitSums, which are added up here    |
| parents        | [B, n]       | int64; absent: position i reads feature i                   |
| tokens         | [B, n]       | int64                                                       |
| embedding      | [V, H]       | as features; rows are contiguous                            |
| inputs, picked | [B, n, 2H], [B, n, H] | as features                                        |

Numerics: as layers.rms_norm; without a norm, copies.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.operands.draft_inputs import check_draft_inputs
from eagle_triton.ops.layers.norms import check_contiguous, load_row_weight, norm_row_by
from eagle_triton.ops.views import Matrix, view
from eagle_triton.runtime.launch import DRAFT_WARPS
from eagle_triton.runtime.overlap import await_others, let_next_start, overlapped
from eagle_triton.runtime.split_sums import SplitSums


class Norm(NamedTuple):
    """A norm's weight [H] or None, and its epsilon."""

    weight: Tensor | None
    eps: float


@triton.jit(do_not_specialize_on_alignment=["parents_ptr", "tokens_ptr", "count", "features"])
def _draft_inputs_kernel(
    values_ptr,
    parents_ptr,
    tokens_ptr,
    embedding,
    token_norm,
    feature_norm,
    inputs_ptr,
    picked_ptr,
    count,
    features,
    stride_split,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * n, 2): a program makes one half of one row, the token's or the feature's."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    inputs = inputs_ptr + row * (2 * size)
    weight = None
    if tl.program_id(1) == 0:
        if token_norm.weight is not None:
            weight = load_row_weight(token_norm.weight, size, BLOCK, ZERO_CENTRED)
        await_others(PDL)
        token = embedding.ptr + tl.load(tokens_ptr + row) * embedding.row
        norm_row_by(token, weight, None, inputs, None, 0, token_norm.eps, size, BLOCK, 1, ZERO_CENTRED, ROUND_FIRST)
    else:
        if feature_norm.weight is not None:
            weight = load_row_weight(feature_norm.weight, size, BLOCK, ZERO_CENTRED)
        await_others(PDL)
        feature = row
        if parents_ptr is not None:
            feature = row // count * features + tl.load(parents_ptr + row)
        norm_row_by(
            values_ptr + feature * size,
            weight,
            None,
            inputs + size,
            picked_ptr + row * size,
            stride_split,
            feature_norm.eps,
            size,
            BLOCK,
            SPLITS,
            ZERO_CENTRED,
            ROUND_FIRST,
        )


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
    """Embeddings and features side by side, each normed where its norm is given; see reference.draft_inputs.

    Returns (inputs [B, n, 2H], the picked features [B, n, H]). Raises ValueError if shapes, dtypes, devices or strides
    do not fit.
    """
    check_draft_inputs(features, parents, tokens, embedding, token_norm, feature_norm)
    for norm in (token_norm, feature_norm):
        check_contiguous("draft_inputs", norm)
    if embedding.stride(1) != 1:
        raise ValueError(f"draft_inputs: the embedding's rows must be contiguous, got strides {embedding.stride()}")
    (batch, count), size = tokens.shape, embedding.shape[1]
    inputs = embedding.new_empty(batch, count, 2 * size)
    picked = embedding.new_empty(batch, count, size)
    if not picked.numel():
        return inputs, picked
    values = features.sums if isinstance(features, SplitSums) else features
    values = values.contiguous()
    splits = len(values) if isinstance(features, SplitSums) else 1
    block = triton.next_power_of_2(size)
    overlapped(_draft_inputs_kernel, (batch * count, 2), embedding.device)(
        values,
        None if parents is None else parents.contiguous(),
        tokens.contiguous(),
        view(Matrix, embedding),
        Norm(token_norm, token_eps),
        Norm(feature_norm, feature_eps),
        inputs,
        picked,
        count,
        features.shape[1],
        values.stride(0) if splits > 1 else 0,
        size,
        block,
        splits,
        zero_centred,
        round_first,
        num_warps=DRAFT_WARPS,
    )
    return inputs, picked
