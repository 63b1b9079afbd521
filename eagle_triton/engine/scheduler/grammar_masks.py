"""Writes what the grammars of requests allow after each node of the trees, while the target's forward runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from eagle_triton.engine.grammar import GrammarError
from eagle_triton.engine.graph import ReportQueue
from eagle_triton.engine.scheduler.requests import RunningRequest
from eagle_triton.engine.state import DecodeState, TokenMasks
from eagle_triton.engine.upload import upload


class GrammarMasks:
    """Keeps the masks of a batch's steps.

    For each step: `send_trees`, then the first part of the step, then `write`, which waits for the step before it, then
    the second part.
    """

    def __init__(self, device: torch.device):
        self._queue = ReportQueue(device)

    def write_first(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Write which tokens may come first after prompts, for requests by slot."""
        self._write(state, {slot: entry for slot, entry in entries.items() if entry.root < 0}, None)

    def send_trees(self, state: DecodeState, longest: int) -> None:
        """Copy the trees of the next step to the host, and each sequence's last `longest` tokens, the root last."""
        columns = state.lengths[:, None] + torch.arange(1 - longest, 1, device=state.lengths.device)
        last = state.tokens.gather(1, columns.clamp(min=0))
        facts = (state.lengths[:, None], state.active[:, None], state.tree.tokens, state.tree.parents, last)
        self._queue.send(torch.cat(facts, 1))

    def write(self, state: DecodeState, entries: Mapping[int, RunningRequest]) -> None:
        """Let the matchers of requests, by slot, read what was committed, and write the masks of the trees' nodes."""
        self._write(state, entries, self._queue.receive().tolist())

    def _write(self, state: DecodeState, entries: Mapping[int, RunningRequest], facts: list[list[int]] | None) -> None:
        """facts: of `send_trees`; None: the only node is the first token's. A request that leaves its grammar gets its
        reason, and ends once the step before is read."""
        masks = state.masks
        assert masks is not None, "call add_masks before masks are written"
        restricted = [False] * state.batch
        for slot, entry in entries.items():
            if entry.matcher is None or entry.failure:
                continue
            try:
                restricted[slot] = _write_slot(entry, masks, slot, None if facts is None else facts[slot])
            except GrammarError as error:
                entry.failure = str(error)
        for slot in range(state.batch) if masks.written is not masks.allowed else ():
            if restricted[slot]:
                masks.allowed[slot].copy_(masks.written[slot], non_blocking=True)
        masks.restricted.copy_(upload(restricted, torch.bool, masks.restricted.device))


def _write_slot(entry: RunningRequest, masks: TokenMasks, slot: int, facts: list[int] | None) -> bool:
    """Write the masks of one request. Returns False if the device has ended it, so that nothing is written."""
    matcher, written = entry.matcher, masks.written[slot]
    assert matcher is not None
    if facts is None:
        matcher.write_mask(written[0])
        return True
    length, active, *rest = facts
    if not active:
        return False
    nodes = len(written)
    tokens, parents, last = rest[:nodes], rest[nodes : 2 * nodes], rest[2 * nodes :]
    unread = length + 1 - len(entry.request.prompt) - matcher.consumed
    assert 0 <= unread <= len(last), f"{unread} tokens are unread, and {len(last)} are known"
    matcher.read(last[len(last) - unread :])
    matcher.write_masks(tokens, parents, written)
    return True
