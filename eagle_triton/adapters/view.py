"""What an adapter hands over: frozen dataclasses of references into a loaded model. Nothing is copied.

Shapes: H hidden size, I intermediate size, Hq/Hkv query and key/value heads, d head dim, V vocabulary,
Vd draft vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_triton.tree_spec import TreeSpec


@dataclass(frozen=True)
class Norm:
    """RMSNorm: `weight` [H] (or [d] for q/k norms) and `eps`."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Projection:
    """A matrix product `x @ weight.T + bias`, or `module` called as it is (quantised, sharded)."""

    weight: Tensor | None = None  # [out, in]
    bias: Tensor | None = None  # [out]
    module: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding in the half-rotation layout: angle = position * inv_freq, scaled by `attention_scaling`."""

    inv_freq: Tensor  # [d / 2] float32
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. For an EAGLE-3 head q, k and v read 2H columns."""

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: Rotary
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sliding_window: int | None = None


@dataclass(frozen=True)
class MLP:
    """SwiGLU block, or `module` called as it is."""

    gate: Projection | None = None
    up: Projection | None = None
    down: Projection | None = None
    module: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Layer:
    """A decoder layer. EAGLE-1 heads have no input norm in their first layer."""

    input_norm: Norm | None
    attention: Attention
    post_norm: Norm
    mlp: MLP


@dataclass(frozen=True)
class ModelView:
    """The target model.

    `feature_layers`: the layers whose inputs, concatenated, feed an EAGLE-3 head (F = 3H); empty for EAGLE-1/2,
    which take the last hidden state after the final norm (F = H).
    """

    embedding: Tensor  # [V, H]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Projection  # [V, H]
    feature_layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def feature_size(self) -> int:
        return self.hidden_size * max(len(self.feature_layers), 1)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


@dataclass(frozen=True)
class DraftView:
    """What drafts: a head on the target's features, or a model of its own.

    eagle3: x = fc(features) on target features (its own hidden state passes as it is); the layer reads
    cat(input_norm(embedding), hidden_norm(x)); logits = head(norm(hidden)); target id = id + d2t[id].
    eagle1: x = fc(cat(embedding, features)); plain layers; logits = the target's head on the hidden state.
    model: a causal language model with the target's vocabulary; it reads tokens alone, and has no fc.
    """

    kind: str  # "eagle3", "eagle1" or "model"
    embedding: Tensor  # [V, H]
    fc: Projection | None
    layers: tuple[Layer, ...]
    head: Projection  # [Vd, H]
    read_tree: Callable[[], TreeSpec]  # the model's tree parameters may change between generations
    hidden_norm: Norm | None = None
    norm: Norm | None = None
    d2t: Tensor | None = None  # [Vd] int64
    norm_before_residual: bool = False  # eagle3: the residual is hidden_norm(x) instead of x

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1] if self.fc is None or self.fc.weight is None else self.fc.weight.shape[0]

    def rows(self, lengths: Tensor) -> Tensor:
        """Rows [B] int32 of the draft's cache, the root's included, where the target's has `lengths`, the root's not.

        A head's row p pairs the features of p with token p + 1, and so none belongs to token 0; a model has a row for
        every token.
        """
        return lengths + 1 if self.kind == "model" else lengths
