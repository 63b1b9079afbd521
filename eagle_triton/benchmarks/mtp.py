"""A recurrent target, Qwen3.5 with multi-token prediction: plain steps, chains, trees, and the first token."""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_triton.benchmarks.drafters import compare, figures
from eagle_triton.benchmarks.models import beside_floor, engine_of, random_tokens
from eagle_triton.benchmarks.modes import TREES
from eagle_triton.benchmarks.original_and_patched import top2_margin
from eagle_triton.benchmarks.parity import margin_bound
from eagle_triton.benchmarks.step import STEPS, optimised_step, slots_of
from eagle_triton.benchmarks.sweep import config_of, tree_config
from eagle_triton.benchmarks.timing import call_times, copy_bandwidth, noise, progress
from eagle_triton.comparison.answer import Answer
from eagle_triton.comparison.figures import first_difference
from eagle_triton.demo import HYBRID, demo_prompts, path_of
from eagle_triton.engine.memory.by_slot import bytes_of
from eagle_triton.engine.memory.pages import SlotPages
from eagle_triton.engine.model.gated_delta import GatedDeltaCache
from eagle_triton.engine.sampling_params import SamplingParams
from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
from eagle_triton.inference.eagle_inference import EAGLEInference
from eagle_triton.models.loading import load_target, load_tokenizer
from eagle_triton.models.mtp import MTP
from eagle_triton.models.shapes import HYBRIDS, random_hybrid

DRAFT_VOCABULARY = 32768  # of 248,320: the projection is read once for each pass
COLUMNS = (
    "=variant, batch, slots, context, ms/step=ms_per_step, device ms=device_ms, floor ms=floor_ms, "
    "of floor=floor_share:.1%, tau, first token ms=first_token_ms, as plain=as_plain, of prompts=prompts, "
    "margin=largest_margin, peak GiB=memory_gib"
)


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each tree, batch and context, and one for transformers' own first token of each context. With the
    demo: a row for each tree."""
    dtype = getattr(torch, args.dtype)
    if args.hybrid == HYBRID:
        _measure_demo(args, dtype, rows, notes)
        return
    if args.max_length is not None:
        raise ValueError(
            "--max-length must come with --hybrid demo-gdn: with random weights, the number of steps is fixed"
        )
    drafts = "model_type" not in HYBRIDS[args.hybrid]
    trees = args.tree or (TREES if drafts else ["plain"])
    if not drafts and [*trees] != ["plain"]:
        raise ValueError(f"--tree must be plain with --hybrid {args.hybrid}, which has no layer that drafts")
    model, head = random_hybrid(args.hybrid, args.device, dtype)
    vocabulary = None if head is None else min(DRAFT_VOCABULARY, HYBRIDS[args.hybrid]["vocab_size"] // 8)
    engine = engine_of(model, head, prefixes=False, draft_vocabulary=vocabulary)
    view = engine.view
    bandwidth = copy_bandwidth(view.device)
    notes.append(f"copy bandwidth (read + write): {bandwidth / 1e9:.0f} GB/s")
    contexts = args.context or [512 if view.device.type == "cuda" else 32]
    cases = list(itertools.product(trees, args.batch or [1], contexts, slots_of(args)))
    with torch.no_grad(), progress(args, cases, "decode steps") as bar:
        for name, batch, context, slots in bar:
            bar.set_postfix_str(f"{name}, batch {batch}, context {context}")
            engine.clear()
            spec, slots = TREES[name], slots or batch
            prompts = [prompt.to(view.device) for prompt in random_tokens(view.vocab_size, batch, context, least=1)]
            target = model if batch == 1 else None
            figures = optimised_step(engine, prompts, spec, SamplingParams(), args.num_runs, target, slots=slots)
            case = {"variant": name, "batch": batch, "slots": slots, "context": context}
            rows.append(case | beside_floor(figures, engine, spec, batch, bandwidth))
        engine.clear()
        for context in contexts:
            (prompt,) = random_tokens(view.vocab_size, 1, context, least=1)
            ids = prompt[None].to(view.device)
            times, _ = call_times(partial(_read, model, ids), view.device, args.num_runs)
            first = {"first_token_ms": statistics.median(times)}
            rows.append({"variant": "transformers", "batch": 1, "context": context, **first})
    caches = view.new_caches(SlotPages.whole(1, 512, torch.device("meta"))).caches
    beside = sum(bytes_of(cache) for cache in caches if isinstance(cache, GatedDeltaCache))
    notes.append(f"states and windows: {beside / 2**20:.1f} MiB a slot")
    notes += [f"{path}: {reason}" for path, reason in engine.notes.items()]
    notes += noise(STEPS[view.device.type] * args.num_runs, "raise --num-runs")


def _measure_demo(args: argparse.Namespace, dtype: torch.dtype, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Held-out prompts one after another: tokens per step, and whether they are plain decoding's."""
    if args.context or args.batch or args.slots:
        raise ValueError(
            "--context, --batch and --slots are for random weights: demo-gdn decodes its own prompts one by one"
        )
    args.max_length = args.max_length or 64
    path = path_of(HYBRID)
    model: Any = load_target(path, engine=True, dtype=dtype).to(args.device)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None, "the demo has a tokenizer"
    prompts = [tokenizer(text).input_ids for text in demo_prompts(args.num_runs)]
    names = ["plain", *(name for name in args.tree or TREES if name != "plain")]
    variants = {name: partial(_inference, model, TREES[name]) for name in names}
    plain: list[Answer] = []
    for found in compare(variants, {HYBRID: prompts}, args, notes):
        name, answers = list(found[HYBRID].items())[-1]
        plain = plain or answers
        margins = [_margin(model, *three) for three in zip(prompts, answers, plain, strict=True)]
        different = [margin for margin in margins if margin is not None]
        (row,) = figures(HYBRID, {name: answers})
        kept = {key: row[key] for key in ("variant", "tau", "ms_per_step")}
        same = {"as_plain": len(answers) - len(different), "prompts": len(answers)}
        rows.append({**kept, **same, "largest_margin": max(different, default=None)})
    worst = max((row["largest_margin"] or 0.0 for row in rows), default=0.0)
    verdict = "FAIL: " if worst >= margin_bound(model) else ""
    notes.append(
        f"{verdict}where outputs differ from plain decoding's, the two best logits differ by at most {worst:.3g}"
    )


def _inference(model: Any, spec: TreeSpec) -> EAGLEInference:
    if spec == PLAIN:
        return EAGLEInference(None, model, config_of("naive"))
    return EAGLEInference(MTP, model, tree_config(spec.nodes, len(spec.beam_widths) + 1, spec.top_k))


def _margin(model: Any, prompt: list[int], answer: Answer, plain: Answer) -> float | None:
    """The difference of the two best logits where two outputs first differ; None if they do not."""
    place = first_difference(answer.tokens, plain.tokens)
    return None if place is None else top2_margin(model, [*prompt, *plain.tokens], len(prompt) + place)


def _read(model: Any, prompt: Tensor, run: int) -> Any:
    """transformers' own forward over a prompt."""
    return model(prompt, use_cache=True, logits_to_keep=1)
