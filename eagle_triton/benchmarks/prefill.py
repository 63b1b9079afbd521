"""Times prompts up to their first tokens: alone, in batches, into a decoding batch, and many short requests."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_triton import EaModel, optimize_with_triton
from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.parity import CHECKED, check_parity
from eagle_triton.benchmarks.step import timed_steps
from eagle_triton.benchmarks.timing import Quantiles, call_times, progress, synchronise
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.memory.pages import PAGE_ROWS
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import PROMPT_TOKENS, Batch
from eagle_triton.engine.scheduler.requests import Request
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.inference.session import Session
from eagle_triton.inference.timing import Stopwatch

WARM_UPS = 2  # runs of a shape: the first compiles, the second captures
REST = {"cuda": 0.2, "cpu": 0.0}  # seconds before a call, in which a device that was at its limit of power recovers
STEPS = {"cuda": 40, "cpu": 4}  # of a running batch, before and after a prompt enters it
SHORT = {"cuda": (256, 64), "cpu": (6, 2)}  # short requests, and the slots that they share
MIXED = {"cuda": (256, 64, 8192, 32), "cpu": (6, 2, 200, 4)}  # requests, slots, tokens of the longest, new ones
CACHE_BYTES = 60e9  # for these
SHORT_PROMPT, SHORT_NEW = 8, 3  # tokens
LARGEST_TREES = 1024  # nodes of a batch; above it first trees are not drafted
COLUMNS = (
    "=variant, batch, context, first token ms=ms, p20=ms_p20, p80=ms_p80, rested=rested_ms, step ms=step_ms, "
    "gap p50=gap_p50_ms, p99=gap_p99_ms, longest=longest_gap_ms, requests/s=requests_per_second, again=again_ms, "
    "found=found_tokens"
)


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add two rows for each batch and context, one for each context that enters a batch, and one of short requests."""
    model = models.load(args)
    engine = models.engine_of(model, model.ea_layer, draft_dtype=args.draft_weights)
    contexts = args.context or ([64, 512, 2048] if engine.device.type == "cuda" else [32])
    cases, tree = [(batch, context) for batch in args.batch for context in contexts], models.own_tree(engine)
    with torch.no_grad(), progress(args, cases, "prompts") as bar:
        for batch, context in bar:
            spec = tree if batch * tree.nodes <= LARGEST_TREES else PLAIN
            rows.append(first_tokens(engine, model, batch, context, spec, args.num_runs))
            engine.clear()
            rows.append(by_generate(model, batch, context, args.num_runs))
        for batch, context in cases:
            if batch * tree.nodes <= LARGEST_TREES:
                rows.append(entering(engine, model, batch, context, tree, args.num_runs))
                engine.clear()
    rows.append(short_requests(engine, model, args.num_runs))
    engine.clear()
    rows.append(mixed_lengths(engine, model))
    engine.clear()
    notes += [f"{path}: {reason}" for path, reason in engine.notes.items()]


def _row(variant: str, batch: int, context: int, times: Sequence[float] = (), **figures: Any) -> dict[str, Any]:
    """A row, with quantiles of milliseconds if there are times."""
    row = {"variant": variant, "batch": batch, "context": context}
    if times:
        quantiles = Quantiles.of(times)
        row |= {"ms": quantiles.median, "ms_p20": quantiles.p20, "ms_p80": quantiles.p80}
    return row | figures


def first_tokens(engine: Engine, model: EaModel, batch: int, context: int, spec: TreeSpec, runs: int) -> dict[str, Any]:
    """The time until the host has the first token of each prompt: right after the last run, and after a rest of REST.
    Then the same when these prompts come again and their pages are found.

    Each run has new prompts. Tokens of the first run are compared with the target's own; ValueError if they differ.
    """
    chosen: list[float] = []
    rested: list[float] = []
    again: list[float] = []
    for run in range(WARM_UPS + 2 * runs):
        rests = run >= WARM_UPS + runs
        prompts = models.random_tokens(model.vocab_size, batch, context, run)
        with Batch(engine, batch, spec, context + (1 + CHECKED) * (spec.depth + 1)) as running:
            for times in (rested, again) if rests else (chosen,):
                synchronise(engine.device)
                time.sleep(REST[engine.device.type] if times is rested else 0.0)
                watch = Stopwatch(engine.device)
                running.enter_all(Request(prompt, CHECKED) for prompt in prompts)
                running.step()
                times.append(watch.so_far() * 1e3)
                found = running.request(0).cached_tokens
                if not run:
                    while running.running:
                        running.step()
                    check_parity(model.base_model, running.tokens(0), context, SamplingParams())
                for slot in running.running:
                    running.release(slot)
    more = {"rested_ms": statistics.median(rested), "again_ms": statistics.median(again), "found_tokens": found}
    return _row("first token", batch, context, chosen[WARM_UPS:], **more)


def by_generate(model: EaModel, batch: int, context: int, runs: int) -> dict[str, Any]:
    """The first two times through `generate` of the target, an optimised Hugging Face model: a call for one token."""
    target: Any = model.base_model
    prompts = [
        torch.stack(models.random_tokens(model.vocab_size, batch, context, run)).to(target.device)
        for run in range(WARM_UPS + 2 * runs)
    ]
    options = dict(max_new_tokens=1, do_sample=False, pad_token_id=0, eos_token_id=None)

    def call(run: int) -> Tensor:
        return target.generate(prompts[run], attention_mask=torch.ones_like(prompts[run]), **options)

    with optimize_with_triton(target, prefixes=False):
        times, _ = call_times(call, target.device, runs, WARM_UPS)
        rest = REST[target.device.type]
        rested, _ = call_times(lambda run: call(WARM_UPS + runs + run), target.device, runs, 0, rest)
    return _row("generate", batch, context, times, rested_ms=statistics.median(rested))


