"""Tree building and verification with the signatures of SGLang's EAGLE kernels, as replacements for them.

One program builds or walks the tree of one request. Vector compares give the links (no loop over nodes depends on
data). spec_steps gathers, each one step to the parent, give the ancestors. A walk visits a node at most once, so bad
links cannot hang it. The sampled walk's final token is found as in ops/sampling: chunk sums, then the chunk, then the
token.

| name                                | shape, dtype                                                              |
|---|---|
| verified_id, seq_lens               | [bs] int32 or int64                                                       |
| parent_list                         | [bs, k (D - 1) + 1] int64                                                 |
| top_scores_index, draft_tokens      | [bs, N - 1] int64                                                         |
| candidates, retrive_*, target_predict | [bs, N] int64                                                           |
| positions                           | [bs * N] int64                                                            |
| predicts, accept_index, accept_token_num | [bs * N], [bs, S], [bs] int32                                        |
| target_probs, draft_probs           | [bs, N, V] f32                                                            |

Semantics: reference/integrators.py, which also runs for tensors on a CPU, unless Triton's interpreter is on. Integers
are exact; masses are fp32, the final draw's sums fp64, in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_triton.engine.operations import module_of
from eagle_triton.operands.integrators import (
    TreeMaskMode,
    both_spellings,
    check_build,
    check_in_place,
    check_sampling,
    check_verify,
    packed_dtypes,
)
from eagle_triton.ops.sampling.draws import choose_chunk, choose_token, chunk_of
from eagle_triton.ops.sampling.filter_thresholds import merge_peaks
from eagle_triton.runtime.launch import launch

_NOWHERE = tl.constexpr(2**31 - 1)

Function = TypeVar("Function", bound=Callable[..., Any])


class Links(NamedTuple):
    """Each node's row in the batch, first child and next sibling, [bs, N] int64."""

    row: Tensor
    next_token: Tensor
    next_sibling: Tensor


class TreeTokens(NamedTuple):
    """A tree's tokens: roots [bs], drafted tokens [bs, N - 1], and room for both together [bs * N], int64."""

    root: Tensor
    drafted: Tensor
    out: Tensor


class Accepted(NamedTuple):
    """The results of a walk: predicts [bs * N], accept_index [bs, S] and accept_token_num [bs], int32."""

    predicts: Tensor
    rows: Tensor
    number: Tensor


class Probabilities(NamedTuple):
    """[bs, N, V] f32: the target's probabilities, and the probabilities of the tokens that a walk refused."""

    target: Tensor
    refused: Tensor


class Chunks(NamedTuple):
    """[bs, chunks] of a distribution: the sum of the remaining mass, and the mass and index of the largest token."""

    sums: Tensor
    peaks: Tensor
    places: Tensor


