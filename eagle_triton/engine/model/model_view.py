"""A target model in the form that the engine reads, and its forward over new rows of several sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.layer_caches import LayerCaches
from eagle_triton.engine.model.mixers import Mixer, NewRows, rows_at
from eagle_triton.engine.model.modules import (
    MLP,
    Experts,
    ExpertsBeside,
    LayerInputBlock,
    LayerInputs,
    Norm,
    NormedUpdate,
    Projection,
    SharedEmbedding,
    add_norm,
    add_norm_for,
    apply_norm,
    computed,
    embed_norm,
    feed_forward,
    nbytes_of,
    whole_product,
)
from eagle_triton.engine.model.one_launch import OneLaunch, reason_against
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.ranks import Ranks
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.runtime.row_formats import ProductRows, RowFormat, whole_of
from eagle_triton.runtime.split_sums import Product


@dataclass(frozen=True)
class Layer:
    """A decoder layer: x += mixer(input_norm(x)), then x += mlp(post_norm(x)).

    The outputs of mixer and MLP may be normed too (`mixer_norm`, `mlp_norm`), then multiplied by `update_scale`. Any
    norm may be missing: EAGLE-1 heads have no input norm in their first layer. Without an MLP the layer ends after its
    mixer. beside: experts that read x like the
    MLP. input_block: runs last, and reads the layer's part of the view's `layer_inputs`. scale [1], of any dtype:
    multiplies x at the end. parallel: the MLP reads input_norm(x) like the mixer, and there is no post_norm.
    """

    input_norm: Norm | None
    mixer: Mixer
    post_norm: Norm | None
    mlp: MLP | Experts | None
    mixer_norm: Norm | None = None
    mlp_norm: Norm | None = None
    update_scale: float = 1.0
    scale: Tensor | None = None
    beside: ExpertsBeside | None = None
    input_block: LayerInputBlock | None = None
    parallel: bool = False

    @property
    def input_format(self) -> RowFormat | None:
        """The format in which what reads input_norm(x) takes it, see layers.rms_norm."""
        found = self.mixer.input_format
        return None if self.parallel and self.mlp is not None and found != self.mlp.input_format else found

    @property
    def is_llamas(self) -> bool:
        """Whether it is a layer like Llama's."""
        changes = (self.mixer_norm, self.mlp_norm, self.scale, self.beside, self.input_block)
        unchanged = all(change is None for change in changes) and self.update_scale == 1.0
        return unchanged and not self.parallel and self.post_norm is not None and self.mlp is not None

    @property
    def mixtures(self) -> tuple[Experts, ...]:
        blocks = (self.mlp, None if self.beside is None else self.beside.block)
        return tuple(block for block in blocks if isinstance(block, Experts))


