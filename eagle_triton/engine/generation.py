"""The engine of one model, and a generation that runs on it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_triton.adapters.view import DraftView, ModelView
from eagle_triton.engine.graph import Outbox, StepGraph
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prefill import prefill
from eagle_triton.engine.sampling import Sampling
from eagle_triton.engine.state import DecodeState, capacity_bucket, rows_beyond
from eagle_triton.engine.step import Mode, decode_step
from eagle_triton.reference.verification import ERROR
from eagle_triton.tree_spec import TreeSpec

log = logging.getLogger(__name__)


@dataclass
class Engine:
    """Decodes with one model. Holds references to the model's parts, and the states and graphs of the shapes used.

    cuda_graph: launch each step as one CUDA graph (on a GPU only). `notes` tells of what fell back and why.
    One generation runs at a time; a second one is refused with RuntimeError, never interleaved.
    """

    view: ModelView
    draft: DraftView
    ops: Operations
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        self.accept_lengths: list[int] = []  # of the last generation's first sequence, one for each step
        self.notes: dict[str, str] = {}
        self.device = self.view.device
        self._lock = threading.Lock()
        self.release()

    def release(self) -> None:
        """Drop all states and graphs."""
        self._states: dict[tuple[int, TreeSpec], DecodeState] = {}
        self._steps: dict[tuple[DecodeState, Mode], Callable[[], None]] = {}
        self._weights = self._address()

    def state(self, batch: int, spec: TreeSpec, rows: int) -> DecodeState:
        """A state with room for `rows` committed rows per sequence, reused where one is large enough.

        Raises RuntimeError if the model was moved to another device since.
        """
        if self.view.device != self.device:
            raise RuntimeError(
                f"the model was moved from {self.device} to {self.view.device} after optimising; restore it and "
                "optimise it there"
            )
        if self._weights != self._address():  # the model was cast: graphs point to freed memory
            self.release()
        needed = capacity_bucket(rows + rows_beyond(spec))
        state = self._states.get((batch, spec))
        if state is None or state.capacity < needed:
            self._steps = {key: step for key, step in self._steps.items() if key[0] is not state}
            self._states.pop((batch, spec), None)
            draft = self.draft if spec.drafts else None
            state = self._states[batch, spec] = DecodeState(self.view, draft, spec, batch, needed)
        return state

    def step(self, state: DecodeState, mode: Mode) -> Callable[[], None]:
        """The decode step for a state: a graph, captured here the first time, or the step itself.

        Must be called before `state` holds a sequence.
        """
        draft = self.draft if state.spec.drafts else None
        eager = functools.partial(decode_step, self.ops, self.view, draft, state, mode)
        if not (self.cuda_graph and state.tokens.is_cuda):
            return eager
        key = (state, mode)
        if key not in self._steps:
            try:
                self._steps[key] = StepGraph(eager, state, self.ops)
            except RuntimeError as error:  # torch's, for an operation that cannot be captured
                log.warning("decoding without a CUDA graph: %s", error)
                self.notes["cuda_graph"] = f"the step could not be captured: {error}"
                self._steps[key] = eager
        return self._steps[key]

    def start(
        self,
        prompts: Sequence[Tensor],
        spec: TreeSpec,
        sampling: Sampling,
        rows: int,
        generator: torch.Generator | None = None,
    ) -> Generation:
        """Prefill `prompts` (int64 [L] each, checked by the caller) and draft the first tree. Use as a context manager.

        rows: the most tokens a sequence may commit, prompt included. Raises RuntimeError if a generation is running or
        if the target's logits are NaN.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another generation is running on this model; finish or close it first")
        try:
            return Generation(self, prompts, spec, sampling, rows, generator)
        except BaseException:
            self._lock.release()
            raise

    def _address(self) -> tuple[int, torch.dtype]:
        return self.view.embedding.data_ptr(), self.view.dtype


class Generation:
    """A running batch. `step` advances it; `tokens` reads a sequence; `freeze` stops one.

    On a GPU the next step is launched before the last one is read, so that the device never waits for the host; what
    that step did past a stop is discarded.
    """

    @torch.no_grad()
    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Tensor],
        spec: TreeSpec,
        sampling: Sampling,
        rows: int,
        generator: torch.Generator | None,
    ):
        self.engine = engine
        sampled, top_p_first = not sampling.greedy, sampling.top_p_first
        self.ahead = 1 if engine.view.device.type == "cuda" else 0  # steps launched before the last one is read
        self.state = state = engine.state(len(prompts), spec, rows + self.ahead * (spec.depth + 1))
        self.launch = engine.step(state, Mode(sampled, top_p_first))
        self.outbox = Outbox(state, 1 + self.ahead)
        self.running = [True] * len(prompts)
        self.lengths = [len(prompt) for prompt in prompts]  # committed tokens, as the host knows them
        engine.accept_lengths = []
        sampling.fill(state.sampling, generator)
        state.active.fill_(True)
        state.stops.ids.fill_(-1)
        state.stops.limit.fill_(2**31 - 1)
        draft = engine.draft if spec.drafts else None
        prefill(engine.ops, engine.view, draft, state, prompts, sampled, top_p_first)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine._lock.release()

    def tokens(self, index: int) -> Tensor:
        """The committed tokens of a sequence: int64 [n], a copy."""
        return self.state.tokens[index, : self.lengths[index]].clone()

    def freeze(self, index: int) -> None:
        """Stop decoding a sequence; the others go on."""
        self.running[index] = False
        self.state.active[index] = False

    @torch.no_grad()
    def step(self) -> list[list[int]]:
        """One decode step: the tokens it committed for each sequence, none for a frozen one.

        Raises RuntimeError if the target's logits are NaN.
        """
        while self.outbox.sent <= self.outbox.received + self.ahead:
            self.launch()
            self.outbox.send()
        rows = self.outbox.receive()
        broken = [i for i, (_, _, reason, *_) in enumerate(rows) if reason == ERROR and self.running[i]]
        if broken:
            raise RuntimeError(f"the target's logits are NaN for sequences {broken}")
        fresh = [
            tokens[:count] if running else []
            for running, (_, count, _, *tokens) in zip(self.running, rows, strict=True)
        ]
        self.lengths = [length + len(tokens) for length, tokens in zip(self.lengths, fresh, strict=True)]
        if fresh[0]:
            self.engine.accept_lengths.append(len(fresh[0]) - 1)
        return fresh
