"""A draft head independent of layouts: its sizes and tensors, its tree, and its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle_triton.export.source import Source, find_source
from eagle_triton.models.block_drafter import BlockDrafterConfig
from eagle_triton.models.families import text_config
from eagle_triton.models.head_loading import check_fit, load_head
from eagle_triton.models.heads import EAGLE31_FIELDS, DraftConfig, DraftHead, Eagle3Head, rope_type
from eagle_triton.models.loading import read_target_config, read_target_embedding
from eagle_triton.models.target import default_feature_layers
from eagle_triton.models.tree import check_dynamic_tree

EMBEDDING = "embed_tokens.weight"
POSITIONS = (
    "max_position_embeddings is raised from {} to the target's {}, because this package drafts that far too; past the "
    "first number, fewer drafts may be accepted"
)


class ExportError(ValueError):
    """An engine cannot run a head. The message names the field, tensor or option. Nothing was written."""


@dataclass(frozen=True)
class Target:
    """The model that a head drafts for. `path`: a directory or hub id, for commands. `config`: of its language
    model."""

    path: str
    config: Any

    @property
    def family(self) -> str:
        """Its model_type."""
        return str(self.config.model_type)


@dataclass(frozen=True)
class Tree:
    """A dynamic tree: nodes with the root, beam passes after the first, beam width, as in `EaModel.from_pretrained`."""

    total_token: int
    depth: int
    top_k: int

    @property
    def levels(self) -> int:
        """Tokens on its longest path without the root; the head drafts it in the same number of passes."""
        return min(self.depth + 1, self.total_token - 1)


@dataclass(frozen=True)
class HeadContents:
    """A head.

    `tensors` have the names of `models.heads`; `embed_tokens.weight` is among them only if it is not the target's.
    `config` names the layers that feed an EAGLE-3 head, has as many positions as the target, and no biases that are
    zero. `trained_positions`: the positions in the head's own config. `chain`: drafts per step in an engine that drafts
    chains.
    """

    eagle3: bool
    config: DraftConfig
    tensors: Mapping[str, Tensor]
    tree: Tree
    target: Target
    trained_positions: int
    chain: int

    @property
    def dtype(self) -> str:
        """The dtype of its matrices, by its name in configurations."""
        return dtype_name(self.tensors)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers with inputs that feed an EAGLE-3 head; none for another head."""
        return self.config.feature_layers or ()

    @property
    def has_own_width(self) -> bool:
        """Whether its hidden states and the target's differ in width."""
        return self.config.target_hidden_size != self.config.hidden_size

    @property
    def eagle31_fields(self) -> dict[str, bool]:
        """The fields of EAGLE 3.1 that are set."""
        return {name: True for name in EAGLE31_FIELDS if getattr(self.config, name)}

    @property
    def notes(self) -> tuple[str, ...]:
        """The changes to the head, for any engine."""
        trained, written = self.trained_positions, self.config.max_position_embeddings
        return (POSITIONS.format(trained, written),) if trained < written else ()


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """The dtype of a draft's matrices, by its name in configurations."""
    return str(tensors["fc.weight"].dtype).removeprefix("torch.")


def read_contents(head: Any, target: Any, tree: Mapping[str, int | None], chain: int | None = None) -> HeadContents:
    """A head from arguments of `export_head`; `tree`: the arguments with a Tree's names. chain: None: as deep as the
    tree. Raises the same errors."""
    source = find_source(head, target)
    config = text_config(read_target_config(source.path) if source.model is None else source.model.config)
    if isinstance(source.head, DraftHead):
        module = source.head
        check_fit(module.config, config, isinstance(module, Eagle3Head))
    else:
        module = load_head(str(source.head), None, config, tree)
    return _contents(module, _own_embedding(module, source), Target(source.path_for_commands, config), tree, chain)


def _own_embedding(head: DraftHead, source: Source) -> Tensor | None:
    """The head's embedding; None if it is the target's."""
    own = head.embed_tokens.weight.detach()
    if own.is_meta:
        return None
    if head.config.hidden_size != head.config.target_hidden_size:
        return own
    model = source.model
    theirs = read_target_embedding(source.path) if model is None else model.get_input_embeddings().weight.detach()
    return None if torch.equal(own, theirs.to(own.device, own.dtype)) else own


def _contents(
    head: DraftHead, embedding: Tensor | None, target: Target, asked: Mapping[str, int | None], chain: int | None
) -> HeadContents:
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name != EMBEDDING}
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    if "fc.bias" in tensors and not tensors["fc.bias"].any():
        del tensors["fc.bias"]
    config, eagle3 = head.config, isinstance(head, Eagle3Head)
    layers = (config.feature_layers or default_feature_layers(target.config.num_hidden_layers)) if eagle3 else None
    settled = config.replace(
        bias="fc.bias" in tensors,
        feature_layers=layers,
        rope_scaling=settled_scaling(config),
        max_position_embeddings=max(config.max_position_embeddings, target.config.max_position_embeddings),
    )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    tree = _tree(head, asked)
    return HeadContents(eagle3, settled, tensors, tree, target, config.max_position_embeddings, chain or tree.levels)


def settled_scaling(config: DraftConfig | BlockDrafterConfig) -> dict[str, Any] | None:
    """The scaling of rotary embeddings, with its kind under the newer name; None if nothing is scaled."""
    kind = rope_type(config.rope_scaling)
    if config.rope_scaling is None or kind == "default":
        return None
    rest = {name: value for name, value in config.rope_scaling.items() if name not in ("type", "rope_type")}
    return {"rope_type": kind, **rest}


def _tree(head: DraftHead, asked: Mapping[str, int | None]) -> Tree:
    """The head's tree with the given changes. Raises ValueError for one that cannot be drafted."""
    changes = {name: value for name, value in asked.items() if value is not None}
    if head.tree_choices is not None and not changes:
        raise ExportError("tree_choices: a fixed tree cannot be exported; give total_token, depth and top_k instead")
    tree = replace(Tree(head.total_tokens + 1, head.depth, head.top_k), **changes)
    check_dynamic_tree(tree.total_token - 1, tree.depth, tree.top_k, head.config.draft_vocab_size)
    return tree
