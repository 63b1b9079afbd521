"""Grow a draft tree: log-softmax with top-k, beam expansion, re-rank and build. ops/verification/ verifies the tree.

This module has all operations of tree decoding: `topk`, `expand_beam`, `build_tree` (tokens, parents and ancestor
masks), `best_first_tree` (the same from the log-probabilities of all levels at once), and from ops/verification/
`verify_greedy`, `verify_sampling`, `verify_target_match`, `verify_topp`, `first_path` and `update_sequence`.

Selection never sorts. `topk` and `expand_beam` take and remove the best value k times. Each time two int32 reductions
find the largest of the floats' ordered bits and its lowest index. (A warp does each in one instruction.) For logits of
16 bits one reduction finds both. `topk` finds the best of each chunk, then compares only the first that is left of
each. `build_tree` finds the (N - 1)-th largest key by bisection and numbers the chosen candidates with a prefix sum.
Ties go to the lower index, a NaN counts as -inf. `best_first_tree` takes node after node, each by two such reductions
over every node's best child outside the tree, in one warp without barriers.

| name            | shape, dtype          | meaning                                                            |
|---|---|---|
| logits          | [R, V] any float      | any strides                                                        |
| parent_scores   | [B, P] f32            | cumulative log-probabilities of a level's nodes                    |
| log_probs       | [B, P, K] f32         | of their children                                                  |
| log_probs       | [B, D, M, K] f32      | of `best_first_tree`: M rows of K tokens in each of D levels       |
| candidates      | [B, C] int64, f32     | tokens and scores of all children of all levels, in flat order     |
| beam_candidates | [B, S] int64          | the flat candidate that fills each beam slot                       |
| tree            | tokens [B, N] int64, parents [B, N] int32, depths [B, N] int32, ancestors [B, N, W] int64 |

Numerics: log-softmax in fp32, with sums in fixed point; everything else is exact.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from eagle_triton.operands.tree_decoding import (
    Expansion,
    check_best_first_tree,
    check_build_tree,
    check_expand_beam,
    check_offsets,
)
from eagle_triton.ops.tree import (
    Beam,
    ChunkBest,
    Lists,
    _best_first_tree_kernel,
    _build_tree_kernel,
    _expand_beam_kernel,
    _topk_chunk_kernel,
    _topk_merge_kernel,
    topk_chunk_of,
)
from eagle_triton.ops.verification import (
    first_path,
    update_sequence,
    verify_greedy,
    verify_sampling,
    verify_target_match,
    verify_topp,
)
from eagle_triton.ops.views import Cube, Matrix, view
from eagle_triton.runtime.overlap import overlapped

__all__ = [
    "best_first_tree",
    "build_tree",
    "expand_beam",
    "first_path",
    "topk",
    "update_sequence",
    "verify_greedy",
    "verify_sampling",
    "verify_target_match",
    "verify_topp",
]

_TOP_K_LIMIT = 64
_MOST_ORDERS = 2**31 - 1  # an int32 packs a place of the lattice and a node
_BUILD_WARPS = 2  # of an earlier form on one H200, 60 nodes of 710 candidates: 9.8 µs; 1 warp 13.4, 4 warps 9.9, 8 10.3


# ---------------------------------------------------------------------------------------------------------- top-k


def topk_warps(vocabulary: int) -> int:
    """Warps of a chunk and of the merge."""
    return 1 if vocabulary <= 65536 else 4


def topk(logits: Tensor, k: int, *, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row and their log-softmax, best first; ties go to the lower index.

    logits [R, V]; returns log-probabilities float32 [R, k] and tokens int64 [R, k]. `offsets` [V] int64 (a draft
    vocabulary's d2t): offsets[token] is added to each token. NaN counts as -inf. For k above 64, torch sorts.
    Raises ValueError unless 1 <= k <= V and the dtypes fit.
    """
    if logits.ndim != 2 or logits.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not len(logits):
        raise ValueError(
            f"topk: logits must be [R, V] of float16, bfloat16 or float32, got {logits.dtype} {tuple(logits.shape)}"
        )
    rows, vocabulary = logits.shape
    if not 1 <= k <= vocabulary:
        raise ValueError(f"topk: k must be in 1..{vocabulary}, got {k}")
    check_offsets(logits, offsets)
    if k > _TOP_K_LIMIT:
        wide = logits.float().masked_fill(logits.isnan(), float("-inf"))
        values, tokens = (best[:, :k] for best in wide.sort(dim=-1, descending=True, stable=True))
        values = (values - wide.logsumexp(-1, keepdim=True)).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        return values, tokens if offsets is None else tokens + offsets[tokens]
    chunk = topk_chunk_of(vocabulary)
    chunks = triton.cdiv(vocabulary, chunk)
    ranks = torch.empty(rows, chunks, k, dtype=torch.int64, device=logits.device)
    best = ChunkBest(ranks, *torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device))
    values = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    overlapped(_topk_chunk_kernel, (rows, chunks), logits.device)(
        view(Matrix, logits),
        best,
        vocabulary,
        K=k,
        CHUNK=chunk,
        num_warps=topk_warps(vocabulary),
    )
    overlapped(_topk_merge_kernel, (rows,), logits.device)(
        best,
        offsets,
        values,
        tokens,
        chunks,
        K=k,
        CHUNKS=triton.next_power_of_2(chunks),
        WIDTH=triton.next_power_of_2(k),
        num_warps=topk_warps(vocabulary),
    )
    return values, tokens


# ----------------------------------------------------------------------------------------------------- beam search


