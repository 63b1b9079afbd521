"""Operands for growing a draft tree, and their checks; see reference.tree_decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.operands.ancestors import WORD
from eagle_triton.operands.shapes import check_tensors


class Expansion(NamedTuple):
    """The children of a level's nodes, and the `width` of them that become the next level's nodes (its beam)."""

    child_scores: Tensor  # [B, P * K] float32, cumulative log-probabilities
    chosen: Tensor  # [B, width] int64: the beam's children, first_candidate + their places among the P * K
    parents: Tensor  # [B, width] int64: their parents, among the P
    tokens: Tensor  # [B, width] int64
    scores: Tensor  # [B, width] float32
    ancestors: Tensor  # [B, width, W] int64 over beam slots, own bit included


def check_offsets(logits: Tensor, offsets: Tensor | None) -> None:
    check_tensors("topk", {"logits": (logits, "R V", None), "offsets": (offsets, "V, contiguous", torch.int64)})


def check_expand_beam(
    parent_scores: Tensor,
    log_probs: Tensor,
    tokens: Tensor,
    parent_ancestors: Tensor,
    first_slot: int,
    width: int,
    selected: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    name, (out_tokens, out_scores, out_chosen) = "expand_beam", (None, None, None) if out is None else out
    sizes = check_tensors(name, {"log_probs": (log_probs, "B>0 P>0 K>0", torch.float32)})
    children = sizes["P"] * sizes["K"]
    tensors = {
        "tokens": (tokens, "B children", torch.int64),
        "parent_scores": (parent_scores, "B P", torch.float32),
        "parent_ancestors": (parent_ancestors, "B P W", torch.int64),
        "selected": (selected, "width, contiguous", torch.int64),
        "out tokens": (out_tokens, "B children, contiguous rows", torch.int64),
        "out scores": (out_scores, "B children, contiguous rows", torch.float32),
        "out chosen": (out_chosen, "B width, contiguous rows", torch.int64),
    }
    sizes = check_tensors(name, tensors, device=log_probs.device, **sizes, children=children, width=width)
    if not 0 <= width <= children or not 0 <= first_slot <= sizes["W"] * WORD - width:
        raise ValueError(
            f"expand_beam: expected 0 <= width <= {children} children and slots within {sizes['W']} words, got width "
            f"{width} and first_slot {first_slot}"
        )


def check_build_tree(
    root: Tensor,
    candidates: Tensor,
    scores: Tensor,
    beam_candidates: Tensor,
    nodes: int,
    top_k: int,
    selected: Tensor | None,
    grafted: Tensor | None,
    lengths: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    if nodes < 1 or top_k < 1:
        raise ValueError(f"build_tree: nodes and top_k must be at least 1, got {nodes} and {top_k}")
    tensors = {
        "candidates": (candidates, "B C", torch.int64),
        "scores": (scores, "B C", torch.float32),
        "beam_candidates": (beam_candidates, "B S", torch.int64),
        **_roots_and_trees(root, lengths, out),
        "selected": (selected, "drafts, contiguous", torch.int64),
        "grafted": (grafted, "B J", torch.int32),
    }
    count = check_tensors("build_tree", tensors, drafts=nodes - 1, N=nodes, W=-(-nodes // WORD))["C"]
    if nodes - 1 > count:
        raise ValueError(f"build_tree: nodes={nodes} needs at least {nodes - 1} candidates, got {count}")
    if grafted is not None and (selected is not None or not 0 < grafted.shape[1] <= count):
        raise ValueError(
            f"build_tree: expected grafted [B, J] with 1 <= J <= {count} and no selected, got J = {grafted.shape[1]}"
            f"{'' if selected is None else ' and selected'}"
        )


def check_best_first_tree(
    root: Tensor,
    log_probs: Tensor,
    tokens: Tensor,
    nodes: int,
    rows: Tensor | None,
    lengths: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    name = "best_first_tree"
    if nodes < 2:
        raise ValueError(f"{name}: nodes must be at least 2, a root and a draft, got {nodes}")
    lattice = "B D M K, contiguous"
    tensors = {
        "log_probs": (log_probs, "B>0 D>0 M>0 K>0, contiguous", torch.float32),
        "tokens": (tokens, lattice, torch.int64),
        "rows": (rows, lattice, torch.int64),
        **_roots_and_trees(root, lengths, out),
    }
    sizes = check_tensors(name, tensors, N=nodes, W=-(-nodes // WORD))
    if rows is None and sizes["M"] != 1:
        raise ValueError(f"{name}: with {sizes['M']} rows in a level, rows must be given: the next row of each token")
    if (paths := paths_of(sizes["D"], sizes["K"], nodes)) < nodes - 1:
        raise ValueError(
            f"{name}: nodes={nodes} needs at least {nodes - 1} paths; {sizes['D']} levels of {sizes['K']} give {paths}"
        )


def _roots_and_trees(
    root: Tensor, lengths: Tensor | None, out: tuple[Tensor, Tensor, Tensor, Tensor] | None
) -> dict[str, tuple[Tensor | None, str, torch.dtype]]:
    tokens, parents, depths, ancestors = (None,) * 4 if out is None else out
    return {
        "root": (root, "B" if lengths is None else "B T", torch.int64),
        "lengths": (lengths, "B, contiguous", torch.int32),
        "out tokens": (tokens, "B N", torch.int64),
        "out parents": (parents, "B N", torch.int32),
        "out depths": (depths, "B N", torch.int32),
        "out ancestors": (ancestors, "B N W", torch.int64),
    }


def paths_of(levels: int, k: int, enough: int) -> int:
    """The number of paths in `levels` levels of k tokens each, counted up to `enough`."""
    total = width = 0
    for _ in range(levels):
        width = (width or 1) * k
        total += width
        if total >= enough:
            break
    return total
