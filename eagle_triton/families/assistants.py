"""Gemma 4's assistants as drafts: they read their target's keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eagle_triton.engine.drafts.shared_keys import Clusters, SharedKeysDraft
from eagle_triton.engine.model.mixers import Attention
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.modules import Projection
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnknownLayerError, UnsupportedModelError
from eagle_triton.families.causal_lm import LayerReader
from eagle_triton.families.reading.module_reader import ModuleReader, check_fits_target, check_readable
from eagle_triton.families.reading.sharded import outputs_of
from eagle_triton.models.families import check_config, text_config


def draft_from_assistant(
    assistant: Any, target: ModelView, target_config: Any, read_tree: Callable[[], TreeSpec], *, root: str = "draft"
) -> SharedKeysDraft:
    """An assistant of transformers that reads its target's keys and values (Gemma 4's) as the draft of `target`.

    target_config: of the target's language model. read_tree: gives the tree to draft in the next generation. Raises
    UnsupportedModelError for one that does not fit the target.
    """
    check_readable(assistant, root)
    config, expected = text_config(assistant.config), text_config(target_config)
    if expected.model_type != config.model_type or target.ranks is not None:
        got = f"a {expected.model_type}" if target.ranks is None else "shared by several ranks (tp_plan)"
        raise UnsupportedModelError(
            f"{root} is an assistant of {config.model_type} models on one device, and the target is {got}", "heads"
        )
    if reason := check_config(config, f"{root}.model"):
        raise UnknownLayerError(reason)
    owners = [index for index, layer in enumerate(target.layers) if layer.mixer.reads_layer is None]
    sources = {expected.layer_types[index]: index for index in owners}  # the last of each kind
    read = ModuleReader(assistant, root, dtype=target.dtype)
    inner = read.at("model")
    count = len(inner.value("layers", nn.ModuleList))
    if missing := {*config.layer_types[:count]} - sources.keys():
        raise UnsupportedModelError(f"{root} reads {missing.pop()} layers, which the target does not have", "heads")
    reader = LayerReader(inner, config, sources)
    layers = tuple(_with_transformers_window(reader.layer(index)) for index in range(count))
    head, norm = read.projection("lm_head"), inner.norm("norm")
    check_fits_target(root, target, config.vocab_size, norm.weight)
    draft = SharedKeysDraft(
        embedding=target.embedding if isinstance(target.embedding, torch.Tensor) else target.embedding.whole(),
        embedding_scale=target.embedding_scale,
        layers=layers,
        sources=tuple(sources[config.layer_types[index]] for index in range(count)),
        norm=norm,
        head=head,
        input=read.projection("pre_projection"),
        output=read.projection("post_projection"),
        clusters=_clusters(read, head) if assistant.config.use_ordered_embeddings else None,
        tree_reader=read_tree,
    )
    _check_shapes(draft, target, root)
    return draft


def _with_transformers_window(layer: Layer) -> Layer:
    """The layer with a window of one token more: transformers' masks show an assistant so many committed tokens."""
    mixer = layer.mixer
    assert isinstance(mixer, Attention)
    window = mixer.sliding_window
    return layer if window is None else replace(layer, mixer=replace(mixer, sliding_window=window + 1))


def _clusters(read: ModuleReader, head: Projection) -> Clusters:
    ordering, config = read.value("masked_embedding.token_ordering", torch.Tensor), read.module.config
    if not isinstance(head.weight, torch.Tensor) or len(ordering) % config.num_centroids:
        raise UnsupportedModelError(
            f"{read.path}.lm_head must be a plain matrix of {config.num_centroids} equal clusters", "heads"
        )
    centroids = read.projection("masked_embedding.centroids")
    return Clusters(centroids, ordering, head.weight, config.num_centroids, config.centroid_intermediate_top_k)


def _check_shapes(draft: SharedKeysDraft, target: ModelView, root: str) -> None:
    for index, (layer, source) in enumerate(zip(draft.layers, draft.sources, strict=True)):
        mine, theirs = layer.mixer, target.layers[source].mixer
        assert isinstance(mine, Attention) and isinstance(theirs, Attention)
        if mine.cache_shape != theirs.cache_shape:
            raise UnsupportedModelError(
                f"{root}.model.layers.{index} reads key heads and head sizes {mine.cache_shape}, the target's layer "
                f"{source} has {theirs.cache_shape}",
                "heads",
            )
    if (width := outputs_of(draft.output)) != target.hidden_size:
        raise UnsupportedModelError(
            f"{root}.post_projection must have {target.hidden_size} outputs, the target's hidden size, got {width}",
            "heads",
        )
