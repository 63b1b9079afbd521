"""The decoding loop of a prepared `generate` call, on the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    StoppingCriteriaList,
)

from eagle_triton.engine.engine import Engine
from eagle_triton.engine.prefill import NaNLogitsError
from eagle_triton.engine.ranks import Ranks
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.stop_rules import raise_errors
from eagle_triton.engine.step import Judge
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.families.hf_generate.host_decoding import HostChooser
from eagle_triton.families.hf_generate.plan import Call, Plan, read_plan
from eagle_triton.families.hf_generate.read_ahead import Reading, open_batch
from eagle_triton.patching import Fallback

_SURELY = 1e30  # added to the logit of a token that must come

Steps = Generator[list[tuple[int, list[int]]], None, None]  # of a batch: rows, and the tokens that they got


def decode(
    engine: Engine, read_tree: Callable[[], TreeSpec], call: Call, reasons: Sequence[str], reading: Reading
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode a call. Returns the ids of the prompts with their continuations. reading: its batch, read ahead.

    Raises Fallback with `reasons` and those found here.
    """
    config, streamer, input_ids = call.config, call.streamer, call.input_ids
    asks, ranks = call.asks, engine.view.ranks
    plan = read_plan(engine.view, reasons, call)
    tree = read_tree()
    batch = reading.take(tree, plan)
    if plan.on_host:
        return _decode_on_host(engine, tree, plan, call)
    if ranks is not None:  # only one rank may stream, or have its own criteria
        ranks.meet()
        asks = ranks.broadcast_from_rank0(asks)
    criteria, deciding = (call.stopping_criteria, ranks) if asks else (call.followed, None)
    try:
        with closing(_steps(engine, tree, plan, batch=batch)) as steps:
            if streamer is None and not asks:
                sequences, counts = _all_tokens(steps, input_ids, plan.pad)
            else:
                sequences, counts = _token_by_token(steps, input_ids, plan.pad, criteria, streamer, deciding)
    except NaNLogitsError as error:
        if config.remove_invalid_values:
            raise Fallback("remove_invalid_values of NaN logits") from error
        raise
    if config.remove_invalid_values and not all(part.isfinite().all() for parts in plan.logits or () for part in parts):
        raise Fallback("remove_invalid_values of infinite logits")
    if not config.return_dict_in_generate:
        return sequences
    if not (config.output_scores or config.output_logits):
        return GenerateDecoderOnlyOutput(sequences=sequences)
    length = input_ids.shape[1]
    logits, scores = _emitted_logits(engine, plan, sequences[:, length:], counts), None
    if config.output_scores:
        scores = tuple(call.logits_processor(sequences[:, : length + place], row) for place, row in enumerate(logits))
    return GenerateDecoderOnlyOutput(
        sequences=sequences, scores=scores, logits=logits if config.output_logits else None
    )


def _decode_on_host(engine: Engine, tree: TreeSpec, plan: Plan, call: Call) -> Tensor | GenerateDecoderOnlyOutput:
    """`decode` if tokens are chosen on the host. Random numbers are torch's own, drawn as in the original."""
    config, input_ids = call.config, call.input_ids
    wanted = bool(config.return_dict_in_generate)
    chooser = HostChooser(
        input_ids,
        call.logits_processor,
        call.stopping_criteria,
        do_sample=config.do_sample,
        pad=plan.pad,
        streamer=call.streamer,
        scores=() if wanted and config.output_scores else None,
        logits=() if wanted and config.output_logits else None,
    )
    with closing(_steps(engine, tree if len(plan.prompts) == 1 else PLAIN, plan, chooser)) as steps:
        try:
            for _ in steps:
                if chooser.done:
                    break
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration):  # a callback's, which Python changes in a generator
                raise error.__cause__ from None
            raise
    engine.ops.calls["chosen_on_host"] += (chooser.sequences.shape[1] - input_ids.shape[1]) * len(input_ids)
    if not wanted:
        return chooser.sequences
    return GenerateDecoderOnlyOutput(sequences=chooser.sequences, scores=chooser.scores, logits=chooser.logits)


