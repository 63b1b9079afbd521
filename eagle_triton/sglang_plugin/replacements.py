"""What stands in the place of SGLang's tree kernels: the same arguments, our kernels.

Tensors that a kernel reads are made contiguous where they are not; those that it writes must be. `predicts` may have
more elements than there are nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle_triton import integrators
from eagle_triton.operands.integrators import both_spellings

SAMPLING_KERNEL = "tree_speculative_sampling_target_only"


@both_spellings
def build_tree(
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
) -> None:
    """The kernel that `build_tree_kernel_efficient` calls: integrators.build_tree_in_place, which says what it raises.

    parent_list may have another dtype: with one step it is empty, and a worker then makes it float32.
    """
    integrators.build_tree_in_place(
        parent_list.long().contiguous(),
        top_scores_index.contiguous(),
        seq_lens.contiguous(),
        tree_mask,
        positions,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        topk,
        spec_steps,
        num_verify_tokens,
        int(tree_mask_mode),
    )


@both_spellings
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_tree_greedy` and `verify_tree_greedy_func`; no kernel reads `topk`.

    Fills and returns its first three arguments; raises ValueError as integrators.verify_tree_greedy_triton does.
    """
    inputs = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    integrators.verify_tree_greedy_triton(
        predicts[: candidates.numel()], accept_index, accept_token_num, *(value.contiguous() for value in inputs)
    )
    return predicts, accept_index, accept_token_num


@both_spellings
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """The kernel of that name; always deterministic.

    Raises ValueError as integrators.tree_speculative_sampling_target_only does.
    """
    inputs = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, uniform_samples)
    integrators.tree_speculative_sampling_target_only(
        predicts[: candidates.numel()],
        accept_index,
        accept_token_num,
        *(value.contiguous() for value in inputs),
        uniform_samples_for_final_sampling.contiguous(),
        target_probs.contiguous(),
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
    )


def uses_greedy(original: Callable[..., bool]) -> Callable[..., bool]:
    """`_verify_uses_greedy` where sampled trees have a kernel on every device: greedy if all requests are.

    Its rejection sampling of chains is another kernel, SGLang's own: for that, the original says.
    """

    def verify_uses_greedy(*, is_all_greedy: bool, use_rejection_sampling: bool, **device: Any) -> bool:
        if use_rejection_sampling:
            return original(is_all_greedy=is_all_greedy, use_rejection_sampling=True, **device)
        return is_all_greedy

    return verify_uses_greedy


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """The `top_ks` [rows] largest of each row of probs [rows, V] float32, those that tie with the last of them too,
    divided by their sum; the others 0."""
    values = probs.sort(dim=-1, descending=True).values
    last = top_ks.long().clamp(1, probs.shape[-1]) - 1
    return _divided(probs, values.gather(1, last[:, None]))


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """The fewest largest of each row of probs [rows, V] float32 that sum to `top_ps` [rows], those that tie with the
    last of them too, divided by their sum; the others 0."""
    values = probs.sort(dim=-1, descending=True).values
    before = values.double().cumsum(-1) - values
    count = (before < top_ps.double()[:, None]).sum(-1, keepdim=True).clamp(min=1)
    return _divided(probs, values.gather(1, count - 1))


def _divided(probs: Tensor, smallest: Tensor) -> Tensor:
    kept = torch.where(probs >= smallest, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)
