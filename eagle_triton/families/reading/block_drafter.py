"""A block drafter as a draft of its target."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle_triton.engine.drafts.block import (
    MOST_CANDIDATES,
    BlockConv,
    BlockDraft,
    Correction,
    Domino,
    MarkovHead,
    RecurrentMarkovHead,
    Selector,
    window_for,
)
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.modules import Rotary
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.module_reader import ModuleReader, check_fits_target, check_readable
from eagle_triton.models.block_drafter import BlockDrafter, BlockDrafterConfig
from eagle_triton.models.heads import rotary_frequencies, rotary_scale


def read_block_drafter(drafter: BlockDrafter, target: ModelView, *, root: str = "draft_model") -> BlockDraft:
    """A block drafter as the draft of `target`, which was read with the drafter's `feature_layers`.

    Raises UnsupportedModelError unless it has the target's device, vocabulary and dtype.
    """
    check_readable(drafter, root)
    if not isinstance(target.embedding, Tensor) or target.ranks is not None:
        raise UnsupportedModelError(
            f"{root}: block drafters do not support a target that is sharded over several devices (tp_plan): "
            "load the target on one device",
            "devices",
        )
    config, read = drafter.config, ModuleReader(drafter, root)
    norm = read.norm("norm")
    check_fits_target(root, target, config.vocab_size, norm.weight)
    head = read.projection("lm_head") if config.own_head else target.head
    scaled = replace(head, factor=config.logit_scale, divisor=1.0, cap=config.logit_cap)
    layers = range(config.num_hidden_layers)
    embedding = read.embedding("embed_tokens") if config.own_embedding else target.embedding
    return BlockDraft(
        embedding=embedding,
        layers=tuple(_layer(read, config, index) for index in layers),
        head=head if (scaled.factor, scaled.divisor, scaled.cap) == (head.factor, head.divisor, head.cap) else scaled,
        tree_reader=lambda: read_tree(drafter),
        norm=norm,
        d2t=drafter.d2t,
        fc=read.projection("fc"),
        hidden_norm=read.norm("hidden_norm"),
        feature_layers=config.feature_layers,
        block=config.block_size,
        mask_token=config.mask_token_id,
        shifted=config.shifted,
        causal=config.causal,
        correction=_correction(read, config, embedding),
        convs=tuple(_convs(read.at(f"layers.{index}"), config) for index in layers) if config.conv_taps else (),
        embedding_scale=config.embedding_scale,
    )


def read_tree(drafter: BlockDrafter) -> TreeSpec:
    """The current tree parameters: as deep as a block can draft, the best nodes of each level expanded. If paths
    have states, the beam is as wide as the tree has drafts, so that its paths are the best ones."""
    nodes, top_k, drafts = drafter.total_token, drafter.top_k, drafter.config.drafts
    levels = min(drafts, nodes - 1)
    beam = 1 if top_k == 1 else nodes - 1 if drafter.config.recurrent else max(top_k, nodes // 4 + 1)
    return TreeSpec(nodes, top_k, tuple(min(beam, top_k ** min(level, 8)) for level in range(1, levels)))


def _layer(read: ModuleReader, config: BlockDrafterConfig, index: int) -> Layer:
    window = config.windows[index]
    return read.layer(
        f"layers.{index}",
        Rotary(rotary_frequencies(config, read.module.fc.weight.device), rotary_scale(config)),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        sliding_window=window if window is None or config.causal[index] else window_for(window, config.block_size),
    )


def _correction(read: ModuleReader, config: BlockDrafterConfig, embedding: Tensor) -> Correction | None:
    drafter, most = read.module, min(MOST_CANDIDATES, config.draft_vocab_size)
    if config.markov_head:
        head = read.at("markov_head")
        w1, w2 = head.embedding("markov_w1"), head.at("markov_w2").tensor("weight")
        if config.markov_head == "rnn":
            return RecurrentMarkovHead(successors=w2, candidates=most, w1=w1, joint=head.projection("joint_proj"))
        gate = head.projection("gate_proj") if config.markov_head == "gated" else None
        return MarkovHead(successors=w2, candidates=most, w1=w1, gate=gate)
    if config.gru_size:
        gru = read.at("prefix_gru")
        return Domino(
            successors=read.at("embed_proj.2").tensor("weight"),
            candidates=most,
            first_level=config.gru_start,
            embedding=embedding,
            embedding_scale=config.embedding_scale,
            inputs=gru.tensor("weight_ih_l0"),
            recurrent=gru.tensor("weight_hh_l0"),
            projection=read.projection("embed_proj.0"),
        )
    if config.selector_top_k:
        selector = read.at("candidate_selector")
        successors = selector.embedding("successor_codebook")
        if drafter.d2t is not None:
            successors = successors[drafter.to_target_ids(torch.arange(len(drafter.d2t), device=successors.device))]
        return Selector(
            successors=successors,
            candidates=config.selector_top_k,
            predecessors=selector.embedding("predecessor_codebook"),
            hidden=selector.projection("hidden_projection"),
        )
    return None


def _convs(layer: ModuleReader, config: BlockDrafterConfig) -> tuple[BlockConv, BlockConv]:
    """The convolutions around a layer's attention, and those around its MLP."""
    around = layer.at("attention_conv"), layer.at("mlp_conv")
    first, second = (
        BlockConv(conv.tensor("base_kernel"), conv.projection("kernel_projection"), config.conv_group)
        for conv in around
    )
    return first, second
