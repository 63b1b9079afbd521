"""Sweep launch settings of the experts' products (eagle_triton/ops/experts/products.py) on this GPU.

    python tools/tune_experts.py --shape qwen3-30b-a3b mixtral-8x7b gpt-oss-20b
    python tools/tune_experts.py --shape gpt-oss-20b --mxfp4
    python tools/tune_experts.py --shape qwen3-30b-a3b --int4
    python tools/tune_experts.py --shape qwen3-30b-a3b --fp8

Prints the fastest settings of a layer's two products, and the time of the layer's mixture, its router included, with
the settings of today: the rows for the table of products.py. Times are those of CUDA-graph replays over several layers
with weights of their own, whose rows choose experts as a random router does. Settings are compiled first, in parallel,
and checked against fp32 before they are timed. With --mxfp4 or --int4 on Hopper they are those of the portable kernels,
while the layer's time is that of Hopper's (hopper_experts.py), which have none.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, run_program, whole
from tools.tuning.sweep import read_sweep

WEIGHTS = {
    "mxfp4": "in MXFP4, as gpt-oss is published",
    "int4": "in four bits with a scale for 128 columns of a row, as compressed-tensors publishes them",
    "fp8": "in FP8 with a scale for each block",
}
SHAPES = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b")


def main(argv: list[str] | None = None) -> int:
    parser = Parser("tune_experts.py", __doc__)
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    add("--rows", type=whole(most=64), default=1, metavar="N", help="default: 1")
    weights = parser.add_mutually_exclusive_group()
    for name, told in WEIGHTS.items():
        weights.add_argument(f"--{name}", dest="weights", action="store_const", const=name, help=f"weights {told}")
    args = read_sweep(parser, argv, "products are", "product")
    from tools.tuning.experts import sweep

    sweep(args)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
