"""Make trees of draft results, and verify them, with the names and layouts of serving engines.

bs requests, N nodes with the root, k children per expanded candidate, D levels. Candidates have one flat order: k
children of the root, then level by level k children of each of the k beam slots (`tree_spec`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from eagle_triton.engine.operations import module_of
from eagle_triton.operands.integrators import TreeMaskMode, both_spellings

__all__ = ["TreeMaskMode", "build_tree_structure", "organize_draft_results", "verify_tree_greedy"]


def organize_draft_results(
    score_list: Sequence[Tensor], token_list: Sequence[Tensor], parents_list: Sequence[Tensor], num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the best N - 1 candidates of all levels.

    score_list: cumulative scores, [bs, 1, k] for the first level, then [bs, k, k]; token_list: [bs, k], then
    [bs, k^2] int64; parents_list: [bs, k + 1] (-1, 0 .. k - 1), then [bs, k] flat indices of the expanded candidates.
    Order: score descending (NaN as -inf), then flat index ascending, so that the parents of chosen nodes are chosen
    too. Returns (parent_list [bs, k (D - 1) + 1], [bs, 0] for one level; top_scores_index [bs, N - 1] ascending;
    draft_tokens [bs, N - 1]), all int64. Raises ValueError if the lists do not fit or have fewer than N - 1 candidates.
    """
    if not score_list or not len(score_list) == len(token_list) == len(parents_list):
        raise ValueError(
            "organize_draft_results: one score, token and parent tensor per level expected, got "
            f"{len(score_list)}, {len(token_list)} and {len(parents_list)}"
        )
    scores = torch.cat([level.flatten(1) for level in score_list], dim=1)
    tokens = torch.cat([level.flatten(1) for level in token_list], dim=1)
    if tokens.shape != scores.shape:
        raise ValueError(
            f"organize_draft_results: a token for each score expected, got {list(tokens.shape)} and "
            f"{list(scores.shape)}"
        )
    drafts = num_draft_tokens - 1
    if not 1 <= drafts <= scores.shape[1]:
        raise ValueError(
            f"organize_draft_results: num_draft_tokens must be in 2..{1 + scores.shape[1]} (the root counts), got "
            f"{num_draft_tokens}"
        )
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :drafts]
    chosen = best.sort(dim=1).values
    parents = torch.cat([*parents_list[:-1], parents_list[0][:, :0]], dim=1).long()
    return parents, chosen, tokens.gather(1, chosen).long()


def build_tree_structure(
    verified_id: Tensor,
    parent_list: Tensor,
    top_scores_index: Tensor,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    topk: int,
    spec_steps: int,
    num_draft_tokens: int,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mask, positions and links of each request's tree. Arguments and results: see `build_tree_efficient_triton`.

    use_triton: True for the kernel, False for the torch reference, None for the kernel with CUDA tensors. Raises
    ValueError if arguments do not fit, or if a node's parent was not chosen.
    """
    tensors = (verified_id, parent_list, top_scores_index, draft_tokens, seq_lens)
    status = torch.zeros(len(verified_id), dtype=torch.int32, device=verified_id.device)
    built = _integrators(use_triton, verified_id).build_tree_efficient_triton(
        *(tensor.contiguous() for tensor in tensors), int(seq_lens.sum()), topk, spec_steps, num_draft_tokens,
        tree_mask_mode, status=status,
    )  # fmt: skip
    if status.any():
        orphans = {request: count for request, count in enumerate(status.tolist()) if count}
        raise ValueError(f"build_tree_structure: nodes without their parent in the tree, by request: {orphans}")
    return built


@both_spellings
def verify_tree_greedy(
    candidates: Tensor,
    target_predict: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree along the target's argmax.

    All arguments [bs, N] int64: tokens with the root, the target's prediction after each node, and the links of
    `build_tree_structure` (retrive_* or retrieve_*). Returns (predicts [bs * N] int32: the token after each accepted
    node, elsewhere -1; accept_index [bs, N] int32: global indices root..last accepted, then -1; accept_length [bs]
    int32: drafts accepted). Raises ValueError if arguments do not fit.
    """
    batch, nodes = candidates.shape
    new = torch.empty(0, dtype=torch.int32, device=candidates.device)
    return _integrators(use_triton, candidates).verify_tree_greedy_triton(
        new.new_full((batch * nodes,), -1), new.new_full((batch, nodes), -1), new.new_zeros(batch),
        candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict,
    )  # fmt: skip


def _integrators(use_triton: bool | None, tensor: Tensor) -> ModuleType:
    return module_of("integrators", tensor.is_cuda if use_triton is None else use_triton)
