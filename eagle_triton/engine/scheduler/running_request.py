"""A request in a slot of a batch: what the host knows of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle_triton.engine.memory.pages import PrefixKeys
from eagle_triton.engine.scheduler.requests import Request


class RunningRequest:
    """A request in its slot. Only its identity tells it from one that comes later.

    prompt: what is read before it decodes, on the host; after a preemption all that was committed before.
    prefix: the keys by which pages with this prompt are found.
    arrival: order of arrival.
    tokens: new tokens, as far as reports tell; with the root if the request is `exact`.
    decodes: its prompt is read.
    preempted: it waits for room, and holds none.
    root: the token after the prompt, -1 if it is still to be chosen.
    steps: how many steps have used its random numbers.
    gamma: how deep its next trees may be, as far as reports tell. It rises at once, and falls by one a step.
    cached_tokens: tokens of its prompt that pages held already.
    page_rows: rows of its pages.
    """

    def __init__(self, request: Request, prompt: Tensor, prefix: PrefixKeys, arrival: int):
        self.request, self.prompt, self.prefix, self.arrival = request, prompt, prefix, arrival
        self.tokens: list[int] = []
        self.decodes = self.preempted = False
        self.root, self.steps = -1, 0
        self.gamma = math.inf
        self.cached_tokens = self.page_rows = 0

    @property
    def new_tokens(self) -> int:
        """How many tokens it has got, as far as reports tell."""
        return len(self.prompt) + len(self.tokens) - len(self.request.prompt)

    def first(self, length: int) -> Tensor:
        """The first `length` of its tokens, as far as reports tell: int64 [length], on the host."""
        return torch.cat((self.prompt, torch.tensor(self.tokens, dtype=torch.int64, device="cpu")))[:length]

    def to_resume(self, tokens: Tensor, prefix: PrefixKeys, root: int) -> RunningRequest:
        """The same request, preempted: once there is room it reads `tokens` again, which pages may still hold by
        `prefix`, and goes on with `root` (-1: none was chosen)."""
        waiting = RunningRequest(self.request, tokens, prefix, self.arrival)
        waiting.cached_tokens, waiting.steps = self.cached_tokens, self.steps
        waiting.preempted, waiting.root = True, root
        waiting.tokens = self.tokens[-1:] if self.request.exact else []  # the root, if it was told
        return waiting
