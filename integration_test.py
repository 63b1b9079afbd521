"""Decode the same prompts with a model as it is, optimised, and restored, with trees and plainly, and compare: tokens,
accepted lengths, counters, originals. Exit code 0: everything agrees, in 16 bits up to rounding; 1: it does not.

    python integration_test.py                            the embedded checkpoint, fp32
    python integration_test.py --dtype bfloat16           100 outputs of 128 tokens, and how many of them are identical
    python integration_test.py --target-weights fp8       with the target's projections in FP8, or int4, nf4
    python integration_test.py --model PATH --draft PATH --prompt "..."

Prompts are decoded whole, as benchmark.py decodes them: with the same --max-length and --num-runs its tau is this one.
A prompt that does not fit the model's positions together with its new tokens is refused.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle_triton import command_line
from eagle_triton.benchmarks.modes import add_options
from eagle_triton.command_line import Parser, run_program
from eagle_triton.demo import demo_prompts
from eagle_triton.text_table import table_of

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from eagle_triton import EaModel
    from eagle_triton.benchmarks.original_and_patched import Comparison

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
COLUMNS = "=pair, identical, of, share, median margin=median_margin, largest=largest_margin, over {:g}=over_bound"
RESTORED = 10  # prompts that are decoded once more after restore


@dataclass(frozen=True)
class Difference:
    """Where the outputs of a pair first differ, and by how much the best logit there beats the second."""

    prompt: int
    column: int
    margin: float


def main(argv: list[str] | None = None) -> int:
    parser, args = _parse(argv)
    command_line.check_device(parser, args.device)
    with parser.explains():
        import torch
        from tqdm import tqdm

        from eagle_triton.benchmarks.models import encoded, load_pair
        from eagle_triton.benchmarks.original_and_patched import compare, decode
        from eagle_triton.benchmarks.parity import MARGIN_BOUND
        from eagle_triton.benchmarks.quantised import round_target
        from eagle_triton.devices import find_device

        args.device = find_device(args.device)
        dtype = getattr(torch, args.dtype)
        model = load_pair(args.model, args.draft, args.eagle1, dtype, args.device)
        if args.target_weights is not None:
            round_target(model.base_model, args.target_weights)
        texts = [args.prompt] if args.prompt else demo_prompts(args.num_runs)
        prompts = encoded(model, texts, args.max_length)
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
    for row in report if args.verbose else ():
        print(f"  {row.status:8s} {row.path:40s} calls {row.calls:6d}  fallbacks {row.fallbacks}  {row.reason}")
    rows = [_row(pair, found, len(prompts), bound) for pair, found in differences.items()]
    return _publish(parser, args, comparisons, rows, problems, bound)


def _publish(
    parser: Parser, args: argparse.Namespace, comparisons: list[Comparison], rows: list[dict[str, Any]],
    problems: list[str], bound: float,
) -> int:  # fmt: skip
    """Print what was found, then write it to the file that was asked for. Returns the exit code."""
    from eagle_triton.benchmarks.original_and_patched import accepted_histogram, tau_of
    from eagle_triton.benchmarks.record import Record, histogram_table, publish
    from eagle_triton.benchmarks.timing import noise

    trees = {name: [getattr(result, name) for result in comparisons] for name in ("original", "optimised")}
    taus = {name: tau_of(runs) for name, runs in trees.items()}
    lengths = [result.original.prompt_length for result in comparisons]
    steps = sum(len(run.lengths) for run in trees["original"])
    notes = [f"FAIL: {problem}" for problem in problems]
    told = len(notes)
    notes += noise(steps, "raise --num-runs or --max-length")
    record = Record.of("integration", args.device, args, rows, notes, prompt_tokens=lengths, tau=taus)
    histograms = {f"{NAMES[name]}, tau {taus[name]:.2f}": accepted_histogram(runs) for name, runs in trees.items()}
    shown = table_of(COLUMNS.format(bound), [{**row, "pair": f"{row['output']}, {row['against']}"} for row in rows])
    same_steps = sum(result.same_accepted for result in comparisons)
    summary = (
        f"{len(comparisons)} prompts of {min(lengths)} to {max(lengths)} tokens, none cut, {same_steps} with the same "
        f"accepted lengths, {len(problems)} failures"
    )
    lines = [shown, "", histogram_table(histograms), "", *notes[:told], summary, *notes[told:], record.facts]
    return publish(record, "\n".join(lines), parser.prog, output=args.output)


def _parse(argv: list[str] | None) -> tuple[Parser, argparse.Namespace]:
    parser = Parser("integration_test.py", __doc__)
    length_help = "new tokens per prompt (default: 100, in 16 bits 128)"
    runs_help = "prompts to decode (default: 3, in 16 bits 100; 1 with --prompt)"
    quantised = "the target's projections in FP8 or four bits; the original converts them to 16 bits in each call"
    add_options(
        parser,
        "--model --draft --eagle1 --prompt --max-length --num-runs --dtype --target-weights --device --commit --output",
        prompt={"help": "one prompt (default: the demo's held-out prompts)"},
        max_length={"type": command_line.whole(2), "default": None, "help": length_help},
        num_runs={"default": None, "help": runs_help},
        dtype={"default": "float32", "help": "default: float32"},
        target_weights={"choices": ("fp8", "int4", "nf4"), "help": quantised},
    )
    parser.add_argument("--verbose", action="store_true", help="print texts, accepted lengths and counters")
    args = parser.parse_args(argv)
    command_line.check_model(parser, args.model, args.draft)
    if args.prompt is not None and args.num_runs not in (None, 1):
        parser.error(f"--num-runs must be 1 with --prompt, which is one prompt, got {args.num_runs}")
    exact = args.dtype == "float32"
    if args.max_length is None:
        args.max_length = 100 if exact else 128
    if args.num_runs is None:
        args.num_runs = 1 if args.prompt else 3 if exact else 100
    if problem := command_line.new_too_many(args.max_length, command_line.stored_positions(args.model)):
        parser.error(problem)
    return parser, args


def _differences(model: EaModel, comparisons: list[Comparison], pair: tuple[str, str]) -> list[Difference]:
    """The prompts whose outputs differ, with the margin that the original model gives the place."""
    from eagle_triton.benchmarks.original_and_patched import top2_margin
    from eagle_triton.comparison.figures import first_difference

    found = []
    for number, result in enumerate(comparisons):
        one, other = (getattr(result, name) for name in pair)
        if (column := first_difference(one.tokens, other.tokens)) is not None:
            found.append(Difference(number, column, top2_margin(model.base_model, other.tokens, column)))
    return found


def _accepted_problems(comparisons: list[Comparison]) -> list[str]:
    """In fp32, outputs that agree must come from the same steps."""
    return [
        f"prompt {number}: accepted lengths differ"
        for number, result in enumerate(comparisons)
        if result.first_difference is None and not result.same_accepted  # which makes the tokens the same
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
    sys.exit(run_program(main))
