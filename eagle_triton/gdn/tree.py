"""Draft trees: the parents of nodes, and the nodes that each node sees.

Node 0 is the root, a parent's index is below its children's, siblings are in ascending order. Candidates are in one
flat order (engine/tree_spec.py): k children of the root, then k for each expanded candidate, level by level; candidate
x is the root's child if x < k, else the child of candidate parent_list[x // k].
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_NODES = 64  # of a tree in one forward: its ancestors are one word


def build_tree_mask_from_parents(
    parent_list: Tensor, top_scores_index: Tensor | None = None, topk: int | None = None
) -> Tensor:
    """The nodes that each node sees, itself and its ancestors: bool [B, N, N].

    parent_list: the parents of a tree's nodes [B, N], or [N] for a mask [N, N]; the root's entry is not read. Or, with
    top_scores_index [B, N - 1] and topk: the results of `generate_draft_tree`. Integers. Raises ValueError if shapes do
    not fit, or if a parent is not before its children.
    """
    if top_scores_index is not None:
        if topk is None:
            raise ValueError("build_tree_mask_from_parents: top_scores_index needs topk")
        return ancestor_mask(candidate_parents(parent_list, top_scores_index, topk))
    if parent_list.dim() not in (1, 2) or not parent_list.numel():
        raise ValueError(f"build_tree_mask_from_parents: parents must be [B, N] or [N], got {list(parent_list.shape)}")
    parents = parent_list.view(-1, parent_list.shape[-1])
    node = torch.arange(parents.shape[1], device=parents.device)
    if bool(((parents < 0) | (parents >= node))[:, 1:].any()):
        raise ValueError(
            "build_tree_mask_from_parents: each node's parent must come before it, and the root first, got "
            f"{parent_list.tolist()}"
        )
    mask = ancestor_mask(parents)
    return mask if parent_list.dim() == 2 else mask[0]


def candidate_parents(parent_list: Tensor, top_scores_index: Tensor, topk: int) -> Tensor:
    """The parents of the nodes in trees of chosen candidates: [B, N] int32, -1 for the root.

    parent_list [B, P] (P is k (D - 1) + 1 for trees that expand k candidates per level; not read below the first);
    top_scores_index [B, N - 1] strictly ascending. Raises ValueError if a candidate does not exist, or if its parent
    was not chosen.
    """
    chosen, blocks = top_scores_index.long(), max(parent_list.shape[1], 1)
    if len(parent_list) != len(chosen) or bool((chosen < 0).any() or (chosen >= topk * blocks).any()):
        raise ValueError(
            f"top_scores_index must name candidates 0..{topk * blocks - 1} of {len(parent_list)} trees, got "
            f"{chosen.tolist()}"
        )
    if bool((chosen[:, 1:] <= chosen[:, :-1]).any()):
        raise ValueError(f"top_scores_index must rise strictly, got {chosen.tolist()}")
    block = chosen // topk
    above = parent_list.long().gather(1, block) if parent_list.shape[1] else block
    match = (chosen[:, None] == above[:, :, None]) & (chosen[:, None] < chosen[:, :, None])  # [B, child, parent]
    orphans = (block > 0) & ~match.any(-1)
    if bool(orphans.any()):
        raise ValueError(f"the parents of some candidates are not in the tree: {chosen[orphans].tolist()}")
    parents = torch.where(block > 0, match.int().argmax(-1) + 1, 0)
    return torch.nn.functional.pad(parents, (1, 0), value=-1).int()


def link_parents(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """The parents [B, N] int32, -1 for the root, of trees given by each node's first child and next sibling.

    next_token, next_sibling [B, N] integers, -1 for none; a node comes after its parent and its elder sibling.
    """
    batch, nodes = next_token.shape
    parents = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=next_token.device)
    for node in range(nodes):
        for link, parent in ((next_token, torch.full_like(parents[:, 0], node)), (next_sibling, parents[:, node])):
            place = link[:, node].long()
            parents.scatter_(1, torch.where(place < 0, nodes, place)[:, None], parent[:, None].clone())
    return parents[:, :nodes].int()


def ancestor_mask(parents: Tensor) -> Tensor:
    """The nodes that each node sees: bool [B, N, N]. parents [B, N]; the root's entry is not read."""
    nodes = parents.shape[1]
    above = torch.nn.functional.pad(parents[:, 1:], (1, 0)).long()
    sees = torch.nn.functional.one_hot(above, nodes).float() + torch.eye(nodes, device=parents.device)
    for _ in range((nodes - 1).bit_length()):  # each product sees twice as far
        sees = ((sees @ sees) > 0).float()
    return sees > 0


def tree_parts(mask: Tensor) -> list[Tensor]:
    """The nodes of trees in parts that one forward can read, each the root and some of its children's subtrees.

    mask [B, N, N]. A tree of at most 64 nodes is one part; larger ones must be equal in all sequences. Returns int64
    indices, ascending. Raises ValueError for larger trees that differ, and for subtrees larger than a part.
    """
    nodes = mask.shape[1]
    if nodes <= MAX_NODES:
        return [torch.arange(nodes, device=mask.device)]
    if bool((mask != mask[:1]).any()):
        raise ValueError(f"trees of more than {MAX_NODES} nodes must be equal in all sequences, got {nodes} nodes")
    subtrees = [mask[0, :, child].nonzero()[:, 0] for child in (mask[0].sum(-1) == 2).nonzero()[:, 0]]
    if max(map(len, subtrees)) >= MAX_NODES:
        raise ValueError(
            f"subtrees below the root must have at most {MAX_NODES - 1} nodes, got {max(map(len, subtrees))}"
        )
    root, parts = subtrees[0].new_zeros(1), []
    part = root
    for subtree in subtrees:
        if len(part) + len(subtree) > MAX_NODES:
            parts.append(part)
            part = root
        part = torch.cat((part, subtree))
    return [part.sort().values for part in (*parts, part)]
