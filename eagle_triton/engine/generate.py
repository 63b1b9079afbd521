"""The generation loop: prefill, steps, and the two families of stop rules.

`original_steps` stops like the original EaModel (it checks after a step and so may overshoot), `generate` exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_triton.adapters.view import DraftView, ModelView
from eagle_triton.engine.operations import Operations
from eagle_triton.engine.prefill import prefill
from eagle_triton.engine.sampling import Sampling
from eagle_triton.engine.state import DecodeState, capacity_bucket, rows_beyond
from eagle_triton.engine.step import decode_step
from eagle_triton.tree_spec import TreeSpec


class Step(NamedTuple):
    """What one decode step gave, on the host."""

    accepted: list[int]  # drafts accepted for each sequence; -1 where a sequence is finished


@dataclass
class Engine:
    """Decodes with one model. Holds references to the model's parts and the tensors of the last shapes used.

    One generation runs at a time; a second one is refused with RuntimeError, never interleaved.
    """

    view: ModelView
    draft: DraftView
    ops: Operations

    def __post_init__(self) -> None:
        self.accept_lengths: list[int] = []  # of the last generation's first sequence, one for each step
        self._lock = threading.Lock()
        self._states: dict[tuple[int, TreeSpec], DecodeState] = {}

    def state(self, batch: int, spec: TreeSpec, rows: int) -> DecodeState:
        """A state with room for `rows` committed rows per sequence, reused where one is large enough."""
        needed = capacity_bucket(rows + rows_beyond(spec))
        state = self._states.get((batch, spec))
        if state is None or state.capacity < needed or state.target_cache.dtype != self.view.dtype:
            self._states.pop((batch, spec), None)
            draft = self.draft if spec.drafts else None
            state = self._states[batch, spec] = DecodeState(self.view, draft, spec, batch, needed)
        return state

    def release(self) -> None:
        """Drop all cached tensors."""
        self._states.clear()

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


class Generation:
    """A running batch. `step` advances it; `tokens` reads a sequence; `freeze` stops one."""

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
        self.engine, self.spec, self.sampling = engine, spec, sampling
        self.draft = engine.draft if spec.drafts else None
        self.state = state = engine.state(len(prompts), spec, rows)
        sampling.fill(state.sampling, generator)
        self.lengths = [len(prompt) for prompt in prompts]  # committed tokens, as the host knows them
        engine.accept_lengths = []
        state.active.fill_(True)
        sampled, top_p_first = not sampling.greedy, sampling.top_p_first
        prefill(engine.ops, engine.view, self.draft, state, prompts, sampled, top_p_first)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine._lock.release()

    def tokens(self, index: int, first: int = 0) -> Tensor:
        """The committed tokens of a sequence from column `first` on: int64 [n], a copy."""
        return self.state.tokens[index, first : self.lengths[index]].clone()

    def freeze(self, index: int) -> None:
        """Stop decoding a sequence; the others go on."""
        self.state.active[index] = False

    @torch.no_grad()
    def step(self) -> Step:
        """One decode step. Raises RuntimeError if the target's logits are NaN."""
        decode_step(
            self.engine.ops,
            self.engine.view,
            self.draft,
            self.state,
            not self.sampling.greedy,
            self.sampling.top_p_first,
        )
        accepted, nan = torch.stack((self.state.accepted, (self.state.nan & self.state.active).int())).tolist()
        if any(nan):
            raise RuntimeError(f"the target's logits are NaN for sequences {[i for i, bad in enumerate(nan) if bad]}")
        self.lengths = [length + count + 1 for length, count in zip(self.lengths, accepted, strict=True)]
        if accepted[0] >= 0:
            self.engine.accept_lengths.append(accepted[0])
        return Step(accepted)


def original_steps(
    engine: Engine,
    input_ids: Tensor,
    spec: TreeSpec,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    limit: int,
    stop_ids: Iterable[int],
) -> Generator[tuple[Tensor, int, int], None, None]:
    """Decode one sequence with the original EaModel's stop rules, which look only after a whole step.

    input_ids [1, L] int64. Yields (input_ids so far [1, L + new], new tokens, index of the step) after every step and
    ends when a stop id is among the new tokens, when new tokens > max_new_tokens, or when the length > limit.
    """
    prompt = input_ids.shape[1]
    rows = min(limit, prompt + max_new_tokens + 1) + spec.depth + 1
    with engine.start([input_ids[0]], spec, sampling, max(rows, prompt + spec.depth + 1)) as generation:
        stops = set(stop_ids)
        for index in range(limit):
            before = generation.lengths[0]
            generation.step()
            length = generation.lengths[0]
            yield generation.tokens(0)[None], length - prompt, index
            if (
                stops.intersection(generation.tokens(0, before).tolist())
                or length - prompt > max_new_tokens
                or length > limit
            ):
                return


def generate(
    engine: Engine,
    prompts: Sequence[Tensor],
    spec: TreeSpec,
    sampling: Sampling,
    *,
    max_new_tokens: Sequence[int],
    eos_token_ids: Iterable[int],
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Decode a batch and stop exactly: at the first end-of-sequence token (kept) or after max_new_tokens.

    prompts: int64 [L] each; max_new_tokens: one for each. Returns the prompts with their new tokens, int64 [L + n].
    """
    rows = max(len(prompt) + new for prompt, new in zip(prompts, max_new_tokens, strict=True)) + spec.depth + 1
    stops = set(eos_token_ids)
    ends: list[int | None] = [len(p) if new == 0 else None for p, new in zip(prompts, max_new_tokens, strict=True)]
    if None not in ends:
        return [prompt.clone() for prompt in prompts]
    with engine.start(prompts, spec, sampling, rows, generator) as generation:
        for index, end in enumerate(ends):
            if end is not None:
                generation.freeze(index)
        while None in ends:
            before = list(generation.lengths)
            generation.step()
            for index, prompt in enumerate(prompts):
                if ends[index] is None:
                    fresh = generation.tokens(index, before[index]).tolist()
                    ends[index] = _end(fresh, before[index], len(prompt) + max_new_tokens[index], stops)
                    if ends[index] is not None:
                        generation.freeze(index)
        return [generation.tokens(index)[:end] for index, end in enumerate(ends)]


def _end(fresh: list[int], before: int, limit: int, stops: set[int]) -> int | None:
    """Where a sequence ends whose columns from `before` on are `fresh`: its length then, or None if it goes on."""
    end = next((before + offset + 1 for offset, token in enumerate(fresh) if token in stops), None)
    if end is not None and end <= limit:
        return end
    return limit if before + len(fresh) >= limit else None