def expand_beam(
    parent_scores: Tensor,
    log_probs: Tensor,
    tokens: Tensor,
    parent_ancestors: Tensor,
    first_slot: int,
    width: int,
    selected: Tensor | None = None,
    *,
    first_candidate: int = 0,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Expansion:
    """Score the children of a level's nodes and choose the next beam; see reference.tree_decoding.expand_beam.

    Raises ValueError if shapes, dtypes or strides do not fit.
    """
    check_expand_beam(parent_scores, log_probs, tokens, parent_ancestors, first_slot, width, selected, out)
    batch, nodes, k = log_probs.shape
    words = parent_ancestors.shape[-1]
    chosen, parents, tokens_out = torch.empty(3, batch, width, dtype=torch.int64, device=log_probs.device)
    children, child_scores, chosen = (None, log_probs.new_empty(batch, nodes * k), chosen) if out is None else out
    grown = Expansion(
        child_scores,
        chosen,
        parents,
        tokens_out,
        log_probs.new_empty(batch, width),
        parent_ancestors.new_empty(batch, width, words),
    )
    overlapped(_expand_beam_kernel, (batch,), log_probs.device)(
        parent_scores,
        parent_scores.stride(),
        view(Cube, log_probs),
        view(Matrix, tokens),
        view(Cube, parent_ancestors),
        selected,
        children,
        0 if children is None else children.stride(0),
        child_scores,
        child_scores.stride(0),
        chosen,
        chosen.stride(0),
        Beam(*grown[2:]),
        nodes * k,
        k,
        width,
        words,
        first_slot,
        first_candidate,
        CHILDREN=triton.next_power_of_2(nodes * k),
        WIDTH=triton.next_power_of_2(max(width, 1)),
        num_warps=1 if nodes * k <= 512 else 4,
    )
    return grown


# ------------------------------------------------------------------------------------------------- re-rank and build


def build_tree(
    root: Tensor,
    candidates: Tensor,
    scores: Tensor,
    beam_candidates: Tensor,
    nodes: int,
    top_k: int,
    selected: Tensor | None = None,
    *,
    grafted: Tensor | None = None,
    lengths: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep the best N - 1 candidates as the next draft tree; see reference.tree_decoding.build_tree.

    root [B]; or, with lengths [B] int32, the sequences [B, C], which have the root in column lengths[b]. Returns
    (tokens, parents, depths, ancestors), written to `out` if given. Raises ValueError if there are fewer than N - 1
    candidates, or if shapes or dtypes do not fit.
    """
    check_build_tree(root, candidates, scores, beam_candidates, nodes, top_k, selected, grafted, lengths, out)
    batch, device = len(root), root.device
    out = _new_tree(batch, nodes, device) if out is None else out
    scratch = torch.empty(batch, nodes, dtype=torch.int32, device=device) if selected is None else None
    width = max(2, triton.next_power_of_2(nodes))
    overlapped(_build_tree_kernel, (batch,), device)(
        root,
        (root.stride(0), root.stride(-1)),
        root.shape[-1],
        lengths,
        Lists.of(candidates),
        view(Matrix, scores),
        Lists.of(beam_candidates),
        selected,
        Lists.of(grafted),
        scratch,
        *out,
        tuple(tensor.stride() for tensor in out),
        nodes,
        out[3].shape[-1],
        top_k,
        CANDIDATES=triton.next_power_of_2(max(candidates.shape[1], 1)),
        NODES=width,
        PAIRS=min(width, 64),
        num_warps=_BUILD_WARPS if candidates.shape[1] <= 4096 else 4,  # more do not fit in two warps' registers
    )
    return out


def best_first_tree(
    root: Tensor,
    log_probs: Tensor,
    tokens: Tensor,
    nodes: int,
    rows: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The N - 1 most probable paths of a lattice, as a draft tree; see reference.tree_decoding.best_first_tree.

    log_probs [B, D, M, K] float32, best first, at most 0; tokens, rows [B, D, M, K] int64. Returns (tokens, parents,
    depths, ancestors), in `out` if given, and scores [B, N] float32. Raises ValueError if there are fewer than N - 1
    paths, if the lattice and N are too large together, or if shapes or dtypes do not fit.
    """
    check_best_first_tree(root, log_probs, tokens, nodes, rows, lengths, out)
    (batch, levels, width, k), device = log_probs.shape, log_probs.device
    out = _new_tree(batch, nodes, device) if out is None else out
    scores = log_probs.new_empty(batch, nodes)
    places, node_block = triton.next_power_of_2(width * k), triton.next_power_of_2(nodes)
    if (levels + 1) * node_block * places > _MOST_ORDERS:
        raise ValueError(
            f"best_first_tree: levels, nodes and tokens of a level must multiply to at most {_MOST_ORDERS}, got "
            f"{levels}, {nodes} and {width * k}"
        )
    overlapped(_best_first_tree_kernel, (batch,), device)(
        root,
        (root.stride(0), root.stride(-1)),
        root.shape[-1],
        lengths,
        log_probs,
        tokens,
        rows,
        scores,
        *out,
        tuple(tensor.stride() for tensor in out),
        nodes,
        out[3].shape[-1],
        levels,
        ROWS=width,
        K=k,
        PLACES=places,
        NODES=node_block,
        num_warps=1,
    )
    return *out, scores


def _new_tree(batch: int, nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors for the tree that an operation returns."""
    return (
        torch.empty(batch, nodes, dtype=torch.int64, device=device),
        torch.empty(batch, nodes, dtype=torch.int32, device=device),
        torch.empty(batch, nodes, dtype=torch.int32, device=device),
        torch.empty(batch, nodes, -(-nodes // 64), dtype=torch.int64, device=device),
    )