@triton.jit
def build_tree_kernel_triton(
    parent_list_ptr,
    top_scores_index_ptr,
    seq_lens_ptr,
    starts_ptr,
    parents_ptr,
    mask_ptr,
    positions_ptr,
    links,
    tokens,
    status_ptr,
    parent_list_width,
    topk,
    spec_steps,
    nodes,
    MODE: tl.constexpr,
    NODES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Grid (bs,): one request's tree. MODE is a TreeMaskMode; starts: the summed lengths of earlier requests; parents
    [bs, N] int32: workspace."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    real = node < nodes
    draft = real & (node > 0)
    chosen_ptr = top_scores_index_ptr + batch * (nodes - 1)
    block = tl.load(chosen_ptr + node - 1, mask=draft, other=0).to(tl.int32) // topk
    nested = draft & (block > 0) & (block < parent_list_width)
    above = tl.load(parent_list_ptr + batch * parent_list_width + block, mask=nested, other=-1)
    parent = tl.zeros((NODES,), tl.int32)
    for first in range(0, nodes - 1, PAIRS):
        other = first + tl.arange(0, PAIRS)
        chosen = tl.load(chosen_ptr + other, mask=other < nodes - 1, other=-2)
        parent += tl.sum(tl.where(chosen[None, :] == above[:, None], other[None, :] + 1, 0), 1)
    orphan = draft & (block > 0) & (parent == 0)
    if status_ptr is not None:
        tl.store(status_ptr + batch, tl.sum(orphan.to(tl.int32), 0))
    link = tl.where(draft & (orphan == 0), parent, -1)
    tl.store(parents_ptr + batch * nodes + node, link, mask=real)
    tl.debug_barrier()

    child = tl.full((NODES,), _NOWHERE, tl.int32)
    sibling = tl.full((NODES,), _NOWHERE, tl.int32)
    for first in range(0, nodes, PAIRS):
        other = (first + tl.arange(0, PAIRS))[None, :]
        other_link = tl.load(parents_ptr + batch * nodes + other, mask=other < nodes, other=-2)
        child = tl.minimum(child, tl.min(tl.where(other_link == node[:, None], other, _NOWHERE), 1))
        same = (other_link == link[:, None]) & (other > node[:, None])
        sibling = tl.minimum(sibling, tl.min(tl.where(same & draft[:, None], other, _NOWHERE), 1))
    sibling = tl.where(link < 0, _NOWHERE, sibling)
    out = batch * nodes + node
    tl.store(links.next_token + out, tl.where(child < _NOWHERE, child, -1).to(tl.int64), mask=real)
    tl.store(links.next_sibling + out, tl.where(sibling < _NOWHERE, sibling, -1).to(tl.int64), mask=real)
    tl.store(links.row + out, out, mask=real)
    if tokens is not None:
        token = tl.load(tokens.drafted + batch * (nodes - 1) + node - 1, mask=draft, other=0)
        token = tl.where(node == 0, tl.load(tokens.root + batch).to(tl.int64), token)
        tl.store(tokens.out + out, token, mask=real)

    length = tl.load(seq_lens_ptr + batch).to(tl.int64)
    width = nodes.to(tl.int64)
    mask_row = mask_ptr + out * nodes
    if MODE == 0:
        width += length
        mask_row = mask_ptr + nodes * (tl.load(starts_ptr + batch) + batch * nodes) + node * width + length
    if MODE < 2:
        for first in range(0, nodes, PAIRS):
            column = (first + tl.arange(0, PAIRS))[None, :]
            inside = real[:, None] & (column < nodes)
            seen = (column == node[:, None]) | (column == 0)
            tl.store(mask_row[:, None] + column, seen, mask=inside)
        tl.debug_barrier()
    depth = tl.zeros((NODES,), tl.int32)
    word = (1 << node) | 1
    current = node
    for _ in range(spec_steps):
        depth += (current > 0).to(tl.int32)
        current = tl.gather(parent, current, 0)
        if MODE < 2:
            tl.store(mask_row + current, tl.full((NODES,), 1, tl.int1), mask=real)
        else:
            word |= 1 << current
    tl.store(positions_ptr + out, length + depth, mask=real)
    if MODE == 2:
        tl.store(mask_ptr + out, word.to(mask_ptr.dtype.element_ty), mask=real)


@triton.jit
def verify_tree_greedy_kernel(accepted, candidates_ptr, links, target_ptr, nodes, steps):
    """Grid (bs,): one request's greedy walk."""
    batch = tl.program_id(0).to(tl.int64)
    tree = batch * nodes
    last = tl.load(links.row + tree)
    wanted = tl.load(target_ptr + last)
    current = tl.load(links.next_token + tree)
    count = tl.full((), 0, tl.int32)
    visited = tl.full((), 0, tl.int32)
    tl.store(accepted.rows + batch * steps, last.to(tl.int32))
    while (current >= 0) & (current < nodes) & (count < steps - 1) & (visited < nodes):
        visited += 1
        if tl.load(candidates_ptr + tree + current) == wanted:
            tl.store(accepted.predicts + last, wanted.to(tl.int32))
            count += 1
            last = tl.load(links.row + tree + current)
            tl.store(accepted.rows + batch * steps + count, last.to(tl.int32))
            wanted = tl.load(target_ptr + last)
            current = tl.load(links.next_token + tree + current)
        else:
            current = tl.load(links.next_sibling + tree + current)
    tl.store(accepted.number + batch, count)
    tl.store(accepted.predicts + last, wanted.to(tl.int32))


@triton.jit
def tree_speculative_sampling_kernel(
    accepted,
    candidates_ptr,
    links,
    coins_ptr,
    probabilities,
    ends_ptr,
    nodes,
    steps,
    vocabulary,
    threshold_single,
    threshold_acc,
    NODES: tl.constexpr,
):
    """Grid (bs,): one request's sampled walk. ends [bs, 2] int64: the row of the last accepted node, and the index of
    its token."""
    batch = tl.program_id(0).to(tl.int64)
    tree = batch * nodes
    node = tl.arange(0, NODES)
    tokens = tl.load(candidates_ptr + tree + node, mask=node < nodes, other=-1)
    refused = tl.zeros((NODES,), tl.int32)
    row = tl.full((), 0, tl.int64)
    last = tl.load(links.row + tree)
    current = tl.load(links.next_token + tree)
    coin = tl.load(coins_ptr + tree)
    mass = tl.full((), 0.0, tl.float32)
    count = tl.full((), 0, tl.int32)
    visited = tl.full((), 0, tl.int32)
    tl.store(accepted.rows + batch * steps, last.to(tl.int32))
    while (current >= 0) & (current < nodes) & (count < steps - 1) & (visited < nodes):
        visited += 1
        token = tl.load(candidates_ptr + tree + current)
        place = (tree + row) * vocabulary + token
        repeated = tl.max(tl.where((tokens == token) & (refused > 0), 1, 0), 0) > 0
        p = tl.where(repeated, 0.0, tl.load(probabilities.target + place))
        mass += p
        if ((p > 0) & (coin < mass / threshold_acc)) | (p >= threshold_single):
            tl.store(accepted.predicts + last, token.to(tl.int32))
            count += 1
            row = current
            last = tl.load(links.row + tree + row)
            tl.store(accepted.rows + batch * steps + count, last.to(tl.int32))
            coin = tl.load(coins_ptr + tree + row)
            mass = mass * 0.0
            refused = refused * 0
            current = tl.load(links.next_token + tree + row)
        else:
            if repeated == 0:
                tl.store(probabilities.refused + place, p)
            refused = tl.where(node == current, 1, refused)
            current = tl.load(links.next_sibling + tree + current)
    tl.store(accepted.number + batch, count)
    tl.store(ends_ptr + batch * 2, tree + row)
    tl.store(ends_ptr + batch * 2 + 1, last)


@triton.jit
def _rest(probabilities, row, whole, index, vocabulary):
    """A chunk of a row's distribution, with the refused tokens and without."""
    place = row * vocabulary + index
    distribution = tl.load(probabilities.target + place, mask=index < vocabulary, other=0.0)
    used = tl.load(probabilities.refused + place, mask=(index < vocabulary) & (whole == 0), other=0.0)
    return distribution, tl.maximum(distribution - used, 0.0)


@triton.jit
def _rest_sums_kernel(accepted, probabilities, ends_ptr, chunks, vocabulary, steps, CHUNK: tl.constexpr):
    """Grid (bs, chunks): the remaining mass of one chunk, and the distribution's largest token in it."""
    batch, chunk = tl.program_id(0), tl.program_id(1)
    whole = (tl.load(accepted.number + batch) == steps - 1).to(tl.int32)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(ends_ptr + batch * 2)
    distribution, rest = _rest(probabilities, row, whole, index, vocabulary)
    slot = batch * tl.num_programs(1) + chunk
    peak = tl.max(distribution, 0)
    tl.store(chunks.sums + slot, tl.sum(rest.to(tl.float64), 0))
    tl.store(chunks.peaks + slot, peak)
    tl.store(chunks.places + slot, tl.min(tl.where(distribution == peak, index, _NOWHERE), 0))


@triton.jit
def _final_token_kernel(
    accepted,
    probabilities,
    ends_ptr,
    coins_ptr,
    chunks,
    vocabulary,
    count,
    steps,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (bs,): draw the final token from `count` chunks, or take the distribution's argmax if no mass remains."""
    batch = tl.program_id(0)
    lane = tl.arange(0, CHUNKS)
    slot = batch * count + lane
    sums = tl.load(chunks.sums + slot, mask=lane < count, other=0.0)
    peaks = tl.load(chunks.peaks + slot, mask=lane < count, other=float("-inf"))
    places = tl.load(chunks.places + slot, mask=lane < count, other=_NOWHERE)
    _, best = merge_peaks(peaks, places, 0)
    whole = (tl.load(accepted.number + batch) == steps - 1).to(tl.int32)
    chunk, target = choose_chunk(sums, tl.load(coins_ptr + batch))
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(ends_ptr + batch * 2)
    _, rest = _rest(probabilities, row, whole, index, vocabulary)
    token = tl.where(tl.sum(sums, 0) > 0, choose_token(rest, index, target, vocabulary), best)
    tl.store(accepted.predicts + tl.load(ends_ptr + batch * 2 + 1), token)


def _interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1), and takes tensors on a CPU."""
    return not isinstance(build_tree_kernel_triton, triton.JITFunction)


def _reference_on_cpu(function: Function) -> Function:
    """Let the reference of the same name take tensors on a CPU, where no kernel can run."""
    plain = getattr(module_of("integrators", kernels=False), function.__name__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        on_cpu = next((tensor.device.type == "cpu" for tensor in tensors), False)
        return (plain if on_cpu and not _interpreted() else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


@_reference_on_cpu
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
    """Links, positions and mask of each request's draft tree; see reference.integrators.build_tree_efficient_triton.

    Returns (tree_mask, positions, retrive_index, retrive_next_token, retrive_next_sibling, tokens with the root) and
    fills `status` [bs] int32, if given, with the number of nodes that have no chosen parent. Raises ValueError if
    arguments do not fit.
    """
    check_build(
        verified_id, parent_list, top_scores_index, draft_tokens, seq_lens, topk, spec_steps, num_verify_tokens,
        tree_mask_mode, status,
    )  # fmt: skip
    batch, nodes, device = len(verified_id), num_verify_tokens, verified_id.device
    if tree_mask_mode == TreeMaskMode.FULL_MASK:
        mask = torch.ones(nodes * seq_lens_sum + batch * nodes**2, dtype=torch.bool, device=device)
    elif tree_mask_mode == TreeMaskMode.QLEN_ONLY:
        mask = torch.empty(batch * nodes * nodes, dtype=torch.bool, device=device)
    else:
        mask = torch.empty(batch * nodes, dtype=packed_dtypes(nodes)[0], device=device)
    positions, tokens = (torch.empty(batch * nodes, dtype=torch.int64, device=device) for _ in range(2))
    links = Links(*(torch.empty(batch, nodes, dtype=torch.int64, device=device) for _ in Links._fields))
    _launch_build(
        parent_list, top_scores_index, seq_lens, mask, positions, links, topk, spec_steps, nodes, tree_mask_mode,
        TreeTokens(verified_id, draft_tokens, tokens), status,
    )  # fmt: skip
    if tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        mask = mask.view(packed_dtypes(nodes)[1])
    return mask, positions, *links, tokens


@_reference_on_cpu
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
    """Write the tree into the caller's tensors; see reference.integrators.build_tree_in_place.

    The arguments are the same as in SGLang's own kernel. Raises ValueError if they do not fit.
    """
    links = Links(retrive_index, retrive_next_token, retrive_next_sibling)
    mask = check_in_place(
        parent_list, top_scores_index, seq_lens, tree_mask, positions, *links, topk, spec_steps, num_verify_tokens,
        tree_mask_mode,
    )  # fmt: skip
    _launch_build(
        parent_list, top_scores_index, seq_lens, mask, positions, links, topk, spec_steps, num_verify_tokens,
        tree_mask_mode,
    )  # fmt: skip


def _launch_build(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    links: Links,
    topk: int,
    spec_steps: int,
    nodes: int,
    mode: int,
    tokens: TreeTokens | None = None,
    status: Tensor | None = None,
) -> None:
    batch, width = len(seq_lens), triton.next_power_of_2(nodes)
    starts = seq_lens.cumsum(0, dtype=torch.int64) - seq_lens if mode == TreeMaskMode.FULL_MASK else None
    parents = torch.empty(batch, nodes, dtype=torch.int32, device=seq_lens.device)
    launch(build_tree_kernel_triton, (batch,))(
        parent_list, top_scores_index, seq_lens, starts, parents, mask, positions, links, tokens, status,
        parent_list.shape[1], topk, spec_steps, nodes, MODE=int(mode), NODES=width, PAIRS=min(width, 64),
    )  # fmt: skip


@_reference_on_cpu
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
    """Walk each tree along the target's argmax; see reference.integrators.verify_tree_greedy_triton.

    Fills and returns (predicts, accept_index, accept_token_num). Raises ValueError if arguments do not fit.
    """
    accepted = Accepted(predicts, accept_index, accept_token_num)
    links = Links(retrive_index, retrive_next_token, retrive_next_sibling)
    check_verify("verify_tree_greedy", *accepted, candidates, links, target_predict)
    batch, nodes = candidates.shape
    launch(verify_tree_greedy_kernel, (batch,))(
        accepted, candidates, links, target_predict, nodes, accept_index.shape[1], num_warps=1
    )
    return predicts, accept_index, accept_token_num


@_reference_on_cpu
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
    """Walk each tree by sampling; see reference.integrators.tree_speculative_sampling_target_only.

    Fills and returns (predicts, accept_index, accept_token_num); always deterministic. Raises ValueError if arguments
    do not fit.
    """
    accepted = Accepted(predicts, accept_index, accept_token_num)
    links = Links(retrive_index, retrive_next_token, retrive_next_sibling)
    check_verify("tree_speculative_sampling", *accepted, candidates, links)
    check_sampling(candidates, uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs)
    (batch, nodes), steps = candidates.shape, accept_index.shape[1]
    vocabulary, device = target_probs.shape[-1], candidates.device
    chunk = chunk_of(vocabulary)
    count = triton.cdiv(vocabulary, chunk)
    ends = torch.empty(batch, 2, dtype=torch.int64, device=device)
    probabilities = Probabilities(target_probs, draft_probs)
    chunks = Chunks(
        torch.empty(batch, count, dtype=torch.float64, device=device),
        torch.empty(batch, count, dtype=torch.float32, device=device),
        torch.empty(batch, count, dtype=torch.int32, device=device),
    )
    launch(tree_speculative_sampling_kernel, (batch,))(
        accepted, candidates, links, uniform_samples, probabilities, ends, nodes, steps, vocabulary,
        float(threshold_single), max(float(threshold_acc), 1e-9), NODES=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip
    launch(_rest_sums_kernel, (batch, count))(accepted, probabilities, ends, chunks, vocabulary, steps, CHUNK=chunk)
    launch(_final_token_kernel, (batch,))(
        accepted, probabilities, ends, uniform_samples_for_final_sampling, chunks, vocabulary, count, steps,
        CHUNK=chunk, CHUNKS=triton.next_power_of_2(count), num_warps=8,
    )  # fmt: skip
    return predicts, accept_index, accept_token_num


build_tree_kernel_efficient = build_tree_efficient_triton
verify_tree_greedy_func = verify_tree_greedy_triton
