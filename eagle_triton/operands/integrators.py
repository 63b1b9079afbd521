"""Operands of the functions with the signatures of serving engines, see reference.integrators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

from eagle_triton.operands.shapes import INTEGERS, check_tensors


class TreeMaskMode(IntEnum):
    """FULL_MASK: N rows over prefix and tree for each request; QLEN_ONLY: only the N x N tree block;
    QLEN_ONLY_BITPACKING: one word per node, where bit j means that node j is the node itself or an ancestor."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


def both_spellings(function: Callable) -> Callable:
    """Accept retrieve_* for the arguments named retrive_*."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **{name.replace("retrieve_", "retrive_"): value for name, value in kwargs.items()})

    return call


def packed_dtypes(nodes: int) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of a bit-packed mask's words: for torch's computations, and of the result."""
    if nodes <= 8:
        return torch.uint8, torch.uint8
    return (torch.int16, torch.uint16) if nodes <= 16 else (torch.int32, torch.uint32)


def check_build(
    verified_id: Tensor,
    parent_list: Tensor,
    top_scores_index: Tensor,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
    status: Tensor | None,
) -> None:
    nodes = num_verify_tokens
    if nodes < 2 or topk < 1 or spec_steps < 1 or nodes > 1 + topk + (spec_steps - 1) * topk**2:
        raise ValueError(
            "build_tree: num_verify_tokens must lie in 2 .. 1 + topk + (spec_steps - 1) * topk^2, got "
            f"{nodes} with topk {topk} and spec_steps {spec_steps}"
        )
    if tree_mask_mode not in tuple(TreeMaskMode):
        raise ValueError(f"build_tree: tree_mask_mode must be one of {[*map(int, TreeMaskMode)]}, got {tree_mask_mode}")
    if tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING and nodes > 32:
        raise ValueError(f"build_tree: a bit-packed mask holds at most 32 nodes, got {nodes}")
    parents = f"bs {topk * (spec_steps - 1) + 1}, contiguous" if spec_steps > 1 else "bs any, contiguous"
    tensors = {
        "verified_id": (verified_id, "bs, contiguous", INTEGERS),
        "seq_lens": (seq_lens, "bs, contiguous", INTEGERS),
        "top_scores_index": (top_scores_index, "bs drafts, contiguous", torch.int64),
        "draft_tokens": (draft_tokens, "bs drafts, contiguous", torch.int64),
        "parent_list": (parent_list, parents, torch.int64),
        "status": (status, "bs, contiguous", torch.int32),
    }
    check_tensors("build_tree", tensors, drafts=nodes - 1)


def check_in_place(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> Tensor:
    """Check the arguments of build_tree_in_place. Returns the mask in the dtype that is written."""
    batch, nodes = len(seq_lens), num_verify_tokens
    check_build(
        seq_lens, parent_list, top_scores_index, top_scores_index, seq_lens, topk, spec_steps, nodes, tree_mask_mode,
        None,
    )  # fmt: skip
    packed = tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING
    dtypes = packed_dtypes(nodes) if packed else (torch.bool, torch.uint8, torch.int8)
    tensors = {
        "positions": (positions, "all, contiguous", torch.int64),
        "retrive_index": (retrive_index, "bs N, contiguous", torch.int64),
        "retrive_next_token": (retrive_next_token, "bs N, contiguous", torch.int64),
        "retrive_next_sibling": (retrive_next_sibling, "bs N, contiguous", torch.int64),
        "tree_mask": (tree_mask, "size, contiguous", dtypes),
    }
    sizes = check_tensors("build_tree", tensors, device=seq_lens.device, bs=batch, N=nodes)
    needed = batch * nodes * (1 if packed else nodes)
    for name, size, least in (("positions", sizes["all"], batch * nodes), ("tree_mask", sizes["size"], needed)):
        if size < least:
            raise ValueError(f"build_tree: {name} must have at least {least} elements, got {size}")
    return tree_mask.view(dtypes[0])


def check_verify(
    name: str,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    links: tuple[Tensor, Tensor, Tensor],
    target_predict: Tensor | None = None,
) -> None:
    tensors = {
        "candidates": (candidates, "bs>0 N, contiguous", torch.int64),
        "accept_index": (accept_index, "bs S>0, contiguous", torch.int32),
        "accept_token_num": (accept_token_num, "bs, contiguous", torch.int32),
        "retrive_index": (links[0], "bs N, contiguous", torch.int64),
        "retrive_next_token": (links[1], "bs N, contiguous", torch.int64),
        "retrive_next_sibling": (links[2], "bs N, contiguous", torch.int64),
        "target_predict": (target_predict, "bs N, contiguous", torch.int64),
        "predicts": (predicts, "nodes, contiguous", torch.int32),
    }
    check_tensors(name, tensors, nodes=candidates.numel())


def check_sampling(
    candidates: Tensor, coins: Tensor, final_coins: Tensor, target_probs: Tensor, draft_probs: Tensor
) -> None:
    tensors = {
        "candidates": (candidates, "bs N", None),
        "uniform_samples": (coins, "bs N, contiguous", torch.float32),
        "uniform_samples_for_final_sampling": (final_coins, "bs, contiguous", torch.float32),
        "target_probs": (target_probs, "bs N V, contiguous", torch.float32),
        "draft_probs": (draft_probs, "bs N V, contiguous", torch.float32),
    }
    check_tensors("tree_speculative_sampling", tensors)
