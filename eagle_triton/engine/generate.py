"""The two families of stop rules over a running generation.

`original_steps` stops like the original EaModel (it looks after a step and so may overshoot), `generate` exactly.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor

from eagle_triton.engine.generation import Engine
from eagle_triton.engine.sampling import Sampling
from eagle_triton.tree_spec import TreeSpec


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
            (fresh,) = generation.step()
            length = generation.lengths[0]
            yield generation.tokens(0)[None], length - prompt, index
            if not stops.isdisjoint(fresh) or length - prompt > max_new_tokens or length > limit:
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
            for index, fresh in enumerate(generation.step()):
                if ends[index] is None:
                    limit = len(prompts[index]) + max_new_tokens[index]
                    ends[index] = _end(fresh, before[index], limit, stops)
                    if ends[index] is not None:
                        generation.freeze(index)
        return [generation.tokens(index)[:end] for index, end in enumerate(ends)]


def _end(fresh: list[int], before: int, limit: int, stops: set[int]) -> int | None:
    """Where a sequence ends whose columns from `before` on are `fresh`: its length then, or None if it goes on."""
    end = next((before + offset + 1 for offset, token in enumerate(fresh) if token in stops), None)
    if end is not None and end <= limit:
        return end
    return limit if before + len(fresh) >= limit else None
