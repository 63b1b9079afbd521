"""Sweep launch settings of the products in eagle_triton/ops/linear/ on this GPU, against cuBLAS.

    python tools/tune_linear.py --shape llama-3.1-8b --rows 16 64 --products o down

Prints, for each product and row count, cuBLAS's time, the fastest settings and their times: the rows for the tables of
settings.py and hopper.py. Times are those of CUDA-graph replays over distinct weights, together far larger than L2.
Settings are compiled first, in parallel, and checked against fp32 before they are timed. With --keep_splits, splits of
K are left to the reader, as in the engine. With --streamed, settings are those of hopper.py and, for more than 128
rows, hopper_many_rows.py, and every product is timed after a small kernel, which is part of the time: that is where
they differ. With --float8, weights have eight bits and scales for rows or for blocks, settings are those of
hopper_fp8_few_rows.py, beyond 64 rows of hopper_fp8.py, timed likewise (with the kernel that makes x's pair), and
cuBLAS's time is that of the same weights in 16 bits. With --four_bits, weights have four bits as compressed-tensors
(with zeros or without), bitsandbytes, GPTQ or Marlin hold them, and settings are those of hopper_four_bits.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, run_program, whole
from tools.tuning.sweep import read_sweep

SHAPES = (
    *("llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b"),
    *("gpt-oss-20b", "qwen3-30b-a3b", "gemma3-12b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b"),
)
PRODUCTS = (
    *("qkv", "o", "gate_up", "down", "head", "draft_qkv", "draft_fc", "draft_head"),
    *("delta_in", "delta_out"),  # of gated delta nets
)


def main(argv: list[str] | None = None) -> int:
    parser = Parser("tune_linear.py", __doc__)
    add = parser.add_argument
    add("--rows", type=whole(most=4096), nargs="+", default=[16, 64], metavar="N", help="default: 16 64")
    add("--shape", choices=SHAPES, default=SHAPES[0], help=f"a model and its draft (default: {SHAPES[0]})")
    add("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS), help="default: all that the shape has")
    add("--keep_splits", action="store_true", help="leave sums over splits of K to the reader")
    add("--streamed", action="store_true", help="ops/linear/hopper.py and hopper_many_rows.py, after a small kernel")
    quantised = parser.add_mutually_exclusive_group().add_argument
    quantised("--float8", choices=("rows", "blocks"), help="weights of eight bits: what has a scale")
    layouts = ("int4", "int4_zeros", "nf4", "columns", "marlin")
    quantised("--four_bits", choices=layouts, help="weights of four bits: their layout")
    args = read_sweep(parser, argv, "products are", "product")
    if args.four_bits and max(args.rows) > 512:
        parser.error(f"--rows must be at most 512 with --four_bits, got {max(args.rows)}")
    from tools.tuning.products import sweep

    sweep(args)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
