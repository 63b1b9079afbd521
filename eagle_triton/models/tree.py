"""Draft trees: choosing the nodes, and the index tensors that describe a tree to the target.

A tree is a row of tokens and a row of parents. Node 0 is the root, `parents[0] = -1`, and every parent comes before
its children. There are two ways to choose the nodes:

- dynamic (EAGLE-2, arXiv:2406.16858, section 4): `depth` beam passes of `top_k` nodes, then the best
  `total_tokens` of all candidates by cumulative log-probability;
- fixed (EAGLE-1, arXiv:2401.15077): each node is given by its path of ranks, the same in every step.

Both call the draft head through one function, `Expand`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

TreeChoices = Sequence[Sequence[int]]

# The tree of EAGLE-1 for a 7B target: 25 drafts, 26 nodes with the root.
MC_SIM_7B_63: tuple[tuple[int, ...], ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)

# (tokens [n] target ids, hidden [1, n, H] of their parents, visible [n, fed so far + n] bool, depth of the tokens)
# -> (log-probabilities [n, Vd] of the token after each, hidden [1, n, H])
Expand = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FixedTree:
    """A fixed tree in node order (by depth, then by path); index 0 of every tuple is the root.

    parents: parent node of each node, -1 for the root.
    ranks: the rank of each node among its parent's children by likelihood; 0 for the root.
    levels: for each depth from 0, the nodes of that depth that have children.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]

    @property
    def branching(self) -> int:
        """The largest number of children of a node: how many of the likeliest tokens it needs."""
        return max(self.ranks) + 1


def fixed_tree(choices: TreeChoices) -> FixedTree:
    """The layout of a tree given as rank paths, e.g. `MC_SIM_7B_63`.

    Raises ValueError for an empty list, a repeated or empty path, a negative rank, or a path without its parent.
    """
    return _fixed_tree(tuple(tuple(path) for path in choices))


@lru_cache(maxsize=16)
def _fixed_tree(choices: tuple[tuple[int, ...], ...]) -> FixedTree:
    paths = sorted(choices, key=lambda path: (len(path), path))
    if not paths:
        raise ValueError("tree_choices: expected at least one path, got none")
    node_of = {(): 0} | {path: node for node, path in enumerate(paths, start=1)}
    if len(node_of) != len(paths) + 1:
        raise ValueError("tree_choices: every path must be non-empty and occur once")
    for path in paths:
        if path[:-1] not in node_of:
            raise ValueError(f"tree_choices: path {list(path)} has no parent {list(path[:-1])} in the tree")
        if path[-1] < 0:
            raise ValueError(f"tree_choices: ranks count from 0, got path {list(path)}")
    parents = (-1, *(node_of[path[:-1]] for path in paths))
    depth = [0, *(len(path) for path in paths)]
    inner = sorted(set(parents[1:]))
    levels = tuple(tuple(node for node in inner if depth[node] == d) for d in range(max(depth)))
    return FixedTree(parents=parents, ranks=(0, *(path[-1] for path in paths)), levels=levels)


