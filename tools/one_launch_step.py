"""An experiment: a plain decode step of a dense model in one persistent launch, timed and checked.

    python tools/one_launch_step.py --shape qwen3-0.6b llama-3.2-1b --output FILE.json

One row in bf16 after 511 tokens, with random weights; a step takes the token of the step before. Prints a step's time
for each limit on the loads in flight, and the largest difference of a step's logits from those of PyTorch in fp32. What
was learnt stands in docs/speed-notes.md. The engine does not use it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, check_device, output_file, some_text, whole

SHAPES = ("qwen3-0.6b", "llama-3.2-1b")


def main(argv: list[str] | None = None) -> int:
    parser = Parser("one_launch_step.py", __doc__)
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: both")
    add("--loads", nargs="+", type=whole(2, 10), default=[2, 3], metavar="N", help="in flight of 16 KiB (default: 2 3)")
    add(
        "--pace",
        nargs="+",
        type=whole(0, 10_000),
        default=[0, 1000],
        metavar="N",
        help="clock cycles from one load to the next at least (default: 0 1000)",
    )
    add("--phases", action="store_true", help="print how long the phases of a layer in the middle take")
    add("--output", type=output_file(), metavar="FILE.json", help="write the figures there")
    add("--commit", type=some_text, metavar="NAME", help="what to record as the commit instead of what git says")
    args = parser.parse_args(argv)
    check_device(parser, None, only_gpu=True)
    with parser.explains():
        import torch

        from eagle_triton.benchmarks.record import publish
        from tools.tuning.one_launch_step import check, times
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.stop("a Hopper GPU is needed")
    rows = [
        {"shape": shape, "loads": loads, "pace": pace, **check(shape, loads, pace), **times(shape, loads, pace)}
        for shape in args.shape
        for loads in args.loads
        for pace in args.pace
    ]
    if args.phases:
        for shape in args.shape:
            print(times(shape, args.loads[0], args.pace[0], phases=True))
    publish("one launch step", torch.device("cuda"), args, rows, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