@dataclass(frozen=True)
class ModelView:
    """The target model: references into a loaded model; nothing is copied. H hidden size, V vocabulary, F feature
    width.

    feature_layers: the inputs of these layers, concatenated, feed an EAGLE-3 head (F = 3H). Empty: the draft takes the
    last hidden state after the final norm (F = H). ranks: they share the model's matrices, and its layers have only
    this rank's heads, columns and rows. layer_inputs: for layers with an `input_block`. short_rope_length: the longest
    text that the model itself rotates by these frequencies; None: any.
    """

    embedding: Tensor | SharedEmbedding  # [V, H]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Projection  # [V, H]
    feature_layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    ranks: Ranks | None = None
    embedding_scale: float = 1.0  # of embeddings, rounded to their dtype
    embedding_norm: Norm | None = None  # of embeddings
    layer_inputs: LayerInputs | None = None
    short_rope_length: int | None = None

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

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a forward over one row reads; of the embedding only that row."""
        return round(self.bytes_read(1))

    def bytes_read(self, rows: int) -> float:
        """The same for more rows, which choose other experts of a mixture."""
        inputs = None if self.layer_inputs is None else self.layer_inputs.projection
        unread = sum(mixture.bytes_unread(rows) for layer in self.layers for mixture in layer.mixtures)
        return nbytes_of(self.layers, inputs, self.norm, self.head) - unread

    @property
    def has_mixtures(self) -> bool:
        """Whether a layer has experts among which a row chooses."""
        return any(layer.mixtures for layer in self.layers)

    @property
    def reads_pieces(self) -> bool:
        """Whether one forward may read pieces of several prompts."""
        return all(layer.mixer.reads_pieces for layer in self.layers)

    @property
    def reads_prompts_apart(self) -> bool:
        """See `Mixer.reads_prompts_apart`."""
        return any(layer.mixer.reads_prompts_apart for layer in self.layers)

    @property
    def by_token(self) -> bool:
        """Whether each token has its own rows in the caches, which prompts with the same beginning may share."""
        return all(layer.mixer.by_token for layer in self.layers)

    @cached_property
    def reason_against_one_launch(self) -> str | None:
        """Why its layers do not run over one row in one launch; None if they do."""
        return reason_against(self)

    @cached_property
    def one_launch(self) -> OneLaunch | None:
        """Its layers over one row in one launch; None if that is not faster or not possible."""
        return None if self.reason_against_one_launch else OneLaunch(self)

    def sees_all(self, rows: int) -> bool:
        """Whether, in every layer, each of `rows` tokens sees all tokens before it and nothing else is remembered."""
        return all(layer.mixer.sees_all(rows) for layer in self.layers)

    def check_tree(self, spec: TreeSpec, option: str = "spec") -> None:
        """Raise ValueError, with the option's name, if a tree has more nodes than a layer supports."""
        limits = [layer.mixer.max_nodes for layer in self.layers if layer.mixer.max_nodes is not None]
        if limits and spec.nodes > min(limits):
            raise ValueError(
                f"{option}: over recurrent layers a tree must have at most {min(limits)} nodes, got {spec.nodes}"
            )

    def new_caches(self, pages: SlotPages) -> LayerCaches:
        """Empty caches of its layers for some slots, on the device of these slots' pages."""
        mixers = [layer.mixer for layer in self.layers]
        return LayerCaches(mixers, pages.slots, pages, self.dtype, pages.table.device)


def decoder_layer(
    ops: Operations,
    layer: Layer,
    normed: ProductRows,
    x: Tensor,
    cache: Any,
    rows: NewRows,
    layer_inputs: Tensor | None = None,
    last: Tensor | None = None,
) -> tuple[Tensor, Product | NormedUpdate | None]:
    """Run mixer and MLP. normed [B, n, *]: the input. x [B, n, H]: the residual stream. cache: the layer's.
    layer_inputs [B, n, P]: its part of LayerInputs, where it has an `input_block`. last: return these flat rows [m]
    int64 of B * n only, in a causal forward; [m, 1, H].

    Returns x with the mixer's output added, and the MLP's output, which the caller adds; None: it is added already.
    """
    read = normed  # by a parallel MLP
    if last is None:
        update = layer.mixer.forward(ops, normed, cache, rows)
        row_format = None if layer.mlp is None else layer.mlp.input_format
    else:
        update, row_format = layer.mixer.forward_last(ops, normed, cache, rows, last), None
        x, layer_inputs = rows_at(x, last), None if layer_inputs is None else rows_at(layer_inputs, last)
        read = rows_at(whole_of(normed), last) if layer.parallel else normed
    finished = _finished(ops, layer, layer.mixer_norm, update)
    if layer.mlp is None:
        return x, finished
    normed, x = add_norm_for(ops, layer.post_norm, x, finished, rows.in_draft_pass, row_format=row_format)
    update = feed_forward(ops, layer.mlp, read if layer.parallel else normed, rows.tune_for_rows)
    if layer.beside is not None:
        update = layer.beside.added(ops, x, update)
    finished = _finished(ops, layer, layer.mlp_norm, update)
    if layer.input_block is None and layer.scale is None:
        return x, finished
    x = ops.add(computed(ops, finished), x)
    if layer.input_block is not None:
        assert layer_inputs is not None, "the layer's part of the view's layer_inputs"
        x = layer.input_block.added(ops, x, layer_inputs)
    return x if layer.scale is None else (x * layer.scale).to(x.dtype), None


