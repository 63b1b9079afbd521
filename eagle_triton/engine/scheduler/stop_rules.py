"""The two families of stop rules over a running batch.

`original_steps` stops like the original EaModel: it checks only after a step, so it may overshoot. `generate` stops
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import CacheFullError
from eagle_triton.engine.prefill import NaNLogitsError
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import NAN, Piece, Request
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.values import check_number


def original_steps(
    engine: Engine,
    input_ids: Tensor,
    spec: TreeSpec,
    sampling: SamplingParams,
    *,
    max_new_tokens: float,
    limit: int,
    stop_ids: Iterable[int],
) -> Generator[tuple[Tensor, int, int], None, None]:
    """Decode one sequence with the original EaModel's stop rules, which check only after a whole step.

    input_ids [1, L] int64. Yields (input_ids so far [1, L + new], new tokens, index of the step) after every step and
    ends when a stop id is among the new tokens, when new tokens > max_new_tokens, or when the length > limit; without
    a step if limit < 1. max_new_tokens may be a fraction, as in the original. Raises TypeError for what is no
    number, RuntimeError for NaN logits, or if another generation is running.
    """
    check_number("max_new_tokens", max_new_tokens)
    if limit < 1:
        return
    length = input_ids.shape[1]
    most = max(math.floor(min(limit, length + max_new_tokens)) + 1 - length, 1)
    request = Request(input_ids[0], most, sampling, frozenset(stop_ids), exact=False)
    with Batch(engine, 1, spec, length + most + spec.depth, drafts=spec.drafts > 0) as batch:
        engine.accept_lengths = []
        batch.enter_all([request])
        for index in count():
            (piece,) = batch.step()
            raise_errors([piece], [0])
            engine.accept_lengths.append(piece.accepted)
            yield batch.tokens(0)[None], batch.lengths[0] - length, index
            if piece.finished:
                return


def generate(
    engine: Engine,
    prompts: Sequence[Tensor],
    spec: TreeSpec,
    sampling: SamplingParams,
    *,
    max_new_tokens: Sequence[int],
    eos_token_ids: Iterable[int],
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Decode a batch and stop exactly: at the first end-of-sequence token (kept) or after max_new_tokens.

    prompts: int64 [L] each; max_new_tokens: one for each. Returns the prompts with their new tokens, int64 [L + n].
    Raises RuntimeError for NaN logits, or if another generation is running.
    """
    rows = [prompt.clone() for prompt in prompts]
    wanted = [index for index, new in enumerate(max_new_tokens) if new > 0]
    engine.accept_lengths = []
    if not wanted:
        return rows
    seeds, stops = sampling.seeds(len(prompts), generator), frozenset(eos_token_ids)
    most = max(len(prompts[index]) + max_new_tokens[index] for index in wanted)
    with Batch(engine, len(wanted), spec, most, drafts=spec.drafts > 0) as batch:
        batch.enter_all(
            Request(prompts[index], max_new_tokens[index], replace(sampling, seed=seeds[index]), stops)
            for index in wanted
        )
        while batch.running:
            batch.compact()
            pieces = batch.step()
            raise_errors(pieces, wanted)
            for piece in pieces:
                index = wanted[piece.index]
                if index == len(prompts) - 1 and piece.tree is not None:
                    engine.accept_lengths.append(piece.accepted)
                if piece.finished:
                    rows[index] = batch.tokens(piece.slot)
    return rows


def raise_errors(pieces: Sequence[Piece], sequences: Sequence[int]) -> None:
    """Raise CacheFullError or NaNLogitsError if a request failed. sequences: the numbers to report, by index."""
    for piece in pieces:
        if piece.error not in (None, NAN):
            raise CacheFullError(piece.error)
    if broken := [sequences[piece.index] for piece in pieces if piece.error]:
        raise NaNLogitsError(f"{NAN} for sequences {broken}")
