"""A block drafter as a draft of its target."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from eagle_triton.engine.drafts.block import BlockConv, BlockDraft, MarkovHead, Selector, window_for
from eagle_triton.engine.model.model_view import Layer, ModelView
from eagle_triton.engine.model.modules import Rotary
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.families.reading.module_reader import (
    attribute_at,
    check_fits_target,
    check_readable,
    read_embedding,
    read_layer,
    read_norm,
    read_projection,
    read_tensor,
)
from eagle_triton.models.block_drafter import BlockDrafter
from eagle_triton.models.heads import rotary_frequencies, rotary_scale


def read_block_drafter(drafter: BlockDrafter, target: ModelView, *, root: str = "draft_model") -> BlockDraft:
    """A block drafter as the draft of `target`, which was read with its `feature_layers`.

    Raises UnsupportedModelError unless it lies where the target does, and has its vocabulary and dtype.
    """
    check_readable(drafter, root)
    if not isinstance(target.embedding, Tensor) or target.ranks is not None:
        raise UnsupportedModelError(
            f"{root}: block drafters are not supported yet where the target is sharded over several devices (tp_plan): "
            "load the target on one device",
            "devices",
        )
    config = drafter.config
    norm = read_norm(drafter, "norm", root=root)
    check_fits_target(root, target, config.vocab_size, norm.weight)
    head = read_projection(drafter, "lm_head", root=root) if config.own_head else target.head
    scaled = replace(head, divisor=1 / config.logit_scale, cap=config.logit_cap)
    return BlockDraft(
        embedding=read_embedding(drafter, "embed_tokens", root=root) if config.own_embedding else target.embedding,
        layers=tuple(_layer(drafter, index, root) for index in range(config.num_hidden_layers)),
        head=head if scaled == head else scaled,
        tree_reader=lambda: read_tree(drafter),
        norm=norm,
        d2t=drafter.d2t,
        fc=read_projection(drafter, "fc", root=root),
        hidden_norm=read_norm(drafter, "hidden_norm", root=root),
        feature_layers=config.feature_layers,
        block=config.block_size,
        mask_token=config.mask_token_id,
        shifted=config.shifted,
        causal=config.causal,
        markov=_markov_head(drafter, root),
        convs=tuple(
            _convs(drafter, index, root) for index in range(config.num_hidden_layers if config.conv_taps else 0)
        ),
        selector=_selector(drafter, root),
        embedding_scale=config.embedding_scale,
    )


def read_tree(drafter: BlockDrafter) -> TreeSpec:
    """The tree parameters as they are now: as deep as the block can draft, the best nodes of each level expanded."""
    nodes, top_k, drafts = drafter.total_token, drafter.top_k, drafter.config.drafts
    levels = min(drafts, nodes - 1)
    beam = 1 if top_k == 1 else max(top_k, nodes // 4 + 1)
    return TreeSpec(nodes, top_k, tuple(min(beam, top_k ** min(level, 8)) for level in range(1, levels)))


def _layer(drafter: BlockDrafter, index: int, root: str) -> Layer:
    config, window = drafter.config, drafter.config.windows[index]
    return read_layer(
        drafter,
        f"layers.{index}",
        Rotary(rotary_frequencies(config, drafter.fc.weight.device), rotary_scale(config)),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        sliding_window=window if window is None or config.causal[index] else window_for(window, config.block_size),
        root=root,
    )


def _markov_head(drafter: BlockDrafter, root: str) -> MarkovHead | None:
    if drafter.markov_head is None:
        return None
    where = f"{root}.markov_head"
    return MarkovHead(
        w1=read_embedding(drafter.markov_head, "markov_w1", root=where),
        w2=read_projection(drafter.markov_head, "markov_w2", root=where),
        gate=read_projection(drafter.markov_head, "gate_proj", root=where)
        if drafter.markov_head.gate_proj is not None
        else None,
    )


def _convs(drafter: BlockDrafter, index: int, root: str) -> tuple[BlockConv, BlockConv]:
    """The convolutions around a layer's attention and around its MLP."""

    def conv(name: str) -> BlockConv:
        path = f"layers.{index}.{name}"
        module = attribute_at(drafter, path, nn.Module, root=root)
        coefficients = read_projection(module, "kernel_projection", root=f"{root}.{path}")
        return BlockConv(read_tensor(module, "base_kernel", f"{root}.{path}"), coefficients, drafter.config.conv_group)

    return conv("attention_conv"), conv("mlp_conv")


def _selector(drafter: BlockDrafter, root: str) -> Selector | None:
    if (module := drafter.candidate_selector) is None:
        return None
    where = f"{root}.candidate_selector"
    return Selector(
        predecessors=read_embedding(module, "predecessor_codebook", root=where),
        successors=read_embedding(module, "successor_codebook", root=where),
        hidden=read_projection(module, "hidden_projection", root=where),
        top_k=drafter.config.selector_top_k,
    )