def _finished(ops: Operations, layer: Layer, norm: Norm | None, update: Product) -> Product | NormedUpdate:
    """The term that a mixer or an MLP adds to the residual stream, from its output. The norm of it is left to the pass
    that adds it."""
    if layer.update_scale == 1.0:
        return update if norm is None else NormedUpdate(update, norm)
    if norm is not None:
        update = apply_norm(ops, norm, update)
    return whole_product(ops, update) * layer.update_scale


def target_forward(
    ops: Operations,
    view: ModelView,
    tokens: Tensor,
    caches: LayerCaches,
    lengths: Tensor,
    depths: Tensor | None,
    ancestors: Tensor | None,
    depth: int = 0,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Any]:
    """Run the target over n new tokens per sequence, after the `lengths` committed ones.

    tokens [B, n] int64; lengths [B] int32. depths [B, n] int32: positions are lengths + depths; None: consecutive.
    ancestors [B, n, W]: of trees of `depth` levels below the root; None: causal, and the tokens are committed. active
    [B] bool, of trees that are only a root: the sequences that will commit it. Recurrent layers do so at once. Returns
    the normed last hidden states [B, n, H], the draft's features [B, n, F], and for trees the argument `pending` of the
    caches' commit.
    """
    new_keys = None if ancestors is None else tokens.shape[1]
    rows = NewRows(lengths, lengths, depths, ancestors, new_keys, depth=depth, active=active)
    pending = None if ancestors is None else caches.new_pending(tokens.shape[1], committed=active is not None)
    hidden, features = _forward(ops, view, tokens, caches, rows, pending)
    return hidden, features, pending


def prompt_forward(
    ops: Operations, view: ModelView, tokens: Tensor, caches: LayerCaches, rows: NewRows, last: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the target over pieces of prompts [P, n] int64, and commit them.

    last: return the hidden states of these flat rows [m] int64 of P * n only; None: all. With feature_layers, the last
    layer runs over these rows only. Returns the normed last hidden states [m, 1, H], or [P, n, H], and the features
    [P, n, F].
    """
    return _forward(ops, view, tokens, caches, rows, last=last)


def _forward(
    ops: Operations,
    view: ModelView,
    tokens: Tensor,
    caches: LayerCaches,
    rows: NewRows,
    pending: Any = None,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The normed last hidden states and the features of tokens [B, n], see `target_forward` and `prompt_forward`."""
    layer_inputs = features = None
    if view.layer_inputs is not None:
        layer_inputs = view.layer_inputs.of(ops, tokens, view.embedding[tokens] * view.embedding_scale)
    if view.feature_layers:
        features = torch.empty(*tokens.shape, view.feature_size, dtype=view.dtype, device=view.device)
    x: Tensor | None = None
    update: Product | NormedUpdate | None = None
    for index, layer in enumerate(view.layers):
        norm, row_format, total = layer.input_norm, layer.input_format, None
        if features is not None and index in view.feature_layers:  # the draft reads what this layer reads
            place = sorted(view.feature_layers).index(index)
            total = features.unflatten(-1, (-1, view.hidden_size))[:, :, place]
        if x is None:
            options: dict[str, Any] = dict(scale=view.embedding_scale, own_norm=view.embedding_norm)
            options |= dict(total=total, row_format=row_format)
            normed, x = embed_norm(ops, norm, view.embedding, tokens, **options)
        else:
            normed, x = add_norm_for(ops, norm, x, update, total=total, row_format=row_format)
        if total is not None and x is not total:
            total.copy_(x)
        part = None if layer_inputs is None else layer_inputs[:, :, index]
        read = None if features is None or index + 1 < len(view.layers) else last  # after the last layer
        x, update = decoder_layer(ops, layer, normed, x, caches.layer(index, pending), rows, part, read)
    assert x is not None, "a model has layers"
    hidden, _ = add_norm(ops, view.norm, x, update)
    if features is not None:
        return hidden, features
    return hidden if last is None else rows_at(hidden, last), hidden
