"""Decode the same prompts with a model as it is, optimised, and restored, and compare: tokens, accepted lengths,
counters, originals. Exits 0 if everything agrees.

    python integration_test.py                            the embedded checkpoint
    python integration_test.py --model PATH --draft PATH --prompt "..."
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.record import machine
from eagle_triton import EaModel
from eagle_triton.comparison import Comparison, compare, decode, top2_margin
from eagle_triton.demo import demo_prompts

MARGIN_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""The largest top-2 logit margin at which a greedy divergence may be rounding."""


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    dtype = getattr(torch, args.dtype)
    model = EaModel.from_pretrained(args.model, args.draft, use_eagle3=not args.eagle1, dtype=dtype).to(args.device)
    texts = [args.prompt] if args.prompt else demo_prompts(args.num_runs)
    prompts = [model.tokenizer(text, return_tensors="pt").input_ids for text in texts]
    prompts = [prompt[:, : args.max_length - 1] for prompt in prompts]
    attributes = ("eagenerate", "ea_generate", "naivegenerate", "naive_generate", "generate")
    methods = {name: getattr(model, name).__func__ for name in attributes}

    failures = 0
    comparisons, report = compare(model, prompts, args.max_length)
    for number, (prompt, result) in enumerate(zip(prompts, comparisons, strict=True)):
        verdict = _judge(model, result, MARGIN_BOUND[dtype])
        restored = decode(model, prompt, args.max_length).tokens == result.original.tokens
        failures += verdict.startswith("FAIL") or not restored
        print(
            f"{number:3d}  prompt {result.original.prompt_length:4d}  new {result.original.new_tokens:4d}  "
            f"tau {result.original.tau:.2f} / {result.optimised.tau:.2f}  {verdict}"
            f"{'' if restored else '  FAIL: differs after restore'}"
        )
        if args.verbose:
            print(model.tokenizer.decode(result.optimised.tokens))
            print("accepted:", result.optimised.accepted)
    idle = [row.path for row in report if row.path in ("ea_generate",) and row.calls == 0]
    counted = {row.path: row.calls for row in report if row.status == "counted"}
    changed = [name for name, method in methods.items() if getattr(model, name).__func__ is not method]
    if args.verbose:
        for row in report:
            print(f"  {row.status:8s} {row.path:40s} calls {row.calls:6d}  fallbacks {row.fallbacks}  {row.reason}")
    for problem, names in (("never called", idle), ("not restored", changed)):
        if names:
            failures += 1
            print(f"FAIL: {problem}: {', '.join(names)}")
    if not counted.get("tree_attention"):
        failures += 1
        print("FAIL: the engine's operations were never called")
    identical = sum(result.same_tokens for result in comparisons)
    print(f"{len(prompts)} prompts, {identical} with the same tokens, {failures} failures")
    print(
        ", ".join(f"{name} {value}" for name, value in machine(torch.device(args.device), args.commit).items() if value)
    )
    return 1 if failures else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="demo", help="directory or hub id of the target (default: demo)")
    parser.add_argument("--draft", default=None, help="directory or hub id of the head (default: the demo's)")
    parser.add_argument("--eagle1", action="store_true", help="the head is EAGLE-1/2 instead of EAGLE-3")
    parser.add_argument("--prompt", default=None, help="one prompt (default: the demo's held-out ones)")
    parser.add_argument("--max-length", type=int, default=100, help="new tokens per prompt (default: 100)")
    parser.add_argument("--num-runs", type=int, default=3, help="prompts to decode (default: 3)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="what to print as the commit where git cannot tell")
    parser.add_argument("--verbose", action="store_true", help="print texts, accepted lengths and counters")
    args = parser.parse_args(argv)
    if args.max_length < 2 or args.num_runs < 1:
        parser.error("--max-length must be at least 2 and --num-runs at least 1")
    return args


def _judge(model: EaModel, result: Comparison, bound: float) -> str:
    """Same tokens and accepted lengths, or a first difference at a margin that rounding explains."""
    column = result.first_difference
    if column is None:
        if result.same_accepted and result.same_tokens:
            return "same"
        exact = model.base_model.dtype == torch.float32
        return "FAIL: accepted lengths differ" if exact else "same tokens, accepted lengths differ by rounding"
    margin = top2_margin(model, result.original.tokens, column)
    verdict = "rounding" if margin < bound else "FAIL"
    return f"{verdict}: differs at column {column}, top-2 margin {margin:.2e} (bound {bound:.0e})"


if __name__ == "__main__":
    sys.exit(main())