def entering(engine: Engine, model: EaModel, batch: int, context: int, spec: TreeSpec, runs: int) -> dict[str, Any]:
    """A prompt enters a decoding batch: the time of its first token, and of the others' tokens meanwhile."""
    steps = STEPS[engine.device.type]
    usual: list[float] = []
    gaps: list[float] = []
    longest: list[float] = []
    first: list[float] = []
    new = (3 * steps + context // PROMPT_TOKENS) * (spec.depth + 1)  # no request ends before everything is measured
    for run in range(runs + WARM_UPS):
        others = models.random_tokens(model.vocab_size, batch, min(context, 512), run)
        (late,) = models.random_tokens(model.vocab_size, 1, context, run + 1000)
        with Batch(engine, batch + 1, spec, context + new) as running:
            running.admit_all(Request(prompt, new) for prompt in others)
            before, _ = timed_steps(running, steps)
            start = time.perf_counter()
            (slot,) = running.enter_all([Request(late, new)])
            after, came = _gaps_until(running, steps, slot, start)
            if run >= WARM_UPS:
                usual += before
                gaps += after
                longest.append(max(after))
                first.append(came)
    middle = {"step_ms": usual, "gap_p50_ms": gaps, "longest_gap_ms": longest}
    figures = {name: statistics.median(values) for name, values in middle.items()}
    figures["gap_p99_ms"] = statistics.quantiles(gaps, n=100, method="inclusive")[98]
    return _row("enter", batch, context, first, **figures)


def short_requests(engine: Engine, model: EaModel, runs: int) -> dict[str, Any]:
    """Many sampled requests with few tokens, one in each slot at a time."""
    count, slots = SHORT[engine.device.type]
    times = []
    for run in range(runs + WARM_UPS):
        prompts = models.random_tokens(model.vocab_size, count, SHORT_PROMPT, run)
        with Session(engine, None, slots, SHORT_PROMPT + SHORT_NEW) as session:
            watch = Stopwatch(engine.device)
            for index, prompt in enumerate(prompts):
                session.submit(prompt, SHORT_NEW, SamplingParams(temperature=1.0, seed=index), stop_token_ids=())
            while not session.idle:
                session.step()
            times.append(watch.so_far() * 1e3)
    rate = count / statistics.median(times[WARM_UPS:]) * 1e3
    return _row("short requests", slots, SHORT_PROMPT, times[WARM_UPS:], requests_per_second=rate)


def mixed_lengths(engine: Engine, model: EaModel) -> dict[str, Any]:
    """Requests of all lengths through a cache of one size, decoded plainly. Each enters as soon as there is room.

    bytes_held: the most bytes of held pages; tokens_held: the tokens in them. paused: how often a request gave its
    pages back and continued later. Raises ValueError if a sequence does not have the target's own tokens.
    """
    cuda = engine.device.type == "cuda"
    count, slots, most, new = MIXED["cuda" if cuda else "cpu"]
    most = min(most, models.positions(model) or most)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, most - new + 1, (count,), generator=generator).tolist()
    waiting = deque(models.random_tokens(model.vocab_size, 1, length, length)[0] for length in lengths)
    finished, tokens_held, pages_held = 0, 0, 0
    engine.cache_tokens = None
    with Batch(engine, slots, PLAIN, most, drafts=False) as batch:
        batch.admit(Request(waiting[0][:16], 1))  # so that the pool knows its layers
        while batch.running:
            batch.step()
        page_bytes = engine.pool.page_bytes
    free = torch.cuda.mem_get_info(engine.device)[0] if cuda else 1 << 26  # the most that a test may take
    engine.cache_tokens = int(min(CACHE_BYTES, free * 0.8)) // page_bytes * PAGE_ROWS
    engine.clear()
    with Batch(engine, slots, PLAIN, most, drafts=False) as batch:
        start = time.perf_counter()
        while waiting or batch.running:
            if entering := batch.fitting([Request(prompt, new) for prompt in itertools.islice(waiting, slots)]):
                batch.enter_all([Request(waiting.popleft(), new) for _ in range(entering)])
            if engine.pool.held > pages_held:
                pages_held = engine.pool.held
                held = [slot for slot in batch.running if batch.sequences.pages.of(slot)]
                tokens_held = sum(batch.lengths[slot] for slot in held)
            for row in batch.step():
                if row.finished == "length":
                    finished += 1
                    if finished == 1:
                        length = len(row.request.prompt)
                        sequence = batch.tokens(row.slot)[: length + CHECKED]
                        check_parity(model.base_model, sequence, length, SamplingParams())
        seconds = time.perf_counter() - start
    limit = engine.cache_tokens
    engine.cache_tokens = None
    return _row(
        "mixed lengths", slots, most, ms=seconds * 1e3, requests_per_second=finished / seconds, finished=finished,
        paused=engine.ops.calls["requests_paused"], cache_bytes=limit // PAGE_ROWS * page_bytes,
        tokens_held=tokens_held, token_bytes=page_bytes // PAGE_ROWS, bytes_held=pages_held * page_bytes,
    )  # fmt: skip


def _gaps_until(batch: Batch, steps: int, slot: int, start: float) -> tuple[list[float], float]:
    """The milliseconds of each step while a prompt enters a slot, and when its first tokens came after `start`."""
    found: list[float] = []
    last, came = start, 0.0
    while not came or len(found) < steps:
        rows = batch.step()
        now = time.perf_counter()
        found.append((now - last) * 1e3)
        last = now
        if not came and any(row.slot == slot for row in rows):
            came = (now - start) * 1e3
    return found, came
