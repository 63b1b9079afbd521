"""Load an EAGLE model, optimise it with one call, generate, and give it back with another.

    python3 setup_env.py --run usage_example.py
    python usage_example.py --model PATH_OR_ID --draft PATH_OR_ID     another target and its EAGLE head, in fp32

The model generates twice: the first call is shown apart, the figures are those of the second.
Exit code 0: the tokens are the same before, after, and once it is restored; 1: they are not; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from eagle_triton import command_line
from eagle_triton.command_line import Parser

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from eagle_triton.benchmarks.comparison import Run

PROMPT = "def read_lines(path, encoding='utf-8'):\n    "
FEW = 50  # new tokens, below which the figures are noise
COMPILED = ", in it the kernels are compiled and the graph is captured"
ON_A_CPU = (
    "There is no GPU here, so torch references run in place of the Triton kernels: the tokens are the same, but it is "
    "not faster than the original."
)


def main(argv: list[str] | None = None) -> int:
    parser, args = _parse(argv)
    with parser.explains():
        import torch

        from eagle_triton import optimize_eagle_with_triton
        from eagle_triton.benchmarks.comparison import decode
        from eagle_triton.benchmarks.models import encoded, load_pair

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_pair(args.model, args.draft, args.eagle1, torch.float32, device)
        (input_ids,) = encoded(model, [args.prompt], args.max_new_tokens)

    def generate() -> Run:
        return decode(model, input_ids, args.max_new_tokens)

    before = generate(), generate()
    model, originals = optimize_eagle_with_triton(model)
    after = generate(), generate()
    patched = sum(row.status == "patched" for row in originals.report())
    originals.restore()
    again = generate()

    print(model.tokenizer.decode(again.tokens[: again.prompt_length + args.max_new_tokens]))
    print("-" * 72)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, threads {torch.get_num_threads()}"
    print(f"device      {where}, float32, {patched} patches")
    print(_line("original", *before))
    print(_line("optimised", *after, COMPILED if device == "cuda" else ""))
    same = all(run.tokens == again.tokens for run in (*before, *after))
    print(f"same tokens {'yes' if same else 'NO'} (original, optimised, restored)")
    if device == "cpu":
        print(ON_A_CPU)
    if args.max_new_tokens < FEW:
        print(f"NOISE: figures of {args.max_new_tokens} tokens, and below {FEW} another run gives others")
    return 0 if same else 1


def _line(name: str, first: Run, second: Run, why: str = "") -> str:
    """The figures of the second call; of the first how long it took, and why."""
    return (
        f"{name:10s}{second.tokens_per_second:10.1f} tokens/s {second.tau:6.2f} tokens per step"
        f"   (first call: {first.times[-1]:.1f} s{why})"
    )


def _parse(argv: list[str] | None) -> tuple[Parser, argparse.Namespace]:
    parser = Parser("usage_example.py", __doc__)
    command_line.add_model(parser)
    parser.add_argument(
        "--prompt", type=command_line.some_text, default=PROMPT, metavar="TEXT", help="default: the head of a function"
    )
    parser.add_argument("--max-new-tokens", type=command_line.whole(), default=100, metavar="N", help="default: 100")
    args = parser.parse_args(argv)
    command_line.check_model(parser, args.model, args.draft)
    positions = command_line.stored_positions(args.model)
    if problem := command_line.new_too_many(args.max_new_tokens, positions, "--max-new-tokens"):
        parser.error(problem)
    return parser, args


if __name__ == "__main__":
    sys.exit(main())
