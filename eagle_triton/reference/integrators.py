"""Tree building and verification with the signatures that serving engines call: SGLang's EAGLE kernels.

N tree nodes per request, node 0 the root (`verified_id`); k = `topk` children per expanded candidate, D = `spec_steps`
levels. Candidate x is a child of the root if x < k, else of candidate parent_list[x // k]. A "local" index is a node's
in its request, the "global" one is b * N + local. S = D + 1 is the width of `accept_index`. Arguments named retrive_*
may be passed as retrieve_* too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands import integrators as operands
from eagle_triton.operands.integrators import TreeMaskMode, both_spellings, packed_dtypes


def build_tree_efficient_triton(
    verified_id: Tensor,
    parent_list: Tensor,
    top_scores_index: Tensor,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    seq_lens_sum: int,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
    *,
    status: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Links, positions and mask of each request's draft tree.

    verified_id, seq_lens [bs] int32 or int64 (lengths without drafts, sum `seq_lens_sum`); parent_list
    [bs, k (D - 1) + 1] int64 (not read for D = 1); top_scores_index [bs, N - 1] int64 strictly ascending; draft_tokens
    [bs, N - 1] int64. Returns (tree_mask, positions [bs * N] int64, retrive_index, retrive_next_token,
    retrive_next_sibling [bs, N] int64, tokens with the root [bs * N] int64); the mask is flat bool, or uint8, uint16 or
    uint32 [bs * N] for N up to 8, 16 or 32. A node without its parent among the chosen has no links, and sees itself
    and the root; `status` [bs] int32, if given, counts such nodes. Raises ValueError if arguments do not fit.
    """
    operands.check_build(
        verified_id, parent_list, top_scores_index, draft_tokens, seq_lens, topk, spec_steps, num_verify_tokens,
        tree_mask_mode, status,
    )  # fmt: skip
    batch, nodes, device = len(verified_id), num_verify_tokens, verified_id.device
    block = top_scores_index // topk
    above = parent_list.gather(1, block) if parent_list.shape[1] else block
    match = top_scores_index[:, None] == above[:, :, None]  # [bs, child, candidate parent]
    orphan = (block > 0) & ~match.any(-1)
    parent = torch.where((block > 0) & ~orphan, match.int().argmax(-1) + 1, 0)
    parent = torch.cat((parent.new_zeros(batch, 1), parent), dim=1)
    orphan = torch.cat((orphan.new_ones(batch, 1), orphan), dim=1)  # the root has no links either
    if status is not None:
        status.copy_(orphan.sum(1) - 1)

    node = torch.arange(nodes, device=device)
    child = (parent[:, None] == node[:, None]) & ~orphan[:, None]  # [bs, parent, child]
    later = (parent[:, None] == parent[:, :, None]) & ~orphan[:, None] & ~orphan[:, :, None] & (node > node[:, None])
    next_token = torch.where(child.any(-1), child.int().argmax(-1), -1)
    next_sibling = torch.where(later.any(-1), later.int().argmax(-1), -1)

    mask = torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    depth, current = torch.zeros_like(parent), node.expand(batch, nodes)
    for _ in range(spec_steps):
        depth += current > 0
        current = parent.gather(1, current)
        mask.scatter_(2, current[:, :, None], True)
    mask[:, :, 0] = True
    lengths = seq_lens.long()[:, None]
    index = node + nodes * torch.arange(batch, device=device)[:, None]
    tokens = torch.cat((verified_id.long()[:, None], draft_tokens), dim=1).flatten()
    packed = _packed(mask, seq_lens, tree_mask_mode)
    return packed, (lengths + depth).flatten(), index, next_token, next_sibling, tokens


@both_spellings
def build_tree_in_place(
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
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
) -> None:
    """build_tree_efficient_triton into the caller's tensors, which may be longer than needed.

    positions [bs * N] and retrive_* [bs, N] int64 are filled. tree_mask is flat, with the dtype of
    build_tree_efficient_triton's mask (for bool: any dtype of one byte), and may be longer. Of a FULL_MASK only the
    N x N tree block of each request is written: the prefix columns keep the caller's values. Its size is not checked,
    because the lengths are on the device. Raises ValueError if other arguments do not fit.
    """
    outputs = (positions, retrive_index, retrive_next_token, retrive_next_sibling)
    mask = operands.check_in_place(
        parent_list, top_scores_index, seq_lens, tree_mask, *outputs, topk, spec_steps, num_verify_tokens,
        tree_mask_mode,
    )  # fmt: skip
    batch, nodes = len(seq_lens), num_verify_tokens
    full = tree_mask_mode == TreeMaskMode.FULL_MASK
    built, where, *links, _ = build_tree_efficient_triton(
        seq_lens, parent_list, top_scores_index, top_scores_index, seq_lens, 0, topk, spec_steps, nodes,
        TreeMaskMode.QLEN_ONLY if full else tree_mask_mode,
    )  # fmt: skip
    positions[: batch * nodes] = where
    for output, link in zip(outputs[1:], links, strict=True):
        output.copy_(link)
    if not full:
        mask[: len(built)] = built.view(mask.dtype)
        return
    start = 0
    for length, block in zip(seq_lens.tolist(), built.view(batch, nodes, nodes), strict=True):
        end = start + nodes * (length + nodes)
        mask[start:end].view(nodes, length + nodes)[:, length:] = block
        start = end


