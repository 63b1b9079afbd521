"""A request in a slot of a batch: what the host knows of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import PrefixKeys
from eagle_triton.engine.scheduler.requests import Request


class RunningRequest:
    """A request in its slot; only its identity tells it from one that comes later.

    prompt: what is read before it decodes, on the host: behind a pause, all that was committed before. beginning: by
    which its pages are found. turn: the smaller, the earlier it came. tokens: behind what was read, as far as reports
    tell: with the root if the request is `exact`. decodes: its prompt is read. waits: for room, and holds none. root:
    behind the prompt, -1 if it is still to be chosen. steps: whose random numbers it has used.
    gamma: how deep its next trees may be, as far as reports tell: it rises at once, and falls by one a step. found:
    tokens of its prompt that pages held already. room: rows that its pages have.
    """

    def __init__(self, request: Request, prompt: Tensor, beginning: PrefixKeys, turn: int):
        self.request, self.prompt, self.beginning, self.turn = request, prompt, beginning, turn
        self.tokens: list[int] = []
        self.decodes = self.waits = False
        self.root, self.steps = -1, 0
        self.gamma = math.inf
        self.found = self.room = 0

    @property
    def new_tokens(self) -> int:
        """How many tokens it has got, as far as reports tell."""
        return len(self.prompt) + len(self.tokens) - len(self.request.prompt)

    def first(self, length: int) -> Tensor:
        """The first `length` of its tokens, as far as reports tell: int64 [length], on the host."""
        return torch.cat((self.prompt, torch.tensor(self.tokens, dtype=torch.int64, device="cpu")))[:length]

    def paused(self, tokens: Tensor, beginning: PrefixKeys, root: int) -> RunningRequest:
        """The same request, waiting for room to read again what was committed, `tokens`, which pages with `beginning`
        hold perhaps, and to go on with the root that was chosen behind it (-1: none was)."""
        waiting = RunningRequest(self.request, tokens, beginning, self.turn)
        waiting.found, waiting.waits, waiting.steps, waiting.root = self.found, True, self.steps, root
        waiting.tokens = self.tokens[-1:] if self.request.exact else []  # the root, if it was told
        return waiting