def check_dynamic_tree(total_tokens: int, depth: int, top_k: int, draft_vocab_size: int) -> None:
    """Raise ValueError unless a tree of `total_tokens` drafts can be chosen with these parameters."""
    if depth < 1 or top_k < 1 or total_tokens < 1:
        raise ValueError(
            "draft tree: total_token must be at least 2, depth and top_k at least 1, "
            f"got total_token={total_tokens + 1}, depth={depth}, top_k={top_k}"
        )
    if top_k > draft_vocab_size:
        raise ValueError(f"draft tree: top_k must not exceed the draft vocabulary ({draft_vocab_size}), got {top_k}")
    candidates = top_k + depth * top_k**2
    if total_tokens > candidates:
        raise ValueError(
            f"draft tree: depth={depth} and top_k={top_k} give {candidates} candidates, "
            f"too few for total_token={total_tokens + 1}"
        )


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension, descending, ties to the lower index: (values, indices), both [..., k].

    `torch.topk` does not define the order of ties. Here it matters: if a child's probability rounds to 1, it ties with
    its parent, and the parent, which has the lower index, must win.
    """
    values, indices = torch.sort(values, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def grow_dynamic_tree(
    log_probs: Tensor,
    hidden: Tensor,
    expand: Expand,
    to_target_ids: Callable[[Tensor], Tensor],
    total_tokens: int,
    depth: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Beam search with the draft head, then choose the best drafts of all candidates.

    log_probs: [1, Vd], of the token after the root. hidden: [1, 1, H], the head's output there.
    Candidates are numbered: `width` children of the root, then for each pass `width` children of each of the `width`
    beam nodes. The chosen drafts keep that order.
    Returns (drafts [total_tokens] target ids, parents [total_tokens + 1], parents[0] = -1), both int64.
    """
    device = log_probs.device
    scores, choice = top_k(log_probs[0], width)
    tokens = to_target_ids(choice)
    hidden = hidden.expand(1, width, -1)
    visible = torch.eye(width, dtype=torch.bool, device=device)
    beam = torch.arange(width, device=device)  # the beam nodes, as candidate numbers
    all_scores, all_tokens, all_parents = [scores], [tokens], [torch.full_like(beam, -1)]
    for level in range(1, depth + 1):
        first = width + (level - 1) * width**2  # number of this pass's first candidate
        log_probs, hidden = expand(tokens, hidden, visible, level)
        step_scores, choice = top_k(log_probs, width)
        candidate_scores = (scores[:, None] + step_scores).flatten()
        candidate_tokens = to_target_ids(choice).flatten()
        all_scores.append(candidate_scores)
        all_tokens.append(candidate_tokens)
        all_parents.append(beam.repeat_interleave(width))

        scores, kept = top_k(candidate_scores, width)
        tokens, parent = candidate_tokens[kept], kept // width
        hidden = hidden[:, parent]
        visible = torch.cat((visible[parent], torch.eye(width, dtype=torch.bool, device=device)), dim=1)
        beam = first + kept

    best = top_k(torch.cat(all_scores), total_tokens)[1].sort().values
    parents = torch.cat(all_parents)[best]
    nodes = torch.where(parents < 0, 0, torch.searchsorted(best, parents.clamp(min=0)) + 1)
    return torch.cat(all_tokens)[best], torch.cat((nodes.new_full((1,), -1), nodes))


def grow_fixed_tree(
    log_probs: Tensor, hidden: Tensor, expand: Expand, to_target_ids: Callable[[Tensor], Tensor], tree: FixedTree
) -> tuple[Tensor, Tensor]:
    """The tokens of a fixed tree: a node of rank r is the r-th most likely token after its parent, counted from 0.

    Arguments and result as in `grow_dynamic_tree`. The head runs only over nodes with children.
    """
    device = log_probs.device
    tokens = torch.zeros(len(tree.parents), dtype=torch.long, device=device)
    parents = torch.tensor(tree.parents, device=device)
    ranks = torch.tensor(tree.ranks, device=device)
    ancestors = ancestor_mask(parents)
    fed: list[int] = []  # nodes with keys in the head's cache, in order
    for depth, level in enumerate(tree.levels):
        if depth > 0:
            fed += level
            above = [tree.levels[depth - 1].index(tree.parents[node]) for node in level]
            visible = ancestors[list(level)][:, fed]
            log_probs, hidden = expand(tokens[list(level)], hidden[:, above], visible, depth)
        followers = to_target_ids(top_k(log_probs, tree.branching)[1])
        for row, node in enumerate(level):
            children = parents == node
            tokens[children] = followers[row, ranks[children]]
    return tokens[1:], parents


def ancestor_mask(parents: Tensor) -> Tensor:
    """[N, N] bool from parents [N] int64: row i is true at i and at its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool, device=parents.device)
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        mask[node] |= mask[parent]
    return mask


def retrieve_paths(parents: Sequence[int], by_path: bool = False) -> list[list[int]]:
    """Root-to-leaf paths, one per leaf, padded with -1 to the longest.

    Leaves are in node order, or with `by_path` sorted by their paths: the order in which the sampled walk visits them.
    """
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while path[-1] != 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    if by_path:
        paths.sort()
    longest = max(map(len, paths))
    return [path + [-1] * (longest - len(path)) for path in paths]
