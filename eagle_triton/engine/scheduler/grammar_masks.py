"""Lets requests follow their grammars: forced tokens into their trees, and masks after each node of these."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from eagle_triton.engine.grammar import DraftTree, GrammarError, Matcher
from eagle_triton.engine.graph import ReportQueue
from eagle_triton.engine.scheduler.requests import RunningRequest
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.upload import upload
from eagle_triton.operands.ancestors import WORD


class GrammarMasks:
    """Keeps the masks of a batch's steps.

    For each step: `send_trees`, `repair_trees` if anything is drafted, then the first part of the step, then
    `write_masks`, then the second part. The first of the two that are called last waits for the step before.
    """

    def __init__(self, device: torch.device):
        self._queue = ReportQueue(device)
        self._trees: dict[int, DraftTree] | None = None  # of the next step, by slot

    def write_first(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Write which tokens may come first after prompts, for requests by slot."""
        first = DraftTree([0], [-1], 0, False, True)
        self._write(state, entries, {slot: first for slot, entry in entries.items() if entry.root < 0})

    def send_trees(self, state: DecodeState, longest: int) -> None:
        """Copy the trees of the next step to the host, and each sequence's last `longest` tokens, the root last."""
        columns = state.lengths[:, None] + torch.arange(1 - longest, 1, device=state.lengths.device)
        last = state.tokens.gather(1, columns.clamp(min=0))
        facts = (state.lengths[:, None], state.active[:, None], state.tree.tokens, state.tree.parents, last)
        self._queue.send(torch.cat(facts, 1))
        self._trees = None

    def repair_trees(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Put the tokens that grammars force into the trees, where they forbid drafts. Waits for the step before."""
        self._trees = self._read(state, entries)
        repaired = {}
        for slot, tree in self._trees.items():
            try:
                better = _matcher_of(entries[slot]).repair(tree)
            except GrammarError as error:
                entries[slot].failure = str(error)
                continue
            if better is not None:
                repaired[slot] = better
        self._trees |= repaired
        _upload_trees(state, repaired)

    def write_masks(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Write the masks of the trees' nodes, for requests by slot."""
        trees = self._read(state, entries) if self._trees is None else self._trees
        self._write(state, entries, trees)

    def _read(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> dict[int, DraftTree]:
        """Let matchers read what was committed. Returns the trees of the requests that go on, by slot. A request that
        has left its grammar gets the reason, and ends once the step before is read."""
        facts, trees, nodes = self._queue.receive(), {}, state.spec.nodes
        shape = state.spec.depth, state.spec.has_empty_places, state.spec.is_chain
        for slot, entry in entries.items():
            if entry.matcher is None or entry.failure:
                continue
            length, active, *rest = facts[slot].tolist()
            if not active:
                continue
            last = rest[2 * nodes :]
            unread = length + 1 - len(entry.request.prompt) - entry.matcher.consumed
            assert 0 <= unread <= len(last), f"{unread} tokens are unread, and {len(last)} are known"
            try:
                entry.matcher.read(last[len(last) - unread :])
            except GrammarError as error:
                entry.failure = str(error)
                continue
            trees[slot] = DraftTree(rest[:nodes], rest[nodes : 2 * nodes], *shape)
        return trees

    def _write(self, state: DecodeState, entries: Mapping[int, RunningRequest], trees: Mapping[int, DraftTree]) -> None:
        """Write masks of trees by slot; the other sequences are not restricted."""
        masks = state.masks
        assert masks is not None, "call add_masks before masks are written"
        restricted = [False] * state.batch
        for slot, tree in trees.items():
            if entries[slot].matcher is None or entries[slot].failure:
                continue
            try:
                _matcher_of(entries[slot]).write_masks(tree, masks.written[slot])
            except GrammarError as error:
                entries[slot].failure = str(error)
                continue
            restricted[slot] = True
            if masks.written is not masks.allowed:
                masks.allowed[slot].copy_(masks.written[slot], non_blocking=True)
        masks.restricted.copy_(upload(restricted, torch.bool, masks.restricted.device))


def _matcher_of(entry: RunningRequest) -> Matcher:
    assert entry.matcher is not None, "only requests with a grammar have trees here"
    return entry.matcher


def _upload_trees(state: DecodeState, trees: Mapping[int, DraftTree]) -> None:
    """Write trees to their slots."""
    if not trees:
        return
    tree, device = state.tree, state.tree.tokens.device
    where = upload(list(trees), torch.int64, device)
    depths, ancestors = zip(*(_depths_and_ancestors(new.parents) for new in trees.values()), strict=True)
    columns = [new.tokens for new in trees.values()], [new.parents for new in trees.values()], depths, ancestors
    for tensor, values in zip(tree, columns, strict=True):
        tensor[where] = upload(values, tensor.dtype, device)


def _depths_and_ancestors(parents: list[int]) -> tuple[list[int], list[list[int]]]:
    """The depth of each node, and the words of its ancestors and itself, see Tree."""
    depths, paths = [0], [1]
    for node, parent in enumerate(parents[1:], start=1):
        depths.append(depths[parent] + 1)
        paths.append(paths[parent] | 1 << node)
    words = range(0, len(parents), WORD)
    return depths, [[_signed(path >> first & (1 << WORD) - 1) for first in words] for path in paths]


def _signed(word: int) -> int:
    return word - (1 << WORD) if word >> WORD - 1 else word