def _steps(engine: Engine, tree: TreeSpec, plan: Plan, judge: Judge | None = None, batch: Batch | None = None) -> Steps:
    """Run the batch step by step, until no row goes on. Logits are added to the plan's. judge: chooses the tokens.
    batch: reads the plan's prompts already; None: make one.

    Raises RuntimeError for NaN logits, or if another generation is running.
    """
    count = len(plan.prompts)
    seeds = plan.sampling.seeds(count)
    if batch is None:
        batch = open_batch(engine, tree, plan, seeds, judge)
    elif not plan.sampling.greedy:
        batch.reseed(seeds)
    with batch:
        engine.accept_lengths = []
        while batch.running:
            if judge is None:  # a judge has the rows in their slots
                batch.compact()
            pieces = batch.step()
            raise_errors(pieces, range(count))
            for piece in pieces:
                if piece.index == count - 1 and piece.tree is not None:
                    engine.accept_lengths.append(piece.accepted)
                if plan.logits is not None and piece.logits is not None:
                    plan.logits[piece.index].append(piece.logits.clone())  # the others are freed with the step
            yield [(piece.index, piece.tokens) for piece in pieces]


def _emitted_logits(engine: Engine, plan: Plan, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """The logits from which each column of tokens [B, n] was chosen, float32 [B, V] each.

    counts: how many tokens of each row are its own. After them the original continues with the plan's padding, and the
    target must read the same here to give the same logits.
    """
    assert plan.logits is not None
    total = tokens.shape[1]
    rows = [torch.cat(parts)[:count] for parts, count in zip(plan.logits, counts, strict=True)]
    ended = [row for row, count in enumerate(counts) if count < total]
    if ended:
        assert plan.pad is not None, "only padding follows a row's end"
        own = [tokens[row, : counts[row]].cpu() for row in ended]
        least = min(counts)
        padded = Plan(
            [torch.cat((plan.prompts[row], new)) for row, new in zip(ended, own, strict=True)],
            total - least,
            SamplingParams(logit_bias={plan.pad: _SURELY}),
            embeddings=None if plan.embeddings is None else [plan.embeddings[row] for row in ended],
            logits=[[] for _ in ended],
        )
        for _ in _steps(engine, PLAIN, padded):
            pass
        assert padded.logits is not None
        for row, parts in zip(ended, padded.logits, strict=True):
            rows[row] = torch.cat((rows[row], *parts))[:total]
    device = tokens.device
    if len(rows) == 1:
        return tuple(rows[0].to(device).split(1))
    return torch.stack(rows, dim=1).to(device).unbind(0)


def _all_tokens(steps: Steps, input_ids: Tensor, pad: int | None) -> tuple[Tensor, list[int]]:
    """Run all rows to their ends: tokens [B, L + longest], padded with `pad`, and the number of tokens of each row."""
    rows: list[list[int]] = [[] for _ in input_ids]
    for step in steps:
        for row, tokens in step:
            rows[row] += tokens
    counts = [len(tokens) for tokens in rows]
    new = [tokens + [pad or 0] * (max(counts) - len(tokens)) for tokens in rows]
    sequences = torch.cat((input_ids, torch.tensor(new, dtype=torch.int64, device=input_ids.device)), dim=1)
    return sequences, counts


def _token_by_token(
    steps: Steps,
    input_ids: Tensor,
    pad: int | None,
    stopping_criteria: StoppingCriteriaList,
    streamer: Any | None,
    ranks: Ranks | None,
) -> tuple[Tensor, list[int]]:
    """Run all rows token by token, in step with each other, until `stopping_criteria` have ended each; and the number
    of tokens of each row.

    pad: for rows that have ended, while others go on; None: the target's tokens. ranks: rank 0's criteria decide for
    all, because criteria may look at a clock; None: all ranks' criteria agree.
    """
    if streamer is not None:
        streamer.put(input_ids.cpu())
    waiting: list[deque[int]] = [deque() for _ in input_ids]
    counts = [0] * len(input_ids)
    sequences, goes_on = input_ids, torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    while goes_on.any():
        new = []
        for row, more in enumerate(goes_on.tolist()):
            while not waiting[row] and (more or pad is None):
                for other, tokens in next(steps):
                    waiting[other] += tokens
            counts[row] += more or pad is None
            new.append(waiting[row].popleft() if more or pad is None else pad)
        column = torch.tensor(new, dtype=torch.int64, device=input_ids.device)
        sequences = torch.cat((sequences, column[:, None]), dim=1)
        if streamer is not None:
            streamer.put(column.cpu())
        done = stopping_criteria(sequences, None)
        if ranks is not None:
            done = torch.tensor(ranks.broadcast_from_rank0(done.tolist()), dtype=torch.bool, device=done.device)
        goes_on = goes_on & ~done
    if streamer is not None:
        streamer.end()
    return sequences, counts
