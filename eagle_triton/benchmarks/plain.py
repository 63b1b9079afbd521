"""Times `generate` of a plain Hugging Face model: as it is, with a compiled static cache, and optimised."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_triton import optimize_with_triton
from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.timing import call_times, progress
from eagle_triton.command_line import sentence

STATIC = {"cache_implementation": "static"}
COLUMNS = (
    "=variant, context, ms/token=ms_per_token, tokens/s=tokens_per_second, x original=speedup, same tokens=same_tokens"
)


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each way of decoding: whole calls of `generate` with the prefill, after a first one for warm-up."""
    loaded = models.load(args)
    model, head = loaded.base_model, loaded.ea_layer
    ways: dict[str, tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]] = {
        "original": (nullcontext, {}),
        "optimised": (lambda: optimize_with_triton(model, prefixes=False), {}),
        "optimised, head": (lambda: optimize_with_triton(model, head, prefixes=False), {}),
        "optimised, suffix": (lambda: optimize_with_triton(model, "suffix", prefixes=False), {}),
    }
    if args.device != "cpu":  # compiling takes minutes, and does not help on a CPU
        ways["original, static cache compiled"] = (nullcontext, STATIC)
    contexts = args.context or [512 if args.device != "cpu" else 32]
    for context in progress(args, contexts, "plain"):
        (prompt,) = models.random_prompts(loaded, 1, context)
        prompt = prompt.to(model.device)
        first, original = prompt, 0.0
        for name, (patched, options) in ways.items():
            call = partial(_generate, model, prompt, args.max_length, options)
            try:
                with patched():
                    times, tokens = call_times(call, prompt.device, args.num_runs)
            except Exception as error:
                if options is not STATIC:
                    raise
                notes.append(f"{name}: not timed, because transformers cannot run it here: {sentence(error)}")
                continue
            ms = statistics.median(times) / args.max_length
            if name == "original":
                first, original = tokens, ms
            same = int((tokens == first).sum()) - context
            row = {"variant": name, "context": context, "ms_per_token": ms, "tokens_per_second": 1e3 / ms}
            rows.append({**row, "speedup": original / ms, "same_tokens": same})
            if args.dtype == "float32" and same < args.max_length:
                notes.append(f"FAIL: {name}: only {same} of {args.max_length} tokens are the original's")
    notes.append("suffix: the prompt is decoded again and again, so drafts come from earlier outputs")


def _generate(model: Any, prompt: Tensor, new: int, options: dict[str, Any], run: int) -> Tensor:
    options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
