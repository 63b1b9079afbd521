"""Grows a draft tree: top-k, beam expansion, re-rank and build. verification.py verifies it.

Flat candidate order (see TreeSpec): candidate x is a child of the root if x < K, else of beam slot x // K - 1; grafts,
which name their parents, come last. Tree arrays: tokens [B, N] int64, parents [B, N] int32 (-1 for the root), depths
[B, N] int32, ancestors [B, N, W] int64; a parent's index is always below its child's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_triton.operands import tree_decoding as operands
from eagle_triton.operands.ancestors import WORD, pack_ancestors
from eagle_triton.operands.tree_decoding import Expansion


def topk(logits: Tensor, k: int, *, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row with their log-softmax, best first; ties go to the lower index.

    logits [R, V]; returns log-probabilities float32 [R, k] and tokens int64 [R, k], plus offsets[token] if `offsets`
    [V] int64 is given (a draft vocabulary's d2t). NaN counts as -inf. Raises ValueError unless 1 <= k <= V.
    """
    operands.check_offsets(logits, offsets)
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"topk: k must be in 1..{logits.shape[-1]}, got {k}")
    wide = logits.float()
    wide = wide.masked_fill(wide.isnan(), float("-inf"))
    indices = _best(wide, k)
    values = wide.gather(-1, indices)
    if offsets is not None:
        indices = indices + offsets[indices]
    return (values - wide.logsumexp(-1, keepdim=True)).nan_to_num(nan=float("-inf"), neginf=float("-inf")), indices


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
    """Score the children of a level's nodes and choose the next beam.

    parent_scores [B, P] float32 (cumulative log-probabilities; P = 1 and 0.0 for the root); log_probs [B, P, K] of the
    children, tokens [B, P * K] int64; parent_ancestors [B, P, W] int64 over beam slots (zeros for the root). The
    `width` best of the P * K children, ties to the lower index, fill the beam slots from first_slot on. For a fixed
    tree `selected` [width] int64 names them. A NaN score counts as -inf. width may be 0.

    first_candidate: the flat index of the first child. out: tensors for the children's tokens [B, P * K] int64, their
    scores [B, P * K] float32 and the flat indices of the chosen [B, width] int64; they are parts of build_tree's
    arguments. Raises ValueError if shapes or dtypes do not fit.
    """
    operands.check_expand_beam(parent_scores, log_probs, tokens, parent_ancestors, first_slot, width, selected, out)
    scores = (parent_scores[:, :, None] + log_probs).flatten(1)
    if selected is not None:
        chosen = selected.expand(len(scores), width)
    else:
        chosen = _best(scores, width)
    words = parent_ancestors.shape[-1]
    parents = chosen // log_probs.shape[-1]
    slot = torch.arange(first_slot, first_slot + width, device=scores.device)
    own = torch.zeros(width, words, dtype=torch.int64, device=scores.device)
    own.scatter_(1, (slot // WORD)[:, None], (torch.ones_like(slot) << (slot % WORD))[:, None])
    ancestors = parent_ancestors.gather(1, parents[:, :, None].expand(-1, -1, words)) | own
    found, flat = (tokens.gather(1, chosen), scores.gather(1, chosen)), chosen + first_candidate
    if out is not None:
        _, scores, flat = (place.copy_(value) for place, value in zip(out, (tokens, scores, flat), strict=True))
    return Expansion(scores, flat, parents, *found, ancestors)


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
    """Keep the best N - 1 candidates as the next draft tree (EAGLE-2, section 4.2).

    root [B] int64, or with lengths [B] int32 the sequences [B, T] int64, with roots at these columns (past the end: at
    the last one). candidates [B, C] int64 tokens and scores [B, C] float32 in flat order. beam_candidates [B, S] int64:
    the flat candidate that fills each beam slot. selected [N - 1] int64, ascending: the candidates of a fixed tree.
    grafted [B, J] int32: the parents of the last J candidates, as flat indices below their own, -1 for the root. Order:
    score descending (NaN as -inf), then flat index ascending. A parent has a lower index and no smaller score, so the
    choice is closed under parents. Returns (tokens, parents, depths, ancestors), see the module, in `out` if given.
    Raises ValueError if there are fewer than N - 1 candidates, or if shapes or dtypes do not fit.
    """
    operands.check_build_tree(root, candidates, scores, beam_candidates, nodes, top_k, selected, grafted, lengths, out)
    if lengths is not None:
        root = root.gather(1, lengths.long().clamp(max=root.shape[1] - 1)[:, None])[:, 0]
    batch, drafts = len(root), nodes - 1
    if selected is not None:
        chosen = selected.expand(batch, drafts)
    else:
        chosen = _best(scores, drafts).sort(dim=-1).values
    tokens = torch.cat((root[:, None], candidates.gather(1, chosen)), dim=1)

    slot = chosen // top_k - 1  # the parent's beam slot; -1: the root
    parent_candidate = (
        beam_candidates.gather(1, slot.clamp(min=0, max=beam_candidates.shape[1] - 1))
        if beam_candidates.shape[1]
        else chosen
    )
    below_root = slot < 0
    if grafted is not None:
        graft = chosen - (candidates.shape[1] - grafted.shape[1])
        named = grafted.long().gather(1, graft.clamp(min=0))
        parent_candidate = torch.where(graft >= 0, named, parent_candidate)
        below_root = torch.where(graft >= 0, named < 0, below_root)
    place = torch.searchsorted(chosen.contiguous(), parent_candidate)  # the parent's place among the chosen
    return _tree_of(tokens, torch.where(below_root, 0, place + 1), out)


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
    """The N - 1 most probable paths of a lattice, as a draft tree (DDTree, arXiv 2604.12989).

    root, lengths: as in `build_tree`. log_probs [B, D, M, K] float32, none of them positive or NaN, and tokens
    [B, D, M, K] int64: each of D levels has M rows of K tokens, the best first. Row 0 of level 0 has the root's
    children. rows [B, D, M, K] int64: the row of the next level that has the children of each token; None: its only
    row. A path's score is the sum of its log-probabilities, in fp32 from the root on. Order: score descending, then
    depth ascending, then the order of the parents, then rank; so a parent comes before its children, and the choice is
    exact. This is the order of nodes.

    Returns (tokens, parents, depths, ancestors), see the module, in `out` if given, and the nodes' scores [B, N]
    float32, 0 for the root. Raises ValueError if there are fewer than N - 1 paths, or if shapes or dtypes do not fit.
    """
    operands.check_best_first_tree(root, log_probs, tokens, nodes, rows, lengths, out)
    if lengths is not None:
        root = root.gather(1, lengths.long().clamp(max=root.shape[1] - 1)[:, None])[:, 0]
    batch, levels, _, k = log_probs.shape
    # Keep the best paths of each level, as many as the tree could take. They are numbered over all levels; 0: the root.
    row, scores, first = tokens.new_zeros(batch, 1), log_probs.new_zeros(batch, 1), 0
    of_paths: list[tuple[Tensor, Tensor, Tensor]] = []  # scores, tokens, parents
    for level in range(levels):
        places = (row[:, :, None] * k + torch.arange(k, device=row.device)).flatten(1)
        children = scores.repeat_interleave(k, 1) + log_probs[:, level].flatten(1).gather(1, places)
        chosen = _best(children, min(nodes - 1, children.shape[1]))
        places, parents, first = places.gather(1, chosen), first + chosen // k, first + scores.shape[1]
        scores = children.gather(1, chosen)
        of_paths.append((scores, tokens[:, level].flatten(1).gather(1, places), parents))
        row = torch.zeros_like(places) if rows is None else rows[:, level].flatten(1).gather(1, places)
    scores, found, parents = (torch.cat(parts, dim=1) for parts in zip(*of_paths, strict=True))
    chosen = _best(scores, nodes - 1)
    node_of = torch.zeros(batch, 1 + scores.shape[1], dtype=torch.int64, device=root.device)
    node_of.scatter_(1, chosen + 1, torch.arange(1, nodes, device=root.device).expand(batch, -1))
    parents = node_of.gather(1, parents.gather(1, chosen))
    tree = _tree_of(torch.cat((root[:, None], found.gather(1, chosen)), dim=1), parents, out)
    return *tree, torch.nn.functional.pad(scores.gather(1, chosen), (1, 0))


def _best(scores: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k best fp32 scores, best first; NaN counts as -inf, ties go to the lower index.

    torch.topk does not define the order of ties, so it gets unique keys: the float's bits as an ordered integer, then
    the index.
    """
    bits = (scores.masked_fill(scores.isnan(), float("-inf")) + 0.0).view(torch.int32)  # + 0.0: no negative zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    count = scores.shape[-1]
    keys = (ordered << 32) + torch.arange(count - 1, -1, -1, device=scores.device)
    return keys.topk(k, dim=-1).indices


def _tree_of(
    tokens: Tensor, parents: Tensor, out: tuple[Tensor, Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tree of tokens [B, N] and the drafts' parents [B, N - 1], in `out` if given."""
    parents = torch.cat((parents.new_full((len(parents), 1), -1), parents), dim=1).int()
    matrix = _ancestor_closure(parents)
    tree = tokens, parents, (matrix.sum(-1) - 1).int(), pack_ancestors(matrix)
    if out is None:
        return tree
    for place, value in zip(out, tree, strict=True):
        place.copy_(value)
    return out


def _ancestor_closure(parents: Tensor) -> Tensor:
    """Bool [B, N, N]: j is i or an ancestor of i. Squares the parent relation log2(N) times."""
    nodes = parents.shape[1]
    reach = torch.nn.functional.one_hot(parents.clamp(min=0).long(), nodes).float()
    reach = (reach + torch.eye(nodes, device=parents.device)).clamp(max=1)
    for _ in range((nodes - 1).bit_length()):
        reach = (reach @ reach).clamp(max=1)
    return reach > 0
