"""Make requests follow their grammars: put forced tokens into trees, and write masks for each node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from eagle_triton.engine.grammar import DraftTree, GrammarError, Matcher, forced_tree
from eagle_triton.engine.graph import ReportQueue
from eagle_triton.engine.scheduler.requests import RunningRequest
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.tree_spec import PLAIN
from eagle_triton.engine.upload import upload
from eagle_triton.operands.ancestors import WORD
from eagle_triton.operands.verification import GOES_ON


class SentRoots(NamedTuple):
    """Roots that a step of `state` chose for requests by slot, while copied to the host."""

    queue: ReportQueue
    state: DecodeState
    entries: Mapping[int, RunningRequest]


class GrammarMasks:
    """Keeps the masks of a batch's steps.

    For each step: `send_trees`, `repair_trees` if anything is drafted, then the first part of the step, `write_masks`,
    the second part, `send_roots`, and the third part. `repair_trees` waits for the second part of the last step, and if
    a grammar forces tokens also for the third. `write_masks` waits for both.
    """

    def __init__(self, device: torch.device):
        self._device, self._queue = device, ReportQueue(device)
        self._trees: dict[int, DraftTree] | None = None  # as they were drafted for the next step, by slot
        self._repaired: dict[int, DraftTree] = {}  # trees that replace those
        self._roots: SentRoots | None = None  # of the last step; None: later roots may exist
        self._restricted: tuple[DecodeState, list[bool]] | None = None  # as last written

    def write_first(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Write which tokens may come first after prompts, for requests by slot."""
        first = DraftTree([0], [-1], PLAIN)
        self._write(state, entries, {slot: first for slot, entry in entries.items() if entry.root < 0})
        self._roots = None

    def send_trees(self, state: DecodeState, longest: int) -> None:
        """Copy the trees of the next step to the host, and each sequence's last `longest` tokens, the root last."""
        columns = state.lengths[:, None] + torch.arange(1 - longest, 1, device=state.lengths.device)
        last = state.tokens.gather(1, columns.clamp(min=0))
        facts = (state.lengths[:, None], state.active[:, None], state.tree.tokens, state.tree.parents, last)
        self._queue.send(torch.cat(facts, 1))
        self._trees, self._repaired = None, {}

    def repair_trees(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Put the tokens that grammars force into the trees, where they forbid drafts.

        The drafted trees are read only if a root is not known otherwise, or if a grammar forces tokens after its root
        and drafts may follow.
        """
        repaired = self._forced_trees(state, entries)
        if repaired is None:
            self._trees, repaired = self._read(state, entries), {}
            for slot, tree in self._trees.items():
                try:
                    better = _matcher_of(entries[slot]).repair(tree)
                except GrammarError as error:
                    entries[slot].failure = str(error)
                    continue
                if better is not None:
                    repaired[slot] = better
        self._repaired = repaired
        _upload_trees(state, repaired)

    def _forced_trees(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> dict[int, DraftTree] | None:
        """The trees, by slot, of requests with forced tokens after their roots. None if drafts matter there, or if a
        request does not go on from the last step. Matchers read the roots."""
        sent, self._roots = self._roots, None
        restricted = {slot: entry for slot, entry in entries.items() if entry.matcher is not None and not entry.failure}
        if sent is None or sent.state is not state:
            return None
        if any(sent.entries.get(slot) is not entry for slot, entry in restricted.items()):
            return None
        report, trees = sent.queue.receive(), dict[int, DraftTree | None]()
        for slot, entry in restricted.items():
            _, count, reason, _, *following = report[slot].tolist()
            if reason == GOES_ON and count and self._reads(entry, following[:count]):
                forced = _matcher_of(entry).forced()
                if forced:
                    trees[slot] = forced_tree(following[count - 1], forced, state.spec)
        return None if None in trees.values() else {slot: tree for slot, tree in trees.items() if tree is not None}

    def write_masks(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Write the masks of the trees' nodes, for requests by slot."""
        trees = self._read(state, entries) if self._trees is None else self._trees
        self._write(state, entries, trees | self._repaired)

    def send_roots(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Copy a step's committed tokens and the next roots to the host, for requests by slot."""
        self._roots = SentRoots(ReportQueue(self._device), state, entries)
        self._roots.queue.send(state.report)

    def _read(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> dict[int, DraftTree]:
        """Let matchers read committed tokens. Returns the trees of requests that go on, by slot."""
        facts, trees, nodes = self._queue.receive(), {}, state.spec.nodes
        for slot, entry in entries.items():
            if entry.matcher is None or entry.failure:
                continue
            length, active, *rest = facts[slot].tolist()
            if not active:
                continue
            last = rest[2 * nodes :]
            unread = length + 1 - len(entry.request.prompt) - entry.matcher.consumed
            assert 0 <= unread <= len(last), f"{unread} tokens are unread, and {len(last)} are known"
            if self._reads(entry, last[len(last) - unread :]):
                trees[slot] = DraftTree(rest[:nodes], rest[nodes : 2 * nodes], state.spec)
        return trees

    @staticmethod
    def _reads(entry: RunningRequest, tokens: list[int]) -> bool:
        """Let a request's matcher read its next tokens. Returns whether the grammar allows them. If not, the request
        gets the reason, and ends when the step that chose them is read."""
        try:
            _matcher_of(entry).read(tokens)
        except GrammarError as error:
            entry.failure = str(error)
        return not entry.failure

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
        if self._restricted is None or self._restricted[0] is not state or self._restricted[1] != restricted:
            masks.restricted.copy_(upload(restricted, torch.bool, masks.restricted.device))
            self._restricted = state, restricted


def _matcher_of(entry: RunningRequest) -> Matcher:
    assert entry.matcher is not None, "only requests with a grammar have trees here"
    return entry.matcher


def _upload_trees(state: DecodeState, trees: Mapping[int, DraftTree]) -> None:
    """Write trees to their slots, in one copy from the host."""
    if not trees:
        return
    rows = []
    for new in trees.values():
        depths, ancestors = _depths_and_ancestors(new.parents)
        rows.append([*new.tokens, *new.parents, *depths, *(word for words in ancestors for word in words)])
    sizes = [tensor[0].numel() for tensor in state.tree]
    for slot, row in zip(trees, upload(rows, torch.int64, state.tree.tokens.device), strict=True):
        for tensor, values in zip(state.tree, row.split(sizes), strict=True):
            tensor[slot].view(-1).copy_(values)


def _depths_and_ancestors(parents: list[int]) -> tuple[list[int], list[list[int]]]:
    """For each node the depth, and the words of `Tree.ancestors`."""
    depths, paths = [0], [1]
    for node, parent in enumerate(parents[1:], start=1):
        depths.append(depths[parent] + 1)
        paths.append(paths[parent] | 1 << node)
    words = range(0, len(parents), WORD)
    return depths, [[_signed(path >> first & (1 << WORD) - 1) for first in words] for path in paths]


def _signed(word: int) -> int:
    return word - (1 << WORD) if word >> WORD - 1 else word
