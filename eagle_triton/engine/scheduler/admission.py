"""Check whether a batch can take a request, and whether ranks got the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from eagle_triton.engine.model.model_view import ModelView
from eagle_triton.engine.ranks import Ranks
from eagle_triton.engine.scheduler.requests import Request, RunningRequest
from eagle_triton.engine.state import TOP_LOGPROBS
from eagle_triton.operands.verification import Verification
from eagle_triton.values import check_range


def check_request(entry: RunningRequest, view: ModelView, rows: int, depth: int) -> None:
    """Raise ValueError if the target cannot decode a request within `rows` tokens.

    depth: the next tree's. A request that is not exact may get up to this many extra tokens.
    """
    request, prompt = entry.request, entry.prompt
    if prompt.dtype != torch.int64 or prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"prompt must be int64 [L] with L > 0, got {prompt.dtype} {list(prompt.shape)}")
    if not 0 <= int(prompt.min()) <= int(prompt.max()) < view.vocab_size:
        raise ValueError(
            f"prompt: tokens must lie in 0..{view.vocab_size - 1}, got {int(prompt.min())}..{int(prompt.max())}"
        )
    given = request.embeddings
    if given is not None and (
        given.ndim != 2
        or len(given) > len(prompt)
        or (given.shape[1], given.dtype, given.device) != (view.hidden_size, view.dtype, view.device)
    ):
        raise ValueError(
            f"embeddings must be {view.dtype} [n, {view.hidden_size}] on {view.device}, n at most the prompt's "
            f"{len(prompt)} tokens, got {given.dtype} {list(given.shape)} on {given.device}"
        )
    check_range("max_new_tokens", request.max_new_tokens, 1)
    check_numbers(request, view.vocab_size)
    overshoot = 0 if request.exact else depth
    if len(prompt) + request.max_new_tokens + overshoot > rows:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {request.max_new_tokens + overshoot} new ones do not fit into "
            f"the {rows} rows of this batch"
        )
    if request.sampling.grammar is not None and entry.matcher is None:
        raise ValueError("grammar: a batch has no tokenizer: give the request to a session, or set its matcher")
    if min(request.stop_ids, default=0) < 0:
        raise ValueError(f"stop_ids must not be negative, got {min(request.stop_ids)}")


def check_numbers(request: Request, vocabulary: int) -> None:
    """Raise ValueError for a request's numbers that are out of range for any prompt."""
    check_range("top_logprobs", request.top_logprobs, 0, TOP_LOGPROBS)
    most, least = request.max_new_tokens, request.min_new_tokens
    if not 0 <= least <= most:
        raise ValueError(f"min_new_tokens must lie in 0..{most} (max_new_tokens), got {least}")
    if unknown := [token for token, _ in request.sampling.biases if token >= vocabulary]:
        raise ValueError(f"logit_bias: tokens must lie in 0..{vocabulary - 1}, got {unknown!s:.60}")
    if request.sampling.forbids_all(vocabulary, request.stop_ids if least else ()):
        beside = f", beside the stop tokens before min_new_tokens={least}" if least else ""
        raise ValueError(f"logit_bias: it forbids (-inf) all {vocabulary} tokens{beside}: leave at least one")


def refuses_grammars(verification: Verification) -> str | None:
    """Why requests with a grammar cannot be verified in this way; None: they can."""
    if verification.verify_strategy == "topp" or verification.accept_policy == "accept_all":
        return (
            f'grammar: verify_strategy="{verification.verify_strategy}" with accept_policy='
            f'"{verification.accept_policy}" may accept tokens that a grammar forbids: use another strategy or policy'
        )
    return None


def agree_on_seeds(ranks: Ranks, entries: Sequence[RunningRequest], batch: tuple[Any, ...]) -> None:
    """Give requests the seeds that rank 0 has or draws. Raises RanksError on all ranks if their requests differ.

    batch: what else decides how requests are decoded; how many steps were launched, because a step that one rank
    launched alone would exchange data with the others' next one; and how often kept pages were forgotten.
    """
    requests = [entry.request for entry in entries]
    asked = [
        {
            **{field.name: getattr(request, field.name) for field in fields(request)},
            "prompt": entry.prompt.tolist(),
            "sampling": replace(request.sampling, seed=None),
        }
        for entry, request in zip(entries, requests, strict=True)
    ]
    what = "the requests of a batch, its engine, options, trees and slots, what was forgotten, and the number of steps"
    ranks.check_same_on_all_ranks(f"{what} before", (batch, asked))
    seeds = ranks.broadcast_from_rank0([request.sampling.seeds(1)[0] for request in requests])
    for entry, seed in zip(entries, seeds, strict=True):
        entry.request = replace(entry.request, sampling=replace(entry.request.sampling, seed=seed))