def _packed(mask: Tensor, seq_lens: Tensor, mode: int) -> Tensor:
    nodes = mask.shape[1]
    if mode == TreeMaskMode.QLEN_ONLY:
        return mask.flatten()
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        words = (mask.long() << torch.arange(nodes, device=mask.device)).sum(-1).flatten()
        signed, unsigned = packed_dtypes(nodes)
        return words.to(signed).view(unsigned)
    rows = [
        torch.cat((block.new_ones(nodes, length), block), dim=1).flatten()
        for block, length in zip(mask, seq_lens.tolist(), strict=True)
    ]
    return torch.cat(rows)


@both_spellings
def verify_tree_greedy_triton(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree along the target's argmax; fills and returns its first three arguments.

    predicts [bs * N] int32: the token after each accepted node, otherwise unchanged; accept_index [bs, S] int32: global
    indices root..last accepted, the rest unchanged; accept_token_num [bs] int32: drafts accepted; candidates,
    retrive_*, target_predict [bs, N] int64. The emitted tokens are predicts[accept_index[b, : accept_token_num[b] +
    1]]. Raises ValueError if arguments do not fit.
    """
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    operands.check_verify(
        "verify_tree_greedy", predicts, accept_index, accept_token_num, candidates, links, target_predict
    )
    nodes, steps = candidates.shape[1], accept_index.shape[1]
    target = target_predict.flatten()
    for b in range(len(candidates)):
        last, current, count, visited = int(retrive_index[b, 0]), int(retrive_next_token[b, 0]), 0, 0
        accept_index[b, 0] = last
        while 0 <= current < nodes and count < steps - 1 and visited < nodes:
            visited += 1
            if candidates[b, current] != target[last]:
                current = int(retrive_next_sibling[b, current])
                continue
            predicts[last] = target[last]
            count, last = count + 1, int(retrive_index[b, current])
            accept_index[b, count] = last
            current = int(retrive_next_token[b, current])
        accept_token_num[b] = count
        predicts[last] = target[last]
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree by sampling from the target; fills and returns its first three arguments, as the greedy walk.

    uniform_samples [bs, N] and uniform_samples_for_final_sampling [bs] float32 in [0, 1); target_probs [bs, N, V]
    float32; draft_probs [bs, N, V] float32: zeros on entry, gets the mass of refused tokens. At each node one coin
    chooses among the children by their cumulated target mass, divided by threshold_acc. A child of mass >=
    threshold_single is taken at once (with 0, the first child always). If no child is taken, the last token is drawn
    from the target without the refused mass. Lossless if both thresholds are 1, and not below. A token that two
    siblings share counts once. A coin never takes a token of mass 0. If rounding refused all mass, the target's argmax
    is taken. Always deterministic. Raises ValueError if arguments do not fit.
    """
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    operands.check_verify("tree_speculative_sampling", predicts, accept_index, accept_token_num, candidates, links)
    operands.check_sampling(candidates, uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs)
    nodes, steps = candidates.shape[1], accept_index.shape[1]
    for b in range(len(candidates)):
        row, last, count, visited, mass = 0, int(retrive_index[b, 0]), 0, 0, torch.zeros((), device=predicts.device)
        current = int(retrive_next_token[b, 0])
        refused: set[int] = set()
        accept_index[b, 0] = last
        while 0 <= current < nodes and count < steps - 1 and visited < nodes:
            visited += 1
            token = int(candidates[b, current])
            if token in refused:
                current = int(retrive_next_sibling[b, current])
                continue
            coin, p = uniform_samples[b, row], target_probs[b, row, token]
            mass = mass + p
            if (p > 0 and coin < mass / max(threshold_acc, 1e-9)) or p >= threshold_single:
                predicts[last] = token
                count, row, last = count + 1, current, int(retrive_index[b, current])
                accept_index[b, count] = last
                mass, refused = torch.zeros_like(mass), set()
                current = int(retrive_next_token[b, current])
            else:
                draft_probs[b, row, token] = p
                refused.add(token)
                current = int(retrive_next_sibling[b, current])
        accept_token_num[b] = count
        distribution = target_probs[b, row]
        weight = distribution if count == steps - 1 else (distribution - draft_probs[b, row]).clamp(min=0)
        cumulated = weight.double().cumsum(0)
        hit = (cumulated > uniform_samples_for_final_sampling[b].double() * cumulated[-1]) & (weight > 0)
        if hit.any():
            token = int(hit.int().argmax())
        elif weight.sum() > 0:
            token = int((weight > 0).nonzero()[-1, 0])
        else:
            token = int(distribution.argmax())
        predicts[last] = token
    return predicts, accept_index, accept_token_num


build_tree_kernel_efficient = build_tree_efficient_triton
verify_tree_greedy_func = verify_tree_greedy_triton
