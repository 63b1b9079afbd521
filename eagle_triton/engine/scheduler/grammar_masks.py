"""Make requests follow their grammars: draft the tokens that they force, and write masks for each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from eagle_triton.engine.grammar import DraftTree, GrammarError, Matcher
from eagle_triton.engine.graph import ReportQueue
from eagle_triton.engine.scheduler.requests import RunningRequest
from eagle_triton.engine.state import DecodeState
from eagle_triton.engine.upload import upload
from eagle_triton.operands.verification import GOES_ON


class SentRoots(NamedTuple):
    """Roots that a step of `state` chose for requests by slot, while copied to the host."""

    queue: ReportQueue
    state: DecodeState
    entries: Mapping[int, RunningRequest]


class GrammarMasks:
    """Keeps the masks of a batch's steps.

    For each step: `draft_forced` if anything is drafted, `send_trees`, then the first part of the step, `write_masks`,
    the second part, `send_roots`, and the third part. `draft_forced` waits for the second part of the last step. After
    a prompt, or a step of another state, it waits for the trees. `write_masks` waits for the third part.
    """

    def __init__(self, device: torch.device):
        self._device, self._queue = device, ReportQueue(device)
        self._roots: SentRoots | None = None  # of the last step; None: later roots may exist
        self._restricted: tuple[DecodeState, list[bool]] | None = None  # as last written

    def write_first(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Write which tokens may come first after prompts, for requests by slot."""
        first = DraftTree([0], [-1])
        self._write(state, entries, {slot: first for slot, entry in _restricted(entries).items() if entry.root < 0})
        self._roots = None

    def draft_forced(
        self, state: DecodeState, entries: Mapping[int, RunningRequest], longest: int, draft: Callable[[], None]
    ) -> None:
        """Draft the tokens that grammars force after the roots. longest: see `send_trees`. draft: launches
        `Tree.draft_forced` with the state's masks.

        It waits for the trees only if a request does not go on from the last step, or if that had another state.
        """
        if not self._read_roots(state, entries):
            self.send_trees(state, longest)
            self._read(state, entries)
        assert state.masks is not None, "call add_masks before tokens are forced"
        forced = [[-1] * state.masks.forced.shape[1] for _ in range(state.batch)]
        for slot, entry in _restricted(entries).items():
            tokens = _matcher_of(entry).forced()[: len(forced[slot])]
            forced[slot][: len(tokens)] = tokens
        if any(tokens[0] >= 0 for tokens in forced):
            state.masks.forced.copy_(upload(forced, torch.int64, state.masks.forced.device))
            draft()

    def _read_roots(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> bool:
        """Let matchers read what the last step committed. Returns whether that is all up to each root."""
        sent, self._roots = self._roots, None
        if sent is None or sent.state is not state:
            return False
        restricted = _restricted(entries)
        if any(sent.entries.get(slot) is not entry for slot, entry in restricted.items()):
            return False
        report = sent.queue.receive()
        for slot, entry in restricted.items():
            _, count, reason, _, *following = report[slot].tolist()
            if reason == GOES_ON:
                self._reads(entry, following[:count])
        return True

    def send_trees(self, state: DecodeState, longest: int) -> None:
        """Copy the trees of the next step to the host, and each sequence's last `longest` tokens, the root last."""
        columns = state.lengths[:, None] + torch.arange(1 - longest, 1, device=state.lengths.device)
        last = state.tokens.gather(1, columns.clamp(min=0))
        facts = (state.lengths[:, None], state.active[:, None], state.tree.tokens, state.tree.parents, last)
        self._queue.send(torch.cat(facts, 1))

    def write_masks(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Write the masks of the trees' nodes, for requests by slot."""
        self._write(state, entries, self._read(state, entries))

    def send_roots(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Copy a step's committed tokens and the next roots to the host, for requests by slot."""
        self._roots = SentRoots(ReportQueue(self._device), state, entries)
        self._roots.queue.send(state.report)

    def _read(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> dict[int, DraftTree]:
        """Let matchers read committed tokens. Returns the trees of requests that go on, by slot."""
        facts, trees, nodes = self._queue.receive(), {}, state.spec.nodes
        for slot, entry in _restricted(entries).items():
            length, active, *rest = facts[slot].tolist()
            if not active:
                continue
            last = rest[2 * nodes :]
            unread = length + 1 - len(entry.request.prompt) - _matcher_of(entry).consumed
            assert 0 <= unread <= len(last), f"{unread} tokens are unread, and {len(last)} are known"
            if self._reads(entry, last[len(last) - unread :]):
                trees[slot] = DraftTree(rest[:nodes], rest[nodes : 2 * nodes])
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
        """Write masks of trees by slot, of requests with a grammar; the other sequences are not restricted."""
        masks = state.masks
        assert masks is not None, "call add_masks before masks are written"
        restricted = [False] * state.batch
        for slot, tree in trees.items():
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


def _restricted(entries: Mapping[int, RunningRequest]) -> dict[int, RunningRequest]:
    """Those with a grammar that has not failed."""
    return {slot: entry for slot, entry in entries.items() if entry.matcher is not None and not entry.failure}
