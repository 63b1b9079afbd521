"""Chooses tokens on the host, like transformers' own loop, while the engine computes the logits.

For logits processors without a kernel in the engine, and for criteria that look at scores. They are called as in the
original: once for each token, in order, with the tokens so far. So they may keep a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class HostChooser:
    """The `Judge` of a batch that has the rows of one `generate` call in its slots.

    A single row walks through its drafts as far as they equal the chosen tokens. Several rows go in step, one token at
    a time, because processors see all rows at once: their batch must draft nothing.

    sequences: int [B, L], first the prompts in the form that processors see. process: gives scores for sequences and
    logits float32 [B, V]. stop: says which rows have ended, bool [B], for sequences and all scores so far. pad: for
    rows that have ended; None: their chosen tokens. scores, logits: of each token, at first (); None: not kept.
    """

    sequences: Tensor
    process: Callable[[Tensor, Tensor], Tensor]
    stop: Callable[[Tensor, Any], Tensor]
    do_sample: bool
    pad: int | None
    streamer: Any | None
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None

    def __post_init__(self) -> None:
        self.done = False
        self._inference_mode = torch.is_inference_mode_enabled()  # the caller's mode: processors may change its tensors
        self._goes_on = torch.ones(len(self.sequences), dtype=torch.bool, device=self.sequences.device)
        if self.streamer is not None:
            self.streamer.put(self.sequences.cpu())

    def __call__(self, logits: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `Judge`. Once all rows have ended, nothing more is chosen, and the tokens mean nothing."""
        batch, device = len(logits), logits.device
        nodes, chosen = [0], self._choose(logits[:, 0])
        if depth:
            assert batch == 1, "rows of a batch go in step with each other"
            places = zip(parents[0].tolist(), tokens[0].tolist(), strict=True)
            child_of = {place: node for node, place in enumerate(places) if node}
            while not self.done and (child := child_of.get((nodes[-1], int(chosen[0])))) is not None:
                nodes.append(child)
                chosen = self._choose(logits[:, child])
        path = torch.tensor([nodes + [-1] * (depth + 1 - len(nodes))] * batch, dtype=torch.int32, device=device)
        accepted = torch.full((batch,), len(nodes) - 1, dtype=torch.int32, device=device)
        return path, accepted, chosen.to(device)

    def _choose(self, row: Tensor) -> Tensor:
        """The next token of every row, [B] int64, from logits [B, V]."""
        if self.done:
            return torch.zeros(len(row), dtype=torch.int64, device=row.device)
        with torch.inference_mode(self._inference_mode), torch.no_grad():
            return self._choose_as_the_original(row)

    def _choose_as_the_original(self, row: Tensor) -> Tensor:
        """`_choose` while some row goes on: calls the caller's processors and criteria."""
        logits = row.to(device=self.sequences.device, dtype=torch.float32, copy=True)
        version = self.sequences._version if not self.sequences.is_inference() else None
        scores = self.process(self.sequences, logits)
        if version is not None and self.sequences._version != version:
            raise RuntimeError(
                "a logits processor changed input_ids in place, but the engine has read these tokens already: let it "
                "change the scores instead, or call the original (originals.restore())"
            )
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.do_sample:
            chosen = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        else:
            chosen = torch.argmax(scores, dim=-1)
        if self.pad is not None:
            chosen = torch.where(self._goes_on, chosen, self.pad)
        self.sequences = torch.cat((self.sequences, chosen[:, None]), dim=1)
        if self.streamer is not None:
            self.streamer.put(chosen.cpu())
        self._goes_on = (self._goes_on & ~self.stop(self.sequences, self.scores)).bool()
        self.done = not bool(self._goes_on.any())
        if self.done and self.streamer is not None:
            self.streamer.end()
        return chosen
