"""Times a decode step over trees, contexts and batches, against the time of reading the weights."""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle_triton.benchmarks import models
from eagle_triton.benchmarks.acceptance import WARNING, fixed_acceptance
from eagle_triton.benchmarks.gpu_clocks import GpuClocks
from eagle_triton.benchmarks.modes import DECODINGS
from eagle_triton.benchmarks.original_and_patched import decode
from eagle_triton.benchmarks.parity import check_parity
from eagle_triton.benchmarks.timing import Quantiles, call_times, copy_bandwidth, noise, progress
from eagle_triton.engine.engine import Engine
from eagle_triton.engine.grammar import Grammar, GrammarCompiler
from eagle_triton.engine.graph import StepGraph, median_milliseconds
from eagle_triton.engine.model.mixers import AcceptedPath
from eagle_triton.engine.model.model_view import target_forward
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.scheduler.batch import Batch
from eagle_triton.engine.scheduler.requests import Request, RunningRequest
from eagle_triton.engine.tree_spec import TreeSpec
from eagle_triton.inference.timing import Stopwatch

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, top_p_first=True, seed=0)
ORIGINALS = ("greedy", "sampled", "plain")  # decodings of a model without the engine
STEPS = {"cuda": 20, "cpu": 3}  # timed in one go: right after the prompts, later, and then on the device alone
WARM_UPS = 2
BETWEEN = {"cuda": 40, "cpu": 1}  # steps, for the device's clocks to recover from reading prompts
FIELDS = {
    "name": {"type": "string", "maxLength": 4},
    "days": {"type": "integer", "minimum": 0, "maximum": 9},
    "unit": {"enum": ["C", "F"]},
}
RECORD = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
RECORDS = Grammar.json_schema({"type": "array", "items": RECORD, "minItems": 10_000})  # more than are ever written
COLUMNS = (
    "=variant, decoding, batch, slots, context, ms/step=ms_per_step, p20=ms_p20, p80=ms_p80, slowest=ms_slowest, "
    "after prompts=ms_behind_prompts, device ms=device_ms, draft ms=draft_ms, idle=idle_share:.1%, "
    "SM MHz=sm_clock_mhz, W=power_w, capped=power_capped_share:.0%, floor ms=floor_ms, of floor=floor_share:.1%, tau, "
    "tokens/s=tokens_per_second, first token ms=first_token_ms, first call s=first_call_s, peak GiB=memory_gib"
)
CHECKED = 8  # steps; their tokens are compared with the target's


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each model, decoding, batch size and context; and notes."""
    module = models.import_safeailab(args.upstream) if args.upstream else None
    model, mean = models.load(args), args.accept_length
    device, clocks, bandwidth = model.device, GpuClocks(model.device), copy_bandwidth(model.device)
    decodings = list(dict.fromkeys(args.decoding))
    contexts = args.context or [512 if device.type == "cuda" else 64]
    cases = list(itertools.product(decodings, args.batch, contexts, slots_of(args)))
    notes += [] if mean is None else [WARNING.format(mean)]
    notes.append(f"copy bandwidth (read + write): {bandwidth / 1e9:.0f} GB/s")

    @functools.cache
    def engine_with(drafts: str, one_launch: bool) -> tuple[Engine, Any]:
        """The engine of a drafter, and the drafter: a block drafter, a small model, the head, or None."""
        make: dict[str, Callable[[], Any]] = {
            "block": lambda: models.block_drafter(model, sure=mean is not None),
            "model": lambda: models.draft_model(args),
            "head": lambda: model.ea_layer,
            "none": lambda: None,
        }
        target, drafter = model if drafts == "head" else model.base_model, make[drafts]()
        draft_dtype = None if drafts == "none" else args.draft_weights
        engine = models.engine_of(target, drafter, prefixes=False, draft_dtype=draft_dtype)
        engine.ops.one_launch &= one_launch
        return engine, drafter

    def engine_for(decoding: str) -> tuple[Engine, TreeSpec]:
        """The engine of a decoding, and its tree."""
        use = DECODINGS[decoding]
        engine, drafter = engine_with(use.drafts, use.one_launch)
        if use.block is not None:
            drafter.total_token, drafter.top_k = use.block
        return engine, use.tree or models.own_tree(engine)

    def add(variant: str, decoding: str, batch: int, context: int, figures: dict[str, Any]) -> None:
        case = {"variant": variant, "decoding": decoding, "batch": batch, "context": context}
        rows.append(case | models.beside_floor(figures, *engine_for(decoding), batch, bandwidth))

    with torch.no_grad(), fixed_acceptance(mean, module), progress(args, cases, "decode steps") as bar:
        for decoding, batch, context, slots in bar:
            bar.set_postfix_str(f"{decoding}, batch {batch}, context {context}")
            engine, spec = engine_for(decoding)
            prompts = [prompt.to(device) for prompt in models.random_tokens(model.vocab_size, batch, context)]
            sampling, grammar = SAMPLED if DECODINGS[decoding].sampled else GREEDY, DECODINGS[decoding].grammar
            target = None if mean is not None or grammar else model.base_model  # to compare tokens with
            compiler = models.grammar_compiler(model) if grammar else None
            figures = optimised_step(engine, prompts, spec, sampling, args.num_runs, target, clocks, slots, compiler)
            figures |= {"draft_ms": draft_ms(engine, prompts, spec)} | ({} if slots is None else {"slots": slots})
            add("optimised", decoding, batch, context, figures)
            engine.clear()
        notes += clocks.notes()
        originals: dict[str, Any] = {"original": model}
        if args.target_weights is not None:
            originals = {}
            notes.append("original: not timed, because it dequantises its weights in every call")
        if module is not None:
            originals["SafeAILab"] = models.safeailab_model(module, model)
        theirs = [decoding for decoding in decodings if decoding in ORIGINALS]
        if originals and len(theirs) < len(decodings):
            notes.append(f"{' and '.join(originals)}: timed only for {', '.join(ORIGINALS)}, with the head's own tree")
        for name, decoding, context in itertools.product(originals, theirs, contexts):
            (prompt,) = models.random_prompts(model, 1, context)
            add(name, decoding, 1, context, original_step(originals[name], prompt, decoding, max(contexts) + 1024))
    found = (engine_for(decoding)[0].notes.items() for decoding in decodings)
    notes += dict.fromkeys(f"{path}: {reason}" for path, reason in itertools.chain.from_iterable(found))
    notes += noise(STEPS[device.type] * args.num_runs, "raise --num-runs")


def slots_of(args: argparse.Namespace) -> Sequence[int | None]:
    """The values of --slots; None: one per sequence. Raises ValueError if the sequences have no room."""
    if args.slots and min(args.slots) < max(args.batch or [1]):
        raise ValueError(f"--slots must be at least --batch, got {min(args.slots)} and {max(args.batch)}")
    return args.slots or [None]


def optimised_step(
    engine: Engine,
    prompts: list[Tensor],
    spec: TreeSpec,
    sampling: SamplingParams,
    repeats: int,
    target: nn.Module | None = None,
    clocks: GpuClocks | None = None,
    slots: int | None = None,
    compiler: GrammarCompiler | None = None,
) -> dict[str, Any]:
    """Figures of one shape: `repeats` generations of a few steps each, after those that compile and capture.

    target: the tokens of the first one are compared with its own; ValueError if they differ. clocks: samples the
    replayed steps and adds its figures. slots: of the batch; None: one per prompt.
    compiler: outputs are RECORDS, by its tokenizer.

    ms_per_step is what a caller sees while a batch decodes; ms_behind_prompts the same right after the prompts, which
    may lower the device's clocks; ms_slowest the longest step. device_ms is the step replayed without a host in
    between, and idle_share the share of ms_per_step in which the device waits.
    """
    device = engine.view.device
    steps, between = STEPS[device.type], BETWEEN[device.type]
    rows = max(map(len, prompts)) + (1 + max(CHECKED, WARM_UPS + 3 * steps + between)) * (spec.depth + 1)
    walls, early, slowest, replays, prefills, emitted = [], [], [], [], [], 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    captured = 1 if device.type == "cuda" else 0  # reading the prompts, when they are read once more
    for repeat in range(-1 - captured, repeats):
        watch = Stopwatch(device)
        requests = list[RunningRequest]()
        for prompt, seed in zip(prompts, sampling.seeds(len(prompts)), strict=True):
            options = replace(sampling, seed=seed, grammar=None if compiler is None else RECORDS)
            requests.append(RunningRequest(Request(prompt, rows - len(prompt), options), len(requests)))
            requests[-1].matcher = None if compiler is None else compiler.matcher(RECORDS)
        with Batch(engine, slots or len(prompts), spec, rows) as batch:
            batch.admit_all(requests)
            batch.step()
            first = watch.so_far()
            if repeat == -1 - captured:
                first_call = first
                for _ in range(CHECKED):
                    batch.step()
                for slot, prompt in enumerate(prompts):
                    if target is not None:
                        check_parity(target, batch.tokens(slot), len(prompt), sampling)
            if repeat < 0:
                continue
            prefills.append(first * 1e3)
            for _ in range(WARM_UPS):
                batch.step()
            early.append(statistics.fmean(timed_steps(batch, steps)[0]))
            for _ in range(between):
                batch.step()
            times, tokens = timed_steps(batch, steps)
            emitted += tokens
            walls.append(statistics.fmean(times))
            slowest.append(max(times))
            if device.type == "cuda":
                replays.append(_replay_ms(batch, steps, clocks))
    wall = Quantiles.of(walls)
    device_ms = statistics.median(replays) if replays else None
    return {
        "ms_per_step": wall.median,
        "ms_p20": wall.p20,
        "ms_p80": wall.p80,
        "ms_slowest": max(slowest),
        "ms_behind_prompts": statistics.median(early),
        "device_ms": device_ms,
        "idle_share": None if device_ms is None else max(0.0, 1 - device_ms / wall.median),
        "tau": emitted / (repeats * steps * len(prompts)),
        "tokens_per_second": emitted / sum(walls) / steps * 1e3,
        "first_token_ms": statistics.median(prefills),
        "first_call_s": first_call,
        "memory_gib": _memory_gib(engine),
        **(clocks.figures() if clocks is not None else {}),
    }


def draft_ms(engine: Engine, prompts: list[Tensor], spec: TreeSpec) -> float | None:
    """Milliseconds of a draft's own part of a step: it takes in the accepted tokens, here only the root, and drafts the
    next tree. On a GPU in a replayed graph. None for plain decoding, and if ranks share the target."""
    draft, view, ops = engine.draft, engine.view, engine.ops
    if draft is None or not spec.depth or view.ranks is not None:
        return None
    with Batch.start(engine, prompts, spec, GREEDY, max(map(len, prompts)) + 2 * (spec.depth + 1)) as batch:
        state, tree = batch.state, batch.state.tree
        before, caches = state.lengths - 1, state.sequences.caches
        _, features, _ = target_forward(
            ops, view, tree.tokens, caches, state.lengths, tree.depths, tree.ancestors, spec.depth
        )
        path = torch.full((state.batch, spec.depth + 1), -1, dtype=torch.int32, device=view.device)
        path[:, 0] = 0
        accepted = AcceptedPath(before, path, torch.zeros_like(before), spec.is_chain)

        def run() -> None:
            draft.extend(ops, state, accepted, features)
            draft.grow(ops, state)

        with state.unchanged():
            if view.device.type == "cuda":
                return median_milliseconds(StepGraph(run, state, ops, torch.cuda.graph_pool_handle(), what="a draft"))
            return statistics.median(call_times(lambda _: run(), view.device, STEPS["cpu"])[0])


def timed_steps(batch: Batch, steps: int) -> tuple[list[float], int]:
    """The milliseconds of each step, and the number of tokens of all steps."""
    times, tokens, start = [], 0, time.perf_counter()
    for _ in range(steps):
        tokens += sum(len(progress.tokens) for progress in batch.step())
        end = time.perf_counter()
        times.append((end - start) * 1e3)
        start = end
    return times, tokens


def _memory_gib(engine: Engine) -> float | None:
    """The most memory that was allocated, on a GPU."""
    if engine.device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(engine.device) + engine.pool.bytes_beside_torch) / 2**30


def _replay_ms(batch: Batch, steps: int, clocks: GpuClocks | None) -> float:
    """Milliseconds per step with nothing between the launches, sampled by `clocks`. The host reads no results, so the
    batch must end after this."""
    with torch.cuda.device(batch.engine.device):  # the events belong to its stream
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        batch.launch()  # wait for the first launch; the others are queued after it
        start.record()
        for _ in range(steps - 1):
            batch.launch()
        end.record()
        if clocks is not None:
            clocks.sample(start, end)
        torch.cuda.synchronize()
        return start.elapsed_time(end) / (steps - 1)


def original_step(model: Any, prompt: Tensor, decoding: str, room: int) -> dict[str, Any]:
    """Figures of a model without the engine, with one sequence in a cache of `room` rows."""
    sampling = SAMPLED if DECODINGS[decoding].sampled else GREEDY
    steps = STEPS[model.base_model.lm_head.weight.device.type]
    top_p = 0.0 if sampling.greedy else sampling.top_p
    options: dict[str, Any] = dict(temperature=sampling.temperature, plain=decoding == "plain", top_p=top_p, room=room)
    decode(model, prompt, room, **options, steps=WARM_UPS)
    run = decode(model, prompt, room, **options, steps=steps + 1)
    return {
        "ms_per_step": run.ms_per_step,
        "tau": run.tau,
        "tokens_per_second": run.tau / run.ms_per_step * 1e3,
        "first_token_ms": run.times[0] * 1e3,
    }
