"""Write the sampling and stop options of requests in some slots, for steps to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.requests import Request, RunningRequest
from eagle_triton.engine.state import Sequences
from eagle_triton.engine.upload import to_device, upload
from eagle_triton.operands.logit_processing import LogitRules


def write_options(sequences: Sequences, entries: Mapping[int, RunningRequest]) -> None:
    """Write the sampling and stop options of requests in some slots, and the positions of their random numbers."""
    stops, requests = sequences.stops, [entry.request for entry in entries.values()]
    slots = upload(list(entries), torch.int64, sequences.device)
    SamplingParams.write([request.sampling for request in requests], sequences.sampling, slots)
    width = stops.ids.shape[1]
    columns: list[tuple[Tensor, list[Any]]] = [
        (stops.ids, [[*sorted(request.stop_ids), *[-1] * (width - len(request.stop_ids))] for request in requests]),
        (stops.limit, [len(request.prompt) + request.max_new_tokens for request in requests]),
        (stops.exact, [request.exact for request in requests]),
        (sequences.first_step, [entry.steps for entry in entries.values()]),
        (sequences.first_root, [entry.root for entry in entries.values()]),
    ]
    for tensor, values in columns:
        tensor[slots] = upload(values, tensor.dtype, tensor.device)
    if sequences.rules is not None:
        for slot, entry in entries.items():
            _write_rules(sequences.rules, slot, entry.request, entry.prompt)


def _write_rules(rules: LogitRules, slot: int, request: Request, seen: Tensor) -> None:
    """Write the penalties, biases and least length of the request in a slot. seen: its tokens, [L] int64."""
    device, sampling = rules.seen.device, request.sampling
    rules.least[slot] = len(request.prompt) + request.min_new_tokens if request.min_new_tokens else 0
    rules.penalty[slot] = sampling.repetition_penalty
    rules.presence[slot], rules.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
    rules.answer[slot] = len(request.prompt)
    rules.bias[slot], rules.seen[slot], rules.counts[slot] = 0, 0, 0
    rules.seen[slot].index_fill_(0, to_device(seen, device), 1)
    answered = to_device(seen[len(request.prompt) :], device)  # output before a pause
    rules.counts[slot].index_add_(0, answered, torch.ones_like(answered, dtype=torch.int32))
    if sampling.biases:
        tokens, values = zip(*sampling.biases, strict=True)
        rules.bias[slot].index_copy_(0, upload(tokens, torch.int64, device), upload(values, torch.float32, device))
