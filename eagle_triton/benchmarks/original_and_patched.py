"""Decodes with a model as it is and optimised, side by side: same prompts, same stop rules, in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from eagle_triton.comparison.figures import first_difference
from eagle_triton.inference.timing import Stopwatch
from eagle_triton.integration import EagleTritonConfig, optimize_eagle_with_triton
from eagle_triton.patching import Originals, PatchPointReport


@dataclass(frozen=True)
class Run:
    """One generation: the sequence, the length after each step, and when each step ended (seconds from the call)."""

    prompt_length: int
    tokens: list[int]
    lengths: list[int]
    times: list[float]

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def accepted(self) -> list[int]:
        """Drafts accepted in each step."""
        return [after - before - 1 for before, after in pairwise([self.prompt_length, *self.lengths])]

    @property
    def tau(self) -> float:
        """Tokens per step."""
        return self.new_tokens / len(self.lengths)

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.times[-1]

    @property
    def ms_per_step(self) -> float:
        """Without the first step, which holds the prefill; of the whole run if there is no other step."""
        if len(self.times) == 1:
            return self.times[0] * 1e3
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) * 1e3


def tau_of(runs: Sequence[Run]) -> float:
    """Tokens per step of all runs together."""
    return sum(run.new_tokens for run in runs) / sum(len(run.lengths) for run in runs)


def accepted_histogram(runs: Sequence[Run]) -> dict[int, int]:
    """The number of steps that accepted 0, 1, ... drafts, in this order."""
    return dict(sorted(Counter(accepted for run in runs for accepted in run.accepted).items()))


def decode(
    model: Any, input_ids: Tensor, max_new_tokens: int, temperature: float = 0.0, plain: bool = False,
    top_p: float = 0.0, room: int | None = None, steps: int | None = None,
) -> Run:  # fmt: skip
    """Run `ea_generate` (with `plain` `naive_generate`) on a prompt [1, L], timing every step.

    room: the `max_length` of the call; None: enough. steps: the most to take. A step ends when its sequence is yielded:
    then the host knows its length. Waiting for the device as well would include a step that was launched ahead.
    """
    device = model.base_model.lm_head.weight.device
    method = model.naive_generate if plain else model.ea_generate
    options = dict(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    lengths, times, sequence = [], [], input_ids
    watch = Stopwatch(device)
    with closing(
        method(input_ids.to(device), **options, max_length=room or room_for(model, input_ids, max_new_tokens))
    ) as sequences:
        for sequence in islice(sequences, steps):
            lengths.append(sequence.shape[1])
            times.append(watch.so_far())
    return Run(input_ids.shape[1], sequence[0].tolist(), lengths, times)


def room_for(model: Any, input_ids: Tensor, max_new_tokens: int) -> int:
    """A `max_length` that ends no generation early."""
    return input_ids.shape[1] + max_new_tokens + 2 * (model.ea_layer.total_tokens + 32)


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded by the original and by the optimised model, and perhaps plainly, one token per step."""

    original: Run
    optimised: Run
    original_plain: Run | None = None
    optimised_plain: Run | None = None

    @property
    def same_tokens(self) -> bool:
        return self.original.tokens == self.optimised.tokens

    @property
    def same_accepted(self) -> bool:
        return self.original.accepted == self.optimised.accepted

    @property
    def first_difference(self) -> int | None:
        """The place of the first different token of the original and the optimised run."""
        return first_difference(self.original.tokens, self.optimised.tokens)


def decode_all(
    model: Any, prompts: Sequence[Tensor], max_new_tokens: int, temperature: float = 0.0, progress: Any = None,
    plain: bool = False,
) -> list[Run]:  # fmt: skip
    """Decode every prompt [1, L] after a short warm-up. `progress` is called without arguments after each."""
    longest = max(prompts, key=lambda prompt: prompt.shape[1])
    room = room_for(model, longest, max_new_tokens)  # one for all: SafeAILab's model keeps the first call's
    decode(model, longest, max_new_tokens, temperature, plain, room=room, steps=2)
    runs = []
    for prompt in prompts:
        runs.append(decode(model, prompt, max_new_tokens, temperature, plain, room=room))
        if progress is not None:
            progress()
    return runs


def compare(
    model: Any, prompts: Sequence[Tensor], max_new_tokens: int, temperature: float = 0.0,
    config: EagleTritonConfig | None = None, progress: Any = None, plain: bool = False,
) -> tuple[list[Comparison], list[PatchPointReport]]:  # fmt: skip
    """Decode every prompt [1, L] with the model as it is, then optimised, and restore it.

    plain: also decode plainly, with both. `progress` is called without arguments after each generation. Returns a
    comparison for each prompt, and the report of the patch from before it was restored.
    """

    def all_runs() -> list[list[Run]]:
        ways = (False, True) if plain else (False,)
        return [decode_all(model, prompts, max_new_tokens, temperature, progress, way) for way in ways]

    before = all_runs()
    originals: Originals
    model, originals = optimize_eagle_with_triton(model, config)
    with originals:
        after = all_runs()
        report = originals.report()
    columns = [runs for pair in zip(before, after, strict=True) for runs in pair]
    return [Comparison(*runs) for runs in zip(*columns, strict=True)], report


@torch.no_grad()
def top2_margin(target: Any, tokens: Sequence[int], column: int) -> float:
    """The difference of a causal language model's two best logits for `column`, given the tokens before it."""
    logits = target(torch.tensor([tokens[:column]], device=target.device)).logits[0, -1]
    best, second = logits.float().topk(2).values.tolist()
    return best - second
