"""Make the embedded checkpoint from nothing but the interpreter's own library.

Stages, in the order in which they run (`--stages` picks some of them; a stage reads what the
earlier ones wrote to the output directory):

    tokenizer   byte-level BPE over the training files
    target      a small Llama, next-token loss on the training files
    prompts     prefixes of held-out files, for tests and measurements
    eagle3      EAGLE-3 head: unrolled training against the target's distribution (arXiv 2503.01840)
    eagle1      EAGLE-1 head: regression of the next feature and its logits (arXiv 2401.15077)
    evaluate    tau of both heads on the held-out prompts, greedy
    hybrid      a small Qwen3.5 with the same tokenizer, three of four layers gated delta nets
    mtp         its multi-token-prediction layer (arXiv 2412.19437), unrolled like the EAGLE-3 head
    evaluate_mtp  tau of its trees and chains on the held-out prompts, greedy
    draft       a Llama of two layers that drafts for the target, distilled from its distribution
    evaluate_draft  tau of its chains on the held-out prompts, greedy
    block       block drafters for the target, with full and with causal blocks (arXiv 2602.06036)
    evaluate_block  tau of their chains and trees on the held-out prompts, greedy
    mixture     a small Qwen3 mixture of experts with the same tokenizer
    mixture_head  an EAGLE-3 head for it, trained as the target's
    evaluate_mixture  tau of its chains and trees, and how many distinct experts some rows choose

The heads, the draft model and the block drafters learn from text that the target itself wrote, continuing prefixes of
the training files, mixed with the files. Every stage has fixed seeds, a number of steps and a time
budget in minutes; whichever ends first ends the stage, and the learning rate follows the nearer of
the two.
What was reached goes to `results/demo_checkpoint.json`.

    python tools/train_demo.py                    # every stage; the recipe says how many minutes each may take
    OMP_NUM_THREADS=1 python tools/train_demo.py --stages evaluate --device cpu
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import (
    Parser,
    check_device,
    device,
    existing_directory,
    number,
    output_file,
    run_program,
    whole,
)
from tools.demo.recipe import STAGES, Recipe

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ("target_minutes", "head_minutes", "draft_minutes", "mixture_minutes", "mixture_head_minutes")


def parse(argv: list[str] | None) -> tuple[Parser, argparse.Namespace, Recipe]:
    recipe = Recipe()
    parser = Parser("train_demo.py", __doc__)
    add = parser.add_argument
    add("--output", type=Path, default=ROOT / "eagle_triton" / "demo", metavar="DIR", help="default: the package's own")
    results = ROOT / "results" / "demo_checkpoint.json"
    add("--results", type=output_file(), default=results, metavar="FILE.json", help="default: the repository's own")
    library = Path(sysconfig.get_path("stdlib"))
    add("--library", type=existing_directory, default=library, metavar="DIR", help="default: this interpreter's")
    add("--with-tests", action="store_true", help="train on the library's test suites too")
    add("--stages", type=stages, default=list(STAGES), metavar="NAME[,NAME...]", help="default: all")
    add("--device", type=device, metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--seed", type=whole(0), default=recipe.seed, metavar="N", help=f"default: {recipe.seed}")
    add("--steps", type=whole(), metavar="N", help="steps of each target, each head and the draft model")
    add("--minutes", type=number(0, 1e6), metavar="X", help="time budget of each of these")
    add("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other fields of the recipe")
    add("--eval-prompts", type=whole(most=100), default=40, metavar="N", help="default: 40")
    arguments = parser.parse_args(argv)
    if arguments.output.exists() and not arguments.output.is_dir():
        parser.error(f"--output must be a directory, and {arguments.output} is a file")
    changes: dict[str, object] = {"seed": arguments.seed}
    if arguments.steps is not None:
        changes |= dict.fromkeys(("target_steps", "head_steps", "draft_steps"), arguments.steps)
    if arguments.minutes is not None:
        changes |= dict.fromkeys(BUDGETS, arguments.minutes)
    for item in arguments.set:
        name, _, value = item.partition("=")
        fields = {field.name: type(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}
        if name not in fields:
            parser.error(f"--set must name a field of the recipe ({', '.join(fields)}), got {item!r}")
        try:
            changes[name] = fields[name](value)
        except ValueError:
            parser.error(f"--set must give {name} a number like {getattr(recipe, name)}, got {item!r}")
    with parser.explains("--set"):
        return parser, arguments, dataclasses.replace(recipe, **changes)


def stages(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(STAGES):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(STAGES)}, got {', '.join(sorted(unknown))!r}")
    return names


def main(argv: list[str] | None = None) -> int:
    parser, arguments, recipe = parse(argv)
    check_device(parser, arguments.device)
    with parser.explains():
        from eagle_triton.devices import find_device
        from tools.demo.pipeline import train

        arguments.device = find_device(arguments.device)
    train(arguments, recipe)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
