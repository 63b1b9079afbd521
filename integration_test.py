"""Decode the same prompts with a model as it is, optimised, and restored, with trees and plainly, and compare: tokens,
accepted lengths, counters, originals. Exits 0 if everything agrees, in 16 bits up to rounding.

    python integration_test.py                            the embedded checkpoint, fp32
    python integration_test.py --dtype bfloat16           100 prompts of 128 tokens, and how many outputs are identical
    python integration_test.py --model PATH --draft PATH --prompt "..."
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.comparison import Comparison, compare, decode, first_difference, top2_margin
from benchmarks.parity import MARGIN_BOUND
from benchmarks.record import Record, machine, table
from eagle_triton import EaModel
from eagle_triton.demo import demo_prompts

PAIRS = (  # what is compared with what; attributes of a Comparison
    ("optimised", "original_plain"),
    ("optimised", "optimised_plain"),
    ("optimised", "original"),
    ("optimised_plain", "original_plain"),
    ("original", "original_plain"),  # how far the original agrees with itself
)
NAMES = {
    "original": "original tree",
    "optimised": "optimised tree",
    "original_plain": "original plain",
    "optimised_plain": "optimised plain",
}
RESTORED = 10  # prompts that are decoded once more after restore


@dataclass(frozen=True)
class Difference:
    """Where the outputs of a pair first differ, and by how much the best logit there beats the second."""

    prompt: int
    column: int
    margin: float


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    dtype = getattr(torch, args.dtype)
    model = EaModel.from_pretrained(args.model, args.draft, use_eagle3=not args.eagle1, dtype=dtype).to(args.device)
    texts = [args.prompt] if args.prompt else demo_prompts(args.num_runs)
    prompts = [model.tokenizer(text, return_tensors="pt").input_ids for text in texts]
    prompts = [prompt[:, : args.max_length - 1] for prompt in prompts]
    attributes = ("eagenerate", "ea_generate", "naivegenerate", "naive_generate", "generate")
    methods = {name: getattr(model, name).__func__ for name in attributes}

    bound = MARGIN_BOUND[dtype]
    with tqdm(total=4 * len(prompts), desc="generations", leave=False, disable=None) as bar:
        comparisons, report = compare(model, prompts, args.max_length, progress=bar.update, plain=True)
    differences = {pair: _differences(model, comparisons, pair) for pair in PAIRS}
    problems = _accepted_problems(comparisons) if dtype == torch.float32 else []
    for (one, other), found in differences.items():
        problems += [
            f"{NAMES[one]} against {NAMES[other]}, prompt {d.prompt}: top-2 margin {d.margin:.2e} at column {d.column}"
            for d in found
            if d.margin >= bound and one != "original"
        ]
    for number, (prompt, result) in enumerate(zip(prompts[:RESTORED], comparisons, strict=False)):
        if decode(model, prompt, args.max_length).tokens != result.original.tokens:
            problems.append(f"prompt {number}: differs after restore")
    calls = {row.path: row.calls for row in report}
    idle = [name for name in ("ea_generate", "naive_generate", "tree_attention") if not calls.get(name)]
    changed = [name for name, method in methods.items() if getattr(model, name).__func__ is not method]
    problems += [f"{name} was never called" for name in idle] + [f"{name} was not restored" for name in changed]

    for number, result in enumerate(comparisons):
        print(_line(number, result, [d for found in differences.values() for d in found if d.prompt == number]))
        if args.verbose:
            print(model.tokenizer.decode(result.optimised.tokens))
            print("accepted:", result.optimised.accepted)
    if args.verbose:
        for row in report:
            print(f"  {row.status:8s} {row.path:40s} calls {row.calls:6d}  fallbacks {row.fallbacks}  {row.reason}")
    rows = [_row(pair, found, len(prompts), bound) for pair, found in differences.items()]
    keys = ("identical", "of", "share", "median_margin", "largest_margin", "over_bound")
    headers = ("", "identical", "of", "share", "median margin", "largest", f"over {bound:g}")
    print(table(headers, [[f"{row['output']}, {row['against']}", *(row[key] for key in keys)] for row in rows]))
    for problem in problems:
        print(f"FAIL: {problem}")
    same_steps = sum(result.same_accepted for result in comparisons)
    print(f"{len(prompts)} prompts, {same_steps} with the same accepted lengths, {len(problems)} failures")
    where = machine(torch.device(args.device), args.commit)
    print(", ".join(f"{name} {value}" for name, value in where.items() if value))
    if args.output:
        options = {name: value for name, value in vars(args).items() if name not in ("output", "commit", "verbose")}
        args.output.write_text(Record("integration", where, options, rows, problems).json() + "\n", encoding="utf-8")
    return 1 if problems else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split(".")[0], allow_abbrev=False)
    parser.add_argument("--model", default="demo", help="directory or hub id of the target (default: demo)")
    parser.add_argument("--draft", default=None, help="directory or hub id of the head (default: the demo's)")
    parser.add_argument("--eagle1", action="store_true", help="the head is EAGLE-1/2 instead of EAGLE-3")
    parser.add_argument("--prompt", default=None, help="one prompt (default: the demo's held-out ones)")
    parser.add_argument("--max-length", type=int, help="new tokens per prompt (default: 100, in 16 bits 128)")
    parser.add_argument("--num-runs", type=int, help="prompts to decode (default: 3, in 16 bits 100)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="what to record as the commit instead of what git says")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the shares and differences as JSON")
    parser.add_argument("--verbose", action="store_true", help="print texts, accepted lengths and counters")
    args = parser.parse_args(argv)
    exact = args.dtype == "float32"
    if args.max_length is None:
        args.max_length = 100 if exact else 128
    if args.num_runs is None:
        args.num_runs = 3 if exact else 100
    if args.max_length < 2 or args.num_runs < 1:
        parser.error("--max-length must be at least 2 and --num-runs at least 1")
    if args.output and not args.output.absolute().parent.is_dir():
        parser.error(f"{args.output.absolute().parent} is no directory")
    return args


def _differences(model: EaModel, comparisons: list[Comparison], pair: tuple[str, str]) -> list[Difference]:
    """The prompts whose outputs differ, with the margin that the original model gives the place."""
    found = []
    for number, result in enumerate(comparisons):
        one, other = (getattr(result, name) for name in pair)
        if (column := first_difference(one, other)) is not None:
            found.append(Difference(number, column, top2_margin(model, other.tokens, column)))
    return found


def _accepted_problems(comparisons: list[Comparison]) -> list[str]:
    """In fp32, outputs that agree must come from the same steps."""
    return [
        f"prompt {number}: accepted lengths differ"
        for number, result in enumerate(comparisons)
        if result.first_difference is None and not (result.same_tokens and result.same_accepted)
    ]


def _line(number: int, result: Comparison, differences: list[Difference]) -> str:
    """One prompt: lengths, tokens per step, and the first difference of all pairs."""
    first = min(differences, key=lambda difference: difference.column, default=None)
    verdict = "same" if first is None else f"first difference at column {first.column}, top-2 margin {first.margin:.2e}"
    original, optimised = result.original, result.optimised
    return (
        f"{number:3d}  prompt {original.prompt_length:4d}  new {original.new_tokens:4d}  "
        f"tau {original.tau:.2f} / {optimised.tau:.2f}  {verdict}"
    )


def _row(pair: tuple[str, str], differences: list[Difference], prompts: int, bound: float) -> dict[str, Any]:
    """How many outputs of a pair are identical, and the margins where the others first differ."""
    margins = [difference.margin for difference in differences]
    return {
        "output": NAMES[pair[0]],
        "against": NAMES[pair[1]],
        "identical": prompts - len(differences),
        "of": prompts,
        "share": 1 - len(differences) / prompts,
        "median_margin": statistics.median(margins) if margins else None,
        "largest_margin": max(margins, default=None),
        "over_bound": sum(margin >= bound for margin in margins),
        "differences": [vars(difference) for difference in differences],
    }


if __name__ == "__main__":
    sys.exit(main())
